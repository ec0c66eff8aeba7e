"""The kernels of `lm_head.py` and their launch settings.

A persistent program walks over tiles of the vocabulary and keeps the best score of each element of a tile, or of every
four of a wide one; they are reduced to one pair a row at its end, and the pairs of all programs by `finish_argmax`.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import triton
import triton.language as tl

from tridraft.kernels._argmax import argmax, is_nan
from tridraft.kernels._op import DEBUG, Arch, cdiv, next_power_of_2
from tridraft.kernels._pdl import pdl_wait
from tridraft.kernels.random import gumbel_at


@triton.jit
def _softcap(z, softcap):
    """The soft cap c · tanh(z / c) to float32's accuracy: a series near 0, where 1 − exp(−2 |z / c|) cancels."""
    y = z / softcap
    s = y * y
    series = y * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
    t = tl.exp(-2.0 * tl.abs(y))
    tail = (1.0 - t) / (1.0 + t)
    return softcap * tl.where(s < 0.0625, series, tl.where(y < 0, -tail, tail))


@triton.jit
def _any_equal(target_ids, ids):
    """`[V]` bool: which of `[V]` target ids are among `[n]` ids."""
    return tl.max((target_ids[:, None] == ids[None, :]).to(tl.int32), axis=1) > 0


@triton.jit
def _dot_order(offs_k):
    """The column that each place of a row has in `_in_dot_order`."""
    return offs_k // 64 * 64 + offs_k // 2 % 4 * 16 + offs_k // 16 % 4 * 4 + offs_k // 8 % 2 * 2 + offs_k % 2


