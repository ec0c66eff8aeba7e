"""The loop over a part of a request's keys that decode, verification and prefill share, and what it loads."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

import triton
import triton.language as tl

from tridraft.kernels._pdl import prefetch_l2

LOG2E = tl.constexpr(1.4426950408889634)
NOT_YET = tl.constexpr(-1e30)
"""Running maximum before the first visible key: finite, so that a row without keys never subtracts two infinities."""


PAIR = tl.int16
"""What two float8_e4m3fn columns are loaded as: matrix loads transpose elements of 16 bits, not of 8."""


@triton.jit
def _upcast(x, dtype: tl.constexpr):
    """Stored keys or values in the dtype of the products; uint8 is float8_e4m3fn where the GPU has no such type."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return x.to(dtype)


def _unpack_asm(even_left: int, odd_right: int, mask: str) -> str:
    """PTX from a register of two pairs to two even and two odd columns: the sign to bit 15, the rest under `mask`."""
    return f"""{{
        .reg .b32 sign, rest;
        shl.b32 sign, $2, 8;
        and.b32 sign, sign, 0x80008000;
        shl.b32 rest, $2, {even_left};
        and.b32 rest, rest, {mask};
        or.b32 $0, sign, rest;
        and.b32 sign, $2, 0x80008000;
        shr.b32 rest, $2, {odd_right};
        and.b32 rest, rest, {mask};
        or.b32 $1, sign, rest;
    }}"""


UNPACK_BF16 = tl.constexpr(_unpack_asm(4, 4, "0x07F007F0"))
UNPACK_FP16 = tl.constexpr(_unpack_asm(7, 1, "0x3F803F80"))


@triton.jit
def _unpack(pairs, dtype: tl.constexpr):
    """Even and odd columns, each 2 ** −120 (bfloat16) or 2 ** −8 (float16) of what is stored.

    The bits of a float8_e4m3fn are those of a small bfloat16 or float16. Seven integer operations for four numbers cost
    less than conversions, which the compiler makes one by one and through float32.
    """
    asm: tl.constexpr = UNPACK_BF16 if dtype == tl.bfloat16 else UNPACK_FP16
    even, odd = tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], dtype=(tl.int16, tl.int16), is_pure=True, pack=2)
    return even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True)


@triton.jit
def raise_queries(q, scale):
    """Queries and score scale that make up for the keys of `_unpack`, half in each: bfloat16 must hold either half."""
    if q.dtype == tl.bfloat16:
        q = (q.to(tl.float32) * 2.0**60).to(tl.bfloat16)
        scale *= 2.0**60
    else:
        scale *= 2.0**8
    return q, scale


@triton.constexpr_function
def whole_blocks(BLOCK_SIZE, BLOCK_N):
    """Keys to which tiles are aligned so that each is some whole blocks or a part of one; 1 if they are not."""
    if BLOCK_N % BLOCK_SIZE == 0 and BLOCK_SIZE >= 8:
        return BLOCK_SIZE
    return BLOCK_N if BLOCK_SIZE % BLOCK_N == 0 else 1


