import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.precision.base import Product, gelu
from model.precision.int8 import Int8

IN, OUT = 64, 96
INT8 = Int8()
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


WEIGHT, BIAS, WTE = normal(IN, OUT) * 0.2, normal(OUT), normal(301, IN)
PRODUCTS: dict[str, Product] = {
    "linear": INT8.linear(WEIGHT, BIAS),
    "neurons": INT8.neurons(WEIGHT, BIAS),
    "head": INT8.head(WTE),
}


@pytest.fixture(params=list(PRODUCTS))
def product(request: pytest.FixtureRequest) -> Product:
    return PRODUCTS[request.param]


def bound(x: Tensor, weight: Tensor) -> Tensor:
    """The most that rounding x [N, in] and weight [in, out] to 8 bits can change, as [N, out].

    Each entry moves by at most half a step: 1/254 of the largest of its row, or of its channel.
    """
    x, weight = x.double().abs(), weight.double().abs()
    dx = (x.amax(dim=1, keepdim=True) / 254).expand_as(x)
    dw = (weight.amax(dim=0, keepdim=True) / 254).expand_as(weight)
    return x @ dw + dx @ weight + dx @ dw


def assert_within_bound(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """And within a thousandth of it, for what float32 rounds."""
    expected = x.double() @ weight.double() + bias.double()
    allowed = bound(x, weight) * 1.001 + 1e-6 * expected.abs() + 1e-6
    assert actual.dtype == torch.float32
    assert ((actual.double() - expected).abs() <= allowed).all()


# Agreement.


@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 130),
    out=st.integers(1, 130),
    size=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_a_product_is_off_by_no_more_than_its_rounding(
    rows: int, width: int, out: int, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * size
    weight = torch.randn(width, out, generator=generator)
    bias = torch.randn(out, generator=generator)
    assert_within_bound(INT8.linear(weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("rows", [1, 256])
@pytest.mark.parametrize(("width", "out"), [(768, 3072), (3072, 768)])
def test_gpt2s_own_shapes_are_within_2_percent(rows: int, width: int, out: int) -> None:
    """Stated, not assumed: of what a product gives for rows of ordinary numbers."""
    x, weight, bias = normal(rows, width), normal(width, out) * 0.02, normal(out)
    expected = x @ weight
    error = INT8.linear(weight, bias)(x) - bias - expected
    assert error.std() < 0.02 * expected.std()


def test_gelu_follows_the_product() -> None:
    x = normal(20, IN)
    assert torch.equal(PRODUCTS["neurons"](x), gelu(PRODUCTS["linear"](x)))


def test_logits_near_one_large_number_keep_their_differences() -> None:
    """Trained GPT-2's are: what all tokens share must not use up the eight bits."""
    shared, own = normal(IN) * 50, normal(301, IN)
    x = normal(9, IN)
    logits = INT8.head(own + shared)(x).double()
    differences = logits - logits.mean(dim=1, keepdim=True)
    expected = x.double() @ (own - own.mean(dim=0)).double().t()
    assert (x @ shared).abs().max() > 100
    assert ((differences - expected).abs() <= 2 * bound(x, own.t()) + 1e-3).all()


# Rows and their mates.


@given(
    order=st.lists(st.integers(0, 69), min_size=1, max_size=70),
    loud=st.sampled_from([1.0, 3000.0]),
    name=st.sampled_from(list(PRODUCTS)),
)
@settings(deadline=None, max_examples=60)
def test_a_rows_bits_do_not_depend_on_its_mates(order: list[int], loud: float, name: str) -> None:
    """Any number of them, in any order, some of them huge."""
    x = torch.randn(70, IN, generator=torch.Generator().manual_seed(1))
    x[::3] *= loud
    together = PRODUCTS[name](x)
    assert torch.equal(PRODUCTS[name](x[order]), together[order])


@pytest.mark.parametrize(("width", "out"), [(768, 768), (3072, 768)])
def test_nor_do_they_at_gpt2s_own_shapes(width: int, out: int) -> None:
    """Where all sums are the largest there are, past the whole numbers that float32 holds."""
    x, weight = normal(260, width).abs(), normal(width, out).abs()
    x[5], weight[:, 3] = 1.0, 1.0
    product = INT8.linear(weight, torch.zeros(out))
    together = product(x)
    for rows in (1, 2, 3, 8, 15, 16, 17, 64, 65):
        assert torch.equal(product(x[:rows]), together[:rows])
        assert torch.equal(product(x[-rows:]), together[-rows:])


@pytest.mark.parametrize("n_zero", [1, 5])
def test_a_row_of_zeros_gives_the_bias(n_zero: int) -> None:
    x = normal(9, IN)
    x[2 : 2 + n_zero] = 0
    assert torch.equal(PRODUCTS["linear"](x)[2 : 2 + n_zero], BIAS.expand(n_zero, -1))
    assert not PRODUCTS["head"](x)[2 : 2 + n_zero].any()


def test_a_channel_of_zeros_gives_the_bias() -> None:
    weight = WEIGHT.clone()
    weight[:, 11] = 0
    assert torch.equal(INT8.linear(weight, BIAS)(normal(4, IN))[:, 11], BIAS[11].expand(4))


def test_a_row_with_an_entry_of_3000_spoils_no_other() -> None:
    """Its own small entries are lost beside it, as 8 bits must; it stays within the bound."""
    x = normal(7, IN)
    alone = PRODUCTS["linear"](x)
    loud = x.clone()
    loud[3, 5] = 3000.0
    actual = PRODUCTS["linear"](loud)
    others = torch.arange(7) != 3
    assert torch.equal(actual[others], alone[others])
    assert_within_bound(actual, loud, WEIGHT, BIAS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_in_its_row(bad: float, product: Product) -> None:
    """The model looks for it at the end of a step, and must not miss it."""
    x = normal(5, IN)
    expected = product(x)
    x[1, 9] = bad
    actual = product(x)
    others = torch.arange(5) != 1
    assert torch.equal(actual[others], expected[others])
    assert not torch.isfinite(actual[1]).any()


# Other machines.


def test_without_onednn_the_sums_are_the_same(
    product: Product, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    products: dict[str, Product] = {
        "linear": INT8.linear(WEIGHT, BIAS),
        "neurons": INT8.neurons(WEIGHT, BIAS),
        "head": INT8.head(WTE),
    }
    plain = products[request.node.callspec.params["product"]]
    x = normal(9, IN)
    assert torch.equal(plain(x), product(x))


LOUDEST = """
import torch
from model.precision.int8 import Int8

product = Int8().linear(torch.full((768, 64), 0.5), torch.zeros(64))
for rows in (1, 2, 16, 65):
    for sign in (1, -1):
        actual = product(torch.full((rows, 768), 2.0 * sign))
        torch.testing.assert_close(actual, torch.full((rows, 64), 768.0 * sign))
"""


@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_older_cpus_do_not_overflow(instructions: str) -> None:
    """Without VNNI oneDNN sums in 16 bits; a CPU that has less than this is not made slower."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions}
    subprocess.run([sys.executable, "-c", LOUDEST], env=environment, check=True)
