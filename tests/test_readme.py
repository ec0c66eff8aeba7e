"""The README's Python runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block):
    names: dict[str, object] = {}
    exec(block, names)
    tokens: Any = names["tokens"]
    assert tokens.shape == (8,)
    assert not any(token in (258_883, 258_882) for token in tokens.tolist())
