"""Training on a terminal: live panel, signals that save first, and a summary at the end."""

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

HANGUP = getattr(signal, "SIGHUP", None)  # signal of a closing terminal; not on Windows


class PatientConsole(Console):
    """Console that goes silent instead of ending the run when its reader exits (`| head -1`)."""

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def train_on_terminal(trainer: RLHFTrainer, console: Console) -> int:
    """Train with a view and return the exit status, 128 plus the signal's number if stopped.

    The first Ctrl-C finishes the phase and saves, a second one stops at once. So does SIGTERM;
    SIGHUP, of a closing terminal, never stops at once. Of several processes only the main one
    prints; a signal to any of them stops all.

    Raises:
        LostRankError: If another process of the run has ended.
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
    # keep ignoring signals that are ignored already, such as SIGHUP under nohup
    numbers = [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        with RunView(trainer, console) if trainer.is_main else nullcontext():
            trainer.train()
        is_done = trainer.phase >= trainer.args.total_phases
    except KeyboardInterrupt:
        is_done = False
    except LostRankError as error:
        # torchrun now sends SIGTERM, which must not interrupt the error message
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise LostRankError(
            f"{error} in phase {trainer.phase}; its error is above or in its log. Continue "
            f"with the same launcher: torchrun ... -m rlhf_lab resume {_run_path(trainer)}"
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if trainer.world is not None:
        trainer.world.close()
    status = 0 if is_done else 128 + received[0] if received else INTERRUPTED
    if not trainer.is_main:
        return status
    path = _run_path(trainer)
    done = f"{trainer.phase} of {trainer.args.total_phases} phases"
    stopped = f"stopped after {done}; continue with: python -m rlhf_lab resume {path}"
    print_line(_summary(trainer.run) if is_done else stopped, console)
    if trainer.run and (directories := trainer.run.read_info().get("wandb_directories")):
        command = f"wandb sync {shlex.join(directories)}"
        print_line(f"wandb, offline; send it with: {command}", console)
    return status


def _run_path(trainer: RLHFTrainer) -> Path | str:
    return trainer.run.path if trainer.run else trainer.directory or "RUN"


def _leave_terminal() -> None:
    """Redirect output to a closed terminal to nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        if os.isatty(number):
            os.dup2(null, number)
    os.close(null)


def _summary(directory: RunDir) -> str:
    run, final = Run(directory.path), directory.read_info()["final"]
    metrics = [f"{name} {value:.3f}" for name, value in final.items() if isinstance(value, float)]
    lines = [f"final, over {final['samples']} fresh samples: {', '.join(metrics)}"]
    if checks := run.checks():
        command = ["python", "-m", "rlhf_lab", "report", str(run.path)]
        n = sum(check.ok for check in checks)
        lines.append(
            f"{len(run.probes())} probes recorded; {n} of {len(checks)} identity checks hold; "
            f"see {shlex.join(command)}"
        )
    return "\n".join([*lines, f"written to {run.path}"])
