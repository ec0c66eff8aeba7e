"""The command: its output, its one-line errors, its exit status."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tridraft
from _tiny_gemma4 import save_random_pair
from tridraft.speculator.cli import main
from tridraft.speculator.decoder import SpeculativeDecoder

ROOT = Path(__file__).parents[2]
NEW = 12
IDS = [2, 17, 9, 40, 41]
OTHER_IDS = [2, 90, 33]


@pytest.fixture(scope="session")
def directories(tiny, tmp_path_factory) -> tuple[Path, Path]:
    """A pair with a tokenizer of single ASCII characters that puts <bos>, id 2, first."""
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    pair = tiny("ordered")
    target = tmp_path_factory.mktemp("pair") / "target"
    shutil.copytree(pair.target_dir, target)
    vocabulary = {"<bos>" if index == 2 else chr(index): index for index in range(128)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>").save_pretrained(target)
    return target, pair.assistant_dir


@pytest.fixture
def generate(directories, device, capsys):
    """Run `tridraft generate` in this process; returns its status, standard output and standard error."""

    def run(*arguments: str, target=directories[0], draft=directories[1]) -> tuple[int, str, str]:
        pair = ["--target", str(target), "--draft", str(draft), "--device", device.type, "--dtype", "float32"]
        capsys.readouterr()
        try:
            status = main(["generate", *pair, *arguments])
        except SystemExit as error:
            status = int(error.code or 0)
        written = capsys.readouterr()
        return status, written.out, written.err

    return run


def new_tokens(count=NEW):
    return ["--max-new-tokens", str(count)]


def command(*arguments: str, **options) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, **options
    )


def as_text(ids):
    return "".join("" if token == 2 else chr(token) for token in ids)


@pytest.mark.parametrize("drafting", [True, False])
def test_json_is_one_object_and_the_text_of_transformers(generate, tiny, drafting):
    options = {} if drafting else {"draft": "none"}
    prompts = ["--prompt-ids", "2,17,9,40,41", "--prompt-ids", "2,90,33"]
    status, out, err = generate(*prompts, *new_tokens(), "--output", "json", "--num-speculative-tokens", "3", **options)
    assert status == 0
    result = json.loads(out)
    assert err == ""
    assert set(result) == {"requests", "stats"}
    pair = tiny("ordered")
    for ids, request in zip((IDS, OTHER_IDS), result["requests"], strict=True):
        assert set(request) == {"prompt_ids", "output_ids", "text", "accepted", "finish_reason"}
        assert request["prompt_ids"] == ids
        assert request["output_ids"] == pair.greedy(ids, NEW)
        assert request["text"] == as_text(request["output_ids"])
        assert len(request["accepted"]) + sum(request["accepted"]) + 1 == NEW
        assert request["finish_reason"] == "length"
    counts = result["stats"]
    assert set(counts) == {
        "target_passes",
        "mean_accepted_length",
        "acceptance_by_position",
        "prompt_tokens",
        "output_tokens",
        "verify_seconds",
        "draft_seconds",
        "total_seconds",
    }
    assert counts["target_passes"] == 1 + max(len(request["accepted"]) for request in result["requests"])
    assert counts["output_tokens"] == 2 * NEW
    assert len(counts["acceptance_by_position"]) == (3 if drafting else 0)


def test_a_text_prompt_streams_the_continuation(generate, tiny, monkeypatch):
    written = []
    status, out, err = generate("--prompt", "def f(x):", *new_tokens())
    ids = [2, *map(ord, "def f(x):")]
    expected = as_text(tiny("ordered").greedy(ids, NEW))
    assert status == 0
    assert out == expected + "\n"
    assert err.count("\n") == 1
    assert "12 tokens in" in err
    assert "target passes" in err
    monkeypatch.setattr(sys, "stdout", type("Stdout", (), {"write": written.append, "flush": lambda _: None})())
    assert generate("--prompt", "def f(x):", *new_tokens())[0] == 0
    assert len(written) > 2
    assert "".join(written) == expected + "\n"


def test_text_of_several_prompts(generate, tiny):
    status, out, _ = generate("--prompt", "ab", "--prompt", "class C", *new_tokens())
    texts = [as_text(tiny("ordered").greedy([2, *map(ord, text)], NEW)) for text in ("ab", "class C")]
    assert status == 0
    assert out == f"--- prompt 1\n{texts[0]}\n--- prompt 2\n{texts[1]}\n"


def test_ids_need_no_tokenizer(generate, tiny):
    pair = tiny("ordered")
    arguments = ["--prompt-ids", "2,17,9,40,41", *new_tokens()]
    status, out, _ = generate(*arguments, target=pair.target_dir)
    assert status == 0
    assert out == ",".join(map(str, pair.greedy(IDS, NEW))) + "\n"
    _, out, _ = generate(*arguments, "--output", "json", target=pair.target_dir)
    assert json.loads(out)["requests"][0]["text"] is None


def test_bytes_of_a_character_wait_for_each_other(monkeypatch, capsys):
    """Text is written up to the last whole character."""
    from tridraft.speculator import cli
    from tridraft.speculator.request import Chunk, Completion

    text = "aé€z"

    class Bytes:
        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    class Decoder:
        def generate(self, requests, on_chunk):
            ids = list(text.encode())
            for place, token in enumerate(ids):
                on_chunk(Chunk(0, [token], 0, "length" if place == len(ids) - 1 else None))
            return [Completion([], ids)]

    pieces = []
    stdout: Any = type("Stdout", (), {"write": pieces.append, "flush": lambda _: None})()
    decoder: Any = Decoder()
    cli._stream(decoder, [], Bytes(), stdout)
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "z", "\n"]


def test_sampling_follows_the_seed(generate):
    arguments = ["--prompt", "ab", "--prompt", "class C", *new_tokens(), "--output", "json", "--temperature", "1.5"]

    def outputs(*more):
        return [request["output_ids"] for request in json.loads(generate(*arguments, *more)[1])["requests"]]

    first = outputs("--seed", "7")
    assert outputs("--seed", "7") == first
    assert outputs("--seed", "8") != first
    alone = json.loads(generate("--prompt", "class C", *arguments[4:], "--seed", "7")[1])
    assert alone["requests"][0]["output_ids"] == first[1]


def test_a_long_answer_ends_at_the_targets_length(generate, tiny):
    ids = ",".join(["5"] * 508)
    _, out, _ = generate("--prompt-ids", ids, *new_tokens(), "--output", "json")
    (request,) = json.loads(out)["requests"]
    assert request["output_ids"] == tiny("ordered").greedy([5] * 508, 4)
    assert request["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --prompt TEXT or --prompt-ids 2,17,9, one of the two"),
        (["--prompt", "a", "--prompt-ids", "2"], "give --prompt TEXT or --prompt-ids 2,17,9, one of the two"),
        (["--prompt-ids", "2,x"], "got '2,x', needs token ids like 2,17,9"),
        (["--prompt-ids", "2,128"], "prompt 1 has the id 128; the target's are 0 to 127"),
        (["--prompt-ids", "2", "--prompt-ids", "-4"], "prompt 2 has the id -4; the target's are 0 to 127"),
        (["--prompt-ids", ",".join(["5"] * 512)], "prompt 1 has 512 tokens; the target takes 511: shorten it"),
        (["--prompt-ids", "2", "--max-new-tokens", "0"], "--max-new-tokens: got 0, needs 1 to"),
        (["--prompt-ids", "2", "--num-speculative-tokens", "1000"], "got 1000, needs 1 to 64"),
        (["--prompt-ids", "2", "--top-p", "0"], "--top-p: got 0, needs more than 0 and at most 1"),
        (["--prompt-ids", "2", "--temperature", "1e308"], "needs 0 (greedy) or 1e-30 to 1e+30"),
        (["--prompt-ids", "2", "--device", "cuda:99999999999999999999"], "--device"),
        (["--prompt-ids", "2", "--num-speculative-tokens", "0"], "--num-speculative-tokens: got 0, needs 1 to 64"),
        (["--prompt-ids", "2", "--num-speculative-tokens", "two"], "invalid integer value: 'two'"),
        (["--prompt-ids", "2", "--temperature", "-1"], "--temperature: got -1, needs 0 (greedy) or 1e-30 to 1e+30"),
        (["--prompt-ids", "2", "--temperature", "nan"], "--temperature: got nan, needs 0 (greedy) or 1e-30 to 1e+30"),
        (["--prompt-ids", "2", "--seed", "-1"], "--seed: got -1, needs 0 to"),
        (["--prompt-ids", "2", "--seed", str(2**63)], f"needs 0 to {2**63 - 1}"),
        (["--prompt-ids", "2", "--device", "tpu"], "--device: got tpu, needs auto, cpu, cuda or cuda:N"),
        (["--prompt-ids", "2", "--device", "cuda:99"], "--device: cuda:99 is not there"),
        (["--prompt-ids", "2", "--method", "medusa"], "argument --method: invalid choice: 'medusa'"),
        (
            ["--prompt-ids", "2", "--method", "eagle"],
            "has model_type 'gemma4_assistant', which does not draft by eagle",
        ),
        (["--prompt-ids", "2", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--prompt-ids", "2", "--speed", "9"], "unrecognized arguments: --speed 9"),
    ],
)
def test_wrong_flags_end_with_one_line(generate, arguments, message):
    status, out, err = generate(*arguments)
    assert status in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("tridraft")
    assert message in err


def _without(name):
    return lambda directory: (directory / name).unlink()


def _write(name, content):
    return lambda directory: (directory / name).write_text(content)


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        ("target", shutil.rmtree, "--target: no directory"),
        ("draft", shutil.rmtree, "--draft: no directory"),
        ("target", _without("config.json"), "has no config.json; give the directory of a Hugging Face checkpoint"),
        ("draft", _without("config.json"), "has no config.json; give the directory of a Hugging Face checkpoint"),
        ("draft", _write("config.json", "{"), "not valid JSON"),
        (
            "draft",
            _write("config.json", '{"model_type": "llama"}'),
            "of model_type 'llama', does not say how it drafts: give --method",
        ),
        ("draft", _without("model.safetensors"), "no model.safetensors"),
        ("target", _without("model.safetensors"), "model.safetensors"),
        ("draft", _write("model.safetensors", "?" * 64), "not a valid safetensors file"),
        ("target", _write("model.safetensors", "?" * 64), "not a valid safetensors file"),
        ("target", _write("config.json", '{"model_type": "no_such_model"}'), "no_such_model"),
    ],
)
def test_broken_directories_end_with_one_line(generate, directories, tmp_path, which, change, message):
    pair = {}
    for name, source in zip(("target", "draft"), directories, strict=True):
        pair[name] = tmp_path / name
        shutil.copytree(source, pair[name])
    change(pair[which])
    status, out, err = generate("--prompt-ids", "2,17", **pair)
    assert status == 1
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_centroid_head_is_not_rounded(generate):
    status, out, err = generate("--prompt-ids", "2,17", "--lm-head-dtype", "fp8")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "lm_head_dtype: got 'fp8'" in err


@pytest.mark.parametrize(
    ("which", "changed", "message"),
    [
        ("target", {"hidden_size": 100}, "target"),
        ("target", {"num_hidden_layers": 2}, "target"),
        ("assistant", {"centroid_intermediate_top_k": 99}, "centroid_intermediate_top_k: got 99, needs 1 to"),
    ],
)
def test_a_config_that_does_not_fit_ends_with_one_line(capsys, tmp_path, which, changed, message):
    """Whatever `transformers` makes of it: its exceptions are of many kinds."""
    pair = {name: tmp_path / name for name in ("target", "assistant")}
    for name, directory in pair.items():
        shutil.copytree(Path(tridraft.__file__).parent / "models" / "tiny_gemma4" / name, directory)
    config = json.loads((pair[which] / "config.json").read_text())
    (pair[which] / "config.json").write_text(json.dumps({**config, **changed}))
    pair_flags = ["--target", str(pair["target"]), "--draft", str(pair["assistant"])]
    assert main(["generate", *pair_flags, "--prompt-ids", "2", "--max-new-tokens", "2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_a_prompt_that_is_not_utf8_ends_with_one_line(capsys):
    assert main(["demo", "--prompt", "a\udcff"]) == 1
    assert (
        capsys.readouterr().err
        == "tridraft demo: error: --prompt: is not valid UTF-8; give token ids with --prompt-ids\n"
    )


def test_a_mismatched_pair_ends_with_one_line(generate, tiny):
    status, _, err = generate("--prompt-ids", "2,17", draft=tiny("plain").assistant_dir)
    assert status == 1
    assert err.count("\n") == 1
    assert "the assistant does not fit this target" in err
    assert "kv heads of sliding_attention (draft 2, target 1)" in err


def test_text_without_a_tokenizer(generate, tiny):
    status, _, err = generate("--prompt", "ab", target=tiny("ordered").target_dir)
    assert status == 1
    assert "has no tokenizer; give token ids with --prompt-ids" in err


def test_without_transformers(generate, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    status, _, err = generate("--prompt-ids", "2,17")
    assert status == 1
    assert err == "tridraft generate: error: checkpoints need the package transformers: pip install 'tridraft[hf]'\n"


def test_out_of_memory(generate, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated …")

    monkeypatch.setattr(SpeculativeDecoder, "generate", fail)
    status, _, err = generate("--prompt-ids", "2,17")
    assert status == 1
    assert err.count("\n") == 1
    assert "out of GPU memory: give fewer prompts" in err


def test_what_libraries_print_goes_to_standard_error(generate, monkeypatch):
    stream = SpeculativeDecoder.stream

    def noisy(self, requests):
        print("a library says hello")
        return stream(self, requests)

    monkeypatch.setattr(SpeculativeDecoder, "stream", noisy)
    _, out, err = generate("--prompt-ids", "2,17", *new_tokens(), "--output", "json")
    assert json.loads(out)["requests"]
    assert err == "a library says hello\n"


def test_interrupt(directories):
    """Ctrl-C while text is being written: status 130, no traceback."""
    target, draft = directories
    arguments = ["--target", str(target), "--draft", str(draft), "--prompt", "ab", "--max-new-tokens", "500"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tridraft", "generate", *arguments, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b"tridraft: interrupted\n"


def test_help_and_wrong_flags_import_no_torch():
    code = (
        "import sys\n"
        "from tridraft.speculator.cli import main\n"
        "for arguments in (['--help'], ['--version'], ['generate', '--help'], ['demo', '--nope'], ['generate']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "print([name for name in ('torch', 'triton', 'transformers', 'numpy') if name in sys.modules])\n"
    )
    result = command("-c", code)
    assert result.returncode == 0
    assert result.stdout.endswith("[]\n")
    assert "usage: tridraft" in result.stdout


def test_module_runs_as_a_command(directories):
    target, draft = directories
    result = command(
        *("-m", "tridraft", "generate", "--target", str(target), "--draft", str(draft)),
        *("--prompt-ids", "2,17,9,40,41", "--max-new-tokens", "5", "--output", "json"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert len(json.loads(result.stdout)["requests"][0]["output_ids"]) == 5
    assert command("-m", "tridraft").returncode == 2


def test_info(capsys, device):
    assert main(["info", "--output", "json", "--device", device.type]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["device"] == device.type
    runs_kernels = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    assert set(facts["operations"].values()) == {"triton" if runs_kernels else "eager"}
    assert {"paged_attention", "draft_sample", "rejection_sample", "rms_norm"} <= set(facts["operations"])
    assert main(["info", "--device", device.type]) == 0
    text = capsys.readouterr().out
    assert f"tridraft      {facts['tridraft']}\n" in text
    assert "  paged_attention" in text


def test_demo_without_its_pair(monkeypatch, tmp_path, capsys):
    import tridraft

    monkeypatch.setattr(tridraft, "__file__", str(tmp_path / "__init__.py"))
    assert main(["demo"]) == 1
    assert "tiny_gemma4 is missing: install tridraft again" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_pair_of_released_size_runs(tmp_path, capsys):
    """The 12B assistant's shapes in bfloat16, with the ids it never drafts and its target never generates."""
    target, draft = save_random_pair("12b", tmp_path, torch.bfloat16)
    prompts = ["--prompt-ids", "2,17,9,40,41", "--prompt-ids", ",".join(map(str, range(100, 1500)))]
    pair = ["--target", str(target), "--draft", str(draft), *prompts, "--device", "cuda", "--output", "json"]
    for sampling in ([], ["--temperature", "1.0", "--seed", "3"]):
        assert main(["generate", *pair, *new_tokens(40), *sampling]) == 0
        result = json.loads(capsys.readouterr().out)
        for request in result["requests"]:
            assert len(request["output_ids"]) == 40
            assert not {258883, 258882} & set(request["output_ids"])


