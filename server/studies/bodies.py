"""Bodies of the requests that study sessions: see `server.fields`. Pure Python, the event loop."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from server.fields import Body, Length, Points, Positions, Text, TokenIds
from server.interventions.bodies import Interventions
from server.negotiation import EncodingFormat

MAX_PROMPTS = 1024
"""Of one capture."""

SessionName = Annotated[Text, Field(min_length=1, max_length=256)]
SomePoints = Annotated[Points, Field(min_length=1)]
Values = Annotated[
    str, Field(max_length=8192, description="comma list of i or a:b (half-open), or *: all")
]


class VerifyBody(Body):
    """`POST /v1/sessions/{id}/verify`."""

    points: SomePoints | None = Field(
        default=None,
        description="default: embedding, k, v and resid_post of all layers, ln_f, logits",
    )
    positions: Positions | None = Field(default=None, description="committed ones; default: all")


class CompareBody(Body):
    """`POST /v1/compare`."""

    a: SessionName
    b: SessionName
    points: SomePoints = Field(default=["resid_post.*", "logits"])
    positions: Positions | None = Field(
        default=None, description="committed in both; default: all that are"
    )


class SweptAxes(Body):
    """What of the intervention is swept, and over which values; one that is absent is not."""

    layer: Values | None = None
    position: Values | None = None
    head: Values | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("axes", "give at least one of layer, position and head")
        return self


class SweepBody(Body):
    """`POST /v1/sessions/{id}/sweep`."""

    axes: SweptAxes
    intervention: dict[str, Any] = Field(
        description="an intervention without what the axes say: the point's layer or head (or * in "
        "its place), positions, and the position of a session's value"
    )
    points: SomePoints
    at: Annotated[int, Field(ge=-1)] = Field(
        default=-1, description="the committed position where points are read; -1: the last one"
    )
    encoding_format: EncodingFormat = "base64"
    stream: bool = False


class CaptureBody(Body):
    """`POST /v1/capture`."""

    prompts: Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = None
    token_ids: Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)] | None = (
        None
    )
    allow_special: bool = Field(
        default=False, description="read <|endoftext|> in a prompt as one token, 50256"
    )
    prepend_bos: bool = Field(default=False, description="begin each with 50256")
    points: SomePoints
    positions: (
        Literal["all", "last"] | Annotated[list[Length], Field(min_length=1, max_length=1024)]
    ) = "all"
    reduce: Literal["mean"] | None = Field(default=None, description="over the positions")
    dtype: Literal["float32", "float16"] = "float32"
    interventions: Interventions = Field(default=[], description="of every prompt")

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if (self.prompts is None) == (self.token_ids is None):
            raise _empty_input("give prompts or token_ids, one of them", "prompts")
        if not (self.prompts or self.token_ids):
            raise _empty_input(f"{self.given} is empty", self.given)
        if self.allow_special and self.prompts is None:
            raise PydanticCustomError(
                "needs_prompt", "allow_special is about prompts", {"param": "allow_special"}
            )
        return self

    @property
    def given(self) -> str:
        """Which of the two fields is there."""
        return "token_ids" if self.prompts is None else "prompts"


def _empty_input(message: str, param: str) -> PydanticCustomError:
    return PydanticCustomError("empty_input", "{message}", {"message": message, "param": param})
