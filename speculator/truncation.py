"""Top-k and top-p: the target's distribution cut to its likeliest tokens, before verification reads it.

    x = logits / T;   keep the k largest x;   of those, in falling order, each one before which less than p lies

Drafts may be sampled from anything: verification accepts them by what is left here.
"""

import torch
from torch import Tensor


def truncate(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The logits with −inf at every token that is cut off. As `transformers` cuts: ties of the k-th token stay.

    Args:
        logits: `[N, V]` float.
        temperature: `[N]` float32; a greedy row (0) is cut as at 1, which leaves its likeliest token.
        top_k: `[N]` int64; 0 keeps all.
        top_p: `[N]` float32; 1 keeps all.

    Returns:
        `[N, V]` float32.

    >>> logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).log_softmax(-1)
    >>> truncate(logits, torch.ones(1), torch.tensor([2]), torch.ones(1)).exp().round(decimals=2)
    tensor([[0.6400, 0.2400, 0.0000, 0.0000]])
    """
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    least = values.gather(1, (top_k - 1).clamp(0, values.shape[1] - 1)[:, None])
    kept = (top_k == 0)[:, None] | (values >= least)
    scaled = values / torch.where(temperature > 0, temperature, 1)[:, None]
    probabilities = scaled.masked_fill(~kept, float("-inf")).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept &= (top_p >= 1)[:, None] | (before < top_p[:, None])
    return logits.float().masked_fill(~torch.zeros_like(kept).scatter_(1, ids, kept), float("-inf"))
