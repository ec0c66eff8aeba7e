"""Launching again what Triton compiled for arguments like these.

At each launch Triton finds out what its arguments are like: with 30 of them a launch takes the host 22.5 µs, and 13.7
without that (H200, 2026-11-30). Inside a captured graph that does not count; in front of one it does at every replay,
which itself takes 3.3.
"""

from typing import Any

import torch
from torch import Tensor


class Relaunch:
    """A kernel whose parameters are tensors, then integers, then constants.

    What Triton compiles depends on the device, the types, which tensors are None or begin elsewhere than at a multiple
    of 16 bytes, the integers and the options. A call like an earlier one in all of that gets the kernel compiled then.
    On AMD GPUs it also depends on how large the tensors' storages are, so there Triton is asked at every launch.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        integers: tuple[int, ...],
        options: dict[str, Any],
    ) -> None:
        """Launch it on the current stream; `options` has the constants by name, `num_warps` and the like."""
        addresses, on_gpu = 0, False
        types: list[torch.dtype | None] = []
        for tensor in tensors:
            if tensor is None:
                types.append(None)
            else:
                types.append(tensor.dtype)
                addresses |= tensor.data_ptr()
                on_gpu = tensor.is_cuda
        if addresses % 16 or torch.version.hip:
            self.kernel[grid](*tensors, *integers, **options)
            return
        device = torch.cuda.current_device() if on_gpu else None
        alike = (device, integers, *types, *options.values())
        known = self._compiled.get(alike)
        if known is None:
            compiled = self.kernel[grid](*tensors, *integers, **options)
            if len(self._compiled) > 4096:  # sizes of mixed batches hardly repeat
                self._compiled.clear()
            if compiled is not None:  # by the interpreter nothing is
                constants = self.kernel.arg_names[len(tensors) + len(integers) :]
                self._compiled[alike] = (compiled, tuple(options[name] for name in constants))
            return
        compiled, constants = known
        compiled[grid](*tensors, *integers, *constants)
