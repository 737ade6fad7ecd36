"""The command line, derived from classes: `serve` is the settings class itself. The main thread."""

import sys
from importlib.metadata import version
from typing import NoReturn

import httpx
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSubCommand,
    SettingsConfigDict,
    get_subcommand,
)

from server.settings import Settings, explain

BAD_USAGE = 2
NOT_READY = 1
_PROBE_SECONDS = 5.0


class Health(BaseModel):
    """Ask a server whether it would take a request now. Exits 0 if so, else 1, whatever it is."""

    url: str | None = Field(
        default=None, description="the server; default: where `serve` would listen on this machine"
    )


class Demo(BaseModel):
    """Start a server, step "Hello world" through it, print what comes, stop it."""

    model: str = Field(default="random:gpt2", min_length=1, description="weights, as for serve")


class Stepscope(BaseSettings):
    """A GPT-2 incremental-decoding server that one can see inside."""

    model_config = SettingsConfigDict(
        env_prefix="STEPSCOPE_CLI_",  # or a variable named SERVE would be read as a command
        cli_prog_name="stepscope",
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_hide_none_type=True,
        nested_model_default_partial_update=False,
    )

    version: bool = Field(default=False, description="say which version this is, and exit")
    serve: CliSubCommand[Settings]
    health: CliSubCommand[Health]
    demo: CliSubCommand[Demo]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command; the exit code says how it went."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    bad_usage = NOT_READY if arguments[:1] == ["health"] else BAD_USAGE
    try:
        return _run(CliApp.run(Stepscope, cli_args=arguments))
    except ValidationError as error:
        print(explain(error), file=sys.stderr)
        return bad_usage
    except SystemExit as left:  # argparse has said why, or leaves a line
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return bad_usage if left.code else 0


def _run(asked: Stepscope) -> int:
    if asked.version:
        print(version("stepscope"))
        return 0
    match get_subcommand(asked):
        case Settings() as settings:
            from server.serve import serve  # imports torch, which the other commands do not need

            return serve(settings)
        case Health(url=url):
            return probe(url or Settings().url)
        case Demo(model=model):
            from server.demo import demo

            return demo(model)
    raise AssertionError(asked)


def probe(url: str) -> int:
    """0 if the server at `url` is ready, 1 if it is not or does not answer; says why."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/ready", timeout=_PROBE_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return NOT_READY
    print(f"{url}: {answer.text}")
    return 0 if answer.is_success else NOT_READY
