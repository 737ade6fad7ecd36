import pytest

from server.errors import NotSupported
from server.negotiation import Form, negotiate


@pytest.mark.parametrize(
    ("accept", "stream", "form"),
    [
        ("", False, Form.JSON),
        ("", True, Form.SSE),
        ("*/*", False, Form.JSON),
        ("*/*", True, Form.SSE),
        ("application/json", True, Form.SSE),
        ("text/event-stream", False, Form.SSE),
        ("TEXT/Event-Stream; charset=utf-8", False, Form.SSE),
        ("application/x-ndjson", True, Form.NDJSON),
        ("application/x-ndjson, */*;q=0.1", False, Form.NDJSON),
        ("text/event-stream;q=0.2, application/json", False, Form.JSON),
        ("text/event-stream;q=0.2, application/x-ndjson;q=0.9", False, Form.NDJSON),
        ("application/json, text/event-stream", False, Form.JSON),
        ("text/event-stream, application/json", False, Form.SSE),
        ("text/event-stream;q=0", False, Form.JSON),
        ("text/event-stream;q=much", False, Form.SSE),
        ("text/event-stream ; Q=0.5 , text/html", False, Form.SSE),
        ("text/html", False, Form.JSON),
        (",,;q=1,", False, Form.JSON),
    ],
)
def test_form(accept: str, stream: bool, form: Form) -> None:
    assert negotiate(accept, stream=stream) is form


def test_frames_of_safetensors_are_refused_where_preferred() -> None:
    with pytest.raises(NotSupported):
        negotiate("application/x-safetensors-stream", stream=False)
    mixed = "application/x-safetensors-stream;q=0.1, text/event-stream"
    assert negotiate(mixed, stream=False) is Form.SSE
