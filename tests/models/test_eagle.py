"""EAGLE heads against the same heads built of transformers' modules, and their checkpoints' layouts."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from _compare import assert_close_to_float64
from _head_references import EagleReference
from _head_runs import (
    LENGTHS,
    STEPS,
    FakeTarget,
    check_against_recompute,
    check_captured,
    dtypes,
    fake_target,
    random_rows,
    run_paged,
)
from _paged_cache import PagedCache
from _tiny_heads import (
    eagle3_checkpoint,
    eagle_checkpoint,
    save_random_eagle,
    save_random_eagle3,
    tiny_target,
    write_checkpoint,
)
from tridraft.models.eagle import Eagle, Eagle3, EagleConfig
from tridraft.models.hf_target import HFTarget

transformers = pytest.importorskip("transformers")

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EAGLE = {
    "plain": {},
    "attention bias": {"bias": True, "attention_bias": True},
    "fc bias": {"fc_bias": True},
    "two layers": {"num_layers": 2},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads as query heads": {"num_key_value_heads": 4},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}
EAGLE3 = {
    **{name: options for name, options in EAGLE.items() if name != "fc bias"},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "both norms": {"fc_norm": True, "norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "eagle_config": {"eagle_config": {"norm_before_residual": True, "norm_output": True}},
    "llama3 rope": {"rope_scaling": LLAMA31, "rope_theta": 500_000.0},
    "five auxiliary layers": {"num_aux": 5, "eagle_aux_hidden_state_layer_ids": [0, 1, 3, 5, 7]},
    "wider target": {"hidden_size": 96, "target_hidden_size": 112, "own_embedding": True},
}


def target_config(**changes):
    sizes = {
        "vocab_size": 128,
        "hidden_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    return transformers.LlamaConfig(**{**sizes, **changes})


def build(checkpoint, device="cpu", dtype=torch.float32):
    """The head of a checkpoint, filled."""
    config, tensors = checkpoint
    kind = Eagle3 if "d2t" in tensors else Eagle
    with torch.device("meta"):
        head = kind.from_config(config, list(tensors), dtype=dtype)
    head.load_weights(tensors.items(), device=device)
    return head


def check(checkpoint, device, dtype):
    head = build(checkpoint, device, dtype)
    reference = EagleReference(*checkpoint).to(device=device, dtype=dtype)
    rows = random_rows(head.hidden_size, dtype, device)
    check_against_recompute(head, reference, EagleReference.whole, rows)


@pytest.mark.parametrize("variant", EAGLE)
def test_eagle_equals_transformers_modules(variant, device):
    for dtype in dtypes(device):
        check(eagle_checkpoint(target_config(), **EAGLE[variant]), device, dtype)


@pytest.mark.parametrize("variant", EAGLE3)
def test_eagle3_equals_transformers_modules(variant, device):
    for dtype in dtypes(device):
        check(eagle3_checkpoint(target_config(), **EAGLE3[variant]), device, dtype)


@pytest.mark.parametrize("option", ["norm_before_residual", "norm_output"])
def test_an_option_left_out_is_noticed(option, device):
    config, tensors = eagle3_checkpoint(target_config(), **{option: True})
    head = build(({**config, option: False}, tensors), device)
    reference = EagleReference(config, tensors).to(device)
    with pytest.raises(AssertionError, match="error"):
        check_against_recompute(head, reference, EagleReference.whole, random_rows(96, torch.float32, device))


@pytest.mark.parametrize("variant", ["plain", "norm_before_fc", "fc_norm", "both norms", "five auxiliary layers"])
def test_combine_hidden_states(variant, device):
    checkpoint = eagle3_checkpoint(target_config(), **EAGLE3[variant])
    head, reference = build(checkpoint, device), EagleReference(*checkpoint).to(device)
    aux = torch.randn(7, head.config.num_aux * 96, device=device)
    exact = EagleReference(*checkpoint).to(device).double().combine(aux.double())
    assert_close_to_float64(head.combine_hidden_states(aux), exact, reference.combine(aux))


def test_eagle_combines_nothing(device):
    hidden = torch.randn(3, 96, device=device)
    assert build(eagle_checkpoint(target_config()), device).combine_hidden_states(hidden) is hidden


def test_chunks_do_not_matter(device):
    head = build(eagle3_checkpoint(target_config()), device)
    rows = random_rows(96, torch.float32, device)
    whole, cut = run_paged(head, rows, chunks=1), run_paged(head, rows, chunks=5)
    torch.testing.assert_close(cut.head_hidden, whole.head_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cut.feedback, whole.feedback, rtol=1e-4, atol=1e-4)


def test_rows_without_a_slot_write_nothing_and_change_nothing(device):
    head = build(eagle3_checkpoint(target_config()), device)
    rows = random_rows(96, torch.float32, device, (5, 6))
    cache = PagedCache(head.kv_specs, 2, 8, dtype=torch.float32, device=device)
    batch, positions = cache.batch([0, 0], [5, 6])
    inputs = torch.cat([row.embeds for row in rows]), positions, torch.cat([row.hidden for row in rows])
    full, _ = head(*inputs, cache.layers, batch)
    before = [layer.k_cache.clone() for layer in cache.layers]
    padded = replace(batch, slot_mappings=(torch.full_like(positions, -1),))
    again, _ = head(inputs[0], positions, inputs[2], cache.layers, padded)
    assert torch.equal(full, again)
    for layer, k_cache in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.k_cache.view(torch.int32), k_cache.view(torch.int32))
    with pytest.raises(ValueError, match="slot_mappings"):
        head(*inputs, cache.layers, replace(batch, slot_mappings=None))


def draft_with_target(head, target, requests, device):
    """K greedy tokens after each request's last one, from the target's own hidden states."""
    lengths = [len(tokens) - 1 for tokens in requests]
    cache = PagedCache(target.kv_specs, len(requests), 48, dtype=torch.float32, device=device)
    batch, positions = cache.batch([0] * len(requests), lengths)
    ids = torch.cat([tokens[:-1] for tokens in requests])
    out = target.forward(ids, positions, cache.layers, batch, positions[:1], aux_layers=head.aux_layers)
    hidden = head.combine_hidden_states(torch.cat(out.aux_hidden, -1) if head.aux_layers else out.hidden)
    own = PagedCache(head.kv_specs, len(requests), 48, dtype=torch.float32, device=device)
    batch, positions = own.batch([0] * len(requests), lengths)
    last = batch.query_start_loc[1:].long() - 1
    seen, state = head(head.embed(torch.cat([tokens[1:] for tokens in requests])), positions, hidden, own.layers, batch)
    seen, state = seen[last], state[last]
    slots, drafts = torch.arange(len(requests), device=device), []
    for step in range(STEPS):
        drafts.append(head.sample(seen, slots, torch.zeros(len(requests), device=device), slots, slots))
        batch, positions = own.batch([length + step for length in lengths], [1] * len(requests))
        seen, state = head(head.embed(drafts[-1]), positions, state, own.layers, batch, step=step)
    return torch.stack(drafts, dim=1)


@pytest.mark.parametrize("make", [eagle_checkpoint, eagle3_checkpoint])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_drafts_from_a_targets_hidden_states(family, make, device):
    """Against the target's `output_hidden_states` and its embedding module, with no cache at all."""
    theirs = tiny_target(family, device=device)
    target = HFTarget(copy.deepcopy(theirs))
    config, tensors = make(theirs.config)
    head, reference = build((config, tensors), device), EagleReference(config, tensors).to(device)
    embedding = theirs.get_input_embeddings()
    head.share_with_target(FakeTarget(target.embed_weight, theirs.lm_head.weight, target.embed_scale))
    requests = [torch.randint(1, 128, (length + 1,), device=device) for length in LENGTHS]
    drafts = draft_with_target(head, target, requests, device)
    for tokens, ours in zip(requests, drafts.tolist(), strict=True):
        states = theirs(tokens[None, :-1], output_hidden_states=True).hidden_states
        three = "d2t" in tensors
        hidden = reference.combine(torch.cat([states[i] for i in (2, 4, 5)], -1))[0] if three else states[-1][0]
        follow, drafted = tokens[1:], []
        for _ in range(STEPS):
            seen, feedback = reference.whole(embedding(follow[None])[0], hidden)
            if three:
                row = (seen[-1] @ tensors["lm_head.weight"].to(device).T).argmax().item()
                drafted.append(row + tensors["d2t"][row].item())
            else:
                drafted.append(theirs.lm_head(seen[-1]).argmax().item())
            follow = torch.cat((follow, torch.tensor(drafted[-1:], device=device)))
            hidden = torch.cat((hidden, feedback[-1:]))
        assert ours == drafted


