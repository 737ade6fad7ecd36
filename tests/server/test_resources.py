import os
from pathlib import Path

import pytest

from server.resources import cpu_count, memory_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1", 1),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5G", 3 * 2**29),
        ("512MB", 2**29),
        ("2k", 2048),
        ("7B", 7),
    ],
)
def test_parse_size(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.GiB", "1e9", "4 XB", "٣"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/pod/one\n"}
V1 = {"proc/self/cgroup": "4:memory:/pod/one\n3:cpu,cpuacct:/pod/one\n"}


def test_k06_quota_of_a_v2_group_and_of_those_around_it(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        V2
        | {
            "sys/fs/cgroup/pod/one/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "100000 100000\n",
        },
    )
    assert cpu_count(root) == 1


def test_k06_quota_as_seen_inside_a_container(tmp_path: Path) -> None:
    """There the path names the host's tree, and only the mount itself exists."""
    root = _write(tmp_path, V2 | {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert cpu_count(root) == 1


def test_k06_quota_of_a_v1_group(tmp_path: Path) -> None:
    cpu = "sys/fs/cgroup/cpu/pod/one/"
    quota = {cpu + "cpu.cfs_quota_us": "100000\n", cpu + "cpu.cfs_period_us": "100000\n"}
    assert cpu_count(_write(tmp_path, V1 | quota)) == 1


def test_no_quota_leaves_the_affinity(tmp_path: Path) -> None:
    cpu = "sys/fs/cgroup/cpu/pod/one/"
    quota = {cpu + "cpu.cfs_quota_us": "-1\n", cpu + "cpu.cfs_period_us": "100000\n"}
    cores = len(os.sched_getaffinity(0))
    assert cpu_count(_write(tmp_path / "v1", V1 | quota)) == cores
    assert cpu_count(tmp_path / "nothing") == cores


def test_memory_limit(tmp_path: Path) -> None:
    v2 = _write(tmp_path / "2", V2 | {"sys/fs/cgroup/pod/one/memory.max": "1048576\n"})
    limit = "sys/fs/cgroup/memory/pod/one/memory.limit_in_bytes"
    v1 = _write(tmp_path / "1", V1 | {limit: "2097152\n"})
    unlimited = _write(tmp_path / "0", V2 | {"sys/fs/cgroup/memory.max": "max\n"})
    assert memory_bytes(v2) == 2**20
    assert memory_bytes(v1) == 2**21
    assert memory_bytes(unlimited) > 2**21
