"""Tiny pairs, a drafter that follows a script, and what `transformers` generates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from _head_pairs import MAKERS, Pair, make_pair
from _tiny_gemma4 import VARIANTS, tiny_pair
from tridraft.models.hf_target import HFTarget
from tridraft.speculator.base import BaseSpeculator
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.decoder import SpeculativeDecoder
from tridraft.speculator.factory import init_speculator


@dataclass
class Tiny:
    """A tiny pair: as directories, as our target, and as the `transformers` models it has to agree with."""

    target_dir: Path
    assistant_dir: Path
    target: HFTarget
    reference: Any
    assistant: Any

    def greedy(self, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
        """What `transformers` generates after the prompt."""
        ids = torch.tensor([prompt], device=self.target.device)
        output = self.reference.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, **options)
        return output[0, len(prompt) :].tolist()

    def speculator(self, steps: int, **options: Any) -> Any:
        config = {"max_num_reqs": 8, "max_model_len": 128, **options}
        speculator = init_speculator(
            SpeculatorConfig("gemma4_mtp", self.assistant_dir, num_speculative_tokens=steps, **config)
        )
        speculator.load_model(self.target)
        return speculator

    def decoder(self, steps: int | None, **options: Any) -> SpeculativeDecoder:
        """A decoder with K = `steps` drafts from the assistant, or plain with None."""
        options = {"max_num_reqs": 4, "max_model_len": 128, "block_size": 4, **options}
        sizes = {name: options[name] for name in ("max_num_reqs", "max_model_len")}
        speculator = None if steps is None else self.speculator(steps, **sizes)
        return SpeculativeDecoder(self.target, speculator, **options)


@pytest.fixture(scope="session")
def tiny(device, tmp_path_factory) -> Callable[[str], Tiny]:
    """The tiny pair of a variant, made once."""
    made: dict[str, Tiny] = {}

    def make(variant: str) -> Tiny:
        if variant not in made:
            pair, other = tiny_pair(variant, device=device), tiny_pair(variant, device=device)
            for model in (pair.target, other.target):
                # The head is tied to the embedding. A smaller one lets the context decide what comes next; otherwise
                # the last token wins most often, and a text that repeats one token shows few faults.
                model.get_input_embeddings().weight.mul_(0.2)
            directories = pair.save(tmp_path_factory.mktemp(variant))
            target = HFTarget(other.target)  # changes how its model attends, so the reference is another copy
            made[variant] = Tiny(*directories, target, pair.target, pair.assistant)
        return made[variant]

    return make


@pytest.fixture(params=VARIANTS)
def variant(request) -> str:
    return request.param


class ScriptedSpeculator(BaseSpeculator):
    """Drafts what it is told: `accept(P)` right tokens after position P, then wrong ones.

    Args:
        sequences: by slot, the prompt and the continuation that plain decoding gives.
        steps: K.
        accept: how many drafts of a round are to be right.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], steps: int, accept: Callable[[int], int]) -> None:
        self.sequences = sequences
        self.num_speculative_tokens = steps
        self.accept = accept

    def load_model(self, target: Any) -> None:
        raise AssertionError("a script has no model")

    def set_kv_cache(self, kv: Any) -> None:
        pass

    def propose(
        self, batch: InputBatch, verify: VerifyResult, sampling: SamplingState, hidden: Tensor, **_: Any
    ) -> Tensor:
        steps, drafts = self.num_speculative_tokens, []
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            length = int(batch.seq_lens[row] - verify.num_rejected[row])
            following = [*self.sequences[slot][length + 1 :], *[0] * steps][:steps]
            right = self.accept(length)
            drafts.append([token if step < right else token + 1 for step, token in enumerate(following)])
        return torch.tensor(drafts, device=hidden.device)


@pytest.fixture
def script() -> type[ScriptedSpeculator]:
    return ScriptedSpeculator


@pytest.fixture(scope="session")
def pairs(device, tmp_path_factory) -> Callable[[str], Pair]:
    """The tiny target with a head of the method, made once."""
    made: dict[str, Pair] = {}

    def make(method: str) -> Pair:
        if method not in made:
            made[method] = make_pair(method, tmp_path_factory.mktemp(method), device)
        return made[method]

    return make


@pytest.fixture(params=MAKERS)
def pair(request, pairs) -> Pair:
    return pairs(request.param)
