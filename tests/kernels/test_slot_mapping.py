"""Slots of positions, and what happens where there is none, against loops over Python lists and values by hand."""

import pytest
import torch

from conftest import GARBAGE, garbage
from tridraft.kernels.draft_inputs import compute_slot_mapping, prepare_decode_inputs, update_draft_inputs


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
    positions = [0, 1, 2, 14, 15, 16, 17, 5, 6, GARBAGE, -1]
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
    out = garbage(600, device)
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
    slots = garbage(1, device)
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


def test_drafting_past_the_end(impl, device, ints):
    """C12: block 16, at most 64 positions, last accepted position 62, and the next request's blocks are 999."""
    table = ints([[2, 5, 1, 7], [999] * 4])[:1]
    ids, positions, slots = garbage(1, device), garbage(1, device), garbage(1, device)
    lengths = garbage(1, device, torch.int32)
    hidden, out_hidden = torch.randn(2, 16, device=device), torch.empty(1, 16, device=device)
    step = {"advance_positions": True, "max_model_len": 64, "input_ids": ids, "positions": positions, "impl": impl}
    slot = {"block_table": table, "block_size": 16, "slot_mapping": slots}
    prepare_decode_inputs(
        hidden,
        ints([0, 2]),
        ints([64]),
        ints([0]),
        ints([1]),
        tokens=ints([8]),
        out_seq_lens=lengths,
        out_hidden=out_hidden,
        **step,
        **slot,
    )
    assert (positions.item(), lengths.item(), slots.item()) == (63, 64, 127)
    assert torch.equal(out_hidden, hidden[:1])
    for token in (9, 10):
        update_draft_inputs(
            ints([token]), hidden[:1], ints([0]), seq_lens=lengths, out_hidden=out_hidden, **step, **slot
        )
        assert (ids.item(), positions.item(), lengths.item(), slots.item()) == (token, 63, 64, -1)


def test_a_sequence_that_is_full_writes_no_slot(impl, device, ints):
    """C12: with 64 accepted keys of 64, step 1 stays at position 63 and must not overwrite its key."""
    ids, positions, slots = garbage(1, device), garbage(1, device), garbage(1, device)
    lengths = garbage(1, device, torch.int32)
    prepare_decode_inputs(
        torch.zeros(1, 8, device=device),
        ints([0, 1]),
        ints([64]),
        ints([0]),
        ints([0]),
        tokens=ints([8]),
        advance_positions=True,
        max_model_len=64,
        input_ids=ids,
        positions=positions,
        out_seq_lens=lengths,
        out_hidden=torch.empty(1, 8, device=device),
        block_table=ints([[2, 5, 1, 7]]),
        block_size=16,
        slot_mapping=slots,
        impl=impl,
    )
    assert (positions.item(), lengths.item(), slots.item()) == (63, 64, -1)


def test_a_length_counts_no_key_without_a_block(impl, device, ints):
    """Blocks end at 8 tokens of at most 64: attention must not look for a ninth key in block −1."""
    ids, positions, slots = garbage(1, device), garbage(1, device), garbage(1, device)
    lengths = garbage(1, device, torch.int32)
    step = {"advance_positions": True, "max_model_len": 64, "input_ids": ids, "positions": positions, "impl": impl}
    slot = {"block_table": ints([[2, 5, -1, -1]]), "block_size": 4, "slot_mapping": slots}
    hidden = torch.zeros(1, 8, device=device)

    def first(length: int) -> tuple[float, float, float]:
        counts = (ints([0, 1]), ints([length]), ints([0]), ints([0]))
        outputs = {"out_seq_lens": lengths, "out_hidden": hidden.clone()}
        prepare_decode_inputs(hidden, *counts, tokens=ints([1]), **outputs, **step, **slot)
        return positions.item(), lengths.item(), slots.item()

    assert first(7) == (7, 8, 23)
    for position in (8, 9):
        update_draft_inputs(ints([1]), None, ints([0]), seq_lens=lengths, **step, **slot)
        assert (positions.item(), lengths.item(), slots.item()) == (position, 8, -1)
    assert first(8) == (8, 8, -1)
