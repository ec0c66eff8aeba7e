"""The built-in pair: what is shipped loads everywhere, is what its record says, and really speculates."""

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma4AssistantForCausalLM

import tridraft
from tridraft.models.hf_target import HFTarget
from tridraft.speculator.config import SpeculatorConfig
from tridraft.speculator.decoder import SpeculativeDecoder
from tridraft.speculator.factory import init_speculator
from tridraft.speculator.request import Request

PAIR = Path(tridraft.__file__).parent / "models" / "tiny_gemma4"
TARGET, ASSISTANT = PAIR / "target", PAIR / "assistant"
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def record():
    return json.loads((PAIR / "training.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def prompts(record, tokenizer):
    """The first 300 bytes of held-out files of whatever Python this is."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("heapq.py", "queue.py", "shlex.py", "textwrap.py")
    assert set(names) <= set(record["data"]["held_out_files"])
    return [tokenizer((library / name).read_text()[:300]).input_ids for name in names]


def read_tensors(directory):
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping


@pytest.mark.parametrize(
    ("directory", "model_class"),
    [(TARGET, AutoModelForCausalLM), (ASSISTANT, Gemma4AssistantForCausalLM)],
    ids=["target", "assistant"],
)
def test_transformers_loads_the_checkpoint_whole(directory, model_class):
    model, report = model_class.from_pretrained(directory, output_loading_info=True)
    assert type(model).__name__ == json.loads((directory / "config.json").read_text())["architectures"][0]
    assert model.dtype == torch.bfloat16
    assert not any(report.values()), report


def test_shapes_are_those_of_the_real_models():
    target, assistant = read_tensors(TARGET), read_tensors(ASSISTANT)
    config = json.loads((TARGET / "config.json").read_text())
    head_dims = {"sliding_attention": 256, "full_attention": 512}
    assert set(config["layer_types"]) == set(head_dims)
    for index, layer_type in enumerate(config["layer_types"]):
        assert target[f"model.layers.{index}.self_attn.k_norm.weight"].shape == (head_dims[layer_type],)
    assert len(assistant) == 50
    assert "lm_head.weight" not in assistant
    ordering = assistant["masked_embedding.token_ordering"]
    assert ordering.dtype == torch.int64
    assert torch.equal(ordering.sort().values, torch.arange(config["vocab_size"]))


def test_layer_scalars_are_not_one():
    """A reader that forgets `layer_scalar` must give other numbers."""
    for directory in (TARGET, ASSISTANT):
        scalars = [tensor for name, tensor in read_tensors(directory).items() if name.endswith("layer_scalar")]
        assert len(scalars) >= 4
        assert all((scalar.float() - 1).abs() > 0.01 for scalar in scalars)


def test_pair_is_a_few_megabytes():
    sizes = {path: path.stat().st_size for path in PAIR.rglob("*") if path.is_file()}
    assert sizes[TARGET / "model.safetensors"] < 6 * MEGABYTE
    assert sizes[ASSISTANT / "model.safetensors"] < 2.5 * MEGABYTE
    assert sum(sizes.values()) < 8 * MEGABYTE


@pytest.mark.parametrize(
    "text",
    [
        "",
        " a  b\t\r\n\n",
        "def f(x):\n    return x\n",
        "don't 1234 ΐ é 漢字 🎉 \u200b",
        "".join(map(chr, range(0x250))),
    ],
    ids=["empty", "spaces", "code", "multibyte", "controls"],
)
def test_tokenizer_gives_the_utf8_bytes_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == [tokenizer.bos_token_id, *text.encode()]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_decodes_every_byte(tokenizer):
    assert len(tokenizer) == 259
    assert [tokenizer.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
    assert tokenizer.decode([0xC3, 0xA9]) == "é"
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_special_ids_agree(tokenizer):
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    assert special == {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 258}
    configs = [json.loads((ASSISTANT / "config.json").read_text())["text_config"]]
    configs += [json.loads((TARGET / name).read_text()) for name in ("config.json", "generation_config.json")]
    for config in configs:
        assert special.items() <= config.items()


def test_record_says_how_it_was_made(record):
    assert record["seed"] == 0
    assert {"torch", "device", "wall_seconds"} <= record.keys()
    data = record["data"]
    assert data["train_bytes"] > 4 * MEGABYTE
    assert len(data["held_out_files"]) == 16
    assert len(data["sha256"]) == 64
    for name, directory in (("target", TARGET), ("assistant", ASSISTANT)):
        floats = sum(tensor.numel() for tensor in read_tensors(directory).values() if tensor.is_floating_point())
        assert record[name]["parameters"] == floats
        assert record[name]["steps"] > 500
    assert record["target"]["held_out_bits_per_byte"] < 2
    acceptance = record["acceptance"]
    assert acceptance["num_speculative_tokens"] == 4
    assert acceptance["prompts"] >= 256
    assert acceptance["mean_accepted_length"] >= 2.5
    by_position = acceptance["acceptance_by_position"]
    assert by_position == sorted(by_position, reverse=True)
    assert acceptance["mean_accepted_length"] == pytest.approx(1 + sum(by_position), abs=1e-3)


def test_pair_speculates_on_held_out_text(prompts, device):
    """Same text as `transformers` gives, and 2.5 tokens or more from a target pass with K = 4."""
    reference: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).to(device).eval()
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        output = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False)
        expected.append(output[0, len(prompt) :].tolist())

    target = HFTarget.from_pretrained(TARGET, dtype=torch.float32, device=device)
    config = SpeculatorConfig("gemma4_mtp", ASSISTANT, num_speculative_tokens=4, max_num_reqs=4, max_model_len=512)
    speculator = init_speculator(config)
    speculator.load_model(target)
    decoder = SpeculativeDecoder(target, speculator, max_num_reqs=4, max_model_len=512)
    completions = decoder.generate([Request(prompt, max_new_tokens=128) for prompt in prompts])

    assert [completion.output_ids for completion in completions] == expected
    assert decoder.stats.mean_accepted_length >= 2.5, decoder.stats
    assert max(map(max, (completion.accepted for completion in completions))) == 4
