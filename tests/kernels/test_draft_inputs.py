"""Draft inputs against loops over requests, and the field's cases on positions, slots and padding."""

from typing import Any

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _variants import variants
from conftest import GARBAGE, garbage
from tridraft.kernels._draft_inputs_kernels import row_launch, token_launch
from tridraft.kernels.draft_inputs import (
    compute_slot_mapping,
    prepare_decode_inputs,
    prepare_prefill_inputs,
    update_draft_inputs,
)


def batch(device, lengths, rejected, sampled, idx_mapping, index_dtype=torch.int32) -> dict[str, Any]:
    """A target pass: ids 100, 101, …; positions from 10 · (r + 1); slots hold sampled 900 + slot, prompt 500 + slot."""
    starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    num_tokens = starts[-1]
    positions = [10 * (r + 1) + i for r, length in enumerate(lengths) for i in range(length)]
    slots = torch.arange(16, device=device)

    def ints(values):
        return torch.tensor(values, device=device, dtype=index_dtype)

    return {
        "target_input_ids": torch.arange(100, 100 + num_tokens, device=device),
        "target_positions": torch.tensor(positions, device=device, dtype=torch.int64),
        "query_start_loc": ints(starts),
        "idx_mapping": ints(idx_mapping),
        "last_sampled": 900 + slots,
        "next_prefill_tokens": 500 + slots,
        "num_sampled": ints(sampled),
        "num_rejected": ints(rejected),
    }


def prefill_by_loop(inputs, num_rows):
    """`prepare_prefill_inputs` in Python lists."""
    lists = {name: tensor.tolist() for name, tensor in inputs.items()}
    ids, positions, last_rows = [0] * num_rows, [0] * num_rows, []
    for r, slot in enumerate(lists["idx_mapping"]):
        begin, end = lists["query_start_loc"][r : r + 2]
        if slot < 0:
            last_rows.append(0)
            continue
        last = max(end - 1 - lists["num_rejected"][r], begin)
        bonus = lists["last_sampled" if lists["num_sampled"][r] else "next_prefill_tokens"][slot]
        accepted = range(begin, min(last + 1, end))
        for row in accepted:
            ids[row] = bonus if row == last else lists["target_input_ids"][row + 1]
            positions[row] = lists["target_positions"][row]
        last_rows.append(min(last, len(lists["target_input_ids"]) - 1))
    return ids, positions, last_rows


def padded_outputs(rows, device, dtype=torch.int32) -> dict[str, Any]:
    names = ("out_query_start_loc", "out_seq_lens", "out_idx_mapping", "out_num_rejected")
    return {name: garbage(rows + (name == names[0]), device, dtype) for name in names}


