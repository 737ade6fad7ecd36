import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import embedding.tokenizer
from embedding.errors import TextTooLong, TokenIdOutOfRange
from embedding.tokenizer import END_OF_TEXT, Tokenizer
from tests.embedding.slow_bpe import SlowBpe

TOKENIZER = Tokenizer()
TWIN = SlowBpe(Path(embedding.tokenizer.__file__).parent / "data" / "vocab.bpe.gz")

HIGH, LOW = "\ud83d", "\udc4d"  # the halves of a thumbs-up
SPECIAL = "<|endoftext|>"
SPELLED = [27, 91, 437, 1659, 5239, 91, 29]
ALIKE = st.sampled_from("aAe' \n\t\r'stvedml0123.,-éßΩжあ漢😀🤗\u0301\u200d\u2028\x85\x00\ufeff")
# Only what Python's Unicode knows: a newer one in the merger may call other characters letters.
KNOWN = st.characters(exclude_categories=["Cs", "Cn"])
TEXTS = st.one_of(st.text(KNOWN), st.text(ALIKE, max_size=60))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("Hello world", [15496, 995]),
        ("😀", [47249, 222]),
        ("🤗", [8582, 97, 245]),
        ("\n", [198]),
        ("\r", [201]),
        ("\x00", [188]),
        (" ", [220]),
        ("!", [0]),
        ('"', [1]),
        ("\ufffd", [4210]),
        ("\u2028", [447, 101]),
        ("DEFGHIJ", [32988, 17511, 23852]),
        ("\n\nUser:", [198, 198, 12982, 25]),
        ("👍", [41840, 235]),
    ],
)
def test_known_ids(text: str, ids: list[int]) -> None:
    assert TOKENIZER.encode(text) == ids
    assert TOKENIZER.decode(ids) == text


@given(TEXTS)
@settings(deadline=None, max_examples=300)
def test_ids_equal_the_slow_twins(text: str) -> None:
    assert TOKENIZER.encode(text) == TWIN.encode(text)


@given(st.one_of(st.text(), TEXTS), st.booleans())
@settings(deadline=None, max_examples=300)
def test_decode_undoes_encode(text: str, allow_special: bool) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, allow_special=allow_special)) == text


@given(st.lists(st.integers(0, 50256)))
@settings(deadline=None)
def test_any_ids_decode_to_their_tokens_joined(ids: list[int]) -> None:
    joined = b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids)
    assert TOKENIZER.decode_bytes(ids) == joined
    assert TOKENIZER.decode(ids) == joined.decode(errors="replace")


def test_own_probe_pieces_appended_are_not_the_text_appended_at_once() -> None:
    assert TOKENIZER.encode("Hel") + TOKENIZER.encode("lo world") == [12621, 5439, 995]
    assert TOKENIZER.encode("Hello world") == [15496, 995]


def test_t01_special_text_is_plain_text_unless_asked_for() -> None:
    assert TOKENIZER.encode(SPECIAL) == SPELLED
    assert TOKENIZER.encode(f"a{SPECIAL}b") == [64, *SPELLED, 65]
    assert TOKENIZER.encode(SPECIAL, allow_special=True) == [END_OF_TEXT]
    assert TOKENIZER.encode(f"a{SPECIAL}b", allow_special=True) == [64, END_OF_TEXT, 65]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (HIGH, [4210]),
        (LOW, [4210]),
        ("a" + HIGH + LOW + "b", [64, 41840, 235, 65]),  # a pair in two halves is one character
        ("a" + HIGH + "b", [64, 4210, 65]),
        (LOW + HIGH, [6353]),  # both halves, in the wrong order, are two characters
    ],
)
def test_t02_a_lone_surrogate_becomes_the_replacement_character(text: str, ids: list[int]) -> None:
    assert TOKENIZER.encode(text) == ids


@pytest.mark.parametrize("space", [" ", "\t", "\n"])
def test_t04_text_that_would_make_the_merger_panic_is_refused_by_size(space: str) -> None:
    with pytest.raises(TextTooLong) as refusal:
        TOKENIZER.encode(space * 999_999 + "x")
    assert refusal.value.n_bytes == 1_000_000
    assert refusal.value.max_bytes == 131_072
    assert TOKENIZER.encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("space", [" ", "\t", "\n", "\u3000"])
