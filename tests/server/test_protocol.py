from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.connection import ABORT
from server.protocol import protocol_with_deadline


def begun(scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A protocol at the beginning of a request, without a connection."""
    monkeypatch.setattr(HttpToolsProtocol, "on_message_begin", lambda self: None)
    kind = protocol_with_deadline(1)
    protocol: Any = kind.__new__(kind)
    protocol.scope = scope
    protocol.transport = SimpleNamespace(abort=lambda: "aborted")
    protocol.loop = SimpleNamespace(call_later=lambda *_: None)
    protocol.on_message_begin()
    return protocol


@pytest.mark.parametrize("others", [None, {"http.response.trailers": {}}])
def test_abort_stands_beside_the_servers_own_extensions(
    others: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = {} if others is None else {"extensions": dict(others)}
    extensions = begun(scope, monkeypatch).scope["extensions"]
    assert extensions.pop(ABORT)["abort"]() == "aborted"
    assert extensions == (others or {})
