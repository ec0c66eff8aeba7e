"""Random Gemma 4 pairs: tiny ones of every kind for the oracle tests, and assistants of the released sizes.

Norms, layer scalars and the token ordering are random too: with their initial values a missing operation
would go unnoticed. Head widths (64 sliding, 128 full) are the smallest that the GPU kernels take.
"""

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tridraft.models.gemma4_mtp import Gemma4MTP, Gemma4MTPConfig

with torch.device("meta"):
    torch.empty(0)  # torch lists its constructors once, and must not list those that the poison fixture replaced

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 8

_TARGET: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": None,
}
_DRAFT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_MIRRORED = {  # what an assistant has in common with its target
    *("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim"),
    *("num_global_key_value_heads", "attention_k_eq_v", "sliding_window", "max_position_embeddings"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
_K_EQ_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_SOFTCAP = {"final_logit_softcapping": 30.0}

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "k_eq_v": ({**_K_EQ_V, **_SOFTCAP}, {}),
    "kv_shared": (
        {
            "num_hidden_layers": 7,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 3,
            # transformers slices the per-layer inputs of shared layers, so it needs some
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
            **_SOFTCAP,
        },
        {},
    ),
    "ordered": (
        {"num_key_value_heads": 1, **_SOFTCAP},
        {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 4},
    ),
    "moe": (
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, **_K_EQ_V},
        {},
    ),
}
"""For each kind, what its target's text config and its assistant's top-level config change."""


@dataclass(frozen=True)
class TinyPair:
    """A target and an assistant as `transformers` models."""

    target: Any
    assistant: Any

    def save(self, directory: Path, *, suppress_tokens: list[int] | None = None) -> tuple[Path, Path]:
        """Write both in the Hub's format and return the target's and the assistant's directory."""
        for model, name in ((self.target, "target"), (self.assistant, "assistant")):
            model.generation_config.suppress_tokens = suppress_tokens
            model.save_pretrained(directory / name)
        return directory / "target", directory / "assistant"


def target_config(variant: str) -> dict[str, Any]:
    """The text config of the variant's target, as keyword arguments and as the Hub's `config.json` has it."""
    return {**_TARGET, **VARIANTS[variant][0]}


def assistant_config(variant: str) -> dict[str, Any]:
    """The assistant's `config.json` of the variant, as the Hub has it."""
    target = target_config(variant)
    mirrored = {name: value for name, value in target.items() if name in _MIRRORED}
    return {
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "text_config": {"model_type": "gemma4_text", **mirrored, **_DRAFT},
        **VARIANTS[variant][1],
    }


def tiny_pair(
    variant: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> TinyPair:
    """A random pair of the variant, the same for the same seed."""
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4ForCausalLM,
        Gemma4TextConfig,
    )

    torch.manual_seed(seed)
    target: Any = Gemma4ForCausalLM(Gemma4TextConfig(**target_config(variant)))
    config = {name: value for name, value in assistant_config(variant).items() if name != "model_type"}
    text = {name: value for name, value in config.pop("text_config").items() if name != "model_type"}
    assistant: Any = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text), **config))
    for offset, model in enumerate((target, assistant)):
        randomize_(model, seed + offset + 1)
        model.to(device=device, dtype=dtype).eval().requires_grad_(False)
    if target_config(variant).get("enable_moe_block") and dtype != torch.bfloat16:
        target.set_experts_implementation("batched_mm")  # grouped products are bfloat16 only on a GPU
    assistant.generation_config.num_assistant_tokens = 4
    return TinyPair(target, assistant)


