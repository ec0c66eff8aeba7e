"""MTP: the multi-token prediction modules trained with a target, in the style of DeepSeek-V3."""

import logging

import torch
from torch import Tensor

from tridraft.models.hf_target import HFTarget
from tridraft.models.mtp import MTP
from tridraft.speculator.batch import InputBatch, Multimodal, SamplingState, VerifyResult
from tridraft.speculator.chain import PassHistory
from tridraft.speculator.head import HeadSpeculator

logger = logging.getLogger(__name__)


class MTPSpeculator(HeadSpeculator):
    """Drafts with a target's MTP modules, whose one result is read by the head and by the next step.

    One module is applied again at every step. Of a chain, each step has the next module, which runs over the whole pass
    as the first does (`chain.py`): K is at most the number of modules.
    """

    model_returns_tuple = False
    _warned = False
    model: MTP

    @property
    def prefill_steps(self) -> int:
        return len(self.model.kv_specs)

    @property
    def repeated_rows(self) -> int:
        return self.prefill_steps - 1

    def load_draft_model(self, target: HFTarget) -> MTP:
        draft = self.load_head(MTP, target)
        modules = len(draft.kv_specs)
        if self.num_speculative_tokens > modules > 1:
            raise ValueError(
                f"num_speculative_tokens: got {self.num_speculative_tokens}, a chain of {modules} modules drafts "
                f"at most {modules}"
            )
        return draft

    def load_model(self, target: HFTarget) -> None:
        super().load_model(target)
        self.history = PassHistory(self.step.hidden, self.repeated_rows)

    @torch.no_grad()
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
        if not self.repeated_rows:
            return super().propose(
                batch,
                verify,
                sampling,
                hidden,
                num_speculative_tokens=num_speculative_tokens,
                multimodal=multimodal,
            )
        if multimodal is not None and not self._warned:
            logger.warning("a chain of MTP modules drafts from token ids: embeddings of images are left out")
            self._warned = True
        # Whatever is wanted, every module's keys have to stay in step.
        drafts = super().propose(batch, verify, sampling, hidden)
        return drafts[:, : self.wanted_steps(num_speculative_tokens)]

    def repeat_rows(self, batch: InputBatch, verify: VerifyResult, hidden: Tensor) -> tuple[InputBatch, Tensor]:
        if not self.repeated_rows:
            return batch, hidden
        repeated, states = self.history.repeat(batch, hidden)
        self.history.keep(repeated, states, verify.num_rejected)
        return repeated, states
