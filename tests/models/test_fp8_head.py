"""Rounding an LM head to fp8."""

import pytest
import torch

from tridraft.models.fp8_head import FP8Head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_to_four_significant_bits(dtype, device):
    """By at most a part in 16, of numbers too small for that by half of fp8's smallest step, 2 ** −9 of the scale."""
    torch.manual_seed(0)
    rows = 3 * 2**14 + 5
    weight = torch.randn(rows, 48, device=device) * torch.logspace(-6, 6, rows, device=device)[:, None]
    weight[7] = 0
    weight = weight.to(dtype)
    head = FP8Head.of(weight)
    assert (head.weight.dtype, head.weight.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (head.scale.dtype, head.scale.shape) == (torch.float32, (rows,))
    exact, scale = weight.double(), head.scale.double()[:, None]
    rounded = head.weight.double() * scale
    bound = torch.maximum(exact.abs() / 16, scale * 2.0**-10) * (1 + 1e-6)
    assert ((rounded - exact).abs() <= bound).all()
    largest = exact.abs().amax(1)
    torch.testing.assert_close(rounded.abs().amax(1), largest, rtol=1e-6, atol=0.0)
    assert (rounded[7] == 0).all()
