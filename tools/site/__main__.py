"""The command `python -m tools.site`: build the site of the docs with Sphinx."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_lab.cli_runner import run_program
from rlhf_lab.console import print_line
from tools.site.builder import build_site


def build(root: Path = Path("."), out: Path = Path("build/site")) -> int:
    """Write the site into OUT/html; status 1 if Sphinx warns, for example of a dead link.

    Args:
        root: root of the repository.
        out: directory of the site, with its staged sources.
    """
    built = build_site(root.resolve(), out.resolve())
    for problem in built.problems:
        print_line(problem)
    print_line(
        f"{built.pages} pages, {len(built.problems)} warnings, {built.seconds:.0f} s: "
        f"{out / 'html' / 'index.html'}"
    )
    return 1 if built.problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run_program(build, "tools.site", arguments, __doc__)


if __name__ == "__main__":
    sys.exit(main())
