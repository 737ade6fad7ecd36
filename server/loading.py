"""From settings to a model that is ready to step. Runs once, on the loading thread."""

import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cache.accounting import PIECE
from cache.kv import KVCache
from embedding.tokenizer import Tokenizer
from engine.limits import Limits
from engine.protocol import Model
from model.attention.explicit import PIECE as EXACT_PIECE
from model.config import GPT2Config
from model.gpt2 import GPT2, cache_shape
from model.selftest import prove_exact
from model.weights.checkpoint import Checkpoint
from model.weights.fresh import PREFIX as RANDOM
from model.weights.source import load_checkpoint
from server.errors import BudgetTooSmall
from server.facts import ModelFacts, SourceKind
from server.settings import Settings

_log = structlog.get_logger("stepscope.loading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything the engine is made of."""

    model: Model
    cache: KVCache
    tokenizer: Tokenizer
    facts: ModelFacts


class LoadingProgress:
    """How far loading has come: read by `/ready`, logged per stage, drawn on a terminal."""

    def __init__(self) -> None:
        self.stage = "starting"
        self.fraction = 0.0
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bars.add_task(self.stage, total=1.0)

    def __call__(self, stage: str, fraction: float) -> None:
        """Say that `stage` is done to `fraction`, 0 to 1."""
        if stage != self.stage:
            _log.info("loading", stage=stage)
        self.stage, self.fraction = stage, fraction
        self._bars.update(self._task, description=stage, completed=fraction)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def __str__(self) -> str:
        return f"{self.stage}, {self.fraction:.0%}"


def limits_of(settings: Settings) -> Limits:
    """The engine's bounds."""
    budgets = {"record_bytes": settings.record_budget, "edit_bytes": settings.edit_budget}
    names = {field.name for field in fields(Limits)} - budgets.keys()
    return Limits(**{name: getattr(settings, name) for name in names}, **budgets)


def load(settings: Settings, progress: LoadingProgress) -> Loaded:
    """Read the weights and prepare the model.

    Raises:
        ModelError: the weights cannot be used, or not with equal bits where these are asked for.
        CacheError: the machine has no room for one session's K/V.
        BudgetTooSmall: neither has the budget.
    """
    torch.set_num_threads(settings.threads)
    with progress:
        checkpoint = load_checkpoint(
            settings.model, cache_dir=settings.data_dir / "hub", progress=progress
        )
        progress("preparing the model", 0.0)
        if settings.batch_invariant:
            prove_exact(checkpoint)
        cache = _cache_for(checkpoint.config, settings)
        model = GPT2(
            checkpoint,
            cache.buffers,
            dtype=settings.dtype,
            max_tokens=limits_of(settings).max_tokens,
            batch_invariant=settings.batch_invariant,
        )
        facts = facts_of(settings, checkpoint)
        progress("preparing the model", 1.0)
    return Loaded(
        model=model, cache=cache, tokenizer=Tokenizer(checkpoint.config.n_ctx), facts=facts
    )


def _cache_for(config: GPT2Config, settings: Settings) -> KVCache:
    cache = KVCache(
        cache_shape(config, settings.kv_dtype),
        budget_bytes=settings.kv_budget,
        max_slots=settings.max_sessions,
        piece=EXACT_PIECE if settings.batch_invariant else PIECE,
    )
    _check_budget(cache, config.n_ctx)
    return cache


def _check_budget(cache: KVCache, n_ctx: int) -> None:
    """A session that can never be filled would be refused as if others were in its way."""
    total_bytes, needed_bytes = cache.usage().bytes_total, cache.bytes_for(n_ctx)
    if needed_bytes > total_bytes:
        raise BudgetTooSmall(
            f"--kv-budget has room for {total_bytes} bytes, less than one session of {n_ctx} "
            f"tokens, which needs {needed_bytes}"
        )


def facts_of(settings: Settings, checkpoint: Checkpoint) -> ModelFacts:
    """What clients are told of the model. A local directory is named by its last part only."""
    source = _source_kind(settings.model)
    is_directory = source == "directory"
    return ModelFacts(
        name=Path(settings.model).resolve().name if is_directory else settings.model,
        source=source,
        fingerprint=checkpoint.fingerprint,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        batch_invariant=settings.batch_invariant,
        created=int(time.time()),
        config=checkpoint.config,
    )


def _source_kind(model: str) -> SourceKind:
    """In the order in which `load_checkpoint` looks."""
    if model.startswith(RANDOM):
        return "random"
    return "directory" if Path(model).is_dir() else "hub"
