"""Gemma 4 MTP: the assistant model that drafts from its target's keys and values.

Four decoder layers with queries only. One row a request: the last committed token x_P and the target's hidden
state h before it (after the target's final norm). H is the target's width, d the assistant's:

    x  = W_pre [E(x_P) · scale ; h]                       E: the target's embedding, W_pre [d, 2H]
    for each layer, with K and V the target's cache of the layer's type:
        q = rope(q_norm(W_q norm_in(x)), position)
        x = x + norm_post_attention(W_o softmax(q Kᵀ) V)
        x = x + norm_post_feedforward(W_down(gelu(W_gate y) · W_up y)),   y = norm_pre_feedforward(x)
        x = x · layer_scalar
    x  = norm(x)                                          logits = lm_head(x), width d
    h' = W_post x                                         the next step's h, W_post [H, d]

The head is tied to the assistant's own d-wide embedding. Checkpoints with `masked_embedding.*` tensors score
2048 centroids first and only the tokens of the best 32. Neither head has a soft cap.

Sources: `transformers` (`gemma4_assistant`), whose checkpoints' names and shapes are read unchanged.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tridraft.kernels._pdl import early_successors
from tridraft.kernels.embedding import embed_concat
from tridraft.kernels.kv_cache import qk_norm_rope
from tridraft.kernels.masked_embedding import masked_embedding_logits, masked_embedding_sample
from tridraft.kernels.sampling import draft_sample
from tridraft.kernels.suppress import make_suppress_ids, suppress_tokens_
from tridraft.models.fp8_head import FP8Head
from tridraft.models.layers import ACTIVATIONS, Activation, GatedMLP, Joint, Linear, RMSNorm, RotaryFrequencies
from tridraft.models.paged import AttentionBatch, KVSpec, LayerKV
from tridraft.models.vocab_parallel import sample_of_ranks, shard_rows
from tridraft.models.weights import LoadReport, fill, iterate_tensors, read_json

logger = logging.getLogger(__name__)

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_CENTROIDS, _TOKEN_ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


class Target(Protocol):
    """What `check_target` and `kv_sources` ask of a target; `HFTarget` answers it, also on the meta device."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layer_types(self) -> Sequence[str]: ...
    @property
    def kv_specs(self) -> Sequence[KVSpec]: ...
    @property
    def kv_index(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Gemma4MTPConfig:
    """The assistant's shape.

    Attributes:
        backbone_hidden_size: the target's width H.
        hidden_size: the assistant's width d.
        layer_types: "sliding_attention" or "full_attention" for each layer.
        kv_specs: for each layer, the target's keys and values it reads.
        rope: `rope_parameters` of each layer type.
        num_centroids: clusters of the vocabulary; used when the checkpoint has a centroid head.
        centroid_top_k: clusters whose tokens are scored.
    """

    vocab_size: int
    backbone_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    layer_types: tuple[str, ...]
    kv_specs: tuple[KVSpec, ...]
    rope: Mapping[str, Mapping[str, Any]]
    activation: Activation
    rms_norm_eps: float
    num_centroids: int
    centroid_top_k: int

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Gemma4MTPConfig":
        """Read an assistant's `config.json`.

        Raises:
            ValueError: not a Gemma 4 assistant, or a setting this model does not have.
        """
        kind = config.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type: got {kind!r}, needs a Gemma 4 assistant ({' or '.join(MODEL_TYPES)})")
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ValueError("text_config: missing from the assistant's configuration")
        try:
            return cls._from_text_config(config, text)
        except KeyError as error:
            raise ValueError(f"text_config: {error.args[0]!r} is missing") from error

    @classmethod
    def _from_text_config(cls, config: Mapping[str, Any], text: Mapping[str, Any]) -> "Gemma4MTPConfig":
        num_layers = text["num_hidden_layers"]
        layer_types = tuple(text["layer_types"])
        if len(layer_types) != num_layers or not set(layer_types) <= set(_ROPE):
            raise ValueError(f"layer_types: got {list(layer_types)}, needs {num_layers} of {sorted(_ROPE)}")
        if text.get("num_kv_shared_layers", num_layers) not in (0, num_layers):
            raise ValueError(
                f"num_kv_shared_layers: got {text['num_kv_shared_layers']}, needs {num_layers}: "
                "every layer of an assistant reads its target's keys and values"
            )
        for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp", "attention_bias"):
            if text.get(name):
                raise ValueError(f"{name}: got {text[name]!r}, which an assistant does not have")
        if text.get("use_bidirectional_attention") == "all":
            raise ValueError("use_bidirectional_attention: got 'all', needs a causal target")
        activation = text.get("hidden_activation", "gelu_pytorch_tanh")
        if activation not in ACTIVATIONS:
            raise ValueError(f"hidden_activation: got {activation!r}, needs one of {sorted(ACTIVATIONS)}")
        rope = text.get("rope_parameters") or _ROPE
        if not set(layer_types) <= set(rope):
            raise ValueError(f"rope_parameters: got {sorted(rope)}, needs {sorted(set(layer_types))}")
        num_heads = text["num_attention_heads"]
        kv_specs = tuple(_kv_spec(text, index, kind) for index, kind in enumerate(layer_types))
        for spec in kv_specs:
            if num_heads % spec.num_kv_heads:
                raise ValueError(f"num_attention_heads: got {num_heads}, needs a multiple of {spec.num_kv_heads}")
        return cls(
            vocab_size=text["vocab_size"],
            backbone_hidden_size=config["backbone_hidden_size"],
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_attention_heads=num_heads,
            layer_types=layer_types,
            kv_specs=kv_specs,
            rope=rope,
            activation=ACTIVATIONS[activation],
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            num_centroids=config.get("num_centroids", 2048),
            centroid_top_k=config.get("centroid_intermediate_top_k", 32),
        )


def _kv_spec(text: Mapping[str, Any], index: int, layer_type: str) -> KVSpec:
    if layer_type == "sliding_attention":
        return KVSpec(text["head_dim"], text["num_key_value_heads"], text["sliding_window"])
    # the Hub's files give full layers' shapes by name; files written by transformers 5.23 and later, by layer
    overrides = (text.get("per_layer_config") or {}).get(str(index), {})
    head_dim = overrides.get("head_dim", text.get("global_head_dim") or 512)
    num_kv_heads = text["num_key_value_heads"]
    if text.get("attention_k_eq_v"):
        num_kv_heads = text.get("num_global_key_value_heads") or num_kv_heads
    return KVSpec(head_dim, overrides.get("num_key_value_heads", num_kv_heads), None)


class QueryAttention(nn.Module):
    """Attention that projects queries only; keys and values are a target layer's, already in its cache."""

    def __init__(self, config: Gemma4MTPConfig, index: int, *, dtype=None, device=None) -> None:
        super().__init__()
        layer_type, spec = config.layer_types[index], config.kv_specs[index]
        width = config.num_attention_heads * spec.head_dim
        self.head_dim = spec.head_dim
        self.sliding_window = spec.sliding_window
        self.q_proj = Linear(config.hidden_size, width, dtype=dtype, device=device)
        self.q_norm = RMSNorm(spec.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
        self.o_proj = Linear(width, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryFrequencies(config.rope[layer_type], spec.head_dim, device=device)

    def forward(
        self,
        joint: Joint,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        window_extra: int,
    ) -> tuple[Tensor, Tensor]:
        """Attention's output [R, d] of what `joint` makes of x [R, d], and the stream [R, d].

        A sliding layer sees the last `sliding_window + window_extra` keys.
        """
        q, stream = self.q_proj.behind(joint, x, residual)
        q = q.unflatten(-1, (-1, self.head_dim))
        q = qk_norm_rope(q, positions, self.rotary.inv_freq, q_weight=self.q_norm.weight, eps=self.q_norm.eps, out=q)
        attended = batch.attention(
            q,
            kv.k_cache,
            kv.v_cache,
            batch.block_tables[kv.group],
            batch.query_start_loc,
            batch.seq_lens,
            scale=1.0,  # the query's norm takes the place of 1 / √D
            max_query_len=batch.max_query_len,
            sliding_window=None if self.sliding_window is None else self.sliding_window + window_extra,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            metadata_ready=True,  # behind `qk_norm_rope`
        )
        return self.o_proj(attended.flatten(-2)), stream


class Gemma4MTPLayer(nn.Module):
    """One decoder layer, from the output of what is in front to its own; a `Joint` leads from one to the next."""

    layer_scalar: Tensor

    def __init__(self, config: Gemma4MTPConfig, index: int, *, dtype=None, device=None) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)

        self.input_layernorm = norm()
        self.self_attn = QueryAttention(config, index, dtype=dtype, device=device)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation, dtype=dtype, device=device)
        self.post_feedforward_layernorm = norm()
        self.register_buffer("layer_scalar", torch.empty(1, dtype=dtype, device=device))

    def forward(
        self,
        joint: Joint,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        kv: LayerKV,
        batch: AttentionBatch,
        window_extra: int,
    ) -> tuple[Tensor, Tensor]:
        """From x [R, d], which is to join the residual stream [R, d], to what is to join it next, and the stream."""
        attended, stream = self.self_attn(joint, x, residual, positions, kv, batch, window_extra)
        between = Joint(self.pre_feedforward_layernorm, self.post_attention_layernorm)
        return self.mlp(between, attended, stream)

    def joint(self, next_norm: RMSNorm) -> Joint:
        """What lies between this layer and the next norm."""
        return Joint(next_norm, self.post_feedforward_layernorm, self.layer_scalar)


class Gemma4MTPDecoder(nn.Module):
    """The layers, their final norm, and the d-wide embedding that the head is tied to."""

    def __init__(self, config: Gemma4MTPConfig, *, dtype=None, device=None) -> None:
        super().__init__()
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            Gemma4MTPLayer(config, index, dtype=dtype, device=device) for index in range(len(config.layer_types))
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, positions: Tensor, kv: Sequence[LayerKV], batch: AttentionBatch, window_extra: int
    ) -> Tensor:
        """From the first layer's input [R, d] to the final norm's output [R, d]."""
        norms = [*(layer.input_layernorm for layer in self.layers), self.norm]
        joint, stream = Joint(norms[0]), None
        for layer, layer_kv, next_norm in zip(self.layers, kv, norms[1:], strict=True):
            x, stream = layer(joint, x, stream, positions, layer_kv, batch, window_extra)
            joint = layer.joint(next_norm)  # type: ignore[operator]
        assert stream is not None  # a model has layers
        return joint(x, stream)[0]


