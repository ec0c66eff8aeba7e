"""Reading checkpoints: what loads, and what is refused by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tridraft
from _tiny_gemma4 import VARIANTS, assistant_config, random_tensors, tiny_pair
from tridraft.models.gemma4_mtp import Gemma4MTP, Gemma4MTPConfig
from tridraft.models.hf_target import HFTarget
from tridraft.models.paged import KVSpec
from tridraft.models.weights import iterate_tensors, read_json, tensor_names

ORDERING, CENTROIDS = "masked_embedding.token_ordering", "masked_embedding.centroids.weight"


def write(directory, variant, **generation_config):
    """An assistant's directory as on the Hub, and its tensors."""
    directory.mkdir(exist_ok=True)
    config = assistant_config(variant)
    tensors = dict(random_tensors(config, torch.float32))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(generation_config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def load(directory, **options):
    return Gemma4MTP.from_pretrained(directory, **{"dtype": torch.float32, "device": "cpu", **options})


def frequencies(draft):
    return dict(draft.named_buffers())["model.layers.3.self_attn.rotary.inv_freq"]


def suppressed_by(draft):
    """The ids the draft suppresses, which are on its device."""
    if draft.suppress_ids is None:
        return None
    assert draft.suppress_ids.device == draft.pre_projection.weight.device
    return draft.suppress_ids.tolist()


def fresh(variant="plain", generation_config=None):
    return Gemma4MTP(Gemma4MTPConfig.from_dict(assistant_config(variant)), generation_config)


@pytest.mark.parametrize("variant", ["plain", "ordered"])
def test_every_tensor_lands_where_it_belongs(variant, tmp_path):
    tensors = write(tmp_path, variant)
    state = load(tmp_path).state_dict()
    for index in range(4):
        name = f"model.layers.{index}.mlp.{{}}_proj.weight"
        halves = tensors.pop(name.format("gate")), tensors.pop(name.format("up"))
        assert torch.equal(state.pop(name.format("gate_up")), torch.cat(halves))
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_directories_written_by_transformers_load(variant, tmp_path):
    """Its config.json gives the full layers' shapes by layer, the Hub's by name: both give one model."""
    pytest.importorskip("transformers")
    pair = tiny_pair(variant)
    _, directory = pair.save(tmp_path, suppress_tokens=[9, 4])
    draft = load(directory)
    assert draft.config == Gemma4MTPConfig.from_dict(assistant_config(variant))
    assert suppressed_by(draft) == [4, 9]
    assert (draft.masked_embedding is not None) == (variant == "ordered")
    assert torch.equal(draft.model.embed_tokens.weight, pair.assistant.lm_head.weight)


def test_dtype_is_cast_and_the_ordering_is_not(tmp_path, device):
    tensors = write(tmp_path, "ordered")
    draft = load(tmp_path, dtype=torch.bfloat16, device=device)
    state = draft.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.int64}
    assert {tensor.device for tensor in state.values()} == {device}
    assert torch.equal(state[CENTROIDS].cpu(), tensors[CENTROIDS].bfloat16())
    assert frequencies(draft).dtype == torch.float32


