"""A server on a real socket, in a thread of this process, whose model waits at a gate."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from server.host import Host
from server.serve import DrainingServer
from server.settings import Settings
from tests.server.program import PATIENCE, free_port, until
from tests.server.serving import Gated, GatedLoader


@dataclass(frozen=True, slots=True)
class Listening:
    """A server, a client of it and the gate."""

    client: httpx.Client
    model: Gated

    def open(self, **body: Any) -> str:
        return str(self.client.post("/v1/sessions", json=body).raise_for_status().json()["id"])


@contextmanager
def listening(**settings: Any) -> Iterator[Listening]:
    port = free_port()
    defaults: dict[str, Any] = {"model": "random:tiny", "threads": 1, "kv_budget": 2**26}
    loader = GatedLoader()
    host = Host(Settings(port=port, **(defaults | settings)), loader=loader)
    server = DrainingServer(host)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            until(lambda: host.failure is not None or _is_ready(client))
            yield Listening(client, loader.model)
    finally:
        loader.model.open()
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").is_success
    except httpx.TransportError:
        return False
