"""What the modules of `transformers`' GPT-2 take and give, under the names that nnsight has."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model.names import ALIASES

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

Values = dict[str, Any]
"""By `module.input` and `module.output`; of an output whatever it is, with its batch."""

NAMES = sorted(
    alias
    for alias in ALIASES
    if re.match(r"transformer\.|lm_head|hidden_states|attentions", alias) and "h[{l}]" not in alias
)
"""Every name that `value` can tell, by the spelling that `transformers` has."""


def values(model: "GPT2LMHeadModel", token_ids: Sequence[int]) -> Values:
    """Of one uncached pass."""
    seen: Values = {}
    with _watched(model, seen), torch.no_grad():
        output = model(
            torch.tensor([token_ids]),
            output_hidden_states=True,
            output_attentions=True,
            use_cache=False,
        )
    seen["hidden_states.output"] = output.hidden_states
    seen["attentions.output"] = output.attentions
    return seen


def value(name: str, seen: Values) -> Tensor:
    """As nnsight reads it, of the one sequence in the batch; a bare module's main output."""
    path, _, index = name.partition("[")
    found = seen[path if path.endswith("put") else f"{path}.output"]
    batch: Tensor = found[int(index.strip("]") or 0)] if isinstance(found, tuple) else found
    return batch[0]


@contextmanager
def _watched(model: nn.Module, seen: Values) -> Iterator[None]:
    def hook(name: str) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen[f"{name}.input"] = args[0] if args else next(iter(kwargs.values()))
            seen[f"{name}.output"] = output

        return keep

    handles = [
        module.register_forward_hook(hook(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