class MaskedEmbedding(nn.Module):
    """The centroid head's tensors: which tokens are scored is decided by the best centroids of the hidden state."""

    token_ordering: Tensor

    def __init__(self, config: Gemma4MTPConfig, *, dtype=None, device=None) -> None:
        super().__init__()
        top_k, most = config.centroid_top_k, config.num_centroids
        if not 1 <= top_k <= most:
            raise ValueError(f"centroid_intermediate_top_k: got {top_k}, needs 1 to num_centroids, {most}")
        self.centroids = Linear(config.hidden_size, config.num_centroids, dtype=dtype, device=device)
        self.register_buffer("token_ordering", torch.empty(config.vocab_size, dtype=torch.int64, device=device))


class Gemma4MTP(nn.Module):
    """The assistant model: `forward` for one draft step, then `sample` (or `compute_logits`) for its token.

    Build it on its device, or on the meta device and name the device to `load_weights`. Before the first step it
    has to be given the target's embedding (`share_embedding`).

    Attributes:
        layer_types: of each draft layer.
        kv_specs: of each draft layer, what the target layer it reads has to store.
        suppress_tokens: ids from the assistant's `generation_config.json` that are never drafted.
        suppress_ids: the same as a device tensor once weights are loaded; None when there are none.
        masked_embedding: the centroid head; None where the checkpoint has the dense one.
    """

    suppress_ids: Tensor | None
    masked_embedding: MaskedEmbedding | None

    def __init__(
        self,
        config: Gemma4MTPConfig,
        generation_config: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.backbone_hidden_size = config.backbone_hidden_size
        self.layer_types = config.layer_types
        self.kv_specs = config.kv_specs
        self.suppress_tokens: list[int] | None = (generation_config or {}).get("suppress_tokens")
        make_suppress_ids(self.suppress_tokens, self.vocab_size, torch.device("cpu"))  # refuses bad ids before loading

        backbone = config.backbone_hidden_size
        self.model = Gemma4MTPDecoder(config, dtype=dtype, device=device)
        self.pre_projection = Linear(2 * backbone, config.hidden_size, dtype=dtype, device=device)
        self.post_projection = Linear(config.hidden_size, backbone, dtype=dtype, device=device)
        self.masked_embedding = None
        self.register_buffer("suppress_ids", None, persistent=False)
        self._embedding: Tensor | None = None
        self._embedding_scale = 1.0
        self._d2t: Tensor | None = None
        self._shards: Any = None

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype, device: torch.device | str, target: Target | None = None
    ) -> "Gemma4MTP":
        """Load an assistant from a checkpoint directory, refusing one that does not fit `target` before allocating.

        Raises:
            FileNotFoundError: a file of the checkpoint is absent.
            ValueError: a file is not what it should be, or the assistant does not fit the target.
        """
        content = read_json(path, "config.json")
        generation_config = read_json(path, "generation_config.json", required=False)
        try:
            with torch.device("meta"):
                model = cls(Gemma4MTPConfig.from_dict(content), generation_config, dtype=dtype)
            if target is not None:
                model.check_target(target)
            report = model.load_weights(iterate_tensors(path), device=device)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if report.unexpected:
            logger.warning(
                "%s: ignored tensors that the model has no place for: %s", path, ", ".join(report.unexpected)
            )
        return model

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, device: torch.device | str | None = None
    ) -> LoadReport:
        """Fill the model from a checkpoint's tensors, by their names on the Hub. Loading again replaces everything.

        The head is the centroid one if the checkpoint has its tensors, whatever the configuration says.

        Args:
            tensors: names and tensors, in any order, any float dtype.
            device: where a model built on the meta device is to live; default: the default device.

        Raises:
            ValueError: a tensor is missing or has another shape; `token_ordering` is not a permutation;
                `lm_head.weight` is there and is not the embedding.
        """
        if self.pre_projection.weight.is_meta:
            self.to_empty(device=torch.get_default_device() if device is None else device)
        weight = self.pre_projection.weight
        self.masked_embedding = MaskedEmbedding(self.config, dtype=weight.dtype, device=weight.device)
        report = fill(
            self._destinations(),
            tensors,
            optional=(_CENTROIDS, _TOKEN_ORDERING),
            tied={"lm_head.weight": "model.embed_tokens.weight"},
        )
        if len(report.absent) == 1:  # half a head
            report = replace(report, missing=(*report.missing, *report.absent))
        report.raise_unless_complete()
        if report.absent:
            self.masked_embedding = None
        else:
            self._check_token_ordering(self.masked_embedding.token_ordering)
        # Now and not earlier, when the device may be meta, nor at the first step, which may be inside a capture.
        self.suppress_ids = make_suppress_ids(self.suppress_tokens, self.vocab_size, weight.device)
        return report

    def _destinations(self) -> dict[str, Tensor]:
        destinations = {}
        for name, tensor in self.state_dict().items():
            if name.endswith("gate_up_proj.weight"):
                gate, up = tensor.chunk(2)
                destinations[name.replace("gate_up_proj", "gate_proj")] = gate
                destinations[name.replace("gate_up_proj", "up_proj")] = up
            else:
                destinations[name] = tensor
        return destinations

    def _check_token_ordering(self, token_ordering: Tensor) -> None:
        if self.vocab_size % self.config.num_centroids:
            raise ValueError(
                f"num_centroids: got {self.config.num_centroids}, needs a divisor of the vocabulary {self.vocab_size}"
            )
        identity = torch.arange(self.vocab_size, device=token_ordering.device)
        if not torch.equal(token_ordering.sort().values, identity):
            raise ValueError(f"{_TOKEN_ORDERING}: needs every id of 0 … {self.vocab_size - 1} once")

    def kv_sources(self, target: Target) -> list[int]:
        """For each draft layer, the index in `target.kv_specs` of the keys it reads.

        That is the target's last layer of the same type that owns keys and values.
        """
        # later layers replace earlier ones; a layer that shares keys leads to the layer it shares them with
        last = dict(zip(target.layer_types, target.kv_index, strict=True))
        return [last[layer_type] for layer_type in self.layer_types]

    def check_target(self, target: Target) -> None:
        """Refuse a target that this assistant was not made for; looks at shapes only, so both may be on meta.

        Raises:
            ValueError: lists every mismatch.
        """
        faults = []

        def compare(what: str, draft: object, theirs: object) -> None:
            if draft != theirs:
                faults.append(f"{what} (draft {draft}, target {theirs})")

        compare("vocabulary", self.vocab_size, target.vocab_size)
        compare("backbone width", self.backbone_hidden_size, target.hidden_size)
        absent = sorted(set(self.layer_types) - set(target.layer_types))
        if absent:
            faults.append(f"layer types (draft reads {', '.join(absent)}, target has none)")
        else:
            theirs = {
                kind: target.kv_specs[index]
                for kind, index in zip(self.layer_types, self.kv_sources(target), strict=True)
            }
            ours = dict(zip(self.layer_types, self.kv_specs, strict=True))
            for kind in sorted(ours):
                compare(f"head dim of {kind}", ours[kind].head_dim, theirs[kind].head_dim)
                compare(f"kv heads of {kind}", ours[kind].num_kv_heads, theirs[kind].num_kv_heads)
                compare(f"window of {kind}", ours[kind].sliding_window, theirs[kind].sliding_window)
        if faults:
            raise ValueError(f"the assistant does not fit this target: {'; '.join(faults)}")

    def share_embedding(self, weight: Tensor, scale: float) -> None:
        """Use the target's embedding [V, H]; `scale` multiplies its rows, rounded to their dtype as the target does.

        Raises:
            ValueError: another shape than the vocabulary and the backbone width, or another dtype.
        """
        shape = (self.vocab_size, self.backbone_hidden_size)
        if tuple(weight.shape) != shape:
            raise ValueError(f"weight: got shape {list(weight.shape)}, needs {list(shape)}")
        if weight.dtype != self.pre_projection.weight.dtype:
            raise ValueError(f"weight: got {weight.dtype}, needs the draft's {self.pre_projection.weight.dtype}")
        self._embedding = weight.detach()
        self._embedding_scale = torch.tensor(scale, dtype=weight.dtype, device="cpu").item()

    def shard_vocabulary(self, group: Any) -> None:
        """Keep this rank's rows of the head; `sample` then finds the winner of all ranks of the group.

        Raises:
            ValueError: a centroid head, which scores a few thousand rows and is not worth a reduction.
        """
        if self.masked_embedding is not None:
            raise ValueError("tensor_parallel_group: got one, a centroid head is not shared between ranks")
        head = self.model.embed_tokens
        weight, self._d2t = shard_rows(head.weight, None, group)
        head.weight = nn.Parameter(weight, requires_grad=False)
        self._shards = group

    def fp8_head(self) -> FP8Head:
        """A rounded copy of the head for `sample`, of this rank's rows.

        Raises:
            ValueError: a centroid head, of whose rows a step reads few.
        """
        if self.masked_embedding is not None:
            raise ValueError("lm_head_dtype: got 'fp8', needs 'auto' with a centroid head")
        return FP8Head.of(self.model.embed_tokens.weight.detach())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
        *,
        window_extra: int,
        out_hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            input_ids: [R] int64, each request's last token, committed or drafted.
            positions: [R] int64, rotary position; the same at every step of a round.
            hidden: [R, H], the target's hidden state before the last committed token, then the previous step's output.
            kv: for each draft layer, the target layer's cache it reads (`kv_sources`).
            batch: one token a request; `seq_lens` counts committed keys, none of this step's.
            window_extra: 1 lets sliding layers see one key more than their window, as the reference does from the
                bonus token's position; 0 from the position before.
            out_hidden: [R, H], where to write the second result; may be `hidden` itself.

        Returns:
            The hidden state for the head [R, d], and the hidden state to feed to the next step [R, H].
        """
        if self._embedding is None:
            raise RuntimeError("the draft has no embedding yet: call share_embedding with the target's")
        x = embed_concat(input_ids, self._embedding, hidden, scale=self._embedding_scale)
        with early_successors():
            draft_hidden = self.model(self.pre_projection(x), positions, kv, batch, window_extra)
            return draft_hidden, self.post_projection(draft_hidden, out=out_hidden)

    def compute_logits(self, draft_hidden: Tensor) -> Tensor:
        """Logits [R, V] of draft_hidden [R, d]; −inf at suppressed ids and outside the selected centroids."""
        head = self.model.embed_tokens
        if self.masked_embedding is not None:
            return masked_embedding_logits(
                draft_hidden,
                self.masked_embedding.centroids.weight,
                self.masked_embedding.token_ordering,
                head.weight,
                self.config.centroid_top_k,
                suppress_ids=self.suppress_ids,
            )
        logits = head(draft_hidden)
        return logits if self.suppress_ids is None else suppress_tokens_(logits, self.suppress_ids)

    def sample(
        self,
        draft_hidden: Tensor,
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
        """Draft tokens [R] int64, without the logits being written anywhere unless verification wants them.

        Args:
            draft_hidden: [R, d].
            idx_mapping: [R], request slot of each row, −1 for padding.
            temperature: [S] f32 by slot, 0 for greedy.
            seeds: [S] int64 by slot.
            positions: [R] int64, the position before the token being sampled, not the rotary one.
            fp8_head: of `fp8_head()`, to be scored in the dense head's place.
            draft_logits_out: [S, K, ≥ V], where the logits go that the token is drawn from.
            draft_step: 0-d, the K index in it.
            out: [R] int64.
        """
        head, centroid_head = self.model.embed_tokens, self.masked_embedding
        request = (idx_mapping, temperature, seeds, positions)
        if centroid_head is None:
            return sample_of_ranks(
                self._shards,
                draft_hidden,
                head.weight if fp8_head is None else fp8_head.weight,
                *request,
                weight_scale=None if fp8_head is None else fp8_head.scale,
                suppress_ids=self.suppress_ids,
                d2t=self._d2t,
                draft_logits_out=draft_logits_out,
                draft_step=draft_step,
                out=out,
            )
        if draft_logits_out is not None:
            logits = self.compute_logits(draft_hidden)
            return draft_sample(logits, *request, draft_logits_out=draft_logits_out, draft_step=draft_step, out=out)
        return masked_embedding_sample(
            draft_hidden,
            centroid_head.centroids.weight,
            centroid_head.token_ordering,
            head.weight,
            self.config.centroid_top_k,
            *request,
            suppress_ids=self.suppress_ids,
            out=out,
        )
