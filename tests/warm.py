"""Processes forked from a server that has imported the package, which takes 5 s and more."""

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
PATIENCE = 900  # seconds that a process may take on a busy machine
MODULES = "commands doctor model_commands tuning views.terminal".split()


class WarmPython:
    """A server with the imported package, which forks processes, by default with its variables."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([f"rlhf_lab.{name}" for name in MODULES])
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        with mock.patch.dict(os.environ, self.environment | {"PYTHONPATH": paths}, clear=True):
            forkserver.ensure_running()

    def start(
        self,
        arguments: list[str],
        files: tuple[int, int, int],
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        file_size: int | None = None,
    ) -> "WarmProcess":
        """Start `python -m MODULE ...` or `python -c CODE ...` with these standard streams.

        Writing more than `file_size` bytes to a file fails as on a full disk.
        """
        env = self.environment if env is None else env
        options = (arguments, Files(files), str(cwd or os.getcwd()), dict(env), file_size)
        process = self._context.Process(target=become, args=options)
        process.start()
        return WarmProcess(process)

    def run(
        self,
        arguments: list[str],
        **options: Any,
    ) -> subprocess.CompletedProcess:
        """Run `python ARGUMENTS` with captured output, as `subprocess.run` does."""
        with (
            open(os.devnull) as nothing,
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as err,
        ):
            files = (nothing.fileno(), out.fileno(), err.fileno())
            status = self.start(arguments, files, **options).wait()
            outputs = []
            for file in (out, err):
                file.seek(0)
                outputs.append(io.TextIOWrapper(file, encoding="utf-8").read())
        return subprocess.CompletedProcess(arguments, status, *outputs)


class WarmProcess:
    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process, self.pid = process, process.pid

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return the exit status, negative for a signal, or kill the process: TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise TimeoutError(f"no end after {timeout} s")
        return self._process.exitcode


class Files(tuple):
    """Descriptors that are passed to the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return receive, tuple(DupFd(number) for number in self)


def receive(*files: Any) -> list[int]:
    return [file.detach() for file in files]


def become(
    arguments: list[str], files: list[int], cwd: str, env: dict[str, str], file_size: int | None
) -> None:
    """Run `python ARGUMENTS` in this process."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if file_size is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size,) * 2)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _reopen_standard_streams()
    kind, program, *rest = arguments
    sys.path[0] = ""
    try:
        if kind == "-m":
            sys.argv = [program, *rest]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [kind, *rest]
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not


def _reopen_standard_streams() -> None:
    """Open the standard streams as Python does at its start."""
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)
    options = {"encoding": "utf-8", "closefd": False}
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if os.isatty(1) else -1, **options)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", **options)
