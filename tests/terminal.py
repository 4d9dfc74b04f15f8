"""A pseudo-terminal on which a command runs."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import Mapping

from tests.warm import WarmPython


def on_a_terminal(
    warm_python: WarmPython,
    arguments: list[str],
    env: Mapping[str, str],
    width: int = 110,
    height: int = 40,
) -> tuple[int, str]:
    """Run `python ARGUMENTS` on a pseudo-terminal; return the status and the output."""
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
