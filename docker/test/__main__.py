"""`make docker-test`: the image, built and run for real on an engine of the test's own.

    packages ─┐
    base ─────┴─▶ engine ─▶ image ─▶ checks, one container after another

Needs root on a Debian-like Linux; installs what is missing, and takes away all that it made. With
`--keep FOLDER` the engine's data and the base stay there, and the next run takes minutes less.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from docker.test import checks
from docker.test.base import import_base, make_base
from docker.test.engine import engine, install_what_is_missing
from docker.test.image import (
    NAME,
    ROOT,
    Images,
    check_image_facts,
    check_second_build_keeps_dependencies,
)
from docker.test.packages import build_arguments
from docker.test.shell import CheckFailed, say
from tests.lively import save_lively

_COMPOSE = Path(sys.executable).with_name("docker-compose")


def main() -> NoReturn:
    """Run it all; the exit code says how it went."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--keep", type=Path, help="folder for the engine's data and the base")
    try:
        test(options.parse_args().keep)
    except CheckFailed as error:
        sys.exit(f"\nThe Docker check FAILED. {error}")
    say("The Docker check passed.")
    sys.exit(0)


def test(keep: Path | None) -> None:
    """From nothing to all checks."""
    install_what_is_missing()
    with _folder(keep) as work, tempfile.TemporaryDirectory() as scratch:
        make_base(work / "base.tar")
        with engine(work) as address:
            _test_on({"DOCKER_HOST": address}, work, Path(scratch))


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="stepscope-docker-") as folder:
        yield Path(folder)


def _test_on(env: dict[str, str], work: Path, scratch: Path) -> None:
    base = import_base(work / "base.tar", env)
    served, weights = scratch / "served", scratch / "weights"
    served.mkdir()
    with build_arguments(served) as arguments:
        images = Images(env, base=base, arguments=arguments)
        say("building the image (minutes)")
        images.build(ROOT, NAME)
        images.tell_sizes(NAME)
        check_image_facts(images)
        say("building it again after a change")
        check_second_build_keeps_dependencies(images, scratch, n_base=len(images.layers(base)))
    save_lively(weights)
    scratch.chmod(0o755)  # the container's user must come to the weights
    setting = checks.Setting(env=env, images=images, weights=weights, compose=_COMPOSE)
    for step in checks.ALL:
        step(setting)
        say(f"ok  {(step.__doc__ or step.__name__).splitlines()[0]}")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
