"""One server process, from its settings to its exit. The main thread.

On SIGTERM or SIGINT the engine hears first: it takes no new work, and what runs may finish within
the grace period or ends with a terminal record; meanwhile the server still listens, so that
`/ready` says 503. Then uvicorn closes its connections. A second signal leaves at once.
"""

import asyncio
import os
from types import FrameType

import structlog
import uvicorn

from server import logs
from server.app import create_app
from server.host import Host
from server.protocol import protocol_with_deadline
from server.settings import Settings

_FLUSH_SECONDS = 1  # for the last bytes of answers, once the engine is drained
FORCED = 130

_log = structlog.get_logger("stepscope.serve")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains its host before it closes anything."""

    def __init__(self, config: uvicorn.Config, host: Host) -> None:
        super().__init__(config)
        self._host = host
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002  # uvicorn's signature
        """A signal came; on the main thread, between two instructions."""
        self._signals += 1
        if self._signals > 1:
            self.should_exit = self.force_exit = True

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


def serve(settings: Settings) -> int:
    """Serve until a signal comes. Returns the exit code: 0, or 1 if the model cannot be loaded."""
    logs.configure(settings.log_level)
    host = Host(settings)
    server = DrainingServer(_uvicorn_config(settings, host), host)
    _log.info("starting", url=settings.url, model=settings.model)
    server.run()
    if server.force_exit:
        _log.warning("forced")
        os._exit(FORCED)
    if host.is_loading:
        os._exit(0)  # the loading thread is in native code, which an orderly exit would abort
    return 0 if host.failure is None else 1


def _uvicorn_config(settings: Settings, host: Host) -> uvicorn.Config:
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
