"""The decoding loop: the target's own text whatever is drafted, in any batch, to the right end."""

import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from scipy import stats

from _tiny_gemma4 import VARIANTS
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.decoder import SpeculativeDecoder
from tridraft.speculator.request import Chunk, Request

NEW = 14


def prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(5, seed=8), prompt(11, seed=7), prompt(23, seed=7)]


def scripted(tiny, script, prompts, steps, accept, **options):
    """A plain-pair decoder whose drafts follow the continuations of `prompts`, and those continuations."""
    pair = tiny("plain")
    outputs = [pair.greedy(ids, NEW + steps) for ids in prompts]
    sequences = [[*ids, *output] for ids, output in zip(prompts, outputs, strict=True)]
    speculator = script(sequences, steps, accept)
    options = {"max_num_reqs": len(prompts), "max_model_len": 128, "block_size": 4, **options}
    return SpeculativeDecoder(pair.target, speculator, **options), outputs


@pytest.mark.parametrize(
    ("kind", "steps"), [*product(VARIANTS, (None, 3)), *(("plain", steps) for steps in (1, 2, 4, 5))]
)
def test_greedy_text_is_that_of_transformers(tiny, kind, steps):
    """Ragged prompts together, with the pair's own drafts and without."""
    pair = tiny(kind)
    decoder = pair.decoder(steps)
    completions = decoder.generate([Request(ids, NEW) for ids in PROMPTS])
    for ids, completion in zip(PROMPTS, completions, strict=True):
        assert completion.prompt_ids == ids
        assert completion.output_ids == pair.greedy(ids, NEW)
        assert completion.finish_reason == "length"
        assert sum(completion.accepted) + len(completion.accepted) + 1 == NEW
    assert decoder.kv.num_free_blocks == decoder.kv.num_blocks
    assert decoder.stats.output_tokens == len(PROMPTS) * NEW


def test_together_is_alone(tiny, variant):
    pair = tiny(variant)
    decoder = pair.decoder(3)
    together = decoder.generate([Request(ids, NEW) for ids in PROMPTS])
    for ids, completion in zip(PROMPTS, together, strict=True):
        assert decoder.generate([Request(ids, NEW)]) == [completion]


@pytest.mark.parametrize(("kind", "budget"), [*product(VARIANTS, (17,)), ("plain", 12)])
def test_chunked_prefill_is_whole_prefill(tiny, kind, budget, monkeypatch):
    pair = tiny(kind)
    requests = [Request(ids, NEW) for ids in PROMPTS]
    whole = pair.decoder(2).generate(requests)
    decoder = pair.decoder(2, max_num_batched_tokens=budget)
    assert decoder.generate(requests) == whole
    sizes = []
    forward = decoder.target.forward

    def measured(input_ids, *rest, **options):
        sizes.append(input_ids.shape[0])
        return forward(input_ids, *rest, **options)

    monkeypatch.setattr(decoder.target, "forward", measured)
    decoder.generate(requests)
    assert max(sizes) == budget
    assert sizes[0] == budget < sum(map(len, PROMPTS))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_every_acceptance_count(tiny, script, steps):
    """0 … K drafts accepted, in an order without pattern, in requests that run together."""
    right = torch.randint(0, steps + 1, (128,), generator=torch.Generator().manual_seed(steps)).tolist()
    decoder, outputs = scripted(tiny, script, PROMPTS, steps, right.__getitem__)
    completions = decoder.generate([Request(ids, NEW) for ids in PROMPTS])
    seen = set()
    for ids, output, completion in zip(PROMPTS, outputs, completions, strict=True):
        assert completion.output_ids == output[:NEW]
        emitted, expected = 1, []
        while emitted < NEW:
            expected.append(min(right[len(ids) + emitted - 1], NEW - emitted - 1))
            emitted += expected[-1] + 1
        assert completion.accepted == expected
        seen.update(expected)
    assert seen == set(range(steps + 1))


