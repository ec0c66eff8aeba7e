"""The kernels of `draft_inputs.py` and their launch settings.

Each is one launch of many small programs that wait for two or three dependent loads, so what counts is that all
programs are in flight at once and that the launch itself overlaps the kernel before it (`_pdl.py`).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from tridraft.kernels._op import DEBUG, Arch, cdiv, next_power_of_2
from tridraft.kernels._pdl import pdl_options, pdl_wait


@triton.jit
def _slot_at(position, request, block_table_ptr, stride_bt_r, block_size, num_columns, max_model_len, mask):
    """Slot of `position` for `request`; −1 past the end, where no block is reserved and where `mask` is false."""
    position = position.to(tl.int64)
    column = position // block_size
    inside = mask & (position >= 0) & (position < max_model_len) & (column < num_columns)
    block = tl.load(block_table_ptr + request.to(tl.int64) * stride_bt_r + column, mask=inside, other=-1).to(tl.int64)
    return tl.where(inside & (block >= 0), block * block_size + position % block_size, -1)


@triton.jit
def _bonus_at(slot, sampled, last_sampled_ptr, next_prefill_ptr, live):
    """The next token of a request: the sampled one, or the prompt's own where nothing was sampled."""
    token = tl.load(last_sampled_ptr + slot, mask=live & (sampled > 0), other=0).to(tl.int64)
    prompt = tl.load(next_prefill_ptr + slot, mask=live & (sampled <= 0), other=0).to(tl.int64)
    return tl.where(sampled > 0, token, prompt)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_rows", "num_slots"], debug=DEBUG)
def prefill_inputs_kernel(
    target_ids_ptr,  # [T] int
    target_positions_ptr,  # [T] int
    query_start_loc_ptr,  # [R + 1] int
    idx_mapping_ptr,  # [R] int
    last_sampled_ptr,  # [S] int
    next_prefill_ptr,  # [S] int
    num_sampled_ptr,  # [R] int
    num_rejected_ptr,  # [R] int
    seq_lens_ptr,  # [R] int, or None as the last four outputs are
    input_ids_ptr,  # [num_rows] int
    positions_ptr,  # [num_rows] int
    last_token_indices_ptr,  # [B] int
    out_query_start_loc_ptr,  # [B + 1] int
    out_seq_lens_ptr,  # [B] int
    out_idx_mapping_ptr,  # [B] int
    out_num_rejected_ptr,  # [B] int
    num_reqs,
    num_tokens,
    num_rows,
    num_slots,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, s) writes every s-th block of request r's rows; request R stands for the rows behind the last."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    split = tl.program_id(1)
    is_request = request < num_reqs
    begin = tl.load(query_start_loc_ptr + tl.minimum(request, num_reqs))
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
    end = tl.where(is_request, end, tl.where(request == num_reqs, num_rows, begin))
    slot = tl.load(idx_mapping_ptr + request, mask=is_request, other=-1)
    tl.device_assert(slot < num_slots, "idx_mapping: slot out of range")
    live = slot >= 0
    rejected = tl.load(num_rejected_ptr + request, mask=live, other=0)
    sampled = tl.load(num_sampled_ptr + request, mask=live, other=0)
    bonus = _bonus_at(slot, sampled, last_sampled_ptr, next_prefill_ptr, live)

    last = tl.where(live, tl.maximum(end - 1 - rejected, begin), -1)
    if split == 0:
        is_row = request < tl.num_programs(0) - 1
        index = tl.where(live, tl.minimum(last, num_tokens - 1), 0)
        tl.store(last_token_indices_ptr + request, index, mask=is_row)
        if seq_lens_ptr is not None:
            length = tl.load(seq_lens_ptr + request, mask=live, other=0)
            tl.store(out_query_start_loc_ptr + request, begin)
            tl.store(out_seq_lens_ptr + request, length, mask=is_row)
            tl.store(out_idx_mapping_ptr + request, slot, mask=is_row)
            tl.store(out_num_rejected_ptr + request, rejected, mask=is_row)
    for start in range(begin + split * BLOCK, end, tl.num_programs(1) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < end
        shifted = tl.load(target_ids_ptr + rows + 1, mask=mask & (rows < last), other=0).to(tl.int64)
        position = tl.load(target_positions_ptr + rows, mask=mask & (rows <= last), other=0)
        ids = tl.where(rows < last, shifted, tl.where(rows == last, bonus, 0))
        tl.store(input_ids_ptr + rows, ids, mask=mask)
        tl.store(positions_ptr + rows, position, mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "num_tokens", "num_slots", "max_model_len", "position_shift"], debug=DEBUG)
