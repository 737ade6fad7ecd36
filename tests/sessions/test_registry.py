import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sessions.edits import STEP_BYTES, Edit
from sessions.errors import SessionError, SessionExpired, SessionNotFound, TooManySessions
from sessions.registry import Registry
from sessions.session import Session
from tests.sessions.clock import Clock

TTL = 60


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(clock=clock, max_sessions=3)


def session(session_id: str, owner: str = "", ttl_seconds: int = TTL) -> Session:
    return Session(id=session_id, created=0.0, ttl_seconds=ttl_seconds, owner=owner)


def ids(registry: Registry, owner: str = "") -> list[str]:
    return [s.id for s in registry.page(owner, limit=100).sessions]


def test_ids_are_long_random_and_distinct(registry: Registry) -> None:
    made = {registry.new_id() for _ in range(1000)}
    assert len(made) == 1000
    assert all(re.fullmatch("sess_[0-9a-f]{32}", session_id) for session_id in made)


def test_the_last_published_value_is_found(registry: Registry) -> None:
    registry.publish(session("a"))
    registry.publish(session("a").committed((1, 2)))
    assert registry.find("a").token_ids == (1, 2)
    assert len(registry) == 1


def test_q07_unknown_removed_and_anothers_look_the_same(registry: Registry) -> None:
    registry.publish(session("a", owner="key A"))
    registry.publish(session("b", owner="key B"))
    registry.remove("b")
    told = []
    for session_id in ("a", "b", "c"):
        with pytest.raises(SessionNotFound) as refusal:
            registry.find(session_id, "key B")
        told.append(str(refusal.value).replace(session_id, "ID", 1))
    assert len(set(told)) == 1
    assert registry.find("a", "key A").owner == "key A"


