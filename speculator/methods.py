"""The ways to draft, for whoever has to know them without PyTorch."""

from typing import Literal, get_args

Method = Literal["gemma4_mtp", "eagle", "eagle3", "mtp"]
METHODS: tuple[Method, ...] = get_args(Method)
MAX_SPECULATIVE_TOKENS = 64
