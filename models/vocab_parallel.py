"""An LM head whose rows are spread over tensor-parallel ranks.

Each rank samples from its own rows; whose winner has the largest score wins, of equal ones the lowest id, which is what
one rank with all rows finds. One reduction of an integer a request: no rank gathers logits.
"""

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tridraft.kernels.lm_head import lm_head_sample

_ID_BITS = 32


def shard_rows(weight: Tensor, d2t: Tensor | None, group: Any) -> tuple[Tensor, Tensor]:
    """The rank's rows of a head [V, H], and the offset from each to its target id, int64."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    first, end = (len(weight) * part // size for part in (rank, rank + 1))
    if first == end:
        raise ValueError(f"weight: got {len(weight)} rows, needs at least one for each of {size} ranks")
    rows = torch.full((end - first,), first, dtype=torch.int64, device=weight.device)
    return weight[first:end].clone(), rows if d2t is None else rows + d2t[first:end]


def sample_of_ranks(group: Any, hidden: Tensor, weight: Tensor, *request: Tensor, **options: Any) -> Tensor:
    """`lm_head_sample`, whose winners are those of all ranks of the group; None: of this one."""
    if group is None:
        return lm_head_sample(hidden, weight, *request, **options)
    scores = hidden.new_empty(len(hidden), dtype=torch.float32)
    tokens = lm_head_sample(hidden, weight, *request, scores_out=scores, **options)
    reduce_winners(scores, tokens, group)
    return tokens


def reduce_winners(scores: Tensor, ids: Tensor, group: Any) -> None:
    """Replace ids [N] int64 by those of the ranks with the largest scores [N] f32; not NaN.

    A float's bits, those of negative ones turned round, order like the float. With the id below them, its complement
    that is, one maximum decides both.

    >>> _unpack(_pack(torch.tensor([-2.5, -0.0, 3.0]), torch.tensor([7, 0, 262_143]))).tolist()
    [7, 0, 262143]
    """
    key = _pack(scores, ids)
    torch.distributed.all_reduce(key, torch.distributed.ReduceOp.MAX, group=group)
    ids.copy_(_unpack(key))


def _pack(scores: Tensor, ids: Tensor) -> Tensor:
    bits = (scores + 0.0).view(torch.int32).long()  # −0 + 0 is +0, which it has to equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << _ID_BITS) | (2**_ID_BITS - 1 - ids)


def _unpack(key: Tensor) -> Tensor:
    return 2**_ID_BITS - 1 - (key & (2**_ID_BITS - 1))
