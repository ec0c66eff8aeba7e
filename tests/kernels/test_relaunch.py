"""A kernel launched again without Triton: only ever for a call that Triton would have taken the same kernel for."""

from typing import Any

import pytest
import torch

from tridraft.kernels._relaunch import Relaunch


class FakeKernel:
    """A kernel of two tensors and an integer; keeps what reaches Triton and what the compiled kernels."""

    arg_names = ("x_ptr", "y_ptr", "size", "BLOCK", "PDL")

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.launched: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> "FakeCompiled":
            self.compiled.append((grid, args, options))
            return FakeCompiled(self, len(self.compiled))

        return launch


class FakeCompiled:
    def __init__(self, kernel: FakeKernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.kernel.launched.append((self.number, grid, args))


OPTIONS = {"PDL": False, "BLOCK": 64, "num_warps": 1}


def test_what_is_alike_is_launched_again():
    kernel = FakeKernel()
    launch = Relaunch(kernel)
    x, y = torch.zeros(8), torch.zeros(8)
    launch((1, 1, 1), (x, None), (8,), OPTIONS)
    assert kernel.compiled == [((1, 1, 1), (x, None, 8), OPTIONS)]
    launch((5, 2, 1), (y, None), (8,), OPTIONS)  # another tensor and another grid
    ((number, grid, args),) = kernel.launched
    assert (number, grid, len(kernel.compiled)) == (1, (5, 2, 1), 1)
    assert args[0] is y
    assert args[1:] == (None, 8, 64, False), "constants in the order of the kernel's parameters"


@pytest.mark.parametrize(
    ("tensors", "size", "options"),
    [
        ((torch.zeros(8), torch.zeros(8)), 8, OPTIONS),
        ((torch.zeros(8).half(), None), 8, OPTIONS),
        ((torch.zeros(8, dtype=torch.int32), None), 8, OPTIONS),
        ((torch.zeros(8), None), 1, OPTIONS),
        ((torch.zeros(8), None), 8, OPTIONS | {"BLOCK": 32}),
        ((torch.zeros(8), None), 8, OPTIONS | {"num_warps": 2}),
    ],
    ids=["another is given", "type", "another type", "integer", "constant", "warps"],
)
def test_what_differs_is_compiled(tensors, size, options):
    kernel = FakeKernel()
    launch = Relaunch(kernel)
    launch((1, 1, 1), (torch.zeros(8), None), (8,), OPTIONS)
    launch((1, 1, 1), tensors, (size,), options)
    assert (len(kernel.compiled), kernel.launched) == (2, [])
    launch((1, 1, 1), tensors, (size,), options)
    assert [number for number, *_ in kernel.launched] == [2]


def test_a_tensor_at_an_odd_address_is_triton_s_business():
    kernel = FakeKernel()
    launch = Relaunch(kernel)
    for tensor in (torch.zeros(8), torch.zeros(9)[1:], torch.zeros(9)[1:], torch.zeros(8)):
        launch((1, 1, 1), (tensor, None), (8,), OPTIONS)
    assert (len(kernel.compiled), len(kernel.launched)) == (3, 1)
