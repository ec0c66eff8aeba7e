"""Draft sampling: one token id a row from its logits, in one pass over them.

    x[n, i]  = logits[n, i]                                        −inf for suppressed i
    token[n] = argmax_i  x[n, i] / T + gumbel(seed, position, i)   T = temperature of the row's request, T > 0
    token[n] = argmax_i  x[n, i]                                   T = 0

logits: `[N, V]` float, any row stride. Ties and NaN: `_argmax.py`. Noise: `random.py`, stream DRAFT, so that a token
depends on its request's seed, its position and its logits only. The Gumbel-max trick draws exactly from softmax(x / T).

Temperature and seed belong to a request: row n uses slot idx_mapping[n] of `[S]` tensors, and −1 marks a padding row.

Two launches: each program of the first reduces a part of one row to a (score, id) pair, the second one reduces the
pairs of a row. What the noise costs is cut by what it cannot do: a tile whose best logit plus the largest noise lies
below the best score so far draws no numbers; four ids of a counter whose best logit with their least word would not
reach that score take no logarithms. The bounds are safe: the result is that of doing it all.
"""

# Launch options are no parameters of a kernel, which a Python checker denies.
# pyright: reportCallIssue=false

from dataclasses import dataclass

import torch
from torch import Tensor

from tridraft.kernels._argmax import argmax_reference, eligible_ids, finish_argmax
from tridraft.kernels._op import (
    FLOATS,
    Arch,
    Impl,
    arch_of,
    cdiv,
    check_tensor,
    register,
    use_triton,
)
from tridraft.kernels._pdl import pdl_options
from tridraft.kernels._sampling_kernels import GROUP, LANES, sample_kernel
from tridraft.kernels.random import DRAFT, STRIP, gumbel
from tridraft.kernels.suppress import check_suppress_ids


def scores_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    stream: int = DRAFT,
) -> Tensor:
    """`[N, C]` float32, of which the largest wins. `token_ids` `[C]` holds the ids that key the columns' noise."""
    slots = idx_mapping.long().clamp(min=0)
    scale = temperature[slots]
    scores = logits.float()
    rows = (scale > 0).nonzero()[:, 0]
    if rows.numel():
        noise = gumbel(seeds[slots][rows, None], positions[rows, None], token_ids, stream)
        scores = scores.index_copy(0, rows, scores[rows] * (1 / scale[rows, None]) + noise)
    return scores


def sample_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    eligible: Tensor | None = None,
    stream: int = DRAFT,
) -> tuple[Tensor, Tensor]:
    """The definition of sampling from given columns; `eligible` `[C]` is False where suppressed.

    Returns:
        the winning column of each row `[N]` int64, and whether all its eligible logits are NaN `[N]` bool.
    """
    scores = scores_reference(logits, idx_mapping, temperature, seeds, positions, token_ids, stream)
    return argmax_reference(scores, eligible)


