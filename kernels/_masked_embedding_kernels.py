"""The kernels of `masked_embedding.py` and their launch settings.

1. `centroid_scores_kernel`: every score.
2. Few rows, `row_candidates_kernel`: each program selects its row's centroids itself (the scores are 8 KB) and takes a
   share of the candidates. Many rows would select, and read popular candidates, too often: then `select_kernel` lists
   the rows of each centroid and `centroid_candidates_kernel` reads its candidates once for all of them.

All products are dots of 16 rows on tensor cores, summed along the hidden size in the same steps whatever the batch and
the tile, so the batch does not show in a row's scores or logits. Programs of a row meet in one 64-bit maximum of
(score, lowest id first), which no order of arrival can change, and the last to arrive writes the token: no launch only
to reduce.
"""

# Kernels are Triton, not Python: what they return are tensors, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG, INTERPRET, Arch, cdiv, next_power_of_2
from tridraft.kernels._pdl import pdl_options, pdl_wait
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


@triton.jit
def _dot(x_ptr, stride_xn, rows, mask_n, w_ptr, stride_wm, ids, mask_m, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """`x[rows] · w[ids]` in float32, of a block of rows (int64) and a block of ids."""
    products = tl.zeros((rows.shape[0], ids.shape[0]), tl.float32)
    for start in tl.static_range(0, HIDDEN, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        mask_h = offs_h[None, :] < HIDDEN
        w_ptrs = w_ptr + ids.to(tl.int64)[:, None] * stride_wm + offs_h[None, :]
        w = tl.load(w_ptrs, mask=mask_m[:, None] & mask_h, other=0.0)
        x_ptrs = x_ptr + rows[:, None] * stride_xn + offs_h[None, :]
        x = tl.load(x_ptrs, mask=mask_n[:, None] & mask_h, other=0.0)
        if _INTERPRET:  # its dot multiplies the bits of a bf16
            x, w = x.to(tl.float32), w.to(tl.float32)
        products = tl.dot(x, tl.trans(w), products, input_precision="ieee")
    return products


@triton.jit(do_not_specialize=["num_rows", "num_slots"], debug=DEBUG)
def centroid_scores_kernel(
    hidden_ptr,  # [N, H] float
    centroids_ptr,  # [C, H] float
    idx_mapping_ptr,  # [N] int, or None: no row is padding
    scores_ptr,  # [N, C] f32
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
    """Program (c, n): a block of centroids against a block of rows. Also resets what the next kernels count in."""
    pdl_wait(PDL)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask_n = offs_n < num_rows
    mask_c = offs_c < num_centroids
    if best_ptr is not None:
        resets = offs_n < tl.where(tl.program_id(0) == 0, num_rows, 0)
        open_meeting(best_ptr + offs_n, arrivals_ptr + offs_n, resets)
    if counts_ptr is not None:
        tl.store(counts_ptr + offs_c, 0, mask=offs_c < tl.where(tl.program_id(1) == 0, num_centroids, 0))
    if idx_mapping_ptr is not None:
        slots = tl.load(idx_mapping_ptr + offs_n, mask=mask_n, other=-1)
        tl.device_assert(slots < num_slots, "idx_mapping: slot out of range")
        mask_n = mask_n & (slots >= 0)
    scores = _dot(hidden_ptr, stride_hn, offs_n, mask_n, centroids_ptr, stride_cc, offs_c, mask_c, HIDDEN, BLOCK_H)
    tl.store(
        scores_ptr + offs_n[:, None] * num_centroids + offs_c[None, :], scores, mask=mask_n[:, None] & mask_c[None, :]
    )


@triton.jit
def _select(scores_ptr, row, num_centroids, top_k, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """(selected `[BLOCK_C]`, the index of each centroid).

    Narrows the keys to a threshold that exactly top_k of them reach, or, if keys tie there, to the top_k-th key. The
    smallest of GROUPS ≥ top_k group maxima is reached by top_k keys, which leaves about six steps in place of 21: of
    three parts each, because one sum counts for two thresholds in 16 bits each.
    """
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < num_centroids
    scores = tl.load(scores_ptr + row * num_centroids + offs_c, mask=mask_c, other=0.0)
    keys = order_key(tl.where(scores > float("-inf"), scores, float("-inf")))
    keys = tl.where(mask_c, keys, -(2**31))
    group_maxima = tl.max(tl.reshape(keys, (GROUPS, BLOCK_C // GROUPS)), axis=1)
    low = tl.min(group_maxima, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    reached = tl.sum((keys >= low.to(tl.int32)).to(tl.int32), axis=0)
    while (reached != top_k) & (high - low > 1):
        third = (high - low + 2) // 3
        lower = low + third
        upper = tl.minimum(lower + third, high - 1)
        flags = (keys >= lower.to(tl.int32)).to(tl.int32) + ((keys >= upper.to(tl.int32)).to(tl.int32) << 16)
        counts = tl.sum(flags, axis=0)
        at_lower, at_upper = counts & 0xFFFF, counts >> 16
        high = tl.where(at_lower < top_k, lower, tl.where(at_upper < top_k, upper, high))
        low = tl.where(at_upper >= top_k, upper, tl.where(at_lower >= top_k, lower, low))
        reached = tl.where(at_upper >= top_k, at_upper, tl.where(at_lower >= top_k, at_lower, reached))

    threshold = low.to(tl.int32)
    selected = keys >= threshold
    if reached != top_k:
        above, equal = keys > threshold, keys == threshold
        ties = top_k - tl.sum(above.to(tl.int32), axis=0)
        selected = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= ties))
    return selected, offs_c


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
def _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr):
    """Logits `[TILE]` of a tile of candidates for one row."""
    offs_n = tl.arange(0, _ROWS)
    rows, first = offs_n.to(tl.int64) * 0 + row, offs_n == 0
    products = _dot(hidden_ptr, stride_hn, rows, first, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
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
    scores_ptr,  # [N, C] f32
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
    top_k,
    per_centroid,
    parts,
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
    """Program (n, t): row n, `tiles` tiles of its candidates; a centroid has `parts` of them.

    Rows run side by side and tiles follow the centroids' order, so rows that share a centroid find it in the L2 cache.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + row)
    if slot >= 0:
        # Loaded before the search, which hides their latency.
        temperature = tl.load(temperature_ptr + slot)
        seed = tl.load(seeds_ptr + slot)
        position = tl.load(positions_ptr + row).to(tl.int64)
        selected, offs_c = _select(scores_ptr, row, num_centroids, top_k, BLOCK_C, GROUPS)
        rank = tl.cumsum(selected.to(tl.int32), axis=0)
        best = nothing()
        first = tl.program_id(1) * tiles
        for item in range(first, tl.minimum(first + tiles, top_k * parts)):
            centroid = tl.sum(tl.where(selected & (rank == item // parts + 1), offs_c, 0), axis=0)
            ids, mask = _candidates(centroid, item % parts, token_ordering_ptr, per_centroid, TILE)
            eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
            scores = _one_row(hidden_ptr, stride_hn, row, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
            if temperature > 0.0:
                scores = scores * tl.div_rn(1.0, temperature) + gumbel_at(seed, position, ids, _DRAFT)
            best = tl.maximum(best, winner_key(scores, ids, eligible, 0))
        _write_token(
            *(row, best, tl.num_programs(1), best_ptr, arrivals_ptr, suppress_ptr, num_suppressed, vocab_size),
            *(nan_flag_ptr, out_ptr, stride_flag, stride_out),
        )


@triton.jit(do_not_specialize=["num_rows"])
def select_kernel(
    scores_ptr,  # [N, C] f32
    idx_mapping_ptr,  # [N] int
    counts_ptr,  # [C] i32, zeros
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
    """Program n appends row n to the members of its centroids, in any order; padding arrives at once."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    if tl.load(idx_mapping_ptr + row) >= 0:
        selected, offs_c = _select(scores_ptr, row.to(tl.int64), num_centroids, top_k, BLOCK_C, GROUPS)
        place = tl.atomic_add(counts_ptr + offs_c, 1, mask=selected, sem="relaxed")
        tl.store(members_ptr + offs_c.to(tl.int64) * num_rows + place, row, mask=selected)
    else:
        tl.atomic_add(arrivals_ptr, top_k * parts, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def centroid_candidates_kernel(
    counts_ptr,  # [C] i32
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
    """Program (t, c): tile t of centroid c's candidates for all its members. The last of all writes the tokens.

    A chain of gathers decides how long a program runs, so what does not need the count is loaded along with it.
    """
    pdl_wait(PDL)
    centroid = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + centroid)
    offs_n = tl.arange(0, _ROWS)
    members_ptrs = members_ptr + centroid * num_rows + offs_n
    members = tl.load(members_ptrs, mask=offs_n < num_rows, other=0)
    ids, mask = _candidates(centroid, tl.program_id(0), token_ordering_ptr, per_centroid, TILE)
    if count > 0:
        eligible = _eligible(ids, mask, suppress_ptr, num_suppressed)
        for start in range(0, count, _ROWS):
            live = start + offs_n < count
            rows = tl.where(live, members, 0).to(tl.int64)
            members = tl.load(members_ptrs + start + _ROWS, mask=start + _ROWS + offs_n < count, other=0)
            slots = tl.load(idx_mapping_ptr + rows, mask=live, other=0)
            temperature = tl.load(temperature_ptr + slots, mask=live, other=0.0)
            scores = _dot(hidden_ptr, stride_hn, rows, live, weight_ptr, stride_wv, ids, mask, HIDDEN, BLOCK_H)
            if tl.max(temperature, axis=0) > 0.0:
                hot = live & (temperature > 0.0)
                seeds = tl.load(seeds_ptr + slots, mask=hot, other=0)
                positions = tl.load(positions_ptr + rows, mask=hot, other=0).to(tl.int64)
                inverse = tl.div_rn(tl.full((_ROWS,), 1.0, tl.float32), tl.where(hot, temperature, 1.0))
                noise = gumbel_at(seeds[:, None], positions[:, None], ids[None, :], _DRAFT)
                scores = tl.where(hot[:, None], scores * inverse[:, None] + noise, scores)
            keys = winner_key(scores, ids[None, :], eligible[None, :], 1)
            tl.atomic_max(best_ptr + rows, keys, mask=live, sem="relaxed")
        tl.debug_barrier()  # the count is one thread's and stands for the maxima of all
        arrived = tl.atomic_add(arrivals_ptr, count) + count
        if arrived == num_rows * top_k * tl.num_programs(0):
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
    scores_ptr,  # [N, C] f32
    hidden_ptr,  # [N, H] float
    token_ordering_ptr,  # [V] int
    weight_ptr,  # [V, H] float
    suppress_ptr,  # [n] i64, or None
    out_ptr,  # [N, V] f32, −inf
    num_centroids,
    tiles,
    top_k,
    per_centroid,
    parts,
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
    """Program (n, t): `row_candidates_kernel`, its logits stored."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    selected, offs_c = _select(scores_ptr, row, num_centroids, top_k, BLOCK_C, GROUPS)
    rank = tl.cumsum(selected.to(tl.int32), axis=0)
    first = tl.program_id(1) * tiles
    for item in range(first, tl.minimum(first + tiles, top_k * parts)):
        centroid = tl.sum(tl.where(selected & (rank == item // parts + 1), offs_c, 0), axis=0)
        ids, mask = _candidates(centroid, item % parts, token_ordering_ptr, per_centroid, TILE)
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
        tiles: tiles of a program of `row_candidates_kernel`.
        num_warps: warps of the kernels over candidates.
        max_registers: registers of their threads, which decide how many programs hide each other's gathers; float32
            multiplies in registers and is not held to it.
    """

    score_block: int
    score_warps: int
    by_centroid: bool
    tile: int
    tiles: int
    num_warps: int
    max_registers: int | None = 168

    def shared_memory(self, hidden_size: int, element_size: int) -> int:
        """Bytes the operands of the largest dot take."""
        block = max(self.score_block, self.tile)
        return (SCORE_ROWS + block) * dot_columns(hidden_size, element_size) * element_size


def dot_columns(hidden_size: int, element_size: int) -> int:
    """Columns of one step of a dot: at most 512 bytes of a row."""
    return max(16, min(next_power_of_2(hidden_size), 512 // element_size))


def masked_embedding_launch(
    num_rows: int, num_centroids: int, vocab_size: int, top_k: int, arch: Arch
) -> MaskedEmbeddingLaunch:
    """Launch settings; none of them reaches the order in which a product is summed."""
    per_centroid = vocab_size // num_centroids
    # Times in µs on an H200, for 2,048 centroids. Scores alone, 32 centroids and 4 warps against 16 and 2: 2.1 to 2.2
    # (1 row), 1.7 to 1.9 (8), 1.9 to 2.2 (32); from 128 rows 64 and 4 against 32 and 4: 3.4 to 3.8.
    score_block = 64 if num_rows > 64 else 32
    # A third launch costs about what one selection does, and reading by centroid about one look at each of them, also
    # at the unselected ones: worth it once a quarter of them could be selected (16 rows: 30.5 against 36.1).
    by_centroid = num_rows * top_k >= num_centroids // 4
    # 64 candidates in bf16 at hidden 256 are 32 KB in flight a program. 168 registers a thread let three of them run on
    # a multiprocessor: 38.9 / 51.3 / 65.5 at 32 / 64 / 128 rows. 128 registers make it four, but spill: 42.8 / 59.7 /
    # 78.1. One row has too few candidates for that: the smallest tiles of a dot, 8.5 (9.2 with 32, 13.8 with 64).
    tile = max(16, min(next_power_of_2(per_centroid), 64))
    while tile > 16 and num_rows * top_k * cdiv(per_centroid, tile // 2) <= 2 * arch.num_sms:
        tile //= 2
    # By row every program repeats the selection: about two programs a multiprocessor, which run at once, instead of
    # smaller ones one after another (8 rows: 18.3 with 256 programs of two tiles, more than 20 with 512 of one).
    programs = num_rows * top_k * cdiv(per_centroid, tile)
    tiles = min(8, cdiv(programs, 2 * arch.num_sms))
    return MaskedEmbeddingLaunch(score_block, 4, by_centroid, tile, tiles, num_warps=4)


def group_count(top_k: int) -> int:
    """Groups whose maxima bound the top_k-th score from below."""
    return next_power_of_2(top_k)


def launch_options(num_warps: int, arch: Arch, max_registers: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch; one stage, as no loop here is long enough to be pipelined."""
    limited = max_registers is not None and arch.backend == "cuda" and not INTERPRET
    limit = {"maxnreg": max_registers} if limited else {}
    return {"num_warps": num_warps, "num_stages": 1, **limit, **pdl_options(arch)}
