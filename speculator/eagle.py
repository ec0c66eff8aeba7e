"""EAGLE and EAGLE-3: a head of one layer that continues the target's hidden states."""

from torch import Tensor

from tridraft.models.eagle import Eagle, Eagle3
from tridraft.models.hf_target import HFTarget
from tridraft.speculator.head import HeadSpeculator


class EagleSpeculator(HeadSpeculator):
    """Drafts with an EAGLE head (EAGLE-1 and EAGLE-2's chain) or an EAGLE-3 head."""

    model: Eagle

    def load_draft_model(self, target: HFTarget) -> Eagle:
        return self.load_head(Eagle3 if self.config.method == "eagle3" else Eagle, target)

    def combine_hidden_states(self, hidden: Tensor) -> Tensor:
        return self.model.combine_hidden_states(hidden)
