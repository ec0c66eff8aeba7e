"""Suppressed tokens: ids that must never be drafted or sampled.

    logits[n, i] = −inf    for i in token_ids

logits: `[N, V]` float, any row stride. token_ids: `[n]` int64 on the device, made once at load by `make_suppress_ids`:
a Python list would be copied to the device at each call, which a CUDA graph cannot record.

Every sampler of this library takes the same tensor as `suppress_ids` and applies it on the fly, so an engine needs
`suppress_tokens_` only in front of a sampler of its own.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportCallIssue=false

import operator
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._op import DEBUG, FLOATS, Impl, arch_of, cdiv, check_tensor, register, use_triton
from tridraft.kernels._pdl import pdl_options, pdl_wait


def make_suppress_ids(token_ids: Sequence[int] | None, vocab_size: int, device: torch.device | str) -> Tensor | None:
    """Validate a checkpoint's `suppress_tokens` and put it on the device, once, at load.

    Args:
        token_ids: ids of the target's vocabulary; None and an empty list suppress nothing.
        vocab_size: the target's.
        device: where the logits will be.

    Returns:
        the ids `[n]` int64, sorted and without duplicates, or None if there are none.

    Raises:
        ValueError: an id is no integer or out of range, or no token would be left.

    >>> make_suppress_ids([7, 3, 7], 10, "cpu")
    tensor([3, 7])
    """
    if token_ids is None or len(token_ids) == 0:
        return None
    unique = set()
    for token_id in token_ids:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise ValueError(f"token_ids: got {token_id!r}, needs integers")
        unique.add(operator.index(token_id))
    outside = sorted(i for i in unique if not 0 <= i < vocab_size)
    if outside:
        raise ValueError(f"token_ids: got {outside[0]}, needs ids in [0, {vocab_size})")
    if len(unique) == vocab_size:
        raise ValueError(f"token_ids: got all {vocab_size} ids, needs to leave at least one")
    return torch.tensor(sorted(unique), dtype=torch.int64, device=device)


def suppress_tokens_reference(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The definition: a new tensor with −inf in the columns `token_ids`."""
    return logits.index_fill(1, token_ids, float("-inf"))


@triton.jit(debug=DEBUG)
def _suppress_kernel(
    logits_ptr,  # [N, V] float
    token_ids_ptr,  # [n] i64
    vocab_size,
    num_ids,
    stride_n,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_ids
    ids = tl.load(token_ids_ptr + offs, mask=mask, other=0)
    tl.device_assert((ids >= 0) & (ids < vocab_size), "token_ids out of range")
    minus_inf = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride_n + ids, minus_inf.to(logits_ptr.dtype.element_ty), mask=mask)


_BLOCK = 32  # one warp, one id a lane: real lists hold two to a few dozen ids


def _launch_suppress(logits: Tensor, token_ids: Tensor) -> None:
    num_rows, vocab_size = logits.shape
    num_ids = token_ids.shape[0]
    _suppress_kernel[(num_rows, cdiv(num_ids, _BLOCK))](
        logits,
        token_ids,
        vocab_size,
        num_ids,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=1,
        **pdl_options(arch_of(logits.device)),
    )


@register("suppress_tokens_", mutates=("logits",))
def _suppress_tokens(logits: Tensor, token_ids: Tensor, triton: bool) -> None:
    if triton:
        _launch_suppress(logits, token_ids)
    else:
        logits.copy_(suppress_tokens_reference(logits, token_ids))


def check_suppress_ids(suppress_ids: Tensor | None, device: torch.device) -> Tensor | None:
    """Refuse a list no sampler can take; an empty one becomes None."""
    if suppress_ids is None:
        return None
    check_tensor("suppress_ids", suppress_ids, shape=("n",), dtype=torch.int64, device=device)
    return suppress_ids if suppress_ids.shape[0] else None


def suppress_tokens_(logits: Tensor, token_ids: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Set the logits of suppressed tokens to −inf, in place.

    Args:
        logits: `[N, V]` float32, bfloat16 or float16, any row stride.
        token_ids: `[n]` int64 on the same device, in range (see `make_suppress_ids`); duplicates are fine.
        impl: "auto", "triton" or "eager".

    Returns:
        `logits`.

    In front of vLLM's or SGLang's own sampler, whose logits are `[num_tokens, vocab_size]`:

    >>> suppress_ids = make_suppress_ids([1, 3], vocab_size=4, device="cpu")
    >>> suppress_tokens_(torch.zeros(1, 4), suppress_ids)
    tensor([[0., -inf, 0., -inf]])
    """
    check_tensor("logits", logits, shape=("N", "V"), dtype=FLOATS)
    check_tensor("token_ids", token_ids, shape=("n",), dtype=torch.int64, device=logits.device)
    triton = use_triton(impl, logits)
    if logits.shape[0] and token_ids.shape[0]:
        _suppress_tokens(logits, token_ids, triton)
    return logits
