"""The engine's bounds. Pure Python, any thread."""

from dataclasses import dataclass

MIB = 1024**2

FOUND_TOKENS = 2048  # of one iteration: some 20 ms of records and texts
CAPTURE_BYTES = 16 * MIB  # of points seen by one job in one iteration; a step may have more
LOGITS_ROWS = 64  # of one product: 12.9 MB of logits at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one engine takes on. Each has a setting of the same name in the server."""

    max_sessions: int = 1024  # open at once, whether their K/V is resident or not
    max_queue: int = 256  # requests that run or wait; more are refused
    max_rows: int = 64  # sessions stepped in one iteration
    prefill_chunk: int = 256  # tokens of prompts stepped in one iteration, over all sessions
    reply_buffer_bytes: int = 8 * MIB  # records a stream may be ahead of its reader
    edit_bytes: int = 256 * MIB  # edits in the histories of all sessions
    record_bytes: int = 256 * MIB  # points that sessions record, all together

    @property
    def max_tokens(self) -> int:
        """The most tokens that one iteration steps."""
        return self.max_rows + self.prefill_chunk
