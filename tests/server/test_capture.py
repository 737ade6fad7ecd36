"""Many prompts to frames: in order, against full passes, bounded, refused as a whole."""

import asyncio
import json
from collections.abc import AsyncGenerator
from types import AsyncGeneratorType
from typing import Any

import numpy as np
import pytest

from engine.studies.bulk import Bulk, PromptActivations
from engine.studies.flow import WINDOW
from model.config import GPT2Config
from server.negotiation import Form
from server.studies.bodies import MAX_PROMPTS
from sessions.edits import Edit
from tests.agreement import assert_agrees
from tests.reference import reference_points
from tests.server.decoding import Told, accepting, told
from tests.server.forking import LIVELY, PROMPT, ids
from tests.server.gating import gated, until_idle
from tests.server.hand import Hand, http_scope, until
from tests.server.serving import Serving, error_of, served, serving

pytestmark = pytest.mark.usefixtures("lively")

CONFIG: GPT2Config = LIVELY.config
PROMPTS = [PROMPT[:3], PROMPT[10:40], [50256], PROMPT[50:62]]
POINTS = ["resid_post.1", "pattern.0", "z.1[1]", "logits[318,262]"]


async def captured(server: Serving, **body: Any) -> list[Told]:
    answer = await server.post("/v1/capture", **({"token_ids": PROMPTS, "points": POINTS} | body))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == Form.FRAMES.value
    return told(Form.FRAMES, answer.content)


def assert_frame(one: Told, token_ids: list[int], positions: list[int], **more: Any) -> None:
    expected = reference_points(LIVELY, token_ids, **more)
    n_keys = max(positions) + 1
    assert_agrees(one.points["resid_post.1"], expected["resid_post.1"][positions])
    assert_agrees(one.points["pattern.0"], expected["pattern.0"][positions][..., :n_keys])
    assert_agrees(one.points["z.1[1]"], expected["z.1"][positions][:, 1:])
    assert_agrees(one.points["logits[318,262]"], expected["logits"][positions][:, [318, 262]])
    assert one.points["n_keys"].tolist() == [p + 1 for p in positions]


@served
async def test_a_frame_for_each_prompt_in_order(server: Serving) -> None:
    *frames, done = await captured(server)
    for index, (one, token_ids) in enumerate(zip(frames, PROMPTS, strict=True)):
        positions = list(range(len(token_ids)))
        assert one.record == {
            "object": "capture",
            "index": index,
            "token_ids": token_ids,
            "positions": positions,
        }
        assert_frame(one, token_ids, positions)
    assert done.record["usage"]["steps"] == sum(map(len, PROMPTS))
    assert done.record["session"] is None
    assert await ids(server) == []


@pytest.mark.parametrize("positions", ["last", [0], [7, 2, 2]])
def test_positions_are_chosen(positions: Any) -> None:
    async def main() -> None:
        async with serving() as server:
            prompts = [PROMPT[:9], PROMPT[10:30]]
            *frames, _ = await captured(server, token_ids=prompts, positions=positions)
            for one, token_ids in zip(frames, prompts, strict=True):
                chosen = [len(token_ids) - 1] if positions == "last" else sorted(set(positions))
                assert one.record["positions"] == chosen
                assert_frame(one, token_ids, chosen)

    asyncio.run(main())


@served
async def test_texts_are_tokenized_and_may_begin_with_bos(server: Serving) -> None:
    tokenizer = server.service.engine.tokenizer
    texts = ["Hello world", "a<|endoftext|>", "é"]
    *plain, _ = await captured(server, token_ids=None, prompts=texts)
    assert [one.record["token_ids"] for one in plain] == [tokenizer.encode(t) for t in texts]
    more = {"prepend_bos": True, "allow_special": True}
    *special, _ = await captured(server, token_ids=None, prompts=texts, **more)
    assert special[1].record["token_ids"] == [50256, *tokenizer.encode("a"), 50256]
    assert_frame(special[0], [50256, *tokenizer.encode("Hello world")], [0, 1, 2])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_means_over_positions(dtype: str) -> None:
    async def main() -> None:
        async with serving(prefill_chunk=8) as server:
            points = ["resid_post.*", "z.0"]
            *frames, done = await captured(
                server, points=points, reduce="mean", dtype=dtype, positions="all"
            )
            for one, token_ids in zip(frames, PROMPTS, strict=True):
                expected = reference_points(LIVELY, token_ids)
                assert one.points.keys() == {"resid_post.0", "resid_post.1", "z.0"}
                for name, mean in one.points.items():
                    assert mean.dtype == dtype
                    row = expected[name].double().mean(0).numpy()
                    atol = 3e-3 if dtype == "float16" else 1e-4
                    np.testing.assert_allclose(mean, row, rtol=2e-3, atol=atol)
            assert done.record["object"] == "done"

    asyncio.run(main())


