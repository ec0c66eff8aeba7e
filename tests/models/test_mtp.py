"""MTP heads against transformers' own modules, and their checkpoints' layouts."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from _compare import assert_close_to_float64
from _head_references import FAMILIES, SIZES, MTPReference
from _head_runs import (
    STEPS,
    FakeTarget,
    check_against_recompute,
    check_captured,
    double,
    dtypes,
    fake_target,
    load,
    random_rows,
    set_attention,
)
from _paged_cache import PagedCache
from _tiny_gemma4 import worst_of
from _tiny_heads import MTP_NAMES, mtp_checkpoint, save_random_mtp, save_target_with_mtp, tiny_target, write_checkpoint
from tridraft.models.mtp import LAYOUTS, MTP, MTPConfig

transformers = pytest.importorskip("transformers")


def target_config():
    return transformers.LlamaConfig(**SIZES)


def checkpoint(family, **options):
    return mtp_checkpoint(target_config(), model_type=family, **{**FAMILIES[family][3], **options})


def build(config, tensors, device="cpu", dtype=torch.float32):
    with torch.device("meta"):
        head = MTP.from_config(config, list(tensors), dtype=dtype)
    head.load_weights(tensors.items(), device=device)
    return head


class Normed(nn.Module):
    """The head with the final norm taken where it is left to `compute_logits`, so as to return what tests compare."""

    def __init__(self, head) -> None:
        super().__init__()
        self.head, self.kv_specs = head, head.kv_specs

    def forward(self, *args, **options) -> tuple[Tensor, Tensor]:
        out = self.head(*args, **options)
        return self.head.head_input(out), out


def check(family, device, dtype, options=None, **layout):
    config, tensors = checkpoint(family, **(options or {}))
    head = Normed(build(config, tensors, device, dtype))
    reference = MTPReference(family, config, tensors, **layout).to(device=device, dtype=dtype)
    check_against_recompute(head, reference, MTPReference.whole, random_rows(96, dtype, device))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_module_equals_transformers(family, device):
    for dtype in dtypes(device):
        check(family, device, dtype)


@pytest.mark.parametrize(
    ("family", "rule"),
    [
        ("deepseek_v3", "prenorm_feedback"),
        ("deepseek_v3", "zero_first_embedding"),
        ("glm4_moe", "prenorm_feedback"),
        ("glm4_moe", "zero_first_embedding"),
        ("mimo", "prenorm_feedback"),
        ("mimo", "zero_first_embedding"),
        ("qwen3_next", "prenorm_feedback"),
        ("qwen3_next", "zero_first_embedding"),
    ],
)
def test_each_rule_shows(family, rule, device):
    """The comparison fails against a reference with the family's rule turned round."""
    with pytest.raises(AssertionError, match="error"):
        check(family, device, torch.float32, **{rule: not getattr(LAYOUTS[family], rule)})


def test_concatenation_order_shows(device):
    config, tensors = checkpoint("mimo")
    reference = MTPReference("mimo", config, tensors).to(device)
    reference.layer.config.mtp_hidden_states_first = False
    with pytest.raises(AssertionError, match="error"):
        check_against_recompute(
            build(config, tensors, device), reference, MTPReference.whole, random_rows(96, torch.float32, device)
        )


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("deepseek_v3", (False, False, False)),
        ("qwen3_next", (False, False, False)),
        ("qwen3_5", (False, False, False)),
        ("mimo", (True, False, True)),
        ("glm4_moe", (False, True, True)),
    ],
)
def test_rules_by_model_type(family, rules):
    layout = LAYOUTS[family]
    assert (layout.hidden_first, layout.prenorm_feedback, layout.zero_first_embedding) == rules


def run_chain(head, rows, device, dtype):
    """Every step runs its module over all rows again: row i of module s has the embedding of token i + 1 + s."""
    lengths = [len(row.embeds) for row in rows]
    cache = PagedCache(head.kv_specs, len(rows), max(lengths), dtype=dtype, device=device)
    batch, positions = cache.batch([0] * len(rows), lengths)
    hidden = torch.cat([row.hidden for row in rows])
    outputs = []
    for step in range(STEPS):
        embeds = torch.cat([torch.cat((row.embeds, row.follow[:step]))[step:] for row in rows])
        hidden = head(embeds, positions, hidden, cache.layers, batch, step=step)
        outputs.append(hidden)
    return torch.cat(outputs)


