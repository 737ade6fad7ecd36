"""Weights by their name on the Hugging Face hub, downloaded once.

Only `config.json` and safetensors are asked for. A complete copy in the cache is used without a
look at the network, so a server that has started once starts offline. The client library shows
its own progress bars, and reads `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`.
"""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from model.errors import HubUnavailable, SourceNotFound
from model.weights.checkpoint import Progress
from model.weights.huggingface import CONFIG, INDEX, SINGLE

FILES = [CONFIG, SINGLE, INDEX, "model-*-of-*.safetensors"]

_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


def fetch(
    name: str, *, cache_dir: Path, progress: Progress | None = None, endpoint: str | None = None
) -> Path:
    """The directory of `owner/name`, from the cache or else from the hub.

    Args:
        name: `owner/name`.
        cache_dir: in the hub client's own layout.
        progress: told when a download begins and ends.
        endpoint: another hub than the client library's.

    Raises:
        SourceNotFound: `name` is neither a directory nor a possible hub name.
        HubUnavailable: it is not cached and cannot be downloaded.
    """
    if not _NAME.fullmatch(name):
        raise SourceNotFound(name, reason="it is no directory and no hub name (owner/name)")
    try:
        return Path(_snapshot(name, cache_dir, endpoint, local_files_only=True))
    except LocalEntryNotFoundError:
        return _download(name, cache_dir, endpoint, progress)


def _download(name: str, cache_dir: Path, endpoint: str | None, progress: Progress | None) -> Path:
    report = progress or (lambda _what, _fraction: None)
    report(f"downloading {name}", 0.0)
    try:
        path = _snapshot(name, cache_dir, endpoint, local_files_only=False)
    except Exception as error:  # the client's own kinds and its transport's; the answer is one
        cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise HubUnavailable(name, cache_dir=str(cache_dir), cause=cause) from error
    report(f"downloading {name}", 1.0)
    return Path(path)


def _snapshot(name: str, cache_dir: Path, endpoint: str | None, *, local_files_only: bool) -> str:
    return snapshot_download(
        name,
        cache_dir=cache_dir,
        endpoint=endpoint,
        allow_patterns=FILES,
        local_files_only=local_files_only,
    )
