"""The command `python -m benchmarks.results`: make missing runs, and write docs/results.md.

python -m benchmarks.results --only methods
python -m benchmarks.results --only real --language-model DIR --classifier DIR
python -m benchmarks.results --page
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar
from tyro.conf import FlagCreatePairsOff

from benchmarks.machine import describe
from benchmarks.records import RESULTS, write_whole
from benchmarks.results.algorithms import run_algorithm
from benchmarks.results.page import PICTURE, picture
from benchmarks.results.page import page as results_page
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


def missing_jobs(
    only: Sequence[str], seeds: Sequence[int], has_models: bool, records: Path
) -> list[Job]:
    """List the requested runs without a record: all rows from one seed, then from the next."""
    rows = all_rows()
    known = {row.part for row in rows} | {row.name for row in rows}
    for name in only:
        if name not in known:
            raise ConfigError(f"Unknown only={name!r}. Choose from: {', '.join(sorted(known))}.")
    if "real" in only and not has_models:
        raise ConfigError("only='real' requires two models. Set --language-model and --classifier.")
    missing = [
        (row, seed)
        for row in rows
        if not only or row.part in only or row.name in only
        if row.part != "real" or has_models
        for seed in row.seeds
        if not seeds or seed in seeds
        if not is_done(records, row, seed)
    ]
    return sorted(missing, key=lambda job: job[1])


def results(
    only: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (),
    language_model: Path | None = None,
    classifier: Path | None = None,
    threads: int = 1,
    records: Path = RESULTS,
    docs: Path = Path("docs/results.md"),
    page: FlagCreatePairsOff[bool] = False,
) -> int:
    """Make the runs of docs/results.md that have no record, then write the page.

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
    torch.set_num_threads(threads)
    disable_progress_bar()
    has_models = language_model is not None and classifier is not None
    jobs = [] if page else missing_jobs(only, seeds, has_models, records)
    for number, (row, seed) in enumerate(jobs, 1):
        print_line(f"{number} of {len(jobs)}: {row.part}, {', '.join(row.labels)}, seed {seed}")
        key = {**run_key(row, seed), "machine": describe(torch.device("cpu"))}
        if row.part == "real":
            found = run_real(row, seed, (language_model, classifier), threads)
            found["models"] = [language_model.name, classifier.name]
        else:
            found = RUNS[row.part](row, seed)
        write_record(records, key | found)
    stored = read_records(records)
    write_whole(docs.with_name(PICTURE), picture(stored))
    write_whole(docs, results_page(stored))
    print_line(f"written to {docs}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(results, "benchmarks.results", arguments)


if __name__ == "__main__":
    sys.exit(main())
