"""The command `python -m benchmarks.results`: make missing runs, and write docs/results.md.

python -m benchmarks.results
python -m benchmarks.results --only methods
python -m benchmarks.results --only real --language-model DIR --classifier DIR
python -m benchmarks.results --page
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from transformers.utils.logging import disable_progress_bar
from tyro.conf import FlagCreatePairsOff

from benchmarks.machine import describe
from benchmarks.records import RESULTS, write_whole
from benchmarks.results.algorithms import run_algorithm
from benchmarks.results.page import page
from benchmarks.results.real import run_real
from benchmarks.results.records import asked, is_done, read_records, write_record
from benchmarks.results.reel import run_learned, run_loophole, run_method
from benchmarks.results.settings import Row, all_rows
from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError

PAGE = Path("docs/results.md")
ON_REEL = {
    "methods": run_method,
    "unheld": run_method,
    "loophole": run_loophole,
    "learned": run_learned,
    "algorithms": run_algorithm,
}


@dataclass(frozen=True)
class Options:
    """What the page of results is made of."""

    only: tuple[str, ...] = ()
    """Parts of the page (methods, unheld, loophole, learned, algorithms, real) or names of rows."""
    seeds: tuple[int, ...] = ()
    """Of each row's seeds, only these."""
    language_model: Path | None = None
    """The directory of a real language model; without it, the part `real` is left as it is."""
    classifier: Path | None = None
    """The directory of the classifier that pays the real language model."""
    threads: int = 1
    """Threads of torch."""
    records: Path = RESULTS
    """The directory of the records, a .jsonl file per part."""
    docs: Path = PAGE
    """The page to write."""
    page: FlagCreatePairsOff[bool] = False
    """Make no run: write the page from the records that are there."""


Job = tuple[Row, int]


def jobs(options: Options) -> list[Job]:
    """The runs that are asked for and not there yet: all rows from one seed, then from the next.

    Raises:
        ConfigError: a name that no part and no row has, or no directories for a real model.
    """
    rows = all_rows()
    known = {row.part for row in rows} | {row.name for row in rows}
    for name in options.only:
        if name not in known:
            raise ConfigError(f"only={name!r} is unknown; choose of {', '.join(sorted(known))}.")
    has_models = has_real_models(options)
    missing = [
        (row, seed)
        for row in rows
        if not options.only or row.part in options.only or row.name in options.only
        if row.part != "real" or has_models
        for seed in row.seeds
        if not options.seeds or seed in options.seeds
        if not is_done(options.records, row, seed)
    ]
    return sorted(missing, key=lambda job: job[1])


def has_real_models(options: Options) -> bool:
    """Whether real models can take part.

    Raises:
        ConfigError: they are asked for, but not both directories are given and there.
    """
    given = {"language_model": options.language_model, "classifier": options.classifier}
    if all(path is None for path in given.values()) and "real" not in options.only:
        return False
    for name, path in given.items():
        if path is None or not path.is_dir():
            raise ConfigError(
                f"{name}={str(path)!r} is no directory; a real run needs "
                "--language-model DIR --classifier DIR."
            )
    return True


def carry_out(job: Job, options: Options) -> dict[str, Any]:
    """One run, as a record."""
    row, seed = job
    if row.part == "real":
        models = (options.language_model, options.classifier)
        figures = run_real(row, seed, models, options.threads)
        figures["models"] = [path.name for path in models]
    else:
        figures = ON_REEL[row.part](row, seed)
    return {**asked(row, seed), "machine": describe(torch.device("cpu")), **figures}


def make(options: Options, run: Callable[..., dict[str, Any]] = carry_out) -> int:
    """Make what is missing, a record at a time, then write the page; returns the exit status."""
    console = Console()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    work = [] if options.page else jobs(options)
    for number, (row, seed) in enumerate(work, 1):
        labels = ", ".join(row.labels)
        print_line(f"{number} of {len(work)}: {row.part}, {labels}, seed {seed}", console)
        write_record(options.records, run((row, seed), options))
    write_whole(options.docs, page(read_records(options.records)))
    console.print(f"written to {options.docs}", highlight=False, soft_wrap=True)
    return 0


def results(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Make the runs of docs/results.md that are not there yet, then write the page."""
    try:
        return make(options)
    except KeyboardInterrupt:
        print("benchmarks.results: stopped; the same command goes on.", file=sys.stderr)
        return 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(results, "benchmarks.results", arguments)


if __name__ == "__main__":
    sys.exit(main())
