"""The real program's beginning and end, over real sockets."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from server.cli import run
from tests.server.program import PATIENCE, SERVE, TINY, free_port, program, until

STUCK = (sys.executable, "-m", "tests.server.stuck", *TINY)


def last_record(lines: Iterator[str]) -> dict[str, Any]:
    last = [line for line in lines if line][-1]
    return dict(json.loads(last.removeprefix("data: ")))


def test_s11_k03_sigterm_ends_streams_with_a_record_and_exits_0() -> None:
    with program("--grace-seconds", "0") as server, ExitStack() as streams:
        server.open()  # an idle one
        body = {"ignore_eos": True, "stream": True, "points": ["logits"]}
        told = []
        for _ in range(3):
            path = f"/v1/sessions/{server.open(token_ids=[1])}/generate"
            response = streams.enter_context(server.client.stream("POST", path, json=body))
            told.append(response.iter_lines())
            assert json.loads(next(told[-1]).removeprefix("data: "))["index"] == 0
        server.process.send_signal(signal.SIGTERM)
        for lines in told:
            last = last_record(lines)
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
        session_id = server.open(token_ids=[1])
        path = f"/v1/sessions/{session_id}/generate"
        with server.ask_raw(path, stream=True, points=["logits"], ignore_eos=True):
            until(lambda: server.n_requests() == 1)
            until(lambda: server.n_requests() == 0)
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
