"""Sessions that must stay as they were, and those that do not."""

from collections.abc import Hashable, Sequence

import pytest

from engine.errors import SessionChanged, SessionDeleted
from engine.studies.guard import Guard
from sessions.edits import Edit, step_keys
from sessions.errors import SessionNotFound
from sessions.session import Session

SESSION = Session(id="s", created=0, ttl_seconds=1, token_ids=(5, 6, 7, 8))
EDIT = (Edit(point="ln_f", op="scale", scale=0.0),)


class Published:
    """What is known of a session by now."""

    def __init__(self, session: Session = SESSION) -> None:
        self.session: Session | None = session

    def __call__(self) -> Session:
        if self.session is None:
            raise SessionNotFound("s")
        return self.session


def test_what_comes_after_is_no_change() -> None:
    current = Published()
    guard = Guard(SESSION, 3, current)
    guard.check()
    for later in (
        SESSION.committed((9,), {4: EDIT}),
        SESSION.truncated(3),
        SESSION.truncated(3).committed((1, 2)),
        SESSION.truncated(1).committed((6, 7)),  # the same again
    ):
        current.session = later
        guard.check()


@pytest.mark.parametrize(
    "other",
    [
        SESSION.truncated(2),
        SESSION.truncated(2).committed((9,)),
        SESSION.truncated(2).committed((7,), {2: EDIT}),
    ],
)
def test_another_history_is_a_change(other: Session) -> None:
    current = Published()
    guard = Guard(SESSION, 3, current)
    current.session = other
    with pytest.raises(SessionChanged):
        guard.check()


def test_a_shorter_session_may_grow() -> None:
    current = Published(SESSION.committed((9,)))
    Guard(SESSION, 100, current).check()
    current.session = SESSION.truncated(3)
    with pytest.raises(SessionChanged):
        Guard(SESSION, 100, current).check()


def test_a_session_that_is_gone_was_deleted() -> None:
    current = Published()
    guard = Guard(SESSION, 3, current)
    current.session = None
    with pytest.raises(SessionDeleted):
        guard.check()


def test_histories_are_compared_once_for_each_that_was_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Session] = []

    def counted(session: Session) -> Sequence[Hashable]:
        asked.append(session)
        return step_keys(session.token_ids, session.edits)

    monkeypatch.setattr(Session, "step_keys", property(counted))
    current = Published()
    guard = Guard(SESSION, 3, current)
    for _ in range(5):
        guard.check()
    assert not asked
    longer = [SESSION.committed((n,)) for n in range(2)]
    for current.session in longer:
        for _ in range(5):
            guard.check()
    assert asked == [longer[0], SESSION, longer[1]]
