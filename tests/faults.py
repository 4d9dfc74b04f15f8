"""Injected faults: each line of `faults.txt` changes the source, and a test must then fail.

`python -m tests.faults [TEXT ...]` runs the lines that contain one of the texts, by default all. It
collects the tests once, and for each fault forks, replaces the code of the function in the child
and runs the tests of the line until one fails. Faults outside of functions, or with tests that
start processes (`copy:`), are written into a copy of the repository. Survivors give the status 1.
PYTEST_ADDOPTS='-m "not slow"' chooses tests.
"""

import ast
import functools
import importlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("faults.txt")
LONGEST = 600  # CPU seconds of one fault; more is an endless loop, which counts as a failing test
OF_PROCESSES = ("process", "kernel", "browser")  # tests that fail in a fork with any code
PYTEST = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]


class Fault(NamedTuple):
    """A line of `faults.txt`: FILE[::FUNCTION] || OLD ==> NEW || [copy:] TESTS."""

    number: int
    file: str  # below rlhf_lab
    function: str  # qualified name, "" if the line names a file only
    old: str
    new: str
    tests: list[str]  # below tests: files, directories or node ids
    in_copy: bool

    def __str__(self) -> str:
        place = f"faults.txt:{self.number} {self.file}::{self.function}"
        return f"{place} {self.old} ==> {self.new}".replace("\n", "\\n")


def read_faults(texts: list[str] | None = None) -> list[Fault]:
    """Return the faults whose line contains one of the texts."""
    faults = []
    for number, line in enumerate(LIST.read_text(encoding="utf-8").splitlines(), 1):
        if line and not line.startswith("#") and any(text in line for text in texts or [""]):
            place, change, tests = line.split(" || ")
            old, new = (text.strip().replace("\\n", "\n") for text in change.split("==>"))
            file, _, function = place.partition("::")
            names = tests.removeprefix("copy: ").split()
            in_copy = not function or tests.startswith("copy: ")
            faults.append(Fault(number, file, function, old, new, names, in_copy))
    return faults


@functools.cache
def _parse(path: Path) -> tuple[list[str], Any]:
    source = path.read_text(encoding="utf-8")
    return source.splitlines(keepends=True), ast.parse(source if path.suffix == ".py" else "")


def inject(fault: Fault) -> str:
    """Return the source of the file with the fault, whose old text must occur exactly once."""
    lines, node = _parse(ROOT / "rlhf_lab" / fault.file)
    first, last = 1, len(lines)
    for name in filter(None, fault.function.split(".")):
        node = next((x for x in node.body if getattr(x, "name", None) == name), None)
        if node is None:
            raise ValueError(f"{fault}: the file has no such function. Update or remove the line.")
        first, last = node.lineno, node.end_lineno
    before, part, after = ("".join(x) for x in _cut(lines, first - 1, last))
    if part.count(fault.old) != 1:
        raise ValueError(
            f"{fault}: the old text occurs {part.count(fault.old)} times, expected once. Update or "
            "remove the line."
        )
    return before + part.replace(fault.old, fault.new) + after


def _cut(lines: list[str], start: int, stop: int) -> tuple[list[str], list[str], list[str]]:
    return lines[:start], lines[start:stop], lines[stop:]


def replace_code(fault: Fault) -> None:
    """Replace the code of the function in this process."""
    value = importlib.import_module(f"rlhf_lab.{fault.file[:-3].replace('/', '.')}")
    for name in fault.function.split("."):
        value = vars(value)[name]
    wrappers = ("__func__", "fget", "func", "__wrapped__")
    while name := next((name for name in wrappers if hasattr(value, name)), None):
        value = getattr(value, name)
    code = compile(inject(fault), fault.file, "exec")
    (value.__code__,) = [x for x in _codes(code) if x.co_qualname == fault.function]


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


class FaultLoop:
    """Plugin of pytest that runs the tests of each fault instead of all tests."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults, self.survivors = faults, []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the name of a failing test."""
        self.failed += [report.nodeid] if report.failed else []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the faults one after another."""
        for fault in self.faults:
            before = _child_seconds()
            failed = _run_copy(fault) if fault.in_copy else self._run_forked(fault, session.items)
            self.survivors += [] if failed else [fault]
            seconds = _child_seconds() - before
            print(f"{seconds:6.1f} s  {failed or 'SURVIVES'}  <-  {fault}", flush=True)
        return True

    def _run_forked(self, fault: Fault, items: list[pytest.Item]) -> str:
        forkable = [x for x in items if not any(map(x.get_closest_marker, OF_PROCESSES))]
        chosen = [x for y in fault.tests for x in forkable if x.nodeid.startswith(f"tests/{y}")]
        if not chosen:
            return ""
        with tempfile.TemporaryFile("w+") as result:
            pid = os.fork()
            if not pid:
                try:
                    self._run_child(fault, list(dict.fromkeys(chosen)))
                    result.write("".join(self.failed[:1]))
                except BaseException as error:
                    result.write(f"(ended with {error!r})")
                finally:
                    result.flush()
                    os._exit(0)
            _, status = os.waitpid(pid, 0)
            result.seek(0)
            return result.read() or (f"(ended with status {status})" if status else "")

    def _run_child(self, fault: Fault, items: list[pytest.Item]) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST))
        items[0].config.pluginmanager.unregister(name="terminalreporter")
        replace_code(fault)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return


def _run_copy(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.glob("[!.]*"):
            place = Path(folder, path.name)
            is_copied = path.name in ("rlhf_lab", "tests")
            shutil.copytree(path, place) if is_copied else place.symlink_to(path)
        Path(folder, "rlhf_lab", fault.file).write_text(inject(fault), encoding="utf-8")
        tests = [f"tests/{name}" for name in fault.tests]
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", *PYTEST, *tests]
        environment = os.environ | {"PYTHONPATH": folder}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
        return failed[0].split()[1] if failed else "(ended)" * (done.returncode not in (0, 5))


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(texts: list[str]) -> int:
    """Run the faults and print the survivors."""
    faults = read_faults(texts)
    for fault in faults:
        if fault.file.endswith(".py"):  # a syntax error would count as a failing test
            compile(inject(fault), str(fault), "exec")
    loop = FaultLoop(faults)
    tests = {f"tests/{x}" for fault in faults if not fault.in_copy for x in fault.tests}
    status = pytest.main([*PYTEST, *sorted(tests)], plugins=[loop])
    print(f"{len(faults)} faults, {len(loop.survivors)} survive, {_child_seconds():.0f} CPU s")
    print("".join(f"SURVIVES  {fault}\n" for fault in loop.survivors), end="")
    return 1 if loop.survivors or status not in (0, 5) else 0


if __name__ == "__main__":
    # a forked child ends without removing its temporary folders
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        status = main(sys.argv[1:])
    sys.exit(status)
