"""EAGLE and EAGLE-3: a head of one layer that continues the target's hidden states."""

from pathlib import Path

from torch import Tensor

from tridraft.models.eagle import Eagle, Eagle3
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.autoregressive import AutoRegressiveSpeculator


class EagleSpeculator(AutoRegressiveSpeculator):
    """Drafts with an EAGLE head (EAGLE-1 and EAGLE-2's chain) or an EAGLE-3 head."""

    model: Eagle

    def load_draft_model(self, target: HFTarget) -> Eagle:
        kind, draft = Eagle3 if self.config.method == "eagle3" else Eagle, self.config.draft
        if isinstance(draft, (str, Path)):
            draft = kind.from_pretrained(draft, dtype=target.dtype, device=target.device, target=target)
        elif type(draft) is kind:
            draft.check_target(target)
        else:
            raise TypeError(
                f"draft: got {type(draft).__name__}, method {self.config.method!r} needs a path or {kind.__name__}"
            )
        draft.share_with_target(target)
        return draft

    def combine_hidden_states(self, hidden: Tensor) -> Tensor:
        return self.model.combine_hidden_states(hidden)

    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        batch: AttentionBatch,
        step: int,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        embeds = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(embeds, positions, hidden, self.layers, batch, step=step)
