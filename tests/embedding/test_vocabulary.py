import gzip
import hashlib
import json
from importlib import resources

import pytest

from embedding.errors import VocabularyCorrupt
from embedding.tokenizer import LONGEST_TOKEN_BYTES, Tokenizer
from embedding.vocabulary import BYTE_SYMBOLS, load_vocabulary, piece, vocabulary_from

ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"


def packed() -> bytes:
    return resources.files("embedding").joinpath("data", "vocab.bpe.gz").read_bytes()


def test_pieces_in_id_order_spell_the_published_encoder_json(tokenizer: Tokenizer) -> None:
    ids = {tokenizer.piece(token_id): token_id for token_id in range(tokenizer.n_vocab)}
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == ENCODER_JSON_SHA256


def test_every_token_is_distinct_and_none_is_longer_than_promised() -> None:
    vocabulary = load_vocabulary()
    assert len(vocabulary.token_bytes) == 50256
    assert len(vocabulary.ranks()) == 50256
    assert max(map(len, vocabulary.token_bytes)) == LONGEST_TOKEN_BYTES


def test_the_byte_symbols_are_distinct_printable_and_no_space() -> None:
    assert len(set(BYTE_SYMBOLS)) == 256
    assert all(symbol.isprintable() and not symbol.isspace() for symbol in BYTE_SYMBOLS)
    assert piece(b" world\n") == "ĠworldĊ"


@pytest.mark.parametrize(
    "damaged",
    [
        pytest.param(packed()[:1000], id="cut"),
        pytest.param(b"", id="empty"),
        pytest.param(b"#version: 0.2\n", id="not gzip"),
        pytest.param(packed()[:500] + b"\xff" * 64 + packed()[564:], id="bytes overwritten"),
        pytest.param(gzip.compress(gzip.decompress(packed())[:-1]), id="one byte short"),
        pytest.param(
            gzip.compress(gzip.decompress(packed()).replace(b"h e\n", b"e h\n", 1)), id="one merge"
        ),
    ],
)
def test_a_damaged_vocabulary_is_refused(damaged: bytes) -> None:
    with pytest.raises(VocabularyCorrupt):
        vocabulary_from(damaged)


def test_the_licence_notice_lies_beside_the_file() -> None:
    notice = resources.files("embedding").joinpath("data", "LICENSE-gpt-2").read_text("utf-8")
    assert "Copyright (c) 2019 OpenAI" in notice
