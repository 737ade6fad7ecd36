"""Facts that the image's files repeat, held against where they come from."""

import re
import tomllib
from pathlib import Path

from docker.test.image import entering

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE = (ROOT / "docker/compose.yaml").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_enters_the_build() -> None:
    packages = {name.partition(".")[0] for name in PYPROJECT["tool"]["setuptools"]["packages"]}
    files = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert set(entering()) == packages | files


def test_the_label_has_the_version() -> None:
    assert f"ARG VERSION={PYPROJECT['project']['version']}\n" in DOCKERFILE


def test_compose_publishes_on_loopback_only() -> None:
    published = re.findall(r"ports: \[(.*)\]", COMPOSE)
    assert published
    assert all(place.startswith('"127.0.0.1:') for place in published)
    assert COMPOSE.count("ports:") == len(published)


def test_the_health_check_is_the_same_in_both() -> None:
    assert 'CMD ["stepscope", "health"]' in DOCKERFILE
    assert 'test: ["CMD", "stepscope", "health"]' in COMPOSE
    for name in ("interval", "timeout", "start-period", "retries"):
        found = re.search(rf"--{name}=(\S+)", DOCKERFILE)
        assert found
        assert f"{name.replace('-', '_')}: {found[1]}\n" in COMPOSE
