"""What a batch reads of the cache, in as few reads as pay. Numpy and torch; the model thread.

A batch is flattened: first one token of each decoding session, then the chunks of those that step
several tokens. A session's keys lie in one or more runs (`cache.accounting`): one if it shares
nothing, several if it was forked or found its prompt in the cache. Each read serves a group:

    neighbours   rows whose runs lie in adjacent slots, one query each: one call, masked to their
                 own lengths, where that pads little
    shared       queries of several sessions that read the same run, or of one session's chunk:
                 its keys and values are read once for all of them

The masks come from one absolute table: a query at position q sees key positions <= q, so a chunk's
mask is aligned to the lower right whatever its past is.

Legend: N tokens of the batch, n queries of a group, S slots, H heads, D head width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache.accounting import KV, Run
from cache.buffers import KVBuffers
from model.batch import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One read of the keys and values at `start`..`stop`-1 for the flattened queries `first`..

    Either query j reads slot `slot + j` (`n_slots == n`), or all n read `slot` (`n_slots == 1`).
    """

    first: int
    n: int
    slot: int
    n_slots: int
    start: int
    stop: int
    mask: Tensor | None  # 0 or -inf, [n, 1, 1, keys] for neighbours, [n, keys] where shared
    whole: bool  # these queries read nothing else
    causal: bool = False  # the mask is the plain triangle

    @property
    def queries(self) -> slice:
        """The group's queries among the flattened ones."""
        return slice(self.first, self.first + self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where the flattened tokens of one batch read and write. Groups are in order of `start`.

    Tokens that are read `again` have their rows in the cache; those of the others are `written`.
    """

    groups: Sequence[Group]
    kvs: Sequence[KV]  # [N]
    slots: Tensor  # [N]
    positions: Tensor  # [N]
    rows: npt.NDArray[np.int64]  # [N, 2, H], see `KVBuffers.rows_of`
    again: Sequence[int]
    written: slice | Sequence[int]

    def sessions(self, tokens: Sequence[int]) -> Iterator[tuple[KV, Sequence[int]]]:
        """`tokens`, which ascend, cut where another session's begin."""
        for _, own in groupby(tokens, key=lambda token: id(self.kvs[token])):
            part = list(own)
            yield self.kvs[part[0]], part


class Planner:
    """Plans over one model's buffers, with at most `max_queries` of a chunk in a group."""

    def __init__(self, buffers: KVBuffers, max_queries: int) -> None:
        shape = buffers.shape
        self._buffers = buffers
        self._max_queries = max_queries
        hidden = torch.full((shape.n_ctx, shape.n_ctx), -torch.inf, dtype=shape.dtype)
        self._causal = hidden.triu_(1)  # [query position, key position]

    def __call__(self, rows: Sequence[Row]) -> Plan:
        """How to attend for `rows`, which are in the order of `in_order`."""
        n_decoding = sum(len(row.token_ids) == 1 for row in rows)
        groups = list(self._decoding(rows[:n_decoding]))
        first = n_decoding
        for row in rows[n_decoding:]:
            groups += self._chunk(row, first)
            first += len(row.token_ids)
        slots = [row.kv.slot_of(p) for row in rows for p in row.positions]
        positions = [p for row in rows for p in row.positions]
        is_again = [row.reads_again for row in rows for _ in row.token_ids]
        again = [token for token, one in enumerate(is_again) if one]
        return Plan(
            groups=sorted(groups, key=attrgetter("start")),
            kvs=[row.kv for row in rows for _ in row.token_ids],
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            rows=self._buffers.rows_of(slots, positions),
            again=again,
            written=[i for i, one in enumerate(is_again) if not one] if again else slice(None),
        )

    def reads(self, kv: KV, positions: Sequence[int]) -> list[Group]:
        """What one session's queries at any `positions` read, if nobody else's are beside them."""
        seen = self._causal[torch.tensor(positions)]
        return [
            Group(
                first=0,
                n=len(positions),
                slot=run.slot,
                n_slots=1,
                start=run.start,
                stop=run.stop,
                mask=seen[:, run.start : run.stop],
                whole=False,
            )
            for run in visible(kv, max(positions) + 1)
        ]

    def _decoding(self, rows: Sequence[Row]) -> Iterator[Group]:
        reads = [visible(row.kv, row.positions.stop) for row in rows]
        for depth in range(max(map(len, reads), default=0)):
            first = 0
            while first < len(reads):
                runs = _at_depth(reads[first:], depth)
                if runs:
                    runs = runs[: _together(runs)]
                    whole = all(len(read) == 1 for read in reads[first : first + len(runs)])
                    yield self._group(runs, first, whole=whole)
                first += max(1, len(runs))

    def _group(self, runs: Sequence[Run], first: int, *, whole: bool) -> Group:
        is_shared = len(runs) > 1 and runs[0].slot == runs[1].slot
        start, stop = runs[0].start, max(run.stop for run in runs)
        mask = self._mask([run.stop for run in runs], start, stop)
        return Group(
            first=first,
            n=len(runs),
            slot=runs[0].slot,
            n_slots=1 if is_shared else len(runs),
            start=start,
            stop=stop,
            mask=mask if mask is None or is_shared else mask[:, None, None, :],
            whole=whole,
        )

    def _mask(self, stops: Sequence[int], start: int, stop: int) -> Tensor | None:
        """[n, keys]: query j sees the keys before `stops[j]`; None if all see all of them."""
        if min(stops) == stop:
            return None
        return self._causal[torch.tensor(stops) - 1, start:stop]

    def _chunk(self, row: Row, first: int) -> Iterator[Group]:
        for begin in range(0, len(row.token_ids), self._max_queries):
            queries = row.positions[begin : begin + self._max_queries]
            yield from self._queries(row.kv, queries, first + begin)

    def _queries(self, kv: KV, positions: range, first: int) -> Iterator[Group]:
        runs = visible(kv, positions.stop)
        for run in runs:
            begin = max(positions.start, run.start)  # queries before it see nothing of this run
            masked = run.stop > begin + 1
            yield Group(
                first=first + begin - positions.start,
                n=positions.stop - begin,
                slot=run.slot,
                n_slots=1,
                start=run.start,
                stop=run.stop,
                mask=self._causal[begin : positions.stop, run.start : run.stop] if masked else None,
                whole=len(runs) == 1,
                causal=run.start == begin and run.stop == positions.stop,
            )


def in_order(rows: Sequence[Row]) -> list[int]:
    """Indices of `rows` in the order that a plan needs.

    Decoding rows come first, those that read the same or adjacent slots beside each other.
    """

    def key(i: int) -> tuple[bool, list[tuple[int, int, int]]]:
        row = rows[i]
        runs = visible(row.kv, row.positions.stop)
        return len(row.token_ids) > 1, [(run.start, run.slot, run.stop) for run in runs]

    return sorted(range(len(rows)), key=key)


def visible(kv: KV, length: int) -> Sequence[Run]:
    """The runs that hold positions 0..length-1, the last one cut there."""
    runs = kv.runs
    if len(runs) == 1:
        return (Run(runs[0].slot, 0, length),)
    return [Run(run.slot, run.start, min(run.stop, length)) for run in runs if run.start < length]


def _at_depth(reads: Sequence[Sequence[Run]], depth: int) -> list[Run]:
    """Run number `depth` of the leading rows, up to the first that has none."""
    runs = []
    for read in reads:
        if len(read) <= depth:
            break
        runs.append(read[depth])
    return runs


def _together(runs: Sequence[Run]) -> int:
    """How many of the leading runs are worth one call: adjacent or the same, little padding."""
    if len(runs) == 1:
        return 1
    step = runs[1].slot - runs[0].slot  # 0: shared; 1: neighbours
    longest = total = 0
    for n, run in enumerate(runs):
        longest, total = max(longest, len(run)), total + len(run)
        padded = (n + 1) * longest - total
        in_line = run.slot == runs[0].slot + step * n and run.start == runs[0].start
        if not in_line or step not in (0, 1) or padded > total // 4 + 32 * n:
            return max(1, n)
    return len(runs)
