"""Many times the same against the real program. `make soak` runs the full sizes."""

import socket
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from server.negotiation import Form
from tests.server.decoding import STREAMS
from tests.server.program import Program, program, until

MIB = 2**20
FULL = pytest.mark.slow


@pytest.mark.parametrize("n_rounds", [10, pytest.param(200, marks=FULL)])
def test_s01_disconnects_after_the_first_event_leave_a_session_that_works(n_rounds: int) -> None:
    with program() as server:
        session_id = server.open(token_ids=[1])
        path = f"/v1/sessions/{session_id}"
        body: dict[str, Any] = {"stream": True, "ignore_eos": True, "points": ["logits"]}
        for _ in range(n_rounds):
            with server.ask_raw(f"{path}/generate", **body) as connection:
                received = b""
                while b"data: " not in received:
                    received += connection.recv(4096)
            until(lambda: server.n_requests() == 0)
            length = server.length(session_id)
            assert length > 1
            step = {"token_ids": [7], "past_length": length}
            told = server.client.post(f"{path}/append", json=step).raise_for_status().json()
            assert told["records"][0]["position"] == length
            server.client.post(f"{path}/truncate", json={"to": 1}).raise_for_status()
        assert used_bytes(server) == one_piece(server)


@pytest.mark.parametrize("n_rounds", [5, pytest.param(100, marks=FULL)])
def test_x01_two_steps_at_once_never_lose_one(n_rounds: int) -> None:
    with program() as server, ThreadPoolExecutor(2) as threads:
        session_id = server.open()
        path = f"{server.url}/v1/sessions/{session_id}/append"

        def step(token_id: int) -> httpx.Response:
            return httpx.post(path, json={"token_ids": [token_id]}, timeout=60)

        for n in range(n_rounds):
            before = server.length(session_id)
            answers = list(threads.map(step, [2 * n, 2 * n + 1]))
            stepped = [a.json() for a in answers if a.status_code == 200]
            refused = [a.json()["error"]["code"] for a in answers if a.status_code != 200]
            assert refused in ([], ["session_busy"])
            positions = sorted(told["records"][0]["position"] for told in stepped)
            assert positions == list(range(before, before + len(stepped)))
            assert server.length(session_id) == before + len(stepped)


@FULL
@pytest.mark.parametrize("form", STREAMS)
def test_s06_a_reader_that_sleeps_is_given_up_in_bounded_memory(form: Form) -> None:
    """The stream would be 200 MB or more; its buffer is 2 MiB."""
    flags = ("--write-timeout", "10", "--reply-buffer-bytes", "2MiB")
    with program(*flags) as server:
        session_id = server.open(token_ids=[1])
        body: dict[str, Any] = {"accept": form.value, "ignore_eos": True, "points": ["logits"]}
        before = server.memory_bytes()
        with server.ask_raw(f"/v1/sessions/{session_id}/generate", **body) as connection:
            assert connection.recv(1024)
            most = watched_until_given_up(server, connection)
        length = server.length(session_id)
        assert 1 < length < 200
        assert most < before + 64 * MIB
        step = {"token_ids": [7], "past_length": length}
        append = f"/v1/sessions/{session_id}/append"
        assert server.client.post(append, json=step).is_success


def watched_until_given_up(server: Program, _asleep: socket.socket) -> int:
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, server.memory_bytes())
        return server.n_requests() == 0

    until(lambda: server.n_requests() == 1)
    until(over)
    return most


@pytest.mark.parametrize(("n_warm", "n_rounds"), [(50, 50), pytest.param(500, 1500, marks=FULL)])
def test_m03_sessions_of_any_length_leave_no_memory_behind(n_warm: int, n_rounds: int) -> None:
    with program() as server:
        n_tokens = (1 + 389 * n % 1024 for n in range(n_warm + n_rounds))
        for _ in range(n_warm):
            one_life(server, next(n_tokens))
        before = server.memory_bytes()
        for _ in range(n_rounds):
            one_life(server, next(n_tokens))
        assert server.memory_bytes() < 1.05 * before
        assert used_bytes(server) == 0
        assert server.client.get("/v1/sessions").json()["data"] == []


