"""Runs whose files were damaged, lost or replaced: rejected in one message, or resumed bitwise."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab.training.checkpoint import load_checkpoint, save_checkpoint
from tests.bad_input.command_outcome import accepted, contents, rejected, untouched
from tests.training.recorded_runs import assert_same_run

pytestmark = pytest.mark.usefixtures("no_type_checks")

Edit = Callable[[Path], Any]
LAST, BEST = "checkpoints/last.safetensors", "checkpoints/best.safetensors"
ONE = "checkpoints/phase_000001.safetensors"
LOGS = ("metrics.jsonl", "samples.jsonl")
BOM = b"\xef\xbb\xbf"


def raw(file: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda run: (run / file).write_bytes(change((run / file).read_bytes()))


def info(*path: Any) -> Edit:
    """Set a value in run.json, as info("args", "seed", 2); ... removes the key."""
    *names, last, value = path

    def edit(run: Path) -> None:
        whole = inner = json.loads((run / "run.json").read_text())
        for name in names:
            inner = inner[name]
        inner.pop(last) if value is ... else inner.update({last: value})
        (run / "run.json").write_text(json.dumps(whole))

    return edit


def second_line(file: str, line: bytes) -> Edit:
    return raw(file, lambda b: b"".join([b.splitlines(True)[0], line, *b.splitlines(True)[2:]]))


def instead(file: str, kind: str) -> Edit:
    """Replace a regular file by something else."""

    def edit(run: Path) -> None:
        path, taken = run / file, run.absolute().parent / "taken"
        if path.is_file():
            path.rename(taken)
        elif path.is_dir():
            shutil.rmtree(path)
        path.parent.mkdir(exist_ok=True)
        taken.touch()
        if kind == "directory":
            path.mkdir()
            (path / "thesis.tex").write_text("all I have")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "file":
            path.write_text("all I have")
        elif kind != "nothing":
            targets = {"device": "/dev/null", "link": taken}
            path.symlink_to(targets.get(kind, taken.with_name("gone")))

    return edit


def checkpoint(change: Callable[[dict, dict], Any]) -> Edit:
    """Change tensors or metadata of `last`, with a checksum that matches."""

    def edit(run: Path) -> None:
        tensors, metadata = load_checkpoint(run / LAST)
        change(tensors, metadata)
        save_checkpoint(run / LAST, tensors, metadata)

    return edit


def copy(source: str, target: str) -> Edit:
    return lambda run: shutil.copy(run / source, run / target)


CUT = raw(LAST, lambda b: b[:-1000])
NAN = checkpoint(lambda t, m: [t[k].fill_(torch.nan) for k in t if k[:9] != "optimizer"])
ANOTHER = checkpoint(lambda t, m: m.update(run="another"))
ALL, LOADING = ("resume", "report", "sample", "export"), ("resume", "sample", "export")
REJECTED: list[tuple[tuple[str, ...], Edit, str]] = [
    (ALL, info("format", 1), "has format 1, expected 2"),
    (LOADING, info("args", "warp_factor", 9), "run.json, written by rlhf_lab"),
    *((ALL, instead("run.json", kind), "RUN") for kind in ("pipe", "nothing")),
    (LOADING, CUT, "last.safetensors is corrupt"),
    (("resume",), CUT, "`export RUN OUT --checkpoint best`"),
    (("export-best",), raw(BEST, lambda b: b[:-1000]), "--checkpoint last`"),
    *((ALL, info(name, ...), "run.json has unexpected contents") for name in ("id", "args")),
    *(
        (("resume",), checkpoint(lambda t, m, name=name: m.pop(name)), f"KeyError: '{name}'")
        for name in ("args", "phase", "best", "reward_moments", "reference_phase")
    ),
    (("resume",), NAN, "nan or inf"),
    (LOADING, ANOTHER, "is of {'run': 'another'"),
    (LOADING, copy(ONE, LAST), "'name': 'phase_"),
    *((LOADING, instead(LAST, kind), "last.safetensors") for kind in ("device", "nothing")),
    (LOADING, instead("checkpoints", "file"), "last.safetensors"),
    *((("resume", "report"), second_line(file, b"hello\n"), f"{file}, line 2") for file in LOGS),
    *((("resume",), instead(file, kind), file) for file in LOGS for kind in ("pipe", "link")),
    (("resume",), instead("run.lock", "link"), "run.lock"),
    (("resume",), instead("checkpoints/.last.safetensors.partial", "directory"), "partial"),
    (("resume",), instead("run.json", "link"), "run.json"),
    (("resume",), checkpoint(lambda t, m: m.update(phase=99)), "phase"),
    (("resume",), info("args", "base_model", "no-such"), "'no-such'"),
    (("resume",), raw(LOGS[0], lambda b: b.splitlines(True)[1]), "one line for each of 2 phases"),
]
COMMANDS = {
    "resume": "resume RUN",
    "report": "report RUN",
    "sample": "sample RUN -n 1 --gen-len 2",
    "export": "export RUN MADE",
    "export-best": "export RUN MADE --checkpoint best",
}


@pytest.mark.parametrize("number", range(len(REJECTED)))
def test_commands_reject_a_damaged_run_and_change_nothing(here: Path, number: int) -> None:
    commands, edit, word = REJECTED[number]
    edit(Path("RUN"))
    for command in commands:
        with untouched(here):
            rejected(COMMANDS[command].split(), word)


def test_relative_file_of_a_run_is_named_from_elsewhere(here: Path, monkeypatch) -> None:
    Path("p.txt").write_text("this movie\n")
    Path("reel-nano").mkdir()  # the bundled model has the same name
    info("args", "prompts", "p.txt")(Path("RUN"))
    info("working_directory", str(here))(Path("RUN"))
    monkeypatch.chdir("/")
    rejected(
        ["resume", here / "RUN"], f"{here} has prompts='p.txt', which is not here. Use the run"
    )
    accepted(["sample", here / "RUN", "-n", "1", "--gen-len", "2"])
    info("args", "base_model", "/moved")(here / "RUN")
    rejected(["sample", here / "RUN"], "or correct base_model in run.json")


def test_lost_or_torn_lines_of_a_finished_run_are_reported(here: Path) -> None:
    torn = raw("samples.jsonl", lambda b: b[:-30])
    torn(Path("RUN"))
    accepted(["report", "RUN"])  # it may have been killed here
    info("status", "finished")(Path("RUN"))
    rejected(["report", "RUN"], "samples.jsonl, line", "Restore or correct it")
    Path("RUN/samples.jsonl").unlink()
    raw("metrics.jsonl", lambda b: b.splitlines(keepends=True)[0])(Path("RUN"))
    rejected(["report", "RUN"], "must have one line for each of 2 phases in order, and has [0]")
    Path("RUN/metrics.jsonl").unlink()
    accepted(["report", "RUN", "--out", "page.html"])
    assert "metrics.jsonl is missing or empty" in Path("page.html").read_text()


def later_phases(content: bytes) -> bytes:
    last = json.loads(content.splitlines()[-1])
    return content + json.dumps(last | {"phase": 7}).encode() + b"\n"


HARMLESS: list[Edit] = [
    info("extra", 1),
    info("args", "device", "cpu"),
    info("status", ...),
    raw("run.json", lambda b: b + b" " * 5_000_000),
    lambda run: (run / "run.lock").write_text("\0 garbage"),
    lambda run: [(run / name).write_text("mine") for name in ("a.txt", ".hidden")],
    *(raw(f, lambda b: b.replace(b"\n", b"\r\n")) for f in ("run.json", *LOGS)),
    *(raw(f, later_phases) for f in LOGS),
    *(raw(f, lambda b: b + b'{"phase": 2, "te') for f in LOGS),
    *(raw(f, lambda b: BOM + b) for f in LOGS),
]
DRAFTS = (".run.json", ".metrics.jsonl", "checkpoints/.last.safetensors")


@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_harmless_changes_leave_the_resumed_run_equal(here: Path, whole: Path, kind: str) -> None:
    for edit in (*HARMLESS, *(instead(f"{draft}.partial", kind) for draft in DRAFTS)):
        edit(here / "RUN")
    outside = {name: digest for name, digest in contents(here).items() if name[:3] != "RUN"}
    accepted(["resume", "RUN"])
    assert_same_run(here / "RUN", whole)
    assert outside.items() <= contents(here).items()


@pytest.fixture(scope="module")
def whole(half_done: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run after it was resumed undamaged."""
    path = tmp_path_factory.mktemp("whole") / "RUN"
    shutil.copytree(half_done, path)
    accepted(["resume", path])
    return path


def test_lost_best_or_early_checkpoint_does_not_stop_resume(here: Path) -> None:
    for file, name in ((BEST, "best"), (ONE, "1")):
        Path("RUN", file).unlink()
        rejected(["sample", "RUN", "--checkpoint", name], "No checkpoint")
    accepted(["resume", "RUN"])


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_failing_disk_loses_nothing(
    here: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    replace, calls = os.replace, []

    def fail(source: Any, target: Any, **options: Any) -> None:
        calls.append(target)
        if len(calls) == nth:
            raise OSError(5, "Input/output error", str(target))
        replace(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        rejected(["resume", "RUN"], "Input/output error")
    accepted(["resume", "RUN"])
    assert_same_run(here / "RUN", whole)
