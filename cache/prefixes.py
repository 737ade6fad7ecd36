"""Which pieces hold the K/V of which beginnings. Pure Python, no torch; the model thread.

A tree: an edge is an owner and the keys of the steps of one whole piece, a node is the piece that
holds their rows. What a row holds depends on every step before it, so a piece stands for the whole
path from the root, and goes with everything below it.

    root ── ("", (15496, 995, ..)) ── ("", (11, 314, ..))      slot 0, pieces 0 and 1
                                   └─ ("", (764, 198, ..))     slot 2, piece 1
         ── ("k", (15496, 995, ..))                            slot 1, piece 0: another owner's

Owners and keys are opaque. They are kept and compared, not only hashed, so a hit is never another
chain's.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

Piece = tuple[int, int]  # slot, and which of its pieces
Edge = tuple[str, tuple[Hashable, ...]]


@dataclass(slots=True, eq=False)
class _Node:
    piece: Piece
    edge: Edge
    level: dict[Edge, "_Node"]  # that it is in
    below: dict[Edge, "_Node"] = field(default_factory=dict)


class PrefixIndex:
    """Whole pieces of `size` positions by the chain of step keys that led to them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._first: dict[Edge, _Node] = {}
        self._nodes: dict[Piece, _Node] = {}

    def __contains__(self, piece: Piece) -> bool:
        return piece in self._nodes

    def has_more(self, piece: Piece) -> bool:
        """Whether it is known how the beginning that ends with `piece` goes on."""
        node = self._nodes.get(piece)
        return node is not None and bool(node.below)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._nodes)

    def chain(self, owner: str, step_keys: Sequence[Hashable]) -> list[Piece]:
        """The pieces of the longest known beginning of `step_keys`, from position 0 on."""
        pieces: list[Piece] = []
        level = self._first
        for edge in self._edges(owner, step_keys):
            node = level.get(edge)
            if node is None:
                break
            pieces.append(node.piece)
            level = node.below
        return pieces

    def add(self, owner: str, step_keys: Sequence[Hashable], pieces: Sequence[Piece]) -> None:
        """Offer the `pieces` that hold the beginning of `step_keys`; what is known stays as it is.

        A piece has one place in the tree: it and what follows it are not added if it is in it for
        another owner.
        """
        level = self._first
        for piece, edge in zip(pieces, self._edges(owner, step_keys), strict=False):
            node = level.get(edge)
            if node is None:
                if piece in self._nodes:
                    return
                node = level[edge] = self._nodes[piece] = _Node(piece, edge, level)
            level = node.below

    def drop(self, piece: Piece) -> list[Piece]:
        """Forget a piece and all below it; returns them, none if it is not known."""
        top = self._nodes.get(piece)
        if top is None:
            return []
        del top.level[top.edge]
        dropped = [node.piece for node in _subtree(top)]
        for gone in dropped:
            del self._nodes[gone]
        return dropped

    def check(self) -> None:
        """Prove that the tree and the list of its pieces agree, and that depth is position."""
        level, index = list(self._first.items()), 0
        found: dict[Piece, _Node] = {}
        while level:
            for edge, node in level:
                assert node.edge == edge
                assert node.level[edge] is node
                assert node.piece[1] == index
                found[node.piece] = node
            level, index = [item for _, node in level for item in node.below.items()], index + 1
        assert found == self._nodes

    def _edges(self, owner: str, step_keys: Sequence[Hashable]) -> Iterator[Edge]:
        for end in range(self._size, len(step_keys) + 1, self._size):
            yield owner, tuple(step_keys[end - self._size : end])


def _subtree(top: _Node) -> Iterator[_Node]:
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.below.values()
