"""The kernels of `masked_embedding.py` and their launch settings.

1. `centroid_scores_kernel`: every score, on tensor cores whatever the batch, so that a row's scores never depend on it.
2. Few rows, `row_candidates_kernel`: each program selects its row's centroids itself (the scores are 8 KB) and takes a
   share of the candidates. Many rows would read popular candidates many times, so then `select_kernel` marks the
   selected (centroid, row) pairs and `centroid_candidates_kernel` reads each selected centroid's candidates once.

Programs of a row meet in one 64-bit maximum of (score, lowest id first), which no order of arrival can change, and
the last to arrive writes the token: no launch only to reduce. Both ways multiply a candidate with a row by the same
tile and sum it in the same order, so the batch does not show in the result.
"""

# Kernels are Triton, not Python: what they return are tensors, which a Python checker denies.
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG, INTERPRET, Arch, cdiv, next_power_of_2
from tridraft.kernels._pdl import pdl_options, pdl_wait
from tridraft.kernels._winner import meet, nothing, open_meeting, order_key, winner_key, winning_token
from tridraft.kernels.random import DRAFT, gumbel_at

_INTERPRET = tl.constexpr(INTERPRET)
_DRAFT = tl.constexpr(DRAFT)


@triton.jit(do_not_specialize=["num_rows", "num_slots"], debug=DEBUG)
def centroid_scores_kernel(
    hidden_ptr,  # [N, H] float
    centroids_ptr,  # [C, H] float
    idx_mapping_ptr,  # [N] int, or None: no row is padding
    scores_ptr,  # [N, C] f32
    best_ptr,  # [N] i64, or None
    arrivals_ptr,  # [N] i32
    num_rows,
    num_centroids,
    hidden_size,
    stride_hn,
    stride_cc,
    num_slots,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, n): a block of centroids against a block of rows. Also resets what the next kernels meet in."""
    pdl_wait(PDL)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_n = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask_n = offs_n < num_rows
    mask_c = offs_c < num_centroids
    if best_ptr is not None:
        resets = offs_n < tl.where(tl.program_id(0) == 0, num_rows, 0)
        open_meeting(best_ptr + offs_n, arrivals_ptr + offs_n, resets)
    if idx_mapping_ptr is not None:
        slots = tl.load(idx_mapping_ptr + offs_n, mask=mask_n, other=-1)
        tl.device_assert(slots < num_slots, "idx_mapping: slot out of range")
        mask_n = mask_n & (slots >= 0)
    scores = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        offs_h = start + tl.arange(0, BLOCK_H)
        mask_h = offs_h[None, :] < hidden_size
        x_ptrs = hidden_ptr + offs_n[:, None] * stride_hn + offs_h[None, :]
        x = tl.load(x_ptrs, mask=mask_n[:, None] & mask_h, other=0.0)
        w_ptrs = centroids_ptr + offs_c[:, None].to(tl.int64) * stride_cc + offs_h[None, :]
        w = tl.load(w_ptrs, mask=mask_c[:, None] & mask_h, other=0.0)
        if _INTERPRET:  # its dot multiplies the bits of a bf16
            x, w = x.to(tl.float32), w.to(tl.float32)
        scores = tl.dot(x, tl.trans(w), scores, input_precision="ieee")
    tl.store(
        scores_ptr + offs_n[:, None] * num_centroids + offs_c[None, :], scores, mask=mask_n[:, None] & mask_c[None, :]
    )


@triton.jit
def _select(scores_ptr, row, num_centroids, top_k, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """(selected `[BLOCK_C]`, how many are selected up to and with each centroid, its index).

    Bisects the keys for a threshold that exactly top_k of them reach, or, if keys tie there, for the top_k-th key. The
    smallest of GROUPS ≥ top_k group maxima is reached by top_k keys, which leaves about ten steps in place of 32.
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
        middle = low + (high - low) // 2
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        enough = count >= top_k
        low = tl.where(enough, middle, low)
        reached = tl.where(enough, count, reached)
        high = tl.where(enough, high, middle)

    threshold = low.to(tl.int32)
    above = (keys > threshold).to(tl.int32)
    equal = (keys == threshold).to(tl.int32)
    ties = top_k - tl.sum(above, axis=0)
    # One scan counts both: above in the low 16 bits, equal in the high ones.
    counts = tl.cumsum(above + (equal << 16), axis=0)
    ties_before = tl.minimum(counts >> 16, ties)
    selected = (above > 0) | ((equal > 0) & (counts >> 16 <= ties))
    return selected, (counts & 0xFFFF) + ties_before, offs_c


