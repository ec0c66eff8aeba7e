"""Attention of ragged queries over a paged key-value cache: decode, verification and prefill.

Query `i` of request `r` is the token at key index `p = seq_lens[r] − query_len + i`. With `s(j) = scale · q · k[j]`,
soft-capped to `softcap · tanh(s / softcap)` when asked for, its output is the softmax-weighted mean of `v[j]` over

    max(0, p − sliding_window + 1) ≤ j ≤ p          (0 ≤ j ≤ p without a window)

Key `j` of request `r` lies in block `block_table[r, j // block_size]` at slot `j % block_size`. Only the visible part
of a row of the block table is read, so entries past the sequence or before the window may hold anything.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridraft.kernels._attention_kernels import combine_kernel, prefill_kernel, split_kernel
from tridraft.kernels._op import (
    FLOATS,
    INTERPRET,
    Arch,
    Impl,
    arch_of,
    cdiv,
    check_tensor,
    next_power_of_2,
    register,
    use_triton,
)
from tridraft.kernels._pdl import pdl_options

FP8 = torch.float8_e4m3fn

MAX_HEAD_DIM = 512

SPLIT_QUERIES = 16
"""Requests with at most this many queries have their keys split over programs; others are prefill.

Up to here a key-value head's queries are one or two tiles of rows, so reading the keys is what takes the time.
"""


COMBINE_REQUESTS = 32
"""Requests that programs of the combine kernel take at the same time; each one more in turn costs 1.8 µs."""


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The definition, in float32, one request at a time (it reads the lengths on the host); see `paged_attention`."""
    out = torch.zeros_like(q)
    block_size, num_kv_heads = k_cache.shape[1:3]
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[request : request + 2]
        if begin == end or seq_len == 0:
            continue
        p = torch.arange(seq_len - (end - begin), seq_len, device=q.device)
        first = 0 if sliding_window is None else max(0, seq_len - (end - begin) - sliding_window + 1)
        j = torch.arange(first, seq_len, device=q.device)
        blocks = block_table[request, j // block_size].long()
        k, v = (cache[blocks, j % block_size].float() for cache in (k_cache, v_cache))
        if k_scale is not None:
            k = k * k_scale[:, None]
        if v_scale is not None:
            v = v * v_scale[:, None]
        queries = q[begin:end].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,jhd->hgqj", queries, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = j <= p[:, None]
        if sliding_window is not None:
            visible &= j > p[:, None] - sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)
        out[begin:end] = torch.einsum("hgqj,jhd->qhgd", weights, v).flatten(1, 2)
    return out


