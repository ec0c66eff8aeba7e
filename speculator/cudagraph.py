"""CUDA graphs of a speculator: one for each size of batch, chosen by the next size up.

A graph is captured from a function of a `Bucket` that reads and writes fixed buffers only. Whatever fits into a bucket
can be replayed in it, since rows and tokens past the batch's are inert padding; so what a call needs is the smallest
bucket that is at least as large in every size.
"""

import gc
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tridraft.speculator.piecewise import PiecewiseGraph, UncapturedAttention

logger = logging.getLogger(__name__)


class CUDAGraphMode(Enum):
    """What is captured.

    NONE: nothing. PIECEWISE: mixed batches, in segments around an attention that cannot be captured.
    FULL_DECODE_ONLY: batches in which every request has at most K + 1 tokens, whole. FULL: all, whole.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL = "full"

    def decode_mode(self) -> "CUDAGraphMode":
        """How batches of verify rows run. A draft step is too short to be cut into segments: they run eagerly."""
        full = self in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY)
        return CUDAGraphMode.FULL if full else CUDAGraphMode.NONE

    def mixed_mode(self) -> "CUDAGraphMode":
        """How batches with prompts among them run."""
        return CUDAGraphMode.NONE if self is CUDAGraphMode.FULL_DECODE_ONLY else self


class Bucket(NamedTuple):
    """Sizes of a batch.

    Attributes:
        num_tokens: T.
        num_reqs: R.
        max_query_len: tokens of one request, at most.
        num_steps: drafts of each request.
    """

    num_tokens: int
    num_reqs: int
    max_query_len: int
    num_steps: int

    def holds(self, other: "Bucket") -> bool:
        """Whether a batch of `other`'s sizes can be padded to this one."""
        return all(ours >= theirs for ours, theirs in zip(self, other, strict=True))


def request_counts(max_num_reqs: int) -> list[int]:
    """Numbers of requests worth a graph: padding costs at most half a batch below 8, and less the more there are."""
    counts = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_reqs, 64)]
    return [*(count for count in counts if count < max_num_reqs), max_num_reqs]


def token_counts(max_num_tokens: int) -> list[int]:
    """Numbers of tokens of a mixed batch worth a graph."""
    counts = [2**power * size for power in range(5, 24) for size in (2, 3)]
    return [*(count for count in counts if count < max_num_tokens), max_num_tokens]


