"""Drafting with heads that own their keys: EAGLE, EAGLE-3 and MTP, against full recomputes of every round."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from _aot import TARGETS
from _head_pairs import MAKERS, NEW, PROMPTS, STEPS, Pair, decode, one_pass, own_caches
from _head_references import MTPReference
from _tiny_heads import mtp_checkpoint, tiny_target, write_checkpoint
from tridraft.kernels.attention import paged_attention
from tridraft.models.hf_target import HFTarget
from tridraft.speculator import autoregressive
from tridraft.speculator.batch import Multimodal, SamplingState
from tridraft.speculator.cudagraph import CUDAGraphMode
from tridraft.speculator.decoder import SpeculativeDecoder
from tridraft.speculator.factory import init_speculator
from tridraft.speculator.kv_cache import KVCache
from tridraft.speculator.request import Request


def test_greedy_text_is_that_of_transformers(pair):
    completions, _ = decode(pair, None)
    assert all(len(one.accepted) for one in completions)


@pytest.mark.parametrize("budget", [64, 13])
def test_every_rounds_drafts_are_those_of_a_full_recompute(pair, budget):
    """After acceptances of every length, ragged, with prompts whole and in chunks whose next token is the prompt's."""
    right = torch.randint(0, STEPS + 1, (128,), generator=torch.Generator().manual_seed(2)).tolist()
    completions, directed = decode(pair, right.__getitem__, max_num_reqs=3, max_num_batched_tokens=budget)
    assert {count for one in completions for count in one.accepted} == set(range(STEPS + 1))
    assert len(directed.rounds) >= 12
    for sequence, drafted in directed.rounds:
        assert drafted == pair.drafts(sequence, STEPS)


