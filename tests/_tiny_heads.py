"""Random EAGLE, EAGLE-3 and MTP heads for a target, as directories in the Hub's layouts, and tiny targets for them.

Everything a head may lack or hold in another way is an argument here: fused projections, a prefix, shards, biases, its
own embedding. Norms are random too: at their initial value a missing one would go unnoticed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

with torch.device("meta"):
    torch.empty(0)  # torch lists its constructors once, and must not list those that the poison fixture replaced

_FAMILIES = {  # classes of transformers, and what a tiny config of the family changes
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 64}),
}


def tiny_target(
    family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, device: Any = "cpu", **config: Any
) -> Any:
    """A random 8-layer `transformers` model of the family with heads of 64, the smallest that GPU kernels take."""
    import transformers

    config_class, model_class, changes = _FAMILIES[family]
    settings = {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings | changes | config))
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if family == "gemma3_text" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_tensor(name, parameter.shape, generator, centre))
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator, centre: float = 1.0) -> Tensor:
    """A random weight of a scale at which each operation shows in the output; `centre` is that of norms."""
    values = torch.randn(shape, generator=generator)
    if "q_norm" in name or "k_norm" in name:
        # attention weights spread over all keys; at 1 they pick one, and a lost key goes unnoticed
        return (1 + 0.3 * values) * shape[0] ** -0.25 + centre - 1
    if "norm" in name:
        return centre + 0.3 * values
    if "embed" in name:
        return 0.3 * values
    return values * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)


def _layer_shapes(config: Mapping[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config["intermediate_size"], hidden),
        "mlp.up_proj.weight": (config["intermediate_size"], hidden),
        "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
    }


def _bias_shapes(shapes: Mapping[str, tuple[int, ...]], projections: str = "qkvo") -> dict[str, tuple[int, ...]]:
    return {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in shapes.items()
        if name.partition("_proj")[0][-1] in projections and "self_attn" in name
    }


def _head_config(target_config: Any, **changes: Any) -> dict[str, Any]:
    text = target_config.get_text_config()
    rope = text.rope_parameters
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "vocab_size": text.vocab_size,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_theta": rope.get("rope_theta", 10_000.0),
        "max_position_embeddings": text.max_position_embeddings,
        "hidden_act": "silu",
        **changes,
    }


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, shards: int = 1
) -> Path:
    """Write a directory in the Hub's format, its tensors dealt to `shards` files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(shards):
        file, names = f"model-{shard + 1:05}-of-{shards:05}.safetensors", list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def eagle_checkpoint(
    target_config: Any, *, num_layers: int = 1, bias: bool = False, fc_bias: bool = False, seed: int = 0, **config: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An EAGLE-1 head's `config.json` and tensors, as EAGLE's authors name them: no norms before or after the layer."""
    config = _head_config(target_config, **config)
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": num_layers}
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    for index in range(num_layers):
        layer = _layer_shapes(config, hidden)
        if index:
            layer["input_layernorm.weight"] = (hidden,)
        layer |= _bias_shapes(layer) if bias else {}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    return config, {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}


def eagle3_checkpoint(
    target_config: Any,
    *,
    draft_vocab_size: int | None = None,
    num_layers: int = 1,
    bias: bool = False,
    own_embedding: bool = False,
    num_aux: int = 3,
    seed: int = 0,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An EAGLE-3 head's `config.json` and tensors; the draft vocabulary is a random half of the target's by default."""
    config = _head_config(target_config, **config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    draft_vocab = vocab // 2 if draft_vocab_size is None else draft_vocab_size
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": draft_vocab,
        "num_hidden_layers": num_layers,
    }
    target_hidden = config.get("target_hidden_size") or target_config.get_text_config().hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, num_aux * target_hidden)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_aux * target_hidden,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (target_hidden,) for index in range(num_aux)}
    for index in range(num_layers):
        layer = _layer_shapes(config, hidden if index else 2 * hidden) | {"input_layernorm.weight": (hidden,)}
        if not index:
            layer["hidden_norm.weight"] = (hidden,)
        layer |= _bias_shapes(layer) if bias else {}
        prefix = "midlayer" if num_layers == 1 else f"layers.{index}"
        shapes |= {f"{prefix}.{name}": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (draft_vocab, hidden)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    chosen = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    return config, tensors


_DEEPSEEK = {
    "enorm": "model.layers.{layer}.enorm",
    "hnorm": "model.layers.{layer}.hnorm",
    "eh_proj": "model.layers.{layer}.eh_proj",
    "norm": "model.layers.{layer}.shared_head.norm",
    "head": "model.layers.{layer}.shared_head.head",
    "layer": "model.layers.{layer}",
}
MTP_NAMES = {
    "deepseek_v3": _DEEPSEEK,
    "llama": _DEEPSEEK,
    "qwen2": _DEEPSEEK,
    "qwen3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "mimo": {
        "enorm": "model.mtp_layers.{module}.token_layernorm",
        "hnorm": "model.mtp_layers.{module}.hidden_layernorm",
        "eh_proj": "model.mtp_layers.{module}.input_proj",
        "norm": "model.mtp_layers.{module}.final_layernorm",
        "head": "model.mtp_layers.{module}.lm_head",
        "layer": "model.mtp_layers.{module}",
    },
    "qwen3_next": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "norm": "mtp.norm",
        "head": "mtp.lm_head",
        "layer": "mtp.layers.{module}",
    },
}
"""For each family, what its checkpoints call each part of a module."""


