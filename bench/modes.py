"""From an engine of ours to the product's own settings, so that what is measured is what runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cases import EngineSpec
from model.config import GPT2Config, from_huggingface

if TYPE_CHECKING:
    from server.loading import Loaded

KV_BUDGET = 6 * 2**30  # only what is written is backed by memory

Values = dict[str, str | int | bool]


def settings_of(spec: EngineSpec, directory: Path, n_threads: int) -> Values:
    """The settings of `spec` over the weights in `directory`, where they are not the defaults."""
    settings: Values = {
        "model": str(directory / "huggingface"),
        "dtype": spec.dtype,
        "threads": n_threads,
        "kv_budget": KV_BUDGET,
        "log_level": "warning",
    }
    match spec.variant:
        case "exact":
            settings["batch_invariant"] = True
        case "kv16":
            settings["kv_dtype"] = "bfloat16"
        case "tight":
            settings["kv_budget"] = _one_session(directory)
    return settings


def loaded(spec: EngineSpec, directory: Path, n_threads: int) -> "Loaded":
    """The model and the cache of `spec`, made as the server makes them. Imports torch."""
    from server.loading import LoadingProgress, load
    from server.settings import Settings

    settings = Settings.model_validate(settings_of(spec, directory, n_threads))
    return load(settings, LoadingProgress())


def config_in(directory: Path) -> GPT2Config:
    """The shape of the weights in `directory`."""
    return from_huggingface(json.loads((directory / "huggingface" / "config.json").read_text()))


def _one_session(directory: Path) -> int:
    """Bytes of float32 keys, values and `ln_f` rows over a whole context."""
    config = config_in(directory)
    return config.n_ctx * config.n_embd * (2 * config.n_layer + 1) * 4
