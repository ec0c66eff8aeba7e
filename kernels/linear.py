"""Linear layers of a few rows, as a draft step has them.

    out[n, m] = Σ_k x[n, k] · weight[m, k] + bias[m]
    out[n, m] = act(out[n, m]) · out[n, M + m]            with an activation: gate and up in one weight [2M, K]

At a few rows a product takes the time to read its weights, and a small one less than a launch does. So a program
owns a few rows of the weight with all their columns, whose sums its threads share: one launch, no partial sums in
memory. The kernel before does not make the weights, so their first tile is loaded while that one ends (`_pdl.py`). Sums
run in float32, in an order that depends on the number of rows: with it a result may move by a rounding.
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._op import FLOATS, Arch, Impl, arch_of, cdiv, check_tensor, next_power_of_2, register, use_triton
from tridraft.kernels._pdl import pdl_options, pdl_wait
from tridraft.kernels.activation import Activation, check_activation, gated, gated_act, gated_act_reference
from tridraft.kernels.norm import add_rms_norm, rms_norm


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None
) -> Tensor:
    """The definition; PyTorch sums in float32 and rounds once, the activation's result again."""
    projected = torch.nn.functional.linear(x, weight, bias)
    return projected if activation is None else gated_act_reference(projected, activation)


@triton.jit
def _accumulate(weight, x, acc, SPLIT: tl.constexpr):
    """Add the products of a tile; without tensor cores eight columns are one thread's, and nothing crosses threads."""
    if SPLIT > 1:
        acc = tl.dot(weight, tl.permute(x, (0, 2, 1)), acc)
    elif SPLIT == 0:
        products = weight.to(tl.float32) * x.to(tl.float32)
        acc += tl.sum(tl.reshape(products, (acc.shape[0], acc.shape[1], acc.shape[2], 8)), axis=3)
    elif x.shape[0] >= 64:
        acc = tl.dot(x, tl.trans(weight), acc)
    else:
        acc = tl.dot(weight, tl.trans(x), acc)
    return acc


