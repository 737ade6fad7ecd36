"""What bodies are made of: their base class and the types of their fields. Pure Python.

Strict means that `1.0`, `true` and `"5"` are no integers; closed means that an unknown field is
refused. An explicit null means the default. A repeated JSON key keeps its last value. Validation
stops at the first fault, so that a large bad body costs no more than a small one.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from model.config import N_VOCAB

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
