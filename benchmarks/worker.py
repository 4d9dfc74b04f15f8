"""A worker process for one contestant: a line of JSON requests a phase, a line answers.

Needs nothing but torch and psutil, so that peers in other environments can use it too.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter, process_time
from typing import Any

import psutil
import torch

POLL_SECONDS = 0.005

Setup = dict[str, Any]


class Clock:
    """Adds up the seconds of the stages of a phase; a stage is named HALF/STAGE."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stages: dict[str, float] = {}
        self._since = self._now()

    def lap(self, stage: str) -> None:
        """Count what passed since the last lap as this stage's."""
        now = self._now()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._since
        self._since = now

    def half(self, name: str) -> float:
        """Seconds of all stages of one half, "rollout" or "learning"."""
        return sum(s for stage, s in self.stages.items() if stage.split("/")[0] == name)

    def _now(self) -> float:
        synchronize(self.device)
        return perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()


class PeakMemory:
    """The most memory in use while it is open: of the allocator on CUDA, of the process elsewhere.

    The process's memory is looked at every 5 milliseconds by a thread.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.peak_bytes = self.now()

    def now(self) -> int:
        """Bytes in use at this moment."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        return psutil.Process().memory_info().rss

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.peak_bytes = self.now()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._closed.set()
        self._thread.join()
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self.now())


def serve(load: Callable[[Setup], Callable[[Clock], None]], packages: tuple[str, ...]) -> None:
    """Be a contestant: load, then do one phase for every line that requests one.

    1. Read the setup, load the models, and answer with versions and the memory that they take.
    2. At each further line, do a phase and answer with its seconds, stages and peak memory.
    3. End when there are no more lines. What libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(fields: dict[str, Any]) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    setup = json.loads(sys.stdin.readline())
    torch.set_num_threads(setup["threads"])
    torch.manual_seed(setup["seed"])
    phase = load(setup)
    memory = PeakMemory(setup["device"])
    answer({"versions": {p: version(p) for p in packages}, "loaded_bytes": memory.now()})
    for _ in sys.stdin:
        answer(timed(phase, memory, setup["device"]))


def timed(phase: Callable[[Clock], None], memory: PeakMemory, device: str) -> dict[str, Any]:
    """One phase's seconds, of the whole, of its halves and stages, and its peak memory."""
    with memory:
        clock = Clock(device)
        began, began_cpu = perf_counter(), process_time()
        phase(clock)
        clock.lap("rest/rest")
        seconds, cpu_seconds = perf_counter() - began, process_time() - began_cpu
    rest = clock.stages.pop("rest/rest")
    return {
        "seconds": seconds,
        **({"cpu_seconds": cpu_seconds} if device == "cpu" else {}),
        "rollout": clock.half("rollout"),
        "learning": clock.half("learning") + rest,
        "stages": clock.stages,
        "peak_bytes": memory.peak_bytes,
    }
