"""The buffers of a speculator: allocated once, and all that its captured graphs read."""

from dataclasses import dataclass

from torch import Tensor

from tridraft.speculator.batch import SamplingState


@dataclass(frozen=True)
class PassBuffers:
    """What a target pass said of its requests, padded to the rows of a graph, where that reads it.

    A drafter without keys reads `idx_mapping` and `sampling` alone.

    Attributes:
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32.
        idx_mapping: `[R]` int32.
        num_rejected: `[R]` int32.
        sampling: of each slot; temperature 0 for all where drafts are greedy whatever their requests ask for.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    idx_mapping: Tensor
    num_rejected: Tensor
    sampling: SamplingState

    def rows(self, reqs: int) -> "PassBuffers":
        """Views of the first `reqs` rows."""
        return PassBuffers(
            query_start_loc=self.query_start_loc[: reqs + 1],
            seq_lens=self.seq_lens[:reqs],
            idx_mapping=self.idx_mapping[:reqs],
            num_rejected=self.num_rejected[:reqs],
            sampling=self.sampling,
        )


@dataclass(frozen=True)
class StepBuffers:
    """What a draft step reads, one row a request.

    Attributes:
        query_start_loc: `[R + 1]` int32, 0 … R.
        input_ids: `[R]`.
        positions: `[R]`, rotary.
        seq_lens: `[R]` int32.
        hidden: `[R, H]`.
        slot_mapping: `[R]`, where the step's keys go.
        sampling_positions: `[K, R]`, the position before each draft, which keys its random draw.
    """

    query_start_loc: Tensor
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    hidden: Tensor
    slot_mapping: Tensor
    sampling_positions: Tensor

    def rows(self, reqs: int) -> "StepBuffers":
        """Views of the first `reqs` rows."""
        return StepBuffers(
            query_start_loc=self.query_start_loc[: reqs + 1],
            input_ids=self.input_ids[:reqs],
            positions=self.positions[:reqs],
            seq_lens=self.seq_lens[:reqs],
            hidden=self.hidden[:reqs],
            slot_mapping=self.slot_mapping[:reqs],
            sampling_positions=self.sampling_positions[:, :reqs],
        )


@dataclass(frozen=True)
class PrefillBuffers:
    """What draft step 0 of a drafter that owns keys reads, one row a token of the target's pass.

    Attributes:
        input_ids: `[T]`, each row's following token.
        positions: `[T]`.
        hidden: `[T, H]`, the target's.
        slot_mapping: `[T]`.
        last_token_indices: `[R]`, each request's last accepted row.
        inputs_embeds: `[T, H]`, of a multimodal pass.
    """

    input_ids: Tensor
    positions: Tensor
    hidden: Tensor
    slot_mapping: Tensor
    last_token_indices: Tensor
    inputs_embeds: Tensor

    def rows(self, tokens: int, reqs: int) -> "PrefillBuffers":
        """Views of the first `tokens` rows, of `reqs` requests."""
        return PrefillBuffers(
            input_ids=self.input_ids[:tokens],
            positions=self.positions[:tokens],
            hidden=self.hidden[:tokens],
            slot_mapping=self.slot_mapping[:tokens],
            last_token_indices=self.last_token_indices[:reqs],
            inputs_embeds=self.inputs_embeds[:tokens],
        )