@pytest.mark.parametrize("draft_vocab_size", [64, 128])
def test_samples_are_target_ids(draft_vocab_size, device):
    config, tensors = eagle3_checkpoint(target_config(), draft_vocab_size=draft_vocab_size)
    head = build((config, tensors), device)
    banned = (torch.arange(draft_vocab_size) + tensors["d2t"])[:40].to(device)
    head.share_with_target(fake_target(head, suppress_ids=banned))
    states = torch.randn(5, 96, device=device)
    slots = torch.arange(5, device=device).flip(0)
    kept = torch.full((5, 2, 128), 7.0, device=device)
    step = torch.tensor(1, device=device)
    ids = torch.arange(draft_vocab_size, device=device) + tensors["d2t"].to(device)
    logits = head.compute_logits(states)
    torch.testing.assert_close(logits, states @ tensors["lm_head.weight"].to(device).T)
    expected = torch.full((5, 128), -torch.inf, device=device)
    expected[:, ids] = logits
    expected[:, banned] = -torch.inf
    tokens = head.sample(
        states, slots, torch.zeros(5, device=device), slots, slots, draft_logits_out=kept, draft_step=step
    )
    assert torch.equal(tokens, expected.argmax(-1))
    torch.testing.assert_close(kept[slots, 1], expected)
    assert (kept[:, 0] == 7).all()


