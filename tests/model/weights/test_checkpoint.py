"""model.weights.checkpoint: strict keys, strict shapes, float32, one fingerprint per model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import SIZES
from model.errors import (
    CorruptWeights,
    MissingTensor,
    NonFiniteTensor,
    UnknownTensor,
    UnsupportedDtype,
    UntiedOutput,
    WrongShape,
)
from model.weights.checkpoint import Checkpoint, expected_shapes
from model.weights.huggingface import load_huggingface
from tests.lively import lively_checkpoint
from tests.model.weights.saved import (
    SIX_LAYERS,
    Tensors,
    noise,
    reconfigure,
    respoil,
    save,
)


def load(directory: Path) -> Checkpoint:
    return load_huggingface(directory, source="test")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def test_what_is_loaded_is_what_was_saved(saved: Path) -> None:
    loaded, expected = load(saved), lively_checkpoint(SIX_LAYERS)

    assert loaded.config == SIX_LAYERS
    assert list(loaded.tensors) == list(expected_shapes(SIX_LAYERS))
    assert all(torch.equal(loaded.tensors[name], expected.tensors[name]) for name in loaded.tensors)


def test_the_shapes_hold_every_parameter() -> None:
    for config in SIZES.values():
        sizes = [torch.Size(shape).numel() for shape in expected_shapes(config).values()]
        assert sum(sizes) == config.n_params


def test_w04_a_missing_tensor_is_refused_by_name(saved: Path) -> None:
    respoil(saved, lambda tensors: tensors.pop("transformer.h.5.mlp.c_fc.weight"))

    with pytest.raises(MissingTensor, match=r"h\.5\.mlp\.c_fc\.weight of shape \[4, 16\]"):
        load(saved)


def test_w04_both_prefixes_load(saved: Path) -> None:
    with_prefix = load(saved)
    respoil(saved, lambda tensors: rename(tensors, lambda name: name.removeprefix("transformer.")))

    assert load(saved).fingerprint == with_prefix.fingerprint


@pytest.mark.parametrize("name", ["h.5.attn.rotary", "score.weight", "transformer.h.6.ln_1.bias"])
def test_w04_an_unknown_tensor_is_refused_by_name(saved: Path, name: str) -> None:
    respoil(saved, lambda tensors: tensors.update({name: noise(4)}))

    with pytest.raises(UnknownTensor, match=name.removeprefix("transformer.")):
        load(saved)


def test_w04_a_misspelt_prefix_is_refused(saved: Path) -> None:
    respoil(saved, lambda tensors: rename(tensors, lambda name: f"model.{name}"))

    with pytest.raises(MissingTensor, match="wte"):
        load(saved)


def test_w04_one_tensor_under_both_prefixes_is_refused(saved: Path) -> None:
    respoil(saved, lambda tensors: tensors.update({"ln_f.bias": noise(4)}))

    with pytest.raises(CorruptWeights, match=r"ln_f\.bias"):
        load(saved)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_the_mask_buffers_are_passed_over(saved: Path, prefix: str) -> None:
    def add(tensors: Tensors) -> None:
        for layer in range(6):
            tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
            tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    before = load(saved).fingerprint
    respoil(saved, add)

    assert load(saved).fingerprint == before


def test_the_attention_bias_is_no_buffer(saved: Path) -> None:
    respoil(saved, lambda tensors: tensors.pop("transformer.h.0.attn.c_attn.bias"))

    with pytest.raises(MissingTensor, match=r"h\.0\.attn\.c_attn\.bias"):
        load(saved)


def test_w02_an_output_equal_to_the_token_table_is_accepted(saved: Path) -> None:
    respoil(
        saved,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["transformer.wte.weight"].clone()}
        ),
    )

    assert "lm_head.weight" not in load(saved).tensors


def test_w02_another_output_is_refused(saved: Path) -> None:
    def untie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        tensors["lm_head.weight"][50256, 3] += 1e-6

    respoil(saved, untie)

    with pytest.raises(UntiedOutput, match=r"lm_head\.weight differs from wte\.weight"):
        load(saved)


def test_w02_an_output_of_another_shape_is_refused(saved: Path) -> None:
    respoil(saved, lambda tensors: tensors.update({"lm_head.weight": noise(50256, 4)}))

    with pytest.raises(UntiedOutput):
        load(saved)


def test_w05_more_layers_in_the_file_than_in_the_configuration(saved: Path) -> None:
    reconfigure(saved, n_layer=3)

    with pytest.raises(UnknownTensor, match=r"h\.[345]\."):
        load(saved)


def test_w05_fewer_layers_in_the_file(saved: Path) -> None:
    reconfigure(saved, n_layer=12)

    with pytest.raises(MissingTensor, match=r"h\.6\.ln_1\.weight of shape \[4\]"):
        load(saved)


def test_w05_n_ctx_is_never_above_the_position_rows(saved: Path) -> None:
    reconfigure(saved, n_positions=1024)

    with pytest.raises(WrongShape, match=r"wpe\.weight has shape \[16, 4\].*\[1024, 4\]") as caught:
        load(saved)
    assert (caught.value.name, caught.value.shape) == ("wpe.weight", (16, 4))


def test_w05_a_transposed_dense_weight_is_refused(saved: Path) -> None:
    name = "transformer.h.2.mlp.c_fc.weight"
    respoil(saved, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))

    with pytest.raises(WrongShape, match=r"\[16, 4\].*\[4, 16\]"):
        load(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(saved: Path, value: float) -> None:
    respoil(saved, lambda tensors: tensors["transformer.h.1.ln_2.bias"].__setitem__(2, value))

    with pytest.raises(NonFiniteTensor, match=r"h\.1\.ln_2\.bias"):
        load(saved)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(saved: Path, dtype: torch.dtype) -> None:
    name = "transformer.h.0.mlp.c_proj.weight"
    respoil(saved, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))

    with pytest.raises(UnsupportedDtype, match=r"h\.0\.mlp\.c_proj\.weight.*(int|float8)"):
        load(saved)


def test_the_tensors_are_our_own_and_not_the_files(saved: Path) -> None:
    checkpoint = load(saved)
    before = checkpoint.tensors["wte.weight"].clone()
    data = bytearray((saved / "model.safetensors").read_bytes())
    with (saved / "model.safetensors").open("r+b") as file:
        file.write(bytes(len(data)))

    assert torch.equal(checkpoint.tensors["wte.weight"], before)
    assert all(tensor.is_contiguous() for tensor in checkpoint.tensors.values())


def test_the_fingerprint_tells_models_apart() -> None:
    checkpoint = lively_checkpoint(SIX_LAYERS)
    changed = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    changed["h.5.ln_2.bias"][3] = torch.nextafter(changed["h.5.ln_2.bias"][3], torch.tensor(9.0))
    others = [
        replace(checkpoint, tensors=changed),
        replace(checkpoint, config=replace(SIX_LAYERS, n_head=4)),
        replace(checkpoint, config=replace(SIX_LAYERS, layer_norm_epsilon=1e-6)),
    ]

    assert len({other.fingerprint for other in [checkpoint, *others]}) == 4
    assert replace(checkpoint, source="elsewhere").fingerprint == checkpoint.fingerprint


def test_progress_ends_at_one(saved: Path) -> None:
    told: list[tuple[str, float]] = []
    load_huggingface(saved, source="test", progress=lambda *what: told.append(what))

    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def rename(tensors: Tensors, new: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[new(name)] = tensors.pop(name)
