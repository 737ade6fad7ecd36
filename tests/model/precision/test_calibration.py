from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.precision import calibration
from model.precision.base import Product
from model.precision.calibration import ROWS, choose, fastest
from model.precision.float32 import Float32

Cost = Callable[[int], float]  # seconds by number of rows


class Workshop:
    """Products that take the time a test gives them, on a clock that nothing else moves."""

    def __init__(self, *costs: Cost) -> None:
        self.now = 0.0
        self.products = [self._product(cost) for cost in costs]

    def choose(self, seconds: float = 1e6) -> list[int]:
        return choose(self.products, 8, seconds=seconds, clock=lambda: self.now)

    def _product(self, cost: Cost) -> Product:
        def product(x: Tensor) -> Tensor:
            self.now += cost(len(x))
            return x

        return product


def flat(rows: int) -> float:
    return 10.0


def steep(rows: int) -> float:
    return 1.0 * rows


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Iterator[None]:
    calibration._chosen.cache_clear()
    yield
    calibration._chosen.cache_clear()


def test_each_number_of_rows_has_its_fastest() -> None:
    assert Workshop(flat, steep).choose() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert Workshop(steep, flat).choose() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_of_three_the_fastest() -> None:
    assert Workshop(lambda _: 10.0, lambda _: 6.0, lambda _: 5.0).choose() == [2] * len(ROWS)


@pytest.mark.parametrize(("time", "choice"), [(10.0, 0), (9.1, 0), (8.9, 1)])
def test_the_default_stays_unless_another_is_clearly_faster(time: float, choice: int) -> None:
    assert Workshop(flat, lambda _: time).choose() == [choice] * len(ROWS)


def test_one_slow_call_does_not_decide() -> None:
    """The first call packs, compiles, maps; any other may meet a busy moment."""
    seen: list[int] = []

    def slow_at_first(rows: int) -> float:
        seen.append(rows)
        return 1.0 if seen.count(rows) == 2 else 100.0

    assert Workshop(flat, slow_at_first).choose() == [1] * len(ROWS)


def test_the_default_where_time_is_over() -> None:
    """One call is the most that is too much."""
    workshop = Workshop(flat, lambda _: 5.0)
    calls = calibration._ROUNDS * (10 + 5)
    assert workshop.choose(seconds=2.5 * calls) == [1, 1] + [0] * (len(ROWS) - 2)
    assert workshop.now <= 2.5 * calls + 10
    assert Workshop(flat, lambda _: 5.0).choose(seconds=0) == [0] * len(ROWS)


def use(monkeypatch: pytest.MonkeyPatch, choices: list[int]) -> list[int]:
    """Let calibration choose so; returns the widths that it was asked for."""
    asked: list[int] = []

    def chosen(products: object, width: int) -> list[int]:
        asked.append(width)
        return choices

    monkeypatch.setattr(calibration, "choose", chosen)
    return asked


def marked(mark: float, made: list[tuple[float, int]]) -> calibration.Maker:
    def maker(weight: Tensor) -> Product:
        made.append((mark, len(weight)))
        return lambda x: torch.full((len(x), len(weight)), mark)

    return maker


def test_rows_between_two_measured_numbers_go_as_the_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, [1, 0, 1, 0, 1, 0, 1, 0])
    product = fastest((marked(0, []), marked(1, [])), torch.ones(5, 8))
    marks = {rows: int(product(torch.ones(rows, 8))[0, 0]) for rows in range(1, 300)}
    expected = {1: 1, 2: 0, 3: 0, 4: 1, 7: 1, 8: 0, 16: 1, 31: 1, 32: 0, 64: 1, 255: 1}
    assert {rows: marks[rows] for rows in expected} == expected
    assert not any(marks[rows] for rows in range(256, 300))


def test_only_what_was_chosen_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A maker may pack a copy of its own: 154 MB of GPT-2's vocabulary."""
    use(monkeypatch, [1] * len(ROWS))
    made: list[tuple[float, int]] = []
    fastest((marked(0, made), marked(1, made)), torch.ones(5, 8))
    assert [mark for mark, out in made if out == 5] == [1]


def test_a_width_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = use(monkeypatch, [0] * len(ROWS))
    makers = (marked(0, []), marked(1, []))
    for width in (8, 8, 16, 8):
        fastest(makers, torch.ones(5, width))
    assert asked == [8, 16]


@pytest.mark.parametrize("choice", [0, 1])
def test_float32_logits_agree_whatever_was_chosen(
    choice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, [choice] * len(ROWS))
    wte, x = torch.randn(301, 48), torch.randn(300, 48)
    expected = x.double() @ wte.double().t()
    product = Float32().head(wte)
    for rows in (1, 2, 3, 16, 300):
        torch.testing.assert_close(product(x[:rows]).double(), expected[:rows], atol=1e-4, rtol=0)


def test_float32_logits_are_tied_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """No way of multiplying may keep a copy of `wte`."""
    for choice in (0, 1):
        calibration._chosen.cache_clear()
        use(monkeypatch, [choice] * len(ROWS))
        wte, x = torch.randn(301, 48), torch.randn(4, 48)
        product = Float32().head(wte)
        wte[7] *= 2
        torch.testing.assert_close(product(x)[:, 7], F.linear(x, wte)[:, 7])
