"""Writing the paged KV cache, alone and fused with per-head norms and rotary embedding.

A cache is `[num_blocks, block_size, Hkv, D]` of any strides but the last, which must be 1: views of vLLM's
`[num_blocks, 2, …]` tensors, head-major caches and token pools (block size 1) are all taken as they are. Token `t`
goes to slot `slot_mapping[t] = block * block_size + offset`; slot −1 is written nowhere. An fp8 (e4m3) cache holds
`value / scale`, saturated at ±448; scales are one float32 for the tensor or one for each KV head.

Rotary embedding is NeoX's: with `n = len(inv_freq)` and `angle[i] = position * inv_freq[i]` rounded to float32,

    y[i]     = x[i] · cos(angle[i]) − x[i + n] · sin(angle[i])
    y[i + n] = x[i + n] · cos(angle[i]) + x[i] · sin(angle[i])        for i < n

and dimensions from `2n` on pass. Frequencies that are 0 leave their pair as it is (Gemma 4's proportional rotary).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridraft.kernels._kv_kernels import qk_norm_rope_kernel, write_kv_kernel
from tridraft.kernels._op import (
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
from tridraft.kernels._pdl import pdl_options
from tridraft.kernels.norm import rms_norm_reference

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = (*FLOATS, FP8)


def write_kv_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Store each token's K and V at its slot; tokens with a negative slot nowhere."""
    if not slot_mapping.numel():
        return
    # Nothing here may depend on how many slots are negative (that would wait for the device), so such a token
    # repeats the first real one's write, or what the cache holds if there is none.
    written = slot_mapping >= 0
    token = torch.where(written, torch.arange(len(slot_mapping), device=slot_mapping.device), written.int().argmax())
    real, slot = written[token], slot_mapping[token].clamp(min=0)
    block, offset = slot // k_cache.shape[1], slot % k_cache.shape[1]
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values = x[token].float()
        if scale is not None:
            values = values / scale[:, None]
        if cache.dtype == FP8:
            values = values.clamp(-448, 448)
        cache[block, offset] = torch.where(real[:, None, None], values, cache[block, offset].float()).to(cache.dtype)


