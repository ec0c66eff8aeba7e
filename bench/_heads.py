"""EAGLE-3 and MTP heads as differentiable modules over whole texts, for training; `models` holds those that draft.

Row i of a text is a chain of drafts that starts from token i + 1 and the target's state of token i. All chains run at
once: step s of chain i stands at position i + s, reads token i + 1 + s and what step s − 1 fed back, and attends to the
keys that step 0 left at positions up to i and to those of its own chain after them, which is what drafting attends to.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normed `x`, in its dtype."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Chains:
    """What the layers of all steps over texts of one length share: angles, who sees whom, and keys so far."""

    def __init__(self, config: Mapping[str, Any], length: int, steps: int, device: torch.device) -> None:
        half = torch.arange(0, config["head_dim"], 2, device=device) / config["head_dim"]
        angles = torch.arange(length + steps, device=device)[:, None] / config["rope_theta"] ** half
        self.cos, self.sin = angles.cos(), angles.sin()
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        own = torch.eye(length, dtype=torch.bool, device=device)
        self.visible = torch.cat([causal, *[own] * (steps - 1)], dim=1)
        self.length = length
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def restart(self) -> "Chains":
        """Forget the keys: the next step is step 0."""
        self.keys, self.values = [], []
        return self

    def rotate(self, x: Tensor) -> Tensor:
        """The x [B, heads, length, D] turned to the positions of the step whose keys come next."""
        rows = slice(len(self.keys), len(self.keys) + self.length)
        cos, sin = self.cos[rows].to(x.dtype), self.sin[rows].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The step's attention [B, heads, length, D] over all steps so far; q and k are not rotated yet."""
        q, k = self.rotate(q), self.rotate(k)
        self.keys.append(k)
        self.values.append(v)
        groups = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x, dim=2).repeat_interleave(groups, 1) for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.visible[:, : keys.shape[2]])


