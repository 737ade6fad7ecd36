import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sessions.edits import Edit, Value
from sessions.errors import LengthOutOfRange
from sessions.session import Parent, Session

EDIT = Edit(point="ln_f", op="replace", value=Value((1,), bytes(4)))
IDS = st.lists(st.integers(0, 50256), max_size=20).map(tuple)


def session(token_ids: tuple[int, ...] = ()) -> Session:
    return Session(
        id="sess_1",
        created=5.0,
        ttl_seconds=60,
        owner="a",
        metadata={"k": "v"},
        parent=Parent("sess_0", 3),
        token_ids=token_ids,
    )


@given(IDS, IDS)
def test_a_commit_follows_what_is_there(before: tuple[int, ...], new: tuple[int, ...]) -> None:
    after = session(before).committed(new)
    assert after.token_ids == before + new
    assert after.past_length == len(before) + len(new)
    assert dataclasses.replace(after, token_ids=before) == session(before)


@given(IDS, st.data())
def test_a_truncate_keeps_the_first_tokens(ids: tuple[int, ...], data: st.DataObject) -> None:
    to = data.draw(st.integers(0, len(ids)))
    after = session(ids).truncated(to)
    assert (after.token_ids, after.past_length) == (ids[:to], to)


def test_edits_are_committed_with_their_steps_and_forgotten_with_them() -> None:
    edited = session((1, 2)).committed((3, 4), {3: (EDIT,)}).committed((5,), {4: (EDIT, EDIT)})
    assert edited.edits == {3: (EDIT,), 4: (EDIT, EDIT)}
    assert edited.edit_sizes == {EDIT.digest: EDIT.n_bytes}
    assert edited.truncated(4).edits == {3: (EDIT,)}
    assert edited.truncated(4).edit_sizes == edited.edit_sizes
    assert edited.truncated(2) == session((1, 2))


def test_an_edited_step_has_another_key() -> None:
    plain, edited = session((1, 2)), session((1,)).committed((2,), {1: (EDIT,)})
    assert plain.token_ids == edited.token_ids == plain.step_keys
    assert edited.step_keys[0] == plain.step_keys[0]
    assert edited.step_keys[1] != plain.step_keys[1]


def test_p11_truncate_to_zero_is_empty_and_out_of_range_is_refused() -> None:
    three = session((1, 2, 3))
    assert three.truncated(0).past_length == 0
    assert three.truncated(0).committed((9,)).token_ids == (9,)
    assert three.truncated(3) == three
    for to in (-2, -1, 4):
        with pytest.raises(LengthOutOfRange) as refusal:
            three.truncated(to)
        assert (refusal.value.to, refusal.value.past_length) == (to, 3)
    assert three.past_length == 3


def test_p13_length_is_what_was_committed_whatever_the_ids() -> None:
    assert session().committed((7, 7, 8)).past_length == 3


def test_a_session_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        session().token_ids = (1,)  # type: ignore[misc]  # the very thing under test


def test_sessions_load_without_torch() -> None:
    program = (
        "import sys, sessions.session, sessions.registry, sessions.log\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
