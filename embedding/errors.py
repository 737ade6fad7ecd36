"""What the embedding side can refuse. Pure Python; no torch.

EmbeddingError
├── PositionOverflow     the tokens would pass the last row of `wpe`
├── TokenIdOutOfRange    an id that is no row of `wte`
├── TextTooLong          text that cannot fit, refused by size before it is tokenized
└── VocabularyCorrupt    the packaged vocabulary is not the one that GPT-2 was trained with
"""


class EmbeddingError(Exception):
    """Root of this package's errors."""


class PositionOverflow(EmbeddingError):
    """`past_length + n_new` exceeds `n_ctx`, the rows of `wpe`."""

    def __init__(self, *, past_length: int, n_new: int, n_ctx: int) -> None:
        self.past_length = past_length
        self.n_new = n_new
        self.n_ctx = n_ctx
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens. However, {past_length} "
            f"tokens are cached and {n_new} more were asked for, {past_length + n_new} in all."
        )


class TokenIdOutOfRange(EmbeddingError):
    """An id outside 0..n_vocab-1."""

    def __init__(self, *, index: int, token_id: int, n_vocab: int) -> None:
        self.index = index
        self.token_id = token_id
        self.n_vocab = n_vocab
        super().__init__(
            f"token id {token_id} at index {index} is outside the vocabulary, 0 to {n_vocab - 1}"
        )


class TextTooLong(EmbeddingError):
    """Text of so many UTF-8 bytes that no tokenization of it fits the context."""

    def __init__(self, *, n_bytes: int, max_bytes: int, n_ctx: int) -> None:
        self.n_bytes = n_bytes
        self.max_bytes = max_bytes
        self.n_ctx = n_ctx
        super().__init__(
            f"This model's maximum context length is {n_ctx} tokens. A text of {n_bytes} UTF-8 "
            f"bytes cannot fit: no token is longer than 128 bytes, so {max_bytes} is the limit."
        )


class VocabularyCorrupt(EmbeddingError):
    """The vocabulary file does not have the SHA-256 it must have."""
