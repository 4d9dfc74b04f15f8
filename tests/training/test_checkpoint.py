"""Checkpoints: tensors are stored bitwise, damaged files are rejected, old ones are removed."""

import json
import struct
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_lab.errors import ConfigError, RunError
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


def test_file_is_plain_safetensors(saved):
    """Eight bytes of header length, then a JSON header; pickle and zip start differently."""
    raw = saved.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__").keys() == {"metadata", "crc32"}
    tensors, metadata = load_checkpoint(saved)
    assert metadata == METADATA and tensors.keys() == header.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor), name
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def swap_names(raw: bytes) -> bytes:
    for old, new in ((b"matrix", b"xxxxxx"), (b"bfloat", b"matrix"), (b"xxxxxx", b"bfloat")):
        raw = raw.replace(old, new)
    return raw


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda raw, n=n: raw[:n] for n in (0, 4, 60, -1)),
        lambda raw: raw[:-20] + bytes([raw[-20] ^ 1]) + raw[-19:],
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


def test_load_rejects_a_file_from_elsewhere(saved):
    save_file({"a": torch.zeros(2)}, saved)
    with pytest.raises(RunError, match="is corrupt"):
        load_checkpoint(saved)


def test_load_weights_copies_all_or_rejects_another_model(tmp_path):
    source, module, path = nn.Linear(2, 3), nn.Linear(2, 3), tmp_path / "x.safetensors"
    good, before = weights(source), copy_weights(module)
    for tensors, words in (
        ({"weight": good["weight"]}, "'bias' is missing"),
        (good | {"bias": torch.zeros(4)}, r"'bias' is torch.float32 \(4,\), expected .*\(3,\)"),
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


def test_flattened_state_survives_json():
    tensors: dict[str, torch.Tensor] = {}
    tensor = torch.tensor([0.1, 0.2]).double()
    tree = json.loads(json.dumps(flatten_state(STATE | {"tensor": tensor}, "s", tensors)))
    state = unflatten_state(tree, tensors)
    assert tensors.keys() == {"s.tensor"} and torch.equal(state.pop("tensor"), tensor)
    assert state == STATE
    assert type(state["milestones"]) is Counter and type(state[3]["tuple"]) is tuple


@pytest.mark.parametrize("value", [{1, 2}, print, 1j, nn.Linear(1, 1)], ids=repr)
def test_state_that_json_cannot_store_is_rejected_by_path(value):
    with pytest.raises(ConfigError, match="scheduler.a.1 is a .*checkpoint cannot store"):
        flatten_state({"a": [0, value]}, "scheduler", {})


@pytest.mark.parametrize(
    ("keep", "left"), [(None, "0 1 2 4 8 16"), (0, "0 16"), (1, "0 8 16"), (9, "0 1 2 4 8 16")]
)
def test_remove_outdated_keeps_phase_0_and_the_newest(tmp_path, keep, left):
    numbers = [n for n in range(20) if is_numbered(n, keep)]
    assert numbers == ([0] if keep == 0 else [0, 1, 2, 4, 8, 16])
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
    policy, args = load_policy(trainer.run.path, 4)
    assert args == trainer.args
    assert is_equal(copy_weights(policy), copy_weights(trainer.policy))
    with pytest.raises(RunError, match="No checkpoint .*Available: best, last, phase_000000, "):
        load_policy(trainer.run.path, 2)