def recompute_chain(modules, rows):
    outputs, hidden = [], [row.hidden for row in rows]
    for step in range(STEPS):
        module = modules[step % len(modules)]
        embeds = [torch.cat((row.embeds, row.follow[:step]))[step:] for row in rows]
        hidden = [module.whole(*pair)[0] for pair in zip(embeds, hidden, strict=True)]
        outputs += hidden
    return torch.cat(outputs)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo"])
@pytest.mark.parametrize("num_modules", [2, 4])
def test_a_chain_equals_transformers(num_modules, family, device):
    config, tensors = checkpoint(family, num_modules=num_modules)
    for dtype in dtypes(device):
        head = build(config, tensors, device, dtype)
        assert len(head.kv_specs) == num_modules
        modules = nn.ModuleList(MTPReference(family, config, tensors, index) for index in range(num_modules))
        modules.to(device=device, dtype=dtype)
        rows = random_rows(96, dtype, device)
        same = []
        for attention in ("eager", "sdpa"):
            set_attention(modules, attention)
            same.append(recompute_chain(modules, rows))
        ours = run_chain(head, rows, device, dtype)
        exact = recompute_chain(modules.double(), double(rows))
        assert_close_to_float64(ours, exact, worst_of(same, exact))


def test_a_chain_equals_mtp_model(device):
    """The whole of transformers' `MtpModel`, its glue included, for three modules of a target that it runs itself."""
    from transformers.modeling_layers import MtpModel

    target = tiny_target("llama", device=device, num_mtp_layers=3)
    config, tensors = mtp_checkpoint(target.config, model_type="llama", num_modules=3)
    theirs: Any = MtpModel(target, 3).eval().to(device)
    for index, layer in enumerate(theirs.layers):
        for part in ("enorm", "hnorm", "eh_proj"):
            load(getattr(layer, part), tensors, f"model.layers.{8 + index}.{part}.")
        load(layer.post_norm, tensors, f"model.layers.{8 + index}.shared_head.norm.")
        block = {f"model.layers.{8 + index}.{name}" for name in layer.mtp_block.state_dict()}
        load(layer.mtp_block, {name: tensors[name] for name in block}, f"model.layers.{8 + index}.")
    ids = torch.randint(1, 128, (1, 12), device=device)
    hidden = target(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(1, 12, device=device)[None]
    tokens, logits, _ = theirs(ids[:, 1:], hidden, None, positions, None)

    head = build(config, tensors, device)
    head.share_with_target(FakeTarget(target.model.embed_tokens.weight, target.lm_head.weight))
    cache = PagedCache(head.kv_specs, 1, 12, dtype=torch.float32, device=device)
    batch, own_positions = cache.batch([0], [11])
    state, follow = hidden[0], ids[0, 1:]
    for step in range(3):
        state = head(head.embed(follow), own_positions, state, cache.layers, batch, step=step)
        torch.testing.assert_close(head.compute_logits(state[-1:]), logits[0, step : step + 1], rtol=1e-4, atol=1e-4)
        follow = torch.cat((follow[1:], tokens[0, step : step + 1]))


def test_sampling_takes_the_one_norm(device):
    """Where r is fed back, `sample` and `compute_logits` norm it; where y is, they do not."""
    for family in ("glm4_moe", "deepseek_v3"):
        config, tensors = checkpoint(family)
        head = build(config, tensors, device)
        head.share_with_target(fake_target(head))
        states = torch.randn(5, 96, device=device)
        weight = tensors["model.layers.6.shared_head.norm.weight"].to(device)
        expected = nn.functional.rms_norm(states, (96,), weight, 1e-5) if family == "glm4_moe" else states
        logits = expected @ head.lm_head_weight.T
        torch.testing.assert_close(head.compute_logits(states), logits, rtol=1e-4, atol=1e-4)
        slots = torch.arange(5, device=device)
        assert torch.equal(head.sample(states, slots, torch.zeros(5, device=device), slots, slots), logits.argmax(-1))


@pytest.mark.parametrize("family", ["deepseek_v3", "mimo", "qwen3_next"])
def test_a_reduced_vocabulary(family, device):
    config, tensors = checkpoint(family, draft_vocab_size=50)
    head = build(config, tensors, device)
    head.share_with_target(fake_target(head))
    states = torch.randn(5, 96, device=device)
    slots = torch.arange(5, device=device)
    tokens = head.sample(states, slots, torch.zeros(5, device=device), slots, slots)
    own = next(tensor for name, tensor in tensors.items() if name.endswith("head.weight")).to(device)
    rows = (states @ own.T).argmax(-1)
    assert torch.equal(tokens, rows + tensors["d2t"].to(device)[rows])
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    with pytest.raises(ValueError, match="d2t: is all zero"):
        build(config, tensors)


@pytest.mark.parametrize("family", MTP_NAMES)
def test_layouts_load_alike(family, tmp_path):
    config, tensors = checkpoint(family)
    plain = build(config, tensors).state_dict()
    for shards in (1, 3):
        directory = write_checkpoint(tmp_path / str(shards), config, tensors, shards=shards)
        state = MTP.from_pretrained(directory, dtype=torch.float32, device="cpu").state_dict()
        assert state.keys() == plain.keys()
        assert all(torch.equal(state[name], plain[name]) for name in state)


def test_only_the_heads_files_of_a_whole_checkpoint_are_read(tmp_path):
    """The target's file may be 600 GB: it is not even there."""
    target = tiny_target("qwen3")
    save_target_with_mtp(tmp_path, target, num_modules=2)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).lm_head is not None
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    head = MTP.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    with safe_open(tmp_path / "model-00002-of-00002.safetensors", "pt") as file:
        assert torch.equal(
            head.state_dict()["chain.1.eh_proj.weight"], file.get_tensor("model.layers.9.eh_proj.weight")
        )
    assert head.embed_weight is None


