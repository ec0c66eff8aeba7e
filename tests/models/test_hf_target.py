"""HFTarget against the model's own forward: every kind of Gemma 4, and other families."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from _compare import assert_close_to_float64
from _paged_cache import PagedCache
from _tiny_gemma4 import VARIANTS, float64_copy, target_config, tiny_pair, worst_of
from tridraft.models import hf_target
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import KVSpec

transformers = pytest.importorskip("transformers")

LENGTHS = (21, 13, 6)
# new tokens of each request in each pass: chunks of prompts, single tokens, verify batches, a request that waits
PASSES = ((9, 5, 2), (1, 1, 1), (5, 0, 2), (6, 7, 1))
SLIDING, FULL = "sliding_attention", "full_attention"


def dtypes(device):
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


def run_whole(model, tokens):
    output = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    return output.logits[0], output.hidden_states[-1][0]


def run_packed(target, sequences, passes, *, aux_layers=()):
    """Every token's logits, hidden and aux states, from several passes over packed requests."""
    cache = PagedCache(target.kv_specs, len(sequences), 64, dtype=target.dtype, device=target.device)
    done = [0] * len(sequences)
    parts = [[] for _ in sequences]
    for new in passes:
        batch, positions = cache.batch(done, new)
        ids = torch.cat([sequence[at : at + n] for sequence, at, n in zip(sequences, done, new, strict=True)])
        rows = torch.arange(len(ids), device=target.device)
        output = target.forward(ids, positions, cache.layers, batch, rows, aux_layers=aux_layers)
        pieces = [piece.split(new) for piece in (output.logits, output.hidden, *(output.aux_hidden or ()))]
        for request, part in enumerate(zip(*pieces, strict=True)):
            parts[request].append(part)
        done = [at + n for at, n in zip(done, new, strict=True)]
    return [[torch.cat(piece) for piece in zip(*part, strict=True)] for part in parts]


def check_against_own_forward(model, attentions=("sdpa", "eager")):
    """Ragged, chunked and verify passes equal one whole forward of the untouched model, within its own error."""
    reference, exact = copy.deepcopy(model), float64_copy(model)
    target = HFTarget(model)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, target.vocab_size, (n,), generator=generator).to(target.device) for n in LENGTHS]
    # logits, then hidden; of all requests at once
    ours = [torch.cat(parts) for parts in zip(*run_packed(target, sequences, PASSES), strict=True)]
    exact = [torch.cat(parts) for parts in zip(*(run_whole(exact, one) for one in sequences), strict=True)]
    same = []
    for attention in attentions:
        reference.set_attn_implementation(attention)
        same.append([torch.cat(parts) for parts in zip(*(run_whole(reference, one) for one in sequences), strict=True)])
    for index in range(2):
        yardstick = worst_of((run[index] for run in same), exact[index])
        assert_close_to_float64(ours[index], exact[index], yardstick)
    return target


@pytest.mark.parametrize("variant", VARIANTS)
def test_gemma4_passes_equal_whole_forward(variant, device):
    for dtype in dtypes(device):
        check_against_own_forward(tiny_pair(variant, dtype=dtype, device=device).target)


def small_config(kind, **changes):
    return kind(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **{"num_hidden_layers": 3, **changes},
    )


FAMILIES = {
    "llama": lambda: small_config(transformers.LlamaConfig),
    "qwen3": lambda: small_config(transformers.Qwen3Config),
    "gemma3": lambda: small_config(
        transformers.Gemma3TextConfig, sliding_window=8, layer_types=[SLIDING, SLIDING, FULL], query_pre_attn_scalar=48
    ),
    "gemma2": lambda: small_config(transformers.Gemma2Config, sliding_window=8, attn_logit_softcapping=5.0),
    "mistral": lambda: small_config(transformers.MistralConfig, sliding_window=8),
}
WINDOWS = {
    "llama": [None] * 3,
    "qwen3": [None] * 3,
    "gemma3": [8, 8, None],
    "gemma2": [8, None, 8],
    "mistral": [8] * 3,
}


