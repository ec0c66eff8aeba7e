"""Draft inputs: what a drafter reads next, written on the device in one launch.

A target pass computes `T` tokens for `R` requests; request `r` owns the rows from `query_start_loc[r]` up to
`query_start_loc[r + 1]`, of which the last `num_rejected[r]` are rejected drafts. With `P = seq_lens − num_rejected`
accepted, computed keys (positions `0 … P − 1`), the next token is `x_P`: the one just sampled, `last_sampled[slot]`,
or, at the end of a prompt chunk (`num_sampled[r] == 0`), the prompt's own next token, `next_prefill_tokens[slot]`.

| operation | when | row |
|---|---|---|
| `prepare_prefill_inputs` | draft step 0 of a drafter that owns KV | every target row, ids shifted left by one |
| `prepare_decode_inputs` | the first step with one row a request | the last accepted row |
| `update_draft_inputs` | between two draft steps | one a request |
| `compute_slot_mapping` | before a pass that writes KV | every row |

Shapes are those vLLM and SGLang hold: packed rows, `query_start_loc` padded with its last value, `idx_mapping`
(row → request slot, −1 for padding), `seq_lens` padded with 0, block tables `[R, M]` padded with −1 or anything.
Integer tensors are int32 or int64. The values live on the device only, so every operation can be captured.

    prepare_decode_inputs(hidden, query_start_loc, seq_lens, idx_mapping, num_rejected, tokens=drafts[0], …)
"""

from typing import Any, Literal

import torch
from torch import Tensor

from tridraft.kernels._draft_inputs_kernels import (
    decode_inputs_kernel,
    prefill_inputs_kernel,
    row_launch,
    slot_mapping_kernel,
    token_launch,
    update_inputs_kernel,
)
from tridraft.kernels._draft_inputs_reference import (
    bonus_token,
    compute_slot_mapping_reference,
    prepare_decode_inputs_reference,
    prepare_prefill_inputs_reference,
    update_draft_inputs_reference,
)
from tridraft.kernels._op import FLOATS, Impl, arch_of, check_tensor, register, use_triton
from tridraft.kernels._relaunch import Relaunch
from tridraft.kernels.pad_requests import pad_requests_reference

_INTS = (torch.int32, torch.int64)

# These two are launched in front of a graph; the others are recorded into one.
_launch_prefill_inputs, _launch_decode_inputs = Relaunch(prefill_inputs_kernel), Relaunch(decode_inputs_kernel)

_PADDED = ("out_query_start_loc", "out_seq_lens", "out_idx_mapping", "out_num_rejected")


@register("prepare_prefill_inputs", mutates=("input_ids", "positions", "last_token_indices", *_PADDED))
def _prepare_prefill_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor | None,
    input_ids: Tensor,
    positions: Tensor,
    last_token_indices: Tensor,
    out_query_start_loc: Tensor | None,
    out_seq_lens: Tensor | None,
    out_idx_mapping: Tensor | None,
    out_num_rejected: Tensor | None,
    triton: bool,
) -> None:
    num_reqs, num_tokens, num_rows = idx_mapping.shape[0], target_input_ids.shape[0], input_ids.shape[0]
    outputs = (input_ids, positions, last_token_indices)
    padded = (out_query_start_loc, out_seq_lens, out_idx_mapping, out_num_rejected)
    if triton:
        rows = last_token_indices.shape[0]
        launch = token_launch(rows, num_rows, arch_of(input_ids.device))
        target = (target_input_ids, target_positions, query_start_loc, idx_mapping, last_sampled, next_prefill_tokens)
        _launch_prefill_inputs(
            (rows + 1, launch.splits, 1),
            (*target, num_sampled, num_rejected, seq_lens, *outputs, *padded),
            (num_reqs, num_tokens, num_rows, last_sampled.shape[0]),
            launch.options,
        )
        return
    lengths = torch.zeros_like(idx_mapping) if seq_lens is None else seq_lens
    query_start_loc, idx_mapping, lengths, num_sampled, num_rejected = pad_requests_reference(
        last_token_indices.shape[0], query_start_loc, idx_mapping, lengths, num_sampled, num_rejected
    )
    values = prepare_prefill_inputs_reference(
        *(target_input_ids, target_positions, query_start_loc, idx_mapping, last_sampled, next_prefill_tokens),
        *(num_sampled, num_rejected, num_rows),
    )
    for output, value in zip(outputs, values, strict=True):
        output.copy_(value)
    lengths, num_rejected = (count.where(idx_mapping >= 0, 0) for count in (lengths, num_rejected))
    for output, value in zip(padded, (query_start_loc, lengths, idx_mapping, num_rejected), strict=True):
        if output is not None:
            output.copy_(value)


