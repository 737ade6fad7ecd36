"""What the cache can refuse. Pure Python; no torch.

CacheError
├── CacheFull            no free place or not enough free pieces; nothing was changed
└── NoAddressSpace       the machine refuses the address range of even one slot
"""


class CacheError(Exception):
    """Root of this package's errors."""


class CacheFull(CacheError):
    """The budget cannot hold what was asked for now."""

    def __init__(self, *, needed_pieces: int, free_pieces: int, free_places: int) -> None:
        self.needed_pieces = needed_pieces
        self.free_pieces = free_pieces
        self.free_places = free_places
        super().__init__(
            f"{needed_pieces} more pieces needed, {free_pieces} and {free_places} places free"
        )


class NoAddressSpace(CacheError):
    """Not even one slot can be mapped."""
