"""Answers as OpenAPI documents them. Pure Python.

Nothing is validated by them at run time: `server.wire` and the routes write the JSON, and tests
compare the two.
"""

from typing import Any, Literal

from fastapi import Response
from pydantic import BaseModel, RootModel

from server.negotiation import STREAMS, Form
from sessions.edits import Op


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
    record: list[str]
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
    """A point. `data` is base64 of little-endian float32, or nested lists of numbers and nulls."""

    dtype: Literal["float32"]
    shape: list[int]
    axes: list[str]
    data: str | list[Any]


class Edited(BaseModel):
    """An edit that was made in a step. `sha256` is of its value's bytes."""

    point: str
    op: Op
    scale: float | None
    keys: str | None
    sha256: str | None


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
    finish_reason: str | None
    stop_reason: str | int | None
    edited: list[Edited]
    points: dict[str, Tensor]


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


class Forked(RootModel[Steps | SessionState]):
    """A new session: alone, or with its steps where something was said of them."""


class Tokenized(BaseModel):
    """vLLM's answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """vLLM's answer of `/detokenize`."""

    prompt: str


class VectorState(BaseModel):
    """A vector that is kept for interventions."""

    id: str
    object: Literal["vector"]
    name: str
    dtype: Literal["float32"]
    shape: list[int]
    bytes: int


class VectorList(BaseModel):
    """Vectors."""

    object: Literal["list"]
    data: list[VectorState]


class VectorDeleted(BaseModel):
    """A vector that is forgotten."""

    id: str
    object: Literal["vector.deleted"]
    deleted: Literal[True]


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
        good["content"] = {form.value: {} for form in STREAMS}
    errors = {code: {"model": Envelope} for code in ("4XX", "5XX")}
    return {"status_code": status, "responses": {status: good, **errors}}


def documented_tensors(form: Form = Form.STACKED) -> dict[str, Any]:
    """Keywords of a route whose answer is a safetensors file, or frames of them."""
    good = {"content": {form.value: {"schema": {"type": "string", "format": "binary"}}}}
    errors = {code: {"model": Envelope} for code in ("4XX", "5XX")}
    return {"response_class": Response, "responses": {200: good, **errors}}
