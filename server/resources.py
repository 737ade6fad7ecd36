"""What this process may use: cores and memory of the container, not of its host.

Pure Python, any thread. A quota (`docker run --cpus 2`) is invisible to `os.cpu_count`, and threads
counted from the host made others up to 45 times slower. Linux control groups, version 2 and 1; the
limits of every enclosing group hold too. https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes in "4GiB", "512 MiB", "1.5G" or "1048576" (K, M, G and T are powers of 1024).

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size in bytes, such as 4GiB or 1048576")
    number, unit = match.groups()
    return int(float(number) * _UNITS[unit.upper()])


def cpu_count(root: Path = Path("/")) -> int:
    """Whole cores this process may use: its affinity, capped by the group's quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for group in _groups(root, "cpu"):
        cores = min(cores, _quota_v2(group / "cpu.max"), _quota_v1(group))
    return max(1, math.ceil(cores))


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes this process may use: the machine's memory, capped by the group's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            total = min(total, int(_number(group / name, otherwise=total)))
    return total


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's group and of all that enclose it, as mounted."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount if not controllers else mount / controller
        group = base / path.lstrip("/")
        yield group
        # Inside a container the path may name the host's tree; then only the mount itself exists.
        yield from (parent for parent in group.parents if parent.is_relative_to(base))


def _quota_v2(file: Path) -> float:
    quota, _, period = _read(file).partition(" ")
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else math.inf


def _quota_v1(group: Path) -> float:
    quota = _number(group / "cpu.cfs_quota_us", otherwise=-1)
    period = _number(group / "cpu.cfs_period_us", otherwise=0)
    return quota / period if quota > 0 and period > 0 else math.inf


def _number(file: Path, *, otherwise: float) -> float:
    text = _read(file).strip()
    return int(text) if text.isdigit() else otherwise


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
