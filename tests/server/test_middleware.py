import asyncio

import pytest
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from server.budget import Budget
from server.middleware import CLIENT_LEFT, BodyLimit, RequestContext
from tests.server.hand import Hand, http_scope, until


class Counted:
    """An `HttpObserver`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, int]] = []

    def http_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.requests.append((method, route, status))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def leave(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()


async def fail(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("secret prompt")


async def fail_late(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError("late")


def limited(app: ASGIApp, max_bytes: int, budget: Budget | None = None) -> BodyLimit:
    return BodyLimit(app, max_bytes=max_bytes, budget=budget or Budget(100))


def ask(app: ASGIApp, *bodies: bytes, headers: dict[str, str] | None = None) -> Hand:
    async def main() -> Hand:
        hand = Hand()
        for i, body in enumerate(bodies):
            hand.feed(body, more=i < len(bodies) - 1)
        await hand.run(app, http_scope(headers=headers))
        return hand

    return asyncio.run(main())


@pytest.mark.parametrize("given", ["abc-1", "a" * 128, "req:1.2_3"])
def test_a_harmless_request_id_is_echoed(given: str) -> None:
    app = RequestContext(echo, observer=Counted(), write_timeout=20)
    assert ask(app, b"", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "é", "<script>"])
def test_any_other_request_id_is_replaced(given: str) -> None:
    app = RequestContext(echo, observer=Counted(), write_timeout=20)
    answered = ask(app, b"", headers={"X-Request-Id": given}).headers["x-request-id"]
    assert answered != given
    assert len(answered) == 32


def test_x05_equal_request_ids_at_once_are_no_conflict() -> None:
    async def main() -> list[Hand]:
        app = RequestContext(echo, observer=Counted(), write_timeout=20)
        hands = [Hand(), Hand()]
        for hand in hands:
            hand.feed(b"x")
        scope = http_scope(headers={"x-request-id": "same"})
        await asyncio.gather(*(hand.run(app, scope) for hand in hands))
        return hands

    assert [hand.body for hand in asyncio.run(main())] == [b"x", b"x"]


def test_a_fault_is_a_500_in_the_envelope() -> None:
    counted = Counted()
    hand = ask(RequestContext(fail, observer=counted, write_timeout=20), b"")
    assert hand.status == 500
    assert hand.json["error"]["code"] == "internal_error"
    assert b"secret" not in hand.body
    assert "x-request-id" in hand.headers
    assert counted.requests == [("POST", "unmatched", 500)]


def test_a_fault_after_the_first_byte_is_left_to_the_server() -> None:
    with pytest.raises(RuntimeError, match="late"):
        ask(RequestContext(fail_late, observer=Counted(), write_timeout=20), b"")


def test_a_client_that_left_is_counted_as_such() -> None:
    counted = Counted()
    ask(RequestContext(leave, observer=counted, write_timeout=20), b"")
    assert counted.requests == [("POST", "unmatched", CLIENT_LEFT)]


def test_q07_the_log_line_has_no_path_no_query_no_body() -> None:
    async def main() -> None:
        hand = Hand()
        hand.feed(b"secret-body")
        app = RequestContext(echo, observer=Counted(), write_timeout=20)
        await hand.run(app, http_scope(path="/secret-path?secret-query"))

    with structlog.testing.capture_logs() as lines:
        asyncio.run(main())
    assert len(lines) == 1
    assert lines[0]["status"] == 200
    assert "secret" not in str(lines)


def test_a_body_in_pieces_arrives_whole() -> None:
    assert ask(limited(echo, 6), b"abc", b"", b"def").body == b"abcdef"


def test_q12_a_large_declared_body_is_refused_unread() -> None:
    hand = ask(limited(echo, 5), b"", headers={"content-length": str(2**30)})
    assert hand.status == 413
    assert hand.json["error"]["code"] == "body_too_large"
    assert hand.json["error"]["max_bytes"] == 5
    assert hand.headers["connection"] == "close"
    assert hand.n_received == 0


@pytest.mark.parametrize("headers", [{}, {"content-length": "1"}, {"content-length": "x"}])
def test_q12_an_undeclared_large_body_is_counted(headers: dict[str, str]) -> None:
    hand = ask(limited(echo, 5), b"abc", b"def", b"never read", headers=headers)
    assert hand.status == 413
    assert hand.n_received == 2


def test_bodies_in_flight_share_a_budget() -> None:
    """The third of three bodies of 4 bytes finds 8 held: refused, and read no further."""

    async def main() -> None:
        may_answer = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await may_answer.wait()
            await echo(scope, receive, send)

        budget = Budget(10)
        app = limited(slow, 5, budget)
        first, second, third = Hand(), Hand(), Hand()
        running = []
        for hand in (first, second):
            hand.feed(b"abcd")
            running.append(asyncio.create_task(hand.run(app, http_scope())))
        await until(lambda: budget.held_bytes == 8)
        third.feed(b"ab", more=True)
        third.feed(b"c", more=True)
        third.feed(b"never read")
        await third.run(app, http_scope())
        assert (third.status, third.json["error"]["code"]) == (429, "queue_full")
        assert third.json["error"]["max_bytes"] == 10
        assert third.headers["retry-after"]
        assert third.headers["connection"] == "close"
        assert third.n_received == 2
        assert budget.held_bytes == 8
        may_answer.set()
        await asyncio.gather(*running)
        assert first.body == second.body == b"abcd"
        assert budget.held_bytes == 0
        again = Hand()
        again.feed(b"abcd")
        await again.run(app, http_scope())
        assert again.status == 200

    asyncio.run(main())


def test_a_client_that_leaves_while_sending_reaches_nobody() -> None:
    async def main() -> Hand:
        hand = Hand()
        hand.feed(b"abc", more=True)
        hand.disconnect()
        await hand.run(limited(fail, 5), http_scope())
        return hand

    assert asyncio.run(main()).sent == []


def test_after_the_body_the_application_hears_the_client_leave() -> None:
    heard = []

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"], (await receive())["type"]])

    async def main() -> None:
        hand = Hand()
        hand.feed(b"abc")
        hand.disconnect()
        await hand.run(limited(listen, 5), http_scope())

    asyncio.run(main())
    assert heard == ["http.request", "http.disconnect"]


def test_other_scopes_pass() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def main() -> None:
        wrapped = RequestContext(limited(app, 1), observer=Counted(), write_timeout=20)
        hand = Hand()
        await wrapped({"type": "lifespan"}, hand.receive, hand.send)

    asyncio.run(main())
    assert seen == ["lifespan"]
