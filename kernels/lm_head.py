"""The head of a drafter and its sampler in one: token ids from hidden states, logits never written.

    z[n, i]  = softcap(scale[i] · Σ_h hidden[n, h] · weight[i, h])     softcap(z) = c · tanh(z / c)
    t[i]     = i + d2t[i]                                              the target id that row i of the weight stands for
    x[n, i]  = z[n, i]                                                 −inf where t[i] is suppressed
    token[n] = t[argmax_i  x[n, i] / T + gumbel(seed, position, t[i])]

hidden: `[N, H]`, weight: `[V, H]` as `torch.nn.Linear` holds it, in hidden's dtype or float8_e4m3fn with a scale a row
or one for all. A draft vocabulary is a smaller weight, rows picked once at load, with `d2t` holding offsets (EAGLE-3's
convention). Sums run in float32. Ties go to the lowest row of the weight; NaN: `_argmax.py`; noise: `random.py`.
"""

# A launch's options are no parameters of its kernel, whose flags are constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from tridraft.kernels._argmax import finish_argmax
from tridraft.kernels._lm_head_kernels import clear_kernel, lm_head_config, lm_head_kernel
from tridraft.kernels._op import (
    FLOATS,
    Impl,
    arch_of,
    cdiv,
    check_tensor,
    next_power_of_2,
    register,
    use_triton,
)
from tridraft.kernels._pdl import pdl_options
from tridraft.kernels.random import DRAFT
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
    num_blocks_k = cdiv(hidden_size, config.block_k)
    num_parts = min(cdiv(vocab_size, config.block_v), max(1, config.programs_per_sm * arch.num_sms // row_blocks))
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=hidden.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=hidden.device)
    num_suppressed = 0 if suppress_ids is None else suppress_ids.shape[0]
    block_s = min(max(16, next_power_of_2(num_suppressed)), 64)
    stride_os, stride_ok = (0, 0) if draft_logits_out is None else draft_logits_out.stride()[:2]
    if draft_logits_out is not None and d2t is not None:
        num_columns = draft_logits_out.shape[2]
        clear_kernel[(num_rows, cdiv(num_columns, 4096))](
            draft_logits_out,
            idx_mapping,
            draft_step,
            num_columns,
            stride_os,
            stride_ok,
            BLOCK=4096,
            **pdl_options(arch),
        )
    lm_head_kernel[(row_blocks, num_parts)](
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
        NUM_BLOCKS_K=num_blocks_k,
        BLOCK_S=block_s,
        MORE_SUPPRESSED=num_suppressed > block_s,
        EVEN_K=hidden_size % config.block_k == 0,
        REORDER=weight.element_size() == 1 and config.block_k >= 64,
        RESIDENT=config.resident > 0 or num_blocks_k == 1,
        FOLD=config.fold,
        ONE_ROW=num_rows == 1,
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
        temperature: `[S]` float32 of each request slot, finite; 0 is greedy.
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