def test_sharded_checkpoint(tmp_path):
    tensors = write(tmp_path / "one", "plain")
    sharded = tmp_path / "many"
    shutil.copytree(tmp_path / "one", sharded)
    (sharded / "model.safetensors").unlink()
    names = list(tensors)
    shards = {f"model-{part}.safetensors": names[part::3] for part in range(3)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, sharded / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, many = load(tmp_path / "one").state_dict(), load(sharded).state_dict()
    assert all(torch.equal(one[name], many[name]) for name in one)

    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors"):
        load(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: needs a 'weight_map'"):
        load(sharded)


def test_names_and_a_part_of_a_checkpoint(tmp_path):
    tensors = {f"{part}.{index}": torch.full((2,), float(index)) for part in ("body", "head") for index in range(3)}
    (tmp_path / "one").mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    (tmp_path / "many").mkdir()
    weight_map = {name: f"{name[:4]}.safetensors" for name in tensors}
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({name: tensors[name] for name in tensors if "head" in name}, tmp_path / "many" / "head.safetensors")
    for directory in (tmp_path / "one", tmp_path / "many"):
        assert sorted(tensor_names(directory)) == sorted(tensors)
        kept = dict(iterate_tensors(directory, keep=lambda name: name.startswith("head")))
        assert sorted(kept) == ["head.0", "head.1", "head.2"]
        assert torch.equal(kept["head.2"], tensors["head.2"])
    with pytest.raises(FileNotFoundError, match=r"body\.safetensors"):
        dict(iterate_tensors(tmp_path / "many"))
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        tensor_names(tmp_path)


def test_loading_twice_replaces_everything():
    draft = fresh("ordered", {"suppress_tokens": [3]})
    first = dict(random_tensors(assistant_config("ordered"), torch.float32, seed=1))
    second = dict(random_tensors(assistant_config("ordered"), torch.float32, seed=2))
    draft.load_weights(first.items())
    draft.load_weights(second.items())
    assert torch.equal(draft.state_dict()[ORDERING], second[ORDERING])
    assert torch.equal(draft.pre_projection.weight, second["pre_projection.weight"])
    assert suppressed_by(draft) == [3]
    dense = {name: tensor for name, tensor in first.items() if "masked" not in name}
    draft.load_weights(dense.items())
    assert draft.masked_embedding is None
    draft.load_weights(first.items())
    assert torch.equal(draft.state_dict()[ORDERING], first[ORDERING])


def test_the_head_follows_the_tensors_not_the_configuration():
    config = assistant_config("ordered")
    config["use_ordered_embeddings"] = False
    draft = Gemma4MTP(Gemma4MTPConfig.from_dict(config))
    draft.load_weights(random_tensors(assistant_config("ordered"), torch.float32))
    assert draft.masked_embedding is not None


def test_meta_then_load_equals_built_in_place(device):
    tensors = dict(random_tensors(assistant_config("ordered"), torch.float32))
    with torch.device("meta"):
        draft = fresh("ordered", {"suppress_tokens": [5]})
    assert draft.suppress_ids is None
    draft.load_weights(tensors.items(), device=device)
    other = fresh("ordered", {"suppress_tokens": [5]})
    other.load_weights(tensors.items())
    assert suppressed_by(draft) == [5]
    for ours, theirs in zip(draft.buffers(), other.buffers(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    for ours, theirs in zip(draft.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_rotary_frequencies_survive_a_cast():
    draft = fresh()
    before = frequencies(draft).clone()
    after = frequencies(draft.to(torch.bfloat16))
    assert after.dtype == torch.float32
    assert torch.equal(after, before)


def test_missing_misshapen_and_unexpected_are_named(tmp_path, caplog):
    tensors = write(tmp_path, "plain")
    tensors["extra.weight"] = torch.zeros(2)
    save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    assert "extra.weight" in caplog.text
    assert fresh().load_weights(tensors.items()).unexpected == ("extra.weight",)

    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["post_projection.weight"] = torch.zeros(3, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not fit") as caught:
        load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "missing: model.layers.2.mlp.up_proj.weight" in message
    assert "misshapen: post_projection.weight (got [3, 4], needs [96, 64])" in message
    assert "unexpected: extra.weight" in message


@pytest.mark.parametrize("name", [ORDERING, CENTROIDS])
def test_half_a_centroid_head_is_refused(name):
    tensors = dict(random_tensors(assistant_config("ordered"), torch.float32))
    del tensors[name]
    with pytest.raises(ValueError, match=f"missing: {name}"):
        fresh("ordered").load_weights(tensors.items())


def test_token_ordering_has_to_be_a_permutation():
    tensors = dict(random_tensors(assistant_config("ordered"), torch.float32))
    tensors[ORDERING][0] = tensors[ORDERING][1]
    with pytest.raises(ValueError, match="token_ordering: needs every id of 0 … 127 once"):
        fresh("ordered").load_weights(tensors.items())
    tensors[ORDERING] = torch.arange(1, 129)
    with pytest.raises(ValueError, match="token_ordering"):
        fresh("ordered").load_weights(tensors.items())
    tensors[ORDERING] = torch.randn(128)
    with pytest.raises(ValueError, match=r"token_ordering \(got torch\.float32, needs torch\.int64\)"):
        fresh("ordered").load_weights(tensors.items())


def test_centroids_have_to_divide_the_vocabulary():
    config = assistant_config("ordered") | {"num_centroids": 15}
    with pytest.raises(ValueError, match="num_centroids: got 15"):
        Gemma4MTP(Gemma4MTPConfig.from_dict(config)).load_weights(random_tensors(config, torch.float32))


def test_lm_head_may_repeat_the_embedding_and_nothing_else():
    tensors = dict(random_tensors(assistant_config("plain"), torch.float32))
    embedding = tensors["model.embed_tokens.weight"]
    assert fresh().load_weights({"lm_head.weight": embedding, **tensors}.items()).unexpected == ()
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        fresh().load_weights({**tensors, "lm_head.weight": embedding + 1}.items())
    tensors.pop("model.embed_tokens.weight")
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        fresh().load_weights({**tensors, "lm_head.weight": embedding}.items())


@pytest.mark.parametrize("suppressed", [[128], [-1], [True], [1.5], list(range(128))], ids=str)
def test_c2_bad_suppress_tokens_are_refused_before_weights_are_read(suppressed, tmp_path):
    write(tmp_path, "plain", suppress_tokens=suppressed)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize(("suppressed", "expected"), [(None, None), ([], None), ([0], [0]), ([7, 7], [7])])
def test_c2_suppress_tokens(suppressed, expected, tmp_path):
    write(tmp_path, "plain", suppress_tokens=suppressed)
    assert suppressed_by(load(tmp_path)) == expected
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).suppress_ids is None


def test_files_are_named_when_they_are_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load(tmp_path)
    write(tmp_path, "plain")
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        load(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json: not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: got a JSON list"):
        load(tmp_path)
    assert read_json(tmp_path, "absent.json", required=False) == {}


def test_tensors_are_streamed(tmp_path):
    tensors = write(tmp_path, "plain")
    stream = iterate_tensors(tmp_path)
    name, tensor = next(stream)
    assert torch.equal(tensor, tensors[name])
    assert {name for name, _ in stream} == tensors.keys() - {name}


def edited(path, value):
    config = assistant_config("plain")
    at = config if len(path) == 1 else config[path[0]]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("model_type",), "llama", "model_type: got 'llama'"),
        (("text_config",), "x", "text_config: missing"),
        (("text_config", "hidden_size"), None, "text_config: 'hidden_size' is missing"),
        (("text_config", "layer_types"), ["full_attention"] * 3, "layer_types: got"),
        (("text_config", "layer_types"), ["linear_attention"] * 4, "layer_types: got"),
        (("text_config", "num_kv_shared_layers"), 2, "num_kv_shared_layers: got 2"),
        (("text_config", "enable_moe_block"), True, "enable_moe_block: got True"),
        (("text_config", "rope_parameters"), {"sliding_attention": {}}, "rope_parameters: got"),
        (("text_config", "num_attention_heads"), 3, "num_attention_heads: got 3, needs a multiple of 2"),
        (("text_config", "hidden_activation"), "relu", "hidden_activation: got 'relu'"),
        (("text_config", "use_bidirectional_attention"), "all", "use_bidirectional_attention"),
    ],
)
def test_configurations_that_are_no_assistant_are_refused(path, value, message):
    with pytest.raises(ValueError, match=message):
        Gemma4MTPConfig.from_dict(edited(path, value))


@pytest.mark.parametrize("kind", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_c23_both_assistant_types_build_with_every_layer_shared(kind):
    """Four layers, four shared: no layer owns keys, and none is needed to start from."""
    config = assistant_config("k_eq_v") | {"model_type": kind}
    with torch.device("meta"):
        draft = Gemma4MTP(Gemma4MTPConfig.from_dict(config))
    assert draft.kv_specs == (*[KVSpec(64, 2, 8)] * 3, KVSpec(128, 1, None))
    assert not [name for name in draft.state_dict() if ".k_" in name or ".v_" in name]
    config["text_config"]["num_kv_shared_layers"] = 0  # what transformers fills in itself
    assert Gemma4MTPConfig.from_dict(config) == draft.config


def meta_target(**changes):
    transformers = pytest.importorskip("transformers")
    from _tiny_gemma4 import target_config

    config = transformers.Gemma4TextConfig(**{**target_config("plain"), **changes})
    with torch.device("meta"):
        return HFTarget(transformers.Gemma4ForCausalLM(config))


def meta_draft():
    with torch.device("meta"):
        return fresh()


def test_matching_pair_is_accepted_on_meta():
    draft, target = meta_draft(), meta_target()
    draft.check_target(target)
    assert draft.kv_sources(target) == [4, 4, 4, 5]


def test_sources_of_a_target_that_shares_keys_itself():
    shared = meta_target(num_kv_shared_layers=3, hidden_size_per_layer_input=8, vocab_size_per_layer_input=128)
    assert meta_draft().kv_sources(shared) == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 127}, r"vocabulary \(draft 128, target 127\)"),
        ({"hidden_size": 64}, r"backbone width \(draft 96, target 64\)"),
        ({"head_dim": 32}, r"head dim of sliding_attention \(draft 64, target 32\)"),
        ({"global_head_dim": 64}, r"head dim of full_attention \(draft 128, target 64\)"),
        ({"num_key_value_heads": 1}, r"kv heads of full_attention \(draft 2, target 1\); kv heads of sliding"),
        ({"sliding_window": 16}, r"window of sliding_attention \(draft 8, target 16\)"),
        ({"layer_types": ["full_attention"] * 6}, r"layer types \(draft reads sliding_attention, target has none\)"),
    ],
)
def test_mismatch_is_one_error_before_anything_is_allocated(changes, message, tmp_path):
    target = meta_target(**changes)
    with pytest.raises(ValueError, match=message):
        meta_draft().check_target(target)
    write(tmp_path, "plain")
    (tmp_path / "model.safetensors").unlink()  # not read
    with pytest.raises(ValueError, match=message):
        load(tmp_path, target=target)


