"""Drafting with a Gemma 4 assistant: which tokens, from which keys, at which positions."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from _tiny_gemma4 import WINDOW
from tridraft.kernels.draft_inputs import compute_slot_mapping
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.kv_cache import KVCache

STEPS = 4
LENGTHS = (WINDOW - 3, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW + 5)
NOISE = 5e-4
"""Gemma 4 attends without a scale, so the order in which float32 sums are taken shows at about 2e-4."""


@dataclass
class Round:
    """A pass of the target over ragged requests, and what `propose` makes of it."""

    batch: InputBatch
    verify: VerifyResult
    sampling: SamplingState
    hidden: Tensor
    kv: KVCache

    def propose(self, speculator: Any) -> list[list[int]]:
        return speculator.propose(self.batch, self.verify, self.sampling, self.hidden).tolist()


def tokens(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sample_as(rows: dict[int, tuple[float, int]], slots: int, device: torch.device) -> SamplingState:
    """A sampling state with each slot's (temperature, seed)."""
    state = SamplingState(torch.zeros(slots, device=device), torch.zeros(slots, dtype=torch.int64, device=device))
    for slot, (temperature, seed) in rows.items():
        state.temperature[slot] = temperature
        state.seeds[slot] = seed
    return state


def run_target(tiny, sequences, *, rejected=None, slots=None, max_model_len=128, prefill_rows=()) -> Round:
    """One pass over everything but each sequence's last token, with `rejected` wrong tokens after it.

    Rows in `prefill_rows` sampled nothing: their last token is the prompt's next one.
    """
    target, rows = tiny.target, len(sequences)
    rejected = rejected or [0] * rows
    slots = slots or list(reversed(range(rows)))
    device = target.device
    kv = KVCache(
        target.kv_specs,
        num_blocks=rows * (max_model_len // 4 + 1),
        block_size=4,
        max_num_reqs=8,
        max_model_len=max_model_len,
        dtype=target.dtype,
        device=device,
    )
    ids, positions, starts = [], [], [0]
    for sequence, wrong, slot in zip(sequences, rejected, slots, strict=True):
        computed = [*sequence[:-1], *[(sequence[-1] + 1 + step) % 128 for step in range(wrong)]]
        ids += computed
        positions += range(len(computed))
        starts.append(len(ids))
        kv.reserve(slot, min(len(computed) + 1, max_model_len))

    def ints(values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=device)

    batch = InputBatch(
        input_ids=ints(ids),
        positions=ints(positions),
        query_start_loc=ints(starts, torch.int32),
        seq_lens=ints(
            [len(sequence) - 1 + wrong for sequence, wrong in zip(sequences, rejected, strict=True)], torch.int32
        ),
        idx_mapping=ints(slots, torch.int32),
        num_reqs=rows,
        num_tokens=len(ids),
        max_query_len=max(after - before for before, after in pairwise(starts)),
    )
    tables = kv.block_tables(batch.idx_mapping)
    mappings = tuple(
        compute_slot_mapping(batch.positions, batch.query_start_loc, table, 4, max_model_len=max_model_len)
        for table in tables
    )
    attention = AttentionBatch(batch.query_start_loc, batch.seq_lens, tables, mappings, int(batch.seq_lens.max()))
    output = target.forward(batch.input_ids, batch.positions, kv.layers, attention, ints([0]))
    newest = {slot: sequence[-1] for slot, sequence in zip(slots, sequences, strict=True)}
    prefilling = {slots[row] for row in prefill_rows}
    verify = VerifyResult(
        num_sampled=ints([int(slot not in prefilling) for slot in slots], torch.int32),
        num_rejected=ints(rejected, torch.int32),
        last_sampled=ints([5 if slot in prefilling else newest.get(slot, 5) for slot in range(8)]),
        next_prefill_tokens=ints([newest[slot] if slot in prefilling else 6 for slot in range(8)]),
    )
    return Round(batch, verify, sample_as({}, 8, device), output.hidden, kv)


def reference_drafts(tiny, sequence, steps=STEPS) -> tuple[list[int], Tensor]:
    """Draft ids and logits of the `transformers` assistant on keys of the committed tokens alone."""
    ids = torch.tensor([sequence], device=tiny.target.device)
    with torch.no_grad():
        out = tiny.reference(
            input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        hidden = out.hidden_states[-1][:, -1:]
        shared = {kind: tuple(pair) for kind, pair in out.shared_kv_states.items()}
        token, position = ids[:, -1:], torch.tensor([[len(sequence) - 1]], device=ids.device)
        drafts, logits = [], []
        for _ in range(steps):
            embedded = tiny.reference.get_input_embeddings()(token)
            step = tiny.assistant(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=position,
                shared_kv_states=shared,
                attention_mask=None,
                use_cache=False,
            )
            token, hidden = step.logits.argmax(-1), step.last_hidden_state
            drafts.append(int(token))
            logits.append(step.logits[0, 0])
    return drafts, torch.stack(logits)


def prepared(tiny, round_, steps=STEPS, **options):
    """A speculator bound to the round's cache, and a log of what each step was given."""
    speculator = tiny.speculator(steps, max_model_len=round_.kv.max_model_len, **options)
    speculator.set_kv_cache(round_.kv)
    log = []
    run_model = speculator.run_model

    def logged(input_ids, positions, hidden, batch, step, **options):
        log.append({"ids": input_ids.tolist(), "positions": positions.tolist(), "seq_lens": batch.seq_lens.tolist()})
        log[-1] |= {"batch": batch, "cache": [tensor.clone() for tensor in caches(round_.kv)]}
        return run_model(input_ids, positions, hidden, batch, step, **options)

    speculator.run_model = logged
    return speculator, log


def caches(kv: KVCache) -> list[Tensor]:
    return [tensor for layer in kv.layers for tensor in (layer.k_cache, layer.v_cache)]


def test_drafts_are_those_of_transformers(tiny, variant):
    pair = tiny(variant)
    sequences = [tokens(length + 1, seed=length) for length in LENGTHS]
    round_ = run_target(pair, sequences)
    # A temperature of 0 drafts greedily either way; "probabilistic" keeps the logits to compare.
    speculator, _ = prepared(pair, round_, draft_sampling="probabilistic")
    drafts = round_.propose(speculator)
    for row, sequence in enumerate(sequences):
        expected, logits = reference_drafts(pair, sequence)
        assert drafts[row] == expected
        ours = speculator.draft_logits[round_.batch.idx_mapping[row].item()]
        scored = ours > -torch.inf
        assert scored.sum() == STEPS * (32 if variant == "ordered" else 128)
        torch.testing.assert_close(ours[scored], logits[scored], atol=NOISE, rtol=NOISE)
    greedy, _ = prepared(pair, round_)
    assert round_.propose(greedy) == drafts


def test_drafts_do_not_see_rejected_tokens(tiny, variant):
    """C13 in the drafts: keys of rejected tokens stay in the cache behind the valid length."""
    pair = tiny(variant)
    sequences = [tokens(length + 1, seed=length) for length in (5, 20, 33)]
    rejected = [3, 0, 4]
    round_ = run_target(pair, sequences, rejected=rejected)
    speculator, _ = prepared(pair, round_)
    assert round_.propose(speculator) == [reference_drafts(pair, sequence)[0] for sequence in sequences]


@pytest.mark.parametrize("fault", ["pre-norm hidden", "position"])
def test_the_comparison_notices(tiny, fault):
    """The test above fails with hidden states from before the final norm, and with positions off by one."""
    pair = tiny("plain")
    sequence = tokens(21)
    before_norm: list[Tensor] = []
    hook = pair.target.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    round_ = run_target(pair, [sequence])
    hook.remove()
    position = "last_computed" if fault == "position" else "bonus"
    speculator, _ = prepared(pair, round_, draft_sampling="probabilistic", draft_position=position)
    if fault == "pre-norm hidden":
        round_ = replace(round_, hidden=before_norm[-1])
    round_.propose(speculator)
    _, logits = reference_drafts(pair, sequence)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(speculator.draft_logits[0], logits, atol=NOISE, rtol=NOISE)


def test_hidden_states_that_require_a_gradient(tiny):
    """An engine in training mode: nothing of its graph is kept from pass to pass."""
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20), tokens(6)])
    speculator, _ = prepared(pair, round_)
    expected = round_.propose(speculator)
    tracked = replace(round_, hidden=round_.hidden.detach().clone().requires_grad_())
    assert tracked.propose(speculator) == tracked.propose(speculator) == expected
    assert not speculator.step.hidden.requires_grad


