"""What a model holds of its checkpoint, and the product that reads it last."""

from weakref import ref

import pytest

from model.gpt2 import GPT2
from model.weights.checkpoint import Checkpoint
from tests.agreement import assert_agrees
from tests.lively import SMALL, lively_checkpoint
from tests.reference import reference_points
from tests.stepping import Stepping


def matrices(checkpoint: Checkpoint) -> set[str]:
    return {name for name, x in checkpoint.tensors.items() if x.dim() == 2 and name[0] == "h"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_parameters_are_the_checkpoints_own_and_no_packed_matrix_is_kept_twice(dtype: str) -> None:
    checkpoint = lively_checkpoint(SMALL)
    model = Stepping(checkpoint, dtype=dtype, n_slots=1).model
    packed = set() if dtype == "float32" else matrices(checkpoint)
    assert set(model.parameters) == set(checkpoint.tensors) - packed
    assert all(model.parameters[name] is checkpoint.tensors[name] for name in model.parameters)
    alive = {name: ref(checkpoint.tensors[name]) for name in matrices(checkpoint)}
    del checkpoint
    assert {name for name, tensor in alive.items() if tensor() is None} == packed


def test_exact_mode_keeps_no_matrix_twice_either() -> None:
    checkpoint = lively_checkpoint(SMALL)
    buffers = Stepping(checkpoint, n_slots=1).cache.buffers
    model = GPT2(checkpoint, buffers, dtype="float32", max_tokens=1, batch_invariant=True)
    alive = [ref(checkpoint.tensors[name]) for name in matrices(checkpoint)]
    assert set(model.parameters) == set(checkpoint.tensors) - matrices(checkpoint)
    del checkpoint
    assert all(tensor() is None for tensor in alive)


def test_logits_of_cached_rows_and_of_others_are_one_product() -> None:
    checkpoint, ids = lively_checkpoint(SMALL), [5, 50256, 77, 0]
    steps = Stepping(checkpoint, n_slots=1)
    kv = steps.open()
    seen = steps.step(kv, ids)
    both = steps.model.logits([(kv, 1), (kv, 3)], seen["ln_f"][:2])
    assert both.shape == (4, 50257)
    assert_agrees(both, reference_points(checkpoint, ids)["logits"][[1, 3, 0, 1]])
    assert steps.model.logits([], seen["ln_f"][:1]).shape == (1, 50257)
