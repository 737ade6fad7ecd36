"""Points: the named tensors of one step. Pure Python, any thread; no torch.

`model.names` has the tables: which points exist and what other systems call them. A name has a
layer place (a number, `*` for all, or half-open `a:b`) and may end in units: `z.9:11[6]`.

    embedding = wte + wpe = resid_pre.0 -> block 0 -> resid_post.0 = resid_pre.1 -> ...
        -> resid_post.(n_layer-1) -> ln_f -> logits
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import total_ordering
from math import prod
from typing import TYPE_CHECKING

from model.config import GPT2Config
from model.errors import TooManyPoints, UnknownPoint
from model.names import ALIASES, HIDDEN_STATES, KINDS, is_one_branch, refusal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LENS_TOP = 10
MAX_UNITS = 1024  # of one name
MAX_NAMES = 8192  # of one request, patterns widened; gpt2-xl has 1,015 points
_FLOAT32_BYTES = 4
_LONGEST_NAME = 64  # no name without units is longer; keeps the search for near ones cheap
_NUMBER = "(?:0|[1-9][0-9]{0,4})"
_LAYER = re.compile(rf"(?<=[.\[])(?:\*|{_NUMBER}(?::{_NUMBER})?)(?=[.\]]|\Z)")
_UNITS = re.compile(rf"(.+)\[({_NUMBER}(?:,{_NUMBER})*)\]")
_RANK: Mapping[str, int] = {name: rank for rank, name in enumerate(KINDS)}
_NAMES: Mapping[str, tuple[str, ...]] = {
    **ALIASES,
    **{kind.pattern: (kind.pattern,) for kind in KINDS.values()},
}


@total_ordering
@dataclass(frozen=True, slots=True)
class Point:
    """One named tensor of a step, or some units of it: `z.9`, or head 6 of it, `z.9[6]`.

    Ordered as the forward pass computes them.
    """

    name: str
    layer: int | None = None
    units: tuple[int, ...] | None = None
    _text: str = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)  # asked for at each point of a step

    def __post_init__(self) -> None:
        layer = "" if self.layer is None else f".{self.layer}"
        units = "" if self.units is None else f"[{','.join(map(str, self.units))}]"
        object.__setattr__(self, "_text", self.name + layer + units)
        object.__setattr__(self, "_hash", hash((self.name, self.layer, self.units)))

    def __str__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: "Point") -> bool:
        return self._forward < other._forward

    @property
    def _forward(self) -> tuple[int, int, int, tuple[int, ...]]:
        return KINDS[self.name].stage, self.layer or 0, _RANK[self.name], self.units or ()

    @property
    def axes(self) -> tuple[str, ...]:
        """What each dimension counts, in the words of the configuration."""
        return KINDS[self.name].axes

    @property
    def unit_axis(self) -> int:
        """The axis that units are indices of: heads where there are heads, else the last."""
        return 0 if self.axes[0] == "n_head" else len(self.axes) - 1

    @property
    def whole(self) -> "Point":
        """The same point without units."""
        return Point(self.name, self.layer)

    @property
    def is_looked_up(self) -> bool:
        """Whether it is known before the first block, without computing a step."""
        return KINDS[self.name].stage == 0 or self.whole == Point("resid_pre", 0)

    @property
    def is_head_product(self) -> bool:
        """Whether it is read from rows that are multiplied by the token table, after the pass."""
        return KINDS[self.name].stage >= 3

    @property
    def is_editable(self) -> bool:
        """Whether what follows in the step is computed from it."""
        return not self.is_head_product

    @property
    def is_ragged(self) -> bool:
        """Whether its tensor grows with the position: one axis counts keys, the last one."""
        return "key" in self.axes

    @property
    def costs_extra(self) -> bool:
        """Whether a step has it only by extra work."""
        return self.name in ("scores", "pattern", "head_out", "lens")

    def shape(self, config: GPT2Config, position: int) -> tuple[int, ...]:
        """Sizes of the tensor of the step at `position`: only `key` depends on that."""
        sizes = _sizes(config, position)
        shape = [sizes[axis] for axis in self.axes]
        if self.units is not None:
            shape[self.unit_axis] = len(self.units)
        return tuple(shape)

    def n_bytes(self, config: GPT2Config) -> int:
        """Bytes of one step's tensor in float32: at the last position, where it is largest."""
        return _FLOAT32_BYTES * prod(self.shape(config, config.n_ctx - 1))

    def select(self, array: "npt.NDArray[np.float32]") -> "npt.NDArray[np.float32]":
        """The units of `array`, which is the whole point's; `array` itself without units."""
        if self.units is None:
            return array
        return array[list(self.units)] if self.unit_axis == 0 else array[..., list(self.units)]


def _sizes(config: GPT2Config, position: int) -> Mapping[str, int]:
    """How long each axis is in the step at `position`."""
    return {
        "one": 1,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "d_head": config.d_head,
        "n_inner": 4 * config.n_embd,
        "n_vocab": config.n_vocab,
        "key": position + 1,
        "id_logit": 2,
        "top": LENS_TOP,
    }


