"""Exact mode through the engine: bytes are compared, never values."""

import asyncio

from engine.events import Done
from model.attention.explicit import PIECE as EXACT_PIECE
from model.gpt2 import cache_shape
from model.points import Point
from tests.engine.rig import LONG, Rig, capture, ended, in_loop, running, some_ids

ASKED = capture(Point("resid_post", 0), Point("ln_f"), Point("logits"))
PROMPTS = [some_ids(n, seed=n) for n in (100, 120, 250, 40)]
PIECE_BYTES = EXACT_PIECE * cache_shape(LONG.config, "float32").row_bytes


def bits(done: Done) -> list[tuple[int, list[bytes]]]:
    return [(r.token_id, [row.tobytes() for row in r.points.values()]) for r in done.records]


async def generated(rig: Rig, sessions: list[str]) -> list[Done]:
    replies = [rig.generate(s, 60, ignore_eos=True, capture=ASKED) for s in sessions]
    return list(await asyncio.gather(*map(ended, replies)))


@in_loop
async def test_b01_mates_evictions_preemptions_and_forks_change_no_bit() -> None:
    async with running(checkpoint=LONG, exact=True) as rig:
        alone = [bits((await generated(rig, [await rig.open(p)]))[0]) for p in PROMPTS]
    tight = PIECE_BYTES * 6
    async with running(checkpoint=LONG, exact=True, budget_bytes=tight, prefill_chunk=30) as rig:
        sessions = [await rig.open(p) for p in PROMPTS]
        ends = await generated(rig, sessions)
        assert list(map(bits, ends)) == alone
        forks = [await rig.fork(s, len(p)) for s, p in zip(sessions, PROMPTS, strict=True)]
        assert list(map(bits, await generated(rig, forks))) == alone
        assert all(rig.engine.stats().evictions[reason] for reason in ("room", "preempted"))
