"""The built-in pair's two models, written for training: every position of a batch at once, parameters named as in the
Hub's Gemma 4 checkpoints, so that `state_dict()` is what gets saved.

Notation: B sequences, T tokens, H target width, d assistant width, W sliding window, K draft steps, V vocabulary.
The pair has one kv head, which lets attention fold the q heads into the query axis: scores are one batched product
[B, T·heads, keys] and nothing is transposed. Sliding layers look at their own chunk of W keys and the one before.

The assistant is trained in the regime it is used in. With positions 0 … P−1 computed and bonus token x_P it sees
h_{P−1}, the target's keys 0 … P−1 (the last W+1 on sliding layers) and rotary position P, and all K steps keep these.
The row of position P therefore attends to keys shifted by one: shifted key j is key j − 1, visible for P − W ≤ j ≤ P.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

SLIDING, FULL = "sliding_attention", "full_attention"
# Ids 0 … 255 are the bytes themselves; the rest of the vocabulary is never produced by the tokenizer.
PAD, EOS, BOS, VOCAB_SIZE = 256, 257, 258, 288
# Trained on 1024; rotary positions carry on from there.
MAX_LENGTH = 4096
ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
HEAD_DIM = {SLIDING: 256, FULL: 512}
HEADS = 2
EPS = 1e-6
KVStates = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TargetConfig:
    """The target: 2.7 M parameters, the real models' head dims, several layers of either type."""

    hidden_size: int = 160
    intermediate_size: int = 384
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, FULL, SLIDING, FULL)
    sliding_window: int = 64
    final_logit_softcapping: float = 30.0


@dataclass(frozen=True)
class AssistantConfig:
    """The assistant: four query-only layers at its own width and a centroid head (32 clusters of 9 tokens)."""

    backbone_hidden_size: int = 160
    hidden_size: int = 96
    intermediate_size: int = 256
    layer_types: tuple[str, ...] = (SLIDING, SLIDING, SLIDING, FULL)
    sliding_window: int = 64
    num_centroids: int = 32
    top_k: int = 8


@dataclass
class Cache:
    """Keys and values of every target layer while a batch of equally long sequences is generated."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    length: int = 0


class Norm(nn.Module):
    """RMS norm, times weight (not 1 + weight)."""

    def __init__(self, dim: int, init: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), init))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), EPS)


class Linear(nn.Linear):
    """A linear map without bias that follows its input's dtype, the weight staying in full precision."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the base class names it
        return F.linear(input, self.weight.to(input.dtype))


