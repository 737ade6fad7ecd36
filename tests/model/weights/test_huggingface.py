"""model.weights.huggingface: files, shards, half types, and pickles that are never opened."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from model.errors import CorruptWeights, ModelError, SourceNotFound, UnsafeFormat
from model.weights.huggingface import load_huggingface
from tests.model.weights.saved import INDEX, SINGLE, halves, respoil, save, save_shards


def fingerprint(directory: Path) -> str:
    return load_huggingface(directory, source="test").fingerprint


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_w06_half_and_double_files_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = save(tmp_path)
    respoil(tmp_path, lambda file: file.update({k: v.to(dtype) for k, v in file.items()}))

    loaded = load_huggingface(tmp_path, source="test").tensors

    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tensors[f"transformer.{name}"].to(dtype).float())


def test_w06_shards_are_one_model(tmp_path: Path) -> None:
    tensors = save(tmp_path)
    whole = fingerprint(tmp_path)
    save_shards(tmp_path, halves(tensors))

    assert fingerprint(tmp_path) == whole


def test_w06_a_missing_shard_is_refused(tmp_path: Path) -> None:
    save_shards(tmp_path, halves(save(tmp_path)))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(CorruptWeights, match=r"shard model-00002-of-00002\.safetensors is missing"):
        fingerprint(tmp_path)


def test_w06_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    first, second = halves(save(tmp_path)).items()
    second[1]["transformer.h.0.attn.c_attn.bias"] = torch.zeros(12)
    save_shards(tmp_path, dict([first, second]))

    with pytest.raises(CorruptWeights, match=r"h\.0\.attn\.c_attn\.bias is in more than one"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("change", ["index has more", "file has more"])
def test_w06_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path, change: str) -> None:
    save_shards(tmp_path, halves(save(tmp_path)))
    index = json.loads((tmp_path / INDEX).read_text())
    if change == "index has more":
        index["weight_map"]["h.9.odd"] = "model-00001-of-00002.safetensors"
    else:
        del index["weight_map"]["transformer.ln_f.bias"]
    (tmp_path / INDEX).write_text(json.dumps(index))

    with pytest.raises(CorruptWeights, match=r"disagrees with its files on (h\.9\.odd|.*ln_f)"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 2000, -1])
def test_w06_a_cut_file_is_refused(tmp_path: Path, cut: int) -> None:
    save(tmp_path)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:cut])

    with pytest.raises(CorruptWeights, match="no whole safetensors file"):
        fingerprint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b", "", ".", 5, "a\0b"]
)
def test_an_index_leads_nowhere_else(tmp_path: Path, name: object) -> None:
    model = tmp_path / "model"
    tensors = save(model)
    save_file(tensors, tmp_path / "secret.safetensors")
    (model / SINGLE).unlink()
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))

    with pytest.raises(CorruptWeights):
        fingerprint(model)


class Payload:
    """Unpickling this touches a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_q03_a_directory_with_only_a_pickle_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path)
    (tmp_path / SINGLE).unlink()
    with (tmp_path / name).open("wb") as file:
        torch.save(Payload(tmp_path / "touched"), file)

    with pytest.raises(UnsafeFormat, match=f"{name} is a pickle"):
        fingerprint(tmp_path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", [SINGLE, "model-00001-of-00002.safetensors"])
def test_q03_a_renamed_pickle_is_refused(tmp_path: Path, name: str, protocol: int) -> None:
    save_shards(tmp_path, halves(save(tmp_path)))
    (tmp_path / name).write_bytes(pickle.dumps(Payload(tmp_path / "touched"), protocol=protocol))

    refusal = UnsafeFormat if protocol >= 2 else CorruptWeights  # older ones bear no mark
    with pytest.raises(refusal):
        fingerprint(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_q03_a_renamed_torch_archive_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    torch.save(Payload(tmp_path / "touched"), tmp_path / SINGLE)

    with pytest.raises(UnsafeFormat):
        fingerprint(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_safetensors_beside_a_pickle_are_read_and_the_pickle_is_not(tmp_path: Path) -> None:
    save(tmp_path)
    torch.save(Payload(tmp_path / "touched"), tmp_path / "pytorch_model.bin")

    assert fingerprint(tmp_path)
    assert not (tmp_path / "touched").exists()


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / SINGLE).unlink()

    with pytest.raises(SourceNotFound, match=r"neither model\.safetensors nor"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\xff", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_broken_json_is_refused(tmp_path: Path, name: str, text: str) -> None:
    save_shards(tmp_path, halves(save(tmp_path)))
    (tmp_path / name).write_bytes(text.encode("latin-1"))

    with pytest.raises(CorruptWeights):
        fingerprint(tmp_path)


@given(at=st.integers(0, 3000), byte=st.integers(0, 255))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_changed_header_is_refused_or_read_but_never_crashes(
    tmp_path: Path, at: int, byte: int
) -> None:
    if not (tmp_path / "config.json").exists():
        save(tmp_path)
        (tmp_path / "whole").write_bytes((tmp_path / SINGLE).read_bytes())
    data = bytearray((tmp_path / "whole").read_bytes())
    data[at] = byte
    (tmp_path / SINGLE).write_bytes(data)

    try:
        loaded = load_huggingface(tmp_path, source="test")
    except ModelError:
        return
    assert len(loaded.tensors) == 76
