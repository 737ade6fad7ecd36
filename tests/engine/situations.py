"""The ways in which a step comes about, for comparisons with systems that know only one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.commands import Capture, Read, Truncate
from engine.events import StepRecord
from model.config import GPT2Config
from model.points import parse_points
from tests.agreement import assert_agrees
from tests.engine.rig import Rig, ended, gate, happened, ids_of, some_ids

CHUNK = 16
"""The engine's `prefill_chunk` that these are made for."""
IDS = some_ids(44, seed=6)
"""More than a piece and two chunks."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Records, and the whole history that they are a part of."""

    history: Sequence[int]
    records: Sequence[StepRecord]


Situation = Callable[[Rig, Capture], Awaitable[Seen]]


async def _at_position_0(rig: Rig, asked: Capture) -> Seen:
    done = await rig.appended(await rig.open(), IDS[:1], capture=asked)
    return Seen(IDS[:1], done.records)


async def _in_the_middle_of_an_append(rig: Rig, asked: Capture) -> Seen:
    session_id = await rig.open(IDS[:5])
    done = await rig.appended(session_id, IDS[5:12], capture=asked)
    return Seen(IDS[:12], done.records)


async def _in_chunks(rig: Rig, asked: Capture) -> Seen:
    session_id = await rig.open(IDS[:3])
    rig.model.passes.clear()
    done = await rig.appended(session_id, IDS[3:], capture=asked, atomic=False)
    assert len(rig.model.passes) > 2
    return Seen(IDS, done.records)


async def _where_another_session_left_it(rig: Rig, asked: Capture) -> Seen:
    await rig.open(IDS)
    done = await rig.appended(await rig.open(), IDS, capture=asked)
    return Seen(IDS, done.records)


async def _generated(rig: Rig, asked: Capture) -> Seen:
    session_id = await rig.open(IDS[:6])
    done = await rig.generated(session_id, 6, capture=asked, ignore_eos=True)
    return Seen([*IDS[:6], *ids_of(done.records)], done.records)


async def _after_a_fork(rig: Rig, asked: Capture) -> Seen:
    new = some_ids(3, seed=7)
    done = await rig.forked(await rig.open(IDS), 21, new, capture=asked)
    assert done.usage.steps == 3
    return Seen([*IDS[:21], *new], done.records)


async def _replayed_by_a_fork(rig: Rig, asked: Capture) -> Seen:
    done = await rig.forked(await rig.open(IDS), 40, replay=True, capture=asked)
    return Seen(IDS, done.records)


async def _after_a_truncate(rig: Rig, asked: Capture) -> Seen:
    session_id, new = await rig.open(IDS), some_ids(3, seed=8)
    await rig.engine.truncate(Truncate(session_id=session_id, to=34))
    done = await rig.appended(session_id, new, capture=asked)
    return Seen([*IDS[:34], *new], done.records)


async def _after_an_eviction(rig: Rig, asked: Capture) -> Seen:
    session_id, new = await _evicted(rig), some_ids(3, seed=9)
    done = await rig.appended(session_id, new, capture=asked)
    assert done.usage.rebuilt_tokens
    return Seen([*IDS, *new], done.records)


async def _read_while_resident(rig: Rig, asked: Capture) -> Seen:
    session_id = await rig.open(IDS)
    done = await ended(rig.engine.read(Read(session_id=session_id, capture=asked)))
    assert not done.usage.rebuilt_tokens
    return Seen(IDS, done.records)


async def _read_though_evicted(rig: Rig, asked: Capture) -> Seen:
    session_id = await _evicted(rig)
    done = await ended(rig.engine.read(Read(session_id=session_id, capture=asked)))
    assert done.usage.rebuilt_tokens
    return Seen(IDS, done.records)


async def _evicted(rig: Rig) -> str:
    session_id = await rig.open(IDS)
    rig.engine._thread.places.evict(session_id, "room")
    assert session_id not in rig.places()
    return session_id


SITUATIONS: Mapping[str, Situation] = {
    situation.__name__.strip("_"): situation
    for situation in (
        _at_position_0,
        _in_the_middle_of_an_append,
        _in_chunks,
        _where_another_session_left_it,
        _generated,
        _after_a_fork,
        _replayed_by_a_fork,
        _after_a_truncate,
        _after_an_eviction,
        _read_while_resident,
        _read_though_evicted,
    )
}
"""Each makes steps and gives the records of some, which report what is asked for."""


async def in_company(rig: Rig, asked: Capture) -> list[Seen]:
    """Sessions that share passes, of which a gated model has made none: each sees its own.

    A long append, a short one and a generation.
    """
    gate(rig).let(3)
    long, short, talking = [await rig.open(IDS[:n]) for n in (3, 9, 6)]
    gate(rig).arrived.clear()
    replies = [rig.append(long, IDS[3:], capture=asked)]
    await happened(gate(rig).arrived)
    replies.append(rig.append(short, some_ids(4, seed=7), capture=asked))
    replies.append(rig.generate(talking, 5, capture=asked, ignore_eos=True))
    gate(rig).release()
    dones = [await ended(reply) for reply in replies]
    assert max(map(len, rig.model.passes)) == 3
    return [Seen(done.session.token_ids, done.records) for done in dones]


def assert_named(seen: Seen, name: str, theirs: Tensor, config: GPT2Config) -> None:
    """Each record's points that another system calls `name` are what it has there.

    Args:
        theirs: of the whole history, [T, ...], or [H, T, T] where there are keys.
    """
    points = parse_points([name], config).points
    has_keys = points[0].axes[-1] == "key"
    for record in seen.records:
        at = record.position
        row = theirs[:, at, : at + 1] if has_keys else theirs[at]
        for point, part in zip(points, np.split(row.numpy().ravel(), len(points)), strict=True):
            what = f"{name}, {point} at {at}"
            assert_agrees(record.points[point], part.reshape(point.shape(config, at)), what=what)
