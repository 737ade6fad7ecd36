"""Other programs, run and read. Everything the test says goes through `say`."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PATIENCE = 300.0  # seconds until something that must come is given up


class CheckFailed(Exception):
    """What was promised did not hold, or a step on the way to it could not be taken."""


def say(text: str) -> None:
    """One line to the person who waits."""
    print(text, flush=True)


def run(
    *command: str | Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    errors_too: bool = False,
) -> str:
    """Run a program to its end and return its output, with `errors_too` both streams of it.

    Raises:
        CheckFailed: it is missing or failed; says its last lines.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise CheckFailed(f"{words[0]} is not here") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise CheckFailed(f"{' '.join(words)} ended with {done.returncode}:\n{tail}")
    return done.stdout + done.stderr if errors_too else done.stdout


def check(what: str, *, holds: bool, seen: object = None) -> None:
    """See that a promise holds.

    Raises:
        CheckFailed: it does not.
    """
    if not holds:
        raise CheckFailed(f"{what}: {seen!r}")


def until(what: str, condition: Callable[[], bool], *, seconds: float = PATIENCE) -> None:
    """Wait for `condition`.

    Raises:
        CheckFailed: it does not come.
    """
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            raise CheckFailed(f"{what}: not within {seconds:.0f} seconds")
        time.sleep(0.2)
