"""The parts draft models are made of: modules that hold weights under the checkpoint's names and call our operations.

Weights are allocated uninitialised and never require gradients; a model fills them from a checkpoint.
"""

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tridraft.kernels.activation import Activation
from tridraft.kernels.kv_cache import qk_norm_rope
from tridraft.kernels.linear import linear, norm_linear
from tridraft.kernels.norm import add_rms_norm, rms_norm
from tridraft.models.paged import AttentionBatch, KVSpec, LayerKV

ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
"""Our name for each activation a checkpoint's config may name."""


def empty_weight(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Parameter:
    """An uninitialised weight without a gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """Root mean square norm of the last dimension, times the weight."""

    def __init__(self, size: int, eps: float, *, dtype=None, device=None) -> None:
        super().__init__()
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The normed `x`, in its dtype, written to `out` (any row stride) when given."""
        return rms_norm(x, self.weight, eps=self.eps, out=out)


@dataclass(frozen=True)
class Joint:
    """What lies between two blocks: the first one's output joins the residual stream, which is normed for the second.

    Attributes:
        norm: the second block's.
        post_norm: of the first one's output; None: it joins as it is.
        scale: `[1]`, a factor on the whole stream, or None.
    """

    norm: RMSNorm
    post_norm: RMSNorm | None = None
    scale: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `add_rms_norm` and `norm_linear`."""
        post_weight = None if self.post_norm is None else self.post_norm.weight
        return {"post_weight": post_weight, "scale": self.scale, "eps": self.norm.eps}

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From the first block's output and the stream before it to the normed stream and the stream."""
        return add_rms_norm(x, residual, self.norm.weight, **self.options)


class Linear(nn.Module):
    """`x @ weight.T + bias`; the bias is None unless `set_bias` gives one."""

    def __init__(self, in_features: int, out_features: int, *, dtype=None, device=None) -> None:
        super().__init__()
        self.weight = empty_weight(out_features, in_features, dtype=dtype, device=device)
        self.register_parameter("bias", None)

    def set_bias(self, present: bool) -> None:
        """Give the layer an uninitialised bias, or none."""
        weight = self.weight
        self.bias = empty_weight(len(weight), dtype=weight.dtype, device=weight.device) if present else None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """From x [T, in] to [T, out], written to `out` (any row stride) when given."""
        return linear(x, self.weight, bias=self.bias, out=out)

    def behind(
        self, joint: Joint, x: Tensor, residual: Tensor | None, *, activation: Activation | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer of what `joint` makes of x, half as wide with an activation, and the stream.

        Without a residual, x is the stream.
        """
        options = {"bias": self.bias, "activation": activation, **joint.options}
        return norm_linear(x, joint.norm.weight, self.weight, residual=residual, **options)


class MergedLinear(Linear):
    """Projections of one input as one matrix product, by their names and widths; most checkpoints hold them apart."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, dtype=None, device=None) -> None:
        super().__init__(in_features, sum(parts.values()), dtype=dtype, device=device)
        self.parts = dict(parts)


class GatedMLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, with gate and up in one weight."""

    def __init__(self, size: int, intermediate: int, activation: Activation, *, dtype=None, device=None) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate, "up_proj": intermediate}
        self.gate_up_proj = MergedLinear(size, parts, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate, size, dtype=dtype, device=device)
        self.activation: Activation = activation

    def forward(self, joint: Joint, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From the block's output [T, size] in front and the stream before that to its own, and the stream between."""
        gated, stream = self.gate_up_proj.behind(joint, x, residual, activation=self.activation)
        return self.down_proj(gated), stream


class RotaryFrequencies(nn.Module):
    """Inverse frequencies of a rotary embedding; they stay float32 when the model is cast."""

    inv_freq: Tensor

    def __init__(self, rope: Mapping[str, Any], head_dim: int, *, device=None) -> None:
        super().__init__()
        self._values = rotary_frequencies(rope, head_dim)
        self.register_buffer(
            "inv_freq", self._values.to(torch.get_default_device() if device is None else device), persistent=False
        )

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.inv_freq = self._values.to(self.inv_freq.device)
        return self


_ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Inverse frequencies f32 [rotary_dim / 2] on the CPU, from a checkpoint's `rope_parameters`.

    "default": theta^(−2i/D) over the first `partial_rotary_factor` of the head. "proportional": the same frequencies,
    with D the whole head, for the first fraction of all D/2 pairs and 0 for the others, which turn nothing. "linear"
    divides the default ones by `factor`, "llama3" those that turn slowly: see `_llama3`.

    Computed in float32, as the models' authors do: the drafter has to turn its queries by the angles that the
    target turned its keys by, and at large positions a last bit of a frequency shows.

    >>> rotary_frequencies({"rope_type": "default", "rope_theta": 10000.0}, 8).tolist()
    [1.0, 0.10000000149011612, 0.009999999776482582, 0.0010000000474974513]
    >>> rotary_frequencies({"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, 16).tolist()
    [1.0, 0.3162277638912201, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Raises:
        ValueError: another rope type, or one that lacks a key.
    """
    kind = rope.get("rope_type", "default")
    fraction = rope.get("partial_rotary_factor", 1.0)
    pairs = int(fraction * head_dim) // 2
    if kind not in ("default", "linear", "llama3", "proportional"):
        raise ValueError(f"rope_type: got {kind!r}, needs 'default', 'linear', 'llama3' or 'proportional'")
    for key in ("rope_theta", *_ROPE_KEYS.get(kind, ())):
        if key not in rope:
            raise ValueError(f"{key}: missing from rope_parameters, needed for rope_type {kind!r}")
        if not isinstance(rope[key], (int, float)) or not rope[key] > 0:
            raise ValueError(f"{key}: got {rope[key]!r}, needs a positive number")
    if not 1 <= pairs <= head_dim // 2:
        raise ValueError(f"partial_rotary_factor: got {fraction}, turns {pairs} of {head_dim // 2} pairs")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"low_freq_factor: got {rope['low_freq_factor']}, needs less than high_freq_factor")
    exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu")
    inv_freq = 1.0 / rope["rope_theta"] ** (exponents / (head_dim if kind == "proportional" else 2 * pairs))
    if kind == "proportional":
        return nn.functional.pad(inv_freq, (0, head_dim // 2 - pairs)) / rope.get("factor", 1.0)
    if kind == "linear":
        return inv_freq / rope["factor"]
    return _llama3(inv_freq, rope) if kind == "llama3" else inv_freq


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3's scaling (from `transformers`), where n is how often a pair turns in the original context.

    f for n > high_freq_factor, f / factor for n < low_freq_factor, and in between s · f + (1 − s) · f / factor with
    s rising linearly from 0 to 1.
    """
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, between)
    return torch.where(wavelength < context / high, inv_freq, scaled)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's `rope_parameters`, also where it has the older `rope_theta` and `rope_scaling`."""
    rope = {"rope_theta": config.get("rope_theta", 10_000.0)}
    if "partial_rotary_factor" in config:
        rope["partial_rotary_factor"] = config["partial_rotary_factor"]
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope |= given.get("full_attention", given)  # one a type of layer, of which a head has this one
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a decoder layer that owns its keys and values.

    Attributes:
        rope: see `rotary_frequencies`.
        gated: the query projection brings a gate of the attention's output beside each head's query (Qwen3-Next).
        zero_centred_norms: the checkpoint's norm weights are w of `1 + w`. They are held in float32, for `1 + w` has
            no place in 16 bits; the model adds the 1 when it has loaded them.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Mapping[str, Any]
    activation: Activation
    rms_norm_eps: float
    gated: bool = False
    zero_centred_norms: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], **family: bool) -> "DecoderShape":
        """Read a `config.json` in the names that Llama's configuration made common.

        Raises:
            ValueError: a size is missing, or a setting these layers do not have.
        """
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            intermediate = config["intermediate_size"]
        except KeyError as error:
            raise ValueError(f"{error.args[0]}: missing from the configuration") from error
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads: got {heads}, needs a multiple of num_key_value_heads, {kv_heads}")
        sliding = "sliding_attention" in (config.get("layer_types") or ())
        for key, unsupported in (
            ("use_sliding_window", config.get("use_sliding_window")),
            ("layer_types", sliding and config["layer_types"]),
            ("attn_logit_softcapping", config.get("attn_logit_softcapping")),
        ):
            if unsupported:
                raise ValueError(
                    f"{key}: got {unsupported}, needs a head that attends to everything, without a soft cap"
                )
        head_dim = config.get("head_dim") or hidden // heads
        if config.get("query_pre_attn_scalar", head_dim) != head_dim:
            raise ValueError(
                f"query_pre_attn_scalar: got {config['query_pre_attn_scalar']}, needs head_dim, {head_dim}"
            )
        eps = config.get("rms_norm_eps", 1e-6)
        if not isinstance(eps, (int, float)) or not eps >= 0:
            raise ValueError(f"rms_norm_eps: got {eps!r}, needs a number of at least 0")
        activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
        if activation not in ACTIVATIONS:
            raise ValueError(f"hidden_act: got {activation!r}, needs one of {sorted(ACTIVATIONS)}")
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope_parameters(config),
            activation=ACTIVATIONS[activation],
            rms_norm_eps=eps,
            **family,
        )

    def norm(self, size: int, *, dtype=None, device=None) -> RMSNorm:
        """A norm as this family has them."""
        return RMSNorm(
            size, self.rms_norm_eps, dtype=torch.float32 if self.zero_centred_norms else dtype, device=device
        )


class SelfAttention(nn.Module):
    """Causal attention that writes the new tokens' keys and values to its own pages, then attends over the pages.

    Norms of queries and keys and biases are there if the checkpoint has them: `add_optional_parts`.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(self, shape: DecoderShape, in_features: int, *, dtype=None, device=None) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {"q_proj": 2 * width if shape.gated else width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv_proj = MergedLinear(in_features, parts, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        self.o_proj = Linear(width, shape.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryFrequencies(shape.rope, shape.head_dim, device=device)
        self.kv_spec = KVSpec(shape.head_dim, shape.num_kv_heads, None)

    def set_norms(self, present: bool) -> None:
        """Give queries and keys uninitialised norms, or none."""
        weight = self.o_proj.weight
        for name in ("q_norm", "k_norm"):
            norm = self.shape.norm(self.shape.head_dim, dtype=weight.dtype, device=weight.device)
            setattr(self, name, norm if present else None)

    def forward(self, x: Tensor, positions: Tensor, kv: LayerKV, batch: AttentionBatch) -> Tensor:
        """From x [T, in] to [T, H]; `batch.slot_mappings` says where the keys go, −1 for nowhere."""
        if batch.slot_mappings is None:
            raise ValueError("batch: got no slot_mappings, needs them: this layer writes its keys and values")
        shape = self.shape
        q, k, v = self.qkv_proj(x).split(list(self.qkv_proj.parts.values()), dim=-1)
        q = q.unflatten(-1, (shape.num_attention_heads, -1))
        q, gate = q.chunk(2, dim=-1) if shape.gated else (q, None)
        q = qk_norm_rope(
            q,
            positions,
            self.rotary.inv_freq,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k=k.unflatten(-1, (shape.num_kv_heads, -1)),
            v=v.unflatten(-1, (shape.num_kv_heads, -1)),
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            qk_norm=self.q_norm is not None,
            eps=shape.rms_norm_eps,
            k_cache=kv.k_cache,
            v_cache=kv.v_cache,
            slot_mapping=batch.slot_mappings[kv.group],
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            out=q,
        )
        attended = batch.attention(
            q,
            kv.k_cache,
            kv.v_cache,
            batch.block_tables[kv.group],
            batch.query_start_loc,
            batch.seq_lens,
            scale=shape.head_dim**-0.5,
            max_query_len=batch.max_query_len,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
            metadata_ready=True,  # behind `qk_norm_rope`
        )
        if gate is not None:
            attended = attended * gate.sigmoid()
        return self.o_proj(attended.flatten(-2))


class DecoderLayer(nn.Module):
    """A decoder layer with a norm before its attention and one before its MLP, as Llama, Qwen and GLM have it.

    The norm before attention is the caller's to apply, who knows how to fuse it with what comes before.
    """

    input_layernorm: RMSNorm | None

    def __init__(
        self,
        shape: DecoderShape,
        *,
        in_features: int | None = None,
        input_norm: bool = True,
        dtype=None,
        device=None,
    ) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.input_layernorm = shape.norm(hidden, dtype=dtype, device=device) if input_norm else None
        self.self_attn = SelfAttention(shape, in_features or hidden, dtype=dtype, device=device)
        self.post_attention_layernorm = shape.norm(hidden, dtype=dtype, device=device)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, shape.activation, dtype=dtype, device=device)

    def forward(
        self, x: Tensor, residual: Tensor, positions: Tensor, kv: LayerKV, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """From the attention's input x [T, in] and the residual stream [T, H] to two summands [T, H].

        Their sum is the stream after the layer; the second is the stream before the MLP.
        """
        attended = self.self_attn(x, positions, kv, batch)
        return self.mlp(Joint(self.post_attention_layernorm), attended, residual)


def merged_parts(model: nn.Module) -> dict[str, list[tuple[str, Tensor]]]:
    """For each tensor of a `MergedLinear`, by its name in the model: names and views of the parts it is made of."""
    found = {}
    for path, module in model.named_modules():
        if not isinstance(module, MergedLinear):
            continue
        parent = path.rpartition(".")[0]
        for kind, tensor in module.named_parameters():
            pieces = tensor.detach().split(list(module.parts.values()))
            names = (f"{parent}.{part}.{kind}" for part in module.parts)
            found[f"{path}.{kind}"] = list(zip(names, pieces, strict=True))
    return found


def add_optional_parts(model: nn.Module, names: Container[str], rename: Callable[[str], str]) -> None:
    """Give projections biases, and queries and keys norms, where the checkpoint has any of their tensors.

    Args:
        model: changed in place.
        names: the checkpoint's names.
        rename: from the model's name of a tensor to the checkpoint's.
    """

    def found(paths: list[str]) -> bool:
        return any(rename(path) in names for path in paths)

    for path, module in list(model.named_modules()):
        if isinstance(module, SelfAttention):
            module.set_norms(found([f"{path}.q_norm.weight", f"{path}.k_norm.weight"]))
        elif isinstance(module, Linear):
            paths = [path]
            if isinstance(module, MergedLinear):
                paths += [f"{path.rpartition('.')[0]}.{part}" for part in module.parts]
            module.set_bias(found([f"{one}.bias" for one in paths]))
