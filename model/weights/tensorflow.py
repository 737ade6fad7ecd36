"""OpenAI's own checkpoints: `hparams.json`, `checkpoint` and a TensorFlow bundle.

Names and shapes as openai/gpt-2 `src/model.py` creates them: `model/h0/attn/c_attn/w` [1, in, out]
is a convolution of width 1, `g` and `b` a layer norm's gain and bias.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from model.config import from_openai
from model.errors import CorruptWeights
from model.weights.bundle import Bundle
from model.weights.checkpoint import Checkpoint, Progress, Shape, assemble
from model.weights.huggingface import read_json

HPARAMS = "hparams.json"

_LEAVES = {"w": "weight", "g": "weight", "b": "bias"}
_LATEST = re.compile(r'^model_checkpoint_path: "([^"]+)"', re.MULTILINE)


def load_tensorflow(
    directory: Path, *, source: str, progress: Progress | None = None
) -> Checkpoint:
    """The model in a directory.

    Raises:
        ConfigError: `hparams.json` is not GPT-2's.
        WeightsError: the bundle does not hold exactly the configuration's tensors.
    """
    config = from_openai(read_json(directory / HPARAMS))
    return assemble(config, BundleFiles(directory), source=source, progress=progress)


class BundleFiles:
    """The tensors of a directory's latest bundle by canonical name (a `TensorFiles`)."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory)
        self._bundle = Bundle(_latest(directory))
        self._names = {_canonical(name): name for name in self._bundle.entries}
        self.shapes: dict[str, Shape] = {
            ours: _without_one(theirs, self._bundle.entries[theirs].shape)
            for ours, theirs in self._names.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor, its checksum verified."""
        return torch.from_numpy(self._bundle.read(self._names[name]).reshape(self.shapes[name]))


def _latest(directory: Path) -> Path:
    """The prefix that the `checkpoint` file names; its folder may be one of another machine."""
    path = directory / "checkpoint"
    try:
        match = _LATEST.search(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptWeights(str(path), reason=f"cannot be read: {error}") from error
    if not match:
        raise CorruptWeights(str(path), reason="names no model_checkpoint_path")
    return directory / Path(match[1]).name


def _canonical(name: str) -> str:
    """`model/h0/ln_1/g` to `h.0.ln_1.weight`; an unknown name stays as it is."""
    *stem, leaf = name.removeprefix("model/").split("/")
    if not stem and leaf in ("wte", "wpe"):
        return f"{leaf}.weight"
    if not stem or leaf not in _LEAVES:
        return name
    return re.sub(r"^h([0-9]+)\.", r"h.\1.", ".".join([*stem, _LEAVES[leaf]]))


def _without_one(name: str, shape: Shape) -> Shape:
    """A dense weight without the convolution's width."""
    return shape[1:] if name.endswith("/w") and shape[:1] == (1,) else shape
