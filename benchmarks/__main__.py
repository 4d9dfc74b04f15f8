"""The command `python -m benchmarks`: time one RLHF phase against other implementations."""

import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar
from tyro.conf import FlagCreatePairsOff

from benchmarks import machine
from benchmarks.contestants import OTHERS, time_phases
from benchmarks.ours import RUN_PHASES
from benchmarks.page import KEYS, page, tables
from benchmarks.records import read_records, store_record, write_whole
from benchmarks.work import ShapeName, Work, write_model
from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import pick_device

RUNS = ("ours-run", "ours-run-with-probes")
STORED = Path("benchmarks/results/speed.jsonl")


def bench(
    shape: ShapeName = "tiny",
    against: tuple[str, ...] = OTHERS,
    repeats: int = 3,
    device: str = "auto",
    precision: Literal["fp32", "bf16"] = "fp32",
    threads: int = 1,
    batch_size: int = 32,
    gen_len: int = 50,
    probes: FlagCreatePairsOff[bool] = False,
    out: Path | None = None,
    write_docs: FlagCreatePairsOff[bool] = False,
    docs: Path = Path("docs/performance.md"),
) -> int:
    """Time one RLHF phase on random weights, in turn with other implementations.

    Args:
        shape: the model; nano as the bundled one, tiny 4 layers, small and medium as GPT-2's.
        against: other implementations; TRL is left out unless `make bench-peers` has built it.
        repeats: turns that count, after one that does not; medians are reported.
        device: auto, cpu, cuda or mps.
        precision: of this package's trainer; the others always run in fp32.
        threads: threads of each implementation.
        batch_size: sequences per phase.
        gen_len: tokens generated per sequence.
        probes: also time a run of 20 phases with the default probes, next to one without.
        out: store the record in this .jsonl file, instead of an earlier one of the same command.
        write_docs: measure nothing; write the page `docs` from the stored records.
        docs: the page.
    """
    if write_docs:
        path = STORED if out is None else out
        link = Path(os.path.relpath(path.resolve(), docs.resolve().parent)).as_posix()
        write_whole(docs, page(read_records(path, KEYS), f"[{path.name}]({link})"))
        print_line(f"written to {docs}")
        return 0
    if repeats < 1:
        raise ConfigError(f"repeats must be 1 or greater, got {repeats}.")
    for name in against:
        if name not in OTHERS:
            raise ConfigError(f"Unknown against={name!r}. Choose one of: {', '.join(OTHERS)}.")
    device = str(pick_device(device))
    sizes = {"batch_size": batch_size, "gen_len": gen_len, "threads": threads}
    work = Work(shape, device=device, precision=precision, **sizes)
    words = [f"python -m benchmarks --shape {shape}"]
    words += [f"--against {' '.join(against)}"] * (against != OTHERS)
    words += [f"--repeats {repeats}", f"--device {device}", f"--threads {threads}"]
    words += [f"--precision {precision}"] * (precision != "fp32")
    words += [f"--batch-size {batch_size}"] * (batch_size != 32)
    words += [f"--gen-len {gen_len}"] * (gen_len != 50)
    words += ["--probes"] * probes
    record: dict[str, Any] = {
        "machine": machine.describe(torch.device(device)),
        "work": work.to_dict(),
        "command": " ".join(words),
        "repeats": repeats,
        "when": f"Measured on {date.today()}.",
    }
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(work.size, model)
        record["contestants"], record["left_out"] = time_phases(
            ("ours", *against), work, repeats, model
        )
        if probes:
            record["probes"], _ = time_phases(RUNS, work, RUN_PHASES + 1, model, warmups=0)
    for table in tables(record):
        Console().print(table.rich())
    for reason in record["left_out"].values():
        print_line(reason)
    if out is not None:
        keys = ("command", "machine")
        store_record(out, record, lambda old: all(old.get(key) == record[key] for key in keys))
        print_line(f"written to {out}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return run_program(bench, "benchmarks", arguments)


if __name__ == "__main__":
    sys.exit(main())