@pytest.mark.parametrize(("right", "passes"), [(4, 4), (0, NEW), (2, 6)])
def test_passes_and_statistics(tiny, script, right, passes):
    """All, none, some of K = 4 drafts accepted: 1 pass for the prompt, then ⌈13 / (accepted + 1)⌉."""
    decoder, outputs = scripted(tiny, script, PROMPTS[:1], 4, lambda _: right)
    (completion,) = decoder.generate([Request(PROMPTS[0], NEW)])
    assert completion.output_ids == outputs[0][:NEW]
    counts = decoder.stats
    assert counts.target_passes == passes
    assert len(completion.accepted) == counts.verify_rows == passes - 1
    assert counts.mean_accepted_length == pytest.approx((NEW - 1) / (passes - 1))
    assert counts.prompt_tokens == len(PROMPTS[0])
    assert counts.output_tokens == NEW
    assert counts.verify_seconds > 0
    assert counts.draft_seconds > 0
    assert counts.total_seconds >= counts.verify_seconds + counts.draft_seconds
    shares = [1.0] * right + [0.0] * (4 - right)
    assert counts.acceptance_by_position == shares


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("right", [4, 2, 0])
def test_a_stop_token_inside_an_accepted_run(tiny, script, place, right):
    """What was accepted behind it is dropped, as plain decoding would never have computed it."""
    decoder, outputs = scripted(tiny, script, PROMPTS[:1], 4, lambda _: right)
    stop = outputs[0][place]
    end = outputs[0].index(stop) + 1
    (completion,) = decoder.generate([Request(PROMPTS[0], NEW, stop_token_ids=[stop, 1])])
    assert completion.output_ids == outputs[0][:end]
    assert completion.finish_reason == "stop"
    assert decoder.stats.output_tokens == end
    assert decoder.stats.verify_tokens == end - 1
    assert decoder.kv.num_free_blocks == decoder.kv.num_blocks


def test_stop_tokens_of_the_target(tiny):
    pair = tiny("plain")
    plain = pair.greedy(PROMPTS[1], NEW)
    stop = plain[6]
    pair.target.eos_token_ids = (stop,)
    try:
        decoder = pair.decoder(3)
        (completion,) = decoder.generate([Request(PROMPTS[1], NEW)])
        assert (
            completion.output_ids == pair.greedy(PROMPTS[1], NEW, eos_token_id=stop) == plain[: plain.index(stop) + 1]
        )
        (completion,) = decoder.generate([Request(PROMPTS[1], NEW, stop_token_ids=())])
        assert completion.output_ids == plain
    finally:
        pair.target.eos_token_ids = ()


@pytest.mark.parametrize("new", range(1, 9))
def test_max_new_tokens(tiny, script, new):
    decoder, outputs = scripted(tiny, script, PROMPTS[:1], 3, lambda length: length % 4)
    (completion,) = decoder.generate([Request(PROMPTS[0], new)])
    assert completion.output_ids == outputs[0][:new]
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_max_model_len(tiny, steps, room):
    """C12, C16: to the last position, with whole blocks and without; every pass drafts."""
    pair = tiny("plain")
    length = len(PROMPTS[1]) + room
    decoder = pair.decoder(steps, max_model_len=length, max_num_reqs=2)
    calls = []
    if steps:
        propose = decoder.speculator.propose
        decoder.speculator.propose = lambda *args: (calls.append(args[0].num_reqs), propose(*args))[1]
    completions = decoder.generate([Request(PROMPTS[1], NEW), Request(PROMPTS[0], NEW)])
    assert completions[0].output_ids == pair.greedy(PROMPTS[1], room)
    assert completions[1].output_ids == pair.greedy(PROMPTS[0], min(NEW, length - len(PROMPTS[0])))
    assert [completion.finish_reason for completion in completions] == ["length", "length"]
    assert len(calls) == (decoder.stats.target_passes if steps else 0)


def test_more_prompts_than_slots(tiny):
    pair = tiny("plain")
    prompts = [prompt(length, seed=length) for length in (4, 9, 17, 6, 12)]
    decoder = pair.decoder(3, max_num_reqs=2)
    completions = decoder.generate([Request(ids, NEW - index) for index, ids in enumerate(prompts)])
    for index, (ids, completion) in enumerate(zip(prompts, completions, strict=True)):
        assert completion.output_ids == pair.greedy(ids, NEW - index)


