"""Gemma 4 MTP: an assistant whose layers have queries only and read the target's keys and values."""

from pathlib import Path

from torch import Tensor

from tridraft.models.gemma4_mtp import Gemma4MTP
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch, LayerKV
from tridraft.speculator.autoregressive import AutoRegressiveSpeculator
from tridraft.speculator.kv_cache import KVCache


class Gemma4Speculator(AutoRegressiveSpeculator):
    """Drafts with a Gemma 4 assistant."""

    writes_draft_kv = False
    advance_draft_positions = False
    model: Gemma4MTP

    def load_draft_model(self, target: HFTarget) -> Gemma4MTP:
        draft = self.config.draft
        if isinstance(draft, (str, Path)):
            draft = Gemma4MTP.from_pretrained(draft, dtype=target.dtype, device=target.device, target=target)
        elif isinstance(draft, Gemma4MTP):
            draft.check_target(target)
        else:
            raise TypeError(
                f"draft: got {type(draft).__name__}, method {self.config.method!r} needs a path or Gemma4MTP"
            )
        draft.share_embedding(target.embed_weight, target.embed_scale)
        return draft

    @property
    def recurrent_size(self) -> int:
        return self.model.backbone_hidden_size

    def kv_layers(self, kv: KVCache) -> list[LayerKV]:
        """The target's last layer of each draft layer's type that owns keys: cache, scales and blocks."""
        return [kv.layers[index] for index in self.model.kv_sources(self.target)]

    def run_model(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        batch: AttentionBatch,
        step: int,
        inputs_embeds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # The reference's query at the bonus token's position sees the last W + 1 keys.
        extra = 1 if self.config.draft_position == "bonus" else 0
        return self.model(input_ids, positions, hidden, self.layers, batch, window_extra=extra, out_hidden=hidden)
