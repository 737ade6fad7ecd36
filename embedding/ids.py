"""Token ids must be rows of `wte`. Pure Python, any thread."""

from collections.abc import Sequence

from embedding.errors import TokenIdOutOfRange


def check_ids(token_ids: Sequence[int], n_vocab: int) -> None:
    """Refuse ids outside 0..n_vocab-1, below zero too: an index of -1 would find the last row.

    Raises:
        TokenIdOutOfRange: names the first such id and where it stands.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < n_vocab):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < n_vocab:
            raise TokenIdOutOfRange(index=index, token_id=token_id, n_vocab=n_vocab)
