"""Padding: what a pass says of its requests, copied into the fixed tensors that a captured graph reads.

A graph is captured for a fixed number of rows and replayed for any smaller number of requests. Rows past the last
request are padding, whatever an earlier, larger batch left there: slot −1, length 0, counts 0, no tokens.

    pad_requests(query_start_loc, seq_lens, idx_mapping, num_sampled, num_rejected, out_query_start_loc=starts, …)
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
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor | None,
    num_rejected: Tensor | None,
    num_rows: int,
) -> tuple[Tensor | None, ...]:
    """The definition; see `pad_requests`. Returns the five vectors, padded."""
    added = (0, num_rows - idx_mapping.shape[0])
    starts = torch.cat((query_start_loc, query_start_loc[-1:].expand(added[1])))
    counts = (None if count is None else F.pad(count, added) for count in (num_sampled, num_rejected))
    return starts, F.pad(seq_lens, added), F.pad(idx_mapping, added, value=-1), *counts


@triton.jit(do_not_specialize=["num_reqs", "num_rows"])
def _pad_requests_kernel(
    query_start_loc_ptr,  # [R + 1] int
    seq_lens_ptr,  # [R] int
    idx_mapping_ptr,  # [R] int
    num_sampled_ptr,  # [R] int or None
    num_rejected_ptr,  # [R] int or None
    out_query_start_loc_ptr,  # [B + 1] int
    out_seq_lens_ptr,  # [B] int
    out_idx_mapping_ptr,  # [B] int
    out_num_sampled_ptr,  # [B] int or None
    out_num_rejected_ptr,  # [B] int or None
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
    if num_sampled_ptr is not None:
        tl.store(out_num_sampled_ptr + rows, tl.load(num_sampled_ptr + rows, mask=real, other=0), mask=mask)
    if num_rejected_ptr is not None:
        tl.store(out_num_rejected_ptr + rows, tl.load(num_rejected_ptr + rows, mask=real, other=0), mask=mask)


_OUTPUTS = ("out_query_start_loc", "out_seq_lens", "out_idx_mapping", "out_num_sampled", "out_num_rejected")


@register("pad_requests", mutates=_OUTPUTS)
def _pad_requests(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor | None,
    num_rejected: Tensor | None,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    out_idx_mapping: Tensor,
    out_num_sampled: Tensor | None,
    out_num_rejected: Tensor | None,
    triton: bool,
) -> None:
    num_reqs, num_rows = idx_mapping.shape[0], out_idx_mapping.shape[0]
    inputs = (query_start_loc, seq_lens, idx_mapping, num_sampled, num_rejected)
    outputs = (out_query_start_loc, out_seq_lens, out_idx_mapping, out_num_sampled, out_num_rejected)
    if triton:
        kernel: Any = _pad_requests_kernel[(cdiv(num_rows + 1, _BLOCK),)]
        options = pdl_options(arch_of(seq_lens.device))
        kernel(*inputs, *outputs, num_reqs, num_rows, BLOCK=_BLOCK, num_warps=4, **options)
        return
    for output, value in zip(outputs, pad_requests_reference(*inputs, num_rows), strict=True):
        if output is not None and value is not None:
            output.copy_(value)


def pad_requests(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor | None = None,
    num_rejected: Tensor | None = None,
    *,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    out_idx_mapping: Tensor,
    out_num_sampled: Tensor | None = None,
    out_num_rejected: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Copy R requests into tensors of B ≥ R rows; every row of those is written. One launch, int32 or int64 all.

    Args:
        query_start_loc: `[R + 1]`.
        seq_lens: `[R]`.
        idx_mapping: `[R]` request slots.
        num_sampled: `[R]`, or None as its output is.
        num_rejected: `[R]`, or None as its output is.
        out_query_start_loc: `[B + 1]` written; padded with the last value.
        out_seq_lens: `[B]` written; padded with 0.
        out_idx_mapping: `[B]` written; padded with −1.
        out_num_sampled: `[B]` written; padded with 0.
        out_num_rejected: `[B]` written; padded with 0.
        impl: "auto", "triton" or "eager".

    >>> def ints(*values): return torch.tensor(values)
    >>> starts, (lengths, slots, sampled, rejected) = torch.empty(5).long(), torch.empty(4, 4).long()
    >>> pad_requests(ints(0, 4, 5), ints(54, 9), ints(7, 2), ints(2, 1), ints(2, 0), out_query_start_loc=starts,
    ...     out_seq_lens=lengths, out_idx_mapping=slots, out_num_sampled=sampled, out_num_rejected=rejected)
    >>> starts.tolist(), lengths.tolist(), slots.tolist()
    ([0, 4, 5, 5, 5], [54, 9, 0, 0], [7, 2, -1, -1])
    """
    device, num_reqs, num_rows = idx_mapping.device, idx_mapping.shape[0], out_idx_mapping.shape[0]

    def check(size: int, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                check_tensor(name, tensor, shape=(size,), dtype=_INTS, device=device)

    check(num_reqs + 1, query_start_loc=query_start_loc)
    check(num_reqs, seq_lens=seq_lens, idx_mapping=idx_mapping, num_sampled=num_sampled, num_rejected=num_rejected)
    check(num_rows + 1, out_query_start_loc=out_query_start_loc)
    check(num_rows, out_seq_lens=out_seq_lens, out_idx_mapping=out_idx_mapping)
    check(num_rows, out_num_sampled=out_num_sampled, out_num_rejected=out_num_rejected)
    if num_rows < num_reqs:
        raise ValueError(f"out_idx_mapping: got {num_rows} rows, needs at least {num_reqs}")
    for name, given, out in (
        ("out_num_sampled", num_sampled, out_num_sampled),
        ("out_num_rejected", num_rejected, out_num_rejected),
    ):
        if (given is None) != (out is None):
            raise ValueError(f"{name}: got {'a tensor' if given is None else None}, needs what its input has")
    inputs = (query_start_loc, seq_lens, idx_mapping, num_sampled, num_rejected)
    outputs = (out_query_start_loc, out_seq_lens, out_idx_mapping, out_num_sampled, out_num_rejected)
    _pad_requests(*inputs, *outputs, use_triton(impl, idx_mapping))
