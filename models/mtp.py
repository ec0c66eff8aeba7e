"""MTP heads, the modules for further tokens that a model is trained with: DeepSeek's, Qwen3-Next's, MiMo's and GLM's.

Row i pairs the embedding e of token i + 1 with a hidden state h of token i, the target's after its final norm in the
first module. A module owns the keys and values of its decoder layer:

    z = W [norm_e(e) ; norm_h(h)]
    r = z + attn(norm(z));   r = r + mlp(norm(r))
    y = norm_final(r),   logits = target_head(y),   the next step's h = y

One module is applied again at every step; of n modules in a chain, step s runs module s mod n. What families do
otherwise is an `MTPLayout`, found by the checkpoint's model type. Decoder layers are dense: a mixture of experts and
multi-head latent attention are refused.

Sources: the DeepSeek-V3 report, `transformers` (`MtpModel`) and vLLM, whose checkpoints' names are read unchanged.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tridraft.kernels._pdl import early_successors
from tridraft.models.draft_head import DraftHead
from tridraft.models.layers import DecoderLayer, DecoderShape, Joint, Linear, RMSNorm
from tridraft.models.paged import AttentionBatch, LayerKV
from tridraft.models.weights import LoadReport


@dataclass(frozen=True)
class MTPLayout:
    """What tells one family's modules from another's: names in a checkpoint, and rules.

    Attributes:
        prefix: what a module's names begin with; `layer` counts on from the target's layers, `module` from 0.
        enorm: after the prefix, the norm of the embedding.
        hnorm: the norm of the hidden state.
        eh_proj: the projection of both.
        layer: the decoder layer.
        norm: the final norm.
        lm_head: an LM head of its own.
        hidden_first: the projection's input is [norm_h(h) ; norm_e(e)].
        prenorm_feedback: a module that is applied again gets r for h, not y.
        zero_first_embedding: e is 0 at position 0.
        gated: the query projection brings a gate of the attention's output.
        zero_centred_norms: the checkpoint holds w of norms that multiply by 1 + w.
    """

    prefix: str
    enorm: str
    hnorm: str
    eh_proj: str
    layer: str
    norm: str
    lm_head: str
    hidden_first: bool = False
    prenorm_feedback: bool = False
    zero_first_embedding: bool = False
    gated: bool = False
    zero_centred_norms: bool = False


_DEEPSEEK = MTPLayout(
    prefix="model.layers.{layer}",
    enorm="enorm",
    hnorm="hnorm",
    eh_proj="eh_proj",
    layer="",
    norm="shared_head.norm",
    lm_head="shared_head.head",
)
# As GLM's authors wrote it for vLLM; transformers and SGLang run its checkpoints by DeepSeek's rules.
_GLM = replace(_DEEPSEEK, prenorm_feedback=True, zero_first_embedding=True)
_MIMO = MTPLayout(
    prefix="model.mtp_layers.{module}",
    enorm="token_layernorm",
    hnorm="hidden_layernorm",
    eh_proj="input_proj",
    layer="",
    norm="final_layernorm",
    lm_head="lm_head",
    hidden_first=True,
    zero_first_embedding=True,
)
_QWEN = MTPLayout(
    prefix="mtp",
    enorm="pre_fc_norm_embedding",
    hnorm="pre_fc_norm_hidden",
    eh_proj="fc",
    layer="layers.0",
    norm="norm",
    lm_head="lm_head",
    gated=True,
    zero_centred_norms=True,
)

LAYOUTS: Mapping[str, MTPLayout] = MappingProxyType(
    {
        "deepseek_v3": _DEEPSEEK,
        "glm4_moe": _GLM,
        "llama": _DEEPSEEK,
        "mimo": _MIMO,
        "qwen2": _DEEPSEEK,
        "qwen3": _DEEPSEEK,
        "qwen3_5": _QWEN,
        "qwen3_5_text": _QWEN,
        "qwen3_next": _QWEN,
    }
)
"""The layout of each model type. Dense models without heads of their own have DeepSeek's, for heads trained later."""

_REFUSED = {
    r"\.mlp\.(experts|gate|shared_experts?|shared_expert_gate)\.": "a mixture of experts",
    r"\.self_attn\.(q_a_|q_b_|kv_a_|kv_b_)": "multi-head latent attention",
    r"\.linear_attn\.": "linear attention",
}


