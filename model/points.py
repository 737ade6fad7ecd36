"""Points: the named tensors of one step. Pure Python, any thread; no torch.

One table says which points exist, their axes, and what TransformerLens, Hugging Face and nnsight
call them. `{l}` stands for the layer: a number, `*` for all, or `a:b` (half-open).

    embedding = wte + wpe = resid_pre.0 -> block 0 -> resid_post.0 = resid_pre.1 -> ...
        -> resid_post.(n_layer-1) -> ln_f -> logits
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering

from model.config import GPT2Config
from model.errors import UnknownPoint

_FLOAT32_BYTES = 4
_LAYERS = r"(\*|[0-9]{1,4}|[0-9]{1,4}:[0-9]{1,4})"
_LONGEST_NAME = 64  # no name is longer; keeps the search for near ones cheap


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One row of the table. `stage`: before the blocks 0, within them 1, after them 2."""

    name: str
    stage: int
    axes: tuple[str, ...]
    aliases: tuple[str, ...]

    @property
    def pattern(self) -> str:
        return f"{self.name}.{{l}}" if self.stage == 1 else self.name


_TABLE = (
    _Kind(
        name="wte",
        stage=0,
        axes=("n_embd",),
        aliases=("hook_embed", "transformer.wte", "transformer.wte.output"),
    ),
    _Kind(
        name="wpe",
        stage=0,
        axes=("n_embd",),
        aliases=("hook_pos_embed", "transformer.wpe", "transformer.wpe.output"),
    ),
    _Kind(name="embedding", stage=0, axes=("n_embd",), aliases=()),
    _Kind(
        name="resid_pre",
        stage=1,
        axes=("n_embd",),
        aliases=("blocks.{l}.hook_resid_pre", "blocks.{l}.hook_in", "transformer.h[{l}].input"),
    ),
    _Kind(
        name="resid_post",
        stage=1,
        axes=("n_embd",),
        aliases=(
            "blocks.{l}.hook_resid_post",
            "blocks.{l}.hook_out",
            "transformer.h[{l}].output",
            "transformer.h.{l}",
        ),
    ),
    _Kind(
        name="ln_f",
        stage=2,
        axes=("n_embd",),
        aliases=("ln_final.hook_out", "transformer.ln_f", "transformer.ln_f.output"),
    ),
    _Kind(
        name="logits",
        stage=2,
        axes=("n_vocab",),
        aliases=("unembed.hook_out", "lm_head", "lm_head.output"),
    ),
)
_KINDS: Mapping[str, _Kind] = {kind.name: kind for kind in _TABLE}
_RANK: Mapping[str, int] = {kind.name: rank for rank, kind in enumerate(_TABLE)}
_HIDDEN_STATES = "hidden_states[{l}]"  # n_layer + 1 of them, and the last is ln_f


