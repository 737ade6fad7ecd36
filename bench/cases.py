"""What is measured, and with what. Plain values; no engine is imported here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


@dataclass(frozen=True, slots=True)
class Decode:
    """One token each for `batch` sessions that hold `context` tokens."""

    batch: int
    context: int
    steps: int  # measured per call

    @property
    def name(self) -> str:
        return f"decode-{self.batch}x{self.context}"


@dataclass(frozen=True, slots=True)
class Prefill:
    """`n_tokens` into one empty session, up to the first greedy id."""

    n_tokens: int
    steps: int

    @property
    def name(self) -> str:
        return f"prefill-{self.n_tokens}"


Case = Decode | Prefill

CASES: tuple[Case, ...] = (
    Decode(1, 128, 24),
    Decode(1, 900, 24),
    Decode(16, 128, 12),
    Decode(16, 900, 10),
    Decode(64, 128, 8),
    Prefill(128, 10),
    Prefill(1023, 7),
    Decode(64, 900, 7),  # last: the longest by far
)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One way to run GPT-2, in a process of its own."""

    library: str
    dtype: str
    variant: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.library, self.variant, self.dtype)))

    @property
    def is_peer(self) -> bool:
        return self.library in {"transformers", "ctranslate2"}


ENGINES: tuple[EngineSpec, ...] = (
    EngineSpec("stepscope", "float32"),
    EngineSpec("stepscope", "bfloat16"),
    EngineSpec("transformers", "float32", "dynamic"),
    EngineSpec("transformers", "float32", "static"),
    EngineSpec("transformers", "bfloat16", "dynamic"),
    EngineSpec("transformers", "bfloat16", "static"),
    EngineSpec("ctranslate2", "float32"),
    EngineSpec("ctranslate2", "int8"),
    EngineSpec("read", "float32"),
    EngineSpec("read", "bfloat16"),
)


def matching(named: Iterable[N], patterns: Sequence[str]) -> list[N]:
    """Those of `named` that a shell pattern names, in their own order."""
    return [one for one in named if any(fnmatchcase(one.name, p) for p in patterns)]
