"""A worker process for one contestant: each line of JSON requests a phase and gets one line back.

It needs only torch and psutil, so it also runs in the environments of peers.
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
    """Seconds of the stages of a phase, by names HALF/STAGE."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.stages: dict[str, float] = {}
        self._since = self._now()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to this stage."""
        now = self._now()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._since
        self._since = now

    def half(self, name: str) -> float:
        """Return the seconds of all stages of one half, "rollout" or "learning"."""
        return sum(s for stage, s in self.stages.items() if stage.split("/")[0] == name)

    def _now(self) -> float:
        synchronize(self.device)
        return perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()


class PeakMemory:
    """The peak memory within a block: of the allocator on CUDA, else of the process.

    A thread reads the memory of the process every 5 milliseconds.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.peak_bytes = self.now()

    def now(self) -> int:
        """Return the bytes in use."""
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
    """Serve a contestant: load, then run one phase per line of standard input.

    1. Read the setup, load the models, and answer with versions and the memory that they take.
    2. At each further line, run a phase and answer with its seconds, stages and peak memory.
    3. End after the last line. Output of libraries goes to standard error.
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
    """Time one phase; returns its seconds, by half and stage, and its peak memory."""
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
