"""Terminal output of the programs."""

import re
import sys
from typing import Any

INTERRUPTED = 130  # exit status after SIGINT: 128 plus the signal's number
PAGE_COLUMNS = 100  # fits on a notebook page of 1,000 pixels
# control characters except tab and line break, and characters that change the writing direction
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Escape control characters, so that no text of others can change a terminal."""
    return UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


def escape_unencodable() -> None:
    """Make the standard streams escape characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str, console: Any = None, style: str | None = None) -> None:
    """Print a text without markup, highlighting or line wrapping, by default to stdout."""
    from rich.console import Console  # not needed for --help

    plain = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
    (console or Console()).print(visible(text), style=style, **plain)


def page_console() -> Any:
    """Return a rich console, in a notebook at most `PAGE_COLUMNS` wide."""
    from rich.console import Console

    console = Console()
    return Console(width=min(PAGE_COLUMNS, console.width)) if console.is_jupyter else console
