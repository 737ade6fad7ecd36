"""Many prompts to their activations, without a session. The event loop; numbers on workers."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from engine.commands import Capture, Probe
from engine.events import Usage
from engine.studies.flow import WINDOW, Probing, gather, in_order
from engine.studies.reach import up_to
from engine.studies.rows import Array, Dtype, Mean, Rows, Stacked
from model.config import GPT2Config
from model.points import Point
from sessions.edits import Intervention


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens to step from position 0, and the ascending positions to keep, at least one."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptActivations:
    """What one prompt brought: arrays [n_positions, ...], or means of the points' own shapes."""

    prompt: Prompt
    arrays: Mapping[Point, Array]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """What is captured of every prompt."""

    points: tuple[Point, ...]
    mean: bool = False
    dtype: Dtype = np.float32
    interventions: tuple[Intervention, ...] = ()
    owner: str = ""

    def n_bytes(self, prompt: Prompt, config: GPT2Config) -> int:
        """Bytes that one prompt's arrays hold, while they are made too."""
        last = prompt.positions[-1]
        n_numbers = sum(prod(point.shape(config, last)) for point in self.points)
        if self.mean:
            return n_numbers * (np.dtype(np.float64).itemsize + np.dtype(self.dtype).itemsize)
        return n_numbers * len(prompt.positions) * np.dtype(self.dtype).itemsize

    async def run(
        self,
        engine: Probing,
        prompts: Sequence[Prompt],
        config: GPT2Config,
        *,
        window: int = WINDOW,
    ) -> AsyncGenerator[PromptActivations, None]:
        """Each prompt's, in order. At most `window` of them are at work or wait to be taken.

        Raises:
            EngineError, SessionError: one was refused or failed.
        """
        attempts = (partial(self._one, engine, prompt, config) for prompt in prompts)
        async with aclosing(in_order(attempts, engine.turns, window=window)) as all_captured:
            async for captured in all_captured:
                yield captured

    async def _one(self, engine: Probing, prompt: Prompt, config: GPT2Config) -> PromptActivations:
        kind: type[Mean | Stacked] = Mean if self.mean else Stacked
        rows: Rows = kind(self.points, prompt.positions, config, self.dtype)
        stop = prompt.positions[-1] + 1  # what follows is nobody's
        command = Probe(
            owner=self.owner,
            token_ids=prompt.token_ids[:stop],
            interventions=up_to(self.interventions, stop),
            capture=Capture(points=self.points, positions=frozenset(prompt.positions)),
            atomic=False,
            of_study=True,
        )
        usage = await gather(engine.probe(command), rows.take)
        return PromptActivations(prompt=prompt, arrays=rows.arrays, usage=usage)