def test_an_fp8_heads_drafts_are_those_of_its_rounded_rows(pair):
    """Not all of them are the head's own; the text stays the target's."""
    own = pair.tensors.get("lm_head.weight")
    weight = pair.reference.get_output_embeddings().weight.detach() if own is None else own
    scale = weight.abs().amax(1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    reference = replace(pair, tensors={**pair.tensors, "lm_head.weight": rounded})
    _, directed = decode(pair, lambda length: length % (STEPS + 1), drafting={"lm_head_dtype": "fp8"})
    moved = 0
    for sequence, drafted in directed.rounds:
        assert drafted == reference.drafts(sequence, STEPS)
        moved += drafted != pair.drafts(sequence, STEPS)
    assert 0 < moved < len(directed.rounds)


def test_an_fp8_head_is_refused_where_no_tensor_core_reads_fp8(pair, monkeypatch):
    monkeypatch.setattr(autoregressive, "arch_of", lambda device: TARGETS["sm_80"][1])
    with pytest.raises(ValueError, match="lm_head_dtype: got 'fp8' on sm_80, needs sm_89 or later"):
        pair.speculator(lm_head_dtype="fp8")


def test_a_slot_and_its_blocks_are_used_again(pair):
    """Seven prompts through two slots: a request finds nothing of the one before it."""
    prompts = [ids[:length] for ids in PROMPTS for length in (3, 5)] + [PROMPTS[1]]
    speculator = pair.speculator(max_num_reqs=2)
    decoder = SpeculativeDecoder(
        pair.target,
        speculator,
        max_num_reqs=2,
        max_model_len=128,
        block_size=4,
        num_blocks=14,
        max_num_batched_tokens=64,
    )
    completions = decoder.generate([Request(ids, NEW) for ids in prompts])
    alone = [decoder.generate([Request(ids, NEW)])[0] for ids in prompts]
    assert completions == alone
    assert [one.output_ids for one in completions] == [pair.greedy(ids, NEW) for ids in prompts]


def test_positions_advance_and_keys_are_written(pair, monkeypatch):
    """C13, C14: rejected tokens shorten the length, steps go on from there, each writing one key."""
    speculator, sequences = pair.speculator(), [PROMPTS[1], PROMPTS[2]]
    _, arguments = one_pass(pair, speculator, sequences, rejected=[3, 0])
    seen, run_model = [], speculator.run_model

    def logged(input_ids, positions, hidden, batch, step, **options):
        seen.append((positions.tolist(), batch.seq_lens.tolist(), batch.slot_mappings[0].tolist()))
        return run_model(input_ids, positions, hidden, batch, step, **options)

    monkeypatch.setattr(speculator, "run_model", logged)
    drafts = speculator.propose(*arguments).tolist()
    assert drafts == [pair.drafts(sequence, STEPS) for sequence in sequences]
    assert seen[0][0] == [*range(10), 0, 0, 0, *range(22)]
    assert seen[0][2][10:13] == [-1] * 3
    assert [positions for positions, _, _ in seen[1:]] == [[10, 22], [11, 23]]
    assert [lengths for _, lengths, _ in seen[1:]] == [[11, 23], [12, 24]]
    assert all(slot >= 0 for _, _, slots in seen[1:] for slot in slots)


def test_near_the_end_no_other_request_is_touched(pair, monkeypatch):
    """C12, C16: at most 64 positions and a last one of 62: the same forwards, the last of them without a slot."""
    sequence = [*(PROMPTS[2] * 3)[:64]]
    speculator = pair.speculator(max_model_len=64, max_num_batched_tokens=96)
    kv, arguments = one_pass(pair, speculator, [sequence, PROMPTS[0]])
    seen, run_model = [], speculator.run_model

    def logged(input_ids, positions, hidden, batch, step, **options):
        seen.append((positions.tolist(), batch.seq_lens.tolist(), batch.slot_mappings[0].tolist()))
        return run_model(input_ids, positions, hidden, batch, step, **options)

    monkeypatch.setattr(speculator, "run_model", logged)
    free = set(range(kv.num_blocks)) - set(kv.tables[0].flatten().tolist())
    before = own_caches(kv, speculator)
    drafts = speculator.propose(*arguments).tolist()
    assert len(seen) == STEPS
    assert [(p[0], n[0], slot[0] >= 0) for p, n, slot in seen[1:]] == [(63, 64, True), (63, 64, False)]
    assert all(0 <= token < 128 for row in drafts for token in row)
    for now, then in zip(own_caches(kv, speculator), before, strict=True):
        assert torch.equal(now[sorted(free)], then[sorted(free)])


def test_padding_and_dummy_steps_write_nothing(pair):
    """C7, C15: rows of padding with counts left over from another batch, and a batch of no requests."""
    speculator, sequences = pair.speculator(), [PROMPTS[1], PROMPTS[0]]
    kv, (batch, verify, sampling, hidden) = one_pass(pair, speculator, sequences)
    alone = speculator.propose(batch, verify, sampling, hidden).tolist()
    after = own_caches(kv, speculator)

    def pad(tensor: Tensor, value: int) -> Tensor:
        return torch.cat((tensor, torch.full((2,), value, dtype=tensor.dtype, device=tensor.device)))

    padded = replace(
        batch,
        query_start_loc=pad(batch.query_start_loc, batch.num_tokens),
        seq_lens=pad(batch.seq_lens, 0),
        idx_mapping=pad(batch.idx_mapping, -1),
        num_reqs=4,
    )
    counts = replace(verify, num_sampled=pad(verify.num_sampled, 0), num_rejected=pad(verify.num_rejected, 7))
    assert speculator.propose(padded, counts, sampling, hidden)[:2].tolist() == alone
    again = own_caches(kv, speculator)
    # the real rows' own keys come out of a product with more rows, which may round in another order
    torch.testing.assert_close(again, after, rtol=1e-5, atol=1e-5)
    none = replace(
        batch,
        input_ids=batch.input_ids[:0],
        positions=batch.positions[:0],
        query_start_loc=batch.query_start_loc[:1],
        seq_lens=batch.seq_lens[:0],
        idx_mapping=batch.idx_mapping[:0],
        num_reqs=0,
        num_tokens=0,
        max_query_len=0,
    )
    nothing = replace(verify, num_sampled=verify.num_sampled[:0], num_rejected=verify.num_rejected[:0])
    assert speculator.propose(none, nothing, sampling, hidden[:0]).shape == (0, STEPS)
    assert all(torch.equal(now, then) for now, then in zip(own_caches(kv, speculator), again, strict=True))


def test_fewer_drafts_and_none(pair):
    """C9: K may change from call to call; with none, the drafter's keys stay in step."""
    speculator, sequences = pair.speculator(), [PROMPTS[1], PROMPTS[0]]
    kv, arguments = one_pass(pair, speculator, sequences)
    assert speculator.propose(*arguments, num_speculative_tokens=0).shape == (2, 0)
    assert any(cache.any() for cache in own_caches(kv, speculator))
    expected = [pair.drafts(sequence, STEPS) for sequence in sequences]
    for count in (1, 3, 2):
        drafts = speculator.propose(*arguments, num_speculative_tokens=count)
        assert drafts.tolist() == [row[:count] for row in expected]
    with pytest.raises(ValueError, match="num_speculative_tokens: got 4, needs 0 to 3"):
        speculator.propose(*arguments, num_speculative_tokens=4)


def test_a_drafter_of_no_drafts_keeps_its_keys(pair):
    """C9: K = 0 by configuration."""
    speculator = pair.speculator(0)
    kv, arguments = one_pass(pair, speculator, [PROMPTS[1], PROMPTS[0]])
    assert speculator.propose(*arguments).shape == (2, 0)
    assert any(cache.any() for cache in own_caches(kv, speculator))


def test_attention_reads_reserved_blocks_only(pair):
    """Requests that end at the end of a block: a draft past it has no key of its own, and looks for none."""
    seen = []

    def attention(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, **options):
        for row, length in enumerate(seq_lens.tolist()):
            seen.extend(block_table[row, : -(-length // 4)].tolist())
        return paged_attention(q, k_cache, v_cache, block_table, query_start_loc, seq_lens, **options)

    prompts = [ids[:3] for ids in PROMPTS]
    speculator = pair.speculator(attention=attention, cudagraph_mode=CUDAGraphMode.NONE)
    decoder = SpeculativeDecoder(
        pair.target, speculator, max_num_reqs=4, max_model_len=128, block_size=4, max_num_batched_tokens=64
    )
    for new in (5, 6, 7, 8):
        decoder.generate([Request(ids, new) for ids in prompts])
    assert seen
    assert min(seen) >= 0


def test_embeddings_of_images(pair):
    """Made-up image embeddings in a ragged batch: each row's following token is what the target saw there."""
    speculator, sequences = pair.speculator(), [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    kv, (batch, verify, sampling, _) = one_pass(pair, speculator, sequences)
    table = pair.reference.get_input_embeddings().weight
    embeds = table[batch.input_ids].clone()
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool, device=embeds.device)
    # an image inside the first request, one that begins the second, one that ends the third's pass
    for start, end in ((3, 7), (10, 13), (34, 36)):
        mask[start:end] = True
    embeds[mask] = torch.randn(int(mask.sum()), embeds.shape[1], device=embeds.device)
    starts = batch.query_start_loc.tolist()
    hidden, expected = [], []
    for row, sequence in enumerate(sequences):
        seen = torch.cat((embeds[starts[row] : starts[row + 1]], table[sequence[-1:]]))
        states = pair.reference(inputs_embeds=seen[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
        layers = pair.aux_layers or (-1,)
        hidden.append(torch.cat([states[layer][0] for layer in layers], -1))
        expected.append(pair.drafts(sequence, STEPS, seen))
    drafts = speculator.propose(
        batch, verify, sampling, torch.cat(hidden), multimodal=Multimodal(embeds, mask)
    ).tolist()
    assert drafts == expected
    keys = own_caches(kv, speculator)[0]
    speculator.propose(batch, verify, sampling, torch.cat(hidden))
    assert not torch.allclose(own_caches(kv, speculator)[0], keys, atol=1e-2)
    with pytest.raises(TypeError, match=r"multimodal.mask: got float32"):
        speculator.propose(batch, verify, sampling, torch.cat(hidden), multimodal=Multimodal(embeds, mask.float()))


def test_sampled_drafts_leave_their_logits(pair):
    """What verification reads as q is what each draft was drawn from, −inf outside the draft vocabulary."""
    speculator = pair.speculator(draft_sampling="probabilistic")
    _, (batch, verify, _, hidden) = one_pass(pair, speculator, [PROMPTS[1], PROMPTS[0]])
    device = hidden.device
    temperature = torch.tensor([0.8, 0.0, 1.0, 1.0], device=device)
    sampling = SamplingState(temperature, torch.arange(4, device=device))
    drafts = speculator.propose(batch, verify, sampling, hidden)
    logits = speculator.draft_logits
    assert logits[:2].gather(2, drafts[..., None]).isfinite().all()
    assert torch.equal(logits[1].argmax(-1), drafts[1])
    outside = 128 - len(pair.tensors["d2t"]) if "d2t" in pair.tensors else 0
    assert (logits[:2].isinf().sum(-1) == outside).all()


def test_a_text_longer_than_the_head_was_made_for_is_refused(pair, tmp_path):
    config, tensors = MAKERS[pair.method](pair.reference.config, max_position_embeddings=100)
    short = replace(pair, directory=write_checkpoint(tmp_path, config, tensors))
    with pytest.raises(ValueError, match="max_model_len: got 128, the draft model ends at 100 tokens"):
        short.speculator()


def test_arguments_are_checked(pair):
    speculator = pair.speculator(max_num_batched_tokens=20)
    with pytest.raises(ValueError, match="batch: got 32 tokens, max_num_batched_tokens is 20"):
        speculator.propose(*one_pass(pair, speculator, [PROMPTS[1], PROMPTS[2]])[1])
    speculator = pair.speculator()
    _, (batch, verify, sampling, hidden) = one_pass(pair, speculator, [PROMPTS[1]])
    with pytest.raises(ValueError, match=r"hidden: got shape \[9, "):
        speculator.propose(batch, verify, sampling, hidden[1:])
    with pytest.raises(TypeError, match=r"hidden: got torch.float64, needs the target's torch.float32"):
        speculator.propose(batch, verify, sampling, hidden.double())
    with pytest.raises(ValueError, match=r"verify.last_sampled: got 1 rows, needs one for each of 4 slots"):
        speculator.propose(batch, replace(verify, last_sampled=verify.last_sampled[:1]), sampling, hidden)
    with pytest.raises(ValueError, match="batch: got max_query_len 3 for 10 tokens of 1 requests"):
        speculator.propose(replace(batch, max_query_len=3), verify, sampling, hidden)
    with pytest.raises(RuntimeError, match="the speculator has no model: call load_model"):
        init_speculator(speculator.config).set_kv_cache(speculator.kv)
    plain = KVCache(
        pair.target.kv_specs,
        num_blocks=8,
        block_size=16,
        max_num_reqs=4,
        max_model_len=128,
        dtype=torch.float32,
        device=hidden.device,
    )
    with pytest.raises(ValueError, match="kv: got 8 layers, needs the target's 8 and then the drafter's 1"):
        speculator.set_kv_cache(plain)


@pytest.fixture(scope="module")
def chain(device, tmp_path_factory):
    """Three MTP modules, and what they draft after whole sequences by the modules of `transformers`."""
    target, theirs = tiny_target(device=device), tiny_target(device=device)
    config, tensors = mtp_checkpoint(theirs.config, num_modules=3)
    directory = write_checkpoint(tmp_path_factory.mktemp("chain"), config, tensors)
    modules = [MTPReference("deepseek_v3", config, tensors, module).to(device) for module in range(3)]
    return ChainPair("mtp", directory, HFTarget(target), theirs, modules, {}, ())


class ChainPair(Pair):
    """A target with a chain of modules, each looking one token further ahead."""

    @torch.no_grad()
    def drafts(self, sequence: Sequence[int], steps: int, embeds: Tensor | None = None) -> list[int]:
        ids = torch.tensor(sequence, device=self.target.device)
        hidden = self.reference(ids[None, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        table, following = self.reference.get_input_embeddings().weight, ids[1:]
        for module in self.head[:steps]:
            hidden = module.whole(table[following], hidden)[0]
            drafted = (self.reference.get_output_embeddings().weight @ hidden[-1]).argmax()
            following = torch.cat((following[1:], drafted[None]))
        return following[-steps:].tolist()


@pytest.mark.parametrize("budget", [64, 13])
def test_a_chain_of_modules_drafts_as_a_full_recompute(chain, budget):
    """Keys that stood for rejected drafts are computed again, after acceptances of every length and in chunks."""
    right = torch.randint(0, STEPS + 1, (128,), generator=torch.Generator().manual_seed(2)).tolist()
    completions, directed = decode(chain, right.__getitem__, max_num_reqs=3, max_num_batched_tokens=budget)
    assert {count for one in completions for count in one.accepted} == set(range(STEPS + 1))
    for sequence, drafted in directed.rounds:
        assert drafted == chain.drafts(sequence, STEPS)


def test_a_chain_keeps_in_step_whatever_is_wanted(chain):
    speculator = chain.speculator()
    _, arguments = one_pass(chain, speculator, [PROMPTS[1], PROMPTS[0]])
    expected = [chain.drafts(ids, STEPS) for ids in (PROMPTS[1], PROMPTS[0])]
    for count in (1, 0, STEPS):
        drafts = speculator.propose(*arguments, num_speculative_tokens=count)
        assert drafts.tolist() == [row[:count] for row in expected]
    with pytest.raises(ValueError, match="num_speculative_tokens: got 4, needs 0 to 3"):
        speculator.propose(*arguments, num_speculative_tokens=4)
    with pytest.raises(ValueError, match="num_speculative_tokens: got 4, a chain of 3 modules drafts at most 3"):
        chain.speculator(4)
