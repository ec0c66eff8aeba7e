"""What a person asks of the decoder and gets back: requests, chunks of output, completions, counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30
"""Beyond them 1 / temperature, or the temperature, has no place in float32."""


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt_ids: at least one token.
        max_new_tokens: where it ends at the latest.
        temperature: 0 is greedy; otherwise `MIN_TEMPERATURE` to `MAX_TEMPERATURE`.
        top_k: how many of the likeliest tokens are sampled from; 0: all.
        top_p: the share of probability they are to have at least, after `top_k`; 1: all.
        seed: of its random draws. What is sampled depends on it, the prompt and how is drafted, not on the requests
            beside it; the distribution is the target's whatever drafts.
        stop_token_ids: tokens that end it, themselves emitted; None takes the target's own.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Chunk:
    """What one pass emitted for one request.

    Attributes:
        index: the request's place among those given.
        token_ids: new tokens, at least one.
        num_accepted: how many of them were drafts; None for the pass that ended the prompt.
        finish_reason: why these are its last tokens, None if they are not.
    """

    index: int
    token_ids: list[int]
    num_accepted: int | None
    finish_reason: FinishReason | None


@dataclass
class Completion:
    """A finished request.

    Attributes:
        prompt_ids: as given.
        output_ids: the tokens after the prompt, the stop token included.
        accepted: drafts among them for each target pass after the prompt.
        finish_reason: a stop token, or the length asked for or possible.
    """

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class Statistics:
    """Counts of one `stream` or `generate`.

    Attributes:
        target_passes: forwards of the target, prompts included.
        prompt_tokens: tokens of all prompts.
        output_tokens: tokens emitted.
        verify_rows: requests times the passes in which they had their newest token verified.
        verify_tokens: tokens emitted by those.
        drafted: by draft position, how many drafts were verified.
        accepted: by draft position, how many of them were emitted.
        verify_seconds: spent in the target and in verification.
        draft_seconds: spent drafting.
        total_seconds: all of it.
    """

    target_passes: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    verify_rows: int = 0
    verify_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens a request gets from one target pass after its prompt; plain decoding has 1."""
        return self.verify_tokens / self.verify_rows if self.verify_rows else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of drafts that were accepted, by draft position."""
        return [got / of if of else 0.0 for got, of in zip(self.accepted, self.drafted, strict=True)]
