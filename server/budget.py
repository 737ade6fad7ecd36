"""Bytes that requests hold in memory, all together. The event loop.

Each request is bounded by itself; their number is not. So what grows with them, bodies being read
and JSON answers being made and sent, is taken out of a budget, and a request that finds it spent is
refused before it costs anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from server.errors import Overloaded


class Budget:
    """At most `max_bytes`, shared."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0

    @contextmanager
    def lease(self, n_bytes: int = 0) -> Iterator["Lease"]:
        """Hold `n_bytes`, and more as the lease grows, until the block ends.

        Raises:
            Overloaded: others hold too many.
        """
        lease = Lease(self)
        try:
            lease.grow(n_bytes)
            yield lease
        finally:
            self.held_bytes -= lease.n_bytes


class Lease:
    """One request's part of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.n_bytes = 0

    def grow(self, n_bytes: int) -> None:
        """Hold `n_bytes` more.

        Raises:
            Overloaded: others hold too many; no more are held than before.
        """
        if self._budget.held_bytes + n_bytes > self._budget.max_bytes:
            raise Overloaded(self._budget.max_bytes)
        self._budget.held_bytes += n_bytes
        self.n_bytes += n_bytes
