"""Drafting token by token, on the device from the verified tokens to the last draft.

With keys 0 … P−1 computed and x_P sampled, K drafts x_{P+1} … x_{P+K} are made in K steps. Two kinds of drafter:

One that owns keys (EAGLE, MTP) pairs each token with the hidden state before it. Its step 0, the *prefill*, runs over
all tokens of the target's pass, shifted by one, and so brings its keys 0 … P−1 in step with the target's; rejected
tokens stay in the batch as padding, so its shape is the target's. The others are *decode* steps of one row a request:

    d_0, g_0 = draft(x_{i+1}, h_i)  at positions i of the pass; the last accepted row, i = P−1, gives d_0
    d_s, g_s = draft(d_{s−1}, g_{s−1})  at position P−1+s                                      s = 1 … K−1

One that owns none (Gemma 4) reads the target's, so its step 0 is a decode step too: one row a request, no token of a
prompt and no rejected one is ever run through it, nothing is written, and every step stands at the same position:

    d_s, g_s = draft(d_{s−1}, g_{s−1})  over keys 0 … P−1      s = 0 … K−1,  d_{−1} = x_P,  g_{−1} = h_{P−1}

Once a pass is staged, all work is a function of its sizes (`Bucket`) alone: `_decode` and `_prefill` read and write
buffers of this object, and a captured graph is one of them with one size.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from tridraft.kernels._op import arch_of, check_tensor
from tridraft.kernels.attention import paged_attention
from tridraft.kernels.draft_inputs import (
    compute_slot_mapping,
    prepare_decode_inputs,
    prepare_prefill_inputs,
    update_draft_inputs,
)
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch, LayerKV
from tridraft.speculator.base import DraftModelSpeculator
from tridraft.speculator.batch import InputBatch, Multimodal, SamplingState, VerifyResult
from tridraft.speculator.buffers import PrefillBuffers, StepBuffers
from tridraft.speculator.chain import follow
from tridraft.speculator.cudagraph import (
    Bucket,
    CUDAGraphMode,
    DecodeSpeculatorCudaGraphManager,
    PrefillSpeculatorCudaGraphManager,
    capture_graphs,
)
from tridraft.speculator.kv_cache import KVCache
from tridraft.speculator.piecewise import UncapturedAttention

logger = logging.getLogger(__name__)


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """The loop over draft steps. A subclass brings the model and says what kind of drafter it is.

    Attributes:
        writes_draft_kv: whether the drafter owns keys, and so has a prefill.
        advance_draft_positions: whether positions and lengths move from step to step.
        model_returns_tuple: whether `run_model` returns what the head reads and what the next step reads apart, or
            one tensor for both.
    """

    writes_draft_kv: ClassVar[bool] = True
    advance_draft_positions: ClassVar[bool] = True
    model_returns_tuple: ClassVar[bool] = True

    step: StepBuffers
    prefill: PrefillBuffers

    @property
    def prefill_steps(self) -> int:
        """Draft steps that run over all tokens of the pass."""
        return int(self.writes_draft_kv)

    @property
    def recurrent_size(self) -> int:
        """H, the width of the hidden state that one step hands to the next."""
        return self.model.hidden_size

    @abstractmethod
    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        batch: AttentionBatch,
        step: int,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """One pass of the draft model: what its head reads `[T, d]` and what the next step reads `[T, H]`.

        Args:
            input_ids: `[T]`, each row's newest token.
            positions: `[T]`, rotary positions.
            hidden: `[T, H]`; may be overwritten with the second result.
            batch: how rows belong to requests.
            step: the draft step, 0 … K−1.
            inputs_embeds: `[T, H]` instead of the embeddings of `input_ids`.
        """

    @property
    def repeated_rows(self) -> int:
        """Rows of each request's last pass that are computed again in front of those of the next."""
        return 0

    def repeat_rows(self, batch: InputBatch, verify: VerifyResult, hidden: Tensor) -> tuple[InputBatch, Tensor]:
        """The pass and its hidden states with the `repeated_rows` of each request in front."""
        return batch, hidden

    def combine_hidden_states(self, hidden: Tensor) -> Tensor:
        """From what `propose` took `[T, ·]` to the hidden states of draft step 0 `[T, H]`."""
        return hidden

    def sample_draft(self, draft_hidden: Tensor, idx_mapping: Tensor, positions: Tensor, step: int) -> Tensor:
        """Sample step `step`'s token of each row into `drafts[step]`, and keep its logits where drafts are sampled.

        Args:
            draft_hidden: `[R, d]`, the first result of `run_model`.
            idx_mapping: `[R]`, slots.
            positions: `[R]`, the position before each sampled token.
            step: 0 … K−1.
        """
        sampling = self.passed.sampling
        return self.model.sample(
            draft_hidden,
            idx_mapping,
            sampling.temperature,
            sampling.seeds,
            positions,
            fp8_head=self.fp8_head,
            draft_logits_out=self.draft_logits,
            draft_step=None if self.draft_logits is None else self.steps[step],
            out=self.drafts[step, : idx_mapping.shape[0]],
        )

    def load_model(self, target: HFTarget) -> None:
        super().load_model(target)
        config, dtype = self.config, target.dtype
        if config.tensor_parallel_group is not None:
            self.model.shard_vocabulary(config.tensor_parallel_group)
        self.fp8_head = None
        if config.lm_head_dtype == "fp8":
            arch = arch_of(target.device)
            if arch.backend == "cuda" and arch.capability < 89:
                raise ValueError(f"lm_head_dtype: got 'fp8' on sm_{arch.capability}, needs sm_89 or later")
            self.fp8_head = self.model.fp8_head()
        if self.writes_draft_kv:
            self.kv_specs, self.aux_layers = self.model.kv_specs, self.model.aux_layers
            self.max_num_batched_tokens = config.max_num_batched_tokens
            end = self.model.max_position_embeddings
            if end is not None and config.max_model_len > end:
                raise ValueError(f"max_model_len: got {config.max_model_len}, the draft model ends at {end} tokens")
        reqs = config.max_num_reqs
        self.step = StepBuffers(
            query_start_loc=torch.arange(reqs + 1, dtype=torch.int32, device=target.device),
            input_ids=self.zeros(reqs),
            positions=self.zeros(reqs),
            seq_lens=self.zeros(reqs, dtype=torch.int32),
            hidden=self.zeros(reqs, self.recurrent_size, dtype=dtype),
            slot_mapping=self.zeros(reqs) - 1,
            sampling_positions=self.zeros(self.num_speculative_tokens, reqs),
        )
        if self.writes_draft_kv:
            tokens = config.max_num_batched_tokens + reqs * self.repeated_rows
            self.prefill = PrefillBuffers(
                input_ids=self.zeros(tokens),
                positions=self.zeros(tokens),
                hidden=self.zeros(tokens, max(len(self.aux_layers), 1) * target.hidden_size, dtype=dtype),
                slot_mapping=self.zeros(tokens) - 1,
                last_token_indices=self.zeros(reqs),
                inputs_embeds=self.zeros(tokens, target.hidden_size, dtype=dtype),
            )
            self._tokens = lru_cache(1024)(self.prefill.rows)
        # Cut once a size: a view takes longer than a look-up.
        self._rows = lru_cache(1024)(lambda reqs: (self.passed.rows(reqs), self.step.rows(reqs)))
        self._drafted = lru_cache(1024)(lambda steps, reqs: self.drafts[:steps, :reqs])

    def set_kv_cache(self, kv: KVCache) -> None:
        super().set_kv_cache(kv)
        self.layers = self.kv_layers(kv)
        self.groups = sorted({layer.group for layer in self.layers})
        if self.writes_draft_kv:
            if len(self.groups) != 1:
                raise ValueError(f"kv: the drafter's layers are in {len(self.groups)} groups, needs one kind of layer")
            self.group = self.groups[0]
        self.init_cudagraph_manager()
        self.bound = True

    def kv_layers(self, kv: KVCache) -> list[LayerKV]:
        """The cache of each draft layer: its own, behind the target's."""
        return kv.layers[len(self.target.kv_specs) :]

    def init_cudagraph_manager(self) -> None:
        """Decide what `capture` is to record; drops what was recorded before."""
        config, device = self.config, self.target.device
        mode = config.cudagraph_mode if device.type == "cuda" else CUDAGraphMode.NONE
        attention = config.attention or paged_attention
        uncaptured = UncapturedAttention(attention) if mode is CUDAGraphMode.PIECEWISE else None
        self.attention: Callable[..., Tensor] = uncaptured or attention
        if uncaptured:
            whole = "" if self.writes_draft_kv else ", which is all that this drafter has"
            logger.info("PIECEWISE does not capture draft steps of one row a request%s", whole)
        steps = config.cudagraph_num_steps or (self.num_speculative_tokens,)
        decodes = mode.decode_mode() is CUDAGraphMode.FULL
        reqs, first, repeated = config.max_num_reqs, self.prefill_steps, self.repeated_rows
        self.decode_graphs = DecodeSpeculatorCudaGraphManager(
            self._decode, device, max_num_reqs=reqs, num_steps=[count for count in steps if decodes and count > first]
        )
        self.verify_graphs = PrefillSpeculatorCudaGraphManager.of_verify(
            self._prefill_and_decode,
            device,
            max_num_reqs=reqs,
            max_query_len=self.num_speculative_tokens + 1 + repeated,
            num_steps=steps if decodes and self.writes_draft_kv else (),
        )
        mixed = mode.mixed_mode() is not CUDAGraphMode.NONE and self.writes_draft_kv
        self.mixed_graphs = PrefillSpeculatorCudaGraphManager.of_mixed(
            self._prefill,
            device,
            max_num_reqs=reqs,
            max_num_tokens=config.max_num_batched_tokens + reqs * repeated,
            num_steps={min(count, first) for count in steps} if mixed else (),
            attention=uncaptured,
        )

    def capture(self) -> None:
        self._check_bound()
        managers = (self.mixed_graphs, self.verify_graphs, self.decode_graphs)
        if all(manager.captured for manager in managers):
            return
        passed, step = self.passed, self.step
        indices = [passed.query_start_loc, passed.seq_lens, passed.num_rejected]
        indices += [step.input_ids, step.positions, step.seq_lens, self.drafts]
        if self.writes_draft_kv:
            indices += [self.prefill.input_ids, self.prefill.positions, self.prefill.last_token_indices]
        for buffer in indices:
            buffer.zero_()
        passed.idx_mapping.fill_(-1)  # warming up runs over padding and writes no key
        step.slot_mapping.fill_(-1)
        with torch.no_grad():
            capture_graphs(managers, self.target.device)

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
        self._check_bound()
        steps = self.wanted_steps(num_speculative_tokens)
        if batch.idx_mapping.shape[0] != batch.num_reqs:
            raise ValueError(f"batch: got {batch.idx_mapping.shape[0]} rows in idx_mapping, num_reqs {batch.num_reqs}")
        if batch.num_reqs > self.config.max_num_reqs:
            raise ValueError(f"batch: got {batch.num_reqs} requests, max_num_reqs is {self.config.max_num_reqs}")
        self._check_pass(batch, verify, hidden)
        self.check_sampling(sampling)
        if not self.writes_draft_kv:
            multimodal = None  # its one row a request is the newest token, which is text
        if multimodal is not None:
            self._check_multimodal(batch, multimodal)
        batch, hidden = self.repeat_rows(batch, verify, hidden)
        wanted = Bucket(batch.num_tokens, batch.num_reqs, max(batch.max_query_len, 1), steps)
        wanted, eager = self.agree(wanted, eager=multimodal is not None)
        if self.writes_draft_kv:
            self._run_owning(batch, verify, sampling, hidden, multimodal, wanted, eager)
        elif wanted.num_steps:
            self._run_reading(batch, verify, sampling, hidden, wanted, eager)
        return self._drafted(steps, batch.num_reqs).t()

    def wanted_steps(self, num_speculative_tokens: int | None) -> int:
        """Drafts that a call asks for, checked."""
        most = self.num_speculative_tokens
        steps = most if num_speculative_tokens is None else num_speculative_tokens
        if not 0 <= steps <= most:
            raise ValueError(f"num_speculative_tokens: got {steps}, needs 0 to {most}")
        return steps

    def _check_pass(self, batch: InputBatch, verify: VerifyResult, hidden: Tensor) -> None:
        slots, tokens, reqs = self.config.max_num_reqs, batch.num_tokens, batch.num_reqs
        for name, rows, needed in (
            ("batch.query_start_loc", batch.query_start_loc, reqs + 1),
            ("batch.seq_lens", batch.seq_lens, reqs),
            ("verify.num_sampled", verify.num_sampled, reqs),
            ("verify.num_rejected", verify.num_rejected, reqs),
        ):
            if rows.shape[0] != needed:
                raise ValueError(f"{name}: got {rows.shape[0]} rows, needs {needed}")
        for name, tensor in (
            ("last_sampled", verify.last_sampled),
            ("next_prefill_tokens", verify.next_prefill_tokens),
        ):
            if tensor.shape[0] != slots:  # by slot, not by row
                raise ValueError(f"verify.{name}: got {tensor.shape[0]} rows, needs one for each of {slots} slots")
        if batch.max_query_len * batch.num_reqs < tokens:
            raise ValueError(
                f"batch: got max_query_len {batch.max_query_len} for {tokens} tokens of {batch.num_reqs} requests"
            )
        if hidden.dtype != self.target.dtype:
            raise TypeError(f"hidden: got {hidden.dtype}, needs the target's {self.target.dtype}")
        if not self.writes_draft_kv:
            return
        most = self.config.max_num_batched_tokens
        if tokens > most:
            raise ValueError(f"batch: got {tokens} tokens, max_num_batched_tokens is {most}")
        shape = (tokens, self.prefill.hidden.shape[1])
        if tuple(hidden.shape) != shape:
            layers = f", the inputs of layers {list(self.aux_layers)} side by side" if self.aux_layers else ""
            raise ValueError(f"hidden: got shape {list(hidden.shape)}, needs {list(shape)}{layers}")

    def _check_multimodal(self, batch: InputBatch, multimodal: Multimodal) -> None:
        width, dtype, device = self.prefill.inputs_embeds.shape[1], self.target.dtype, self.target.device
        if width != self.model.hidden_size:
            raise ValueError(
                f"multimodal: the target's embeddings are {width} wide, the drafter's {self.model.hidden_size}"
            )
        shape = (batch.num_tokens, width)
        check_tensor("multimodal.embeds", multimodal.embeds, shape=shape, dtype=dtype, device=device)
        check_tensor("multimodal.mask", multimodal.mask, shape=shape[:1], dtype=torch.bool, device=device)

    def _check_bound(self) -> None:
        if not self.bound:
            raise RuntimeError("the speculator has no cache: call load_model, then set_kv_cache")

    def _run_reading(
        self,
        batch: InputBatch,
        verify: VerifyResult,
        sampling: SamplingState,
        hidden: Tensor,
        wanted: Bucket,
        eager: bool,
    ) -> None:
        """Every step of a drafter that owns no keys, from each request's last accepted row of `hidden`."""
        wanted = Bucket(wanted.num_reqs, wanted.num_reqs, 1, wanted.num_steps)
        graph = None if eager else self.decode_graphs.find(wanted)
        if graph:  # launches alone, of which autograd knows nothing
            self._stage_rows(batch, verify, sampling, hidden, graph)
            self.decode_graphs.replay(graph)
            return
        with torch.no_grad():
            self._stage_rows(batch, verify, sampling, hidden, wanted)
            self._decode(wanted)

    def _stage_rows(
        self, batch: InputBatch, verify: VerifyResult, sampling: SamplingState, hidden: Tensor, bucket: Bucket
    ) -> None:
        passed, step = self._rows(bucket.num_reqs)
        prepare_decode_inputs(
            hidden,
            batch.query_start_loc,
            batch.seq_lens,
            batch.idx_mapping,
            verify.num_rejected,
            last_sampled=verify.last_sampled,
            next_prefill_tokens=verify.next_prefill_tokens,
            num_sampled=verify.num_sampled,
            advance_positions=False,
            draft_position=self.config.draft_position,
            max_model_len=self.config.max_model_len,
            input_ids=step.input_ids,
            positions=step.positions,
            out_seq_lens=step.seq_lens,
            out_hidden=step.hidden,
            out_idx_mapping=passed.idx_mapping,
        )
        self.stage_sampling(sampling)

    @torch.no_grad()
    def _run_owning(
        self,
        batch: InputBatch,
        verify: VerifyResult,
        sampling: SamplingState,
        hidden: Tensor,
        multimodal: Multimodal | None,
        wanted: Bucket,
        eager: bool,
    ) -> None:
        """Step 0 over the whole pass, then the others: one graph for verify batches, two calls for mixed ones."""
        whole = None if eager else self.verify_graphs.find(wanted)
        if whole:
            self._stage_tokens(batch, verify, sampling, hidden, whole)
            self.verify_graphs.replay(whole)
            return
        rest = Bucket(wanted.num_reqs, wanted.num_reqs, 1, wanted.num_steps)
        decode_graph = None if eager else self.decode_graphs.find(rest)
        rest = decode_graph or rest
        # The prefill leaves a row for each one the decode steps read.
        first = Bucket(
            wanted.num_tokens, rest.num_reqs, wanted.max_query_len, min(wanted.num_steps, self.prefill_steps)
        )
        mixed_graph = None if eager else self.mixed_graphs.find(first)
        first = mixed_graph or first
        self._stage_tokens(batch, verify, sampling, hidden, first)
        if mixed_graph:
            self.mixed_graphs.replay(mixed_graph)
        else:
            self._prefill(first, None if multimodal is None else self._merge(batch, multimodal, first))
        if wanted.num_steps > self.prefill_steps:
            if decode_graph:
                self.decode_graphs.replay(decode_graph)
            else:
                self._decode(rest)

    def _stage_tokens(
        self, batch: InputBatch, verify: VerifyResult, sampling: SamplingState, hidden: Tensor, bucket: Bucket
    ) -> None:
        prefill = self._tokens(bucket.num_tokens, bucket.num_reqs)
        passed, _ = self._rows(bucket.num_reqs)
        prepare_prefill_inputs(
            batch.input_ids,
            batch.positions,
            batch.query_start_loc,
            batch.idx_mapping,
            verify.last_sampled,
            verify.next_prefill_tokens,
            verify.num_sampled,
            verify.num_rejected,
            input_ids=prefill.input_ids,
            positions=prefill.positions,
            last_token_indices=prefill.last_token_indices,
            seq_lens=batch.seq_lens,
            out_query_start_loc=passed.query_start_loc,
            out_seq_lens=passed.seq_lens,
            out_idx_mapping=passed.idx_mapping,
            out_num_rejected=passed.num_rejected,
        )
        prefill.hidden[: batch.num_tokens].copy_(hidden)
        self.stage_sampling(sampling)

    def _merge(self, batch: InputBatch, multimodal: Multimodal, bucket: Bucket) -> Tensor:
        """The embeddings of each row's following token, those that are no text taken from the target's.

        A chunk's last row is followed by a token of another pass; where that is no text, it gets its placeholder's.
        """
        count, prefill = batch.num_tokens, self._tokens(bucket.num_tokens, bucket.num_reqs)
        following = prefill.inputs_embeds
        following.copy_(self.model.embed(prefill.input_ids))
        begins = torch.zeros(count + 1, dtype=torch.bool, device=following.device)
        begins.index_fill_(0, batch.query_start_loc.long(), True)
        taken = (multimodal.mask & ~begins[:count])[1:, None]
        following[: count - 1].copy_(torch.where(taken, multimodal.embeds[1:], following[: count - 1]))
        return following

    def _forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        output = self.run_model(*arguments, **options)
        return output if self.model_returns_tuple else (output, output)  # type: ignore[return-value]

    def _stage_slots(self, reqs: int) -> None:
        """What a slot's place brings: its blocks, and the positions that key its draws.

        Draft s comes after token P + s, wherever its query stands.
        """
        passed, step = self._rows(reqs)
        self.kv.block_tables(passed.idx_mapping, self._block_tables(reqs), self.groups)
        if self.draft_logits is not None:  # greedy drafts use no random numbers
            lengths = passed.seq_lens - passed.num_rejected if self.writes_draft_kv else step.seq_lens
            torch.add(lengths, self.steps[:, None], out=step.sampling_positions)

    def _block_tables(self, reqs: int) -> tuple[Tensor, ...]:
        return tuple(table[:reqs] for table in self.block_tables)

    def _prefill(self, bucket: Bucket, inputs_embeds: Tensor | None = None) -> None:
        """Draft step 0 over the pass's tokens, and the inputs of step 1; with no steps, its keys alone."""
        prefill = self._tokens(bucket.num_tokens, bucket.num_reqs)
        passed, step = self._rows(bucket.num_reqs)
        idx_mapping, num_rejected = passed.idx_mapping, passed.num_rejected
        requests = (passed.query_start_loc, passed.seq_lens)
        self._stage_slots(bucket.num_reqs)
        tables = self._block_tables(bucket.num_reqs)
        slots: dict[str, Any] = {"block_size": self.kv.block_size, "max_model_len": self.config.max_model_len}
        slot_mapping = compute_slot_mapping(
            prefill.positions,
            requests[0],
            tables[self.group],
            idx_mapping=idx_mapping,
            num_rejected=num_rejected,
            out=prefill.slot_mapping,
            **slots,
        )
        batch = AttentionBatch(*requests, tables, (slot_mapping,) * len(tables), bucket.max_query_len, self.attention)
        input_ids, hidden = prefill.input_ids, self.combine_hidden_states(prefill.hidden)
        drafted: Tensor | None = None
        for number in range(max(1, min(self.prefill_steps, bucket.num_steps))):
            if drafted is not None:
                input_ids = follow(input_ids, requests[0], num_rejected, drafted)
            draft_hidden, hidden = self._forward(
                input_ids, prefill.positions, hidden, batch, number, inputs_embeds=inputs_embeds
            )
            if bucket.num_steps:
                last_hidden = draft_hidden.index_select(0, prefill.last_token_indices)
                drafted = self.sample_draft(last_hidden, idx_mapping, step.sampling_positions[number], number)
        if self.prefill_steps > 1 or not bucket.num_steps:
            return
        prepare_decode_inputs(
            hidden,
            *requests,
            idx_mapping,
            num_rejected,
            tokens=drafted,
            advance_positions=True,
            input_ids=step.input_ids,
            positions=step.positions,
            out_seq_lens=step.seq_lens,
            out_hidden=step.hidden,
            block_table=tables[self.group],
            slot_mapping=step.slot_mapping,
            **slots,
        )

    def _prefill_and_decode(self, bucket: Bucket) -> None:
        self._prefill(bucket)
        self._decode(bucket)

    def _decode(self, bucket: Bucket) -> None:
        """Draft steps of one row a request: all but the prefill, which has staged what they need of the slots."""
        first = self.prefill_steps
        if bucket.num_steps <= first:
            return
        passed, step = self._rows(bucket.num_reqs)
        if not self.writes_draft_kv:
            self._stage_slots(bucket.num_reqs)
        tables = self._block_tables(bucket.num_reqs)
        slot_mappings = (step.slot_mapping,) * len(tables) if self.writes_draft_kv else None
        batch = AttentionBatch(step.query_start_loc, step.seq_lens, tables, slot_mappings, 1, self.attention)
        tokens = step.input_ids
        for number in range(first, bucket.num_steps):
            draft_hidden, hidden = self._forward(tokens, step.positions, step.hidden, batch, number)
            tokens = self.sample_draft(draft_hidden, passed.idx_mapping, step.sampling_positions[number], number)
            if self.advance_draft_positions and number + 1 < bucket.num_steps:
                update_draft_inputs(
                    tokens,
                    hidden,
                    passed.idx_mapping,
                    advance_positions=True,
                    max_model_len=self.config.max_model_len,
                    input_ids=step.input_ids,
                    positions=step.positions,
                    seq_lens=step.seq_lens,
                    out_hidden=step.hidden,
                    block_table=tables[self.group],
                    block_size=self.kv.block_size,
                    slot_mapping=step.slot_mapping,
                )
                tokens = step.input_ids
