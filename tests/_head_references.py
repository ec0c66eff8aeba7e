"""EAGLE and MTP heads built of transformers' own modules, over whole requests and without a cache."""

from dataclasses import replace

import torch
import transformers
from torch import Tensor, nn

from _head_runs import causal, load, rotary
from _tiny_heads import MTP_NAMES
from tridraft.models.layers import rope_parameters, rotary_frequencies
from tridraft.models.mtp import LAYOUTS

SIZES = {
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
# config and decoder layer of transformers, what its config needs besides, what the checkpoint's does
FAMILIES = {
    "deepseek_v3": ("llama", "Llama", {}, {}),
    "llama": ("llama", "Llama", {"attention_bias": True}, {"bias": "qkvo"}),
    "qwen2": ("qwen2", "Qwen2", {}, {}),
    "qwen3": ("qwen3", "Qwen3", {}, {}),
    "mimo": ("qwen2", "Qwen2", {"mtp_hidden_states_first": True}, {}),
    "glm4_moe": (
        "glm4_moe",
        "Glm4Moe",
        {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 9},
        {"qk_norm": True, "bias": "qkv", "partial_rotary_factor": 0.5},
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3Next",
        {"layer_types": ["full_attention"] * 6, "mlp_only_layers": list(range(6))},
        {"partial_rotary_factor": 0.25},
    ),
}


class EagleReference(nn.Module):
    """The head's equations with transformers' attention and MLP, over whole requests."""

    def __init__(self, config, tensors) -> None:
        super().__init__()
        tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
        llama = transformers.LlamaConfig(
            **{
                key: value
                for key, value in config.items()
                if key not in ("architectures", "rope_scaling", "rope_theta")
            }
        )
        llama._attn_implementation = "sdpa"
        self.three = "d2t" in tensors
        self.eps = config["rms_norm_eps"]
        self.options = {**config, **config.get("eagle_config", {})}
        rope = {"rope_theta": config["rope_theta"], **config.get("rope_scaling", {})}
        self.inv_freq = rotary_frequencies(rope, config["head_dim"])  # no buffer: not to be cast
        self.attention, self.mlp = nn.ModuleList(), nn.ModuleList()
        for index in range(config["num_hidden_layers"]):
            attention = transformers.models.llama.modeling_llama.LlamaAttention(llama, 0)
            mlp = transformers.models.llama.modeling_llama.LlamaMLP(llama)
            prefix = f"layers.{index}."
            for name in "qkv" if self.three and index == 0 else "":
                width = tensors[f"{prefix}self_attn.{name}_proj.weight"].shape
                linear = nn.Linear(width[1], width[0], bias=f"{prefix}self_attn.{name}_proj.bias" in tensors)
                setattr(attention, f"{name}_proj", linear)
            load(attention, tensors, prefix + "self_attn.")
            load(mlp, tensors, prefix + "mlp.")
            self.attention.append(attention)
            self.mlp.append(mlp)
        for name, tensor in tensors.items():
            if "norm" in name or name.startswith("fc"):
                self.register_buffer(name.replace(".", "/"), tensor)

    def norm(self, name, x: Tensor) -> Tensor:
        weight = getattr(self, f"{name}.weight".replace(".", "/"))
        return nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)

    def combine(self, aux: Tensor) -> Tensor:
        """EAGLE-3: h of the target's three residual streams."""
        if self.options.get("norm_before_fc"):
            aux = self.norm("input_norm", aux)
        if self.options.get("fc_norm"):
            count = len([name for name in dict(self.named_buffers()) if name.startswith("fc_norm")])
            aux = torch.cat([self.norm(f"fc_norm.{i}", x) for i, x in enumerate(aux.chunk(count, -1))], -1)
        return nn.functional.linear(aux, getattr(self, "fc/weight"))

    def whole(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.three:
            normed = self.norm("layers.0.hidden_norm", hidden)
            residual = normed if self.options.get("norm_before_residual") else hidden
            x = torch.cat((self.norm("layers.0.input_layernorm", embeds), normed), -1)
        else:
            bias = getattr(self, "fc/bias", None)
            residual = x = nn.functional.linear(torch.cat((embeds, hidden), -1), getattr(self, "fc/weight"), bias)
        count = len(embeds)
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            if index:
                x = self.norm(f"layers.{index}.input_layernorm", residual)
            places = rotary(self.inv_freq, count, x)
            residual = residual + attention(x[None], position_embeddings=places, attention_mask=causal(count, x))[0][0]
            residual = residual + mlp(self.norm(f"layers.{index}.post_attention_layernorm", residual))
        if not self.three:
            return residual, residual
        normed = self.norm("norm", residual)
        return normed, normed if self.options.get("norm_output") else residual


class MTPReference(nn.Module):
    """One module of the chain: transformers' `MtpLayer` with the family's decoder layer and norms."""

    def __init__(self, family, config, tensors, module=0, **layout) -> None:
        super().__init__()
        from transformers.modeling_layers import MtpLayer

        package, name, extra, _ = FAMILIES[family]
        modeling = getattr(transformers.models, package)
        modeling = getattr(modeling, f"modeling_{package}")
        theirs = getattr(transformers, f"{name}Config")(**SIZES, **extra)
        theirs._attn_implementation = "sdpa"
        self.layout = replace(LAYOUTS[family], **layout)
        # r and its norm apart: which of them is fed back is what is tested
        self.layer = MtpLayer(
            theirs,
            getattr(modeling, f"{name}DecoderLayer"),
            getattr(modeling, f"{name}RMSNorm"),
            0,
            use_post_norm=False,
        )
        self.post_norm = getattr(modeling, f"{name}RMSNorm")(SIZES["hidden_size"], eps=SIZES["rms_norm_eps"])
        names = {
            part: where.format(layer=config["num_hidden_layers"] + module, module=module)
            for part, where in MTP_NAMES[family].items()
        }
        for part in ("enorm", "hnorm", "eh_proj"):
            load(getattr(self.layer, part), tensors, f"{names[part]}.")
        load(self.post_norm, tensors, f"{names['norm']}.")
        prefix = f"{names['layer']}."
        block = {f"{prefix}{name}" for name in self.layer.mtp_block.state_dict()}
        load(self.layer.mtp_block, {name: tensors[name] for name in block}, prefix)
        self.inv_freq = rotary_frequencies(rope_parameters(config), config["head_dim"])  # no buffer: not to be cast

    def whole(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """y, and what is fed back."""
        if self.layout.zero_first_embedding:
            embeds = torch.cat((torch.zeros_like(embeds[:1]), embeds[1:]))
        places = rotary(self.inv_freq, len(embeds), embeds)
        r = self.layer(
            embeds[None],
            hidden[None],
            position_embeddings=places,
            attention_mask=causal(len(embeds), embeds),
            position_ids=None,
            cache=None,
        )[0]
        y = self.post_norm(r)
        return y, r if self.layout.prenorm_feedback else y
