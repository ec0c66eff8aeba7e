"""One way to time every operation: check, rotate, capture, interleave, report.

A benchmark file declares cases and hands them over; nothing runs at import:

    from _harness import Benchmark, Case, compiled, main

    def case(tokens, hidden):
        def inputs(device):                     # one set of fresh inputs, a tuple; the harness seeds and rotates it
            return torch.randn(tokens, hidden, device=device), torch.ones(hidden, device=device)

        return Case(
            name=f"rms_norm [{tokens}, {hidden}]",
            inputs=inputs,
            reference=rms_norm_reference,       # the definition: called with clones of the inputs
            providers={                         # each called as run(*inputs); what it returns is checked, then timed
                "tridraft": rms_norm,
                "eager": rms_norm_reference,
                "compile": compiled(rms_norm_reference),
                "rival": Provider(run=theirs, prepare=lambda x, w: (x, w, theirs_plan(x))),   # untimed preparation
            },
            bytes=2 * tokens * hidden * 4,      # what one call must move; the roofline divides by it
            flops=0,                            # given, TFLOP/s and % of the measured GEMM rate are reported as well
        )

    BENCHMARK = Benchmark("norm", cases=lambda: [case(1, 256), case(8, 256)], smoke=lambda: case(2, 8))

    if __name__ == "__main__":
        main(BENCHMARK)

Declare a rival only where it imports; a provider that raises or returns another value is reported as failed and the
process exits with 1. An operation that writes in place returns what it wrote. `check(actual, expected)` replaces the
default comparison where it does not fit (a sampler). `floor=True` also times one plain kernel that reads `bytes`
from cold memory. `headline=True` puts the case into the README's table. `anchor` names the provider speed-ups are
against.

How a case is timed: each provider's output is compared with `reference` first. Input sets are made until they exceed
three times the L2 cache (at most 200 sets; a case that cannot reach it is marked "hot"). One CUDA graph a provider
holds one call for each set, repeated until a replay takes 0.4 ms. Providers take turns, replay by replay, each timed
replay right behind an untimed one so that its launch is hidden. The result is the median, 20th and 80th percentile of
microseconds a call, node-to-node latency of the graph included.

    PYTHONPATH=src python bench/norm.py                     # all cases; writes bench/results/<gpu>/norm.json
    PYTHONPATH=src python bench/norm.py --cases "[8, 1024]" gated --providers tridraft     # a part; only prints
    PYTHONPATH=src python bench/norm.py --out DIR           # writes DIR/norm.json, parts too

Without a GPU it checks the providers of the `smoke` case and times nothing.
"""

import argparse
import gc
import json
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parent.parent
MAX_SETS = 200
REPLAY_US = 400.0
MAX_NODES = 4000


def assert_near(actual: Any, expected: Any) -> None:
    """Integers equal; floats within 2⁻⁶ of the largest expected magnitude: a gate against nonsense, not a test."""
    got, want = tree_leaves(actual), tree_leaves(expected)
    assert len(got) == len(want), f"{len(got)} outputs against {len(want)}"
    for one, other in zip(got, want, strict=True):
        if not isinstance(other, Tensor):
            continue
        assert one.shape == other.shape, f"shape {list(one.shape)} against {list(other.shape)}"
        if not other.dtype.is_floating_point:
            wrong = int((one != other).sum())
            assert not wrong, f"{wrong} of {other.numel()} integers differ"
        elif other.numel():
            infinite = torch.isinf(other)
            assert torch.equal(torch.isinf(one), infinite), "infinities differ"
            error = (one.double() - other.double()).masked_fill(infinite, 0).abs().max().item()
            largest = other.double().masked_fill(infinite, 0).abs().max().item()
            assert error <= 2**-6 * max(largest, 1e-6), f"error {error:.2e} at magnitude {largest:.2e}"


@dataclass(frozen=True)
class Provider:
    """One implementation: `run(*prepare(*inputs))`, of which only `run` is timed.

    Attributes:
        run: called with the inputs (or what `prepare` made of them); capturable unless `graph` is False.
        prepare: untimed layout changes and plans, once a set.
        graph: False times plain back-to-back calls, for an implementation that cannot be captured.
    """

    run: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] | None = None
    graph: bool = True


