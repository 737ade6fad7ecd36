"""model.weights.hub: a name, downloaded once, and clear words when that is impossible."""

from pathlib import Path

import pytest

from model.errors import HubUnavailable, SourceNotFound
from model.weights.hub import fetch
from model.weights.huggingface import load_huggingface
from tests.model.weights.fake_hub import fake_hub
from tests.model.weights.saved import SINGLE, halves, save, save_shards

NAME = "somebody/gpt2-small"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


@pytest.fixture
def published(tmp_path: Path) -> Path:
    directory = tmp_path / "published"
    save(directory)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "README.md").write_text("words")
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_name_is_downloaded_once_and_then_needs_no_hub(published: Path, cache: Path) -> None:
    told: list[tuple[str, float]] = []
    with fake_hub(NAME, published) as hub:
        first = fetch(NAME, cache_dir=cache, endpoint=hub.url, progress=lambda *w: told.append(w))
        assert sorted(hub.downloaded) == ["config.json", SINGLE]

    again = fetch(NAME, cache_dir=cache, endpoint=NOWHERE)

    assert again == first
    assert told == [(f"downloading {NAME}", 0.0), (f"downloading {NAME}", 1.0)]
    expected = load_huggingface(published, source=NAME).fingerprint
    assert load_huggingface(again, source=NAME).fingerprint == expected


def test_shards_are_downloaded_with_their_index(published: Path, cache: Path) -> None:
    expected = load_huggingface(published, source=NAME).fingerprint
    save_shards(published, halves(save(published)))

    with fake_hub(NAME, published) as hub:
        directory = fetch(NAME, cache_dir=cache, endpoint=hub.url)

    assert len(list(directory.glob("*.safetensors"))) == 2
    assert load_huggingface(directory, source=NAME).fingerprint == expected


def test_an_interrupted_download_is_finished(published: Path, cache: Path) -> None:
    with fake_hub(NAME, published) as hub:
        directory = fetch(NAME, cache_dir=cache, endpoint=hub.url)
        (directory / SINGLE).unlink()
        for blob in cache.rglob("blobs/*"):
            if blob.stat().st_size > 100_000:
                blob.unlink()

        assert load_huggingface(fetch(NAME, cache_dir=cache, endpoint=hub.url), source=NAME)


def test_without_a_hub_the_error_names_every_way_out(cache: Path) -> None:
    with pytest.raises(HubUnavailable, match="network, or give a local directory or random:gpt2"):
        fetch(NAME, cache_dir=cache, endpoint=NOWHERE)


def test_a_name_that_the_hub_does_not_know(published: Path, cache: Path) -> None:
    with (
        fake_hub(NAME, published) as hub,
        pytest.raises(HubUnavailable, match="nobody/nothing"),
    ):
        fetch("nobody/nothing", cache_dir=cache, endpoint=hub.url)


@pytest.mark.parametrize(
    "name", ["", "gpt2", "./missing", "/missing/dir", "a/b/c", "../a", "a/..b/", "a b/c", "-a/b"]
)
def test_what_cannot_be_a_name_never_reaches_the_hub(name: str, cache: Path) -> None:
    with pytest.raises(SourceNotFound, match="no directory and no hub name"):
        fetch(name, cache_dir=cache, endpoint=NOWHERE)