@dataclass(frozen=True, slots=True)
class Selection:
    """What a request asked for.

    `points` are unique and in forward order. `aliases` tells, for each name of another system,
    the canonical name under which its tensor is answered (three in a comma list for q, k and v in
    one); a pattern is listed name by name.
    """

    points: tuple[Point, ...]
    aliases: Mapping[str, str]


def all_points(config: GPT2Config) -> tuple[Point, ...]:
    """Every whole point of a model, in forward order."""
    return parse_points(
        [kind.pattern.replace("{l}", "*") for kind in KINDS.values()], config
    ).points


def parse_points(specs: Sequence[str], config: GPT2Config) -> Selection:
    """Resolve names, patterns and other systems' names, each with or without units.

    Raises:
        UnknownPoint: with the names that come nearest, or the reason.
        TooManyPoints: more than `MAX_NAMES` after patterns are widened.
    """
    points: set[Point] = set()
    aliases: dict[str, str] = {}
    n_names = 0
    for spec in dict.fromkeys(specs):
        found = _resolve(spec, config)
        n_names += len(found)
        if n_names > MAX_NAMES:
            raise TooManyPoints(MAX_NAMES)
        for name, named in found:
            points.update(named)
            canonical = ",".join(map(str, named))
            if name != canonical:
                aliases[name] = canonical
    return Selection(tuple(sorted(points)), aliases)


def parse_point(spec: str, config: GPT2Config) -> Point:
    """The one point that an edit of `spec` changes.

    Raises:
        UnknownPoint: none, or several, or an input that only one of its point's readers reads.
    """
    template, _, _ = _read(spec)
    points = parse_points([spec], config).points
    if len(points) != 1:
        raise UnknownPoint(spec, reason=f"it stands for {len(points)} points, and one is needed")
    if is_one_branch(template):
        reason = f"to edit there would pass by other readers of {points[0]}: say which point"
        raise UnknownPoint(spec, reason=reason)
    return points[0]


def _resolve(spec: str, config: GPT2Config) -> list[tuple[str, tuple[Point, ...]]]:
    """Each concrete name that `spec` stands for, with its points."""
    template, place, told = _read(spec)
    if template not in _NAMES or ("{l}" in template) != bool(place):
        raise _unknown(spec, template, place)
    n_layers = config.n_layer + (template == HIDDEN_STATES)
    layers = _layers(place, n_layers) if place else range(1)
    if not layers:
        raise UnknownPoint(spec, reason=f"layers are 0 to {n_layers - 1}")
    units = tuple(map(int, told.split(","))) if told else None
    brackets = f"[{told}]" if told else ""
    found = [
        (
            template.replace("{l}", str(layer)) + brackets,
            tuple(Point(name, at, units) for name, at in _targets(template, layer, config)),
        )
        for layer in layers
    ]
    _check_units(spec, found[0][1][0], config)
    return found


def _read(spec: str) -> tuple[str, str, str]:
    """The name with `{l}` for the layer, the layer place and the units; both may be empty.

    Brackets that belong to the name, as in `attentions[3]` and `attn.output[0]`, are no units.
    """
    template, place = _template(spec)
    if template not in _NAMES and (match := _UNITS.fullmatch(spec)):
        return *_template(match[1]), match[2]
    return template, place, ""


def _template(name: str) -> tuple[str, str]:
    place = _LAYER.search(name)
    if place is None:
        return name, ""
    return f"{name[: place.start()]}{{l}}{name[place.end() :]}", place[0]


def _layers(place: str, n: int) -> range:
    """The layers that `*`, `a:b` or a number names; empty where it names none of the `n`."""
    if place == "*":
        return range(n)
    first, _, stop = place.partition(":")
    start, end = int(first), int(stop or first) + (not stop)
    return range(start, end) if end <= n else range(0)


def _targets(template: str, layer: int, config: GPT2Config) -> Iterator[tuple[str, int | None]]:
    """Names and layers of the points behind a name."""
    if template == HIDDEN_STATES and layer == config.n_layer:
        yield "ln_f", None
        return
    for pattern in _NAMES[template]:
        name, _, at = pattern.partition(".")
        yield name, {"": None, "{l}": layer, "{last}": config.n_layer - 1}[at]


def _check_units(spec: str, point: Point, config: GPT2Config) -> None:
    units, whole = point.units or (), point.whole
    n_units = whole.shape(config, 0)[point.unit_axis]
    if len(units) > MAX_UNITS or len(set(units)) < len(units):
        raise UnknownPoint(spec, reason=f"units are distinct and at most {MAX_UNITS}")
    if max(units, default=0) >= n_units:
        raise UnknownPoint(spec, reason=f"units of {whole} are 0 to {n_units - 1}")


def _unknown(spec: str, template: str, place: str) -> UnknownPoint:
    """The refusal of a name that is in no table: with its reason, or names that look like it."""
    if reason := refusal(template):
        return UnknownPoint(spec, reason=reason)
    near = difflib.get_close_matches(template[:_LONGEST_NAME], _NAMES, n=3)
    return UnknownPoint(spec, nearest=[name.replace("{l}", place or "0") for name in near])
