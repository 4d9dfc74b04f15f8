"""The command `python -m tools.reel train|check`: train and measure the bundled Reel models."""

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
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism import weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from tools.reel.check import run_checks
from tools.reel.readings import readings
from tools.reel.train import Trained, rebuild

READINGS_SEED = 21


def train(out: Path = Path("runs/organism")) -> int:
    """Train all bundled models from the grammar, with fixed seeds, and compare them with those
    that are shipped.

    Args:
        out: where the model directories are written.
    """
    disable_progress_bar()
    for name, trained in rebuild(out).items():
        print_line(f"{name}: {trained.directory}")
        print_line(f"  {_compared_with_bundled(name, trained)}")
    return 0


def _compared_with_bundled(name: str, trained: Trained) -> str:
    new = load_file(trained.directory / "model.safetensors")
    shipped = load_file(weights_dir(name) / "model.safetensors")
    gap = max((new[key] - shipped[key]).abs().max().item() for key in shipped)
    if gap == 0:
        return "bit for bit the shipped weights"
    return f"largest difference from the shipped weights {gap:.2g} (other CPUs round differently)"


def check(reviews: int = 4000) -> int:
    """Check Reel: exact identities, and the bundled models against the grammar; status 1 when one
    fails. Then what linear probes read in each language model, which has no bound.

    Args:
        reviews: fresh reviews to measure the models on.
    """
    table = Table("check", "value", "bound", "holds", box=None)
    disable_progress_bar()
    try:
        checks = run_checks(reviews)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for one in checks:
        table.add_row(escape(one.name), f"{one.value:.3g}", one.bound, "yes" if one.ok else "NO")
    Console().print(table)
    Console().print(_readings_table(reviews))
    return 0 if all(one.ok for one in checks) else 1


def _readings_table(reviews: int) -> Table:
    """What is read in each language model, with 95 % intervals, and the mean over models."""
    table = Table("read by a linear probe, held out", *LANGUAGE_MODELS, "mean", box=None)
    by_model = [readings(name, reviews, READINGS_SEED) for name in LANGUAGE_MODELS]
    for row in zip(*by_model, strict=True):
        cells = [f"{x.value:.3f} ({x.low:.3f} to {x.high:.3f})" for x in row]
        table.add_row(row[0].name, *cells, f"{sum(x.value for x in row) / len(row):.3f}")
    return table


COMMANDS = MappingProxyType({"train": train, "check": check})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    return run_program(COMMANDS, "tools.reel", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