def decode_inputs_kernel(
    hidden_ptr,  # [T, H] float
    query_start_loc_ptr,  # [R + 1] int
    seq_lens_ptr,  # [R] int
    idx_mapping_ptr,  # [R] int
    num_rejected_ptr,  # [R] int
    tokens_ptr,  # [R] int, or None: the bonus rule
    last_sampled_ptr,  # [S] int
    next_prefill_ptr,  # [S] int
    num_sampled_ptr,  # [R] int
    input_ids_ptr,  # [B] int
    positions_ptr,  # [B] int
    out_seq_lens_ptr,  # [B] int32
    out_hidden_ptr,  # [B, H] float
    out_idx_mapping_ptr,  # [B] int, or None
    block_table_ptr,  # [B, M] int, or None: no slots
    slot_mapping_ptr,  # [B] int64
    num_reqs,
    num_tokens,
    num_slots,
    hidden_size,
    num_columns,
    stride_bt_r,
    stride_ht,
    stride_or,
    block_size,
    max_model_len,
    position_shift,
    ADVANCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, c) copies column block c of request r's last accepted row; c = 0 writes its scalars too."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    column = tl.program_id(1)
    slot = tl.load(idx_mapping_ptr + request, mask=request < num_reqs, other=-1)
    tl.device_assert(slot < num_slots, "idx_mapping: slot out of range")
    live = slot >= 0
    rejected = tl.load(num_rejected_ptr + request, mask=live, other=0)
    begin = tl.load(query_start_loc_ptr + request, mask=live, other=0)
    end = tl.load(query_start_loc_ptr + request + 1, mask=live, other=1)
    row = tl.minimum(tl.maximum(end - 1 - rejected, begin), num_tokens - 1)

    offs_h = column * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < tl.where(live, hidden_size, 0)
    hidden = tl.load(hidden_ptr + row.to(tl.int64) * stride_ht + offs_h, mask=mask_h, other=0.0)
    tl.store(out_hidden_ptr + request.to(tl.int64) * stride_or + offs_h, hidden, mask=mask_h)

    if column == 0:
        if out_idx_mapping_ptr is not None:
            tl.store(out_idx_mapping_ptr + request, slot)
        length = tl.load(seq_lens_ptr + request, mask=live, other=0)
        length = tl.maximum(length - rejected, 0)
        if tokens_ptr is None:
            sampled = tl.load(num_sampled_ptr + request, mask=live, other=0)
            token = _bonus_at(slot, sampled, last_sampled_ptr, next_prefill_ptr, live)
        else:
            token = tl.load(tokens_ptr + request, mask=live, other=0)
        position = tl.where(live, tl.maximum(length + position_shift, 0), 0)
        tl.store(input_ids_ptr + request, token)
        tl.store(positions_ptr + request, tl.minimum(position, max_model_len - 1))
        has_slot = True
        if block_table_ptr is not None:
            kv_slot = _slot_at(
                position, request, block_table_ptr, stride_bt_r, block_size, num_columns, max_model_len, live
            )
            tl.store(slot_mapping_ptr + request, kv_slot)
            has_slot = kv_slot >= 0
        if ADVANCE:
            length = tl.where(has_slot, length + 1, length)
        tl.store(out_seq_lens_ptr + request, tl.where(live, tl.minimum(length, max_model_len), 0))


