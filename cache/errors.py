"""What the cache can refuse. Pure Python; no torch.

CacheError
├── CacheFull            no free slot or not enough free pieces; nothing was changed
└── NoAddressSpace       the machine refuses the address range of even one slot
"""


class CacheError(Exception):
    """Root of this package's errors."""


class CacheFull(CacheError):
    """The budget cannot hold what was asked for now."""

    def __init__(self, *, needed_pieces: int, free_pieces: int, free_slots: int) -> None:
        self.needed_pieces = needed_pieces
        self.free_pieces = free_pieces
        self.free_slots = free_slots
        super().__init__(
            f"{needed_pieces} more pieces needed, {free_pieces} pieces and {free_slots} slots free"
        )


class NoAddressSpace(CacheError):
    """Not even one slot can be mapped."""