def test_a_refused_pass_changes_nothing(tiny):
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20), tokens(6)])
    speculator, _ = prepared(pair, round_, draft_sampling="probabilistic")
    round_.propose(speculator)
    buffers = [*vars(speculator.step).values(), *vars(speculator.passed.sampling).values(), speculator.drafts]
    before = [buffer.clone() for buffer in buffers]
    short = replace(round_.verify, num_rejected=round_.verify.num_rejected[:1])
    hot = replace(round_.sampling, temperature=round_.sampling.temperature + 1)
    with pytest.raises(ValueError, match=r"verify.num_rejected: got 1 rows, needs 2"):
        replace(round_, verify=short, sampling=hot).propose(speculator)
    with pytest.raises(ValueError, match=r"sampling.seeds: got shape \[7\], needs \[8\]"):
        replace(round_, sampling=replace(hot, seeds=hot.seeds[:7])).propose(speculator)
    assert all(torch.equal(now, then) for now, then in zip(buffers, before, strict=True))


def test_num_rejected_shortens_the_keys(tiny):
    """C13: 50 keys after a verify pass with 3 drafts, of which 3, 0 and 1 were rejected."""
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(48), tokens(51), tokens(50)], rejected=[3, 0, 1])
    assert round_.batch.seq_lens.tolist() == [50, 50, 50]
    speculator, log = prepared(pair, round_)
    round_.propose(speculator)
    assert [step["seq_lens"] for step in log] == [[47, 50, 49]] * STEPS
    assert [step["positions"] for step in log] == [[47, 50, 49]] * STEPS


