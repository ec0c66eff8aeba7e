"""RMS norms, alone and fused with the residual stream.

    rms(x)[h] = x[h] / sqrt(mean(x²) + eps)

The weight multiplies as it is (not `1 + weight`). Everything between a load and a store is float32, so a fused
operation rounds once where a chain of PyTorch operations rounds at every step. Weights and scale are read before the
operation in front has ended (`_pdl.py`), which must not write them.
"""

# A constexpr and a tensor are one thing to Triton, and two to a Python checker.
# pyright: reportAttributeAccessIssue=false

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._op import FLOATS, Arch, Impl, arch_of, check_tensor, next_power_of_2, register, use_triton
from tridraft.kernels._pdl import pdl_options, pdl_wait


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`rms(x) * weight` over the last dimension, in `x`'s dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, post_weight: Tensor | None, scale: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual stream after `x` joined it, and its norm for the next block; the norm reads the rounded stream."""
    branch = x.float() if post_weight is None else rms_norm_reference(x.float(), post_weight, eps)
    stream = residual.float() + branch
    if scale is not None:
        stream = stream * scale.float()
    stream = stream.to(residual.dtype)
    return rms_norm_reference(stream, weight, eps), stream


@triton.jit
def _rms(x, eps, hidden):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H] or None
    out_ptr,  # [T, H]
    hidden,
    stride_xt,
    stride_ot,
    eps,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32) if weight_ptr is not None else 1.0
    pdl_wait(PDL)
    x = tl.load(x_ptr + token * stride_xt + offs_h, mask=mask_h, other=0.0)
    normed = _rms(x.to(tl.float32), eps, hidden) * weight
    tl.store(out_ptr + token * stride_ot + offs_h, normed.to(out_ptr.dtype.element_ty), mask=mask_h)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    post_weight_ptr,  # [H] or None
    scale_ptr,  # [1] or None
    normed_ptr,  # [T, H]
    stream_ptr,  # [T, H]
    hidden,
    stride_xt,
    stride_rt,
    stride_nt,
    stride_st,
    eps,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < hidden
    # After the wait the weights would queue behind those of the layer that this norm lets start.
    weight = tl.load(weight_ptr + offs_h, mask=mask_h, other=0.0)
    post_weight = tl.load(post_weight_ptr + offs_h, mask=mask_h, other=0.0) if post_weight_ptr is not None else 1.0
    scale = tl.load(scale_ptr).to(tl.float32) if scale_ptr is not None else 1.0
    pdl_wait(PDL)
    # Every load is issued before the first reduction waits for one.
    x = tl.load(x_ptr + token * stride_xt + offs_h, mask=mask_h, other=0.0)
    residual = tl.load(residual_ptr + token * stride_rt + offs_h, mask=mask_h, other=0.0)
    branch = x.to(tl.float32)
    if post_weight_ptr is not None:
        branch = _rms(branch, eps, hidden) * post_weight.to(tl.float32)
    stream = residual.to(tl.float32) + branch
    if scale_ptr is not None:
        stream *= scale
    stream = stream.to(stream_ptr.dtype.element_ty)
    tl.store(stream_ptr + token * stride_st + offs_h, stream, mask=mask_h)
    normed = _rms(stream.to(tl.float32), eps, hidden) * weight.to(tl.float32)
    tl.store(normed_ptr + token * stride_nt + offs_h, normed.to(normed_ptr.dtype.element_ty), mask=mask_h)


@dataclass(frozen=True)
class NormConfig:
    """Launch settings of a norm: a program holds a whole row of `block` columns in registers."""

    block: int
    num_warps: int


