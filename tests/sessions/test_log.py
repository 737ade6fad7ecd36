"""What every session log promises. A back end joins by its line in `BACK_ENDS`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sessions.edits import Edit, Value
from sessions.errors import LogError
from sessions.log import Committed, Deleted, Entry, MemoryLog, Opened, SessionLog, Truncated
from sessions.session import Parent, Session

EDIT = Edit(point="z.0[1]", op="add", value=Value((1, 2), bytes(8)), scale=-0.5)

BackEnd = Callable[[Path], SessionLog]
BACK_ENDS: dict[str, BackEnd] = {"memory": lambda _: MemoryLog()}


@pytest.fixture(params=BACK_ENDS)
def back_end(request: pytest.FixtureRequest) -> BackEnd:
    return BACK_ENDS[request.param]


@pytest.fixture
def log(back_end: BackEnd, tmp_path: Path) -> Iterator[SessionLog]:
    log = back_end(tmp_path)
    yield log
    log.close()


def session(session_id: str, *token_ids: int) -> Session:
    return Session(id=session_id, created=1.5, ttl_seconds=60, token_ids=token_ids)


def test_a_new_log_is_empty(log: SessionLog) -> None:
    assert log.load() == []


def test_all_that_was_said_at_open_is_kept(log: SessionLog) -> None:
    opened = Session(
        id="a",
        created=1234.5678,
        ttl_seconds=604800,
        owner="someone",
        metadata={"name": "é😀", "empty": ""},
        parent=Parent("b", 1024),
        record=("resid_post.0", "z.1[0]"),
        token_ids=(0, 50256, 7),
        edits={1: (EDIT,)},
        edit_sizes={EDIT.digest: EDIT.n_bytes},
    )
    log.commit([Opened(opened)])
    assert log.load() == [opened]


def test_sessions_load_oldest_first_wherever_they_changed_last(log: SessionLog) -> None:
    log.commit([Opened(session("b")), Opened(session("a"))])
    log.commit([Opened(session("c")), Committed("b", 0, (1,)), Committed("a", 0, (2,))])
    assert [kept.id for kept in log.load()] == ["b", "a", "c"]


def test_one_batch_may_hold_a_whole_life(log: SessionLog) -> None:
    log.commit([Opened(session("a")), Committed("a", 0, (1, 2, 3)), Truncated("a", 1)])
    assert log.load() == [session("a", 1)]
    log.commit([Committed("a", 1, (9,)), Committed("a", 2, (8, 7)), Truncated("a", 3)])
    assert log.load() == [session("a", 1, 9, 8)]
    log.commit([Committed("a", 3, (5,)), Deleted("a"), Opened(session("b"))])
    assert log.load() == [session("b")]


def test_edits_are_kept_with_their_steps(log: SessionLog) -> None:
    edits = {1: (EDIT,), 2: (EDIT, EDIT)}
    log.commit([Opened(session("a", 7)), Committed("a", 1, (8, 9), edits)])
    (kept,) = log.load()
    assert (kept.token_ids, kept.edits) == ((7, 8, 9), edits)
    log.commit([Truncated("a", 2)])
    assert log.load()[0].edits == {1: (EDIT,)}


def test_an_empty_batch_changes_nothing(log: SessionLog) -> None:
    log.commit([Opened(session("a", 4))])
    log.commit([])
    assert log.load() == [session("a", 4)]


@pytest.mark.parametrize(
    "misfit",
    [
        Opened(session("a")),
        Committed("unknown", 0, (1,)),
        Committed("a", 1, (1,)),
        Committed("a", 3, (1,)),
        Truncated("a", 3),
        Truncated("a", -1),
        Truncated("unknown", 0),
        Deleted("unknown"),
        Deleted("gone"),
        Committed("gone", 1, (1,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_misfit_keeps_its_whole_batch_out(log: SessionLog, misfit: Entry, place: int) -> None:
    log.commit([Opened(session("a", 1, 2)), Opened(session("b")), Opened(session("gone", 1))])
    log.commit([Deleted("gone")])
    batch: list[Entry] = [Committed("b", 0, (5,)), Opened(session("c"))]
    batch.insert(place, misfit)
    with pytest.raises(LogError):
        log.commit(batch)
    assert log.load() == [session("a", 1, 2), session("b")]
    log.commit([Committed("a", 2, (3,)), Committed("b", 0, (6,))])
    assert log.load() == [session("a", 1, 2, 3), session("b", 6)]


def test_what_was_loaded_is_the_callers_own(log: SessionLog) -> None:
    log.commit([Opened(session("a"))])
    log.load().clear()
    assert log.load() == [session("a")]


def test_a_closed_log_refuses_and_closes_again(log: SessionLog) -> None:
    log.commit([Opened(session("a"))])
    log.close()
    log.close()
    with pytest.raises(LogError):
        log.commit([])
    with pytest.raises(LogError):
        log.load()


ID = st.sampled_from(["a", "b", "c"])
TOKENS = st.lists(st.integers(0, 50256), min_size=1, max_size=4).map(tuple)
LENGTH = st.integers(-1, 6)
BATCH = st.lists(
    st.one_of(
        st.builds(lambda n, ids: Opened(session(n, *ids)), ID, TOKENS),
        st.builds(Committed, ID, LENGTH, TOKENS),
        st.builds(Truncated, ID, LENGTH),
        st.builds(Deleted, ID),
    ),
    max_size=4,
)


def fits(entry: Entry, kept: dict[str, list[int]]) -> bool:
    """Make the change in a plain model of a log, if it fits."""
    match entry:
        case Opened(opened):
            fit = opened.id not in kept
            kept.setdefault(opened.id, list(opened.token_ids))
        case Committed(name, past_length, token_ids):
            fit = name in kept and len(kept[name]) == past_length
            kept.get(name, []).extend(token_ids)
        case Truncated(name, to):
            fit = name in kept and 0 <= to <= len(kept[name])
            del kept.get(name, [])[max(to, 0) :]
        case Deleted(name):
            fit = kept.pop(name, None) is not None
    return fit


@given(batches=st.lists(BATCH, max_size=12))
@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_batches_are_kept_whole_or_not_at_all(
    back_end: BackEnd, tmp_path_factory: pytest.TempPathFactory, batches: Sequence[list[Entry]]
) -> None:
    log = back_end(tmp_path_factory.mktemp("log"))
    kept: dict[str, list[int]] = {}
    for batch in batches:
        changed = {name: list(ids) for name, ids in kept.items()}
        if not {fits(entry, changed) for entry in batch} - {True}:
            log.commit(batch)
            kept = changed
        else:
            with pytest.raises(LogError):
                log.commit(batch)
        assert {s.id: list(s.token_ids) for s in log.load()} == kept
        assert [s.id for s in log.load()] == list(kept)
    log.close()
