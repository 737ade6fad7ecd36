"""Fresh weights, as GPT-2's training began: `random:<size>`.

The initialisers of openai/gpt-2 (`src/model.py`): wte N(0, 0.02^2), wpe N(0, 0.01^2), dense
weights N(0, 0.02^2), biases 0, layer norms 1 and 0. Seeded, so that a size is the same model on
every start. Such a model says nothing; it has every shape and cost of a trained one.
"""

import torch
from torch import Generator, Tensor

from embedding import tables
from model.config import SIZES, GPT2Config
from model.errors import SourceNotFound
from model.weights.checkpoint import Checkpoint, Progress, Shape, expected_shapes

DENSE_STD = 0.02
PREFIX = "random:"


def load_fresh(source: str, *, progress: Progress | None = None) -> Checkpoint:
    """The model that `random:<size>` names.

    Raises:
        SourceNotFound: there is no such size.
    """
    config = SIZES.get(source.removeprefix(PREFIX))
    if config is None:
        raise SourceNotFound(source, reason=f"the sizes are {', '.join(SIZES)}")
    return fresh_checkpoint(config, source=source, progress=progress)


def fresh_checkpoint(
    config: GPT2Config, *, source: str, seed: int = 0, progress: Progress | None = None
) -> Checkpoint:
    """Fresh weights of any configuration."""
    generator = Generator().manual_seed(seed)
    embedding = tables.fresh(
        n_vocab=config.n_vocab, n_ctx=config.n_ctx, n_embd=config.n_embd, generator=generator
    )
    tensors = {"wte.weight": embedding.wte, "wpe.weight": embedding.wpe}
    shapes = expected_shapes(config)
    for done, (name, shape) in enumerate(shapes.items()):
        if name not in tensors:
            tensors[name] = _initial(name, shape, generator)
        if progress:
            progress("drawing fresh weights", (done + 1) / len(shapes))
    return Checkpoint(config, tensors, source)


def _initial(name: str, shape: Shape, generator: Generator) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # a layer norm's gain
        return torch.ones(shape)
    return torch.empty(shape).normal_(0.0, DENSE_STD, generator=generator)
