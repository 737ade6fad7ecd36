"""A hub of one repository on the loopback, as much of the real one as its client asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Serves `directory` as `name` and remembers which files were asked for."""

    daemon_threads = True

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.directory = directory
        self.downloaded: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_hub(name: str, directory: Path) -> Iterator[FakeHub]:
    """A running hub; gone afterwards."""
    with FakeHub(name, directory) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        api, files = f"/api/models/{self.server.name}", f"/{self.server.name}/resolve/{COMMIT}/"
        if path.startswith(files):
            self._file(path.removeprefix(files), with_body=with_body)
        elif path.startswith(f"{api}/tree/"):
            self._send(json.dumps([self._row(each) for each in self._files()]).encode())
        elif path == api or path.startswith(f"{api}/revision/"):
            self._send(json.dumps({"id": self.server.name, "sha": COMMIT}).encode())
        else:
            self.send_error(404)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.server.directory.iterdir() if path.is_file())

    def _row(self, path: Path) -> dict[str, object]:
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": _etag(path)}

    def _file(self, name: str, *, with_body: bool) -> None:
        path = self.server.directory / name
        if with_body:
            self.server.downloaded.append(name)
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
        self._send(path.read_bytes(), with_body=with_body, headers=headers)

    def _send(
        self, body: bytes, *, with_body: bool = True, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
