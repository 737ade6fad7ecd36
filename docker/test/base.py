"""A base image without a registry: Debian with Python, put together from Debian's own packages.

It stands for python:3.11-slim where nothing can be pulled. It carries this machine's certificate
authorities, so that what can be reached from here can be reached from a build.
"""

import ssl
from pathlib import Path

from docker.test.engine import CLIENT
from docker.test.shell import run, say

NAME = "stepscope-test-base"
_SUITE = "bookworm"  # Python 3.11
_INCLUDED = "ca-certificates,python3,python3-pip,python3-venv"
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


def make_base(tarball: Path) -> None:
    """Write the base as a tarball, unless it is there from an earlier run."""
    if tarball.exists():
        return
    say("making a base image (minutes)")
    unfinished = tarball.with_name(f"unfinished-{tarball.name}")
    ours = ssl.get_default_verify_paths().cafile
    hooks = [f"--customize-hook=upload {ours} {_BUNDLE}"] if ours else []
    run(
        "mmdebstrap",
        "--variant=minbase",
        f"--include={_INCLUDED}",
        *hooks,
        _SUITE,
        unfinished,
    )
    unfinished.rename(tarball)


def import_base(tarball: Path, env: dict[str, str]) -> str:
    """Give the tarball to the engine; returns the image's name."""
    run(CLIENT, "import", tarball, NAME, env=env)
    return NAME
