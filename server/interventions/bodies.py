"""Interventions as a request writes them. Pure Python, the event loop.

    {"point": "resid_post.6", "positions": "10:", "op": "add", "value": {"vector": "vec_..."}}

Here is checked what one of them can be wrong in by itself; `plan`, beside it, knows the model.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from server.fields import Body, Length, Positions, Text
from sessions.edits import Op

MAX_INTERVENTIONS = 64
"""Of one request."""

_LARGEST = 3.4e38  # that float32 holds
_TAKES: Mapping[Op, frozenset[str]] = {
    "replace": frozenset({"value"}),
    "add": frozenset({"value", "scale"}),
    "scale": frozenset({"scale"}),
    "project": frozenset({"value", "scale"}),
    "mask": frozenset({"keys"}),
}
_DEFAULT_SCALE: Mapping[Op, float] = {"add": 1.0, "project": 0.0}
_ABOUT: Mapping[str, frozenset[str]] = {
    "data": frozenset({"dtype", "shape", "axes"}),
    "vector": frozenset(),
    "session": frozenset({"position", "point"}),
    "param": frozenset(),
}


def _text_or_list(value: object) -> object:
    """Its numbers are checked later, all at once."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("data", "should be a list of numbers, or base64")
    return value


Name = Annotated[Text, Field(min_length=1, max_length=256)]
Data = Annotated[Any, BeforeValidator(_text_or_list, json_schema_input_type=str | list[Any])]
Sizes = Annotated[list[Length], Field(max_length=8, fail_fast=True)]
Axes = Annotated[list[Name], Field(max_length=8, fail_fast=True)]
Scale = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class ValueBody(Body):
    """The numbers of an edit, from one of four places.

    `data`: here, as nested lists or in base64, as answers have tensors. `vector`: of
    `PUT /v1/vectors`. `session`: what was computed there. `param`: a row of the weights.
    """

    data: Data = None
    dtype: Literal["float32"] | None = None
    shape: Sizes | None = None
    axes: Axes | None = None
    vector: Name | None = None
    session: Name | None = None
    position: Length | None = Field(default=None, description="a committed one of `session`")
    point: Name | None = Field(default=None, description="of `session`; default: the edited one")
    param: Name | None = Field(default=None, description="such as wpe[0] or ln_f.bias")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = _ABOUT.keys() & self.model_fields_set
        if len(sources) != 1:
            raise _fault(f"give one of {', '.join(_ABOUT)}")
        source = next(iter(sources))
        for name in sorted(self.model_fields_set - {source} - _ABOUT[source]):
            raise _fault(f"{name} says nothing of {source}")
        if source == "session" and self.position is None:
            raise _fault("a session's value needs its position")
        if isinstance(self.data, str) and self.shape is None:
            raise _fault("data in base64 needs its shape")
        return self


class InterventionBody(Body):
    """One change of one point. Fields that its `op` does not use are refused."""

    point: Name
    positions: Positions | None = Field(
        default=None,
        description="of what is stepped: comma list of i, a:b, a: or :b; default: all of it",
    )
    op: Op
    value: ValueBody | None = None
    scale: Scale | None = Field(default=None, description="of add 1, of project 0 by default")
    keys: Positions | None = Field(
        default=None, description="positions that a mask hides: comma list of i, a:b, a: or :b"
    )

    @model_validator(mode="after")
    def _as_its_op_takes_them(self) -> Self:
        given = {"value", "scale", "keys"} & self.model_fields_set
        for name in sorted(given - _TAKES[self.op]):
            raise _fault(f"{self.op} takes no {name}")
        needed = _TAKES[self.op] - ({"scale"} if self.op in _DEFAULT_SCALE else set())
        for name in sorted(needed - given):
            raise _fault(f"{self.op} needs {name}")
        return self

    @property
    def factor(self) -> float:
        """`scale`, or what it is by default."""
        return _DEFAULT_SCALE.get(self.op, 1.0) if self.scale is None else self.scale


Interventions = Annotated[
    list[InterventionBody], Field(max_length=MAX_INTERVENTIONS, fail_fast=True)
]


def _fault(message: str) -> PydanticCustomError:
    return PydanticCustomError("intervention", "{message}", {"message": message})