@triton.jit
def _candidates(centroid, part, token_ordering_ptr, per_centroid, TILE: tl.constexpr):
    """Vocabulary ids of one tile of a centroid's candidates, and which of them exist."""
    offs = part * TILE + tl.arange(0, TILE)
    mask = offs < per_centroid
    ids = tl.load(token_ordering_ptr + centroid.to(tl.int64) * per_centroid + offs, mask=mask, other=0)
    return ids.to(tl.int32), mask


@triton.jit
def _load_tile(weight_ptr, stride_wv, ids, mask, hidden_size, BLOCK_H: tl.constexpr):
    """The weight rows of a tile of candidates `[TILE, BLOCK_H]`."""
    offs_h = tl.arange(0, BLOCK_H)
    w_ptrs = weight_ptr + ids.to(tl.int64)[:, None] * stride_wv + offs_h[None, :]
    return tl.load(w_ptrs, mask=mask[:, None] & (offs_h < hidden_size)[None, :], other=0.0)


@triton.jit
def _multiply(w, hidden_ptr, row, stride_hn, ids, hidden_size, suppress_ptr, num_suppressed, BLOCK_H: tl.constexpr):
    """Logits of a tile of candidates for one row, −inf at suppressed ids."""
    offs_h = tl.arange(0, BLOCK_H)
    x = tl.load(hidden_ptr + row * stride_hn + offs_h, mask=offs_h < hidden_size, other=0.0).to(tl.float32)
    logits = tl.sum(w.to(tl.float32) * x[None, :], axis=1)
    if suppress_ptr is not None:
        for i in range(num_suppressed):
            logits = tl.where(ids == tl.load(suppress_ptr + i), float("-inf"), logits)
    return logits


