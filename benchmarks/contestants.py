"""Contestants: implementations in separate processes, timed in turn (A B A B).

Turns make a slow spell of the machine affect every contestant.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.work import Work
from rlhf_lab.errors import RunError

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("RLHF_LAB_PEERS") or ROOT / ".cache" / "peers")
PEER_MODULES: MappingProxyType[str, str] = MappingProxyType(
    {"trl-0.11.4": "benchmarks.trl_step", "trl-1.12": "benchmarks.trl_experimental"}
)
OTHERS = ("ours-residual", "ours-pattern", "ours-all", "naive", *PEER_MODULES)
PATIENCE_SECONDS = 10

Timing = dict[str, Any]


class ContestantProcess:
    """A contestant in a separate process, which runs `worker.serve` with the code in `root`."""

    def __init__(
        self, name: str, command: Sequence[str], setup: dict[str, Any], root: Path = ROOT
    ) -> None:
        self.name = name
        threads = str(setup["threads"])
        environment = os.environ | {
            "PYTHONPATH": str(root),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.about = self._request(setup)

    def phase(self) -> Timing:
        """Run one phase; returns seconds, stages and peak memory."""
        return self._request({"do": "phase"})

    def _request(self, message: dict[str, Any]) -> Timing:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_SECONDS)
            self._errors.seek(0)
            lines = [line.strip() for line in self._errors if line.strip()] or ["no output."]
            self.close()
            raise RunError(f"the contestant {self.name} ended early: {lines[-1]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def start_command(name: str) -> list[str]:
    """Return the command that starts a contestant."""
    if name == "naive":
        return [sys.executable, "-m", "benchmarks.naive"]
    if name in PEER_MODULES:
        return [str(PEERS / name / "bin" / "python"), "-m", PEER_MODULES[name]]
    return [sys.executable, "-m", "benchmarks.ours", name]


def time_phases(
    names: Sequence[str], work: Work, repeats: int, model: Path, warmups: int = 1
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time contestants in turn; returns all timings, and the reason if one is left out."""
    left_out = {
        name: f"{name} is left out: not built. Build it with `make bench-peers`."
        for name in names
        if not Path(start_command(name)[0]).exists()
    }
    with contextlib.ExitStack() as stack:
        contestants = [
            stack.enter_context(
                contextlib.closing(ContestantProcess(name, start_command(name), work.setup(model)))
            )
            for name in dict.fromkeys(names)
            if name not in left_out
        ]
        timings = interleave(contestants, repeats, warmups)
        return {c.name: {**c.about, "phases": timings[c.name]} for c in contestants}, left_out


def interleave(
    contestants: Sequence[Any], repeats: int, warmups: int = 1
) -> dict[str, list[Timing]]:
    """Run a phase of each contestant in turn, `repeats` times after warm-ups."""
    timings: dict[str, list[Timing]] = {contestant.name: [] for contestant in contestants}
    for turn in range(warmups + repeats):
        for contestant in contestants:
            timing = contestant.phase()
            if turn >= warmups:
                timings[contestant.name].append(timing)
    return timings