def norm_config(hidden: int, arch: Arch) -> NormConfig:
    """Eight elements a thread, one 16-byte load of a 16-bit row, up to 8 warps; a wider row gives each thread more.

    H200, 2026-11-30: [1, 256] takes 0.71 µs with 1 warp and 0.75 with 8, [1, 1024] 0.79 with 4 and 0.91 with 1 or 2;
    [4096, 2560] 11.5 with 8 and 14.5 with 16, whose sums cross more warps.
    """
    block = next_power_of_2(hidden)
    warp = 64 if arch.backend == "hip" else 32
    return NormConfig(block, max(1, min(8 if block <= 8192 else 16, block // (8 * warp))))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _pdl_options(hidden: int, arch: Arch) -> dict[str, int]:
    # Cold weights that are loaded ahead of a norm delay what it reads: four drafts of 8 requests, 12B (1,024 columns)
    # 1,523 µs if norms wait first and 1,587 if not, E2B (256) 495 and 486 (H200, 2026-12-01).
    return pdl_options(arch, early=False if hidden >= 1024 else None)


def _launch_rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
    x, out = _rows(x), out.view(-1, out.shape[-1])
    if not x.numel():
        return
    arch = arch_of(x.device)
    config = norm_config(x.shape[1], arch)
    launch: Any = _rms_norm_kernel[(x.shape[0],)]
    launch(
        x,
        weight,
        out,
        x.shape[1],
        x.stride(0),
        out.stride(0),
        eps,
        BLOCK_H=config.block,
        num_warps=config.num_warps,
        **_pdl_options(x.shape[1], arch),
    )


def _launch_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    post_weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    normed: Tensor,
    stream: Tensor,
) -> None:
    if not x.numel():
        return
    arch = arch_of(x.device)
    config = norm_config(x.shape[1], arch)
    launch: Any = _add_rms_norm_kernel[(x.shape[0],)]
    launch(
        x,
        residual,
        weight,
        post_weight,
        scale,
        normed,
        stream,
        x.shape[1],
        x.stride(0),
        residual.stride(0),
        normed.stride(0),
        stream.stride(0),
        eps,
        BLOCK_H=config.block,
        num_warps=config.num_warps,
        **_pdl_options(x.shape[1], arch),
    )


@register("rms_norm", mutates=("out",))
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor, triton: bool) -> None:
    if triton:
        _launch_rms_norm(x, weight, eps, out)
    else:
        out.copy_(rms_norm_reference(x, weight, eps))


@register("add_rms_norm", mutates=("normed", "stream"))
def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    post_weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    normed: Tensor,
    stream: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch_add_rms_norm(x, residual, weight, post_weight, scale, eps, normed, stream)
    else:
        values = add_rms_norm_reference(x, residual, weight, post_weight, scale, eps)
        normed.copy_(values[0])
        stream.copy_(values[1])


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, out: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    """Root-mean-square norm of the last dimension, times `weight`.

    Args:
        x: `[..., H]` float32, bfloat16 or float16.
        weight: `[H]`, any of those dtypes, or None.
        eps: added to the mean square.
        out: `[..., H]` in `x`'s dtype, written and returned; may be `x`. Contiguous from three dimensions on.
        impl: "triton", "eager", or "auto" for whichever the tensors can run.

    Returns:
        `[..., H]` in `x`'s dtype.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([[0.8485, 2.2627]])
    """
    check_tensor("x", x, dtype=FLOATS)
    if weight is not None:
        check_tensor("weight", weight, shape=(x.shape[-1],), dtype=FLOATS, device=x.device)
    if out is None:
        out = x.new_empty(x.shape)
    else:
        check_tensor("out", out, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
        if out.dim() > 2 and not out.is_contiguous():
            raise ValueError(f"out: got strides {list(out.stride())}, needs it contiguous from three dimensions on")
    _rms_norm(x, weight, eps, out, use_triton(impl, x))
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    post_weight: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a block's output to the residual stream and norm the stream for the next block.

        stream = (residual + (x, or rms(x) * post_weight)) * scale
        normed = rms(stream) * weight

    Args:
        x: `[T, H]`, what the block returned.
        residual: `[T, H]`, the stream before it, in `x`'s dtype.
        weight: `[H]`, the next block's norm.
        post_weight: `[H]`, this block's own output norm, or None.
        scale: `[1]`, a factor on the whole stream (Gemma 4's layer scalar), or None.
        eps: added to both mean squares.
        impl: "triton", "eager", or "auto" for whichever the tensors can run.

    Returns:
        `(normed, stream)`, both new; `normed` equals `rms_norm(stream, weight)`.

    >>> normed, stream = add_rms_norm(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), torch.ones(2))
    >>> stream
    tensor([[3., 4.]])
    """
    check_tensor("x", x, shape=("T", "H"), dtype=FLOATS)
    check_tensor("residual", residual, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
    check_tensor("weight", weight, shape=(x.shape[1],), dtype=FLOATS, device=x.device)
    if post_weight is not None:
        check_tensor("post_weight", post_weight, shape=(x.shape[1],), dtype=FLOATS, device=x.device)
    if scale is not None:
        check_tensor("scale", scale, shape=(1,), dtype=FLOATS, device=x.device)
    normed = x.new_empty(x.shape)
    stream = x.new_empty(x.shape)
    _add_rms_norm(x, residual, weight, post_weight, scale, eps, normed, stream, use_triton(impl, x))
    return normed, stream
