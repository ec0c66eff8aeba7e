"""An LM head rounded to fp8, to draft with.

A draft step with a dense head reads the head more than anything else, and in 16 bits twice as many bytes. A draft is
only proposed: what the rounding moves is how many are accepted, not the target's text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX = 448.0
"""The largest float8_e4m3fn."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class FP8Head:
    """Rows of an LM head [V, H] float8_e4m3fn, and by what each is multiplied [V] float32."""

    weight: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "FP8Head":
        """A copy of weight [V, H] with 3 bits of mantissa, each row's largest number at the upper end of fp8.

        >>> head = FP8Head.of(torch.tensor([[0.5, -2.0], [0.0, 0.0]]))
        >>> head.weight.float() * head.scale[:, None]
        tensor([[ 0.5000, -2.0000],
                [ 0.0000,  0.0000]])
        """
        rounded = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first in range(0, len(weight), 2**14):  # in float32 a whole head would be gigabytes
            rows = weight[first : first + 2**14].float()
            largest = rows.abs().amax(dim=1)
            scale[first : first + 2**14] = (largest / _MAX).clamp(min=_TINY)
            rounded[first : first + 2**14] = (rows / scale[first : first + 2**14, None]).to(torch.float8_e4m3fn)
        return cls(rounded, scale)
