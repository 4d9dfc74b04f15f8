"""The lock of a run: a second trainer is refused, and a dead one's lock is taken over."""

import contextlib
import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lab.__main__ import main
from rlhf_lab.errors import RunError
from rlhf_lab.training import RLHFTrainer, run_lock
from rlhf_lab.training.run_lock import LOCK, STALE, RunLock, refuse_locked
from tests.warm import WarmProcess, WarmPython

HOLDER = """
import sys, time
from pathlib import Path
from rlhf_lab.training.run_lock import RunLock

lock = RunLock()
lock.hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def holding(warm_python: WarmPython, directory: Path) -> Iterator[WarmProcess]:
    """A process that holds the lock of a directory, until it is killed."""
    read, write = os.pipe()
    with open(os.devnull, "r+") as nowhere:
        files = (nowhere.fileno(), write, nowhere.fileno())
        process = warm_python.start(["-c", HOLDER, str(directory)], files)
    os.close(write)
    with open(read) as said:
        assert said.readline() == "held\n"
    try:
        yield process
    finally:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def write_foreign(directory: Path, age: float) -> Path:
    """The lock of a trainer on another machine, touched so many seconds ago."""
    path = directory / LOCK
    path.write_text(json.dumps({"host": "far", "pid": 7, "boot": "another kernel"}))
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_a_second_process_is_refused_by_pid_and_host(warm_python, tmp_path):
    with holding(warm_python, tmp_path) as other:
        for ask in (RunLock().hold, refuse_locked):
            with pytest.raises(RunError, match=rf"by process {other.pid} on .*; stop that one"):
                ask(tmp_path)
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == other.pid


def test_the_lock_of_a_killed_process_is_taken_over_at_once(warm_python, tmp_path):
    with holding(warm_python, tmp_path):
        pass
    assert (tmp_path / LOCK).exists()
    refuse_locked(tmp_path)
    lock = RunLock()
    lock.hold(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_another_machines_lock_holds_until_it_was_untouched_for_long(tmp_path):
    write_foreign(tmp_path, STALE - 30)
    with pytest.raises(RunError, match=r"by process 7 on far; .*wait (29|30) s or delete .*lock"):
        RunLock().hold(tmp_path)
    write_foreign(tmp_path, STALE + 1)
    refuse_locked(tmp_path)
    lock = RunLock()
    lock.hold(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_one_kernel_without_locks_goes_by_age_too(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "fcntl", None)
    write_foreign(tmp_path, 0)
    with pytest.raises(RunError, match="process 7 on far"):
        RunLock().hold(tmp_path)


def test_a_holder_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    lock = RunLock()
    lock.hold(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    deadline = time.monotonic() + 60
    while (tmp_path / LOCK).stat().st_mtime < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - (tmp_path / LOCK).stat().st_mtime < 60


def test_a_holder_whose_lock_was_taken_over_is_refused(tmp_path):
    lock = RunLock()
    lock.hold(tmp_path)
    lock.hold(tmp_path)
    (tmp_path / LOCK).unlink()
    write_foreign(tmp_path, 0)
    with pytest.raises(RunError, match="another trainer has taken the run"):
        lock.hold(tmp_path)
    lock.release()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == 7


@pytest.mark.parametrize("how", ["released", "forgotten"])
def test_a_lock_goes_with_its_file(tmp_path, how):
    lock = RunLock()
    lock.hold(tmp_path)
    if how == "released":
        lock.release()
    else:
        del lock
        gc.collect()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}'])
def test_a_lock_that_was_cut_off_is_taken_over(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    lock = RunLock()
    lock.hold(tmp_path)
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.slow
def test_resume_of_a_run_in_progress_is_refused_and_changes_nothing(
    make_trainer, warm_python, capsys
):
    """Through the command line, against a trainer in a process of its own."""
    trainer = make_trainer(total_phases=3)
    trainer.run_phase()
    trainer.recorder.break_off()
    path = trainer.run.path
    with holding(warm_python, path) as process:
        files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
        assert main(["resume", str(path)]) == 2
        assert f"is being trained by process {process.pid}" in capsys.readouterr().err
        with pytest.raises(RunError, match="is being trained"):
            trainer.run_phase()
        assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == files
    assert main(["resume", str(path)]) == 0
    assert not (path / LOCK).exists()
    phases = [line["phase"] for line in trainer.run.read("metrics.jsonl")]
    assert phases == [0, 1, 2]


@pytest.mark.slow
def test_in_one_process_the_newest_trainer_has_the_run(make_trainer):
    older = make_trainer(total_phases=3)
    older.run_phase()
    newer = RLHFTrainer.resume(older.run.path)
    newer.run_phase()
    with pytest.raises(RunError, match="another trainer has taken the run"):
        older.run_phase()
    assert [line["phase"] for line in newer.run.read("metrics.jsonl")] == [0, 1]


@pytest.mark.slow
def test_a_trainer_whose_run_went_on_without_it_is_refused(make_trainer):
    older = make_trainer(total_phases=3)
    older.run_phase()
    path = older.run.path
    late = RLHFTrainer.resume(path)
    older.run_phase()
    with pytest.raises(RunError, match="of phase 2 by now, not of 1.*another trainer"):
        late.run_phase()
    older.run_phase()
    assert [line["phase"] for line in older.run.read("metrics.jsonl")] == [0, 1, 2]
