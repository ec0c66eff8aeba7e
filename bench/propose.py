"""A whole `propose` of a Gemma 4 drafter: K = 4 drafts for each request, from verified tokens to draft tokens.

Assistants of the released sizes with random weights, over random keys and values in blocks of 16 tokens in random
order. Every provider starts each call from a cold L2, as it is after a pass of the target. Providers:

- tridraft: the captured speculator, staging included
- fp8: the same with `lm_head_dtype="fp8"`, where the head is a dense one
- uncaptured: the same launches without a graph
- compile: plain PyTorch over dense keys and values (`_dense.py`), all steps in one function, by
  `torch.compile(mode="reduce-overhead")`; compiled anew for every shape, so only where `COMPILED` says
- transformers: the drafting loop of its assisted generation, one request at a time

What is reported of each: µs of a call on the device (median, 20th and 80th percentile) and by the wall clock from an
idle device to the drafts; of tridraft also the Python time of a call, its time on the device after a pass over a whole
prompt (`prefill`, batch 1), and from a trace of one replay how many kernels a further draft step launches and how long
no kernel was running. Traces come last: once a profiler has run, it stays in every launch of the process, and a call
takes 93 µs of Python instead of 55. `step` is a further draft step, a third of the difference between 4 drafts and 1;
its floor is the time to read its weights, the rows of the head it has to score and the keys and values in view, each
once, at the card's measured read rate.

    PYTHONPATH=src python bench/propose.py                            # writes bench/results/<gpu>/propose.json
    PYTHONPATH=src python bench/propose.py --assistants 12B --batches 1 --contexts 8192 --kernels     # only prints
"""

import argparse
import gc
import itertools
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from _dense import dense_keys
from _dense import propose as dense_propose
from _harness import ROOT, Machine, gpu_slug
from _pairs import cache_bytes, config_json, random_assistant, random_cache, random_target, target_pass
from torch import Tensor

from tridraft.models.gemma4_mtp import Gemma4MTP
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.cudagraph import Bucket, CUDAGraphMode
from tridraft.speculator.gemma4 import Gemma4Speculator

STEPS = 4
ASSISTANTS = ("E2B", "12B")
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 8192, 32768)
PROVIDERS = ("tridraft", "fp8", "uncaptured", "compile", "transformers")
COMPILED = {(1, 8192), (32, 8192)}
FLUSHES = 4
"""Of 1 GiB each, about 1 ms in all: longer than the host takes to enqueue a replay, which would show otherwise."""
PYTHON_US = 60.0
"""What a call may cost in Python at most, the median of 200."""


@dataclass(frozen=True)
class Row:
    """One provider at one shape; `note` says why there are no times."""

    assistant: str
    batch: int
    context: int
    provider: str
    us: float = 0.0
    p20: float = 0.0
    p80: float = 0.0
    wall_us: float = 0.0
    python_us: float = 0.0
    step_us: float = 0.0
    floor_us: float = 0.0
    launches: float = 0.0
    idle_percent: float = 0.0
    prefill_us: float = 0.0
    same_drafts: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a trace, in µs from the first one's start."""

    name: str
    start: float
    end: float


