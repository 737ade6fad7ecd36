"""What is measured, and with what. Plain values; no engine is imported here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)

PEERS = ("transformers-*", "ctranslate2-*", "llamacpp-*")
MODELS = ("stepscope-*", *PEERS)  # stepped directly: no scheduler, no HTTP


@dataclass(frozen=True, slots=True)
class Decode:
    """One token each for `batch` sessions that hold `context` tokens."""

    batch: int
    context: int
    steps: int  # measured per call
    engines: tuple[str, ...] = (*MODELS, "read-*")  # patterns of those that take part

    @property
    def name(self) -> str:
        return f"decode-{self.batch}x{self.context}"


@dataclass(frozen=True, slots=True)
class Prefill:
    """`n_tokens` into one empty session, up to the first greedy id."""

    n_tokens: int
    steps: int
    engines: tuple[str, ...] = MODELS

    @property
    def name(self) -> str:
        return f"prefill-{self.n_tokens}"


@dataclass(frozen=True, slots=True)
class Rebuild:
    """A step of a session of `n_tokens` whose K/V was evicted. A sample is of one rebuilt row."""

    n_tokens: int
    steps: int
    engines: tuple[str, ...] = ("alone-tight-*",)

    @property
    def name(self) -> str:
        return f"rebuild-{self.n_tokens}"


@dataclass(frozen=True, slots=True)
class Serve:
    """Streams of `n_tokens` each, see `bench.load`. The one sample is of one generated token."""

    n_streams: int
    n_tokens: int
    engines: tuple[str, ...] = ("alone-float32", "alone-bfloat16", "http-*")

    @property
    def name(self) -> str:
        return f"serve-{self.n_streams}"


@dataclass(frozen=True, slots=True)
class Capture:
    """Sessions of `context` tokens generate `n_tokens` each, with internals streamed and without.

    A side that captures nothing, and one for each of `asked` (see `bench.load.points_of`). They
    take turns; a sample is of one token.
    """

    name: str
    asked: tuple[str, ...]
    n_turns: int
    engines: tuple[str, ...]
    n_sessions: int = 16
    context: int = 128
    n_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Sweep:
    """A patching grid, every `resid_pre` at each of `n_tokens` positions. A sample is of one cell.

    What is looked at are two logits after the last token.
    """

    n_tokens: int
    engines: tuple[str, ...] = ("alone-float32", "transformers-dynamic-float32")
    logits: tuple[int, int] = (318, 262)

    @property
    def name(self) -> str:
        return f"sweep-{self.n_tokens}"


@dataclass(frozen=True, slots=True)
class Activations:
    """Every `resid_post` at the last of `n_tokens` committed positions."""

    n_tokens: int
    steps: int
    engines: tuple[str, ...] = ("alone-float32", "transformers-dynamic-float32")

    @property
    def name(self) -> str:
        return f"activations-{self.n_tokens}"


Case = Decode | Prefill | Rebuild | Serve | Capture | Sweep | Activations

# With everybody, batch 64 at context 900 would take most of 24 GiB; those that are left out copy
# their cache at every step or read it slowly, and are 2 to 8 times behind at 16x900 already.
_AT_64X900 = ("stepscope-*", "transformers-static-*", "read-*")
_STREAMING = ("alone-float32", "http-float32")
_AT_1023 = ("stepscope-*", "transformers-*", "ctranslate2-*", "llamacpp-float32")  # q8_0: 4 s

CASES: tuple[Case, ...] = (
    Decode(1, 128, 20),
    Decode(1, 900, 16),
    Decode(4, 128, 12),
    Decode(4, 900, 10),
    Decode(16, 128, 10),
    Decode(16, 900, 8),
    Decode(64, 128, 8),
    Prefill(128, 10),
    Prefill(1023, 5, _AT_1023),
    Decode(64, 900, 7, _AT_64X900),
    Rebuild(900, 6),
    Serve(1, 64),
    Serve(16, 64),
    Serve(64, 32),
    Capture("capture", ("one", "residuals"), 2, (*_STREAMING, "transformers-dynamic-float32")),
    Capture("capture-all", ("cheap", "all"), 1, _STREAMING, n_tokens=8),
    Sweep(15),
    Activations(900, 3),
)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One way to run GPT-2, in a process of its own.

    `dtype` is the precision of the weights. Variants of ours: `exact` (bits that depend on nothing
    else in the batch), `kv16` (K/V in bfloat16), `tight` (room for little K/V).
    """

    library: str
    dtype: str
    variant: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.library, self.variant, self.dtype)))

    @property
    def kv_dtype(self) -> str:
        """The precision of our keys and values, and of what a probe reads in their place."""
        return "bfloat16" if self.dtype == "bfloat16" or self.variant == "kv16" else "float32"


ENGINES: tuple[EngineSpec, ...] = (
    EngineSpec("stepscope", "float32"),
    EngineSpec("stepscope", "float32", "exact"),
    EngineSpec("stepscope", "bfloat16"),
    EngineSpec("stepscope", "int8"),
    EngineSpec("stepscope", "int8", "kv16"),
    EngineSpec("transformers", "float32", "dynamic"),
    EngineSpec("transformers", "float32", "static"),
    EngineSpec("transformers", "bfloat16", "dynamic"),
    EngineSpec("transformers", "bfloat16", "static"),
    EngineSpec("ctranslate2", "float32"),
    EngineSpec("ctranslate2", "int8"),
    EngineSpec("llamacpp", "float32"),
    EngineSpec("llamacpp", "q8_0"),
    EngineSpec("read", "float32"),
    EngineSpec("read", "bfloat16"),
    EngineSpec("read", "int8", "kv16"),
    EngineSpec("alone", "float32", "tight"),
    EngineSpec("alone", "float32"),
    EngineSpec("http", "float32"),
    EngineSpec("alone", "bfloat16"),
    EngineSpec("http", "bfloat16"),
)


def side_of(engine: str, side: str) -> str:
    """What a side of an engine is called; of several words in this order too."""
    return "+".join(filter(None, (engine, side)))


def engine_of(name: str) -> str:
    """The engine that a side is of."""
    return name.partition("+")[0]


def matching(named: Iterable[N], patterns: Sequence[str]) -> list[N]:
    """Those of `named` that a shell pattern names, in their own order."""
    return [one for one in named if is_named(one.name, patterns)]


def is_named(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
