"""Answers about the model, as OpenAPI documents them: see `server.answers`. Pure Python."""

from typing import Literal

from pydantic import BaseModel

from server.facts import SourceKind
from sessions.edits import Op


class Sizes(BaseModel):
    """The model's shape."""

    n_ctx: int
    n_vocab: int
    n_layer: int
    n_head: int
    n_embd: int


class ModelCard(Sizes):
    """A model, OpenAI's fields first."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    source: SourceKind
    fingerprint: str
    dtype: str
    kv_dtype: str
    batch_invariant: bool
    max_model_len: int


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class KVBytes(BaseModel):
    """The K/V cache: what sessions hold, what several of them hold, what is kept for reuse."""

    bytes_total: int
    bytes_used: int
    bytes_shared: int
    bytes_cached: int
    bytes_per_token: int


class Editable(BaseModel):
    """What interventions can do."""

    ops: list[Op]
    points: list[str]
    max_interventions: int


class Capabilities(Sizes):
    """What this server can do."""

    model: str
    fingerprint: str
    dtype: str
    kv_dtype: str
    batch_invariant: bool
    points: list[str]
    points_that_cost_extra: list[str]
    interventions: Editable
    gradients: Literal[False]
    formats: list[str]
    limits: dict[str, float]
    kv: KVBytes
