"""What happens at the points of a pass besides computing: edits, then copies. Torch; model thread.

The pass calls `at` wherever a point has its value. Where nobody asks, that is one look into a
dictionary. A point that a pass does not have by itself is computed for a `Part` of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from model.batch import Captured, Row
from model.capture import Column, Index, Sheet, Sheets, index_of
from model.edits import Change, Changes
from model.errors import NonFiniteHidden
from sessions.edits import StepEdits

CACHED = ("k", "v", "ln_f")  # where a token that is read again has what the cache has


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a pass, ascending, that something is computed for."""

    tokens: Sequence[int]
    edited: Sequence[int]  # places in `tokens` of those that are edited there
    where: Index = field(init=False, repr=False)  # the tokens among all of the pass
    _places: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "where", index_of(self.tokens))
        object.__setattr__(self, "_places", {token: i for i, token in enumerate(self.tokens)})

    @property
    def changed(self) -> Sequence[int]:
        """The tokens that are edited."""
        return [self.tokens[place] for place in self.edited]

    def index(self, tokens: Sequence[int]) -> Index:
        """Where these are among the part's tokens."""
        return index_of([self._places[token] for token in tokens])


@dataclass(slots=True)
class _Site:
    """What is to be done at one point."""

    edits: list[tuple[list[int], list[Change]]] = field(default_factory=list)  # of these tokens
    copies: list[tuple[Sheet, Column]] = field(default_factory=list)

    @property
    def edited(self) -> set[int]:
        return {token for tokens, _ in self.edits for token in tokens}

    @property
    def copied(self) -> set[int]:
        return {token for sheet, _ in self.copies for token in sheet.tokens}


class Hooks:
    """The edits and copies of one pass over `rows`."""

    def __init__(self, rows: Sequence[Row], changes: Changes, sheets: Sheets) -> None:
        self._sites: dict[tuple[str, int | None], _Site] = {}
        firsts = [0, *accumulate(len(row.token_ids) for row in rows)][:-1]
        for (edits, again), tokens in _edited(rows, firsts).values():
            self._add_edits([changes.ready(edit) for edit in edits], tokens, again=again)
        self._sheets = sheets.of(rows, firsts)
        for sheet in self._sheets:
            for column in sheet.layout.columns:
                self._site(column.point.name, column.point.layer).copies.append((sheet, column))

    def at(self, name: str, layer: int | None, x: Tensor, part: Part | None = None) -> None:
        """Edit point `name.layer` in place, then copy it.

        x [N, ...] has it for all tokens of the pass, or for those of `part`.

        Raises:
            NonFiniteHidden: an edit made an infinity or a NaN.
        """
        site = self._sites.get((name, layer)) if self._sites else None
        if site is None:
            return
        for tokens, changes in site.edits:
            _edit(x, index_of(tokens) if part is None else part.index(tokens), changes)
        for sheet, column in site.copies:
            sheet.take(column, x, sheet.index if part is None else part.index(sheet.tokens))

    def at_keys(
        self, name: str, layer: int, x: Tensor, tokens: Sequence[int], positions: Sequence[int]
    ) -> None:
        """As `at`, of what grows with the position: x [n, H, as many keys or more] of n tokens."""
        site = self._sites.get((name, layer))
        if site is None:
            return
        changes = {token: changes for tokens, changes in site.edits for token in tokens}
        copies = [(set(sheet.tokens), sheet, column) for sheet, column in site.copies]
        for i, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            own = x[i, :, : position + 1]
            for change in changes.get(token, ()):
                change.make(own.unsqueeze(0))
            for captured, sheet, column in copies:
                if token in captured:
                    sheet.take_beside(column, token, own)

    @property
    def edited(self) -> list[int]:
        """The tokens of the pass that are edited anywhere."""
        return sorted({token for site in self._sites.values() for token in site.edited})

    def part(self, layer: int | None, *names: str) -> Part | None:
        """The tokens for which somebody asks at one of these points; None if nobody does."""
        if not self._sites:
            return None
        sites = [site for name in names if (site := self._sites.get((name, layer)))]
        if not sites:
            return None
        edited = {token for site in sites for token in site.edited}
        tokens = sorted(edited.union(*(site.copied for site in sites)))
        return Part(tokens, [i for i, token in enumerate(tokens) if token in edited])

    def by_row(self, order: Sequence[int]) -> list[Captured]:
        """What each row captured; `order[i]` is the place of row i in the answer."""
        answer: list[Captured] = [{}] * len(order)
        for sheet in self._sheets:
            for row, captured in sheet.handed_over():
                answer[order[row]] = captured
        return answer

    def _add_edits(self, changes: Sequence[Change], tokens: list[int], *, again: bool) -> None:
        at_sites: dict[tuple[str, int | None], list[Change]] = {}
        for change in changes:
            if not (again and change.point.name in CACHED):
                at_sites.setdefault((change.point.name, change.point.layer), []).append(change)
        for site, own in at_sites.items():
            self._site(*site).edits.append((tokens, own))

    def _site(self, name: str, layer: int | None) -> _Site:
        return self._sites.setdefault((name, layer), _Site())


_Alike = tuple[StepEdits, bool]  # and whether they are of tokens that are read again


def _edited(
    rows: Sequence[Row], firsts: Sequence[int]
) -> dict[tuple[bool, tuple[int, ...]], tuple[_Alike, list[int]]]:
    """Tokens that are edited alike, by the identity of their edits."""
    found: dict[tuple[bool, tuple[int, ...]], tuple[_Alike, list[int]]] = {}
    for row, first in zip(rows, firsts, strict=True):
        again = row.reads_again
        for place, edits in row.edits.items():
            key = again, tuple(map(id, edits))
            found.setdefault(key, ((edits, again), []))[1].append(first + place)
    return found


def _edit(x: Tensor, index: Index, changes: Sequence[Change]) -> None:
    """Edit x where `index` says. What is infinite is refused here: a key might be masked later."""
    own = x[index].float()
    for change in changes:
        change.make(own)
    if not torch.isfinite(own).all():
        raise NonFiniteHidden
    x[index] = own
