"""What a speculator is made from."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from tridraft.speculator.cudagraph import CUDAGraphMode
from tridraft.speculator.methods import MAX_SPECULATIVE_TOKENS, METHODS, Method

if TYPE_CHECKING:
    from tridraft.models.eagle import Eagle
    from tridraft.models.gemma4_mtp import Gemma4MTP
    from tridraft.models.mtp import MTP


@dataclass(frozen=True)
class SpeculatorConfig:
    """Settings of a speculator.

    Attributes:
        method: how it drafts; one of `METHODS`.
        draft: the draft checkpoint's directory, or the draft model itself.
        num_speculative_tokens: K, the most drafts a request gets for each target pass.
        max_num_reqs: request slots.
        max_model_len: the longest request, in tokens.
        max_num_batched_tokens: tokens of one target pass, at most; a drafter that owns keys runs over all of them.
        draft_position: where a draft query of Gemma 4 stands: at the bonus token's position, as its authors have it,
            or at the last computed one. It moves which drafts are accepted, never what greedy decoding prints.
        draft_sampling: "probabilistic" samples drafts at their request's temperature and keeps the draft logits for
            verification; "greedy" always takes the likeliest and keeps nothing. Both leave the target's distribution
            as it is.
        lm_head_dtype: "fp8" drafts with a copy of the LM head rounded to float8_e4m3fn with a scale a row, whose bytes
            are most of what a draft step with a dense head reads. It moves which drafts are accepted, not the target's
            text. "auto" scores the head as it is, as a centroid head always is.
        attention: what draft layers attend with, a function with the signature of `paged_attention`; None: that one. It
            may ignore `metadata_ready`.
        cudagraph_mode: what `capture` records. PIECEWISE is for an `attention` that cannot be captured.
        cudagraph_num_steps: draft lengths that get graphs of their own; empty for K alone. `propose` of another
            length replays the next longer one.
        data_parallel_group: a `torch.distributed` group with a CPU backend whose ranks each hold this speculator and
            call `propose` together; None for one rank.
        tensor_parallel_group: a `torch.distributed` group whose ranks each hold this speculator and call `propose` with
            the same batch: each scores its share of the vocabulary. No rank has all the logits that "probabilistic"
            drafts would keep. None for one rank. Its graphs hold the group's collectives: drop the speculator before
            the group is destroyed, which NCCL waits for.
    """

    method: Method
    draft: "str | Path | Gemma4MTP | Eagle | MTP"
    num_speculative_tokens: int
    max_num_reqs: int
    max_model_len: int
    max_num_batched_tokens: int = 2048
    draft_position: Literal["bonus", "last_computed"] = "bonus"
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    lm_head_dtype: Literal["auto", "fp8"] = "auto"
    attention: Callable[..., Tensor] | None = None
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL
    cudagraph_num_steps: tuple[int, ...] = ()
    data_parallel_group: Any = None
    tensor_parallel_group: Any = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("draft_position", self.draft_position, ("bonus", "last_computed")),
            ("draft_sampling", self.draft_sampling, ("greedy", "probabilistic")),
            ("lm_head_dtype", self.lm_head_dtype, ("auto", "fp8")),
            ("cudagraph_mode", self.cudagraph_mode, tuple(CUDAGraphMode)),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: got {value!r}, needs {' or '.join(map(repr, allowed))}")
        for name, value, least in (
            ("num_speculative_tokens", self.num_speculative_tokens, 0),
            ("max_num_reqs", self.max_num_reqs, 1),
            ("max_model_len", self.max_model_len, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, 1),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name}: got {value!r}, needs an integer of at least {least}")
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens: got {self.num_speculative_tokens}, needs at most {MAX_SPECULATIVE_TOKENS}"
            )
        if self.tensor_parallel_group is not None and self.draft_sampling != "greedy":
            raise ValueError(
                f"draft_sampling: got {self.draft_sampling!r}, needs 'greedy' with a tensor_parallel_group"
            )
        if not isinstance(self.cudagraph_num_steps, tuple):
            raise TypeError(f"cudagraph_num_steps: got {self.cudagraph_num_steps!r}, needs a tuple of integers")
        for steps in self.cudagraph_num_steps:
            if type(steps) is not int or not 0 <= steps <= self.num_speculative_tokens:
                raise ValueError(f"cudagraph_num_steps: got {steps}, needs 0 to {self.num_speculative_tokens}")
