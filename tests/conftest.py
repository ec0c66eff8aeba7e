"""Fixtures every test shares: the device, poisoned memory, fixed seeds."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch caches the constructors it wraps for `with torch.device(...)` at the first use: let that be before the poison.
# So does the compiler, of the functions it knows.
with torch.device("meta"):
    torch.empty(0)
torch.compile(torch.empty_like, backend="eager", fullgraph=True)(torch.zeros(1))

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = ["triton"] if INTERPRET else ["eager", "triton"] if torch.cuda.is_available() else ["eager"]


def pytest_collection_modifyitems(config, items):
    """Leave out what cannot run here (deselected, so nothing is reported as skipped).

    That is tests marked `gpu` with fewer GPUs than they need, and those marked `compiled` in the interpreter.
    """

    def runs(item):
        if INTERPRET and item.get_closest_marker("compiled"):
            return False
        gpu = item.get_closest_marker("gpu")
        return gpu is None or torch.cuda.device_count() >= gpu.kwargs.get("count", 1)

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]


@pytest.fixture(params=IMPLS)
def impl(request):
    """Each implementation that runs here: the eager definition, and the kernel on a GPU or in the interpreter."""
    return request.param


@pytest.fixture(scope="session")
def device():
    """The CUDA device where there is one, otherwise the CPU."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison_empty(monkeypatch):
    """`torch.empty` and its kin return NaN (or the largest integer), so an unwritten cell fails its test."""

    def poison(tensor):
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.numel():
            if tensor.dtype.is_floating_point:
                if tensor.element_size() > 1:
                    tensor.fill_(float("nan"))
                else:
                    tensor.view(torch.uint8).fill_(0x7F)
            elif tensor.dtype != torch.bool and not tensor.dtype.is_complex:
                tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    def wrap(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: poison(original(*args, **kwargs)))

    for name in ("empty", "empty_like", "empty_strided"):
        wrap(torch, name)
    wrap(torch.Tensor, "new_empty")


@pytest.fixture
def ints(device):
    """Makes a tensor of integers, int32 unless it is told."""

    def make(values, dtype=torch.int32):
        return torch.tensor(values, device=device, dtype=dtype)

    return make


GARBAGE = 77777


def garbage(size, device, dtype=torch.int64):
    """What an output holds before it is written: integers that are no token, position, length or slot in a test."""
    return torch.full((size,), GARBAGE, device=device, dtype=dtype)