@register(
    "prepare_decode_inputs",
    mutates=("input_ids", "positions", "out_seq_lens", "out_hidden", "out_idx_mapping", "slot_mapping"),
)
def _prepare_decode_inputs(
    hidden: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    num_rejected: Tensor,
    tokens: Tensor | None,
    last_sampled: Tensor | None,
    next_prefill_tokens: Tensor | None,
    num_sampled: Tensor | None,
    input_ids: Tensor,
    positions: Tensor,
    out_seq_lens: Tensor,
    out_hidden: Tensor,
    out_idx_mapping: Tensor | None,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    block_size: int,
    max_model_len: int,
    position_shift: int,
    advance_positions: bool,
    triton: bool,
) -> None:
    num_reqs, (num_rows, hidden_size) = idx_mapping.shape[0], out_hidden.shape
    target = (hidden, query_start_loc, seq_lens, idx_mapping, num_rejected)
    if triton:
        launch = row_launch(hidden_size, arch_of(hidden.device))
        num_slots = 2**31 - 1 if last_sampled is None else last_sampled.shape[0]
        bonus = (tokens, last_sampled, next_prefill_tokens, num_sampled)
        outputs = (input_ids, positions, out_seq_lens, out_hidden, out_idx_mapping, block_table, slot_mapping)
        sizes = (num_reqs, hidden.shape[0], num_slots, hidden_size, *_table_sizes(block_table))
        _launch_decode_inputs(
            (num_rows, launch.splits, 1),
            (*target, *bonus, *outputs),
            (*sizes, hidden.stride(0), out_hidden.stride(0), block_size, max_model_len, position_shift),
            {"ADVANCE": advance_positions, **launch.options},
        )
        return
    if tokens is None:
        assert last_sampled is not None
        assert next_prefill_tokens is not None
        assert num_sampled is not None
        tokens = bonus_token(idx_mapping, last_sampled, next_prefill_tokens, num_sampled)
    query_start_loc, idx_mapping, seq_lens, num_rejected, tokens = pad_requests_reference(
        num_rows, query_start_loc, idx_mapping, seq_lens, num_rejected, tokens
    )
    ids, places, lengths, row, slots = prepare_decode_inputs_reference(
        *(hidden, query_start_loc, seq_lens, idx_mapping, num_rejected, tokens),
        *(block_table, block_size, advance_positions, position_shift, max_model_len),
    )
    input_ids.copy_(ids)
    positions.copy_(places)
    out_seq_lens.copy_(lengths)
    if out_idx_mapping is not None:
        out_idx_mapping.copy_(idx_mapping)
    if hidden.shape[0]:  # a batch of padding alone has no row to copy
        out_hidden.copy_(torch.where((idx_mapping >= 0).unsqueeze(1), hidden[row], out_hidden))
    if slots is not None and slot_mapping is not None:
        slot_mapping.copy_(slots)


@register("update_draft_inputs", mutates=("input_ids", "positions", "seq_lens", "out_hidden", "slot_mapping"))
def _update_draft_inputs(
    tokens: Tensor,
    hidden: Tensor | None,
    idx_mapping: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    out_hidden: Tensor | None,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    block_size: int,
    max_model_len: int,
    advance_positions: bool,
    triton: bool,
) -> None:
    if triton:
        hidden_size = 1 if hidden is None else hidden.shape[1]
        launch = row_launch(hidden_size, arch_of(tokens.device))
        strides = [0 if tensor is None else tensor.stride(0) for tensor in (hidden, out_hidden)]
        kernel: Any = update_inputs_kernel[(idx_mapping.shape[0], launch.splits)]
        kernel(
            *(tokens, hidden, idx_mapping, input_ids, positions, seq_lens, out_hidden, block_table, slot_mapping),
            *(hidden_size, *_table_sizes(block_table), *strides, block_size, max_model_len),
            ADVANCE=advance_positions,
            **launch.options,
        )
        return
    ids, places, lengths, slots = update_draft_inputs_reference(
        tokens, idx_mapping, positions, seq_lens, block_table, block_size, advance_positions, max_model_len
    )
    input_ids.copy_(ids)
    positions.copy_(places)
    seq_lens.copy_(lengths)
    if hidden is not None and out_hidden is not None:
        out_hidden.copy_(torch.where((idx_mapping >= 0).unsqueeze(1), hidden, out_hidden))
    if slots is not None and slot_mapping is not None:
        slot_mapping.copy_(slots)


