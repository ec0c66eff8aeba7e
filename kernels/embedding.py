"""The input of a drafter that reads its target's embedding and hidden state side by side.

    out[t] = [scale · weight[ids[t]] ; hidden[t]]

One launch gathers, scales and concatenates. Gemma 4's assistant projects the result (its `pre_projection`).
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._op import (
    DEBUG,
    FLOATS,
    Impl,
    arch_of,
    cdiv,
    check_tensor,
    next_power_of_2,
    register,
    use_triton,
)
from tridraft.kernels._pdl import pdl_options, pdl_wait

_BLOCK = 1024


def embed_concat_reference(input_ids: Tensor, weight: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """The definition; see `embed_concat`."""
    return torch.cat((F.embedding(input_ids, weight) * scale, hidden), dim=-1)


@triton.jit(debug=DEBUG, do_not_specialize=["vocab_size"])
def _embed_concat_kernel(
    input_ids_ptr,  # [T] int
    weight_ptr,  # [V, E]
    hidden_ptr,  # [T, H]
    out_ptr,  # [T, E + H]
    vocab_size,
    embedding_size,
    hidden_size,
    stride_wv,
    stride_ht,
    stride_ot,
    scale,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(embedding_size, BLOCK)
    block = tl.program_id(1)
    pdl_wait(PDL)
    if block < blocks:
        offs = block * BLOCK + tl.arange(0, BLOCK)
        mask = offs < embedding_size
        row = tl.load(input_ids_ptr + token).to(tl.int64)
        tl.device_assert((row >= 0) & (row < vocab_size), "input_ids: outside the vocabulary")
        x = tl.load(weight_ptr + row * stride_wv + offs, mask=mask, other=0.0).to(tl.float32) * scale
        tl.store(out_ptr + token * stride_ot + offs, x.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        offs = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < hidden_size
        h = tl.load(hidden_ptr + token * stride_ht + offs, mask=mask, other=0.0)
        tl.store(out_ptr + token * stride_ot + embedding_size + offs, h, mask=mask)


@register("embed_concat", mutates=("out",))
def _embed_concat(input_ids: Tensor, weight: Tensor, hidden: Tensor, scale: float, out: Tensor, triton: bool) -> None:
    if not triton:
        out.copy_(embed_concat_reference(input_ids, weight, hidden, scale))
        return
    tokens, (vocab_size, embedding_size), hidden_size = input_ids.shape[0], weight.shape, hidden.shape[1]
    block = min(next_power_of_2(max(embedding_size, hidden_size)), _BLOCK)
    kernel: Any = _embed_concat_kernel[(tokens, cdiv(embedding_size, block) + cdiv(hidden_size, block))]
    kernel(
        *(input_ids, weight, hidden, out, vocab_size, embedding_size, hidden_size),
        *(weight.stride(0), hidden.stride(0), out.stride(0), scale),
        BLOCK=block,
        num_warps=4,
        **pdl_options(arch_of(hidden.device)),
    )


def embed_concat(
    input_ids: Tensor,
    weight: Tensor,
    hidden: Tensor,
    *,
    scale: float = 1.0,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Scaled embeddings and hidden states side by side, in one launch.

    Args:
        input_ids: `[T]` int32 or int64, from 0 to V − 1; not checked without `TRIDRAFT_DEBUG=1`.
        weight: `[V, E]` float32, bfloat16 or float16.
        hidden: `[T, H]` in `weight`'s dtype.
        scale: factor of the embeddings; the product is rounded once to their dtype.
        out: `[T, E + H]`, written and returned; must not overlap `hidden`.
        impl: "auto", "triton" or "eager".

    Returns:
        `[T, E + H]` in `weight`'s dtype.

    >>> weight, hidden = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[7.0]])
    >>> embed_concat(torch.tensor([1]), weight, hidden, scale=10.0)
    tensor([[30., 40.,  7.]])
    """
    device = weight.device
    check_tensor("weight", weight, shape=("V", "E"), dtype=FLOATS)
    check_tensor("input_ids", input_ids, shape=("T",), dtype=(torch.int32, torch.int64), device=device)
    tokens = input_ids.shape[0]
    check_tensor("hidden", hidden, shape=(tokens, "H"), dtype=weight.dtype, device=device)
    shape = (tokens, weight.shape[1] + hidden.shape[1])
    if out is None:
        out = weight.new_empty(shape)
    else:
        check_tensor("out", out, shape=shape, dtype=weight.dtype, device=device)
    triton = use_triton(impl, hidden)
    if tokens:
        _embed_concat(input_ids, weight, hidden, scale, out, triton)
    return out
