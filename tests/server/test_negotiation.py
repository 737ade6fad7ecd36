import pytest

from server.errors import InvalidRequest
from server.negotiation import Form, check_encoding, negotiate


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
        ("application/x-safetensors-stream", False, Form.FRAMES),
        ("application/x-safetensors-stream;q=0.1, text/event-stream", True, Form.SSE),
        ("text/event-stream;q=0.1, Application/X-SafeTensors-Stream", True, Form.FRAMES),
        ("application/x-safetensors, application/x-ndjson;q=0.1", True, Form.NDJSON),
        ("text/html", False, Form.JSON),
        (",,;q=1,", False, Form.JSON),
    ],
)
def test_form(accept: str, stream: bool, form: Form) -> None:
    assert negotiate(accept, stream=stream) is form


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", Form.JSON),
        ("*/*", Form.JSON),
        ("application/x-safetensors", Form.STACKED),
        ("application/x-safetensors, application/json", Form.STACKED),
        ("text/event-stream", Form.JSON),
        ("application/x-safetensors-stream", Form.JSON),
        ("text/event-stream, application/x-safetensors;q=0.1", Form.STACKED),
    ],
)
def test_a_form_that_the_route_does_not_have_is_passed_over(accept: str, form: Form) -> None:
    assert negotiate(accept, forms=(Form.STACKED,)) is form


def test_a_stacked_answer_is_no_stream() -> None:
    assert negotiate(Form.STACKED.value, stream=False) is Form.JSON
    assert {form for form in Form if form.streams} == {Form.SSE, Form.NDJSON, Form.FRAMES}


@pytest.mark.parametrize("form", Form)
def test_numbers_as_bytes_are_what_every_form_has(form: Form) -> None:
    check_encoding(form, "base64")


@pytest.mark.parametrize("form", [Form.FRAMES, Form.STACKED])
def test_numbers_as_text_are_for_json_only(form: Form) -> None:
    check_encoding(Form.NDJSON, "float")
    with pytest.raises(InvalidRequest) as raised:
        check_encoding(form, "float")
    assert raised.value.param == "encoding_format"
