"""The command `python -m benchmarks.results`: make missing runs, and write docs/results.md.

python -m benchmarks.results --only methods
python -m benchmarks.results --only real --language-model DIR --classifier DIR
python -m benchmarks.results --page
"""

import sys
from collections.abc import Sequence
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
from benchmarks.results.records import is_done, read_records, run_key, write_record
from benchmarks.results.reel import run_learned, run_loophole, run_method
from benchmarks.results.settings import Row, all_rows
from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError

RUNS = {
    "methods": run_method,
    "loophole": run_loophole,
    "learned": run_learned,
    "algorithms": run_algorithm,
}
Job = tuple[Row, int]


@dataclass(frozen=True)
class Options:
    """Options of the page of results.

    Args:
        only: parts of the page (methods, loophole, learned, algorithms, real) or names of rows.
        seeds: of each row's seeds, only these.
        language_model: directory of a real language model; without it, the part real is kept.
        classifier: directory of the classifier that rewards the real language model.
        threads: threads of torch.
        records: directory of the records, a .jsonl file per part.
        docs: the page.
        page: make no run; write the page from the stored records.
    """

    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    language_model: Path | None = None
    classifier: Path | None = None
    threads: int = 1
    records: Path = RESULTS
    docs: Path = Path("docs/results.md")
    page: FlagCreatePairsOff[bool] = False


def missing_jobs(options: Options) -> list[Job]:
    """List the requested runs without a record: all rows from one seed, then from the next."""
    rows = all_rows()
    known = {row.part for row in rows} | {row.name for row in rows}
    for name in options.only:
        if name not in known:
            raise ConfigError(f"Unknown only={name!r}. Choose from: {', '.join(sorted(known))}.")
    has_models = options.language_model is not None and options.classifier is not None
    if "real" in options.only and not has_models:
        raise ConfigError("only='real' requires two models. Set --language-model and --classifier.")
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


def carry_out(row: Row, seed: int, options: Options) -> dict[str, Any]:
    """Make one run; returns its record."""
    if row.part == "real":
        models = options.language_model, options.classifier
        found = run_real(row, seed, models, options.threads)
        found["models"] = [path.name for path in models]
    else:
        found = RUNS[row.part](row, seed)
    return {**run_key(row, seed), "machine": describe(torch.device("cpu")), **found}


def results(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Make the runs of docs/results.md that have no record, then write the page."""
    console = Console()
    torch.set_num_threads(options.threads)
    disable_progress_bar()
    jobs = [] if options.page else missing_jobs(options)
    for number, (row, seed) in enumerate(jobs, 1):
        labels = ", ".join(row.labels)
        print_line(f"{number} of {len(jobs)}: {row.part}, {labels}, seed {seed}", console)
        write_record(options.records, carry_out(row, seed, options))
    write_whole(options.docs, page(read_records(options.records)))
    print_line(f"written to {options.docs}", console)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(results, "benchmarks.results", arguments)


if __name__ == "__main__":
    sys.exit(main())