@register("compute_slot_mapping", mutates=("out",))
def _compute_slot_mapping(
    positions: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    block_size: int,
    idx_mapping: Tensor | None,
    num_rejected: Tensor | None,
    max_model_len: int,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        num_reqs, num_rows = block_table.shape[0], out.shape[0]
        launch = token_launch(num_reqs, num_rows, arch_of(out.device))
        kernel: Any = slot_mapping_kernel[(num_reqs + 1, launch.splits)]
        kernel(
            *(positions, query_start_loc, block_table, idx_mapping, num_rejected, out),
            *(num_reqs, num_rows, *_table_sizes(block_table), block_size, max_model_len),
            **launch.options,
        )
        return
    slots = compute_slot_mapping_reference(
        positions, query_start_loc, block_table, block_size, idx_mapping, num_rejected, max_model_len
    )
    out.fill_(-1)[: positions.shape[0]].copy_(slots)


def _table_sizes(block_table: Tensor | None) -> tuple[int, int]:
    return (0, 0) if block_table is None else (block_table.shape[1], block_table.stride(0))


def _check_ints(device: torch.device, size: int | str, **tensors: Tensor | None) -> None:
    shape = (size,)
    for name, tensor in tensors.items():
        if tensor is not None and not (
            # As nearly always, and in half the time: a pass has a dozen of them.
            tensor.shape == shape and tensor.dtype in _INTS and tensor.device == device and tensor.is_contiguous()
        ):
            check_tensor(name, tensor, shape=shape, dtype=_INTS, device=device)


def _check_slots(
    block_table: Tensor | None, block_size: int | None, slot_mapping: Tensor | None, num_reqs: int, device: torch.device
) -> None:
    given = [argument is not None for argument in (block_table, block_size, slot_mapping)]
    if any(given) and not all(given):
        raise ValueError("block_table, block_size, slot_mapping: got some of the three, needs all or none")
    if block_table is not None and block_size is not None and slot_mapping is not None:
        check_tensor("block_table", block_table, shape=(num_reqs, "M"), dtype=_INTS, device=device)
        check_tensor("slot_mapping", slot_mapping, shape=(num_reqs,), dtype=torch.int64, device=device)
        _check_positive(block_size=block_size)


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, needs at least 1")


def prepare_prefill_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    *,
    input_ids: Tensor,
    positions: Tensor,
    last_token_indices: Tensor,
    seq_lens: Tensor | None = None,
    out_query_start_loc: Tensor | None = None,
    out_seq_lens: Tensor | None = None,
    out_idx_mapping: Tensor | None = None,
    out_num_rejected: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Inputs of draft step 0 over the target's rows: ids shifted left by one, the next token at the last.

    Rejected rows stay in the batch as padding (id 0, position 0), so its shape is the target's. With `seq_lens` and the
    outputs after it, the same launch brings the pass's requests into the buffers of a graph of B ≥ R rows.

    Args:
        target_input_ids: `[T]` tokens of the target pass.
        target_positions: `[T]` their positions.
        query_start_loc: `[R + 1]`.
        idx_mapping: `[R]` request slots; −1 is padding.
        last_sampled: `[S]` last sampled token by slot.
        next_prefill_tokens: `[S]` next prompt token by slot.
        num_sampled: `[R]` tokens this pass sampled; 0 inside a prompt.
        num_rejected: `[R]` rejected drafts at the end of each request's rows.
        input_ids: `[≥ T]` written, every row.
        positions: `[≥ T]` written, every row.
        last_token_indices: `[B]` written: row of the last accepted token, 0 for padding.
        seq_lens: `[R]`, or None as the next four.
        out_query_start_loc: `[B + 1]` written, padded with the last value.
        out_seq_lens: `[B]` written, padded with 0.
        out_idx_mapping: `[B]` written, padded with −1.
        out_num_rejected: `[B]` written, padded with 0.
        impl: "auto", "triton" or "eager".

    >>> def ints(*values): return torch.tensor(values)
    >>> ids, positions, last = torch.empty(6).long(), torch.empty(6).long(), torch.empty(2).long()
    >>> prepare_prefill_inputs(
    ...     ints(11, 12, 13, 21, 22), ints(4, 5, 6, 0, 1), ints(0, 3, 5), ints(1, 0), last_sampled=ints(7, 99),
    ...     next_prefill_tokens=ints(23, 8), num_sampled=ints(2, 0), num_rejected=ints(1, 0),
    ...     input_ids=ids, positions=positions, last_token_indices=last)
    >>> ids.tolist(), positions.tolist(), last.tolist()
    ([12, 99, 0, 22, 23, 0], [4, 5, 0, 0, 1, 0], [1, 4])
    """
    device, num_tokens, num_reqs = target_input_ids.device, target_input_ids.shape[0], idx_mapping.shape[0]
    num_rows, num_slots = input_ids.shape[0], last_sampled.shape[0]
    _check_ints(device, num_tokens, target_input_ids=target_input_ids, target_positions=target_positions)
    _check_ints(device, num_reqs + 1, query_start_loc=query_start_loc)
    _check_ints(device, num_reqs, idx_mapping=idx_mapping, num_sampled=num_sampled, num_rejected=num_rejected)
    num_padded = last_token_indices.shape[0]
    _check_ints(device, num_padded, last_token_indices=last_token_indices)
    _check_ints(device, num_slots, last_sampled=last_sampled, next_prefill_tokens=next_prefill_tokens)
    _check_ints(device, num_rows, input_ids=input_ids, positions=positions)
    if num_rows < num_tokens:
        raise ValueError(f"input_ids: got {num_rows} rows, needs at least {num_tokens}")
    if num_padded < num_reqs:
        raise ValueError(f"last_token_indices: got {num_padded} rows, needs at least {num_reqs}")
    requests = (seq_lens, out_query_start_loc, out_seq_lens, out_idx_mapping, out_num_rejected)
    given = [argument is not None for argument in requests]
    if any(given) and not all(given):
        raise ValueError(f"seq_lens, {', '.join(_PADDED)}: got some of the five, needs all or none")
    _check_ints(device, num_reqs, seq_lens=seq_lens)
    _check_ints(device, num_padded + 1, out_query_start_loc=out_query_start_loc)
    padded = {"out_idx_mapping": out_idx_mapping, "out_num_rejected": out_num_rejected}
    _check_ints(device, num_padded, out_seq_lens=out_seq_lens, **padded)
    _prepare_prefill_inputs(
        *(target_input_ids, target_positions, query_start_loc, idx_mapping, last_sampled, next_prefill_tokens),
        *(num_sampled, num_rejected, seq_lens, input_ids, positions, last_token_indices),
        *(out_query_start_loc, out_seq_lens, out_idx_mapping, out_num_rejected, use_triton(impl, target_input_ids)),
    )


def prepare_decode_inputs(
    hidden: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    num_rejected: Tensor,
    *,
    tokens: Tensor | None = None,
    last_sampled: Tensor | None = None,
    next_prefill_tokens: Tensor | None = None,
    num_sampled: Tensor | None = None,
    advance_positions: bool,
    draft_position: Literal["bonus", "last_computed"] = "bonus",
    max_model_len: int,
    input_ids: Tensor,
    positions: Tensor,
    out_seq_lens: Tensor,
    out_hidden: Tensor,
    out_idx_mapping: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int | None = None,
    slot_mapping: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Inputs of the first draft step with one row a request: the last accepted row of each.

    With constant positions the row is the first draft step itself: position P ("bonus") or P − 1 ("last_computed"),
    keys `0 … P − 1`. A drafter that owns KV runs its step 1 here: position P, P + 1 keys, both clamped to
    `max_model_len`; where position P does not exist or has no block, its slot is −1 and no key is counted. Padding
    rows, and the outputs' rows past the pass's R, get id 0, position 0, length 0 and slot −1; their hidden row is left
    alone. So one launch brings a pass into the buffers of a graph of B ≥ R rows.

    Args:
        hidden: `[T, H]` hidden states of the pass before: the target's, or draft step 0's.
        query_start_loc: `[R + 1]` rows of that pass.
        seq_lens: `[R]` lengths after that pass, rejected tokens included.
        idx_mapping: `[R]` request slots; −1 is padding.
        num_rejected: `[R]`.
        tokens: `[R]` tokens to read; None takes the bonus token from the next three.
        last_sampled: `[S]` last sampled token by slot.
        next_prefill_tokens: `[S]` next prompt token by slot.
        num_sampled: `[R]` tokens sampled after that pass; 0 inside a prompt.
        advance_positions: whether the drafter owns KV.
        draft_position: rotary position of a drafter with constant positions.
        max_model_len: positions end below it.
        input_ids: `[B]` written.
        positions: `[B]` written.
        out_seq_lens: `[B]` int32, written.
        out_hidden: `[B, H]` written.
        out_idx_mapping: `[B]` written: `idx_mapping`, −1 past its end.
        block_table: `[B, M]`; with the next two, slots are written in the same launch.
        block_size: tokens a block.
        slot_mapping: `[B]` int64, written.
        impl: "auto", "triton" or "eager".
    """
    device, num_reqs, num_rows = hidden.device, idx_mapping.shape[0], out_hidden.shape[0]
    check_tensor("hidden", hidden, shape=("T", "H"), dtype=FLOATS)
    check_tensor("out_hidden", out_hidden, shape=("B", hidden.shape[1]), dtype=hidden.dtype, device=device)
    check_tensor("out_seq_lens", out_seq_lens, dtype=torch.int32)
    _check_ints(device, num_reqs + 1, query_start_loc=query_start_loc)
    _check_ints(device, num_reqs, seq_lens=seq_lens, idx_mapping=idx_mapping, num_rejected=num_rejected)
    _check_ints(device, num_reqs, tokens=tokens, num_sampled=num_sampled)
    _check_ints(device, num_rows, input_ids=input_ids, positions=positions, out_seq_lens=out_seq_lens)
    _check_ints(device, num_rows, out_idx_mapping=out_idx_mapping)
    if num_rows < num_reqs:
        raise ValueError(f"out_hidden: got {num_rows} rows, needs at least {num_reqs}")
    slots = "S" if last_sampled is None else last_sampled.shape[0]
    _check_ints(device, slots, last_sampled=last_sampled, next_prefill_tokens=next_prefill_tokens)
    bonus_rule = last_sampled is not None and next_prefill_tokens is not None and num_sampled is not None
    if tokens is None and not bonus_rule:
        raise ValueError("tokens: got None, needs it or last_sampled, next_prefill_tokens and num_sampled")
    if draft_position not in ("bonus", "last_computed"):
        raise ValueError(f"draft_position: got {draft_position!r}, needs 'bonus' or 'last_computed'")
    _check_positive(max_model_len=max_model_len)
    _check_slots(block_table, block_size, slot_mapping, num_rows, device)
    triton = use_triton(impl, hidden)
    if num_rows:
        _prepare_decode_inputs(
            *(hidden, query_start_loc, seq_lens, idx_mapping, num_rejected),
            *(tokens, last_sampled, next_prefill_tokens, num_sampled),
            *(input_ids, positions, out_seq_lens, out_hidden, out_idx_mapping, block_table, slot_mapping),
            *(block_size or 1, max_model_len, -1 if draft_position == "last_computed" and not advance_positions else 0),
            *(advance_positions, triton),
        )


def update_draft_inputs(
    tokens: Tensor,
    hidden: Tensor | None,
    idx_mapping: Tensor,
    *,
    advance_positions: bool,
    max_model_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    out_hidden: Tensor | None = None,
    block_table: Tensor | None = None,
    block_size: int | None = None,
    slot_mapping: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Inputs of the next draft step, in place: token and hidden state; positions, lengths and slots if they advance.

    Past the end, positions and lengths stay at their limit and the slot is −1; where no block is reserved, the slot is
    −1 and the length stays, so that attention reads no key that is not there. Padding rows get id 0, position 0, length
    0 and slot −1; their hidden row is left alone. (With constant positions, a sampler that writes into `input_ids` and
    a model that writes into `out_hidden` need no update at all.)

    Args:
        tokens: `[R]` tokens the step before sampled.
        hidden: `[R, H]` its hidden states; None leaves `out_hidden` alone.
        idx_mapping: `[R]` request slots; −1 is padding.
        advance_positions: whether the drafter owns KV.
        max_model_len: positions end below it.
        input_ids: `[R]` written.
        positions: `[R]` updated.
        seq_lens: `[R]` int32, updated.
        out_hidden: `[R, H]` written.
        block_table: `[R, M]`; with the next two, slots are written in the same launch.
        block_size: tokens a block.
        slot_mapping: `[R]` int64, written.
        impl: "auto", "triton" or "eager".
    """
    device, num_reqs = tokens.device, idx_mapping.shape[0]
    _check_ints(device, num_reqs, tokens=tokens, idx_mapping=idx_mapping)
    _check_ints(device, num_reqs, input_ids=input_ids, positions=positions, seq_lens=seq_lens)
    if hidden is not None:
        check_tensor("hidden", hidden, shape=(num_reqs, "H"), dtype=FLOATS, device=device)
        if out_hidden is None:
            raise ValueError("out_hidden: got None, needs a tensor to copy hidden into")
        check_tensor("out_hidden", out_hidden, shape=tuple(hidden.shape), dtype=hidden.dtype, device=device)
    _check_positive(max_model_len=max_model_len)
    _check_slots(block_table, block_size, slot_mapping, num_reqs, device)
    if slot_mapping is not None and not advance_positions:
        raise ValueError("slot_mapping: got a tensor, needs None: constant positions write no KV")
    triton = use_triton(impl, tokens)
    if num_reqs:
        _update_draft_inputs(
            *(tokens, hidden, idx_mapping, input_ids, positions, seq_lens, out_hidden if hidden is not None else None),
            *(block_table, slot_mapping, block_size or 1, max_model_len, advance_positions, triton),
        )


def compute_slot_mapping(
    positions: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    idx_mapping: Tensor | None = None,
    num_rejected: Tensor | None = None,
    max_model_len: int,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Cache slot `block_table[r, p // block_size] · block_size + p % block_size` of each row.

    −1, which every cache write skips: padding and rejected rows, positions at or past `max_model_len` (give them
    unclamped), and blocks that are not reserved (an entry below 0, or a column the table does not have).

    Args:
        positions: `[T]`.
        query_start_loc: `[R + 1]`.
        block_table: `[R, M]` block ids; its last dimension contiguous.
        block_size: tokens a block; 1 for a token pool.
        idx_mapping: `[R]` request slots; −1 is padding. None: every request is real.
        num_rejected: `[R]` rejected drafts at the end of each request's rows.
        max_model_len: positions end below it.
        out: `[≥ T]` int64, written, every row.
        impl: "auto", "triton" or "eager".

    Returns:
        `[T]` int64, or `out`.

    >>> compute_slot_mapping(torch.tensor([62, 63, 64, 0]), torch.tensor([0, 3]), torch.tensor([[2, 5, 1, 7]]), 16,
    ...                      max_model_len=64).tolist()
    [126, 127, -1, -1]
    """
    device, num_reqs = positions.device, block_table.shape[0]
    _check_ints(device, "T", positions=positions)
    _check_ints(device, num_reqs + 1, query_start_loc=query_start_loc)
    _check_ints(device, num_reqs, idx_mapping=idx_mapping, num_rejected=num_rejected)
    check_tensor("block_table", block_table, shape=("R", "M"), dtype=_INTS, device=device)
    _check_positive(block_size=block_size, max_model_len=max_model_len)
    if out is None:
        out = torch.empty(positions.shape[0], dtype=torch.int64, device=device)
    check_tensor("out", out, shape=("≥T",), dtype=torch.int64, device=device)
    if out.shape[0] < positions.shape[0]:
        raise ValueError(f"out: got {out.shape[0]} rows, needs at least {positions.shape[0]}")
    requests = (idx_mapping, num_rejected)
    triton = use_triton(impl, positions)
    _compute_slot_mapping(positions, query_start_loc, block_table, block_size, *requests, max_model_len, out, triton)
    return out