@dataclass(frozen=True)
class AttentionConfig:
    """Launch settings.

    Attributes:
        block_m: rows, one for each query and each query head of the key-value head.
        block_n: keys a step.
        num_warps: warps a program.
        num_stages: depth of the pipeline that loads keys and values.
        programs_per_sm: programs that the split kernel wants for each multiprocessor; 0 splits no request.
        block_v: columns of the output a program computes, of which `head_dim` may be less.
        loads_first: whether the loads of a tile come before the products of the one before; for two stages on Hopper.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    block_v: int = MAX_HEAD_DIM
    loads_first: bool = False


def shared_memory(config: AttentionConfig, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, arch: Arch) -> int:
    """Bytes of shared memory a program takes at most: its queries, its tiles of keys and values, its weights."""
    width = _width(head_dim)
    queries = config.block_m * width * dtype.itemsize
    pair = config.block_n * (width + min(config.block_v, width)) * kv_dtype.itemsize
    # Asynchronous products read tiles in place, so one more pair is in use. Without a pipeline K and V share a tile.
    asynchronous = _has_wgmma(arch) and config.block_m >= 64
    if asynchronous and kv_dtype != dtype:
        # The products read tiles converted on the way.
        tiles = (config.num_stages - 1) * pair + pair // kv_dtype.itemsize * dtype.itemsize
    elif asynchronous:
        tiles = config.num_stages * pair
    else:
        tiles = (config.num_stages - 1) * pair or config.block_n * width * kv_dtype.itemsize
    # Tensor cores get the weights through shared memory, unless each warp's rows are its own.
    in_registers = dtype == torch.float32 or (asynchronous and config.block_m >= 16 * config.num_warps)
    weights = 0 if in_registers else 2 * config.block_m * config.block_n
    # Entries of the block table come through shared memory too, 16 bytes for each block of 8 keys or more.
    entries = 2 * config.block_n if config.loads_first else 0
    return queries + tiles + weights + entries


def split_config(
    head_dim: int,
    group: int,
    queries: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    arch: Arch,
    programs: int = 1,
    windowed: bool = False,
) -> AttentionConfig:
    """Settings of the split kernel for `queries` queries a request and `group` query heads a key-value head.

    `programs` is the number of requests times key-value heads: how far unsplit requests would fill the GPU.
    """
    width = _width(head_dim)
    smallest = max(16, next_power_of_2(group))
    rungs = []
    if dtype != torch.float32:
        rows = max(queries * group, smallest)
        # Windows are short and of one length: once they fill the GPU, splitting them costs more than it evens out.
        if windowed and rows <= 16 and 4 * programs >= 3 * arch.num_sms:
            # One program a multiprocessor needs the larger tile in flight; several need it less than the room.
            rungs.append(AttentionConfig(16, *((64, 4, 3, 0) if programs <= arch.num_sms else (32, 4, 4, 0))))
        if windowed and rows <= 16 and width <= 256 and programs > 1:
            # Half of the partial results; a single window of one head has too few keys for that.
            rungs.append(AttentionConfig(16, 64, 4, 3, 1))
        if rows <= 16 and width > 256 and kv_dtype.itemsize == 1:
            # Half of the bytes, and time that goes into conversion: two programs overlap it.
            rungs.append(AttentionConfig(16, 32, 4, 3, 2))
        elif rows <= 16:
            # Memory bound: what counts is keys in flight. More keys than rows a step, or Triton gives all warps the
            # same rows. At head 512 a second program a multiprocessor costs more partial results than it hides.
            rungs += [AttentionConfig(16, 32, 4, *rest) for rest in ([(3, 1)] if width > 256 else [(4, 2), (3, 1)])]
        elif width > 256 and rows <= 32 and smallest == 16:
            # Reading the keys twice, the second time from the L2 cache, beats sums that are half padding.
            rungs.append(AttentionConfig(16, 32, 4, 2, 2))
        elif width > 256 and _has_async_products(arch):
            # 64 rows let the products run asynchronously. Triton repeats the scores in every four warps, so four it is,
            # which hold half of 512 columns; the columns' programs share the keys in the L2 cache.
            rungs += [AttentionConfig(64, 32, 4, stages, 1, 256) for stages in (3, 2)]
        elif _has_async_products(arch):
            rungs += [AttentionConfig(64, 32, 4, 3)]
        elif width <= 256 and smallest <= 32:
            rungs += [AttentionConfig(32, 64, 4, stages) for stages in (3, 2)]
        rungs += [AttentionConfig(smallest, 32, 4, stages) for stages in (2, 1)]
    # Products of float32 use no tensor cores, hold their operands in registers, and are there for tests.
    rungs.append(AttentionConfig(smallest, 16, 4, 1))
    return _first_that_fits(rungs, head_dim, group, dtype, kv_dtype, arch)


def combine_config(parts: int, rows: int, requests: int, head_dim: int) -> tuple[int, int, int]:
    """Parts and columns a step and warps of the combine kernel for `requests` requests of `parts` parts of `rows` rows.

    One warp needs no barriers, and has its addresses before the parts are there if all programs fit the GPU at once.
    """
    if INTERPRET:
        return 64, MAX_HEAD_DIM, 4
    if parts > 100 and rows <= 16:
        # One request over the whole GPU: all its parts in one step, and many programs of few columns.
        return 256, 16, 4
    if parts > 16:
        return (64, 64, 4) if rows <= 16 else (64, 32, 1)
    if parts > 8:
        return 16, 32, 1
    # 16,384 programs of 64 columns (8 queries of 8 heads, 32 requests) take 20 µs where 2,048 of 512 take 5.
    one_wave = rows * requests * cdiv(head_dim, 128) <= 4096
    return (4, 128 if one_wave else 512, 1) if parts <= 4 else (8, 128 if one_wave else 256, 1)


def prefill_config(
    head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype, arch: Arch, rows: int = 2**20
) -> AttentionConfig:
    """Settings of the prefill kernel for `group` query heads a key-value head and `rows` rows in all."""
    width = _width(head_dim)
    smallest = max(16, next_power_of_2(group))
    rungs = []
    # Two stages leave a tile's loads no time beside the products unless they come first: 250 → 304 TFLOP/s at head 512.
    # Other matrix instructions are pipelined in other ways, and float8 is converted between load and product.
    first = _has_wgmma(arch) and kv_dtype == dtype and head_dim == width
    if dtype != torch.float32:
        if width > 256 and _has_async_products(arch):
            # Every four warps have 64 rows of their own, so that none repeats another's scores, and their sums fit the
            # registers for half of the columns: the scores are computed twice, which costs less than 64 rows.
            rungs += [AttentionConfig(128, 32, 8, 2, block_v=256, loads_first=first), AttentionConfig(64, 32, 8, 2)]
        elif width <= 256:
            # The more rows share a tile of keys, the less of it the L2 cache has to deliver, if they fill the GPU.
            if rows > 128 * arch.num_sms:
                if width > 128:
                    rungs.append(AttentionConfig(128, 64, 8, 2, loads_first=first))
                else:
                    rungs += [AttentionConfig(128, 64, 8, stages) for stages in (3, 2)]
            rungs += [AttentionConfig(64, 64, 4, 2), AttentionConfig(64, 32, 4, 2)]
        rungs += [AttentionConfig(smallest, 32, 4, stages) for stages in (2, 1)]
    rungs.append(AttentionConfig(smallest, 16, 4, 1))
    return _first_that_fits(rungs, head_dim, group, dtype, kv_dtype, arch)


def _width(head_dim: int) -> int:
    """Columns of a tile: Triton's blocks are powers of two, and products need 16 at least."""
    return max(next_power_of_2(head_dim), 16)


