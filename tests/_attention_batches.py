"""Ragged batches over paged caches, and what attention over them is: in float64, and as PyTorch computes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from _compare import assert_close_to_float64
from tridraft.kernels._op import Impl
from tridraft.kernels.attention import paged_attention


@dataclass
class Batch:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    lengths: list[tuple[int, int]]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.block_table, self.query_start_loc, self.seq_lens)

    @property
    def max_query_len(self) -> int:
        return max(query_len for query_len, _ in self.lengths)


def new_cache(layout: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype, device):
    """K and V views `[num_blocks, block_size, num_kv_heads, head_dim]` of one allocation, full of NaN."""
    shape = {
        "apart": (2, num_blocks, block_size, num_kv_heads, head_dim),
        "block_pairs": (num_blocks, 2, block_size, num_kv_heads, head_dim),
        "head_major": (num_blocks, 2, num_kv_heads, block_size, head_dim),
        "packed": (num_blocks, block_size, num_kv_heads, 2 * head_dim),
    }[layout]
    memory = torch.full(shape, float("nan"), device=device).to(dtype)
    if layout == "apart":
        return memory[0], memory[1]
    if layout == "block_pairs":
        return memory[:, 0], memory[:, 1]
    if layout == "head_major":
        return memory[:, 0].transpose(1, 2), memory[:, 1].transpose(1, 2)
    return memory[..., :head_dim], memory[..., head_dim:]


def new_batch(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype=torch.float32,
    kv_dtype=None,
    window: int | None = None,
    layout: str = "apart",
    device="cpu",
) -> Batch:
    """A ragged batch over shuffled blocks; keys that no query sees are NaN, their table entries no blocks."""
    kv_dtype = kv_dtype or dtype
    columns = max(seq_len for _, seq_len in lengths) // block_size + 2
    blocks = [-(-seq_len // block_size) for _, seq_len in lengths]
    order = torch.randperm(sum(blocks) + 1).tolist()
    k_cache, v_cache = new_cache(layout, len(order), block_size, num_kv_heads, head_dim, kv_dtype, device)
    block_table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    block_table[:, 1::2] = 2**30
    for request, (query_len, seq_len) in enumerate(lengths):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        own = [order.pop() for _ in range(blocks[request])]
        for j in range(first, seq_len if query_len else 0):
            block_table[request, j // block_size] = own[j // block_size]
            for cache in (k_cache, v_cache):
                value = torch.randn(num_kv_heads, head_dim).to(kv_dtype).to(device)
                cache[own[j // block_size], j % block_size] = value
    starts = torch.tensor([0] + [query_len for query_len, _ in lengths]).cumsum(0)
    return Batch(
        q=torch.randn(int(starts[-1]), num_heads, head_dim).to(device, dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table.to(device),
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
        lengths=lengths,
    )


def gather(batch: Batch, request: int, keys: range, dtype, k_scale, v_scale) -> tuple[Tensor, Tensor]:
    """Keys and values `[Hkv, len(keys), D]` of one request, dequantised, in `dtype` on the CPU."""
    block_size = batch.k_cache.shape[1]
    table = batch.block_table[request].tolist()
    places = [(table[j // block_size], j % block_size) for j in keys]
    blocks, slots = (torch.tensor(column, dtype=torch.int64) for column in zip(*places, strict=True))
    pairs = ((batch.k_cache, k_scale), (batch.v_cache, v_scale))
    k, v = (
        cache.cpu()[blocks, slots].to(dtype) * (1 if factor is None else factor.cpu().to(dtype)[:, None])
        for cache, factor in pairs
    )
    return k.transpose(0, 1), v.transpose(0, 1)


def exact_attention(batch: Batch, *, scale, window=None, softcap=None, k_scale=None, v_scale=None) -> Tensor:
    """The oracle: float64, one query at a time, over exactly the keys it sees."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    queries = batch.q.cpu().double().unflatten(1, (batch.k_cache.shape[2], -1))
    row = 0
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        for p in range(seq_len - query_len, seq_len):
            keys = range(max(0, p + 1 - (window or p + 1)), p + 1)
            if keys:
                k, v = gather(batch, request, keys, torch.float64, k_scale, v_scale)
                scores = queries[row] @ k.transpose(1, 2) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row] = (scores.softmax(-1) @ v).flatten(0, 1)
            row += 1
    return out


def torch_attention(batch: Batch, *, scale, window=None, softcap=None, k_scale=None, v_scale=None) -> Tensor:
    """What PyTorch computes in the dtype of the queries, all queries of a request at once under a mask."""
    out = torch.zeros(batch.q.shape, dtype=batch.q.dtype)
    queries = batch.q.cpu().unflatten(1, (batch.k_cache.shape[2], -1))
    row = 0
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        if query_len and seq_len:
            k, v = gather(batch, request, range(first, seq_len), batch.q.dtype, k_scale, v_scale)
            p, j = torch.arange(seq_len - query_len, seq_len)[:, None], torch.arange(first, seq_len)
            hidden = (j > p) | (j <= p - (window or seq_len))
            scores = queries[row : row + query_len].permute(1, 2, 0, 3) @ k.transpose(1, 2)[:, None] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[row : row + query_len] = (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
        row += query_len
    return out


def check(batch: Batch, impl: Impl, *, window=None, softcap=None, k_scale=None, v_scale=None, scale=None) -> Tensor:
    """Run and compare; returns the result."""
    scale = batch.q.shape[-1] ** -0.5 if scale is None else scale
    actual = paged_attention(
        *batch.tensors,
        scale=scale,
        max_query_len=batch.max_query_len,
        sliding_window=window,
        softcap=softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        impl=impl,
    )
    options = {"scale": scale, "window": window, "softcap": softcap, "k_scale": k_scale, "v_scale": v_scale}
    assert_close_to_float64(actual, exact_attention(batch, **options), torch_attention(batch, **options))
    return actual