def test_every_mismatch_is_listed():
    with pytest.raises(ValueError, match=r"vocabulary .*backbone width .*head dim of full_attention"):
        meta_draft().check_target(meta_target(vocab_size=100, hidden_size=64, global_head_dim=64))


def test_share_embedding_refuses_another_table():
    draft = fresh()
    with pytest.raises(ValueError, match=r"weight: got shape \[128, 64\], needs \[128, 96\]"):
        draft.share_embedding(torch.zeros(128, 64), 1.0)
    with pytest.raises(ValueError, match=r"weight: got torch\.float16"):
        draft.share_embedding(torch.zeros(128, 96, dtype=torch.float16), 1.0)
    weight = torch.nn.Parameter(torch.zeros(128, 96))
    draft.share_embedding(weight, 9.8)
    assert len(list(draft.parameters())) == len(list(fresh().parameters()))


def test_models_import_without_transformers():
    """Only a Hugging Face target needs it, when one is made."""
    code = (
        "import sys\n"
        "for name in ('transformers', 'safetensors', 'tqdm'):\n"
        "    sys.modules[name] = None\n"
        "import tridraft.models.gemma4_mtp, tridraft.models.hf_target, tridraft.models.weights\n"
        "try:\n"
        "    next(tridraft.models.weights.iterate_tensors('.'))\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    source = Path(tridraft.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'tridraft[hf]'" in done.stdout
