"""`python -m tools.pictures RUN`: draw the README's picture, the live panel at a run's end."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from tyro.conf import Positional

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.cli_runner import run_program
from rlhf_lab.views import RunView

PICTURE = Path("docs/live-panel.svg")


def draw(run: Positional[Path], picture: Path = PICTURE) -> int:
    """Train the preset reel into a new directory, and save its last panel as SVG.

    Args:
        run: the new run's directory.
        picture: the file to write.
    """
    trainer = RLHFTrainer(RLHFArgs(preset="reel"), out=run)
    view = RunView(trainer, Console(file=io.StringIO()))
    with view:
        trainer.train()
    size = {"width": 100, "height": 40}
    canvas = Console(file=io.StringIO(), record=True, force_terminal=True, **size)
    canvas.print(view.panel())
    canvas.save_svg(
        str(picture), title=f"python -m rlhf_lab train --preset reel --out {run} --seed 1"
    )
    print(f"written: {picture}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(draw, "tools.pictures", arguments)


if __name__ == "__main__":
    sys.exit(main())
