"""The rules of ties and NaN, as the definition and as the kernels' combine."""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false

import pytest
import torch
import triton
import triton.language as tl

from tridraft.kernels._argmax import argmax, argmax_reference, lowest_eligible

NAN, INF = float("nan"), float("inf")
# scores, eligible ids, winner, all eligible are NaN
TABLE = [
    ([1, 3, 3, 2], [0, 1, 2, 3], 1, False),
    ([NAN, 3, NAN, 4], [0, 1, 2, 3], 3, False),
    ([NAN, -INF, NAN, -1], [0, 1, 2, 3], 3, False),
    ([9, 3, 9, 3], [1, 3], 1, False),
    ([INF, 1, INF, 0], [1, 2, 3], 2, False),
    ([0.0, -0.0, -1, -1], [0, 1, 2, 3], 0, False),
    ([-INF, -INF, -INF, -INF], [0, 1, 2, 3], 0, False),
    ([-INF, -INF, -INF, -INF], [2, 3], 2, False),
    ([NAN, NAN, -INF, NAN], [1, 2, 3], 1, False),
    ([NAN, NAN, NAN, NAN], [0, 1, 2, 3], 0, True),
    ([7, NAN, NAN, NAN], [1, 2, 3], 1, True),
]


@triton.jit
def _argmax_kernel(scores_ptr, eligible_ptr, suppress_ptr, num_suppressed, out_ptr, flag_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    scores = tl.where(tl.load(eligible_ptr + offs) != 0, tl.load(scores_ptr + offs), float("nan"))
    best, token = argmax(scores, offs, 0)
    if not best > float("-inf"):
        token = lowest_eligible(suppress_ptr, num_suppressed, None, BLOCK)
    tl.store(out_ptr, token)
    tl.store(flag_ptr, tl.where(best > float("-inf"), 0, tl.where(best == float("-inf"), 0, 1)))


@pytest.mark.parametrize(("scores", "eligible", "winner", "all_nan"), TABLE)
def test_winner(scores, eligible, winner, all_nan, impl, device):
    scores = torch.tensor(scores, dtype=torch.float32, device=device)
    mask = torch.zeros(4, dtype=torch.bool, device=device)
    mask[eligible] = True
    if impl == "eager":
        ids, flags = argmax_reference(scores[None], mask)
    else:
        suppress = (~mask).nonzero()[:, 0].repeat(9)  # more ids than a block of the list holds
        ids, flags = torch.empty(1, dtype=torch.int32, device=device), torch.empty(1, dtype=torch.int32, device=device)
        _argmax_kernel[(1,)](scores, mask.int(), suppress, suppress.numel(), ids, flags, 4)
    assert ids.tolist() == [winner]
    assert flags.bool().tolist() == [all_nan]


def test_lowest_eligible_stops_at_the_end(impl, device):
    suppress = torch.arange(4, device=device)
    if impl == "eager":
        ids = argmax_reference(torch.zeros(1, 4, device=device), torch.zeros(4, dtype=torch.bool, device=device))[0]
        assert ids.tolist() == [0]
        return
    out, flag = torch.empty(1, dtype=torch.int32, device=device), torch.empty(1, dtype=torch.int32, device=device)
    nan = torch.full((4,), NAN, device=device)
    _argmax_kernel[(1,)](nan, torch.zeros(4, dtype=torch.int32, device=device), suppress, 4, out, flag, 4)
    assert 0 <= out.item() < 4
