"""The environment of a real process: variables, encodings, streams and limits."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlhf_lab.cli_runner import run_guarded
from tests.bad_input.command_outcome import TRAIN
from tests.warm import WarmPython

PROGRAM = ["-m", "rlhf_lab", *TRAIN, "--out", "made"]
SCORE = ["-m", "rlhf_lab", "score", "a great movie", "--reward-fn", "count:movie"]
ROOT = str(Path(__file__).parents[2])

pytestmark = pytest.mark.process


@pytest.fixture
def warm(warm_python: WarmPython, here: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run `python ARGUMENTS` in `here`, with changed variables."""

    def run(
        arguments: list[str], variables: Mapping[str, str | None] | None = None, **options: object
    ) -> subprocess.CompletedProcess:
        env = {k: v for k, v in (warm_python.environment | dict(variables or {})).items() if v}
        return warm_python.run(arguments, cwd=here, env=env, **options)

    return run


ONE_KIND = "no variable at all"  # of those below, in every run
VARIABLES = {
    "dumb terminal": {"TERM": "dumb", "COLUMNS": "wide", "FORCE_COLOR": "1"},
    "one column": {"COLUMNS": "1", "NO_COLOR": "1"},
    "missing directories": {"HOME": "/nowhere", "TMPDIR": "/nowhere", "HF_HOME": "/nowhere/hf"},
    "no variable at all": {name: None for name in os.environ},
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k == ONE_KIND else pytest.mark.nightly) for k in VARIABLES]
)
def test_run_works_with(kind: str, warm: Callable, here: Path) -> None:
    done = warm(PROGRAM, VARIABLES[kind])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "written to made" in done.stdout
    assert len((here / "made" / "samples.jsonl").read_text().splitlines()) == 32


@pytest.mark.nightly
@pytest.mark.parametrize("streams", ["<&-", "2>&-"])
def test_closed_stream_is_ignored(streams: str, surroundings: dict[str, str], here: Path) -> None:
    command = f"{sys.executable} -m rlhf_lab report RUN --out new.html {streams}"
    env = surroundings | {"PYTHONPATH": ROOT}
    done = subprocess.run(command, shell=True, env=env, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert (here / "new.html").read_text().endswith("<!-- written by rlhf_lab -->\n")


def test_full_device_as_standard_output_is_reported(warm_python: WarmPython, here: Path) -> None:
    with open("/dev/null") as nothing, open("/dev/full", "w") as full, open("err", "w") as err:
        process = warm_python.start(SCORE, (nothing.fileno(), full.fileno(), err.fileno()))
        assert process.wait() == 2
    (line,) = (here / "err").read_text().splitlines()
    assert "No space left on device" in line


def test_file_size_limit_is_reported(warm: Callable) -> None:
    done = warm(PROGRAM, file_size=4096)
    lines = done.stderr.splitlines()  # samples may not fit, and weights before them
    assert done.returncode == 2 and 1 <= len(lines) <= 2
    assert all("File too large" in line for line in lines)


def test_unknown_option_is_named_on_any_terminal(cold_python: Callable) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = cold_python(["-m", "rlhf_lab", "train", "--größe", "3"], ascii_only)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "Unrecognized options: --gr" in done.stderr


def test_import_silences_bitsandbytes() -> None:
    """With the extra eightbit, its import warns of missing kernels, also in a lesson."""
    assert logging.getLogger("bitsandbytes").level == logging.ERROR


def test_missing_package_is_named(capsys) -> None:
    assert run_guarded("rlhf_lab", lambda: __import__("no_such_package")) == 2
    error = capsys.readouterr().err
    assert error == "rlhf_lab: ModuleNotFoundError: No module named 'no_such_package'.\n"