@triton.jit
def _best_of(logits, ids, mask, slot, row, temperature_ptr, seeds_ptr, positions_ptr):
    """The key of the tile's winner (`_winner.py`)."""
    temperature = tl.load(temperature_ptr + slot)
    scores = logits
    if temperature > 0.0:
        seed = tl.load(seeds_ptr + slot)
        position = tl.load(positions_ptr + row).to(tl.int64)
        scores = logits * tl.div_rn(1.0, temperature) + gumbel_at(seed, position, ids, _DRAFT)
    return winner_key(scores, ids, mask)


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
    hidden_size,
    num_suppressed,
    vocab_size,
    stride_hn,
    stride_wv,
    stride_flag,
    stride_out,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
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
        selected, rank, offs_c = _select(scores_ptr, row, num_centroids, top_k, BLOCK_C, GROUPS)
        best = nothing()
        first = tl.program_id(1) * tiles
        for item in range(first, tl.minimum(first + tiles, top_k * parts)):
            centroid = tl.sum(tl.where(selected & (rank == item // parts + 1), offs_c, 0), axis=0)
            ids, mask = _candidates(centroid, item % parts, token_ordering_ptr, per_centroid, TILE)
            w = _load_tile(weight_ptr, stride_wv, ids, mask, hidden_size, BLOCK_H)
            logits = _multiply(w, hidden_ptr, row, stride_hn, ids, hidden_size, suppress_ptr, num_suppressed, BLOCK_H)
            tile_best = _best_of(logits, ids, mask, slot, row, temperature_ptr, seeds_ptr, positions_ptr)
            best = tl.maximum(best, tile_best)
        _write_token(
            *(row, best, tl.num_programs(1), best_ptr, arrivals_ptr, suppress_ptr, num_suppressed, vocab_size),
            *(nan_flag_ptr, out_ptr, stride_flag, stride_out),
        )


@triton.jit(do_not_specialize=["num_rows"])
def select_kernel(
    scores_ptr,  # [N, C] f32
    idx_mapping_ptr,  # [N] int
    flags_ptr,  # [C, N] i8
    num_rows,
    num_centroids,
    top_k,
    BLOCK_C: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program n marks the centroids of row n; none for padding."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    flags_ptrs = flags_ptr + offs_c.to(tl.int64) * num_rows + row
    if tl.load(idx_mapping_ptr + row) >= 0:
        selected, _, _ = _select(scores_ptr, row, num_centroids, top_k, BLOCK_C, GROUPS)
        tl.store(flags_ptrs, selected.to(tl.int8), mask=offs_c < num_centroids)
    else:
        tl.store(flags_ptrs, tl.zeros((BLOCK_C,), tl.int8), mask=offs_c < num_centroids)


@triton.jit(do_not_specialize=["num_rows"])
def centroid_candidates_kernel(
    flags_ptr,  # [C, N] i8
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
    num_rows,
    top_k,
    per_centroid,
    parts,
    hidden_size,
    num_suppressed,
    vocab_size,
    stride_hn,
    stride_wv,
    stride_flag,
    stride_out,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, c): one tile of centroid c's candidates, read once for all rows that selected c."""
    pdl_wait(PDL)
    part = tl.program_id(0)
    centroid = tl.program_id(1).to(tl.int64)
    for start in range(0, num_rows, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        flags = tl.load(flags_ptr + centroid * num_rows + offs_n, mask=offs_n < num_rows, other=0) > 0
        row = tl.min(tl.where(flags, offs_n, num_rows), axis=0)
        if row < num_rows:
            ids, mask = _candidates(centroid, part, token_ordering_ptr, per_centroid, TILE)
            w = _load_tile(weight_ptr, stride_wv, ids, mask, hidden_size, BLOCK_H)
            while row < num_rows:
                row64 = row.to(tl.int64)
                logits = _multiply(
                    w, hidden_ptr, row64, stride_hn, ids, hidden_size, suppress_ptr, num_suppressed, BLOCK_H
                )
                slot = tl.load(idx_mapping_ptr + row64)
                best = _best_of(logits, ids, mask, slot, row64, temperature_ptr, seeds_ptr, positions_ptr)
                _write_token(
                    *(row64, best, top_k * parts, best_ptr, arrivals_ptr, suppress_ptr, num_suppressed, vocab_size),
                    *(nan_flag_ptr, out_ptr, stride_flag, stride_out),
                )
                row = tl.min(tl.where(flags & (offs_n > row), offs_n, num_rows), axis=0)


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
    hidden_size,
    num_suppressed,
    stride_hn,
    stride_wv,
    stride_on,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, t): `row_candidates_kernel`, its logits stored."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    selected, rank, offs_c = _select(scores_ptr, row, num_centroids, top_k, BLOCK_C, GROUPS)
    first = tl.program_id(1) * tiles
    for item in range(first, tl.minimum(first + tiles, top_k * parts)):
        centroid = tl.sum(tl.where(selected & (rank == item // parts + 1), offs_c, 0), axis=0)
        ids, mask = _candidates(centroid, item % parts, token_ordering_ptr, per_centroid, TILE)
        w = _load_tile(weight_ptr, stride_wv, ids, mask, hidden_size, BLOCK_H)
        logits = _multiply(w, hidden_ptr, row, stride_hn, ids, hidden_size, suppress_ptr, num_suppressed, BLOCK_H)
        tl.store(out_ptr + row * stride_on + ids, logits, mask=mask)


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
        row_block: rows `centroid_candidates_kernel` looks through at once.
    """

    score_block: int
    score_warps: int
    by_centroid: bool
    tile: int
    tiles: int
    num_warps: int
    row_block: int = 128

    def shared_memory(self, hidden_size: int, element_size: int) -> int:
        """Bytes the operands of the scores' dot take at most: two steps of them."""
        return 2 * (SCORE_ROWS + self.score_block) * score_columns(hidden_size) * element_size


SCORE_ROWS = 16  # the smallest tile of a dot, for every batch: with another shape a row's scores could differ


def score_columns(hidden_size: int) -> int:
    """Columns of one step of the scores' dot."""
    return max(16, min(next_power_of_2(hidden_size), 256))


def masked_embedding_launch(
    num_rows: int, num_centroids: int, vocab_size: int, hidden_size: int, top_k: int, arch: Arch
) -> MaskedEmbeddingLaunch:
    """Launch settings; `tile` and `num_warps` do not depend on `num_rows`, so a row's logits do not either."""
    per_centroid = vocab_size // num_centroids
    # 16 KB of weights in flight a program at hidden 256 in bf16 (64 bytes a thread twice over): one row then makes 128
    # programs, about one a multiprocessor. Wider rows, fewer of them.
    tile = max(1, min(next_power_of_2(per_centroid), 8192 // next_power_of_2(hidden_size)))
    parts = cdiv(per_centroid, tile)
    # Rows overlap in few centroids until they select about as many as there are: reading by centroid then saves more
    # than its third launch costs.
    by_centroid = num_rows * top_k > num_centroids
    # Every program selects for itself, so once all multiprocessors have several, each takes more of the row.
    programs = num_rows * top_k * parts
    tiles = min(4, max(1, programs // (arch.num_sms * 16)))
    # 16 centroids a program make 128 programs of 2,048; 8 KB each are too few to need more than two warps.
    return MaskedEmbeddingLaunch(16, 2, by_centroid, tile, tiles, num_warps=4)


def group_count(top_k: int) -> int:
    """Groups whose maxima bound the top_k-th score from below."""
    return next_power_of_2(top_k)


def launch_options(num_warps: int, arch: Arch) -> dict[str, Any]:
    """Keyword arguments of a launch."""
    return {"num_warps": num_warps, **pdl_options(arch)}
