"""What is there only on a real socket: records that come one by one, whatever lies between."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from docs.clients.frames import frames
from server.negotiation import Form
from tests.server.decoding import STREAMS
from tests.server.program import PATIENCE, program, until
from tests.server.sockets import listening

FORMS = [form.value for form in STREAMS]


def records(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """What a reader sees, as soon as it is there."""
    assert response.status_code == 200
    assert "content-encoding" not in response.headers
    if response.headers["content-type"] == Form.FRAMES.value:
        return (record for record, _ in frames(response.iter_raw()))
    return _lines(response)


def _lines(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Split at line feeds only, as the specifications say."""
    rest = b""
    for part in response.iter_raw():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data and data != b"[DONE]" and not data.startswith(b":"):
                yield json.loads(data)
    assert rest == b""


@pytest.mark.parametrize("accept", FORMS)
def test_s12_record_n_arrives_before_step_n_plus_1_is_computed(accept: str) -> None:
    with listening() as server:
        path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
        server.model.close()
        before = server.model.n_passes
        headers = {"accept": accept, "accept-encoding": "gzip"}
        body = {"max_tokens": 4, "ignore_eos": True}
        with server.client.stream("POST", path, json=body, headers=headers) as response:
            assert server.model.n_passes == before, "headers come before the first step"
            told = records(response)
            for index in range(4):
                server.model.allow()
                assert next(told)["index"] == index
                assert server.model.n_passes == before + index + 1
            assert [record["object"] for record in told] == ["done"]


@pytest.mark.parametrize("accept", FORMS)
def test_s12_a_chunk_of_an_append_arrives_before_the_next_is_computed(accept: str) -> None:
    with listening(prefill_chunk=2) as server:
        path = f"/v1/sessions/{server.open()}/append"
        server.model.close()
        before = server.model.n_passes
        headers = {"accept": accept, "accept-encoding": "gzip"}
        body = {"token_ids": [1, 2, 3, 4, 5, 6]}
        with server.client.stream("POST", path, json=body, headers=headers) as response:
            told = records(response)
            for chunk in range(3):
                server.model.allow()
                assert [next(told)["position"] for _ in range(2)] == [2 * chunk, 2 * chunk + 1]
                assert server.model.n_passes == before + chunk + 1
            assert [record["object"] for record in told] == ["done"]


def test_s13_line_breaks_of_any_kind_come_back_exactly() -> None:
    ids = [201, 198, 447, 101, 188]  # \r, \n, the halves of U+2028, NUL
    with program() as server:
        for accept in FORMS:
            session_id = server.open()
            path, headers = f"/v1/sessions/{session_id}/append", {"accept": accept}
            body = {"token_ids": ids}
            with server.client.stream("POST", path, json=body, headers=headers) as response:
                *steps, done = records(response)
            assert done["session"]["past_length"] == 5
            assert [record["token"]["id"] for record in steps] == ids
            assert "".join(record["text"] for record in steps) == "\r\n\u2028\0"
            tokens = server.client.get(f"/v1/sessions/{session_id}/tokens").json()["data"]
            assert [token["id"] for token in tokens] == ids
            if accept == Form.FRAMES.value:
                continue
            with server.client.stream(
                "POST", f"/v1/sessions/{server.open()}/append", json=body, headers=headers
            ) as response:
                n_lines = len(list(response.iter_lines()))  # httpx splits at every line break
            assert n_lines == (14 if accept == "text/event-stream" else 6)


def test_x08_a_retry_after_a_lost_answer_is_not_stepped_twice() -> None:
    with program() as server:
        session_id = server.open(token_ids=[1])
        path = f"/v1/sessions/{session_id}/append"
        body: dict[str, Any] = {"token_ids": [2], "past_length": 1}
        with server.ask_raw(path, **body):
            until(lambda: server.length(session_id) == 2)
        again = server.client.post(path, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "past_length_mismatch")
        numbers = {name: again.json()["error"][name] for name in ("expected", "past_length")}
        assert numbers == {"expected": 1, "past_length": 2}
        assert server.length(session_id) == 2


def test_s05_health_answers_while_large_bodies_arrive() -> None:
    n_bodies = 5
    large = b'{"tokens": [' + b"1," * (7 * 2**20) + b"1]}"
    statuses = []

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            for _ in range(n_bodies):
                headers = {"content-type": "application/json"}
                answer = client.post("/detokenize", content=large, headers=headers)
                statuses.append(answer.status_code)

    with program() as server:
        asking = threading.Thread(target=ask, args=(server.url,))
        asking.start()
        n_polls = 0
        while asking.is_alive():
            assert server.client.get("/health").status_code == 200
            n_polls += 1
        assert statuses == [400] * n_bodies
        assert n_polls > n_bodies, "answered between the parts of a body, not only after each"
