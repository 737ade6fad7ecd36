"""Our server as clients meet it: the real process, uvicorn, and `bench.engines.client`.

The client is this process, and it has the same cores as the server. Its CPU time is not counted:

    seconds counted = wall seconds - CPU seconds of this process / cores

which takes off what the client's work costs at least. Where it takes a core while the model's other
threads wait at a barrier it costs more, and that stays counted.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from bench.cases import Capture, EngineSpec, Serve, side_of
from bench.engines.base import Engine
from bench.engines.client import FORMS, Form, connected
from bench.load import Stream, points_of, prompts, streams
from bench.machine import available_threads
from bench.modes import Values, config_in, settings_of
from bench.samples import Sample, Sides, in_turns
from model.config import GPT2Config
from server.settings import PREFIX

T = TypeVar("T")

START_SECONDS, STOP_SECONDS = 600, 15


class Http(Engine):
    """A server process and its client."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, config: GPT2Config) -> None:
        self._process = process
        self._port = port
        self._config = config
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._api = httpx.Client(base_url=_url(port), timeout=60, trust_env=False)

    def serve(self, case: Serve) -> list[Sample]:
        opened, sample = self._counted(self._served(case))
        self._delete(opened)
        return [sample.per(case.n_streams * case.n_tokens)]

    def capture(self, case: Capture) -> Sides:
        opened = [self._open(token_ids) for token_ids in prompts(case)]
        sides = {
            side_of(form, asked): partial(self._burst, case, opened, FORMS[form], asked)
            for form, asked in product(FORMS, ("", *case.asked))
        }
        samples = in_turns(sides, case.n_turns, warm_up=0)
        self._delete(opened)
        return samples

    def next_id(self, token_ids: Sequence[int]) -> int:
        session_id = self._open(token_ids)
        answer = self._api.post(f"/v1/sessions/{session_id}/generate", json=_greedy(1))
        self._delete([session_id])
        return int(answer.raise_for_status().json()["records"][0]["token"]["id"])

    def close(self) -> None:
        self._runner.close()
        self._api.close()
        self._process.terminate()
        self._process.wait(STOP_SECONDS)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def _counted(self, work: Coroutine[Any, Any, T]) -> tuple[T, Sample]:
        """What `work` returns, and what the server needed for it."""
        start, cpu_start = time.perf_counter(), time.process_time()
        result = self._run(work)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        return result, Sample(seconds - cpu / available_threads(), 0.0)

    def _open(self, token_ids: Sequence[int]) -> str:
        opened = self._api.post("/v1/sessions", json={"token_ids": list(token_ids)})
        return str(opened.raise_for_status().json()["id"])

    def _delete(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            self._api.delete(f"/v1/sessions/{session_id}").raise_for_status()

    async def _served(self, case: Serve) -> list[str]:
        return await asyncio.gather(*(self._stream(one) for one in streams(case)))

    async def _stream(self, stream: Stream) -> str:
        await asyncio.sleep(stream.at)
        async with connected(self._port) as client:
            opened = await client.created("/v1/sessions", {"token_ids": stream.token_ids})
            path, body = f"/v1/sessions/{opened['id']}/generate", _greedy(stream.n_tokens)
            n_records = await client.n_streamed(path, body, FORMS["sse"])
        assert n_records == stream.n_tokens, f"{n_records} records came"
        return str(opened["id"])

    def _burst(self, case: Capture, session_ids: Sequence[str], form: Form, asked: str) -> Sample:
        points = [str(point) for point in points_of(asked, self._config)]
        body = _greedy(case.n_tokens) | {"points": points}
        told, sample = self._counted(self._streamed(session_ids, body, form))
        assert told == [case.n_tokens] * case.n_sessions, f"{told} records came"
        for session_id in session_ids:
            path, to = f"/v1/sessions/{session_id}/truncate", {"to": case.context}
            self._api.post(path, json=to).raise_for_status()
        return sample.per(case.n_sessions * case.n_tokens)

    async def _streamed(
        self, session_ids: Sequence[str], body: dict[str, Any], form: Form
    ) -> list[int]:
        """How many records each session's stream had."""

        async def one(session_id: str) -> int:
            async with connected(self._port) as client:
                return await client.n_streamed(f"/v1/sessions/{session_id}/generate", body, form)

        return await asyncio.gather(*(one(session_id) for session_id in session_ids))


def _greedy(n_tokens: int) -> dict[str, Any]:
    return {"max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def build(spec: EngineSpec, directory: Path, n_threads: int) -> Http:
    port = _free_port()
    settings = settings_of(spec, directory, n_threads) | {"port": port}
    command = [sys.executable, "-m", "server", "serve"]
    process = subprocess.Popen(command, env=_environment(settings))
    _wait_until_ready(process, port)
    return Http(process, port, config_in(directory))


def _wait_until_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{_url(port)}/ready", trust_env=False).is_success:
                return
        time.sleep(0.1)
    process.kill()
    raise RuntimeError("the server did not become ready")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(settings: Values) -> dict[str, str]:
    """This process's environment, with the settings of this server and of no other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return kept | {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
