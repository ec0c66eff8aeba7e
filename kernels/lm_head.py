"""The head of a drafter and its sampler in one: token ids from hidden states, logits never written.

    z[n, i]  = softcap(scale[i] · Σ_h hidden[n, h] · weight[i, h])     softcap(z) = c · tanh(z / c)
    t[i]     = i + d2t[i]                                              the target id that row i of the weight stands for
    x[n, i]  = z[n, i]                                                 −inf where t[i] is suppressed
    token[n] = t[argmax_i  x[n, i] / T + gumbel(seed, position, t[i])]

hidden: `[N, H]`, weight: `[V, H]` as `torch.nn.Linear` holds it, in hidden's dtype or float8_e4m3fn with a scale a row
or one for all. A draft vocabulary is a smaller weight, rows picked once at load, with `d2t` holding offsets (EAGLE-3's
convention). Sums run in float32. Ties go to the lowest row of the weight; NaN: `_argmax.py`; noise: `random.py`.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._argmax import argmax, finish_argmax, is_nan
from tridraft.kernels._op import (
    DEBUG,
    FLOATS,
    Arch,
    Impl,
    arch_of,
    cdiv,
    check_tensor,
    next_power_of_2,
    register,
    use_triton,
)
from tridraft.kernels._pdl import pdl_options, pdl_wait
from tridraft.kernels.random import DRAFT, gumbel_at
from tridraft.kernels.sampling import (
    check_logits_out,
    check_sampling,
    sample_reference,
    scores_reference,
    store_reference,
)
from tridraft.kernels.suppress import check_suppress_ids


def lm_head_reference(
    hidden: Tensor, weight: Tensor, weight_scale: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    """The logits `[N, V]` float32, before suppression and temperature."""
    logits = hidden.float() @ weight.float().T
    if weight_scale is not None:
        logits = logits * weight_scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def target_ids(num_rows: int, d2t: Tensor | None, device: torch.device) -> Tensor:
    """`[V]` int64, the target id of each row of the weight."""
    draft_ids = torch.arange(num_rows, device=device)
    return draft_ids if d2t is None else draft_ids + d2t


def lm_head_sample_reference(
    hidden: Tensor,
    weight: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    weight_scale: Tensor | None = None,
    softcap: float | None = None,
    suppress_ids: Tensor | None = None,
    d2t: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: target ids `[N]` int64 and all_nan `[N]` bool; rows of padding hold anything."""
    logits = lm_head_reference(hidden, weight, weight_scale, softcap)
    targets = target_ids(weight.shape[0], d2t, hidden.device)
    eligible = None if suppress_ids is None else ~torch.isin(targets, suppress_ids)
    rows, all_nan = sample_reference(logits, idx_mapping, temperature, seeds, positions, targets, eligible)
    return targets[rows], all_nan


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


@triton.jit(debug=DEBUG, do_not_specialize=["num_rows"])
def _lm_head_kernel(
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
    if NUM_BLOCKS_K == 1:
        hidden = tl.load(hidden_ptrs, mask=mask_n[None, :] & (hidden_k[:, None] < hidden_size), other=0.0)

    # One loop over (vocabulary tile, block of H), so that loads run ahead across tiles. The best score and its tile are
    # kept for each element of the tile; they are reduced to one pair a row only once, at the end.
    best = tl.full((BLOCK_V, BLOCK_N), float("nan"), tl.float32)
    best_tile = tl.zeros((BLOCK_V, BLOCK_N), tl.int32)
    acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
    num_tiles = tl.cdiv(tl.cdiv(vocab_size, BLOCK_V) - part, num_parts)
    for step_index in range(num_tiles * NUM_BLOCKS_K):
        # Functions of the step alone: what an earlier step decides would keep loads from running ahead of it.
        tile = part + step_index // NUM_BLOCKS_K * num_parts
        block_k = step_index % NUM_BLOCKS_K
        first_v = tile * BLOCK_V
        first_k = block_k * BLOCK_K
        weight_mask = (offs_v < vocab_size - first_v)[:, None]
        if not EVEN_K:
            weight_mask = weight_mask & (offs_k < hidden_size - first_k)[None, :]
        weight_ptrs = weight_ptr + first_v.to(tl.int64) * stride_wv + first_k + weight_offs
        weight = tl.load(weight_ptrs, mask=weight_mask, other=0.0)
        if NUM_BLOCKS_K > 1:
            hidden_mask = mask_n[None, :]
            if not EVEN_K:
                hidden_mask = hidden_mask & (hidden_k < hidden_size - first_k)[:, None]
            hidden = tl.load(hidden_ptrs + first_k, mask=hidden_mask, other=0.0)
        if REORDER:
            # Through float32: of the conversions to bfloat16, only that from float32 takes two numbers an instruction.
            weight = _in_dot_order(weight, BLOCK_V, BLOCK_K).to(tl.float16).to(tl.float32)
        acc = tl.dot(weight.to(hidden.dtype), hidden, acc, input_precision="ieee")
        if block_k == NUM_BLOCKS_K - 1:
            draft_ids = first_v + offs_v
            mask_v = draft_ids < vocab_size
            x = acc
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
                        more = tl.load(suppress_ptr + start + offs_s, mask=start + offs_s < num_suppressed, other=-1)
                        eligible = eligible & ~_any_equal(target_ids, more)
            x = tl.where(eligible[:, None], x, float("nan"))
            if logits_out_ptr is not None:
                kept = tl.where(is_nan(x), float("-inf"), x).to(logits_out_ptr.dtype.element_ty)
                tl.store(out_ptrs[None, :] + target_ids[:, None], kept, mask=mask_v[:, None] & mask_n[None, :])
            if any_hot:
                noise = gumbel_at(seeds[None, :], positions[None, :], target_ids[:, None], STREAM)
                x = tl.where(hot[None, :], x * inverse[None, :] + noise, x)
            take = (x > best) | is_nan(best)
            best = tl.where(take, x, best)
            best_tile = tl.where(take, tile, best_tile)
            acc = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)

    value, draft_id = argmax(best, best_tile * BLOCK_V + offs_v[:, None], 0)
    offset = rows * num_parts + part
    tl.store(values_ptr + offset, value, mask=mask_n)
    tl.store(ids_ptr + offset, draft_id, mask=mask_n)


