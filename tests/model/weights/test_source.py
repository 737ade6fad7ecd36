"""model.weights.source: one string to one checkpoint."""

import gzip
import shutil
from pathlib import Path

import pytest

from model.config import SIZES
from model.errors import SourceNotFound
from model.weights.source import load_checkpoint
from tests.model.weights.saved import SIX_LAYERS, save

FIXTURE = Path(__file__).parents[2] / "data" / "tensorflow"


def test_random_and_a_size(tmp_path: Path) -> None:
    assert load_checkpoint("random:tiny", cache_dir=tmp_path).config == SIZES["tiny"]


def test_a_directory_in_hugging_faces_layout(tmp_path: Path) -> None:
    save(tmp_path / "model")
    told: list[float] = []

    checkpoint = load_checkpoint(
        str(tmp_path / "model"),
        cache_dir=tmp_path,
        progress=lambda _what, fraction: told.append(fraction),
    )

    assert (checkpoint.config, checkpoint.source) == (SIX_LAYERS, str(tmp_path / "model"))
    assert told[-1] == 1.0


def test_a_directory_in_openais_layout(tmp_path: Path) -> None:
    for path in FIXTURE.iterdir():
        if path.suffix == ".gz":
            (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copy(path, tmp_path)

    assert load_checkpoint(str(tmp_path), cache_dir=tmp_path).config.n_embd == 4


def test_a_directory_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"neither config\.json nor hparams\.json"):
        load_checkpoint(str(tmp_path), cache_dir=tmp_path)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="missing"):
        load_checkpoint(str(tmp_path / "missing"), cache_dir=tmp_path)