def family_model(family, device, dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(device).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_as_targets(family, device):
    model = family_model(family, device)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # the only one of the two that applies its soft cap
        target = check_against_own_forward(model, ["eager"])
    else:
        target = check_against_own_forward(model)
    assert target.kv_specs == [KVSpec(64, 2, window) for window in WINDOWS[family]]
    assert target.layer_types == [SLIDING if window else FULL for window in WINDOWS[family]]


def multimodal_model(unified):
    text = target_config("k_eq_v" if unified else "kv_shared")
    if unified:
        text = {key: value for key, value in text.items() if "per_layer_input" not in key}
        config = transformers.Gemma4UnifiedConfig(text_config={**text, "model_type": "gemma4_unified_text"})
        return transformers.Gemma4UnifiedForConditionalGeneration(config)
    config = transformers.Gemma4Config(
        text_config={**text, "model_type": "gemma4_text"}, vision_config=None, audio_config=None
    )
    return transformers.Gemma4ForConditionalGeneration(config)


@pytest.mark.parametrize("unified", [False, True], ids=["gemma4", "gemma4_unified"])
def test_multimodal_classes_run_as_text(unified, device):
    torch.manual_seed(0)
    check_against_own_forward(multimodal_model(unified).to(device).eval())


def test_shared_layers_point_at_their_source():
    target = HFTarget(tiny_pair("kv_shared").target)
    assert target.layer_types == [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL]
    assert target.kv_specs == [KVSpec(64, 1, 8), KVSpec(64, 1, 8), KVSpec(128, 1, None), KVSpec(64, 1, 8)]
    assert target.kv_index == [0, 1, 2, 3, 2, 3, 2]


def test_k_eq_v_gives_full_layers_their_own_heads():
    target = HFTarget(tiny_pair("k_eq_v").target)
    assert target.kv_specs == [
        KVSpec(128, 1, None) if kind == FULL else KVSpec(64, 2, 8) for kind in target.layer_types
    ]
    assert target.kv_index == list(range(6))


def test_chunked_prefill_equals_whole(device):
    target = HFTarget(tiny_pair("plain", device=device).target)
    sequence = torch.arange(3, 33, device=device)
    whole = run_packed(target, [sequence], [(30,)])[0]
    chunked = run_packed(target, [sequence], [(11,), (1,), (5,), (13,)])[0]
    for ours, theirs in zip(chunked, whole, strict=True):
        # matrix products of other row counts sum in another order: float32 noise through six layers
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_aux_hidden_is_the_stream_entering_each_layer(device):
    model = tiny_pair("plain", device=device).target
    reference = copy.deepcopy(model)
    sequence = torch.arange(3, 20, device=device)
    _, _, first, second = run_packed(HFTarget(model), [sequence], [(17,)], aux_layers=(2, 4))[0]
    hidden = reference(input_ids=sequence[None], use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(first, hidden[2][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, hidden[4][0], rtol=1e-4, atol=1e-4)


def test_logits_of_the_rows_asked_for(device):
    target = HFTarget(tiny_pair("plain", device=device).target)
    cache = PagedCache(target.kv_specs, 2, 16, dtype=target.dtype, device=device)
    batch, positions = cache.batch([0, 0], [5, 3])
    ids = torch.arange(3, 11, device=device)
    every = target.forward(ids, positions, cache.layers, batch, torch.arange(8, device=device))
    some = target.forward(ids, positions, cache.layers, batch, torch.tensor([7, 4], device=device))
    assert some.hidden.shape == (8, target.hidden_size)
    torch.testing.assert_close(some.logits, every.logits[[7, 4]], rtol=1e-4, atol=1e-4)


def test_embedding_scale_is_rounded_as_the_target_rounds_it():
    config = transformers.Gemma4TextConfig(**{**target_config("plain"), "hidden_size": 1536})
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(config).bfloat16()
    assert HFTarget(model).embed_scale == 39.25  # √1536 = 39.19
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(FAMILIES["llama"]())
    assert HFTarget(llama).embed_scale == 1.0


def test_generation_config_is_exposed():
    model = tiny_pair("plain").target
    assert HFTarget(model).eos_token_ids == ()
    assert HFTarget(model).suppress_ids is None
    model.generation_config.eos_token_id = [1, 106]
    model.generation_config.suppress_tokens = [9, 5]
    target = HFTarget(model)
    assert target.eos_token_ids == (1, 106)
    assert target.suppress_ids is not None
    assert target.suppress_ids.tolist() == [5, 9]
    model.generation_config.eos_token_id = 7
    assert HFTarget(model).eos_token_ids == (7,)
    model.generation_config.suppress_tokens = [128]
    with pytest.raises(ValueError, match="128"):
        HFTarget(model)


def test_attention_sinks_are_refused():
    config = small_config(transformers.GptOssConfig, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="GptOssAttention: attention sinks"):
        HFTarget(transformers.GptOssForCausalLM(config))


def test_other_layer_types_are_refused():
    with torch.device("meta"):
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(num_hidden_layers=4))
    with pytest.raises(ValueError, match="layers of type linear_attention"):
        HFTarget(model)


def test_two_key_widths_are_refused():
    config = transformers.DeepseekV3Config(num_hidden_layers=1, first_k_dense_replace=1)
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    with pytest.raises(ValueError, match="keys of width 192 with values of 128"):
        HFTarget(model)


def test_an_assistant_is_no_target():
    with pytest.raises(ValueError, match="an assistant drafts"):
        HFTarget(tiny_pair("plain").assistant)


def test_direct_call_of_the_wrapped_model_is_refused():
    model = tiny_pair("plain").target
    HFTarget(model)
    with pytest.raises(RuntimeError, match=r"HFTarget\.forward"):
        model(input_ids=torch.tensor([[3, 4]]))


def test_from_pretrained_equals_the_model_saved(tmp_path, device):
    pair = tiny_pair("kv_shared", device=device)
    directory, _ = pair.save(tmp_path, suppress_tokens=[3])
    target = HFTarget.from_pretrained(directory, dtype=torch.float32, device=device)
    sequence = torch.arange(3, 20, device=device)
    (loaded,) = run_packed(target, [sequence], [(17,)])
    (original,) = run_packed(HFTarget(pair.target), [sequence], [(17,)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(loaded, original, strict=True))
    assert target.suppress_ids is not None
    assert target.suppress_ids.tolist() == [3]
    assert (target.device, target.dtype) == (device, torch.float32)


def test_from_pretrained_errors_name_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        HFTarget.from_pretrained(tmp_path / "nowhere", dtype=torch.float32, device="cpu")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        HFTarget.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "gemma9000"}')
    with pytest.raises(ValueError, match="gemma9000"):
        HFTarget.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    _, assistant = tiny_pair("plain").save(tmp_path / "pair")
    with pytest.raises(ValueError, match="gemma4_assistant drafts, it cannot be the target"):
        HFTarget.from_pretrained(assistant, dtype=torch.float32, device="cpu")


def test_from_pretrained_names_missing_tensors(tmp_path):
    from safetensors.torch import load_file, save_file

    directory, _ = tiny_pair("plain").save(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        HFTarget.from_pretrained(directory, dtype=torch.float32, device="cpu")


class SyncLog(TorchDispatchMode):
    """Names of the operators that would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "aten.equal", "masked_select")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_outside_our_operations_syncs(variant, monkeypatch):
    monkeypatch.setattr(hf_target, "paged_attention", lambda q, *_, **__: torch.zeros_like(q))
    monkeypatch.setattr(hf_target, "write_kv", lambda *_, **__: None)
    target = HFTarget(tiny_pair(variant).target)
    cache = PagedCache(target.kv_specs, 2, 16, dtype=target.dtype, device=target.device)
    batch, positions = cache.batch([0, 0], [5, 3])
    with SyncLog() as log:
        target.forward(torch.arange(3, 11), positions, cache.layers, batch, torch.tensor([4, 7]))
    assert log.found == []


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_verify_pass_is_captured_and_replayed(variant, device):
    """A verify batch recorded in a CUDA graph, replayed on other tokens, gives what an eager pass gives."""
    target = HFTarget(tiny_pair(variant, device=device, dtype=torch.bfloat16).target)
    cache = PagedCache(target.kv_specs, 2, 32, dtype=target.dtype, device=device)
    prompts, positions = cache.batch([0, 0], [9, 4])
    rows = torch.arange(13, device=device)
    target.forward(torch.arange(3, 16, device=device), positions, cache.layers, prompts, rows)
    batch, positions = cache.batch([9, 4], [5, 5])
    ids, rows = torch.arange(20, 30, device=device), torch.arange(10, device=device)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = target.forward(ids, positions, cache.layers, batch, rows)
    ids.copy_(torch.arange(50, 60, device=device))
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    eager = target.forward(ids, positions, cache.layers, batch, rows)
    assert torch.equal(output.logits, eager.logits)
    assert torch.equal(output.hidden, eager.hidden)
