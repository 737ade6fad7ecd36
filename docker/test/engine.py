"""A Docker engine of the test's own, beside whatever else runs here, and gone without a trace.

    work/data     images and layers       work/docker.sock   where clients find it
    work/exec     what runs now           work/dockerd.pid   how it is stopped
    work/log      what it said

It writes no firewall rules and leaves forwarding as it is: containers are published by Docker's own
proxy on the loopback address, and a build uses the host's network.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from docker.test.shell import CheckFailed, check, run, say, until

CLIENT = Path("/usr/bin/docker")  # of the package; another one may want a builder it lacks
_DAEMON = Path("/usr/sbin/dockerd")
_BRIDGE = "docker0"
_PACKAGES = {_DAEMON: "docker.io", Path("/usr/bin/mmdebstrap"): "mmdebstrap"}
_PACKAGES |= {Path("/bin/ip"): "iproute2"}


def install_what_is_missing() -> None:
    """Packages of the system, with apt.

    Raises:
        CheckFailed: this is no machine that it can be done on.
    """
    missing = [package for program, package in _PACKAGES.items() if not program.exists()]
    if os.geteuid() != 0:
        raise CheckFailed("an engine of the test's own needs root")
    if missing:
        say(f"installing {', '.join(missing)}")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "-qq", env=quiet)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, env=quiet)


@contextmanager
def engine(work: Path) -> Iterator[str]:
    """An engine for as long as the context lasts; gives its address (DOCKER_HOST).

    Raises:
        CheckFailed: it cannot start here; says what it said.
    """
    address = f"unix://{work / 'docker.sock'}"
    had_bridge, groups = _has_bridge(), _groups()
    with (work / "log").open("w") as log, _daemon(work, address, log.fileno()) as process:
        try:
            _wait_for(process, address, work / "log")
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            _clean(work, had_bridge=had_bridge, groups=groups)


def _daemon(work: Path, address: str, log: int) -> subprocess.Popen[bytes]:
    command: list[str | Path] = [_DAEMON, "--host", address, "--data-root", work / "data"]
    command += ["--exec-root", work / "exec", "--pidfile", work / "dockerd.pid"]
    command += ["--iptables=false", "--ip-masq=false", "--ip-forward=false"]
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _wait_for(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    try:
        until("it answers", lambda: process.poll() is not None or _answers(address), seconds=60)
        check("it runs", holds=process.poll() is None, seen=process.returncode)
    except CheckFailed as error:
        tail = "\n".join(log.read_text().splitlines()[-20:])
        raise CheckFailed(f"No engine can start here ({error}). It said:\n{tail}") from error


def _answers(address: str) -> bool:
    asked = subprocess.run([CLIENT, "--host", address, "info"], capture_output=True, check=False)
    return asked.returncode == 0


def _has_bridge() -> bool:
    return Path("/sys/class/net", _BRIDGE).exists()


def _groups() -> set[Path]:
    root = Path("/sys/fs/cgroup")
    return {path for path in (*root.glob("docker"), *root.glob("*/docker")) if path.is_dir()}


def _clean(work: Path, *, had_bridge: bool, groups: set[Path]) -> None:
    """Take away what an engine leaves behind when it is stopped."""
    if _has_bridge() and not had_bridge:
        run("ip", "link", "delete", _BRIDGE)
    for group in _groups() - groups:
        for folder, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):  # it is in use: someone else's by now
                Path(folder).rmdir()
    shutil.rmtree(work / "exec", ignore_errors=True)
