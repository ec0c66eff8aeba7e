"""CUDA graphs: which there are, which is replayed, and that a replay is what the same code does without."""

import json
import weakref
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from _passes import Rig, no_sync, overwrite, poison_free_memory
from tridraft.kernels import _op
from tridraft.speculator.cudagraph import (
    Bucket,
    CudaGraphManager,
    CUDAGraphMode,
    DecodeSpeculatorCudaGraphManager,
    PrefillSpeculatorCudaGraphManager,
    capture_graphs,
    no_collection,
    request_counts,
    token_counts,
)

CPU = torch.device("cpu")
NONE, PIECEWISE, DECODE_ONLY, FULL = CUDAGraphMode
NOISE = 5e-4
"""Gemma 4 attends without a scale, so the order in which float32 sums are taken shows at about 2e-4."""


def idle(bucket: Bucket) -> None:
    """Nothing to capture."""


@pytest.fixture
def no_cuda(monkeypatch):
    """A CUDA that records nothing: what is left is the order of runs and what becomes of an exception."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    return SimpleNamespace(synchronize=lambda: None)


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [(NONE, NONE, NONE), (PIECEWISE, NONE, PIECEWISE), (DECODE_ONLY, FULL, NONE), (FULL, FULL, FULL)],
)
def test_modes(mode, decode, mixed):
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed


@pytest.mark.parametrize("max_num_reqs", [1, 2, 3, 4, 9, 64, 200, 1000])
def test_request_counts_cover_every_batch(max_num_reqs):
    counts = request_counts(max_num_reqs)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == max_num_reqs
    for smaller, larger in pairwise(counts):
        # The padding of the worst batch between the two: at most half of 4, 7 of 8, 15 of 64, 63 of 256.
        assert larger - smaller <= max(smaller, 1) if smaller < 8 else larger - smaller <= max(8, smaller // 4)


@pytest.mark.parametrize("max_num_tokens", [1, 64, 65, 2048, 5000])
def test_token_counts_cover_every_batch(max_num_tokens):
    counts = token_counts(max_num_tokens)
    assert counts == sorted(set(counts))
    assert counts[-1] == max_num_tokens
    assert all(larger <= 1.5 * smaller for smaller, larger in pairwise(counts))


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("max_num_reqs", [1, 3, 4, 9, 100])
def test_verify_buckets_are_multiples_of_a_verified_request(steps, max_num_reqs):
    """C8: no bucket splits a request, and the largest holds all of them."""
    manager = PrefillSpeculatorCudaGraphManager.of_verify(
        idle, CPU, max_num_reqs=max_num_reqs, max_query_len=steps + 1, num_steps=[steps]
    )
    tokens = [bucket.num_tokens for bucket in manager.buckets]
    assert all(count % (steps + 1) == 0 for count in tokens)
    assert tokens[0] == max_num_reqs * (steps + 1)
    assert all(bucket.num_tokens == bucket.num_reqs * bucket.max_query_len for bucket in manager.buckets)


def test_a_prompt_is_no_batch_of_verified_requests(no_cuda):
    """C8: 7 tokens of 1 request fit into 12, but not as the 4 requests of 3 tokens that the graph of 12 has."""
    manager = PrefillSpeculatorCudaGraphManager.of_verify(idle, CPU, max_num_reqs=4, max_query_len=3, num_steps=[2])
    manager.capture(None, no_cuda)
    assert manager.find(Bucket(7, 1, 7, 2)) is None
    assert manager.find(Bucket(7, 3, 3, 2)) == Bucket(12, 4, 3, 2)
    assert manager.find(Bucket(3, 3, 1, 2)) == Bucket(12, 4, 3, 2)
    assert manager.find(Bucket(3, 1, 3, 2)) == Bucket(3, 1, 3, 2)


def test_the_next_size_up_is_replayed(no_cuda):
    manager = DecodeSpeculatorCudaGraphManager(idle, CPU, max_num_reqs=4, num_steps=(3, 1))
    assert manager.find(Bucket(1, 1, 1, 1)) is None  # nothing is captured yet
    manager.capture(None, no_cuda)
    found = {(reqs, steps): manager.find(Bucket(reqs, reqs, 1, steps)) for reqs in range(1, 6) for steps in range(1, 5)}
    expected = dict(zip(range(1, 5), (1, 2, 4, 4), strict=True))
    for (reqs, steps), bucket in found.items():
        if reqs > 4 or steps > 3:
            assert bucket is None
        else:
            assert bucket == Bucket(expected[reqs], expected[reqs], 1, 1 if steps == 1 else 3)


def test_a_mixed_bucket_holds_one_prompt_or_many(no_cuda):
    manager = PrefillSpeculatorCudaGraphManager.of_mixed(
        idle, CPU, max_num_reqs=4, max_num_tokens=200, num_steps=[1], attention=None
    )
    manager.capture(None, no_cuda)
    assert manager.find(Bucket(150, 1, 150, 1)) == manager.find(Bucket(130, 4, 100, 1)) == Bucket(192, 4, 192, 1)
    assert manager.find(Bucket(201, 1, 201, 1)) is None


def test_every_size_is_at_least_as_large():
    bucket = Bucket(8, 4, 2, 3)
    assert bucket.holds(bucket)
    for index in range(4):
        larger, smaller = list(bucket), list(bucket)
        larger[index] += 1
        smaller[index] -= 1
        assert not bucket.holds(Bucket(*larger))
        assert bucket.holds(Bucket(*smaller))


def test_largest_first_each_warmed_up_and_only_once(no_cuda):
    runs: list[Bucket] = []
    manager = DecodeSpeculatorCudaGraphManager(runs.append, CPU, max_num_reqs=4, num_steps=(2,))
    manager.capture(None, no_cuda)
    assert [bucket.num_reqs for bucket in runs] == [4, 4, 2, 2, 1, 1]
    manager.capture(None, no_cuda)
    assert len(runs) == 6
    assert list(manager.memory) == manager.buckets
    manager.reset()
    assert manager.find(Bucket(1, 1, 1, 1)) is None
    assert not manager.memory
    manager.capture(None, no_cuda)
    assert len(runs) == 12


def test_nothing_to_capture_needs_no_device():
    capture_graphs([DecodeSpeculatorCudaGraphManager(idle, CPU, max_num_reqs=4, num_steps=())], CPU)


def test_a_failure_names_bucket_and_line(no_cuda):
    def run(bucket: Bucket) -> None:
        if bucket.num_reqs == 2:
            raise ValueError("\n".join(("no such size", "and more")))

    manager = DecodeSpeculatorCudaGraphManager(run, CPU, max_num_reqs=4, num_steps=(2,))
    with pytest.raises(RuntimeError) as raised:
        manager.capture(None, no_cuda)
    message = str(raised.value)
    assert "draft decode graph of Bucket(num_tokens=2, num_reqs=2, max_query_len=1, num_steps=2)" in message
    assert "ValueError: no such size (raise ValueError(" in message
    assert "test_cudagraph.py:" in message
    assert "size\n" not in message
    assert manager.find(Bucket(4, 4, 1, 2)) is None


def test_an_interrupt_leaves_no_graph(no_cuda):
    def run(bucket: Bucket) -> None:
        if bucket.num_reqs == 1:
            raise KeyboardInterrupt

    manager = DecodeSpeculatorCudaGraphManager(run, CPU, max_num_reqs=4, num_steps=(2,))
    with pytest.raises(KeyboardInterrupt):
        manager.capture(None, no_cuda)
    assert manager.find(Bucket(4, 4, 1, 2)) is None


LENGTHS = (15, 1, 16, 64, 31, 9, 8, 33, 40)
QUERIES = (5, 1, 3, 20, 5, 9, 2, 5, 1)
REJECTED = (4, 0, 1, 0, 2, 0, 1, 3, 0)
"""Nine requests: prompts among verified drafts, block and window ends, a request as long as the model."""


def ragged(rig: Rig, rows: int, *, seed: int = 0, **options: Any) -> Any:
    return rig.random_pass(LENGTHS[:rows], QUERIES[:rows], REJECTED[:rows], seed=seed, **options)


def bucket_of(rows: int) -> int:
    return next(count for count in (1, 2, 4, 8, 9) if count >= rows)


@pytest.fixture
def replayed(monkeypatch):
    """The buckets replayed so far, in order."""
    buckets: list[Bucket] = []
    replay = CudaGraphManager.replay

    def recorded(self: CudaGraphManager, bucket: Bucket) -> None:
        buckets.append(bucket)
        replay(self, bucket)

    monkeypatch.setattr(CudaGraphManager, "replay", recorded)
    return buckets


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["plain", "k_eq_v", "ordered"])
def test_replay_is_the_eager_run(variant, dtype, device, replayed):
    """C5, C7: every bucket with every number of requests it holds, larger batches before smaller ones and after.

    The eager run of the bucket's own size is the same to the last bit, kept logits included.
    """
    rig = Rig(variant, device, dtype)
    choices: list[dict[str, Any]] = [{}, {"draft_sampling": "probabilistic"}]
    if variant != "ordered":  # whose centroid head is never rounded
        choices.append({"lm_head_dtype": "fp8"})
    for options in choices:
        captured, eager = rig.speculator(**options), rig.speculator(cudagraph_mode=NONE, **options)
        captured.capture()
        for seed, rows in enumerate([*range(9, 0, -1), *range(1, 10)]):
            one = ragged(rig, rows, seed=seed, temperatures=(0.0, 0.8, 1.4))
            size = bucket_of(rows)
            drafts = one.propose(captured)
            assert replayed.pop() == Bucket(size, size, 1, 4)
            assert drafts == one.padded(size).propose(eager)[:rows]
            if captured.draft_logits is not None:
                slots = one.batch.idx_mapping
                assert torch.equal(captured.draft_logits[slots], eager.draft_logits[slots])
        assert not replayed


@pytest.mark.gpu
def test_replay_is_the_eager_run_of_the_batch_alone(device):
    """Padding changes how sums are split, so where a draft differs its two candidates have to be as good as equal."""
    rig = Rig("plain", device)
    options: dict[str, Any] = {"draft_sampling": "probabilistic"}
    captured, eager = rig.speculator(**options), rig.speculator(cudagraph_mode=NONE, **options)
    captured.capture()
    for rows in range(1, 10):
        one = ragged(rig, rows, seed=rows)
        ours, theirs = one.propose(captured), one.propose(eager)
        for row, slot in enumerate(one.batch.idx_mapping.tolist()):
            step = next((step for step in range(4) if ours[row][step] != theirs[row][step]), None)
            if step is not None:
                logits = eager.draft_logits[slot, step]
                assert logits[theirs[row][step]] - logits[ours[row][step]] < NOISE


@pytest.mark.gpu
def test_lengths_move_across_blocks_without_a_new_capture(device):
    """C5: one graph from the first key to the last that the model can have, block ends on both sides."""
    rig = Rig("plain", device, block_size=16)
    captured, eager = rig.speculator(), rig.speculator(cudagraph_mode=NONE)
    captured.capture()
    for length in (15, 31, 16, 17, 1, 63, 64, 32, 15):
        one = rig.random_pass([length], [min(5, length)], [min(2, length - 1)], seed=length)
        assert one.propose(captured) == one.propose(eager)


@pytest.mark.gpu
def test_padding_of_a_smaller_batch_is_inert(device):
    """C7: after 4 requests, 2 in the graph of 4: nothing of the earlier ones is left, no key is written."""
    rig = Rig("plain", device, max_num_reqs=4)
    speculator = rig.speculator()
    speculator.decode_graphs.buckets = [Bucket(4, 4, 1, 4)]
    speculator.capture()
    caches = [cache for layer in rig.kv.layers for cache in (layer.k_cache, layer.v_cache)]
    before = [cache.clone() for cache in caches]
    ragged(rig, 4).propose(speculator)
    two = ragged(rig, 2, seed=1)
    drafts = two.propose(speculator)
    assert all(torch.equal(now, then) for now, then in zip(caches, before, strict=True))
    passed, step = speculator.passed, speculator.step
    assert passed.idx_mapping.tolist() == [*two.batch.idx_mapping.tolist(), -1, -1]
    for tensor in (step.input_ids, step.positions, step.seq_lens):
        assert tensor[2:].tolist() == [0, 0]
    assert drafts == two.padded(4).propose(rig.speculator(cudagraph_mode=NONE))[:2]


@pytest.mark.gpu
def test_draft_lengths_have_graphs_of_their_own(device, replayed):
    """C9: lengths 3, 1 and 0 by turns; 2 is the beginning of 3; 0 runs nothing."""
    rig = Rig("plain", device, max_num_reqs=4)
    captured = rig.speculator(3, cudagraph_num_steps=(3, 1, 0))
    eager = rig.speculator(3, cudagraph_mode=NONE)
    captured.capture()
    assert {bucket.num_steps for bucket in captured.decode_graphs.memory} == {3, 1}
    for seed, steps in enumerate((3, 1, 0, 2, 0, 3, 1, 1, 3)):
        one = rig.random_pass(LENGTHS[:4], QUERIES[:4], REJECTED[:4], seed=seed)
        drafts = one.propose(captured, num_speculative_tokens=steps)
        assert drafts == one.propose(eager, num_speculative_tokens=steps)
        assert [len(row) for row in drafts] == [steps] * 4
        assert [bucket.num_steps for bucket in replayed] == ([] if not steps else [1 if steps == 1 else 3])
        replayed.clear()


@pytest.mark.gpu
def test_no_drafts_need_no_graph(device):
    """C9: K = 0."""
    rig = Rig("plain", device)
    speculator = rig.speculator(0)
    speculator.capture()
    assert not speculator.decode_graphs.memory
    assert ragged(rig, 3).propose(speculator) == [[], [], []]


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "graphs"), [(NONE, 0), (PIECEWISE, 0), (DECODE_ONLY, 5), (FULL, 5)])
def test_what_a_mode_captures(mode, graphs, device):
    """A draft step cannot be cut into pieces; a drafter without keys has no other work."""
    speculator = Rig("plain", device).speculator(cudagraph_mode=mode)
    assert len(speculator.decode_graphs.buckets) == graphs
    assert not speculator.verify_graphs.buckets
    assert not speculator.mixed_graphs.buckets


@pytest.mark.gpu
def test_capturing_again_changes_nothing(device):
    rig = Rig("plain", device)
    speculator = rig.speculator()
    speculator.capture()
    graphs, one = dict(speculator.decode_graphs._graphs), ragged(rig, 5)
    drafts = one.propose(speculator)
    speculator.capture()
    assert speculator.decode_graphs._graphs == graphs
    assert one.propose(speculator) == drafts


@pytest.mark.gpu
def test_reset_frees_the_graphs(device, replayed):
    rig = Rig("plain", device)
    speculator = rig.speculator()
    speculator.capture()
    one = ragged(rig, 3)
    drafts = one.propose(speculator)
    graphs = [weakref.ref(graph) for graph in speculator.decode_graphs._graphs.values()]
    speculator.decode_graphs.reset()
    assert all(graph() is None for graph in graphs)
    replayed.clear()
    assert one.padded(4).propose(speculator)[:3] == drafts
    assert not replayed
    speculator.capture()
    assert one.propose(speculator) == drafts
    assert len(replayed) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_suppressed_tokens_are_never_drafted(variant, device):
    """C1: the ids that win without it, suppressed in a graph."""
    rig = Rig(variant, device)
    one, free = ragged(rig, 9), rig.speculator()
    free.capture()
    winners = sorted({token for row in one.propose(free) for token in row})
    rig = Rig(variant, device, suppress_tokens=winners)
    speculator = rig.speculator()
    speculator.capture()
    with no_sync():
        drafts = speculator.propose(one.batch, one.verify, one.sampling, one.hidden)
    assert not set(drafts.flatten().tolist()) & set(winners)
    assert drafts.tolist() == one.propose(rig.speculator(cudagraph_mode=NONE))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_the_head_is_captured_at_its_first_call(variant, device):
    """C1: no warm-up of the suppression before the capture, so nothing of it may come from the host then."""
    model = Rig(variant, device, suppress_tokens=[126, 3]).model
    hidden, other = (torch.randn(4, model.hidden_size, device=device) for _ in range(2))
    slots, seeds, temperature = torch.arange(4, device=device), torch.zeros(4, device=device).long(), hidden[:, 0] * 0
    drafts = torch.zeros(4, dtype=torch.int64, device=device)
    torch.mm(hidden, hidden.t())  # cuBLAS makes its handle at a process's first product, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with no_collection(), no_sync(), torch.cuda.graph(graph):
        model.sample(hidden, slots, temperature, seeds, seeds, out=drafts)
    hidden.copy_(other)
    graph.replay()
    logits = model.compute_logits(other)
    assert torch.isneginf(logits[:, [3, 126]]).all()
    assert drafts.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.gpu
def test_what_is_made_at_first_use_is_made_in_every_replay(device):
    """C4: a batch that initialises itself lazily must not be the one that warmed up."""
    rig = Rig("plain", device, max_num_reqs=1)
    speculator, made = rig.speculator(), torch.zeros((), device=device)
    run_model, ready = speculator.run_model, []

    def lazily(input_ids, positions, hidden, batch, step, **options):
        if not any(one is batch for one in ready):
            ready.append(batch)
            made.add_(1)
        return run_model(input_ids, positions, hidden, batch, step, **options)

    speculator.run_model = lazily
    speculator.capture()
    before = made.item()
    for seed in range(5):
        ragged(rig, 1, seed=seed).propose(speculator)
    assert made.item() - before == 5


@pytest.mark.gpu
def test_the_targets_output_is_left_alone(device):
    """C6: hidden states in another graph's memory, captured before or after the drafter's, survive its replay."""
    rig = Rig("plain", device)
    speculator, source = rig.speculator(), torch.randn(51, 96, device=device)
    outputs, graphs = [], []
    for capture in (True, False):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(source * 2 + 1)
        if capture:
            speculator.capture()
    for graph in graphs:
        graph.replay()
    before = [output.clone() for output in outputs]
    one = ragged(rig, 9)
    speculator.propose(one.batch, one.verify, one.sampling, outputs[0])
    speculator.propose(one.batch, one.verify, one.sampling, outputs[1])
    assert all(torch.equal(now, then) for now, then in zip(outputs, before, strict=True))


@pytest.mark.gpu
def test_garbage_in_the_buffers_is_harmless(device):
    """C10: warm-up and capture over memory nobody initialised; the first call is that of a fresh speculator."""
    rig = Rig("plain", device)
    fresh, dirty = rig.speculator(), rig.speculator()
    passed, step = dirty.passed, dirty.step
    for tensor in (
        passed.idx_mapping,
        step.input_ids,
        step.positions,
        step.seq_lens,
        dirty.drafts,
        *dirty.block_tables,
    ):
        tensor.fill_(0x7F7F7F7F)
    step.hidden.fill_(torch.nan)
    fresh.capture()
    dirty.capture()
    torch.cuda.synchronize()
    one = ragged(rig, 5)
    assert one.propose(dirty) == one.propose(fresh)


@pytest.mark.gpu
def test_one_stream_for_warm_up_and_capture(device):
    """C11: workspaces and handles belong to a stream."""
    streams: list[torch.cuda.Stream] = []
    manager = CudaGraphManager(
        "test", lambda _: streams.append(torch.cuda.current_stream()), [Bucket(1, 1, 1, 1)], device
    )
    capture_graphs([manager], device)
    assert len(streams) == 2
    assert streams[0] == streams[1] != torch.cuda.default_stream(device)


@pytest.mark.gpu
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("mode", [NONE, FULL])
def test_propose_never_waits(mode, draft_sampling, device):
    rig = Rig("plain", device)
    speculator = rig.speculator(cudagraph_mode=mode, draft_sampling=draft_sampling)
    speculator.capture()
    passes = [ragged(rig, rows, seed=rows) for rows in (3, 9, 1)]
    for one in passes:
        speculator.propose(one.batch, one.verify, one.sampling, one.hidden)
    with no_sync():
        for one in passes:
            speculator.propose(one.batch, one.verify, one.sampling, one.hidden)


@pytest.mark.gpu
def test_a_replay_is_one_graph_launch(device, tmp_path):
    rig = Rig("plain", device)
    speculator, one = rig.speculator(), ragged(rig, 5)
    speculator.capture()
    arguments = (one.batch, one.verify, one.sampling, one.hidden)
    speculator.propose(*arguments)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        speculator.propose(*arguments)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [event.get("name", "") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names.count("cudaGraphLaunch") == 1
    assert not [name for name in names if "Memcpy" in name or "Malloc" in name]
    assert len([name for name in names if "LaunchKernel" in name]) == 1  # the first step's inputs


@pytest.mark.gpu
def test_replays_do_not_depend_on_free_memory(device):
    rig = Rig("plain", device)
    speculator, passes = rig.speculator(), [ragged(rig, rows, seed=rows) for rows in (9, 3, 1)]
    speculator.capture()
    drafts = [one.propose(speculator) for one in passes]
    assert poison_free_memory()
    for one, expected in zip(passes, drafts, strict=True):
        assert one.propose(speculator) == expected
        poison_free_memory()


@pytest.mark.gpu
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_a_graph_reads_nothing_of_the_caller(draft_sampling, device, monkeypatch):
    """The inputs are staged, everything the caller passed is overwritten and freed, and only then the graph runs."""
    rig = Rig("plain", device)
    speculator = rig.speculator(draft_sampling=draft_sampling)
    one = ragged(rig, 5, temperatures=(0.0, 0.9))
    speculator.capture()
    expected = one.propose(speculator)
    speculator.drafts.zero_()
    staged: list[Bucket] = []
    monkeypatch.setattr(speculator.decode_graphs, "replay", staged.append)
    drafts = speculator.propose(one.batch, one.verify, one.sampling, one.hidden)
    overwrite(one.tensors())
    del one
    poison_free_memory()
    monkeypatch.undo()
    speculator.decode_graphs.replay(*staged)
    assert drafts.tolist() == expected


@pytest.mark.gpu
def test_what_cannot_be_captured_is_named(device):
    rig = Rig("plain", device)
    speculator, one = rig.speculator(), ragged(rig, 9)
    run_model = speculator.run_model

    def reading(input_ids, positions, hidden, batch, step, **options):
        if len(input_ids) == 4:
            assert hidden.sum().item() < 1e9  # a wait
        return run_model(input_ids, positions, hidden, batch, step, **options)

    speculator.run_model = reading
    with pytest.raises(RuntimeError) as raised:
        speculator.capture()
    message = str(raised.value)
    assert "draft decode graph of Bucket(num_tokens=4, num_reqs=4, max_query_len=1, num_steps=4)" in message
    assert "assert hidden.sum().item() < 1e9" in message
    assert not speculator.decode_graphs.memory
    # The device is as usable as before: eagerly, and for a capture of something better.
    expected = one.propose(rig.speculator(cudagraph_mode=NONE))
    assert one.propose(speculator) == expected
    speculator.run_model = run_model
    speculator.capture()
    assert one.propose(speculator) == expected


@pytest.mark.gpu
def test_an_interrupted_capture_leaves_no_graph(device):
    rig = Rig("plain", device)
    speculator, one = rig.speculator(), ragged(rig, 9)
    run_model, calls = speculator.run_model, []

    def interrupted(*args, **options):
        calls.append(torch.cuda.is_current_stream_capturing())
        if sum(calls) == 6:  # within the second graph
            raise KeyboardInterrupt
        return run_model(*args, **options)

    speculator.run_model = interrupted
    with pytest.raises(KeyboardInterrupt):
        speculator.capture()
    assert not speculator.decode_graphs.memory
    speculator.run_model = run_model
    speculator.capture()
    assert one.propose(speculator) == one.propose(rig.speculator(cudagraph_mode=NONE))


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 1000])
def test_capture_on_another_size_of_device(num_sms, device, monkeypatch):
    """Attention in one part or in as many as it can be: launches that a larger or smaller card would make."""
    arch = _op.arch_of(device)
    monkeypatch.setattr(_op, "arch_of_override", _op.Arch(arch.backend, arch.capability, num_sms, arch.shared_memory))
    rig = Rig("plain", device)
    captured, eager = rig.speculator(), rig.speculator(cudagraph_mode=NONE)
    captured.capture()
    for rows in (9, 1, 4):
        one = ragged(rig, rows, seed=rows)
        assert one.propose(captured) == one.padded(bucket_of(rows)).propose(eager)[:rows]