def test_t04_as_much_space_as_is_allowed_is_encoded(space: str) -> None:
    text = space * ((131_072 - 1) // len(space.encode())) + "x"
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("letter", ["a", "é", "漢", "😀", HIGH])
def test_t04_the_limit_counts_bytes_and_is_exact(letter: str) -> None:
    n_bytes = 3 if letter == HIGH else len(letter.encode())
    fits = letter * (131_072 // n_bytes)
    fits += "b" * (131_072 % n_bytes)
    TOKENIZER.encode(fits)
    with pytest.raises(TextTooLong) as refusal:
        TOKENIZER.encode(fits + "b")
    assert refusal.value.n_bytes == 131_073


def test_t04_the_limit_follows_the_context() -> None:
    short = Tokenizer(n_ctx=16)
    assert short.max_text_bytes == 16 * 128
    assert short.decode(short.encode("a" * 2048)) == "a" * 2048
    with pytest.raises(TextTooLong, match="maximum context length is 16 tokens"):
        short.encode("a" * 2049)


def test_t04_the_longest_text_that_fits_the_context_is_not_refused() -> None:
    longest = max(range(50256), key=lambda token_id: len(TOKENIZER.token_bytes(token_id)))
    text = TOKENIZER.decode([longest] * 1024)
    assert len(text.encode()) == TOKENIZER.max_text_bytes
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_t05_one_letter_repeated_to_the_limit_is_encoded() -> None:
    text = "a" * 131_072
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert len(ids) == 131_072 // 4  # "aaaa" is the longest run of the letter that is a token


@pytest.mark.parametrize("bad", [-1, 50257, 2147483648, 9223372036854775808, -(2**63)])
def test_t10_an_id_out_of_range_is_refused_by_index_and_bound(bad: int) -> None:
    for use in (TOKENIZER.check_ids, TOKENIZER.decode, TOKENIZER.decode_bytes):
        with pytest.raises(TokenIdOutOfRange, match=r"at index 2 .* 0 to 50256") as refusal:
            use([0, 50256, bad, -5])
        assert (refusal.value.index, refusal.value.token_id) == (2, bad)
    for look_up in (TOKENIZER.token_bytes, TOKENIZER.token_text, TOKENIZER.piece):
        with pytest.raises(TokenIdOutOfRange):
            look_up(bad)


def test_t10_ids_in_range_pass() -> None:
    TOKENIZER.check_ids([])
    TOKENIZER.check_ids([0, 50256])
    TOKENIZER.check_ids(range(50257))


@pytest.mark.parametrize(
    "text",
    [
        "a\rb",
        "a\nb",
        "a\r\nb",
        "a\u2028b",
        "a\u2029b",
        "a\x00b",
        "a\x0bb",
        "a\x0cb",
        "\x85",
        "\x1c",
    ],
)
def test_s13_line_breaks_and_controls_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == text.encode()


def test_a_token_is_told_as_bytes_text_and_piece() -> None:
    assert TOKENIZER.token_bytes(995) == b" world"
    assert TOKENIZER.token_text(995) == " world"
    assert TOKENIZER.piece(995) == "Ġworld"
    assert TOKENIZER.token_bytes(222) == b"\x80"
    assert TOKENIZER.token_text(222) == "\ufffd"
    assert TOKENIZER.token_text(END_OF_TEXT) == SPECIAL
    assert TOKENIZER.piece(END_OF_TEXT) == SPECIAL


def test_threads_share_one_tokenizer() -> None:
    texts = [f"thread {n} says Hello world 😀 " * 50 for n in range(32)]
    alone = [TOKENIZER.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        together: Iterable[list[int]] = pool.map(TOKENIZER.encode, texts)
        assert list(together) == alone


def test_the_tokenizer_loads_without_torch_and_without_a_network() -> None:
    program = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('a network was asked for')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from embedding.tokenizer import Tokenizer\n"
        "assert Tokenizer().encode('Hello world') == [15496, 995]\n"
        "import embedding.text, embedding.positions\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"TIKTOKEN_CACHE_DIR": ""})
