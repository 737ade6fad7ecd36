"""GPT-2's byte-pair vocabulary, from one file inside the package. Pure Python, any thread.

Everything follows from `vocab.bpe` (openai/gpt-2, Modified MIT licence): 256 byte symbols, then the
50,000 merges in file order; `encoder.json` holds nothing more. The SHA-256 is the one that tiktoken
checks too, so a vocabulary that loads at all is the one the weights were trained with.
"""

import gzip
import hashlib
import zlib
from dataclasses import dataclass
from importlib import resources

from embedding.errors import VocabularyCorrupt

VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def _byte_order() -> tuple[int, ...]:
    """The 256 bytes in id order: those that print as themselves first, then the rest."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    return tuple(printable + sorted(set(range(256)) - set(printable)))


def _byte_symbols() -> tuple[str, ...]:
    """The printable character that stands for each byte: itself, else chr(256 + n)."""
    order = _byte_order()
    n_printable = sum(chr(byte).isprintable() and chr(byte) != " " for byte in range(256))
    symbols = [chr(byte) for byte in order[:n_printable]]
    symbols += [chr(256 + n) for n in range(256 - n_printable)]
    return tuple(symbol for _, symbol in sorted(zip(order, symbols, strict=True)))


BYTE_SYMBOLS = _byte_symbols()
"""GPT-2's printable symbol of each byte, such as "Ġ" for a space."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of the 50,256 mergeable tokens, by id. An id is also the rank of its merge."""

    token_bytes: tuple[bytes, ...]

    def ranks(self) -> dict[bytes, int]:
        """The id of each token's bytes, as tiktoken wants it."""
        return {token: rank for rank, token in enumerate(self.token_bytes)}


def piece(token: bytes) -> str:
    """GPT-2's printable form of a token's bytes, such as "Ġworld" for b" world"."""
    return "".join(map(BYTE_SYMBOLS.__getitem__, token))


def load_vocabulary() -> Vocabulary:
    """The packaged vocabulary.

    Raises:
        VocabularyCorrupt: the file in the package is damaged or another one.
    """
    file = resources.files("embedding").joinpath("data", "vocab.bpe.gz")
    return vocabulary_from(file.read_bytes())


def vocabulary_from(packed: bytes) -> Vocabulary:
    """The vocabulary of a gzipped `vocab.bpe`.

    Raises:
        VocabularyCorrupt: it does not unpack to the file whose SHA-256 is `VOCAB_SHA256`.
    """
    merges = _unpacked(packed).decode().split("\n")[1:-1]  # a version line; a last empty one
    byte_of = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}
    merged = (bytes(byte_of[symbol] for symbol in merge if symbol != " ") for merge in merges)
    return Vocabulary((*(bytes([byte]) for byte in _byte_order()), *merged))


def _unpacked(packed: bytes) -> bytes:
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise VocabularyCorrupt(f"the vocabulary does not unpack: {error}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != VOCAB_SHA256:
        raise VocabularyCorrupt(f"the vocabulary has SHA-256 {sha256}, not {VOCAB_SHA256}")
    return content
