"""verify and compare over HTTP; their numbers are tested in tests/engine/studies."""

import asyncio
import json
import math
import threading
from typing import Any

import numpy as np
import pytest

from engine.studies.measures import kl_divergence
from server import wire
from server.routes import studies
from server.studies.answers import Compared, Verified
from tests.reference import reference_points
from tests.server.forking import LIVELY, PROMPT
from tests.server.gating import begin, gated, steps_scope, until_busy, until_idle
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")

KEYS = {"embedding", "k.0", "v.0", "resid_post.0", "k.1", "v.1", "resid_post.1", "ln_f", "logits"}


async def verified(server: Serving, session_id: str, **body: Any) -> Any:
    answer = await server.post(f"/v1/sessions/{session_id}/verify", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@served
async def test_a_session_is_verified(server: Serving) -> None:
    session_id = await server.open(token_ids=PROMPT[:20])
    await server.post(f"/v1/sessions/{session_id}/generate", max_tokens=5)
    found = await verified(server, session_id)
    Verified.model_validate(found, strict=True)
    assert (found["object"], found["past_length"], found["greedy_equal"]) == ("verify", 25, True)
    assert found["max_abs_diff"].keys() == found["max_rel_diff"].keys() == KEYS
    assert max(found["max_abs_diff"].values()) < 1e-4
    assert found["usage"]["cached_tokens"] == 25
    assert await server.length(session_id) == 25


def test_a_corrupted_key_is_told_and_where() -> None:
    async def main() -> None:
        async with serving() as server:
            session_id = await server.open(token_ids=PROMPT[:20])
            engine = server.service.engine
            slot = engine._thread.places._places[session_id].slots[0]
            keys = engine._cache.buffers.keys
            for number in (4.0, math.nan):
                kept = float(keys[0, slot, 1, 6, 3])
                keys[0, slot, 1, 6, 3] = number
                found = await verified(server, session_id, points=["k.*"], positions="2:9")
                assert found["where"]["k.0"] == {"position": 6, "index": [1, 3]}
                difference = abs(kept - number)
                expected = pytest.approx(difference, rel=1e-4) if number == 4.0 else None
                assert found["max_abs_diff"]["k.0"] == expected
                assert found["greedy_equal"] is None
                clean = await verified(server, session_id, points=["k.0"], positions="0:6")
                assert clean["max_abs_diff"]["k.0"] < 1e-4
                keys[0, slot, 1, 6, 3] = kept

    asyncio.run(main())


@served
async def test_an_empty_session_and_other_peoples_names(server: Serving) -> None:
    found = await verified(server, await server.open())
    assert (found["past_length"], found["greedy_equal"]) == (0, True)
    assert set(found["where"].values()) == {None}
    found = await verified(
        server, await server.open(token_ids=[5]), points=["blocks.1.attn.hook_v"]
    )
    assert found["aliases"] == {"blocks.1.attn.hook_v": "v.1"}
    assert found["max_abs_diff"].keys() == {"v.1"}


def test_verify_waits_for_no_mutation() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=PROMPT[:4])
            model.close()
            scope = steps_scope(session_id, "append", accept="text/event-stream")
            _, running = begin(server, scope, token_ids=PROMPT[4:9])
            await until_busy(server, session_id)
            verifying = asyncio.create_task(verified(server, session_id))
            await until_reading(server)
            model.open()
            assert (await verifying)["past_length"] == 4
            await running

    asyncio.run(main())


async def until_reading(server: Serving) -> None:
    while len(server.service.engine._requests) < 3:  # noqa: ASYNC110  # nobody is told
        await asyncio.sleep(0.001)


def test_a_client_that_leaves_ends_both_reads() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            session_id = await server.open(token_ids=PROMPT[:50])
            model.close()
            hand, task = begin(server, steps_scope(session_id, "verify"))
            while len(server.service.engine._requests) < 2:  # noqa: ASYNC110  # nobody is told
                await asyncio.sleep(0.001)
            hand.disconnect()
            await task
            model.open()
            await until_idle(server)
            assert hand.status is None

    asyncio.run(main())


@served
async def test_two_sessions_are_compared(server: Serving) -> None:
    ids = PROMPT[:8], [*PROMPT[:3], *PROMPT[50:57]]
    a, b = [await server.open(token_ids=list(one)) for one in ids]
    answer = (await server.post("/v1/compare", a=a, b=b, points=["resid_post.1", "logits"])).json()
    Compared.model_validate(answer, strict=True)
    assert (answer["object"], answer["a"], answer["b"]) == ("comparison", a, b)
    assert answer["positions"] == list(range(8))
    left, right = (reference_points(LIVELY, one) for one in ids)
    told = answer["points"]
    assert told["resid_post.1"].keys() == {"l2", "norm_a", "norm_b", "cosine"}
    for position in range(8):
        x, y = (p["logits"][position].numpy() for p in (left, right))
        assert told["logits"]["l2"][position] == pytest.approx(np.linalg.norm(x - y), abs=2e-3)
        assert told["logits"]["kl_ab"][position] == pytest.approx(
            kl_divergence(x, y), rel=1e-4, abs=2e-6
        )
        assert told["logits"]["kl_ba"][position] == pytest.approx(
            kl_divergence(y, x), rel=1e-4, abs=2e-6
        )
    assert answer["usage"]["a"]["cached_tokens"] == answer["usage"]["b"]["cached_tokens"] == 8
    assert (await server.length(a), await server.length(b)) == (8, 10)


