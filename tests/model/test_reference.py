"""tests.reference against `transformers`: the oracle's oracle."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from model.config import SIZES, GPT2Config
from model.weights.checkpoint import Checkpoint
from model.weights.huggingface import load_huggingface
from tests.agreement import assert_agrees, assert_same_greedy
from tests.lively import SMALL, in_transformers, lively_checkpoint, save_lively
from tests.reference import reference_logits, reference_points

CONFIGS = [
    SMALL,
    GPT2Config(n_ctx=40, n_embd=24, n_layer=1, n_head=1),
    GPT2Config(n_ctx=64, n_embd=48, n_layer=3, n_head=4, layer_norm_epsilon=1e-3),
    GPT2Config(n_ctx=64, n_embd=64, n_layer=4, n_head=8),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def ids_of(n: int, seed: int = 11) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, 50257, (n,), generator=generator).tolist()
    return ids


def theirs_of(directory: Path, dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    model: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(
        directory, attn_implementation="eager", dtype=dtype
    )
    return model


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.n_embd}x{config.n_layer}")
def test_every_point_agrees_with_transformers(config: GPT2Config, tmp_path: Path) -> None:
    checkpoint = save_lively(tmp_path, config)
    ids = ids_of(config.n_ctx)

    output = theirs_of(tmp_path)(torch.tensor([ids]), output_hidden_states=True, use_cache=True)
    points = reference_points(checkpoint, ids)

    for layer, hidden in enumerate(output.hidden_states):
        name = f"resid_pre.{layer}" if layer < config.n_layer else "ln_f"
        assert_agrees(points[name], hidden[0], what=name)
    for layer, cached in enumerate(output.past_key_values.layers):
        assert_agrees(points[f"k.{layer}"].transpose(0, 1), cached.keys[0], what=f"k.{layer}")
        assert_agrees(points[f"v.{layer}"].transpose(0, 1), cached.values[0], what=f"v.{layer}")
    assert_agrees(points["logits"], output.logits[0], what="logits")
    assert_same_greedy(points["logits"], output.logits[0])


def test_w02_logits_are_ln_f_times_the_token_table(tmp_path: Path) -> None:
    """Saved files carry no lm_head; the output is tied."""
    checkpoint = save_lively(tmp_path)
    points = reference_points(checkpoint, ids_of(8))

    assert torch.equal(points["logits"], points["ln_f"] @ checkpoint.tensors["wte.weight"].T)
    assert_agrees(points["logits"], theirs_of(tmp_path)(torch.tensor([ids_of(8)])).logits[0])


def test_the_full_gpt2_shape_agrees_with_transformers() -> None:
    checkpoint = lively_checkpoint(SIZES["gpt2"])
    ids = ids_of(12)

    logits = reference_logits(checkpoint, ids)

    expected = in_transformers(checkpoint)(torch.tensor([ids])).logits[0]
    assert_agrees(logits, expected)
    assert_same_greedy(logits, expected)


def test_a_giant_entry_at_position_0_agrees_too(tmp_path: Path) -> None:
    """Trained GPT-2 has entries near 3,000 at the first position."""
    save_lively(tmp_path)
    theirs = theirs_of(tmp_path)
    theirs.transformer.wpe.weight[0, 7] = 3000.0
    theirs.save_pretrained(tmp_path)
    checkpoint = load_huggingface(tmp_path, source="giant")

    points = reference_points(checkpoint, ids_of(20))
    output = theirs(torch.tensor([ids_of(20)]), output_hidden_states=True)

    assert points["embedding"][0].max() > 2999
    assert_agrees(points["resid_pre.1"], output.hidden_states[1][0])
    assert_agrees(points["logits"], output.logits[0])


def test_positions_decide() -> None:
    """The comparison above would see a twin that restarts positions at 0."""
    checkpoint = lively_checkpoint()
    right, restarted = (
        reference_logits(checkpoint, ids_of(6), positions=positions)
        for positions in (None, [0, 1, 2, 3, 0, 0])
    )

    assert_agrees(restarted[:4], right[:4])
    with pytest.raises(AssertionError):
        assert_agrees(restarted[4:], right[4:])


def test_w06_half_weights_agree_within_tolerance(tmp_path: Path) -> None:
    """Half files are computed in float32, from the rounded numbers that they hold."""
    for dtype in (torch.float16, torch.bfloat16):
        save_lively(tmp_path)
        theirs_of(tmp_path, dtype).save_pretrained(tmp_path)
        checkpoint = load_huggingface(tmp_path, source="half")

        expected = theirs_of(tmp_path)(torch.tensor([ids_of(10)])).logits[0]
        assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.float32}
        assert_agrees(reference_logits(checkpoint, ids_of(10)), expected)


def test_one_weight_matters() -> None:
    checkpoint = lively_checkpoint()
    changed = _with(checkpoint, "h.1.attn.c_attn.bias", checkpoint.tensors["ln_f.bias"].repeat(3))

    with pytest.raises(AssertionError):
        assert_agrees(*(reference_logits(each, ids_of(5)) for each in (changed, checkpoint)))


def _with(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Checkpoint:
    return replace(checkpoint, tensors={**checkpoint.tensors, name: tensor})
