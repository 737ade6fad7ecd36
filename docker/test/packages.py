"""Where this machine's pip finds packages, in words that a build understands.

A build cannot see the machine's folders, so an index or a find-links folder on its disk is served
over HTTP on the loopback address for as long as the test runs.
"""

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docker.test.shell import run

_ARGUMENTS = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "find-links": "PIP_FIND_LINKS",
}


@contextmanager
def build_arguments(folder: Path) -> Iterator[list[str]]:
    """`--build-arg ...` for the image, from pip's configuration; empty if pip has none.

    `folder` holds links to what is served.
    """
    configured = _pip_settings()
    if not configured:
        yield []
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        yield [
            f"--build-arg={argument}={_reachable(configured.get(name, ''), folder, url)}"
            for name, argument in _ARGUMENTS.items()
        ]
        server.shutdown()


def _pip_settings() -> dict[str, str]:
    """The settings of `_ARGUMENTS` that are in force; pip lists them, the strongest last."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line]
    strongest_last = sorted(pairs, key=lambda pair: pair[0].startswith(":env:"))
    found = {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, value in strongest_last}
    return {name: value for name, value in found.items() if name in _ARGUMENTS}


def _reachable(value: str, folder: Path, url: str) -> str:
    return " ".join(_one(place, folder, url) for place in value.split())


def _one(place: str, folder: Path, url: str) -> str:
    path = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
    if not path.is_dir():
        return place
    # An index refers to files beside itself (../../), so the folder around it is served.
    link = folder / str(len(list(folder.iterdir())))
    link.symlink_to(path.parent.resolve())
    return f"{url}/{link.name}/{path.name}/"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # the base's
        """Say nothing: pip tells what it misses."""
