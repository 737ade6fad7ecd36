"""Rounds to ratios to Markdown. Pure Python.

A ratio is another engine's time by ours in the same round: above 1, ours is faster.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.cases import (
    PEERS,
    Decode,
    EngineSpec,
    Prefill,
    Rebuild,
    Serve,
    engine_of,
    is_named,
    matching,
    side_of,
)
from bench.driver import CaseResult

Table = Sequence[Sequence[str]]
SideRow = Mapping[str, str | float]

HEADER = """\
# Benchmarks

Written by `make bench`; the method is in the docstring of `bench/driver.py`. Every ratio compares
two engines in one round on one machine, and reads *other's time / ours*: above 1, ours is faster.
It is the median over rounds, with (smallest to largest). Times differ between machines and minutes
and are there for orientation only.

`stepscope-*` is ours at the level of the model: one forward pass over the cache, logits of the last
row, greedy id; no scheduler, no HTTP. A prompt is stepped in the server's chunks; the peers take it
in one pass. `exact` are bits that depend on nothing else in the batch, `kv16` is K/V in bfloat16.
`read-*` only reads as many bytes as a decode step must read: *of the limit* is the share of the
memory's speed that ours uses. `alone-*` is ours with its scheduler, `http-*` the whole server,
the client's CPU time not counted (`bench/engines/http.py` says how).

What follows a `+` is a side of an engine, measured in turns with its other sides. `capture`: greedy
streams of sessions at context 128 with one residual, with the embedding and all residuals, with
all points that cost a copy, with all there are; over HTTP as SSE with base64 and as frames.
`sweep-15`: a grid of patches, every `resid_pre` at 15 positions; in transformers by full passes
with hooks, one for each cell or each layer. `activations-900`: every residual of one past position
from what is cached, or with all positions before it computed anew (`+fresh`, transformers).
"""

_FLOAT32_PEERS = ("transformers-*-float32", "ctranslate2-float32", "llamacpp-float32")


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio to reach: the best of `ours` against the best of `others`. All are patterns.

    They name engines, or sides of them.
    """

    cases: str
    ours: str
    others: tuple[str, ...]
    at_least: float | None  # None: only reported


