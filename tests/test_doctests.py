"""Every example in a docstring runs."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODULES = [
    f"tridraft.{path.parent.name}.{path.stem}"
    for folder in ("kernels", "models", "speculator")
    for path in sorted((ROOT / folder).glob("*.py"))
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted
    assert not result.failed
