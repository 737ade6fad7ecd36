"""What the engine can refuse, and how a step can end badly. Pure Python; no torch.

EngineError
├── Refused                  said before any compute; nothing changed
│   ├── EmptySession             generating with nothing to continue
│   ├── SessionBusy              another mutation of this session is under way
│   ├── PastLengthMismatch       the client expected another length
│   ├── ReplyTooLarge            the answer would exceed the byte limit
│   ├── PositionsOutOfRange      `points_at` names positions this request does not step
│   ├── PositionCommitted        an intervention on a step that was made already
│   ├── EditOutOfReach           an intervention on a step that this request does not make
│   ├── TooManyEdits             the sessions' histories hold as many edits as they may
│   ├── BosNotAtStart            `prepend_bos` on a session that has tokens
│   ├── QueueFull                as many requests wait as the server allows
│   ├── NoRoom                   the K/V budget has no room for these tokens
│   └── ShuttingDown             the server is stopping
├── EngineDown               the model thread died; the process should be replaced
└── Interrupted              the work was begun and ended early
    ├── Cancelled                the client left
    ├── SessionDeleted           the session was deleted meanwhile
    ├── SessionChanged           what a study had begun to look at was rolled back meanwhile
    ├── Drained                  the grace period of a shutdown is over
    └── StepFailed               the model, the sampler or the log failed for this row
        └── EditNotFinite            its edits made an infinity or a NaN
"""


def _told(past_length: int, n_new: int) -> str:
    """The positions of a request in words."""
    first, last = past_length, past_length + n_new - 1
    return f"{n_new} positions" + (f", {first} to {last}" if n_new else "")


class EngineError(Exception):
    """Root of this package's errors."""


class Refused(EngineError):
    """Refused before any compute; nothing changed."""


class EmptySession(Refused):
    """There is no token whose logits could be sampled from."""

    def __init__(self) -> None:
        super().__init__(
            "cannot generate on an empty session: append a prompt first, "
            "or token_ids [50256] to begin as in training"
        )


class SessionBusy(Refused):
    """One mutation at a time."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"session {session_id!r} is busy with another request")


class PastLengthMismatch(Refused):
    """The session is not as long as the client believes."""

    def __init__(self, *, expected: int, past_length: int) -> None:
        self.expected = expected
        self.past_length = past_length
        super().__init__(f"expected past_length {expected}, but it is {past_length}")


class ReplyTooLarge(Refused):
    """One JSON answer would hold more bytes than the server allows."""

    def __init__(self, *, n_bytes: int, max_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.max_bytes = max_bytes
        super().__init__(
            f"the answer would be about {n_bytes} bytes, over the limit of {max_bytes}: "
            "stream it, or narrow points_at"
        )


class PositionsOutOfRange(Refused):
    """`points_at` names a position that this request does not step."""

    def __init__(self, *, position: int, past_length: int, n_new: int) -> None:
        self.position = position
        self.past_length = past_length
        self.n_new = n_new
        super().__init__(
            f"position {position} is none of this request's {_told(past_length, n_new)}"
        )


class PositionCommitted(Refused):
    """History is not edited: a branch of it is."""

    def __init__(self, *, position: int, past_length: int) -> None:
        self.position = position
        self.past_length = past_length
        super().__init__(
            f"position {position} is committed already (past_length is {past_length}): "
            "fork the session with `at` there and `replay: true` to step it again, edited"
        )


class EditOutOfReach(Refused):
    """An intervention names a position that this request cannot reach."""

    def __init__(self, *, position: int, past_length: int, n_new: int) -> None:
        self.position = position
        self.past_length = past_length
        self.n_new = n_new
        super().__init__(
            f"position {position} cannot be edited by this request: "
            f"it is none of its {_told(past_length, n_new)}"
        )


class TooManyEdits(Refused):
    """The edits that sessions keep would need more memory than they may."""

    def __init__(self, *, n_bytes: int, max_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.max_bytes = max_bytes
        super().__init__(
            f"the edits that sessions keep would need {n_bytes} bytes, "
            f"over the limit of {max_bytes}: delete or truncate edited sessions"
        )


class BosNotAtStart(Refused):
    """A beginning-of-text token was asked for in the middle of a session."""

    def __init__(self, past_length: int) -> None:
        self.past_length = past_length
        super().__init__(f"prepend_bos needs past_length 0, but it is {past_length}")


class QueueFull(Refused):
    """As many requests are in the engine as the server allows."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        super().__init__(f"{max_queue} requests are running or waiting, which is the limit")


class NoRoom(Refused):
    """The K/V budget is spent on sessions that are at work."""

    def __init__(self, *, needed_bytes: int, total_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.total_bytes = total_bytes
        super().__init__(
            f"no room for {needed_bytes} more bytes of K/V within the budget of {total_bytes}"
        )


class ShuttingDown(Refused):
    """The server takes no new work."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class EngineDown(EngineError):
    """The model thread died of a fault that was not one row's."""

    def __init__(self) -> None:
        super().__init__("the model thread died")


class Interrupted(EngineError):
    """Ended early; the session is as its last commit left it."""


class Cancelled(Interrupted):
    """The client left."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled")


class SessionDeleted(Interrupted):
    """The session was deleted while it ran."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"session {session_id!r} was deleted")


class SessionChanged(Interrupted):
    """The session was rolled back below what a study looks at, and the study is of no use."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"session {session_id!r} was rolled back while it was studied")


class Drained(Interrupted):
    """The grace period of a shutdown ended before the request did."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


class StepFailed(Interrupted):
    """A fault inside a step. The message names no tensor contents and no text."""


class EditNotFinite(StepFailed):
    """The step was edited, and what came of it is not finite."""

    def __init__(self) -> None:
        super().__init__("the interventions led to values that are not finite")
