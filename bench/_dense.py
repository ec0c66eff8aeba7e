"""Drafting in plain PyTorch over dense keys and values: what a compiler gets to optimise."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tridraft.kernels.activation import gated_act_reference
from tridraft.kernels.kv_cache import qk_norm_rope_reference
from tridraft.kernels.norm import add_rms_norm_reference, rms_norm_reference
from tridraft.models.gemma4_mtp import Gemma4MTP
from tridraft.models.paged import LayerKV
from tridraft.speculator.kv_cache import KVCache


def dense_keys(
    model: Gemma4MTP, kv: KVCache, layers: list[LayerKV], slots: Tensor, context: int
) -> list[tuple[Tensor, Tensor]]:
    """For each draft layer the keys and values `[R, Hkv, n, D]` it sees; layers of one kind share them."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for layer, spec in zip(layers, model.kv_specs, strict=True):
        if layer.group not in made:
            seen = context if spec.sliding_window is None else min(context, spec.sliding_window + 1)
            tokens = torch.arange(context - seen, context, device=slots.device)
            blocks = kv.tables[layer.group][slots][:, tokens // kv.block_size]
            cells = (blocks, (tokens % kv.block_size).expand_as(blocks))
            made[layer.group] = tuple(  # type: ignore[assignment]
                cache[cells].transpose(1, 2).contiguous() for cache in (layer.k_cache, layer.v_cache)
            )
    return [made[layer.group] for layer in layers]


def propose(
    model: Gemma4MTP,
    embedding: Tensor,
    keys: list[tuple[Tensor, Tensor]],
    steps: int,
    tokens: Tensor,
    positions: Tensor,
    hidden: Tensor,
) -> Tensor:
    """Greedy drafts `[K, R]` from the newest tokens `[R]` and the hidden states `[R, H]` before them."""
    drafts = []
    for _ in range(steps):
        residual = F.linear(torch.cat((F.embedding(tokens, embedding), hidden), dim=-1), model.pre_projection.weight)
        draft_hidden = _decode(model, residual, positions, keys)
        tokens, hidden = _head(model, draft_hidden), F.linear(draft_hidden, model.post_projection.weight)
        drafts.append(tokens)
    return torch.stack(drafts)


def _decode(model: Gemma4MTP, residual: Tensor, positions: Tensor, keys: list[tuple[Tensor, Tensor]]) -> Tensor:
    layers: Any = model.model.layers
    norms, eps = [*(layer.input_layernorm for layer in layers), model.model.norm], model.config.rms_norm_eps
    normed = rms_norm_reference(residual, norms[0].weight, eps)
    for layer, (k, v), following in zip(layers, keys, norms[1:], strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        q = F.linear(normed, attention.q_proj.weight).unflatten(-1, (-1, attention.head_dim))
        q = qk_norm_rope_reference(
            q, None, None, positions, attention.rotary.inv_freq, attention.q_norm.weight, None, True, False, eps
        )[0]
        attended = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=1.0, enable_gqa=True).flatten(1)
        normed, residual = add_rms_norm_reference(
            F.linear(attended, attention.o_proj.weight),
            residual,
            layer.pre_feedforward_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None,
            eps,
        )
        gate_up = gated_act_reference(F.linear(normed, mlp.gate_up_proj.weight), mlp.activation)
        normed, residual = add_rms_norm_reference(
            F.linear(gate_up, mlp.down_proj.weight),
            residual,
            following.weight,
            layer.post_feedforward_layernorm.weight,
            layer.layer_scalar,
            eps,
        )
    return normed


def _head(model: Gemma4MTP, draft_hidden: Tensor) -> Tensor:
    weight, head = model.model.embed_tokens.weight, model.masked_embedding
    if head is None:
        logits = F.linear(draft_hidden, weight)
        if model.suppress_ids is not None:
            logits = logits.index_fill(1, model.suppress_ids, -torch.inf)
        return logits.argmax(-1)
    top = F.linear(draft_hidden, head.centroids.weight).topk(model.config.centroid_top_k).indices
    ids = head.token_ordering.view(model.config.num_centroids, -1)[top].flatten(1)
    best = torch.bmm(weight[ids], draft_hidden.unsqueeze(2)).squeeze(2).argmax(-1, keepdim=True)
    return ids.gather(1, best).squeeze(1)
