"""Text to token ids and back: tiktoken's byte-pair merges over the packaged vocabulary. No torch.

Any thread: nothing changes after construction, and tiktoken releases the GIL while it merges. No
network, ever. Nothing is added silently: no beginning-of-text token, no leading space.
"""

from collections.abc import Sequence

import tiktoken

from embedding.errors import TextTooLong, TokenIdOutOfRange
from embedding.ids import check_ids
from embedding.vocabulary import load_vocabulary, piece

END_OF_TEXT = 50256
END_OF_TEXT_LITERAL = "<|endoftext|>"
LONGEST_TOKEN_BYTES = 128

# openai/gpt-2 `src/encoder.py` splits text with `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|
#  ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`. This is tiktoken's equal of it, which backtracks less.
_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


class Tokenizer:
    """GPT-2's tokenizer, for a model with a context of `n_ctx` tokens (1 to 1024)."""

    n_vocab = 50257

    def __init__(self, n_ctx: int = 1024) -> None:
        vocabulary = load_vocabulary()
        self.n_ctx = n_ctx
        self._bytes = (*vocabulary.token_bytes, END_OF_TEXT_LITERAL.encode())
        self._encoding = tiktoken.Encoding(
            "gpt2",
            explicit_n_vocab=self.n_vocab,
            pat_str=_SPLIT,
            mergeable_ranks=vocabulary.ranks(),
            special_tokens={END_OF_TEXT_LITERAL: END_OF_TEXT},
        )

    @property
    def max_text_bytes(self) -> int:
        """UTF-8 bytes beyond which no text can fit the context."""
        return self.n_ctx * LONGEST_TOKEN_BYTES

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`, which may be empty.

        `<|endoftext|>` in it is seven ordinary tokens, unless `allow_special`. A lone surrogate,
        which JSON can spell but UTF-8 cannot, becomes U+FFFD.

        Raises:
            TextTooLong: more than `max_text_bytes`. Checked first, because a million spaces make
                the merger's regular expression panic past `except Exception`.
        """
        text, n_bytes = _well_formed(text)
        if n_bytes > self.max_text_bytes:
            raise TextTooLong(n_bytes=n_bytes, max_bytes=self.max_text_bytes, n_ctx=self.n_ctx)
        if allow_special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse ids that are no token.

        Raises:
            TokenIdOutOfRange: names the first such id and where it stands.
        """
        check_ids(token_ids, self.n_vocab)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole characters.

        Raises:
            TokenIdOutOfRange: it is no token.
        """
        if not 0 <= token_id < self.n_vocab:  # a negative index would find another token
            raise TokenIdOutOfRange(index=0, token_id=token_id, n_vocab=self.n_vocab)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def piece(self, token_id: int) -> str:
        """GPT-2's printable name of a token, such as "Ġworld"; `<|endoftext|>` for 50256."""
        token = self.token_bytes(token_id)
        return END_OF_TEXT_LITERAL if token_id == END_OF_TEXT else piece(token)

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of all tokens, joined.

        Raises:
            TokenIdOutOfRange: one is no token.
        """
        self.check_ids(token_ids)
        return b"".join(map(self._bytes.__getitem__, token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all tokens; what is not UTF-8 becomes U+FFFD."""
        return self.decode_bytes(token_ids).decode(errors="replace")


def _well_formed(text: str) -> tuple[str, int]:
    """`text` with surrogate pairs joined and lone ones as U+FFFD, and its UTF-8 bytes."""
    try:
        return text, len(text.encode())
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return text, len(text.encode())
