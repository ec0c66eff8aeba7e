"""Random passes of a target that is not there: what `propose` takes, over a cache full of random keys."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from _tiny_gemma4 import FULL, SLIDING, assistant_config, random_tensors
from tridraft.models.gemma4_mtp import Gemma4MTP, Gemma4MTPConfig
from tridraft.models.paged import KVSpec
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.factory import init_speculator
from tridraft.speculator.kv_cache import KVCache


@dataclass(frozen=True)
class FakeTarget:
    """What a Gemma 4 drafter shares with its target: an embedding, and a layer of each kind."""

    embed_weight: Tensor
    kv_specs: tuple[KVSpec, ...]
    layer_types: tuple[str, ...] = (SLIDING, FULL)
    kv_index: tuple[int, ...] = (0, 1)
    embed_scale: float = 2.0

    @property
    def vocab_size(self) -> int:
        return self.embed_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device


@dataclass(frozen=True)
class Pass:
    """The arguments of `propose`."""

    batch: InputBatch
    verify: VerifyResult
    sampling: SamplingState
    hidden: Tensor

    def propose(self, speculator: Any, **options: Any) -> list[list[int]]:
        return speculator.propose(self.batch, self.verify, self.sampling, self.hidden, **options).tolist()

    def padded(self, rows: int) -> "Pass":
        """The same pass with padding behind its requests, so that it has `rows` of them."""
        more = rows - self.batch.num_reqs

        def pad(tensor: Tensor, value: Any) -> Tensor:
            return torch.cat((tensor, tensor.new_full((more,), value)))

        batch = replace(
            self.batch,
            query_start_loc=pad(self.batch.query_start_loc, self.batch.num_tokens),
            seq_lens=pad(self.batch.seq_lens, 0),
            idx_mapping=pad(self.batch.idx_mapping, -1),
            num_reqs=rows,
        )
        counts = {name: pad(getattr(self.verify, name), 0) for name in ("num_sampled", "num_rejected")}
        return replace(self, batch=batch, verify=replace(self.verify, **counts))

    def tensors(self) -> list[Tensor]:
        """Everything on the device that the caller owns."""
        parts = (self.batch, self.verify, self.sampling)
        values = [getattr(part, field.name) for part in parts for field in fields(part)]
        return [self.hidden, *(value for value in values if isinstance(value, Tensor))]


class Rig:
    """A random Gemma 4 assistant with a cache; every slot has blocks for `max_model_len` tokens.

    Args:
        variant: of `_tiny_gemma4.VARIANTS`.
        device: where it lives.
        dtype: of weights and cache.
        suppress_tokens: ids that are never drafted.
        sizes: `max_num_reqs`, `max_model_len` and `block_size`.
    """

    def __init__(
        self,
        variant: str,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        suppress_tokens: list[int] | None = None,
        **sizes: int,
    ) -> None:
        self.sizes = {"max_num_reqs": 9, "max_model_len": 64, "block_size": 4, **sizes}
        config = assistant_config(variant)
        generation_config = {"suppress_tokens": suppress_tokens}
        self.model = Gemma4MTP(Gemma4MTPConfig.from_dict(config), generation_config, dtype=dtype, device=device)
        self.model.load_weights(random_tensors(config, dtype))
        generator = torch.Generator().manual_seed(7)
        embedding = torch.randn(self.model.vocab_size, self.model.backbone_hidden_size, generator=generator)
        specs = dict(zip(self.model.layer_types, self.model.kv_specs, strict=True))
        self.target = FakeTarget(embedding.to(device, dtype), (specs[SLIDING], specs[FULL]))
        self.kv = self.cache()

    def cache(self) -> KVCache:
        reqs, length, block = (self.sizes[name] for name in ("max_num_reqs", "max_model_len", "block_size"))
        kv = KVCache(
            self.target.kv_specs,
            num_blocks=reqs * -(-length // block),
            block_size=block,
            max_num_reqs=reqs,
            max_model_len=length,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        generator = torch.Generator().manual_seed(8)
        for layer in kv.layers:
            for cache in (layer.k_cache, layer.v_cache):
                cache.copy_(torch.randn(cache.shape, generator=generator))
        for slot in range(reqs):
            kv.reserve(slot, length)
        return kv

    def speculator(self, steps: int = 4, **options: Any) -> Any:
        sizes = {name: self.sizes[name] for name in ("max_num_reqs", "max_model_len")}
        speculator: Any = init_speculator(SpeculatorConfig("gemma4_mtp", self.model, steps, **{**sizes, **options}))
        speculator.load_model(self.target)
        speculator.set_kv_cache(self.kv)
        return speculator

    def random_pass(
        self,
        lengths: Sequence[int],
        queries: Sequence[int] | None = None,
        rejected: Sequence[int] | None = None,
        *,
        seed: int = 0,
        temperatures: Sequence[float] = (0.0,),
    ) -> Pass:
        """A pass after which the requests have `lengths` keys, `rejected` of them of rejected tokens.

        Args:
            lengths: keys of each request.
            queries: tokens of each request in the pass, more than it rejects; default 1.
            rejected: default 0.
            seed: of tokens, hidden states and slots.
            temperatures: of the slots, in turn.
        """
        rows, device, generator = len(lengths), self.target.device, torch.Generator().manual_seed(seed)
        queries, rejected = queries or [1] * rows, rejected or [0] * rows
        starts = [0, *accumulate(queries)]
        slots = self.sizes["max_num_reqs"]

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.as_tensor(values).to(device, dtype)

        def tokens(count: int) -> Tensor:
            return ints(torch.randint(0, self.target.vocab_size, (count,), generator=generator), torch.int64)

        pairs = zip(lengths, queries, strict=True)
        positions = [position for length, count in pairs for position in range(length - count, length)]
        batch = InputBatch(
            input_ids=tokens(starts[-1]),
            positions=ints(positions, torch.int64),
            query_start_loc=ints(starts),
            seq_lens=ints(lengths),
            idx_mapping=ints(torch.randperm(slots, generator=generator)[:rows]),
            num_reqs=rows,
            num_tokens=starts[-1],
            max_query_len=max(queries),
        )
        verify = VerifyResult(
            num_sampled=ints([int(row % 3 != 2) for row in range(rows)]),
            num_rejected=ints(rejected),
            last_sampled=tokens(slots),
            next_prefill_tokens=tokens(slots),
        )
        turns = -(-slots // len(temperatures))
        temperature = torch.tensor(list(temperatures) * turns, device=device)[:slots]
        hidden = torch.randn(starts[-1], self.target.hidden_size, generator=generator)
        sampling = SamplingState(temperature, ints(range(slots), torch.int64))
        return Pass(batch, verify, sampling, hidden.to(device, self.target.dtype))


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever would wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def overwrite(tensors: Sequence[Tensor]) -> None:
    """Fill with NaN, or with the largest integer."""
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def poison_free_memory() -> int:
    """Fill every block that the allocator could hand out with NaN; returns how many bytes."""
    free = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    held = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sorted(free, reverse=True)]
    return sum(one.nbytes for one in held)
