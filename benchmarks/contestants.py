"""The implementations that are timed: how each is started, and when one is left out."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from benchmarks.harness import ROOT, ContestantProcess
from benchmarks.work import Work
from rlhf_lab.errors import ConfigError

PEERS: MappingProxyType[str, str] = MappingProxyType(
    {"trl-0.11.4": "benchmarks.trl_step", "trl-1.12": "benchmarks.trl_experimental"}
)
OTHERS = ("ours-hooked", "ours-modules", "naive", *PEERS)
OWN = (
    "ours",
    "ours-hooked",
    "ours-modules",
    "ours-sampling",
    "hf-generate",
    "ours-run",
    "ours-run-with-probes",
)


def command_of(name: str, peers: Path | None) -> list[str]:
    """How a contestant is started.

    Raises:
        ConfigError: there is no such contestant.
        FileNotFoundError: it is not here; the message says how to get it.
    """
    if name in OWN:
        return [sys.executable, "-m", "benchmarks.ours", name]
    if name not in OTHERS:
        raise ConfigError(f"against={name!r} is unknown; choose of {', '.join(OTHERS)}.")
    if name == "naive":
        return [sys.executable, "-m", "benchmarks.naive"]
    python = peers_dir(peers) / name / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{name} is left out: not built; build it with `make bench-peers`.")
    return [str(python), "-m", PEERS[name]]


def peers_dir(given: Path | None) -> Path:
    """Where the peers' environments are: as given, RLHF_LAB_PEERS, or .cache/peers."""
    return given or Path(os.environ.get("RLHF_LAB_PEERS") or ROOT / ".cache" / "peers")


@contextmanager
def started(
    names: Sequence[str], work: Work, model: Path, peers: Path | None = None
) -> Iterator[tuple[list[ContestantProcess], dict[str, str]]]:
    """Contestants that have loaded their models, and for each that is left out a sentence why.

    Raises:
        ConfigError: an unknown name.
        RunError: a contestant fails to start.
    """
    commands, left_out = {}, {}
    for name in names:
        try:
            commands[name] = command_of(name, peers)
        except FileNotFoundError as missing:
            left_out[name] = str(missing)
    running: list[ContestantProcess] = []
    try:
        for name, command in commands.items():
            running.append(ContestantProcess(name, command, work.setup(model)))
        yield running, left_out
    finally:
        for contestant in running:
            contestant.close()
