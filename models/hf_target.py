"""A Hugging Face causal language model as the target, unmodified, over a paged cache.

All requests of a pass are packed in one row [1, T]. The model runs with `use_cache=False` and an attention function
of ours, registered as "tridraft": it gets each layer's new keys and values, normed and rotated, writes them to the
layer's pages and attends over the pages. What it needs for that travels through the model as a keyword argument, so
two targets, or two threads, share nothing. No mask is built and nothing waits for the device: a forward pass can be
captured in a CUDA graph.

`transformers` is imported when a target is made, not with this module.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tridraft.kernels.attention import paged_attention
from tridraft.kernels.kv_cache import write_kv
from tridraft.kernels.suppress import make_suppress_ids
from tridraft.models.paged import AttentionBatch, KVSpec, LayerKV
from tridraft.models.weights import read_json

_NAME = "tridraft"
_FINAL = -1
_LAYER_TYPES = ("full_attention", "sliding_attention")


class TargetOutput(NamedTuple):
    """What a pass of the target gives.

    Attributes:
        logits: [N, V] of the rows asked for.
        hidden: [T, H], every token's hidden state after the final norm.
        aux_hidden: for each of the `aux_layers`, [T, H], the residual stream that enters that layer; None without.
    """

    logits: Tensor
    hidden: Tensor
    aux_hidden: tuple[Tensor, ...] | None


@dataclass(frozen=True)
class _LayerCall:
    """What one attention layer asks of its attention function, besides the tensors."""

    scaling: float
    sliding_window: int | None
    softcap: float | None


def _attention(module, query, key, value, attention_mask, dropout=0.0, **kwargs) -> tuple[Tensor, None]:
    """The function `transformers` calls in every attention layer; query and key [1, heads, T, D]."""
    handler = kwargs.pop(_NAME, None)
    if handler is None:
        raise RuntimeError("a model with the 'tridraft' attention runs through HFTarget.forward only")
    scaling = kwargs.get("scaling")
    call = _LayerCall(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__}: attention sinks are not supported")
    return handler(module, *(x[0].transpose(0, 1) for x in (query, key, value)), call).unsqueeze(0), None


class _Probe:
    """Runs through a model once to learn what its attention layers ask for; computes nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[KVSpec, bool]] = {}

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, call: _LayerCall) -> Tensor:
        kind = type(module).__name__
        if not getattr(module, "is_causal", True):
            raise ValueError(f"{kind}: attention that is not causal is not supported")
        if key.shape[-1] != value.shape[-1]:
            raise ValueError(
                f"{kind}: keys of width {key.shape[-1]} with values of {value.shape[-1]} are not supported"
            )
        spec = KVSpec(key.shape[-1], key.shape[-2], call.sliding_window)
        self.layers[module.layer_idx] = (spec, not getattr(module, "is_kv_shared_layer", False))
        return torch.zeros_like(query)


@dataclass(frozen=True)
class _PagedAttention:
    """Attention over the pages, for one pass."""

    kv: Sequence[LayerKV]
    kv_index: Sequence[int]
    owns_kv: Sequence[bool]
    batch: AttentionBatch

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, call: _LayerCall) -> Tensor:
        layer = module.layer_idx
        kv, batch = self.kv[self.kv_index[layer]], self.batch
        if self.owns_kv[layer] and batch.slot_mappings is not None:
            slots = batch.slot_mappings[kv.group]
            write_kv(key, value, kv.k_cache, kv.v_cache, slots, k_scale=kv.k_scale, v_scale=kv.v_scale)
        return paged_attention(
            query,
            kv.k_cache,
            kv.v_cache,
            batch.block_tables[kv.group],
            batch.query_start_loc,
            batch.seq_lens,
            scale=call.scaling,
            max_query_len=batch.max_query_len,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
        )


