"""Where weights come from: one string to one checkpoint.

`random:<size>` is drawn, a directory is read in the layout it has, and any other string is a name
on the Hugging Face hub. Runs once, on the thread that starts the server.
"""

from pathlib import Path

from model.errors import SourceNotFound
from model.weights import fresh, hub, huggingface, tensorflow
from model.weights.checkpoint import Checkpoint, Progress


def load_checkpoint(
    source: str, *, cache_dir: Path, progress: Progress | None = None
) -> Checkpoint:
    """The checkpoint that `source` names.

    Args:
        source: `random:gpt2`, a directory, or `owner/name`.
        cache_dir: where downloads are kept.
        progress: told what is being done and which fraction of it is done.

    Raises:
        ConfigError: the configuration is not one of GPT-2's.
        WeightsError: the subclass says why.
    """
    if source.startswith(fresh.PREFIX):
        return fresh.load_fresh(source, progress=progress)
    directory = Path(source)
    if not directory.is_dir():
        directory = hub.fetch(source, cache_dir=cache_dir, progress=progress)
    return _load_directory(directory, source=source, progress=progress)


def _load_directory(directory: Path, *, source: str, progress: Progress | None) -> Checkpoint:
    if (directory / huggingface.CONFIG).exists():
        return huggingface.load_huggingface(directory, source=source, progress=progress)
    if (directory / tensorflow.HPARAMS).exists():
        return tensorflow.load_tensorflow(directory, source=source, progress=progress)
    reason = f"it has neither {huggingface.CONFIG} nor {tensorflow.HPARAMS}"
    raise SourceNotFound(source, reason=reason)
