"""Wall-clock time of the command line, in fresh processes, from start to exit."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from rlhf_lab.errors import RunError

TRAIN = ("train",)
HELP, FIRST_SAMPLES, MAIN_JOB = "--help", "train, to its first samples", "train, to its end"


def command_times(threads: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of `--help`, and of the main job to its first samples and to its end.

    Args:
        threads: of each process.
        repeats: how often each is called; all calls count.

    Raises:
        RunError: a command failed.
    """
    found: dict[str, list[float]] = {HELP: [], FIRST_SAMPLES: [], MAIN_JOB: []}
    for _ in range(repeats):
        _, whole = _seconds(["--help"], threads)
        found[HELP].append(whole)
        with tempfile.TemporaryDirectory() as directory:
            out = str(Path(directory, "run"))
            first, whole = _seconds([*TRAIN, "--out", out], threads, "samples of phase 0")
        found[FIRST_SAMPLES].append(first)
        found[MAIN_JOB].append(whole)
    return found


def _seconds(arguments: Sequence[str], threads: int, mark: str = "") -> tuple[float, float]:
    """Seconds until a line with `mark` was printed, and until the process had ended."""
    began = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "rlhf_lab", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
    ) as process:
        lines = [(perf_counter() - began, line) for line in process.stdout]
    whole = perf_counter() - began
    if process.returncode:
        last = next(
            (line.strip() for _, line in reversed(lines) if line.strip()), "it said nothing"
        )
        raise RunError(f"the command {arguments[0]} failed: {last}")
    return next((seconds for seconds, line in lines if mark in line), whole), whole