def test_own_copies_that_equal_the_targets_are_given_up(device):
    config, tensors = eagle3_checkpoint(target_config(), draft_vocab_size=128, own_embedding=True)
    head = build((config, tensors), device)
    own = head.embed_weight
    same = FakeTarget(tensors["embed_tokens.weight"].to(device), tensors["lm_head.weight"].to(device))
    other = fake_target(head)
    head.share_with_target(other)
    assert head.embed_weight is own
    head.share_with_target(same)
    assert head.embed(torch.arange(128, device=device)).equal(same.embed_weight)
    assert head.embed_weight is not None
    assert head.lm_head_weight is not None
    assert head.embed_weight.data_ptr() == same.embed_weight.data_ptr()
    assert head.lm_head_weight.data_ptr() == same.lm_head_weight.data_ptr()


def test_embeddings_are_scaled_as_the_target_does(device):
    """Gemma multiplies by √H, rounded to the weight's dtype: 39.25 for 1536 in bfloat16."""
    head = build(eagle_checkpoint(target_config()), device, torch.bfloat16)
    target = fake_target(head, embed_scale=1536**0.5)
    ids = torch.tensor([3, 127, 0], device=device)
    with pytest.raises(RuntimeError, match="share_with_target"):
        head.embed(ids)
    head.share_with_target(target)
    assert torch.equal(head.embed(ids), target.embed_weight[ids] * 39.25)
    head.share_with_target(fake_target(head))
    assert torch.equal(head.embed(ids), target.embed_weight[ids])


def test_what_cannot_be_shared_is_refused(device):
    head = build(eagle_checkpoint(target_config()), device)
    with pytest.raises(RuntimeError, match="share_with_target"):
        head.compute_logits(torch.zeros(1, 96, device=device))
    half = fake_target(head)
    half = FakeTarget(half.embed_weight.half(), half.lm_head_weight.half())
    with pytest.raises(ValueError, match=r"the head is torch.float32 on .*, the target torch.float16 on"):
        head.share_with_target(half)
    config = eagle3_checkpoint(target_config(), hidden_size=64, target_hidden_size=96)
    narrow = build(config, device)
    with pytest.raises(ValueError, match=r"embedding: the checkpoint has none and the target's is \[128, 96\]"):
        narrow.share_with_target(fake_target(narrow))


