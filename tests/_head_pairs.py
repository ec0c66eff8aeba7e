"""Tiny targets with EAGLE, EAGLE-3 and MTP heads, and what has to be drafted after whole sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _head_references import EagleReference, MTPReference
from _tiny_heads import eagle3_checkpoint, eagle_checkpoint, mtp_checkpoint, tiny_target, write_checkpoint
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.base import BaseSpeculator
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.decoder import SpeculativeDecoder
from tridraft.speculator.factory import init_speculator
from tridraft.speculator.kv_cache import KVCache
from tridraft.speculator.request import Request

STEPS, NEW = 3, 14
MAKERS: dict[str, Callable[..., Any]] = {"eagle": eagle_checkpoint, "eagle3": eagle3_checkpoint, "mtp": mtp_checkpoint}
PROMPTS = [
    torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (5, 11, 23)
]


@dataclass
class Pair:
    """A tiny target with a head: as ours, and as the modules of `transformers` they have to agree with."""

    method: str
    directory: Path
    target: HFTarget
    reference: Any
    head: Any
    tensors: dict[str, Tensor]
    aux_layers: tuple[int, ...]

    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=self.target.device)
        return self.reference.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, len(prompt) :].tolist()

    @torch.no_grad()
    def drafts(self, sequence: Sequence[int], steps: int, embeds: Tensor | None = None) -> list[int]:
        """What the head drafts after x_0 … x_P, from whole sequences and no cache.

        `embeds` [P + 1, H] stands for what the target saw instead of embeddings of ids.
        """
        ids = torch.tensor(sequence, device=self.target.device)
        table: Tensor = self.reference.get_input_embeddings().weight
        seen = table[ids] if embeds is None else embeds
        states = self.reference(inputs_embeds=seen[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
        if self.method == "eagle3":
            hidden = self.head.combine(torch.cat([states[layer][0] for layer in self.aux_layers], -1))
        else:
            hidden = states[-1][0]
        following, drafted = seen[1:], []
        own = self.tensors.get("lm_head.weight")
        weight = self.reference.get_output_embeddings().weight if own is None else own
        for _ in range(steps):
            head_hidden, feedback = self.head.whole(following, hidden)
            token = int((weight @ head_hidden[-1]).argmax())
            drafted.append(token + int(self.tensors["d2t"][token]) if "d2t" in self.tensors else token)
            following = torch.cat((following, table[drafted[-1:]]))
            hidden = torch.cat((hidden, feedback[-1:]))
        return drafted

    def speculator(self, steps: int = STEPS, **options: Any) -> Any:
        sizes = {"max_num_reqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64, **options}
        speculator = init_speculator(
            SpeculatorConfig(self.method, self.directory, num_speculative_tokens=steps, **sizes)  # type: ignore[arg-type]
        )
        speculator.load_model(self.target)
        return speculator


def make_pair(method: str, directory: Path, device: torch.device) -> Pair:
    """A target and a head of the method, random both."""
    ours, theirs = tiny_target(device=device), tiny_target(device=device)
    config, tensors = MAKERS[method](theirs.config)
    write_checkpoint(directory, config, tensors)
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    head = MTPReference("deepseek_v3", config, tensors) if method == "mtp" else EagleReference(config, tensors)
    depth = theirs.config.num_hidden_layers
    aux = (2, depth // 2, depth - 3) if method == "eagle3" else ()
    return Pair(method, directory, HFTarget(ours), theirs, head.to(device), moved, aux)


class Directed(BaseSpeculator):
    """Keeps what another speculator drafts in each round, and hands out drafts of which the wanted number is right."""

    def __init__(self, inner: Any, sequences: Sequence[Sequence[int]], accept: Callable[[int], int]) -> None:
        self.inner, self.sequences, self.accept = inner, sequences, accept
        self.num_speculative_tokens, self.aux_layers = inner.num_speculative_tokens, inner.aux_layers
        self.kv_specs = inner.kv_specs
        self.rounds: list[tuple[list[int], list[int]]] = []

    def load_model(self, target: Any) -> None:
        self.inner.load_model(target)

    def set_kv_cache(self, kv: KVCache) -> None:
        self.inner.set_kv_cache(kv)

    def capture(self) -> None:
        self.inner.capture()

    def propose(
        self, batch: InputBatch, verify: VerifyResult, sampling: SamplingState, hidden: Tensor, **options: Any
    ) -> Tensor:
        drafted = self.inner.propose(batch, verify, sampling, hidden, **options).tolist()
        out = []
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            length = int(batch.seq_lens[row] - verify.num_rejected[row])
            self.rounds.append((list(self.sequences[slot][: length + 1]), drafted[row]))
            following = [*self.sequences[slot][length + 1 :], *[0] * STEPS][: self.num_speculative_tokens]
            right = self.accept(length)
            out.append([token if step < right else (token + 1) % 128 for step, token in enumerate(following)])
        return torch.tensor(out, device=hidden.device)


def decode(pair: Pair, accept: Callable[[int], int] | None, prompts=PROMPTS, steps=STEPS, drafting=None, **options):
    """Greedy completions of the prompts, checked, and the rounds of the drafter under `Directed` (`accept` given)."""
    sizes = {"max_num_reqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64, **options}
    inner = pair.speculator(steps, **sizes, **(drafting or {}))
    outputs = [pair.greedy(ids, NEW + steps) for ids in prompts]
    speculator = inner
    if accept is not None:
        speculator = Directed(inner, [[*a, *b] for a, b in zip(prompts, outputs, strict=True)], accept)
    decoder = SpeculativeDecoder(pair.target, speculator, block_size=4, **sizes)
    completions = decoder.generate([Request(ids, NEW) for ids in prompts])
    assert [one.output_ids for one in completions] == [output[:NEW] for output in outputs]
    return completions, speculator


def one_pass(pair: Pair, speculator: Any, sequences: Sequence[Sequence[int]], *, rejected=None, block_size=16):
    """The pass over each sequence but its last token, that one sampled, and `rejected` wrong drafts behind it."""
    rejected = rejected or [0] * len(sequences)
    length, slots = speculator.config.max_model_len, range(len(sequences))
    kv = KVCache(
        [*pair.target.kv_specs, *speculator.kv_specs],
        num_blocks=4 * length // block_size,
        block_size=block_size,
        max_num_reqs=speculator.config.max_num_reqs,
        max_model_len=length,
        dtype=pair.target.dtype,
        device=pair.target.device,
    )
    speculator.set_kv_cache(kv)
    decoder = SpeculativeDecoder(
        pair.target, None, max_num_reqs=speculator.config.max_num_reqs, max_model_len=length, block_size=block_size
    )
    decoder.kv = kv
    ids, positions, starts = [], [], [0]
    for slot, (sequence, wrong) in enumerate(zip(sequences, rejected, strict=True)):
        computed = [*sequence[:-1], *[1] * wrong]
        ids, positions = ids + computed, positions + list(range(len(computed)))
        starts.append(len(ids))
        kv.reserve(slot, min(len(computed) + STEPS + 1, length))

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=pair.target.device)

    lengths = [len(sequence) - 1 + wrong for sequence, wrong in zip(sequences, rejected, strict=True)]
    batch = InputBatch(
        input_ids=ints(ids, torch.int64),
        positions=ints(positions, torch.int64),
        query_start_loc=ints(starts),
        seq_lens=ints(lengths),
        idx_mapping=ints(list(slots)),
        num_reqs=len(sequences),
        num_tokens=len(ids),
        max_query_len=max(lengths),
    )
    last = torch.zeros(speculator.config.max_num_reqs, dtype=torch.int64, device=pair.target.device)
    last[: len(sequences)] = ints([sequence[-1] for sequence in sequences], torch.int64)
    verify = VerifyResult(ints([1] * len(sequences)), ints(rejected), last, torch.zeros_like(last))
    zeros = torch.zeros(speculator.config.max_num_reqs, device=pair.target.device)
    rows = torch.arange(len(ids), device=pair.target.device)
    tables = kv.block_tables(batch.idx_mapping)
    attention = AttentionBatch(
        batch.query_start_loc,
        batch.seq_lens,
        tables,
        tuple(decoder._slot_mapping(batch, table) for table in tables),
        batch.max_query_len,
    )
    output = pair.target.forward(
        batch.input_ids, batch.positions, kv.layers, attention, rows, aux_layers=speculator.aux_layers
    )
    hidden = output.hidden if output.aux_hidden is None else torch.cat(output.aux_hidden, -1)
    return kv, (batch, verify, SamplingState(zeros, zeros.long()), hidden)


def own_caches(kv: KVCache, speculator: Any) -> list[Tensor]:
    """Copies of the drafter's keys and values."""
    return [cache.clone() for layer in speculator.layers for cache in (layer.k_cache, layer.v_cache)]
