"""A session that must stay as it was while it is studied. The event loop."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

from engine.errors import SessionChanged, SessionDeleted
from sessions.errors import SessionNotFound
from sessions.session import Session


class Guard:
    """The first `length` steps of `session`, or all if it has fewer, as they were at the beginning.

    `current` tells what the session is by now. What is asked of the engine right after a check sees
    what was checked.
    """

    def __init__(self, session: Session, length: int, current: Callable[[], Session]) -> None:
        self.session = session
        self._length = min(length, session.past_length)
        self._current = current
        self._seen = session  # the last one that was found to be the same so far

    def check(self) -> None:
        """See that the steps are still the same. One session value is compared once.

        Raises:
            SessionChanged, SessionDeleted: they are not.
        """
        try:
            now = self._current()
        except SessionNotFound as error:
            raise SessionDeleted(self.session.id) from error
        if now is self._seen:
            return
        if now.step_keys[: self._length] != self._before:
            raise SessionChanged(self.session.id)
        self._seen = now

    @cached_property
    def _before(self) -> Sequence[Hashable]:
        return self.session.step_keys[: self._length]
