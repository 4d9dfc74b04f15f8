"""A run on the terminal: a live view, signals that save first, and the figures at the end."""

import os
import shlex
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

from rich.console import Console

from rlhf_lab.console import INTERRUPTED, print_line
from rlhf_lab.errors import LostRankError
from rlhf_lab.probes import Run
from rlhf_lab.training import RLHFTrainer, RunDir
from rlhf_lab.views.live import RunView

HANGUP = getattr(signal, "SIGHUP", None)
"""The signal of a terminal that closes; Windows has none."""


class PatientConsole(Console):
    """A console whose reader may go away (as in `| head -1`) without ending the run."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train_on_terminal(trainer: RLHFTrainer, console: Console) -> int:
    """Train with a view, and give the exit status; the first Ctrl-C finishes the phase and saves, a
    second stops at once. So does SIGTERM, and a terminal that closes (SIGHUP), however often.

    The status of a run that was stopped is 128 plus the number of the signal, as shells have it.
    Of several processes only the main one shows anything; a signal to any of them stops all.

    Raises:
        LostRankError: another process of the run is gone.
    """
    console.quiet = console.quiet or not trainer.is_main
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        is_hangup = number == HANGUP
        if is_hangup:
            _leave_terminal()
        if received and not is_hangup:
            raise KeyboardInterrupt
        received.append(number)
        trainer.request_stop()
        print_line("finishing this phase, then saving; Ctrl-C again stops at once", console)

    numbers = [signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else [])]
    # a signal that is ignored, as SIGHUP is under nohup, stays so
    numbers = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        with RunView(trainer, console) if trainer.is_main else nullcontext():
            trainer.train()
        is_done = trainer.phase >= trainer.args.total_phases
    except KeyboardInterrupt:
        is_done = False
    except LostRankError as error:
        # torchrun sends SIGTERM to those that are left, which end by themselves, with a sentence
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise LostRankError(
            f"{error} in phase {trainer.phase}; what that one said is above or in its log. Go on "
            f"with the same launcher: torchrun ... -m rlhf_lab resume {_path_of(trainer)}"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if trainer.world is not None:
        trainer.world.close()
    if not trainer.is_main:
        return 0 if is_done else 128 + received[0] if received else INTERRUPTED
    path = _path_of(trainer)
    done = f"{trainer.phase} of {trainer.args.total_phases} phases"
    how_to_go_on = f"stopped after {done}; go on with: python -m rlhf_lab resume {path}"
    print_line(_figures(trainer.run) if is_done else how_to_go_on, console)
    if trainer.run and (directories := trainer.run.read_info().get("wandb_directories")):
        command = f"wandb sync {shlex.join(directories)}"
        print_line(f"wandb, offline; send it with: {command}", console)
    if is_done:
        return 0
    return 128 + received[0] if received else INTERRUPTED


def _path_of(trainer: RLHFTrainer) -> Path | str:
    """The directory of the run, which is told to the processes that do not write there."""
    return trainer.run.path if trainer.run else trainer.directory or "RUN"


def _leave_terminal() -> None:
    """Write to nowhere what would go to a terminal that is closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if os.isatty(number):
            os.dup2(nowhere, number)
    os.close(nowhere)


def _figures(directory: RunDir) -> str:
    """What a finished run came to, and what its probes say of it, if it has any."""
    run, final = Run(directory.path), directory.read_info()["final"]
    figures = [f"{name} {value:.3f}" for name, value in final.items() if isinstance(value, float)]
    lines = [f"final, over {final['samples']} fresh samples: {', '.join(figures)}"]
    checks = run.checks()
    if checks:
        held = sum(check.ok for check in checks)
        lines.append(
            f"{len(run.probes())} probes recorded; {held} of {len(checks)} identity checks hold; "
            f"see python -m rlhf_lab report {run.path}"
        )
    return "\n".join([*lines, f"written to {run.path}"])
