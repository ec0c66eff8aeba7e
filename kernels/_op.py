"""What every operation shares: declaring it to PyTorch, choosing kernel or definition, refusing bad input.

An operation is declared once, in its out-variant: it returns nothing and writes the tensors it names. The
public function allocates what the caller did not pass and returns it, so the fake implementation has no shape
of its own that could drift from the real one.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Impl = Literal["auto", "triton", "eager"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton kernels run in Triton's interpreter, on CPU tensors."""

DEBUG = os.environ.get("TRIDRAFT_DEBUG") == "1"
"""Kernels check their indices on the device (`tl.device_assert`)."""

_library = torch.library.Library("tridraft", "DEF")


def register(name: str, *, mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Any]:
    """Declare `tridraft::name` to PyTorch with its true mutation schema, for every device and for tracing.

    It is opaque to `torch.compile` and `torch.export`, which keeps the launch settings that each operation chooses for
    itself. Plain tensors outside of both go to the function directly: the dispatcher takes about 0.5 µs an argument.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        _library.define(name + torch.library.infer_schema(fn, mutates_args=mutates))
        _library.impl(name, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tridraft::{name}", lambda *args, **kwargs: None, lib=_library)
        operation = getattr(torch.ops.tridraft, name).default

        def call(*args: Any) -> None:
            direct = type(args[0]) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
            (fn if direct else operation)(*args)

        return call

    return decorate


def can_launch(tensor: Tensor) -> bool:
    """Whether a Triton kernel can run on this tensor here."""
    return tensor.is_cuda or INTERPRET


def use_triton(impl: Impl, tensor: Tensor) -> bool:
    """Whether the kernel runs: on CUDA tensors and under the interpreter unless the caller asks for "eager".

    Raises:
        ValueError: `impl` is not a known name, or "triton" was asked for where no kernel can run.
    """
    if impl not in ("auto", "triton", "eager"):
        raise ValueError(f"impl: got {impl!r}, needs 'auto', 'triton' or 'eager'")
    if impl == "triton" and not can_launch(tensor):
        raise ValueError(f"impl: 'triton' needs CUDA tensors or TRITON_INTERPRET=1, got a tensor on {tensor.device}")
    return impl != "eager" and can_launch(tensor)


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    if len(shape) != len(wanted):
        return False
    for got, want in zip(shape, wanted, strict=True):  # noqa: SIM110  a generator takes three times as long
        if got != want and not isinstance(want, str):
            return False
    return True


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int | str, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    contiguous_last: bool = True,
) -> None:
    """Refuse a tensor whose shape, dtype, device or last stride an operation cannot take.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.
        shape: a required size for each dimension; a string is a free dimension and its name.
        dtype: the dtype or dtypes taken.
        device: the device the other arguments are on.
        contiguous_last: the last dimension must have stride 1.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: another shape, device or layout.
    """
    if (
        isinstance(tensor, Tensor)
        and (shape is None or tensor.shape == shape or _fits(tensor.shape, shape))
        and (dtype is None or tensor.dtype is dtype or (type(dtype) is tuple and tensor.dtype in dtype))
        and (device is None or tensor.device == device)
        and (not contiguous_last or tensor.is_contiguous() or tensor.stride(-1) == 1)
    ):
        return  # as nearly always: what follows says what is wrong
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, needs a tensor")
    if shape is not None and not _fits(tensor.shape, shape):
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, needs [{wanted}]")
    if dtype is not None:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if tensor.dtype not in allowed:
            wanted = " or ".join(str(one).removeprefix("torch.") for one in allowed)
            raise TypeError(f"{name}: got {str(tensor.dtype).removeprefix('torch.')}, needs {wanted}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, needs {device}")
    if contiguous_last and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {list(tensor.stride())}, needs a contiguous last dimension")


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Floating point types every operation takes."""


class Arch(NamedTuple):
    """What a launch ladder may depend on.

    Attributes:
        backend: Triton's name, "cuda" or "hip".
        capability: 90 for sm_90; the digits of the gfx name on hip.
        num_sms: multiprocessors (compute units on hip).
        shared_memory: bytes one program may use.
    """

    backend: str
    capability: int
    num_sms: int
    shared_memory: int


@lru_cache
def _cuda_arch(index: int) -> Arch:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        digits = "".join(filter(str.isdigit, properties.gcnArchName.split(":")[0]))
        return Arch("hip", int(digits), properties.multi_processor_count, 65536)
    return Arch(
        "cuda",
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


arch_of_override: Arch | None = None
"""An architecture to answer for instead, while kernels are compiled ahead of time for it."""


def arch_of(device: torch.device) -> Arch:
    """The architecture behind `device`; on a CPU, a small sm_90 for the interpreter."""
    if arch_of_override is not None:
        return arch_of_override
    if device.type != "cuda":
        return Arch("cuda", 90, 4, 232448)
    return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for positive `b`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