def test_q07_an_expired_session_is_told_to_its_owner_only(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a", owner="key A"))
    clock.now += TTL
    for _ in ("before it is collected", "after"):
        with pytest.raises(SessionExpired):
            registry.find("a", "key A")
        with pytest.raises(SessionNotFound):
            registry.find("a", "key B")
        registry.expire()


def test_expired_then_tombstone_then_unknown(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a"))
    clock.now += TTL - 1
    assert registry.expire() == []
    assert registry.find("a").id == "a"
    clock.now += 1
    assert registry.expire() == [session("a")]
    assert registry.expire() == []
    clock.now += TTL - 1
    with pytest.raises(SessionExpired):
        registry.find("a")
    clock.now += 1
    with pytest.raises(SessionNotFound):
        registry.find("a")
    registry.expire()
    registry.check()


def test_time_alone_expires_and_forgets(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a"))
    clock.now += TTL
    assert (len(registry), ids(registry)) == (0, [])
    with pytest.raises(SessionExpired), registry.using("a"):
        pass
    clock.now += TTL
    with pytest.raises(SessionNotFound):
        registry.find("a")
    assert registry.expire() == [session("a")]  # collected late, and once
    with pytest.raises(SessionNotFound):
        registry.find("a")


def test_x04_a_session_does_not_expire_during_a_request(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a", ttl_seconds=1))
    with registry.using("a"):
        clock.now += 5
        assert registry.expire() == []
        assert registry.expires(registry.find("a")) == clock.now + 1
        with registry.using("a"):
            clock.now += 5
        assert registry.expire() == []
        clock.now += 5
    ended = clock.now
    assert registry.expires(registry.find("a")) == ended + 1
    clock.now = ended + 0.5
    assert registry.expires(registry.find("a")) == ended + 1  # a look is no touch
    assert registry.expire() == []
    clock.now = ended + 1
    assert [s.id for s in registry.expire()] == ["a"]


def test_x04_a_mutation_without_its_client_keeps_the_session(
    registry: Registry, clock: Clock
) -> None:
    registry.publish(session("a"))
    with registry.using("a"):
        registry.mark_busy("a")
    clock.now += 10 * TTL
    assert registry.expire() == []
    registry.clear_busy("a")
    assert registry.expires(registry.find("a")) == clock.now + TTL


def test_a_request_that_fails_has_ended(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a"))
    with pytest.raises(ZeroDivisionError), registry.using("a"):
        raise ZeroDivisionError
    clock.now += TTL
    assert [s.id for s in registry.expire()] == ["a"]


def test_a_publish_is_no_touch(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a"))
    clock.now += TTL - 1
    registry.publish(session("a").committed((1,)))
    clock.now += 1
    assert [s.past_length for s in registry.expire()] == [1]


def test_one_mutation_at_a_time(registry: Registry) -> None:
    registry.publish(session("a"))
    registry.publish(session("b"))
    assert not registry.is_busy("a")
    registry.mark_busy("a")
    assert registry.is_busy("a")
    assert not registry.is_busy("b")
    with pytest.raises(AssertionError):
        registry.mark_busy("a")
    registry.clear_busy("a")
    assert not registry.is_busy("a")
    with pytest.raises(AssertionError):
        registry.clear_busy("a")
    assert not registry.is_busy("unknown")


def test_x02_a_late_publish_does_not_bring_a_removed_session_back(registry: Registry) -> None:
    registry.publish(session("a"))
    with registry.using("a"):
        registry.mark_busy("a")
        registry.remove("a")
        assert registry.is_busy("a")
        registry.publish(session("a").committed((1,)))
        with pytest.raises(SessionNotFound):
            registry.find("a")
        registry.check()
        registry.clear_busy("a")
        registry.publish(session("a").committed((1,)))
        assert ids(registry) == []
    registry.check()
    assert not registry.is_busy("a")
    registry.remove("a")


def test_an_expired_session_is_not_published_again(registry: Registry, clock: Clock) -> None:
    registry.publish(session("a"))
    clock.now += TTL
    registry.expire()
    registry.publish(session("a").committed((1,)))
    registry.check()
    with pytest.raises(SessionExpired):
        registry.find("a")


def test_pages_are_newest_first_and_of_one_owner(registry: Registry) -> None:
    for n in range(5):
        registry.publish(session(f"a{n}", owner="A"))
        registry.publish(session(f"b{n}", owner="B"))
    registry.publish(session("a0", owner="A").committed((1,)))  # keeps its place
    first = registry.page("A", limit=2)
    assert ([s.id for s in first.sessions], first.has_more) == (["a4", "a3"], True)
    second = registry.page("A", limit=2, after="a3")
    assert ([s.id for s in second.sessions], second.has_more) == (["a2", "a1"], True)
    last = registry.page("A", limit=2, after="a1")
    assert ([s.id for s in last.sessions], last.has_more) == (["a0"], False)
    end = registry.page("A", limit=2, after="a0")
    assert (end.sessions, end.has_more) == ((), False)
    exact = registry.page("A", limit=5)
    assert (len(exact.sessions), exact.has_more) == (5, False)


@pytest.mark.parametrize("after", ["unknown", "b", "removed"])
def test_a_page_after_a_session_that_is_not_ones_own_is_refused(
    registry: Registry, after: str
) -> None:
    registry.publish(session("b", owner="B"))
    registry.publish(session("removed", owner="A"))
    registry.remove("removed")
    with pytest.raises(SessionNotFound):
        registry.page("A", limit=1, after=after)


def test_places_are_counted_with_the_opens_in_flight(registry: Registry) -> None:
    registry.publish(session("a"))
    registry.hold_place()
    registry.hold_place()
    for refused in (registry.check_place, registry.hold_place):
        with pytest.raises(TooManySessions) as refusal:
            refused()
        assert refusal.value.max_sessions == 3
    registry.release_place()  # this one failed to open
    registry.hold_place()
    registry.publish(session("b"))
    registry.release_place()  # this one is open now
    with pytest.raises(TooManySessions):
        registry.hold_place()
    registry.remove("a")
    registry.hold_place()
    registry.release_place()
    registry.release_place()
    with pytest.raises(AssertionError):
        registry.release_place()


def test_a_session_that_expired_gives_its_place_at_once(registry: Registry, clock: Clock) -> None:
    for name in "abc":
        registry.publish(session(name))
    with pytest.raises(TooManySessions):
        registry.check_place()
    clock.now += TTL
    registry.check_place()


def test_m03_nothing_is_kept_of_sessions_that_are_gone(registry: Registry, clock: Clock) -> None:
    for n in range(1000):
        registry.publish(session(f"deleted{n}"))
        with registry.using(f"deleted{n}"):
            registry.remove(f"deleted{n}")
        registry.publish(session(f"expired{n}"))
        clock.now += TTL
        registry.expire()
    clock.now += TTL
    registry.expire()
    kept = [value for value in vars(registry).values() if isinstance(value, dict)]
    assert kept == [{}] * len(kept)


NAMES = st.sampled_from(["a", "b", "c"])
TTLS = {"a": 2, "b": 5, "c": 9}


class Machine(RuleBasedStateMachine):
    """The registry against three dicts of what was opened, how often it is used, since when not."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = Registry(clock=self.clock, max_sessions=100)
        self.n_opened = 0
        self.idle_since: dict[str, float] = {}  # of all that were ever opened and not removed
        self.uses: dict[str, int] = {}
        self.latest: dict[str, str] = {}
        self.collected: set[str] = set()

    def ttl(self, session_id: str) -> int:
        return TTLS[session_id[0]]

    def idle(self, session_id: str) -> float:
        return 0 if self.uses[session_id] else self.clock.now - self.idle_since[session_id]

    def state(self, session_id: str) -> str:
        idle = self.idle(session_id) if session_id in self.idle_since else float("inf")
        ttl = self.ttl(session_id)
        return "living" if idle < ttl else "expired" if idle < 2 * ttl else "unknown"

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        self.n_opened += 1
        session_id = f"{name}{self.n_opened}"
        self.registry.publish(session(session_id, ttl_seconds=self.ttl(session_id)))
        self.idle_since[session_id], self.uses[session_id] = self.clock.now, 0
        self.latest[name] = session_id

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        session_id = self.latest.get(name, "a0")
        if self.state(session_id) == "living":
            self.registry.begin(session_id)
            self.uses[session_id] += 1
        else:
            with pytest.raises(SessionError):
                self.registry.begin(session_id)

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        session_id = self.latest.get(name)
        if session_id is not None and self.uses[session_id]:
            self.registry.end(session_id)
            self.uses[session_id] -= 1
            self.idle_since[session_id] = self.clock.now

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        session_id = self.latest.pop(name, None)
        if session_id is None or self.state(session_id) != "living":
            return
        self.registry.remove(session_id)
        del self.idle_since[session_id]
        for _ in range(self.uses[session_id]):
            self.registry.publish(session(session_id, ttl_seconds=self.ttl(session_id)))
            self.registry.end(session_id)

    @rule(seconds=st.sampled_from([0.5, 1, 2, 5]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        over = {n for n in self.idle_since if self.state(n) != "living"} - self.collected
        assert {s.id for s in self.registry.expire()} == over
        self.collected |= over

    @invariant()
    def agrees(self) -> None:
        self.registry.check()
        for session_id in [*self.uses, "a0"]:
            try:
                found = self.registry.find(session_id)
            except SessionExpired:
                assert self.state(session_id) == "expired"
            except SessionNotFound:
                assert self.state(session_id) == "unknown"
            else:
                assert self.state(session_id) == "living"
                idle = self.idle(session_id)
                assert self.registry.expires(found) == self.clock.now - idle + found.ttl_seconds
        living = [n for n in self.idle_since if self.state(n) == "living"]
        assert ids(self.registry) == living[::-1]
        assert len(self.registry) == len(living)


TestMachine = Machine.TestCase
TestMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_edits_count_once_while_a_session_has_them(registry: Registry) -> None:
    one, two = (Edit(point="ln_f", op="scale", scale=scale) for scale in (0.0, 2.0))
    edited = session("a").committed((1, 2, 3), {0: (one,), 1: (one, two)})
    assert registry.publish(edited)
    assert registry.publish(session("b").committed((1,), {0: (one,)}))
    assert registry.edit_bytes == one.n_bytes + two.n_bytes + 3 * STEP_BYTES
    assert registry.edits.more([one, two]) == 0
    assert registry.publish(edited.truncated(1))
    assert registry.edit_bytes == one.n_bytes + 2 * STEP_BYTES
    assert registry.edits.more([one, two, two]) == two.n_bytes
    registry.remove("a")
    assert registry.edit_bytes == one.n_bytes + STEP_BYTES
    registry.remove("b")
    assert registry.edit_bytes == 0


def test_a_tombstone_keeps_no_history(registry: Registry, clock: Clock) -> None:
    edit = Edit(point="ln_f", op="scale", scale=0.0)
    registry.publish(session("a").committed((1, 2), {0: (edit,)}))
    clock.now += TTL + 1
    (expired,) = registry.expire()
    assert expired.past_length == 2
    assert registry.edit_bytes == 0
    with pytest.raises(SessionExpired):
        registry.find("a")


def test_what_was_removed_while_in_use_does_not_live_again(registry: Registry) -> None:
    registry.publish(session("a"))
    registry.begin("a")
    registry.remove("a")
    assert not registry.publish(session("a"))
