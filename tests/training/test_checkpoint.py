"""Checkpoints: tensors are stored bitwise, damaged files are rejected, old ones are removed."""

import json
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer, checkpoint, get_optimizer
from rlhf_lab.training.checkpoint import (
    flatten_state,
    is_numbered,
    load_checkpoint,
    load_weights,
    remove_outdated,
    save_checkpoint,
    unflatten_state,
    weights,
)
from rlhf_lab.training.restore import load_policy

METADATA = {"phase": 3, "best": {"phase": 2, "mean_reward": 0.1 + 0.2}, "text": "schön"}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(3, 4, generator=generator),
        "transposed": torch.randn(5, 2, generator=generator).T,
        "half": torch.randn(7, generator=generator).half(),
        "bfloat": torch.randn(3, generator=generator).bfloat16(),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor([1, -2]),
        "odd": torch.tensor([torch.inf, -torch.inf, -0.0, 1e-45]),
        "empty": torch.zeros(0, 3),
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "last.safetensors"
    save_checkpoint(path, some_tensors(), METADATA)
    return path


def test_load_returns_saved_tensors_and_metadata_bitwise(saved):
    tensors, metadata = load_checkpoint(saved)
    expected = some_tensors()
    assert metadata == METADATA and tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor), name
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def test_file_is_plain_safetensors(saved):
    """Eight bytes of header length, then a JSON header; pickle and zip start differently."""
    raw = saved.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header["__metadata__"].keys() == {"metadata", "crc32"}
    assert json.loads(header["__metadata__"]["metadata"]) == METADATA
    assert "matrix" in header


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_file_only(saved, monkeypatch, error):
    before = saved.read_bytes()

    def fail(tensors, path, metadata):
        Path(path).write_bytes(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(checkpoint, "save_file", fail)
    is_full = isinstance(error, OSError)
    with pytest.raises(RunError if is_full else KeyboardInterrupt) as caught:
        save_checkpoint(saved, {"matrix": torch.zeros(3)}, {})
    assert not is_full or f"cannot write {saved}: No space left" in str(caught.value)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def flip_bit(raw: bytes) -> bytes:
    return raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:]


def swap_names(raw: bytes) -> bytes:
    for old, new in ((b"matrix", b"xxxxxx"), (b"bfloat", b"matrix"), (b"xxxxxx", b"bfloat")):
        raw = raw.replace(old, new)
    return raw


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda raw, n=n: raw[:n] for n in (0, 4, 8, 60, -1)),
        flip_bit,
        swap_names,
        lambda raw: raw.replace(rb"\"phase\": 3", rb"\"phase\": 7"),
        lambda raw: (2**63).to_bytes(8, "little") + raw[8:],
    ],
)
def test_load_rejects_a_damaged_file(saved, damage):
    before = saved.read_bytes()
    saved.write_bytes(damage(before))
    assert saved.read_bytes() != before
    with pytest.raises(RunError, match="last.safetensors is corrupt") as error:
        load_checkpoint(saved)
    assert "\n" not in str(error.value)


def test_load_rejects_a_foreign_safetensors_file(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(RunError, match="is corrupt"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_missing_checkpoint_lists_the_available_ones(saved, tmp_path):
    with pytest.raises(RunError, match="No checkpoint .*best.safetensors. Available: last"):
        load_checkpoint(saved.with_name("best.safetensors"))
    with pytest.raises(RunError, match="None has been saved yet"):
        load_checkpoint(tmp_path / "gone" / "last.safetensors")


def test_load_weights_copies_into_a_module(tmp_path):
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    load_weights(second, weights(first), tmp_path / "x")
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    assert first.weight.data_ptr() != second.weight.data_ptr() and second.weight.requires_grad


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"weight": torch.zeros(3, 2)}, "'bias' is missing"),
        ({"weight": torch.zeros(3, 4)}, r"'weight' is torch.float32 \(3, 4\), expected .*\(3, 2\)"),
        ({"weight": torch.zeros(3, 2).half()}, "'weight' is torch.float16"),
    ],
)
def test_load_weights_rejects_another_model(tmp_path, tensors, word):
    module = nn.Linear(2, 3)
    before = module.weight.detach().clone()
    with pytest.raises(RunError, match=f"x.safetensors is of another model: {word}"):
        load_weights(module, tensors, tmp_path / "x.safetensors")
    assert torch.equal(module.weight, before)


