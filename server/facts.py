"""What the served model is: said at start, in `/v1/models` and with every session. Pure Python."""

from dataclasses import dataclass

from model.config import GPT2Config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One model, as clients see it.

    `created` is when these weights were loaded, in unix seconds. `fingerprint` is a SHA-256 over
    configuration and weights.
    """

    name: str
    source: str
    fingerprint: str
    dtype: str
    created: int
    config: GPT2Config
