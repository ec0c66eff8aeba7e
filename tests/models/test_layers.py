"""The parts of draft models: rotary frequencies against transformers, modules against plain PyTorch."""

import doctest

import pytest
import torch
from torch import nn

from _compare import assert_close_to_float64
from tridraft.models import layers
from tridraft.models.layers import (
    GatedMLP,
    Joint,
    Linear,
    RMSNorm,
    RotaryFrequencies,
    rope_parameters,
    rotary_frequencies,
)


def test_docstring_examples():
    assert doctest.testmod(layers).failed == 0


@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["default", "proportional"])
def test_frequencies_are_bitwise_those_of_transformers(kind, fraction, head_dim):
    """A last bit of a frequency is a fortieth of a turn at position 10⁵ · theta⁰."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": 1e6, "partial_rotary_factor": fraction}
    if kind == "proportional":
        config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope)
        theirs, factor = ROPE_INIT_FUNCTIONS["proportional"](config, "cpu")
        assert factor == 1.0
    else:
        size = int(head_dim * fraction)
        theirs = 1.0 / (1e6 ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    ours = rotary_frequencies(rope, head_dim)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)


LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA31}])
def test_scaled_frequencies_are_bitwise_those_of_transformers(scaling, fraction, head_dim):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 500_000.0, "partial_rotary_factor": fraction, **scaling}
    config = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131_072)
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    assert factor == 1.0
    assert torch.equal(rotary_frequencies(rope, head_dim), theirs)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_theta": 10_000.0}),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, {"rope_theta": 5e5, "partial_rotary_factor": 0.5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": 5.0},
            {"rope_theta": 1e6, "rope_type": "default"},
        ),
    ],
)
def test_rope_parameters_of_older_configurations(config, expected):
    assert rope_parameters(config) == expected


def test_other_rope_types_are_refused():
    with pytest.raises(ValueError, match="rope_type: got 'yarn'"):
        rotary_frequencies({"rope_type": "yarn", "rope_theta": 1e4}, 64)


def test_frequencies_leave_meta_with_their_values():
    rope = {"rope_theta": 1e4}
    with torch.device("meta"):
        module = RotaryFrequencies(rope, 8)
    assert module.inv_freq.is_meta
    assert torch.equal(module.to_empty(device="cpu").inv_freq, rotary_frequencies(rope, 8))


def test_linear_writes_into_a_strided_view(device):
    linear = Linear(48, 32, device=device)
    linear.weight.normal_()
    x = torch.randn(5, 48, device=device)
    buffer = torch.zeros(5, 80, device=device)
    view = buffer[:, 16:48]
    assert linear(x, out=view).data_ptr() == view.data_ptr()
    torch.testing.assert_close(view, linear(x))
    linear.set_bias(True)
    assert linear.bias is not None
    linear.bias.copy_(torch.arange(32))
    torch.testing.assert_close(linear(x, out=view), x @ linear.weight.T + torch.arange(32, device=device))
    torch.testing.assert_close(view, linear(x))
    assert (buffer[:, :16] == 0).all()
    assert (buffer[:, 48:] == 0).all()


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gated_mlp(activation, rows, device):
    mlp, norm = GatedMLP(32, 48, activation, device=device), RMSNorm(32, 1e-6, device=device)
    for parameter in (*mlp.parameters(), norm.weight):
        parameter.normal_().mul_(0.2)
    x, residual = torch.randn(2, rows, 32, device=device)

    def formula(dtype):
        gate, up = mlp.gate_up_proj.weight.to(dtype).chunk(2)
        y = nn.functional.rms_norm(residual.to(dtype) + x.to(dtype), (32,), norm.weight.to(dtype), 1e-6)
        act = (
            nn.functional.gelu(y @ gate.T, approximate="tanh")
            if activation == "gelu_tanh"
            else nn.functional.silu(y @ gate.T)
        )
        return (act * (y @ up.T)) @ mlp.down_proj.weight.to(dtype).T

    out, stream = mlp(Joint(norm), x, residual)
    assert_close_to_float64(out, formula(torch.float64), formula(torch.float32))
    torch.testing.assert_close(stream, residual + x)


def test_rms_norm_multiplies_by_its_weight(device):
    norm = RMSNorm(32, 1e-6, device=device)
    norm.weight.normal_()
    x = torch.randn(3, 32, device=device)
    wide = x.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    same = nn.functional.rms_norm(x, (32,), norm.weight, 1e-6)
    assert_close_to_float64(norm(x), exact, same)


def test_nothing_requires_gradients():
    modules = Linear(4, 4), RMSNorm(4, 1e-6), GatedMLP(4, 8, "silu")
    assert not [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
