"""The real program in a process of its own, over real sockets."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from server.cli import run
from server.serve import FORCED

PATIENCE = 60.0  # seconds until a test gives up; none asserts how long anything took
TINY = ("--model", "random:tiny", "--threads", "1", "--kv-budget", "64MiB")
QUIET = ("--log-level", "info")


@dataclass(frozen=True, slots=True)
class Program:
    """A server process and a client of it."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    port: int

    def open(self, **body: Any) -> str:
        return str(self.client.post("/v1/sessions", json=body).raise_for_status().json()["id"])

    def ask_raw(self, path: str, **body: Any) -> socket.socket:
        """A POST whose answer nobody reads yet."""
        content = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    def n_running(self) -> float:
        text = self.client.get("/metrics").text
        found = re.search(r"^stepscope:num_requests_running (\S+)$", text, re.MULTILINE)
        assert found
        return float(found[1])


@contextmanager
def program(*flags: str, probe: str = "/ready") -> Iterator[Program]:
    """A server that answers `probe` well, until the block ends."""
    port = _free_port()
    command = [sys.executable, "-m", "server", "serve", *TINY, *QUIET, "--port", str(port), *flags]
    with (
        subprocess.Popen(command) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        try:
            until(lambda: _answers(process, client, probe))
            yield Program(process, client, port)
        finally:
            process.kill()


def _answers(process: subprocess.Popen[bytes], client: httpx.Client, probe: str) -> bool:
    assert process.poll() is None, "the server ended"
    try:
        return client.get(probe).is_success
    except httpx.TransportError:
        return False


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_s11_k03_sigterm_ends_streams_with_a_record_and_exits_0() -> None:
    with program("--grace-seconds", "0") as server:
        path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
        server.open()  # an idle one
        body = {"ignore_eos": True, "stream": True, "points": ["logits"]}
        with server.client.stream("POST", path, json=body) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["index"] == 0
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        told = json.loads(last.removeprefix("data: "))
        assert told["error"]["code"] == "shutting_down"
        assert 1 < told["session"]["past_length"] < 1024
        assert server.process.wait(PATIENCE) == 0


def test_running_work_may_finish_within_the_grace_period() -> None:
    with program("--grace-seconds", "60") as server:
        path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
        body = {"ignore_eos": True, "stream": True, "max_tokens": 200, "points": []}
        with server.client.stream("POST", path, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["session"]["past_length"] == 201
        assert server.process.wait(PATIENCE) == 0


def test_a_second_signal_leaves_at_once() -> None:
    with program("--grace-seconds", "3600", "--write-timeout", "3600") as server:
        path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
        with server.ask_raw(path, stream=True, points=["logits"], ignore_eos=True):
            until(lambda: server.n_running() == 1)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.client.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == FORCED


def test_s06_q15_clients_that_do_not_read_or_write_are_given_up() -> None:
    flags = ("--write-timeout", "0.3", "--read-timeout", "0.3", "--reply-buffer-bytes", "1MiB")
    with program(*flags) as server:
        session_id = server.open(token_ids=[1])
        path = f"/v1/sessions/{session_id}/generate"
        with server.ask_raw(path, stream=True, points=["logits"], ignore_eos=True):
            until(lambda: server.n_running() == 1)
            until(lambda: server.n_running() == 0)
        length = server.client.get(f"/v1/sessions/{session_id}").json()["past_length"]
        assert length < 1024, "a row whose client is behind is not scheduled"
        body = {"token_ids": [7], "past_length": length}
        assert server.client.post(f"/v1/sessions/{session_id}/append", json=body).is_success

        heads = [b"POST /tokenize HT", b"POST /tokenize HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"]
        for head in heads:
            with socket.create_connection(("127.0.0.1", server.port)) as trickler:
                trickler.sendall(head)
                trickler.settimeout(PATIENCE)
                assert _closed(trickler)
        assert server.client.get("/health").is_success


def _closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_s01_s02_a_client_that_leaves_frees_the_work() -> None:
    with program() as server:
        session_id = server.open(token_ids=[1])
        path = f"/v1/sessions/{session_id}/generate"
        for stream in (True, False):
            before = server.client.get(f"/v1/sessions/{session_id}").json()["past_length"]
            with server.ask_raw(path, stream=stream, points=["logits"], points_at=str(before)):
                until(lambda: server.n_running() == 1)
            until(lambda: server.n_running() == 0)
            length = server.client.get(f"/v1/sessions/{session_id}").json()["past_length"]
            assert stream or length == before
            assert run(["health", "--url", f"http://127.0.0.1:{server.port}"]) == 0
            body = {"to": 1, "past_length": length}
            assert server.client.post(f"/v1/sessions/{session_id}/truncate", json=body).is_success


def test_a_signal_while_the_model_loads_ends_the_program_in_order() -> None:
    with program("--model", "random:gpt2", probe="/health") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def test_a_model_that_cannot_be_loaded_ends_the_program() -> None:
    command = [sys.executable, "-m", "server", "serve", "--model", "random:none"]
    ended = subprocess.run(
        [*command, "--port", str(_free_port())], capture_output=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 1
    assert b"random:none" in ended.stderr


def test_demo_shows_positions_and_tokens() -> None:
    command = [sys.executable, "-m", "server", "demo", "--model", "random:tiny"]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode()
    shown = [(int(p), int(i)) for p, i in re.findall(r"position +(\d+) +token +(\d+)", text)]
    assert shown[:3] == [(0, 15496), (1, 995), (2, 11)]
    assert [position for position, _ in shown] == list(range(8))
    assert re.search(r"embedding \[[+-]0\.\d{4}, ", text)
