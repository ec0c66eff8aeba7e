"""Captured drafting with heads that own their keys: replays equal eager rounds, wait for nothing, read their own."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from _head_pairs import PROMPTS, STEPS, decode, one_pass
from _passes import no_sync, poison_free_memory
from tridraft.kernels.attention import paged_attention
from tridraft.speculator.batch import SamplingState
from tridraft.speculator.cudagraph import CUDAGraphMode

pytestmark = pytest.mark.gpu
SHORT = [PROMPTS[0][:4], PROMPTS[1][:5]]
"""Passes of at most K + 1 tokens: verify batches, as far as a graph can tell."""


def waiting_attention(*args: Any, **options: Any) -> Tensor:
    """An attention that no capture may hold."""
    torch.cuda.synchronize()
    return paged_attention(*args, **options)


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.PIECEWISE])
def test_replays_equal_eager_rounds(pair, mode):
    """C5: prompts whole and in chunks, verify rows and both together, across blocks of 4 tokens."""
    right = torch.randint(0, STEPS + 1, (128,), generator=torch.Generator().manual_seed(2)).tolist()
    sizes = {"max_num_reqs": 3, "max_num_batched_tokens": 20}
    graphs = {"cudagraph_mode": mode}
    if mode is CUDAGraphMode.PIECEWISE:
        graphs["attention"] = waiting_attention
    _, eager = decode(pair, right.__getitem__, drafting={"cudagraph_mode": CUDAGraphMode.NONE}, **sizes)
    _, replayed = decode(pair, right.__getitem__, drafting=graphs, **sizes)
    assert replayed.rounds == eager.rounds
    managers = ("mixed_graphs", "verify_graphs", "decode_graphs")
    captured = {name: len(getattr(replayed.inner, name).memory) for name in managers}
    assert captured["verify_graphs"] == captured["decode_graphs"] == 3 * (mode is not CUDAGraphMode.PIECEWISE)
    assert captured["mixed_graphs"] == (0 if mode is CUDAGraphMode.FULL_DECODE_ONLY else 1)


def test_a_replay_owns_what_it_reads(pair):
    """What the caller passed may be gone, and free memory full of NaN, by the time a graph runs again."""
    speculator = pair.speculator()
    _, arguments = one_pass(pair, speculator, SHORT)
    speculator.capture()
    expected = [pair.drafts(sequence, STEPS) for sequence in SHORT]
    assert speculator.propose(*arguments).tolist() == expected
    (bucket,) = [one for one in speculator.verify_graphs.buckets if one.num_reqs == 2]
    for value in (*vars(arguments[0]).values(), *vars(arguments[1]).values(), arguments[3]):
        if isinstance(value, Tensor):
            value.fill_(0x7F)
    del arguments
    poison_free_memory()
    speculator.drafts.zero_()
    speculator.verify_graphs.replay(bucket)
    assert speculator.drafts[:, :2].t().tolist() == expected


@pytest.mark.parametrize("sequences", [SHORT, PROMPTS], ids=["verify", "prompts"])
def test_propose_never_waits(pair, sequences):
    speculator = pair.speculator()
    _, arguments = one_pass(pair, speculator, sequences)
    speculator.capture()
    speculator.propose(*arguments)
    with no_sync():
        drafts = speculator.propose(*arguments)
    assert drafts.tolist() == [pair.drafts(sequence, STEPS) for sequence in sequences]


@pytest.mark.parametrize(("sequences", "graphs"), [(SHORT, 1), (PROMPTS, 2)], ids=["verify", "prompts"])
def test_a_round_is_one_graph_or_two(pair, sequences, graphs, tmp_path):
    """Step 0 of a pass with prompts is a graph of its own; nothing is copied from the host."""
    speculator = pair.speculator()
    _, arguments = one_pass(pair, speculator, sequences)
    speculator.capture()
    speculator.propose(*arguments)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        speculator.propose(*arguments)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [event.get("name", "") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count("cudaGraphLaunch") == graphs
    assert not [name for name in names if "HtoD" in name or "DtoH" in name or "Malloc" in name]


def test_draft_lengths_and_smaller_batches(pair):
    """C7, C9: any length in any order, and fewer requests after more."""
    speculator = pair.speculator(cudagraph_num_steps=(3, 1, 0))
    _, both = one_pass(pair, speculator, SHORT)
    speculator.capture()
    expected = [pair.drafts(sequence, STEPS) for sequence in SHORT]
    batch, verify, sampling, hidden = both
    alone = replace(
        batch,
        input_ids=batch.input_ids[:3],
        positions=batch.positions[:3],
        query_start_loc=batch.query_start_loc[:2],
        seq_lens=batch.seq_lens[:1],
        idx_mapping=batch.idx_mapping[:1],
        num_reqs=1,
        num_tokens=3,
    )
    counts = replace(verify, num_sampled=verify.num_sampled[:1], num_rejected=verify.num_rejected[:1])
    for count in (3, 0, 1, 2, 3):
        drafts = speculator.propose(*both, num_speculative_tokens=count).tolist()
        assert drafts == [row[:count] for row in expected]
        drafts = speculator.propose(alone, counts, sampling, hidden[:3], num_speculative_tokens=count).tolist()
        assert drafts == [expected[0][:count]]


@pytest.mark.parametrize("lm_head_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("sequences", [SHORT, PROMPTS], ids=["verify", "prompts"])
def test_sampled_drafts_are_the_eager_ones(pair, sequences, lm_head_dtype):
    """One graph, and two of which the second samples at positions that the first left."""
    speculator = pair.speculator(draft_sampling="probabilistic", lm_head_dtype=lm_head_dtype)
    _, (batch, verify, _, hidden) = one_pass(pair, speculator, sequences)
    temperature = torch.tensor([0.8, 1.5, 0.0, 0.0], device=hidden.device)
    sampling = SamplingState(temperature, torch.arange(4, device=hidden.device))
    eager = speculator.propose(batch, verify, sampling, hidden).tolist()
    logits = speculator.draft_logits.clone()
    speculator.capture()
    speculator.draft_logits.zero_()
    assert speculator.propose(batch, verify, sampling, hidden).tolist() == eager
    used = batch.idx_mapping.long()
    torch.testing.assert_close(speculator.draft_logits[used], logits[used])


def test_garbage_in_the_buffers_is_harmless(pair):
    """C10: whatever lies in them when capture begins."""
    speculator = pair.speculator()
    _, arguments = one_pass(pair, speculator, SHORT)
    buffers = [*vars(speculator.step).values(), *vars(speculator.prefill).values(), speculator.drafts]
    for buffer in buffers:
        if buffer is not speculator.step.query_start_loc:
            buffer.fill_(0x7F7F if not buffer.is_floating_point() else float("nan"))
    speculator.capture()
    assert speculator.propose(*arguments).tolist() == [pair.drafts(sequence, STEPS) for sequence in SHORT]
