"""Checkpoints: bitwise tensors, rejected damage, removed files, and writes in the background."""

import gc
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer, recorder
from rlhf_lab.training.checkpoint import (
    CheckpointWriter,
    copied_to_host,
    flatten_state,
    is_numbered,
    load_checkpoint,
    load_weights,
    read_metadata,
    remove_outdated,
    save_checkpoint,
    unflatten_state,
    wait_for_writers,
    weights,
)
from rlhf_lab.training.resume import load_policy
from tests.training.recorded_runs import copy_weights, is_equal

METADATA = {"phase": 3, "best": {"phase": 2, "mean_reward": 0.1 + 0.2}, "text": "schön"}
TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4) / 7,
    "transposed": torch.arange(10.0).reshape(5, 2).T,
    "half": torch.tensor([0.1, 0.2]).half(),
    "bfloat": torch.tensor([0.1, 0.2]).bfloat16(),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor([1, -2]),
    "odd": torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1e-45]),
    "empty": torch.zeros(0, 3),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, TENSORS, METADATA)
    return path


def test_file_is_plain_safetensors_of_the_same_bits(saved):
    tensors, metadata = load_checkpoint(saved)
    assert metadata == METADATA and tensors.keys() == load_file(saved).keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor), name
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def test_load_rejects_a_damaged_file(saved):
    before = saved.read_bytes()
    for damaged in (
        b"",
        before[:-1],
        before[:-20] + bytes([before[-20] ^ 1]) + before[-19:],
        before.replace(b"matrix", b"matriy"),
        before.replace(rb"\"phase\": 3", rb"\"phase\": 7"),
        save({"a": torch.zeros(2)}),  # by another program, without metadata
    ):
        saved.write_bytes(damaged)
        assert damaged != before
        with pytest.raises(RunError, match="last.safetensors is corrupt") as error:
            load_checkpoint(saved)
        assert "\n" not in str(error.value)


def test_load_weights_copies_all_or_rejects_another_model(tmp_path):
    source, module, path = nn.Linear(2, 3), nn.Linear(2, 3), tmp_path / "x.safetensors"
    good, before = weights(source), copy_weights(module)
    for tensors, words in (
        ({"weight": good["weight"]}, "'bias' is missing"),
        (good | {"bias": torch.zeros(4)}, r"'bias' is torch.float32 \(4,\), expected .*\(3,\)"),
        (good | {"bias": torch.zeros(3).half()}, r"'bias' is torch.float16 \(3,\), expected"),
    ):
        with pytest.raises(RunError, match=f"x.safetensors is of another model: {words}"):
            load_weights(module, tensors, path)
        assert is_equal(copy_weights(module), before)
    load_weights(module, good, path)
    assert is_equal(copy_weights(module), copy_weights(source))
    assert module.bias.requires_grad and module.bias.data_ptr() != source.bias.data_ptr()


STATE = {
    "numbers": [1, 2.5, float("inf"), True, None, "text"],
    3: {"tuple": (1, (2.0,)), "nested": [{"a": []}]},
    "milestones": Counter({4: 1}),
}


def test_flattened_state_survives_its_file(tmp_path):
    """Also a tensor that two parameters share: safetensors stores no shared memory."""
    tensors, table, path = {}, torch.tensor([1, 2]).double() / 3, tmp_path / "x.safetensors"
    tree = flatten_state(STATE | {"one": table, "two": table}, "s", tensors)
    save_checkpoint(path, copied_to_host(tensors), {"tree": tree})
    found, metadata = load_checkpoint(path)
    state = unflatten_state(metadata["tree"], found)
    assert found.keys() == {"s.one", "s.two"}
    assert all(torch.equal(state.pop(name), table) for name in ("one", "two"))
    assert state == STATE
    assert type(state["milestones"]) is Counter and type(state[3]["tuple"]) is tuple
    for value in ({1, 2}, print, 1j, nn.Linear(1, 1)):
        with pytest.raises(ConfigError, match="scheduler.a.1 is a .*checkpoint cannot store"):
            flatten_state({"a": [0, value]}, "scheduler", {})


@pytest.mark.parametrize(
    ("keep", "left"), [(None, "0 1 2 3 5 8 13"), (0, "0 13"), (1, "0 8 13"), (9, "0 1 2 3 5 8 13")]
)
def test_remove_outdated_keeps_phase_0_and_the_newest(tmp_path, keep, left):
    numbers = [n for n in range(20) if is_numbered(n, keep)]
    assert numbers == ([0] if keep == 0 else [0, 1, 2, 3, 5, 8, 13])
    names = [f"phase_{n:06d}" for n in (0, 1, 2, 3, 5, 8, 13)] + ["best", "last", "phase_mine"]
    for name in names:
        (tmp_path / f"{name}.safetensors").touch()
    remove_outdated(tmp_path, keep, phase=8)  # that of phase 13 is newer
    stems = {path.stem for path in tmp_path.iterdir()}
    expected = {f"phase_{int(n):06d}" for n in left.split()}
    assert stems == expected | {"best", "last", "phase_mine"}


PATIENCE = 60  # seconds


@pytest.fixture
def gate(monkeypatch):
    """An event that every write of a checkpoint waits for; it is set at first."""
    gate = threading.Event()
    gate.set()

    def save(path, tensors, metadata):
        assert gate.wait(PATIENCE)
        save_checkpoint(path, tensors, metadata)

    monkeypatch.setattr(recorder, "save_checkpoint", save)
    yield gate
    gate.set()


def train_two_phases(trainer: RLHFTrainer, gate: threading.Event) -> None:
    """Train two phases; the save after the second waits for the gate."""
    trainer.run_phase()
    trainer.recorder.writer.wait()
    gate.clear()
    trainer.run_phase()


@pytest.mark.slow
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
def test_run_continues_during_a_save_of_its_phase(make_trainer, gate):
    """The next phase has stepped on the tensors before the first byte is written."""
    trainer = make_trainer(total_phases=3)
    train_two_phases(trainer, gate)
    before = copy_weights(trainer.policy)
    trainer.learning_phase(trainer.rollout_phase())
    path = trainer.run.checkpoints / "last.safetensors"
    assert read_metadata(path)["phase"] == 1
    gate.set()
    trainer.recorder.writer.wait()
    assert read_metadata(path)["phase"] == 2 and not is_equal(copy_weights(trainer.policy), before)
    saved = load_file(path)
    assert is_equal({name: saved[name] for name in before}, before)


@pytest.mark.slow
@pytest.mark.parametrize("load", [load_policy, RLHFTrainer.resume])
def test_loading_waits_for_the_save(make_trainer, gate, load):
    trainer = make_trainer(total_phases=4)
    train_two_phases(trainer, gate)
    threading.Timer(0.3, gate.set).start()
    loaded = load(trainer.run.path)
    policy = loaded[0] if load is load_policy else loaded.policy
    assert is_equal(weights(policy), weights(trainer.policy))