class Layer(nn.Module):
    """A Llama layer; its modules are named as in a checkpoint."""

    def __init__(self, config: Mapping[str, Any], in_features: int) -> None:
        super().__init__()
        hidden, wide, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        width, kv_width = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
        self.head_dim: int = config["head_dim"]
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        outputs = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.self_attn = nn.ModuleDict({name: _linear(in_features, size) for name, size in outputs.items()})
        self.self_attn["o_proj"] = _linear(width, hidden)
        self.mlp = nn.ModuleDict({name: _linear(hidden, wide) for name in ("gate_proj", "up_proj")})
        self.mlp["down_proj"] = _linear(wide, hidden)

    def forward(self, x: Tensor, residual: Tensor, chains: Chains) -> Tensor:
        """From the attention's input x [B, length, in], normed, to the residual stream behind the layer."""
        attn, mlp = self.self_attn, self.mlp
        q, k, v = (attn[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in "qkv")
        stream = residual + attn["o_proj"](chains.attend(q, k, v).transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(stream)
        return stream + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))

    @torch.no_grad()
    def start_from(self, layer: Any) -> None:
        """Take a target layer's weights: the last inputs of the attention, as much of the MLP as there is room for."""
        attn: Any = self.self_attn
        mlp: Any = self.mlp
        hidden, wide = mlp["gate_proj"].in_features, mlp["gate_proj"].out_features
        for name in ("q_proj", "k_proj", "v_proj"):
            attn[name].weight[:, -hidden:] = getattr(layer.self_attn, name).weight
        attn["o_proj"].weight.copy_(layer.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj"):
            mlp[name].weight.copy_(getattr(layer.mlp, name).weight[:wide])
        mlp["down_proj"].weight.copy_(layer.mlp.down_proj.weight[:, :wide])
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(self, name).weight.copy_(getattr(layer, name).weight)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Head(nn.Module):
    """What training needs of a head.

    Attributes:
        ids: int64 [n], the target's ids it can draft, ascending.
    """

    ids: Tensor
    prefix: str = ""

    def start(self, states: Tensor) -> Tensor:
        """From the target's states [B, T, 4, H], three residual streams and the final one, to step 0's [B, T, H]."""
        raise NotImplementedError

    def step(self, embeds: Tensor, hidden: Tensor, chains: Chains) -> tuple[Tensor, Tensor]:
        """What the LM head reads and what the next step's `hidden` is, each [B, T, H]."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Logits [N, n] of what the LM head reads, by place in `ids`."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint: bf16 weights under their names."""
        return {f"{self.prefix}{name}": p.detach().bfloat16().cpu().contiguous() for name, p in self.named_parameters()}


class _Eagle3Layer(Layer):
    """The layer that reads the embedding and the hidden state beside each other, each behind its norm."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, 2 * config["hidden_size"])
        self.hidden_norm = Norm(config["hidden_size"], config["rms_norm_eps"])


class Eagle3Head(Head):
    """EAGLE-3 with `fc_norm`, drafting a part of the vocabulary with an LM head of its own."""

    def __init__(self, config: Mapping[str, Any], target: Any, ids: Tensor) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.register_buffer("ids", ids, persistent=False)
        self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in range(3))
        self.fc = _linear(3 * hidden, hidden)
        self.midlayer = _Eagle3Layer(config)
        self.norm = Norm(hidden, eps)
        self.lm_head = _linear(hidden, len(ids))
        decoder = target.get_decoder()
        self.midlayer.start_from(decoder.layers[-1])
        with torch.no_grad():
            self.midlayer.hidden_norm.weight.copy_(decoder.layers[-1].input_layernorm.weight)
            self.midlayer.input_layernorm.weight.fill_(1)
            self.norm.weight.copy_(decoder.norm.weight)
            self.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])

    def start(self, states: Tensor) -> Tensor:
        return self.fc(torch.cat([norm(states[:, :, index]) for index, norm in enumerate(self.fc_norm)], dim=-1))

    def step(self, embeds: Tensor, hidden: Tensor, chains: Chains) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        z = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        stream = layer(z, hidden, chains)
        return self.norm(stream), stream

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(x)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "d2t": (self.ids - torch.arange(len(self.ids), device=self.ids.device)).cpu()}


class MTPHead(Head):
    """One DeepSeek module; LM head and embedding are the target's."""

    lm_head_weight: Tensor

    def __init__(self, config: Mapping[str, Any], target: Any) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        weight = target.get_output_embeddings().weight.detach()
        self.register_buffer("lm_head_weight", weight, persistent=False)
        self.register_buffer("ids", torch.arange(len(weight), device=weight.device), persistent=False)
        self.prefix = f"model.layers.{config['num_hidden_layers']}."
        self.enorm, self.hnorm, self.norm = (Norm(hidden, eps) for _ in range(3))
        self.eh_proj = _linear(2 * hidden, hidden)
        self.layer = Layer(config, hidden)
        decoder = target.get_decoder()
        self.layer.start_from(decoder.layers[-1])
        with torch.no_grad():
            self.norm.weight.copy_(decoder.norm.weight)

    def start(self, states: Tensor) -> Tensor:
        return states[:, :, 3]

    def step(self, embeds: Tensor, hidden: Tensor, chains: Chains) -> tuple[Tensor, Tensor]:
        z = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], dim=-1))
        y = self.norm(self.layer(self.layer.input_layernorm(z), z, chains))
        return y, y

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.lm_head_weight.to(x.dtype))

    def tensors(self) -> dict[str, Tensor]:
        renamed = {f"{self.prefix}norm.weight": f"{self.prefix}shared_head.norm.weight"}
        tensors = {name.replace(".layer.", "."): tensor for name, tensor in super().tensors().items()}
        return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def unroll(head: Head, embedding: Tensor, ids: Tensor, states: Tensor, chains: Chains, steps: int) -> list[Tensor]:
    """What the LM head reads in each step of every chain, `steps` times [B, T − 1, H].

    Args:
        head: the head.
        embedding: [V, H], the target's.
        ids: int64 [B, T].
        states: [B, T, 4, H], see `Head.start`.
        chains: of length T − 1.
        steps: K.
    """
    chains.restart()
    hidden = head.start(states[:, :-1])
    outputs = []
    for step in range(steps):
        tokens = F.pad(ids[:, 1 + step :], (0, step))
        x, hidden = head.step(F.embedding(tokens, embedding), hidden, chains)
        outputs.append(x)
    return outputs


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        wide = logits.float()
        total = wide.logsumexp(-1, keepdim=True)
        loss = (total[:, 0] - (wanted * wide).sum(-1)).mean()
        ctx.save_for_backward(wide.sub_(total).exp_().sub_(wanted).div_(len(logits)).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0], None


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """The mean of −Σ wanted · log softmax(logits), both [N, n].

    PyTorch's keeps tensors of logits in float32 for the way back; here one is kept, the gradient in their own dtype.
    """
    return _CrossEntropy.apply(logits, wanted)  # type: ignore[return-value]
