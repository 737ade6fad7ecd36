"""model.weights.tensorflow and .bundle, on a checkpoint that TensorFlow itself wrote."""

import gzip
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.config import GPT2Config
from model.errors import ConfigError, CorruptWeights, MissingTensor, ModelError, UnknownTensor
from model.weights.bundle import Bundle
from model.weights.checkpoint import Checkpoint
from model.weights.tensorflow import load_tensorflow

FIXTURE = Path(__file__).parents[2] / "data" / "tensorflow"
INDEX = "model.ckpt.index"
DATA = "model.ckpt.data-00000-of-00001"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for name in ("hparams.json", "checkpoint", INDEX):
        shutil.copy(FIXTURE / name, tmp_path)
    (tmp_path / DATA).write_bytes(gzip.decompress((FIXTURE / f"{DATA}.gz").read_bytes()))
    return tmp_path


def load(directory: Path) -> Checkpoint:
    return load_tensorflow(directory, source="test")


def written(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What the fixture's README says that TensorFlow was given."""
    place = np.arange(np.prod(shape)) + zlib.crc32(name.encode()) % 31
    return torch.from_numpy(((place % 31 - 15) / 16).astype(np.float32).reshape(shape))


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        ("wte.weight", "model/wte", (50257, 4)),
        ("wpe.weight", "model/wpe", (8, 4)),
        ("h.0.ln_1.weight", "model/h0/ln_1/g", (4,)),
        ("h.1.ln_2.bias", "model/h1/ln_2/b", (4,)),
        ("h.1.attn.c_attn.weight", "model/h1/attn/c_attn/w", (4, 12)),
        ("h.0.attn.c_attn.bias", "model/h0/attn/c_attn/b", (12,)),
        ("h.0.attn.c_proj.weight", "model/h0/attn/c_proj/w", (4, 4)),
        ("h.1.mlp.c_fc.weight", "model/h1/mlp/c_fc/w", (4, 16)),
        ("h.1.mlp.c_proj.weight", "model/h1/mlp/c_proj/w", (16, 4)),
        ("ln_f.weight", "model/ln_f/g", (4,)),
    ],
)
def test_every_kind_of_tensor_is_what_tensorflow_wrote(
    saved: Path, ours: str, theirs: str, shape: tuple[int, ...]
) -> None:
    checkpoint = load(saved)

    assert checkpoint.config == GPT2Config(n_ctx=8, n_embd=4, n_head=2, n_layer=2)
    assert torch.equal(checkpoint.tensors[ours], written(theirs, shape))


def test_a_prefix_of_another_machine_is_looked_up_here(saved: Path) -> None:
    (saved / "checkpoint").write_text('model_checkpoint_path: "/home/theirs/models/model.ckpt"\n')

    assert load(saved).tensors


def test_w05_more_layers_than_the_file_has(saved: Path) -> None:
    _rewrite(saved, n_layer=3)

    with pytest.raises(MissingTensor, match=r"h\.2\.ln_1\.weight"):
        load(saved)


def test_w05_fewer_layers_than_the_file_has(saved: Path) -> None:
    _rewrite(saved, n_layer=1)

    with pytest.raises(UnknownTensor, match=r"h\.1\."):
        load(saved)


def test_w05_a_head_count_that_does_not_divide(saved: Path) -> None:
    _rewrite(saved, n_head=3)

    with pytest.raises(ConfigError, match="n_head"):
        load(saved)


@pytest.mark.parametrize("at", [0, 805_000])
def test_a_changed_byte_of_a_tensor_is_noticed(saved: Path, at: int) -> None:
    data = bytearray((saved / DATA).read_bytes())
    data[at] ^= 0x10
    (saved / DATA).write_bytes(data)

    with pytest.raises(CorruptWeights, match="the checksum of model/"):
        load(saved)


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_a_cut_data_file_is_refused(saved: Path, cut: int) -> None:
    (saved / DATA).write_bytes((saved / DATA).read_bytes()[:cut])

    with pytest.raises(CorruptWeights, match="does not have its bytes"):
        load(saved)


@pytest.mark.parametrize("name", ["checkpoint", INDEX, DATA])
def test_a_missing_file_is_refused(saved: Path, name: str) -> None:
    (saved / name).unlink()

    with pytest.raises(CorruptWeights, match=name):
        load(saved)


@pytest.mark.parametrize("text", ["", "all_model_checkpoint_paths: 5", "\xff"])
def test_a_checkpoint_file_that_names_nothing_is_refused(saved: Path, text: str) -> None:
    (saved / "checkpoint").write_bytes(text.encode("latin-1"))

    with pytest.raises(CorruptWeights):
        load(saved)


@given(at=st.integers(0, 917), byte=st.integers(0, 255), cut=st.booleans())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_broken_index_is_refused_or_harmless(saved: Path, at: int, byte: int, cut: bool) -> None:
    original = (FIXTURE / INDEX).read_bytes()
    (saved / INDEX).write_bytes(original)
    whole = Bundle(saved / "model.ckpt").entries
    data = bytearray(original)
    data[at] = byte
    (saved / INDEX).write_bytes(data[:at] if cut else data)

    try:
        assert Bundle(saved / "model.ckpt").entries == whole
    except ModelError:
        assert data != original or cut


def _rewrite(directory: Path, **keys: int) -> None:
    path = directory / "hparams.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
