"""Answers as OpenAPI documents them. Pure Python.

Nothing is validated by them at run time: `server.wire` and the routes write the JSON, and tests
compare the two.
"""

from typing import Any, Literal

from pydantic import BaseModel

from server.facts import SourceKind


class Fault(BaseModel):
    """What went wrong. Numbers such as `n_ctx`, `past_length` or `expected` stand beside these."""

    message: str
    type: str
    param: str | None
    code: str


class Envelope(BaseModel):
    """Every error."""

    error: Fault


class Branch(BaseModel):
    """Where a session was forked."""

    id: str
    past_length: int


class SessionState(BaseModel):
    """A session. Times in unix seconds."""

    id: str
    object: Literal["session"]
    model: str
    fingerprint: str
    created: int
    expires: int
    past_length: int
    n_ctx: int
    remaining: int
    parent: Branch | None
    kv: Literal["resident", "evicted"]
    edits: int
    metadata: dict[str, str]


class SessionList(BaseModel):
    """A page of sessions, newest first."""

    object: Literal["list"]
    data: list[SessionState]
    first_id: str | None
    last_id: str | None
    has_more: bool


class SessionDeleted(BaseModel):
    """A session that is closed."""

    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


class Token(BaseModel):
    """The bare facts of a token."""

    id: int
    text: str
    piece: str
    bytes: list[int]


class PlacedToken(Token):
    """A committed token."""

    position: int


class TokenList(BaseModel):
    """A session's tokens."""

    object: Literal["list"]
    data: list[PlacedToken]


class TopLogprob(Token):
    """One of the likeliest tokens."""

    logprob: float


class Tensor(BaseModel):
    """A point. `data` is base64 of little-endian float32, or nested lists of numbers."""

    dtype: Literal["float32"]
    shape: list[int]
    axes: list[str]
    data: str | list[Any]


class Record(BaseModel):
    """One step."""

    object: Literal["step"]
    index: int
    position: int
    past_length: int
    token: Token
    text: str
    logprob: float | None
    top_logprobs: list[TopLogprob] | None
    points: dict[str, Tensor]
    finish_reason: str | None
    stop_reason: str | int | None
    edited: bool


class Usage(BaseModel):
    """What a request cost."""

    steps: int
    cached_tokens: int
    rebuilt_tokens: int
    seed: int | None


class EmbedSteps(BaseModel):
    """The lookup's records. `aliases` only where other systems' names were asked for."""

    object: Literal["steps"]
    records: list[Record]
    aliases: dict[str, str] = {}


class Steps(EmbedSteps):
    """The steps of one append or generate."""

    session: SessionState
    usage: Usage


class Tokenized(BaseModel):
    """vLLM's answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """vLLM's answer of `/detokenize`."""

    prompt: str


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


class Capabilities(Sizes):
    """What this server can do."""

    model: str
    fingerprint: str
    dtype: str
    kv_dtype: str
    batch_invariant: bool
    points: list[str]
    formats: list[str]
    limits: dict[str, float]
    kv: KVBytes


class Status(BaseModel):
    """A probe's answer."""

    status: str


class Version(BaseModel):
    """The server's version."""

    version: str


def documented(
    model: type[BaseModel], *, status: int = 200, streams: bool = False
) -> dict[str, Any]:
    """Keywords of a route: its answer's model, its stream types, and that errors are envelopes."""
    good: dict[str, Any] = {"model": model}
    if streams:
        good["content"] = {"text/event-stream": {}, "application/x-ndjson": {}}
    errors = {code: {"model": Envelope} for code in ("4XX", "5XX")}
    return {"status_code": status, "responses": {status: good, **errors}}
