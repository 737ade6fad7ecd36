"""`stepscope demo`: a real server, a session, and what each step looks like. A client's view."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

START_SECONDS = 600.0
STOP_SECONDS = 15.0
_SHOWN = 4  # numbers of each vector

_console = Console()


def demo(model: str) -> int:
    """Run it. Returns 0 if every step came as it should."""
    with running_server(model) as url, httpx.Client(base_url=url, timeout=60) as client:
        session = client.post("/v1/sessions", json={}).raise_for_status().json()
        _console.print(
            f"session {session['id']} on {session['model']}, past_length 0\n", soft_wrap=True
        )
        _console.print('append "Hello world"')
        length = _append(client, session["id"], "Hello world")
        _console.print(f'\nappend ", again" at past_length {length}')
        length = _append(client, session["id"], ", again", past_length=length)
        _console.print("\ngenerate 4 tokens")
        _step(client, session["id"], "generate", {"max_tokens": 4, "temperature": 0})
        client.delete(f"/v1/sessions/{session['id']}").raise_for_status()
    return 0


def _append(client: httpx.Client, session_id: str, prompt: str, *, past_length: int = 0) -> int:
    body = {"prompt": prompt, "past_length": past_length}
    return _step(client, session_id, "append", body)


def _step(client: httpx.Client, session_id: str, verb: str, body: dict[str, Any]) -> int:
    """Stream one request and print its records; returns the session's length after it."""
    body = {**body, "encoding_format": "float"}
    headers = {"accept": "text/event-stream"}
    path = f"/v1/sessions/{session_id}/{verb}"
    with client.stream("POST", path, json=body, headers=headers) as response:
        response.raise_for_status()
        for record in _records(response):
            if record["object"] == "done":
                return int(record["session"]["past_length"])
            _print_record(record)
    raise RuntimeError("the stream ended without its last record")


def _records(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            record = json.loads(line.removeprefix("data: "))
            if "error" in record:
                raise RuntimeError(record["error"]["message"])
            yield record


def _print_record(record: dict[str, Any]) -> None:
    token, data = record["token"], record["points"]["embedding"]["data"]
    numbers = ", ".join(f"{number:+.4f}" for number in data[:_SHOWN])
    _console.print(
        f"  position {record['position']:>3}  token {token['id']:>5} "
        f"{escape(repr(token['text'])):<14} embedding [dim]\\[{numbers}, ... {len(data)}][/dim]",
        soft_wrap=True,
    )


@contextlib.contextmanager
def running_server(model: str) -> Iterator[str]:
    """A server process on a free port, ready; stopped at the end. Yields its URL."""
    port = _free_port()
    command = [sys.executable, "-m", "server", "serve", "--model", model, "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "warning"], env=_plain_environment())
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).is_success:
                return
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _plain_environment() -> dict[str, str]:
    """This environment without settings of a server, which are not the demo's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_")}