def test_only_the_heads_tensors_of_a_single_file_are_read(tmp_path, monkeypatch):
    config, tensors = checkpoint("mimo")
    others = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "model.embed_tokens.weight": torch.zeros(2, 2)}
    directory = write_checkpoint(tmp_path, config, {**others, **tensors})
    read = []
    load_weights = MTP.load_weights

    def spy(self, tensors, **options):
        return load_weights(self, ((read.append(name), (name, tensor))[1] for name, tensor in tensors), **options)

    monkeypatch.setattr(MTP, "load_weights", spy)
    MTP.from_pretrained(directory, dtype=torch.float32, device="cpu")
    assert sorted(read) == sorted(tensors)


def test_copies_of_the_targets_embedding_and_head(device):
    """DeepSeek's checkpoints repeat both in every module; equal to the target's, they are given up for them."""
    config, tensors = checkpoint("deepseek_v3", num_modules=2)
    embed, lm_head = torch.randn(128, 96), torch.randn(128, 96)
    for layer in (6, 7):
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = embed.clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = lm_head.clone()
    head = build(config, tensors, device)
    assert torch.equal(head.lm_head_weight.cpu(), lm_head)
    target = FakeTarget(embed.to(device), lm_head.to(device))
    head.share_with_target(target)
    assert head.embed_weight.data_ptr() == target.embed_weight.data_ptr()
    assert head.lm_head_weight.data_ptr() == target.lm_head_weight.data_ptr()
    tensors["model.layers.7.shared_head.head.weight"][3, 4] += 1
    with pytest.raises(ValueError, match=r"layers\.7\.shared_head\.head\.weight differs from model\.layers\.6\."):
        build(config, tensors)


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("deepseek_v3", "model.layers.6.mlp.experts.3.up_proj.weight", "model.layers.6: a mixture of experts"),
        ("glm4_moe", "model.layers.6.mlp.gate.weight", "model.layers.6: a mixture of experts"),
        ("deepseek_v3", "model.layers.6.self_attn.kv_a_proj_with_mqa.weight", "model.layers.6: multi-head latent"),
        ("qwen3_next", "mtp.layers.0.mlp.shared_expert.up_proj.weight", "mtp.layers.0: a mixture of experts"),
        ("qwen3_next", "mtp.layers.0.linear_attn.in_proj.weight", "mtp.layers.0: linear attention"),
    ],
)
def test_layers_that_are_not_dense_are_refused_by_name(family, name, message, tmp_path):
    config, tensors = checkpoint(family)
    tensors[name] = torch.zeros(2)
    with pytest.raises(ValueError, match=message):
        build(config, tensors)
    directory = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        MTP.from_pretrained(directory, dtype=torch.float32, device="cpu")
    assert str(caught.value).startswith(str(tmp_path))
    assert name in str(caught.value)


