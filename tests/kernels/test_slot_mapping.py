"""Slots of positions, against loops over Python lists."""

import pytest
import torch

from tridraft.kernels.draft_inputs import compute_slot_mapping, update_draft_inputs


def slots_by_loop(positions, starts, table, block_size, slots, rejected, max_model_len):
    """`compute_slot_mapping` in Python lists."""
    out = [-1] * len(positions)
    for r, row in enumerate(table):
        if slots[r] < 0:
            continue
        for t in range(starts[r], starts[r + 1] - rejected[r]):
            column = positions[t] // block_size
            if 0 <= positions[t] < max_model_len and column < len(row) and row[column] >= 0:
                out[t] = row[column] * block_size + positions[t] % block_size
    return out


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_compute_slot_mapping(block_size, dtype, impl, device, ints):
    starts, slots, rejected = [0, 3, 7, 9, 9, 9], [2, 0, -1, 1, -1], [1, 0, 0, 0, 0]
    positions = [0, 1, 2, 14, 15, 16, 17, 5, 6, 77777, -1]
    wide = [[(7 * r + 3 * c) % 50 - (c == 2) * 60 for c in range(24)] for r in range(5)]
    table = ints(wide, dtype)[:, 2:22]
    out = compute_slot_mapping(
        ints(positions, torch.int64),
        ints(starts, dtype),
        table,
        block_size,
        idx_mapping=ints(slots, dtype),
        num_rejected=ints(rejected, dtype),
        max_model_len=17,
        impl=impl,
    )
    assert out.tolist() == slots_by_loop(positions, starts, table.tolist(), block_size, slots, rejected, 17)


def test_compute_slot_mapping_fills_a_longer_out(impl, device, ints):
    out = torch.full((600,), 77777, device=device)
    positions = torch.arange(300, device=device)
    result = compute_slot_mapping(
        positions, ints([0, 300]), ints([[5, 6, 7]]), 128, max_model_len=290, out=out, impl=impl
    )
    assert result is out
    expected = [640 + p if p < 290 else -1 for p in range(300)]
    assert out.tolist() == expected + [-1] * 300


def test_slots_beyond_two_to_the_31(impl, device, ints):
    """C22: a slot is int64 from the block id on."""
    table = ints([[2**27]])
    slots = compute_slot_mapping(ints([3]), ints([0, 1]), table, 64, max_model_len=64, impl=impl)
    assert slots.tolist() == [2**33 + 3]
    ids, positions, lengths = ints([0]), ints([2]), ints([3])
    slots = torch.full((1,), 77777, device=device)
    update_draft_inputs(
        ints([1]),
        None,
        ints([0]),
        advance_positions=True,
        max_model_len=64,
        input_ids=ids,
        positions=positions,
        seq_lens=lengths,
        block_table=table,
        block_size=64,
        slot_mapping=slots,
        impl=impl,
    )
    assert slots.tolist() == [2**33 + 3]
