"""What a speculator is made from."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tridraft.models.gemma4_mtp import Gemma4MTP

METHODS = ("gemma4_mtp",)


@dataclass(frozen=True)
class SpeculatorConfig:
    """Settings of a speculator.

    Attributes:
        method: how it drafts; one of `METHODS`.
        draft: the draft checkpoint's directory, or the draft model itself.
        num_speculative_tokens: K, drafts a request gets for each target pass.
        max_num_reqs: request slots.
        max_model_len: the longest request, in tokens.
        draft_position: where a draft query of Gemma 4 stands: at the bonus token's position, as its authors have it,
            or at the last computed one. It moves which drafts are accepted, never what greedy decoding prints.
        draft_sampling: "probabilistic" samples drafts at their request's temperature and keeps the draft logits for
            verification; "greedy" always takes the likeliest and keeps nothing. Both leave the target's distribution
            as it is.
    """

    method: Literal["gemma4_mtp"]
    draft: "str | Path | Gemma4MTP"
    num_speculative_tokens: int
    max_num_reqs: int
    max_model_len: int
    draft_position: Literal["bonus", "last_computed"] = "bonus"
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("draft_position", self.draft_position, ("bonus", "last_computed")),
            ("draft_sampling", self.draft_sampling, ("greedy", "probabilistic")),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, needs {' or '.join(map(repr, allowed))}")
        for name, value, least in (
            ("num_speculative_tokens", self.num_speculative_tokens, 0),
            ("max_num_reqs", self.max_num_reqs, 1),
            ("max_model_len", self.max_model_len, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: got {value}, needs at least {least}")
