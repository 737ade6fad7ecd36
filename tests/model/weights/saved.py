"""Small model directories as `transformers` writes them, and ways to spoil them."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.config import GPT2Config
from tests.lively import save_lively

SIX_LAYERS = GPT2Config(n_ctx=16, n_embd=4, n_layer=6, n_head=2)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, Tensor]


def save(directory: Path, config: GPT2Config = SIX_LAYERS) -> Tensors:
    """A whole model; returns its tensors as the file names them."""
    directory.mkdir(exist_ok=True)
    for name, data in _files(config).items():
        (directory / name).write_bytes(data)
    return dict(load_file(directory / SINGLE))


@cache
def _files(config: GPT2Config) -> dict[str, bytes]:
    """What `transformers` writes for it, written once."""
    with TemporaryDirectory() as directory:
        save_lively(Path(directory), config)
        return {name: (Path(directory) / name).read_bytes() for name in ("config.json", SINGLE)}


def respoil(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite a model's file after `change` was made to its tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / SINGLE).items()}
    change(tensors)
    save_file(tensors, directory / SINGLE)


def reconfigure(directory: Path, **keys: object) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def save_shards(directory: Path, shards: Mapping[str, Tensors]) -> None:
    """Replace the single file by shards and their index."""
    (directory / SINGLE).unlink()
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def halves(tensors: Tensors) -> dict[str, Tensors]:
    """The tensors in two shards."""
    names = sorted(tensors)
    middle = len(names) // 2
    return {
        f"model-0000{number}-of-00002.safetensors": {name: tensors[name] for name in part}
        for number, part in ((1, names[:middle]), (2, names[middle:]))
    }


def noise(*shape: int) -> Tensor:
    """Some tensor."""
    return torch.randn(shape)