def test_a_comparison_is_written_on_a_worker_point_by_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def dumps(value: object) -> bytes:
        threads.append(threading.current_thread())
        return wire.dumps(value)

    monkeypatch.setattr(studies, "dumps", dumps)

    async def main() -> None:
        async with serving() as server:
            a = await server.open(token_ids=PROMPT[:8])
            answer = await server.post("/v1/compare", a=a, b=a, points=["resid_post.*", "ln_f"])
            assert answer.json()["points"].keys() == {"resid_post.0", "resid_post.1", "ln_f"}

    asyncio.run(main())
    assert len(threads) == 1 + 3
    assert threading.main_thread() not in threads


@served
async def test_a_session_beside_itself_is_as_far_apart_as_batches_are(server: Serving) -> None:
    a = await server.open(token_ids=PROMPT[:8])
    answer = (await server.post("/v1/compare", a=a, b=a, positions="1,4:6")).json()
    assert answer["positions"] == [1, 4, 5]
    assert answer["points"].keys() == {"resid_post.0", "resid_post.1", "logits"}
    for told in answer["points"].values():
        assert told["l2"] == pytest.approx([0, 0, 0], abs=1e-3)
        assert told["norm_a"] == pytest.approx(told["norm_b"], rel=1e-5)
        assert told["cosine"] == pytest.approx([1, 1, 1], abs=1e-6)
    for divergence in ("kl_ab", "kl_ba"):
        assert answer["points"]["logits"][divergence] == pytest.approx([0, 0, 0], abs=1e-5)


@served
async def test_zero_and_infinite_vectors_are_null(server: Serving) -> None:
    a, b = [await server.open(token_ids=PROMPT[:2]) for _ in range(2)]
    edits = [
        {"point": "mlp_out.1", "op": "scale", "scale": 0},
        {"point": "scores.0", "keys": "1", "op": "mask"},
    ]
    path = f"/v1/sessions/{b}/append"
    assert (await server.post(path, token_ids=[7], interventions=edits)).status_code == 200
    await server.post(f"/v1/sessions/{a}/append", token_ids=[7])
    body = {"points": ["mlp_out.1", "scores.0"], "positions": "2"}
    told = (await server.post("/v1/compare", a=a, b=b, **body)).json()["points"]
    assert told["mlp_out.1"]["norm_b"] == [0]
    assert told["mlp_out.1"]["cosine"] == [None]
    assert told["scores.0"]["norm_b"] == [None]


@served
async def test_nothing_in_common_is_nothing_to_compare(server: Serving) -> None:
    a, b = await server.open(), await server.open(token_ids=[5])
    answer = (await server.post("/v1/compare", a=a, b=b)).json()
    assert answer["positions"] == []
    assert answer["points"]["logits"]["kl_ab"] == []


BAD_VERIFY: list[tuple[dict[str, Any], str, str | None]] = [
    ({"points": []}, "invalid_request", "points"),
    ({"points": ["nothing"]}, "unknown_point", "points"),
    ({"points": ["lens.0"]}, "invalid_request", "points"),
    ({"positions": "20"}, "invalid_request", "positions"),
    ({"positions": [1]}, "invalid_request", "positions"),
    ({"past_length": 4}, "invalid_request", None),
]
BAD_COMPARE: list[tuple[dict[str, Any], str, str | None]] = [
    *BAD_VERIFY,
    ({"a": None}, "invalid_request", "a"),
    ({"b": 5}, "invalid_request", "b"),
    ({"b": "sess_0"}, "session_not_found", None),
    ({"b": "\ud83d"}, "invalid_request", "b"),
    ({"positions": "3:6"}, "invalid_request", "positions"),  # the shorter one has 5
]


@pytest.mark.parametrize(("body", "code", "param"), BAD_COMPARE)
def test_bad_bodies_are_refused(body: dict[str, Any], code: str, param: str | None) -> None:
    async def main() -> None:
        async with serving() as server:
            a, b = [await server.open(token_ids=PROMPT[:n]) for n in (20, 5)]
            sent = {f"/v1/sessions/{a}/verify": body} if (body, code, param) in BAD_VERIFY else {}
            for path, said in (sent | {"/v1/compare": {"a": a, "b": b} | body}).items():
                answer = await server.client.post(
                    path, content=json.dumps(said), headers={"content-type": "application/json"}
                )
                assert error_of(answer)["code"] == code, answer.text
                if param is not None:
                    assert error_of(answer)["param"] == param
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


def test_the_size_of_a_comparison_is_known_before_it_is_made() -> None:
    async def main() -> None:
        async with gated(max_response_bytes=5000) as (server, model):
            a = await server.open(token_ids=PROMPT[:20])
            n_passes = model.n_passes
            refused = await server.post("/v1/compare", a=a, b=a, points=["resid_post.*"])
            assert error_of(refused)["code"] == "response_too_large"
            assert model.n_passes == n_passes
            body = {"points": ["resid_post.0"]}
            assert (await server.post("/v1/compare", a=a, b=a, **body)).status_code == 200

    asyncio.run(main())
