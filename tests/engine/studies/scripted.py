"""An engine that answers reads and probes from arrays, in batches of the test's choice."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.commands import Probe, Read
from engine.errors import Cancelled, EngineError
from engine.events import Done, Failed, Progress, Started, StepRecord, Usage
from engine.reply import Reply
from engine.studies.turns import Turns
from model.points import Point
from sessions.session import Session

Arrays = Mapping[Point, npt.NDArray[np.float32]]  # [n_positions, ...]
SESSION = Session(id="sess_s", created=0, ttl_seconds=1)


class Scripted:
    """`answers`: what a command's point has. `batch`: records to an event."""

    def __init__(self, answers: Callable[[Read | Probe], Arrays], *, batch: int = 3) -> None:
        self.answers = answers
        self.turns = Turns()
        self.batch = batch
        self.commands: list[Read | Probe] = []
        self.running: list[Reply] = []
        self.most_running = 0
        self.cancelled: list[Reply] = []
        self.holds = False  # requests begin and do not end
        self.refusals: list[EngineError] = []  # of the next requests

    def read(self, command: Read) -> Reply:
        return self._reply(command)

    def probe(self, command: Probe) -> Reply:
        return self._reply(command)

    def _reply(self, command: Read | Probe) -> Reply:
        if self.refusals:
            raise self.refusals.pop(0)
        self.commands.append(command)
        reply = Reply(on_cancel=self._cancel, wake=lambda: None)
        self.running.append(reply)
        self.most_running = max(self.most_running, len(self.running))
        reply.put(Started(), 0)
        if not self.holds:
            self.finish(reply, command)
        return reply

    def _cancel(self, reply: Reply) -> None:
        self.cancelled.append(reply)
        self.running.remove(reply)
        reply.put(Failed(Cancelled(), SESSION), 0)

    def finish(self, reply: Reply, command: Read | Probe) -> None:
        records = self._records(command)
        self.running.remove(reply)
        if command.atomic:
            reply.put(Done(SESSION, Usage(steps=len(records)), tuple(records)), 0)
            return
        for at in range(0, len(records), self.batch):
            reply.put(Progress(SESSION, tuple(records[at : at + self.batch])), 0)
        reply.put(Done(SESSION, Usage(steps=len(records))), 0)

    def _records(self, command: Read | Probe) -> Sequence[StepRecord]:
        arrays = self.answers(command)
        n_positions = min(map(len, arrays.values()))
        positions = sorted(command.capture.positions or range(n_positions))
        return [
            StepRecord(
                index=i,
                position=p,
                token_id=p,
                text="",
                points={point: arrays[point][p] for point in command.capture.points},
            )
            for i, p in enumerate(positions)
        ]


def some_numbers(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