def test_constant_positions(tiny, variant):
    """C14: positions and lengths stay, the cache is not written; token and hidden state move."""
    pair = tiny(variant)
    round_ = run_target(pair, [tokens(20), tokens(6)], rejected=[1, 0])
    before = [tensor.clone() for tensor in caches(round_.kv)]
    speculator, log = prepared(pair, round_)
    drafts = round_.propose(speculator)
    assert len(log) == STEPS
    for step in log:
        assert step["positions"] == step["seq_lens"] == [19, 5]
        assert step["batch"].slot_mappings is None
        assert step["batch"].max_query_len == 1
    read = [list(row) for row in zip(*(step["ids"] for step in log), strict=True)]
    assert read == [[tokens(20)[-1], *drafts[0][:-1]], [tokens(6)[-1], *drafts[1][:-1]]]
    for cache in [*(step["cache"] for step in log), caches(round_.kv)]:
        assert all(torch.equal(now, then) for now, then in zip(cache, before, strict=True))


def test_position_of_the_last_computed_token(tiny):
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20)])
    speculator, log = prepared(pair, round_, draft_position="last_computed")
    round_.propose(speculator)
    assert [(step["positions"], step["seq_lens"]) for step in log] == [([18], [19])] * STEPS


def test_a_prompt_chunk_drafts_from_the_next_prompt_token(tiny):
    """C15: nothing was sampled, so the count that an index is made from is 0."""
    pair = tiny("plain")
    sequences = [tokens(20), tokens(12, seed=4)]
    round_ = run_target(pair, sequences, prefill_rows=[1])
    speculator, _ = prepared(pair, round_)
    assert round_.propose(speculator) == [reference_drafts(pair, sequence)[0] for sequence in sequences]


