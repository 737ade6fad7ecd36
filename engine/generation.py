"""The sampled side of one generate request. Numpy, no torch; the model thread."""

import numpy as np
import numpy.typing as npt

from embedding.tokenizer import END_OF_TEXT, Tokenizer
from engine.commands import Generate
from engine.text import ShownText
from model.sampling import choose


class Generation:
    """Chooses ids until a stop or the budget ends it.

    Everything chosen is stepped and reported, the id that ends it too.
    """

    def __init__(self, command: Generate, *, max_tokens: int, tokenizer: Tokenizer) -> None:
        self.max_tokens = max_tokens
        self._sampling = command.sampling
        self._tokenizer = tokenizer
        self._stop_ids = command.stop_token_ids | (
            frozenset() if command.ignore_eos else {END_OF_TEXT}
        )
        self._shown = ShownText(command.stop)
        self._left = max_tokens
        self.text = ""  # of the id chosen last
        self.stop_reason: str | int | None = None

    @property
    def seed(self) -> int:
        """The seed in use, given or drawn."""
        return self._sampling.seed

    @property
    def finish_reason(self) -> str | None:
        """Why the id chosen last is the last one; None while there is more to choose."""
        if self.stop_reason is not None:
            return "stop"
        return None if self._left else "length"

    def choose(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """The id for `position` from the row of logits [V] before it.

        Raises:
            NonFiniteLogits: nothing can be chosen from such a row.
        """
        token_id = choose(logits, self._sampling, position=position)
        self._left -= 1
        self._show(token_id)
        return token_id

    def _show(self, token_id: int) -> None:
        if token_id in self._stop_ids:
            self.stop_reason = token_id
            self.text = self._shown.flush()
            return
        self.text = self._shown.push(self._tokenizer.token_bytes(token_id))
        self.stop_reason = self._shown.matched
        if self.finish_reason == "length":
            self.text += self._shown.flush()
