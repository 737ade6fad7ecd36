"""tests.lively itself: on these weights a restarted position shows."""

import pytest

from model.config import SIZES, GPT2Config
from model.weights.fresh import fresh_checkpoint
from tests.lively import SMALL, lively_checkpoint
from tests.reference import reference_greedy

PROMPT = [15496, 995]
CONFIGS = [
    SMALL,
    SIZES["tiny"],
    GPT2Config(n_ctx=128, n_embd=48, n_layer=3, n_head=4),
    GPT2Config(n_ctx=64, n_embd=8, n_layer=1, n_head=1),
    GPT2Config(n_ctx=64, n_embd=64, n_layer=4, n_head=4),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.n_embd}x{config.n_layer}")
def test_greedy_decoding_wanders_and_a_restart_at_0_leads_it_elsewhere(config: GPT2Config) -> None:
    checkpoint = lively_checkpoint(config)

    right = reference_greedy(checkpoint, PROMPT, 40)
    restarted = reference_greedy(checkpoint, PROMPT, 40, restart_positions=True)

    assert len(set(right)) >= 20
    assert restarted != right


def test_fresh_weights_would_hide_it() -> None:
    """The reason for all this."""
    checkpoint = fresh_checkpoint(SIZES["tiny"], source="random:tiny")

    right = reference_greedy(checkpoint, PROMPT, 20)
    restarted = reference_greedy(checkpoint, PROMPT, 20, restart_positions=True)

    assert len(set(right)) < 5
    assert restarted[1:] == right[1:]


def test_the_same_seed_gives_the_same_weights() -> None:
    assert lively_checkpoint(seed=5).fingerprint == lively_checkpoint(seed=5).fingerprint
    assert lively_checkpoint(seed=5).fingerprint != lively_checkpoint(seed=6).fingerprint