PASSES = {
    "verify": ([4, 4, 4], [0, 3, 1], [4, 1, 3], [5, 0, 2]),
    "chunk inside a prompt": ([7, 4], [0, 2], [0, 2], [3, 1]),
    "decode": ([1, 1, 1], [0, 0, 0], [1, 1, 1], [2, 1, 0]),
    "padding": ([2, 3, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [4, -1, -1, -1]),
    "stale counts": ([3, 0, 2], [9, 0, 0], [0, 0, 1], [1, 0, -1]),
    "one long prompt": ([300, 1], [0, 0], [0, 1], [6, 7]),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", PASSES)
@pytest.mark.parametrize("extra_rows", [0, 5])
def test_prepare_prefill_inputs(case, extra_rows, dtype, impl, device):
    inputs = batch(device, *PASSES[case], index_dtype=dtype)
    num_rows = inputs["target_input_ids"].shape[0] + extra_rows
    ids, positions = garbage(num_rows, device, dtype), garbage(num_rows, device)
    last = garbage(inputs["idx_mapping"].shape[0], device, dtype)
    prepare_prefill_inputs(**inputs, input_ids=ids, positions=positions, last_token_indices=last, impl=impl)
    assert (ids.tolist(), positions.tolist(), last.tolist()) == prefill_by_loop(inputs, num_rows)


def test_a_smaller_batch_leaves_nothing_of_a_larger_one(impl, device):
    """C7: rows of requests that left are padding, not their old tokens."""
    ids, positions, last = garbage(16, device), garbage(16, device), garbage(4, device)
    outputs = {"input_ids": ids, "positions": positions, "last_token_indices": last}
    prepare_prefill_inputs(**batch(device, [4] * 4, [0] * 4, [4] * 4, [0, 1, 2, 3]), **outputs, impl=impl)
    small = batch(device, [4, 4, 0, 0], [0, 2, 0, 0], [4, 2, 0, 0], [0, 1, -1, -1])
    prepare_prefill_inputs(**small, **outputs, impl=impl)
    assert not ids[6:].any()
    assert not positions[6:].any()
    assert last.tolist() == [3, 5, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("extra_reqs", [0, 1, 3])
@pytest.mark.parametrize("case", PASSES)
def test_a_pass_in_the_buffers_of_a_larger_graph(case, extra_reqs, dtype, impl, device):
    """C4: the requests past its own are padding, as are rows of its own that have no slot."""
    inputs = batch(device, *PASSES[case], index_dtype=dtype)
    num_reqs, num_tokens = inputs["idx_mapping"].shape[0], inputs["target_input_ids"].shape[0]
    ids, positions = garbage(num_tokens + 2, device), garbage(num_tokens + 2, device)
    last = garbage(num_reqs + extra_reqs, device)
    padded, lengths = padded_outputs(num_reqs + extra_reqs, device, dtype), 40 + inputs["idx_mapping"]
    rows = {"input_ids": ids, "positions": positions, "last_token_indices": last}
    prepare_prefill_inputs(**inputs, **rows, seq_lens=lengths, **padded, impl=impl)
    wanted_ids, wanted_positions, wanted_last = prefill_by_loop(inputs, num_tokens + 2)
    assert (ids.tolist(), positions.tolist()) == (wanted_ids, wanted_positions)
    assert last.tolist() == wanted_last + [0] * extra_reqs
    mapping = inputs["idx_mapping"].tolist()
    rejected = inputs["num_rejected"].tolist()
    live = [slot >= 0 for slot in mapping]
    assert padded["out_query_start_loc"].tolist() == inputs["query_start_loc"].tolist() + [num_tokens] * extra_reqs
    assert padded["out_idx_mapping"].tolist() == mapping + [-1] * extra_reqs
    assert (
        padded["out_seq_lens"].tolist() == [(40 + s) * a for s, a in zip(mapping, live, strict=True)] + [0] * extra_reqs
    )
    assert (
        padded["out_num_rejected"].tolist() == [n * a for n, a in zip(rejected, live, strict=True)] + [0] * extra_reqs
    )


def test_a_graph_without_a_request(impl, device, ints):
    """C8: an idle rank's rows are padding alone."""
    inputs = {name: value[:0] for name, value in batch(device, [1], [0], [1], [0]).items()}
    inputs |= {"query_start_loc": ints([0]), "last_sampled": ints([7, 8]), "next_prefill_tokens": ints([7, 8])}
    rows = {name: garbage(3, device) for name in ("input_ids", "positions", "last_token_indices")}
    padded = padded_outputs(2, device) | {"last_token_indices": rows["last_token_indices"][:2]}
    prepare_prefill_inputs(**inputs, **{**rows, **padded}, seq_lens=ints([]), impl=impl)
    assert rows["input_ids"].tolist() == rows["positions"].tolist() == [0, 0, 0]
    assert padded["last_token_indices"].tolist() == padded["out_seq_lens"].tolist() == [0, 0]
    assert padded["out_query_start_loc"].tolist() == [0, 0, 0]
    assert padded["out_idx_mapping"].tolist() == [-1, -1]
    assert padded["out_num_rejected"].tolist() == [0, 0]
    none = ints([])
    step: dict[str, Any] = {name: garbage(2, device) for name in ("input_ids", "positions")}
    state: dict[str, Any] = {name: inputs[name] for name in ("last_sampled", "next_prefill_tokens", "num_sampled")}
    lengths, hidden = garbage(2, device, torch.int32), torch.ones(2, 8, device=device)
    prepare_decode_inputs(
        torch.zeros(0, 8, device=device),
        *(ints([0]), none, none, none),
        **state,
        **step,
        advance_positions=False,
        max_model_len=64,
        out_seq_lens=lengths,
        out_hidden=hidden,
        impl=impl,
    )
    assert step["input_ids"].tolist() == step["positions"].tolist() == lengths.tolist() == [0, 0]
    assert hidden.eq(1).all()


@pytest.mark.parametrize("draft_position", ["bonus", "last_computed"])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("given_tokens", [False, True])
def test_prepare_decode_inputs(advance, draft_position, given_tokens, impl, device, ints):
    """C13: verify left 50 keys including 3 drafts; 3, 0 and 1 of them rejected, and a row of padding."""
    rejected, sampled, slots = [3, 0, 1, 0], [1, 0, 3, 0], [2, 5, 0, -1]
    hidden = torch.randn(12, 2 * 40, device=device)[:, 3:43]
    out_hidden, before = torch.zeros(4, 64, device=device)[:, :40].fill_(5), torch.full((40,), 5.0, device=device)
    ids, positions, lengths = garbage(4, device), garbage(4, device), garbage(4, device, torch.int32)
    tokens = ints([31, 32, 33, GARBAGE], torch.int64)
    state = torch.arange(8, device=device)
    prepare_decode_inputs(
        hidden,
        ints([0, 4, 8, 12, 12]),
        ints([50, 50, 50, 0]),
        ints(slots),
        ints(rejected),
        tokens=tokens if given_tokens else None,
        last_sampled=900 + state,
        next_prefill_tokens=500 + state,
        num_sampled=ints(sampled),
        advance_positions=advance,
        draft_position=draft_position,
        max_model_len=1000,
        input_ids=ids,
        positions=positions,
        out_seq_lens=lengths,
        out_hidden=out_hidden,
        impl=impl,
    )
    valid = [47, 50, 49]
    shift = -1 if draft_position == "last_computed" and not advance else 0
    assert ids.tolist() == ([31, 32, 33, 0] if given_tokens else [902, 505, 900, 0])
    assert positions.tolist() == [length + shift for length in valid] + [0]
    assert lengths.tolist() == [length + advance for length in valid] + [0]
    assert torch.equal(out_hidden[:3], hidden[[0, 7, 10]])
    assert torch.equal(out_hidden[3], before)


@pytest.mark.parametrize("given_tokens", [False, True])
def test_rows_past_the_pass_are_padding(given_tokens, impl, device, ints):
    """C4: a graph of 5 rows gets a pass of 2, whose slots are not its rows, after a larger one left its values."""
    hidden, out_hidden = torch.randn(6, 24, device=device), torch.full((5, 24), 5.0, device=device)
    ids, positions, slots = garbage(5, device), garbage(5, device), garbage(5, device)
    lengths, mapping = garbage(5, device, torch.int32), garbage(5, device, torch.int32)
    state = torch.arange(8, device=device)
    prepare_decode_inputs(
        hidden,
        ints([0, 4, 6]),
        ints([20, 9]),
        ints([6, 1]),
        ints([2, 0]),
        tokens=ints([31, 32], torch.int64) if given_tokens else None,
        last_sampled=900 + state,
        next_prefill_tokens=500 + state,
        num_sampled=ints([2, 0]),
        advance_positions=True,
        max_model_len=64,
        input_ids=ids,
        positions=positions,
        out_seq_lens=lengths,
        out_hidden=out_hidden,
        out_idx_mapping=mapping,
        block_table=ints([[3, 4], [6, 7], *[[GARBAGE] * 2] * 3]),
        block_size=16,
        slot_mapping=slots,
        impl=impl,
    )
    assert ids.tolist() == ([31, 32, 0, 0, 0] if given_tokens else [906, 501, 0, 0, 0])
    assert positions.tolist() == [18, 9, 0, 0, 0]
    assert lengths.tolist() == [19, 10, 0, 0, 0]
    assert mapping.tolist() == [6, 1, -1, -1, -1]
    assert slots.tolist() == [4 * 16 + 2, 6 * 16 + 9, -1, -1, -1]
    assert torch.equal(out_hidden[:2], hidden[[1, 5]])
    assert out_hidden[2:].eq(5).all()


def test_a_stale_count_stays_in_its_row(impl, device, ints):
    """C15: count − 1 is never an index; a request whose rows are all rejected, or that has none, reads its first."""
    hidden = torch.arange(5.0, device=device)[:, None].expand(5, 8).contiguous()
    out_hidden = torch.zeros(3, 8, device=device)
    ids, positions, lengths = garbage(3, device), garbage(3, device), garbage(3, device, torch.int32)
    prepare_decode_inputs(
        hidden,
        ints([0, 2, 2, 5]),
        ints([1, 0, 40]),
        ints([0, 1, 2]),
        ints([9, 0, 3]),
        tokens=ints([1, 2, 3]),
        advance_positions=False,
        draft_position="last_computed",
        max_model_len=64,
        input_ids=ids,
        positions=positions,
        out_seq_lens=lengths,
        out_hidden=out_hidden,
        impl=impl,
    )
    assert out_hidden[:, 0].tolist() == [0, 2, 2]
    assert positions.tolist() == [0, 0, 36]
    assert lengths.tolist() == [0, 0, 37]


@pytest.mark.parametrize("advance", [False, True])
def test_update_draft_inputs(advance, impl, device, ints):
    """C14: constant positions change token and hidden state only; advancing ones move, and padding stays inert."""
    hidden = torch.randn(3, 90, device=device)[:, 10:]
    out_hidden = torch.full((3, 80), 5.0, device=device)
    ids, positions = garbage(3, device), ints([20, 33, GARBAGE], torch.int64)
    lengths, slots = ints([20, 33, GARBAGE]), garbage(3, device)
    table = ints([[4, 3, 9], [6, 8, -1], [GARBAGE] * 3])
    slot = {"block_table": table, "block_size": 16, "slot_mapping": slots} if advance else {}
    update_draft_inputs(
        ints([1, 2, GARBAGE], torch.int64),
        hidden,
        ints([5, 3, -1]),
        advance_positions=advance,
        max_model_len=48,
        input_ids=ids,
        positions=positions,
        seq_lens=lengths,
        out_hidden=out_hidden,
        impl=impl,
        **slot,
    )
    assert ids.tolist() == [1, 2, 0]
    assert positions.tolist() == [20 + advance, 33 + advance, 0]
    assert lengths.tolist() == [20 + advance, 33, 0]  # the second has no block for another key
    assert torch.equal(out_hidden[:2], hidden[:2])
    assert out_hidden[2].tolist() == [5.0] * 80
    assert slots.tolist() == ([3 * 16 + 5, -1, -1] if advance else [GARBAGE] * 3)


def test_update_without_a_hidden_state(impl, device, ints):
    ids, positions, lengths = garbage(2, device), ints([4, 5], torch.int64), ints([5, 6])
    update_draft_inputs(
        ints([7, 8]),
        None,
        ints([0, 1]),
        advance_positions=True,
        max_model_len=48,
        input_ids=ids,
        positions=positions,
        seq_lens=lengths,
        impl=impl,
    )
    assert (ids.tolist(), positions.tolist(), lengths.tolist()) == ([7, 8], [5, 6], [6, 7])


def test_empty_batches(impl, device, ints):
    none = ints([])
    ids, positions = garbage(3, device), garbage(3, device)
    prepare_prefill_inputs(
        ints([1, 2]),
        ints([0, 1]),
        ints([0]),
        none,
        ints([5]),
        ints([6]),
        none,
        none,
        input_ids=ids,
        positions=positions,
        last_token_indices=none,
        impl=impl,
    )
    assert (ids.tolist(), positions.tolist()) == ([0, 0, 0], [0, 0, 0])
    # an idle rank's graph has rows of padding only, and its target has no hidden states
    ids, positions, lengths = garbage(2, device), garbage(2, device), garbage(2, device, torch.int32)
    out_hidden = torch.ones(2, 8, device=device)
    prepare_decode_inputs(
        torch.zeros(0, 8, device=device),
        ints([0, 0, 0]),
        ints([0, 0]),
        ints([-1, -1]),
        ints([0, 0]),
        tokens=ints([5, 5]),
        advance_positions=False,
        max_model_len=64,
        input_ids=ids,
        positions=positions,
        out_seq_lens=lengths,
        out_hidden=out_hidden,
        impl=impl,
    )
    assert (ids.tolist(), positions.tolist(), lengths.tolist()) == ([0, 0], [0, 0], [0, 0])
    assert out_hidden.eq(1).all()
    table = torch.empty(0, 4, dtype=torch.int32, device=device)
    assert compute_slot_mapping(ints([1, 2]), ints([0]), table, 16, max_model_len=64, impl=impl).tolist() == [-1, -1]


def test_refusals_name_the_argument(device, ints):
    hidden, out_hidden, one = torch.zeros(2, 8, device=device), torch.zeros(1, 8, device=device), ints([0])
    decode: dict[str, Any] = {
        "advance_positions": True,
        "max_model_len": 8,
        "input_ids": one,
        "positions": one,
        "out_seq_lens": one,
        "out_hidden": out_hidden,
    }
    arguments = (hidden, ints([0, 1]), one, one, one)
    with pytest.raises(ValueError, match="tokens: got None"):
        prepare_decode_inputs(*arguments, **decode)
    with pytest.raises(ValueError, match="draft_position: got 'last'"):
        prepare_decode_inputs(*arguments, tokens=one, draft_position="last", **decode)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="out_hidden: got float16"):
        prepare_decode_inputs(*arguments, tokens=one, **{**decode, "out_hidden": out_hidden.half()})
    none = {name: decode[name][:0] for name in ("input_ids", "positions", "out_seq_lens", "out_hidden")}
    with pytest.raises(ValueError, match="out_hidden: got 0 rows, needs at least 1"):
        prepare_decode_inputs(*arguments, tokens=one, **{**decode, **none})
    with pytest.raises(ValueError, match="block_table, block_size, slot_mapping"):
        prepare_decode_inputs(*arguments, tokens=one, block_size=16, **decode)
    with pytest.raises(ValueError, match=r"query_start_loc: got shape \[1\], needs \[2\]"):
        compute_slot_mapping(one, one, ints([[1]]), 16, max_model_len=8)
    with pytest.raises(ValueError, match="block_size: got 0"):
        compute_slot_mapping(one, ints([0, 1]), ints([[1]]), 0, max_model_len=8)
    with pytest.raises(TypeError, match="positions: got float32"):
        compute_slot_mapping(hidden[0], ints([0, 1]), ints([[1]]), 16, max_model_len=8)
    with pytest.raises(ValueError, match="slot_mapping: got a tensor, needs None"):
        update_draft_inputs(
            one,
            None,
            one,
            advance_positions=False,
            max_model_len=8,
            input_ids=one,
            positions=one,
            seq_lens=one,
            block_table=ints([[1]]),
            block_size=16,
            slot_mapping=one.long(),
        )
    inputs = batch(device, [2], [0], [1], [0])
    with pytest.raises(ValueError, match="input_ids: got 1 rows, needs at least 2"):
        prepare_prefill_inputs(**inputs, input_ids=one, positions=one, last_token_indices=one)
    two = {name: ints([0, 0]) for name in ("input_ids", "positions", "last_token_indices")}
    with pytest.raises(ValueError, match="last_token_indices: got 0 rows, needs at least 1"):
        prepare_prefill_inputs(**inputs, **{**two, "last_token_indices": one[:0]})
    with pytest.raises(ValueError, match=r"seq_lens, out_query_start_loc, .*: got some of the five"):
        prepare_prefill_inputs(**inputs, **two, seq_lens=one)


def every_operation(device, hidden_size=32, dtype=torch.float32, num_reqs=3):
    """One call of each operation in each of its forms, on its own buffers, which it returns."""
    inputs = batch(device, [4] * num_reqs, [1] * num_reqs, [3] * num_reqs, list(range(num_reqs)))
    num_tokens = 4 * num_reqs
    hidden = torch.zeros(num_tokens, hidden_size, device=device, dtype=dtype)
    table = torch.zeros(num_reqs, 8, device=device, dtype=torch.int32)
    ids, positions, slots = (torch.zeros(num_reqs, device=device, dtype=torch.int64) for _ in range(3))
    lengths = torch.full((num_reqs,), 40, device=device, dtype=torch.int32)
    out_hidden = torch.zeros(num_reqs, hidden_size, device=device, dtype=dtype)
    token_ids, token_positions, last = (
        torch.zeros(n, device=device).long() for n in (num_tokens, num_tokens, num_reqs)
    )
    requests = (inputs["query_start_loc"], lengths.clone(), inputs["idx_mapping"], inputs["num_rejected"])
    state = {name: inputs[name] for name in ("last_sampled", "next_prefill_tokens", "num_sampled")}
    slot = {"block_table": table, "block_size": 16, "slot_mapping": slots}
    step = {"max_model_len": 64, "input_ids": ids, "positions": positions}
    padded = padded_outputs(num_reqs, device)

    def call():
        rows: dict[str, Any] = {"input_ids": token_ids, "positions": token_positions, "last_token_indices": last}
        prepare_prefill_inputs(**inputs, **rows)
        prepare_prefill_inputs(**inputs, **rows, seq_lens=requests[1], **padded)
        compute_slot_mapping(token_positions, requests[0], table, 16, max_model_len=64)
        compute_slot_mapping(
            token_positions, requests[0], table, 16, idx_mapping=requests[2], num_rejected=requests[3], max_model_len=64
        )
        decode = {"out_seq_lens": lengths, "out_hidden": out_hidden, **step}
        prepare_decode_inputs(hidden, *requests, **state, advance_positions=False, **decode)
        prepare_decode_inputs(hidden, *requests, tokens=last, advance_positions=True, **decode, **slot)
        update = {"seq_lens": lengths, "out_hidden": out_hidden, **step}
        update_draft_inputs(last, hidden[:num_reqs], requests[2], advance_positions=True, **update, **slot)
        update_draft_inputs(last, hidden[:num_reqs], requests[2], advance_positions=False, **update)
        update_draft_inputs(last, None, requests[2], advance_positions=True, seq_lens=lengths, **step)

    buffers = [token_ids, token_positions, last, ids, positions, lengths, slots, out_hidden]
    return call, inputs, hidden, buffers


@pytest.mark.parametrize("hidden_size", [16, 40])
@pytest.mark.compiled
def test_opcheck(hidden_size, device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    ops, triton = torch.ops.tridraft, device.type == "cuda"
    inputs = batch(device, [4, 2], [1, 0], [3, 0], [0, 3])
    last, positions = torch.zeros(2, device=device).long(), torch.zeros(6, device=device).long()
    torch.library.opcheck(
        ops.prepare_prefill_inputs.default,
        (*inputs.values(), None, positions.clone(), positions.clone(), last, *[None] * 4, triton),
    )
    hidden = torch.randn(6, 50, device=device)[:, :hidden_size]
    lengths, out_hidden = torch.zeros(2, device=device).int(), torch.zeros(2, hidden_size, device=device)
    table, slots = torch.ones(2, 4, device=device).int(), torch.zeros(2, device=device).long()
    requests = (inputs["query_start_loc"], lengths.clone(), inputs["idx_mapping"], inputs["num_rejected"])
    state = (inputs["last_sampled"], inputs["next_prefill_tokens"], inputs["num_sampled"])
    outputs = (last.clone(), last.clone(), lengths, out_hidden)
    for slot in ((table, slots), (None, None)):
        args = (hidden, *requests, None, *state, *outputs, lengths.clone(), *slot, 16, 64, 0, True, triton)
        torch.library.opcheck(ops.prepare_decode_inputs.default, args)
        args = (last, hidden[:2], requests[2], *outputs, *slot, 16, 64, True, triton)
        torch.library.opcheck(ops.update_draft_inputs.default, args)
    args = (positions, requests[0], table, 16, requests[2], requests[3], 64, positions.clone(), triton)
    torch.library.opcheck(ops.compute_slot_mapping.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty
    call, _, _, expected = every_operation(device)
    call()
    call, _, _, buffers = every_operation(device)
    torch.compile(call, fullgraph=True, backend="aot_eager")()
    assert all(torch.equal(got, want) for got, want in zip(buffers, expected, strict=True))


def test_launches():
    arch = TARGETS["sm_90"][1]
    for num_requests in (0, 1, 8, 256):
        for num_rows in (0, 1, 300, 8192):
            launch = token_launch(num_requests, num_rows, arch)
            assert launch.options["BLOCK"] == 256  # the batch must not reach a constexpr
            assert 1 <= launch.splits * max(num_requests, 1) <= max(128, num_requests)
    assert token_launch(64, 64 * 4, arch).splits == 1
    for hidden_size in (1, 256, 1536, 5376):
        launch = row_launch(hidden_size, arch)
        assert launch.options["BLOCK_H"] // (32 * launch.options["num_warps"]) <= 8
        assert launch.options["num_warps"] <= 4
        assert launch.options["BLOCK_H"] * launch.splits >= hidden_size


@pytest.mark.compiled
def test_the_batch_reaches_no_variant():
    alone = variants(every_operation(torch.device("cpu"), num_reqs=1)[0])
    for num_reqs in (2, 16, 33, 64):
        assert variants(every_operation(torch.device("cpu"), num_reqs=num_reqs)[0]) == alone


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target):
    assert_compiles(every_operation(torch.device("cpu"), 256, torch.bfloat16)[0], target)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 256])
def test_replays_on_changed_inputs(num_reqs, device):
    call, inputs, hidden, buffers = every_operation(device, 1536, torch.bfloat16, num_reqs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            call()
        hidden.normal_()
        inputs["num_rejected"].copy_(torch.arange(num_reqs, device=device) % 4)
        inputs["last_sampled"] += 3
        for buffer in buffers:
            buffer.fill_(17)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replayed = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(17)
    call()
    assert all(torch.equal(got, want) for got, want in zip(replayed, buffers, strict=True))
    assert buffers[-1].any()


@pytest.mark.gpu
def test_hidden_rows_beyond_two_to_the_31st_element(device, ints):
    """C22: the row index is widened before it meets the stride."""
    hidden = torch.zeros(2**21 + 8, 1024, device=device, dtype=torch.bfloat16)
    hidden[-3] = 1
    out_hidden = torch.zeros(1, 1024, device=device, dtype=torch.bfloat16)
    begin, end = hidden.shape[0] - 4, hidden.shape[0]
    one = garbage(1, device)
    prepare_decode_inputs(
        hidden,
        ints([begin, end]),
        ints([50]),
        ints([0]),
        ints([2]),
        tokens=ints([1]),
        advance_positions=False,
        max_model_len=64,
        input_ids=one,
        positions=one.clone(),
        out_seq_lens=one.int(),
        out_hidden=out_hidden,
    )
    assert out_hidden.eq(1).all()
