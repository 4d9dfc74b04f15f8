"""Processes that have imported everything before they begin: each is forked from one that waits.

An import of TransformerLens takes 5 seconds and more. A forked process has descriptors, a working
directory, an environment, signals and an exit of its own, so that what a command prints, leaves
behind and returns is what it does from the shell. What differs is the start: a test of imports,
of warnings that they give or of the time until help is there starts Python itself.
"""

import contextlib
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 900
"""Seconds that a process may take on a busy machine."""


class WarmPython:
    """One process that has imported the package, and forks for whoever asks.

    Args:
        environment: of the process, which what is read at import sees.
        socket_path: where it is asked; at most 100 characters.
    """

    def __init__(self, environment: Mapping[str, str], socket_path: Path) -> None:
        self.socket_path = str(socket_path)
        self.environment = dict(environment)
        paths = [str(ROOT), *filter(None, sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.socket_path],
            env=self.environment | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "ready\n", "the warm process did not start"

    def start(
        self,
        arguments: list[str],
        files: tuple[int, int, int],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        file_size: int | None = None,
    ) -> "WarmProcess":
        """Start what `python ARGUMENTS` starts.

        Args:
            arguments: `-m MODULE ...` or `-c CODE ...`.
            files: the descriptors of standard input, output and error.
            file_size: bytes that a file may have; writing more fails as on a full disk.
        """
        asked = {
            "arguments": arguments,
            "cwd": str(cwd or os.getcwd()),
            "env": dict(self.environment if env is None else env),
            "file_size": file_size,
        }
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(self.socket_path)
        socket.send_fds(line, [b"f"], list(files))
        line.sendall(json.dumps(asked).encode() + b"\n")
        return WarmProcess(line)

    def run(
        self,
        arguments: list[str],
        text: str | None = None,
        timeout: float = PATIENCE,
        **options: Any,
    ) -> subprocess.CompletedProcess:
        """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out:
            with tempfile.TemporaryFile() as err:
                given.write((text or "").encode())
                given.seek(0)
                files = (given.fileno(), out.fileno(), err.fileno())
                status = self.start(arguments, files, **options).wait(timeout)
                said = []
                for file in (out, err):
                    file.seek(0)
                    said.append(io.TextIOWrapper(file, encoding="utf-8").read())
        return subprocess.CompletedProcess(arguments, status, *said)

    def close(self) -> None:
        """End the process that waits; the end of its standard input tells it to."""
        self.process.communicate(timeout=30)


class WarmProcess:
    """A process that was forked, known by the line on which its end is told."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.told = line.makefile("r")
        self.pid = int(self.told.readline())

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit status, negative for a signal; what takes too long is killed: TimeoutError."""
        self.line.settimeout(timeout)
        try:
            return int(self.told.readline())
        except TimeoutError:
            os.killpg(self.pid, signal.SIGKILL)
            raise
        finally:
            self.told.close()
            self.line.close()


def serve(path: str) -> dict[str, Any]:
    """Wait, and fork for each request; returns only in the forked process, with the request."""
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    waiting.bind(path)
    waiting.listen()
    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    while waiting in select.select([waiting, sys.stdin], [], [])[0]:
        line, _ = waiting.accept()
        _, files, _, _ = socket.recv_fds(line, 1, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            waiting.close()
            asked = json.loads(line.makefile().readline())
            pid = os.fork()
            if pid == 0:
                line.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                return asked
            close_all(files)
            line.sendall(f"{pid}\n".encode())
            line.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
            os._exit(0)
        close_all(files)
        line.close()
    sys.exit()


def reap(number: int, frame: Any) -> None:
    """Let processes that have ended go."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def close_all(files: list[int]) -> None:
    """Close descriptors."""
    for file in files:
        os.close(file)


def become(asked: dict[str, Any]) -> None:
    """Turn into the process that was asked for, and run it."""
    os.setsid()
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if asked["file_size"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_size"],) * 2)
    reopen_standard_streams()
    kind, what, *rest = asked["arguments"]
    sys.path[0] = ""
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def reopen_standard_streams() -> None:
    """As Python does at its start."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    terminal = os.isatty(1)
    sys.stdout = sys.__stdout__ = open(
        1, "w", buffering=1 if terminal else -1, encoding="utf-8", closefd=False
    )
    sys.stderr = sys.__stderr__ = open(
        2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
    )


if __name__ == "__main__":
    import rlhf_lab.commands
    import rlhf_lab.doctor
    import rlhf_lab.model_commands
    import rlhf_lab.tuning
    import rlhf_lab.views.terminal  # noqa: F401

    gc.freeze()
    become(serve(sys.argv[1]))