@pytest.mark.parametrize(("n_warm", "n_rounds"), [(60, 60), pytest.param(2000, 8000, marks=FULL)])
def test_m03_forks_and_reuse_leave_no_memory_behind(n_warm: int, n_rounds: int) -> None:
    """What is kept for reuse fills the budget, which is small, and then changes for ever."""
    with program("--kv-budget", "2MiB") as server:
        churn = Churn(server)
        for _ in range(n_warm):
            churn.one_round()
        before = server.memory_bytes()
        for _ in range(n_rounds):
            churn.one_round()
        assert server.memory_bytes() < 1.05 * before
        churn.delete_all()
        told = kv(server)
        assert (told["bytes_used"], told["bytes_shared"]) == (0, 0)
        assert 0 < told["bytes_cached"] <= told["bytes_total"]
        assert server.client.get("/v1/sessions").json()["data"] == []


class Churn:
    """Sessions that are opened, forked, appended to, rolled back and deleted, by a seeded chance.

    Each is compared with what it should hold.
    """

    N_SESSIONS = 12

    def __init__(self, server: Program) -> None:
        self._server = server
        self._chance = Random(4)
        self._prompts = [[self._id() for _ in range(1000)] for _ in range(5)]
        self._tokens: dict[str, list[int]] = {}

    def one_round(self) -> None:
        """A new session, opened or forked; then an append and a truncate of any."""
        if len(self._tokens) == self.N_SESSIONS:
            self._delete(self._any())
        if self._tokens and self._chance.random() < 0.5:
            self._fork(self._any())
        else:
            self._open()
        self._append(self._any())
        self._truncate(self._any())
        self._check(self._any())

    def delete_all(self) -> None:
        for session_id in list(self._tokens):
            self._delete(session_id)

    def _id(self) -> int:
        return self._chance.randrange(50257)

    def _any(self) -> str:
        return self._chance.choice(list(self._tokens))

    def _open(self) -> None:
        prompt = self._chance.choice(self._prompts)[: self._chance.randrange(1, 1000)]
        self._tokens[self._server.open(token_ids=prompt)] = prompt

    def _fork(self, session_id: str) -> None:
        at = self._chance.randrange(len(self._tokens[session_id]) + 1)
        new = self._new(at)
        child = self._post(session_id, "fork", at=at, **({"token_ids": new} if new else {}))
        self._tokens[child["id"]] = [*self._tokens[session_id][:at], *new]

    def _append(self, session_id: str) -> None:
        tokens = self._tokens[session_id]
        if new := self._new(len(tokens)):
            self._post(session_id, "append", token_ids=new, past_length=len(tokens), points=[])
            self._tokens[session_id] = tokens + new

    def _truncate(self, session_id: str) -> None:
        tokens = self._tokens[session_id]
        to = self._chance.randrange(len(tokens) // 2, len(tokens) + 1)
        self._post(session_id, "truncate", to=to)
        self._tokens[session_id] = tokens[:to]

    def _delete(self, session_id: str) -> None:
        self._server.client.delete(f"/v1/sessions/{session_id}").raise_for_status()
        del self._tokens[session_id]

    def _check(self, session_id: str) -> None:
        told = self._server.client.get(f"/v1/sessions/{session_id}/tokens").json()["data"]
        assert [token["id"] for token in told] == self._tokens[session_id]

    def _new(self, length: int) -> list[int]:
        return [self._id() for _ in range(self._chance.randrange(min(200, 1025 - length)))]

    def _post(self, session_id: str, verb: str, **body: Any) -> dict[str, Any]:
        path = f"/v1/sessions/{session_id}/{verb}"
        return dict(self._server.client.post(path, json=body).raise_for_status().json())


def one_life(server: Program, n_tokens: int) -> None:
    path = f"/v1/sessions/{server.open()}"
    body: dict[str, Any] = {"token_ids": [7] * n_tokens, "points": []}
    server.client.post(f"{path}/append", json=body).raise_for_status()
    server.client.delete(path).raise_for_status()


def kv(server: Program) -> dict[str, int]:
    return dict(server.client.get("/v1/capabilities").json()["kv"])


def used_bytes(server: Program) -> int:
    return kv(server)["bytes_used"]


def one_piece(server: Program) -> int:
    """What a session of one token holds."""
    before = used_bytes(server)
    server.open(token_ids=[1])
    return used_bytes(server) - before
