"""Request bodies, in the words of the API: see `server.fields`. Pure Python, the event loop."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.fields import (
    MAX_INT,
    Body,
    Expected,
    Length,
    LogitBias,
    Metadata,
    Points,
    Positions,
    Stops,
    TokenIds,
    Ttl,
)
from server.interventions.bodies import Interventions
from server.negotiation import EncodingFormat


class Tokens(Body):
    """Text or ids, not both."""

    prompt: str | None = None
    token_ids: TokenIds | None = None
    allow_special: bool = Field(
        default=False, description="read <|endoftext|> in the prompt as one token, 50256"
    )

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.prompt is not None and self.token_ids is not None:
            raise _empty_input("give prompt or token_ids, not both", "token_ids")
        if self.prompt == "":
            raise _empty_input("the prompt is empty", "prompt")
        if self.token_ids == []:
            raise _empty_input("token_ids is empty", "token_ids")
        if self.allow_special and self.prompt is None:
            raise PydanticCustomError(
                "needs_prompt", "allow_special is about a prompt", {"param": "allow_special"}
            )
        return self

    @property
    def given(self) -> str | None:
        """Which of the two fields is there."""
        if self.prompt is not None:
            return "prompt"
        return None if self.token_ids is None else "token_ids"


class SomeTokens(Tokens):
    """Text or ids, one of them."""

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        if self.given is None:
            raise _empty_input("give prompt or token_ids", "prompt")
        return self


class Reporting(Body):
    """What a request that steps reports of each step."""

    past_length: Expected | None = None
    points: Points = Field(default=["embedding"])
    points_at: Positions | None = None
    encoding_format: EncodingFormat = "base64"
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    interventions: Interventions = Field(default=[], description="edits of what is stepped")
    stream: bool = False

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "needs_logprobs",
                "top_logprobs needs logprobs: true",
                {"param": "top_logprobs"},
            )
        return self


class OpenBody(Tokens):
    """`POST /v1/sessions`."""

    prepend_bos: bool = False
    record: Points = Field(default=[], description="points to keep of every step, for later")
    ttl_seconds: Ttl | None = None
    metadata: Metadata = Field(default={})


class AppendBody(SomeTokens, Reporting):
    """`POST /v1/sessions/{id}/append`."""

    prepend_bos: bool = Field(
        default=False, description="begin with 50256; only where past_length is 0"
    )


class GenerateBody(Reporting):
    """`POST /v1/sessions/{id}/generate`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stop: Stops = Field(default=[])
    stop_token_ids: TokenIds = Field(default=[])
    logit_bias: LogitBias = Field(default={})
    ignore_eos: bool = False


class TruncateBody(Body):
    """`POST /v1/sessions/{id}/truncate`."""

    to: Length
    past_length: Expected | None = None


class ForkBody(Tokens, Reporting):
    """`POST /v1/sessions/{id}/fork`."""

    at: Length | None = Field(
        default=None, description="how much of the session the new one begins with; default: all"
    )
    replay: bool = Field(default=False, description="step the session's own tokens from `at` on")
    edits: Literal["keep", "drop"] = Field(
        default="keep", description="what becomes of the edits of what is replayed"
    )
    ttl_seconds: Ttl | None = None
    metadata: Metadata = Field(default={})

    @model_validator(mode="after")
    def _about_its_steps(self) -> Self:
        if self.replay and self.at is None:
            raise _misplaced("at", "replay needs at, the first position that is stepped anew")
        if "edits" in self.model_fields_set and not self.replay:
            raise _misplaced("edits", "edits is about what is replayed")
        asked = sorted(self.model_fields_set & _OF_STEPS)
        if asked and not (self.replay or self.given):
            raise _misplaced(asked[0], f"{asked[0]} is about steps: replay, or give tokens")
        return self

    @property
    def is_about_steps(self) -> bool:
        """Whether its answer has records; else it is the session alone."""
        return self.replay or bool(self.model_fields_set & _OF_STEPS)


class EmbedBody(SomeTokens):
    """`POST /v1/embed`."""

    past_length: Length = 0
    points: Points = Field(default=["embedding"])
    encoding_format: EncodingFormat = "base64"
    stream: bool = False


class TokenizeBody(Body):
    """`POST /tokenize`, as vLLM has it."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: str
    return_token_strs: bool = False
    allow_special: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`, as vLLM has it."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: TokenIds


_OF_STEPS = frozenset(Reporting.model_fields) - {"past_length"}


def _misplaced(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("misplaced", "{message}", {"message": message, "param": param})


def _empty_input(message: str, param: str) -> PydanticCustomError:
    return PydanticCustomError("empty_input", "{message}", {"message": message, "param": param})
