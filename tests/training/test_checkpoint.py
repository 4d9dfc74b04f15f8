"""Checkpoints: what is written comes back bit for bit, and what is damaged is refused."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rlhf_lab.errors import RunError
from rlhf_lab.training import checkpoint, get_optimizer
from rlhf_lab.training.checkpoint import (
    load_checkpoint,
    load_optimizer,
    load_weights,
    optimizer_tensors,
    save_checkpoint,
    weights,
)

NOTES = {"phase": 3, "best": {"phase": 2, "mean_reward": 0.1 + 0.2}, "text": "schön"}


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
    save_checkpoint(path, some_tensors(), NOTES)
    return path


def test_tensors_and_notes_come_back_bit_for_bit(saved):
    tensors, notes = load_checkpoint(saved)
    expected = some_tensors()
    assert notes == NOTES and tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        assert bits(tensors[name]) == bits(tensor), name


def test_parameters_are_saved_without_their_graph(tmp_path):
    save_checkpoint(tmp_path / "a.safetensors", weights(nn.Linear(2, 3)), {})
    tensors, _ = load_checkpoint(tmp_path / "a.safetensors")
    assert tensors.keys() == {"weight", "bias"}
    assert not any(t.requires_grad for t in tensors.values())


def test_nothing_is_left_beside_the_file(saved):
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def test_the_file_is_plain_safetensors_and_no_pickle(saved):
    """Eight bytes of header length, then a JSON header; a pickle or zip starts otherwise."""
    raw = saved.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header["__metadata__"].keys() == {"notes", "crc32"}
    assert json.loads(header["__metadata__"]["notes"]) == NOTES
    assert "matrix" in header
    assert raw[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")


@pytest.mark.parametrize("writes", ["nothing", "half"])
def test_a_write_that_fails_leaves_the_old_file_and_no_partial_one(saved, monkeypatch, writes):
    before = saved.read_bytes()

    def full_disk(tensors, path, metadata):
        if writes == "half":
            Path(path).write_bytes(before[: len(before) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(RunError) as error:
        save_checkpoint(saved, {"matrix": torch.zeros(3)}, {})
    assert str(saved) in str(error.value) and "No space left on device" in str(error.value)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def test_an_interrupted_write_leaves_the_old_file(saved, monkeypatch):
    """Ctrl-C in the middle of a save."""
    before = saved.read_bytes()

    def interrupted(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, {"matrix": torch.zeros(3)}, {})
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == ["last.safetensors"]


def test_a_directory_that_is_gone_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match="cannot write .*gone"):
        save_checkpoint(tmp_path / "gone" / "last.safetensors", some_tensors(), {})


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_truncated_file_is_refused(saved, keep):
    raw = saved.read_bytes()
    saved.write_bytes(raw[:keep])
    with pytest.raises(RunError, match="last.safetensors is corrupt") as error:
        load_checkpoint(saved)
    assert "\n" not in str(error.value)


def test_one_flipped_bit_in_the_tensors_is_refused(saved):
    raw = bytearray(saved.read_bytes())
    raw[-20] ^= 1
    saved.write_bytes(raw)
    with pytest.raises(RunError, match="checksum differs"):
        load_checkpoint(saved)


def test_tensors_that_swapped_names_are_refused(tmp_path):
    """The checksum covers the names: the same bytes under other names are another model."""
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, {"aaaa": torch.zeros(3), "bbbb": torch.ones(3)}, {})
    raw = path.read_bytes()
    swapped = raw.replace(b"aaaa", b"xxxx").replace(b"bbbb", b"aaaa").replace(b"xxxx", b"bbbb")
    assert swapped != raw
    path.write_bytes(swapped)
    with pytest.raises(RunError, match="corrupt"):
        load_checkpoint(path)


def test_changed_notes_are_refused(saved):
    """A phase number that changed on the disk would resume a run at the wrong place."""
    raw = saved.read_bytes()
    changed = raw.replace(rb"\"phase\": 3", rb"\"phase\": 7")
    assert changed != raw
    saved.write_bytes(changed)
    with pytest.raises(RunError, match="corrupt"):
        load_checkpoint(saved)


def test_a_safetensors_file_of_somebody_else_is_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(RunError, match="is corrupt"):
        load_checkpoint(tmp_path / "a.safetensors")


def test_a_checkpoint_that_is_not_there_names_those_that_are(saved):
    with pytest.raises(RunError, match="no checkpoint .*best.safetensors; there are last"):
        load_checkpoint(saved.with_name("best.safetensors"))


def test_without_any_checkpoint_it_says_so(tmp_path):
    with pytest.raises(RunError, match="there are none yet"):
        load_checkpoint(tmp_path / "last.safetensors")


def test_weights_come_back_into_a_module(tmp_path):
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    load_weights(second, dict(weights(first)), tmp_path / "x")
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    assert first.weight.data_ptr() != second.weight.data_ptr()
    assert second.weight.requires_grad


def test_a_missing_parameter_is_refused_by_name(tmp_path):
    tensors = {"weight": torch.zeros(3, 2)}
    with pytest.raises(RunError, match="x.safetensors has no fitting 'bias'; .*another model"):
        load_weights(nn.Linear(2, 3), tensors, tmp_path / "x.safetensors")


def test_a_parameter_of_another_shape_is_refused_by_name(tmp_path):
    """The checkpoint of another model."""
    with pytest.raises(RunError, match="no fitting 'weight'"):
        load_weights(nn.Linear(2, 3), dict(weights(nn.Linear(4, 3))), tmp_path / "x")


def test_a_refused_checkpoint_leaves_the_module_as_it_was(tmp_path):
    module = nn.Linear(2, 3)
    before = module.weight.detach().clone()
    with pytest.raises(RunError):
        load_weights(module, {"weight": torch.zeros(3, 2)}, tmp_path / "x")
    assert torch.equal(module.weight, before)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on a gradient of its own."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_an_optimizer_goes_on_from_the_file_exactly_as_it_would_have(make_trainer, tmp_path):
    """Two steps in one go equal one step, save, load into fresh objects, one step."""
    first, second = make_trainer().policy, make_trainer().policy
    at_once = get_optimizer(first, 1e-3, 1e-2)
    step(first, at_once, seed=1)
    save_checkpoint(tmp_path / "a", weights(first) | optimizer_tensors(at_once), {})
    step(first, at_once, seed=2)
    again = get_optimizer(second, 1e-3, 1e-2)
    tensors, _ = load_checkpoint(tmp_path / "a")
    load_weights(second, tensors, tmp_path / "a")
    load_optimizer(again, tensors)
    step(second, again, seed=2)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, dict(second.named_parameters())[name]), name


def test_loading_an_optimizer_leaves_its_learning_rates(make_trainer):
    policy = make_trainer().policy
    trained, fresh = get_optimizer(policy, 1e-3, 1e-2), get_optimizer(policy, 5e-3, 5e-2)
    step(policy, trained, seed=1)
    load_optimizer(fresh, optimizer_tensors(trained))
    assert [group["lr"] for group in fresh.param_groups] == [5e-3, 5e-2]
    assert len(fresh.state) == len(list(policy.parameters()))
