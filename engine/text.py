"""The text that a reader may be shown, byte by byte. Pure Python, no torch; the model thread.

It runs on the model thread because a stop decides whether the next step runs. What is shown holds
back an unfinished character, and any tail that may yet turn out to begin a stop. All texts shown
by one call, joined, are its bytes decoded with errors="replace", cut before the stop.
"""

from collections.abc import Sequence

from embedding.text import IncrementalText


class ShownText:
    """The bytes of one call, released as text once they cannot belong to a stop."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = {stop.encode(): stop for stop in stops}
        self._decoder = IncrementalText()
        self._held = b""
        self.matched: str | None = None

    def push(self, new: bytes) -> str:
        """Add one token's bytes; returns what may be shown now. Sets `matched` at a stop.

        Of several stops in the same bytes the one that begins earliest counts, then the longest.
        """
        self._held += new
        found = [(self._held.find(stop), -len(stop), stop) for stop in self._stops]
        found = [match for match in found if match[0] >= 0]
        if found:
            start, _, stop = min(found)
            self.matched = self._stops[stop]
            self._held = self._held[:start]
            return self.flush()
        return self._release(len(self._held) - self._tail())

    def flush(self) -> str:
        """The rest, at the end of the call."""
        return self._release(len(self._held)) + self._decoder.flush()

    def _release(self, n: int) -> str:
        shown, self._held = self._held[:n], self._held[n:]
        return self._decoder.push(shown)

    def _tail(self) -> int:
        """Length of the longest end of the held bytes that begins a stop."""
        return max((_overlap(self._held, stop) for stop in self._stops), default=0)


def _overlap(held: bytes, stop: bytes) -> int:
    for n in range(min(len(held), len(stop) - 1), 0, -1):
        if held.endswith(stop[:n]):
            return n
    return 0
