"""Triton kernels of `attention.py`, which has the formula, the layout and the launches."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from tridraft.kernels._attention_loop import (
    NOT_YET,
    PAIR,
    attend,
    mean,
    prefetch,
    raise_queries,
    score_scale,
    whole_blocks,
)
from tridraft.kernels._op import DEBUG
from tridraft.kernels._pdl import pdl_wait


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
def _first_key(seq_len, query_len, window):
    """The first key that any query of a request sees."""
    first = seq_len * 0
    if window is not None:
        first = tl.maximum(seq_len - query_len - window + 1, 0)
    return first


@triton.jit
def _tiles(
    requests,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_requests,
    max_queries,
    window,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of keys that the requests have visible; none for one without queries or with more than max_queries."""
    mask = requests < num_requests
    query_len = tl.load(query_start_loc_ptr + requests + 1, mask=mask, other=0)
    query_len -= tl.load(query_start_loc_ptr + requests, mask=mask, other=0)
    keys = tl.load(seq_lens_ptr + requests, mask=mask, other=0)
    first = _first_key(keys, query_len, window)
    keys -= first - first % whole_blocks(BLOCK_SIZE, BLOCK_N)
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_ONLY: tl.constexpr,
):
    """Find part `index` of all requests' parts; with SPLIT_ONLY, request `index` of those in more than one part.

    Returns:
        The request (`num_requests` or more if there is none), the parts before it, the partial results before it
        (requests in one part leave none), and the number of tiles in the batch.
    """
    # Sums of 32-bit integers over one warp's lanes are one instruction each, whose result the compiler knows to be the
    # same for all threads: asynchronous products need that of their operands' addresses.
    BLOCK_R: tl.constexpr = 32
    all_tiles = 0
    for base in range(0, num_requests, BLOCK_R):
        requests = base + tl.arange(0, BLOCK_R)
        tiles = _tiles(
            requests, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_SIZE, BLOCK_N
        )
        all_tiles += tl.sum(tiles)
    request = 0
    parts_before = 0
    partials_before = 0
    seen = 0
    for base in range(0, num_requests, BLOCK_R):
        requests = base + tl.arange(0, BLOCK_R)
        tiles = _tiles(
            requests, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_SIZE, BLOCK_N
        )
        splits = _splits(tiles, all_tiles, budget)
        counted = (splits > 1).to(tl.int32) if SPLIT_ONLY else splits
        before = seen + tl.cumsum(counted) <= index
        request += tl.sum(before.to(tl.int32))
        parts_before += tl.sum(tl.where(before, counted, 0))
        partials_before += tl.sum(tl.where(before & (splits > 1), splits, 0))
        if base + BLOCK_R < num_requests:
            seen += tl.sum(counted)
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
    stride_ks: tl.constexpr,
    stride_kh,
    stride_vb,
    stride_vs: tl.constexpr,
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
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one request's visible keys for BLOCK_Q of its queries, one key-value head and BLOCK_V columns.

    The grid is fixed; how many parts each request gets follows from the lengths on the device, so that all programs
    read about the same number of keys at whatever length. A request in one part is finished here.

    With EARLY, lengths and block table are read before the wait, and the part's first tile is asked for. What the
    predecessor still writes to the cache reaches the L2 cache, from which the tile is loaded behind the wait.
    """
    if not EARLY:
        pdl_wait(PDL)
    COLUMNS: tl.constexpr = (HEAD_DIM + BLOCK_V - 1) // BLOCK_V
    lane = tl.program_id(0) // COLUMNS
    head = lane % num_kv_heads
    part = tl.program_id(1)
    request, parts_before, slot, all_tiles = part, part, 0, 0x7FFFFFFF
    if budget > 1:
        request, parts_before, slot, all_tiles = _schedule(
            part,
            query_start_loc_ptr,
            seq_lens_ptr,
            num_requests,
            max_queries,
            budget,
            window,
            BLOCK_SIZE,
            BLOCK_N,
            False,
        )
    exists = request < num_requests
    row_begin = tl.load(query_start_loc_ptr + request, mask=exists, other=0)
    query_len = tl.load(query_start_loc_ptr + request + 1, mask=exists, other=0) - row_begin
    seq_len = tl.load(seq_lens_ptr + request, mask=exists, other=0)
    first_query = lane // num_kv_heads * BLOCK_Q
    has_queries = (first_query < query_len) & (query_len <= max_queries)
    first_key = _first_key(seq_len, query_len, window)
    key_begin = first_key - first_key % whole_blocks(BLOCK_SIZE, BLOCK_N)
    tiles = tl.maximum((seq_len - key_begin + BLOCK_N - 1) // BLOCK_N, 1)
    splits = _splits(tiles, all_tiles, budget)
    part -= parts_before
    begin = key_begin + part * tiles // splits * BLOCK_N
    end = tl.minimum(key_begin + (part + 1) * tiles // splits * BLOCK_N, seq_len)
    table_ptr += request.to(tl.int64) * stride_tr
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh
    if EARLY:
        if has_queries:
            prefetch(
                table_ptr, k_ptr, v_ptr, begin, end, stride_kb, stride_ks, stride_vb, stride_vs,
                HEAD_DIM, BLOCK_SIZE, BLOCK_N,
            )  # fmt: skip
        pdl_wait(PDL)
    if not has_queries:
        return

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    query = first_query + offs_m // GROUP
    mask_m = (offs_m < BLOCK_Q * GROUP) & (query < query_len)
    positions = tl.where(mask_m, seq_len - query_len + query, -1)
    row = (row_begin + query).to(tl.int64)
    q_head = (head * GROUP + offs_m % GROUP).to(tl.int64)
    mask = mask_m[:, None] & (offs_d < HEAD_DIM)
    q = tl.load(q_ptr + (row * stride_qt + q_head * stride_qh)[:, None] + offs_d, mask=mask, other=0.0)

    PACKED: tl.constexpr = k_ptr.dtype.element_ty == PAIR
    first_v = tl.program_id(0) % COLUMNS * BLOCK_V
    scale = score_scale(scale, k_scale_ptr, head, softcap, K_SCALES)
    q_odd = q
    if PACKED:
        q, scale = raise_queries(q, scale)
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, BLOCK_D // 2, 2]))
    # Four warps that share 16 rows have one product of scores at a time each, and 32 that wait for each other.
    HALVES: tl.constexpr = BLOCK_M == 16 and HEAD_DIM == 512 and k_ptr.dtype == q_ptr.dtype and q.dtype != tl.float32
    if HALVES:
        offs_h = tl.arange(0, BLOCK_D // 2)
        halves = q_ptr + (row * stride_qt + q_head * stride_qh)[:, None] + offs_h
        q = tl.load(halves, mask=mask_m[:, None], other=0.0)
        q_odd = tl.load(halves + BLOCK_D // 2, mask=mask_m[:, None], other=0.0)
    LOADED_V: tl.constexpr = BLOCK_V // 2 if PACKED else BLOCK_V
    acc = tl.zeros([BLOCK_M, LOADED_V], tl.float32)
    peak = tl.full([BLOCK_M], NOT_YET, tl.float32)
    # Warps that share rows have different keys: with their weights added up at the end, a tile has one exchange less.
    WIDE: tl.constexpr = BLOCK_M == 16
    total = tl.zeros([BLOCK_M, BLOCK_N] if WIDE else [BLOCK_M], tl.float32)
    acc, acc_odd, peak, total = attend(
        acc,
        acc,
        peak,
        total,
        q,
        q_odd,
        positions,
        first_key,
        begin,
        end,
        table_ptr,
        k_ptr,
        v_ptr,
        first_v // BLOCK_V * LOADED_V + tl.arange(0, LOADED_V),
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
        BLOCK_N,
        True,
        HALVES,
        False,
    )
    if WIDE:
        total = tl.sum(total, 1)
    row, q_head, mask_m = _output_rows(query_start_loc_ptr, request, first_query, head, offs_m, GROUP, BLOCK_Q)
    offs_v = first_v + tl.arange(0, BLOCK_V)
    mask = mask_m[:, None] & (offs_v < HEAD_DIM)
    acc = mean(acc, acc_odd, total, v_scale_ptr, head, V_SCALES, PACKED, q.dtype)
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
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the partial results of one row, BLOCK_D of its columns, in every GRID-th request that has more than one.

    Finding the request and its parts needs the lengths only, so with programmatic launch it happens while the parts are
    computed: the split kernel lets this one start when its own wait is over, so the lengths are there before this one's
    wait. What comes behind the wait is one round of loads: 0.3 to 0.5 µs less than with the lengths read again.
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
            index,
            query_start_loc_ptr,
            seq_lens_ptr,
            num_requests,
            max_queries,
            budget,
            window,
            BLOCK_SIZE,
            BLOCK_N,
            True,
        )
        out_row = tl.load(query_start_loc_ptr + request, mask=request < num_requests, other=0)
        query_end = tl.load(query_start_loc_ptr + request + 1, mask=request < num_requests, other=0)
        tiles = _tiles(
            request, query_start_loc_ptr, seq_lens_ptr, num_requests, max_queries, window, BLOCK_SIZE, BLOCK_N
        )
        splits = _splits(tiles, all_tiles, budget)
        pdl_wait(PDL)
        if out_row + query < query_end:
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
    stride_ks: tl.constexpr,
    stride_kh,
    stride_vb,
    stride_vs: tl.constexpr,
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
    LOADS_FIRST: tl.constexpr,
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

    PACKED: tl.constexpr = k_ptr.dtype.element_ty == PAIR
    first_v = tl.program_id(0) % COLUMNS * BLOCK_V
    scale = score_scale(scale, k_scale_ptr, head, softcap, K_SCALES)
    q_odd = q
    if PACKED:
        q, scale = raise_queries(q, scale)
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, BLOCK_D // 2, 2]))
    LOADED_V: tl.constexpr = BLOCK_V // 2 if PACKED else BLOCK_V
    offs_v = first_v // BLOCK_V * LOADED_V + tl.arange(0, LOADED_V)
    acc = tl.zeros([BLOCK_M, LOADED_V], tl.float32)
    acc_odd = acc
    peak = tl.full([BLOCK_M], NOT_YET, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    table_ptr += request.to(tl.int64) * stride_tr
    head_offset = head.to(tl.int64)
    k_ptr += head_offset * stride_kh
    v_ptr += head_offset * stride_vh
    first_key = _first_key(last_position + 1, last_position - first_position + 1, window)
    begin = first_key - first_key % whole_blocks(BLOCK_SIZE, BLOCK_N)
    end = last_position + 1
    # Only the tiles at the window's edge and on the diagonal need masks; those between are visible to every row.
    if window is not None:
        edge = tl.maximum(last_position - window + 1 - begin, 0)
        inner = begin + (edge + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        acc, acc_odd, peak, total = attend(
            acc, acc_odd, peak, total, q, q_odd, positions, first_key, begin, tl.minimum(inner, end), table_ptr,
            k_ptr, v_ptr, offs_v, stride_kb, stride_ks, stride_vb, stride_vs, num_blocks, scale, softcap, window,
            HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, False, LOADS_FIRST,
        )  # fmt: skip
        begin = inner
    diagonal = begin + tl.maximum(first_position + 1 - begin, 0) // BLOCK_N * BLOCK_N
    acc, acc_odd, peak, total = attend(
        acc, acc_odd, peak, total, q, q_odd, positions, first_key, begin, diagonal, table_ptr,
        k_ptr, v_ptr, offs_v, stride_kb, stride_ks, stride_vb, stride_vs, num_blocks, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, False, LOADS_FIRST,
    )  # fmt: skip
    acc, acc_odd, peak, total = attend(
        acc, acc_odd, peak, total, q, q_odd, positions, first_key, diagonal, end, table_ptr,
        k_ptr, v_ptr, offs_v, stride_kb, stride_ks, stride_vb, stride_vs, num_blocks, scale, softcap, window,
        HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, False, LOADS_FIRST,
    )  # fmt: skip
    row, q_head, mask_m = _output_rows(query_start_loc_ptr, request, first_query, head, offs_m, GROUP, BLOCK_Q)
    offs_v = first_v + tl.arange(0, BLOCK_V)
    mask = mask_m[:, None] & (offs_v < HEAD_DIM)
    out = out_ptr + (row * stride_ot + q_head * stride_oh)[:, None] + offs_v
    acc = mean(acc, acc_odd, total, v_scale_ptr, head, V_SCALES, PACKED, q.dtype)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
