"""What must hold of a running container; the letters are those of the project's list of cases."""

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from docker.test.container import Container, container
from docker.test.hello import hello
from docker.test.image import NAME, ROOT, Images
from docker.test.shell import check, run, until

GIB = 2**30
_PUBLISHED = ("--publish=127.0.0.1::8000",)
_TINY = ("serve", "--model", "random:tiny")
_STOP_SECONDS = 10.0
_SOMEONE = 4242  # owns the weights; not the container's user
_KV_SHARE = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a check works with."""

    env: dict[str, str]  # of the engine's clients
    images: Images
    weights: Path  # a small model in Hugging Face's layout
    compose: Path  # the program


def locked_down(setting: Setting) -> None:
    """K01 K04: no network, nothing to write to, no rights, an unknown user; a real append."""
    flags = ("--read-only", "--cap-drop=ALL", "--user=12345:0", "--network=none")
    with container(setting.env, NAME, *flags) as server:
        server.wait_healthy()
        server.hello_inside()
        ready = server.log("ready")
        check(
            "says that the log is in memory", holds=ready.get("session_log") == "memory", seen=ready
        )


def limits(setting: Setting) -> None:
    """K06: threads from the quota or the set of cores, K/V budget from the memory limit."""
    for cores in ("--cpus=1", "--cpuset-cpus=0"):
        flags = (*_PUBLISHED, cores, "--memory=1g")
        with container(setting.env, NAME, *flags, command=_TINY) as server:
            server.wait_healthy()
            threads, kv = server.log("ready")["threads"], server.kv_bytes()
            check(f"one thread with {cores}", holds=threads == 1, seen=threads)
            share = kv / GIB
            check("K/V is 30 % of 1 GiB", holds=0.29 < share <= _KV_SHARE, seen=share)
            hello(server.url)


def others_weights(setting: Setting) -> None:
    """Weights mounted read-only from another user's folder; a client outside."""
    weights = setting.weights
    for path in (weights, *weights.iterdir()):
        os.chown(path, _SOMEONE, _SOMEONE)
        path.chmod(0o755 if path.is_dir() else 0o644)  # `save_pretrained` lets only its user read
    flags = (*_PUBLISHED, f"--volume={weights}:/weights:ro")
    with container(setting.env, NAME, *flags, command=("serve", "--model", "/weights")) as server:
        server.wait_healthy()
        check("the mounted weights", holds=_is_ours(server, weights), seen=server.log("ready"))


def weights_inside(setting: Setting) -> None:
    """An image with weights needs neither a network nor a mount."""
    setting.images.build_with_weights(setting.weights, f"{NAME}:weights")
    with container(setting.env, f"{NAME}:weights", "--network=none", "--read-only") as server:
        server.wait_healthy()
        server.hello_inside()
        check("n_params", holds=server.log("ready")["n_params"] > 0)


def _is_ours(server: Container, weights: Path) -> bool:
    n_embd = json.loads((weights / "config.json").read_text())["n_embd"]
    told = httpx.get(f"{server.url}/v1/capabilities").json()
    return bool(hello(server.url) == told["fingerprint"] and told["n_embd"] == n_embd)


def stopped_in_a_stream(setting: Setting) -> None:
    """K03: `docker stop` reaches the server, and an open stream gets its terminal record."""
    with container(setting.env, NAME, *_PUBLISHED) as server, httpx.Client(timeout=60) as client:
        server.wait_healthy()
        opened = client.post(f"{server.url}/v1/sessions", json={"token_ids": [50256]}).json()
        path = f"{server.url}/v1/sessions/{opened['id']}/generate"
        body = {"stream": True, "ignore_eos": True, "points": ["logits"]}
        with client.stream("POST", path, json=body) as answer, ThreadPoolExecutor() as threads:
            lines = answer.iter_lines()
            next(lines)
            stopping = threads.submit(server.stop)  # while the client reads on
            last = [line for line in lines if line][-1]
            seconds = stopping.result()
        told = json.loads(last.removeprefix("data: "))
        check("the terminal record", holds=told["error"]["code"] == "shutting_down", seen=told)
        check("it has the session", holds=told["session"]["past_length"] > 1, seen=told)
        _check_exit(server, seconds)


def stopped_while_starting(setting: Setting) -> None:
    """K03: process 1 hears SIGTERM at any time, also before it listens and while it loads."""
    with container(setting.env, NAME) as server:
        _check_exit(server, server.stop())
    with container(setting.env, NAME) as server:
        until("it loads", lambda: bool(server.log("loading")))
        _check_exit(server, server.stop())


def _check_exit(server: Container, seconds: float) -> None:
    code = server.state["ExitCode"]
    check("exit by SIGTERM, not killed", holds=code in (0, 143), seen=code)
    check("well before Docker kills", holds=seconds < _STOP_SECONDS, seen=seconds)


def composed(setting: Setting) -> None:
    """`docker-compose up --wait`, a client outside, and down."""
    port = _free_port()
    settings = {
        **setting.env,
        "IMAGE": NAME,
        "PORT": str(port),
        "CPUS": "1",
        "MODEL": "random:tiny",
    }
    command = (setting.compose, "-f", ROOT / "docker/compose.yaml", "-p", NAME)
    try:
        run(*command, "up", "--detach", "--wait", "--no-build", env=settings)
        hello(f"http://127.0.0.1:{port}")
        run(*command, "exec", "-T", "stepscope", "touch", "/data/x", "/data/hub/x", env=settings)
        listed = json.loads(run(*command, "ps", "--format=json", env=settings))
        places = {publisher["URL"] for publisher in listed["Publishers"]}
        check("published on loopback only", holds=places == {"127.0.0.1"}, seen=places)
    finally:
        run(*command, "down", "--volumes", env=settings)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


ALL: tuple[Callable[[Setting], None], ...] = (
    locked_down,
    limits,
    others_weights,
    weights_inside,
    stopped_in_a_stream,
    stopped_while_starting,
    composed,
)
