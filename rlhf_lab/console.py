"""Terminal output of the programs, and the exit status of one that was interrupted."""

import re
import sys
from typing import Any

INTERRUPTED = 130
"""As shells have it: 128 plus the number of the signal, SIGINT."""

PAGE_COLUMNS = 100
"""What fits on a notebook's page of 1,000 pixels."""

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tabs and line breaks, and those that change the direction of writing."""


def visible(text: str) -> str:
    """A text with its control characters written out: none reaches a terminal or turns a line."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def write_out_what_cannot_be_encoded() -> None:
    """Let standard output show characters that its encoding lacks as escapes, not end with them."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str, console: Any = None, style: str | None = None) -> None:
    """Print a text as it stands: no colors for numbers, no markup, no breaks but its own.

    Control characters are written out, see `visible`.

    Args:
        console: of rich; a new one on standard output when None.
    """
    from rich.console import Console  # not for --help

    as_it_stands = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
    (console or Console()).print(visible(text), style=style, **as_it_stands)


def page_console() -> Any:
    """A console of rich, no wider than a notebook's page, where rich would take 115 columns."""
    from rich.console import Console

    console = Console()
    return Console(width=min(PAGE_COLUMNS, console.width)) if console.is_jupyter else console