TARGETS = (
    Target("decode-1x*", "stepscope-float32", _FLOAT32_PEERS, 1.0),
    Target("decode-1x128", "stepscope-*int8", ("ctranslate2-int8",), None),
    Target("decode-16x128", "stepscope-*", PEERS, 1.3),
    Target("decode-16x900", "stepscope-*", PEERS, 2.2),
    Target("decode-64x128", "stepscope-*", PEERS, 2.1),
    Target("decode-64x900", "stepscope-*", PEERS, 1.8),
    Target("prefill-128", "stepscope-*", PEERS, 1.2),
    Target("prefill-1023", "stepscope-*", PEERS, 1.5),
    Target("decode-*", "stepscope-exact-float32", ("stepscope-float32",), 1 / 1.3),
    Target("serve-16", "http-float32", ("alone-float32",), 0.9),
    Target("serve-16", "http-bfloat16", ("alone-bfloat16",), 0.9),
    *(
        Target(case, side_of(engine, asked), (engine,), goal)
        for case, asked, goal in (
            ("capture", "one", 0.97),
            ("capture", "residuals", 0.9),
            ("capture-all", "cheap", None),
            ("capture-all", "all", None),
        )
        for engine in ("alone-float32", "http-float32+sse", "http-float32+frames")
    ),
    Target("capture", "transformers-*+hidden_states", ("transformers-dynamic-float32",), None),
    Target("sweep-*", "alone-float32", PEERS, None),
    Target("activations-*", "alone-float32", ("alone-float32+fresh",), None),
    Target("activations-*", "alone-float32", PEERS, None),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median, smallest and largest over rounds."""

    median: float
    smallest: float
    largest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.smallest:.2f} to {self.largest:.2f})"


def ratio(result: CaseResult, ours: str, others: Sequence[str]) -> Ratio | None:
    """The fastest of `others` by `ours`; None where no round has both."""
    ratios = []
    for medians in result.medians():
        times = [medians[name] for name in others if name in medians]
        if times and ours in medians:
            ratios.append(min(times) / medians[ours])
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def fastest(result: CaseResult, names: Sequence[str]) -> str:
    """The engine that was fastest in most rounds."""
    winners = [
        min(present, key=medians.__getitem__)
        for medians in result.medians()
        if (present := [name for name in names if name in medians])
    ]
    return statistics.mode(winners) if winners else ""


@dataclass(slots=True)
class Page:
    """What is known so far, and its Markdown.

    `tables` are those that other modules measure, by title.
    """

    specs: Sequence[EngineSpec]
    machine: Mapping[str, str]
    results: list[CaseResult] = field(default_factory=list)
    tables: dict[str, list[SideRow]] = field(default_factory=dict)
    next_ids: dict[str, int | None] = field(default_factory=dict)

    def render(self) -> str:
        """The whole page."""
        steps = [one for one in self.results if isinstance(one.case, Decode | Prefill)]
        rates = [one for one in self.results if isinstance(one.case, Rebuild | Serve)]
        inside = [one for one in self.results if one not in steps + rates]
        sections = [
            HEADER,
            _section("Targets", _targets(self.results, self.specs)),
            _section("Against each engine", _against(steps, self.specs)),
            _section("Milliseconds per step (clean steps of all)", _times(steps, self.specs)),
            _section("Tokens or rebuilt rows per second", _rates(rates, self.specs)),
            _section("Looking inside: tokens, cells or reads per second", _side_rates(inside)),
            *(_section(title, _side(rows)) for title, rows in self.tables.items()),
            _section("Greedy id after 128 tokens", _next_ids(self.next_ids)),
            _section("Machine", [("what", "value"), *self.machine.items()]),
        ]
        return "\n".join(filter(None, sections))


def _targets(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    rows: list[Sequence[str]] = [
        ("case", "ours", "against", "ratio", "goal", "reached", "of the limit")
    ]
    for target in TARGETS:
        for result in results:
            if is_named(result.case.name, [target.cases]):
                rows += _target_row(target, result, specs)
    return rows


def _target_row(
    target: Target, result: CaseResult, specs: Sequence[EngineSpec]
) -> list[Sequence[str]]:
    """One row; none where no round has both sides."""
    others = [name for name in result.names if is_named(name, target.others)]
    reached = {
        name: one
        for name in result.names
        if is_named(name, [target.ours]) and (one := ratio(result, name, others))
    }
    if not reached:
        return []
    ours = max(reached, key=lambda name: reached[name].median)  # one mode, the same in all rounds
    limit = ratio(result, ours, _limit_of(ours, specs))
    row = (
        result.case.name,
        ours,
        fastest(result, others),
        str(reached[ours]),
        f"{target.at_least:.2f}" if target.at_least else "none",
        f"{reached[ours].median / target.at_least:.0%}" if target.at_least else "",
        f"{limit.median:.0%}" if limit else "",
    )
    return [row]


def _limit_of(ours: str, specs: Sequence[EngineSpec]) -> list[str]:
    """The probe that reads the bytes that `ours` must read."""
    (engine,) = matching(specs, [engine_of(ours)])
    precision = engine.dtype, engine.kv_dtype
    return [
        spec.name
        for spec in matching(specs, ["read-*"])
        if (spec.dtype, spec.kv_dtype) == precision
    ]


def _against(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    others = _names(specs, [*PEERS, "read-*"])
    rows: list[Sequence[str]] = [("case", "ours", *others)]
    for result in results:
        for ours in _names(specs, ["stepscope-*"]):
            ratios = [ratio(result, ours, [other]) for other in others]
            rows.append((result.case.name, ours, *(str(one or "") for one in ratios)))
    return rows


def _times(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    names = _present(results, specs)
    rows: list[Sequence[str]] = [("case", *names)]
    rows += [(result.case.name, *(_time(result, name) for name in names)) for result in results]
    return rows


def _time(result: CaseResult, name: str) -> str:
    """Milliseconds, and how many of the steps were clean."""
    clean, total = result.counts(name)
    if not total:
        return ""
    median = _median(result, name)
    return f"{'-' if median is None else f'{median * 1000:.1f}'} ({clean}/{total})"


def _rates(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    names = _present(results, specs)
    rows: list[Sequence[str]] = [("case", *names)]
    rows += [(result.case.name, *(_rate(result, name) for name in names)) for result in results]
    return rows


def _side_rates(results: Sequence[CaseResult]) -> Table:
    rows = [
        (result.case.name, name, rate)
        for result in results
        for name in result.names
        if (rate := _rate(result, name))
    ]
    return [("case", "who", "per second"), *rows]


def _rate(result: CaseResult, name: str) -> str:
    median = _median(result, name)
    return "" if median is None else f"{1 / median:.{0 if median < 0.1 else 2}f}"


def _median(result: CaseResult, name: str) -> float | None:
    """Seconds, over rounds."""
    times = [medians[name] for medians in result.medians() if name in medians]
    return statistics.median(times) if times else None


def _present(results: Sequence[CaseResult], specs: Iterable[EngineSpec]) -> list[str]:
    """Engines that took part in any of these cases."""
    return [spec.name for spec in specs if any(one.counts(spec.name)[1] for one in results)]


def _side(rows: Sequence[SideRow]) -> Table:
    cells = [
        [one if isinstance(one, str) else f"{one:.2f}" for one in row.values()] for row in rows
    ]
    return [list(rows[0]), *cells]


def _next_ids(next_ids: Mapping[str, int | None]) -> Table:
    known = [(name, str(token_id)) for name, token_id in next_ids.items() if token_id is not None]
    return [("engine", "id"), *known]


def _names(specs: Iterable[EngineSpec], patterns: Sequence[str]) -> list[str]:
    return [spec.name for spec in matching(specs, patterns)]


def _section(title: str, table: Table) -> str:
    """A heading and a table; nothing where the table has no rows."""
    if len(table) < 2:
        return ""
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"## {title}\n\n{body}\n"