def draft_sample_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition: ids `[N]` int64 and all_nan `[N]` bool; rows of padding hold anything."""
    vocab_size, device = logits.shape[1], logits.device
    eligible = eligible_ids(vocab_size, suppress_ids, device)
    token_ids = torch.arange(vocab_size, device=device)
    return sample_reference(logits, idx_mapping, temperature, seeds, positions, token_ids, eligible)


def store_reference(tokens: Tensor, all_nan: Tensor, idx_mapping: Tensor, nan_flag: Tensor | None, out: Tensor) -> None:
    """Write the rows that are not padding."""
    active = idx_mapping >= 0
    out.copy_(torch.where(active, tokens.to(out.dtype), out))
    if nan_flag is not None:
        nan_flag.copy_(torch.where(active, all_nan.to(nan_flag.dtype), nan_flag))


@dataclass(frozen=True)
class SampleConfig:
    """Launch settings of the first stage.

    Attributes:
        width: ids a program takes of each strip of 1,024.
        groups_per_program: groups of four strips a program reduces to one pair.
        num_warps: of a program.
    """

    width: int
    groups_per_program: int
    num_warps: int


def sample_config(num_rows: int, vocab_size: int, itemsize: int, arch: Arch) -> SampleConfig:
    """The ladder. One warp a program: nothing in its loop waits at a barrier, and a lane loads 16 bytes of a strip,
    or 8 where there are too few programs else.

    Times in µs on an H200, 2026-11-30, 262,144 bf16 logits, greedy / temperature 1.
    """
    groups = cdiv(vocab_size, GROUP.value)
    if num_rows * vocab_size <= 4096 * arch.num_sms and groups <= 64:
        # One row, strips of 64 / 128 / 256 ids: 3.3 / 2.9 / 3.1 and 4.1 / 3.8 / 4.2.
        return SampleConfig(width=128, groups_per_program=1, num_warps=1)
    # As many programs as run at once, 16 a multiprocessor by their registers: a second wave waits for all the latencies
    # again, and each program has to find a bar of its own. Groups a program at 8 rows, 1 / 2: 4.7 / 4.5 and 6.8 / 6.7;
    # 32 rows, 2 / 4 / 6: 8.4 / 7.3 / 7.9 and 15.1 / 14.6 / 15.0; 128 rows, 8 / 16 / 22: 22.4 / 19.3 / 19.2 and 37.6 /
    # 36.3 / 36.5. Of 128 ids of a strip, at best 4.4, 7.7 and 19.1, and 7.0, 16.6 and 40.4.
    width = LANES.value * (16 // itemsize)
    num_tiles = num_rows * groups * (STRIP.value // width)
    groups_per_program = min(groups, max(2, cdiv(num_tiles, 16 * arch.num_sms), cdiv(groups, 128)))
    return SampleConfig(width=width, groups_per_program=groups_per_program, num_warps=1)


def _launch_draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None,
    draft_logits_out: Tensor | None,
    draft_step: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    arch = arch_of(logits.device)
    config = sample_config(num_rows, vocab_size, logits.element_size(), arch)
    num_groups = cdiv(vocab_size, GROUP.value)
    grid = (
        num_rows,
        cdiv(min(vocab_size, STRIP.value), config.width),
        cdiv(num_groups, config.groups_per_program),
    )
    num_parts = grid[1] * grid[2]
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    sample_kernel[grid](
        logits,
        idx_mapping,
        temperature,
        seeds,
        positions,
        suppress_ids,
        draft_logits_out,
        None if draft_logits_out is None else draft_step,
        values,
        ids,
        vocab_size,
        temperature.shape[0],
        0 if suppress_ids is None else suppress_ids.shape[0],
        num_groups,
        config.groups_per_program,
        logits.stride(0),
        0 if draft_logits_out is None else draft_logits_out.stride(0),
        0 if draft_logits_out is None else draft_logits_out.stride(1),
        STREAM=DRAFT,
        WIDTH=config.width,
        WHOLE=vocab_size % GROUP.value == 0,
        num_warps=config.num_warps,
        enable_fp_fusion=False,  # scores round as in the definition
        **pdl_options(arch),
    )
    finish_argmax(values, ids, idx_mapping, suppress_ids, None, nan_flag, out, vocab_size)


@register("draft_sample", mutates=("draft_logits_out", "nan_flag", "out"))
def _draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    suppress_ids: Tensor | None,
    draft_logits_out: Tensor | None,
    draft_step: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch_draft_sample(
            logits,
            idx_mapping,
            temperature,
            seeds,
            positions,
            suppress_ids,
            draft_logits_out,
            draft_step,
            nan_flag,
            out,
        )
        return
    tokens, all_nan = draft_sample_reference(logits, idx_mapping, temperature, seeds, positions, suppress_ids)
    store_reference(tokens, all_nan, idx_mapping, nan_flag, out)
    if draft_logits_out is not None and draft_step is not None:
        rows = (idx_mapping >= 0).nonzero()[:, 0]
        kept = logits[rows].masked_fill(logits[rows].isnan(), float("-inf"))
        if suppress_ids is not None:
            kept = kept.index_fill(1, suppress_ids, float("-inf"))
        slots = idx_mapping[rows].long()
        draft_logits_out[slots, draft_step.long(), : logits.shape[1]] = kept.to(draft_logits_out.dtype)


def check_sampling(
    num_rows: int,
    device: torch.device,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    nan_flag: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Refuse per-row and per-request arguments no sampler can take; returns `out`, allocated if it is None."""
    integers = (torch.int64, torch.int32)
    check_tensor("idx_mapping", idx_mapping, shape=(num_rows,), dtype=integers, device=device)
    check_tensor("temperature", temperature, shape=("S",), dtype=torch.float32, device=device)
    check_tensor("seeds", seeds, shape=(temperature.shape[0],), dtype=torch.int64, device=device)
    check_tensor("positions", positions, shape=(num_rows,), dtype=integers, device=device)
    if nan_flag is not None:
        check_tensor(
            "nan_flag",
            nan_flag,
            shape=(num_rows,),
            dtype=(torch.bool, torch.int32),
            device=device,
            contiguous_last=False,
        )
    if out is None:
        return torch.empty(num_rows, dtype=torch.int64, device=device)
    check_tensor("out", out, shape=(num_rows,), dtype=integers, device=device, contiguous_last=False)
    return out


