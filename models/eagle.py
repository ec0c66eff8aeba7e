"""EAGLE heads: a decoder layer or two that continue the target's hidden states, a token a step.

Row i pairs the embedding e of token i + 1 with the target's hidden state h of token i. Layers own keys and values, so
position i of the cache belongs to row i. EAGLE-1 and 2, on the target's state after its final norm:

    x = W_fc [e ; h]                                       no norm before the first layer's attention
    r = x + attn(x);   r = r + mlp(norm(r))
    logits = target_head(r),   the next step's h = r       no final norm

EAGLE-3, on the residual streams a₁, a₂, a₃ that enter three of the target's layers:

    h = W_fc [a₁ ; a₂ ; a₃]                                of the target's rows; a drafted row's h is fed back as it is
    z = [norm_in(e) ; norm_hidden(h)]
    r = h + attn(z);   r = r + mlp(norm(r))
    logits = head(norm_out(r)) over the draft vocabulary,  the next step's h = r, or norm_out(r) with `norm_output`

`norm_before_residual` puts norm_hidden(h) for h in the sum, `norm_before_fc` norms [a₁ ; a₂ ; a₃] as one, `fc_norm`
each of the three. A layer id counts layers before the stream: `output_hidden_states[id]` of `transformers`, which is
vLLM's reading of configured ids (SGLang adds 1).

Sources: SafeAILab/EAGLE, SpecForge and vLLM, whose checkpoints' names and shapes are read unchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tridraft.kernels._pdl import early_successors
from tridraft.models.draft_head import DraftHead, Target, TargetShape
from tridraft.models.layers import DecoderLayer, DecoderShape, Joint, Linear, RMSNorm
from tridraft.models.paged import AttentionBatch, LayerKV
from tridraft.models.weights import LoadReport

_AUX_KEYS = ("eagle_aux_hidden_state_layer_ids", "layer_ids")


@dataclass(frozen=True)
class EagleConfig:
    """The head's shape.

    Attributes:
        layer: the shape of its layers.
        num_layers: how many; the checkpoint's tensors say, configurations often carry the target's number.
        aux_layers: target layers whose input EAGLE-3 reads; None for the default (2, L // 2, L − 3).
        norm_before_residual: see the module, as are the three after it.
    """

    layer: DecoderShape
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    max_position_embeddings: int | None
    aux_layers: tuple[int, ...] | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @property
    def num_aux(self) -> int:
        """Residual streams that EAGLE-3 reads."""
        return 3 if self.aux_layers is None else len(self.aux_layers)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], num_layers: int = 1) -> "EagleConfig":
        """Read a head's `config.json`, as EAGLE's authors, SpecForge, NVIDIA or the speculators library write it.

        Raises:
            ValueError: a size is missing, or a setting these heads do not have.
        """
        settings = {**config, **(config.get("eagle_config") or {})}
        body = config.get("transformer_layer_config") or config
        layer = DecoderShape.from_dict(body)
        vocab_size = body.get("vocab_size")
        if not vocab_size:
            raise ValueError("vocab_size: missing from the configuration")
        aux_layers = next((settings[key] for key in _AUX_KEYS if settings.get(key)), None)
        if aux_layers is not None and not all(type(index) is int for index in aux_layers):
            raise ValueError(f"{_AUX_KEYS[0]}: got {aux_layers}, needs integers")
        return cls(
            layer=layer,
            num_layers=num_layers,
            vocab_size=vocab_size,
            draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
            target_hidden_size=config.get("target_hidden_size") or layer.hidden_size,
            max_position_embeddings=body.get("max_position_embeddings"),
            aux_layers=None if aux_layers is None else tuple(aux_layers),
            norm_before_residual=bool(settings.get("norm_before_residual")),
            norm_before_fc=bool(settings.get("norm_before_fc")),
            fc_norm=bool(settings.get("fc_norm")),
            norm_output=bool(settings.get("norm_output")),
        )


def _canonical(name: str) -> str:
    """The name without the loaders' prefix, the one layer of EAGLE-3 named as layer 0."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


class Eagle(DraftHead):
    """The head of EAGLE-1 and 2, drafting a chain."""

    def __init__(self, config: EagleConfig, *, dtype=None, device=None) -> None:
        layers = [self._make_layer(config, index, dtype, device) for index in range(config.num_layers)]
        super().__init__(
            [layer.self_attn.kv_spec for layer in layers],
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            hidden_size=config.layer.hidden_size,
            target_hidden_size=config.target_hidden_size,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.fc = Linear(self._fc_inputs(config), config.layer.hidden_size, dtype=dtype, device=device)

    @staticmethod
    def _make_layer(config: EagleConfig, index: int, dtype, device) -> DecoderLayer:
        return DecoderLayer(config.layer, input_norm=index > 0, dtype=dtype, device=device)

    @staticmethod
    def _fc_inputs(config: EagleConfig) -> int:
        hidden = config.layer.hidden_size
        if config.target_hidden_size != hidden:
            raise ValueError(f"target_hidden_size: got {config.target_hidden_size}, needs hidden_size, {hidden}")
        return 2 * hidden

    @classmethod
    def from_config(cls, config: Mapping[str, Any], names: Sequence[str], *, dtype: torch.dtype) -> "Eagle":
        layers = {_canonical(name).split(".")[1] for name in names if _canonical(name).startswith("layers.")}
        return cls(EagleConfig.from_dict(config, max(1, len(layers))), dtype=dtype)

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, device: torch.device | str | None = None
    ) -> LoadReport:
        return super().load_weights(((_canonical(name), tensor) for name, tensor in tensors), device=device)

    def _run(
        self,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor]:
        """The layers, from the first one's attention's input: two summands of the residual stream."""
        with early_successors():
            branch, stream = self.layers[0](x, residual, positions, kv[0], batch)
            layers: list[Any] = list(self.layers)[1:]
            for layer, layer_kv in zip(layers, kv[1:], strict=True):
                normed, stream = Joint(layer.input_layernorm)(branch, stream)
                branch, stream = layer(normed, stream, positions, layer_kv, batch)
            return branch, stream

    def forward(
        self,
        inputs_embeds: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
        *,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One pass over rows of any requests; writes their keys and values where `batch.slot_mappings` says.

        Args:
            inputs_embeds: [T, H], of each row's next token (`embed`).
            positions: [T] int64, rotary positions.
            hidden: [T, H], the target's final hidden states, then what the previous step fed back.
            kv: the cache of each of the head's layers.
            batch: how rows belong to requests; `seq_lens` counts the keys of this pass.
            step: the draft step.

        Returns:
            What the LM head reads and what the next step's `hidden` is: here one tensor [T, H].
        """
        x = self.fc(torch.cat((inputs_embeds, hidden), dim=-1))
        branch, stream = self._run(x, x, positions, kv, batch)
        out = stream + branch
        return out, out


class _Eagle3Layer(DecoderLayer):
    """The first layer, whose attention reads the normed embedding and the normed hidden state beside each other."""

    def __init__(self, shape: DecoderShape, *, dtype=None, device=None) -> None:
        super().__init__(shape, in_features=2 * shape.hidden_size, dtype=dtype, device=device)
        self.hidden_norm = shape.norm(shape.hidden_size, dtype=dtype, device=device)


class Eagle3(Eagle):
    """The head of EAGLE-3, drafting a chain. `aux_layers` is known once the target is (`share_with_target`)."""

    input_norm: RMSNorm | None
    fc_norm: nn.ModuleList | None

    def __init__(self, config: EagleConfig, *, dtype=None, device=None) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self.aux_layers = config.aux_layers or ()
        width = config.target_hidden_size

        def norm(size: int) -> RMSNorm:
            return config.layer.norm(size, dtype=dtype, device=device)

        self.input_norm = norm(config.num_aux * width) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(norm(width) for _ in range(config.num_aux)) if config.fc_norm else None
        self.norm = norm(config.layer.hidden_size)

    @staticmethod
    def _make_layer(config: EagleConfig, index: int, dtype, device) -> DecoderLayer:
        kind = DecoderLayer if index else _Eagle3Layer
        return kind(config.layer, dtype=dtype, device=device)

    @staticmethod
    def _fc_inputs(config: EagleConfig) -> int:
        return config.num_aux * config.target_hidden_size

    def _aux_layers_of(self, target: TargetShape) -> tuple[int, ...]:
        depth = len(target.layer_types)
        return self.config.aux_layers or (2, depth // 2, depth - 3)

    def _mismatches(self, target: TargetShape) -> Iterator[str]:
        yield from super()._mismatches(target)
        depth, layers = len(target.layer_types), self._aux_layers_of(target)
        if not all(0 <= layer < depth for layer in layers):
            yield f"auxiliary layers (draft reads {list(layers)}, target has 0 … {depth - 1})"

    def share_with_target(self, target: Target) -> None:
        super().share_with_target(target)
        self.aux_layers = self._aux_layers_of(target)

    def combine_hidden_states(self, hidden: Tensor) -> Tensor:
        """From the target's residual streams [T, 3 · target_hidden_size], one after another in `aux_layers`' order, to
        `forward`'s [T, H]. Of the target's rows only: what a step feeds back is combined already.
        """
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            normed = torch.empty_like(hidden)
            chunks = hidden.chunk(self.config.num_aux, -1), normed.chunk(self.config.num_aux, -1)
            for norm, x, out in zip(self.fc_norm, *chunks, strict=True):
                norm(x, out=out)
            hidden = normed
        return self.fc(hidden)

    def forward(
        self,
        inputs_embeds: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
        *,
        step: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One pass over rows of any requests; writes their keys and values where `batch.slot_mappings` says.

        Args:
            inputs_embeds: [T, H], of each row's next token (`embed`).
            positions: [T] int64, rotary positions.
            hidden: [T, H], combined target states, then what the previous step fed back.
            kv: the cache of each of the head's layers.
            batch: how rows belong to requests; `seq_lens` counts the keys of this pass.
            step: the draft step.

        Returns:
            What the LM head reads and what the next step's `hidden` is, each [T, H].
        """
        first: Any = self.layers[0]
        width = self.hidden_size
        z = hidden.new_empty(len(hidden), 2 * width)
        first.input_layernorm(inputs_embeds, out=z[:, :width])
        normed = first.hidden_norm(hidden, out=z[:, width:])
        residual = normed if self.config.norm_before_residual else hidden
        branch, stream = self._run(z, residual, positions, kv, batch)
        head_hidden, stream = Joint(self.norm)(branch, stream)
        return head_hidden, head_hidden if self.config.norm_output else stream
