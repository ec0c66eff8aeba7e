"""The kernels of `masked_embedding.py` and their launch settings.

1. `centroid_scores_kernel`: every score, as an integer that orders as the score does.
2. A few rows, `row_candidates_kernel`: each program finds one of its row's centroids itself (the scores are 8 KB) and
   takes a share of its candidates; the last of a row's programs writes its token: two launches.
3. More rows, `select_kernel` finds each row's centroids once, so that programs over candidates are small and do nothing
   but read: many of them run at once. They take a row's list, or, where rows share much of what they read, the list of
   the centroids that any row selects, each with its rows (`centroid_candidates_kernel`). `write_tokens_kernel` ends.

All products are dots of 16 rows on tensor cores, summed along the hidden size in the same steps whatever the batch and
the tile, so the batch does not show in a row's scores or logits. Programs of a row meet in one 64-bit maximum of
(score, lowest id first), which no order of arrival can change.
"""

# Kernels are Triton, not Python: what they return are tensors, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from dataclasses import dataclass
from typing import Any, Literal

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG, INTERPRET, Arch, next_power_of_2
from tridraft.kernels._pdl import pdl_options, pdl_wait
from tridraft.kernels._winner import (
    meet,
    open_meeting,
    order_key,
    winner_key,
    winning_token,
    winning_tokens,
)
from tridraft.kernels.random import DRAFT, gumbel_at

_INTERPRET = tl.constexpr(INTERPRET)
_DRAFT = tl.constexpr(DRAFT)

SCORE_ROWS = 16
"""Rows of every dot, the fewest one takes: of another shape the sums of a row could differ."""
_ROWS = tl.constexpr(SCORE_ROWS)
_SIGN = tl.constexpr(2**31)
_STAGES = tl.constexpr(5)