@triton.jit
def _in_dot_order(weight, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns of an 8-bit tile in another order, which a sum does not mind.

    A tensor core's thread takes 2 columns of every 8. In this order those of 64 columns are 16 bytes in a row, one read
    from shared memory, where in the stored order each byte would be one.
    """
    weight = tl.reshape(weight, (BLOCK_V, BLOCK_K // 64, 4, 4, 2, 2))
    return tl.reshape(tl.permute(weight, (0, 1, 3, 4, 2, 5)), (BLOCK_V, BLOCK_K))


@triton.jit
def _load_weight(ptrs, mask, dtype: tl.constexpr, REORDER: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of the weight, converted to dtype."""
    weight = tl.load(ptrs, mask=mask, other=0.0)
    if REORDER:
        weight = _in_dot_order(weight, BLOCK_V, BLOCK_K).to(tl.float16)
        if dtype == tl.bfloat16:
            # Through float32: of the conversions to bfloat16, only that from it takes two numbers an instruction.
            weight = weight.to(tl.float32)
    return weight.to(dtype)


@triton.jit
def _power_of_2(exponent):
    """2^exponent in float32, −126 ≤ exponent ≤ 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half(blocks, NUM_BLOCKS_K: tl.constexpr):
    """A row's columns in float16 and what undoes their scale, a power of 2 that brings the largest below 2^15.

    Exact for columns of at least 2^-29 of the largest, and to 2^-39 of it for the others.
    """
    largest = tl.abs(blocks[0].to(tl.float32))
    for block in tl.static_range(1, NUM_BLOCKS_K):
        largest = tl.maximum(largest, tl.abs(blocks[block].to(tl.float32)))
    exponent = (tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23) - 127
    shift = tl.maximum(exponent - 14, -126)
    scaled = ()
    for block in tl.static_range(NUM_BLOCKS_K):
        wide = blocks[block].to(tl.float32) * _power_of_2(-shift)[None, :]
        scaled = scaled + (wide.to(tl.float16),)  # noqa: RUF005  Triton has no other way
    return scaled, _power_of_2(shift)


@triton.jit
def _pieces(x, FOLD: tl.constexpr):
    """`[V, N]` as FOLD tensors `[V / FOLD, N]`.

    What a thread holds of a tensor core's result is spread over them; `_piece_rows` says which rows they are, ascending
    from piece to piece, so that of equal scores the lowest row comes first.
    """
    pieces = (x,)
    if FOLD == 4:
        rows: tl.constexpr = x.shape[0] // 4
        columns: tl.constexpr = x.shape[1]
        x = tl.permute(tl.reshape(x, (2, rows // 8, 2, 8, columns)), (1, 3, 4, 0, 2))
        even, odd = tl.split(x)
        a, b = tl.split(even)
        c, d = tl.split(odd)
        shape: tl.constexpr = (rows, columns)
        pieces = (tl.reshape(a, shape), tl.reshape(c, shape), tl.reshape(b, shape), tl.reshape(d, shape))
    return pieces


@triton.jit
def _piece_rows(piece: tl.constexpr, FOLD: tl.constexpr, BLOCK_V: tl.constexpr):
    """The rows of a tile in one of its pieces."""
    rows = tl.arange(0, BLOCK_V // FOLD)
    if FOLD == 4:
        rows = piece // 2 * (BLOCK_V // 2) + rows // 8 * 16 + piece % 2 * 8 + rows % 8
    return rows


@triton.jit(debug=DEBUG, do_not_specialize=["num_rows"])
def lm_head_kernel(
    hidden_ptr,  # [N, H] float
    weight_ptr,  # [V, H] as hidden, or f8
    weight_scale_ptr,  # [V] or [1] f32, or None
    idx_mapping_ptr,  # [N] int
    temperature_ptr,  # [S] f32
    seeds_ptr,  # [S] i64
    positions_ptr,  # [N] int
    suppress_ptr,  # [n] i64 or None
    d2t_ptr,  # [V] i64 or None
    logits_out_ptr,  # [S, K, >=V] float or None
    draft_step_ptr,  # [] int or None
    values_ptr,  # [N, P] f32
    ids_ptr,  # [N, P] i32
    num_rows,
    vocab_size,
    hidden_size,
    num_slots,
    num_suppressed,
    stride_hn,
    stride_wv,
    stride_sv,
    stride_os,
    stride_ok,
    softcap,
    STREAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_BLOCKS_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MORE_SUPPRESSED: tl.constexpr,
    EVEN_K: tl.constexpr,
    REORDER: tl.constexpr,
    RESIDENT: tl.constexpr,
    FOLD: tl.constexpr,
    ONE_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    # Programs of different rows and the same part are neighbours, so that all but one of them read weights from L2.
    part = tl.program_id(1)
    num_parts = tl.num_programs(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_v = tl.arange(0, BLOCK_V)
    offs_k = tl.arange(0, BLOCK_K)
    rows = offs_n.to(tl.int64)

    slots = tl.load(idx_mapping_ptr + offs_n, mask=offs_n < num_rows, other=-1).to(tl.int64)
    mask_n = slots >= 0
    tl.device_assert(slots < num_slots, "idx_mapping out of range")
    temperature = tl.load(temperature_ptr + slots, mask=mask_n, other=0.0)
    seeds = tl.load(seeds_ptr + slots, mask=mask_n, other=0)
    positions = tl.load(positions_ptr + rows, mask=mask_n, other=0).to(tl.int64)
    hot = temperature > 0
    inverse = tl.div_rn(tl.full((BLOCK_N,), 1.0, tl.float32), tl.where(hot, temperature, 1.0))
    any_hot = tl.max(hot.to(tl.int32), axis=0) > 0
    if suppress_ptr is not None:
        offs_s = tl.arange(0, BLOCK_S)
        suppress_ids = tl.load(suppress_ptr + offs_s, mask=offs_s < num_suppressed, other=-1)
    if logits_out_ptr is not None:
        step = tl.load(draft_step_ptr).to(tl.int64)
        out_ptrs = logits_out_ptr + slots * stride_os + step * stride_ok

    weight_offs = offs_v.to(tl.int64)[:, None] * stride_wv + offs_k[None, :]
    hidden_k = _dot_order(offs_k) if REORDER else offs_k
    hidden_ptrs = hidden_ptr + rows[None, :] * stride_hn + hidden_k[:, None]
    hidden_dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    # 8-bit weights become float16 in one instruction for two, bfloat16 in four.
    HALF: tl.constexpr = RESIDENT and REORDER and hidden_dtype == tl.bfloat16
    DTYPE: tl.constexpr = tl.float16 if HALF else hidden_dtype
    if RESIDENT:
        blocks = ()
        for block in tl.static_range(NUM_BLOCKS_K):
            hidden_mask = mask_n[None, :] & (hidden_k < hidden_size - block * BLOCK_K)[:, None]
            hidden = tl.load(hidden_ptrs + block * BLOCK_K, mask=hidden_mask, other=0.0)
            blocks = blocks + (hidden,)  # noqa: RUF005  Triton has no other way
        if HALF:
            blocks, unscale = _half(blocks, NUM_BLOCKS_K)

    # One loop over (vocabulary tile, block of H), so that loads run ahead across tiles. The best score and its tile are
    # kept for each element of the tile; they are reduced to one pair a row only once, at the end.
    best = tl.full((BLOCK_V // FOLD, BLOCK_N), float("nan"), tl.float32)
    best_id = tl.zeros((BLOCK_V // FOLD, BLOCK_N), tl.int32)
    acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    num_tiles = tl.cdiv(tl.cdiv(vocab_size, BLOCK_V) - part, num_parts)
    for step_index in range(num_tiles if RESIDENT else num_tiles * NUM_BLOCKS_K):
        # Functions of the step alone: what an earlier step decides would keep loads from running ahead of it.
        tile = part + (step_index if RESIDENT else step_index // NUM_BLOCKS_K) * num_parts
        first_v = tile * BLOCK_V
        mask_w = (offs_v < vocab_size - first_v)[:, None]
        weight_ptrs = weight_ptr + first_v.to(tl.int64) * stride_wv + weight_offs
        if RESIDENT:
            block_k = NUM_BLOCKS_K - 1
            acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
            for block in tl.static_range(NUM_BLOCKS_K):
                first_k = block * BLOCK_K
                mask = mask_w if EVEN_K else mask_w & (offs_k < hidden_size - first_k)[None, :]
                weight = _load_weight(weight_ptrs + first_k, mask, DTYPE, REORDER, BLOCK_V, BLOCK_K)
                acc = tl.dot(weight, blocks[block], acc, input_precision="ieee")
        else:
            block_k = step_index % NUM_BLOCKS_K
            first_k = block_k * BLOCK_K
            mask = mask_w if EVEN_K else mask_w & (offs_k < hidden_size - first_k)[None, :]
            weight = _load_weight(weight_ptrs + first_k, mask, DTYPE, REORDER, BLOCK_V, BLOCK_K)
            hidden_mask = mask_n[None, :]
            if not EVEN_K:
                hidden_mask = hidden_mask & (hidden_k < hidden_size - first_k)[:, None]
            hidden = tl.load(hidden_ptrs + first_k, mask=hidden_mask, other=0.0)
            if REORDER:
                # A product that starts from 0: ptxas serializes those whose sum other instructions have set.
                product = tl.dot(weight, hidden, input_precision="ieee")
                acc = tl.where(block_k == 0, product, acc + product)
            else:
                acc = tl.dot(weight, hidden, acc, input_precision="ieee")
        if block_k == NUM_BLOCKS_K - 1:
            pieces = _pieces(acc, FOLD)
            for piece in tl.static_range(FOLD):
                draft_ids = first_v + _piece_rows(piece, FOLD, BLOCK_V)
                mask_v = draft_ids < vocab_size
                x = pieces[piece]
                if HALF:
                    x = x * unscale[None, :]
                if weight_scale_ptr is not None:
                    x = x * tl.load(weight_scale_ptr + draft_ids * stride_sv, mask=mask_v, other=0.0)[:, None]
                if softcap is not None:
                    x = _softcap(x, softcap)
                target_ids = draft_ids.to(tl.int64)
                if d2t_ptr is not None:
                    target_ids += tl.load(d2t_ptr + draft_ids, mask=mask_v, other=0)
                eligible = mask_v
                if suppress_ptr is not None:
                    eligible = eligible & ~_any_equal(target_ids, suppress_ids)
                    if MORE_SUPPRESSED:
                        for start in range(BLOCK_S, num_suppressed, BLOCK_S):
                            mask_s = start + offs_s < num_suppressed
                            more = tl.load(suppress_ptr + start + offs_s, mask=mask_s, other=-1)
                            eligible = eligible & ~_any_equal(target_ids, more)
                x = tl.where(eligible[:, None], x, float("nan"))
                if logits_out_ptr is not None:
                    kept = tl.where(is_nan(x), float("-inf"), x).to(logits_out_ptr.dtype.element_ty)
                    tl.store(out_ptrs[None, :] + target_ids[:, None], kept, mask=mask_v[:, None] & mask_n[None, :])
                if any_hot:
                    if ONE_ROW:  # no noise for the other columns of the tile
                        noise = gumbel_at(tl.sum(seeds), tl.sum(positions), target_ids, STREAM)[:, None]
                    else:
                        noise = gumbel_at(seeds[None, :], positions[None, :], target_ids[:, None], STREAM)
                    x = tl.where(hot[None, :], x * inverse[None, :] + noise, x)
                take = (x > best) | is_nan(best)
                best = tl.where(take, x, best)
                best_id = tl.where(take, draft_ids[:, None], best_id)
            if not RESIDENT and not REORDER:
                acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)

    value, draft_id = argmax(best, best_id, 0)
    offset = rows * num_parts + part
    tl.store(values_ptr + offset, value, mask=mask_n)
    tl.store(ids_ptr + offset, draft_id, mask=mask_n)


@triton.jit
def clear_kernel(
    logits_out_ptr,  # [S, K, V] float
    idx_mapping_ptr,  # [N] int
    draft_step_ptr,  # [] int
    num_columns,
    stride_os,
    stride_ok,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    slot = tl.load(idx_mapping_ptr + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        step = tl.load(draft_step_ptr).to(tl.int64)
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        minus_inf = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits_out_ptr.dtype.element_ty)
        tl.store(logits_out_ptr + slot * stride_os + step * stride_ok + offs, minus_inf, mask=offs < num_columns)


@dataclass(frozen=True)
class LmHeadConfig:
    """Launch settings.

    Attributes:
        block_n: rows of a program.
        block_v: vocabulary rows of a tile.
        block_k: columns of a step.
        num_stages: steps in flight, or tiles if columns are resident.
        num_warps: of a program.
        programs_per_sm: persistent programs, each walking over vocabulary tiles.
        resident: columns of the hidden states kept in shared memory: 0, or all of them in whole steps.
        fold: elements of a tile that share a best score, 1 or 4.
    """

    block_n: int
    block_v: int
    block_k: int
    num_stages: int
    num_warps: int
    programs_per_sm: int
    resident: int = 0
    fold: int = 1

    def shared_memory(self, hidden_bytes: int, weight_bytes: int, arch: Arch) -> int:
        """Bytes of the operands in flight: where the tensor cores read them from registers, one stage needs none."""
        converted = self.resident and weight_bytes < hidden_bytes  # in registers
        reads_shared = arch.backend == "cuda" and 90 <= arch.capability < 120 and not converted
        buffers = self.num_stages if reads_shared else max(1, self.num_stages - 1)
        weights = buffers * (self.resident or self.block_k) * self.block_v * weight_bytes
        return weights + (self.resident or buffers * self.block_k) * self.block_n * hidden_bytes


def lm_head_config(num_rows: int, hidden_size: int, hidden_bytes: int, weight_bytes: int, arch: Arch) -> LmHeadConfig:
    """The ladder. How a row's sum rounds must not depend on the number of rows.

    A sum of 16-bit products goes 16 columns after 16 whatever `block_k`; with 8-bit weights it is also a matter of
    `block_k` and of what is resident.
    """
    # 64 × 256 is one matrix instruction of a warpgroup high and all of a small drafter's H wide.
    widest = 64 if hidden_bytes == 4 else 256 if arch.shared_memory >= 160_000 else 128
    block_k = min(max(16, next_power_of_2(hidden_size)), widest)
    if arch[:2] == ("cuda", 90) and hidden_bytes == weight_bytes == 2 and num_rows > 32 and hidden_size > block_k:
        # Many rows wait for operands to come from L2 and from shared memory; larger tiles need fewer. H 1,024 (H200,
        # 2026-11-30; tiles of 64 × 64 in brackets): 64 rows 138 (146), at temperature 1 223 (257); 128 rows in tiles of
        # 64 221 (270) and 398 (500), in one of 128 9% and 11% less. That in 8 warps takes 785 at temperature 1.
        block_n, num_warps = (64, 8) if num_rows <= 64 else (128, 16)
        return LmHeadConfig(block_n, 128, 64, 5, num_warps, 1, fold=4)
    # Tensor cores from one row on: a 16-wide tile costs nothing beside its weights, and one path means one rounding.
    # 64 rows at most: a wider tile would hold scores, ids and noise of more elements than a thread has registers for.
    block_n = min(max(16, next_power_of_2(num_rows)), 64)
    block_v = 64
    # 32 rows in 4 warps spill: 65.9 against 36.0 (H200, 2026-11-30, H 256).
    num_warps = 4 if block_n <= 16 else 8
    # One program a multiprocessor, three tiles ahead of itself: 123 at H 1,024, two programs of three stages 124. At
    # H 256 both take 34.4, but two share the noise of a tile: 16 rows at temperature 1 37.0 instead of 50.1. Converting
    # 8-bit weights takes longer than loading them, so two programs share it: 69.3 at H 1,024 against 72.3 in one.
    pairs = ()
    if num_warps == 4 and weight_bytes == 1:
        pairs = ((2, 4), (2, 3), (2, 2))
    elif num_warps == 4 and hidden_size <= block_k:
        pairs = ((2, 3),)
    converted, whole = weight_bytes == 1 and hidden_bytes == 2, weight_bytes == hidden_bytes and hidden_size <= block_k
    columns = cdiv(hidden_size, block_k) * block_k if converted or whole else 0
    if LmHeadConfig(64, block_v, block_k, 2, 8, 1, columns).shared_memory(2, 1, arch) + 16_384 > arch.shared_memory:
        columns = 0  # they must fit with 64 rows, or those of fewer would round otherwise
    for programs_per_sm, num_stages in (*pairs, (1, 4), (1, 3), (1, 2)):
        config = LmHeadConfig(block_n, block_v, block_k, num_stages, num_warps, programs_per_sm, columns)
        if programs_per_sm * (config.shared_memory(hidden_bytes, weight_bytes, arch) + 2048) <= arch.shared_memory:
            return config
    raise ValueError(f"no launch settings fit {arch.shared_memory} B of shared memory")
