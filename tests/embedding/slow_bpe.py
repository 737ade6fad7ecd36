"""A slow, readable twin of the tokenizer that uses nothing of the product but the packaged file.

Byte-pair encoding (Sennrich et al. 2016): split the text into words, spell each word in byte
symbols, and while two neighbours have a merge, merge the pair that stands first in the file.
"""

import gzip
import re
import unicodedata
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
REST = [byte for byte in range(256) if byte not in PRINTABLE]
SYMBOL = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + n) for n, byte in enumerate(REST)
}

# openai/gpt-2 splits: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
# Python's `re` has no \p, so the second part reads the kinds of the characters instead.
SUFFIX = re.compile("'s|'t|'re|'ve|'m|'ll|'d")
KINDS = re.compile(r" ?L+| ?N+| ?o+|[ _]+(?![LNo])|[ _]+")
SPACES = {*map(chr, range(9, 14)), *map(chr, range(0x2000, 0x200B)), *"\x85\xa0\u1680"} | {
    *"\u2028\u2029\u202f\u205f\u3000"
}


def kind(char: str) -> str:
    if char == " ":
        return " "
    if char in SPACES:
        return "_"
    category = unicodedata.category(char)[0]
    return category if category in "LN" else "o"


def words(text: str) -> Iterator[str]:
    kinds = "".join(map(kind, text))
    start = 0
    while start < len(text):
        match = SUFFIX.match(text, start) or KINDS.match(kinds, start)
        assert match is not None
        yield text[start : match.end()]
        start = match.end()


class SlowBpe:
    def __init__(self, file: Path) -> None:
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        self.merges = [(line.split()[0], line.split()[1]) for line in lines[1:]]

    @cached_property
    def ranks(self) -> dict[tuple[str, str], int]:
        return {merge: rank for rank, merge in enumerate(self.merges)}

    @cached_property
    def ids(self) -> dict[str, int]:
        symbols = [SYMBOL[byte] for byte in PRINTABLE + REST]
        return {piece: n for n, piece in enumerate(symbols + ["".join(m) for m in self.merges])}

    def encode(self, text: str) -> list[int]:
        return [self.ids[piece] for word in words(text) for piece in self._merged(word.encode())]

    def _merged(self, word: bytes) -> list[str]:
        pieces = [SYMBOL[byte] for byte in word]
        while True:
            pairs = enumerate(pairwise(pieces))
            ranked = [(self.ranks[pair], n) for n, pair in pairs if pair in self.ranks]
            if not ranked:
                return pieces
            _, n = min(ranked)
            pieces[n : n + 2] = [pieces[n] + pieces[n + 1]]