@served
async def test_float16_halves_the_bytes(server: Serving) -> None:
    body = {"token_ids": PROMPTS, "points": ["resid_post.*"]}
    whole = await server.post("/v1/capture", **body)
    half = await server.post("/v1/capture", **body, dtype="float16")
    n_bytes = sum(map(len, PROMPTS)) * 2 * CONFIG.n_embd * 2
    assert abs(len(whole.content) - len(half.content) - n_bytes) < 64
    first, one = (told(Form.FRAMES, a.content)[1].points["resid_post.1"] for a in (half, whole))
    np.testing.assert_array_equal(first, one.astype(np.float16))


@served
async def test_interventions_are_of_every_prompt(server: Serving) -> None:
    prompts = [PROMPT[:5], PROMPT[10:19]]
    zero = {"point": "attn_out.0", "op": "scale", "scale": 0, "positions": "1,3:"}
    *frames, _ = await captured(server, token_ids=prompts, interventions=[zero])
    edit = Edit(point="attn_out.0", op="scale", scale=0.0)
    for one, token_ids in zip(frames, prompts, strict=True):
        positions = list(range(len(token_ids)))
        edits = {p: (edit,) for p in positions if p == 1 or p >= 3}
        assert_frame(one, token_ids, positions, edits=edits)


@served
async def test_other_peoples_names_and_forms(server: Serving) -> None:
    *_, done = await captured(server, points=["blocks.0.hook_resid_post"])
    assert done.record["aliases"] == {"blocks.0.hook_resid_post": "resid_post.0"}
    body = {"token_ids": [[1]], "points": ["wte"]}
    for form in (Form.SSE, Form.NDJSON):
        refused = await server.client.post("/v1/capture", json=body, headers=accepting(form))
        assert (refused.status_code, error_of(refused)["code"]) == (400, "not_supported")
    frames = await server.client.post("/v1/capture", json=body, headers=accepting(Form.FRAMES))
    assert frames.status_code == 200


ZERO = {"point": "z.0", "op": "scale", "scale": 0, "positions": "1"}
MASK = {"point": "scores.0", "op": "mask", "keys": "0"}
BOS_TOO_MANY = {"token_ids": [[1] * 256], "prepend_bos": True}
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"token_ids": [[1], []]}, "empty_input", "token_ids", "token_ids[1]"),
    ({"token_ids": [[1], [2, 50257]]}, "invalid_request", "token_ids", "token_ids[1]"),
    ({"token_ids": [[1], [2], [1] * 257]}, "context_length_exceeded", "token_ids", "token_ids[2]"),
    (BOS_TOO_MANY, "context_length_exceeded", "token_ids", "[0]"),
    ({"token_ids": None, "prompts": ["a", ""]}, "empty_input", "prompts", "prompts[1]"),
    ({"token_ids": None, "prompts": ["a" * 131_073]}, "context_length_exceeded", "prompts", "[0]"),
    ({"token_ids": []}, "empty_input", "token_ids", "empty"),
    ({"prompts": ["a"]}, "empty_input", "prompts", "one of them"),
    ({"token_ids": None}, "empty_input", "prompts", "one of them"),
    ({"token_ids": [1, 2]}, "invalid_request", "token_ids", ""),
    ({"token_ids": [[True]]}, "invalid_request", "token_ids", ""),
    ({"token_ids": [[1]] * (MAX_PROMPTS + 1)}, "invalid_request", "token_ids", "1024"),
    ({"positions": [1]}, "invalid_request", "positions", "token_ids[0]"),
    ({"positions": []}, "invalid_request", "positions", ""),
    ({"positions": [-1]}, "invalid_request", "positions", ""),
    ({"positions": "first"}, "invalid_request", "positions", ""),
    ({"points": []}, "invalid_request", "points", ""),
    ({"points": None}, "invalid_request", "points", ""),
    ({"points": ["x"]}, "unknown_point", "points", ""),
    ({"points": ["pattern.0"], "reduce": "mean"}, "invalid_request", "points", "pattern.0"),
    ({"points": ["lens.0"], "reduce": "mean"}, "invalid_request", "points", "lens.0"),
    ({"reduce": "sum"}, "invalid_request", "reduce", ""),
    ({"dtype": "bfloat16"}, "invalid_request", "dtype", ""),
    ({"allow_special": True}, "invalid_request", "allow_special", ""),
    ({"interventions": [{"point": "z.0"}]}, "invalid_request", "interventions", ""),
    ({"interventions": [ZERO]}, "invalid_request", "interventions", "position 1"),
    ({"interventions": [MASK]}, "invalid_request", "interventions", "no key"),
    ({"token_ids": [[1], [2] * 200], "points": ["logits"]}, "response_too_large", "points", ""),
    ({"stream": True}, "invalid_request", "stream", ""),
]


