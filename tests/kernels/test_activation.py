"""Gated activations against float64."""

import math

import pytest
import torch

from _aot import TARGETS, assert_compiles
from _compare import assert_close_to_float64
from conftest import INTERPRET
from tridraft.kernels.activation import activation_config, gated_act

ACTIVATIONS = ["gelu_tanh", "silu"]
# The interpreter rounds bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])


def exact_gated_act(gate_up, activation):
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    return 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up


def torch_gated_act(gate_up, activation):
    gate, up = gate_up.chunk(2, -1)
    act = torch.nn.functional.silu(gate)
    if activation == "gelu_tanh":
        act = torch.nn.functional.gelu(gate, approximate="tanh")
    return act * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 512), (3, 6), (2, 1300), (5, 2)], ids=str)
def test_gated_act(shape, dtype, activation, impl, device):
    gate_up = (torch.randn(shape, device=device) * 3).to(dtype)
    out = gated_act(gate_up, activation=activation, impl=impl)
    assert out.dtype == dtype
    assert_close_to_float64(out, exact_gated_act(gate_up, activation), torch_gated_act(gate_up, activation))


def test_the_gate_comes_first(impl, device):
    gate_up = torch.tensor([[20.0, -20.0, 3.0, 5.0]], device=device)
    out = gated_act(gate_up, activation="silu", impl=impl)
    torch.testing.assert_close(out.cpu(), torch.tensor([[60.0, 0.0]]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates_saturate(activation, impl, device):
    gate_up = torch.tensor([[1e4, -1e4, 90.0, -90.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0]], device=device)
    out = gated_act(gate_up, activation=activation, impl=impl).cpu()
    torch.testing.assert_close(out, torch.tensor([[2e4, 0.0, 180.0, 0.0, 0.0]]), atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_passes(activation, impl, device):
    gate_up = torch.tensor([[math.nan, 1.0, 1.0, math.nan]], device=device)
    assert gated_act(gate_up, activation=activation, impl=impl).isnan().all()


def test_strides_and_out(impl, device):
    wide = torch.randn(4, 90, device=device)
    out = torch.zeros(4, 50, device=device)
    assert gated_act(wide[:, 10:74], activation="silu", out=out[:, 5:37], impl=impl).data_ptr() == out[:, 5:].data_ptr()
    exact = exact_gated_act(wide[:, 10:74], "silu")
    assert_close_to_float64(out[:, 5:37], exact, torch_gated_act(wide[:, 10:74], "silu"))
    assert not out[:, :5].any()
    assert not out[:, 37:].any()


def test_no_rows(impl, device):
    assert gated_act(torch.empty(0, 8, device=device), activation="silu", impl=impl).shape == (0, 4)


def test_refusals_name_the_argument():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="activation: got 'relu'"):
        gated_act(x, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gate_up: got 7 columns"):
        gated_act(x[:, :7], activation="silu")
    with pytest.raises(ValueError, match=r"out: got shape \[2, 8\], needs \[2, 4\]"):
        gated_act(x, activation="silu", out=x)
    with pytest.raises(TypeError, match="gate_up: got float64"):
        gated_act(x.double(), activation="silu")


@pytest.mark.parametrize("x", [torch.randn(3, 16), torch.randn(2, 40)[:, 3:35]], ids=["contiguous", "view"])
@pytest.mark.compiled
def test_opcheck(x, device):
    out = torch.zeros(x.shape[0], x.shape[1] // 2, device=device)
    for activation in ACTIVATIONS:
        args = (x.to(device), activation, out, device.type == "cuda")
        torch.library.opcheck(torch.ops.tridraft.gated_act.default, args)


@pytest.mark.compiled
def test_compiles_into_a_full_graph(device, monkeypatch):
    monkeypatch.undo()  # Dynamo cannot trace a poisoned torch.empty

    def layer(x):
        return gated_act(x * 2, activation="gelu_tanh") + 1

    x = torch.randn(4, 32, device=device)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_config():
    for size in (1, 200, 2048, 8192, 21504):
        config = activation_config(size)
        assert config.block <= max(2 * size, 256)
        assert config.block == 256 * config.num_warps


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_ahead_of_time(target, activation, dtype):
    for size in (100, 2048):
        gate_up = torch.zeros(2, 2 * size, dtype=dtype)
        assert_compiles(lambda x=gate_up: gated_act(x, activation=activation), target)


@pytest.mark.gpu
def test_replays_on_changed_inputs(device):
    x = torch.randn(5, 4096, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = gated_act(x, activation="silu")
        x.mul_(-0.5)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(out, gated_act(x, activation="silu", impl="eager"))


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31st_element(device):
    x = torch.zeros(2**20 + 4, 2048, device=device, dtype=torch.bfloat16)
    x[-2:] = torch.randn(2, 2048, device=device)
    out = gated_act(x, activation="silu")
    assert_close_to_float64(out[-2:], exact_gated_act(x[-2:], "silu"), torch_gated_act(x[-2:], "silu"))
