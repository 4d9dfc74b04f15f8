"""The implementations that are timed: how each is started, and when one is left out."""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

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
OF_A_COMMIT = "ours@"


class Start(NamedTuple):
    """How a contestant is started: the command, and the checkout whose packages it imports."""

    command: list[str]
    root: Path = ROOT


def start_of(name: str, peers: Path | None, files: ExitStack) -> Start:
    """How a contestant is started.

    Args:
        files: holds a commit's files while they are needed.

    Raises:
        ConfigError: there is no such contestant or commit.
        FileNotFoundError: it is not here; the message says how to get it.
    """
    if name in OWN:
        return Start([sys.executable, "-m", "benchmarks.ours", name])
    if name.startswith(OF_A_COMMIT):
        root = files.enter_context(files_of(name.removeprefix(OF_A_COMMIT)))
        room = "rlhf_lab.bench" if (root / "rlhf_lab" / "bench").is_dir() else "benchmarks"
        return Start([sys.executable, "-m", f"{room}.ours", "ours"], root)
    if name not in OTHERS:
        raise ConfigError(f"against={name!r} is unknown; choose of {', '.join(OTHERS)}.")
    if name == "naive":
        return Start([sys.executable, "-m", "benchmarks.naive"])
    python = peers_dir(peers) / name / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"{name} is left out: not built; build it with `make bench-peers`.")
    return Start([str(python), "-m", PEERS[name]])


@contextmanager
def files_of(commit: str) -> Iterator[Path]:
    """A commit's files in a temporary directory.

    Raises:
        ConfigError: this repository has no such commit.
    """
    packed = _git(commit, "archive", "--format=tar", commit)
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(directory, filter="data")
        yield Path(directory)


def short_hash(commit: str) -> str:
    """The hash of a commit, abbreviated.

    Raises:
        ConfigError: this repository has no such commit.
    """
    return _git(commit, "rev-parse", "--short", "--verify", f"{commit}^{{commit}}").decode().strip()


def _git(commit: str, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"against_commit={commit!r} is no commit of this repository; name one that `git log` "
            "shows."
        )
    return done.stdout


def peers_dir(given: Path | None) -> Path:
    """Where the peers' environments are: as given, RLHF_LAB_PEERS, or .cache/peers."""
    return given or Path(os.environ.get("RLHF_LAB_PEERS") or ROOT / ".cache" / "peers")


@contextmanager
def started(
    names: Sequence[str], work: Work, model: Path, peers: Path | None = None
) -> Iterator[tuple[list[ContestantProcess], dict[str, str]]]:
    """Contestants that have loaded their models, and for each that is left out a sentence why.

    Raises:
        ConfigError: an unknown name or commit.
        RunError: a contestant fails to start.
    """
    with ExitStack() as held:
        starts, left_out = {}, {}
        for name in names:
            try:
                starts[name] = start_of(name, peers, held)
            except FileNotFoundError as missing:
                left_out[name] = str(missing)
        yield (
            [
                held.enter_context(
                    closing(ContestantProcess(name, start.command, work.setup(model), start.root))
                )
                for name, start in starts.items()
            ],
            left_out,
        )