def test_experts_of_the_targets_own_layers_do_not_matter():
    config, tensors = checkpoint("deepseek_v3")
    tensors["model.layers.5.mlp.experts.3.up_proj.weight"] = torch.zeros(2)
    build(config, tensors)


def test_missing_extra_and_misshapen_are_named_as_in_the_checkpoint(tmp_path):
    config, tensors = checkpoint("deepseek_v3")
    tensors["model.layers.6.mlp.extra.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.6\.mlp\.extra\.weight"):
        build(config, tensors)
    del tensors["model.layers.6.mlp.up_proj.weight"], tensors["model.layers.6.shared_head.norm.weight"]
    tensors["model.layers.6.eh_proj.weight"] = torch.zeros(3, 4)
    directory = write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        MTP.from_pretrained(directory, dtype=torch.float32, device="cpu")
    for part in (
        "missing: model.layers.6.mlp.up_proj.weight, model.layers.6.shared_head.norm.weight",
        "misshapen: model.layers.6.eh_proj.weight (got [3, 4], needs [96, 192])",
        "unexpected: model.layers.6.mlp.extra.weight",
    ):
        assert part in str(caught.value)


def test_half_of_the_query_and_key_norms_is_refused():
    config, tensors = checkpoint("qwen3")
    del tensors["model.layers.6.self_attn.k_norm.weight"]
    with pytest.raises(ValueError, match=r"missing: model\.layers\.6\.self_attn\.k_norm\.weight"):
        build(config, tensors)


def test_zero_centred_norms_keep_their_digits(device):
    """1 + w would lose w's digits in 16 bits."""
    config, tensors = checkpoint("qwen3_next")
    head = build(config, tensors, device, torch.bfloat16)
    for _ in range(2):  # loading again adds the 1 once
        state = head.state_dict()
        for ours, theirs in (("norm", "norm"), ("enorm", "pre_fc_norm_embedding"), ("layer.self_attn.q_norm", "")):
            name = f"mtp.{theirs}.weight" if theirs else "mtp.layers.0.self_attn.q_norm.weight"
            assert torch.equal(state[f"chain.0.{ours}.weight"].cpu(), 1 + tensors[name])
        head.load_weights(tensors.items())
    assert head.state_dict()["chain.0.eh_proj.weight"].dtype == torch.bfloat16


def test_modules_beyond_those_counted_are_refused(tmp_path):
    config, tensors = checkpoint("llama", num_modules=3)
    write_checkpoint(tmp_path, {**config, "num_nextn_predict_layers": 2}, tensors)
    with pytest.raises(ValueError, match=r"got 2, the checkpoint has more \(has model\.layers\.8"):
        MTP.from_pretrained(tmp_path, dtype=torch.float32, device="cpu")


def test_nested_text_configurations():
    config, tensors = checkpoint("qwen3_next")
    modules = config.pop("num_nextn_predict_layers")
    nested = {"model_type": "qwen3_5", "text_config": {**config, "mtp_num_hidden_layers": modules}}
    assert MTPConfig.from_dict(nested) == MTPConfig.from_dict(config)
    build(nested, tensors)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"model_type": "gpt2"}, "model_type: got 'gpt2', needs one of"),
        ("llama", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers: got 0, needs 1 or more"),
        ("qwen3_next", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: got 2, needs 1"),
        ("llama", {"vocab_size": None}, "vocab_size: missing"),
        ("llama", {"intermediate_size": None}, "intermediate_size: missing"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(family, change, message, tmp_path):
    directory = save_random_mtp(tmp_path, target_config(), model_type=family)
    config = json.loads((directory / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as caught:
        MTP.from_pretrained(directory, dtype=torch.float32, device="cpu")
    assert str(caught.value).startswith(str(tmp_path))


def test_a_target_it_was_not_made_for_is_refused(tmp_path):
    save_random_mtp(tmp_path, target_config())
    target = FakeTarget(torch.empty(130, 96, device="meta"), torch.empty(130, 96, device="meta"))
    with pytest.raises(ValueError, match=r"vocabulary \(draft 128, target 130\)"):
        MTP.from_pretrained(tmp_path, dtype=torch.float32, device="cpu", target=target)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"model_type": "glm4_moe"}, {"num_modules": 3}])
def test_steps_draft_in_one_graph(options, device):
    sizes = {"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 8}
    checkpoint = mtp_checkpoint(transformers.LlamaConfig(**SIZES | sizes), **options)
    check_captured(build(*checkpoint, device, torch.bfloat16), device)