class Rotary:
    """Cosines and sines of every position below `length`, per layer type: [length, 1, D/2]."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}
        for layer_type, rope in ROPE.items():
            dim = HEAD_DIM[layer_type]
            rotated = int(rope.get("partial_rotary_factor", 1.0) * dim // 2)
            # Proportional: exponents over the full head dim, zero frequency (no rotation) beyond the rotated part.
            inv_freq = rope["rope_theta"] ** -(torch.arange(0, 2 * rotated, 2).float() / dim)
            angles = torch.arange(length).float()[:, None] * F.pad(inv_freq, (0, dim // 2 - rotated))
            self.tables[layer_type] = angles.cos()[:, None].to(device), angles.sin()[:, None].to(device)

    def __call__(self, x: Tensor, layer_type: str, start: int = 0) -> Tensor:
        """Rotates x [B, T, heads, D], whose rows are at positions start … start + T − 1."""
        cos, sin = (table[start : start + x.shape[1]].to(x.dtype) for table in self.tables[layer_type])
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Visibility:
    """Which keys a query sees: query i sees keys max(first, i − span + 1) … i (row 0 always sees key 0)."""

    def __init__(self, length: int, window: int, span: int, first: int, device: torch.device) -> None:
        if length % window:
            raise ValueError(f"length must be a multiple of the sliding window {window}, got {length}")
        query, key = torch.arange(length)[:, None], torch.arange(length)[None]
        self.window = window
        self.full = ((key <= query) & ((key >= first) | (key == query))).to(device)
        chunk_query = query.view(-1, window, 1)
        chunk_key = (chunk_query[:, :1] - window) + torch.arange(2 * window)
        in_window = (chunk_key <= chunk_query) & (chunk_key > chunk_query - span)
        self.sliding = (in_window & ((chunk_key >= first) | (chunk_key == chunk_query))).to(device)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Attention of q [N, T, heads, D] over k, v [N, L, D] where `visible` (broadcast to [N, T, heads, L]); scale 1."""
    rows = q.flatten(1, 2)
    scores = (rows @ k.transpose(1, 2)).view(*q.shape[:3], -1)
    probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (probs.flatten(1, 2) @ v).view(q.shape)


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, layer_type: str, visibility: Visibility) -> Tensor:
    """Attention over whole sequences: q [B, T, heads, D], k, v [B, T, D]."""
    if layer_type == FULL:
        return attend(q, k, v, visibility.full[:, None])
    batch, length = q.shape[:2]
    window = visibility.window

    def with_previous_chunk(x: Tensor) -> Tensor:
        chunks = F.pad(x, (0, 0, window, 0)).view(batch, length // window + 1, window, -1)
        return torch.cat([chunks[:, :-1], chunks[:, 1:]], 2).flatten(0, 1)

    visible = visibility.sliding.repeat(batch, 1, 1)[:, :, None]
    chunk_q = q.reshape(-1, window, *q.shape[2:])
    return attend(chunk_q, with_previous_chunk(k), with_previous_chunk(v), visible).view(q.shape)


class Attention(nn.Module):
    """Projections and norms of one attention layer; `owns_kv=False` has queries only."""

    def __init__(self, hidden_size: int, layer_type: str, *, owns_kv: bool) -> None:
        super().__init__()
        dim = HEAD_DIM[layer_type]
        self.layer_type = layer_type
        self.q_proj = Linear(hidden_size, HEADS * dim)
        # Attention has no 1/√D: the norms of q and k start where their product has it.
        self.q_norm = Norm(dim, dim**-0.25)
        if owns_kv:
            self.k_proj = Linear(hidden_size, dim)
            self.v_proj = Linear(hidden_size, dim)
            self.k_norm = Norm(dim, dim**-0.25)
        self.o_proj = Linear(HEADS * dim, hidden_size)

    def query(self, x: Tensor, rotary: Rotary, start: int = 0) -> Tensor:
        return rotary(self.q_norm(self.q_proj(x).unflatten(-1, (HEADS, -1))), self.layer_type, start)

    def keys_values(self, x: Tensor, rotary: Rotary, start: int = 0) -> tuple[Tensor, Tensor]:
        keys = rotary(self.k_norm(self.k_proj(x))[:, :, None], self.layer_type, start)[:, :, 0]
        values = self.v_proj(x)
        return keys, F.rms_norm(values, (values.shape[-1],), None, EPS)


class MLP(nn.Module):
    """down(gelu_tanh(gate) · up)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; the caller runs attention between `self_attn.query` and `finish`."""

    def __init__(self, hidden_size: int, intermediate_size: int, layer_type: str, *, owns_kv: bool) -> None:
        super().__init__()
        self.self_attn = Attention(hidden_size, layer_type, owns_kv=owns_kv)
        self.mlp = MLP(hidden_size, intermediate_size)
        self.input_layernorm = Norm(hidden_size)
        self.post_attention_layernorm = Norm(hidden_size, 0.5)
        self.pre_feedforward_layernorm = Norm(hidden_size)
        self.post_feedforward_layernorm = Norm(hidden_size, 0.5)
        # Away from 1, so that a reader of the checkpoint that forgets it computes something else.
        self.layer_scalar = nn.Parameter(torch.full((1,), 0.75))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + self.post_attention_layernorm(self.self_attn.o_proj(attended.flatten(2)))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar.to(x.dtype)


class Backbone(nn.Module):
    """Embedding table, layers and final norm under the checkpoint's names."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, layer_types: tuple[str, ...], *, owns_kv: bool
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=hidden_size**-0.5)
        self.layers = nn.ModuleList(
            Layer(hidden_size, intermediate_size, layer_type, owns_kv=owns_kv) for layer_type in layer_types
        )
        self.norm = Norm(hidden_size)

    def __iter__(self):
        return iter(cast("list[Layer]", self.layers))


class Target(nn.Module):
    """The Gemma 4 text target."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config.hidden_size, config.intermediate_size, config.layer_types, owns_kv=True)

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return (self.model.embed_tokens(ids) * math.sqrt(self.config.hidden_size)).to(dtype)

    def forward(
        self, ids: Tensor, rotary: Rotary, visibility: Visibility, dtype: torch.dtype, cache: Cache | None = None
    ) -> tuple[Tensor, KVStates]:
        """Post-norm hidden [B, T, H] of ids [B, T], and keys and values [B, T, D] of the last layer of each type."""
        x = self.embed(ids, dtype)
        shared: KVStates = {}
        for layer in self.model:
            normed = layer.input_layernorm(x)
            q = layer.self_attn.query(normed, rotary)
            k, v = layer.self_attn.keys_values(normed, rotary)
            layer_type = layer.self_attn.layer_type
            shared[layer_type] = (k, v)
            if cache is not None:
                cache.keys.append(k)
                cache.values.append(v)
            x = layer.finish(x, attend_sequence(q, k, v, layer_type, visibility))
        if cache is not None:
            cache.length = ids.shape[1]
        return self.model.norm(x), shared

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits in fp32: c · tanh(E h / c)."""
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float() / cap)

    def decode(self, ids: Tensor, rotary: Rotary, cache: Cache, dtype: torch.dtype) -> Tensor:
        """Hidden [B, H] of one more token a sequence, ids [B] at position cache.length; the cache takes them in."""
        position = cache.length
        cache.length += 1
        x = self.embed(ids[:, None], dtype)
        for layer, keys, values in zip(self.model, cache.keys, cache.values, strict=True):
            normed = layer.input_layernorm(x)
            q = layer.self_attn.query(normed, rotary, position)
            k, v = layer.self_attn.keys_values(normed, rotary, position)
            keys[:, position], values[:, position] = k[:, 0], v[:, 0]
            first = max(0, position + 1 - self.config.sliding_window) if layer.self_attn.layer_type == SLIDING else 0
            seen = slice(first, position + 1)
            x = layer.finish(x, attend(q, keys[:, seen], values[:, seen], torch.ones((), device=x.device).bool()))
        return self.model.norm(x)[:, 0]


class MaskedEmbedding(nn.Module):
    """Centroid scores [C, d] choose which clusters of `token_ordering` are looked at."""

    def __init__(self, hidden_size: int, num_centroids: int) -> None:
        super().__init__()
        self.centroids = Linear(hidden_size, num_centroids)
        self.token_ordering: Tensor
        self.register_buffer("token_ordering", torch.arange(VOCAB_SIZE))

    def set_ordering(self, ordering: Tensor) -> None:
        self.token_ordering.copy_(ordering)


class Assistant(nn.Module):
    """The Gemma 4 assistant: query-only layers over the target's keys and values."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config.hidden_size, config.intermediate_size, config.layer_types, owns_kv=False)
        self.pre_projection = Linear(2 * config.backbone_hidden_size, config.hidden_size)
        self.post_projection = Linear(config.hidden_size, config.backbone_hidden_size)
        self.masked_embedding = MaskedEmbedding(config.hidden_size, config.num_centroids)

    def step(
        self, embedded: Tensor, hidden: Tensor, shared: KVStates, rotary: Rotary, visibility: Visibility
    ) -> tuple[Tensor, Tensor]:
        """One draft step of every position: embedded and hidden [B, T, H] → post-norm [B, T, d], fed-back [B, T, H].

        `shared` holds the shifted keys and values (`shift_keys`).
        """
        x = self.pre_projection(torch.cat([embedded, hidden], -1))
        for layer in self.model:
            q = layer.self_attn.query(layer.input_layernorm(x), rotary)
            layer_type = layer.self_attn.layer_type
            x = layer.finish(x, attend_sequence(q, *shared[layer_type], layer_type, visibility))
        x = self.model.norm(x)
        return x, self.post_projection(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits over the whole vocabulary, in fp32."""
        return F.linear(x, self.model.embed_tokens.weight.to(x.dtype)).float()

    def centroid_logits(self, x: Tensor) -> Tensor:
        return self.masked_embedding.centroids(x).float()

    def cluster_of_token(self) -> Tensor:
        """Cluster [V] of each token id: token_ordering lists cluster after cluster."""
        ordering = self.masked_embedding.token_ordering
        size = VOCAB_SIZE // self.config.num_centroids
        return torch.empty_like(ordering).scatter_(
            0, ordering, torch.arange(VOCAB_SIZE, device=ordering.device) // size
        )

    def draft(self, x: Tensor) -> Tensor:
        """The greedy token of each row: argmax over the tokens of the top-k clusters."""
        scores = self.centroid_logits(x)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(-1, scores.topk(self.config.top_k, -1).indices, torch.ones_like(chosen))
        visible = chosen[..., self.cluster_of_token()]
        return self.logits(x).masked_fill(~visible, float("-inf")).argmax(-1)


def shift_keys(shared: KVStates) -> KVStates:
    """Keys and values moved one position later: row P then finds keys 0 … P − 1 at 1 … P."""
    return {name: (F.pad(k, (0, 0, 1, 0))[:, :-1], F.pad(v, (0, 0, 1, 0))[:, :-1]) for name, (k, v) in shared.items()}


def cluster_tokens(embedding: Tensor, num_clusters: int) -> Tensor:
    """A balanced clustering of the rows of `embedding` [V, H], as a token ordering [V] of equally long clusters.

    Halves the set along its principal axis until there are `num_clusters` (a power of two) parts.
    """
    parts = [torch.arange(embedding.shape[0])]
    rows = embedding.double().cpu()
    while len(parts) < num_clusters:
        halves = []
        for part in parts:
            centred = rows[part] - rows[part].mean(0)
            axis = torch.linalg.svd(centred, full_matrices=False).Vh[0]
            order = part[(centred @ axis).argsort()]
            halves += [order[: len(part) // 2], order[len(part) // 2 :]]
        parts = halves
    return torch.cat(parts)


def target_config_json(config: TargetConfig) -> dict[str, Any]:
    """config.json of the target, in the Hub's form."""
    fields = {**asdict(config), **_common_fields(config.layer_types)}
    return {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16", **fields}


def assistant_config_json(config: AssistantConfig) -> dict[str, Any]:
    """config.json of the assistant, in the Hub's form: its layers under `text_config`."""
    text = {
        "model_type": "gemma4_text",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "sliding_window": config.sliding_window,
        "final_logit_softcapping": None,
        **_common_fields(config.layer_types),
        "num_kv_shared_layers": len(config.layer_types),
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": config.backbone_hidden_size,
        "use_ordered_embeddings": True,
        "num_centroids": config.num_centroids,
        "centroid_intermediate_top_k": config.top_k,
        "tie_word_embeddings": True,
        "text_config": text,
    }


def _common_fields(layer_types: tuple[str, ...]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "head_dim": HEAD_DIM[SLIDING],
        "global_head_dim": HEAD_DIM[FULL],
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": EPS,
        "rope_parameters": ROPE,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }
