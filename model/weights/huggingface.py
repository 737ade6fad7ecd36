"""Weights in Hugging Face's layout: `config.json` and safetensors, in one file or in shards.

A pickle is never opened, whatever it is called. Shards must be complete and must not overlap.
Format: https://huggingface.co/docs/safetensors (a length, a JSON header, the bytes).
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import from_huggingface
from model.errors import CorruptWeights, SourceNotFound, UnsafeFormat
from model.weights.checkpoint import Checkpoint, Progress, Shape, assemble

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))


def load_huggingface(
    directory: Path, *, source: str, progress: Progress | None = None
) -> Checkpoint:
    """The model in a directory.

    Raises:
        ConfigError: the configuration is not GPT-2's.
        WeightsError: the files do not hold exactly the configuration's tensors, or are pickles.
    """
    config = from_huggingface(read_json(directory / CONFIG))
    files = SafetensorsFiles(directory)
    return assemble(config, files, source=source, progress=progress)


def read_json(path: Path) -> Mapping[str, object]:
    """A JSON object in a file.

    Raises:
        CorruptWeights: it is something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptWeights(str(path), reason=f"is no readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptWeights(str(path), reason="holds no JSON object")
    return value


class SafetensorsFiles:
    """The tensors of a directory's safetensors file or files (a `TensorFiles`)."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        index = _index(directory)
        for path in _shards(directory, index):
            self._add(path)
        if index is not None and set(index) != set(self._file_of):
            odd = min(set(index) ^ set(self._file_of))
            raise CorruptWeights(
                str(directory / INDEX), reason=f"disagrees with its files on {odd}"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, mapped from its file."""
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def _add(self, path: Path) -> None:
        for name, shape in _read_shapes(path).items():
            if name in self._file_of:
                raise CorruptWeights(self.path, reason=f"{name} is in more than one file")
            self._file_of[name], self.shapes[name] = path, shape


def _index(directory: Path) -> Mapping[str, object] | None:
    """Tensor name to file name where the weights come in shards."""
    if (directory / SINGLE).exists() or not (directory / INDEX).exists():
        return None
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptWeights(str(directory / INDEX), reason="has no weight_map")
    return weight_map


def _shards(directory: Path, index: Mapping[str, object] | None) -> list[Path]:
    if index is not None:
        return [_shard(directory, name) for name in dict.fromkeys(index.values())]
    if not (directory / SINGLE).exists():
        for pattern in _PICKLES:
            for path in sorted(directory.glob(pattern)):
                raise UnsafeFormat(str(path))
        raise SourceNotFound(str(directory), reason=f"it has neither {SINGLE} nor {INDEX}")
    return [directory / SINGLE]


def _shard(directory: Path, name: object) -> Path:
    """A shard named by the index: a file beside it, never a path that leads elsewhere."""
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        raise CorruptWeights(str(directory / INDEX), reason=f"{name!r} is no file name")
    if not (directory / name).is_file():
        raise CorruptWeights(str(directory / INDEX), reason=f"shard {name} is missing")
    return directory / name


def _read_shapes(path: Path) -> dict[str, Shape]:
    """Shapes from the header; the library checks that header and length fit the file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    except (SafetensorError, OSError) as error:
        if _is_pickle(path):
            raise UnsafeFormat(str(path)) from error
        raise CorruptWeights(str(path), reason=f"is no whole safetensors file: {error}") from error


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLE_STARTS)
