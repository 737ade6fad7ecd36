"""`python -m bench`: measure, and write the page. `--help` says how to narrow it.

One case quickly:  python -m bench --cases decode-16x900 --engines 'stepscope-*,ctranslate2-*'
"""

import argparse
import os
import tempfile
from contextlib import closing
from pathlib import Path

from bench import machine
from bench.cases import CASES, ENGINES, EngineSpec, is_named, matching
from bench.driver import measure
from bench.engines.base import token_ids
from bench.report import Page
from bench.worker import Crew, Worker, in_own_process

RESULTS = Path(__file__).with_name("RESULTS.md")
EMBEDDING, SHARING = "embedding", "sharing"  # measured by the modules of these names
OURS = ("stepscope-*",)


def main() -> None:
    """Run what the command line asks for; the page is written anew after every part."""
    options = _options()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # inherited by the engines
    page = Page(
        [spec for spec in matching(ENGINES, options.engines) if machine.has_packages_of(spec)],
        machine.facts(options.threads, in_own_process("bench.machine", "torch_config")),
    )
    with tempfile.TemporaryDirectory() as temporary:
        _measure(page, options.weights or Path(temporary), options)
    _say(f"wrote {options.out}")


def _measure(page: Page, directory: Path, options: argparse.Namespace) -> None:
    _say(f"weights in {directory}")
    in_own_process("bench.weights", "prepare", directory, page.specs)
    if is_named(EMBEDDING, options.cases):
        page.tables["Embedding step"] = in_own_process("bench.embedding", "main")
    if is_named(SHARING, options.cases):
        _measure_sharing(page, directory, options.threads)
    options.out.write_text(page.render())

    def start(spec: EngineSpec) -> Worker:
        _say(f"loading {spec.name}")
        worker = Worker(spec, directory, options.threads)
        page.next_ids[spec.name] = worker.next_id(token_ids(128))
        return worker

    with closing(Crew(page.specs, start)) as crew:
        for case in matching(CASES, options.cases):
            workers = crew.called_for(case)
            page.results.append(measure(case, workers, n_rounds=options.rounds, say=_say))
            options.out.write_text(page.render())


def _measure_sharing(page: Page, directory: Path, n_threads: int) -> None:
    for spec in matching(page.specs, OURS):
        _say(f"sharing in {spec.name}")
        of_mode = in_own_process("bench.sharing", "main", spec, directory, n_threads)
        for title, rows in of_mode.items():
            page.tables.setdefault(title, []).extend(rows)


def _options() -> argparse.Namespace:
    names = ", ".join([EMBEDDING, SHARING, *(case.name for case in CASES)])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    add = parser.add_argument
    add("--cases", type=_patterns, default=["*"], help=f"comma list of patterns, of: {names}")
    names = ", ".join(spec.name for spec in ENGINES)
    add("--engines", type=_patterns, default=["*"], help=f"comma list of patterns, of: {names}")
    add("--rounds", type=int, default=3, help="rounds per case (default %(default)s)")
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
