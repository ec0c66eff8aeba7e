"""`pytest bench`: every provider of every case under pytest-benchmark; without a GPU, each file's smoke case."""

import importlib
from pathlib import Path

import pytest
import torch
from _harness import Benchmark, Case, Graph, Provider, check, make_inputs, smoke

SCRIPTS = {"conftest", "report", "test_bench", "train_tiny_pair"}
FILES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem not in SCRIPTS)
BENCHMARKS: list[Benchmark] = [
    module.BENCHMARK for module in map(importlib.import_module, FILES) if hasattr(module, "BENCHMARK")
]
TIMED = [
    pytest.param(case, name, id=f"{one.name}-{case.name}-{name}".replace(" ", "_"))
    for one in (BENCHMARKS if torch.cuda.is_available() else [])
    for case in one.cases()
    for name in case.providers
]


@pytest.mark.parametrize("one", BENCHMARKS, ids=lambda one: one.name)
def test_providers_agree(one: Benchmark):
    smoke(one)


@pytest.mark.parametrize(("case", "name"), TIMED)
def test_speed(benchmark, case: Case, name: str):
    inputs = make_inputs(case, torch.device("cuda"))
    check(case, name, inputs, case.reference(*make_inputs(case, torch.device("cuda"))))
    provider = case.provider(name)
    prepared = inputs if provider.prepare is None else provider.prepare(*inputs)
    graph = Graph(Provider(provider.run, graph=provider.graph), [prepared])
    benchmark.extra_info["calls"] = graph.calls

    def replay():
        graph.replay()
        torch.cuda.synchronize()

    benchmark(replay)