@dataclass(frozen=True)
class MTPConfig:
    """The head's shape.

    Attributes:
        layout: the family's.
        layer: the shape of its decoder layers.
        first_layer: the number of the first module's layer, which is the target's number of layers.
        num_modules: modules of the chain.
    """

    layout: MTPLayout
    layer: DecoderShape
    first_layer: int
    num_modules: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "MTPConfig":
        """Read the `config.json` of a checkpoint, the target's own or one of a head alone.

        Raises:
            ValueError: a model type without a layout, a size is missing, or a setting these heads do not have.
        """
        kind = str(config.get("model_type"))
        if kind not in LAYOUTS:
            raise ValueError(f"model_type: got {kind!r}, needs one of {', '.join(LAYOUTS)}")
        layout = LAYOUTS[kind]
        text = config.get("text_config") or config
        counts = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
        counted, num_modules = next(((key, text[key]) for key in counts if text.get(key) is not None), (counts[0], 1))
        separate = "{" in layout.prefix
        if type(num_modules) is not int or num_modules < 1 or (num_modules > 1 and not separate):
            raise ValueError(f"{counted}: got {num_modules}, needs {'1 or more' if separate else '1'}")
        for key in ("num_hidden_layers", "vocab_size"):
            if key not in text:
                raise ValueError(f"{key}: missing from the configuration")
        return cls(
            layout=layout,
            layer=DecoderShape.from_dict(text, gated=layout.gated, zero_centred_norms=layout.zero_centred_norms),
            first_layer=text["num_hidden_layers"],
            num_modules=num_modules,
            vocab_size=text["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or text["vocab_size"],
            max_position_embeddings=text.get("max_position_embeddings"),
        )


class MTPModule(nn.Module):
    """One module: two norms and a projection into a decoder layer, and the final norm."""

    def __init__(self, shape: DecoderShape, *, dtype=None, device=None) -> None:
        super().__init__()
        hidden = shape.hidden_size

        def norm() -> RMSNorm:
            return shape.norm(hidden, dtype=dtype, device=device)

        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = Linear(2 * hidden, hidden, dtype=dtype, device=device)
        self.layer = DecoderLayer(shape, dtype=dtype, device=device)
        self.norm = norm()


class MTP(DraftHead):
    """An MTP head of one module or a chain."""

    def __init__(self, config: MTPConfig, *, dtype=None, device=None) -> None:
        modules = [MTPModule(config.layer, dtype=dtype, device=device) for _ in range(config.num_modules)]
        hidden = config.layer.hidden_size
        super().__init__(
            [module.layer.self_attn.kv_spec for module in modules],
            vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            hidden_size=hidden,
            target_hidden_size=hidden,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.config = config
        self.chain = nn.ModuleList(modules)
        # In a chain the next module was trained on y.
        self._prenorm_feedback = config.layout.prenorm_feedback and config.num_modules == 1

    @classmethod
    def from_config(cls: type[Any], config: Mapping[str, Any], names: Sequence[str], *, dtype: torch.dtype) -> Any:
        return cls(MTPConfig.from_dict(config), dtype=dtype)

    def _prefix(self, module: int) -> str:
        return self.config.layout.prefix.format(layer=self.config.first_layer + module, module=module)

    def _outer_name(self, name: str, module: int) -> str:
        own = {"embed_weight": "embed_tokens.weight", "lm_head_weight": f"{self.config.layout.lm_head}.weight"}
        return f"{self._prefix(module)}.{own[name]}"

    def checkpoint_name(self, name: str) -> str:
        if name in ("embed_weight", "lm_head_weight"):
            return self._outer_name(name, 0)
        matched = re.fullmatch(r"chain\.(\d+)\.(\w+)\.(.*)", name)
        if matched is None:
            return name
        module, part, rest = matched.groups()
        return ".".join(filter(None, (self._prefix(int(module)), getattr(self.config.layout, part), rest)))

    def reads(self, name: str) -> bool:
        return name == "d2t" or name.startswith(tuple(f"{self._prefix(module)}." for module in range(len(self.chain))))

    def tied(self) -> dict[str, str]:
        return {
            self._outer_name(name, module): self._outer_name(name, 0)
            for name, own in (("embed_weight", self.embed_weight), ("lm_head_weight", self.lm_head_weight))
            for module in range(1, len(self.chain))
            if own is not None
        }

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse decoder layers that are not dense, and modules that the configuration does not count.

        Raises:
            ValueError: names the layer, what it is, and the tensor that shows it.
        """
        names = list(names)
        following = f"{self._prefix(len(self.chain))}."
        surplus = following != f"{self._prefix(0)}." and next((one for one in names if one.startswith(following)), None)
        if surplus:
            raise ValueError(
                f"num_nextn_predict_layers: got {len(self.chain)}, the checkpoint has more (has {surplus})"
            )
        for name in filter(self.reads, names):
            for pattern, kind in _REFUSED.items():
                matched = re.search(pattern, name)
                if matched:
                    raise ValueError(f"{name[: matched.start()]}: {kind} is not supported in an MTP layer (has {name})")

    def load_weights(
        self, tensors: Iterable[tuple[str, Tensor]], *, device: torch.device | str | None = None
    ) -> LoadReport:
        report = super().load_weights(tensors, device=device)
        if self.config.layout.zero_centred_norms:
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.add_(1)
        return report

    def forward(
        self,
        inputs_embeds: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
        *,
        step: int = 0,
    ) -> Tensor:
        """One pass of one module over rows of any requests; writes their keys and values.

        Args:
            inputs_embeds: [T, H], of each row's next token (`embed`).
            positions: [T] int64, rotary positions, from 0 for a text's first row.
            hidden: [T, H], the target's final hidden states, then what the previous step returned.
            kv: the cache of each module.
            batch: how rows belong to requests, and where their keys go; `seq_lens` counts the keys of this pass.
            step: the draft step s, which runs module s mod n.

        Returns:
            [T, H], the next step's `hidden` and what `compute_logits` and `sample` take. It is y, normed already, but
            r in layouts with `prenorm_feedback`, of which `compute_logits` and `sample` take the norm.
        """
        index = step % len(self.chain)
        module: Any = self.chain[index]
        layout, width = self.config.layout, self.hidden_size
        if layout.zero_first_embedding:
            inputs_embeds = inputs_embeds.masked_fill((positions == 0)[:, None], 0)
        halves = hidden.new_empty(len(hidden), 2 * width)
        first, second = halves[:, :width], halves[:, width:]
        module.enorm(inputs_embeds, out=second if layout.hidden_first else first)
        module.hnorm(hidden, out=first if layout.hidden_first else second)
        with early_successors():
            z = module.eh_proj(halves)
            branch, stream = module.layer(module.layer.input_layernorm(z), z, positions, kv[index], batch)
        if self._prenorm_feedback:
            return stream + branch
        return Joint(module.norm)(branch, stream)[0]

    def head_input(self, head_hidden: Tensor) -> Tensor:
        module: Any = self.chain[0]
        return module.norm(head_hidden) if self._prenorm_feedback else head_hidden
