"""The README's Python runs as it stands."""

import re
from pathlib import Path
from typing import Any

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run(monkeypatch):
    """One after another, as they are read."""
    monkeypatch.chdir(Path(__file__).parents[1])
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block, names)
    tokens = names["tokens"]
    assert tokens.shape == (8,)
    assert not any(token in (258_883, 258_882) for token in tokens.tolist())
    assert len(names["completion"].output_ids) == 16
    assert sum(names["completion"].accepted) > 0
