"""The kernels of `kv_cache`: heads normed, rotated and written to their slots."""

# A constexpr is its value to Triton, and a type of its own to a Python checker.
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG
from tridraft.kernels._pdl import pdl_wait


@triton.jit
def sin_cos(angle):
    """Sine and cosine of float32 angles up to 2²⁴, to about one rounding.

    The device library's reduction of angles beyond 105,615 goes through local memory, and a position may be larger.
    """
    turn = tl.floor(tl.fma(angle, 0.6366197723675814, 0.5))
    x = tl.fma(turn, -1.5707963705062866, angle)  # π/2 in three float32 parts: the product is exact inside an fma
    x = tl.fma(turn, 4.371138828673793e-08, x)
    x = tl.fma(turn, 1.7151245100058819e-15, x)
    z = x * x
    sin = tl.fma(tl.fma(tl.fma(z, -1.9515295891e-4, 8.3321608736e-3), z, -1.6666654611e-1), z * x, x)
    cos = tl.fma(tl.fma(z, 2.443315711809948e-5, -1.388731625493765e-3), z, 4.166664568298827e-2)
    cos = tl.fma(cos, z * z, tl.fma(z, -0.5, 1.0))
    quadrant = turn.to(tl.int32)
    swapped = (quadrant & 1) != 0
    sine, cosine = tl.where(swapped, cos, sin), tl.where(swapped, sin, cos)
    return tl.where((quadrant & 2) != 0, -sine, sine), tl.where(((quadrant + 1) & 2) != 0, -cosine, cosine)


@triton.jit
def _inverse_scale(scale_ptr, offs_h, mask_h, stride_scale):
    """What heads [HEADS, 1] are multiplied by on their way into a cache with scales [heads], or [1] of stride 0."""
    inverse = tl.full(offs_h.shape, 1.0, tl.float32)
    if scale_ptr is not None:
        inverse /= tl.load(scale_ptr + offs_h * stride_scale, mask=mask_h, other=1.0)
    return inverse