@pytest.fixture
def demo_pair(directories, tmp_path, monkeypatch):
    """A tiny random pair in the place of the built-in one."""
    import tridraft

    for source, name in zip(directories, ("target", "assistant"), strict=True):
        shutil.copytree(source, tmp_path / "models" / "tiny_gemma4" / name)
    monkeypatch.setattr(tridraft, "__file__", str(tmp_path / "__init__.py"))


def test_demo_of_the_built_in_pair(capsys, device):
    """It speculates, and prints what `transformers` does."""
    from transformers import AutoModelForCausalLM

    assert main(["demo", "--max-new-tokens", "48", "--output", "json", "--device", device.type]) == 0
    result = json.loads(capsys.readouterr().out)
    (request,) = result["requests"]
    reference: Any = AutoModelForCausalLM.from_pretrained(
        ROOT / "models" / "tiny_gemma4" / "target", dtype=torch.float32
    )
    prompt = torch.tensor([request["prompt_ids"]])
    expected = reference.generate(prompt, max_new_tokens=48, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert request["output_ids"] == expected
    assert result["stats"]["target_passes"] * 2 < result["plain"]["target_passes"] == 48


@pytest.mark.usefixtures("demo_pair")
def test_demo_compares_with_plain_decoding(tiny, capsys, device):
    arguments = ["demo", "--prompt", "ab", *new_tokens(), "--device", device.type]
    text = as_text(tiny("ordered").greedy([2, *map(ord, "ab")], NEW))
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"ab{text}\n\nplain decoding  12 tokens in 12 target passes, 1.00 tokens a verify pass")
    assert "\nwith drafts     12 tokens in " in out
    assert out.endswith("same text       yes\n")
    assert main([*arguments, "--output", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"requests", "stats", "plain", "same_text"}
    assert result["same_text"] is True
    assert result["plain"]["target_passes"] == NEW >= result["stats"]["target_passes"]


@pytest.mark.usefixtures("demo_pair")
def test_demo_notices_another_text(monkeypatch, capsys, device):
    take = SpeculativeDecoder._take

    def wrong(self, row, emitted):
        return take(self, row, [3] * len(emitted) if self.speculator else emitted)

    monkeypatch.setattr(SpeculativeDecoder, "_take", wrong)
    assert main(["demo", "--prompt", "ab", *new_tokens(), "--device", device.type]) == 1
    assert "plain decoding gave another text" in capsys.readouterr().err
