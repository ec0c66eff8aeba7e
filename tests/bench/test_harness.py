"""The benchmark harness and the report, as far as they run without a GPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
CASE = {"case": "op [1]", "bytes": 4096, "gbs": 2.0, "percent": 50.0, "headline": True, "error": ""}


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "_harness", raising=False)
    return importlib.import_module("_harness")


def make_case(harness, **providers):
    return harness.Case(
        name="double [4]",
        inputs=lambda device: (torch.arange(4.0, device=device),),
        reference=lambda x: 2 * x,
        providers={"tridraft": lambda x: x + x, **providers},
        bytes=32,
    )


def benchmark_of(harness, case):
    return harness.Benchmark("double", cases=lambda: [case], smoke=lambda: case)


def test_without_a_gpu_main_checks_the_providers(harness, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepared = harness.Provider(run=lambda x, factor: x * factor, prepare=lambda x: (x, 2))
    harness.main(benchmark_of(harness, make_case(harness, rival=prepared)), [])
    assert "the providers agree" in capsys.readouterr().out


def test_a_wrong_provider_fails(harness, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AssertionError, match="error 3"):
        harness.main(benchmark_of(harness, make_case(harness, rival=lambda x: x)), [])


def test_a_provider_that_writes_its_inputs_does_not_spoil_the_next(harness):
    case = make_case(harness, inplace=lambda x: x.mul_(2))
    inputs = harness.make_inputs(case, torch.device("cpu"))
    for name in ("inplace", "tridraft", "inplace"):
        harness.check(case, name, inputs, case.reference(*inputs))


def test_clones_keep_strides_and_aliases(harness):
    x = torch.arange(12.0).reshape(3, 4)[:, 1:3]
    one, other = harness._clone((x, x))
    assert one is other
    assert one.stride() == x.stride()
    assert torch.equal(one, x)
    one.zero_()
    assert x.any()


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 integers differ"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), "error nan"),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 2.0]), "infinities differ"),
        (torch.tensor([1.0, 1.9]), torch.tensor([1.0, 2.0]), "error 1.00e-01"),
        (torch.zeros(2), torch.zeros(3), "shape"),
        ((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), "1 outputs against 2"),
    ],
)
def test_the_default_check_finds(harness, actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        harness.assert_near(actual, expected)


def test_the_default_check_accepts_rounding_and_equal_infinities(harness):
    expected = torch.tensor([1.0, -float("inf"), 0.3, 1e-9])
    harness.assert_near(expected.bfloat16(), expected)


def test_table_and_json(harness, tmp_path):
    rows = [
        harness.Row("op [1]", "tridraft", us=2.0, p20=1.9, p80=2.25, bytes=4096, gbs=2.0, percent=50.0, speedup=1.5),
        harness.Row("op [1]", "eager", us=3.0, p20=3.0, p80=3.0, bytes=4096, speedup=1.0, cold=False),
        harness.Row("op [1]", "rival", error="RuntimeError: no kernel for this shape"),
    ]
    lines = harness.format_table(rows).splitlines()
    assert lines[1].split() == ["op", "[1]", "tridraft", "2.00", "1.90–2.25", "2", "50%", "1.50"]
    assert lines[2].split() == ["eager", "3.00", "3.00–3.00", "0", "0%", "1.00", "hot"]
    assert lines[3].split() == ["rival", "failed", "RuntimeError:", "no", "kernel", "for", "this", "shape"]
    machine = harness.Machine(4000.0, 0.0, 2**20, harness.describe())
    harness.write_json(tmp_path / "gpu" / "op.json", machine, rows)
    content = json.loads((tmp_path / "gpu" / "op.json").read_text())
    assert content["read_gbs"] == 4000.0
    assert content["torch"] == torch.__version__
    assert [row["provider"] for row in content["rows"]] == ["tridraft", "eager", "rival"]


def test_gpu_slug(harness):
    assert harness.gpu_slug("NVIDIA H200") == "h200"
    assert harness.gpu_slug("NVIDIA GeForce RTX 5090") == "geforce-rtx-5090"


def test_report(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.syspath_prepend(str(BENCH))
    report = importlib.import_module("report")
    about = {
        "gpu": "GPU",
        "driver": "1",
        "torch": "2",
        "triton": "3",
        "date": "2026-01-01T00:00:00",
        "read_gbs": 4000.0,
    }
    rows = [
        {**CASE, "provider": "tridraft", "us": 2.0, "speedup": 3.0},
        {**CASE, "provider": "eager", "us": 6.0, "speedup": 1.0},
        {**CASE, "provider": "compile", "us": 3.0, "speedup": 2.0},
        {**CASE, "provider": "tridraft late", "us": 2.5, "speedup": 2.4},
        {**CASE, "provider": "read floor", "us": 1.0, "speedup": 6.0},
        {**CASE, "provider": "broken", "us": 0.0, "speedup": 0.0, "error": "failed"},
    ]
    (tmp_path / "op.json").write_text(json.dumps({**about, "rows": rows}))
    (tmp_path / "propose.json").write_text(json.dumps({**about, "rows": [{"batch": 1, "us": 300.0}]}))
    report.main([str(tmp_path)])
    assert "| op [1] | 2.0 | 50% | 3.0 (compile) | 1.5 |" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.svg")} == {"op_speedup.svg", "op_roofline.svg"}
    assert "broken" not in (tmp_path / "op_speedup.svg").read_text()


@pytest.mark.gpu
def test_measures_on_a_gpu(harness, tmp_path, capsys):
    def inputs(device):
        return (torch.randn(2**22, device=device),)

    case = harness.Case(
        name="double",
        inputs=inputs,
        reference=lambda x: 2 * x,
        providers={
            "tridraft": lambda x: x + x,
            "eager": lambda x: 2 * x,
            "loose": harness.Provider(lambda x: x * 2, graph=False),
            "wrong": lambda x: x,
        },
        bytes=2**25,
        flops=2**22,
        floor=True,
    )
    with pytest.raises(SystemExit, match="1"):
        harness.main(benchmark_of(harness, case), ["--rounds", "5", "--out", str(tmp_path)])
    rows = {row["provider"]: row for row in json.loads((tmp_path / "double.json").read_text())["rows"]}
    assert set(rows) == {"tridraft", "eager", "loose", "wrong", "read floor"}
    assert "AssertionError" in rows["wrong"]["error"]
    for name in ("tridraft", "eager", "loose"):
        assert 0 < rows[name]["p20"] <= rows[name]["us"] <= rows[name]["p80"]
        assert 1 < rows[name]["percent"] < 120
        assert rows[name]["cold"]
    assert rows["eager"]["speedup"] == 1
    assert "read ceiling" in capsys.readouterr().out
