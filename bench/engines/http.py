"""Our server as clients meet it: the real process, uvicorn, SSE, a TCP connection per stream.

The client is this process, and it has the same cores as the server. Its CPU time is not counted:

    seconds counted = wall seconds - CPU seconds of this process / cores

which takes off what the client's work costs at least. Where it takes a core while the model's other
threads wait at a barrier it costs more, and that stays counted. The client reads lines and counts
those that are records; it parses nothing.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from bench.cases import EngineSpec, Serve
from bench.engines.base import Engine
from bench.load import Stream, streams
from bench.machine import available_threads
from bench.modes import Values, settings_of
from bench.samples import Sample
from server.settings import PREFIX

T = TypeVar("T")

RECORD, END = b'data: {"object":"step"', b"data: [DONE]"
START_SECONDS, STOP_SECONDS = 600, 15


class Http(Engine):
    """A server process and its client."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self._process = process
        self._port = port
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._api = httpx.Client(base_url=_url(port), timeout=60, trust_env=False)

    def serve(self, case: Serve) -> list[Sample]:
        start, cpu_start = time.perf_counter(), time.process_time()
        opened = self._run(self._served(case))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        for session_id in opened:
            self._api.delete(f"/v1/sessions/{session_id}").raise_for_status()
        counted = seconds - cpu / available_threads()
        return [Sample(counted / (case.n_streams * case.n_tokens), 0.0)]

    def next_id(self, token_ids: Sequence[int]) -> int:
        opened = self._api.post("/v1/sessions", json={"token_ids": list(token_ids)})
        session_id = opened.raise_for_status().json()["id"]
        answer = self._api.post(f"/v1/sessions/{session_id}/generate", json=_greedy(1))
        self._api.delete(f"/v1/sessions/{session_id}").raise_for_status()
        return int(answer.raise_for_status().json()["records"][0]["token"]["id"])

    def close(self) -> None:
        self._runner.close()
        self._api.close()
        self._process.terminate()
        self._process.wait(STOP_SECONDS)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _served(self, case: Serve) -> list[str]:
        return await asyncio.gather(*(self._stream(one) for one in streams(case)))

    async def _stream(self, stream: Stream) -> str:
        await asyncio.sleep(stream.at)
        async with _connected(self._port) as (reader, writer):
            writer.write(_post("/v1/sessions", {"token_ids": stream.token_ids}))
            session_id = str(json.loads(await _body(reader))["id"])
            body = _greedy(stream.n_tokens) | {"stream": True}
            writer.write(_post(f"/v1/sessions/{session_id}/generate", body))
            n_records = await _n_records(reader)
        assert n_records == stream.n_tokens, f"{n_records} records came"
        return session_id


async def _n_records(reader: asyncio.StreamReader) -> int:
    """Read a stream of records to its end and count them."""
    n_records = 0
    async for line in reader:
        if line.startswith(RECORD):
            n_records += 1
        elif line.startswith(END):
            break
    return n_records


async def _body(reader: asyncio.StreamReader) -> bytes:
    """The body of an answer of known length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(length)
    assert b" 201 " in head.partition(b"\r\n")[0], body
    return body


@asynccontextmanager
async def _connected(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


def _post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


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
    return Http(process, port)


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