def rotary_reference(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """NeoX rotary embedding of the first `2 * len(inv_freq)` dimensions of `[T, heads, D]`, in float32."""
    angle = positions[:, None, None].float() * inv_freq
    cos, sin = angle.cos(), angle.sin()
    n = inv_freq.shape[0]
    first, second, rest = x.float().split((n, n, x.shape[-1] - 2 * n), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def qk_norm_rope_reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    positions: Tensor,
    inv_freq: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    qk_norm: bool,
    v_norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Q and K normed and rotated, V normed; Q in its dtype, K and V in float32, as the cache rounds them."""

    def norm_rope(x: Tensor, weight: Tensor | None) -> Tensor:
        normed = rms_norm_reference(x.float(), weight, eps) if qk_norm else x
        return rotary_reference(normed, positions, inv_freq)

    q = norm_rope(q, q_weight).to(q.dtype)
    k = None if k is None else norm_rope(k, k_weight)
    v = None if v is None else rms_norm_reference(v.float(), None, eps) if v_norm else v.float()
    return q, k, v


@dataclass(frozen=True)
class HeadsConfig:
    """Launch settings of both kernels: heads of a tile, warps of a program, programs that share a token's tiles."""

    heads: int
    num_warps: int
    programs: int


def write_kv_config(heads: int, head_dim: int) -> HeadsConfig:
    """Tiles of 1,024 elements for two warps, 16 each a thread; a token's tiles are all in flight at once.

    H200, 2026-11-30, 8,192 tokens of 2 × 8 heads of 256: 35.7 µs; 40.0 with 512 elements and one warp.
    """
    tile = max(1, 1024 // next_power_of_2(head_dim))
    return HeadsConfig(tile, 2, cdiv(heads, tile))


def qk_norm_rope_config(tokens: int, q_heads: int, kv_heads: int, head_dim: int, arch: Arch) -> HeadsConfig:
    """Tiles of 1,024 elements for two warps: a warp reads whole heads, so no sum crosses warps.

    With few tokens each tile has a program of its own, for latency. With many, a program takes several tiles of its
    token, since the sines cost more instructions than a tile does; 16 programs a multiprocessor remain. H200,
    2026-11-30, 4,096 tokens of 8 + 2 × 1 heads of 256: 16.0 µs with 16, 17.8 with 32, 19.0 with 64; tiles of 4,096
    elements and 4 warps run out of registers (49 µs).
    """
    tile = max(1, 1024 // next_power_of_2(head_dim))
    tiles = cdiv(q_heads, tile) + 2 * cdiv(kv_heads, tile)
    return HeadsConfig(tile, 2, max(1, min(tiles, cdiv(16 * arch.num_sms, max(tokens, 1)))))


def _check_fp8(cache: Tensor, arch: Arch) -> None:
    if cache.dtype == FP8 and arch.backend == "cuda" and arch.capability < 89:
        raise ValueError(f"k_cache: got float8_e4m3fn on sm_{arch.capability}, needs sm_89 or later for it")


def _scale_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.shape[0] == 1 else scale.stride(0)


def _num_slots(cache: Tensor) -> int:
    return cache.shape[0] * cache.shape[1]


def _launch_write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if not k.numel():
        return
    tokens, heads, head_dim = k.shape
    arch = arch_of(k.device)
    _check_fp8(k_cache, arch)
    config = write_kv_config(heads, head_dim)
    launch: Any = write_kv_kernel[(tokens, config.programs)]
    launch(
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        _scale_stride(k_scale),
        _scale_stride(v_scale),
        _num_slots(k_cache),
        NUM_HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        HEADS=config.heads,
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=config.num_warps,
        **pdl_options(arch),
    )


def _launch_qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    positions: Tensor,
    inv_freq: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    qk_norm: bool,
    v_norm: bool,
    eps: float,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
) -> None:
    if not q.numel():
        return
    tokens, q_heads, head_dim = q.shape
    kv_heads = 0 if k is None else k.shape[1]
    rotary = inv_freq.shape[0]
    arch = arch_of(q.device)
    if k_cache is not None:
        _check_fp8(k_cache, arch)
    config = qk_norm_rope_config(tokens, q_heads, kv_heads, head_dim, arch)
    launch: Any = qk_norm_rope_kernel[(tokens, config.programs)]
    launch(
        q,
        k,
        v,
        positions,
        inv_freq,
        q_weight,
        k_weight,
        out,
        k_cache,
        v_cache,
        slot_mapping,
        k_scale,
        v_scale,
        *q.stride()[:2],
        *(k.stride()[:2] if k is not None else (0, 0)),
        *(v.stride()[:2] if v is not None else (0, 0)),
        *out.stride()[:2],
        *(k_cache.stride()[:3] if k_cache is not None else (0, 0, 0)),
        *(v_cache.stride()[:3] if v_cache is not None else (0, 0, 0)),
        _scale_stride(k_scale),
        _scale_stride(v_scale),
        0 if k_cache is None else _num_slots(k_cache),
        eps,
        QK_NORM=qk_norm,
        V_NORM=v_norm,
        NUM_Q_HEADS=q_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY=rotary,
        BLOCK_SIZE=1 if k_cache is None else k_cache.shape[1],
        HEADS=config.heads,
        HALF=next_power_of_2(rotary),
        REST=next_power_of_2(head_dim - 2 * rotary) if head_dim > 2 * rotary else 0,
        num_warps=config.num_warps,
        **pdl_options(arch),
    )


@register("write_kv", mutates=("k_cache", "v_cache"))
def _write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    triton: bool,
) -> None:
    if triton:
        _launch_write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    else:
        write_kv_reference(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


@register("qk_norm_rope", mutates=("out", "k_cache", "v_cache"))
def _qk_norm_rope(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    positions: Tensor,
    inv_freq: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    qk_norm: bool,
    v_norm: bool,
    eps: float,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch_qk_norm_rope(
            q, k, v, positions, inv_freq, q_weight, k_weight, qk_norm, v_norm, eps,
            k_cache, v_cache, slot_mapping, k_scale, v_scale, out,
        )  # fmt: skip
        return
    q, k, v = qk_norm_rope_reference(q, k, v, positions, inv_freq, q_weight, k_weight, qk_norm, v_norm, eps)
    out.copy_(q)
    if k is not None and v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None:
        write_kv_reference(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _check_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check_tensor("k", k, shape=("T", "Hkv", "D"), dtype=FLOATS)
    check_tensor("v", v, shape=tuple(k.shape), dtype=k.dtype, device=k.device)
    heads, head_dim = k.shape[1:]
    check_tensor(
        "k_cache",
        k_cache,
        shape=("num_blocks", "block_size", heads, head_dim),
        dtype=CACHE_DTYPES,
        device=k.device,
    )
    check_tensor("v_cache", v_cache, shape=tuple(k_cache.shape), dtype=k_cache.dtype, device=k.device)
    check_tensor("slot_mapping", slot_mapping, shape=(k.shape[0],), dtype=torch.int64, device=k.device)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            size = heads if scale.dim() == 1 and scale.shape[0] != 1 else 1
            check_tensor(name, scale, shape=(size,), dtype=torch.float32, device=k.device)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Write new keys and values into the paged cache, in place.

    Args:
        k: `[T, Hkv, D]` float32, bfloat16 or float16.
        v: `[T, Hkv, D]` in `k`'s dtype; may be `k`.
        k_cache: `[num_blocks, block_size, Hkv, D]` float32, bfloat16, float16 or float8_e4m3fn.
        v_cache: the same shape and dtype, strides of its own.
        slot_mapping: `[T]` int64, `block * block_size + offset`; −1 writes nothing.
        k_scale: `[1]` or `[Hkv]` float32; the cache holds `k / k_scale`. None is 1.
        v_scale: the same for V.
        impl: "triton", "eager", or "auto" for whichever the tensors can run.

    >>> k_cache, v_cache = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
    >>> write_kv(torch.tensor([[[5.0]], [[6.0]]]), torch.ones(2, 1, 1), k_cache, v_cache, torch.tensor([3, -1]))
    >>> k_cache.flatten()
    tensor([0., 0., 0., 5.])
    """
    _check_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _write_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, use_triton(impl, k))


def qk_norm_rope(
    q: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    q_weight: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    k_weight: Tensor | None = None,
    qk_norm: bool = True,
    v_norm: bool = False,
    eps: float = 1e-6,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Norm and rotate each head of Q and, with `k` and `v`, write the cache: one launch before attention.

    Q and K are normed over the head dimension and rotated; V is normed (without a weight) if `v_norm`. A drafter
    that owns no KV passes Q alone. `k` and `v` may be one tensor (Gemma 4's shared key and value projection).

    Args:
        q: `[T, Hq, D]` float32, bfloat16 or float16.
        positions: `[T]` int64. They and `inv_freq` are read before the operation in front has ended, which must not
            write them.
        inv_freq: `[n]` float32 inverse frequencies; the first `2n ≤ D` dimensions rotate.
        q_weight: `[D]`, the weight of Q's norm, or None; of `k_weight`'s dtype.
        k: `[T, Hkv, D]` in `q`'s dtype; needs `v`, both caches and `slot_mapping`.
        v: `[T, Hkv, D]` in `q`'s dtype.
        k_weight: `[D]`, the weight of K's norm, or None.
        qk_norm: norm Q and K; False takes no weights.
        v_norm: norm V.
        eps: added to the mean squares.
        k_cache: see `write_kv`, as are the four arguments after it.
        v_cache: see `write_kv`.
        slot_mapping: see `write_kv`.
        k_scale: see `write_kv`.
        v_scale: see `write_kv`.
        out: `[T, Hq, D]` in `q`'s dtype, written and returned; may be `q`.
        impl: "triton", "eager", or "auto" for whichever the tensors can run.

    Returns:
        `[T, Hq, D]`, Q for attention.

    >>> q = torch.tensor([[[1.0, 0.0]]])
    >>> qk_norm_rope(q, torch.tensor([1]), torch.tensor([torch.pi / 2]), qk_norm=False).round()
    tensor([[[-0., 1.]]])
    """
    check_tensor("q", q, shape=("T", "Hq", "D"), dtype=FLOATS)
    tokens, _, head_dim = q.shape
    check_tensor("positions", positions, shape=(tokens,), dtype=torch.int64, device=q.device)
    check_tensor("inv_freq", inv_freq, shape=("n",), dtype=torch.float32, device=q.device)
    if not 0 < 2 * inv_freq.shape[0] <= head_dim:
        raise ValueError(f"inv_freq: got {inv_freq.shape[0]} frequencies, needs 1 to {head_dim // 2} (D is {head_dim})")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        if not qk_norm:
            raise ValueError(f"{name}: got a tensor with qk_norm=False, needs None")
        check_tensor(name, weight, shape=(head_dim,), dtype=FLOATS, device=q.device)
    written = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping}
    missing = [name for name, tensor in written.items() if tensor is None]
    if 0 < len(missing) < len(written):
        raise ValueError(f"{missing[0]}: got None, needs a tensor, since {', '.join(written)} come together")
    if k_weight is not None:
        if k is None:
            raise ValueError("k_weight: got a tensor without k, needs None")
        if q_weight is not None:
            check_tensor("k_weight", k_weight, dtype=q_weight.dtype)
    if k is not None and v is not None and k_cache is not None and v_cache is not None and slot_mapping is not None:
        check_tensor("k", k, shape=(tokens, "Hkv", head_dim), dtype=q.dtype, device=q.device)
        _check_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if out is None:
        out = q.new_empty(q.shape)
    else:
        check_tensor("out", out, shape=tuple(q.shape), dtype=q.dtype, device=q.device)
    _qk_norm_rope(
        q, k, v, positions, inv_freq, q_weight, k_weight, qk_norm, v_norm, eps,
        k_cache, v_cache, slot_mapping, k_scale, v_scale, out, use_triton(impl, q),
    )  # fmt: skip
    return out
