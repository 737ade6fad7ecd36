"""Facts about the machine that the numbers were taken on. Linux tells most of them."""

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bench.cases import EngineSpec

PACKAGES = ("torch", "numpy", "transformers", "ctranslate2", "llama-cpp-python")
MODULES = {"ctranslate2": ("ctranslate2",), "llamacpp": ("llama_cpp", "gguf")}
FLAGS = r"\b(avx2|avx512[a-z_0-9]*|avx_vnni|amx_[a-z0-9]+|asimd|sve|bf16|i8mm)\b"


def available_threads() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_packages_of(spec: EngineSpec) -> bool:
    """Whether what `spec` needs beside transformers is installed."""
    return all(find_spec(name) for name in MODULES.get(spec.library, ()))


def facts(n_threads: int, torch_config: str) -> dict[str, str]:
    """Name and value, in the order to print."""
    cpu = _read("/proc/cpuinfo")
    return {
        "CPU": _first(r"model name\s*: (.*)", cpu) or platform.processor() or platform.machine(),
        "CPU family, model": " ".join(
            re.findall(r"^(?:cpu family|model)\s*: (\d+)", cpu, re.M)[:2]
        ),
        "CPU flags": " ".join(sorted(set(re.findall(FLAGS, cpu)))),
        "cores, threads used": f"{available_threads()}, {n_threads}",
        "memory": _first(r"MemTotal:\s*(.*)", _read("/proc/meminfo")),
        "system": platform.platform(),
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "torch": " ".join(torch_config.split()),
        "run_delay": "known"
        if Path("/proc/self/schedstat").exists()
        else "unknown: all steps count",
    }


def torch_config() -> str:
    """What torch was built with. Imports torch."""
    import torch

    return torch.__config__.show().partition("Build settings")[0].strip(" -\n")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed: not measured"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""
