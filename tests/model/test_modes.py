"""Every precision with every type of K/V: near to float32, and the same in any company."""

import random

import numpy as np
import pytest

from model.batch import Floats
from model.config import GPT2Config
from model.gpt2 import KV_DTYPES
from model.precision.modes import PRECISIONS
from tests.lively import lively_checkpoint
from tests.reference import reference_points
from tests.stepping import Stepping

LIVELY = lively_checkpoint(GPT2Config(n_ctx=128, n_embd=64, n_layer=3, n_head=4))
HISTORY = random.Random(3).choices(range(50256), k=100)
RIGHT = reference_points(LIVELY, HISTORY)["logits"].numpy()
MODES = [(dtype, kv_dtype) for dtype in PRECISIONS for kv_dtype in KV_DTYPES]
# Of the spread of a row's logits: what docs/deploy.md says of the default and allows the others.
ALLOWED = {"float32": 0.02, "bfloat16": 0.03, "int8": 0.08}


def logits(dtype: str, kv_dtype: str, *, chunk: int, n_mates: int = 0) -> Floats:
    """Logits at every position, stepped in chunks beside mates of other lengths."""
    steps = Stepping(LIVELY, dtype=dtype, kv_dtype=kv_dtype)
    kv = steps.open()
    mates = [steps.opened(HISTORY[: 5 * i + 1]) for i in range(n_mates)]
    for i in range(0, len(HISTORY), chunk):
        steps.batch([(kv, HISTORY[i : i + chunk]), *[(mate, [i]) for mate in mates]])
    return np.concatenate([steps.logits(kv, p)[None] for p in range(len(HISTORY))])


@pytest.mark.parametrize(("dtype", "kv_dtype"), MODES)
@pytest.mark.parametrize("chunk", [1, 40])
def test_near_to_float32(dtype: str, kv_dtype: str, chunk: int) -> None:
    difference = logits(dtype, kv_dtype, chunk=chunk) - RIGHT
    error = np.sqrt((difference**2).mean(axis=1)) / RIGHT.std(axis=1)
    assert error.mean() < (1e-5 if (dtype, kv_dtype) == ("float32", "float32") else ALLOWED[dtype])


@pytest.mark.parametrize(("dtype", "kv_dtype"), MODES)
def test_b01_ids_do_not_depend_on_mates_where_the_choice_is_clear(
    dtype: str, kv_dtype: str
) -> None:
    alone = logits(dtype, kv_dtype, chunk=25)
    beside = logits(dtype, kv_dtype, chunk=25, n_mates=7)
    difference = np.abs(alone - beside).max(axis=1)
    second, first = np.sort(alone, axis=1)[:, -2:].T
    clear = first - second > 2 * difference
    assert clear.mean() > 0.8
    assert np.array_equal(alone.argmax(axis=1)[clear], beside.argmax(axis=1)[clear])
