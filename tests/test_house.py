"""The house rules that are facts about files: who imports whom, what is light, what is declared."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

MAY_IMPORT = {
    "embedding": set[str](),
    "cache": set[str](),
    "sessions": set[str](),
    "model": {"embedding", "cache", "sessions"},
    "engine": {"embedding", "cache", "sessions", "model"},
    "server": {"embedding", "cache", "sessions", "model", "engine"},
}
ONLY_IN_SERVER = {"fastapi", "starlette", "uvicorn", "httpx", "pydantic", "pydantic_settings"}
NOT_IN_THE_PRODUCT = {"bench", "tests", "transformers", "transformer_lens", "ctranslate2"}
COMES_WITH = {"starlette": "fastapi", "pydantic_core": "pydantic"}

LIGHT = [
    "embedding.errors",
    "embedding.ids",
    "embedding.positions",
    "embedding.text",
    "embedding.tokenizer",
    "embedding.vocabulary",
    "cache.accounting",
    "cache.errors",
    "cache.prefixes",
    "model.batch",
    "model.config",
    "model.errors",
    "model.names",
    "model.points",
    "model.sampling",
    "sessions.edits",
    "sessions.errors",
    "sessions.log",
    "sessions.registry",
    "sessions.session",
    "engine.branches",
    "engine.commands",
    "engine.edits",
    "engine.errors",
    "engine.events",
    "engine.generation",
    "engine.limits",
    "engine.recordings",
    "engine.scheduler",
    "engine.sight",
    "engine.studies.bulk",
    "engine.studies.compare",
    "engine.studies.sweep",
    "engine.studies.verify",
    "engine.text",
    "server.cli",
    "server.fields",
    "server.interventions.bodies",
    "server.schemas",
    "server.settings",
    "server.studies.bodies",
]


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Top-level names that the file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module.partition(".")[0]


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def names(requirements: list[str]) -> set[str]:
    return {requirement_name(requirement) for requirement in requirements}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package: str) -> None:
    assert modules(package)
    for path in modules(package):
        ours = set(imported(path)) & MAY_IMPORT.keys()
        assert ours <= MAY_IMPORT[package] | {package}, path


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_http_stays_in_the_server_and_the_peers_outside(package: str) -> None:
    forbidden = NOT_IN_THE_PRODUCT | (ONLY_IN_SERVER if package != "server" else set())
    for path in modules(package):
        assert not forbidden & set(imported(path)), path


def test_light_modules_load_without_torch() -> None:
    program = "import importlib, sys\nsys.modules['torch'] = None\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in LIGHT
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_package_files_are_empty() -> None:
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("__init__.py"):
            assert path.read_text() == "", path


def test_every_package_is_listed_and_typed() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])
    assert all((ROOT / package / "py.typed").exists() for package in MAY_IMPORT)


def test_no_init_file_makes_a_package_of_the_tests() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_third_party_imports_are_declared() -> None:
    declared = names(PYPROJECT["project"]["dependencies"])
    distributions = packages_distributions()
    for package in MAY_IMPORT:
        for path in modules(package):
            for name in set(imported(path)) - sys.stdlib_module_names - MAY_IMPORT.keys():
                providers = names(distributions.get(name, [name]))
                assert declared & (providers | {COMES_WITH.get(name, "")}), f"{path}: {name}"


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in lines if "==" in line])
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    assert names(project["dependencies"]) <= pinned
    assert all(names(extra) <= pinned for extra in extras)


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_name_files_that_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#]+)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_name_targets_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"help", "serve", "demo", "test", "check", "bench", "soak"} <= targets
    asked = set(re.findall(r"(?:^|`)make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert asked <= targets
