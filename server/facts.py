"""What the served model is: said at start, in `/v1/models` and with every session. Pure Python."""

from dataclasses import dataclass
from typing import Literal

from model.config import GPT2Config

SourceKind = Literal["random", "directory", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model, as clients see it.

    `source` is the kind of place the weights came from. `created` is when they were loaded, in unix
    seconds. `fingerprint` is a SHA-256 over configuration and weights.
    """

    name: str
    source: SourceKind
    fingerprint: str
    dtype: str
    kv_dtype: str
    batch_invariant: bool
    created: int
    config: GPT2Config