def test_more_prompts_than_blocks(tiny):
    """A request waits until all it may need is free: 2 of these run at once, not 4."""
    pair = tiny("plain")
    decoder = pair.decoder(3, max_num_reqs=4, num_blocks=10)
    rows = []
    propose = decoder.speculator.propose
    decoder.speculator.propose = lambda *args: (rows.append(args[0].num_reqs), propose(*args))[1]
    prompts = [prompt(5, seed=seed) for seed in range(4)]
    completions = decoder.generate([Request(ids, NEW) for ids in prompts])
    assert max(rows) == 2
    for ids, completion in zip(prompts, completions, strict=True):
        assert completion.output_ids == pair.greedy(ids, NEW)


@pytest.mark.parametrize("kind", ["plain", "kv_shared"])
def test_freed_blocks_are_used_again(tiny, kind):
    """Keys of finished requests stay in the pool; another request in their blocks does not see them."""
    pair = tiny(kind)
    decoder = pair.decoder(3, max_num_reqs=2, max_model_len=48, num_blocks=20)
    for ids in [*PROMPTS, *PROMPTS[::-1]]:
        (completion,) = decoder.generate([Request(ids, NEW)])
        assert completion.output_ids == pair.greedy(ids, NEW)
    used = sum(bool(layer.k_cache[block].any()) for layer in decoder.kv.layers[:1] for block in range(20))
    assert 0 < used < 20


def test_suppressed_ids_of_the_target(tiny):
    """C2, C3: they are neither accepted nor sampled, greedily as `transformers` has it."""
    pair = tiny("plain")
    suppressed = sorted(set(pair.greedy(PROMPTS[0], NEW)[:5]))
    pair.target.suppress_ids = torch.tensor(suppressed, device=pair.target.device)
    try:
        decoder = pair.decoder(3)
        (completion,) = decoder.generate([Request(PROMPTS[0], NEW)])
        (hot,) = decoder.generate([Request(PROMPTS[0], 40, temperature=5.0, seed=1)])
    finally:
        pair.target.suppress_ids = None
    assert completion.output_ids == pair.greedy(PROMPTS[0], NEW, suppress_tokens=suppressed)
    assert completion.output_ids != pair.greedy(PROMPTS[0], NEW)
    assert not set(hot.output_ids) & set(suppressed)


def test_stream_and_callback(tiny):
    pair = tiny("plain")
    decoder = pair.decoder(3)
    requests = [Request(ids, NEW) for ids in PROMPTS]
    chunks: list[Chunk] = []
    completions = decoder.generate(requests, chunks.append)
    assert list(decoder.stream(requests)) == chunks
    for index, completion in enumerate(completions):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in mine for token in chunk.token_ids] == completion.output_ids
        assert [chunk.num_accepted for chunk in mine] == [None, *completion.accepted]
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_leaving_early_frees_everything(tiny, how):
    pair = tiny("plain")
    decoder = pair.decoder(3, max_num_reqs=2)
    requests = [Request(ids, NEW) for ids in PROMPTS]
    stream = decoder.stream(requests)
    next(stream)
    assert decoder.kv.num_free_blocks < decoder.kv.num_blocks
    with pytest.raises(RuntimeError, match="another stream of this decoder is still open"):
        decoder.generate(requests)
    if how == "close":
        stream.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)
    assert decoder.kv.num_free_blocks == decoder.kv.num_blocks
    completions = decoder.generate(requests)
    assert [completion.output_ids for completion in completions] == [pair.greedy(ids, NEW) for ids in PROMPTS]


