"""The command: `tridraft generate`, `tridraft demo`, `tridraft info`.

Results go to standard output, everything else to standard error. PyTorch and the models are imported by the
subcommand that needs them, so that `--help` and wrong flags answer at once.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import tridraft
from tridraft.speculator.arguments import DTYPES, parser

if TYPE_CHECKING:
    import torch

    from tridraft.models.hf_target import HFTarget
    from tridraft.speculator.decoder import SpeculativeDecoder
    from tridraft.speculator.request import Chunk, Completion, Request, Statistics

_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
_MTP_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_MAX_NUM_REQS = 32


class UsageError(Exception):
    """What the user has to change, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are directories; nothing is looked up
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers shows how it reads a GGUF file, told not to or not
    stdout = sys.stdout
    try:
        _on_interrupt(_leave)
        # Libraries print where they like; standard output holds the result alone.
        with contextlib.redirect_stdout(sys.stderr):
            _COMMANDS[arguments.command](arguments, stdout)
        stdout.flush()
    except UsageError as error:
        print(f"tridraft {arguments.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tridraft: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, MemoryError) as error:
        # PyTorch's own class, which may not have been imported; its CPU allocator has none.
        on_gpu = type(error).__name__ == "OutOfMemoryError"
        if not (on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in str(error)):
            raise
        hint = "give fewer prompts, fewer --max-new-tokens or a smaller --dtype"
        print(f"tridraft {arguments.command}: error: out of {'GPU ' * on_gpu}memory: {hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        return 141
    except OSError as error:
        print(f"tridraft {arguments.command}: error: standard output: {error.strerror}", file=sys.stderr)
        return 1
    finally:
        _on_interrupt(signal.default_int_handler)
    return 0


def _on_interrupt(handler: Any) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


def _leave(*_: object) -> None:
    """Ctrl-C while libraries and checkpoints load: an exception there may be taken for a missing module."""
    sys.stderr.write("tridraft: interrupted\n")
    sys.stderr.flush()
    os._exit(130)


@contextlib.contextmanager
def _usage_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn what the user can put right into one line."""
    try:
        yield
    except kinds as error:
        raise UsageError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def _checkpoint_errors(directory: Path) -> Iterator[None]:
    """The same for whatever a library makes of a checkpoint whose files do not fit each other."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        line = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(line if str(directory) in line else f"{directory}: {line}") from error


def _generate(arguments: argparse.Namespace, stdout: TextIO) -> None:
    if bool(arguments.prompt) == bool(arguments.prompt_ids):
        raise UsageError("give --prompt TEXT or --prompt-ids 2,17,9, one of the two")
    _check_checkpoint("--target", arguments.target)
    draft, method = None, arguments.method
    if arguments.draft != "none":
        draft = Path(arguments.draft)
        _check_checkpoint("--draft", draft)
        method = _method(method, draft, arguments.target)
    _prepare_transformers()
    device = _device(arguments.device)
    dtype = _dtype(arguments.dtype, arguments.target, device)
    tokenizer = _tokenizer(arguments.target, required=bool(arguments.prompt))

    from tridraft.speculator.request import Request  # noqa: PLC0415

    prompts = arguments.prompt_ids or [_encode(tokenizer, text) for text in arguments.prompt]
    target = _load_target(arguments.target, dtype, device)
    _check_prompts(prompts, target)
    requests = [
        Request(
            prompt,
            arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            seed=arguments.seed,
        )
        for prompt in prompts
    ]
    decoder = _decoder(target, requests, method, draft, arguments.num_speculative_tokens, arguments.lm_head_dtype)
    if arguments.output == "json":
        completions = _complete(decoder, requests)
        result = {"requests": [_as_json(one, tokenizer) for one in completions], "stats": _stats(decoder.stats)}
        print(json.dumps(result), file=stdout)
        return
    if len(requests) == 1 and tokenizer:
        _stream(decoder, requests, tokenizer, stdout)
    else:
        for number, completion in enumerate(_complete(decoder, requests), start=1):
            heading = f"--- prompt {number}\n" if len(requests) > 1 else ""
            print(heading + _text(completion, tokenizer), file=stdout)
    print(_summary(decoder.stats), file=sys.stderr)


def _demo(arguments: argparse.Namespace, stdout: TextIO) -> None:
    from tridraft.speculator import demo  # noqa: PLC0415

    if arguments.method and arguments.target != "smollm2":
        raise UsageError(f"--method: {arguments.method} is for --target smollm2")
    with _usage_errors(FileNotFoundError):
        asked = arguments.method or "eagle3"
        pair = demo.smollm2_pair(asked) if arguments.target == "smollm2" else demo.tiny_pair()
    _prepare_transformers()
    device = _device(arguments.device)

    import torch  # noqa: PLC0415

    from tridraft.speculator.request import Request  # noqa: PLC0415

    tokenizer = _tokenizer(pair.target, required=True)
    # float32, in which a pass over one token and a pass over K + 1 agree to well below what parts two tokens.
    target = _load_target(pair.target, torch.float32, device)
    text = pair.prompt if arguments.prompt is None else arguments.prompt
    prompt = _encode(tokenizer, demo.chat(tokenizer, text) if pair.chats else text)
    _check_prompts([prompt], target)
    requests = [Request(prompt, arguments.max_new_tokens)]
    plain = _decoder(target, requests)
    drafting = _decoder(target, requests, pair.method, pair.draft, arguments.num_speculative_tokens)
    for decoder in (plain, drafting):  # the first pass of a GPU compiles kernels, which is not what is timed
        decoder.generate([Request(prompt, arguments.num_speculative_tokens + 2)])
    expected = _complete(plain, requests)
    if arguments.output == "json":
        completions = _complete(drafting, requests)
    else:
        print(text, end="\n\n" if pair.chats else "", file=stdout)
        completions = [_stream(drafting, requests, tokenizer, stdout)]
    same = completions[0].output_ids == expected[0].output_ids
    if arguments.output == "json":
        result = {
            "requests": [_as_json(one, tokenizer) for one in completions],
            "stats": _stats(drafting.stats),
            "plain": _stats(plain.stats),
            "same_text": same,
        }
        print(json.dumps(result), file=stdout)
    else:
        print(f"\nplain decoding  {_summary(plain.stats)}", file=stdout)
        print(f"with drafts     {_summary(drafting.stats)}", file=stdout)
        if device.type == "cpu":
            print("                (times on a CPU say little of a GPU's: drafts save target passes)", file=stdout)
        print(f"same text       {'yes' if same else 'no'}", file=stdout)
    if not same:
        raise UsageError("plain decoding gave another text, which is a fault of this program: please report it")


def _info(arguments: argparse.Namespace, stdout: TextIO) -> None:
    device = _device(arguments.device)

    import importlib  # noqa: PLC0415
    import pkgutil  # noqa: PLC0415
    import platform  # noqa: PLC0415
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from tridraft.kernels import _op  # noqa: PLC0415

    def version_of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    folder = Path(tridraft.__file__).parent / "kernels"
    for module in pkgutil.iter_modules([str(folder)]):
        importlib.import_module(f"tridraft.kernels.{module.name}")
    kernels = _op.can_launch(torch.empty(0, device=device))
    implementation = "triton" if kernels else "eager"
    if device.type == "cuda":
        arch = _op.arch_of(device)
        backend = f"{arch.backend} {arch.capability}"
        name = torch.cuda.get_device_name(device)
    else:
        backend = "triton interpreter" if kernels else "pytorch"
        name = platform.processor() or platform.machine()
    facts = {
        "tridraft": tridraft.__version__,
        "python": platform.python_version(),
        **{package: version_of(package) for package in ("torch", "triton", "transformers")},
        "device": str(device),
        "name": name,
        "backend": backend,
        "operations": dict.fromkeys(sorted(torch.ops.tridraft), implementation),
    }
    if arguments.output == "json":
        print(json.dumps(facts), file=stdout)
        return
    operations = facts.pop("operations")
    for fact, value in facts.items():
        print(f"{fact:13} {value or 'not installed'}", file=stdout)
    for operation, implementation in operations.items():
        print(f"  {operation:30} {implementation}", file=stdout)


def _check_checkpoint(flag: str, directory: Path) -> None:
    if directory.is_file():
        raise UsageError(f"{flag}: {directory} is a file; give the directory of a Hugging Face checkpoint")
    if not directory.is_dir():
        raise UsageError(f"{flag}: no directory {directory}; give the directory of a downloaded checkpoint")
    if not (directory / "config.json").is_file():
        raise UsageError(f"{flag}: {directory} has no config.json; give the directory of a Hugging Face checkpoint")


def _config(directory: Path) -> dict[str, Any]:
    from tridraft.models.weights import read_json  # noqa: PLC0415

    with _usage_errors(ValueError, OSError):
        return read_json(directory, "config.json")


def _method(method: str, draft: Path, target: Path) -> str:
    """The method to draft with: as asked, or as the draft's own configuration says."""
    config = _config(draft)
    model_type = config.get("model_type")
    found = "mtp" if draft.resolve() == target.resolve() else _method_of(config)
    if method == "auto" and found is None:
        raise UsageError(f"--draft: {draft}, of model_type {model_type!r}, does not say how it drafts: give --method")
    if "gemma4_mtp" in (method, found) and method not in ("auto", found):
        raise UsageError(f"--method: {draft} has model_type {model_type!r}, which does not draft by {method}")
    return str(found) if method == "auto" else method


def _method_of(config: dict[str, Any]) -> str | None:
    if config.get("model_type") in _ASSISTANTS:
        return "gemma4_mtp"
    names = str(config.get("architectures")).lower()
    if "eagle" in names:
        return "eagle3" if "eagle3" in names else "eagle"
    text = config.get("text_config")
    if any((text if isinstance(text, dict) else config).get(key) for key in _MTP_COUNTS):
        return "mtp"
    return "eagle3" if config.get("draft_vocab_size") else None


def _prepare_transformers() -> None:
    try:
        from transformers.utils import logging  # noqa: PLC0415
    except ImportError as error:
        raise UsageError("checkpoints need the package transformers: pip install 'tridraft[hf]'") from error
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _device(name: str) -> "torch.device":
    import torch  # noqa: PLC0415

    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise UsageError(f"--device: got {name}, needs auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device: {name} is not there ({torch.cuda.device_count()} CUDA devices); use --device cpu")
    return device


def _dtype(name: str, target: Path, device: "torch.device") -> "torch.dtype":
    import torch  # noqa: PLC0415

    if name == "auto":
        config = _config(target)
        stored = [part.get("dtype") or part.get("torch_dtype") for part in (config, config.get("text_config") or {})]
        # A CPU computes float32 fastest.
        name = next(filter(None, stored), "float32") if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise UsageError(f"--dtype: the target is stored as {name}; choose one of {', '.join(DTYPES[1:])}")
    return getattr(torch, name)


def _tokenizer(path: Path, *, required: bool) -> Any:
    """The tokenizer of a checkpoint or a GGUF file, or None where there is none and none is needed."""
    directory, source = path, {}
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if path.suffix == ".gguf":
        directory, source = path.parent, {"gguf_file": path.name}
    elif not any((directory / name).is_file() for name in files):
        if required:
            raise UsageError(f"--prompt: {directory} has no tokenizer; give token ids with --prompt-ids")
        return None
    from transformers import AutoTokenizer  # noqa: PLC0415

    with _checkpoint_errors(directory):
        return AutoTokenizer.from_pretrained(directory, **source)


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("--prompt: is not valid UTF-8; give token ids with --prompt-ids") from None
    return tokenizer(text).input_ids


def _load_target(directory: Path, dtype: "torch.dtype", device: "torch.device") -> "HFTarget":
    from tridraft.models.hf_target import HFTarget  # noqa: PLC0415

    with _checkpoint_errors(directory):
        return HFTarget.from_pretrained(directory, dtype=dtype, device=device)


def _check_prompts(prompts: Sequence[Sequence[int]], target: "HFTarget") -> None:
    longest = target.max_position_embeddings
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UsageError(f"prompt {number} has no tokens; give some text")
        wrong = [token for token in prompt if not 0 <= token < target.vocab_size]
        if wrong:
            raise UsageError(f"prompt {number} has the id {wrong[0]}; the target's are 0 to {target.vocab_size - 1}")
        if len(prompt) >= longest:
            raise UsageError(f"prompt {number} has {len(prompt)} tokens; the target takes {longest - 1}: shorten it")


def _decoder(
    target: "HFTarget",
    requests: "Sequence[Request]",
    method: Any = None,
    draft: Path | None = None,
    num_speculative_tokens: int = 0,
    lm_head_dtype: Any = "auto",
) -> "SpeculativeDecoder":
    """A decoder with room for these requests; without a draft it decodes plainly."""
    from tridraft.speculator.config import SpeculatorConfig  # noqa: PLC0415
    from tridraft.speculator.decoder import SpeculativeDecoder  # noqa: PLC0415
    from tridraft.speculator.factory import init_speculator  # noqa: PLC0415

    max_num_reqs = min(len(requests), _MAX_NUM_REQS)
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    max_model_len = min(longest, target.max_position_embeddings)
    max_num_batched_tokens = max(2048, max_num_reqs * (num_speculative_tokens + 1))
    speculator = None
    if draft is not None:
        config = SpeculatorConfig(
            method=method,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            draft_sampling="probabilistic" if requests[0].temperature else "greedy",
            lm_head_dtype=lm_head_dtype,
        )
        with _checkpoint_errors(draft):
            speculator = init_speculator(config)
            speculator.load_model(target)
    return SpeculativeDecoder(
        target,
        speculator,
        max_num_reqs=max_num_reqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _complete(decoder: "SpeculativeDecoder", requests: "Sequence[Request]") -> "list[Completion]":
    """Run the requests with a progress bar, if somebody is looking."""
    _on_interrupt(signal.default_int_handler)
    if not sys.stderr.isatty():
        return decoder.generate(requests)
    from tqdm import tqdm  # noqa: PLC0415

    with tqdm(total=sum(request.max_new_tokens for request in requests), unit="tok", desc="generating") as bar:

        def advance(chunk: "Chunk") -> None:
            bar.update(len(chunk.token_ids))

        return decoder.generate(requests, advance)


def _stream(
    decoder: "SpeculativeDecoder", requests: "Sequence[Request]", tokenizer: Any, stdout: TextIO
) -> "Completion":
    """Run one request and write its text as it comes."""
    _on_interrupt(signal.default_int_handler)
    ids: list[int] = []
    written = 0

    def write(chunk: "Chunk") -> None:
        nonlocal written
        ids.extend(chunk.token_ids)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not chunk.finish_reason:
            text = text.rstrip("\ufffd")  # the bytes of a character may come in several tokens
        stdout.write(text[written:])
        stdout.flush()
        written = max(written, len(text))

    (completion,) = decoder.generate(requests, write)
    stdout.write("\n")
    return completion


def _text(completion: "Completion", tokenizer: Any) -> str:
    if tokenizer:
        return tokenizer.decode(completion.output_ids, skip_special_tokens=True)
    return ",".join(map(str, completion.output_ids))


def _as_json(completion: "Completion", tokenizer: Any) -> dict[str, Any]:
    return {
        "prompt_ids": completion.prompt_ids,
        "output_ids": completion.output_ids,
        "text": _text(completion, tokenizer) if tokenizer else None,
        "accepted": completion.accepted,
        "finish_reason": completion.finish_reason,
    }


def _stats(stats: "Statistics") -> dict[str, Any]:
    return {
        "target_passes": stats.target_passes,
        "mean_accepted_length": stats.mean_accepted_length,
        "acceptance_by_position": stats.acceptance_by_position,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "verify_seconds": stats.verify_seconds,
        "draft_seconds": stats.draft_seconds,
        "total_seconds": stats.total_seconds,
    }


def _summary(stats: "Statistics") -> str:
    parts = [
        f"{stats.output_tokens} tokens in {stats.target_passes} target passes",
        f"{stats.mean_accepted_length:.2f} tokens a verify pass",
        f"{stats.total_seconds:.2f} s (drafting {stats.draft_seconds:.2f} s)",
    ]
    if stats.drafted:
        shares = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
        parts.append(f"accepted by draft position {shares}")
    return ", ".join(parts)


_COMMANDS = {"generate": _generate, "demo": _demo, "info": _info}
