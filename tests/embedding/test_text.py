from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedding.text import IncrementalText
from embedding.tokenizer import Tokenizer

TOKENIZER = Tokenizer()
BROKEN = st.lists(
    st.sampled_from([b"a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe2", b"\xed", b"\xa0", b"\xc3"])
).map(b"".join)
DATA = st.one_of(st.binary(max_size=40), BROKEN, st.text(max_size=20).map(str.encode))


def pushed(pieces: list[bytes]) -> list[str]:
    text = IncrementalText()
    return [*(text.push(piece) for piece in pieces), text.flush()]


@given(DATA, st.lists(st.integers(0, 40)))
@settings(deadline=None, max_examples=500)
def test_any_split_joins_to_the_whole_decode(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    assert "".join(pushed(pieces)) == data.decode(errors="replace")


@given(DATA)
@settings(deadline=None, max_examples=300)
def test_byte_by_byte_joins_to_the_whole_decode(data: bytes) -> None:
    pieces = [bytes([byte]) for byte in data]
    assert "".join(pushed(pieces)) == data.decode(errors="replace")


@given(st.lists(st.integers(0, 50256), max_size=30))
@settings(deadline=None)
def test_t06_joined_tokens_equal_the_whole_decode(ids: list[int]) -> None:
    assert "".join(pushed([TOKENIZER.token_bytes(n) for n in ids])) == TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([47249, 222], ["", "😀"]),
        ([8582, 97, 245], ["", "", "🤗"]),
        ([15496, 995], ["Hello", " world"]),
        ([447, 101], ["", "\u2028"]),
    ],
)
def test_t06_a_character_over_several_tokens_comes_whole(ids: list[int], texts: list[str]) -> None:
    assert pushed([TOKENIZER.token_bytes(n) for n in ids]) == [*texts, ""]


def test_what_never_becomes_a_character_is_flushed_as_replacement() -> None:
    text = IncrementalText()
    assert text.push(b"a\xf0\x9f") == "a"
    assert text.flush() == "\ufffd"
    assert text.flush() == ""
    assert text.push(b"\x98\x80b") == "\ufffd\ufffdb"


def test_a_flush_begins_anew() -> None:
    text = IncrementalText()
    text.push(b"\xf0\x9f")
    text.flush()
    assert text.push("😀".encode()) == "😀"
