import json
import subprocess
import sys
from typing import Any


def lines_of(level: str, *statements: str) -> list[dict[str, Any]]:
    """What a process that logs like the server writes to its stderr."""
    head = f"import logging, structlog; from server import logs; logs.configure({level!r})\n"
    code = head + "\n".join(statements)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return [json.loads(line) for line in ended.stderr.decode().splitlines()]


def test_lines_are_json_and_below_the_level_there_are_none() -> None:
    statements = ["log = structlog.get_logger()", "log.info('a', n=1)", "log.warning('b', n=2)"]
    assert [line["event"] for line in lines_of("info", *statements)] == ["a", "b"]
    (line,) = lines_of("warning", *statements)
    assert (line["event"], line["n"], line["level"]) == ("b", 2, "warning")


def test_the_web_servers_lines_take_the_same_way() -> None:
    (line,) = lines_of("warning", "logging.getLogger('uvicorn.error').error('gone %d', 3)")
    assert (line["event"], line["level"]) == ("gone 3", "error")


def test_q07_a_traceback_shows_no_local_variables() -> None:
    (line,) = lines_of(
        "info",
        "def step(prompt):",
        "    raise ValueError('bad')",
        "try:",
        "    step('sec' + 'ret')",
        "except ValueError:",
        "    structlog.get_logger().exception('failed')",
    )
    assert "ValueError: bad" in line["exception"]
    assert "secret" not in json.dumps(line)