def test_bad_bodies_are_refused_before_anything_is_stepped() -> None:
    async def main() -> None:
        async with gated(max_response_bytes=2_000_000) as (server, model):
            n_passes = model.n_passes
            good: dict[str, Any] = {"token_ids": [[1]], "points": ["wte", "z.0"]}
            for body, code, param, message in BAD:
                answer = await server.post("/v1/capture", **(good | body))
                assert 400 <= answer.status_code < 500, (body, answer.text)
                error = error_of(answer)
                assert error["code"] == code, (body, error)
                assert (error["param"] or param) == param, (body, error)
                assert message in error["message"]
            assert model.n_passes == n_passes
            assert server.service.answers.held_bytes == 0
            assert (await server.post("/v1/capture", **good)).status_code == 200

    asyncio.run(main())


def capturing(
    server: Serving, prompts: list[list[int]], *, write_blocks: bool = False
) -> tuple[Hand, asyncio.Task[None]]:
    hand = Hand(write_blocks=write_blocks)
    hand.feed(json.dumps({"token_ids": prompts, "points": ["resid_post.*"]}).encode())
    scope = http_scope("POST", "/v1/capture", headers={"content-type": "application/json"})
    return hand, asyncio.create_task(hand.run(server.app, scope))


def test_a_slow_reader_holds_no_more_than_the_window() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            hand, task = capturing(server, [[n] for n in range(200)], write_blocks=True)
            await until(lambda: model.n_passes > 0)
            held = server.service.answers.held_bytes
            assert held > 0
            await until_idle(server)
            await until(lambda: _n_stepped(server) > 0)  # told by another thread
            assert _n_stepped(server) <= WINDOW
            hand.may_write.set()
            await task
            assert len(told(Form.FRAMES, hand.body)) == 201
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


def test_frames_under_way_are_bounded_in_bytes_too() -> None:
    async def main() -> None:
        async with gated(max_response_bytes=100_000) as (server, model):
            hand, task = capturing(server, [[n] for n in range(50)], write_blocks=True)
            await until(lambda: model.n_passes > 0)
            assert server.service.answers.held_bytes <= 100_000
            await until_idle(server)
            await until(lambda: _n_stepped(server) > 0)
            assert _n_stepped(server) <= 100_000 // (32 * 1024 + 2 * CONFIG.n_embd * 4)
            hand.may_write.set()
            await task
            assert len(told(Form.FRAMES, hand.body)) == 51

    asyncio.run(main())


def _n_stepped(server: Serving) -> int:
    """Prompts that were begun so far."""
    text = server.host.metrics.exposition().decode()
    lines = [line for line in text.splitlines() if line.startswith("stepscope:prompt_tokens")]
    return int(float(lines[0].split()[-1]))


def test_a_client_that_leaves_ends_the_prompts_under_way() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            model.close()
            hand, task = capturing(server, PROMPTS * 50)
            await until(lambda: len(server.service.engine._requests) > 0)
            hand.disconnect()
            await task
            model.open()
            await until_idle(server)
            assert model.n_passes <= 2
            assert server.service.answers.held_bytes == 0
            assert not server.service.engine._thread.places._places

    asyncio.run(main())


def test_a_client_that_leaves_before_the_first_byte_ends_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[AsyncGenerator[PromptActivations, None]] = []
    real = Bulk.run

    def run(*arguments: Any, **more: Any) -> AsyncGenerator[PromptActivations, None]:
        begun.append(real(*arguments, **more))
        return begun[0]

    monkeypatch.setattr(Bulk, "run", run)

    async def main() -> None:
        async with gated() as (server, model):
            hand, task = capturing(server, PROMPTS * 50, write_blocks=True)
            await until(lambda: model.n_passes > 0)
            await until_idle(server)  # the first ones wait to be sent
            assert not hand.sent
            hand.disconnect()
            await task
            assert isinstance(begun[0], AsyncGeneratorType)
            assert begun[0].ag_frame is None, "it was not closed"
            assert server.service.answers.held_bytes == 0

    asyncio.run(main())


def test_what_cannot_begin_is_a_status_and_a_later_fault_a_frame() -> None:
    async def main() -> None:
        async with gated() as (server, model):
            model.fails = True
            answer = await server.post("/v1/capture", token_ids=[[1]] * 3, points=["z.0"])
            assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
            model.fails = False
            hand, task = capturing(server, [[n] for n in range(WINDOW + 2)], write_blocks=True)
            await until(lambda: model.n_passes > 0)
            await until_idle(server)
            model.fails = True
            hand.may_write.set()
            await task
            [*frames, ending] = told(Form.FRAMES, hand.body)
            assert [one.record["index"] for one in frames] == list(range(len(frames)))
            assert 0 < len(frames) <= WINDOW
            assert ending.record["error"]["code"] == "internal_error"
            assert ending.record["session"] is None
            await until_idle(server)

    asyncio.run(main())
