"""Runs of a draft head over a paged cache, and the full recompute they are compared with."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from _compare import assert_close_to_float64
from _paged_cache import PagedCache
from _tiny_gemma4 import worst_of

STEPS = 4
LENGTHS = (1, 3, 9, 30)


def dtypes(device: torch.device) -> list[torch.dtype]:
    """What a model is tested in: also 16 bits on a GPU."""
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


@dataclass(frozen=True)
class FakeTarget:
    """What a head is shared with, without a model behind it."""

    embed_weight: Tensor
    lm_head_weight: Tensor
    embed_scale: float = 1.0
    suppress_ids: Tensor | None = None
    layer_types: tuple[str, ...] = ("full_attention",) * 8

    @property
    def vocab_size(self) -> int:
        return len(self.embed_weight)

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]


def fake_target(head: Any, **options: Any) -> FakeTarget:
    """A random target that fits the head."""
    generator = torch.Generator().manual_seed(3)
    weight = head.layers[0].self_attn.o_proj.weight if hasattr(head, "layers") else head.chain[0].eh_proj.weight
    shape = (head.vocab_size, head.target_hidden_size)
    embed, lm_head = (torch.randn(shape, generator=generator).to(weight) * 0.3 for _ in range(2))
    return FakeTarget(embed, lm_head, **options)


@dataclass(frozen=True)
class Row:
    """One request: embeddings [P, H] and hidden states [P, H] of the target's rows, then of K − 1 drafted tokens."""

    embeds: Tensor
    hidden: Tensor
    follow: Tensor


