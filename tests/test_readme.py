"""README's commands, as a reader would type them, against a server."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.program import PATIENCE, Program, program

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STRICT = """set -euo pipefail
curl() { command curl --fail-with-body --max-time 60 "$@"; }
python3() { '%s' "$@"; }
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with program() as served:
        yield served


def at(server: Program, text: str) -> str:
    assert ":8000" in text
    return text.replace(":8000", f":{server.port}")


def test_the_bash_blocks_run_in_order(server: Program) -> None:
    script = STRICT % sys.executable + "\n".join(blocks("bash"))
    done = subprocess.run(
        ["bash", "-c", at(server, script)], capture_output=True, timeout=PATIENCE, check=False
    )
    told = done.stdout.decode()
    assert done.returncode == 0, (told[-2000:], done.stderr)
    assert "data: [DONE]" in told
    assert '"token":{"id":15496,' in told
    steps = [*range(9), 1, 2, *range(2, 9)]  # appended and generated, read again, replayed
    assert re.findall(r'"position":(\d+),"past_length"', told) == list(map(str, steps))
    assert '"object":"session.deleted"' in told


def test_the_python_blocks_run(server: Program) -> None:
    assert blocks("python")
    for block in blocks("python"):
        subprocess.run([sys.executable, "-c", at(server, block)], timeout=PATIENCE, check=True)


def test_the_sh_blocks_name_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = re.findall(r"^make ([a-z-]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert {"serve", "demo", "test", "check", "soak", "lens-test"} <= set(asked) <= targets
