"""Rounds to ratios to Markdown. Pure Python.

A ratio is another engine's time by ours in the same round: above 1, ours is faster.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.cases import EngineSpec
from bench.driver import CaseResult

Table = Sequence[Sequence[str]]
Accepts = Callable[[EngineSpec], bool]

HEADER = """\
# Benchmarks

Written by `make bench`; the method is in the docstring of `bench/driver.py`. Every ratio compares
two engines in one round on one machine, and reads *other's time / ours*: above 1, ours is faster.
It is the median over rounds, with (smallest to largest). Times differ between machines and minutes
and are there for orientation only.

Ours is measured at the level of the model: one forward pass over the cache, logits of the last
row, greedy id; no scheduler, no HTTP. A prompt is stepped in the server's chunks of 256; the peers
take it in one pass. `read-*` only reads as many bytes as a decode step must read: ours divided
into it is the share of the memory's speed that is used.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio to reach on the cases whose name begins with `cases`."""

    ours: str
    cases: str
    peers: str  # their precision, or "any"
    at_least: float

    def accepts(self, spec: EngineSpec) -> bool:
        """Whether `spec` is one of the peers to beat."""
        return spec.is_peer and self.peers in (spec.dtype, "any")


TARGETS = (
    Target("stepscope-float32", "decode-1x", "float32", 0.95),
    Target("stepscope-bfloat16", "decode-16x900", "any", 1.5),
    Target("stepscope-bfloat16", "decode-64x", "any", 1.5),
    Target("stepscope-bfloat16", "prefill-1023", "any", 1.3),
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
    """What is known so far, and its Markdown."""

    specs: Sequence[EngineSpec]
    machine: Mapping[str, str]
    results: list[CaseResult] = field(default_factory=list)
    embedding: Sequence[Mapping[str, str | float]] = ()
    next_ids: Mapping[str, int | None] = field(default_factory=dict)

    def render(self) -> str:
        """The whole page."""
        sections = [
            HEADER,
            _section("Targets", _targets(self.results, self.specs)),
            _section("Against each engine", _against(self.results, self.specs)),
            _section(
                "Milliseconds per step (clean steps of all)", _times(self.results, self.specs)
            ),
            _section("Embedding step", _embedding(self.embedding)),
            _section("Greedy id after 128 tokens", _next_ids(self.next_ids)),
            _section("Machine", [("what", "value"), *self.machine.items()]),
        ]
        return "\n".join(filter(None, sections))


def _targets(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    rows: list[Sequence[str]] = [("case", "ours", "peers", "the best", "ratio", "goal", "reached")]
    for target in TARGETS:
        peers = _names(specs, target.accepts)
        for result in results:
            if not result.case.name.startswith(target.cases):
                continue
            if reached := ratio(result, target.ours, peers):
                rows.append(_target_row(target, result, peers, reached))
    return rows


def _target_row(
    target: Target, result: CaseResult, peers: Sequence[str], reached: Ratio
) -> tuple[str, ...]:
    return (
        result.case.name,
        target.ours,
        target.peers,
        fastest(result, peers),
        str(reached),
        f"{target.at_least}",
        f"{reached.median / target.at_least:.0%}",
    )


def _against(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    others = _names(specs, lambda s: s.library != "stepscope")
    rows: list[Sequence[str]] = [("case", "ours", *others)]
    for result in results:
        for ours in _names(specs, lambda s: s.library == "stepscope"):
            ratios = [ratio(result, ours, [other]) for other in others]
            rows.append((result.case.name, ours, *(str(one or "") for one in ratios)))
    return rows


def _times(results: Sequence[CaseResult], specs: Sequence[EngineSpec]) -> Table:
    names = _names(specs, lambda _: True)
    rows: list[Sequence[str]] = [("case", *names)]
    rows += [(result.case.name, *(_time(result, name) for name in names)) for result in results]
    return rows


def _time(result: CaseResult, name: str) -> str:
    """Milliseconds, and how many of the steps were clean."""
    times = [medians[name] for medians in result.medians() if name in medians]
    clean, total = result.counts(name)
    if not total:
        return ""
    shown = f"{statistics.median(times) * 1000:.1f}" if times else "-"
    return f"{shown} ({clean}/{total})"


def _embedding(rows: Sequence[Mapping[str, str | float]]) -> Table:
    if not rows:
        return []
    cells = [
        [one if isinstance(one, str) else f"{one:.2f}" for one in row.values()] for row in rows
    ]
    return [list(rows[0]), *cells]


def _next_ids(next_ids: Mapping[str, int | None]) -> Table:
    known = [(name, str(token_id)) for name, token_id in next_ids.items() if token_id is not None]
    return [("engine", "id"), *known]


def _names(specs: Iterable[EngineSpec], accepts: Accepts) -> list[str]:
    return [spec.name for spec in specs if accepts(spec)]


def _section(title: str, table: Table) -> str:
    """A heading and a table; nothing where the table has no rows."""
    if len(table) < 2:
        return ""
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"## {title}\n\n{body}\n"
