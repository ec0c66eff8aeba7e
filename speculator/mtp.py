"""MTP: the multi-token prediction modules trained with a target, in the style of DeepSeek-V3."""

from pathlib import Path

from torch import Tensor

from tridraft.models.hf_target import HFTarget
from tridraft.models.mtp import MTP
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.autoregressive import AutoRegressiveSpeculator


class MTPSpeculator(AutoRegressiveSpeculator):
    """Drafts with a target's MTP modules, whose one result is read by the head and by the next step."""

    model_returns_tuple = False
    model: MTP

    def load_draft_model(self, target: HFTarget) -> MTP:
        draft = self.config.draft
        if isinstance(draft, (str, Path)):
            draft = MTP.from_pretrained(draft, dtype=target.dtype, device=target.device, target=target)
        elif isinstance(draft, MTP):
            draft.check_target(target)
        else:
            raise TypeError(f"draft: got {type(draft).__name__}, needs a path or an MTP")
        if len(draft.kv_specs) > 1:
            # Module s pairs a state with the token s + 1 further on. After a rejection its last s keys stand for tokens
            # that were not taken, and would have to be computed again from states of the pass before.
            raise ValueError(f"draft: got a chain of {len(draft.kv_specs)} MTP modules, drafting supports one")
        draft.share_with_target(target)
        return draft

    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        batch: AttentionBatch,
        step: int,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        embeds = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(embeds, positions, hidden, self.layers, batch, step=step)
