import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

import pytest

from server.cli import BAD_USAGE, NOT_READY, run
from server.settings import Settings


class Probed(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def probed() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Probed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_health_is_0_when_ready(probed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probed, "status", 200)
    assert run(["health", "--url", probed]) == 0


def test_health_is_1_when_not_ready(probed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probed, "status", 503)
    assert run(["health", "--url", probed]) == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "ftp://x"])
def test_health_is_1_when_nobody_answers(url: str) -> None:
    assert run(["health", "--url", url]) == 1


def test_health_asks_where_the_environment_says(
    probed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probed, "status", 200)
    monkeypatch.setenv("STEPSCOPE_PORT", probed.rpartition(":")[2])
    assert run(["health"]) == 0


def test_a_bad_setting_stops_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["serve", "--port", "65536"]) == BAD_USAGE
    assert "--port (STEPSCOPE_PORT)" in capsys.readouterr().err
    monkeypatch.setenv("STEPSCOPE_POTR", "1")
    assert run(["serve"]) == BAD_USAGE
    assert "STEPSCOPE_POTR" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("stepscope")


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == BAD_USAGE
    assert "serve, health, demo" in capsys.readouterr().err


def test_a_bad_precision_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--dtype", "float16"]) == BAD_USAGE
    assert capsys.readouterr().err.splitlines() == [
        "stepscope: --dtype (STEPSCOPE_DTYPE): Input should be 'float32', 'bfloat16' or 'int8'"
    ]
    assert run(["serve", "--batch-invariant", "--dtype", "int8"]) == BAD_USAGE
    assert "--batch-invariant needs --dtype float32" in capsys.readouterr().err


def test_an_unknown_flag_stops_the_start() -> None:
    assert run(["serve", "--colour", "blue"]) == BAD_USAGE


@pytest.mark.parametrize("flags", [[], ["--url"], ["--colour"], ["--url", ""]])
def test_health_is_0_or_1_whatever_is_wrong(
    flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's engine keeps every other code for itself."""
    monkeypatch.setenv("STEPSCOPE_POTR", "1")
    assert run(["health", *flags]) == NOT_READY
    monkeypatch.delenv("STEPSCOPE_POTR")
    monkeypatch.setenv("STEPSCOPE_PORT", "x")
    assert run(["health", *flags]) == NOT_READY


@pytest.mark.parametrize("flags", [["--workers", "2"], ["--workers=1"]])
def test_x11_several_workers_are_refused(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sessions live in one process."""
    assert run(["serve", *flags]) == BAD_USAGE
    assert "--workers" in capsys.readouterr().err
    monkeypatch.setenv("STEPSCOPE_WORKERS", "2")
    assert run(["serve"]) == BAD_USAGE
    assert "STEPSCOPE_WORKERS" in capsys.readouterr().err


def test_every_setting_is_a_flag_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert field.description
