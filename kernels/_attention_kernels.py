"""Triton kernels of `attention.py`, which has the formula, the layout and the launches."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG
from tridraft.kernels._pdl import pdl_wait

LOG2E = tl.constexpr(1.4426950408889634)
NOT_YET = tl.constexpr(-1e30)
"""Running maximum before the first visible key: finite, so that a row without keys never subtracts two infinities."""


@triton.jit
def _upcast(x, dtype: tl.constexpr):
    """Stored keys or values in the dtype of the products; uint8 is float8_e4m3fn where the GPU has no such type."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        x = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return x.to(dtype)


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_V] f32
    peak,  # [BLOCK_M] f32, base-2 logarithm
    total,  # [BLOCK_M] f32
    q,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M] key index of each row's own token, −1 for a row that sees nothing
    begin,
    end,
    table_ptr,  # [M] int32, of one request
    k_ptr,  # [num_blocks, BLOCK_SIZE, D], of one head
    v_ptr,
    offs_v,  # [BLOCK_V] columns of the values
    stride_kb,
    stride_ks,
    stride_vb,
    stride_vs,
    num_blocks,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over keys begin … end − 1, all of them visible to every row unless MASKED.

    `end` is a whole number of tiles after `begin`, or past what any row sees.
    """
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    offs_v = offs_v[None, :]
    # Every float8_e4m3fn is a float16, and float16 holds the weights better than bfloat16 does.
    FP8: tl.constexpr = v_ptr.dtype.element_ty.primitive_bitwidth == 8
    v_dtype: tl.constexpr = tl.float16 if FP8 and q.dtype != tl.float32 else q.dtype
    offs_n = tl.arange(0, BLOCK_N)
    next_block = tl.load(table_ptr + (begin + offs_n) // BLOCK_SIZE, mask=begin + offs_n < end, other=0)
    # Whole blocks a tile leave the slots as they are, which is worth the registers where the sums leave some.
    HOISTED: tl.constexpr = BLOCK_N % BLOCK_SIZE == 0 and acc.shape[0] * acc.shape[1] <= 16 * 512 and not FP8
    slot = ((begin + offs_n) % BLOCK_SIZE).to(tl.int64)
    for first in range(begin, end, BLOCK_N):
        # The blocks of the next tile are read a tile ahead: loads that wait for loads are not pipelined as deeply.
        keys = first + offs_n
        block = next_block.to(tl.int64)
        next_block = tl.load(table_ptr + (keys + BLOCK_N) // BLOCK_SIZE, mask=keys + BLOCK_N < end, other=0)
        tl.device_assert((block >= 0) & (block < num_blocks), "block_table: no such block")
        if not HOISTED:
            slot = (keys % BLOCK_SIZE).to(tl.int64)
        k_offsets = (block * stride_kb + slot * stride_ks)[:, None] + offs_d
        v_offsets = (block * stride_vb + slot * stride_vs)[:, None] + offs_v
        # A key past the end is one of block 0, which exists, and its score is masked; a value's NaN would survive that.
        if HEAD_DIM != BLOCK_D:
            k = tl.load(k_ptr + k_offsets, mask=offs_d < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_ptr + k_offsets)
        if MASKED:
            v = tl.load(v_ptr + v_offsets, mask=(keys < end)[:, None] & (offs_v < HEAD_DIM), other=0.0)
        elif HEAD_DIM != BLOCK_D:
            v = tl.load(v_ptr + v_offsets, mask=offs_v < HEAD_DIM, other=0.0)
        else:
            v = tl.load(v_ptr + v_offsets)
        scores = tl.dot(q, tl.trans(_upcast(k, q.dtype)), input_precision="ieee") * scale
        if softcap is not None:
            # tanh(x) = 1 − 2 / (1 + exp(2x)), with the scale of x in `scale` already.
            scores = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E))))
        if MASKED:
            visible = keys <= positions[:, None]
            if window is not None:
                visible &= keys > positions[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_dtype), _upcast(v, v_dtype), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _score_scale(scale, k_scale_ptr, head, softcap, K_SCALES: tl.constexpr):
    """Factor of the raw products that leaves base-2 logits, or the argument of the soft cap's tanh."""
    if k_scale_ptr is not None:
        scale = scale * tl.load(k_scale_ptr + head % K_SCALES)
    if softcap is not None:
        return scale / softcap
    return scale * LOG2E


