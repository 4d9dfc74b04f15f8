"""The lock of a run: other processes are rejected until they end."""

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from rlhf_lab.__main__ import main
from rlhf_lab.errors import RunError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.run_dir import LOCK, RunLock

HOLDER = """
import sys, time
from pathlib import Path
from rlhf_lab.training.run_dir import RunLock

lock = RunLock()
lock.hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holding(warm_python) -> Callable[[Path], AbstractContextManager[None]]:
    """A process that holds the lock of a directory, and is killed at the end."""

    @contextlib.contextmanager
    def hold(directory):
        read, write = os.pipe()
        with open(os.devnull, "r+") as null:
            files = (null.fileno(), write, null.fileno())
            process = warm_python.start(["-c", HOLDER, str(directory)], files)
        os.close(write)
        with open(read) as output:
            assert output.readline() == "held\n"
        try:
            yield
        finally:
            os.kill(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL

    return hold


def test_lock_rejects_another_process_until_it_is_killed(holding, tmp_path):
    lock = RunLock()
    with holding(tmp_path):
        with pytest.raises(RunError, match="is being trained by another process. Stop that"):
            lock.hold(tmp_path)
        assert not lock.is_held
    lock.hold(tmp_path)
    lock.release()
    assert not lock.is_held and not (tmp_path / LOCK).exists()
    lock.hold(tmp_path)
    del lock
    gc.collect()
    with holding(tmp_path):
        pass


def test_newest_lock_of_a_process_takes_over(tmp_path):
    older, newer = RunLock(), RunLock()
    older.hold(tmp_path)
    older.hold(tmp_path)
    newer.hold(tmp_path)
    with pytest.raises(RunError, match="Another trainer has taken over the run"):
        older.hold(tmp_path)
    older.release()
    newer.hold(tmp_path)
    assert newer.is_held and (tmp_path / LOCK).exists()


@pytest.mark.slow
def test_resume_of_a_run_in_progress_is_rejected(make_trainer, holding, capsys):
    trainer = make_trainer(total_phases=3)
    trainer.run_phase()
    trainer.recorder.break_off()
    path = trainer.run.path
    with holding(path):
        files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
        assert main(["resume", str(path)]) == 2
        assert "is being trained by another process" in capsys.readouterr().err
        with pytest.raises(RunError, match="is being trained"):
            trainer.run_phase()
        assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == files
    assert main(["resume", str(path)]) == 0 and not (path / LOCK).exists()
    assert [line["phase"] for line in trainer.run.read("metrics.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_newest_trainer_of_a_process_has_the_run(make_trainer):
    """A trainer that was loaded before another one continued the run is rejected."""
    older = make_trainer(total_phases=4)
    older.run_phase()
    newer, late = (RLHFTrainer.resume(older.run.path) for _ in range(2))
    newer.run_phase()
    with pytest.raises(RunError, match="Another trainer has taken over the run"):
        older.run_phase()
    newer.recorder.break_off()
    with pytest.raises(RunError, match="of phase 2 now, not of 1: another trainer"):
        late.run_phase()
    newer.run_phase()
    assert [line["phase"] for line in older.run.read("metrics.jsonl")] == [0, 1, 2]