@triton.jit
def _clear_kernel(
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
        num_stages: steps in flight.
        num_warps: of a program.
        programs_per_sm: persistent programs, each walking over vocabulary tiles.
    """

    block_n: int
    block_v: int
    block_k: int
    num_stages: int
    num_warps: int
    programs_per_sm: int

    def shared_memory(self, hidden_bytes: int, weight_bytes: int, arch: Arch) -> int:
        """Bytes of the operands in flight: where the tensor cores read them from registers, one stage needs none."""
        reads_shared = arch.backend == "cuda" and 90 <= arch.capability < 120
        buffers = self.num_stages if reads_shared else max(1, self.num_stages - 1)
        return buffers * self.block_k * (self.block_v * weight_bytes + self.block_n * hidden_bytes)


def lm_head_config(num_rows: int, hidden_size: int, hidden_bytes: int, weight_bytes: int, arch: Arch) -> LmHeadConfig:
    """The ladder. `block_k` must not depend on the number of rows: it would move how a row's sum rounds."""
    # Tensor cores from one row on: a 16-wide tile costs nothing beside its weights, and one path means one rounding.
    # 64 rows at most: a wider tile would hold scores, ids and noise of more elements than a thread has registers for.
    block_n = min(max(16, next_power_of_2(num_rows)), 64)
    # 64 × 256 is one matrix instruction of a warpgroup high and all of a small drafter's H wide.
    widest = 64 if hidden_bytes == 4 else 256 if arch.shared_memory >= 160_000 else 128
    block_k = min(max(16, next_power_of_2(hidden_size)), widest)
    block_v = 64
    # 32 rows in 4 warps spill: 65.9 against 36.0 (H200, 2026-11-30, H 256).
    num_warps = 4 if block_n <= 16 else 8
    # One program a multiprocessor, three tiles ahead of itself: 34.2 at H 256 and one row, two programs of three stages
    # 34.4, of two 35.6, six stages 34.7. Converting 8-bit weights takes longer than loading them, so two programs share
    # it: 21.7 at H 256 and 85.8 at H 1,024 against 24.3 and 140.
    pairs = ((2, 4), (2, 3)) if weight_bytes == 1 and num_warps == 4 else ()
    for programs_per_sm, num_stages in (*pairs, (1, 4), (1, 3), (1, 2)):
        config = LmHeadConfig(block_n, block_v, block_k, num_stages, num_warps, programs_per_sm)
        if programs_per_sm * (config.shared_memory(hidden_bytes, weight_bytes, arch) + 2048) <= arch.shared_memory:
            return config
    raise ValueError(f"no launch settings fit {arch.shared_memory} B of shared memory")


def _launch_lm_head_sample(
    hidden: Tensor,
    weight: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    weight_scale: Tensor | None,
    softcap: float | None,
    suppress_ids: Tensor | None,
    d2t: Tensor | None,
    draft_logits_out: Tensor | None,
    draft_step: Tensor | None,
    nan_flag: Tensor | None,
    scores_out: Tensor | None,
    out: Tensor,
) -> None:
    num_rows, hidden_size = hidden.shape
    vocab_size = weight.shape[0]
    arch = arch_of(hidden.device)
    config = lm_head_config(num_rows, hidden_size, hidden.element_size(), weight.element_size(), arch)
    row_blocks = cdiv(num_rows, config.block_n)
    num_parts = min(cdiv(vocab_size, config.block_v), max(1, config.programs_per_sm * arch.num_sms // row_blocks))
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=hidden.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=hidden.device)
    num_suppressed = 0 if suppress_ids is None else suppress_ids.shape[0]
    block_s = min(max(16, next_power_of_2(num_suppressed)), 64)
    stride_os, stride_ok = (0, 0) if draft_logits_out is None else draft_logits_out.stride()[:2]
    if draft_logits_out is not None and d2t is not None:
        num_columns = draft_logits_out.shape[2]
        _clear_kernel[(num_rows, cdiv(num_columns, 4096))](
            draft_logits_out,
            idx_mapping,
            draft_step,
            num_columns,
            stride_os,
            stride_ok,
            BLOCK=4096,
            **pdl_options(arch),
        )
    _lm_head_kernel[(row_blocks, num_parts)](
        hidden,
        weight,
        weight_scale,
        idx_mapping,
        temperature,
        seeds,
        positions,
        suppress_ids,
        d2t,
        draft_logits_out,
        None if draft_logits_out is None else draft_step,
        values,
        ids,
        num_rows,
        vocab_size,
        hidden_size,
        temperature.shape[0],
        num_suppressed,
        hidden.stride(0),
        weight.stride(0),
        0 if weight_scale is None or weight_scale.shape[0] == 1 else 1,
        stride_os,
        stride_ok,
        softcap,
        STREAM=DRAFT,
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        BLOCK_K=config.block_k,
        NUM_BLOCKS_K=cdiv(hidden_size, config.block_k),
        BLOCK_S=block_s,
        MORE_SUPPRESSED=num_suppressed > block_s,
        EVEN_K=hidden_size % config.block_k == 0,
        REORDER=weight.element_size() == 1 and config.block_k >= 64,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(arch),
    )
    finish_argmax(values, ids, idx_mapping, suppress_ids, d2t, nan_flag, out, vocab_size, scores_out)


@register("lm_head_sample", mutates=("draft_logits_out", "nan_flag", "scores_out", "out"))
def _lm_head_sample(
    hidden: Tensor,
    weight: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    weight_scale: Tensor | None,
    softcap: float | None,
    suppress_ids: Tensor | None,
    d2t: Tensor | None,
    draft_logits_out: Tensor | None,
    draft_step: Tensor | None,
    nan_flag: Tensor | None,
    scores_out: Tensor | None,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch_lm_head_sample(
            hidden,
            weight,
            idx_mapping,
            temperature,
            seeds,
            positions,
            weight_scale,
            softcap,
            suppress_ids,
            d2t,
            draft_logits_out,
            draft_step,
            nan_flag,
            scores_out,
            out,
        )
        return
    tokens, all_nan = lm_head_sample_reference(
        hidden, weight, idx_mapping, temperature, seeds, positions, weight_scale, softcap, suppress_ids, d2t
    )
    store_reference(tokens, all_nan, idx_mapping, nan_flag, out)
    if scores_out is not None:
        logits = lm_head_reference(hidden, weight, weight_scale, softcap)
        targets = target_ids(weight.shape[0], d2t, hidden.device)
        scores = scores_reference(logits, idx_mapping, temperature, seeds, positions, targets)
        won = (targets == tokens[:, None]) & ~all_nan[:, None]
        best = torch.where(won, scores, float("-inf")).amax(dim=1)
        scores_out.copy_(torch.where(idx_mapping >= 0, best, scores_out))
    if draft_logits_out is not None and draft_step is not None:
        rows = (idx_mapping >= 0).nonzero()[:, 0]
        logits = lm_head_reference(hidden[rows], weight, weight_scale, softcap)
        logits = logits.masked_fill(logits.isnan(), float("-inf")).to(draft_logits_out.dtype)
        targets = target_ids(weight.shape[0], d2t, hidden.device)
        width = weight.shape[0] if d2t is None else draft_logits_out.shape[2]
        kept = logits.new_full((rows.shape[0], width), float("-inf"))
        kept[:, targets] = logits
        if suppress_ids is not None:
            kept[:, suppress_ids[suppress_ids < width]] = float("-inf")
        draft_logits_out[idx_mapping[rows].long(), draft_step.long(), :width] = kept


def lm_head_sample(
    hidden: Tensor,
    weight: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    weight_scale: Tensor | None = None,
    softcap: float | None = None,
    suppress_ids: Tensor | None = None,
    d2t: Tensor | None = None,
    draft_logits_out: Tensor | None = None,
    draft_step: Tensor | None = None,
    nan_flag: Tensor | None = None,
    scores_out: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Project hidden states on the vocabulary and sample one token a row, without writing the logits.

    Args:
        hidden: `[N, H]` float32, bfloat16 or float16, any row stride; N up to a few hundred.
        weight: `[V, H]` in hidden's dtype or float8_e4m3fn, any row stride.
        idx_mapping: `[N]` int64 or int32, the request slot of each row; −1: padding, nothing is read or written.
        temperature: `[S]` float32 of each request slot; 0 is greedy.
        seeds: `[S]` int64 of each request slot.
        positions: `[N]` int64 or int32, the position before the token being sampled.
        weight_scale: `[V]` or `[1]` float32, by which a row of the weight (all of them) is multiplied.
        softcap: c of c · tanh(z / c).
        suppress_ids: `[n]` int64 target ids that never win (see `make_suppress_ids`).
        d2t: `[V]` int64 offsets, target id − row of the weight.
        draft_logits_out: `[S, K, ≥V]` float; receives what was sampled from, the logits before temperature, at
            `[slot, draft_step]` in the column of the target id; −inf where suppressed or NaN. Without `d2t` the first V
            columns are written; with it every column is, −inf outside the draft vocabulary.
        draft_step: 0-d int64 or int32 tensor.
        nan_flag: `[N]` bool or int32; receives whether all eligible logits of the row are NaN.
        scores_out: `[N]` float32; receives the winner's score, logit / T + noise, or −inf where none exceeds that. The
            largest over several shards of a vocabulary is the whole vocabulary's winner.
        out: `[N]` int64 or int32, any stride.
        impl: "auto", "triton" or "eager".

    Returns:
        `out`, or a new `[N]` int64 tensor of target ids, in which rows of padding hold anything.

    A row's token does not depend on the other rows, on their number or on padding.

    With a tied head as vLLM and SGLang hold it (`lm_head.weight`, one shard):

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.1, 9.0], [0.7, 0.0], [0.4, 0.0]])
    >>> row, greedy, seeds = torch.tensor([0]), torch.zeros(1), torch.tensor([1234])
    >>> lm_head_sample(hidden, weight, row, greedy, seeds, torch.tensor([17]), softcap=30.0)
    tensor([1])
    """
    check_tensor("hidden", hidden, shape=("N", "H"), dtype=FLOATS)
    num_rows, hidden_size = hidden.shape
    device = hidden.device
    check_tensor("weight", weight, shape=("V", hidden_size), dtype=(hidden.dtype, torch.float8_e4m3fn), device=device)
    vocab_size = weight.shape[0]
    if vocab_size == 0 or hidden_size == 0:
        raise ValueError(f"weight: got shape {list(weight.shape)}, needs at least one row and column")
    if weight_scale is not None:
        shape = (1,) if isinstance(weight_scale, Tensor) and weight_scale.numel() == 1 else (vocab_size,)
        check_tensor("weight_scale", weight_scale, shape=shape, dtype=torch.float32, device=device)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: got {softcap}, needs a positive number or None")
    if d2t is not None:
        check_tensor("d2t", d2t, shape=(vocab_size,), dtype=torch.int64, device=device)
    out = check_sampling(num_rows, device, idx_mapping, temperature, seeds, positions, nan_flag, out)
    suppress_ids = check_suppress_ids(suppress_ids, device)
    check_logits_out(draft_logits_out, draft_step, vocab_size, device)
    if scores_out is not None:
        check_tensor("scores_out", scores_out, shape=(num_rows,), dtype=torch.float32, device=device)
    triton = use_triton(impl, hidden)
    if triton and weight.dtype == torch.float8_e4m3fn:
        arch = arch_of(device)
        if arch.backend == "cuda" and arch.capability < 89:
            raise TypeError(f"weight: got float8_e4m3fn on sm_{arch.capability}, needs sm_89 or impl='eager'")
    if num_rows:
        _lm_head_sample(
            hidden,
            weight,
            idx_mapping,
            temperature,
            seeds,
            positions,
            weight_scale,
            softcap,
            suppress_ids,
            d2t,
            draft_logits_out,
            draft_step,
            nan_flag,
            scores_out,
            out,
            triton,
        )
    return out