@triton.jit
def _blocks(table_ptr, first, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block of each of BLOCK_N keys from `first` on; block 0 for keys past the end."""
    offs_n = tl.arange(0, BLOCK_N)
    if whole_blocks(BLOCK_SIZE, BLOCK_N) == 1:
        blocks = tl.load(table_ptr + (first + offs_n) // BLOCK_SIZE, mask=first + offs_n < end, other=0)
    else:
        # One load a block, not one a row of the tile: which row has which is known at compile time, and so the rows of
        # a block share its address.
        table_ptr += first // BLOCK_SIZE
        blocks = tl.zeros([BLOCK_N], tl.int32) + tl.load(table_ptr, mask=first < end, other=0)
        for i in tl.static_range(1, BLOCK_N // BLOCK_SIZE):
            block = tl.load(table_ptr + i, mask=first + i * BLOCK_SIZE < end, other=0)
            blocks = tl.where(offs_n // BLOCK_SIZE == i, block, blocks)
    return blocks


@triton.jit
def prefetch(
    table_ptr, k_ptr, v_ptr, begin, end, stride_kb, stride_ks, stride_vb, stride_vs,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Ask for the first tile of one head's keys and values to be brought into the L2 cache."""
    columns: tl.constexpr = HEAD_DIM // 2 if k_ptr.dtype.element_ty == PAIR else HEAD_DIM
    line: tl.constexpr = 128 // (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
    offs = tl.arange(0, triton.next_power_of_2(triton.cdiv(columns, line)))[None, :] * line
    keys = begin + tl.arange(0, BLOCK_N)
    wanted = (keys < end)[:, None] & (offs < columns)
    block = _blocks(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N).to(tl.int64)[:, None]
    slot = (keys % BLOCK_SIZE).to(tl.int64)[:, None]
    prefetch_l2(k_ptr + block * stride_kb + slot * stride_ks + offs, wanted)
    prefetch_l2(v_ptr + block * stride_vb + slot * stride_vs + offs, wanted)


@triton.jit
def _attend_tile(
    acc, acc_odd, peak, total, q, q_odd, k, k_odd, v, keys, positions, scale, softcap, window,
    PACKED: tl.constexpr, HALVES: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: a tile's scores, weights and weighted values; with TURNED `k` is transposed."""
    # Every float8_e4m3fn is a float16, and float16 holds the weights better than bfloat16 does.
    FP8: tl.constexpr = v.dtype.primitive_bitwidth == 8
    v_dtype: tl.constexpr = tl.float16 if FP8 and q.dtype != tl.float32 else q.dtype
    # Keeps sums of 2 ** −120 of the values away from where float32 runs out of bits.
    LIFT: tl.constexpr = 64.0 if PACKED and q.dtype == tl.bfloat16 else 0.0
    WIDE: tl.constexpr = len(total.shape) == 2
    if PACKED:
        k, k_odd = _unpack(k, q.dtype)
        scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k))) * scale
    elif HALVES:
        # Scaled one by one: as a plain sum, Triton makes them one chain again.
        scores = tl.dot(q, tl.trans(k)) * scale + tl.dot(q_odd, tl.trans(k_odd)) * scale
    elif TURNED:
        scores = tl.dot(q, k) * scale
    else:
        scores = tl.dot(q, tl.trans(_upcast(k, q.dtype)), input_precision="ieee") * scale
    if softcap is not None:
        # tanh(x) = 1 − 2 / (1 + exp(2x)), with the scale of x in `scale` already.
        scores = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E))))
    if MASKED:
        visible = keys <= positions[:, None]
        if window is not None:
            visible &= keys > positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) - LIFT)
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay[:, None] + weights if WIDE else total * decay + tl.sum(weights, 1)
    weights = weights.to(v_dtype)
    if PACKED:
        v, v_odd = _unpack(v, q.dtype)
        acc = tl.dot(weights, v, acc * decay[:, None])
        acc_odd = tl.dot(weights, v_odd, acc_odd * decay[:, None])
    else:
        acc = tl.dot(weights, _upcast(v, v_dtype), acc * decay[:, None], input_precision="ieee")
    return acc, acc_odd, new_peak, total


