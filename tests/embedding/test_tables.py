import pytest
import torch

from embedding.tables import WPE_STD, WTE_STD, EmbeddingTables, fresh


def drawn(seed: int, n_vocab: int = 50257) -> EmbeddingTables:
    generator = torch.Generator().manual_seed(seed)
    return fresh(n_vocab=n_vocab, n_ctx=1024, n_embd=768, generator=generator)


def test_the_two_initial_deviations_over_the_full_tables() -> None:
    tables = drawn(seed=0)
    for table, std, tolerance in ((tables.wte, 0.02, 1e-3), (tables.wpe, 0.01, 5e-3)):
        assert table.std().item() == pytest.approx(std, rel=tolerance)
        assert abs(table.mean().item()) < 6 * std / table.numel() ** 0.5  # six standard errors
        within_one_std = (table.abs() < std).sum().item() / table.numel()
        assert within_one_std == pytest.approx(0.6827, abs=3e-3)  # normal, not uniform
    assert (WTE_STD, WPE_STD) == (0.02, 0.01)


def test_fresh_tables_follow_their_seed_and_sizes() -> None:
    tables = drawn(seed=1, n_vocab=100)
    assert (tables.n_vocab, tables.n_ctx, tables.n_embd) == (100, 1024, 768)
    assert torch.equal(tables.wte, drawn(seed=1, n_vocab=100).wte)
    assert torch.equal(tables.wpe, drawn(seed=1, n_vocab=100).wpe)
    assert not torch.equal(tables.wte, drawn(seed=2, n_vocab=100).wte)


@pytest.mark.parametrize(
    ("wte", "wpe"),
    [
        pytest.param(torch.zeros(5, 8), torch.zeros(4, 6), id="two widths"),
        pytest.param(torch.zeros(5, 8), torch.zeros(8), id="one axis"),
        pytest.param(torch.zeros(5, 8), torch.zeros(4, 8, dtype=torch.float16), id="half"),
        pytest.param(torch.zeros(8, 5).T, torch.zeros(4, 8), id="not contiguous"),
    ],
)
def test_tables_that_do_not_fit_are_a_fault_of_the_caller(
    wte: torch.Tensor, wpe: torch.Tensor
) -> None:
    with pytest.raises(AssertionError):
        EmbeddingTables(wte, wpe)
