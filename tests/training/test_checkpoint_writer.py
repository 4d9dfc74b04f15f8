"""Checkpoints written in the background: the run continues, and every file is complete."""

import gc
import threading

import pytest
from safetensors.torch import load_file

from rlhf_lab.errors import RunError
from rlhf_lab.training import RLHFTrainer, recorder
from rlhf_lab.training.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    read_metadata,
    save_checkpoint,
    wait_for_writers,
    weights,
)
from rlhf_lab.training.restore import load_policy
from tests.training.recorded_runs import is_equal

PATIENCE = 60  # seconds


class Gate:
    """Holds back the writes of checkpoints until `open` is set; fails for the file `full_from`."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.full_from: str | None = None

    def save(self, path, tensors, metadata):
        assert self.open.wait(PATIENCE)
        if self.full_from == path.stem:
            raise RunError(f"cannot write {path}: No space left on device. Make room.")
        save_checkpoint(path, tensors, metadata)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    gate.open.set()
    monkeypatch.setattr(recorder, "save_checkpoint", gate.save)
    yield gate
    gate.open.set()


@pytest.fixture
def waiting(make_trainer, gate, monkeypatch, tmp_path):
    """A run in a relative directory, whose save after the second phase waits for the gate."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(total_phases=4)
    trainer.recorder.out = "relative"
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()
    monkeypatch.chdir("/")  # the path of the save does not change
    threading.Timer(0.3, gate.open.set).start()
    return trainer, tmp_path / "relative"


def test_failed_save_is_raised_once_by_wait_or_warned_about(tmp_path):
    def fail() -> None:
        raise RunError("cannot write a: No space left.")

    writer = CheckpointWriter()
    writer.start(tmp_path, fail)
    with pytest.raises(RunError, match="cannot write a"):
        writer.wait()
    writer.wait()
    writer.start(tmp_path, fail)
    wait_for_writers(tmp_path)
    with pytest.warns(UserWarning, match="cannot write a"):
        del writer
        gc.collect()


@pytest.mark.slow
def test_run_continues_during_a_save_and_the_file_is_the_same(make_trainer, gate):
    """The next phase is complete before the first byte of this phase's state is written.

    With a callback for checkpoints a run waits for each file, so that model and file are equal.
    """
    watched, saved = make_trainer(total_phases=3), {}

    @watched.on("checkpoint")
    def compare(ctx):
        tensors, metadata = load_checkpoint(ctx.checkpoint)
        policy = weights(ctx.policy)
        assert is_equal({name: tensors[name] for name in policy}, policy)
        assert metadata["phase"] == ctx.phase
        saved[ctx.checkpoint.stem, ctx.phase] = tensors

    watched.train()
    trainer = make_trainer(total_phases=3)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()
    trainer.learning_phase(trainer.rollout_phase())  # steps on the same tensors
    path = trainer.run.checkpoints / "last.safetensors"
    assert read_metadata(path)["phase"] == 1
    gate.open.set()
    trainer.recorder.writer.wait()
    assert read_metadata(path)["phase"] == 2 and ("best", 0) in saved and len(saved) >= 8
    for name in ("phase_000002", "last"):
        assert is_equal(load_file(path.with_stem(name)), saved[name, 2])


@pytest.mark.slow
def test_full_disk_ends_the_run_at_the_next_save(make_trainer, gate):
    trainer = make_trainer(total_phases=3)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.full_from = "last"
    trainer.run_phase()
    with pytest.raises(RunError, match="cannot write .*last.safetensors.*No space left"):
        trainer.run_phase()
    gate.full_from = None
    again = RLHFTrainer.resume(trainer.run.path)
    assert again.phase == 1
    again.run_phase()
    again.recorder.writer.wait()
    gate.full_from = "last"
    with pytest.raises(RunError, match="No space left"):  # also at the end
        again.train()
    assert again.run.read_info()["status"] == "running"


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_the_run_waits_for_the_save(waiting, gate, monkeypatch, error):
    trainer, path = waiting

    def fail() -> None:
        raise error

    monkeypatch.setattr(trainer, "rollout_phase", fail)
    with pytest.raises(error):
        trainer.run_phase()
    assert gate.open.is_set()
    assert read_metadata(path / "checkpoints" / "last.safetensors")["phase"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_policy, RLHFTrainer.resume])
def test_loading_waits_for_the_save_in_progress(waiting, load):
    trainer, path = waiting
    loaded = load(path)
    policy = loaded.policy if load == RLHFTrainer.resume else loaded[0]
    assert is_equal(weights(policy), weights(trainer.policy))
