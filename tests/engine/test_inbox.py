import threading

from engine.inbox import EndAll, Inbox

FOR_EVER = 60.0


def test_messages_are_taken_once_and_in_order() -> None:
    inbox = Inbox()
    messages = [EndAll() for _ in range(3)]
    for message in messages:
        inbox.put(message)
    assert len(inbox) == 3
    taken = inbox.take()
    assert all(a is b for a, b in zip(taken, messages, strict=True))
    assert (inbox.take(), len(inbox)) == ([], 0)


def test_a_bell_that_rang_during_a_pass_starts_another() -> None:
    """A reader that caught up while the thread was looking elsewhere must not be forgotten."""
    inbox = Inbox()
    inbox.ring()
    assert inbox.take() == []
    waited = threading.Thread(target=inbox.wait, args=(FOR_EVER,), daemon=True)
    waited.start()
    waited.join(FOR_EVER / 2)
    assert not waited.is_alive()


def test_the_bell_rings_once() -> None:
    inbox = Inbox()
    inbox.ring()
    inbox.wait(FOR_EVER)
    assert not inbox._bell.is_set()
