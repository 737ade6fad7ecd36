"""Bytes that arrive in pieces, as text that is right at every moment. Pure Python, any thread.

GPT-2's tokens are bytes, and one character may be spread over several of them. As in mlx-lm, the
incremental decoder of `codecs` does the work.
"""

import codecs

_Utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalText:
    """A UTF-8 decoder that holds back an unfinished character. One stream, one thread.

    The joined results of `push` and one last `flush` are the joined bytes decoded with
    `errors="replace"`.
    """

    def __init__(self) -> None:
        self._decoder = _Utf8(errors="replace")

    def push(self, data: bytes) -> str:
        """The text that is now certain."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was held back, as U+FFFD; the next `push` begins anew."""
        return self._decoder.decode(b"", final=True)
