"""The server's settings: one class. The command line and the environment are derived from it.

`max_queue` is `--max-queue` and `STEPSCOPE_MAX_QUEUE`; a flag wins over its variable. An unknown
name or a bad value stops the start.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.limits import Limits
from server.resources import cpu_count, memory_bytes, parse_size

PREFIX = "STEPSCOPE_"
KV_SHARE = 0.3
"""Share of the memory limit that K/V may take by default; weights and answers need the rest."""

_MIB = 2**20
_LIMITS = Limits()


def _to_bytes(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_to_bytes), Field(ge=1)]
KVDtype = Literal["float32", "bfloat16"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def kv_share() -> int:
    """The default of `kv_budget`, in bytes."""
    return int(memory_bytes() * KV_SHARE)


def kv_dtype_for(given: dict[str, Any]) -> KVDtype:
    """The default of `kv_dtype`, from the settings before it."""
    return "bfloat16" if given["dtype"] == "bfloat16" else "float32"


class Settings(BaseSettings):
    """Serve a model over HTTP. Every flag has a twin in the environment, STEPSCOPE_..."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, cli_kebab_case=True
    )

    model: str = Field(
        default="random:gpt2",
        min_length=1,
        description="weights: a directory, a hub name, or random:gpt2|gpt2-medium|gpt2-large|"
        "gpt2-xl|tiny",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(
        default=8000, ge=0, le=65535, description="port to listen on; 0 picks a free one"
    )
    data_dir: Path = Field(
        default=Path(".stepscope"),
        description="folder for downloaded weights, made when first needed",
    )
    dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32", description="precision of the model"
    )
    kv_dtype: KVDtype = Field(
        default_factory=kv_dtype_for,
        description="precision of K/V; default: bfloat16 for a bfloat16 model, else float32",
    )
    batch_invariant: bool = Field(
        default=False,
        description="equal bits whatever else is stepped; in float32 throughout, and slower",
    )
    threads: int = Field(
        default_factory=cpu_count, ge=1, description="threads of the model; default: cores allowed"
    )
    kv_budget: Bytes = Field(
        default_factory=kv_share,
        description=f"bytes of K/V, such as 4GiB; default: {KV_SHARE:.0%} of the memory limit",
    )
    record_budget: Bytes = Field(
        default=_LIMITS.record_bytes, description="bytes of points that sessions record"
    )
    edit_budget: Bytes = Field(
        default=_LIMITS.edit_bytes, description="bytes of edits in the histories of sessions"
    )
    vector_budget: Bytes = Field(default=64 * _MIB, description="bytes of vectors that are kept")
    max_sessions: int = Field(default=_LIMITS.max_sessions, ge=1, description="open sessions")
    session_ttl: int = Field(
        default=3600, ge=1, le=604_800, description="idle seconds after which a session ends"
    )
    max_queue: int = Field(
        default=_LIMITS.max_queue, ge=1, description="requests running or waiting"
    )
    max_rows: int = Field(
        default=_LIMITS.max_rows, ge=1, description="sessions stepped together in one iteration"
    )
    prefill_chunk: int = Field(
        default=_LIMITS.prefill_chunk, ge=1, description="prompt tokens stepped in one iteration"
    )
    max_response_bytes: Bytes = Field(default=64 * _MIB, description="limit of one JSON answer")
    max_body_bytes: Bytes = Field(default=16 * _MIB, description="limit of one request body")
    reply_buffer_bytes: Bytes = Field(
        default=_LIMITS.reply_buffer_bytes,
        description="records a stream may have unsent before its row waits",
    )
    write_timeout: Seconds = Field(default=30, description="seconds a client may refuse to read")
    read_timeout: Seconds = Field(default=30, description="seconds a request may take to arrive")
    ping_seconds: Seconds = Field(default=15, description="silence on an SSE stream before a ping")
    grace_seconds: float = Field(
        default=5,
        ge=0,
        allow_inf_nan=False,
        description="seconds that running work gets at shutdown",
    )
    stall_seconds: Seconds = Field(
        default=30,
        description="silence of the model thread before /ready fails; /health after 10 times it",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe log line that is written"
    )

    @model_validator(mode="after")
    def _exact_is_float32(self) -> Self:
        if self.batch_invariant and (self.dtype, self.kv_dtype) != ("float32", "float32"):
            raise ValueError(
                "--batch-invariant needs --dtype float32 and --kv-dtype float32, "
                f"not {self.dtype} and {self.kv_dtype}"
            )
        return self

    @model_validator(mode="after")
    def _refuse_unknown_variables(self) -> Self:
        names = unknown_variables(os.environ)
        if names:
            raise ValueError(f"unknown environment variables: {', '.join(names)}")
        return self

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names that begin as ours do and are no setting: most likely a slip of the pen."""
    known = {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    return sorted(
        name for name in environ if name.upper().startswith(PREFIX) and name.upper() not in known
    )


def explain(error: ValidationError) -> str:
    """One line per bad setting, by its flag and its variable; no value is repeated."""
    lines = error.errors(include_url=False)
    told = [_explain_one(dict(line)) for line in lines if line["type"] not in _FOLLOWS]
    return "\n".join(f"stepscope: {line}" for line in told)


_FOLLOWS = frozenset({"default_factory_not_called"})
"""Kinds of errors that only follow from another one."""


def _explain_one(line: dict[str, object]) -> str:
    location = line["loc"]
    name = str(location[-1]) if isinstance(location, tuple) and location else ""
    message = str(line["msg"]).removeprefix("Value error, ")
    if name not in Settings.model_fields:
        return message
    return f"--{name.replace('_', '-')} ({PREFIX}{name.upper()}): {message}"
