"""Graphs in segments, around an attention that cannot be captured.

    q, k, v → [graph] → attention, as it is → [graph] → attention → [graph] → token

The attention is called while everything before and after it is being recorded: the recording ends before the call and
another begins after it. A replay runs the segments and calls in turn; the tensors between them stay where they were.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class PiecewiseGraph:
    """A recorded function, replayed piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[Callable[[], Any]] = []
        self._segment: torch.cuda.CUDAGraph | None = None

    def record(self, attention: "UncapturedAttention", run: Callable[[], None], pool: Any) -> None:
        """Run once on the current stream, which is not the default one, and keep what it launched."""
        self._pool = pool
        attention.recording = self
        try:
            self._begin()
            run()
            self._end()
        except BaseException:
            if self._segment is not None:
                self._abandon(self._segment)
            raise
        finally:
            attention.recording = None

    def call(self, function: Callable[[], Any]) -> None:
        """Call the function now, and at this place of every replay."""
        self._end()
        function()
        self._pieces.append(function)
        self._begin()

    def replay(self) -> None:
        """Enqueue every piece."""
        for piece in self._pieces:
            piece()

    def _begin(self) -> None:
        self._segment = torch.cuda.CUDAGraph()
        self._segment.capture_begin(pool=self._pool)

    def _end(self) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        segment.capture_end()
        self._pieces.append(segment.replay)

    @staticmethod
    def _abandon(segment: torch.cuda.CUDAGraph) -> None:
        with contextlib.suppress(RuntimeError):  # it says that the capture failed, as the error on its way says better
            segment.capture_end()


class UncapturedAttention:
    """An attention with the signature of `paged_attention` that recordings are cut around.

    Args:
        function: writes its result to `out`, and depends on its tensors' contents at the time of the call only.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.recording: PiecewiseGraph | None = None

    def __call__(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        out = torch.empty_like(q)  # inside the segment, so that the graph's pool owns it
        call = partial(self._function, q, *args, **options, out=out)
        if self.recording is None:
            call()
        else:
            self.recording.call(call)
        return out