class HFTarget:
    """A `transformers` causal language model that reads and writes a paged cache.

    Gemma 4 (also inside its multimodal classes, text only), Gemma 2 and 3, Llama, Qwen, Mistral and others whose
    layers attend causally with one key width through the library's attention interface. On the meta device it answers
    everything but `forward`, which is enough to check a pair before anything is allocated.

    Attributes:
        layer_types: "full_attention" or "sliding_attention" for each layer.
        kv_specs: what each layer that owns keys and values stores.
        kv_index: for each layer, the index in `kv_specs` of the keys it reads; layers may share.
        embed_weight: [V, H].
        embed_scale: what the embedding's rows are multiplied by, rounded to the weight's dtype.
        lm_head_weight: [V, H], rows that score the final hidden state.
        suppress_ids: ids the target never generates, as a device tensor; None when there are none.
        eos_token_ids: ids that end a text.
    """

    def __init__(self, model: Any, generation_config: Any = None) -> None:
        from transformers import AttentionInterface  # noqa: PLC0415

        AttentionInterface.register(_NAME, _attention)
        self.model = model
        text = model.config.get_text_config()
        if text.model_type.endswith("_assistant") or model.config.model_type.endswith("_assistant"):
            raise ValueError(f"{model.config.model_type}: an assistant drafts, it cannot be the target")
        # vision and audio towers keep their own attention
        wrapped = text is not model.config
        model.set_attn_implementation({"text_config": _NAME} if wrapped else _NAME)
        model.eval().requires_grad_(False)

        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.max_position_embeddings: int = text.max_position_embeddings
        embedding = model.get_input_embeddings()
        self.embed_weight: Tensor = embedding.weight.detach()
        self.embed_scale = _embed_scale(embedding)
        self.lm_head_weight: Tensor = model.get_output_embeddings().weight.detach()
        self.device, self.dtype = self.embed_weight.device, self.embed_weight.dtype

        generation = model.generation_config if generation_config is None else generation_config
        eos = getattr(generation, "eos_token_id", None)
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        suppressed = getattr(generation, "suppress_tokens", None)
        self.suppress_ids = make_suppress_ids(suppressed, self.vocab_size, self.device)
        self._read_layers(text)

    def _read_layers(self, text: Any) -> None:
        declared = getattr(text, "layer_types", None) or []
        unsupported = sorted(set(declared) - set(_LAYER_TYPES))
        if unsupported:
            raise ValueError(f"{text.model_type}: layers of type {', '.join(unsupported)} are not supported")
        # A dict of masks is taken as ready-made. Models without layer types build their mask themselves, and build
        # none for an attention function that has no mask function registered.
        self._mask = dict.fromkeys(_LAYER_TYPES) if declared else None

        probe = _Probe()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._run(token, token, probe, logits_to_keep=1)
        if sorted(probe.layers) != list(range(text.num_hidden_layers)):
            raise ValueError(
                f"{text.model_type}: {len(probe.layers)} of {text.num_hidden_layers} layers attend through the "
                "attention interface of transformers; all have to"
            )
        self.layer_types: list[str] = []
        self.kv_specs: list[KVSpec] = []
        self.kv_index: list[int] = []
        self._owns_kv: list[bool] = []
        last: dict[str, int] = {}
        for index in range(text.num_hidden_layers):
            spec, owns = probe.layers[index]
            kind = _LAYER_TYPES[spec.sliding_window is not None]
            if owns:
                last[kind] = len(self.kv_specs)
                self.kv_specs.append(spec)
            self.layer_types.append(kind)
            self.kv_index.append(last[kind])
            self._owns_kv.append(owns)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, dtype: torch.dtype, device: torch.device | str) -> "HFTarget":
        """Load a target from a checkpoint directory, or from a GGUF file, whose weights are taken out of their blocks.

        Raises:
            FileNotFoundError: not a checkpoint directory, or no such file.
            ImportError: `transformers` is absent, or what it needs to build this model.
            ValueError: the checkpoint is not complete, or its model cannot be a target.
        """
        directory, source = Path(path), {}
        if directory.suffix == ".gguf":
            if not directory.is_file():
                raise FileNotFoundError(f"{path}: no such file")
            directory, source = directory.parent, {"gguf_file": directory.name}
        model_type = None if source else read_json(directory, "config.json").get("model_type")
        try:
            import transformers  # noqa: PLC0415
            from safetensors import SafetensorError  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("a Hugging Face target needs transformers: pip install 'tridraft[hf]'") from error
        if str(model_type).endswith("_assistant"):
            raise ValueError(f"{path}: {model_type} drafts, it cannot be the target")
        try:
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, output_loading_info=True, local_files_only=True, **source
            )
            model, report = loaded
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: transformers {transformers.__version__} cannot load it: {error}") from error
        except SafetensorError as error:
            raise ValueError(f"{path}: not a valid safetensors file ({error}): download it again") from error
        if report["missing_keys"] or report["mismatched_keys"]:
            faults = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
            raise ValueError(f"{path}: tensors missing or misshapen: {', '.join(faults)}")
        try:
            return cls(model.to(device))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
        logits_rows: Tensor,
        *,
        aux_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass over packed requests: whole prompts, chunks of them, single tokens and verify batches alike.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            kv: the cache of each owning layer, in the order of `kv_specs`.
            batch: how the tokens belong to requests, and where their keys go.
            logits_rows: [N] int64, the rows of [T] to compute logits of.
            aux_layers: layers whose input is wanted besides, from 0 (EAGLE-3).
        """
        handler = _PagedAttention(kv, self.kv_index, self._owns_kv, batch)
        with _watch(self.model.get_decoder(), aux_layers) as seen:
            output = self._run(input_ids[None], positions[None], handler, logits_to_keep=logits_rows)
        aux = tuple(seen[layer][0] for layer in aux_layers) or None
        return TargetOutput(output.logits[0], seen[_FINAL][0], aux)

    def _run(self, input_ids: Tensor, positions: Tensor, handler: Any, **options: Any) -> Any:
        with torch.no_grad():
            return self.model(
                input_ids=input_ids,
                position_ids=positions,
                attention_mask=self._mask,
                use_cache=False,
                return_dict=True,
                **{_NAME: handler},
                **options,
            )


@contextmanager
def _watch(decoder: Any, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """What the decoder returns, under `_FINAL`, and what enters each of its `layers`, from the passes made inside.

    `output_hidden_states` would keep every layer's; its selection by index means other layers in other versions.
    """
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        return lambda _, inputs: seen.update({layer: inputs[0]})

    hooks = [decoder.register_forward_hook(lambda _, __, output: seen.update({_FINAL: output[0]}))]
    hooks += [decoder.layers[layer].register_forward_pre_hook(keep(layer)) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _embed_scale(embedding: Any) -> float:
    scale = getattr(embedding, "scalar_embed_scale", None)  # a number even on the meta device
    if scale is None:
        scale = getattr(embedding, "embed_scale", 1.0)
    return torch.as_tensor(scale, dtype=embedding.weight.dtype, device="cpu").item()
