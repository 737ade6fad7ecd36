"""model.weights.fresh: GPT-2's own initial deviations, measured over full tables."""

import pytest
import torch

from model.config import SIZES, GPT2Config
from model.errors import SourceNotFound
from model.weights.checkpoint import expected_shapes
from model.weights.fresh import fresh_checkpoint, load_fresh


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    config = GPT2Config(n_layer=1)  # the widths of gpt2 itself
    return dict(fresh_checkpoint(config, source="test").tensors)


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("wte.weight", 0.02),
        ("wpe.weight", 0.01),
        ("h.0.attn.c_attn.weight", 0.02),
        ("h.0.attn.c_proj.weight", 0.02),
        ("h.0.mlp.c_fc.weight", 0.02),
        ("h.0.mlp.c_proj.weight", 0.02),
    ],
)
def test_initial_deviations(tensors: dict[str, torch.Tensor], name: str, deviation: float) -> None:
    assert tensors[name].std().item() == pytest.approx(deviation, rel=0.005)
    assert tensors[name].mean().item() == pytest.approx(0.0, abs=deviation / 100)


def test_biases_are_0_and_gains_1(tensors: dict[str, torch.Tensor]) -> None:
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    gains = [tensor for name, tensor in tensors.items() if "ln_" in name and "weight" in name]

    assert len(biases) == 7
    assert len(gains) == 3
    assert all((bias == 0).all() for bias in biases)
    assert all((gain == 1).all() for gain in gains)


def test_every_tensor_is_there_in_order() -> None:
    checkpoint = load_fresh("random:tiny")

    assert {n: tuple(t.shape) for n, t in checkpoint.tensors.items()} == expected_shapes(
        SIZES["tiny"]
    )
    assert list(checkpoint.tensors) == list(expected_shapes(SIZES["tiny"]))
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.float32}
    assert checkpoint.source == "random:tiny"


def test_a_size_is_the_same_model_on_every_start() -> None:
    other = fresh_checkpoint(SIZES["tiny"], source="random:tiny", seed=1)

    assert load_fresh("random:tiny").fingerprint == load_fresh("random:tiny").fingerprint
    assert load_fresh("random:tiny").fingerprint != other.fingerprint


@pytest.mark.parametrize("source", ["random:", "random:gpt3", "random:TINY"])
def test_an_unknown_size_is_refused_with_the_sizes(source: str) -> None:
    with pytest.raises(SourceNotFound, match="gpt2, gpt2-medium, gpt2-large, gpt2-xl, tiny"):
        load_fresh(source)
