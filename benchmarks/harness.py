"""Interleaved timing (A B A B), so that a slow spell of the machine hits every contestant."""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rlhf_lab.errors import RunError

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 10

Answer = dict[str, Any]


@runtime_checkable
class Contestant(Protocol):
    """An implementation that runs one phase on request."""

    name: str

    def phase(self) -> Answer:
        """Do one phase; seconds, stages and peak memory."""


class ContestantProcess:
    """A contestant in a process of its own, which runs `worker.serve`.

    Args:
        name: what it is called in the results.
        command: starts it.
        setup: its first line.
        root: the checkout whose packages it imports, wherever it is started.

    Raises:
        RunError: it ends instead of answering.
    """

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
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env=environment,
        )
        self.about = self._ask(setup)

    def phase(self) -> Answer:
        """Do one phase; seconds, stages and peak memory.

        Raises:
            RunError: the process ended instead.
        """
        return self._ask({"do": "phase"})

    def _ask(self, question: dict[str, Any]) -> Answer:
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            last_words = self._last_words()
            self.close()
            raise RunError(f"the contestant {self.name} ended early: {last_words}")
        return json.loads(answer)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_SECONDS)
        self._complaints.seek(0)
        lines = [line.strip() for line in self._complaints if line.strip()]
        return lines[-1] if lines else "it said nothing."

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
        self._complaints.close()


def interleave(
    contestants: Sequence[Contestant],
    repeats: int,
    warmups: int = 1,
) -> dict[str, list[Answer]]:
    """Run a phase of each contestant in turn, `repeats` times after `warmups` not counted."""
    answers: dict[str, list[Answer]] = {contestant.name: [] for contestant in contestants}
    for turn in range(warmups + repeats):
        for contestant in contestants:
            answer = contestant.phase()
            if turn >= warmups:
                answers[contestant.name].append(answer)
    return answers
