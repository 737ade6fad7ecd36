"""What the model side can refuse. Pure Python; no torch.

ModelError
├── ConfigError              a configuration that is not GPT-2's, or that this code cannot honour
├── WeightsError             weights that cannot be what their source says
│   ├── SourceNotFound           no such directory, size or hub name
│   ├── HubUnavailable           a hub name that is neither cached nor to be had
│   ├── UnsafeFormat             pickle: loading it would run its code
│   ├── CorruptWeights           a file that is cut, broken or contradicts another
│   ├── MissingTensor            the configuration needs it and no file has it
│   ├── UnknownTensor            a file has it and the configuration has no place for it
│   ├── WrongShape               the file and the configuration disagree
│   ├── UnsupportedDtype         quantised or integer weights
│   ├── NonFiniteTensor          NaN or infinity among the weights
│   └── UntiedOutput             an `lm_head.weight` that differs from `wte.weight`
├── UnknownPoint             a name that is no point of this model
├── TooManyPoints            more names than one request may have
├── NotExact                 a result on this machine depends on what it is computed with
├── NonFiniteHidden          NaN or infinity in what the blocks computed, or soon
└── NonFiniteLogits          NaN or infinity where an id should be chosen
"""

from collections.abc import Sequence


class ModelError(Exception):
    """Root of this package's errors."""


class ConfigError(ModelError):
    """A configuration key whose value would change the maths or cannot be true."""

    def __init__(self, key: str, value: object, *, allowed: str) -> None:
        self.key = key
        self.value = value
        super().__init__(f"{key} is {value!r}, but must be {allowed}")


class WeightsError(ModelError):
    """Weights that cannot be used."""


class SourceNotFound(WeightsError):
    """The source names nothing that weights could come from."""

    def __init__(self, source: str, *, reason: str) -> None:
        self.source = source
        super().__init__(f"no weights at {source!r}: {reason}")


class HubUnavailable(WeightsError):
    """A hub name that is not in the cache and could not be downloaded."""

    def __init__(self, name: str, *, cache_dir: str, cause: str) -> None:
        self.name = name
        super().__init__(
            f"cannot download {name!r} ({cause}) and {cache_dir} has no copy: "
            "check the name and the network, or give a local directory or random:gpt2"
        )


class UnsafeFormat(WeightsError):
    """A pickle. It is never opened: opening it would run whatever code it holds."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path} is a pickle, which could run code: convert it to safetensors")


class CorruptWeights(WeightsError):
    """A file that is cut, broken or contradicts another."""

    def __init__(self, path: str, *, reason: str) -> None:
        self.path = path
        super().__init__(f"{path}: {reason}")


class MissingTensor(WeightsError):
    """The configuration needs a tensor that no file has."""

    def __init__(self, name: str, *, shape: Sequence[int]) -> None:
        self.name = name
        self.shape = tuple(shape)
        super().__init__(f"tensor {name} of shape {list(shape)} is missing")


class UnknownTensor(WeightsError):
    """A file has a tensor that the configuration has no place for."""

    def __init__(self, name: str, *, shape: Sequence[int]) -> None:
        self.name = name
        self.shape = tuple(shape)
        super().__init__(f"unknown tensor {name} of shape {list(shape)}")


class WrongShape(WeightsError):
    """A tensor's shape in the file is not the one of the configuration."""

    def __init__(self, name: str, *, shape: Sequence[int], expected: Sequence[int]) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.expected = tuple(expected)
        super().__init__(
            f"tensor {name} has shape {list(shape)}, but the configuration says {list(expected)}"
        )


class UnsupportedDtype(WeightsError):
    """Weights that are no plain floating-point numbers, so a scale is missing from the picture."""

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self.dtype = dtype
        super().__init__(f"tensor {name} has dtype {dtype}, which is not supported")


class NonFiniteTensor(WeightsError):
    """NaN or infinity among the weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"tensor {name} holds NaN or infinity")


class UntiedOutput(WeightsError):
    """The file's output matrix is not the token table, so the model would be another one."""

    def __init__(self) -> None:
        super().__init__(
            "lm_head.weight differs from wte.weight: GPT-2's output is tied to its token table"
        )


class UnknownPoint(ModelError):
    """A name that is no point of this model, in any of the name systems.

    Either `nearest` has names that look like it, or `reason` says why it is none.
    """

    def __init__(self, name: str, *, nearest: Sequence[str] = (), reason: str = "") -> None:
        self.name = name
        self.nearest = tuple(nearest)
        self.reason = reason
        hint = f"; did you mean {', '.join(nearest)}?" if nearest else ""
        super().__init__(f"unknown point {name[:80]!r}{': ' if reason else ''}{reason}{hint}")


class TooManyPoints(ModelError):
    """A request whose names, its patterns widened, are more than one request may have."""

    def __init__(self, max_names: int) -> None:
        self.max_names = max_names
        super().__init__(f"more than {max_names} points are asked for")


class NotExact(ModelError):
    """A result whose bits depend, on this machine, on what is computed with it."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"exact mode is impossible here: the bits of {what} depend on what is computed with it"
        )


class NonFiniteLogits(ModelError):
    """NaN or infinity in a row of logits: the argmax of NaN would quietly be an id."""

    def __init__(self) -> None:
        super().__init__("the logits hold NaN or infinity")


class NonFiniteHidden(ModelError):
    """NaN or infinity in what a step leaves behind, or numbers so large that products overflow.

    Nothing that follows from it would mean anything.
    """

    def __init__(self) -> None:
        super().__init__("the hidden state holds NaN, infinity or what would overflow")
