"""The one home of ties and NaN: which token wins a row of scores.

The largest score wins; among equal scores the lowest id. A NaN never wins. If no eligible score exceeds −inf, the row
gives the lowest eligible id, where every id is eligible but the suppressed ones; if all of them are NaN, it also sets
the row's NaN flag.

Kernels carry "not there" (suppressed, out of range) as NaN, because a maximum of floats skips NaN for nothing: the
maximum of a block is NaN only if nothing was there, and −inf only if something was.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._op import arch_of, next_power_of_2
from tridraft.kernels._pdl import pdl_options, pdl_wait


def argmax_reference(scores: Tensor, eligible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The winning id of each row and whether all its eligible scores are NaN.

    Args:
        scores: `[N, V]` float.
        eligible: `[V]` or `[N, V]` bool; None: every id.

    Returns:
        ids `[N]` int64 and all_nan `[N]` bool.
    """
    eligible = torch.ones_like(scores, dtype=torch.bool) if eligible is None else eligible.expand(scores.shape)
    present = eligible & ~scores.isnan()
    candidates = scores.masked_fill(~present, float("-inf"))
    fallback = eligible.int().argmax(dim=-1)
    ids = torch.where((candidates > float("-inf")).any(dim=-1), candidates.argmax(dim=-1), fallback)
    return ids, ~present.any(dim=-1)


def eligible_ids(vocab_size: int, suppress_ids: Tensor | None, device: torch.device) -> Tensor:
    """`[V]` bool: True but at the suppressed ids."""
    eligible = torch.ones(vocab_size, dtype=torch.bool, device=device)
    return eligible if suppress_ids is None else eligible.index_fill(0, suppress_ids, False)


@triton.jit
def is_nan(x):
    """Whether x is NaN: Triton has no function for it."""
    return x != x  # noqa: PLR0124


@triton.jit
def argmax_combine(value_a, id_a, value_b, id_b):
    """The better of two (score, id) pairs; NaN means not there."""
    take_a = (value_a > value_b) | ((value_a == value_b) & (id_a < id_b)) | is_nan(value_b)
    return tl.where(take_a, value_a, value_b), tl.where(take_a, id_a, id_b)


@triton.jit
def argmax(values, ids, axis: tl.constexpr):
    """(best score, its id) along `axis`: NaN if nothing is there."""
    return tl.reduce((values, ids), axis, argmax_combine)


@triton.jit
def is_suppressed(token_id, suppress_ptr, num_suppressed):
    """Whether a scalar id is in the list, of any length."""
    found = False
    for start in range(0, num_suppressed, 16):
        offs = start + tl.arange(0, 16)
        ids = tl.load(suppress_ptr + offs, mask=offs < num_suppressed, other=-1)
        found = found | (tl.max((ids == token_id).to(tl.int32), axis=0) > 0)
    return found


@triton.jit
def lowest_eligible(suppress_ptr, num_suppressed, d2t_ptr, vocab_size):
    """The lowest id of `vocab_size` that is not suppressed (as the target id it stands for).

    Runs only for a row without a finite candidate, so a search costs nothing that anyone waits for.
    """
    lowest = 0
    if suppress_ptr is not None:
        searching = vocab_size > 0
        while searching:
            target_id = lowest.to(tl.int64)
            if d2t_ptr is not None:
                target_id += tl.load(d2t_ptr + lowest)
            searching = is_suppressed(target_id, suppress_ptr, num_suppressed) & (lowest + 1 < vocab_size)
            lowest += searching.to(tl.int32)
    return lowest


@triton.jit(do_not_specialize=["num_partials"])
def _finish_kernel(
    values_ptr,  # [N, P] f32
    ids_ptr,  # [N, P] i32
    idx_mapping_ptr,  # [N] int
    suppress_ptr,  # [n] i64 or None
    d2t_ptr,  # [V] i64 or None
    nan_flag_ptr,  # [N] bool or i32, or None
    scores_ptr,  # [N] f32 or None
    out_ptr,  # [N] int
    num_partials,
    num_suppressed,
    vocab_size,
    stride_out,
    stride_flag,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_P)
    mask = offs < num_partials
    values = tl.load(values_ptr + row * num_partials + offs, mask=mask, other=float("nan"))
    ids = tl.load(ids_ptr + row * num_partials + offs, mask=mask, other=0)
    if tl.load(idx_mapping_ptr + row) >= 0:  # padding wrote no pairs
        best = tl.max(values, axis=0)
        token = tl.min(tl.where(values == best, ids, vocab_size), axis=0)
        if not best > float("-inf"):
            token = lowest_eligible(suppress_ptr, num_suppressed, d2t_ptr, vocab_size)
        target_id = token.to(tl.int64)
        if d2t_ptr is not None:
            target_id += tl.load(d2t_ptr + token)
        tl.store(out_ptr + row * stride_out, target_id.to(out_ptr.dtype.element_ty))
        if nan_flag_ptr is not None:
            tl.store(nan_flag_ptr + row * stride_flag, is_nan(best).to(nan_flag_ptr.dtype.element_ty))
        if scores_ptr is not None:
            tl.store(scores_ptr + row, tl.where(is_nan(best), float("-inf"), best))


def finish_argmax(
    values: Tensor,
    ids: Tensor,
    idx_mapping: Tensor,
    suppress_ids: Tensor | None,
    d2t: Tensor | None,
    nan_flag: Tensor | None,
    out: Tensor,
    vocab_size: int,
    scores: Tensor | None = None,
) -> None:
    """The second stage of a sampler: reduce each row's partial winners `[N, P]` to its token in `out`.

    `scores` `[N]` float32 receives the winners' scores, −inf where nothing was there.

    Programmatic dependent launch has it resident before the first stage ends, so it costs no launch gap.
    """
    block = max(64, next_power_of_2(values.shape[1]))
    _finish_kernel[(values.shape[0],)](
        values,
        ids,
        idx_mapping,
        suppress_ids,
        d2t,
        nan_flag,
        scores,
        out,
        values.shape[1],
        0 if suppress_ids is None else suppress_ids.shape[0],
        vocab_size,
        out.stride(0),
        0 if nan_flag is None else nan_flag.stride(0),
        BLOCK_P=block,
        num_warps=1 if block <= 256 else 4,
        **pdl_options(arch_of(out.device), early=True),
    )