def test_a_target_it_was_not_made_for_is_refused(tmp_path):
    directory = save_random_eagle3(tmp_path, target_config(), eagle_aux_hidden_state_layer_ids=[1, 4, 9])
    target = FakeTarget(torch.empty(130, 64, device="meta"), torch.empty(130, 64, device="meta"))
    with pytest.raises(ValueError, match="does not fit this target") as caught:
        Eagle3.from_pretrained(directory, dtype=torch.float32, device="cpu", target=target)
    message = str(caught.value)
    assert message.startswith(str(tmp_path))
    for part in ("vocabulary (draft 128, target 130)", "hidden size (draft 96, target 64)", "[1, 4, 9]", "0 … 7"):
        assert part in message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (1, 2, 3)),
        ({"eagle_config": {"layer_ids": [1, 2, 4]}}, (1, 2, 4)),
    ],
)
def test_auxiliary_layers(config, expected):
    head = build(eagle3_checkpoint(target_config(), **config))
    head.share_with_target(fake_target(head))
    assert head.aux_layers == expected
    assert build(eagle_checkpoint(target_config())).aux_layers == ()


def equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def merged(tensors):
    """The checkpoint with its projections fused, as vLLM and SGLang save them."""
    tensors = dict(tensors)
    for kind in ("weight", "bias"):
        for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            for name in [name for name in tensors if name.endswith(f"{parts[0]}.{kind}")]:
                pieces = [tensors.pop(name.replace(parts[0], part)) for part in parts]
                tensors[name.replace(parts[0], whole)] = torch.cat(pieces)
    return tensors


