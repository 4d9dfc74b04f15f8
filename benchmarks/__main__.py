"""The command `python -m benchmarks`: time one RLHF phase against other implementations."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from benchmarks.options import Bench
from rlhf_lab.cli_runner import run_program


def bench(options: Annotated[Bench, tyro.conf.arg(name="")]) -> int:
    """Time one RLHF phase on random weights, in turn with other ways of doing the same work."""
    from benchmarks import command

    return command.write_page(options) if options.write_docs else command.measure(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    return run_program(bench, "benchmarks", arguments)


if __name__ == "__main__":
    sys.exit(main())
