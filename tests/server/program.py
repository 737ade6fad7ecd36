"""The real program in a process of its own, over real sockets."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 60.0  # seconds until a test gives up; none asserts how long anything took
SERVE = (sys.executable, "-m", "server", "serve")
TINY = ("--model", "random:tiny", "--threads", "1", "--kv-budget", "64MiB")


@dataclass(frozen=True, slots=True)
class Program:
    """A server process and a client of it."""

    process: subprocess.Popen[bytes]
    client: httpx.Client
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self, **body: Any) -> str:
        return str(self.client.post("/v1/sessions", json=body).raise_for_status().json()["id"])

    def length(self, session_id: str) -> int:
        told = self.client.get(f"/v1/sessions/{session_id}").raise_for_status().json()
        return int(told["past_length"])

    def ask_raw(self, path: str, *, accept: str = "*/*", **body: Any) -> socket.socket:
        """A POST whose answer nobody reads yet."""
        content = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Accept: {accept}\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    def n_requests(self) -> float:
        """Those that are stepped and those that wait, for others or for their reader."""
        text = self.client.get("/metrics").text
        found = re.findall(
            r"^stepscope:num_requests_(?:running|waiting) (\S+)$", text, re.MULTILINE
        )
        assert len(found) == 2
        return sum(map(float, found))

    def memory_bytes(self) -> int:
        """What the process has resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found
        return int(found[1]) * 1024


@contextmanager
def program(
    *flags: str, probe: str = "/ready", command: Sequence[str] = (*SERVE, *TINY)
) -> Iterator[Program]:
    """A server that answers `probe` well, until the block ends."""
    port = free_port()
    with (
        subprocess.Popen([*command, "--port", str(port), *flags], env=_plain()) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client,
    ):
        try:
            until(lambda: _answers(process, client, probe))
            yield Program(process, client, port)
        finally:
            process.kill()


def _plain() -> dict[str, str]:
    """This environment without settings of a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_")}


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
