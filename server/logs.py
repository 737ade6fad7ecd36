"""Log lines: readable on a terminal, JSON elsewhere, on stderr. Any thread.

Prompts, token ids, tensors and keys never enter a line. The web server's own lines (the standard
library's `logging`) take the same way.
"""

import logging
import sys

import structlog


def configure(level: str) -> None:
    """Set up both logging systems for this process."""
    number = logging.getLevelNamesMapping()[level.upper()]
    on_terminal = sys.stderr.isatty()
    renderer = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if on_terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if on_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_ToStructlog()], level=max(number, logging.INFO), force=True)
    logging.captureWarnings(capture=True)


class _ToStructlog(logging.Handler):
    """Hands a line of `logging` over."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)