class CudaGraphManager:
    """Graphs of one function, captured once and replayed by size.

    Args:
        name: of what is captured, for messages.
        run: does the work of a bucket on fixed buffers, on any stream.
        buckets: what to capture.
        device: where they run.
        attention: what a capture is cut around; None captures whole.

    Attributes:
        memory: bytes by which the device's free memory shrank while each bucket was captured.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Bucket], None],
        buckets: Iterable[Bucket],
        device: torch.device,
        attention: UncapturedAttention | None = None,
    ) -> None:
        self.name = name
        self.device = device
        # Largest first: smaller graphs find their memory in the pool.
        self.buckets = sorted(set(buckets), reverse=True)
        self.memory: dict[Bucket, int] = {}
        self._run = run
        self._attention = attention
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph | PiecewiseGraph] = {}
        self._found: dict[Bucket, Bucket | None] = {}

    @property
    def captured(self) -> bool:
        """Whether every bucket has its graph."""
        return len(self._graphs) == len(self.buckets)

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Warm up and capture every bucket that has no graph yet, on `stream` both times.

        Raises:
            RuntimeError: names the bucket, and the line that cannot be captured; no graph of this manager is left.
        """
        for bucket in _progress([one for one in self.buckets if one not in self._graphs], self.name):
            free = torch.cuda.mem_get_info(self.device)[0]
            try:
                # Libraries make their workspaces a stream at a time, lazily; kernels are compiled at their first call.
                with torch.cuda.stream(stream):
                    self._run(bucket)
                stream.synchronize()
                graph = self._record(bucket, pool, stream)
            except Exception as error:
                self.reset()
                raise RuntimeError(f"capturing the {self.name} graph of {bucket}: {_origin(error)}") from error
            except BaseException:
                self.reset()
                raise
            self._graphs[bucket] = graph
            self.memory[bucket] = free - torch.cuda.mem_get_info(self.device)[0]
        self._found.clear()
        total = sum(self.memory.values()) / 2**20
        logger.info("%s: %d CUDA graphs, %.0f MiB", self.name, len(self._graphs), total)

    def _record(self, bucket: Bucket, pool: Any, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | PiecewiseGraph:
        if self._attention is not None:
            pieces = PiecewiseGraph()
            with torch.cuda.stream(stream):
                pieces.record(self._attention, lambda: self._run(bucket), pool)
            return pieces
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._run(bucket)
        return graph

    def find(self, wanted: Bucket) -> Bucket | None:
        """The smallest captured bucket that holds `wanted`; None if there is none."""
        if wanted not in self._found:
            if len(self._found) > 4096:  # sizes of mixed batches hardly repeat
                self._found.clear()
            fitting = [bucket for bucket in self._graphs if bucket.holds(wanted)]
            self._found[wanted] = min(fitting, default=None)
        return self._found[wanted]

    def replay(self, bucket: Bucket) -> None:
        """Enqueue the bucket's graph."""
        self._graphs[bucket].replay()

    def reset(self) -> None:
        """Drop every graph and its memory."""
        self._graphs.clear()
        self._found.clear()
        self.memory.clear()
        gc.collect()


class DecodeSpeculatorCudaGraphManager(CudaGraphManager):
    """Graphs of draft steps with one row a request."""

    def __init__(
        self, run: Callable[[Bucket], None], device: torch.device, *, max_num_reqs: int, num_steps: Iterable[int]
    ) -> None:
        counts = request_counts(max_num_reqs)
        buckets = [Bucket(reqs, reqs, 1, steps) for steps in num_steps for reqs in counts]
        super().__init__("draft decode", run, buckets, device)


class PrefillSpeculatorCudaGraphManager(CudaGraphManager):
    """Graphs that begin with draft step 0 over the target's tokens."""

    @classmethod
    def of_verify(
        cls,
        run: Callable[[Bucket], None],
        device: torch.device,
        *,
        max_num_reqs: int,
        max_query_len: int,
        num_steps: Iterable[int],
    ) -> "PrefillSpeculatorCudaGraphManager":
        """For batches of at most K + 1 tokens a request: tokens in multiples of K + 1, up to all requests."""
        counts = request_counts(max_num_reqs)
        buckets = [Bucket(reqs * max_query_len, reqs, max_query_len, steps) for steps in num_steps for reqs in counts]
        return cls("draft verify", run, buckets, device)

    @classmethod
    def of_mixed(
        cls,
        run: Callable[[Bucket], None],
        device: torch.device,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        num_steps: Iterable[int],
        attention: UncapturedAttention | None,
    ) -> "PrefillSpeculatorCudaGraphManager":
        """For batches with prompts among them: all tokens may be one request's."""
        counts = token_counts(max_num_tokens)
        buckets = [Bucket(tokens, max_num_reqs, tokens, steps) for steps in num_steps for tokens in counts]
        return cls("draft prefill", run, buckets, device, attention)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from freeing an older graph in the middle of a capture, which that would end."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_graphs(managers: Sequence[CudaGraphManager], device: torch.device) -> None:
    """Capture all of them into one memory pool, on one stream."""
    if all(manager.captured for manager in managers):
        return
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream(device))
    with no_collection():
        for manager in managers:
            manager.capture(pool, stream)
    torch.cuda.current_stream(device).wait_stream(stream)


def _progress(buckets: list[Bucket], name: str) -> Iterable[Bucket]:
    try:
        from tqdm import tqdm  # noqa: PLC0415  a convenience, not a dependency
    except ImportError:
        return buckets
    return tqdm(buckets, desc=f"capturing {name}", unit="graph", disable=None, leave=False)


def _origin(error: BaseException) -> str:
    """What first went wrong and on which line; ending the capture raises another error about it."""
    while error.__context__ is not None:
        error = error.__context__
    torch_root = str(Path(torch.__file__).parent)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(torch_root)]
    where = f" ({frames[-1].line}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}"
