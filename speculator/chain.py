"""A chain of modules, each of which looks one token further ahead (MTP with more than one module).

Module s pairs the state of token i with token i + 1 + s, so it runs over all tokens of a pass with ids shifted by s
more, the drafts before it at the end. Its keys of the last s tokens stand for drafts. Where those are rejected the keys
are wrong, and the states that lead to the right ones are of the pass before: so n − 1 rows of each request are kept,
and run again in front of its next ones. That is done by PyTorch before a replay, in about thirty small launches.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tridraft.kernels._draft_inputs_reference import last_accepted_row, request_of_row
from tridraft.speculator.batch import InputBatch


def follow(input_ids: Tensor, query_start_loc: Tensor, num_rejected: Tensor, drafted: Tensor) -> Tensor:
    """Ids `[T]` one token further: each row gets its request's next one, the last accepted row the draft.

    Args:
        input_ids: `[T]`.
        query_start_loc: `[R + 1]`.
        num_rejected: `[R]`.
        drafted: `[R]`.

    >>> def ints(*values): return torch.tensor(values)
    >>> follow(ints(11, 12, 13, 21, 22), ints(0, 3, 5), ints(1, 0), ints(99, 88))[[0, 1, 3, 4]].tolist()
    [12, 99, 22, 88]
    """
    row = torch.arange(input_ids.shape[0], device=input_ids.device)
    request = request_of_row(query_start_loc, input_ids.shape[0]).clamp(max=drafted.shape[0] - 1)
    last = last_accepted_row(query_start_loc, num_rejected)
    return torch.where(row == last[request], drafted[request], input_ids.roll(-1))


class PassHistory:
    """The last accepted rows of each slot: ids and the target's hidden states.

    They are repeated only in front of the rows that continue them, those whose first position is where the slot's last
    ones ended. A pass that is drafted from again, or a request that begins in a slot, finds nothing here, and the keys
    of tokens before the pass stay as they are. (A request that takes a slot over at the very position where another
    ended, behind a cached prefix, is not told from it: `num_rows` of its keys are then wrong, which costs acceptance.)

    Args:
        like: `[slots, H]`, of the hidden states' dtype and device.
        num_rows: rows kept of each.
    """

    def __init__(self, like: Tensor, num_rows: int) -> None:
        slots, width = like.shape
        self.num_rows = num_rows
        # One slot more, for what rows of padding write.
        self._ids = torch.zeros(slots + 1, num_rows, dtype=torch.int64, device=like.device)
        self._hidden = like.new_zeros(slots + 1, num_rows, width)
        self._end = torch.full((slots + 1,), -1, dtype=torch.int64, device=like.device)

    def _slots(self, batch: InputBatch) -> Tensor:
        return torch.where(batch.idx_mapping < 0, self._ids.shape[0] - 1, batch.idx_mapping.long())

    def repeat(self, batch: InputBatch, hidden: Tensor) -> tuple[InputBatch, Tensor]:
        """The pass with each request's kept rows in front; rows of which none is kept have positions below 0."""
        count = self.num_rows
        if not batch.num_reqs:
            return batch, hidden
        num_rows = batch.num_tokens + count * batch.num_reqs
        starts = batch.query_start_loc + count * torch.arange(batch.num_reqs + 1, device=hidden.device)
        request = request_of_row(starts, num_rows).clamp(max=batch.num_reqs - 1)
        offset = torch.arange(num_rows, device=hidden.device) - starts[request] - count
        repeated, source = offset < 0, (batch.query_start_loc[request] + offset).clamp(min=0)
        slots = self._slots(batch)
        slot, place = slots[request], (offset + count).clamp(max=count - 1)
        first = batch.seq_lens - batch.query_start_loc.diff()
        continued = (self._end[slots] == first)[request]
        extended = replace(
            batch,
            input_ids=torch.where(repeated, self._ids[slot, place], batch.input_ids[source].long()),
            positions=torch.where(repeated & ~continued, -1, first[request] + offset),
            query_start_loc=starts.int(),
            num_tokens=num_rows,
            max_query_len=batch.max_query_len + count,
        )
        return extended, torch.where(repeated[:, None], self._hidden[slot, place], hidden[source])

    def keep(self, batch: InputBatch, hidden: Tensor, num_rejected: Tensor) -> None:
        """Remember the last accepted rows of a pass that `repeat` gave.

        A pass too short to fill them, which continued nothing, leaves what is known of the same tokens, or nothing.
        """
        starts = batch.query_start_loc[:-1]
        last = last_accepted_row(batch.query_start_loc, num_rejected)
        rows = last[:, None] - torch.arange(self.num_rows - 1, -1, -1, device=last.device)
        rows = torch.maximum(rows, starts[:, None])  # a stale count stays in its request
        slots, end = self._slots(batch), batch.seq_lens.long() - num_rejected
        begins = batch.seq_lens - batch.query_start_loc.diff() + self.num_rows == 0
        whole = begins | (batch.positions[rows] >= 0).all(dim=1)
        self._ids[slots] = torch.where(whole[:, None], batch.input_ids[rows], self._ids[slots])
        self._hidden[slots] = torch.where(whole[:, None, None], hidden[rows], self._hidden[slots])
        self._end[slots] = torch.where(whole | (self._end[slots] == end), end, -1)