@total_ordering
@dataclass(frozen=True, slots=True)
class Point:
    """One named tensor of a step. Ordered as the forward pass computes them."""

    name: str
    layer: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}.{self.layer}"

    def __lt__(self, other: "Point") -> bool:
        return self._forward < other._forward

    @property
    def axes(self) -> tuple[str, ...]:
        """What each dimension counts, in the words of the configuration."""
        return _KINDS[self.name].axes

    @property
    def is_looked_up(self) -> bool:
        """Whether it is known before the first block, without computing a step."""
        return _KINDS[self.name].stage == 0 or self == Point("resid_pre", 0)

    def shape(self, config: GPT2Config) -> tuple[int, ...]:
        """Sizes of one step's tensor."""
        sizes = {"n_embd": config.n_embd, "n_vocab": config.n_vocab}
        return tuple(sizes[axis] for axis in self.axes)

    def n_bytes(self, config: GPT2Config) -> int:
        """Bytes of one step's tensor in float32."""
        n_bytes = _FLOAT32_BYTES
        for size in self.shape(config):
            n_bytes *= size
        return n_bytes

    @property
    def _forward(self) -> tuple[int, int, int]:
        return _KINDS[self.name].stage, self.layer or 0, _RANK[self.name]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a request asked for.

    `points` are unique and in forward order. `aliases` tells, for each name of another system,
    the canonical name under which its tensor is answered; a pattern is listed name by name.
    """

    points: tuple[Point, ...]
    aliases: Mapping[str, str]


def all_points(config: GPT2Config) -> tuple[Point, ...]:
    """Every point of a model, in forward order."""
    return tuple(sorted(point for kind in _TABLE for point in _points_of(kind, config)))


def parse_points(specs: Sequence[str], config: GPT2Config) -> Selection:
    """Resolve names, patterns and other systems' names.

    Raises:
        UnknownPoint: with the names that come nearest.
    """
    points: set[Point] = set()
    aliases: dict[str, str] = {}
    for spec in dict.fromkeys(specs):
        for name, point in _resolve(spec, config):
            points.add(point)
            if name != str(point):
                aliases[name] = str(point)
    return Selection(tuple(sorted(points)), aliases)


def _resolve(spec: str, config: GPT2Config) -> list[tuple[str, Point]]:
    """Each concrete name that `spec` stands for, with its point."""
    for regex, pattern, kind in _PATTERNS:
        match = regex.fullmatch(spec)
        if match and kind.stage != 1:
            return [(spec, Point(kind.name))]
        if match:
            layers = _layers(match[1], config.n_layer)
            return _known(spec, config, [(pattern, i, Point(kind.name, i)) for i in layers])
    if match := _HIDDEN_STATES_REGEX.fullmatch(spec):
        indices = _layers(match[1], config.n_layer + 1)
        hidden = [(_HIDDEN_STATES, i, _hidden_state(i, config)) for i in indices]
        return _known(spec, config, hidden)
    raise _unknown(spec, config)


def _known(
    spec: str, config: GPT2Config, found: list[tuple[str, int, Point]]
) -> list[tuple[str, Point]]:
    if not found:
        raise _unknown(spec, config)
    return [(pattern.replace("{l}", str(layer)), point) for pattern, layer, point in found]


def _layers(spec: str, n: int) -> range:
    """The layers that `*`, `a:b` or a number names; empty where it names none of the `n`."""
    if spec == "*":
        return range(n)
    first, _, stop = spec.partition(":")
    start, end = int(first), int(stop or first) + (not stop)
    return range(start, end) if end <= n else range(0)


def _hidden_state(index: int, config: GPT2Config) -> Point:
    """`hidden_states[index]`: the last one is after `ln_f`, not the last block's output."""
    return Point("resid_pre", index) if index < config.n_layer else Point("ln_f")


def _unknown(spec: str, config: GPT2Config) -> UnknownPoint:
    names = list(_names(config))
    return UnknownPoint(spec, nearest=difflib.get_close_matches(spec[:_LONGEST_NAME], names, n=3))


def _names(config: GPT2Config) -> Iterator[str]:
    """Every concrete name of every system."""
    for _, pattern, kind in _PATTERNS:
        layers = range(config.n_layer if kind.stage == 1 else 1)
        yield from (pattern.replace("{l}", str(layer)) for layer in layers)
    yield from (_HIDDEN_STATES.replace("{l}", str(i)) for i in range(config.n_layer + 1))


def _points_of(kind: _Kind, config: GPT2Config) -> Iterator[Point]:
    if kind.stage == 1:
        yield from (Point(kind.name, layer) for layer in range(config.n_layer))
    else:
        yield Point(kind.name)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(re.escape("{l}"), _LAYERS))


_PATTERNS = tuple(
    (_compiled(pattern), pattern, kind)
    for kind in _TABLE
    for pattern in (kind.pattern, *kind.aliases)
)
_HIDDEN_STATES_REGEX = _compiled(_HIDDEN_STATES)