def random_rows(width: int, dtype: torch.dtype, device: torch.device, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Requests of ragged lengths; `follow` is given to the steps after the first."""
    generator = torch.Generator().manual_seed(17)

    def rows(count: int) -> Tensor:
        return torch.randn(count, width, generator=generator).to(device, dtype)

    return [Row(rows(length), rows(length), rows(STEPS - 1)) for length in lengths]


@dataclass(frozen=True)
class Run:
    """What the head and the recurrence see at every row, all requests and then all rows of one, each [N, H]."""

    head_hidden: Tensor
    feedback: Tensor


def pair(result: Any) -> tuple[Tensor, Tensor]:
    """What the head reads and what is fed back, from a model that returns both or one."""
    return result if isinstance(result, tuple) else (result, result)


def run_paged(head: Any, rows: Sequence[Row], *, chunks: int = 2) -> Run:
    """The target's rows in ragged chunks, then K − 1 single steps, over shuffled blocks."""
    device, dtype = rows[0].embeds.device, rows[0].embeds.dtype
    lengths = [len(row.embeds) for row in rows]
    cache = PagedCache(head.kv_specs, len(rows), max(lengths) + STEPS, dtype=dtype, device=device)
    outputs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in rows]
    done = [0] * len(rows)

    def forward(embeds: list[Tensor], hidden: list[Tensor], step: int) -> None:
        counts = [len(one) for one in embeds]
        batch, positions = cache.batch(done, counts)
        result = pair(head(torch.cat(embeds), positions, torch.cat(hidden), cache.layers, batch, step=step))
        for index, pieces in enumerate(zip(*(one.split(counts) for one in result), strict=True)):
            outputs[index].append(pieces)
            done[index] += counts[index]

    for chunk in range(chunks):
        ends = [length * (chunk + 1) // chunks for length in lengths]
        parts = [slice(start, end) for start, end in zip(done, ends, strict=True)]
        cut = list(zip(rows, parts, strict=True))
        forward([row.embeds[part] for row, part in cut], [row.hidden[part] for row, part in cut], 0)
    for step in range(1, STEPS):
        last = [pieces[-1][1][-1:] for pieces in outputs]
        forward([row.follow[step - 1 : step] for row in rows], last, step)
    per_request = [[torch.cat(kind) for kind in zip(*pieces, strict=True)] for pieces in outputs]
    return Run(*(torch.cat(kind) for kind in zip(*per_request, strict=True)))


Recompute = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run_recomputed(whole: Recompute, rows: Sequence[Row]) -> Run:
    """The same from a function of one request's whole rows, run over all of them again for every step."""
    outputs = []
    for row in rows:
        hidden, embeds = row.hidden, row.embeds
        result = whole(embeds, hidden)
        for token in row.follow.split(1):
            hidden, embeds = torch.cat((hidden, result[1][-1:])), torch.cat((embeds, token))
            result = whole(embeds, hidden)
        outputs.append(result)
    return Run(*(torch.cat(kind) for kind in zip(*outputs, strict=True)))


def double(rows: Sequence[Row]) -> list[Row]:
    return [
        replace(row, **{name: getattr(row, name).double() for name in ("embeds", "hidden", "follow")}) for row in rows
    ]


def check_against_recompute(
    head: Any, modules: Any, whole: Callable[..., Any], rows: Sequence[Row], **how: Any
) -> None:
    """Every row of the paged run is as near to float64 as the reference's own modules are in the same dtype.

    Args:
        head: the head under test.
        modules: the reference's modules in the head's dtype, with an attention implementation to choose.
        whole: `whole(modules, embeds, hidden) -> (head_hidden, feedback)`, one request at a time.
        rows: the requests.
        how: options of `run_paged`.
    """
    ours = run_paged(head, rows, **how)
    exact_modules = copy.deepcopy(modules).double()
    exact = run_recomputed(lambda *args: whole(exact_modules, *args), double(rows))
    same = []
    for attention in ("sdpa", "eager"):
        set_attention(modules, attention)
        same.append(run_recomputed(lambda *args: whole(modules, *args), rows))
    for kind in ("head_hidden", "feedback"):
        results, true = [getattr(run, kind) for run in same], getattr(exact, kind)
        assert_close_to_float64(getattr(ours, kind), true, worst_of(results, true))


def set_attention(modules: torch.nn.Module, attention: str) -> None:
    for module in modules.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = attention


def causal(count: int, like: Tensor) -> Tensor:
    """The mask [1, 1, T, T] that `transformers` adds to scores."""
    return torch.full((count, count), torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device).triu(1)[
        None, None
    ]


def rotary(inv_freq: Tensor, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [1, T, 2n] of positions 0 … T − 1, in `like`'s dtype."""
    angles = torch.arange(count)[:, None].double() * inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)[None]
    return angles.cos().to(like), angles.sin().to(like)


def load(module: torch.nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Fill a module of `transformers` with the tensors under the prefix, and nothing else."""
    module.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})


def check_captured(head: Any, device: torch.device) -> None:
    """K steps recorded with no step before, replayed on other inputs, equal the eager loop."""
    head.share_with_target(fake_target(head))
    lengths, dtype = [5, 700, 33], head.embed_weight.dtype
    cache = PagedCache(head.kv_specs, len(lengths), 704, dtype=dtype, device=device)
    for layer in cache.layers:
        layer.k_cache.normal_()
        layer.v_cache.normal_()
    passes = [cache.batch([length + step for length in lengths], [1] * 3) for step in range(STEPS)]
    slots = torch.arange(3, device=device)
    temperature = torch.tensor([0.0, 0.7, 0.0], device=device)
    tokens = torch.tensor([3, 70, 99], device=device)
    hidden = torch.randn(3, head.hidden_size, device=device, dtype=dtype)
    drafts = torch.zeros(STEPS, 3, dtype=torch.int64, device=device)

    def propose() -> None:
        ids, state = tokens, hidden
        for step, (batch, positions) in enumerate(passes):
            seen, state = pair(head(head.embed(ids), positions, state, cache.layers, batch, step=step))
            ids = head.sample(seen, slots, temperature, slots, positions, out=drafts[step])

    torch.mm(hidden, hidden.t())  # cuBLAS makes its handle at a process's first product, which cannot be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        propose()
    tokens.copy_(torch.tensor([9, 8, 7], device=device))
    hidden.copy_(torch.randn_like(hidden))
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replayed = drafts.clone()
    propose()
    assert torch.equal(replayed, drafts)
    assert ((drafts >= 0) & (drafts < head.vocab_size)).all()
