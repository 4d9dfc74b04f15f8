"""The implementations that are timed: how each is started, and when one is left out."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType

from benchmarks.harness import ROOT, ContestantProcess
from benchmarks.work import Work
from rlhf_lab.errors import ConfigError

PEERS: MappingProxyType[str, str] = MappingProxyType(
    {"trl-0.11.4": "benchmarks.trl_step", "trl-1.12": "benchmarks.trl_experimental"}
)
HOOKED = ("ours-residual", "ours-pattern", "ours-all")
OTHERS = (*HOOKED, "naive", *PEERS)
OWN = (
    "ours",
    *HOOKED,
    "ours-sampling",
    "hf-generate",
    "ours-run",
    "ours-run-with-probes",
)


def start_command(name: str, peers: Path | None) -> list[str]:
    """Return the command that starts a contestant.

    Raises:
        ConfigError: If there is no such contestant.
        FileNotFoundError: If its packages are not installed; the message names the command.
    """
    if name in OWN:
        return [sys.executable, "-m", "benchmarks.ours", name]
    if name not in OTHERS:
        raise ConfigError(f"Unknown against={name!r}. Choose one of: {', '.join(OTHERS)}.")
    if name == "naive":
        return [sys.executable, "-m", "benchmarks.naive"]
    python = peers_dir(peers) / name / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{name} is left out: not built. Build it with `make bench-peers`.")
    return [str(python), "-m", PEERS[name]]


def peers_dir(given: Path | None) -> Path:
    """Where the peers' environments are: as given, RLHF_LAB_PEERS, or .cache/peers."""
    return given or Path(os.environ.get("RLHF_LAB_PEERS") or ROOT / ".cache" / "peers")


@contextmanager
def started(
    names: Sequence[str], work: Work, model: Path, peers: Path | None = None
) -> Iterator[tuple[list[ContestantProcess], dict[str, str]]]:
    """Start contestants that are installed; yield them and the reasons why others are left out."""
    with ExitStack() as stack:
        contestants, left_out = [], {}
        for name in names:
            try:
                command = start_command(name, peers)
            except FileNotFoundError as missing:
                left_out[name] = str(missing)
                continue
            process = ContestantProcess(name, command, work.setup(model))
            contestants.append(stack.enter_context(closing(process)))
        yield contestants, left_out
