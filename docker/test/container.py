"""One running container."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from docker.test.engine import CLIENT
from docker.test.shell import check, run, until

HELLO = Path(__file__).with_name("hello.py").read_text()
_CONTAINER_PORT = "8000/tcp"


class Container:
    """A container by its id."""

    def __init__(self, ident: str, env: dict[str, str]) -> None:
        self.ident = ident
        self._env = env

    @property
    def state(self) -> dict[str, Any]:
        """Whether it runs, its exit code, its health."""
        facts: dict[str, Any] = json.loads(self._docker("inspect", self.ident))[0]
        state: dict[str, Any] = facts["State"]
        return state

    @property
    def url(self) -> str:
        """Where it is published; on the loopback address, or the test ends."""
        place = self._docker("port", self.ident, _CONTAINER_PORT).strip()
        check("published on loopback", holds=place.startswith("127.0.0.1:"), seen=place)
        return f"http://{place}"

    def log(self, event: str) -> dict[str, Any]:
        """The line of the server's log with this event; {} if it has not come."""
        found = (json.loads(line) for line in self.said().splitlines() if line.startswith("{"))
        return next((line for line in found if line["event"] == event), {})

    def said(self) -> str:
        """All that the server wrote."""
        return run(CLIENT, "logs", self.ident, env=self._env, errors_too=True)

    def wait_healthy(self) -> None:
        """Until its own health check says so."""
        until("healthy", self._is_healthy)

    def hello_inside(self) -> None:
        """A real append, by a client inside."""
        self._docker("exec", "-i", self.ident, "python", "-", "http://127.0.0.1:8000", stdin=HELLO)

    def stop(self) -> float:
        """As `docker stop` does, with its own ten seconds; returns how many it took."""
        begun = time.monotonic()
        self._docker("stop", self.ident)
        return time.monotonic() - begun

    def kv_bytes(self) -> int:
        """The K/V budget that clients are told."""
        return int(httpx.get(f"{self.url}/v1/capabilities").json()["kv"]["bytes_total"])

    def _is_healthy(self) -> bool:
        state = self.state
        check("it runs", holds=state["Running"], seen=self.said()[-2000:])
        return bool(state["Health"]["Status"] == "healthy")

    def _docker(self, *words: str, stdin: str = "") -> str:
        return run(CLIENT, *words, env=self._env, stdin=stdin)


@contextmanager
def container(
    env: dict[str, str], image: str, *flags: str, command: tuple[str, ...] = ()
) -> Iterator[Container]:
    """Run `image` for as long as the context lasts."""
    # Asked often, so that the test need not wait for the next quarter of a minute.
    words = ("run", "--detach", "--health-interval=1s", *flags, image, *command)
    ident = run(CLIENT, *words, env=env).strip()
    try:
        yield Container(ident, env)
    finally:
        run(CLIENT, "rm", "--force", "--volumes", ident, env=env)
