"""The image: built, built again after a change, and looked into."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from docker.test.engine import CLIENT
from docker.test.shell import check, run, say

ROOT = Path(__file__).parents[2]
NAME = "stepscope-test"
SBOM = "/usr/share/doc/stepscope/sbom.cdx.json"


class Images:
    """Builds of one source tree on one engine."""

    def __init__(self, env: dict[str, str], *, base: str, arguments: list[str]) -> None:
        self._env = {**env, "DOCKER_BUILDKIT": "1"}
        self._arguments = [f"--build-arg=BASE_IMAGE={base}", *arguments]

    def build(self, tree: Path, name: str) -> None:
        """Build `tree` as README says, with this machine's base and packages."""
        file = ("-f", tree / "docker/Dockerfile", "-t", name)
        # The test's engine has no way out of its own; see docker/test/engine.py.
        run(CLIENT, "build", "--network=host", *self._arguments, *file, tree, env=self._env)

    def build_with_weights(self, weights: Path, name: str) -> None:
        """The image of docs/deploy.md that has its weights inside."""
        text = f"FROM {NAME}\nCOPY . /weights\nENV STEPSCOPE_MODEL=/weights\n"
        run(CLIENT, "build", "-t", name, "-f", "-", weights, env=self._env, stdin=text)

    def inspect(self, name: str) -> dict[str, Any]:
        """What the engine knows of an image."""
        facts: dict[str, Any] = json.loads(run(CLIENT, "inspect", name, env=self._env))[0]
        return facts

    def layers(self, name: str) -> list[str]:
        """Digests, the base's first."""
        digests: list[str] = self.inspect(name)["RootFS"]["Layers"]
        return digests

    def sbom(self, name: str) -> dict[str, str]:
        """Names and versions of what the image says is inside."""
        command = ("run", "--rm", "--network=none", "--entrypoint=cat", name, SBOM)
        parts = json.loads(run(CLIENT, *command, env=self._env))["components"]
        return {_normal(part["name"]): part["version"] for part in parts}

    def tell_sizes(self, name: str) -> None:
        """Say what each layer takes."""
        say(f"size {self.inspect(name)['Size'] / 1e6:,.0f} MB, of these the layers")
        columns = "{{.Size}}\t{{.CreatedBy}}"
        history = run(CLIENT, "history", "--no-trunc", f"--format={columns}", name, env=self._env)
        for line in history.splitlines():
            if not line.startswith("0B"):
                say(f"    {' '.join(line.split())[:100]}")


def check_second_build_keeps_dependencies(images: Images, work: Path, *, n_base: int) -> None:
    """After a change of the source only the product's layer and what follows it are new."""
    tree = work / "changed"
    tree.mkdir()
    for name in [*entering(), ".dockerignore", "docker"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    with (tree / "server/__main__.py").open("a") as source:
        source.write("# changed\n")
    images.build(tree, f"{NAME}:changed")
    first, second = images.layers(NAME), images.layers(f"{NAME}:changed")
    kept = n_base + 1
    check("the dependencies' layer is reused", holds=first[:kept] == second[:kept], seen=second)
    check("the product's layer is new", holds=first[kept] != second[kept], seen=second)


def check_image_facts(images: Images) -> None:
    """Labels, user, health check; each package inside is there in its pinned version."""
    config = images.inspect(NAME)["Config"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    told = config["Labels"]["org.opencontainers.image.version"]
    check("the label has the version", holds=told == version, seen=told)
    check("a numeric user, not root", holds=config["User"] == "10001:0", seen=config["User"])
    test = config["Healthcheck"]["Test"]
    check("health by the product", holds=test == ["CMD", "stepscope", "health"], seen=test)
    inside, pinned = images.sbom(NAME), _pins()
    check("the list has torch", holds="torch" in inside, seen=sorted(inside))
    # A local version (2.13.0+cpu) names the build, not another version.
    unpinned = {k: v for k, v in inside.items() if pinned.get(k) != v.partition("+")[0]}
    unpinned.pop("stepscope", None)
    check("everything inside is pinned", holds=not unpinned, seen=unpinned)


def entering() -> list[str]:
    """What .dockerignore lets into a build."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {_normal(name): version for name, version in pairs}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
