"""A terminal for the tests: a pseudo-terminal, and what is on its screen after all was written."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Mapping

from rich.cells import cell_len

from tests.warm import WarmPython

PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\s\S])")


def on_a_terminal(
    warm_python: WarmPython,
    arguments: list[str],
    env: Mapping[str, str],
    width: int = 110,
    height: int = 40,
) -> tuple[int, str]:
    """Run `python ARGUMENTS` on a pseudo-terminal; returns the status and all that was drawn."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    hidden = ("COLUMNS", "LINES", "NO_COLOR", "CI")
    env = {name: value for name, value in env.items() if name not in hidden}
    process = warm_python.start(arguments, (terminal, terminal, terminal), env=env)
    os.close(terminal)
    drawn = bytearray()
    with contextlib.suppress(OSError):
        while piece := os.read(controller, 65536):
            drawn += piece
    os.close(controller)
    return process.wait(), drawn.decode(errors="replace")


def screen(drawn: str, width: int, height: int) -> tuple[list[str], list[str]]:
    """The lines that have left a terminal of this size at its top, and those that it still shows.

    It knows the cursor's way up, the erasing of a line, and colors, which it leaves out.
    """
    gone, rows = list[str](), [""]
    row = column = 0
    for found in PIECE.finditer(drawn):
        number, command, character = found.groups()
        if command == "A":
            row = max(row - int(number or 1), 0)
        elif command == "K":
            assert number == "2"
            rows[row] = ""
        elif command:
            assert command in "mhl", found[0]
        elif character == "\r":
            column = 0
        else:
            if character == "\n" or column >= width:
                row, column = row + 1, 0
            if row == len(rows):
                rows.append("")
            if len(rows) > height:
                gone.append(rows.pop(0))
                row -= 1
            if character != "\n":
                line = rows[row].ljust(column)
                rows[row] = line[:column] + character + line[column + 1 :]
                column += cell_len(character)
    return gone, rows