@dataclass(frozen=True)
class Case:
    """One shape of one operation; the module's docstring shows each field in use."""

    name: str
    inputs: Callable[[torch.device], tuple[Any, ...]]
    reference: Callable[..., Any]
    providers: dict[str, Callable[..., Any] | Provider]
    bytes: int
    flops: int = 0
    anchor: str = "eager"
    check: Callable[[Any, Any], None] = assert_near
    floor: bool = False
    headline: bool = False

    def provider(self, name: str) -> Provider:
        """The provider called `name`."""
        one = self.providers[name]
        return one if isinstance(one, Provider) else Provider(one)


@dataclass(frozen=True)
class Benchmark:
    """The cases of one file; both callables are called once the command line is read."""

    name: str
    cases: Callable[[], Iterable[Case]]
    smoke: Callable[[], Case]


@dataclass(frozen=True)
class Row:
    """One measured provider of one case; `error` is set instead of times when it failed."""

    case: str
    provider: str
    us: float = 0.0
    p20: float = 0.0
    p80: float = 0.0
    bytes: int = 0
    flops: int = 0
    gbs: float = 0.0
    percent: float = 0.0
    tflops: float = 0.0
    flops_percent: float = 0.0
    speedup: float = 0.0
    sets: int = 0
    cold: bool = True
    headline: bool = False
    error: str = ""


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile(fn)`, with the static shapes a captured graph has."""
    return torch.compile(fn, fullgraph=True, dynamic=False, **options)


@triton.jit
def _read_kernel(
    x_ptr,  # [n] i32
    out_ptr,  # [programs] i32
    n,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + pid, tl.sum(tl.load(x_ptr + offs, mask=offs < n, other=0)))


def read(x: Tensor, out: Tensor) -> None:
    """Read `x` (int32) once; the largest `out` it needs has an element for each 2,048 of `x`."""
    block, warps = (8192, 16) if x.numel() > 2**24 else (2048, 4)
    launch: Any = _read_kernel[(triton.cdiv(x.numel(), block),)]
    launch(x, out, x.numel(), BLOCK=block, num_warps=warps)


class Graph:
    """Calls of one provider over the rotated sets, captured and repeated until a replay takes `REPLAY_US`."""

    def __init__(self, provider: Provider, sets: Sequence[tuple[Any, ...]]):
        """Warm up on every set, then capture; `sets` is what `provider.prepare` made."""
        self._run, self._sets, self._repeats = provider.run, sets, 1
        self._once()
        torch.cuda.synchronize()
        self._graph = self._capture() if provider.graph else None
        wanted = REPLAY_US / max(min(self.time() for _ in range(3)), 1e-3)
        self._repeats = max(1, min(round(wanted + 0.5), MAX_NODES // len(sets)))
        if self._repeats > 1 and provider.graph:
            self._graph = self._capture()

    @property
    def calls(self) -> int:
        """Calls in one replay."""
        return len(self._sets) * self._repeats

    def _once(self) -> None:
        for _ in range(self._repeats):
            for inputs in self._sets:
                self._run(*inputs)

    def _capture(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._once()
        return graph

    def replay(self) -> None:
        """Enqueue every call."""
        if self._graph is None:
            self._once()
        else:
            self._graph.replay()

    def time(self) -> float:
        """Microseconds of one replay, enqueued behind another."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.replay()
        start.record()
        self.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


@dataclass
class Machine:
    """The GPU's measured ceilings, and what a result must name to be repeatable."""

    read_gbs: float
    bf16_tflops: float
    l2_bytes: int
    about: dict[str, Any]

    @staticmethod
    def measure(*, flops: bool) -> "Machine":
        """Measure once a process: a 2 GiB read, and an 8192³ bf16 GEMM where a case counts FLOPs."""
        x = torch.empty(2**29, dtype=torch.int32, device="cuda").random_()
        out = torch.empty(2**18, dtype=torch.int32, device="cuda")
        graph = Graph(Provider(read), [(x, out)])
        read_gbs = x.nbytes / (statistics.median(graph.time() for _ in range(15)) / graph.calls) / 1e3
        del graph, x
        tflops = 0.0
        if flops:
            a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            graph = Graph(Provider(torch.mm), [(a, b)])
            tflops = 2 * 8192**3 / (statistics.median(graph.time() for _ in range(15)) / graph.calls) / 1e6
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Machine(read_gbs, tflops, properties.L2_cache_size, describe())


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe() -> dict[str, Any]:
    """GPU, driver, clocks, versions, commit, arguments and date."""
    smi = _output_of("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader")
    driver, sm_clock, memory_clock = [*smi.splitlines()[0].split(", "), "", ""][:3] if smi else ("", "", "")
    script = Path(sys.argv[0])
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": driver,
        "max_sm_clock": sm_clock,
        "max_memory_clock": memory_clock,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": _output_of("git", "rev-parse", "HEAD"),
        "argv": [f"{script.parent.name}/{script.name}", *sys.argv[1:]],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def gpu_slug(name: str) -> str:
    """A folder name for a GPU: "NVIDIA H200" is `h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def _clone(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Clones that keep strides and aliases: a tensor passed twice stays one tensor."""
    clones: dict[int, Tensor] = {}

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in clones:
            storage = leaf.untyped_storage().clone()
            empty = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
            clones[id(leaf)] = empty.set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())  # type: ignore[call-overload]
        return clones[id(leaf)]

    return tree_map(clone, inputs)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    """The case's input set number `seed`."""
    torch.manual_seed(seed)
    return case.inputs(device)


def check(case: Case, name: str, inputs: tuple[Any, ...], expected: Any) -> None:
    """Assert that the provider computes what the definition computes."""
    provider = case.provider(name)
    inputs = _clone(inputs)
    prepared = inputs if provider.prepare is None else provider.prepare(*inputs)
    case.check(provider.run(*prepared), expected)


def _failure(case: Case, name: str, inputs: tuple[Any, ...], expected: Any) -> str:
    """Why the provider cannot be timed; empty if it can. A rival may fail in any way of its own."""
    try:
        check(case, name, inputs, expected)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _sets_of(case: Case, l2_bytes: int, providers: int) -> int:
    """How many input sets exceed three times the L2 cache and fit the memory, prepared copies included."""
    before = torch.cuda.memory_allocated()
    inputs = make_inputs(case, torch.device("cuda"))
    size = max(torch.cuda.memory_allocated() - before, 1)
    del inputs
    fitting = int(0.6 * torch.cuda.mem_get_info()[0] / size / (1 + providers))
    return max(1, min(-(-3 * l2_bytes // case.bytes) + 1, MAX_SETS, fitting))


@cache
def _floor_us(size: int, sets: int) -> tuple[float, float, float]:
    """Microseconds (median, p20, p80) one plain kernel takes to read `size` bytes from cold memory."""
    buffers = [torch.empty(-(-size // 4), dtype=torch.int32, device="cuda").random_() for _ in range(sets)]
    out = torch.empty(-(-size // 8192) + 1, dtype=torch.int32, device="cuda")
    graph = Graph(Provider(read), [(x, out) for x in buffers])
    return _quantiles([graph.time() / graph.calls for _ in range(15)])


def _quantiles(samples: list[float]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(samples, n=5)
    return statistics.median(samples), cuts[0], cuts[3]


def run_case(case: Case, machine: Machine, names: Sequence[str], rounds: int) -> list[Row]:
    """Check, capture and time `names` of `case`."""
    torch._dynamo.reset()  # else the ninth shape of a compiled provider silently runs eagerly
    device = torch.device("cuda")
    first = make_inputs(case, device)
    expected = case.reference(*_clone(first))
    failures = {name: _failure(case, name, first, expected) for name in names}
    rows = [Row(case.name, name, error=failure) for name, failure in failures.items() if failure]
    checked = [name for name, failure in failures.items() if not failure]
    del first, expected
    prepared_copies = sum(case.provider(name).prepare is not None for name in checked)
    count = _sets_of(case, machine.l2_bytes, prepared_copies)
    cold = count * case.bytes >= 3 * machine.l2_bytes
    sets = [make_inputs(case, device, seed) for seed in range(count)]
    graphs = {}
    for name in checked:
        provider = case.provider(name)
        prepared = sets if provider.prepare is None else [provider.prepare(*inputs) for inputs in sets]
        graphs[name] = Graph(provider, prepared)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(graph.time() / graph.calls)
    times = {name: _quantiles(one) for name, one in samples.items()}
    del graphs, sets
    gc.collect()
    torch.cuda.empty_cache()
    if case.floor:
        times["read floor"] = _floor_us(case.bytes, count)
    anchor = times.get(case.anchor, (0.0,))[0]
    for name, (us, p20, p80) in times.items():
        gbs, tflops = case.bytes / us / 1e3, case.flops / us / 1e6
        rows.append(
            Row(
                case=case.name,
                provider=name,
                us=round(us, 3),
                p20=round(p20, 3),
                p80=round(p80, 3),
                bytes=case.bytes,
                flops=case.flops,
                gbs=round(gbs, 1),
                percent=round(100 * gbs / machine.read_gbs, 1),
                tflops=round(tflops, 1),
                flops_percent=round(100 * tflops / machine.bf16_tflops, 1) if machine.bf16_tflops else 0.0,
                speedup=round(anchor / us, 2),
                sets=count,
                cold=cold,
                headline=case.headline,
            )
        )
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """The rows as an aligned table, one line a provider; the case is named once."""
    flops = any(row.flops for row in rows)
    header = ["case", "provider", "µs", "p20–p80", "GB/s", "% read", *(["TFLOP/s", "% gemm"] if flops else []), "×", ""]
    lines, previous = [header], None
    for row in rows:
        case = "" if row.case == previous else row.case
        previous = row.case
        if row.error:
            lines.append([case, row.provider, "failed", row.error, *[""] * (len(header) - 4)])
            continue
        rate = [f"{row.tflops:.0f}", f"{row.flops_percent:.0f}%"] if flops else []
        times = [f"{row.us:.2f}", f"{row.p20:.2f}–{row.p80:.2f}"]
        speed = [f"{row.gbs:.0f}", f"{row.percent:.0f}%", *rate, f"{row.speedup:.2f}" if row.speedup else "–"]
        lines.append([case, row.provider, *times, *speed, "" if row.cold else "hot"])
    widths = [max(len(line[i]) for line in lines if line[2] != "failed" or i < 3) for i in range(len(header))]
    pads = [*([str.ljust] * 2), *([str.rjust] * (len(header) - 2))]
    padded = ([pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def write_json(path: Path, machine: Machine, rows: Sequence[Row]) -> None:
    """Write the rows with all that is needed to repeat them."""
    content = {
        **machine.about,
        "read_gbs": round(machine.read_gbs, 1),
        "bf16_tflops": round(machine.bf16_tflops, 1),
        "l2_bytes": machine.l2_bytes,
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _progress(cases: list[Case]) -> Iterable[Case]:
    try:
        from tqdm import tqdm  # noqa: PLC0415  a convenience, not a dependency
    except ImportError:
        return cases
    return tqdm(cases, unit="case", disable=None, leave=False)


def smoke(benchmark: Benchmark) -> None:
    """Check the providers of the smoke case on the CPU, but for compiled ones, which would need a C++ compiler."""
    case = benchmark.smoke()
    inputs = make_inputs(case, torch.device("cpu"))
    expected = case.reference(*_clone(inputs))
    for name in case.providers:
        if name != "compile":
            check(case, name, inputs, expected)


def main(benchmark: Benchmark, argv: Sequence[str] | None = None) -> None:
    """Run the benchmark from the command line; exit 1 if a provider failed, 130 if interrupted."""
    parser = argparse.ArgumentParser(description=f"Benchmark of tridraft's {benchmark.name} kernels.")
    parser.add_argument("--cases", nargs="+", default=[], help="only cases whose name contains one of these")
    parser.add_argument("--providers", nargs="+", default=[], help="only these providers")
    parser.add_argument("--rounds", type=int, default=15, help="timed replays of each provider (default 15)")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default bench/results/<gpu>, full runs only)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        smoke(benchmark)
        print(f"{benchmark.name}: the providers agree; timing needs a CUDA device")
        return
    cases = [one for one in benchmark.cases() if not args.cases or any(part in one.name for part in args.cases)]
    machine = Machine.measure(flops=any(case.flops for case in cases))
    about = machine.about
    print(
        f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, triton {about['triton']}; "
        f"read ceiling {machine.read_gbs:.0f} GB/s"
        + (f", bf16 GEMM {machine.bf16_tflops:.0f} TFLOP/s" if machine.bf16_tflops else "")
    )
    rows: list[Row] = []
    interrupted = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit too leaves what was measured
    try:
        for case in _progress(cases):
            rows += run_case(
                case, machine, [n for n in case.providers if n in (args.providers or case.providers)], args.rounds
            )
    except KeyboardInterrupt:
        interrupted = True
    print(format_table(rows))
    partial = bool(args.cases or args.providers or interrupted)
    if args.out is not None or not partial:
        folder = args.out or ROOT / "bench" / "results" / gpu_slug(about["gpu"])
        write_json(folder / f"{benchmark.name}.json", machine, rows)
    if interrupted:
        raise SystemExit(130)
    if any(row.error for row in rows):
        raise SystemExit(1)