@pytest.mark.gpu
def test_one_read_of_the_device_a_pass(tiny):
    """Between acceptance and the next drafts the host learns nothing: the only wait is for the emitted tokens."""
    pair = tiny("plain")
    decoder = pair.decoder(3)
    decoder.generate([Request(PROMPTS[0], 6)])
    waits = []
    forward_pass = decoder._pass

    def counted(rows):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return forward_pass(rows)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                waits.append(sum("called a synchronizing" in str(warning.message) for warning in caught))

    decoder._pass = counted
    decoder.generate([Request(PROMPTS[0], 6)])
    assert waits == [1] * decoder.stats.target_passes


def test_sampling_depends_on_seed_and_prompt_alone(tiny):
    """C26, C29: not on the order, on the batch, or on other temperatures in it."""
    pair = tiny("plain")
    speculator = pair.speculator(3, max_num_reqs=4, draft_sampling="probabilistic")
    decoder = SpeculativeDecoder(pair.target, speculator, max_num_reqs=4, max_model_len=128, block_size=4)
    requests = [
        Request(PROMPTS[0], NEW, temperature=1.0, seed=7),
        Request(PROMPTS[1], NEW, temperature=0.0, seed=7),
        Request(PROMPTS[2], NEW, temperature=0.6, seed=8),
        Request(PROMPTS[0], NEW, temperature=1.0, seed=9),
    ]
    together = decoder.generate(requests)
    torch.rand(100)
    assert decoder.generate(requests[::-1]) == together[::-1]
    for request, completion in zip(requests, together, strict=True):
        assert decoder.generate([request]) == [completion]
    assert together[1].output_ids == pair.greedy(PROMPTS[1], NEW)
    assert together[0].output_ids != together[3].output_ids


@pytest.mark.parametrize("drafts", ["probabilistic", "greedy", "none"])
def test_sampled_text_has_the_targets_distribution(tiny, drafts):
    """The second token after a prompt, over 1,000 seeds, against its exact probabilities; α = 0.001."""
    pair = tiny("plain")
    start, draws, temperature = PROMPTS[0], 1000, 0.1
    speculator = None
    if drafts != "none":
        speculator = pair.speculator(1, max_num_reqs=50, max_model_len=16, draft_sampling=drafts)
    decoder = SpeculativeDecoder(pair.target, speculator, max_num_reqs=50, max_model_len=16, max_num_batched_tokens=300)
    # Three tokens, so that the second is verified with a draft before it.
    completions = decoder.generate([Request(start, 3, temperature=temperature, seed=seed) for seed in range(draws)])
    first = next_token_probabilities(pair, [start], temperature)[0]
    after = next_token_probabilities(pair, [[*start, token] for token in range(128)], temperature)
    expected = (first @ after).double().cpu()
    observed = torch.bincount(torch.tensor([completion.output_ids[1] for completion in completions]), minlength=128)
    common = expected * draws >= 5
    assert common.sum() >= 10
    frequencies = [*observed[common].tolist(), observed[~common].sum().item()]
    probabilities = torch.cat((expected[common], expected[~common].sum()[None]))
    result = stats.chisquare(frequencies, (probabilities / probabilities.sum() * draws).tolist())
    assert result.pvalue > 0.001
    if drafts != "none":
        assert 0 < decoder.stats.acceptance_by_position[0] < 1