@triton.jit
def attend(
    acc,  # [BLOCK_M, BLOCK_V] f32; of pairs the even columns
    acc_odd,  # of pairs the odd columns; else passed on as it is
    peak,  # [BLOCK_M] f32, base-2 logarithm
    total,  # [BLOCK_M] f32, or [BLOCK_M, BLOCK_N] to be summed
    q,  # [BLOCK_M, BLOCK_D]; of pairs the even columns
    q_odd,
    positions,  # [BLOCK_M] key index of each row's own token, −1 for a row that sees nothing
    first_key,  # that any row sees
    begin,
    end,
    table_ptr,  # [M] int32, of one request
    k_ptr,  # [num_blocks, BLOCK_SIZE, D], of one head
    v_ptr,
    offs_v,  # [BLOCK_V] columns of the values
    stride_kb,
    stride_ks: tl.constexpr,
    stride_vb,
    stride_vs: tl.constexpr,
    num_blocks,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HALVES: tl.constexpr,
    LOADS_FIRST: tl.constexpr,
):
    """Online softmax over keys begin … end − 1, all of them visible to every row unless MASKED.

    `begin` is aligned as `whole_blocks` says; `end` is a whole number of tiles after it, or past what any row sees.

    With HALVES, `q` is the first half of the queries' columns and `q_odd` the second: two sums in flight instead of one
    chain of products that wait for each other. With LOADS_FIRST, a tile's products come behind the next tile's loads.
    """
    PACKED: tl.constexpr = k_ptr.dtype.element_ty == PAIR
    COLUMNS: tl.constexpr = HEAD_DIM // 2 if PACKED or HALVES else HEAD_DIM
    VALUES: tl.constexpr = HEAD_DIM // 2 if PACKED else HEAD_DIM
    PADDED: tl.constexpr = q.shape[1] != COLUMNS
    offs_d = tl.arange(0, q.shape[1])[None, :]
    offs_v = offs_v[None, :]
    # Triton's pipeline puts the loads of a later tile at the end of the loop's body, where two stages leave them no
    # time. Only an `if` goes behind them, so the products are in one that is always taken, and the loop itself names
    # its stages, or loads would not be pipelined without a product beside them.
    FIRST: tl.constexpr = LOADS_FIRST and whole_blocks(BLOCK_SIZE, BLOCK_N) != 1
    offs_n = tl.arange(0, BLOCK_N)
    next_block = _blocks(table_ptr, begin, end, BLOCK_SIZE, BLOCK_N)
    for first in tl.range(begin, end, BLOCK_N, num_stages=2 if FIRST else None):
        # The blocks of the next tile are read a tile ahead: loads that wait for loads are not pipelined as deeply.
        keys = first + offs_n
        block = next_block.to(tl.int64)
        next_block = _blocks(table_ptr, first + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        tl.device_assert((block >= 0) & (block < num_blocks), "block_table: no such block")
        if whole_blocks(BLOCK_SIZE, BLOCK_N) == BLOCK_SIZE:
            slot = offs_n % BLOCK_SIZE
        elif whole_blocks(BLOCK_SIZE, BLOCK_N) == BLOCK_N:
            slot = first % BLOCK_SIZE + offs_n
        else:
            slot = keys % BLOCK_SIZE
        slot = slot.to(tl.int64)
        k_offsets = (block * stride_kb)[:, None] + ((slot * stride_ks)[:, None] + offs_d)
        v_offsets = (block * stride_vb)[:, None] + ((slot * stride_vs)[:, None] + offs_v)
        # A key that no row sees is in a block that exists, and its score is masked; a value's NaN would survive that.
        k = tl.load(k_ptr + k_offsets, mask=offs_d < COLUMNS, other=0.0) if PADDED else tl.load(k_ptr + k_offsets)
        k_odd = tl.load(k_ptr + k_offsets + COLUMNS) if HALVES else k
        if MASKED:
            seen = keys < end
            if window is not None:
                seen &= keys >= first_key
            v = tl.load(v_ptr + v_offsets, mask=seen[:, None] & (offs_v < VALUES), other=0.0)
        elif PADDED:
            v = tl.load(v_ptr + v_offsets, mask=offs_v < VALUES, other=0.0)
        else:
            v = tl.load(v_ptr + v_offsets)
        if FIRST:
            # Turned behind the `if`, the keys would take a third buffer.
            k = tl.trans(k)
            if first < end:
                acc, acc_odd, peak, total = _attend_tile(
                    acc, acc_odd, peak, total, q, q_odd, k, k_odd, v, keys, positions, scale, softcap, window,
                    PACKED, HALVES, MASKED, True,
                )  # fmt: skip
        else:
            acc, acc_odd, peak, total = _attend_tile(
                acc, acc_odd, peak, total, q, q_odd, k, k_odd, v, keys, positions, scale, softcap, window,
                PACKED, HALVES, MASKED, False,
            )  # fmt: skip
    return acc, acc_odd, peak, total


@triton.jit
def mean(acc, acc_odd, total, v_scale_ptr, head, V_SCALES: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr):
    """Weighted means of the values from their sums."""
    norm = 1.0 / tl.where(total > 0, total, 1.0)
    if v_scale_ptr is not None:
        norm *= tl.load(v_scale_ptr + head % V_SCALES)
    if PACKED:
        norm *= 2.0**120 if dtype == tl.bfloat16 else 2.0**8
        acc = tl.interleave(acc * norm[:, None], acc_odd * norm[:, None])
    else:
        acc *= norm[:, None]
    return acc


@triton.jit
def score_scale(scale, k_scale_ptr, head, softcap, K_SCALES: tl.constexpr):
    """Factor of the raw products that leaves base-2 logits, or the argument of the soft cap's tanh."""
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + head % K_SCALES)
    if softcap is not None:
        return scale / softcap
    return scale * LOG2E
