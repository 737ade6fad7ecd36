"""Hugging Face transformers in eager mode with sdpa attention, as `generate` runs it on a CPU."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GPT2LMHeadModel, StaticCache
from transformers.cache_utils import DynamicLayer

from bench.cases import Activations, Capture, Decode, EngineSpec, Prefill, Sweep
from bench.engines.base import Engine, token_ids
from bench.engines.patching import by_layer, one_by_one
from bench.samples import Sample, Sides, in_turns, repeat, timed

STATIC_SPARE = 16  # positions that a static cache is longer than what it holds


class Transformers(Engine):
    """`GPT2LMHeadModel` with one kind of cache."""

    def __init__(self, model: GPT2LMHeadModel, *, static: bool) -> None:
        self._model = model
        self._static = static

    @torch.inference_mode()
    def next_id(self, token_ids: Sequence[int]) -> int:
        return int(self._step(torch.tensor([token_ids]), self._empty(len(token_ids)))[0])

    @torch.inference_mode()
    def decode(self, case: Decode) -> list[Sample]:
        cache = self._filled(case.batch, case.context)
        ids = torch.tensor(token_ids(case.batch, seed=1)).unsqueeze(1)
        self._step(ids, cache)
        # Untimed: forget the last step's row, so that every step is at the same length.
        return repeat(lambda: self._step(ids, cache), case.steps, between=lambda: cache.crop(-1))

    @torch.inference_mode()
    def prefill(self, case: Prefill) -> list[Sample]:
        ids = torch.tensor([token_ids(case.n_tokens)])
        return repeat(lambda: self._step(ids, self._empty(case.n_tokens)), case.steps)

    @torch.inference_mode()
    def capture(self, case: Capture) -> Sides:
        """Steps with `output_hidden_states`, whatever is asked for, and without."""
        cache = self._filled(case.n_sessions, case.context)
        ids = torch.tensor(token_ids(case.n_sessions, seed=1)).unsqueeze(1)
        self._step(ids, cache)

        def step(*, shown: bool) -> Sample:
            cache.crop(-1)
            sample = timed(lambda: self._step(ids, cache, shown=shown))
            return sample.per(case.n_sessions)

        sides = {"": partial(step, shown=False), "hidden_states": partial(step, shown=True)}
        return in_turns(sides, case.n_turns * case.n_tokens)

    @torch.inference_mode()
    def sweep(self, case: Sweep) -> Sides:
        """Every pass is a sample; that of the source is not counted."""
        return {
            "one-by-one": [timed(one) for one in one_by_one(self._model, case)],
            "by-layer": [timed(one).per(case.n_tokens) for one in by_layer(self._model, case)],
        }

    @torch.inference_mode()
    def activations(self, case: Activations) -> Sides:
        """All positions are computed."""
        ids = torch.tensor([token_ids(case.n_tokens)])

        def read() -> None:
            self._model(ids, use_cache=False, logits_to_keep=1, output_hidden_states=True)

        return {"": repeat(read, case.steps)}

    def _empty(self, length: int) -> Cache:
        if self._static:
            return StaticCache(config=self._model.config, max_cache_len=length + STATIC_SPARE)
        return DynamicCache(config=self._model.config)

    def _filled(self, batch: int, length: int) -> Cache:
        """A cache of `batch` equal rows: one is computed, the others are copies."""
        one = DynamicCache(config=self._model.config)
        self._step(torch.tensor([token_ids(length)]), one)
        cache = self._empty(length)
        for i, layer in enumerate(one.layers):  # one by one: never two whole caches in memory
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None
            assert layer.values is not None
            cache.update(
                layer.keys.repeat_interleave(batch, 0), layer.values.repeat_interleave(batch, 0), i
            )
        return cache

    def _step(self, ids: Tensor, cache: Cache, *, shown: bool = False) -> Tensor:
        """Greedy ids [B] after ids [B, T]; `shown`: with the hidden states."""
        out = self._model(
            ids, cache=cache, use_cache=True, logits_to_keep=1, output_hidden_states=shown
        )
        logits: Tensor = out.logits[:, -1]  # [B, V]
        return logits.argmax(-1)


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Transformers:
    torch.set_num_threads(n_threads)
    model = GPT2LMHeadModel.from_pretrained(
        directory / "huggingface", dtype=getattr(torch, spec.dtype), attn_implementation="sdpa"
    )
    return Transformers(model, static=spec.variant == "static")
