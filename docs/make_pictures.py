"""Draws the README's picture: the live panel at the end of the main job, as SVG.

python docs/make_pictures.py RUN_DIRECTORY   (a new directory: the job is run for the picture)
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.views import RunView


def main(run: str) -> None:
    """Train the reel preset and save its last panel beside this script."""
    trainer = RLHFTrainer(RLHFArgs(preset="reel"), out=run)
    view = RunView(trainer, Console(file=io.StringIO()))
    with view:
        trainer.train()
    canvas = Console(file=io.StringIO(), record=True, width=100, force_terminal=True)
    canvas.print(view.panel())
    picture = Path(__file__).parent / "live-panel.svg"
    title = f"python -m rlhf_lab train --preset reel --out {run} --seed 1"
    canvas.save_svg(str(picture), title=title)
    print(f"written: {picture}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
