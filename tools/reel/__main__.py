"""The command `python -m tools.reel train|check`: train and measure the bundled models."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from rlhf_lab.organism import weights_dir
from tools.reel.check import run_checks
from tools.reel.train import SEEDS, train_model


def train(out: Path = Path("runs/organism")) -> int:
    """Train all bundled models from their grammars, with fixed seeds, and compare them with those
    that are shipped.

    Args:
        out: directory for the directories of the models.
    """
    disable_progress_bar()
    for name in SEEDS:
        train_model(name, out / name)
        new = load_file(out / name / "model.safetensors")
        shipped = load_file(weights_dir(name) / "model.safetensors")
        gap = max((new[key] - shipped[key]).abs().max().item() for key in shipped)
        print_line(f"{name}: {out / name}")
        print_line(
            f"  largest difference from the shipped weights {gap:.2g}" * bool(gap)
            or "  bitwise identical with the shipped weights"
        )
    return 0


def check(reviews: int = 4000) -> int:
    """Check the bundled models against their grammars; status 1 if a check fails.

    Args:
        reviews: number of fresh texts per model.
    """
    disable_progress_bar()
    checks = run_checks(reviews)
    table = Table("check", "value", "bound", "holds", box=None)
    for one in checks:
        table.add_row(escape(one.name), f"{one.value:.3g}", one.bound, "yes" if one.ok else "NO")
    Console().print(table)
    return 0 if all(one.ok for one in checks) else 1


COMMANDS = MappingProxyType({"train": train, "check": check})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return run_program(COMMANDS, "tools.reel", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
