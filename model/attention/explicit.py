"""Attention with its scores and weights in sight, and the same bits in any company. Model thread.

The order of every sum depends on a query and its absolute positions alone:

    scores    one product for all keys of a run, at least 3 queries at a time and whole multiples
              of 32 keys: then each score is one chain of additions over D
    softmax   over all of a row's keys at once; a score of -inf adds nothing, wherever it stands
    z         values are summed over each block of `PIECE` positions, and the blocks' sums are
              added in the order of positions

So a run may be read alone, beside neighbours or for many queries, and cut wherever a piece ends.
Pieces are whole blocks: the K/V cache of exact mode has `PIECE` positions to a piece.

Scores and weights exist on the way, so this is how they are shown and edited in every mode.

Source: Radford et al. 2019; openai/gpt-2 `src/model.py`, `attn` and `mask_attn_weights`.
Legend: N tokens of the batch, n queries of a group, S slots, s slots of a group, m = n / s queries
per slot, H heads, D head width.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cache.buffers import KVBuffers
from model.attention.plan import Group

PIECE = 128  # positions; less costs time at every step, more costs rows copied at a fork
_ALIGNED = 32  # keys; fewer could fall to a kernel for tiny products, which adds otherwise
_QUERIES, _ROWS = 3, 2  # least rows of a product with keys and with values, for the same reason


Read = tuple[Group, slice, slice, Tensor]  # its queries, its keys, and which of them are hidden


class Scores(NamedTuple):
    """[n, H, keys of all reads], -inf where a query does not see a key; and what the reads were."""

    scores: Tensor
    reads: Sequence[Read]


class ExplicitAttention:
    """Queries over the keys and values of one model's buffers, in float32."""

    max_queries = 128  # of one session's chunk in a group: their scores stay in the CPU's cache

    def __init__(self, buffers: KVBuffers) -> None:
        shape = buffers.shape
        self._n_head, self._scale = shape.n_head, shape.d_head**-0.5
        self._keys = [keys.flatten(0, 1) for keys in buffers.keys]  # each [S * H, n_ctx, D]
        self._values = [values.flatten(0, 1) for values in buffers.values]

    def __call__(self, layer: int, q: Tensor, groups: Sequence[Group]) -> Tensor:
        """Answer queries q [N, H, D] with z [N, H, D]; see `Kernel`."""
        q = q * self._scale
        if len(groups) == 1:
            return self._whole(layer, q, groups[0])
        z = torch.empty_like(q)
        for queries, tile in _tiles(groups):
            if len(tile) == 1:
                z[queries] = self._whole(layer, q, tile[0])
            else:
                scores, reads = self._joined(layer, q, queries, tile)
                z[queries] = self.values(layer, torch.softmax(scores, dim=2), reads)
        return z

    def _whole(self, layer: int, q: Tensor, group: Group) -> Tensor:
        """Rows [n, H, D] of queries that read one run."""
        weights = torch.softmax(self._scores(layer, q, group), dim=2)
        sums = torch.zeros(len(weights), weights.size(1), q.size(2))
        return _swapped(self._add_values(layer, group, weights, sums), group)

    def scores(self, layer: int, q: Tensor, groups: Sequence[Group]) -> Scores:
        """What queries q [n, H, D] of one session see of `groups`, in order of `start`."""
        return self._joined(layer, q * self._scale, slice(0, len(q)), groups)

    def _joined(self, layer: int, q: Tensor, queries: slice, tile: Sequence[Group]) -> Scores:
        """What `queries` see of several runs: one row of scores for one softmax."""
        n_keys = _aligned(max(group.stop for group in tile))
        scores = torch.full((queries.stop - queries.start, self._n_head, n_keys), -torch.inf)
        reads = []
        for group in tile:
            own = _swapped(self._scores(layer, q, group), group)
            rows = slice(group.first - queries.start, group.queries.stop - queries.start)
            keys = slice(group.start, group.start + own.size(2))
            scores[rows, :, keys] = own
            reads.append((group, rows, keys, own.isneginf()))
        return Scores(scores, reads)

    def values(self, layer: int, weights: Tensor, reads: Sequence[Read]) -> Tensor:
        """Rows z [n, H, D]: weights [n, H, keys], made of scores, times the values of `reads`."""
        z = torch.zeros(len(weights), self._n_head, self._values[layer].size(2))
        for group, rows, keys, unseen in reads:  # what one hides, a later one may have shown
            own = _swapped(weights[rows, :, keys].masked_fill(unseen, 0.0), group)
            sums = _swapped(z[rows], group)
            z[rows] = _swapped(self._add_values(layer, group, own, sums), group)
        return z

    def _scores(self, layer: int, q: Tensor, group: Group) -> Tensor:
        """[s * H, m, keys]: -inf where a query does not see a key."""
        own = _swapped(q[group.queries], group)
        keys = self._read(self._keys[layer], group)
        scores = torch.bmm(_at_least(_QUERIES, own), keys.transpose(1, 2))[:, : own.size(1)]
        n_keys = group.stop - group.start
        if scores.size(2) > n_keys:
            scores[:, :, n_keys:].fill_(-torch.inf)
        if group.mask is not None:
            by_slot = scores.view(group.n_slots, self._n_head, -1, scores.size(2))
            by_slot[..., :n_keys].add_(group.mask)
        return scores

    def _add_values(self, layer: int, group: Group, weights: Tensor, sums: Tensor) -> Tensor:
        """`sums` [s * H, m, D] and what `weights` [s * H, m, keys] give of the group's values."""
        n_queries = sums.size(1)
        sums, weights = _at_least(_ROWS, sums), _at_least(_ROWS, weights)
        blocks = torch.split(self._read(self._values[layer], group), PIECE, dim=1)
        for block, own in zip(blocks, torch.split(weights, PIECE, dim=2), strict=True):
            sums = torch.baddbmm(sums, own, block)
        return sums[:, :n_queries]

    def _read(self, rows: Tensor, group: Group) -> Tensor:
        """The group's keys or values and what fills their last multiple: [s * H, keys, D]."""
        heads = slice(group.slot * self._n_head, (group.slot + group.n_slots) * self._n_head)
        return rows[heads, group.start : _aligned(group.stop)].float()


def _tiles(groups: Sequence[Group]) -> Iterator[tuple[slice, list[Group]]]:
    """Groups that share queries: those queries, and the groups in order of `start`."""
    tiles: list[list[Group]] = []
    stop = 0
    for group in sorted(groups, key=attrgetter("first")):
        if group.first >= stop:
            tiles.append([])
        tiles[-1].append(group)
        stop = max(stop, group.queries.stop)
    for tile in tiles:
        queries = slice(tile[0].first, max(group.queries.stop for group in tile))
        yield queries, sorted(tile, key=attrgetter("start"))


def _aligned(n_keys: int) -> int:
    return -(-n_keys // _ALIGNED) * _ALIGNED


def _swapped(x: Tensor, group: Group) -> Tensor:
    """A group's rows [n, H, X] by the slots they read [s * H, m, X], or the other way round."""
    return x.view(group.n_slots, -1, *x.shape[1:]).transpose(1, 2).flatten(0, 1)


def _at_least(n: int, x: Tensor) -> Tensor:
    """Rows x [s * H, m, X], repeated until a slot has at least n."""
    if x.size(1) == 1:
        return x.expand(-1, n, -1).contiguous()  # the same as below, in half the time
    return x if x.size(1) >= n else x.repeat(1, -(-n // x.size(1)), 1)
