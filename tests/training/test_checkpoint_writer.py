"""Checkpoints written in the background: the run goes on, and what is written is whole."""

import gc
import json
import random
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.errors import RunError
from rlhf_lab.training import RLHFTrainer, checkpoint_writer
from rlhf_lab.training.checkpoint import load_checkpoint, read_notes, save_checkpoint, weights
from rlhf_lab.training.checkpoint_writer import (
    CheckpointWriter,
    Snapshot,
    copied_to_host,
    wait_for_writers,
)
from rlhf_lab.training.restore import load_policy

PATIENCE = 60


class Gate:
    """Stands before the disk: writes wait until it is opened, and are counted."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []
        self.at_once = self.most_at_once = 0
        self.full_from: str | None = None

    def save(self, path, tensors, notes):
        self.begun.append(path.stem)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.open.wait(PATIENCE)
        self.at_once -= 1
        if self.full_from == path.stem:
            raise RunError(f"cannot write {path}: No space left on device; make room.")
        save_checkpoint(path, tensors, notes)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    gate.open.set()
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", gate.save)
    yield gate
    gate.open.set()


def snapshot(path: Path, value: float = 1.0, **more) -> Snapshot:
    return Snapshot(path, {"a": torch.full((3,), value)}, {"phase": int(value)}, **more)


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_copies_are_contiguous_and_of_the_same_values_and_memory_of_their_own():
    given = {
        "transposed": torch.arange(6.0).reshape(2, 3).T.requires_grad_(),
        "half": torch.ones(3).bfloat16(),
        "count": torch.tensor(7),
    }
    copies = copied_to_host(given)
    for name, tensor in given.items():
        assert torch.equal(copies[name], tensor) and copies[name].dtype == tensor.dtype
        assert copies[name].is_contiguous() and not copies[name].requires_grad
        assert copies[name].data_ptr() != tensor.data_ptr()


def test_save_returns_at_once_and_the_next_one_waits_for_it(tmp_path, gate):
    writer, passed = CheckpointWriter(), threading.Event()
    gate.open.clear()
    writer.save([snapshot(tmp_path / "a.safetensors")])
    until(lambda: gate.begun == ["a"])
    assert not (tmp_path / "a.safetensors").exists()

    def second():
        writer.save([snapshot(tmp_path / "b.safetensors")])
        passed.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not passed.wait(0.2) and gate.begun == ["a"]
    gate.open.set()
    thread.join(PATIENCE)
    writer.wait()
    assert gate.begun == ["a", "b"] and gate.most_at_once == 1
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "b"}


def test_what_comes_then_finds_the_file_whole(tmp_path):
    path, writer, found = tmp_path / "a.safetensors", CheckpointWriter(), []
    writer.save([snapshot(path, 4.0, then=lambda: found.append(load_checkpoint(path)[1]))])
    writer.wait()
    assert found == [{"phase": 4}]


def test_a_relative_path_is_that_of_the_directory_in_which_it_was_given(
    tmp_path, gate, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    gate.open.clear()
    writer = CheckpointWriter()
    writer.save([snapshot(Path("a.safetensors"))])
    monkeypatch.chdir("elsewhere")
    gate.open.set()
    writer.wait()
    assert (tmp_path / "a.safetensors").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_error_is_raised_once_by_the_next_wait_and_what_was_whole_stays(tmp_path, gate):
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    writer = CheckpointWriter()
    writer.save([snapshot(paths[1])])
    writer.wait()
    gate.full_from = "b"
    writer.save([snapshot(path, 2.0) for path in paths])
    with pytest.raises(RunError, match="cannot write .*b.safetensors: No space left") as error:
        writer.save([snapshot(paths[2], 3.0)])
    assert "\n" not in str(error.value)
    writer.wait()
    assert load_checkpoint(paths[0])[1] == {"phase": 2}
    assert load_checkpoint(paths[1])[1] == {"phase": 1}
    assert not paths[2].exists()


def test_an_error_that_nobody_waited_for_is_said_when_the_writer_goes(tmp_path):
    writer = CheckpointWriter()
    writer.save([snapshot(tmp_path / "gone" / "a.safetensors")])
    wait_for_writers(tmp_path / "gone")
    with pytest.warns(UserWarning, match="cannot write .*gone"):
        del writer
        gc.collect()


def test_memory_of_a_snapshot_is_free_before_the_next_is_written(tmp_path, monkeypatch):
    """The best weights do not stay in memory while the state is written."""
    pair, still_there = [snapshot(tmp_path / f"{name}.safetensors") for name in "ab"], []
    references = [weakref.ref(one.tensors["a"]) for one in pair]

    def save(path, tensors, notes):
        still_there.append([reference() is not None for reference in references])

    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", save)
    writer = CheckpointWriter()
    first = threading.Event()
    pair[0] = Snapshot(pair[0].path, pair[0].tensors, pair[0].notes, first.wait)
    writer.save(pair)
    pair.clear()
    first.set()
    writer.wait()
    assert still_there == [[True, True], [False, True]]


@pytest.fixture
def reference_run(make_trainer):
    trainer = make_trainer(total_phases=3)
    trainer.train()
    return trainer.run.checkpoints


@pytest.mark.slow
def test_the_run_goes_on_while_the_state_is_written_and_the_file_is_the_same(
    make_trainer, gate, reference_run
):
    """All of the next phase is done before the first byte of this one's state is written."""
    trainer = make_trainer(total_phases=3, save_every=2)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()
    learned = trainer.learning_phase(trainer.rollout_phase())  # steps on the very tensors
    assert learned is not None
    path = trainer.run.checkpoints / "last.safetensors"
    assert read_notes(path)["phase"] == 0
    gate.open.set()
    trainer.recorder.writer.wait()
    assert read_notes(path)["phase"] == 2
    found = load_file(trainer.run.checkpoints / "phase_000002.safetensors")
    expected = load_file(reference_run / "phase_000002.safetensors")
    state = load_file(path)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and torch.equal(state[name], tensor), name


