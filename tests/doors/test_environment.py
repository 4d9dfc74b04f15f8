"""Surroundings of a real process: encodings, streams, variables, directories and limits."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.doors.door import TRAIN
from tests.warm import WarmPython

PROGRAM = ["-m", "rlhf_lab", *TRAIN, "--out"]
REPORT = ["-m", "rlhf_lab", "report", "RUN"]
SCORE = ["-m", "rlhf_lab", "score", "a great movie", "--reward-fn", "count:movie"]
NO_TRACE = "Traceback"

pytestmark = pytest.mark.process


@pytest.fixture
def cold(surroundings: dict[str, str], here: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `python ARGUMENTS` in `here`, started as the shell does it, with changed variables."""

    def run(
        arguments: list[str], more: Mapping[str, str | None] | None = None, **options: object
    ) -> subprocess.CompletedProcess:
        given = {"PYTHONPATH": str(Path(__file__).parents[2])} | dict(more or {})
        env = {k: v for k, v in (surroundings | given).items() if v is not None}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=env, cwd=here, text=True, timeout=300, **options)

    return run


@pytest.fixture
def warm(warm_python: WarmPython, here: Path) -> Callable[..., subprocess.CompletedProcess]:
    """As `cold`, in a process that has imported everything before."""

    def run(
        arguments: list[str], more: Mapping[str, str | None] | None = None, **options: object
    ) -> subprocess.CompletedProcess:
        env = {k: v for k, v in (warm_python.environment | dict(more or {})).items() if v}
        return warm_python.run(arguments, cwd=here, env=env, **options)

    return run


SETTINGS = {
    "TERM=dumb": {"TERM": "dumb"},
    "no TERM": {"TERM": None},
    "COLUMNS=40": {"COLUMNS": "40"},
    "COLUMNS=1": {"COLUMNS": "1"},
    "COLUMNS of text": {"COLUMNS": "wide"},
    "NO_COLOR": {"NO_COLOR": "1"},
    "FORCE_COLOR": {"FORCE_COLOR": "1"},
    "no HOME": {"HOME": None},
    "a HOME that is not there": {"HOME": "/nowhere"},
    "TMPDIR that is not there": {"TMPDIR": "/nowhere"},
    "HF_HOME that is not there": {"HF_HOME": "/nowhere/hf"},
    "no PATH": {"PATH": None},
    "no variable at all": {name: None for name in os.environ},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_goes_well_with(kind: str, warm: Callable, here: Path) -> None:
    done = warm([*PROGRAM, "made"], SETTINGS[kind])
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "written to made" in done.stdout
    assert len((here / "made" / "samples.jsonl").read_text().splitlines()) == 32


NONSENSE = {
    "RLHF_LAB_PROGRESS a directory": ("RLHF_LAB_PROGRESS", "RUN"),
    "RLHF_LAB_PROGRESS below a file": ("RLHF_LAB_PROGRESS", "RUN/run.json/x"),
    "RLHF_LAB_PROGRESS a link to a device": ("RLHF_LAB_PROGRESS", "null"),
    "RLHF_LAB_PROGRESS of 5000 characters": ("RLHF_LAB_PROGRESS", "x" * 5000),
    "XDG_DATA_HOME that is not there": ("XDG_DATA_HOME", "/nowhere"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_progress_is_shown_with(kind: str, warm: Callable, here: Path) -> None:
    name, value = NONSENSE[kind]
    (here / "null").symlink_to("/dev/null")  # the device itself is not risked by a test
    before = sorted(here.rglob("*"))
    done = warm(["-m", "rlhf_lab", "progress"], {name: value})
    assert (done.returncode, done.stderr) == (0, "")
    assert value in done.stdout and "kept in" in done.stdout
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("streams", ["<&-", "2>&-"])
def test_streams_that_are_closed(streams: str, surroundings: dict[str, str], here: Path) -> None:
    env = surroundings | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = f"{sys.executable} -m rlhf_lab report RUN --out new.html {streams}"
    done = subprocess.run(command, shell=True, env=env, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0 and NO_TRACE not in done.stderr, done.stderr
    assert (here / "new.html").read_text().endswith("<!-- written by rlhf_lab -->\n")


def test_a_full_device_as_standard_output(cold: Callable) -> None:
    with open("/dev/full", "w") as full:
        done = cold(SCORE, stdout=full)
    assert done.returncode == 2 and NO_TRACE not in done.stderr
    assert "no space left on the device" in done.stderr and len(done.stderr.splitlines()) == 1


def test_warnings_as_errors(cold: Callable) -> None:
    done = cold(SCORE, {"PYTHONWARNINGS": "error"})
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("1.0000")


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "LANG": "C"}])
def test_a_name_beyond_ascii_where_only_ascii_can_be_shown(
    locale: dict[str, str], cold: Callable, here: Path
) -> None:
    done = cold(["-m", "rlhf_lab", "report", "RUN", "--out", "größe 🎬.html"], locale)
    assert done.returncode == 0 and done.stderr == ""
    assert (here / "größe 🎬.html").is_file()


def test_a_refusal_where_only_ascii_can_be_shown(cold: Callable) -> None:
    done = cold(["-m", "rlhf_lab", "train", "--größe", "3"], {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("rlhf_lab: Unrecognized options: ") and "---" not in done.stderr


@pytest.mark.parametrize("columns", ["40", "20", "400"])
def test_a_refusal_on_a_terminal_of_any_width(columns: str, cold: Callable) -> None:
    done = cold(["-m", "rlhf_lab", "train", "--direction", "up"], {"COLUMNS": columns})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "'up'" in done.stderr and "--direction" in done.stderr and "'neg'" in done.stderr


@pytest.mark.parametrize("option", ["-O", "-OO", "-I", "-X dev"])
def test_help_of_every_kind_of_python(option: str, cold: Callable) -> None:
    done = cold([*option.split(), "-m", "rlhf_lab", "--help"])
    if option == "-I" and "No module named" in done.stderr:
        pytest.skip("an isolated Python sees installed packages only")
    assert (done.returncode, done.stderr) == (0, "") and "train-reward" in done.stdout


def test_without_assertions_a_mistake_is_refused_as_well(cold: Callable, here: Path) -> None:
    done = cold(["-O", *PROGRAM, "made", "--batch-size", "9"])
    assert done.returncode == 2 and "batch_size=9 is not divisible" in done.stderr
    assert not (here / "made").exists()


@pytest.mark.parametrize("limit", [4096, 1_000_000])
def test_a_limit_on_the_size_of_files(limit: int, warm: Callable, here: Path) -> None:
    done = warm([*PROGRAM, "made"], file_size=limit)
    assert done.returncode == 2 and NO_TRACE not in done.stderr
    lines = done.stderr.splitlines()  # samples may not fit, and before them weights may not
    assert 1 <= len(lines) <= 2 and all("File too large" in line for line in lines)


@pytest.mark.parametrize("file", ["random.py"])
def test_a_file_of_a_librarys_name_in_the_working_directory(
    file: str, cold: Callable, here: Path
) -> None:
    (here / file).write_text("raise SystemExit('mine was imported')\n")
    done = cold(["-P", *SCORE])
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("1.0000")