def test_padding_rows_are_inert(tiny):
    """C15: padding beside real rows, with counts left over from another batch."""
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20), tokens(12)])
    speculator, _ = prepared(pair, round_)
    alone = round_.propose(speculator)

    def pad(tensor, value):
        return torch.cat((tensor, torch.full((2,), value, dtype=tensor.dtype, device=tensor.device)))

    batch, verify = round_.batch, round_.verify
    padded = replace(
        round_,
        batch=replace(
            batch,
            query_start_loc=pad(batch.query_start_loc, batch.num_tokens),
            seq_lens=pad(batch.seq_lens, 0),
            idx_mapping=pad(batch.idx_mapping, -1),
            num_reqs=4,
        ),
        verify=replace(verify, num_sampled=pad(verify.num_sampled, 0), num_rejected=pad(verify.num_rejected, 7)),
    )
    before = [tensor.clone() for tensor in caches(round_.kv)]
    assert padded.propose(speculator)[:2] == alone
    assert all(torch.equal(now, then) for now, then in zip(caches(round_.kv), before, strict=True))
    assert round_.propose(speculator) == alone


@pytest.mark.parametrize("length", [20, 62, 63])
def test_the_same_forwards_near_the_end(tiny, length):
    """C12, C16: at the last positions a round makes the same K calls, inside the model's length."""
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(length + 1), tokens(9)], max_model_len=64)
    speculator, log = prepared(pair, round_)
    drafts = round_.propose(speculator)
    assert [step["positions"] for step in log] == [[length, 8]] * STEPS
    assert [step["seq_lens"] for step in log] == [[length, 8]] * STEPS
    assert all(0 <= token < 128 for row in drafts for token in row)


def test_draws_depend_on_seed_position_and_token_alone(tiny):
    """C26: other uses of the generator, another order and another batch change nothing."""
    pair = tiny("plain")
    sequences = [tokens(20, seed=1), tokens(12, seed=2), tokens(30, seed=3)]
    wishes = {0: (1.0, 11), 1: (0.7, 12), 2: (1.3, 13)}

    def drafts(order: tuple[int, ...], noise: int) -> dict[int, list[int]]:
        round_ = run_target(pair, [sequences[slot] for slot in order], slots=list(order))
        speculator, _ = prepared(pair, round_, draft_sampling="probabilistic")
        torch.rand(noise, device=pair.target.device)
        sampling = sample_as(wishes, 8, pair.target.device)
        return dict(zip(order, replace(round_, sampling=sampling).propose(speculator), strict=True))

    together = drafts((0, 1, 2), noise=0)
    assert drafts((2, 0, 1), noise=100) == together
    for slot in range(3):
        assert drafts((slot,), noise=7)[slot] == together[slot]
    wishes[1] = (0.7, 99)
    assert drafts((0, 1, 2), noise=0)[1] != together[1]


def test_each_row_has_its_temperature_at_every_step(tiny):
    """C29: temperatures [0, 1, 0.5]; each row is what it is alone, and row 0 is greedy."""
    pair = tiny("plain")
    sequences = [tokens(20, seed=1), tokens(12, seed=2), tokens(30, seed=3)]
    wishes = {0: (0.0, 5), 1: (1.0, 5), 2: (0.5, 5)}
    sampling = sample_as(wishes, 8, pair.target.device)
    together = run_target(pair, sequences, slots=[0, 1, 2])
    speculator, _ = prepared(pair, together, steps=3, draft_sampling="probabilistic")
    drafts = replace(together, sampling=sampling).propose(speculator)
    greedy = together.propose(speculator)
    assert drafts[0] == greedy[0]
    assert drafts[1] != greedy[1]
    for slot in range(3):
        alone = run_target(pair, [sequences[slot]], slots=[slot])
        speculator, _ = prepared(pair, alone, steps=3, draft_sampling="probabilistic")
        assert replace(alone, sampling=sampling).propose(speculator) == [drafts[slot]]