@triton.jit
def _output_rows(query_start_loc_ptr, request, first_query, head, offs_m, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Token, query head and mask of a program's rows, from loads of its own: used on, the first ones would fill
    registers all through the loop over the keys.
    """
    row_begin = tl.load(query_start_loc_ptr + request, volatile=True)
    query_end = tl.load(query_start_loc_ptr + request + 1, volatile=True)
    row = row_begin + first_query + offs_m // GROUP
    return (
        row.to(tl.int64),
        (head * GROUP + offs_m % GROUP).to(tl.int64),
        (offs_m < BLOCK_Q * GROUP) & (row < query_end),
    )


@triton.jit
def _tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_N: tl.constexpr):
    """Tiles of keys that the requests have visible; none for one without queries or with more than max_queries."""
    mask = requests < num_requests
    query_len = tl.load(query_start_loc_ptr + requests + 1, mask=mask, other=0)
    query_len -= tl.load(query_start_loc_ptr + requests, mask=mask, other=0)
    keys = tl.load(seq_lens_ptr + requests, mask=mask, other=0)
    if window is not None:
        keys = tl.minimum(keys, window + query_len - 1)
    tiles = tl.maximum((keys + BLOCK_N - 1) // BLOCK_N, 1)
    return tl.where((query_len > 0) & (query_len <= max_queries), tiles, 0)


@triton.jit
def _splits(tiles, all_tiles, budget):
    """Parts into which a request's tiles go: its share of the budget, at least one, at most one a tile."""
    return tl.minimum(tl.maximum(tiles * budget // tl.maximum(all_tiles, 1), 1), tiles)


@triton.jit
def _schedule(
    index,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_requests,
    max_queries,
    budget,
    window,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_ONLY: tl.constexpr,
):
    """Find part `index` of all requests' parts; with SPLIT_ONLY, request `index` of those in more than one part.

    Returns:
        The request (`num_requests` or more if there is none), the parts before it, the partial results before it
        (requests in one part leave none), and the number of tiles in the batch.
    """
    all_tiles = 0
    for base in range(0, num_requests, BLOCK_R):
        requests = base + tl.arange(0, BLOCK_R)
        all_tiles += tl.sum(
            _tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_N)
        )
    # One sum of three counts of 21 bits each: a sum over a program's warps costs more than the arithmetic.
    packed = tl.zeros([], tl.int64)
    seen = tl.zeros([], tl.int64)
    for base in range(0, num_requests, BLOCK_R):
        requests = base + tl.arange(0, BLOCK_R)
        tiles = _tiles(requests, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_N)
        splits = _splits(tiles, all_tiles, budget).to(tl.int64)
        partials = tl.where(splits > 1, splits, 0)
        counted = (splits > 1).to(tl.int64) if SPLIT_ONLY else splits
        counts = (1 << 42) + (counted << 21) + partials
        packed += tl.sum(tl.where(seen + tl.cumsum(counted) <= index, counts, 0))
        if base + BLOCK_R < num_requests:
            seen += tl.sum(counted)
    request = (packed >> 42).to(tl.int32)
    parts_before = ((packed >> 21) & 0x1FFFFF).to(tl.int32)
    partials_before = (packed & 0x1FFFFF).to(tl.int32)
    return request, parts_before, partials_before, all_tiles


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "budget"], debug=DEBUG)
def split_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [budget, Hkv * query blocks, BLOCK_Q * GROUP, D] f32
    lse_ptr,  # [budget, Hkv * query blocks, BLOCK_Q * GROUP] f32, base 2
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    table_ptr,  # [R, M] int32
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    k_scale_ptr,  # [1] or [Hkv] f32
    v_scale_ptr,  # [1] or [Hkv] f32
    num_requests,
    num_kv_heads,
    num_blocks,
    max_queries,
    budget,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_tr,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one request's visible keys for BLOCK_Q of its queries, one key-value head and BLOCK_V columns.

    The grid is fixed; how many parts each request gets follows from the lengths on the device, so that all programs
    read about the same number of keys at whatever length. A request in one part is finished here.
    """
    pdl_wait(PDL)
    COLUMNS: tl.constexpr = (HEAD_DIM + BLOCK_V - 1) // BLOCK_V
    lane = tl.program_id(0) // COLUMNS
    head = lane % num_kv_heads
    part = tl.program_id(1)
    # Sums over one warp's lanes need no barriers. Those over several warps end in a read that the compiler can tell is
    # the same for all threads, without which every asynchronous product sets its operands up one register at a time.
    BLOCK_R: tl.constexpr = 32 if BLOCK_M < 64 else 128
    request, parts_before, slot, all_tiles = part, part, 0, 0x7FFFFFFF
    if budget > 1:
        request, parts_before, slot, all_tiles = _schedule(
            part, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, budget, window, BLOCK_N, BLOCK_R, False
        )
    if request >= num_requests:
        return
    row_begin = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - row_begin
    seq_len = tl.load(seq_lens_ptr + request)
    first_query = lane // num_kv_heads * BLOCK_Q
    if (first_query >= query_len) | (query_len > max_queries):
        return
    key_begin = 0
    if window is not None:
        key_begin = tl.maximum(seq_len - query_len - window + 1, 0)
    tiles = tl.maximum((seq_len - key_begin + BLOCK_N - 1) // BLOCK_N, 1)
    splits = _splits(tiles, all_tiles, budget)
    part -= parts_before
    begin = key_begin + part * tiles // splits * BLOCK_N
    end = tl.minimum(key_begin + (part + 1) * tiles // splits * BLOCK_N, seq_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = first_query + offs_m // GROUP
    mask_m = (offs_m < BLOCK_Q * GROUP) & (query < query_len)
    positions = tl.where(mask_m, seq_len - query_len + query, -1)
    row = (row_begin + query).to(tl.int64)
    q_head = (head * GROUP + offs_m % GROUP).to(tl.int64)
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)
    q = tl.load(q_ptr + (row * stride_qt + q_head * stride_qh)[:, None] + offs_d, mask=mask, other=0.0)

    offs_v = tl.program_id(0) % COLUMNS * BLOCK_V + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], NOT_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    head_offset = head.to(tl.int64)
    scale = _score_scale(scale, k_scale_ptr, head, softcap, K_SCALES)
    acc, peak, total = _attend(
        acc,
        peak,
        total,
        q,
        positions,
        begin,
        end,
        table_ptr + request.to(tl.int64) * stride_tr,
        k_ptr + head_offset * stride_kh,
        v_ptr + head_offset * stride_vh,
        offs_v,
        stride_kb,
        stride_ks,
        stride_vb,
        stride_vs,
        num_blocks,
        scale,
        softcap,
        window,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_D,
        BLOCK_N,
        True,
    )
    row, q_head, mask_m = _output_rows(query_start_loc_ptr, request, first_query, head, offs_m, GROUP, BLOCK_Q)
    mask = mask_m[:, None] & (offs_v < HEAD_DIM)
    norm = 1.0 / tl.where(total > 0, total, 1.0)
    if v_scale_ptr is not None:
        norm *= tl.load(v_scale_ptr + head % V_SCALES)
    acc *= norm[:, None]
    if splits == 1:
        out = out_ptr + (row * stride_ot + q_head * stride_oh)[:, None] + offs_v
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        rows = ((slot + part) * (tl.num_programs(0) // COLUMNS) + lane) * (BLOCK_Q * GROUP) + offs_m
        tl.store(partial_ptr + rows[:, None] * HEAD_DIM + offs_v, acc, mask=mask)
        tl.store(lse_ptr + rows, peak + tl.log2(total), mask=mask_m)


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "budget"], debug=DEBUG)
def combine_kernel(
    out_ptr,  # [T, Hq, D]
    partial_ptr,  # [budget, Hkv * query blocks, BLOCK_Q * GROUP, D] f32
    lse_ptr,  # [budget, Hkv * query blocks, BLOCK_Q * GROUP] f32, base 2
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    num_requests,
    num_kv_heads,
    max_queries,
    budget,
    stride_ot,
    stride_oh,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partial results of one row, BLOCK_D of its columns, in every GRID-th request that has more than one.

    Finding the request needs the lengths only, so with programmatic launch it happens while the parts are computed: the
    split kernel lets this one start when its own wait is over, so the lengths are there before this one's wait.
    """
    lane = tl.program_id(0) // (BLOCK_Q * GROUP)
    row = tl.program_id(0) % (BLOCK_Q * GROUP)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    lanes = tl.num_programs(0) // (BLOCK_Q * GROUP)
    query = lane // num_kv_heads * BLOCK_Q + row // GROUP
    q_head = (lane % num_kv_heads * GROUP + row % GROUP).to(tl.int64)
    index = tl.program_id(2)
    request = 0
    while request < num_requests:
        request, _, slot, all_tiles = _schedule(
            index, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, budget, window, BLOCK_N, 32, True
        )
        pdl_wait(PDL)
        out_row = tl.load(query_start_loc_ptr + request, mask=request < num_requests, other=0)
        query_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_requests, other=0)
        if out_row + query < query_end:
            tiles = _tiles(request, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_N)
            splits = _splits(tiles, all_tiles, budget)
            acc = tl.zeros([BLOCK_D], tl.float32)
            peak = NOT_YET
            total = 0.0
            for first in range(0, splits, BLOCK_S):
                part = first + tl.arange(0, BLOCK_S)
                rows = ((slot + part) * lanes + lane) * (BLOCK_Q * GROUP) + row
                lse = tl.load(lse_ptr + rows, mask=part < splits, other=float("-inf"))
                mask = (part < splits)[:, None] & mask_d
                partial = tl.load(partial_ptr + rows[:, None] * HEAD_DIM + offs_d, mask=mask, other=0.0)
                new_peak = tl.maximum(peak, tl.max(lse))
                weights = tl.exp2(lse - new_peak)
                decay = tl.exp2(peak - new_peak)
                total = total * decay + tl.sum(weights)
                acc = acc * decay + tl.sum(weights[:, None] * partial, 0)
                peak = new_peak
            acc *= 1.0 / tl.where(total > 0, total, 1.0)
            out = out_ptr + (out_row + query).to(tl.int64) * stride_ot + q_head * stride_oh + offs_d
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask_d)
        index += tl.num_programs(2)


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "min_queries"], debug=DEBUG)
def prefill_kernel(
    out_ptr,  # [T, Hq, D]
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    v_ptr,  # [num_blocks, BLOCK_SIZE, Hkv, D]
    table_ptr,  # [R, M] int32
    query_start_loc_ptr,  # [R + 1] int32
    seq_lens_ptr,  # [R] int32
    k_scale_ptr,  # [1] or [Hkv] f32
    v_scale_ptr,  # [1] or [Hkv] f32
    num_requests,
    num_blocks,
    min_queries,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_tr,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """BLOCK_Q queries of one request, one key-value head and BLOCK_V columns, over all their visible keys.

    Query blocks of request `r` have the numbers from `query_start_loc[r] // BLOCK_Q + r` on, which never overlap, so
    the grid follows from the sizes of the batch alone; numbers left over end at once. Last blocks start first: they
    have the most keys.
    """
    COLUMNS: tl.constexpr = (HEAD_DIM + BLOCK_V - 1) // BLOCK_V
    head = tl.program_id(0) // COLUMNS
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    request = -1
    BLOCK_R: tl.constexpr = 128
    for base in range(0, num_requests, BLOCK_R):
        requests = base + tl.arange(0, BLOCK_R)
        starts = tl.load(query_start_loc_ptr + requests, mask=requests < num_requests, other=0)
        begun = (requests < num_requests) & (starts // BLOCK_Q + requests <= block)
        request += tl.sum(begun.to(tl.int32))
    row_begin = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - row_begin
    seq_len = tl.load(seq_lens_ptr + request)
    first_query = (block - row_begin // BLOCK_Q - request) * BLOCK_Q
    if (query_len < min_queries) | (first_query >= query_len):
        return
    first_position = seq_len - query_len + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, seq_len) - 1

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = first_query + offs_m // GROUP
    mask_m = (offs_m < BLOCK_Q * GROUP) & (query < query_len)
    positions = tl.where(mask_m, seq_len - query_len + query, -1)
    row = (row_begin + query).to(tl.int64)
    q_head = (head * GROUP + offs_m % GROUP).to(tl.int64)
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)
    q = tl.load(q_ptr + (row * stride_qt + q_head * stride_qh)[:, None] + offs_d, mask=mask, other=0.0)

    offs_v = tl.program_id(0) % COLUMNS * BLOCK_V + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], NOT_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table_ptr += request.to(tl.int64) * stride_tr
    head_offset = head.to(tl.int64)
    k_ptr += head_offset * stride_kh
    v_ptr += head_offset * stride_vh
    scale = _score_scale(scale, k_scale_ptr, head, softcap, K_SCALES)
    begin = 0
    end = last_position + 1
    # Only the tiles at the window's edge and on the diagonal need masks; those between are visible to every row.
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0)
        edge = tl.maximum(last_position - window + 1 - begin, 0)
        inner = begin + (edge + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        acc, peak, total = _attend(
            acc, peak, total, q, positions, begin, tl.minimum(inner, end), table_ptr, k_ptr, v_ptr, offs_v,
            stride_kb, stride_ks, stride_vb, stride_vs, num_blocks, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, True,
        )  # fmt: skip
        begin = inner
    diagonal = begin + tl.maximum(first_position + 1 - begin, 0) // BLOCK_N * BLOCK_N
    acc, peak, total = _attend(
        acc, peak, total, q, positions, begin, diagonal, table_ptr, k_ptr, v_ptr, offs_v,
        stride_kb, stride_ks, stride_vb, stride_vs, num_blocks, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, False,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, q, positions, diagonal, end, table_ptr, k_ptr, v_ptr, offs_v,
        stride_kb, stride_ks, stride_vb, stride_vs, num_blocks, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, True,
    )  # fmt: skip
    row, q_head, mask_m = _output_rows(query_start_loc_ptr, request, first_query, head, offs_m, GROUP, BLOCK_Q)
    mask = mask_m[:, None] & (offs_v < HEAD_DIM)
    norm = 1.0 / tl.where(total > 0, total, 1.0)
    if v_scale_ptr is not None:
        norm *= tl.load(v_scale_ptr + head % V_SCALES)
    out = out_ptr + (row * stride_ot + q_head * stride_oh)[:, None] + offs_v
    tl.store(out, (acc * norm[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
