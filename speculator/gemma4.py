"""Gemma 4 MTP: an assistant whose layers have queries only and read the target's keys and values."""

from torch import Tensor

from tridraft.models.gemma4_mtp import Gemma4MTP
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import AttentionBatch
from tridraft.speculator.autoregressive import AutoRegressiveSpeculator
from tridraft.speculator.batch import SamplingState
from tridraft.speculator.kv_cache import KVCache


class Gemma4Speculator(AutoRegressiveSpeculator):
    """Drafts with a Gemma 4 assistant."""

    model: Gemma4MTP

    def load_draft_model(self, target: HFTarget) -> Gemma4MTP:
        draft = self.config.draft
        if isinstance(draft, Gemma4MTP):
            draft.check_target(target)
        else:
            draft = Gemma4MTP.from_pretrained(draft, dtype=target.dtype, device=target.device, target=target)
        draft.share_embedding(target.embed_weight, target.embed_scale)
        return draft

    def set_kv_cache(self, kv: KVCache) -> None:
        """Let each draft layer read the target's last layer of its type that owns keys: cache, scales and blocks."""
        super().set_kv_cache(kv)
        self.layers = [kv.layers[index] for index in self.model.kv_sources(self.target)]

    def run_model(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, batch: AttentionBatch) -> Tensor:
        # The reference's query at the bonus token's position sees the last W + 1 keys.
        extra = 1 if self.config.draft_position == "bonus" else 0
        draft_hidden, _ = self.model(
            input_ids, positions, hidden, self.layers, batch, window_extra=extra, out_hidden=hidden
        )
        return draft_hidden

    def sample_draft(
        self,
        draft_hidden: Tensor,
        idx_mapping: Tensor,
        sampling: SamplingState,
        positions: Tensor,
        step: int,
        out: Tensor,
    ) -> None:
        probabilistic = self.draft_logits is not None
        self.model.sample(
            draft_hidden,
            idx_mapping,
            sampling.temperature if probabilistic else self.greedy,
            sampling.seeds,
            positions,
            draft_logits_out=self.draft_logits,
            draft_step=self.steps[step] if probabilistic else None,
            out=out,
        )