def randomize_(model: torch.nn.Module, seed: int) -> None:
    """Give every weight a random value of a scale at which each operation shows in the output."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                # attention weights spread over all keys; at 1 they pick one, and a lost key goes unnoticed
                parameter.copy_((1 + 0.3 * normal(parameter.shape)) * parameter.shape[0] ** -0.25)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * normal(parameter.shape))
            elif "embed" in name:
                parameter.copy_(normal(parameter.shape) * 0.1)
            else:
                parameter.copy_(normal(parameter.shape) * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
            elif name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(buffer.numel(), generator=generator))


def float64_copy(model: Any) -> Any:
    """The model in float64, also inside its norms, with the values its own dtype gives weights and embedding scales."""
    exact = copy.deepcopy(model).double()
    for ours, theirs in zip(exact.modules(), model.modules(), strict=True):
        if hasattr(theirs, "embed_scale"):
            ours.embed_scale = theirs.embed_scale.to(theirs.weight.dtype).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("batched_mm")  # the grouped product has no float64
    forward = exact.forward

    def forward_without_float32(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            return forward(*args, **kwargs)

    exact.forward = forward_without_float32
    return exact


def worst_of(results: Iterable[torch.Tensor], exact: torch.Tensor) -> torch.Tensor:
    """The result farthest from `exact`: one run of a chain this long says little about the error of another."""
    return max(results, key=lambda result: (result.double() - exact).abs().max().item())


# hidden, intermediate, query heads, kv heads (sliding, full), window, backbone, centroids
_RELEASED = {
    "e2b": (256, 2048, 4, (1, 1), 512, 1536, True),
    "e4b": (256, 2048, 4, (2, 2), 512, 2560, True),
    "12b": (1024, 8192, 16, (8, 1), 1024, 3840, False),
    "26b": (1024, 8192, 16, (8, 2), 1024, 2816, False),
    "31b": (1024, 8192, 32, (16, 4), 1024, 5376, False),
}


def released_config(name: str) -> dict[str, Any]:
    """The `config.json` of the released assistant `name`: "e2b", "e4b", "12b", "26b" or "31b"."""
    hidden, intermediate, heads, (sliding_kv, full_kv), window, backbone, ordered = _RELEASED[name]
    unified = "_unified" if name == "12b" else ""
    return {
        "model_type": f"gemma4{unified}_assistant",
        "backbone_hidden_size": backbone,
        "use_ordered_embeddings": ordered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": {
            "model_type": f"gemma4{unified}_text",
            "vocab_size": 262144,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 4,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "num_attention_heads": heads,
            "num_key_value_heads": sliding_kv,
            "num_global_key_value_heads": full_kv if sliding_kv != full_kv else None,
            "attention_k_eq_v": sliding_kv != full_kv,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": window,
            **({} if unified else {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}),
        },
    }


def checkpoint_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of an assistant's checkpoint, by the Hub's names."""
    text = config["text_config"]
    vocab, hidden, intermediate = text["vocab_size"], text["hidden_size"], text["intermediate_size"]
    backbone = config["backbone_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * backbone),
        "post_projection.weight": (backbone, hidden),
    }
    for index, kind in enumerate(text["layer_types"]):
        head_dim = text["head_dim" if kind == SLIDING else "global_head_dim"]
        heads = text["num_attention_heads"]
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "pre_feedforward_layernorm.weight": (hidden,),
            "post_feedforward_layernorm.weight": (hidden,),
            "layer_scalar": (1,),
            "self_attn.q_proj.weight": (heads * head_dim, hidden),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (hidden, heads * head_dim),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.get("use_ordered_embeddings"):
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], hidden)
        shapes["masked_embedding.token_ordering"] = (vocab,)
    return shapes


def random_tensors(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """A random checkpoint of the assistant `config`, one tensor at a time."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in checkpoint_shapes(config).items():
        if name.endswith("token_ordering"):
            yield name, torch.randperm(shape[0], generator=generator, device=device)
        elif len(shape) == 1:
            yield name, 0.5 + torch.rand(shape, generator=generator, device=device, dtype=dtype)
        else:
            values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            yield name, values * shape[-1] ** -0.5


def released_generation_config(name: str) -> dict[str, Any]:
    """The part of the released assistant's `generation_config.json` that drafting reads."""
    return {"suppress_tokens": [258883, 258882]} if name == "12b" else {}


def random_assistant(name: str, device: torch.device | str, dtype: torch.dtype) -> Gemma4MTP:
    """The released assistant `name` with random weights and a random target embedding, ready to draft."""
    config = released_config(name)
    with torch.device("meta"):
        model = Gemma4MTP(Gemma4MTPConfig.from_dict(config), released_generation_config(name), dtype=dtype)
    model.load_weights(random_tensors(config, dtype, device), device=device)
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (model.vocab_size, model.backbone_hidden_size)
    model.share_embedding(torch.randn(shape, generator=generator, device=device, dtype=dtype), 1.0)
    return model


def save_random_pair(name: str, directory: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Write a random assistant of the released size `name` and a 6-layer target that fits it, as Hub directories.

    The target has the real vocabulary, width, head shapes and windows, and narrow feed-forward layers.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    config, generation_config = released_config(name), released_generation_config(name)
    target_dir, draft_dir = directory / "target", directory / "assistant"
    draft_dir.mkdir(parents=True)
    (draft_dir / "config.json").write_text(json.dumps(config, indent=2))
    (draft_dir / "generation_config.json").write_text(json.dumps(generation_config))
    save_file(dict(random_tensors(config, dtype)), draft_dir / "model.safetensors", metadata={"format": "pt"})

    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    text |= {
        "hidden_size": config["backbone_hidden_size"],
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "layer_types": [SLIDING] * 5 + [FULL],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(Gemma4TextConfig(**text), dtype=dtype)
    target.generation_config.suppress_tokens = generation_config.get("suppress_tokens")
    target.save_pretrained(target_dir)
    return target_dir, draft_dir
