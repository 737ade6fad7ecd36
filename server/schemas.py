"""Request bodies: strict, closed, in the words of the API. Pure Python, the event loop.

Strict means that `1.0`, `true` and `"5"` are no integers; closed means that an unknown field is
refused. An explicit null means the default. A repeated JSON key keeps its last value. Validation
stops at the first fault, so that a large bad body costs no more than a small one.
"""

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from model.config import N_VOCAB
from server.negotiation import EncodingFormat

MAX_INT = 2**63 - 1
MAX_STOPS = 16
MAX_IDS = 131_072  # more than any text has that is tokenized; a session takes far fewer
MAX_POINT_NAMES = 1024


class Body(BaseModel):
    """Strict, closed, nulls as defaults."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, frozen=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known_and_given(cls, data: object) -> object:
        """Refuse the first unknown name; forget explicit nulls."""
        if not isinstance(data, dict):
            return data
        for name in data:
            if name not in cls.model_fields:
                raise PydanticCustomError(
                    "unknown_field", "unknown field {param}", {"param": _told(str(name))}
                )
        return {name: value for name, value in data.items() if value is not None}


def _refuse_interventions(_value: object) -> object:
    raise PydanticCustomError("not_supported", "interventions are not supported by this version")


def _well_formed(text: str) -> str:
    """Half a surrogate pair is no character: it could be neither matched nor answered."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "holds half a surrogate pair") from None
    return text


def _told(name: str) -> str:
    """A client's name as it can be repeated: short, and text in any case."""
    return name[:80].encode(errors="replace").decode()


def _check_metadata(value: object) -> object:
    """Checked whole, before pydantic: it cannot name a key that is no unicode."""
    if not isinstance(value, dict):
        return value
    if len(value) > 16:
        raise PydanticCustomError("too_long", "at most 16 entries are kept")
    for key in value:
        _well_formed(key)
    return value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _bias_ids(value: object) -> object:
    """JSON's keys are strings; a bias's key is the id's decimal form."""
    if not isinstance(value, dict):
        return value
    return {_bias_id(key): _bias(key, bias) for key, bias in value.items()}


def _bias_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 5 and int(key) < N_VOCAB):
        raise PydanticCustomError(
            "logit_bias", "keys are token ids as strings, 0 to {last}", {"last": N_VOCAB - 1}
        )
    return int(key)


def _bias(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
        raise PydanticCustomError(
            "logit_bias", "the bias of {key} must be a number from -100 to 100", {"key": key}
        )
    return float(value)


Text = Annotated[str, AfterValidator(_well_formed)]
TokenIds = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)]
Points = Annotated[
    list[Annotated[str, Field(max_length=256)]], Field(max_length=MAX_POINT_NAMES, fail_fast=True)
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    BeforeValidator(_check_metadata),
]
Stops = Annotated[
    list[Annotated[Text, Field(min_length=1, max_length=1024)]],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_bias_ids, json_schema_input_type=dict[str, float]),
]
Ttl = Annotated[int, Field(ge=1, le=604_800, description="idle seconds before it expires")]
Length = Annotated[int, Field(ge=0, le=MAX_INT)]
Expected = Annotated[
    Length, Field(description="the length that the client believes; another one is a 409")
]
Positions = Annotated[
    str, Field(max_length=8192, description="comma list of i or a:b (half-open), absolute")
]


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
    points: Points = ["embedding"]
    points_at: Positions | None = None
    encoding_format: EncodingFormat = "base64"
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    interventions: Annotated[Any, BeforeValidator(_refuse_interventions)] = Field(
        default=None, description="not supported by this version: refused"
    )
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
    ttl_seconds: Ttl | None = None
    metadata: Metadata = {}


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
    stop: Stops = []
    stop_token_ids: TokenIds = []
    logit_bias: LogitBias = {}
    ignore_eos: bool = False


class TruncateBody(Body):
    """`POST /v1/sessions/{id}/truncate`."""

    to: Length
    past_length: Expected | None = None


class ForkBody(Tokens):
    """`POST /v1/sessions/{id}/fork`."""

    at: Length | None = Field(
        default=None, description="how much of the session the new one begins with; default: all"
    )
    past_length: Expected | None = None
    ttl_seconds: Ttl | None = None
    metadata: Metadata = {}


class EmbedBody(SomeTokens):
    """`POST /v1/embed`."""

    past_length: Length = 0
    points: Points = ["embedding"]
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


def _empty_input(message: str, param: str) -> PydanticCustomError:
    return PydanticCustomError("empty_input", "{message}", {"message": message, "param": param})
