"""What a decoding loop needs of a speculator, and what every speculator with a draft model has in common."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from tridraft.models.hf_target import HFTarget
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.kv_cache import KVCache


class BaseSpeculator(ABC):
    """Proposes the tokens that the target verifies next.

    Attributes:
        num_speculative_tokens: K.
        draft_logits: `[max_num_reqs, K, V]`, what the drafts were sampled from, by slot; None for greedy drafts.
    """

    num_speculative_tokens: int
    draft_logits: Tensor | None = None

    @abstractmethod
    def load_model(self, target: HFTarget) -> None:
        """Load what drafts, and refuse a target it does not fit."""

    @abstractmethod
    def set_kv_cache(self, kv: KVCache) -> None:
        """Bind to the cache the target writes."""

    @abstractmethod
    def propose(self, batch: InputBatch, verify: VerifyResult, sampling: SamplingState, hidden: Tensor) -> Tensor:
        """Draft K tokens after each request's newest one.

        Args:
            batch: the pass the target just ran.
            verify: what verification made of it.
            sampling: temperature and seed of each slot.
            hidden: `[T, H]`, the target's hidden states in that pass.

        Returns:
            `[R, K]` int64, valid until the next call.
        """


class DraftModelSpeculator(BaseSpeculator):
    """A speculator with a draft model: its loading and its buffers.

    Every buffer is allocated once. Drafts are kept step by step, `[K, R]`, so that the tokens of one step are a
    contiguous row, written by the sampler and read as the next step's input.
    """

    def __init__(self, config: SpeculatorConfig) -> None:
        self.config = config
        self.num_speculative_tokens = config.num_speculative_tokens

    @abstractmethod
    def load_draft_model(self, target: HFTarget) -> nn.Module:
        """The draft model, checked against the target and sharing what it shares with it."""

    def load_model(self, target: HFTarget) -> None:
        self.target = target
        self.model: Any = self.load_draft_model(target)
        reqs, steps, device = self.config.max_num_reqs, self.num_speculative_tokens, target.device

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.steps = torch.arange(steps, device=device)
        self.input_ids = integers(reqs)
        self.positions = integers(reqs)
        self.seq_lens = integers(reqs, dtype=torch.int32)
        self.query_start_loc = torch.arange(reqs + 1, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(reqs, target.hidden_size, dtype=target.dtype, device=device)
        self.sampling_positions = integers(steps, reqs)
        self.drafts = integers(steps, reqs)
        if self.config.draft_sampling == "probabilistic":
            shape = (reqs, steps, target.vocab_size)
            self.draft_logits = torch.zeros(shape, dtype=torch.float32, device=device)
        else:
            # A temperature of 0 for every slot: drafts are greedy whatever their requests ask for.
            self.greedy = torch.zeros(reqs, device=device)

    def set_kv_cache(self, kv: KVCache) -> None:
        ours = (self.config.max_num_reqs, self.config.max_model_len)
        theirs = (kv.max_num_reqs, kv.max_model_len)
        if ours != theirs:
            raise ValueError(f"(max_num_reqs, max_model_len): the cache has {theirs}, the speculator {ours}")
        self.kv = kv
        self.block_tables = tuple(torch.zeros_like(table) for table in kv.tables)
