"""What one pass of the target hands to the speculator: its packed tokens, the verdict on the drafts, how to sample.

A *row* is a request's place in this pass; a *slot* is its place for as long as it runs. `idx_mapping` leads from row
to slot; -1 marks a padding row, which reads and writes nothing.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class InputBatch:
    """The tokens one target pass ran over, packed without padding between requests.

    Attributes:
        input_ids: `[T]` int64.
        positions: `[T]` int64, each token's position in its request.
        query_start_loc: `[R + 1]` int32, where each row's tokens begin; padded with its last value.
        seq_lens: `[R]` int32, keys in the cache after the pass, drafts later rejected included; 0 for padding.
        idx_mapping: `[R]` int32, each row's slot; -1 for padding.
        num_reqs: R.
        num_tokens: T.
        max_query_len: no row has more tokens.
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    idx_mapping: Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int


@dataclass(frozen=True)
class Multimodal:
    """A pass's embeddings that do not come from token ids: those of images, video or sound.

    Attributes:
        embeds: `[T, H]`, the target's input embeddings, read where `mask` is set.
        mask: `[T]` bool.
    """

    embeds: Tensor
    mask: Tensor


@dataclass(frozen=True)
class VerifyResult:
    """What verification decided, on the device.

    Attributes:
        num_sampled: `[R]` int32, tokens each row emitted; 0 for a prompt chunk that is not the last.
        num_rejected: `[R]` int32, drafts of this pass that were rejected.
        last_sampled: `[max_num_reqs]` int64 by slot, the newest token: the one whose KV does not exist yet.
        next_prefill_tokens: `[max_num_reqs]` int64 by slot, the prompt token after this pass's chunk; stands in for
            `last_sampled` where `num_sampled` is 0.
    """

    num_sampled: Tensor
    num_rejected: Tensor
    last_sampled: Tensor
    next_prefill_tokens: Tensor


@dataclass(frozen=True)
class SamplingState:
    """How each slot samples.

    Attributes:
        temperature: `[max_num_reqs]` float32; 0 is greedy.
        seeds: `[max_num_reqs]` int64. A draw depends on the seed, the position and the token alone.
    """

    temperature: Tensor
    seeds: Tensor