@dataclass
class Timer:
    """Times calls that each find the L2 cache full of something else."""

    rounds: int
    flush: Tensor = field(default_factory=lambda: torch.empty(2**30, dtype=torch.uint8, device="cuda"))

    def device_us(self, call: Callable[[], object]) -> list[float]:
        """Device time of a call, queued behind the flush so that its first launches are hidden."""
        samples = []
        for _ in range(self.rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(FLUSHES):
                self.flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(1e3 * start.elapsed_time(end))
        return samples

    def host_us(self, call: Callable[[], object], calls: int) -> tuple[float, float]:
        """Medians of a call's own time on the host, and of its time until the device is done."""
        python, wall = [], []
        for _ in range(calls):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            python.append(time.perf_counter() - started)
            torch.cuda.synchronize()
            wall.append(time.perf_counter() - started)
        return 1e6 * statistics.median(python), 1e6 * statistics.median(wall)


def trace(call: Callable[[], object]) -> list[Kernel]:
    """The kernels of one call, by start."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = [event for event in events if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    first = min(event["ts"] for event in events)
    kernels = [Kernel(event["name"], event["ts"] - first, event["ts"] - first + event["dur"]) for event in events]
    return sorted(kernels, key=lambda kernel: kernel.start)


def idle_share(kernels: Sequence[Kernel]) -> float:
    """How much of the time between the first start and the last end no kernel was running."""
    busy, reached = 0.0, 0.0
    for kernel in kernels:
        busy += max(kernel.end - max(kernel.start, reached), 0.0)
        reached = max(reached, kernel.end)
    return 1 - busy / reached


def step_bytes(model: Gemma4MTP, batch: int, context: int) -> int:
    """What one draft step has to read: weights, embeddings, the head's rows, and each kind of layer's keys once."""
    config, item = model.config, model.pre_projection.weight.dtype.itemsize
    head = model.model.embed_tokens.weight.numel()
    weights = sum(weight.numel() for weight in model.parameters()) - head
    rows = config.vocab_size
    if model.masked_embedding is not None:
        rows = min(rows, batch * config.centroid_top_k * config.vocab_size // config.num_centroids)
    keys = 0
    for spec in set(model.kv_specs):
        seen = context if spec.sliding_window is None else min(context, spec.sliding_window + 1)
        keys += 2 * batch * seen * spec.num_kv_heads * spec.head_dim
    return item * (weights + rows * config.hidden_size + batch * model.backbone_hidden_size + keys)


def transformers_loop(name: str, target: Any, context: int) -> Callable[[], Any]:
    """Its candidate generator after a pass of one request, with weights of its own."""
    from transformers import (  # noqa: PLC0415  a rival, not a dependency
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4TextConfig,
        GenerationConfig,
    )
    from transformers.generation.candidate_generator import (  # noqa: PLC0415
        SinglePositionMultiTokenCandidateGenerator,
    )
    from transformers.utils.generic import ModelOutput  # noqa: PLC0415

    config = config_json(name)
    del config["model_type"]
    text = Gemma4TextConfig(**config.pop("text_config"))
    with torch.device(target.device):
        model: Any = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text, **config))
    model.to(target.dtype).eval()
    model.generation_config.num_assistant_tokens = STEPS
    embedding = torch.nn.Embedding.from_pretrained(target.embed_weight)
    generator = SinglePositionMultiTokenCandidateGenerator(model, embedding, GenerationConfig(max_length=context + 100))
    generator.is_main_model_prefill = False

    def states(spec: Any) -> tuple[Tensor, ...]:
        seen = context if spec.sliding_window is None else min(context, spec.sliding_window)
        shape = (1, spec.num_kv_heads, seen, spec.head_dim)
        return tuple(torch.randn(shape, device=target.device, dtype=target.dtype) for _ in range(2))

    shared = {kind: states(spec) for kind, spec in zip(target.layer_types, target.kv_specs, strict=True)}
    hidden = torch.randn(1, STEPS + 1, target.hidden_size, device=target.device, dtype=target.dtype)
    ids: Any = torch.randint(0, target.vocab_size, (1, context), device=target.device)
    outputs = ModelOutput(hidden_states=(hidden,), shared_kv_states=shared)
    arguments: dict[str, Any] = {"model_kwargs": {}, "is_first_iteration": False, "n_last_matches": STEPS}
    return lambda: generator.get_candidates(ids, model_outputs=outputs, **arguments)


class Shape:
    """One assistant with a batch of one context length: the providers of a row each."""

    def __init__(self, name: str, model: Gemma4MTP, target: Any, batch: int, context: int) -> None:
        self.name, self.model, self.target, self.batch, self.context = name, model, target, batch, context
        self.kv = random_cache(target, batch, context)
        self.arguments = target_pass(target, batch, context, STEPS + 1, batch)
        self.captured = self.speculator()

    def speculator(self, mode: CUDAGraphMode = CUDAGraphMode.FULL, **options: Any) -> Gemma4Speculator:
        config = SpeculatorConfig(
            "gemma4_mtp", self.model, STEPS, self.batch, self.kv.max_model_len, cudagraph_mode=mode, **options
        )
        speculator = Gemma4Speculator(config)
        speculator.load_model(self.target)
        speculator.set_kv_cache(self.kv)
        if mode is CUDAGraphMode.FULL:
            speculator.decode_graphs.buckets = [Bucket(self.batch, self.batch, 1, steps) for steps in (STEPS, 1)]
            speculator.capture()
        return speculator

    def propose(self, steps: int = STEPS) -> Tensor:
        return self.captured.propose(*self.arguments, num_speculative_tokens=steps)

    def replay(self, steps: int = STEPS) -> None:
        """The graph without the staging of its inputs."""
        self.captured.decode_graphs.replay(Bucket(self.batch, self.batch, 1, steps))

    def tridraft(self) -> Callable[[], Any]:
        return self.propose

    def fp8(self) -> Callable[[], Any]:
        speculator = self.speculator(lm_head_dtype="fp8")
        return lambda: speculator.propose(*self.arguments)

    def uncaptured(self) -> Callable[[], Any]:
        speculator = self.speculator(CUDAGraphMode.NONE)
        return lambda: speculator.propose(*self.arguments)

    def compile(self) -> Callable[[], Any]:
        torch._dynamo.reset()
        batch, verify, _, hidden = self.arguments
        slots = batch.idx_mapping.long()
        keys = dense_keys(self.model, self.kv, self.captured.layers, slots, self.context)
        run = torch.compile(dense_propose, mode="reduce-overhead", fullgraph=True, dynamic=False)
        tokens, last = verify.last_sampled[slots], hidden[STEPS :: STEPS + 1].contiguous()
        positions = batch.seq_lens.long()

        def call() -> Tensor:
            with torch.no_grad():
                return run(self.model, self.target.embed_weight, keys, STEPS, tokens, positions, last).t()

        return call

    def transformers(self) -> Callable[[], Any]:
        return transformers_loop(self.name, self.target, self.context)

    def why_not(self, provider: str) -> str:
        """Why the provider has no row here; empty if it has."""
        if provider == "transformers" and self.batch > 1:
            return "drafts for one request at a time"
        if provider == "fp8" and self.model.masked_embedding is not None:
            return "a centroid head is not rounded"
        if provider == "compile" and (self.batch, self.context) not in COMPILED:
            return "not compiled for this shape"
        return ""

    def measure(self, provider: str, timer: Timer, machine: Machine) -> Row:
        """Time one provider, once its drafts were compared with ours."""
        about = (self.name, self.batch, self.context, provider)
        try:
            call = getattr(self, provider)()
            for _ in range(2):  # compiles and records
                call()
            theirs = call()
        except Exception as error:  # a rival may fail in any way of its own
            return Row(*about, note=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        same = 0.0
        if isinstance(theirs, Tensor):
            theirs = theirs.clone()
            same = (theirs[:, 0] == self.propose()[:, 0]).float().mean().item()
            if provider == "uncaptured" and not torch.equal(theirs, self.propose()):
                return Row(*about, note="AssertionError: the replay's drafts are others")
        times = timer.device_us(call)
        cuts = statistics.quantiles(times, n=5)
        python, wall = timer.host_us(call, 200 if provider == "tridraft" else timer.rounds)
        values: dict[str, float] = {"us": statistics.median(times), "p20": cuts[0], "p80": cuts[3], "wall_us": wall}
        if provider == "tridraft":
            one = statistics.median(timer.device_us(lambda: self.propose(1)))
            values |= {"python_us": python, "step_us": (values["us"] - one) / (STEPS - 1)}
            values["floor_us"] = step_bytes(self.model, self.batch, self.context) / machine.read_gbs / 1e3
            if self.batch == 1:
                prompt = target_pass(self.target, 1, self.context, self.context, 1)
                times = timer.device_us(lambda: self.captured.propose(*prompt))
                values["prefill_us"] = statistics.median(times)
        rounded: dict[str, Any] = {key: round(value, 2) for key, value in values.items()}
        return Row(*about, same_drafts=round(same, 3), **rounded)

    def traced(self, row: Row, show: bool) -> Row:
        """The row with what a trace of a replay tells."""
        kernels = trace(self.replay)
        launches = (len(kernels) - len(trace(lambda: self.replay(1)))) / (STEPS - 1)
        if show:
            print_kernels(f"{self.name}, batch {self.batch}, context {self.context}", kernels[-int(launches) - 1 :])
        return replace(row, launches=round(launches, 2), idle_percent=round(100 * idle_share(kernels), 2))


def print_kernels(shape: str, kernels: Sequence[Kernel]) -> None:
    """Each kernel's time but the first one's, and how much later it ended than the one before it."""
    print(f"{shape}: {len(kernels) - 1} kernels of the last draft step")
    for before, kernel in itertools.pairwise(kernels):
        print(f"{kernel.end - kernel.start:8.2f} {kernel.end - before.end:8.2f}  {kernel.name[:110]}")


def shape_of(row: Row) -> tuple[str, int, int]:
    return row.assistant, row.batch, row.context


def format_table(rows: Sequence[Row]) -> str:
    """One line a row."""
    head = f"{'assistant':9} {'batch':>5} {'context':>7} {'provider':12} {'µs':>9} {'p20–p80':>17} {'wall':>9} {'×':>6}"
    lines = [f"{head} {'python':>6} {'step':>7} {'floor':>7} {'%':>4} {'launches':>8} {'idle':>5} {'prefill':>7} same"]
    ours = {shape_of(row): row.us for row in rows if row.provider == "tridraft"}
    for row in rows:
        shape = f"{row.assistant:9} {row.batch:5} {row.context:7} {row.provider:12}"
        if row.note:
            lines.append(f"{shape} {row.note}")
            continue
        base = ours.get(shape_of(row))
        ratio = f"{row.us / base:6.2f}" if base else f"{'–':>6}"
        line = f"{shape} {row.us:9.1f} {f'{row.p20:.1f}–{row.p80:.1f}':>17} {row.wall_us:9.1f} {ratio}"
        if row.provider == "tridraft":
            line += f" {row.python_us:6.1f} {row.step_us:7.2f} {row.floor_us:7.2f}"
            line += f" {100 * row.floor_us / row.step_us:4.0f}"
            line += f" {row.launches:8.1f} {row.idle_percent:4.1f}%" if row.launches else 15 * " "
            line += f" {row.prefill_us:7.1f}" if row.prefill_us else ""
        lines.append(line if row.provider in ("tridraft", "transformers") else f"{line} {row.same_drafts:51.2f}")
    return "\n".join(lines)


def visit_shapes(args: argparse.Namespace, visit: Callable[[tuple[str, int, int], Shape | None], None]) -> None:
    """Every shape asked for, one in memory at a time; None where its cache does not fit the card."""
    for name in args.assistants:
        model = random_assistant(name, torch.bfloat16, torch.device("cuda"))
        target = random_target(model)
        for context in args.contexts:
            for batch in args.batches:
                free = torch.cuda.mem_get_info()[0] - 4 * 2**30
                fits = cache_bytes(target, batch, context) <= free
                visit((name, batch, context), Shape(name, model, target, batch, context) if fits else None)
                gc.collect()
                torch.cuda.empty_cache()


def run(args: argparse.Namespace, timer: Timer, machine: Machine, rows: list[Row]) -> None:
    """Measure everything asked for, adding to `rows`."""

    def measure(about: tuple[str, int, int], shape: Shape | None) -> None:
        if shape is None:
            rows.append(Row(*about, "tridraft", note="its cache does not fit this card"))
            return
        for provider in args.providers:
            reason = shape.why_not(provider)
            rows.append(Row(*about, provider, note=reason) if reason else shape.measure(provider, timer, machine))
            if not reason:
                print(format_table(rows[-1:]).splitlines()[-1], flush=True)

    def look(about: tuple[str, int, int], shape: Shape | None) -> None:
        for i, row in enumerate(rows):
            if shape is not None and row.provider == "tridraft" and not row.note and about == shape_of(row):
                rows[i] = shape.traced(row, args.kernels)

    visit_shapes(args, measure)
    visit_shapes(args, look)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exit 1 if a provider failed or Python takes too long, 130 if interrupted."""
    parser = argparse.ArgumentParser(description="Benchmark of a whole propose with a Gemma 4 assistant.")
    parser.add_argument("--assistants", nargs="+", default=ASSISTANTS, choices=ASSISTANTS)
    parser.add_argument("--batches", nargs="+", default=BATCHES, type=int)
    parser.add_argument("--contexts", nargs="+", default=CONTEXTS, type=int)
    parser.add_argument("--providers", nargs="+", default=PROVIDERS, choices=PROVIDERS)
    parser.add_argument("--rounds", type=int, default=50, help="timed calls of each provider (default 50)")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a draft step")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default bench/results/<gpu>, full runs only)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("propose: timing needs a CUDA device")
        return
    machine = Machine.measure(flops=False)
    about = machine.about
    print(
        f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, triton {about['triton']}; "
        f"read ceiling {machine.read_gbs:.0f} GB/s; K = {STEPS}"
    )
    rows: list[Row] = []
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit too leaves what was measured
    try:
        run(args, Timer(args.rounds), machine, rows)
    except KeyboardInterrupt:
        interrupted = True
    print(format_table(rows))
    full: Iterable[tuple[str, Any]] = (
        ("assistants", ASSISTANTS),
        ("batches", BATCHES),
        ("contexts", CONTEXTS),
        ("providers", PROVIDERS),
    )
    if args.out or not (interrupted or any(tuple(getattr(args, name)) != whole for name, whole in full)):
        folder = args.out or ROOT / "bench" / "results" / gpu_slug(about["gpu"])
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            **about,
            "read_gbs": round(machine.read_gbs, 1),
            "steps": STEPS,
            "rows": [asdict(row) for row in rows],
        }
        (folder / "propose.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if interrupted:
        raise SystemExit(130)
    slow = [row for row in rows if row.python_us > PYTHON_US]
    for row in slow:
        print(f"{row.assistant}, batch {row.batch}: {row.python_us:.1f} µs of Python a call, at most {PYTHON_US:.0f}")
    if slow or any("Error: " in row.note for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