STATE = {
    "numbers": [1, 2.5, float("inf"), True, None, "text"],
    3: {"tuple": (1, (2.0,)), "nested": [{"a": []}]},
    "milestones": Counter({4: 1}),
    "tensor": torch.tensor([0.1, 0.2]).double(),
}


def test_flattened_state_survives_json():
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(flatten_state(STATE, "s", tensors)))
    state = unflatten_state(tree, tensors)
    assert tensors.keys() == {"s.tensor"} and torch.equal(state.pop("tensor"), STATE["tensor"])
    assert state == {key: value for key, value in STATE.items() if key != "tensor"}
    assert type(state["milestones"]) is Counter and type(state[3]["tuple"]) is tuple


@pytest.mark.parametrize(
    "value", [{1, 2}, print, object(), 1j, nn.Linear(1, 1)], ids=lambda value: type(value).__name__
)
def test_state_that_json_cannot_store_is_rejected_by_path(value):
    with pytest.raises(ConfigError, match="scheduler.a.1 is a .*checkpoint cannot store"):
        flatten_state({"a": [0, value]}, "scheduler", {})


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_restored_optimizer_steps_bitwise_equally(make_trainer, tmp_path):
    first, second = make_trainer().policy, make_trainer().policy
    optimizer, restored = get_optimizer(first, 1e-3, 1e-2), get_optimizer(second, 5e-3, 5e-2)
    step(first, optimizer, seed=1)
    moments: dict[str, torch.Tensor] = {}
    tree = flatten_state(optimizer.state_dict(), "optimizer", moments)
    save_checkpoint(tmp_path / "a", weights(first) | moments, {"tree": tree})
    step(first, optimizer, seed=2)
    tensors, metadata = load_checkpoint(tmp_path / "a")
    load_weights(second, tensors, tmp_path / "a")
    restored.load_state_dict(unflatten_state(metadata["tree"], tensors))
    step(second, restored, seed=2)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, dict(second.named_parameters())[name]), name


def test_numbered_phases_are_powers_of_two():
    for keep in (None, 1, 5):
        assert [n for n in range(20) if is_numbered(n, keep)] == [0, 1, 2, 4, 8, 16]
    assert [n for n in range(20) if is_numbered(n, 0)] == [0]


@pytest.mark.parametrize(
    ("keep", "left"), [(None, "0 1 2 4 8 16"), (0, "0 16"), (1, "0 8 16"), (9, "0 1 2 4 8 16")]
)
def test_remove_outdated_keeps_phase_0_and_the_newest(tmp_path, keep, left):
    names = [f"phase_{n:06d}" for n in (0, 1, 2, 4, 8, 16)] + ["best", "last", "phase_mine"]
    for name in names:
        (tmp_path / f"{name}.safetensors").touch()
    remove_outdated(tmp_path, keep, phase=8)  # that of phase 16 is newer
    stems = {path.stem for path in tmp_path.iterdir()}
    expected = {f"phase_{int(n):06d}" for n in left.split()}
    assert stems == expected | {"best", "last", "phase_mine"}


@pytest.mark.slow
def test_run_keeps_the_newest_numbered_checkpoints(make_trainer):
    trainer = make_trainer(total_phases=4, keep_checkpoints=1)
    trainer.train()
    stems = sorted(path.stem for path in trainer.run.checkpoints.iterdir())
    assert stems == ["best", "last", "phase_000000", "phase_000004"]
    state = load_file(trainer.run.checkpoints / "last.safetensors")
    policy, args = load_policy(trainer.run.path, 4)
    assert args.keep_checkpoints == 1
    assert all(torch.equal(w, state[name]) for name, w in weights(policy).items())
    load_policy(trainer.run.path, 0)
    with pytest.raises(RunError, match="No checkpoint .*Available: best, last, phase_000000, "):
        load_policy(trainer.run.path, 2)
    assert RLHFTrainer.resume(trainer.run.path).phase == 4


def test_keep_checkpoints_survives_json():
    fields = RLHFArgs(keep_checkpoints=0).to_dict()
    assert RLHFArgs.from_dict(json.loads(json.dumps(fields))).keep_checkpoints == 0
