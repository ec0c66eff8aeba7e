"""What drafting with EAGLE and MTP heads has in common: a head that shares the target's embedding and owns its keys."""

from pathlib import Path
from typing import TypeVar

from torch import Tensor

from tridraft.models.draft_head import DraftHead
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.autoregressive import AutoRegressiveSpeculator

Head = TypeVar("Head", bound=DraftHead)


class HeadSpeculator(AutoRegressiveSpeculator):
    """A speculator whose model is a `DraftHead`."""

    def load_head(self, kind: type[Head], target: HFTarget) -> Head:
        """The configured head, of this kind, fitted to the target."""
        draft = self.config.draft
        if isinstance(draft, (str, Path)):
            head = kind.from_pretrained(draft, dtype=target.dtype, device=target.device, target=target)
        elif isinstance(draft, kind) and type(draft) is kind:  # an Eagle3 is an Eagle, and drafts otherwise
            head = draft
        else:
            raise TypeError(
                f"draft: got {type(draft).__name__}, method {self.config.method!r} needs a path or {kind.__name__}"
            )
        head.share_with_target(target)
        return head

    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        batch: AttentionBatch,
        step: int,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | Tensor:
        embeds = self.model.embed(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(embeds, positions, hidden, self.layers, batch, step=step)
