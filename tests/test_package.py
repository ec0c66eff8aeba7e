"""The package as others see it: import name, layering, the built wheel."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "models", "speculator")
LAYERS = {"kernels": set(), "models": {"kernels"}, "speculator": {"kernels", "models"}}
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def fresh(code: str, **env: str) -> str:
    """Standard output of `code` in a new interpreter started at the project's root."""
    environment = {**os.environ, "PYTHONPATH": "src", **env}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_folders_are_not_packages():
    """A top-level `kernels` package here would shadow the one that transformers looks for."""
    assert not [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()]


def test_installed_kernels_package_wins_at_the_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("name = 'the other one'\n")
    code = "import kernels; print(kernels.name)"
    assert fresh(code, PYTHONPATH=str(tmp_path)) == "the other one"


def test_transformers_does_not_take_our_folder_for_kernels():
    code = "import importlib.util as u; spec = u.find_spec('kernels'); print(spec is None or spec.origin is None)"
    assert fresh(code) == "True"
    code = "from transformers.utils import import_utils; print(import_utils.is_kernels_available())"
    assert fresh(code) == "False"


def test_import_loads_neither_torch_nor_triton():
    code = "import sys, tridraft; print([m for m in ('torch', 'triton', 'numpy', 'transformers') if m in sys.modules])"
    assert fresh(code) == "[]"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_imports_point_downward(path):
    folder = path.parent.name
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} relative import"
            names = [node.module or ""]
        else:
            names = [alias.name for alias in node.names]
        for name in names:
            assert name.split(".")[0] not in FOLDERS, f"{path.name}:{node.lineno} imports {name}, not tridraft.{name}"
            if name.startswith("tridraft."):
                layer = name.split(".")[1]
                assert layer == folder or layer in LAYERS[folder], f"{path.name}:{node.lineno} imports {name}"


def test_modules_import_without_optional_packages_and_without_cuda():
    """The extras are needed to load checkpoints, not to import; importing touches no device."""
    names = [f"tridraft.{path.parent.name}.{path.stem}" for path in MODULES]
    code = (
        "import sys, importlib\n"
        "for name in ('transformers', 'safetensors', 'tqdm', 'scipy', 'matplotlib'): sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "import torch; print(torch.cuda.is_initialized())"
    )
    assert fresh(code) == "False"


def test_wheel_holds_every_module(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"tridraft/{path.parent.name}/{path.name}" for path in MODULES}
    expected |= {"tridraft/__init__.py", "tridraft/__main__.py", "tridraft/py.typed"}
    assert not expected - held
    assert not [name for name in held if not name.startswith(("tridraft/", "tridraft-"))]
