"""Reading a checkpoint directory in the Hub's format: configuration files and safetensors, streamed.

A model says where each checkpoint tensor belongs by naming destinations, tensors that are filled in place. Two
checkpoint tensors that the model holds fused are two views of one destination.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoadReport:
    """What did not fit while a model was filled, by checkpoint name.

    Attributes:
        missing: tensors the model needs and the checkpoint lacks.
        misshapen: tensors of another shape, with both shapes.
        unexpected: tensors the model has no place for; they are ignored.
        absent: optional tensors the checkpoint lacks.
    """

    missing: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def raise_unless_complete(self) -> None:
        """Refuse a checkpoint with missing or misshapen tensors.

        Raises:
            ValueError: names every one of them, and the unexpected ones, which are often the same misspelt.
        """
        if not self.missing and not self.misshapen:
            return
        faults = [("missing", self.missing), ("misshapen", self.misshapen), ("unexpected", self.unexpected)]
        found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in faults if names)
        raise ValueError(f"the checkpoint does not fit the model; {found}")

    def raise_unless_exact(self) -> None:
        """Refuse a checkpoint with unexpected tensors too: a head of another architecture drafts badly, not loudly.

        Raises:
            ValueError: names every missing, misshapen and unexpected tensor.
        """
        self.raise_unless_complete()
        if self.unexpected:
            raise ValueError(f"the checkpoint does not fit the model; unexpected: {', '.join(self.unexpected)}")


def read_json(directory: str | Path, name: str, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in `directory/name`; an absent file that is not required reads as an empty one.

    Raises:
        FileNotFoundError: no such directory, or no such file in it.
        ValueError: the file is not a JSON object.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such directory; give the directory of a downloaded checkpoint")
    path = directory / name
    if not path.is_file():
        if required:
            raise FileNotFoundError(f"{path}: no such file; {directory} is not a checkpoint in the Hub's format")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a JSON {type(content).__name__}, needs an object")
    return content


def _weight_map(directory: Path) -> dict[str, str] | None:
    """The file of each tensor of a sharded checkpoint; None for one in a single file."""
    if not (directory / "model.safetensors.index.json").is_file():
        return None
    weight_map = read_json(directory, "model.safetensors.index.json").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
        raise ValueError(f"{directory / 'model.safetensors.index.json'}: needs a 'weight_map' that names files")
    return weight_map


def _safetensors_files(directory: Path, keep: Callable[[str], bool] | None) -> list[Path]:
    weight_map = _weight_map(directory)
    if weight_map is not None:
        names = {file for name, file in weight_map.items() if keep is None or keep(name)}
        files = [directory / name for name in sorted(names)]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(f"{directory}: the index names {', '.join(absent)}, not there; download again")
        return files
    if not (directory / "model.safetensors").is_file():
        raise FileNotFoundError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    return [directory / "model.safetensors"]


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"reading a checkpoint needs {error.name}: pip install 'tridraft[hf]'") from error
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a valid safetensors file ({error})") from error


def tensor_names(directory: str | Path) -> list[str]:
    """The names of the checkpoint's tensors; reads none of them.

    Raises:
        FileNotFoundError: no safetensors file.
        ValueError: the file is not valid safetensors, or the index names no files.
    """
    directory = Path(directory)
    weight_map = _weight_map(directory)
    if weight_map is not None:
        return list(weight_map)
    (path,) = _safetensors_files(directory, None)
    with _safe_open(path) as file:
        return list(file.keys())


def iterate_tensors(
    directory: str | Path, *, keep: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors, one at a time, on the CPU; a progress bar where stderr is a terminal.

    Args:
        directory: the checkpoint.
        keep: whether a tensor of this name is wanted; files without any are not opened. None wants all.

    Raises:
        FileNotFoundError: no safetensors file, or a shard that the index names is absent.
        ValueError: a file is not valid safetensors.
    """
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
        from tqdm import tqdm  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(f"reading a checkpoint needs {error.name}: pip install 'tridraft[hf]'") from error

    directory = Path(directory)
    files, weight_map = _safetensors_files(directory, keep), _weight_map(directory)
    show = sys.stderr.isatty()
    with tqdm(total=0, desc=f"loading {directory.name}", unit=" tensors", disable=not show) as bar:
        for count, path in enumerate(files, start=1):
            try:
                with _safe_open(path) as file:
                    names = [name for name in file.keys() if keep is None or keep(name)]  # noqa: SIM118 — no iterator
                    if weight_map is not None:  # a file may hold another one's tensor, left over from a conversion
                        names = [name for name in names if weight_map.get(name, path.name) == path.name]
                    bar.total += len(names)
                    bar.set_postfix_str(f"file {count} of {len(files)}", refresh=False)
                    for name in names:
                        yield name, file.get_tensor(name)
                        bar.update()
            except SafetensorError as error:  # noqa: PERF203 — names the file
                raise ValueError(f"{path}: not a valid safetensors file ({error})") from error


def fill(
    destinations: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    optional: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    merged: Mapping[str, Sequence[str]] | None = None,
) -> LoadReport:
    """Copy checkpoint tensors into their destinations, casting floats to the destination's dtype.

    Args:
        destinations: for each checkpoint name, the tensor it fills.
        tensors: the checkpoint, in any order.
        optional: names that the checkpoint may lack.
        tied: for each name that a checkpoint may repeat, the name of the destination it has to equal.
        merged: for each destination that a checkpoint may hold in parts instead, the names of the parts, which are
            destinations too.

    Raises:
        ValueError: a tied tensor differs from the one it is tied to.
    """
    tied = dict(tied or {})
    merged = merged or {}
    optional = set(optional)
    missing = set(destinations) - set(merged)
    misshapen, unexpected, repeated = [], [], {}
    for name, tensor in tensors:
        if name in tied:
            repeated[name] = tensor
            continue
        destination = destinations.get(name)
        if destination is None:
            unexpected.append(name)
            continue
        missing -= {name, *merged.get(name, ())}
        if destination.shape != tensor.shape:
            misshapen.append(f"{name} (got {list(tensor.shape)}, needs {list(destination.shape)})")
            continue
        if destination.is_floating_point() != tensor.is_floating_point():
            misshapen.append(f"{name} (got {tensor.dtype}, needs {destination.dtype})")
            continue
        destination.copy_(tensor)
    for name, tensor in repeated.items():
        original = destinations[tied[name]]
        if tied[name] in missing:
            continue
        if tensor.shape != original.shape or not torch.equal(tensor.to(original), original):
            raise ValueError(f"{name} differs from {tied[name]}; this model uses one tensor for both")
    return LoadReport(
        missing=tuple(sorted(missing - optional)),
        misshapen=tuple(misshapen),
        unexpected=tuple(unexpected),
        absent=tuple(sorted(missing & optional)),
    )
