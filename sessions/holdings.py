"""What histories hold in edits, all together. Pure Python; the event loop only.

Sessions share edits: a steering vector that acts at every step, the beginning that forks have in
common. So a distinct edit is counted once, for as long as any session has it.
"""

from collections.abc import Iterable, Mapping

from sessions.edits import Edit, sizes_of


class EditHoldings:
    """Distinct edits by digest, and how many sessions have each."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._n_holders: dict[bytes, int] = {}

    def exchange(self, old: Mapping[bytes, int], new: Mapping[bytes, int]) -> None:
        """A session that held the edits of sizes `old` holds `new` now."""
        if old is new:
            return
        for digest, n_bytes in new.items():
            n_holders = self._n_holders.get(digest, 0)
            self._n_holders[digest] = n_holders + 1
            self.n_bytes += 0 if n_holders else n_bytes
        for digest, n_bytes in old.items():
            self._n_holders[digest] -= 1
            if not self._n_holders[digest]:
                del self._n_holders[digest]
                self.n_bytes -= n_bytes

    def more(self, edits: Iterable[Edit]) -> int:
        """Bytes that these would add."""
        return sum(n for digest, n in sizes_of(edits).items() if digest not in self._n_holders)
