"""Paged attention: decode, sliding windows, verification, float8 caches and prefill.

Keys and values lie in pages of 16 tokens in random order, behind a block table with room for 131,072 tokens a request,
which is all that the host knows when the graph is captured. PyTorch's SDPA gets dense keys and values, the window
already cut out: the gather is not counted. A layer, whose queries are made right before, passes `metadata_ready`;
"tridraft late" is what any other predecessor needs, the default.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from _harness import Benchmark, Case, Provider, compiled, main
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tridraft.kernels.attention import FP8, paged_attention, paged_attention_reference

PAGE = 16
MAX_SEQ_LEN = 131_072


def attention_case(
    heads: tuple[int, int],
    head_dim: int,
    batch: int,
    context: int,
    *,
    queries: int = 1,
    window: int | None = None,
    fp8: bool = False,
) -> Case:
    """`queries` tokens of each of `batch` requests over `context` keys."""
    num_heads, num_kv_heads = heads
    visible = context if window is None else min(context, window + queries - 1)
    scale = head_dim**-0.5
    prefill = queries > 16

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        # Only the pages of visible keys exist; the table repeats nothing and points nowhere else.
        first = (context - visible) // PAGE
        pages = -(-context // PAGE) - first
        shape = (batch * pages, PAGE, num_kv_heads, head_dim)
        k_cache, v_cache = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        if fp8:
            k_cache, v_cache = k_cache.to(FP8), v_cache.to(FP8)
        table = torch.full((batch, MAX_SEQ_LEN // PAGE), -1, dtype=torch.int32, device=device)
        order = torch.randperm(batch * pages, device=device).view(batch, pages)
        table[:, first : first + pages] = order.to(torch.int32)
        q = torch.randn(batch * queries, num_heads, head_dim, device=device, dtype=dtype)
        starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=device)
        seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        return q, k_cache, v_cache, table, starts, seq_lens

    def attention(metadata_ready: bool) -> Callable[..., Tensor]:
        return partial(
            paged_attention,
            scale=scale,
            max_query_len=queries,
            sliding_window=window,
            metadata_ready=metadata_ready,
        )

    def eager(*tensors: Tensor) -> Tensor:
        return paged_attention_reference(*tensors, scale=scale, sliding_window=window)

    def gather(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        keys = torch.arange(context - visible, context, device=q.device)
        blocks = table[:, keys // PAGE].long()
        k, v = (cache[blocks, keys % PAGE].to(q.dtype).transpose(1, 2).contiguous() for cache in (k_cache, v_cache))
        return q.unflatten(0, (batch, queries)).transpose(1, 2).contiguous(), k, v

    def to_rows(out: Tensor) -> Tensor:
        return out.transpose(1, 2).flatten(0, 1)

    def hidden(device: torch.device) -> Tensor | None:
        if queries == 1:
            return None
        p = torch.arange(visible - queries, visible, device=device)[:, None]
        j = torch.arange(visible, device=device)
        return (j <= p) & (j > p - (window or visible))

    def dense(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Prefill of whole prompts runs on the causal path, which needs no mask.
        causal = prefill and window is None and queries == context
        return *gather(q, k_cache, v_cache, table), None if causal else hidden(q.device)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None and queries > 1
        return to_rows(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, scale=scale, is_causal=causal, enable_gqa=num_heads != num_kv_heads
            )
        )

    providers: dict = {
        "tridraft": attention(True),
        "tridraft late": attention(False),
        "sdpa dense": Provider(sdpa, dense),
    }
    if prefill and head_dim <= 256:
        # At head 512 none of its settings fits an H200: "Required: 262144 Hardware limit: 232448" bytes.
        flex = compiled(flex_attention)

        def blocks(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, *_: Tensor) -> tuple:
            def visible_to(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
                p = i + visible - queries
                return (j <= p) & (j > p - (window or visible))

            mask = create_block_mask(visible_to, None, None, queries, visible, device=q.device.type)
            return *gather(q, k_cache, v_cache, table), mask

        def flexible(q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
            return to_rows(flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=num_heads != num_kv_heads))

        # Under the name of compiled providers, which the CPU check leaves out.
        providers["compile"] = Provider(flexible, blocks)

    seen = sum(min(context - queries + i + 1, window or context) for i in range(queries))
    kind = f"w{window} " if window else ""
    name = f"D{head_dim} {num_heads}/{num_kv_heads} {kind}B{batch} ctx{context} q{queries}{' fp8' if fp8 else ''}"
    element = 1 if fp8 else 2
    return Case(
        name=name,
        inputs=inputs,
        reference=eager,
        providers=providers,
        bytes=2 * batch * visible * num_kv_heads * head_dim * element,
        flops=4 * batch * num_heads * head_dim * seen if prefill else 0,
        anchor="sdpa dense",
        floor=not prefill,
    )


def cases() -> list[Case]:
    """Gemma 4's layers: full attention at head 512, windows at head 256."""
    full = [attention_case(heads, 512, 1, ctx) for heads in ((8, 1), (16, 1)) for ctx in (1024, 8192, 32768, 131_072)]
    full += [attention_case((8, 1), 512, batch, ctx) for batch, ctx in ((8, 8192), (32, 8192), (32, 32768))]
    full += [attention_case((32, 4), 512, 1, ctx) for ctx in (8192, 32768)]
    verify = [attention_case((8, 1), 512, batch, 8192, queries=8) for batch in (1, 8, 32)]
    windows = [attention_case((8, 1), 256, batch, 32768, window=512) for batch in (1, 32, 128)]
    windows += [attention_case((16, 8), 256, batch, 32768, window=1024) for batch in (1, 32)]
    fp8 = [attention_case((8, 1), 512, batch, ctx, fp8=True) for batch, ctx in ((32, 8192), (32, 32768), (8, 32768))]
    fp8 += [attention_case((8, 1), 512, 8, 32768)]
    prefill = [
        attention_case(heads, head_dim, 1, tokens, queries=tokens, window=window)
        for tokens in (2048, 8192)
        for heads, head_dim, window in (((8, 1), 512, None), ((8, 1), 256, None), ((8, 1), 256, 512))
    ]
    marked = {"D512 8/1 B1 ctx32768 q1", "D512 8/1 B32 ctx8192 q8", "D256 8/1 w512 B32 ctx32768 q1"}
    return [
        case if case.name not in marked else replace(case, headline=True)
        for case in full + verify + windows + fp8 + prefill
    ]


BENCHMARK = Benchmark("attention", cases, smoke=lambda: attention_case((4, 2), 32, 2, 70, queries=3, window=40))

if __name__ == "__main__":
    main(BENCHMARK)