@triton.jit
def _store(pointers, x, mask):
    """Store float32 values in the pointers' dtype; fp8 saturates and keeps NaN."""
    if pointers.dtype.element_ty.is_fp8():
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _copy_heads(
    x_ptr,  # [Hkv, D], one token
    cache_ptr,  # [Hkv, D], its slot
    scale_ptr,  # [1] or [Hkv] f32, or None
    offs_h,  # [HEADS, 1]
    stride_xh,
    stride_ch,
    stride_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask_h = offs_h < NUM_HEADS
    mask = mask_h & (offs_d < HEAD_DIM)
    x = tl.load(x_ptr + offs_h * stride_xh + offs_d, mask=mask, other=0.0).to(tl.float32)
    x *= _inverse_scale(scale_ptr, offs_h, mask_h, stride_scale)
    _store(cache_ptr + offs_h * stride_ch + offs_d, x, mask)


@triton.jit(debug=DEBUG)
def write_kv_kernel(
    k_ptr,  # [T, Hkv, D]
    v_ptr,  # [T, Hkv, D]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    slot_mapping_ptr,  # [T] i64
    k_scale_ptr,  # [1] or [Hkv] f32, or None
    v_scale_ptr,  # [1] or [Hkv] f32, or None
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    stride_ks,
    stride_vs,
    num_slots,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)[:, None]
    pdl_wait(PDL)
    slot = tl.load(slot_mapping_ptr + token)
    tl.device_assert(slot < num_slots, "slot_mapping: a slot lies beyond the cache")
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_ptr += token * stride_kt
        v_ptr += token * stride_vt
        k_cache_ptr += block * stride_kcb + offset * stride_kcs
        v_cache_ptr += block * stride_vcb + offset * stride_vcs
        _copy_heads(
            k_ptr, k_cache_ptr, k_scale_ptr, offs_h, stride_kh, stride_kch, stride_ks, NUM_HEADS, HEAD_DIM, BLOCK_D
        )
        _copy_heads(
            v_ptr, v_cache_ptr, v_scale_ptr, offs_h, stride_vh, stride_vch, stride_vs, NUM_HEADS, HEAD_DIM, BLOCK_D
        )


@triton.jit
def _tile_heads(tile, NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr):
    """Whether a tile holds heads of Q or of V (else of K), which [HEADS, 1], and which of them exist."""
    q_tiles: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    is_q, is_v = tile < q_tiles, tile >= q_tiles + kv_tiles
    first = tl.where(is_q, tile, tl.where(is_v, tile - q_tiles - kv_tiles, tile - q_tiles)) * HEADS
    offs_h = first + tl.arange(0, HEADS).to(tl.int64)[:, None]
    return is_q, is_v, offs_h, offs_h < tl.where(is_q, NUM_Q_HEADS, NUM_KV_HEADS)


@triton.jit
def _rows_of(is_q, is_v, offs_h, q_ptr, k_ptr, v_ptr, stride_qh, stride_kh, stride_vh):
    """Pointers [HEADS, 1] to heads of Q, K or V."""
    rows = q_ptr + offs_h * stride_qh
    if k_ptr is not None:
        if is_v:
            rows = v_ptr + offs_h * stride_vh
        elif is_q == 0:
            rows = k_ptr + offs_h * stride_kh
    return rows


@triton.jit
def _load_weight(is_q, is_v, offs_d, mask, q_weight_ptr, k_weight_ptr):
    """The tile's norm weight, a row for each head: one row of it would change its layout through shared memory."""
    if q_weight_ptr is None and k_weight_ptr is None:
        weight = tl.full(mask.shape, 1.0, tl.float32)
    elif k_weight_ptr is None:
        weight = tl.load(q_weight_ptr + offs_d, mask=mask & is_q, other=1.0)
    elif q_weight_ptr is None:
        weight = tl.load(k_weight_ptr + offs_d, mask=mask & (is_q == 0) & (is_v == 0), other=1.0)
    else:
        weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        weight = tl.load(weight_ptr + offs_d, mask=mask & (is_v == 0), other=1.0)
    return weight.to(tl.float32)


@triton.jit(debug=DEBUG)
def qk_norm_rope_kernel(
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [T, Hkv, D] or None, as is all of K and V
    v_ptr,  # [T, Hkv, D]
    positions_ptr,  # [T] i64
    inv_freq_ptr,  # [ROTARY] f32
    q_weight_ptr,  # [D] or None
    k_weight_ptr,  # [D] or None
    out_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_cache_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    slot_mapping_ptr,  # [T] i64
    k_scale_ptr,  # [1] or [Hkv] f32, or None
    v_scale_ptr,  # [1] or [Hkv] f32, or None
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_kcb,
    stride_kcs,
    stride_kch,
    stride_vcb,
    stride_vcs,
    stride_vch,
    stride_ks,
    stride_vs,
    num_slots,
    eps,
    QK_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    # A token's tiles of HEADS heads, Q's, then K's, then V's, are dealt to the programs of grid axis 1. A tile is two
    # tensors of the rotated pairs (i, i + ROTARY) and a third of what passes unrotated, if anything does.
    num_tiles: tl.constexpr = (NUM_Q_HEADS + HEADS - 1) // HEADS + 2 * ((NUM_KV_HEADS + HEADS - 1) // HEADS)
    token = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1)
    offs_d = tl.broadcast_to(tl.arange(0, HALF)[None, :], HEADS, HALF)
    rest_size: tl.constexpr = REST if REST > 0 else 1
    offs_r = 2 * ROTARY + tl.broadcast_to(tl.arange(0, rest_size)[None, :], HEADS, rest_size)
    mask_d = offs_d < ROTARY
    inv_freq = tl.load(inv_freq_ptr + offs_d, mask=mask_d, other=0.0)
    position = tl.load(positions_ptr + token).to(tl.float32)
    pdl_wait(PDL)
    q_ptr += token * stride_qt
    out_ptr += token * stride_ot
    if k_ptr is not None:
        k_ptr += token * stride_kt
        v_ptr += token * stride_vt
    sin = tl.zeros((HEADS, HALF), tl.float32)
    cos = sin
    for tile in range(first_tile, num_tiles, tl.num_programs(1)):
        is_q, is_v, offs_h, mask_h = _tile_heads(tile, NUM_Q_HEADS, NUM_KV_HEADS, HEADS)
        rows = _rows_of(is_q, is_v, offs_h, q_ptr, k_ptr, v_ptr, stride_qh, stride_kh, stride_vh)
        mask = mask_h & mask_d
        left = tl.load(rows + offs_d, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(rows + offs_d + ROTARY, mask=mask, other=0.0).to(tl.float32)
        left_weight = _load_weight(is_q, is_v, offs_d, mask, q_weight_ptr, k_weight_ptr)
        right_weight = _load_weight(is_q, is_v, offs_d + ROTARY, mask, q_weight_ptr, k_weight_ptr)
        rest, mask_r, rest_weight = left, mask, left_weight
        if REST > 0:
            mask_r = mask_h & (offs_r < HEAD_DIM)
            rest = tl.load(rows + offs_r, mask=mask_r, other=0.0).to(tl.float32)
            rest_weight = _load_weight(is_q, is_v, offs_r, mask_r, q_weight_ptr, k_weight_ptr)
        slot = tl.load(slot_mapping_ptr + token) if k_ptr is not None else tl.full((), -1, tl.int64)
        tl.device_assert(slot < num_slots, "slot_mapping: a slot lies beyond the cache")
        inverse_scale = _inverse_scale(k_scale_ptr, offs_h, mask_h & (is_q == 0) & (is_v == 0), stride_ks)
        inverse_scale *= _inverse_scale(v_scale_ptr, offs_h, mask_h & is_v, stride_vs)
        if tile == first_tile:
            # Once a program; not before the loop, where the wait for the position would hold up the first tile's loads.
            sin, cos = sin_cos(position * inv_freq)
        squares = tl.sum(left * left + right * right, axis=1, keep_dims=True)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
        inverse = tl.where(tl.where(is_v, V_NORM, QK_NORM), tl.rsqrt(squares / HEAD_DIM + eps), 1.0)
        left, right, rest = left * inverse * left_weight, right * inverse * right_weight, rest * inverse * rest_weight
        if is_v == 0:
            left, right = left * cos - right * sin, right * cos + left * sin
        if is_q:
            out_rows = out_ptr + offs_h * stride_oh
            _store(out_rows + offs_d, left, mask)
            _store(out_rows + offs_d + ROTARY, right, mask)
            if REST > 0:
                _store(out_rows + offs_r, rest, mask_r)
        elif k_ptr is not None:  # noqa: SIM102  decided by the compiler; the next on the device
            if slot >= 0:
                block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
                k_slot_ptr = k_cache_ptr + block * stride_kcb + offset * stride_kcs
                v_slot_ptr = v_cache_ptr + block * stride_vcb + offset * stride_vcs
                cache_rows = _rows_of(
                    False, is_v, offs_h, k_slot_ptr, k_slot_ptr, v_slot_ptr, 0, stride_kch, stride_vch
                )
                _store(cache_rows + offs_d, left * inverse_scale, mask)
                _store(cache_rows + offs_d + ROTARY, right * inverse_scale, mask)
                if REST > 0:
                    _store(cache_rows + offs_r, rest * inverse_scale, mask_r)