@triton.jit
def _load_block(ptr, stride, rows, mask, start, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Columns start to start + BLOCK_H of some rows."""
    offs_h = start + tl.arange(0, BLOCK_H)
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + offs_h[None, :]
    return tl.load(ptrs, mask=mask[:, None] & (offs_h < HIDDEN)[None, :], other=0.0)


@triton.jit
def _add_products(products, x, w):
    """Sums of products in float32, with x · wᵀ added."""
    if _INTERPRET:  # its dot multiplies the bits of a bf16
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, tl.trans(w), products, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows", "num_slots"], debug=DEBUG)
def centroid_scores_kernel(
    hidden_ptr,  # [N, H] float
    centroids_ptr,  # [C, H] float
    idx_mapping_ptr,  # [N] int, checked; or None
    keys_ptr,  # [N, C] i32, bits of u32
    best_ptr,  # [N] i64, or None
    arrivals_ptr,  # [N] i32
    counts_ptr,  # [C + 1] i32, or None
    num_rows,
    num_centroids,
    stride_hn,
    stride_cc,
    num_slots,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, n): a block of centroids against a block of rows. Also resets what the next kernels count in.

    Centroids are weights: their first block is loaded before the wait (9.0 → 8.3 µs at one row).
    """
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_centroids
    w = _load_block(centroids_ptr, stride_cc, offs_c, mask_c, 0, HIDDEN, BLOCK_H)
    pdl_wait(PDL)
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask_n = offs_n < num_rows
    if idx_mapping_ptr is not None:
        slots = tl.load(idx_mapping_ptr + offs_n, mask=mask_n, other=-1)
        tl.device_assert(slots < num_slots, "idx_mapping: slot out of range")
    x = _load_block(hidden_ptr, stride_hn, offs_n, mask_n, 0, HIDDEN, BLOCK_H)  # of padding too: no load before it
    if best_ptr is not None:
        resets = offs_n < tl.where(tl.program_id(0) == 0, num_rows, 0)
        open_meeting(best_ptr + offs_n, arrivals_ptr + offs_n, resets)
    if counts_ptr is not None:
        tl.store(counts_ptr + offs_c, 0, mask=offs_c < tl.where(tl.program_id(1) == 0, num_centroids, 0))
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(counts_ptr + num_centroids, 0)
    scores = _add_products(tl.zeros((BLOCK_N, BLOCK_C), tl.float32), x, w)
    for start in tl.static_range(BLOCK_H, HIDDEN, BLOCK_H):
        w = _load_block(centroids_ptr, stride_cc, offs_c, mask_c, start, HIDDEN, BLOCK_H)
        x = _load_block(hidden_ptr, stride_hn, offs_n, mask_n, start, HIDDEN, BLOCK_H)
        scores = _add_products(scores, x, w)
    keys = order_key(tl.where(scores > float("-inf"), scores, float("-inf"))).to(tl.uint32, bitcast=True) ^ _SIGN
    keys_ptrs = keys_ptr + offs_n[:, None] * num_centroids + offs_c[None, :]
    tl.store(keys_ptrs, keys.to(tl.int32, bitcast=True), mask=mask_n[:, None] & mask_c[None, :])


@triton.jit
def _load_keys(keys_ptr, row, num_centroids, BLOCK_C: tl.constexpr):
    """(a row's keys, 0 where there is no centroid, the index of each)."""
    offs_c = tl.arange(0, BLOCK_C)
    keys = tl.load(keys_ptr + row * num_centroids + offs_c, mask=offs_c < num_centroids, other=0)
    return keys.to(tl.uint32, bitcast=True), offs_c


@triton.jit
def _two_largest(a, a_next, b, b_next):
    return tl.maximum(a, b), tl.maximum(tl.minimum(a, b), tl.maximum(a_next, b_next))


@triton.jit
def _bounds(largest, GROUPS: tl.constexpr):
    """(low, high): the wanted keys lie in [low, high), given the largest of each eight keys.

    The smallest of GROUPS ≥ top_k group maxima is reached by top_k keys.
    """
    high = tl.max(largest, axis=0) + 1
    low = high - high
    if GROUPS:
        low = tl.min(tl.max(tl.reshape(largest, (GROUPS, largest.shape[0] // GROUPS)), axis=1), axis=0)
    return low, high


@triton.jit
def _reaching(keys, lower, upper):
    """1 for each key that reaches `lower` and 2¹⁶ more if it reaches `upper`: one sum counts for both."""
    return tl.where(keys >= upper, 0x10001, tl.where(keys >= lower, 1, 0))


@triton.jit
def _narrow(first, second, wanted, low, high, ISOLATE: tl.constexpr):
    """(low, high, how many reach low, and high): [low, high) narrowed around the wanted-th largest key.

    Ends when `wanted` keys reach low, with ISOLATE all but one of them high, or when keys tie there: high = low + 1.
    """
    at_low, at_high = 1 << 30, 0
    searching = True
    while searching:
        third = (high - low) // 3 + 1
        lower = low + third
        upper = tl.minimum(lower + third, high - 1)
        flags = _reaching(first, lower, upper)
        if second is not None:
            flags += _reaching(second, lower, upper)
        counts = tl.sum(flags, axis=0)
        at_lower, at_upper = counts & 0xFFFF, counts >> 16
        high = tl.where(at_lower < wanted, lower, tl.where(at_upper < wanted, upper, high))
        at_high = tl.where(at_lower < wanted, at_lower, tl.where(at_upper < wanted, at_upper, at_high))
        low = tl.where(at_upper >= wanted, upper, tl.where(at_lower >= wanted, lower, low))
        at_low = tl.where(at_upper >= wanted, at_upper, tl.where(at_lower >= wanted, at_lower, at_low))
        found = at_low - at_high == 1 if ISOLATE else at_low == wanted
        searching = (found == 0) & (high - low > 1)
    return low, high, at_low, at_high


@triton.jit
def _centroid_of_rank(keys, offs_c, wanted, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """The centroid of the wanted-th largest key; of equal keys the lowest index is the largest.

    Searches among the two largest of each eight, which are a thread's own, and again among all from there on if what it
    found is not of that rank: one row in 13 has three of its top 32 of 2,048 in an eight.
    """
    eights = tl.reshape(keys, (8, BLOCK_C // 8))
    first, second = tl.reduce((eights, tl.zeros_like(eights)), 0, _two_largest)
    bottom, top = _bounds(first, GROUPS)
    low, high, _, _ = _narrow(first, second, wanted, bottom, top, True)
    # One sum of three: how many keys are higher, how many in [low, high), and the index of that one.
    inside = tl.where(keys >= low, 2**32 + offs_c.to(tl.int64), 0)
    sums = tl.sum(tl.where(keys >= high, 2**48, inside), axis=0)
    centroid = (sums & (2**32 - 1)).to(tl.int32)
    if (sums >> 32) != ((wanted - 1) << 16) + 1:
        low, high, _, at_high = _narrow(keys, None, wanted, low, top, True)
        equal = (keys >= low) & (keys < high)
        chosen = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == wanted - at_high)
        centroid = tl.sum(tl.where(chosen, offs_c, 0), axis=0)
    return centroid


@triton.jit
def _selected(keys, top_k, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """Which `[BLOCK_C]` centroids are among the top_k; of equal keys those of the lowest indices."""
    bottom, top = _bounds(tl.max(tl.reshape(keys, (8, BLOCK_C // 8)), axis=0), GROUPS)
    low, high, at_low, at_high = _narrow(keys, None, top_k, bottom, top, False)
    selected = keys >= low
    if at_low != top_k:
        equal = selected & (keys < high)
        selected = (keys >= high) | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= top_k - at_high))
    return selected


@triton.jit
def _candidates(centroid, part, token_ordering_ptr, per_centroid, TILE: tl.constexpr):
    """Vocabulary ids of one tile of a centroid's candidates, and which of them exist."""
    offs = part * TILE + tl.arange(0, TILE)
    mask = offs < per_centroid
    ids = tl.load(token_ordering_ptr + centroid.to(tl.int64) * per_centroid + offs, mask=mask, other=0)
    return ids.to(tl.int32), mask


@triton.jit
def _eligible(ids, mask, suppress_ptr, num_suppressed):
    """Which of a tile's candidates exist and are not suppressed."""
    if suppress_ptr is not None:
        for start in range(0, num_suppressed, 16):
            offs = start + tl.arange(0, 16)
            suppressed = tl.load(suppress_ptr + offs, mask=offs < num_suppressed, other=-1).to(tl.int32)
            mask = mask & (tl.max((ids[:, None] == suppressed[None, :]).to(tl.int32), axis=1) == 0)
    return mask


@triton.jit
def _products(
    hidden_ptr,
    stride_hn,
    rows,
    live,
    weight_ptr,
    stride_wv,
    ids,
    mask,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Logits `[16, TILE]` of a tile of candidates for some rows.

    All of a row of 256 is on its way to shared memory before the first product and takes no registers: 64 of a thread
    instead of 112. Loaded into registers first: 39.3 / 50.2 against 35.8 / 46.3 at 64 / 128 rows.
    """
    products = tl.zeros((_ROWS, ids.shape[0]), tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_H, num_stages=_STAGES):
        x = _load_block(hidden_ptr, stride_hn, rows, live, start, HIDDEN, BLOCK_H)
        w = _load_block(weight_ptr, stride_wv, ids, mask, start, HIDDEN, BLOCK_H)
        products = _add_products(products, x, w)
    return products


@triton.jit
def _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Logits `[TILE]` of a tile of candidates for one row."""
    offs_n = tl.arange(0, _ROWS)
    rows, first = offs_n.to(tl.int64) * 0 + row, offs_n == 0
    products = _products(hidden_ptr, stride_hn, rows, first, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
    return tl.sum(tl.where(first[:, None], products, 0.0), axis=0)


@triton.jit
def _write_token(
    row,
    key,
    num_programs,
    best_ptr,
    arrivals_ptr,
    suppress_ptr,
    num_suppressed,
    vocab_size,
    nan_flag_ptr,
    out_ptr,
    stride_flag,
    stride_out,
):
    """Join the row's other programs; the last to arrive writes its token."""
    last, winner = meet(key, row, num_programs, best_ptr, arrivals_ptr)
    if last:
        token, only_nan = winning_token(winner, suppress_ptr, num_suppressed, vocab_size)
        tl.store(out_ptr + row * stride_out, token.to(out_ptr.dtype.element_ty))
        if nan_flag_ptr is not None:
            tl.store(nan_flag_ptr + row * stride_flag, only_nan.to(nan_flag_ptr.dtype.element_ty))


@triton.jit
def row_candidates_kernel(
    keys_ptr,  # [N, C] i32
    chosen_ptr,  # [N, top_k] i32; or None: each program searches, and the last of a row writes its token
    hidden_ptr,  # [N, H] float
    token_ordering_ptr,  # [V] int
    weight_ptr,  # [V, H] float
    suppress_ptr,  # [n] i64, or None
    idx_mapping_ptr,  # [N] int
    temperature_ptr,  # [S] f32
    seeds_ptr,  # [S] i64
    positions_ptr,  # [N] int
    best_ptr,  # [N] i64
    arrivals_ptr,  # [N] i32
    nan_flag_ptr,  # [N] bool or i32, or None
    out_ptr,  # [N] int
    num_centroids,
    per_centroid,
    num_suppressed,
    vocab_size,
    stride_hn,
    stride_wv,
    stride_flag,
    stride_out,
    TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, j, s): tile s of the candidates of row n's (j + 1)-th centroid, best or listed.

    Rows run side by side, so those that share a centroid find its candidates in the L2 cache.
    """
    row = tl.program_id(0).to(tl.int64)
    # The kernel before does not write these.
    slot = tl.load(idx_mapping_ptr + row)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    seed = tl.load(seeds_ptr + slot, mask=slot >= 0, other=0)
    position = tl.load(positions_ptr + row).to(tl.int64)
    pdl_wait(PDL)
    if slot >= 0:
        if chosen_ptr is None:
            keys, offs_c = _load_keys(keys_ptr, row, num_centroids, BLOCK_C)
            centroid = _centroid_of_rank(keys, offs_c, tl.program_id(1) + 1, BLOCK_C, GROUPS)
        else:
            centroid = tl.load(chosen_ptr + row * tl.num_programs(1) + tl.program_id(1))
        ids, mask = _candidates(centroid, tl.program_id(2), token_ordering_ptr, per_centroid, TILE)
        scores = _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
        if temperature > 0.0:
            scores = scores * tl.div_rn(1.0, temperature) + gumbel_at(seed, position, ids, _DRAFT)
        best = winner_key(scores, ids, _eligible(ids, mask, suppress_ptr, num_suppressed), 0)
        if chosen_ptr is None:
            num_programs = tl.num_programs(1) * tl.num_programs(2)
            _write_token(
                *(row, best, num_programs, best_ptr, arrivals_ptr, suppress_ptr, num_suppressed, vocab_size),
                *(nan_flag_ptr, out_ptr, stride_flag, stride_out),
            )
        else:  # to meet takes a fence and two round trips, in which a program reads nothing
            tl.atomic_max(best_ptr + row, best, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def select_kernel(
    keys_ptr,  # [N, C] i32
    idx_mapping_ptr,  # [N] int
    chosen_ptr,  # [N, top_k] i32, or None
    counts_ptr,  # [C + 1] i32, zeros, the last counts centroids; or None
    active_ptr,  # [≤ C + N * top_k / 16] i32, the centroid and, from bit 15 on, how many sixteens of members precede
    members_ptr,  # [C, N] i32
    num_rows,  # below 2²⁰, for those bits
    num_centroids,
    top_k,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program n lists the centroids of row n, in any order, or appends the row to their members.

    Every sixteenth member, from the first on, appends its centroid to the active ones. A row counts its own at once:
    warps make atomics at one address wait for each other.
    """
    pdl_wait(PDL)
    row = tl.program_id(0)
    keys, offs_c = _load_keys(keys_ptr, row.to(tl.int64), num_centroids, BLOCK_C)
    if tl.load(idx_mapping_ptr + row) >= 0:
        selected = _selected(keys, top_k, BLOCK_C, GROUPS)
        if counts_ptr is None:
            eights = tl.reshape(selected, (8, BLOCK_C // 8))
            counts = tl.sum(eights.to(tl.int32), axis=0)
            before = tl.cumsum(counts, axis=0) - counts
            place = before[None, :] + tl.cumsum(eights.to(tl.int32), axis=0) - 1
            index = tl.arange(0, 8)[:, None] * (BLOCK_C // 8) + tl.arange(0, BLOCK_C // 8)[None, :]
            tl.store(chosen_ptr + row * top_k + place, index, mask=eights)
        else:
            place = tl.atomic_add(counts_ptr + offs_c, 1, mask=selected, sem="relaxed")
            tl.store(members_ptr + offs_c.to(tl.int64) * num_rows + place, row, mask=selected)
            first = (selected & (place % _ROWS == 0)).to(tl.int32)
            base = tl.atomic_add(counts_ptr + num_centroids, tl.sum(first, axis=0), sem="relaxed")
            actives = offs_c + (place // _ROWS << 15)
            tl.store(active_ptr + base + tl.cumsum(first, axis=0) - 1, actives, mask=first > 0)


@triton.jit(do_not_specialize=["num_rows"])
def centroid_candidates_kernel(
    counts_ptr,  # [C + 1] i32
    active_ptr,  # [≤ C + N * top_k / 16] i32
    members_ptr,  # [C, N] i32
    hidden_ptr,  # [N, H] float
    token_ordering_ptr,  # [V] int
    weight_ptr,  # [V, H] float
    suppress_ptr,  # [n] i64, or None
    idx_mapping_ptr,  # [N] int
    temperature_ptr,  # [S] f32
    seeds_ptr,  # [S] i64
    positions_ptr,  # [N] int
    best_ptr,  # [N] i64
    num_rows,
    num_centroids,
    per_centroid,
    num_suppressed,
    stride_hn,
    stride_wv,
    TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p: a tile of the candidates of an active centroid, for up to 16 of its members.

    No loop: with one over the members' sixteens, the addresses of the candidates' rows are kept in 70 registers more.
    """
    pdl_wait(PDL)
    offs_n = tl.arange(0, _ROWS)
    parts = tl.cdiv(per_centroid, TILE)
    item = tl.program_id(0) // parts
    active = tl.load(active_ptr + item)
    if item < tl.load(counts_ptr + num_centroids):
        centroid, start = active & 0x7FFF, active >> 15 << 4
        ids, mask = _candidates(centroid, tl.program_id(0) % parts, token_ordering_ptr, per_centroid, TILE)
        live = start + offs_n < tl.load(counts_ptr + centroid)
        members_ptrs = members_ptr + centroid.to(tl.int64) * num_rows + start + offs_n
        rows = tl.where(live, tl.load(members_ptrs, mask=start + offs_n < num_rows, other=0), 0)
        slots = tl.load(idx_mapping_ptr + rows, mask=live, other=0)
        temperature = tl.load(temperature_ptr + slots, mask=live, other=0.0)
        scores = _products(hidden_ptr, stride_hn, rows, live, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
        eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
        for member in range(tl.sum(live.to(tl.int32), axis=0)):
            this = offs_n == member
            row = tl.sum(tl.where(this, rows, 0), axis=0)
            heat = tl.sum(tl.where(this, temperature, 0.0), axis=0)
            logits = tl.sum(tl.where(this[:, None], scores, 0.0), axis=0)
            if heat > 0.0:
                seed = tl.load(seeds_ptr + tl.sum(tl.where(this, slots.to(tl.int32), 0), axis=0))
                position = tl.load(positions_ptr + row).to(tl.int64)
                logits = logits * tl.div_rn(1.0, heat) + gumbel_at(seed, position, ids, _DRAFT)
            tl.atomic_max(best_ptr + row, winner_key(logits, ids, eligible, 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def write_tokens_kernel(
    idx_mapping_ptr,  # [N] int
    best_ptr,  # [N] i64
    suppress_ptr,  # [n] i64, or None
    nan_flag_ptr,  # [N] bool or i32, or None
    out_ptr,  # [N] int
    num_rows,
    num_suppressed,
    vocab_size,
    stride_flag,
    stride_out,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program n: the tokens of a block of rows."""
    offs_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask_n = offs_n < num_rows
    mask_n = mask_n & (tl.load(idx_mapping_ptr + offs_n, mask=mask_n, other=-1) >= 0)
    pdl_wait(PDL)
    keys = tl.load(best_ptr + offs_n, mask=mask_n, other=2**62)
    tokens, only_nan = winning_tokens(keys, suppress_ptr, num_suppressed, vocab_size)
    tl.store(out_ptr + offs_n * stride_out, tokens.to(out_ptr.dtype.element_ty), mask=mask_n)
    if nan_flag_ptr is not None:
        flags = only_nan.to(nan_flag_ptr.dtype.element_ty)
        tl.store(nan_flag_ptr + offs_n * stride_flag, flags, mask=mask_n)


@triton.jit
def candidate_logits_kernel(
    keys_ptr,  # [N, C] i32
    hidden_ptr,  # [N, H] float
    token_ordering_ptr,  # [V] int
    weight_ptr,  # [V, H] float
    suppress_ptr,  # [n] i64, or None
    out_ptr,  # [N, V] f32, −inf
    num_centroids,
    per_centroid,
    num_suppressed,
    stride_hn,
    stride_wv,
    stride_on,
    TILE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, j, s): `row_candidates_kernel`, its logits stored."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    keys, offs_c = _load_keys(keys_ptr, row, num_centroids, BLOCK_C)
    centroid = _centroid_of_rank(keys, offs_c, tl.program_id(1) + 1, BLOCK_C, GROUPS)
    ids, mask = _candidates(centroid, tl.program_id(2), token_ordering_ptr, per_centroid, TILE)
    eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
    logits = _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
    tl.store(out_ptr + row * stride_on + ids, logits, mask=eligible)


@dataclass(frozen=True)
class MaskedEmbeddingLaunch:
    """Launch knobs of the masked embedding.

    Attributes:
        score_block: centroids of a program of `centroid_scores_kernel`.
        score_warps: its warps.
        order: candidates are read row by row, by programs that search or from a list, or centroid by centroid.
        tile: candidates of a program.
        num_warps: its warps.
    """

    score_block: int
    score_warps: int
    order: Literal["search", "row", "centroid"]
    tile: int
    num_warps: int

    def shared_memory(self, hidden_size: int, element_size: int) -> int:
        """Bytes the operands of the largest dot take."""
        scores = (SCORE_ROWS + self.score_block) * dot_columns(hidden_size, element_size, SCORE_BYTES)
        candidates = (SCORE_ROWS + self.tile) * dot_columns(hidden_size, element_size, CANDIDATE_BYTES) * _STAGES.value
        return max(scores, candidates) * element_size


SCORE_BYTES, CANDIDATE_BYTES = 512, 128
"""Of a row, in one block of a dot."""
SELECT_WARPS = 4
"""Of a program of `select_kernel`: up to its end, 1 / 8 / 32 rows take 4.8 / 5.1 / 6.7; with eight 6.0 / 6.4 / 6.9."""


def dot_columns(hidden_size: int, element_size: int, row_bytes: int) -> int:
    """Columns of one block of a dot: at most `row_bytes` of a row. A sum's steps are the tensor core's, not these."""
    return max(16, min(next_power_of_2(hidden_size), row_bytes // element_size))


def masked_embedding_launch(num_rows: int, num_centroids: int, vocab_size: int, top_k: int) -> MaskedEmbeddingLaunch:
    """Launch settings; none of them reaches the order in which a product is summed."""
    widest = max(16, next_power_of_2(vocab_size // num_centroids))
    # Times in µs on an H200 (2026-11-30), 2,048 centroids of 128 tokens, bf16, hidden 256. Scores alone of 128 rows, 64
    # centroids and 4 warps against 32 and 4: 3.4 to 3.8; of one row, 16 and 1 are not faster than 32 and 2.
    score_block, score_warps = (64, 4) if num_rows > 64 else (32, 2)
    pairs = num_rows * top_k
    if pairs > num_centroids // 4:
        # 32 / 64 / 128 rows 26.2 / 35.8 / 46.3; tiles of 32 in 2 warps 26.6 / 36.8 / 46.8; by row 34 / 50 at 32 / 64.
        tile = min(widest, 64)
        return MaskedEmbeddingLaunch(score_block, score_warps, "centroid", tile, tile // 16)
    if pairs > 64:
        # 8 / 16 rows 14.4 / 18.8; tiles of 16 in a warp 14.7 / 19.1, of 64 in 4 warps 15.2 / 19.6.
        tile = min(widest, 32)
        return MaskedEmbeddingLaunch(score_block, score_warps, "row", tile, tile // 16)
    # 1 row 7.9, from a list 9.7; 4 rows 12.7 and, from a list in tiles of 16, 11.8. A warp of its own searches without
    # barriers (4 warps: 12.3 against 8.3 at one row) and holds up to 4,096 scores.
    warps = max(1, next_power_of_2(num_centroids) // 4096)
    return MaskedEmbeddingLaunch(score_block, score_warps, "search", 16, warps)


def group_count(top_k: int, block: int) -> int:
    """Groups whose maxima bound the top_k-th score from below; 0 where there are not enough keys for them."""
    groups = next_power_of_2(top_k)
    return groups if groups <= block // 16 else 0


def launch_options(num_warps: int, arch: Arch, early: bool | None = True) -> dict[str, Any]:
    """Keyword arguments of a launch, of one behind the operation's first; one stage but where a loop says otherwise."""
    return {"num_warps": num_warps, "num_stages": 1, **pdl_options(arch, early)}
