"""Weights by name: a tensor, or one row of it. Any thread: they are only read.

Names are the checkpoint's, `h.9.mlp.c_proj.weight[1007]` being row 1007; `wte` and `wpe` alone mean
their only tensor. Rows lie along the first axis: dense weights are [in, out].
"""

import difflib
import re

from torch import Tensor

from engine.protocol import Model
from model.weights.checkpoint import expected_shapes
from server.errors import InvalidRequest

_ROW = re.compile(r"(.*?)(?:\[([0-9]{1,9})\])?", re.ASCII | re.DOTALL)
_TABLES = {"wte": "wte.weight", "wpe": "wpe.weight"}
_LONGEST_NAME = 64


def parameter(model: Model, name: str) -> Tensor:
    """The tensor or the row of this name: a view of what the model computes with.

    Raises:
        InvalidRequest: the model has no such tensor or row, or only a packed form of it.
    """
    match = _ROW.fullmatch(name)
    assert match
    tensor = _tensor(model, _TABLES.get(match[1], match[1]))
    return tensor if match[2] is None else _row(tensor, int(match[2]), name)


def _tensor(model: Model, name: str) -> Tensor:
    tensor = model.parameters.get(name)
    if tensor is not None:
        return tensor
    known = expected_shapes(model.config)
    if name in known:
        raise InvalidRequest(
            f"the server keeps {name} only packed for its products: "
            "start it with --dtype float32 and without --batch-invariant"
        )
    near = difflib.get_close_matches(name[:_LONGEST_NAME], [*_TABLES, *known], n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise InvalidRequest(f"the model has no parameter {name[:80]!r}{hint}")


def _row(tensor: Tensor, index: int, name: str) -> Tensor:
    if tensor.ndim == 1:
        raise InvalidRequest(f"{name} is no row: that parameter is a vector")
    if index >= len(tensor):
        raise InvalidRequest(f"{name} is no row: there are rows 0 to {len(tensor) - 1}")
    return tensor[index]
