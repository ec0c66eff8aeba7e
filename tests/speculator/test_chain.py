"""Rows of a chain's last pass, repeated where they are continued and nowhere else."""

import pytest
import torch

from tridraft.speculator.batch import InputBatch
from tridraft.speculator.chain import PassHistory


def one_request(ids: list[int], start: int, device: torch.device) -> tuple[InputBatch, torch.Tensor]:
    """A pass of one request in slot 0, whose hidden states are its positions."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    count = len(ids)
    batch = InputBatch(
        input_ids=ints(*ids),
        positions=torch.arange(start, start + count, device=device),
        query_start_loc=ints(0, count).int(),
        seq_lens=ints(start + count).int(),
        idx_mapping=ints(0).int(),
        num_reqs=1,
        num_tokens=count,
        max_query_len=count,
    )
    return batch, batch.positions[:, None].float()


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_drafting_again_from_a_pass_changes_nothing(calls, device):
    history = PassHistory(torch.zeros(2, 1, device=device), 2)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    for ids, start in (([10, 11, 12], 0), ([13], 3)):
        for _ in range(calls):
            history.keep(*history.repeat(*one_request(ids, start, device)), none)
    batch, hidden = history.repeat(*one_request([14], 4, device))
    assert (batch.input_ids.tolist(), batch.positions.tolist()) == ([12, 13, 14], [2, 3, 4])
    assert hidden[:, 0].tolist() == [2, 3, 4]


def test_rejected_rows_are_not_kept(device):
    history = PassHistory(torch.zeros(2, 1, device=device), 1)
    rejected = torch.tensor([2], dtype=torch.int32, device=device)
    history.keep(*history.repeat(*one_request([10, 11, 12], 0, device)), rejected)
    batch, hidden = history.repeat(*one_request([20, 21], 1, device))
    assert (batch.input_ids.tolist(), batch.positions.tolist()) == ([10, 20, 21], [0, 1, 2])
    assert hidden[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("start", [0, 2, 5])
def test_another_request_in_the_slot_finds_nothing(start, device):
    history = PassHistory(torch.zeros(2, 1, device=device), 2)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    history.keep(*history.repeat(*one_request([10, 11, 12], 0, device)), none)
    batch, _ = history.repeat(*one_request([99], start, device))
    assert batch.positions.tolist() == [-1, -1, start]
    assert batch.input_ids[2] == 99
