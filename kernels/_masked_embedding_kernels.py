"""The kernels of `masked_embedding.py` and their launch settings.

1. `centroid_scores_kernel`: every score, as an integer that orders as the score does.
2. Few rows, `row_candidates_kernel`: each program finds one of its row's centroids itself (the scores are 8 KB) and
   takes a share of its candidates. Many rows would search, and read popular candidates, too often: then `select_kernel`
   lists the centroids that any row selects, with the rows of each, and `centroid_candidates_kernel` reads their
   candidates once for all of them.

All products are dots of 16 rows on tensor cores, summed along the hidden size in the same steps whatever the batch and
the tile, so the batch does not show in a row's scores or logits. Programs of a row meet in one 64-bit maximum of
(score, lowest id first), which no order of arrival can change, and the last to arrive writes the token: no launch only
to reduce.
"""

# Kernels are Triton, not Python: what they return are tensors, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG, INTERPRET, Arch, cdiv, next_power_of_2
from tridraft.kernels._pdl import pdl_options, pdl_wait, prefetch_l2
from tridraft.kernels._winner import (
    meet,
    nothing,
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


@triton.jit
def _load_block(ptr, stride, rows, mask, start: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
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
    counts_ptr,  # [C] i32, or None
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
def _likely(keys, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """(largest of each eight keys, second largest, low, high): the wanted keys lie in [low, high).

    The eight are a thread's own. The smallest of GROUPS ≥ top_k group maxima is reached by top_k keys.
    """
    eights = tl.reshape(keys, (8, BLOCK_C // 8))
    first, second = tl.reduce((eights, tl.zeros_like(eights)), 0, _two_largest)
    high = tl.max(first, axis=0) + 1
    low = high - high
    if GROUPS:
        low = tl.min(tl.max(tl.reshape(first, (GROUPS, BLOCK_C // 8 // GROUPS)), axis=1), axis=0)
    return first, second, low, high


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

    Searches among the likely keys, a quarter of all, and again among all if what it found is not of that rank there.
    """
    first, second, bottom, top = _likely(keys, BLOCK_C, GROUPS)
    low, high, _, _ = _narrow(first, second, wanted, bottom, top, True)
    # One sum of three: how many keys are higher, how many in [low, high), and the index of that one.
    inside = tl.where(keys >= low, 2**32 + offs_c.to(tl.int64), 0)
    sums = tl.sum(tl.where(keys >= high, 2**48, inside), axis=0)
    centroid = (sums & (2**32 - 1)).to(tl.int32)
    if (sums >> 32) != ((wanted - 1) << 16) + 1:
        low, high, _, at_high = _narrow(keys, None, wanted, top - top, top, True)
        equal = (keys >= low) & (keys < high)
        chosen = equal & (tl.cumsum(equal.to(tl.int32), axis=0) == wanted - at_high)
        centroid = tl.sum(tl.where(chosen, offs_c, 0), axis=0)
    return centroid


@triton.jit
def _selected(keys, top_k, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """Which `[BLOCK_C]` centroids are among the top_k; searches as `_centroid_of_rank` does."""
    first, second, bottom, top = _likely(keys, BLOCK_C, GROUPS)
    low, _, _, _ = _narrow(first, second, top_k, bottom, top, False)
    selected = keys >= low
    if tl.sum(selected.to(tl.int32), axis=0) != top_k:
        low, high, _, at_high = _narrow(keys, None, top_k, top - top, top, False)
        equal = (keys >= low) & (keys < high)
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
def _prefetch(w_ptr, stride_wm, ids, mask, HIDDEN: tl.constexpr):
    """Ask for rows to be brought into the L2 cache."""
    element: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    lines: tl.constexpr = triton.next_power_of_2(triton.cdiv(HIDDEN * element, 128))
    offs_h = tl.arange(0, lines) * (128 // element)
    ptrs = w_ptr + ids.to(tl.int64)[:, None] * stride_wm + offs_h[None, :]
    prefetch_l2(ptrs, mask[:, None] & (offs_h < HIDDEN)[None, :])


@triton.jit
def _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Logits `[TILE]` of a tile of candidates for one row."""
    offs_n = tl.arange(0, _ROWS)
    rows, first = offs_n.to(tl.int64) * 0 + row, offs_n == 0
    products = tl.zeros((_ROWS, ids.shape[0]), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        x = _load_block(hidden_ptr, stride_hn, rows, first, start, HIDDEN, BLOCK_H)
        w = _load_block(weight_ptr, stride_wv, ids, mask, start, HIDDEN, BLOCK_H)
        products = _add_products(products, x, w)
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


@triton.jit(do_not_specialize=["tiles"])
def row_candidates_kernel(
    keys_ptr,  # [N, C] i32
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
    tiles,
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
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, j, s): of row n's (j + 1)-th centroid, `tiles` tiles of candidates from tile s * `tiles` on.

    Rows run side by side, so those that share a centroid find its candidates in the L2 cache.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    keys, offs_c = _load_keys(keys_ptr, row, num_centroids, BLOCK_C)  # of padding too: the loads do not wait in turn
    slot = tl.load(idx_mapping_ptr + row)
    if slot >= 0:
        # Loaded before the search, which hides their latency.
        temperature = tl.load(temperature_ptr + slot)
        seed = tl.load(seeds_ptr + slot)
        position = tl.load(positions_ptr + row).to(tl.int64)
        centroid = _centroid_of_rank(keys, offs_c, tl.program_id(1) + 1, BLOCK_C, GROUPS)
        best = nothing()
        start = tl.program_id(2) * tiles
        end = tl.minimum(start + tiles, tl.cdiv(per_centroid, TILE))
        if PREFETCH:
            for tile in range(start + 1, end):
                ids, mask = _candidates(centroid, tile, token_ordering_ptr, per_centroid, TILE)
                _prefetch(weight_ptr, stride_wv, ids, mask, HIDDEN)
        for tile in range(start, end):
            ids, mask = _candidates(centroid, tile, token_ordering_ptr, per_centroid, TILE)
            scores = _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
            if temperature > 0.0:
                scores = scores * tl.div_rn(1.0, temperature) + gumbel_at(seed, position, ids, _DRAFT)
            eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
            best = tl.maximum(best, winner_key(scores, ids, eligible, 0))
        num_programs = tl.num_programs(1) * tl.num_programs(2)
        _write_token(
            *(row, best, num_programs, best_ptr, arrivals_ptr, suppress_ptr, num_suppressed, vocab_size),
            *(nan_flag_ptr, out_ptr, stride_flag, stride_out),
        )


@triton.jit(do_not_specialize=["num_rows"])
def select_kernel(
    keys_ptr,  # [N, C] i32
    idx_mapping_ptr,  # [N] int
    counts_ptr,  # [C + 1] i32, zeros; the last counts centroids
    active_ptr,  # [C] i32
    members_ptr,  # [C, N] i32
    arrivals_ptr,  # [N] i32, zeros
    num_rows,
    num_centroids,
    top_k,
    parts,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program n appends row n to the members of its centroids, in any order; padding arrives at once.

    The first member appends the centroid to the active ones. A row counts its own at once: warps make atomics at one
    address wait for each other.
    """
    pdl_wait(PDL)
    row = tl.program_id(0)
    keys, offs_c = _load_keys(keys_ptr, row.to(tl.int64), num_centroids, BLOCK_C)
    if tl.load(idx_mapping_ptr + row) >= 0:
        selected = _selected(keys, top_k, BLOCK_C, GROUPS)
        place = tl.atomic_add(counts_ptr + offs_c, 1, mask=selected, sem="relaxed")
        tl.store(members_ptr + offs_c.to(tl.int64) * num_rows + place, row, mask=selected)
        first = (selected & (place == 0)).to(tl.int32)
        base = tl.atomic_add(counts_ptr + num_centroids, tl.sum(first, axis=0), sem="relaxed")
        tl.store(active_ptr + base + tl.cumsum(first, axis=0) - 1, offs_c, mask=first > 0)
    else:
        tl.atomic_add(arrivals_ptr, top_k * parts, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def centroid_candidates_kernel(
    counts_ptr,  # [C + 1] i32
    active_ptr,  # [C] i32
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
    arrivals_ptr,  # [N] i32, of which the first counts for all
    nan_flag_ptr,  # [N] bool or i32, or None
    out_ptr,  # [N] int
    num_rows,
    num_centroids,
    top_k,
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
    PDL: tl.constexpr,
):
    """Program p of P: tiles p, p + P, ... of the active centroids' candidates, each for all members of its centroid.

    The program whose tiles complete the count writes the tokens.
    """
    pdl_wait(PDL)
    offs_n = tl.arange(0, _ROWS)
    parts = tl.cdiv(per_centroid, TILE)
    step = tl.num_programs(0)
    num_items = tl.load(counts_ptr + num_centroids) * parts
    first = tl.program_id(0)
    centroid = tl.load(active_ptr + first // parts, mask=first < num_items, other=0)
    done = 0
    for item in range(first, num_items, step):
        # What does not need the count is loaded along with it, and the next centroid's index ahead of it.
        ids, mask = _candidates(centroid, item % parts, token_ordering_ptr, per_centroid, TILE)
        count = tl.load(counts_ptr + centroid)
        members_ptrs = members_ptr + centroid.to(tl.int64) * num_rows + offs_n
        members = tl.load(members_ptrs, mask=offs_n < num_rows, other=0)
        centroid = tl.load(active_ptr + (item + step) // parts, mask=item + step < num_items, other=0)
        eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
        done += count
        for start in range(0, count, _ROWS):
            live = start + offs_n < count
            rows = tl.where(live, members, 0).to(tl.int64)
            members = tl.load(members_ptrs + start + _ROWS, mask=start + _ROWS + offs_n < count, other=0)
            slots = tl.load(idx_mapping_ptr + rows, mask=live, other=0)
            temperature = tl.load(temperature_ptr + slots, mask=live, other=0.0)
            scores = tl.zeros((_ROWS, TILE), tl.float32)
            for start_h in tl.static_range(0, HIDDEN, BLOCK_H):
                w = _load_block(weight_ptr, stride_wv, ids, mask, start_h, HIDDEN, BLOCK_H)
                x = _load_block(hidden_ptr, stride_hn, rows, live, start_h, HIDDEN, BLOCK_H)
                scores = _add_products(scores, x, w)
            if tl.max(temperature, axis=0) > 0.0:
                hot = live & (temperature > 0.0)
                seeds = tl.load(seeds_ptr + slots, mask=hot, other=0)
                positions = tl.load(positions_ptr + rows, mask=hot, other=0).to(tl.int64)
                inverse = tl.div_rn(tl.full((_ROWS,), 1.0, tl.float32), tl.where(hot, temperature, 1.0))
                noise = gumbel_at(seeds[:, None], positions[:, None], ids[None, :], _DRAFT)
                scores = tl.where(hot[:, None], scores * inverse[:, None] + noise, scores)
            keys = winner_key(scores, ids[None, :], eligible[None, :], 1)
            tl.atomic_max(best_ptr + rows, keys, mask=live, sem="relaxed")
    if done > 0:
        tl.debug_barrier()  # the count is one thread's and stands for the maxima of all
        arrived = tl.atomic_add(arrivals_ptr, done) + done
        if arrived == num_rows * top_k * parts:
            _write_tokens(
                *(num_rows, idx_mapping_ptr, best_ptr, suppress_ptr, num_suppressed, vocab_size),
                *(nan_flag_ptr, out_ptr, stride_flag, stride_out),
            )


@triton.jit
def _write_tokens(
    num_rows,
    idx_mapping_ptr,
    best_ptr,
    suppress_ptr,
    num_suppressed,
    vocab_size,
    nan_flag_ptr,
    out_ptr,
    stride_flag,
    stride_out,
):
    """Write every row's token, when the maxima are final."""
    for start in range(0, num_rows, 128):
        offs_n = (start + tl.arange(0, 128)).to(tl.int64)
        mask_n = offs_n < num_rows
        mask_n = mask_n & (tl.load(idx_mapping_ptr + offs_n, mask=mask_n, other=-1) >= 0)
        keys = tl.load(
            best_ptr + offs_n, mask=mask_n, other=2**62, cache_modifier=".cg"
        )  # atomics pass the L1 cache by
        tokens, only_nan = winning_tokens(keys, suppress_ptr, num_suppressed, vocab_size)
        tl.store(out_ptr + offs_n * stride_out, tokens.to(out_ptr.dtype.element_ty), mask=mask_n)
        if nan_flag_ptr is not None:
            flags = only_nan.to(nan_flag_ptr.dtype.element_ty)
            tl.store(nan_flag_ptr + offs_n * stride_flag, flags, mask=mask_n)


@triton.jit(do_not_specialize=["tiles"])
def candidate_logits_kernel(
    keys_ptr,  # [N, C] i32
    hidden_ptr,  # [N, H] float
    token_ordering_ptr,  # [V] int
    weight_ptr,  # [V, H] float
    suppress_ptr,  # [n] i64, or None
    out_ptr,  # [N, V] f32, −inf
    num_centroids,
    tiles,
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
    start = tl.program_id(2) * tiles
    for tile in range(start, tl.minimum(start + tiles, tl.cdiv(per_centroid, TILE))):
        ids, mask = _candidates(centroid, tile, token_ordering_ptr, per_centroid, TILE)
        eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
        logits = _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
        tl.store(out_ptr + row * stride_on + ids, logits, mask=eligible)


@dataclass(frozen=True)
class MaskedEmbeddingLaunch:
    """Launch knobs of the masked embedding.

    Attributes:
        score_block: centroids of a program of `centroid_scores_kernel`.
        score_warps: its warps.
        by_centroid: candidates are read centroid by centroid for all rows, not row by row.
        tile: candidates multiplied at once.
        tiles: tiles of a program that reads row by row.
        num_warps: warps of the kernels over candidates.
        prefetch: a program that reads row by row asks for the rows of all its tiles at once.
    """

    score_block: int
    score_warps: int
    by_centroid: bool
    tile: int
    tiles: int
    num_warps: int
    prefetch: bool = False

    def shared_memory(self, hidden_size: int, element_size: int) -> int:
        """Bytes the operands of the largest dot take."""
        block = max(self.score_block, self.tile)
        return (SCORE_ROWS + block) * dot_columns(hidden_size, element_size) * element_size


MAX_REGISTERS, PROGRAMS_PER_SM = 128, 4
"""Of a thread of `centroid_candidates_kernel`, and its programs."""


def dot_columns(hidden_size: int, element_size: int, row_bytes: int = 512) -> int:
    """Columns of one block of a dot: at most `row_bytes` of a row. A sum's steps are the tensor core's, not these."""
    return max(16, min(next_power_of_2(hidden_size), row_bytes // element_size))


def masked_embedding_launch(
    num_rows: int, num_centroids: int, vocab_size: int, top_k: int, arch: Arch
) -> MaskedEmbeddingLaunch:
    """Launch settings; none of them reaches the order in which a product is summed."""
    per_centroid = vocab_size // num_centroids
    widest = max(16, next_power_of_2(per_centroid))
    # Times in µs on an H200 (2026-11-30), 2,048 centroids of 128 tokens, bf16, hidden 256. One row, 32 centroids and 2
    # warps 7.5, 32 and 4 7.65, 16 and 1 8.3; scores alone of 128 rows, 64 and 4 against 32 and 4: 3.4 to 3.8.
    score_block, score_warps = (64, 4) if num_rows > 64 else (32, 2)
    # By centroid takes a third launch, which pays once rows share what they read: 31.4 by row and 34.9 by centroid at
    # 32 rows; 128 rows by row would read twice what they share.
    if num_rows * top_k > num_centroids // 2:
        # 128 registers let four programs run on a multiprocessor: 34.9 / 55.1 at 32 / 128 rows where 168 and three take
        # 37.7 / 59.6. They spill unless a row is read in two blocks.
        return MaskedEmbeddingLaunch(score_block, score_warps, True, min(widest, 64), cdiv(per_centroid, 64), 4)
    # A warp of its own searches without barriers (4 warps: 12.3 against 8.3 at one row) and holds up to 4,096 scores.
    warps = max(1, next_power_of_2(num_centroids) // 4096)
    pairs = num_rows * top_k
    if pairs <= 256:
        # As many programs as fit in one wave: 8 rows 14.3 with two tiles of 16 a program, 17.3 with four.
        tiles = max(1, cdiv(pairs * cdiv(per_centroid, 16), 1024))
        return MaskedEmbeddingLaunch(score_block, score_warps, False, 16, tiles, warps)
    # 16 rows 23.8, 32 rows 31.4, where 1 warp and tiles of 16 take 27.5 and 37.9.
    tile = min(widest, 32)
    prefetch = arch.backend == "cuda" and not INTERPRET
    return MaskedEmbeddingLaunch(score_block, score_warps, False, tile, 4, max(2, warps), prefetch)


def group_count(top_k: int, block: int) -> int:
    """Groups whose maxima bound the top_k-th score from below; 0 where there are not enough keys for them."""
    groups = next_power_of_2(top_k)
    return groups if groups <= block // 16 else 0


def launch_options(num_warps: int, arch: Arch, max_registers: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch; one stage, as no loop here is long enough to be pipelined."""
    limited = max_registers is not None and arch.backend == "cuda" and not INTERPRET
    limit = {"maxnreg": max_registers} if limited else {}
    return {"num_warps": num_warps, "num_stages": 1, **limit, **pdl_options(arch)}