@triton.jit
def _total(acc, bias_ptr, offs_m, out_features, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """The sums of all threads [BLOCK_N, BLOCK_M], with the bias."""
    if SPLIT > 1:
        # `tl.split` wants pairs in one thread, and Triton puts the other warps' sums into its neighbours: one exchange
        # through shared memory. `tl.sum` across warps writes there with a stride of SPLIT: 256 × 2048 at 32 rows 2.1 µs
        # instead of 2.8, and 2.0 instead of 4.3 in 16 warps.
        pairs = tl.reshape(tl.permute(acc, (2, 1, 0)), (BLOCK_N, acc.shape[1], SPLIT // 2, 2))
        even, odd = tl.split(pairs)
        sums = tl.sum(even + odd, axis=2)
    elif SPLIT == 0:
        sums = tl.trans(tl.sum(acc, axis=2))
    elif BLOCK_N >= 64:
        sums = acc
    else:
        sums = tl.trans(acc)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_m, mask=offs_m < out_features, other=0.0).to(tl.float32)[None, :]
    return sums


@triton.jit
def _load(pointers, cols, end, EVEN: tl.constexpr):
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=cols < end, other=0.0)


@triton.jit
def _rms(x, eps, hidden):
    return x * tl.rsqrt(tl.sum(x * x, axis=len(x.shape) - 1, keep_dims=True) / hidden + eps)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,  # [N, K]
    residual_ptr,  # [N, K] or None
    norm_weight_ptr,  # [K], or None: no norm in front
    post_weight_ptr,  # [K] or None
    scale_ptr,  # [1] or None
    stream_ptr,  # [N, K]
    weight_ptr,  # [M, K], or [2M, K]: gate, then up
    bias_ptr,  # [M] or [2M], or None
    out_ptr,  # [N, M]
    num_rows,
    out_features,  # specialised: only then does Triton store several elements at once
    in_features,
    stride_xn,
    stride_rn,
    stride_sn,
    stride_wm,
    stride_on,
    eps,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_BLOCKS_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the end read the last one, which needs no mask, and are not stored.
    rows_m = tl.minimum(offs_m, out_features - 1).to(tl.int64)
    rows_n = tl.minimum(offs_n, num_rows - 1).to(tl.int64)
    if SPLIT == 0:
        rows_m, rows_n, offs_x = rows_m[:, None, None], rows_n[None, :, None], offs_n[None, :, None]
        x_cols = tl.arange(0, BLOCK_K)[None, None, :]
        weight_cols = x_cols
        acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K // 8), tl.float32)
    elif SPLIT == 1:
        rows_m, rows_n, offs_x = rows_m[:, None], rows_n[:, None], offs_n[:, None]
        x_cols = tl.arange(0, BLOCK_K)[None, :]
        weight_cols = x_cols
        acc = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_N >= 64 else (BLOCK_M, BLOCK_N), tl.float32)
    else:
        # A product a warp: its own columns of every tile.
        WIDTH: tl.constexpr = BLOCK_K // SPLIT
        rows_m = rows_m[None, :, None]
        weight_cols = (tl.arange(0, SPLIT) * WIDTH)[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
        acc = tl.zeros((SPLIT, BLOCK_M, BLOCK_N), tl.float32)
        if norm_weight_ptr is not None:
            rows_n, offs_x = rows_n[:, None], offs_n[:, None]
            x_cols = tl.arange(0, BLOCK_K)[None, :]
        else:
            rows_n, offs_x = rows_n[None, :, None], offs_n[None, :, None]
            x_cols = weight_cols
    weight_ptrs = weight_ptr + rows_m * stride_wm + weight_cols
    x_ptrs = x_ptr + rows_n * stride_xn + x_cols
    first = _load(weight_ptrs, weight_cols, in_features, EVEN_K)
    if ACTIVATION is not None:
        up_ptrs = weight_ptr + (rows_m + out_features) * stride_wm + weight_cols
        up_acc = acc
        first_up = _load(up_ptrs, weight_cols, in_features, EVEN_K)
    if norm_weight_ptr is not None:
        norm_weight = _load(norm_weight_ptr + x_cols, x_cols, in_features, EVEN_K).to(tl.float32)
        if post_weight_ptr is not None:
            post_weight = _load(post_weight_ptr + x_cols, x_cols, in_features, EVEN_K).to(tl.float32)
        scale = tl.load(scale_ptr).to(tl.float32) if scale_ptr is not None else 1.0
    pdl_wait(PDL)
    # The first tile's turn comes last, and the other loads go out before anything waits for one.
    x = _load(x_ptrs, x_cols, in_features, EVEN_K)
    if norm_weight_ptr is not None:
        # As `add_rms_norm` does it, in every program: that costs less than a launch between two layers.
        stream = x.to(tl.float32)
        if residual_ptr is not None:
            residual = _load(residual_ptr + rows_n * stride_rn + x_cols, x_cols, in_features, EVEN_K)
            if post_weight_ptr is not None:
                stream = _rms(stream, eps, in_features) * post_weight
            stream = ((residual.to(tl.float32) + stream) * scale).to(x.dtype)
            if tl.program_id(0) == 0:
                stream_ptrs = stream_ptr + offs_x.to(tl.int64) * stride_sn + x_cols
                tl.store(stream_ptrs, stream, mask=(offs_x < num_rows) & (x_cols < in_features))
            stream = stream.to(tl.float32)
        x = (_rms(stream, eps, in_features) * norm_weight).to(x.dtype)
        if SPLIT > 1:
            x = tl.permute(tl.reshape(x, (BLOCK_N, SPLIT, BLOCK_K // SPLIT)), (1, 0, 2))
    else:
        for block in tl.range(1, NUM_BLOCKS_K, num_stages=NUM_STAGES):
            start = block * BLOCK_K
            weight = _load(weight_ptrs + start, weight_cols, in_features - start, EVEN_K)
            later_x = _load(x_ptrs + start, x_cols, in_features - start, EVEN_K)
            acc = _accumulate(weight, later_x, acc, SPLIT)
            if ACTIVATION is not None:
                up_weight = _load(up_ptrs + start, weight_cols, in_features - start, EVEN_K)
                up_acc = _accumulate(up_weight, later_x, up_acc, SPLIT)
    sums = _total(_accumulate(first, x, acc, SPLIT), bias_ptr, offs_m, out_features, BLOCK_N, SPLIT)
    if ACTIVATION is not None:
        up_bias_ptr = bias_ptr + out_features if bias_ptr is not None else None
        up_sums = _total(_accumulate(first_up, x, up_acc, SPLIT), up_bias_ptr, offs_m, out_features, BLOCK_N, SPLIT)
        # Rounded as a projection's result is.
        gate, up = sums.to(x.dtype).to(tl.float32), up_sums.to(x.dtype).to(tl.float32)
        sums = gated(gate, up, ACTIVATION == "gelu_tanh")
    out_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * stride_on + offs_m[None, :]
    mask = (offs_n < num_rows)[:, None] & (offs_m < out_features)[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class LinearConfig:
    """Launch settings.

    Attributes:
        block_n: rows of x in a program.
        block_m: rows of the weight in a program, with an activation those of gate and up.
        block_k: columns of a tile.
        num_warps: of a program.
        num_stages: of the tiles after the first, how many are in flight.
        split: into how many parts of the columns a tile's product on tensor cores is split, each a warp's own; 1: the
            warps share the rows; 0: no tensor cores, threads have eight columns each.
    """

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int

    def shared_memory(self, in_features: int, itemsize: int) -> int:
        """Bytes of the tiles in flight; of one for tensor cores, which read from there, where it is the only one.

        Where warps share the rows, Triton keeps the first tile there too.
        """
        tile = self.block_k * (self.block_m + self.block_n) * itemsize
        if in_features > self.block_k:
            return (self.num_stages + (self.split == 1)) * tile
        return tile if self.split else 0


def uses_cublas(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether a product is left to PyTorch.

    All measured ones are faster here up to 32 rows of weights of up to 32 MiB (64 at 4 rows), and up to 128 rows of up
    to 4 MiB, but not more than 4,096 columns of larger weights at more than 8 rows: 1024 × 8192 at 32 rows 10.9 µs
    against 9.5. Float32, which has no tensor cores to gain from, is left to it from 5 rows on.
    """
    size = out_features * in_features * dtype.itemsize
    if dtype == torch.float32:
        return num_rows > 4 or size > 2**26
    if num_rows <= 8:
        return size > (2**26 if num_rows <= 4 else 2**25)
    if num_rows <= 32 and in_features <= 4096:
        return size > 2**25
    return num_rows > 128 or size > 2**22


def _dot_config(num_rows: int, out_features: int, in_features: int, arch: Arch) -> LinearConfig:
    """Settings on tensor cores; weights of the E2B from L2, of the 12B (1,024 columns and more) from cold memory."""
    rows, whole = next_power_of_2(num_rows), max(next_power_of_2(in_features), 64)
    if rows > 64 or (rows > 32 and whole <= 512):
        # Rows of x take the side of a matrix instruction that has 64. 128 rows: 2048 × 256 2.3 (3.1), 4096 × 256 with
        # an activation 3.1 (4.1), 256 × 2048 4.6 (5.2).
        if whole > 512:
            return LinearConfig(64, 32, 128, 4, 4, 1)
        block_m = 64
        while block_m > 16 and 4 * cdiv(out_features, block_m) * cdiv(rows, 64) < 3 * arch.num_sms:
            block_m //= 2
        return LinearConfig(64, block_m, whole, 4, 2, 1)
    if whole <= 512:
        # 32 rows: 1024 × 256 1.3 (2.8), 2048 × 256 1.6 (2.9); 1.6 and 2.0 with all 32 in a program whose warps share no
        # columns. With an activation 4096 × 256, so half of it gate: 8 rows 1.5 (3.4), 1.7 with 32 rows of the weight.
        block_m = 16 if rows <= 8 or out_features <= 2048 else 32
        return LinearConfig(min(rows, 16), block_m, whole, 4, 2, 4)
    if out_features <= 1024:
        # Up to 64 programs: 256 × 2048 at 8 rows in 32 1.7 (5.1), in 16 1.9; at 32 rows in 64 2.1 (5.1), in 128 2.9.
        block_n, block_m = 8, 8
        while cdiv(rows, block_n) * cdiv(out_features, block_m) > 64 and block_n < 32:
            if block_m < 16:
                block_m *= 2
            else:
                block_n *= 2
        if whole <= 2048:
            return LinearConfig(block_n, block_m, whole, 8, 2, 8)
        # 1024 × 8192 at 8 rows: 7.0 (9.2), 7.6 with four stages, 8.1 with tiles of 256. 256 × 3072, whose loop has five
        # tiles, at 8 / 32 rows: 2.5 / 3.0 with five stages, 2.3 / 2.8 with four (5.5).
        num_stages = 5 if in_features > 3072 else 4
        return LinearConfig(block_n, block_m, 512 if block_n <= 16 else 256, 4, num_stages, 4)
    if out_features >= 16384:
        # With an activation, 8 / 32 rows: 10.7 / 11.3 (11.8, 12.4).
        return LinearConfig(min(rows, 32), 128, 64, 4, 6, 1)
    if rows <= 8:
        # 4096 × 1024: 4.4 (5.7) with 16 rows and 4.8 with 32, 8192 × 1024: 6.9 (7.3) and 6.4.
        return LinearConfig(8, 16 if out_features <= 4096 else 32, 256, 4, 4, 4)
    # 32 rows: 4096 × 1024 5.1 (5.8), 8192 × 1024 6.6 (7.6).
    return LinearConfig(min(rows, 32), 64, 128, 4, 5, 1)


def linear_config(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, arch: Arch) -> LinearConfig:
    """The ladder. Times in µs behind a norm, less the norm, on an H200, 2026-11-30, bfloat16; cuBLAS in brackets."""
    if num_rows > 4 and dtype != torch.float32:  # which tensor cores would round
        config = _dot_config(num_rows, out_features, in_features, arch)
    else:
        # Whole rows are all loaded ahead: 256 × 3072 1.1 (5.4). Of 7,680 columns 5.0 (8.0) in tiles of 2,048, and 5.9
        # whole. Four rows in a program: 2048 × 256 1.0 (2.7), 1.4 with sixteen; 4096 × 1024 3.3 (5.3) and 3.7.
        block_n = min(next_power_of_2(num_rows), 4)
        block_k = max(next_power_of_2(in_features), 256) if in_features <= 4096 else 2048
        num_warps = max(block_k // 512, 1)
        block_m = 4
        while block_m > 1 and (4 * cdiv(out_features, block_m) < 3 * arch.num_sms or block_m * block_n > 16):
            block_m //= 2
        # 4096 × 256: 1.2 in 512 programs, 1.5 in 1,024; 16384 × 1024: 9.7 (10.5) in 2,048.
        most = 512 if num_warps == 1 else 2048
        while cdiv(out_features, block_m) > most and 2 * block_m * block_n <= 16:
            block_m *= 2
        config = LinearConfig(block_n, block_m, block_k, num_warps, 3, 0)
    while config.shared_memory(in_features, dtype.itemsize) > arch.shared_memory - 2048:
        if config.num_stages > 2 and in_features > config.block_k:
            config = replace(config, num_stages=config.num_stages - 1)
        else:
            config = replace(config, block_k=config.block_k // 2, num_stages=2)
    return config


@dataclass(frozen=True)
class Norm:
    """The norm in front of a linear layer, and what joins the residual stream before it; see `norm_linear`."""

    residual: Tensor | None
    weight: Tensor
    post_weight: Tensor | None
    scale: Tensor | None
    eps: float
    stream: Tensor | None


def _launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
    norm: Norm | None = None,
) -> None:
    (num_rows, in_features), out_features = x.shape, out.shape[1]
    arch = arch_of(x.device)
    config = linear_config(num_rows, weight.shape[0], in_features, x.dtype, arch)
    block_m = config.block_m if activation is None else max(config.block_m // 2, 1)
    num_blocks_k = max(cdiv(in_features, config.block_k), 1)
    assert norm is None or num_blocks_k == 1, "fuses_norm says which norms can be made"
    before = (None,) * 5 if norm is None else (norm.residual, norm.weight, norm.post_weight, norm.scale, norm.stream)
    residual, stream = before[0], before[4]
    launch: Any = _linear_kernel[(cdiv(out_features, block_m), cdiv(num_rows, config.block_n))]
    launch(
        *(x, *before, weight, bias, out, num_rows, out_features, in_features, x.stride(0)),
        *(0 if residual is None else residual.stride(0), 0 if stream is None else stream.stride(0)),
        *(weight.stride(0), out.stride(0), 0.0 if norm is None else norm.eps),
        ACTIVATION=activation,
        BLOCK_N=config.block_n,
        BLOCK_M=block_m,
        BLOCK_K=config.block_k,
        NUM_BLOCKS_K=num_blocks_k,
        EVEN_K=in_features == num_blocks_k * config.block_k,
        SPLIT=config.split,
        num_warps=config.num_warps,
        NUM_STAGES=config.num_stages,
        **pdl_options(arch),
    )


@register("linear", mutates=("out",))
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch_linear(x, weight, bias, activation, out)
    elif activation is not None:
        out.copy_(linear_reference(x, weight, bias, activation))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _check_weight(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
    """The width of the result."""
    check_tensor("weight", weight, shape=("M", x.shape[1]), dtype=x.dtype, device=x.device)
    out_features = weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, shape=(out_features,), dtype=x.dtype, device=x.device)
    if activation is None:
        return out_features
    check_activation(activation)
    if out_features % 2:
        raise ValueError(f"weight: got {out_features} rows, needs an even number (gate, then up)")
    return out_features // 2


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """`x @ weight.T + bias`, or `act(gate) * up` of it, faster than cuBLAS at up to 32 rows, or 128 of small weights.

    Args:
        x: `[N, K]` float32, bfloat16 or float16.
        weight: `[M, K]` in `x`'s dtype, `[2M, K]` with an activation, the gate's rows first. The kernel reads it before
            the operation in front of it has ended, which must not write it.
        bias: `[M]` or `[2M]` in `x`'s dtype, or None.
        activation: "gelu_tanh" or "silu", or None.
        out: `[N, M]` in `x`'s dtype, written and returned; must not overlap `x`.
        impl: "triton", "eager" (PyTorch: cuBLAS on a GPU), or "auto" for the faster one that the tensors can run.

    Returns:
        `[N, M]` in `x`'s dtype. A row's last bit may depend on how many others there are.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), bias=torch.tensor([0.5, 0.0]))
    tensor([[11.5000, 17.0000]])
    """
    check_tensor("x", x, shape=("N", "K"), dtype=FLOATS)
    num_rows, in_features = x.shape
    out_features = _check_weight(x, weight, bias, activation)
    if out is None:
        out = x.new_empty(num_rows, out_features)
    else:
        check_tensor("out", out, shape=(num_rows, out_features), dtype=x.dtype, device=x.device)
    triton = use_triton(impl, x)
    if impl == "auto" and triton and uses_cublas(num_rows, weight.shape[0], in_features, x.dtype):
        triton = False
        if activation is not None:
            return gated_act(linear(x, weight, bias=bias), activation=activation, out=out)
    if out.numel():
        _linear(x, weight, bias, activation, out, triton)
    return out


def fuses_norm(num_rows: int, out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether the programs of a linear layer make the norm in front of it, each its own.

    A draft step in µs, H200, fused and apart: E2B (K = 256) 73.5 and 81.7 at 1 row, 117.5 and 126.5 at 16, 141.5 and
    148.5 at 32, 206.9 and 199.8 at 64; 12B (K = 1,024) 289 and 296 at 1 row, 418 and 366 at 4.
    """
    if num_rows > 4:
        fits = num_rows <= 32 and in_features <= 256 and dtype != torch.float32
    else:
        fits = next_power_of_2(num_rows) * in_features <= 1024  # as all rows of a bucket
    return fits and not uses_cublas(num_rows, out_features, in_features, dtype)


@register("norm_linear", mutates=("out", "stream_out"))
def _norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    post_weight: Tensor | None,
    scale: Tensor | None,
    eps: float,
    bias: Tensor | None,
    activation: str | None,
    out: Tensor,
    stream_out: Tensor | None,
) -> None:
    norm = Norm(residual, norm_weight, post_weight, scale, eps, stream_out)
    _launch_linear(x, weight, bias, activation, out, norm)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    post_weight: Tensor | None = None,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """A linear layer behind `rms_norm` or `add_rms_norm`, in one launch where there is little to norm (`fuses_norm`).

        stream = (residual + (x, or rms(x) * post_weight)) * scale        x, without a residual
        out = linear(rms(stream) * norm_weight, weight)

    Args:
        x: `[N, K]` float32, bfloat16 or float16; with a residual, what a block returned.
        norm_weight: `[K]`, any of those dtypes. As `weight`, `post_weight` and `scale`, it is read before the kernel in
            front has ended.
        weight: see `linear`.
        residual: `[N, K]`, the stream before that block, in `x`'s dtype, or None.
        post_weight: `[K]`, that block's own output norm, or None; needs a residual.
        scale: `[1]`, a factor on the whole stream, or None; needs a residual.
        eps: added to both mean squares.
        bias: see `linear`.
        activation: see `linear`.
        impl: see `linear`.

    Returns:
        `(out, stream)`: the layer's result and the stream; without a residual, that is `x` itself.

    >>> out, stream = norm_linear(torch.ones(1, 2), torch.ones(2), torch.eye(2), residual=torch.tensor([[2.0, 3.0]]))
    >>> stream
    tensor([[3., 4.]])
    """
    check_tensor("x", x, shape=("N", "K"), dtype=FLOATS)
    num_rows, in_features = x.shape
    out_features = _check_weight(x, weight, bias, activation)
    check_tensor("norm_weight", norm_weight, shape=(in_features,), dtype=FLOATS, device=x.device)
    if residual is None and not (post_weight is None and scale is None):
        raise ValueError("residual: got None, needs one for post_weight and scale")
    fused = use_triton(impl, x) and fuses_norm(num_rows, weight.shape[0], in_features, x.dtype)
    if not fused or not x.numel():
        if residual is None:
            normed, stream = rms_norm(x, norm_weight, eps=eps, impl=impl), x
        else:
            before = {"post_weight": post_weight, "scale": scale, "eps": eps, "impl": impl}
            normed, stream = add_rms_norm(x, residual, norm_weight, **before)
        return linear(normed, weight, bias=bias, activation=activation, impl=impl), stream
    if residual is not None:
        check_tensor("residual", residual, shape=tuple(x.shape), dtype=x.dtype, device=x.device)
    for name, vector, size in (("post_weight", post_weight, in_features), ("scale", scale, 1)):
        if vector is not None:
            check_tensor(name, vector, shape=(size,), dtype=FLOATS, device=x.device)
    out = x.new_empty(num_rows, out_features)
    stream = None if residual is None else torch.empty_like(x)
    _norm_linear(x, norm_weight, weight, residual, post_weight, scale, eps, bias, activation, out, stream)
    return out, x if stream is None else stream
