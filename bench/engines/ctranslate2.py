"""CTranslate2, timed from one step's callback to the next.

Its cache cannot be held at one length, so the measured steps lie around the case's context. The
prompt is a static one: computed once, then repeated for the batch by the library itself.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cases import Decode, EngineSpec, Prefill
from bench.engines.base import Engine, token_ids
from bench.samples import WARM_UP, Sample, repeat, run_delay
from bench.weights import file_name, token_name

if TYPE_CHECKING:
    from ctranslate2 import GenerationStepResult, Generator


class CTranslate2(Engine):
    """One converted model."""

    def __init__(self, generator: "Generator") -> None:
        self._generator = generator

    def next_id(self, token_ids: Sequence[int]) -> int:
        result = self._generator.generate_batch(
            [_names(token_ids)], max_length=1, include_prompt_in_result=False
        )
        return int(result[0].sequences_ids[0][0])

    def decode(self, case: Decode) -> list[Sample]:
        prompt = _names(token_ids(case.context - WARM_UP - case.steps // 2))
        n_steps = 1 + WARM_UP + case.steps  # the first one ends the prompt
        laps = Laps()
        self._generator.generate_batch(
            [[token_name(token_id)] for token_id in token_ids(case.batch, seed=1)],
            static_prompt=prompt,
            include_prompt_in_result=False,
            min_length=n_steps,
            max_length=n_steps,
            callback=laps,
        )
        return laps.samples[WARM_UP:]

    def prefill(self, case: Prefill) -> list[Sample]:
        ids = token_ids(case.n_tokens)
        return repeat(lambda: self.next_id(ids), case.steps)


class Laps:
    """The callback: a sample from each step's first token to the next step's."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._step = -1
        self._start = self._delay = 0.0

    def __call__(self, result: "GenerationStepResult") -> bool:
        if result.step != self._step:
            self._lap(time.perf_counter(), run_delay())
            self._step = result.step
        return False

    def _lap(self, now: float, delay: float) -> None:
        if self._step >= 0:
            self.samples.append(Sample(now - self._start, delay - self._delay))
        self._start, self._delay = time.perf_counter(), delay


def _names(ids: Sequence[int]) -> list[str]:
    return [token_name(token_id) for token_id in ids]


def build(spec: EngineSpec, directory: Path, n_threads: int) -> CTranslate2:
    # It would load torch if it could, and two OpenMP runtimes in one process fight for the cores.
    sys.modules["torch"] = None  # type: ignore[assignment]  # None: "cannot be imported"
    from ctranslate2 import Generator

    generator = Generator(
        str(directory / file_name(spec)),
        device="cpu",
        compute_type=spec.dtype,
        inter_threads=1,
        intra_threads=n_threads,
    )
    return CTranslate2(generator)
