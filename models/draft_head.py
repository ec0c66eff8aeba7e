"""What EAGLE and MTP heads have in common: loading, what they share with their target, and sampling.

A head owns keys and values for each of its layers. Its embedding and LM head are its target's unless its checkpoint
has its own, the LM head possibly over a part of the vocabulary: then `d2t[row]` is target id − row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from tridraft.models.fp8_head import FP8Head
from tridraft.models.layers import Linear, add_optional_parts, merged_parts
from tridraft.models.paged import KVSpec
from tridraft.models.vocab_parallel import sample_of_ranks, shard_rows
from tridraft.models.weights import LoadReport, fill, iterate_tensors, read_json, tensor_names

Head = TypeVar("Head", bound="DraftHead")


class TargetShape(Protocol):
    """What `check_target` asks of a target; `HFTarget` answers it, also on the meta device."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layer_types(self) -> Sequence[str]: ...


class Target(TargetShape, Protocol):
    """What `share_with_target` asks of a target."""

    @property
    def embed_weight(self) -> Tensor: ...
    @property
    def embed_scale(self) -> float: ...
    @property
    def lm_head_weight(self) -> Tensor: ...
    @property
    def suppress_ids(self) -> Tensor | None: ...


class DraftHead(nn.Module):
    """The base of heads that write keys and values of their own.

    Build one on its device, or on the meta device and name the device to `load_weights`. Before the first step it has
    to be given its target (`share_with_target`).

    Attributes:
        kv_specs: what each of its layers stores, in the order of `forward`'s `kv`.
        aux_layers: target layers whose input it reads, `()` for the target's final hidden state.
        vocab_size: the target's.
        draft_vocab_size: rows of its LM head.
        hidden_size: width H of what is fed back.
        target_hidden_size: width of the target's hidden states.
        max_position_embeddings: the longest text it was made for; None if its configuration does not say.
        suppress_ids: the target's ids that are never drafted, once it is given; None when there are none.
        embed_weight: [V, H].
        lm_head_weight: [draft_vocab_size, H].
        d2t: int64 [draft_vocab_size], target id − row; None where they are equal.
    """

    ignored: ClassVar[tuple[str, ...]] = ("t2d", "rotary_emb.inv_freq")
    """Ends of the names of tensors that say nothing new."""

    suppress_ids: Tensor | None
    embed_weight: Tensor | None
    lm_head_weight: Tensor | None
    d2t: Tensor | None

    def __init__(
        self,
        kv_specs: Sequence[KVSpec],
        *,
        vocab_size: int,
        draft_vocab_size: int,
        hidden_size: int,
        target_hidden_size: int,
        max_position_embeddings: int | None,
    ) -> None:
        super().__init__()
        if not 0 < draft_vocab_size <= vocab_size:
            raise ValueError(f"draft_vocab_size: got {draft_vocab_size}, needs 1 to vocab_size, {vocab_size}")
        self.kv_specs = tuple(kv_specs)
        self.aux_layers: tuple[int, ...] = ()
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size
        self.hidden_size = hidden_size
        self.target_hidden_size = target_hidden_size
        self.max_position_embeddings = max_position_embeddings
        for name in ("embed_weight", "lm_head_weight", "d2t", "suppress_ids"):
            self.register_buffer(name, None)
        self._embed_scale = 1.0
        self._shards: Any = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], names: Sequence[str], *, dtype: torch.dtype) -> Any:
        """The head that a `config.json` and the names of its checkpoint's tensors describe, on the default device."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls: type[Head],
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        target: TargetShape | None = None,
    ) -> Head:
        """Load a head from a checkpoint directory, refusing one that does not fit `target` before allocating.

        Raises:
            FileNotFoundError: a file of the checkpoint is absent.
            ValueError: a file is not what it should be, or the head does not fit the target.
        """
        content = read_json(path, "config.json")
        try:
            names = tensor_names(path)
            with torch.device("meta"):
                head: Head = cls.from_config(content, names, dtype=dtype)
            if target is not None:
                head.check_target(target)
            head.check_names(names)
            head.load_weights(iterate_tensors(path, keep=head.reads), device=device)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return head

    def reads(self, name: str) -> bool:
        """Whether the checkpoint tensor of this name is the head's."""
        return True

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint whose layers are of a kind that the head does not have, by their tensors' names."""

    def _projection(self) -> Tensor:
        """A weight that has the head's dtype and device."""
        return next(module.weight for module in self.modules() if isinstance(module, Linear))

    def checkpoint_name(self, name: str) -> str:
        """What the checkpoint calls the model's tensor `name`."""
        renamed = {"embed_weight": "embed_tokens.weight", "lm_head_weight": "lm_head.weight"}
        return renamed.get(name, name)

    def tied(self) -> dict[str, str]:
        """For each tensor that a checkpoint may repeat, the name of the one it has to equal."""
        return {}

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, device: torch.device | str | None = None
    ) -> LoadReport:
        """Fill the head from a checkpoint's tensors. Loading again replaces everything: share the target again then,
        and capture again what was captured.

        Biases, norms of queries and keys, an embedding, an LM head and `d2t` are there if the checkpoint has them.

        Args:
            tensors: names and tensors, in any order, any float dtype.
            device: where a head built on the meta device is to live; default: the default device.

        Raises:
            ValueError: a tensor is missing, has another shape or no place, or a layer is of a kind that the head does
                not have; `d2t` does not name a part of the vocabulary.
        """
        found = {name: tensor for name, tensor in tensors if not name.endswith(self.ignored) and self.reads(name)}
        self.check_names(found)
        if self._projection().is_meta:
            self.to_empty(device=torch.get_default_device() if device is None else device)
        self._allocate_optional(found)
        destinations, merged = {}, {}
        parts = merged_parts(self)
        for name, tensor in self.state_dict().items():
            destinations[self.checkpoint_name(name)] = tensor
            pieces = [(self.checkpoint_name(part), piece) for part, piece in parts.get(name, [])]
            if pieces:
                merged[self.checkpoint_name(name)] = [part for part, _ in pieces]
                destinations |= dict(pieces)
        report = fill(destinations, found.items(), merged=merged, tied=self.tied())
        report.raise_unless_exact()
        self._check_d2t()
        return report

    def _allocate_optional(self, names: Mapping[str, Tensor]) -> None:
        add_optional_parts(self, names, self.checkpoint_name)
        reduced = self.draft_vocab_size < self.vocab_size
        weight = self._projection()

        def allocate(name: str, *shape: int, needed: bool = False, dtype: torch.dtype = weight.dtype) -> None:
            present = needed or self.checkpoint_name(name) in names
            setattr(self, name, torch.empty(shape, dtype=dtype, device=weight.device) if present else None)

        allocate("embed_weight", self.vocab_size, self.hidden_size)
        allocate("lm_head_weight", self.draft_vocab_size, self.hidden_size, needed=reduced)
        allocate("d2t", self.draft_vocab_size, needed=reduced, dtype=torch.int64)
        self.suppress_ids = None

    def _check_d2t(self) -> None:
        if self.d2t is None:
            return
        if self.draft_vocab_size < self.vocab_size and not self.d2t.any():
            raise ValueError(
                f"{self.checkpoint_name('d2t')}: is all zero, needs the offsets of {self.draft_vocab_size} draft ids "
                f"to ids of the vocabulary of {self.vocab_size}"
            )
        ids = torch.arange(self.draft_vocab_size, device=self.d2t.device) + self.d2t
        if ids.min() < 0 or ids.max() >= self.vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"{self.checkpoint_name('d2t')}: needs offsets (target id − draft id) to different ids of "
                f"0 … {self.vocab_size - 1}; got ids {ids.min().item()} … {ids.max().item()}, "
                f"{len(ids.unique())} different ones of {len(ids)}"
            )

    def _mismatches(self, target: TargetShape) -> Iterator[str]:
        for what, draft, theirs in (
            ("vocabulary", self.vocab_size, target.vocab_size),
            ("hidden size", self.target_hidden_size, target.hidden_size),
        ):
            if draft != theirs:
                yield f"{what} (draft {draft}, target {theirs})"

    def check_target(self, target: TargetShape) -> None:
        """Refuse a target that this head was not made for; looks at shapes only, so both may be on meta.

        Raises:
            ValueError: lists every mismatch.
        """
        faults = list(self._mismatches(target))
        if faults:
            raise ValueError(f"the head does not fit this target: {'; '.join(faults)}")

    def share_with_target(self, target: Target) -> None:
        """Take from the target its suppressed ids, and its embedding and LM head where the checkpoint has none.

        A checkpoint's own copy that equals the target's is given up for it.

        Raises:
            ValueError: the target does not fit, or what is to be shared has another shape or dtype.
        """
        self.check_target(target)
        ours, theirs = self._projection(), target.embed_weight
        if (ours.dtype, ours.device) != (theirs.dtype, theirs.device):
            raise ValueError(f"the head is {ours.dtype} on {ours.device}, the target {theirs.dtype} on {theirs.device}")
        self.embed_weight = self._share("embedding", self.embed_weight, target.embed_weight)
        self.lm_head_weight = self._share("LM head", self.lm_head_weight, target.lm_head_weight)
        # rounded to the weights' dtype, as the target does
        self._embed_scale = torch.tensor(target.embed_scale, dtype=self.embed_weight.dtype, device="cpu").item()
        self.suppress_ids = target.suppress_ids

    def _share(self, what: str, own: Tensor | None, theirs: Tensor) -> Tensor:
        if own is not None:
            same = own.shape == theirs.shape and own.dtype == theirs.dtype and torch.equal(own, theirs)
            return theirs.detach() if same else own
        shape, dtype = (self.vocab_size, self.hidden_size), self._projection().dtype
        if tuple(theirs.shape) != shape:
            raise ValueError(
                f"{what}: the checkpoint has none and the target's is {list(theirs.shape)}, needs {list(shape)}"
            )
        if theirs.dtype != dtype:
            raise ValueError(f"{what}: the target's is {theirs.dtype}, needs the draft's {dtype}")
        return theirs.detach()

    def shard_vocabulary(self, group: Any) -> None:
        """Keep this rank's rows of the LM head; `sample` then finds the winner of all ranks of the group."""
        self.lm_head_weight, self.d2t = shard_rows(self._head_weight(), self.d2t, group)
        self._shards = group

    def fp8_head(self) -> FP8Head:
        """A rounded copy of the LM head for `sample`, of this rank's rows."""
        return FP8Head.of(self._head_weight())

    def embed(self, input_ids: Tensor) -> Tensor:
        """The embeddings [T, H] of input_ids [T] int64, scaled as the target scales its own."""
        if self.embed_weight is None:
            raise RuntimeError("the head has no embedding yet: call share_with_target")
        embedded = nn.functional.embedding(input_ids, self.embed_weight)
        return embedded if self._embed_scale == 1 else embedded * self._embed_scale

    def combine_hidden_states(self, hidden: Tensor) -> Tensor:
        """From what the target gives to what `forward` takes; nothing to do but for EAGLE-3."""
        return hidden

    def head_input(self, head_hidden: Tensor) -> Tensor:
        """What the LM head multiplies, from what `forward` returned."""
        return head_hidden

    def _head_weight(self) -> Tensor:
        if self.lm_head_weight is None:
            raise RuntimeError("the head has no LM head yet: call share_with_target")
        return self.lm_head_weight

    def compute_logits(self, head_hidden: Tensor) -> Tensor:
        """Logits [T, draft_vocab_size] of head_hidden [T, H], by row of the LM head, before suppression."""
        return nn.functional.linear(self.head_input(head_hidden), self._head_weight())

    def sample(
        self,
        head_hidden: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        fp8_head: FP8Head | None = None,
        draft_logits_out: Tensor | None = None,
        draft_step: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Draft tokens [R] int64, target ids, without the logits being written unless verification wants them.

        Args:
            head_hidden: [R, H].
            idx_mapping: [R], request slot of each row, −1 for padding.
            temperature: [S] f32 by slot, 0 for greedy.
            seeds: [S] int64 by slot.
            positions: [R] int64, the position before the token being sampled.
            fp8_head: of `fp8_head()`, to be scored in the LM head's place.
            draft_logits_out: [S, K, ≥ V], the logits that the token is drawn from, by target id, −inf outside the
                draft vocabulary.
            draft_step: 0-d, the K index in it.
            out: [R] int64.
        """
        return sample_of_ranks(
            self._shards,
            self.head_input(head_hidden),
            self._head_weight() if fp8_head is None else fp8_head.weight,
            idx_mapping,
            temperature,
            seeds,
            positions,
            weight_scale=None if fp8_head is None else fp8_head.scale,
            suppress_ids=self.suppress_ids,
            d2t=self.d2t,
            draft_logits_out=draft_logits_out,
            draft_step=draft_step,
            out=out,
        )
