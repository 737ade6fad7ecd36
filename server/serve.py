"""One server process, from its settings to its exit. The main thread.

On SIGTERM or SIGINT the engine hears first: it takes no new work, and what runs may finish within
the grace period or ends with a terminal record; meanwhile the server still listens, so that
`/ready` says 503. Then uvicorn closes its connections. A second signal leaves at once, from
wherever the process is: no lock is taken and nothing is waited for.
"""

import asyncio
import os
import signal
from types import FrameType
from typing import NoReturn

import structlog
import uvicorn

from server import logs
from server.app import create_app
from server.host import Host, Loader
from server.loading import load
from server.protocol import protocol_with_deadline
from server.settings import Settings

_FLUSH_SECONDS = 1  # for the last bytes of answers, once the engine is drained

_log = structlog.get_logger("stepscope.serve")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains its host before it closes anything."""

    def __init__(self, host: Host) -> None:
        super().__init__(_config(host))
        self._host = host
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; on the main thread, between two instructions."""
        self._signals += 1
        if self._signals > 1:
            _leave_at_once(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: notice signals, a failed load, the end of the drain."""
        if self._host.failure is not None:
            self.should_exit = True
        elif self._signals and self._drain is None:
            _log.info("draining", grace_seconds=self._host.settings.grace_seconds)
            self._drain = asyncio.create_task(self._host.drain())
        elif self._drain is not None and self._drain.done():
            self.should_exit = True
        return await super().on_tick(counter)


def serve(settings: Settings, *, loader: Loader = load) -> int:
    """Serve until a signal comes.

    Returns the exit code: 0, or 1 if the model cannot be loaded or the address cannot be had.
    """
    logs.configure(settings.log_level)
    host = Host(settings, loader=loader)
    server = DrainingServer(host)
    _log.info("starting", url=settings.url, model=settings.model)
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, _leave_at_once)  # in force again once the server has stopped listening
    code = 0
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not listen; it has logged why
        code = 1
    if host.failure is not None:
        code = 1
    if host.stuck:
        _log.warning("thread_left_behind")
    if host.stuck or host.loading:  # in native code that an orderly exit would wait for, or abort
        os._exit(code)  # log lines are flushed as they are written
    return code


def _leave_at_once(sig: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # a handler's signature
    os.write(2, b"stepscope: forced to leave\n")
    os._exit(128 + sig)


def _config(host: Host) -> uvicorn.Config:
    settings = host.settings
    return uvicorn.Config(
        create_app(settings, host),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=protocol_with_deadline(settings.read_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
