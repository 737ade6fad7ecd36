from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model import gpt2
from model.attention import explicit
from model.attention.fused import FusedAttention
from model.config import GPT2Config
from model.errors import NotExact
from model.precision.base import Neurons, Product
from model.precision.exact import Exact
from model.selftest import prove_exact
from tests.lively import SMALL, lively_checkpoint

LONG = GPT2Config(n_ctx=512, n_embd=32, n_layer=2, n_head=2)
CHECKPOINT = lively_checkpoint(SMALL)

PRODUCTS = [(0, "c_attn"), (1, "attn.c_proj"), (2, "mlp.c_proj")]  # in the order of asking


def off_by_a_bit_alone(x: Tensor, y: Tensor, n: int) -> Tensor:
    """The last bit of one element differs in batches of n."""
    if len(x) == n:
        y = y.clone()
        y[-1, 0] = torch.nextafter(y[-1, 0], torch.tensor(torch.inf))
    return y


def faulty(product: Product, n: int) -> Product:
    return lambda x: off_by_a_bit_alone(x, product(x), n)


def test_exact_mode_is_exact_here() -> None:
    prove_exact(CHECKPOINT)


@pytest.mark.parametrize(("position", "name"), PRODUCTS)
def test_a_product_that_differs_by_one_bit_is_named(
    position: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, asked = Exact.linear, []

    def third(self: Exact, weight: Tensor, bias: Tensor) -> Product:
        asked.append(weight)
        product = linear(self, weight, bias)
        return faulty(product, 15) if len(asked) == position + 1 else product

    monkeypatch.setattr(Exact, "linear", third)
    with pytest.raises(NotExact, match=rf"{name} in a batch of 15") as caught:
        prove_exact(CHECKPOINT)
    assert name in caught.value.what


def test_a_gelu_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons = Exact.neurons

    def differing(self: Exact, weight: Tensor, bias: Tensor) -> Neurons:
        right = neurons(self, weight, bias)
        return replace(right, fused=faulty(right, 1))

    monkeypatch.setattr(Exact, "neurons", differing)
    with pytest.raises(NotExact, match=r"mlp.c_fc in a batch of 1\b"):
        prove_exact(CHECKPOINT)


def test_neurons_that_differ_before_gelu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    neurons = Exact.neurons

    def differing(self: Exact, weight: Tensor, bias: Tensor) -> Neurons:
        right = neurons(self, weight, bias)
        return replace(right, linear=faulty(right.linear, 3))

    monkeypatch.setattr(Exact, "neurons", differing)
    with pytest.raises(NotExact, match=r"mlp.c_fc before GELU in a batch of 3\b"):
        prove_exact(CHECKPOINT)


def test_a_head_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exact, "head", lambda self, wte: faulty(lambda x: F.linear(x, wte), 4))
    with pytest.raises(NotExact, match="wte in a batch of"):
        prove_exact(CHECKPOINT)


def test_the_fused_attention_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedAttention, "max_queries", 1024, raising=False)
    monkeypatch.setattr(gpt2, "ExplicitAttention", FusedAttention)
    with pytest.raises(NotExact, match="attention in"):
        prove_exact(CHECKPOINT)


def test_an_order_of_runs_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = explicit._tiles
    monkeypatch.setattr(
        explicit, "_tiles", lambda groups: ((rows, tile[::-1]) for rows, tile in tiles(groups))
    )
    with pytest.raises(NotExact, match="attention in what follows a fork"):
        prove_exact(lively_checkpoint(LONG))
