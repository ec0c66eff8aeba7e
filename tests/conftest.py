"""Fixtures every test shares: the device, poisoned memory, fixed seeds."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch caches the constructors it wraps for `with torch.device(...)` at the first use: let that be before the poison.
with torch.device("meta"):
    torch.empty(0)

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = ["triton"] if INTERPRET else ["eager", "triton"] if torch.cuda.is_available() else ["eager"]


def pytest_collection_modifyitems(config, items):
    """Leave tests marked `gpu` out where there is no GPU (deselected, so nothing is reported as skipped)."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


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
