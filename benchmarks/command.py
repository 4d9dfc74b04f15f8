"""The benchmark commands: measure, print, store; each function returns the exit status."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from benchmarks import machine
from benchmarks import measure as measuring
from benchmarks.command_times import command_times
from benchmarks.contestants import OTHERS
from benchmarks.options import Bench
from benchmarks.page import page
from benchmarks.records import Record, put_record, read_records, write_whole
from benchmarks.sheets import sheets
from benchmarks.work import Work, write_model
from rlhf_lab.console import print_line
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import pick_device

KEYS = frozenset({"machine", "work", "command", "contestants"})
"""What each stored result has at least."""


def measure(options: Bench) -> int:
    """Time what the options ask for, show it, and store it if asked to, one kind at a time."""
    work = _work(options)
    console = Console()
    print_line(
        f"{work.shape}: batch {work.batch_size}, {work.gen_len} new tokens, {work.device}, "
        f"{work.threads} threads",
        console,
    )
    result = {"machine": machine.describe(torch.device(work.device)), "work": work.to_dict()}
    result |= {"command": command_line(options), "repeats": options.repeats}
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(work.size, model)
        for found in _measurements(options, work, model):
            result |= found
            if options.out is not None:
                put_record(options.out, result, partial(_is_same_measurement, result))
    for why in result["left_out"].values():
        print_line(why, console)
    for sheet in sheets(result):
        console.print(sheet.rich())
    if options.out is not None:
        print_line(f"written to {options.out}", console)
    return 0


def _work(options: Bench) -> Work:
    """The work that the options describe.

    Raises:
        ConfigError: an option out of range, or one that this version or machine cannot carry out.
    """
    if options.repeats < 1:
        raise ConfigError(f"repeats={options.repeats} must be 1 or greater.")
    for name in options.against:
        if name not in OTHERS:
            raise ConfigError(f"against={name!r} is unknown; choose of {', '.join(OTHERS)}.")
    return Work(
        shape=options.shape,
        batch_size=options.batch_size,
        gen_len=options.gen_len,
        device=str(pick_device(options.device)),
        precision=options.precision,
        threads=torch.get_num_threads() if options.threads is None else options.threads,
    )


def _measurements(options: Bench, work: Work, model: Path) -> Iterator[dict[str, Any]]:
    """Yield the requested measurements, one kind after another."""
    contestants, left_out = measuring.phases(
        options.contestants, work, options.repeats, model, options.peers
    )
    yield {"contestants": contestants, "left_out": left_out}
    if options.generation:
        yield {"generation": measuring.generation(work, options.repeats, model)}
    if options.commands:
        yield {"commands": command_times(work.threads, options.repeats)}
    if options.probes:
        yield {"probes": measuring.probes(work, model)}


def command_line(options: Bench) -> str:
    """The command that asks for these options, without its places on this disk."""
    words = ["python -m benchmarks"]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default or field.name in ("out", "peers", "write_docs", "docs"):
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if not isinstance(value, bool):
            words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return " ".join(words)


def _is_same_measurement(result: Record, other: Record) -> bool:
    """Whether two records are of one command on one machine."""

    def what(record: Record) -> list[Any]:
        machine = record.get("machine", {})
        return [record.get("command"), machine.get("processor"), machine.get("device")]

    return what(result) == what(other)


def write_page(options: Bench) -> int:
    """Write the page from stored results."""
    results, sources = [], []
    for path in options.write_docs:
        there = read_records(path, KEYS)
        results += there
        sources += [_link(path, options.docs)] * len(there)
    write_whole(options.docs, page(results, sources))
    print_line(f"written to {options.docs}")
    return 0


def _link(path: Path, docs: Path) -> str:
    """A Markdown link to a file, as seen from the page."""
    place = Path(os.path.relpath(path.resolve(), docs.resolve().parent))
    return f"[{path.name}]({place.as_posix()})"
