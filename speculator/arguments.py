"""What can be said to the command."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tridraft
from tridraft.speculator.methods import MAX_SPECULATIVE_TOKENS, METHODS
from tridraft.speculator.request import MAX_TEMPERATURE, MIN_TEMPERATURE

DTYPES = ("auto", "float32", "bfloat16", "float16")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _integer(least: int, most: int = 2**63 - 1) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {value}, needs {least} to {most}")
        return value

    parse.__name__ = "integer"
    return parse


def _number(allowed: Callable[[float], bool], needs: str) -> Any:
    def parse(text: str) -> float:
        value = float(text)
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"got {text}, needs {needs}")
        return value

    parse.__name__ = "number"
    return parse


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, needs token ids like 2,17,9") from None


def parser() -> argparse.ArgumentParser:
    """The command's parser; a wrong flag ends the program with one line."""
    common = _Parser(add_help=False)
    common.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 …; auto takes the GPU where there is one")
    common.add_argument("--output", choices=("text", "json"), default="text", help="form of the result (default: text)")
    drafting = _Parser(add_help=False)
    drafting.add_argument("--max-new-tokens", type=_integer(1), default=128, metavar="N", help="default: 128")
    drafting.add_argument(
        "--num-speculative-tokens",
        type=_integer(1, MAX_SPECULATIVE_TOKENS),
        default=4,
        metavar="K",
        help="drafts a pass (default: 4)",
    )

    whole = _Parser(prog="tridraft", description=tridraft.__doc__)
    whole.add_argument("--version", action="version", version=f"tridraft {tridraft.__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        parents=[drafting, common],
        help="continue prompts with a checkpoint pair",
        description="Continue prompts with the target's own text; the draft model makes it faster.",
    )
    generate.add_argument("--target", type=Path, required=True, metavar="DIR", help="target checkpoint")
    generate.add_argument(
        "--draft",
        required=True,
        metavar="DIR|none",
        help="draft checkpoint, the target's own for MTP modules inside it; none decodes with the target alone",
    )
    generate.add_argument(
        "--method",
        choices=("auto", *METHODS),
        default="auto",
        help="how to draft; auto reads the draft's config.json (default: auto)",
    )
    generate.add_argument(
        "--lm-head-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="fp8 drafts with a rounded copy of a dense head, which takes half the time (default: auto, as it is)",
    )
    prompt = generate.add_argument_group("prompts", "one kind, each repeatable; several are decoded together")
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="as it is, without a chat template")
    prompt.add_argument("--prompt-ids", action="append", type=_ids, metavar="2,17,9", help="needs no tokenizer")
    temperature = _number(
        lambda value: value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE,
        f"0 (greedy) or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
    )
    share = _number(lambda value: 0 < value <= 1, "more than 0 and at most 1")
    generate.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default)")
    generate.add_argument("--top-k", type=_integer(0), default=0, metavar="N", help="0 keeps all (default)")
    generate.add_argument("--top-p", type=share, default=1.0, metavar="P", help="1 keeps all (default)")
    generate.add_argument(
        "--seed",
        type=_integer(0),
        default=0,
        metavar="N",
        help="of the random draws, the same for each prompt (default: 0)",
    )
    generate.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's on a GPU, float32 on a CPU"
    )

    demo = commands.add_parser(
        "demo",
        parents=[drafting, common],
        help="generate with the built-in pair and compare with plain decoding",
        description="Generate with a built-in pair, with and without drafts; no download.",
    )
    demo.add_argument(
        "--target",
        choices=("tiny", "smollm2"),
        default="tiny",
        help="tiny: a Gemma 4 pair that writes Python (default); smollm2: SmolLM2-135M-Instruct, an installed package",
    )
    demo.add_argument(
        "--method", choices=("eagle3", "mtp"), help="which head drafts for --target smollm2 (default: eagle3)"
    )
    demo.add_argument("--prompt", metavar="TEXT", help="text to continue, or the question to smollm2")

    commands.add_parser("info", parents=[common], help="what this machine runs", description="What this machine runs.")
    return whole