def _has_wgmma(arch: Arch) -> bool:
    return arch.backend == "cuda" and arch.capability == 90


def _has_async_products(arch: Arch) -> bool:
    """Hopper and data center Blackwell; not sm_120, which has Ampere's matrix instructions."""
    return arch.backend == "cuda" and arch.capability in (90, 100, 103)


def _first_that_fits(
    rungs: list[AttentionConfig], head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype, arch: Arch
) -> AttentionConfig:
    for config in rungs:
        if config.block_m >= group and shared_memory(config, head_dim, dtype, kv_dtype, arch) <= arch.shared_memory:
            return config
    raise ValueError(
        f"q: {group} heads of {head_dim} in {dtype} a key-value head do not fit the {arch.shared_memory} B of shared "
        "memory of this GPU"
    )


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    max_query_len: int,
    sliding_window: int | None,
    softcap: float | None,
    metadata_ready: bool,
    out: Tensor,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads = k_cache.shape[:3]
    num_requests = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    if num_tokens == 0 or num_requests == 0:
        return
    arch = arch_of(q.device)
    kv_dtype = k_cache.dtype
    if kv_dtype == FP8:
        k_cache, v_cache = _loadable(k_cache, v_cache, q.dtype, arch)
    inputs: dict[str, Any] = {
        "out_ptr": out,
        "q_ptr": q,
        "k_ptr": k_cache,
        "v_ptr": v_cache,
        "table_ptr": block_table,
        "query_start_loc_ptr": query_start_loc,
        "seq_lens_ptr": seq_lens,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "num_requests": num_requests,
        "num_blocks": num_blocks,
        "stride_ot": out.stride(0),
        "stride_oh": out.stride(1),
        "stride_qt": q.stride(0),
        "stride_qh": q.stride(1),
        "stride_kb": k_cache.stride(0),
        "stride_ks": k_cache.stride(1),
        "stride_kh": k_cache.stride(2),
        "stride_vb": v_cache.stride(0),
        "stride_vs": v_cache.stride(1),
        "stride_vh": v_cache.stride(2),
        "stride_tr": block_table.stride(0),
        "scale": scale,
        "softcap": softcap,
        "window": sliding_window,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "K_SCALES": 1 if k_scale is None else k_scale.shape[0],
        "V_SCALES": 1 if v_scale is None else v_scale.shape[0],
        "BLOCK_D": _width(head_dim),
    }
    _launch_split(inputs, min(max_query_len, SPLIT_QUERIES), num_kv_heads, kv_dtype, metadata_ready, arch)
    if max_query_len > SPLIT_QUERIES:
        config = prefill_config(head_dim, group, q.dtype, kv_dtype, arch, num_tokens * num_heads)
        block_q = config.block_m // group
        block_v = min(config.block_v, _width(head_dim))
        launch: Any = prefill_kernel[(num_kv_heads * cdiv(head_dim, block_v), num_tokens // block_q + num_requests)]
        launch(
            **inputs,
            min_queries=SPLIT_QUERIES + 1,
            BLOCK_M=config.block_m,
            BLOCK_Q=block_q,
            BLOCK_N=config.block_n,
            BLOCK_V=block_v,
            LOADS_FIRST=config.loads_first,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


def _loadable(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype, arch: Arch) -> tuple[Tensor, Tensor]:
    """float8 caches as the kernels load them: in pairs of columns, as bytes where Triton has no such type, or as is."""
    places = [place for cache in (k_cache, v_cache) for place in (cache.storage_offset(), *cache.stride()[:-1])]
    # A product takes at least 16 columns, and pairs make two of half a head each.
    even = k_cache.shape[-1] >= 32 and k_cache.shape[-1] % 2 == 0 and all(place % 2 == 0 for place in places)
    if even and arch.backend == "cuda" and dtype != torch.float32 and not INTERPRET:
        return k_cache.view(torch.int16), v_cache.view(torch.int16)
    if INTERPRET or (arch.backend == "cuda" and arch.capability < 89):
        return k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    return k_cache, v_cache


def _launch_split(
    inputs: dict[str, Any],
    max_queries: int,
    num_kv_heads: int,
    kv_dtype: torch.dtype,
    metadata_ready: bool,
    arch: Arch,
) -> None:
    """Launch the split kernel for the requests with at most `max_queries` queries, and what merges the parts."""
    q, out, seq_lens = (inputs[name] for name in ("q_ptr", "out_ptr", "seq_lens_ptr"))
    num_requests, group, head_dim = inputs["num_requests"], inputs["GROUP"], inputs["HEAD_DIM"]
    config = split_config(
        head_dim,
        group,
        max_queries,
        q.dtype,
        kv_dtype,
        arch,
        num_requests * num_kv_heads,
        inputs["window"] is not None,
    )
    block_q = min(config.block_m // group, max_queries)
    lanes = num_kv_heads * cdiv(max_queries, block_q)
    rows = lanes * block_q * group
    block_v = min(config.block_v, _width(head_dim))
    columns = cdiv(head_dim, block_v)
    budget = max(arch.num_sms * config.programs_per_sm // (lanes * columns), 1)
    if num_requests == 1 and rows > 16 and budget > 64 and budget % 64 < budget // 16:
        # A few parts beyond whole steps of the combine kernel would cost it another one: 18.1 against 15.7 µs.
        budget -= budget % 64
    partial = torch.empty(budget * rows, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(budget * rows, dtype=torch.float32, device=q.device)
    pdl = pdl_options(arch)
    # Every request has a part of its own beside its share of the budget, which is rounded down.
    launch: Any = split_kernel[(lanes * columns, budget + num_requests - 1)]
    launch(
        **inputs,
        partial_ptr=partial,
        lse_ptr=lse,
        num_kv_heads=num_kv_heads,
        max_queries=max_queries,
        budget=budget,
        BLOCK_M=config.block_m,
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        BLOCK_V=block_v,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # One request at 8k 12.3 → 11.6, 128 unsplit windows 21.2 → 20.1; 32 split windows 10.9 → 11.4.
        EARLY=metadata_ready and (num_requests == 1 or budget == 1) and pdl["PDL"] > 0,
        **pdl,
    )
    if budget < 2:
        return
    parts = budget // num_requests
    if inputs["window"] is not None:
        parts = min(parts, cdiv(inputs["window"] + max_queries - 1, config.block_n))
    requests = min(num_requests, budget // 2, COMBINE_REQUESTS)
    block_s, block_d, num_warps = combine_config(parts, rows, requests, head_dim)
    block_d = min(_width(head_dim), block_d)
    launch = combine_kernel[(rows, cdiv(head_dim, block_d), requests)]
    launch(
        out,
        partial,
        lse,
        inputs["query_start_loc_ptr"],
        seq_lens,
        num_requests,
        num_kv_heads,
        max_queries,
        budget,
        out.stride(0),
        out.stride(1),
        inputs["window"],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=inputs["BLOCK_SIZE"],
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        BLOCK_D=block_d,
        BLOCK_S=block_s,
        num_warps=num_warps,
        **pdl_options(arch, early=True),
    )


@register("paged_attention", mutates=("out",))
def _paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    max_query_len: int,
    sliding_window: int | None,
    softcap: float | None,
    metadata_ready: bool,
    out: Tensor,
    triton: bool,
) -> None:
    if triton:
        _launch(
            q,
            k_cache,
            v_cache,
            block_table,
            query_start_loc,
            seq_lens,
            k_scale,
            v_scale,
            scale,
            max_query_len,
            sliding_window,
            softcap,
            metadata_ready,
            out,
        )
    else:
        out.copy_(
            paged_attention_reference(
                q,
                k_cache,
                v_cache,
                block_table,
                query_start_loc,
                seq_lens,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
                k_scale=k_scale,
                v_scale=v_scale,
            )
        )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_query_len: int,
    sliding_window: int | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    metadata_ready: bool = False,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention of the last tokens of every request over the request's keys and values in a paged cache.

    Args:
        q: queries of all requests one after the other, `[T, Hq, D]`.
        k_cache: keys `[num_blocks, block_size, Hkv, D]` in `q`'s dtype or float8_e4m3fn, `Hq` a multiple of `Hkv`; any
            strides, so a view of a packed or a head-major cache will do, and a token pool is `block_size` 1. A stored
            float8 NaN may count as ±480.
        v_cache: values, like `k_cache`.
        block_table: block of each `block_size` keys of a request, `[R, M]` int32.
        query_start_loc: row of `q` where each request begins, then the end of the last, `[R + 1]` int32.
        seq_lens: keys of each request, those of its queries included, `[R]` int32.
        scale: factor of the scores.
        max_query_len: no request has more queries; known on the host.
        sliding_window: keys a query sees, itself included; `None` for all.
        softcap: bound of the scores; `None` for none.
        k_scale: float32 factor of the stored keys, `[1]` or `[Hkv]`.
        v_scale: float32 factor of the stored values, `[1]` or `[Hkv]`.
        metadata_ready: whether the operation right before this one leaves `block_table`, `query_start_loc` and
            `seq_lens` alone, as one does that makes `q` and writes its keys: then they are read while that one ends.
            Not for `torch.compile`, which may put others before this one.
        out: where to write, like `q`; allocated when `None`.
        impl: "triton", "eager", or "auto" for the kernel where it can run.

    Returns:
        `out`. A query that sees no key gives zeros; a row of `q` that no request owns is not written.

    Raises:
        ValueError: a shape, stride, device or setting that does not fit; the message names the argument.
        TypeError: a dtype that is not taken.

    A request without queries (padding repeats the last `query_start_loc`) costs nothing. Results are the same from
    run to run, but where the keys are split for long contexts, and so the rounding, depends on the batch.

    >>> q = torch.ones(1, 1, 16)
    >>> k_cache, v_cache = torch.zeros(3, 2, 1, 16), torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 2, 1, 16)
    >>> block_table = torch.tensor([[2, 1]], dtype=torch.int32)  # keys 0 and 1 in block 2, key 2 in block 1
    >>> query_start_loc, seq_lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> out = paged_attention(
    ...     q, k_cache, v_cache, block_table, query_start_loc, seq_lens, scale=1.0, max_query_len=1, sliding_window=2
    ... )
    >>> out[0, 0, 0].item()  # keys 1 and 2, with equal weights
    1.5
    """
    launch = use_triton(impl, q)
    check_tensor("q", q, shape=("T", "Hq", "D"), dtype=FLOATS)
    num_heads, head_dim = q.shape[1:]
    check_tensor(
        "k_cache",
        k_cache,
        shape=("num_blocks", "block_size", "Hkv", head_dim),
        dtype=(q.dtype, FP8),
        device=q.device,
    )
    check_tensor("v_cache", v_cache, shape=tuple(k_cache.shape), dtype=k_cache.dtype, device=q.device)
    num_kv_heads = k_cache.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"q: got {num_heads} heads, needs a multiple of the cache's {num_kv_heads}")
    check_tensor("block_table", block_table, shape=("R", "M"), dtype=torch.int32, device=q.device)
    num_requests = block_table.shape[0]
    check_tensor("query_start_loc", query_start_loc, shape=(num_requests + 1,), dtype=torch.int32, device=q.device)
    check_tensor("seq_lens", seq_lens, shape=(num_requests,), dtype=torch.int32, device=q.device)
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None:
            size = 1 if factor.numel() == 1 else num_kv_heads
            check_tensor(name, factor, shape=(size,), dtype=torch.float32, device=q.device)
    for name, value in (
        ("max_query_len", max_query_len),
        ("sliding_window", sliding_window),
        ("softcap", softcap),
    ):
        if value is not None and value <= 0:
            raise ValueError(f"{name}: got {value}, needs a positive number")
    if out is None:
        out = q.new_empty(q.shape)
    else:
        check_tensor("out", out, shape=tuple(q.shape), dtype=q.dtype, device=q.device)
    _paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        query_start_loc,
        seq_lens,
        k_scale,
        v_scale,
        scale,
        max_query_len,
        sliding_window,
        softcap,
        metadata_ready,
        out,
        launch,
    )
    return out
