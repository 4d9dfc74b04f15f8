"""Who can be timed, how each is started, and why one has to be left out."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from rlhf_lab.bench.harness import ROOT, ContestantProcess
from rlhf_lab.bench.work import Work
from rlhf_lab.errors import ConfigError

BENCHMARKS = ROOT / "benchmarks"
PEERS: MappingProxyType[str, str] = MappingProxyType(
    {"trl-0.11.4": "trl_step.py", "trl-1.12": "trl_experimental.py"}
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
        return [sys.executable, "-m", "rlhf_lab.bench.ours", name]
    if name not in OTHERS:
        raise ConfigError(f"against={name!r} is unknown; choose of {', '.join(OTHERS)}.")
    if not BENCHMARKS.is_dir():
        raise FileNotFoundError(f"{name} is left out: run from a checkout, which has benchmarks/.")
    if name == "naive":
        return [sys.executable, str(BENCHMARKS / "naive.py")]
    python = peers_dir(peers) / name / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{name} is left out: not built; build it with `make bench-peers`.")
    return [str(python), str(BENCHMARKS / PEERS[name])]


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