@pytest.mark.slow
def test_the_state_in_the_background_is_that_of_a_run_that_waits_for_each_save(make_trainer):
    """A listener makes the run wait, so that file and model are compared at the same time."""
    alone, watched = make_trainer(total_phases=3), make_trainer(total_phases=3)
    seen = []

    @watched.on("checkpoint")
    def compare(ctx):
        tensors, notes = load_checkpoint(ctx.checkpoint)
        assert notes["phase"] == ctx.phase
        policy = weights(ctx.policy)
        assert all(torch.equal(tensors[name], policy[name]) for name in policy)
        seen.append((ctx.checkpoint.stem, ctx.phase))

    alone.train(), watched.train()
    assert ("best", 0) in seen and ("last", 3) in seen and len(seen) >= 8
    for path in sorted(watched.run.checkpoints.iterdir()):
        ours, theirs = load_file(alone.run.checkpoints / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), path.name
        notes = [read_notes(each) for each in (alone.run.checkpoints / path.name, path)]
        assert len({each.pop("run") for each in notes}) == 2 and notes[0] == notes[1]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_at_the_next_save_in_one_sentence(make_trainer, gate):
    trainer = make_trainer(total_phases=4)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.full_from = "last"
    trainer.run_phase()
    with pytest.raises(RunError, match="cannot write .*last.safetensors.*No space left") as error:
        trainer.run_phase()
    assert "\n" not in str(error.value)
    assert read_notes(trainer.run.checkpoints / "last.safetensors")["phase"] == 1
    gate.full_from = None
    assert RLHFTrainer.resume(trainer.run.path).phase == 1


@pytest.mark.slow
def test_a_full_disk_at_the_last_save_is_said_at_the_end(make_trainer, gate):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    trainer.start()
    trainer.recorder.writer.wait()
    gate.full_from = "last"
    with pytest.raises(RunError, match="No space left"):
        trainer.train()
    assert trainer.run.read_info()["status"] == "running"


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_loop_waits_for_the_writer_and_comes_through(make_trainer, gate, error):
    trainer = make_trainer(total_phases=4)
    trainer.start()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()  # whose checkpoint waits for the gate
    threading.Timer(0.3, gate.open.set).start()

    def broken():
        raise error

    with pytest.raises(error):
        trainer.run_phase_on(broken)
    assert gate.open.is_set()
    assert read_notes(trainer.run.checkpoints / "last.safetensors")["phase"] == 1


@pytest.mark.slow
def test_a_run_that_is_loaded_while_it_is_written_is_what_was_saved_last(make_trainer, gate):
    trainer = make_trainer(total_phases=4)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()
    threading.Timer(0.3, gate.open.set).start()
    policy, _ = load_policy(trainer.run.path)
    ours = weights(trainer.policy)
    assert all(torch.equal(w, ours[name]) for name, w in weights(policy).items())
    assert RLHFTrainer.resume(trainer.run.path).phase == 2


KILLED = """
import json, os, sys, threading, time

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer, checkpoint_writer

job = json.loads(sys.argv[1])
save, left = checkpoint_writer.save_checkpoint, [job["file"]]


def slow(path, tensors, notes):
    # the run goes on meanwhile; another thread kills it at the time given
    left[0] -= 1
    if left[0] == 0:
        threading.Timer(job["after"], os.kill, (os.getpid(), 9)).start()
        time.sleep(job["half"])
        save(path, tensors, notes)
        time.sleep(60)
    save(path, tensors, notes)


checkpoint_writer.save_checkpoint = slow
RLHFTrainer(RLHFArgs(**job["args"]), out=job["out"]).train()
"""
RUN = {
    "preset": "reel",
    "total_phases": 6,
    "batch_size": 8,
    "num_minibatches": 2,
    "warmup_steps": 1,
    "gen_len": 8,
    "save_every": 2,
    "keep_checkpoints": 1,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, warm_python) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    job = {"out": str(out), "args": RUN, "file": 0, "after": 0, "half": 0}
    done = warm_python.run(["-c", KILLED, json.dumps(job)])
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("file", [2, 3, 4, 6])
def test_a_run_that_is_killed_while_it_writes_in_the_background_ends_as_one_that_is_not(
    tmp_path, warm_python, uninterrupted, file
):
    """Before or after the rename of the best, a numbered one or the last."""
    rng, out = random.Random(file), tmp_path / "run"
    times = {"after": rng.uniform(0.01, 0.6), "half": rng.uniform(0, 0.3)}
    job = {"out": str(out), "args": RUN, "file": file} | times
    assert warm_python.run(["-c", KILLED, json.dumps(job)]).returncode == -signal.SIGKILL
    for path in out.glob("checkpoints/*.safetensors"):
        load_checkpoint(path)  # whole, whatever was being written
    done = warm_python.run(["-m", "rlhf_lab", "resume", str(out)])
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (uninterrupted / "checkpoints").iterdir()}
    assert {path.name for path in (out / "checkpoints").iterdir()} == names
    assert names == {f"{n}.safetensors" for n in ("phase_000000", "phase_000004", "best", "last")}
    for name in names:
        ours, theirs = (load_file(run / "checkpoints" / name) for run in (out, uninterrupted))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
