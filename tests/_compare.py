"""The tolerance policy: integers exactly; floats against float64, with an error the dtype itself explains."""

import torch
from torch import Tensor

ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float64: 2**-53}
"""Half a unit in the last place, relative."""


def assert_close_to_float64(actual: Tensor, exact: Tensor, same_dtype: Tensor | None = None) -> None:
    """Assert that `actual` is as near to `exact` as its dtype allows.

    The largest absolute error may be twice the sum of what PyTorch's own computation in the same dtype errs
    (`same_dtype`, when given) and one rounding of the largest value to `actual`'s dtype.

    Args:
        actual: the result under test, any float dtype.
        exact: the same quantity computed in float64.
        same_dtype: the same quantity computed by PyTorch in `actual`'s dtype.
    """
    assert actual.shape == exact.shape, f"shape {list(actual.shape)} against {list(exact.shape)}"
    assert exact.dtype == torch.float64
    exact = exact.to(actual.device)
    rounding = ROUNDING[actual.dtype]
    infinite = torch.isinf(exact)
    assert torch.equal(torch.where(infinite, actual.double(), 0), torch.where(infinite, exact, 0)), "infinities differ"
    exact, actual = exact.masked_fill(infinite, 0), actual.double().masked_fill(infinite, 0)
    if not exact.numel():
        return
    allowed = rounding * exact.abs().max()
    if same_dtype is not None:
        allowed = allowed + (same_dtype.double().to(exact.device).masked_fill(infinite, 0) - exact).abs().max()
    error = (actual - exact).abs()
    worst = error.argmax()
    assert error.max() <= 2 * allowed, (
        f"error {error.max():.3e} at {tuple(i.item() for i in torch.unravel_index(worst, error.shape))}, "
        f"allowed {2 * allowed:.3e}: got {actual.flatten()[worst]:.6g}, exact {exact.flatten()[worst]:.6g}"
    )
