"""What a decoding loop needs of a speculator, and what every speculator with a draft model has in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from tridraft.kernels._op import check_tensor
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import KVSpec
from tridraft.speculator.batch import InputBatch, Multimodal, SamplingState, VerifyResult
from tridraft.speculator.buffers import PassBuffers
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.cudagraph import Bucket
from tridraft.speculator.kv_cache import KVCache


class BaseSpeculator(ABC):
    """Proposes the tokens that the target verifies next.

    Attributes:
        num_speculative_tokens: K.
        draft_logits: `[max_num_reqs, K, V]`, what the drafts were sampled from, by slot; None for greedy drafts.
        kv_specs: what each layer of the drafter that owns keys and values stores, once the model is loaded. The cache
            has their layers behind the target's.
        max_num_reqs: request slots; None: any number. The cache has as many.
        max_model_len: the longest request; None: any. The cache has the same.
        max_num_batched_tokens: tokens of a pass that `propose` takes at most; None: any number.
        aux_layers: target layers whose inputs, side by side, `propose` takes for `hidden`, once the model is loaded;
            empty: it takes the target's last hidden states.
    """

    num_speculative_tokens: int
    draft_logits: Tensor | None = None
    kv_specs: Sequence[KVSpec] = ()
    aux_layers: Sequence[int] = ()
    max_num_reqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None

    @abstractmethod
    def load_model(self, target: HFTarget) -> None:
        """Load what drafts, and refuse a target it does not fit.

        An engine gives an object of its own with the attributes that are read: `device`, `dtype`, `vocab_size`,
        `hidden_size`, `layer_types`, `kv_specs`, `kv_index`, `embed_weight`, `embed_scale`, `lm_head_weight` and
        `suppress_ids`, as `HFTarget` describes them.
        """

    @abstractmethod
    def set_kv_cache(self, kv: KVCache) -> None:
        """Bind to the cache the target writes, which has the `kv_specs` of this drafter behind the target's.

        Of a cache are read `layers`, `tables`, `block_tables`, `block_size`, `max_num_reqs` and `max_model_len`.
        """

    def capture(self) -> None:  # noqa: B027  a drafter without graphs has nothing to do
        """Record what `propose` does into CUDA graphs; calling it again does nothing."""

    @abstractmethod
    def propose(
        self,
        batch: InputBatch,
        verify: VerifyResult,
        sampling: SamplingState,
        hidden: Tensor,
        *,
        num_speculative_tokens: int | None = None,
        multimodal: Multimodal | None = None,
    ) -> Tensor:
        """Draft K tokens after each request's newest one.

        Args:
            batch: the pass the target just ran.
            verify: what verification made of it.
            sampling: temperature and seed of each slot; read where drafts are sampled, not greedy.
            hidden: `[T, H]`, the target's hidden states in that pass, or its `aux_layers`, `[T, len(aux_layers) · H]`.
            num_speculative_tokens: drafts wanted of this call, 0 … K; None: K.
            multimodal: the pass's embeddings that do not come from token ids.

        Returns:
            `[R, num_speculative_tokens]` int64, valid until the next call.
        """


class DraftModelSpeculator(BaseSpeculator):
    """A speculator with a draft model: its loading, its buffers, and what its ranks agree on.

    Every buffer is allocated once, and a captured graph reads nothing else. Drafts are kept step by step, `[K, R]`, so
    that the tokens of one step are a contiguous row, written by the sampler and read as the next step's input.
    """

    kv: KVCache

    def __init__(self, config: SpeculatorConfig) -> None:
        self.config = config
        self.bound = False
        self.num_speculative_tokens = config.num_speculative_tokens
        self.max_num_reqs, self.max_model_len = config.max_num_reqs, config.max_model_len

    @abstractmethod
    def load_draft_model(self, target: HFTarget) -> nn.Module:
        """The draft model, checked against the target and sharing what it shares with it."""

    def load_model(self, target: HFTarget) -> None:
        absent = [name for name in ("device", "dtype", "vocab_size", "hidden_size") if not hasattr(target, name)]
        if absent:
            raise TypeError(
                f"target: got {type(target).__name__} without {', '.join(absent)}, needs an HFTarget or its like"
            )
        self.bound = False  # to a cache; graphs of buffers that are about to be replaced are not to be replayed
        self.target = target
        self.model: Any = self.load_draft_model(target)
        reqs, steps = self.config.max_num_reqs, self.num_speculative_tokens
        self.passed = PassBuffers(
            query_start_loc=self.zeros(reqs + 1, dtype=torch.int32),
            seq_lens=self.zeros(reqs, dtype=torch.int32),
            idx_mapping=self.zeros(reqs, dtype=torch.int32) - 1,
            num_rejected=self.zeros(reqs, dtype=torch.int32),
            sampling=SamplingState(self.zeros(reqs, dtype=torch.float32), self.zeros(reqs)),
        )
        self.steps = torch.arange(steps, device=target.device)
        self.drafts = self.zeros(steps, reqs)
        if self.config.draft_sampling == "probabilistic":
            self.draft_logits = self.zeros(reqs, steps, target.vocab_size, dtype=torch.float32)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A buffer on the target's device."""
        return torch.zeros(shape, dtype=dtype, device=self.target.device)

    def set_kv_cache(self, kv: KVCache) -> None:
        if not hasattr(self, "target"):
            raise RuntimeError("the speculator has no model: call load_model, then set_kv_cache")
        ours = (self.config.max_num_reqs, self.config.max_model_len)
        theirs = (kv.max_num_reqs, kv.max_model_len)
        if ours != theirs:
            raise ValueError(f"(max_num_reqs, max_model_len): the cache has {theirs}, the speculator {ours}")
        expected = len(self.target.kv_specs) + len(self.kv_specs)
        if len(kv.layers) != expected:
            raise ValueError(
                f"kv: got {len(kv.layers)} layers, needs the target's {len(self.target.kv_specs)} and then the "
                f"drafter's {len(self.kv_specs)}"
            )
        self.kv = kv
        self.block_tables = tuple(torch.zeros_like(table) for table in kv.tables)

    def agree(self, wanted: Bucket, eager: bool) -> tuple[Bucket, bool]:
        """The largest sizes any data-parallel rank wants, and whether any has to run without a graph.

        One collective, made by every rank in every call, so that no rank leaves out a forward others take part in.
        """
        if self.config.data_parallel_group is None:
            return wanted, eager
        sizes = torch.tensor([*wanted, eager])
        torch.distributed.all_reduce(sizes, torch.distributed.ReduceOp.MAX, group=self.config.data_parallel_group)
        *largest, any_eager = sizes.tolist()
        return Bucket(*largest), bool(any_eager)

    def check_sampling(self, sampling: SamplingState) -> None:
        """Refuse what `stage_sampling` cannot take."""
        if self.draft_logits is not None:
            slots = self.passed.sampling.temperature.shape
            check_tensor("sampling.temperature", sampling.temperature, shape=slots, dtype=torch.float32)
            check_tensor("sampling.seeds", sampling.seeds, shape=slots, dtype=torch.int64)

    def stage_sampling(self, sampling: SamplingState) -> None:
        """Bring what graphs read of how to sample into its buffers; greedy drafts read nothing."""
        if self.draft_logits is not None:
            self.passed.sampling.temperature.copy_(sampling.temperature)
            self.passed.sampling.seeds.copy_(sampling.seeds)
