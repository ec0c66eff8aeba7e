"""The definitions of `draft_inputs.py`, in PyTorch."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def request_of_row(query_start_loc: Tensor, num_rows: int) -> Tensor:
    """The request that owns each row; R for the rows behind the last request."""
    rows = torch.arange(num_rows, device=query_start_loc.device)
    return torch.searchsorted(query_start_loc[1:].long(), rows, right=True)


def last_accepted_row(query_start_loc: Tensor, num_rejected: Tensor) -> Tensor:
    """Each request's last accepted row; its first row where a stale count rejects them all."""
    begin, end = query_start_loc[:-1].long(), query_start_loc[1:].long()
    return torch.maximum(end - 1 - num_rejected, begin)


def bonus_token(idx_mapping: Tensor, last_sampled: Tensor, next_prefill_tokens: Tensor, num_sampled: Tensor) -> Tensor:
    slots = idx_mapping.long().clamp(min=0)
    return torch.where(num_sampled > 0, last_sampled[slots].long(), next_prefill_tokens[slots].long())


def _slots(positions: Tensor, block_rows: Tensor, block_size: int, max_model_len: int) -> Tensor:
    """Slot of each position in its row of block ids `[n, M]`; −1 past the end or where no block is reserved."""
    positions = positions.long()
    column = positions // block_size
    inside = (positions >= 0) & (positions < max_model_len) & (column < block_rows.shape[1])
    block = block_rows.gather(1, column.where(inside, 0).unsqueeze(1)).squeeze(1).long()
    return torch.where(inside & (block >= 0), block * block_size + positions % block_size, -1)


def prepare_prefill_inputs_reference(
    target_input_ids: Tensor,
    target_positions: Tensor,
    query_start_loc: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition; see `prepare_prefill_inputs`. Returns (input_ids, positions, last_token_indices)."""
    num_tokens = target_input_ids.shape[0]
    live = idx_mapping >= 0
    last = last_accepted_row(query_start_loc, num_rejected)
    bonus = bonus_token(idx_mapping, last_sampled, next_prefill_tokens, num_sampled)

    row = torch.arange(num_rows, device=last.device)
    request = request_of_row(query_start_loc, num_rows)
    row_last = F.pad(torch.where(live, last, -1), (0, 1), value=-1)[request]
    shifted = F.pad(target_input_ids.long(), (0, max(num_rows - num_tokens, 0) + 1))[1 : num_rows + 1]
    ids = torch.where(row < row_last, shifted, F.pad(bonus, (0, 1))[request])
    positions = F.pad(target_positions.long(), (0, max(num_rows - num_tokens, 0)))[:num_rows]
    accepted = row <= row_last
    return ids.where(accepted, 0), positions.where(accepted, 0), last.clamp(max=num_tokens - 1).where(live, 0)


def _grown(lengths: Tensor, slots: Tensor | None, max_model_len: int) -> Tensor:
    """One key more, if there is a slot for it: attention reads every key that a length counts."""
    return (lengths + 1).clamp(max=max_model_len) if slots is None else lengths + (slots >= 0)


def prepare_decode_inputs_reference(
    hidden: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    num_rejected: Tensor,
    tokens: Tensor,
    block_table: Tensor | None,
    block_size: int,
    advance_positions: bool,
    position_shift: int,
    max_model_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The definition; see `prepare_decode_inputs`. `tokens` already follows the bonus rule.

    Returns (input_ids, positions, seq_lens, row of `hidden`, slots if there is a block table).
    """
    live = idx_mapping >= 0
    length = (seq_lens.long() - num_rejected).clamp(min=0)
    row = last_accepted_row(query_start_loc, num_rejected).clamp(max=hidden.shape[0] - 1)
    positions = (length + position_shift).clamp(min=0).where(live, 0)
    slots = None if block_table is None else _slots(positions, block_table, block_size, max_model_len).where(live, -1)
    length = _grown(length, slots, max_model_len) if advance_positions else length
    lengths = length.clamp(max=max_model_len).where(live, 0)
    return tokens.long().where(live, 0), positions.clamp(max=max_model_len - 1), lengths, row.where(live, 0), slots


def update_draft_inputs_reference(
    tokens: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    block_size: int,
    advance_positions: bool,
    max_model_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The definition; see `update_draft_inputs`.

    Returns (input_ids, positions, seq_lens, slots if there is a block table).
    """
    live = idx_mapping >= 0
    moved = (positions.long() + advance_positions).where(live, 0)
    slots = None if block_table is None else _slots(moved, block_table, block_size, max_model_len).where(live, -1)
    lengths = _grown(seq_lens.long(), slots, max_model_len) if advance_positions else seq_lens.long()
    return tokens.long().where(live, 0), moved.clamp(max=max_model_len - 1), lengths.where(live, 0), slots


def compute_slot_mapping_reference(
    positions: Tensor,
    query_start_loc: Tensor,
    block_table: Tensor,
    block_size: int,
    idx_mapping: Tensor | None,
    num_rejected: Tensor | None,
    max_model_len: int,
) -> Tensor:
    """The definition; see `compute_slot_mapping`."""
    num_reqs = block_table.shape[0]
    if num_reqs == 0:
        return torch.full_like(positions, -1, dtype=torch.int64)
    row = torch.arange(positions.shape[0], device=positions.device)
    request = request_of_row(query_start_loc, positions.shape[0])
    end = query_start_loc[1:].long()
    if num_rejected is not None:
        end = end - num_rejected
    if idx_mapping is not None:
        end = end.where(idx_mapping >= 0, 0)
    written = (request < num_reqs) & (row < F.pad(end, (0, 1))[request])
    slots = _slots(positions, block_table[request.clamp(max=num_reqs - 1)], block_size, max_model_len)
    return slots.where(written, -1)
