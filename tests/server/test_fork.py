"""Branches over HTTP, with the real engine: what they begin with, and that it is right."""

import asyncio

import pytest

from server import answers
from tests.server.forking import PROMPT, assert_as_alone, fork, ids, kv, tokens_of
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")


@served
async def test_a_fork_begins_as_its_parent_and_goes_its_own_way(server: Serving) -> None:
    parent = await server.open(token_ids=PROMPT, ttl_seconds=77, metadata={"who": "parent"})
    answer = await server.client.post(f"/v1/sessions/{parent}/fork")
    assert answer.status_code == 201
    child = answers.SessionState.model_validate(answer.json(), strict=True)
    assert set(answer.json()) == set(answers.SessionState.model_fields)
    assert child.id != parent
    assert child.parent == answers.Branch(id=parent, past_length=100)
    assert (child.past_length, child.remaining, child.metadata) == (100, 156, {})
    assert child.expires - child.created in (77, 78), "the parent's, where none is given"
    assert await ids(server) == [child.id, parent]
    assert await tokens_of(server, child.id) == PROMPT

    await server.post(f"/v1/sessions/{parent}/append", token_ids=[1, 2, 3])
    await server.post(f"/v1/sessions/{child.id}/append", token_ids=[4, 5])
    assert await tokens_of(server, parent) == [*PROMPT, 1, 2, 3]
    assert await tokens_of(server, child.id) == [*PROMPT, 4, 5]
    assert (await server.client.get(f"/v1/sessions/{parent}")).json()["parent"] is None
    for session_id in (parent, child.id):
        await assert_as_alone(server, session_id)


@served
async def test_an_edit_at_a_position_is_one_call(server: Serving) -> None:
    parent = await server.open(token_ids=PROMPT)
    for at in (0, 1, 31, 32, 33, 70, 99, 100):
        child = await fork(server, parent, at=at, past_length=100, token_ids=[11, 12])
        assert await tokens_of(server, child) == [*PROMPT[:at], 11, 12]
        told = (await server.client.get(f"/v1/sessions/{child}")).json()
        assert told["parent"] == {"id": parent, "past_length": at}
        assert (told["past_length"], told["kv"]) == (at + 2, "resident")
    for at in (33, 70):
        await assert_as_alone(
            server, await fork(server, parent, at=at, token_ids=[11, 12], metadata={"a": "b"})
        )
    assert await tokens_of(server, parent) == PROMPT
    await assert_as_alone(server, parent)


@served
async def test_a_fork_takes_text_and_settings_of_its_own(server: Serving) -> None:
    parent = await server.open(prompt="Hello world")
    body = {"at": 1, "prompt": "<|endoftext|>", "allow_special": True}
    answer = await server.post(
        f"/v1/sessions/{parent}/fork", **body, ttl_seconds=9, metadata={"a": "b"}
    )
    told = answer.json()
    assert await tokens_of(server, told["id"]) == [15496, 50256]
    assert told["expires"] - told["created"] in (9, 10)
    assert told["metadata"] == {"a": "b"}


@served
async def test_forks_of_nothing_and_of_forks(server: Serving) -> None:
    empty = await server.open()
    child = await fork(server, empty)
    assert await tokens_of(server, child) == []
    assert error_of(await server.post(f"/v1/sessions/{child}/generate"))["code"] == "empty_session"
    ids = PROMPT
    session_id = await server.open(token_ids=ids)
    for at in (90, 60, 64, 33):
        session_id = await fork(server, session_id, at=at, token_ids=[at, at, at, at])
        ids = [*ids[:at], at, at, at, at]
        assert await tokens_of(server, session_id) == ids
    await assert_as_alone(server, session_id)


@served
async def test_a_fork_outlives_its_parent(server: Serving) -> None:
    parent = await server.open(token_ids=PROMPT)
    child = await fork(server, parent, at=50, token_ids=[3])
    grandchild = await fork(server, child)
    for gone in (parent, child):
        assert (await server.client.delete(f"/v1/sessions/{gone}")).status_code == 200
    told = (await server.client.get(f"/v1/sessions/{grandchild}")).json()
    assert told["parent"] == {"id": child, "past_length": 51}
    await assert_as_alone(server, grandchild)


@served
async def test_a_parent_can_roll_back_under_its_forks(server: Serving) -> None:
    parent = await server.open(token_ids=PROMPT)
    children = [await fork(server, parent, at=at) for at in (100, 40)]
    await server.post(f"/v1/sessions/{parent}/truncate", to=20)
    await server.post(f"/v1/sessions/{parent}/append", token_ids=[5] * 60)
    for session_id in (*children, parent):
        await assert_as_alone(server, session_id)


@served
async def test_many_forks_hold_their_prefix_once(server: Serving) -> None:
    parent = await server.open(token_ids=PROMPT)
    before = await kv(server)
    for _ in range(50):
        await fork(server, parent, at=96)
    after = await kv(server)
    assert after["bytes_used"] - before["bytes_used"] < before["bytes_used"]
    assert 0 < after["bytes_shared"] <= after["bytes_used"]


def test_a_fork_of_an_evicted_session_is_computed_again() -> None:
    """Room for one full session: the others lose their rows to it and keep their ids."""

    async def main() -> None:
        async with serving(kv_budget="170KiB") as server:
            parent = await server.open(token_ids=PROMPT)
            other = await server.open(token_ids=[9] * 256)
            state = (await server.client.get(f"/v1/sessions/{parent}")).json()
            assert state["kv"] == "evicted"
            plain = await server.post(f"/v1/sessions/{parent}/fork", at=80)
            assert (plain.json()["kv"], plain.json()["past_length"]) == ("evicted", 80)
            child = await fork(server, parent, at=80, token_ids=[1])
            assert (await server.client.get(f"/v1/sessions/{child}")).json()["kv"] == "resident"
            await assert_as_alone(server, child)
            await assert_as_alone(server, plain.json()["id"])
            assert await server.length(other) == 256

    asyncio.run(main())
