"""Padding: what a pass says of its requests, copied into the fixed tensors that a captured graph reads.

A graph is captured for a fixed number of rows and replayed for any smaller number of requests. Rows past the last
request are padding, whatever an earlier, larger batch left there: slot −1, length 0, counts 0, no tokens.

    pad_requests(query_start_loc, seq_lens, idx_mapping, out_query_start_loc=starts, out_seq_lens=lengths, …)
    graph.replay()
"""

# Kernels are Triton, not Python: their integers are tensors and their flags constexprs, which a Python checker denies.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from tridraft.kernels._op import Impl, arch_of, cdiv, check_tensor, register, use_triton
from tridraft.kernels._pdl import pdl_options, pdl_wait

_INTS = (torch.int32, torch.int64)
_BLOCK = 256


def pad_requests_reference(
    num_rows: int, query_start_loc: Tensor, idx_mapping: Tensor, *counts: Tensor
) -> tuple[Tensor, ...]:
    """The definition; see `pad_requests`. Returns the vectors, padded; the lengths are counts."""
    added = (0, num_rows - idx_mapping.shape[0])
    starts = torch.cat((query_start_loc, query_start_loc[-1:].expand(added[1])))
    return starts, F.pad(idx_mapping, added, value=-1), *(F.pad(count, added) for count in counts)


@triton.jit(do_not_specialize=["num_reqs", "num_rows"])
def _pad_requests_kernel(
    query_start_loc_ptr,  # [R + 1] int
    seq_lens_ptr,  # [R] int
    idx_mapping_ptr,  # [R] int
    out_query_start_loc_ptr,  # [B + 1] int
    out_seq_lens_ptr,  # [B] int
    out_idx_mapping_ptr,  # [B] int
    num_reqs,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real, mask = rows < num_reqs, rows < num_rows
    start = tl.load(query_start_loc_ptr + tl.minimum(rows, num_reqs))
    tl.store(out_query_start_loc_ptr + rows, start, mask=rows <= num_rows)
    tl.store(out_seq_lens_ptr + rows, tl.load(seq_lens_ptr + rows, mask=real, other=0), mask=mask)
    tl.store(out_idx_mapping_ptr + rows, tl.load(idx_mapping_ptr + rows, mask=real, other=-1), mask=mask)


_OUTPUTS = ("out_query_start_loc", "out_seq_lens", "out_idx_mapping")


@register("pad_requests", mutates=_OUTPUTS)
def _pad_requests(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    out_idx_mapping: Tensor,
    triton: bool,
) -> None:
    num_reqs, num_rows = idx_mapping.shape[0], out_idx_mapping.shape[0]
    inputs = (query_start_loc, seq_lens, idx_mapping)
    outputs = (out_query_start_loc, out_seq_lens, out_idx_mapping)
    if triton:
        kernel: Any = _pad_requests_kernel[(cdiv(num_rows + 1, _BLOCK),)]
        options = pdl_options(arch_of(seq_lens.device))
        kernel(*inputs, *outputs, num_reqs, num_rows, BLOCK=_BLOCK, num_warps=4, **options)
        return
    starts, slots, lengths = pad_requests_reference(num_rows, query_start_loc, idx_mapping, seq_lens)
    for output, value in zip(outputs, (starts, lengths, slots), strict=True):
        output.copy_(value)


def pad_requests(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    *,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    out_idx_mapping: Tensor,
    impl: Impl = "auto",
) -> None:
    """Copy R requests into tensors of B ≥ R rows; every row of those is written. One launch, int32 or int64 all.

    Args:
        query_start_loc: `[R + 1]`.
        seq_lens: `[R]`.
        idx_mapping: `[R]` request slots.
        out_query_start_loc: `[B + 1]` written; padded with the last value.
        out_seq_lens: `[B]` written; padded with 0.
        out_idx_mapping: `[B]` written; padded with −1.
        impl: "auto", "triton" or "eager".

    >>> def ints(*values): return torch.tensor(values)
    >>> starts, (lengths, slots) = torch.empty(5).long(), torch.empty(2, 4).long()
    >>> pad_requests(ints(0, 4, 5), ints(54, 9), ints(7, 2), out_query_start_loc=starts, out_seq_lens=lengths,
    ...     out_idx_mapping=slots)
    >>> starts.tolist(), lengths.tolist(), slots.tolist()
    ([0, 4, 5, 5, 5], [54, 9, 0, 0], [7, 2, -1, -1])
    """
    device, num_reqs, num_rows = idx_mapping.device, idx_mapping.shape[0], out_idx_mapping.shape[0]

    def check(size: int, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            check_tensor(name, tensor, shape=(size,), dtype=_INTS, device=device)

    check(num_reqs + 1, query_start_loc=query_start_loc)
    check(num_reqs, seq_lens=seq_lens, idx_mapping=idx_mapping)
    check(num_rows + 1, out_query_start_loc=out_query_start_loc)
    check(num_rows, out_seq_lens=out_seq_lens, out_idx_mapping=out_idx_mapping)
    if num_rows < num_reqs:
        raise ValueError(f"out_idx_mapping: got {num_rows} rows, needs at least {num_reqs}")
    inputs = (query_start_loc, seq_lens, idx_mapping)
    outputs = (out_query_start_loc, out_seq_lens, out_idx_mapping)
    _pad_requests(*inputs, *outputs, use_triton(impl, idx_mapping))
