import numpy as np
import pytest

from embedding.tokenizer import END_OF_TEXT
from engine.commands import Generate
from engine.generation import Generation
from model.errors import NonFiniteLogits
from model.sampling import Sampling
from tests.engine.rig import GREEDY, TOKENIZER


def generation(max_tokens: int = 10, **more: object) -> Generation:
    command = Generate(session_id="", **{"sampling": GREEDY, **more})  # type: ignore[arg-type]  # any field
    return Generation(command, max_tokens=max_tokens, tokenizer=TOKENIZER)


def force(own: Generation, *token_ids: int) -> list[tuple[str, str | None, str | int | None]]:
    """What is said of each id that is made the likeliest in turn."""
    told = []
    for position, token_id in enumerate(token_ids, start=1):
        row = np.zeros(50257, dtype=np.float32)
        row[token_id] = 9
        assert own.choose(row, position) == token_id
        told.append((own.text, own.finish_reason, own.stop_reason))
    return told


def test_t15_a_stop_over_three_tokens_never_shows() -> None:
    own = generation(stop=("DEFGHIJ",))
    assert force(own, 32988, 17511, 23852) == [
        ("", None, None),
        ("", None, None),
        ("", "stop", "DEFGHIJ"),
    ]


def test_t16_what_only_looked_like_a_stop_is_flushed_by_the_last_id() -> None:
    own = generation(max_tokens=3, stop=("\n\nUser:",))
    texts = force(own, 198, 198, 12982)  # 12982 is "User"
    assert texts == [("", None, None), ("", None, None), ("\n\nUser", "length", None)]


def test_t06_an_unfinished_character_is_flushed_at_the_end() -> None:
    assert force(generation(), 47249, 222) == [("", None, None), ("😀", None, None)]
    assert force(generation(max_tokens=1), 47249)[0][:2] == ("\ufffd", "length")


def test_end_of_text_ends_it_and_is_not_shown() -> None:
    own = generation()
    assert force(own, 464, END_OF_TEXT) == [("The", None, None), ("", "stop", END_OF_TEXT)]


def test_end_of_text_is_an_id_like_others_when_ignored() -> None:
    own = generation(ignore_eos=True)
    assert force(own, END_OF_TEXT) == [("<|endoftext|>", None, None)]


def test_ignoring_end_of_text_does_not_ignore_the_clients_own_stop_ids() -> None:
    own = generation(ignore_eos=True, stop_token_ids=frozenset({END_OF_TEXT}))
    assert force(own, END_OF_TEXT)[-1] == ("", "stop", END_OF_TEXT)


def test_a_stop_id_flushes_what_was_held_and_hides_itself() -> None:
    own = generation(stop=("DEFGHIJ",), stop_token_ids=frozenset({995}))
    assert force(own, 32988, 995) == [("", None, None), ("DEF", "stop", 995)]


def test_a_stop_on_the_last_id_is_a_stop() -> None:
    own = generation(max_tokens=1, stop=("The",))
    assert force(own, 464) == [("", "stop", "The")]


def test_the_seed_is_told() -> None:
    assert generation(sampling=Sampling(seed=42)).seed == 42


def test_nothing_is_chosen_from_a_row_that_holds_nan() -> None:
    with pytest.raises(NonFiniteLogits):
        generation().choose(np.full(50257, np.nan, dtype=np.float32), 1)