@pytest.mark.parametrize("make", [eagle_checkpoint, eagle3_checkpoint])
def test_layouts_load_alike(make, tmp_path):
    config, tensors = make(target_config(), bias=True)
    plain = build((config, tensors))
    fused = merged(tensors)
    assert len(fused) == len(tensors) - 5
    assert equal(build((config, fused)), plain)
    prefixed = {name if name in ("d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}
    assert equal(build((config, prefixed)), plain)
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    assert equal(build((config, renamed)), plain)
    kind = type(plain)
    for shards in (1, 3):
        directory = write_checkpoint(tmp_path / str(shards), config, tensors, shards=shards)
        assert equal(kind.from_pretrained(directory, dtype=torch.float32, device="cpu"), plain)


def test_the_tensors_say_how_many_layers(tmp_path):
    config, tensors = eagle3_checkpoint(target_config())
    directory = write_checkpoint(tmp_path, config | {"num_hidden_layers": 36}, tensors)
    assert len(Eagle3.from_pretrained(directory, dtype=torch.float32, device="cpu").kv_specs) == 1


def test_half_precision_loads_in_the_dtype_asked_for(tmp_path, device):
    config, tensors = eagle3_checkpoint(target_config(), bias=True)
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    directory = write_checkpoint(tmp_path, config, half)
    head = Eagle3.from_pretrained(directory, dtype=torch.bfloat16, device=device)
    assert {tensor.dtype for tensor in head.state_dict().values()} == {torch.bfloat16, torch.int64}
    assert {tensor.device for tensor in head.buffers()} == {device}
    assert torch.equal(head.fc.weight.cpu(), half["fc.weight"].bfloat16())
    assert dict(head.named_buffers())["layers.0.self_attn.rotary.inv_freq"].dtype == torch.float32


def test_configurations_of_the_speculators_library_load(tmp_path):
    config, tensors = eagle3_checkpoint(target_config())
    outer = {"draft_vocab_size": config.pop("draft_vocab_size"), "norm_before_residual": True}
    nested = {"speculators_model_type": "eagle3", **outer, "transformer_layer_config": config}
    head = Eagle3.from_pretrained(
        write_checkpoint(tmp_path, nested, tensors), dtype=torch.float32, device="cpu", target=None
    )
    assert head.config == EagleConfig.from_dict({**config, **outer})


def test_missing_extra_and_misshapen_are_named(tmp_path):
    config, tensors = eagle3_checkpoint(target_config(), bias=True)
    tensors["midlayer.mlp.gate.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"unexpected: layers\.0\.mlp\.gate\.weight"):
        build((config, tensors))
    del tensors["midlayer.self_attn.k_proj.bias"], tensors["norm.weight"], tensors["lm_head.weight"]
    tensors["fc.weight"] = torch.zeros(3, 4)
    directory = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        Eagle3.from_pretrained(directory, dtype=torch.float32, device="cpu")
    message = str(caught.value)
    assert message.startswith(str(tmp_path))
    for part in (
        "missing: layers.0.self_attn.k_proj.bias, lm_head.weight, norm.weight",
        "misshapen: fc.weight (got [3, 4], needs [96, 288])",
        "unexpected: layers.0.mlp.gate.weight",
    ):
        assert part in message


def test_a_merged_projection_of_another_shape_is_named():
    config, tensors = eagle_checkpoint(target_config())
    tensors = merged(tensors)
    tensors["layers.0.self_attn.qkv_proj.weight"] = torch.zeros(500, 96)
    with pytest.raises(ValueError, match=r"misshapen: layers\.0\.self_attn\.qkv_proj\.weight \(got \[500, 96\], needs"):
        build((config, tensors))


def test_reduced_vocabularies_need_offsets():
    config, tensors = eagle3_checkpoint(target_config())
    head = Eagle3(EagleConfig.from_dict(config))
    chosen = torch.arange(64) + tensors["d2t"]
    for wrong, message in (
        (torch.zeros(64, dtype=torch.int64), "d2t: is all zero"),
        (chosen, "d2t: needs offsets"),  # ids instead of offsets
        (tensors["d2t"] - 1000, "d2t: needs offsets"),
        (-torch.arange(64), "1 different ones of 64"),
        (tensors["d2t"].float(), r"d2t \(got torch\.float32, needs torch\.int64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            head.load_weights({**tensors, "d2t": wrong}.items())
    del tensors["d2t"]
    with pytest.raises(ValueError, match="missing: d2t"):
        head.load_weights(tensors.items())


def test_whole_vocabularies_need_no_offsets():
    config, tensors = eagle3_checkpoint(target_config(), draft_vocab_size=128)
    head = Eagle3(EagleConfig.from_dict(config))
    head.load_weights({**tensors, "d2t": torch.zeros(128, dtype=torch.int64)}.items())
    del tensors["d2t"]
    head.load_weights(tensors.items())
    assert head.d2t is None


def test_loading_again_replaces_everything():
    config, tensors = eagle_checkpoint(target_config(), bias=True, fc_bias=True)
    head = build((config, tensors))
    head.share_with_target(fake_target(head))
    plain = eagle_checkpoint(target_config(), seed=1)
    head.load_weights(plain[1].items())
    assert equal(head, build(plain))
    assert head.embed_weight is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"vocab_size": None}, "vocab_size: missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads: got 4, needs a multiple"),
        ({"hidden_act": "relu"}, "hidden_act: got 'relu'"),
        ({"draft_vocab_size": 500}, "draft_vocab_size: got 500, needs 1 to vocab_size, 128"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: got 'yarn'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "needs integers"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change, message, tmp_path):
    directory = save_random_eagle3(tmp_path, target_config())
    config = json.loads((directory / "config.json").read_text()) | change
    (directory / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    with pytest.raises(ValueError, match=message) as caught:
        Eagle3.from_pretrained(directory, dtype=torch.float32, device="cpu")
    assert str(caught.value).startswith(str(tmp_path))


def test_directories_that_are_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        Eagle.from_pretrained(tmp_path / "none", dtype=torch.float32, device="cpu")
    directory = save_random_eagle(tmp_path / "head", target_config())
    (directory / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        Eagle.from_pretrained(directory, dtype=torch.float32, device="cpu")
    (directory / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        Eagle.from_pretrained(directory, dtype=torch.float32, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [eagle_checkpoint, eagle3_checkpoint])
def test_steps_draft_in_one_graph(make, device):
    sizes = {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 8}
    check_captured(build(make(target_config(**sizes)), device, torch.bfloat16), device)
