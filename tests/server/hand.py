"""A client that is fed by hand: ASGI messages in, ASGI messages out, disconnects at will."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Scope


def http_scope(
    method: str = "POST",
    path: str = "/",
    *,
    headers: dict[str, str] | None = None,
    extensions: dict[str, Any] | None = None,
) -> Scope:
    path, _, query = path.partition("?")
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": raw,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": extensions or {},
    }


class Hand:
    """One request. `feed` gives the application a message; `sent` is what it answered."""

    def __init__(self, *, write_blocks: bool = False) -> None:
        self.sent: list[Message] = []
        self.n_received = 0
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._news = asyncio.Event()
        self.may_write = asyncio.Event()
        if not write_blocks:
            self.may_write.set()

    def feed(self, body: bytes = b"", *, more: bool = False) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        message = await self._incoming.get()
        self.n_received += 1
        return message

    async def send(self, message: Message) -> None:
        await self.may_write.wait()
        self.sent.append(message)
        self._news.set()
        if self.complete:
            self.disconnect()  # as uvicorn tells it, even where the connection lives on

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        async with asyncio.timeout(20) as patience:
            await app(scope, self.receive, self.send)
        assert not patience.expired(), "the application ended only when it was cancelled"

    async def until_body_has(self, part: bytes) -> None:
        async with asyncio.timeout(20):
            while part not in self.body:
                self._news.clear()
                await self._news.wait()

    @property
    def status(self) -> int | None:
        return next((m["status"] for m in self.sent if m["type"] == "http.response.start"), None)

    @property
    def headers(self) -> dict[str, str]:
        start = next(m for m in self.sent if m["type"] == "http.response.start")
        return {name.decode(): value.decode() for name, value in start["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def complete(self) -> bool:
        last = self.sent[-1] if self.sent else {"type": "none"}
        return last["type"] == "http.response.body" and not last.get("more_body", False)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or task will bring about."""
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.001)


def sse(body: bytes) -> list[str]:
    """The `data:` payloads of an event stream that has nothing else but pings."""
    payloads = []
    for event in body.decode().split("\n\n")[:-1]:
        if event != ": ping":
            assert event.startswith("data: ")
            assert "\n" not in event
            payloads.append(event.removeprefix("data: "))
    return payloads
