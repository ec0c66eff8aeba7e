"""Ahead-of-time compilation: every launch an operation makes, compiled for real targets without a GPU.

`record_launches` runs an operation with its launches recorded instead of made, so the compiled variants are the
ones in use, not a list kept beside them. Pass the architecture so that the launch ladder answers for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tridraft.kernels import _op
from tridraft.kernels._op import Arch

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Arch("cuda", 80, 108, 166912)),
    "sm_90": (GPUTarget("cuda", 90, 32), Arch("cuda", 90, 132, 232448)),
    "sm_100": (GPUTarget("cuda", 100, 32), Arch("cuda", 100, 148, 232448)),
    "sm_120": (GPUTarget("cuda", 120, 32), Arch("cuda", 120, 170, 101376)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Arch("hip", 942, 304, 65536)),
}

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its arguments by name, and its compile options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compile(self, target: GPUTarget) -> Any:
        """Compile for `target` as the runtime would, argument specialisation included."""
        signature, constexprs, attrs = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments.get(parameter.name, parameter.default)
            specialize = not parameter.do_not_specialize
            aligned = False
            if parameter.is_constexpr or value is None or (specialize and type(value) is int and value == 1):
                signature[parameter.name] = "constexpr"
                constexprs[(index,)] = value
            elif isinstance(value, Tensor):
                signature[parameter.name] = _POINTERS[value.dtype]
                aligned = True
            elif isinstance(value, bool):
                signature[parameter.name] = "i1"
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                aligned = specialize and value % 16 == 0
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                raise TypeError(f"{parameter.name}: cannot give {type(value).__name__} a Triton type")
            if aligned:
                attrs[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs, attrs)
        return triton.compile(source, target=target, options=self.options)


@contextmanager
def record_launches(arch: Arch) -> Iterator[list[Launch]]:
    """Record every launch made inside, on tensors of any device, as if on `arch`; nothing runs."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        names = [parameter.name for parameter in self.params]
        arguments = {
            **dict(zip(names, args, strict=False)),
            **{k: v for k, v in kwargs.items() if k in names},
        }
        launches.append(Launch(self, arguments, options))

    with (
        patch.object(JITFunction, "run", record),
        patch.object(_op, "can_launch", lambda _: True),
        patch.object(_op, "arch_of_override", arch),
    ):
        yield launches


def assert_compiles(call: Callable[[], object], target: str) -> None:
    """Assert that every launch `call` makes compiles for `target` and fits its shared memory."""
    gpu, arch = TARGETS[target]
    with record_launches(arch) as launches:
        call()
    assert launches, "the call launched nothing"
    for launch in launches:
        compiled = launch.compile(gpu)
        shared = compiled.metadata.shared
        assert shared <= arch.shared_memory, f"{launch.kernel.__name__}: {shared} B of shared memory on {target}"
