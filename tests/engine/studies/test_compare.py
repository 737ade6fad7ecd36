"""Two sessions against the reference's passes, measured by hand in float64."""

import numpy as np
import pytest
import torch

from engine.commands import Capture, Read
from engine.studies.compare import Comparison, compare
from model.points import Point
from tests.engine.rig import LIVELY, Rig, in_loop, running, some_ids
from tests.reference import reference_points

NAMES = ("resid_post.1", "pattern.0", "z.1[1]", "logits", "logits[5,7]")


async def compared(rig: Rig, a: str, b: str, positions: range, *names: str) -> Comparison:
    capture = Capture(points=rig.points(*names), positions=frozenset(positions))
    left, right = (Read(session_id=one, capture=capture, atomic=False) for one in (a, b))
    return await compare(rig.engine, left, right)


@in_loop
async def test_distances_are_those_of_two_full_passes() -> None:
    async with running(prefill_chunk=5) as rig:
        shared = some_ids(6)
        ids = [*shared, *some_ids(7, seed=1)], [*shared, *some_ids(7, seed=2)]
        a, b = [await rig.open(one) for one in ids]
        found = await compared(rig, a, b, range(13), *NAMES)
        left, right = (reference_points(LIVELY, one) for one in ids)
        for point, row in found.points.items():
            for position, one in enumerate(row):
                x, y = (_vector(points, point, position) for points in (left, right))
                assert one.distance.l2 == pytest.approx(np.linalg.norm(x - y), abs=2e-4, rel=1e-4)
                assert one.distance.norm_a == pytest.approx(np.linalg.norm(x), rel=1e-4)
                assert one.distance.norm_b == pytest.approx(np.linalg.norm(y), rel=1e-4)
                cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
                assert one.distance.cosine == pytest.approx(cosine, abs=1e-5)
        for position, one in enumerate(found.points[Point("logits")]):
            p, q = (points["logits"][position].double().log_softmax(-1) for points in (left, right))
            assert one.kl_ab == pytest.approx(float(p.exp() @ (p - q)), abs=2e-6, rel=1e-4)
            assert one.kl_ba == pytest.approx(float(q.exp() @ (q - p)), abs=2e-6, rel=1e-4)
        assert all(one.kl_ab is None for one in found.points[Point("logits", units=(5, 7))])


def _vector(points: dict[str, torch.Tensor], point: Point, position: int) -> np.ndarray:
    row = points[str(point.whole)][position].numpy()
    if point.is_ragged:
        row = row[..., : position + 1]
    return np.asarray(point.select(row)).ravel().astype(np.float64)


@in_loop
async def test_a_session_is_no_distance_from_itself() -> None:
    async with running() as rig:
        session_id = await rig.open(some_ids(9))
        found = await compared(rig, session_id, session_id, range(9), *NAMES)
        for row in found.points.values():
            assert len(row) == 9
            assert all(one.distance.l2 == 0 for one in row)
            assert all(one.distance.cosine == pytest.approx(1, abs=1e-12) for one in row)
        assert all(one.kl_ab == one.kl_ba == 0 for one in found.points[Point("logits")])
        assert [usage.cached_tokens for usage in found.usage] == [9, 9]


@in_loop
async def test_one_may_be_evicted_and_the_positions_are_chosen() -> None:
    async with running() as rig:
        a, b = await rig.open(some_ids(9)), await rig.open(some_ids(12))
        rig.engine._thread.places.evict(b, "room")
        found = await compared(rig, a, b, range(3, 6), "resid_post.0")
        row = found.points[Point("resid_post", 0)]
        assert len(row) == 3
        assert max(one.distance.l2 for one in row) < 1e-4  # the ids are the same there
        assert [usage.rebuilt_tokens for usage in found.usage] == [0, 6]


@in_loop
async def test_without_positions_there_is_nothing_to_compare() -> None:
    async with running() as rig:
        a, b = await rig.open(some_ids(2)), await rig.open()
        found = await compared(rig, a, b, range(0), "logits")
        assert found.points == {Point("logits"): []}
