"""Weights as the model takes them: every tensor present, of the right shape, float32 and its own.

Canonical names are those of `openai-community/gpt2` on the hub, which follow openai/gpt-2's
attribute names: no `transformer.` in front, dense weights `[in, out]` (Conv1D). Loading is strict:
what does not fit is refused by name, never passed over. Runs once, before the model thread starts.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from model.config import GPT2Config
from model.errors import (
    CorruptWeights,
    MissingTensor,
    NonFiniteTensor,
    UnknownTensor,
    UnsupportedDtype,
    UntiedOutput,
    WrongShape,
)

Shape = tuple[int, ...]
Progress = Callable[[str, float], None]  # what is being done, and the fraction of it done

_PREFIX = "transformer."
_OUTPUT = "lm_head.weight"
_BUFFER = re.compile(r"h\.[0-9]+\.attn\.(masked_)?bias")  # causal masks that old exports carry
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TensorFiles(Protocol):
    """Tensors on disk, known by shape before any is read."""

    @property
    def path(self) -> str:
        """What to name in an error."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor, by its name in the files."""

    def read(self, name: str) -> Tensor:
        """One tensor. It may share memory with the file."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One model's weights. `tensors` are float32 and contiguous, in canonical order."""

    config: GPT2Config
    tensors: Mapping[str, Tensor]
    source: str

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the configuration and every weight: equal only for the same model."""
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        with ThreadPoolExecutor() as pool:
            for name, part in zip(
                self.tensors, pool.map(_digest, self.tensors.values()), strict=True
            ):
                digest.update(name.encode() + b"\0" + part)
        return digest.hexdigest()


def expected_shapes(config: GPT2Config) -> dict[str, Shape]:
    """Shape of every tensor of a model, in canonical order."""
    width = config.n_embd
    shapes: dict[str, Shape] = {
        "wte.weight": (config.n_vocab, width),
        "wpe.weight": (config.n_ctx, width),
    }
    for layer in range(config.n_layer):
        for name, shape in _block_shapes(width).items():
            shapes[f"h.{layer}.{name}"] = shape
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def assemble(
    config: GPT2Config, files: TensorFiles, *, source: str, progress: Progress | None = None
) -> Checkpoint:
    """Read every tensor of `config` from `files`; nothing may be missing or left over.

    An `lm_head.weight` is accepted where it equals `wte.weight` and refused otherwise. Half and
    double types become float32. Names, shapes and dtypes are checked before the bulk is read.

    Raises:
        WeightsError: the subclass and message name the tensor.
    """
    names = _canonical_names(files)
    shapes = {name: files.shapes[in_file] for name, in_file in names.items()}
    expected = expected_shapes(config)
    check_shapes(shapes, expected)
    tensors: dict[str, Tensor] = {}
    for done, name in enumerate(expected):
        tensors[name] = _own_float32(name, files.read(names[name]))
        if progress:
            progress("reading weights", (done + 1) / len(expected))
    if _OUTPUT in names:
        _check_tied(files.read(names[_OUTPUT]), tensors["wte.weight"])
    return Checkpoint(config, tensors, source)


def check_shapes(shapes: Mapping[str, Sequence[int]], expected: Mapping[str, Shape]) -> None:
    """Refuse the first tensor that is missing, of another shape, or unknown.

    Raises:
        MissingTensor, WrongShape, UnknownTensor: naming it.
    """
    for name, shape in expected.items():
        if name not in shapes:
            raise MissingTensor(name, shape=shape)
        if tuple(shapes[name]) != shape:
            raise WrongShape(name, shape=shapes[name], expected=shape)
    for name, unknown in shapes.items():
        if name not in expected and name != _OUTPUT:
            raise UnknownTensor(name, shape=unknown)


def _block_shapes(width: int) -> dict[str, Shape]:
    return {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }


def _canonical_names(files: TensorFiles) -> dict[str, str]:
    """Canonical name to name in the file, without the buffers."""
    names: dict[str, str] = {}
    for in_file in files.shapes:
        name = in_file.removeprefix(_PREFIX)
        if _BUFFER.fullmatch(name):
            continue
        if name in names:
            raise CorruptWeights(files.path, reason=f"{in_file} and {names[name]} are one tensor")
        names[name] = in_file
    return names


def _own_float32(name: str, tensor: Tensor) -> Tensor:
    """A float32 copy in memory of its own: a mapped file may change under a running server."""
    if tensor.dtype not in _FLOATS:
        raise UnsupportedDtype(name, str(tensor.dtype).removeprefix("torch."))
    own = torch.empty(tensor.shape, dtype=torch.float32).copy_(tensor)
    low, high = own.aminmax()  # one pass, no mask the size of the tensor; NaN propagates
    if not (low.isfinite() and high.isfinite()):
        raise NonFiniteTensor(name)
    return own


def _check_tied(output: Tensor, wte: Tensor) -> None:
    if output.shape != wte.shape or not torch.equal(_own_float32(_OUTPUT, output), wte):
        raise UntiedOutput


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(tensor.reshape(-1).numpy().data).digest()
