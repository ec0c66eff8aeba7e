"""Padding of a pass's requests, against Python lists."""

from typing import Any

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _variants import variants
from tridraft.kernels.pad_requests import pad_requests

NAMES = ("query_start_loc", "seq_lens", "idx_mapping")
PADDING = (None, 0, -1)


def vectors(num_reqs, device, dtype=torch.int32) -> dict[str, Any]:
    """What a pass of `num_reqs` requests says, no two values alike."""
    counts = [torch.arange(num_reqs, device=device, dtype=dtype) + 1000 * i for i in range(1, 3)]
    starts = 3 * torch.arange(num_reqs + 1, device=device, dtype=dtype)
    return dict(zip(NAMES, (starts, *counts), strict=True))


def buffers(num_rows, device, dtype=torch.int32) -> dict[str, Any]:
    """Outputs full of an earlier batch's values."""
    sizes = (num_rows + 1, *[num_rows] * 2)
    return {
        f"out_{name}": torch.full((size,), 77, device=device, dtype=dtype)
        for name, size in zip(NAMES, sizes, strict=True)
    }


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("num_reqs", "num_rows"), [(0, 0), (0, 3), (1, 1), (2, 4), (255, 255), (256, 256), (5, 700)])
def test_rows_past_the_last_request_are_padding(num_reqs, num_rows, dtype, impl, device):
    """C7: nothing of a larger batch is left."""
    given, outputs = vectors(num_reqs, device, dtype), buffers(num_rows, device)
    pad_requests(**given, **outputs, impl=impl)
    for name, filler in zip(NAMES, PADDING, strict=True):
        values = given[name].tolist()
        padding = values[-1] if filler is None else filler
        assert outputs[f"out_{name}"].tolist() == values + [padding] * (num_rows - num_reqs)


def test_refusals_name_the_argument(device):
    with pytest.raises(ValueError, match="out_idx_mapping: got 1 rows, needs at least 2"):
        pad_requests(**vectors(2, device), **buffers(1, device))
    with pytest.raises(ValueError, match=r"out_query_start_loc: got shape \[2\], needs \[3\]"):
        pad_requests(
            **vectors(2, device), **{**buffers(2, device), "out_query_start_loc": torch.zeros(2, device=device).int()}
        )
    with pytest.raises(TypeError, match="seq_lens: got float32"):
        pad_requests(**{**vectors(2, device), "seq_lens": torch.zeros(2, device=device)}, **buffers(2, device))


@pytest.mark.compiled
def test_opcheck_and_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo would remember the poisoned torch.empty
    given, outputs = vectors(3, device), buffers(4, device)
    operation = torch.ops.tridraft.pad_requests.default
    torch.library.opcheck(operation, (*given.values(), *outputs.values(), device.type == "cuda"))
    torch.compile(lambda: pad_requests(**given, **outputs), fullgraph=True, backend="aot_eager")()
    assert outputs["out_idx_mapping"].tolist() == [2000, 2001, 2002, -1]


@pytest.mark.compiled
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target):
    cpu = torch.device("cpu")
    given, outputs = vectors(3, cpu), buffers(4, cpu)
    assert_compiles(lambda: pad_requests(**given, **outputs), target)


@pytest.mark.compiled
def test_the_batch_reaches_no_variant():
    cpu = torch.device("cpu")
    seen = [variants(lambda n=n: pad_requests(**vectors(n, cpu), **buffers(64, cpu))) for n in (1, 2, 16, 33)]
    assert all(one == seen[0] for one in seen)


@pytest.mark.gpu
def test_replays_on_changed_inputs(device):
    given, outputs = vectors(3, device), buffers(8, device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            pad_requests(**given, **outputs)
        given["seq_lens"] += 5
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outputs["out_seq_lens"].tolist() == [1005, 1006, 1007, 0, 0, 0, 0, 0]
