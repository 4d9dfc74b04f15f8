"""Checkpoints written in the background: the run continues, and every file is complete."""

import gc
import json
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.errors import RunError
from rlhf_lab.training import RLHFTrainer, recorder
from rlhf_lab.training.checkpoint import load_checkpoint, read_metadata, save_checkpoint, weights
from rlhf_lab.training.checkpoint_writer import CheckpointWriter, copied_to_host, wait_for_writers
from rlhf_lab.training.restore import load_policy

PATIENCE = 60


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


def test_copies_are_contiguous_and_share_no_memory():
    tensors = {
        "transposed": torch.arange(6.0).reshape(2, 3).T.requires_grad_(),
        "half": torch.ones(3).bfloat16(),
        "count": torch.tensor(7),
    }
    copies = copied_to_host(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor) and copies[name].dtype == tensor.dtype
        assert copies[name].is_contiguous() and not copies[name].requires_grad
        assert copies[name].data_ptr() != tensor.data_ptr()


def test_start_returns_at_once_and_the_next_one_waits(tmp_path):
    writer, gate, done = CheckpointWriter(), threading.Event(), []
    writer.start(tmp_path, lambda: (gate.wait(PATIENCE), done.append(1)))
    assert not done
    thread = threading.Thread(target=writer.start, args=(tmp_path, lambda: done.append(2)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not done
    gate.set()
    thread.join(PATIENCE)
    wait_for_writers(tmp_path)
    assert done == [1, 2]


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


@pytest.fixture
def reference_run(make_trainer):
    trainer = make_trainer(total_phases=3)
    trainer.train()
    return trainer.run.checkpoints


@pytest.mark.slow
def test_run_continues_during_a_save_and_the_file_is_the_same(make_trainer, gate, reference_run):
    """The next phase is complete before the first byte of this phase's state is written."""
    trainer = make_trainer(total_phases=3, save_every=2)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()
    learned = trainer.learning_phase(trainer.rollout_phase())  # steps on the same tensors
    assert learned is not None
    path = trainer.run.checkpoints / "last.safetensors"
    assert read_metadata(path)["phase"] == 0
    gate.open.set()
    trainer.recorder.writer.wait()
    assert read_metadata(path)["phase"] == 2
    found = load_file(trainer.run.checkpoints / "phase_000002.safetensors")
    expected = load_file(reference_run / "phase_000002.safetensors")
    state = load_file(path)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and torch.equal(state[name], tensor), name


@pytest.mark.slow
def test_background_save_equals_a_save_that_is_awaited(make_trainer):
    """With a callback for checkpoints the run waits, so that file and model can be compared."""
    alone, watched = make_trainer(total_phases=3), make_trainer(total_phases=3)
    seen = []

    @watched.on("checkpoint")
    def compare(ctx):
        tensors, metadata = load_checkpoint(ctx.checkpoint)
        assert metadata["phase"] == ctx.phase
        policy = weights(ctx.policy)
        assert all(torch.equal(tensors[name], policy[name]) for name in policy)
        seen.append((ctx.checkpoint.stem, ctx.phase))

    alone.train(), watched.train()
    assert ("best", 0) in seen and ("last", 3) in seen and len(seen) >= 8
    for path in sorted(watched.run.checkpoints.iterdir()):
        ours, theirs = load_file(alone.run.checkpoints / path.name), load_file(path)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), path.name
        found = [read_metadata(each) for each in (alone.run.checkpoints / path.name, path)]
        assert len({each.pop("run") for each in found}) == 2 and found[0] == found[1]


@pytest.mark.slow
def test_full_disk_ends_the_run_at_the_next_save(make_trainer, gate):
    trainer = make_trainer(total_phases=4)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.full_from = "last"
    trainer.run_phase()
    with pytest.raises(RunError, match="cannot write .*last.safetensors.*No space left") as error:
        trainer.run_phase()
    assert "\n" not in str(error.value)
    assert read_metadata(trainer.run.checkpoints / "last.safetensors")["phase"] == 1
    gate.full_from = None
    assert RLHFTrainer.resume(trainer.run.path).phase == 1


@pytest.mark.slow
def test_full_disk_at_the_last_save_is_raised_at_the_end(make_trainer, gate):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    trainer.start()
    trainer.recorder.writer.wait()
    gate.full_from = "last"
    with pytest.raises(RunError, match="No space left"):
        trainer.train()
    assert trainer.run.read_info()["status"] == "running"


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_in_the_run_waits_for_the_save(make_trainer, gate, monkeypatch, error):
    trainer = make_trainer(total_phases=4)
    trainer.start()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()  # whose checkpoint waits for the gate
    threading.Timer(0.3, gate.open.set).start()

    def fail() -> None:
        raise error

    monkeypatch.setattr(trainer, "rollout_phase", fail)
    with pytest.raises(error):
        trainer.run_phase()
    assert gate.open.is_set()
    assert read_metadata(trainer.run.checkpoints / "last.safetensors")["phase"] == 1


@pytest.mark.slow
def test_loading_waits_for_the_save_in_progress(make_trainer, gate, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(total_phases=4)
    trainer.recorder.out = "relative"
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.open.clear()
    trainer.run_phase()
    monkeypatch.chdir("/")  # the path of the save does not change
    threading.Timer(0.3, gate.open.set).start()
    policy, _ = load_policy(tmp_path / "relative")
    ours = weights(trainer.policy)
    assert all(torch.equal(w, ours[name]) for name, w in weights(policy).items())
    assert RLHFTrainer.resume(tmp_path / "relative").phase == 2


KILLED = """
import json, os, sys, threading, time

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer, recorder

job = json.loads(sys.argv[1])
save, left = recorder.save_checkpoint, [job["file"]]


def slow(path, tensors, metadata):
    # the run continues meanwhile; another thread kills the process at the given time
    left[0] -= 1
    if left[0] == 0:
        threading.Timer(job["after"], os.kill, (os.getpid(), 9)).start()
        time.sleep(job["half"])
        save(path, tensors, metadata)
        time.sleep(60)
    save(path, tensors, metadata)


recorder.save_checkpoint = slow
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
def test_run_killed_during_a_background_save_resumes_bitwise(
    tmp_path, warm_python, uninterrupted, file
):
    """Before or after the rename of the best, a numbered one or the last."""
    rng, out = random.Random(file), tmp_path / "run"
    times = {"after": rng.uniform(0.01, 0.6), "half": rng.uniform(0, 0.3)}
    job = {"out": str(out), "args": RUN, "file": file} | times
    assert warm_python.run(["-c", KILLED, json.dumps(job)]).returncode == -signal.SIGKILL
    for path in out.glob("checkpoints/*.safetensors"):
        load_checkpoint(path)  # complete, at any moment of the kill
    done = warm_python.run(["-m", "rlhf_lab", "resume", str(out)])
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (uninterrupted / "checkpoints").iterdir()}
    assert {path.name for path in (out / "checkpoints").iterdir()} == names
    assert names == {f"{n}.safetensors" for n in ("phase_000000", "phase_000004", "best", "last")}
    for name in names:
        ours, theirs = (load_file(run / "checkpoints" / name) for run in (out, uninterrupted))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs), name