def test_greedy_drafts_at_any_temperature(tiny):
    """Without kept logits verification takes drafts for greedy, so they have to be."""
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20)])
    speculator, _ = prepared(pair, round_)
    greedy = round_.propose(speculator)
    hot = replace(round_, sampling=sample_as({0: (5.0, 1)}, 8, pair.target.device))
    assert hot.propose(speculator) == greedy
    assert speculator.draft_logits is None


def test_drafts_are_allocated_once_and_step_by_step(tiny):
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20), tokens(12)])
    speculator, log = prepared(pair, round_)
    drafts = speculator.propose(round_.batch, round_.verify, round_.sampling, round_.hidden)
    assert drafts.shape == (2, STEPS)
    assert drafts.stride() == (1, 8)
    again = speculator.propose(round_.batch, round_.verify, round_.sampling, round_.hidden)
    assert again.data_ptr() == drafts.data_ptr()
    assert log[0]["batch"].seq_lens.data_ptr() == log[-1]["batch"].seq_lens.data_ptr()


def test_no_drafts(tiny):
    """C9: K = 0 proposes [R, 0] and runs nothing."""
    pair = tiny("plain")
    round_ = run_target(pair, [tokens(20), tokens(12)])
    speculator, log = prepared(pair, round_, steps=0)
    drafts = speculator.propose(round_.batch, round_.verify, round_.sampling, round_.hidden)
    assert drafts.shape == (2, 0)
    assert not log


def test_draft_layers_hold_the_targets_cache(tiny, variant):
    """Each reads the last layer of its type that owns keys: the same object, so scales set later are seen."""
    pair = tiny(variant)
    round_ = run_target(pair, [tokens(9)])
    speculator, _ = prepared(pair, round_)
    config = pair.reference.config
    owning = range(config.num_hidden_layers - config.num_kv_shared_layers)
    for kind, layer in zip(speculator.model.layer_types, speculator.layers, strict=True):
        source = max(index for index in owning if config.layer_types[index] == kind)
        assert layer is round_.kv.layers[pair.target.kv_index[source]]


def test_another_target_is_refused(tiny):
    pair, other = tiny("plain"), tiny("k_eq_v")
    config = SpeculatorConfig("gemma4_mtp", other.assistant_dir, STEPS, max_num_reqs=1, max_model_len=64)
    speculator = type(pair.speculator(1))(config)
    with pytest.raises(ValueError, match="kv heads of full_attention"):
        speculator.load_model(pair.target)
    speculator = type(speculator)(replace(config, draft=other.speculator(1).model))
    with pytest.raises(ValueError, match="kv heads of full_attention"):
        speculator.load_model(pair.target)


def test_a_cache_of_other_sizes_is_refused(tiny):
    pair = tiny("plain")
    speculator = pair.speculator(STEPS, max_num_reqs=4)
    with pytest.raises(ValueError, match=r"the cache has \(8, 128\), the speculator \(4, 128\)"):
        speculator.set_kv_cache(run_target(pair, [tokens(9)]).kv)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "medusa"}, "method: got 'medusa', needs 'gemma4_mtp' or 'eagle' or 'eagle3' or 'mtp'"),
        ({"draft_position": "last"}, "draft_position: got 'last', needs 'bonus' or 'last_computed'"),
        ({"draft_sampling": "top"}, "draft_sampling: got 'top', needs 'greedy' or 'probabilistic'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: got -1, needs an integer of at least 0"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens: got 65, needs at most 64"),
        ({"cudagraph_num_steps": (1, 5)}, "cudagraph_num_steps: got 5, needs 0 to 4"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: got 0, needs an integer of at least 1"),
        ({"max_num_reqs": 0}, "max_num_reqs: got 0, needs an integer of at least 1"),
        ({"max_model_len": 0}, "max_model_len: got 0, needs an integer of at least 1"),
    ],
)
def test_config_is_checked(change, message):
    config = SpeculatorConfig("gemma4_mtp", "draft", STEPS, max_num_reqs=1, max_model_len=64)
    with pytest.raises(ValueError, match=message):
        replace(config, **change)
