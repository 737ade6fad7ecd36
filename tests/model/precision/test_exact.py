from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from model.precision.exact import Exact
from model.selftest import same_bits

N_ROWS = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 128, 129, 300, 385, 399)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", [(32, 96), (24, 30), (128, 32), (768, 768), (3072, 96)])
@pytest.mark.parametrize("kind", ["linear", "neurons", "head"])
def test_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, int], kind: str) -> None:
    weight, bias = drawn(*shape, seed=1) / 8, drawn(shape[1], seed=2)
    mode = Exact()
    product = mode.head(weight.t()) if kind == "head" else getattr(mode, kind)(weight, bias)
    x = drawn(400, shape[0])
    whole = product(x)
    for n in N_ROWS:
        assert same_bits(product(x[:n]), whole[:n])
        assert same_bits(product(x[-n:]), whole[-n:])


def test_one_thread_and_two_give_the_same_bits() -> None:
    product = Exact().linear(drawn(3072, 256, seed=1), drawn(256, seed=2))
    x, answers = drawn(500, 3072), []
    before = torch.get_num_threads()
    for n_threads in (1, 2):
        torch.set_num_threads(n_threads)
        answers.append(product(x))
    torch.set_num_threads(before)
    assert same_bits(*answers)


@pytest.mark.parametrize("n_rows", [1, 2, 40])
def test_the_products_are_those_that_they_are_called(n_rows: int) -> None:
    x, weight, bias = drawn(n_rows, 96), drawn(96, 64, seed=1), drawn(64, seed=2)
    product = x.double() @ weight.double()
    linear = product + bias.double()
    for answer, expected in (
        (Exact().linear(weight, bias)(x), linear),
        (Exact().neurons(weight, bias)(x), gelu(linear, approximate="tanh")),
        (Exact().head(weight.t())(x), product),
    ):
        assert (answer.shape, answer.dtype) == (expected.shape, torch.float32)
        assert (answer.double() - expected).abs().max() < 2e-5


def test_the_weights_may_change_afterwards() -> None:
    weight, x = drawn(96, 64), drawn(3, 96)
    product = Exact().linear(weight, torch.zeros(64))
    before = product(x)
    weight.zero_()
    assert torch.equal(product(x), before)