def check_logits_out(
    draft_logits_out: Tensor | None, draft_step: Tensor | None, num_columns: int, device: torch.device
) -> None:
    """Refuse a cache of draft logits that cannot hold `num_columns`, or one without its step."""
    if draft_logits_out is None:
        return
    check_tensor("draft_logits_out", draft_logits_out, shape=("S", "K", "V"), dtype=FLOATS, device=device)
    if draft_logits_out.shape[2] < num_columns:
        raise ValueError(f"draft_logits_out: got {draft_logits_out.shape[2]} columns, needs {num_columns}")
    if draft_step is None:
        raise ValueError("draft_step: got None, needs a 0-d int tensor beside draft_logits_out")
    check_tensor("draft_step", draft_step, shape=(), dtype=(torch.int64, torch.int32), device=device)


def draft_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    suppress_ids: Tensor | None = None,
    draft_logits_out: Tensor | None = None,
    draft_step: Tensor | None = None,
    nan_flag: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sample one token a row: suppression, temperature, Gumbel-max or argmax in one pass over the logits.

    Args:
        logits: `[N, V]` float32, bfloat16 or float16, any row stride.
        idx_mapping: `[N]` int64 or int32, the request slot of each row; −1: padding, nothing is read or written.
        temperature: `[S]` float32 of each request slot, finite; 0 is greedy.
        seeds: `[S]` int64 of each request slot.
        positions: `[N]` int64 or int32, the position before the token being sampled.
        suppress_ids: `[n]` int64 ids that never win (see `make_suppress_ids`).
        draft_logits_out: `[S, K, ≥V]` float; receives what was sampled from, for the acceptance test: the logits before
            temperature, −inf where suppressed or NaN, at `[slot, draft_step, :V]`. Further columns are left alone.
        draft_step: 0-d int64 or int32 tensor.
        nan_flag: `[N]` bool or int32; receives whether all eligible logits of the row are NaN.
        out: `[N]` int64 or int32, any stride.
        impl: "auto", "triton" or "eager".

    Returns:
        `out`, or a new `[N]` int64 tensor, in which rows of padding hold anything.

    With vLLM's or SGLang's `[num_tokens, vocab_size]` logits, and per-request sampling tensors indexed by slot:

    >>> logits = torch.tensor([[-8.0, -3, -2, -1, 0, 9, 1, 2], [0, 0, 0, 7, 0, 0, 0, 0]])
    >>> temperature, seeds = torch.zeros(4), torch.arange(4)
    >>> draft_sample(logits, torch.tensor([2, 0]), temperature, seeds, torch.tensor([17, 40]))
    tensor([5, 3])
    """
    check_tensor("logits", logits, shape=("N", "V"), dtype=FLOATS)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise ValueError(f"logits: got shape {list(logits.shape)}, needs at least one column")
    device = logits.device
    out = check_sampling(num_rows, device, idx_mapping, temperature, seeds, positions, nan_flag, out)
    suppress_ids = check_suppress_ids(suppress_ids, device)
    check_logits_out(draft_logits_out, draft_step, vocab_size, device)
    triton = use_triton(impl, logits)
    if num_rows:
        _draft_sample(
            logits,
            idx_mapping,
            temperature,
            seeds,
            positions,
            suppress_ids,
            draft_logits_out,
            draft_step,
            nan_flag,
            out,
            triton,
        )
    return out
