"""Terminal output of the programs, and the exit status of one that was interrupted."""

from typing import Any

INTERRUPTED = 130
"""As shells have it: 128 plus the number of the signal, SIGINT."""


def print_line(text: str, console: Any = None, style: str | None = None) -> None:
    """Print a text as it stands: no colors for numbers, no markup, no breaks but its own.

    Args:
        console: of rich; a new one on standard output when None.
    """
    from rich.console import Console  # not for --help

    as_it_stands = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
    (console or Console()).print(text, style=style, **as_it_stands)
