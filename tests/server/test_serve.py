"""The real program's beginning and end, over real sockets."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from server.cli import run
from tests.server.decoding import STREAMS, accepting, told
from tests.server.program import PATIENCE, SERVE, TINY, free_port, program, until

STUCK = (sys.executable, "-m", "tests.server.stuck", *TINY)


def last_record(lines: Iterator[str]) -> dict[str, Any]:
    last = [line for line in lines if line][-1]
    return dict(json.loads(last.removeprefix("data: ")))


def test_s11_k03_sigterm_ends_streams_with_a_record_and_exits_0() -> None:
    with program("--grace-seconds", "0") as server, ExitStack() as streams:
        server.open()  # an idle one
        body = {"ignore_eos": True, "points": ["logits"]}
        parts = []
        for form in STREAMS:
            path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
            asked = server.client.stream("POST", path, json=body, headers=accepting(form))
            parts.append(streams.enter_context(asked).iter_raw())
        begun = [next(part) for part in parts]
        server.process.send_signal(signal.SIGTERM)
        for form, first, rest in zip(STREAMS, begun, parts, strict=True):
            last = told(form, first + b"".join(rest))[-1].record
            assert last["error"]["code"] == "shutting_down"
            assert 1 < last["session"]["past_length"] < 1024
        assert server.process.wait(PATIENCE) == 0


def test_k03_a_model_thread_that_is_stuck_does_not_keep_the_program() -> None:
    with program("--grace-seconds", "0.2", command=STUCK) as server:
        path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
        with server.client.stream("POST", path, json={"stream": True}) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["index"] == 0
            server.process.send_signal(signal.SIGTERM)
            last = last_record(lines)
        assert last["error"]["code"] == "shutting_down"
        assert last["session"]["past_length"] == 2
        assert server.process.wait(PATIENCE) == 0


def test_a_second_signal_leaves_at_once_while_the_engine_closes() -> None:
    with program("--grace-seconds", "0", command=STUCK) as server:
        path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
        with server.client.stream("POST", path, json={"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            last_record(lines)
        until(lambda: not _listens(server.port))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
            until(lambda: server.n_requests() == 1)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.client.get("/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_s06_q15_clients_that_do_not_read_or_write_are_given_up() -> None:
    flags = ("--write-timeout", "0.3", "--read-timeout", "0.3", "--reply-buffer-bytes", "1MiB")
    with program(*flags) as server:
        for form in STREAMS:
            session_id = server.open(token_ids=[1])
            path = f"/v1/sessions/{session_id}/generate"
            body: dict[str, Any] = {"points": ["logits"], "ignore_eos": True}
            with server.ask_raw(path, accept=form.value, **body):
                until(lambda: server.n_requests() == 1)
                until(lambda: server.n_requests() == 0)
            length = server.client.get(f"/v1/sessions/{session_id}").json()["past_length"]
            assert 1 < length < 1024, "a row whose client is behind is not scheduled"
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
                until(lambda: server.n_requests() == 1)
            until(lambda: server.n_requests() == 0)
            length = server.client.get(f"/v1/sessions/{session_id}").json()["past_length"]
            assert stream or length == before
            assert run(["health", "--url", f"http://127.0.0.1:{server.port}"]) == 0
            body = {"to": 1, "past_length": length}
            assert server.client.post(f"/v1/sessions/{session_id}/truncate", json=body).is_success


def test_a_signal_while_the_model_loads_ends_the_program_in_order() -> None:
    with program("--model", "random:gpt2", "--kv-budget", "1GiB", probe="/health") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def test_a_model_that_cannot_be_loaded_ends_the_program() -> None:
    for flags, reason in (
        (("--model", "random:none"), b"random:none"),
        (("--model", "random:tiny", "--kv-budget", "64KiB"), b"less than one session of 1024"),
    ):
        command = [*SERVE, *flags, "--port", str(free_port())]
        ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
        assert ended.returncode == 1
        assert reason in ended.stderr


def test_demo_shows_positions_and_tokens() -> None:
    command = [sys.executable, "-m", "server", "demo", "--model", "random:tiny"]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    text = ended.stdout.decode()
    shown = [(int(p), int(i)) for p, i in re.findall(r"position +(\d+) +token +(\d+)", text)]
    assert shown[:3] == [(0, 15496), (1, 995), (2, 11)]
    assert [position for position, _ in shown] == list(range(8))
    assert re.search(r"embedding \[[+-]0\.\d{4}, ", text)


def test_an_address_that_is_taken_ends_the_program_with_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*SERVE, *TINY, "--port", str(port)], capture_output=True, timeout=PATIENCE, check=False
        )
    assert ended.returncode == 1
    assert b"address already in use" in ended.stderr
    assert b"thread_left_behind" not in ended.stderr, "it only loads"


def test_an_upgrade_with_a_body_is_refused_and_never_stepped_with_defaults() -> None:
    """The parser would take the body for the other protocol, as with `curl --http2`."""
    with program() as server:
        session_id = server.open(token_ids=[1, 2])
        head = (
            f"POST /v1/sessions/{session_id}/generate HTTP/1.1\r\nHost: x\r\n"
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
            "Content-Type: application/json\r\nContent-Length: 18\r\n\r\n"
        )
        told = exchanged(server.port, head.encode() + b'{"past_length":99}')
        assert told.startswith(b"HTTP/1.1 400")
        assert b'"param":"Upgrade"' in told
        assert server.length(session_id) == 2
        get = f"GET /v1/sessions/{session_id} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n"
        told = exchanged(server.port, get.encode() + b"Upgrade: h2c\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200")


def test_a_head_without_end_is_cut_off() -> None:
    with program() as server:
        told = exchanged(server.port, b"GET /health HTTP/1.1\r\nx: " + b"a" * 2**20)
        assert told.startswith(b"HTTP/1.1 431")
        before = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx: "
        assert exchanged(server.port, before + b"a" * 30_000 + b"\r\n\r\n").startswith(
            b"HTTP/1.1 200"
        )


def test_s06_a_plain_answer_that_nobody_reads_is_given_up() -> None:
    with program("--write-timeout", "0.2") as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        reader.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        until(lambda: not _is_held(server.process.pid, reader.getsockname()[1]))
        assert server.client.get("/health").is_success


def _is_held(pid: int, client_port: int) -> bool:
    """Whether the process still has its end of the connection."""
    held = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(
        int(row[2].split(":")[1], 16) == client_port and f"socket:[{row[9]}]" in held
        for row in rows
    )


def exchanged(port: int, sent: bytes) -> bytes:
    """All that a server says to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        with suppress(OSError):
            connection.sendall(sent)
        told = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                told += part
        return told
