"""The parts draft models are made of: modules that hold weights under the checkpoint's names and call our operations.

Weights are allocated uninitialised and never require gradients; a model fills them from a checkpoint.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tridraft.kernels.activation import gated_act
from tridraft.kernels.norm import rms_norm

Activation = Literal["gelu_tanh", "silu"]
ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
"""Our name for each activation a checkpoint's config may name."""


def empty_weight(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Parameter:
    """An uninitialised weight without a gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T`, no bias."""

    def __init__(self, in_features: int, out_features: int, *, dtype=None, device=None) -> None:
        super().__init__()
        self.weight = empty_weight(out_features, in_features, dtype=dtype, device=device)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """From x [T, in] to [T, out], written to `out` (any row stride) when given."""
        if out is None:
            return nn.functional.linear(x, self.weight)
        return torch.mm(x, self.weight.t(), out=out)


class RMSNorm(nn.Module):
    """Root mean square norm of the last dimension, times the weight."""

    def __init__(self, size: int, eps: float, *, dtype=None, device=None) -> None:
        super().__init__()
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normed `x`, in its dtype."""
        return rms_norm(x, self.weight, eps=self.eps)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, with gate and up in one weight: one matrix product, one activation launch."""

    def __init__(self, size: int, intermediate: int, activation: Activation, *, dtype=None, device=None) -> None:
        super().__init__()
        self.gate_up_proj = Linear(size, 2 * intermediate, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate, size, dtype=dtype, device=device)
        self.activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """From x [T, size] to [T, size]."""
        return self.down_proj(gated_act(self.gate_up_proj(x), activation=self.activation))


class RotaryFrequencies(nn.Module):
    """Inverse frequencies of a rotary embedding; they stay float32 when the model is cast."""

    inv_freq: Tensor

    def __init__(self, rope: Mapping[str, Any], head_dim: int, *, device=None) -> None:
        super().__init__()
        self._values = rotary_frequencies(rope, head_dim)
        self.register_buffer(
            "inv_freq", self._values.to(torch.get_default_device() if device is None else device), persistent=False
        )

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.inv_freq = self._values.to(self.inv_freq.device)
        return self


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Inverse frequencies f32 [rotary_dim / 2] on the CPU, from a checkpoint's `rope_parameters`.

    "default": theta^(−2i/D) over the first `partial_rotary_factor` of the head. "proportional": the same frequencies,
    with D the whole head, for the first fraction of all D/2 pairs and 0 for the others, which turn nothing.

    Computed in float32, as the models' authors do: the drafter has to turn its queries by the angles that the
    target turned its keys by, and at large positions a last bit of a frequency shows.

    >>> rotary_frequencies({"rope_type": "default", "rope_theta": 10000.0}, 8).tolist()
    [1.0, 0.10000000149011612, 0.009999999776482582, 0.0010000000474974513]
    >>> rotary_frequencies({"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, 16).tolist()
    [1.0, 0.3162277638912201, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Raises:
        ValueError: another rope type.
    """
    kind = rope.get("rope_type", "default")
    fraction = rope.get("partial_rotary_factor", 1.0)
    pairs = int(fraction * head_dim) // 2
    if kind not in ("default", "proportional"):
        raise ValueError(f"rope_type: got {kind!r}, needs 'default' or 'proportional'")
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / rope["rope_theta"] ** (exponents / (head_dim if kind == "proportional" else 2 * pairs))
    if kind == "proportional":
        inv_freq = nn.functional.pad(inv_freq, (0, head_dim // 2 - pairs)) / rope.get("factor", 1.0)
    return inv_freq