@triton.jit(do_not_specialize=["max_model_len"])
def update_inputs_kernel(
    tokens_ptr,  # [R] int
    hidden_ptr,  # [R, H] float, or None
    idx_mapping_ptr,  # [R] int
    input_ids_ptr,  # [R] int
    positions_ptr,  # [R] int
    seq_lens_ptr,  # [R] int32
    out_hidden_ptr,  # [R, H] float
    block_table_ptr,  # [R, M] int, or None: no slots
    slot_mapping_ptr,  # [R] int64
    hidden_size,
    num_columns,
    stride_bt_r,
    stride_hr,
    stride_or,
    block_size,
    max_model_len,
    ADVANCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, c) copies column block c of request r's hidden row; c = 0 writes its scalars too."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    column = tl.program_id(1)
    live = tl.load(idx_mapping_ptr + request) >= 0
    if hidden_ptr is not None:
        offs_h = column * BLOCK_H + tl.arange(0, BLOCK_H)
        mask_h = offs_h < tl.where(live, hidden_size, 0)
        hidden = tl.load(hidden_ptr + request.to(tl.int64) * stride_hr + offs_h, mask=mask_h, other=0.0)
        tl.store(out_hidden_ptr + request.to(tl.int64) * stride_or + offs_h, hidden, mask=mask_h)

    if column == 0:
        token = tl.load(tokens_ptr + request, mask=live, other=0)
        tl.store(input_ids_ptr + request, token)
        position = tl.load(positions_ptr + request, mask=live, other=0)
        length = tl.load(seq_lens_ptr + request, mask=live, other=0)
        if ADVANCE:
            position = tl.where(live, position + 1, 0)
        tl.store(positions_ptr + request, tl.minimum(position, max_model_len - 1))
        has_slot = live
        if block_table_ptr is not None:
            slot = _slot_at(
                position, request, block_table_ptr, stride_bt_r, block_size, num_columns, max_model_len, live
            )
            tl.store(slot_mapping_ptr + request, slot)
            has_slot = slot >= 0
        if ADVANCE:
            length = tl.minimum(tl.where(has_slot, length + 1, length), max_model_len)
        tl.store(seq_lens_ptr + request, length)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "max_model_len"])
def slot_mapping_kernel(
    positions_ptr,  # [T] int
    query_start_loc_ptr,  # [R + 1] int
    block_table_ptr,  # [R, M] int
    idx_mapping_ptr,  # [R] int, or None
    num_rejected_ptr,  # [R] int, or None
    out_ptr,  # [num_rows] int64
    num_reqs,
    num_rows,
    num_columns,
    stride_bt_r,
    block_size,
    max_model_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (r, s) writes every s-th block of request r's rows; request R stands for the rows behind the last."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    is_request = request < num_reqs
    begin = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=num_rows)
    last = tl.where(is_request, end, begin)
    if idx_mapping_ptr is not None:
        last = tl.where(tl.load(idx_mapping_ptr + request, mask=is_request, other=-1) >= 0, last, begin)
    if num_rejected_ptr is not None:
        last -= tl.load(num_rejected_ptr + request, mask=is_request, other=0)
    for start in range(begin + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        mask = rows < last
        position = tl.load(positions_ptr + rows, mask=mask, other=-1)
        slot = _slot_at(position, request, block_table_ptr, stride_bt_r, block_size, num_columns, max_model_len, mask)
        tl.store(out_ptr + rows, slot, mask=rows < end)


@dataclass(frozen=True)
class Launch:
    """How an operation is launched: programs that share a row or a request, and the kernel's options."""

    splits: int
    options: dict[str, Any]


@lru_cache
def token_launch(num_requests: int, num_rows: int, arch: Arch) -> Launch:
    """Launch settings of the operations over packed rows: each request's rows in blocks, shared by the splits."""
    # A verify batch has K + 1 rows a request: one block, and a single warp has the shortest way from load to store.
    block = 256
    # Only a prompt chunk has more rows. Which request owns it is not known on the host, so each gets the splits that
    # keep 128 programs in flight, as many as every supported card runs at once; those without rows leave at once.
    splits = min(cdiv(max(num_rows, 1), block), max(1, 128 // max(num_requests, 1)))
    return Launch(splits, {"BLOCK": block, "num_warps": 1, **pdl_options(arch)})


@lru_cache
def row_launch(hidden_size: int, arch: Arch) -> Launch:
    """Launch settings of the operations with one row a request: its hidden row in blocks of columns."""
    # A program waits for two dependent loads (row index, then row), so a wide row gets more programs rather than
    # longer ones; 256 elements are one 16-byte load a lane in bf16.
    block = min(next_power_of_2(max(hidden_size, 1)), 1024)
    options = {"BLOCK_H": block, "num_warps": max(1, block // 256), **pdl_options(arch)}
    return Launch(max(1, cdiv(hidden_size, block)), options)
