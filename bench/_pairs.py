"""Assistants of the released sizes with random weights, beside a target of which only the cache is there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tridraft.kernels._op import cdiv
from tridraft.models.gemma4_mtp import Gemma4MTP, Gemma4MTPConfig
from tridraft.models.paged import KVSpec
from tridraft.speculator.batch import InputBatch, SamplingState, VerifyResult
from tridraft.speculator.kv_cache import KVCache

SLIDING, FULL = "sliding_attention", "full_attention"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 131072

# hidden, intermediate, query heads, kv heads (sliding, full), window, backbone, centroid head, suppressed ids
_RELEASED: dict[str, tuple[int, int, int, tuple[int, int], int, int, bool, list[int] | None]] = {
    "E2B": (256, 2048, 4, (1, 1), 512, 1536, True, None),
    "12B": (1024, 8192, 16, (8, 1), 1024, 3840, False, [258883, 258882]),
}


def config_json(name: str) -> dict[str, Any]:
    """The `config.json` of the released assistant "E2B" or "12B"."""
    hidden, intermediate, heads, (sliding_kv, full_kv), window, backbone, centroids, _ = _RELEASED[name]
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": centroids,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": {
            "vocab_size": 262144,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "num_attention_heads": heads,
            "num_key_value_heads": sliding_kv,
            "num_global_key_value_heads": full_kv,
            "attention_k_eq_v": sliding_kv != full_kv,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": window,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    }


def _random_tensors(model: Gemma4MTP, centroids: bool, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """A random checkpoint for a model that is being loaded, by the Hub's names."""
    dtype = model.pre_projection.weight.dtype
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name.startswith("masked_embedding") and not centroids:
            continue
        if name.endswith("token_ordering"):
            yield name, torch.randperm(shape[0], device=device)
        elif len(shape) == 1:
            yield name, 0.5 + torch.rand(shape, device=device, dtype=dtype)
        elif "gate_up_proj" in name:
            for part in ("gate_proj", "up_proj"):
                half = torch.randn(shape[0] // 2, shape[1], device=device, dtype=dtype)
                yield name.replace("gate_up_proj", part), half * shape[1] ** -0.5
        else:
            yield name, torch.randn(shape, device=device, dtype=dtype) * shape[1] ** -0.5


def random_assistant(name: str, dtype: torch.dtype, device: torch.device) -> Gemma4MTP:
    """The released assistant `name` with random weights."""
    *_, centroids, suppressed = _RELEASED[name]
    with torch.device("meta"):
        config = Gemma4MTPConfig.from_dict(config_json(name))
        model = Gemma4MTP(config, {"suppress_tokens": suppressed}, dtype=dtype)
    model.load_weights(_random_tensors(model, centroids, device), device=device)
    return model


@dataclass(frozen=True)
class Target:
    """What the drafter shares with its target: the embedding, and the last layer of each kind."""

    embed_weight: Tensor
    kv_specs: tuple[KVSpec, ...]
    layer_types: tuple[str, ...] = (SLIDING, FULL)
    kv_index: tuple[int, ...] = (0, 1)
    embed_scale: float = 1.0

    @property
    def vocab_size(self) -> int:
        return self.embed_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embed_weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device


def random_target(model: Gemma4MTP) -> Target:
    """A target that fits the assistant."""
    shape, like = (model.vocab_size, model.backbone_hidden_size), model.pre_projection.weight
    specs = dict(zip(model.layer_types, model.kv_specs, strict=True))
    return Target(torch.randn(shape, device=like.device, dtype=like.dtype), (specs[SLIDING], specs[FULL]))


def cache_bytes(target: Target, num_reqs: int, context: int) -> int:
    """Bytes of a cache in which every request has `context` keys."""
    per_token = sum(2 * spec.num_kv_heads * spec.head_dim * target.dtype.itemsize for spec in target.kv_specs)
    return per_token * num_reqs * cdiv(context, BLOCK_SIZE) * BLOCK_SIZE


def random_cache(target: Target, num_reqs: int, context: int) -> KVCache:
    """A cache of random keys and values, each request's `context` in blocks all over it."""
    used = cdiv(context, BLOCK_SIZE)
    kv = KVCache(
        target.kv_specs,
        num_blocks=num_reqs * used,
        block_size=BLOCK_SIZE,
        max_num_reqs=num_reqs,
        max_model_len=MAX_MODEL_LEN,
        dtype=target.dtype,
        device=target.device,
    )
    for layer in kv.layers:
        layer.k_cache.normal_()
        layer.v_cache.normal_()
    for table in kv.tables:
        table[:, :used] = torch.randperm(kv.num_blocks, device=target.device).view(num_reqs, used)
    return kv


def target_pass(
    target: Target, num_reqs: int, context: int, rows: int, num_slots: int
) -> tuple[InputBatch, VerifyResult, SamplingState, Tensor]:
    """The arguments of `propose` after a pass over the last `rows` tokens of each request, all of them accepted."""
    device = target.device

    def ints(count: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, (count,), device=device, dtype=dtype)

    positions = torch.arange(context - rows, context, device=device).repeat(num_reqs)
    batch = InputBatch(
        input_ids=ints(num_reqs * rows, target.vocab_size),
        positions=positions,
        query_start_loc=torch.arange(0, rows * num_reqs + 1, rows, device=device, dtype=torch.int32),
        seq_lens=torch.full((num_reqs,), context, device=device, dtype=torch.int32),
        idx_mapping=torch.randperm(num_slots, device=device)[:num_reqs].int(),
        num_reqs=num_reqs,
        num_tokens=num_reqs * rows,
        max_query_len=rows,
    )
    newest = [ints(num_slots, target.vocab_size) for _ in range(2)]
    sampled = torch.full((num_reqs,), rows, device=device, dtype=torch.int32)
    verify = VerifyResult(sampled, torch.zeros_like(sampled), *newest)
    sampling = SamplingState(torch.zeros(num_slots, device=device), ints(num_slots, 2**31))
    hidden = torch.randn(num_reqs * rows, target.hidden_size, device=device, dtype=target.dtype)
    return batch, verify, sampling, hidden
