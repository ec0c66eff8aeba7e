"""Drafting token by token, every step at one place.

With keys 0 … P−1 computed and x_P sampled, a drafter that owns no keys asks K times about the same P keys; only the
token and the hidden state move from step to step:

    x_{P+1+s}, h_{s+1} = draft(x_{P+s}, h_s, keys 0 … P−1)        s = 0 … K−1,   h_0 = the target's hidden state at P−1

A request is one row, the last accepted one. No token of the prompt and no rejected position is run through the
draft model, and nothing is written to the cache.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from tridraft.kernels.draft_inputs import prepare_decode_inputs
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.base import DraftModelSpeculator
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """The loop over draft steps. A subclass brings the model, its forward step and its sampler."""

    @abstractmethod
    def run_model(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        """One step of the draft model: the hidden state its head reads, and the next step's `hidden` in place.

        Args:
            input_ids: `[R]`, each request's newest token.
            positions: `[R]`, rotary positions.
            hidden: `[R, H]`, read, then overwritten with what the next step reads.
            batch: one query a request.
        """

    @abstractmethod
    def sample_draft(
        self,
        draft_hidden: Tensor,
        idx_mapping: Tensor,
        sampling: SamplingState,
        positions: Tensor,
        step: int,
        out: Tensor,
    ) -> None:
        """Sample one token a row into `out`, and record its logits as step `step` where drafts are sampled.

        Args:
            draft_hidden: `[R, d]`, what `run_model` returned.
            idx_mapping: `[R]`, slots.
            sampling: temperature and seed of each slot.
            positions: `[R]`, the position before each sampled token, which keys its random draw.
            step: the draft step, 0 … K−1.
            out: `[R]` int64.
        """

    def propose(self, batch: InputBatch, verify: VerifyResult, sampling: SamplingState, hidden: Tensor) -> Tensor:
        reqs = batch.num_reqs
        positions, seq_lens, recurrent = self.positions[:reqs], self.seq_lens[:reqs], self.hidden[:reqs]
        tokens = self.input_ids[:reqs]
        prepare_decode_inputs(
            hidden,
            batch.query_start_loc,
            batch.seq_lens,
            batch.idx_mapping,
            verify.num_rejected,
            tokens=None,
            last_sampled=verify.last_sampled,
            next_prefill_tokens=verify.next_prefill_tokens,
            num_sampled=verify.num_sampled,
            advance_positions=False,
            draft_position=self.config.draft_position,
            max_model_len=self.config.max_model_len,
            input_ids=tokens,
            positions=positions,
            out_seq_lens=seq_lens,
            out_hidden=recurrent,
        )
        # Draft s comes after token P + s, wherever its query stands.
        keys = self.sampling_positions[:, :reqs]
        torch.add(seq_lens, self.steps[:, None], out=keys)
        attention = AttentionBatch(
            query_start_loc=self.query_start_loc[: reqs + 1],
            seq_lens=seq_lens,
            block_tables=self.kv.block_tables(batch.idx_mapping, [table[:reqs] for table in self.block_tables]),
            slot_mappings=None,
            max_query_len=1,
        )
        for step in range(self.num_speculative_tokens):
            draft_hidden = self.run_model(tokens, positions, recurrent, attention)
            tokens = self.drafts[step, :reqs]
            self.sample_draft(draft_hidden, batch.idx_mapping, sampling, keys[step], step, tokens)
        return self.drafts[:, :reqs].t()