def next_token_probabilities(pair, sequences, temperature):
    with torch.no_grad():
        logits = pair.reference(input_ids=torch.tensor(sequences, device=pair.target.device)).logits[:, -1]
    return (logits / temperature).softmax(-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, r"requests\[1\].prompt_ids: is empty, needs at least one token"),
        ({"prompt_ids": [5, 128]}, r"requests\[1\].prompt_ids: got 128, the target's ids are 0 to 127"),
        ({"prompt_ids": [-1, 5]}, r"requests\[1\].prompt_ids: got -1, the target's ids are 0 to 127"),
        ({"prompt_ids": [5] * 32}, r"requests\[1\].prompt_ids: has 32 tokens, max_model_len 32 leaves no new one"),
        ({"max_new_tokens": 0}, r"requests\[1\].max_new_tokens: got 0, needs an integer of 1 to"),
        ({"temperature": -1.0}, r"requests\[1\].temperature: got -1.0, needs 0 .greedy. or 1e-30 to"),
        ({"temperature": 1e-40}, r"requests\[1\].temperature: got 1e-40, needs 0 .greedy. or 1e-30 to"),
        ({"top_k": -1}, r"requests\[1\].top_k: got -1, needs an integer of 0 to"),
        ({"top_p": 0.0}, r"requests\[1\].top_p: got 0.0, needs more than 0 and at most 1"),
        ({"max_new_tokens": 2.5}, r"requests\[1\].max_new_tokens: got 2.5, needs an integer"),
        ({"seed": 2**63}, r"requests\[1\].seed: got 9223372036854775808, needs an integer"),
        ({"temperature": float("nan")}, r"requests\[1\].temperature: got nan, needs 0 .greedy. or 1e-30 to"),
        ({"max_new_tokens": 30}, r"requests\[1\]: may need 8 blocks, num_blocks is 5: raise it"),
    ],
)
def test_requests_are_checked_before_anything_runs(tiny, change, message):
    decoder = tiny("plain").decoder(None, max_model_len=32, num_blocks=5)
    request = Request(PROMPTS[0], NEW)
    with pytest.raises(ValueError, match=message):
        decoder.stream([request, replace(request, **change)])
    assert decoder.stats.target_passes == 0
    assert decoder.kv.num_free_blocks == 5


def test_a_stream_that_waits_is_open(tiny):
    """Between two requests nothing runs, and another stream would run in the first one's place."""
    decoder = tiny("plain").decoder(None, max_num_reqs=1)
    stream = decoder.stream([Request(PROMPTS[0], 1), Request(PROMPTS[1], 1)])
    next(stream)
    with pytest.raises(RuntimeError, match="another stream of this decoder is still open"):
        decoder.generate([Request(PROMPTS[2], 1)])
    assert len(list(stream)) == 1
    assert len(decoder.generate([Request(PROMPTS[2], 1)])) == 1


def test_sizes_are_checked(tiny):
    pair = tiny("plain")
    with pytest.raises(ValueError, match="max_model_len: got 513, the target ends at 512 tokens"):
        SpeculativeDecoder(pair.target, max_model_len=513)
    with pytest.raises(ValueError, match="4 requests with 3 drafts each need 16"):
        pair.decoder(3, max_num_batched_tokens=15)


def test_a_pass_says_how_it_is_packed(tiny, script, monkeypatch):
    """A prompt chunk beside a verify row: rows, lengths and slots as the kernels take them."""
    decoder, _ = scripted(tiny, script, PROMPTS[:2], 3, lambda _: 3, max_num_batched_tokens=8)
    passes: list[tuple[torch.Tensor, AttentionBatch, torch.Tensor]] = []
    forward = decoder.target.forward

    def recorded(input_ids, positions, kv, batch, logits_rows, **options):
        passes.append((positions, batch, logits_rows))
        return forward(input_ids, positions, kv, batch, logits_rows, **options)

    monkeypatch.setattr(decoder.target, "forward", recorded)
    decoder.generate([Request(ids, NEW) for ids in PROMPTS[:2]])
    positions, batch, logits_rows = passes[0]  # all of the first prompt, 3 tokens of the second
    assert positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.query_start_loc.tolist() == [0, 5, 8]
    assert batch.seq_lens.tolist() == [5, 3]
    assert logits_rows.tolist() == [4]
    positions, batch, logits_rows = passes[1]  # the first's newest token and 3 drafts, 4 more of the second
    assert positions.tolist() == [5, 6, 7, 8, 3, 4, 5, 6]
    assert batch.query_start_loc.tolist() == [0, 4, 8]
    assert batch.seq_lens.tolist() == [9, 7]
    assert logits_rows.tolist() == [0, 1, 2, 3]
    assert batch.slot_mappings is not None
    for table, mapping in zip(batch.block_tables, batch.slot_mappings, strict=True):
        rows = [0] * 4 + [1] * 4
        slots = [
            int(table[row, position // 4]) * 4 + position % 4
            for row, position in zip(rows, positions.tolist(), strict=True)
        ]
        assert mapping.tolist() == slots
