"""`python -m bench`: measure, and write the page. `--help` says how to narrow it.

One case quickly:  python -m bench --cases decode-16x900 --engines 'stepscope-*,ctranslate2-*'
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path

from bench import machine
from bench.cases import CASES, ENGINES, Case, EngineSpec, matching
from bench.driver import measure
from bench.engines.base import token_ids
from bench.report import Page
from bench.worker import Worker, in_own_process

RESULTS = Path(__file__).with_name("RESULTS.md")
EMBEDDING = "embedding"  # the case that bench.embedding measures


def main() -> None:
    """Run what the command line asks for; the page is written anew after every case."""
    options = _options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # inherited by the engines
    specs = matching(ENGINES, options.engines)
    page = Page(
        specs, machine.facts(options.threads, in_own_process("bench.machine", "torch_config"))
    )
    if any(fnmatchcase(EMBEDDING, pattern) for pattern in options.cases):
        page.embedding = in_own_process("bench.embedding", "main")
        options.out.write_text(page.render())
    if cases := matching(CASES, options.cases):
        _measure(cases, page, options)
    _say(f"wrote {options.out}")


def _measure(cases: list[Case], page: Page, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        workers = _workers(page.specs, options, stack)
        page.next_ids = {worker.spec.name: worker.next_id(token_ids(128)) for worker in workers}
        for case in cases:
            page.results.append(measure(case, workers, n_rounds=options.rounds, say=_say))
            options.out.write_text(page.render())


def _workers(
    specs: Sequence[EngineSpec], options: argparse.Namespace, stack: ExitStack
) -> list[Worker]:
    directory = options.weights or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    _say(f"weights in {directory}")
    in_own_process("bench.weights", "prepare", directory)
    workers = []
    for spec in specs:
        _say(f"loading {spec.name}")
        workers.append(Worker(spec, directory, options.threads))
        stack.callback(workers[-1].close)
    return workers


def _options() -> argparse.Namespace:
    names = ", ".join([EMBEDDING, *(case.name for case in CASES)])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("--cases", type=_patterns, default=["*"], help=f"comma list of patterns, of: {names}")
    names = ", ".join(spec.name for spec in ENGINES)
    add("--engines", type=_patterns, default=["*"], help=f"comma list of patterns, of: {names}")
    add("--rounds", type=int, default=5, help="rounds per case (default %(default)s)")
    add("--threads", type=int, default=machine.available_threads(), help="default: all cores")
    add("--weights", type=Path, help="folder that keeps the saved weights (default: a new one)")
    add("--out", type=Path, default=RESULTS, help="default: %(default)s")
    return parser.parse_args()


def _patterns(text: str) -> list[str]:
    return text.split(",")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
