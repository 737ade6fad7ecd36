"""One block of GPT-2 and its layer norms, with a look at every point. Torch; the model thread.

Functions of the checkpoint's tensors: no module tree, no autograd. Points that a step has anyway
are looked at as they pass. The others are computed for those tokens alone that somebody asks for:
both stages of a layer norm before its gain, heads apart, neurons before a GELU that is fused.

Source: Radford et al. 2019, section 2.3; openai/gpt-2 `src/model.py` (`block`, `mlp`, `norm`).
Legend: N tokens of the batch, n of a part of it, C width, H heads, D head width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from model.attention.attention import Attention
from model.attention.plan import Plan
from model.config import GPT2Config
from model.hooks import Hooks
from model.precision.base import Precision, Product, gelu


class LayerNorm:
    """`(x - mean) / scale * gain + bias`, scale = sqrt(variance + epsilon)."""

    def __init__(
        self, tensors: Mapping[str, Tensor], key: str, config: GPT2Config, layer: int | None = None
    ) -> None:
        """`key`: what the checkpoint calls its tensors."""
        self._gain, self._bias = tensors[f"{key}.weight"], tensors[f"{key}.bias"]
        self._shape, self._epsilon = (config.n_embd,), config.layer_norm_epsilon
        self._layer = layer
        self._name = key.rpartition(".")[2]
        self._scale, self._normalized = f"{self._name}_scale", f"{self._name}_normalized"

    def __call__(self, x: Tensor, hooks: Hooks) -> Tensor:
        """Normalize x [N, C]."""
        y = self.computed(x, hooks)
        hooks.at(self._name, self._layer, y)
        return y

    def computed(self, x: Tensor, hooks: Hooks) -> Tensor:
        """As a call, but nobody has looked at the result yet."""
        y, mean, reciprocal = self._plain(x)
        part = hooks.part(self._layer, self._scale, self._normalized)
        if part:
            scale = reciprocal[part.where].reciprocal()  # [n, 1]
            hooks.at(self._scale, self._layer, scale, part)
            normalized = (x[part.where] - mean[part.where]) / scale
            hooks.at(self._normalized, self._layer, normalized, part)
            if part.edited:
                y[part.changed] = normalized[part.edited] * self._gain + self._bias
        return y

    def plain(self, x: Tensor) -> Tensor:
        """Normalize x [n, C] where nobody looks."""
        return self._plain(x)[0]

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With the mean of each row and the reciprocal of its scale, both [N, 1]."""
        return torch.native_layer_norm(x, self._shape, self._gain, self._bias, self._epsilon)


class Block:
    """One layer."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        layer: int,
        config: GPT2Config,
        precision: Precision,
        attention: Attention,
    ) -> None:
        def parts(name: str) -> tuple[Tensor, Tensor]:
            key = f"h.{layer}.{name}"
            return tensors[f"{key}.weight"], tensors[f"{key}.bias"]

        self._layer = layer
        self._dtype = precision.dtype
        self._attention = attention
        self._ln_1 = LayerNorm(tensors, f"h.{layer}.ln_1", config, layer)
        self._c_attn = precision.linear(*parts("attn.c_attn"))
        self._attn_proj = precision.linear(*parts("attn.c_proj"))
        self._ln_2 = LayerNorm(tensors, f"h.{layer}.ln_2", config, layer)
        self._c_fc = precision.neurons(*parts("mlp.c_fc"))
        self._mlp_proj = precision.linear(*parts("mlp.c_proj"))

    def __call__(self, x: Tensor, plan: Plan, hooks: Hooks) -> None:
        """Add what this block has to say to the residual stream x [N, C]."""
        layer = self._layer
        hooks.at("resid_pre", layer, x)
        qkv = self._c_attn(self._ln_1(x, hooks).to(self._dtype))  # [N, 3C]
        z = self._attention(layer, qkv, plan, hooks)  # [N, H, D]
        x.add_(self._attn_out(z, hooks))
        hooks.at("resid_mid", layer, x)
        neurons = self._neurons(self._ln_2(x, hooks).to(self._dtype), hooks)  # [N, 4C]
        mlp_out = self._mlp_proj(neurons)
        hooks.at("mlp_out", layer, mlp_out)
        x.add_(mlp_out)
        hooks.at("resid_post", layer, x)

    def _attn_out(self, z: Tensor, hooks: Hooks) -> Tensor:
        """Heads z [N, H, D] through the output matrix: [N, C]."""
        attn_out = self._attn_proj(z.reshape(len(z), -1))
        part = hooks.part(self._layer, "head_out")
        if part:
            heads = apart(self._attn_proj, z[part.where])
            before = heads[part.edited]
            hooks.at("head_out", self._layer, heads, part)
            if part.edited:
                attn_out[part.changed] += (heads[part.edited] - before).sum(1).to(attn_out.dtype)
        hooks.at("attn_out", self._layer, attn_out)
        return attn_out

    def _neurons(self, x: Tensor, hooks: Hooks) -> Tensor:
        """After GELU, [N, 4C], of the normalized x [N, C]."""
        if self._c_fc.fused is None:
            pre = self._c_fc.linear(x)
            hooks.at("mlp_pre", self._layer, pre)
            post = gelu(pre)
        else:
            post = self._c_fc.fused(x)
            self._before_gelu(x, post, hooks)
        hooks.at("mlp_post", self._layer, post)
        return post

    def _before_gelu(self, x: Tensor, post: Tensor, hooks: Hooks) -> None:
        """Neurons before a GELU that is part of the product, for those who ask."""
        part = hooks.part(self._layer, "mlp_pre")
        if part:
            pre = self._c_fc.linear(x[part.where]).float()
            hooks.at("mlp_pre", self._layer, pre, part)
            for place, token in zip(part.edited, part.changed, strict=True):
                post[token] = gelu(pre[place])  # one by one: GELU's last bits depend on the length


def apart(product: Product, z: Tensor) -> Tensor:
    """What each head of z [n, H, D] adds through a product's matrix, without its bias: [n, H, C].

    Each head is multiplied with nothing beside it, so the packed matrix of any precision will do.
    """
    n, n_head, d_head = z.shape
    alone = torch.zeros(n, n_head, n_head, d_head, dtype=z.dtype)
    alone.diagonal(dim1=1, dim2=2).copy_(z.transpose(1, 2))
    bias = product(torch.zeros(1, n_head * d_head, dtype=z.dtype))
    return product(alone.view(n * n_head, -1)).float().sub_(bias.float()).view(n, n_head, -1)
