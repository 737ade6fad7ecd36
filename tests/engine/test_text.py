import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text import ShownText


def show(tokens: list[bytes], *stops: str) -> tuple[list[str], str | None]:
    """What is shown after each token, up to the stop; the end flushed into the last one."""
    shown = ShownText(stops)
    texts = []
    for token in tokens:
        texts.append(shown.push(token))
        if shown.matched is not None:
            return texts, shown.matched
    return [*texts, shown.flush()], None


def test_t06_a_character_over_several_tokens_is_shown_once_and_whole() -> None:
    face = "🤗".encode()
    assert show([face[:2], face[2:3], face[3:]]) == (["", "", "🤗", ""], None)


def test_t15_no_part_of_a_stop_is_ever_shown() -> None:
    assert show([b"ABC", b"DEF", b"GHI", b"J"], "DEFGHIJ") == (["ABC", "", "", ""], "DEFGHIJ")
    assert show([b"ABCDE", b"FGH", b"IJKL"], "DEFGHIJ") == (["ABC", "", ""], "DEFGHIJ")


def test_t16_a_tail_that_only_looked_like_a_stop_is_flushed() -> None:
    texts, matched = show([b"bye", b"\n", b"\n", b"User", b"!"], "\n\nUser:")
    assert (texts, matched) == (["bye", "", "", "", "\n\nUser!", ""], None)
    assert show([b"\n", b"\n", b"Use"], "\n\nUser:") == (["", "", "", "\n\nUse"], None)


@pytest.mark.parametrize(
    ("tokens", "stops", "text", "matched"),
    [
        ([b"abcd"], ("cd", "bc"), "a", "bc"),  # the one that begins first
        ([b"abcd"], ("bc", "bcd"), "a", "bcd"),  # of those the longest
        ([b"abc", b"d"], ("bcd", "bc"), "a", "bc"),  # the one that is whole first ends it
        ([b"aab"], ("ab",), "a", "ab"),
        ([b"aa", b"a", b"b"], ("aab",), "a", "aab"),  # held back again and again
        ([b"xy"], ("x",), "", "x"),
        ([b"\xc3", b"\xa9", b"!"], ("!",), "é", "!"),
    ],
)
def test_the_earliest_stop_counts(
    tokens: list[bytes], stops: tuple[str, ...], text: str, matched: str
) -> None:
    texts, found = show(tokens, *stops)
    assert ("".join(texts), found) == (text, matched)


def test_an_unfinished_character_before_a_stop_is_shown_as_replaced() -> None:
    assert show([b"a\xf0\x9f", b"."], ".") == (["a", "\ufffd"], ".")


def test_a_stop_inside_one_token_hides_what_follows_it() -> None:
    assert show([b"one. two"], ".") == (["one"], ".")


# Few letters, so that stops and text meet; some of them of several bytes.
LETTER = st.sampled_from("aab.é😀")
TEXT = st.text(LETTER, max_size=12)


@given(
    data=st.one_of(TEXT.map(str.encode), st.binary(max_size=12)),
    cuts=st.lists(st.integers(1, 4), max_size=30),
    stops=st.lists(st.text(LETTER, min_size=1, max_size=4), max_size=3),
)
@settings(deadline=None, max_examples=500)
def test_joined_text_is_the_whole_decode_cut_before_the_earliest_stop(
    data: bytes, cuts: list[int], stops: list[str]
) -> None:
    tokens = []
    rest = data
    for cut in [*cuts, *[4] * len(data)]:
        if rest:
            tokens.append(rest[:cut])
            rest = rest[cut:]
    texts, matched = show(tokens, *stops)
    seen = b""
    for token in tokens:
        seen += token
        found = [(seen.find(stop.encode()), -len(stop.encode()), stop) for stop in stops]
        found = [match for match in found if match[0] >= 0]
        if found:
            start, _, stop = min(found)
            assert matched == stop
            assert "".join(texts) == seen[:start].decode(errors="replace")
            return
    assert matched is None
    assert "".join(texts) == data.decode(errors="replace")
