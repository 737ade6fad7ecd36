"""TransformerLens as an oracle: a `TransformerBridge` of a GPT-2, without compatibility mode.

It is imported inside functions, since only tests that are marked `lens` have it installed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model.weights.checkpoint import Checkpoint
from tests.lively import in_transformers

Change = Callable[[Tensor], Tensor]
"""From an activation with its batch axis to another one."""


class Lens:
    """One model in TransformerLens. Nothing is cached between calls."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        model = in_transformers(checkpoint)
        self.config = checkpoint.config
        self._bridge: Any = build_bridge_from_module(
            model, "GPT2LMHeadModel", hf_config=model.config, model_name="gpt2"
        )

    @torch.no_grad()
    def activations(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """Whatever fires in a pass, by the hook's name, without the batch axis.

        `hook_result` and the output matrix's own hook exclude each other.
        """
        fired: dict[str, Tensor] = {}
        for splits_heads in (False, True):
            self._bridge.set_use_attn_result(splits_heads)
            _, cache = self._bridge.run_with_cache(torch.tensor([token_ids]), remove_batch_dim=True)
            fired.update(cache.items())
        return fired

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], changes: Mapping[str, Change] = {}) -> Tensor:
        """Logits [T, V] of a pass whose activations are changed at hooks."""
        self._bridge.set_use_attn_result(any(name.endswith("hook_result") for name in changes))
        hooks = [(name, _hook(change)) for name, change in changes.items()]
        logits: Tensor = self._bridge.run_with_hooks(torch.tensor([token_ids]), fwd_hooks=hooks)[0]
        return logits

    def greedy(self, prompt: Sequence[int], n_new: int, changes: Mapping[str, Change]) -> list[int]:
        """New ids, each from a full pass."""
        ids = list(prompt)
        for _ in range(n_new):
            ids.append(int(self.logits(ids, changes)[-1].argmax()))
        return ids[len(prompt) :]

    @torch.no_grad()
    def patching_grid(
        self, name: str, clean: Sequence[int], corrupted: Sequence[int], pair: tuple[int, int]
    ) -> Tensor:
        """`transformer_lens.patching.get_act_patch_{name}`: the last logit difference of `pair`."""
        from transformer_lens import patching

        def difference(logits: Tensor) -> Tensor:
            return logits[0, -1, pair[0]] - logits[0, -1, pair[1]]

        self._bridge.set_use_attn_result(False)
        _, cache = self._bridge.run_with_cache(torch.tensor([clean]))
        patch = getattr(patching, f"get_act_patch_{name}")
        grid: Tensor = patch(self._bridge, torch.tensor([corrupted]), cache, difference)
        return grid


def _hook(change: Change) -> Callable[[Tensor, object], Tensor]:
    return lambda activation, hook: change(activation)