def mtp_checkpoint(
    target_config: Any,
    *,
    model_type: str = "deepseek_v3",
    num_modules: int = 1,
    qk_norm: bool | None = None,
    bias: str = "",
    draft_vocab_size: int | None = None,
    seed: int = 0,
    **config: Any,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `config.json` and the MTP tensors of a checkpoint of `model_type` with a dense decoder layer a module.

    By default Qwen3's and later families norm queries and keys, Qwen2's and MiMo's have q, k and v biases; `bias` names
    other projections ("qkvo"). With `draft_vocab_size` the head is the checkpoint's own, over a random part.
    """
    qwen3_next = model_type == "qwen3_next"
    depth = target_config.get_text_config().num_hidden_layers
    config = _head_config(target_config, **config)
    config |= {"model_type": model_type, "num_hidden_layers": depth, "num_nextn_predict_layers": num_modules}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    if qk_norm is None:
        qk_norm = model_type in ("qwen3", "qwen3_next")
    if not bias and model_type in ("qwen2", "mimo"):
        bias = "qkv"
    generator = torch.Generator().manual_seed(seed)
    names, tensors = MTP_NAMES[model_type], {}
    for module in range(num_modules):
        layer = _layer_shapes(config, hidden) | {"input_layernorm.weight": (hidden,)}
        if qwen3_next:
            q_and_gate = 2 * config["num_attention_heads"] * config["head_dim"]
            layer["self_attn.q_proj.weight"] = (q_and_gate, hidden)
        if qk_norm:
            layer |= {f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
        layer |= _bias_shapes(layer, bias)
        shapes: dict[str, tuple[int, ...]] = {
            f"{names['enorm']}.weight": (hidden,),
            f"{names['hnorm']}.weight": (hidden,),
            f"{names['eh_proj']}.weight": (hidden, 2 * hidden),
            f"{names['norm']}.weight": (hidden,),
        }
        shapes |= {f"{names['layer']}.{name}": shape for name, shape in layer.items()}
        for name, shape in shapes.items():
            where = name.format(layer=depth + module, module=module)
            tensors[where] = random_tensor(name, shape, generator, centre=0.0 if qwen3_next else 1.0)
    if draft_vocab_size is not None:
        config["draft_vocab_size"] = draft_vocab_size
        head = f"{names['head']}.weight".format(layer=depth, module=0)
        tensors[head] = random_tensor("head", (draft_vocab_size, hidden), generator)
        chosen = torch.randperm(vocab, generator=generator)[:draft_vocab_size].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
    return config, tensors


def save_random_eagle(directory: Path, target_config: Any, *, shards: int = 1, **options: Any) -> Path:
    """Write `eagle_checkpoint(target_config, **options)` as a directory of its own and return it."""
    return write_checkpoint(directory, *eagle_checkpoint(target_config, **options), shards=shards)


def save_random_eagle3(directory: Path, target_config: Any, *, shards: int = 1, **options: Any) -> Path:
    """Write `eagle3_checkpoint(target_config, **options)` as a directory of its own and return it."""
    return write_checkpoint(directory, *eagle3_checkpoint(target_config, **options), shards=shards)


def save_random_mtp(directory: Path, target_config: Any, *, shards: int = 1, **options: Any) -> Path:
    """Write `mtp_checkpoint(target_config, **options)` without a target's tensors and return the directory."""
    return write_checkpoint(directory, *mtp_checkpoint(target_config, **options), shards=shards)


def save_target_with_mtp(directory: Path, target: Any, **options: Any) -> Path:
    """Write a target and a random head, `mtp_checkpoint(target.config, **options)`, as one checkpoint of two files.

    The model type is the target's, so that both `transformers` and `MTP` read the directory.
    """
    target.save_pretrained(directory)
    kind = target.config.model_type
    changes, head = mtp_checkpoint(target.config, model_type=kind, **options)
    config = json.loads((directory / "config.json").read_text())
    config |= {name: changes[name] for name in ("num_nextn_predict_layers", "draft_vocab_size") if name in changes}
    (directory / "config.json").write_text(json.dumps(config))
    body, mtp = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (directory / "model.safetensors").rename(directory / body)
    save_file(head, directory / mtp, metadata={"format": "pt"})
    weight_map = dict.fromkeys(target.state_dict(), body) | dict.fromkeys(head, mtp)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
