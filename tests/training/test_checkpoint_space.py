"""How many checkpoints stay on the disk, what they take there, and what is said of it."""

import json
import shutil
import warnings
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.models import TransformerWithCritic, TransformerWithValueHead
from rlhf_lab.models.hooked_model import make_model
from rlhf_lab.training import checkpoint
from rlhf_lab.training.checkpoint import load_checkpoint, read_notes, weights
from rlhf_lab.training.checkpoint_space import (
    in_words,
    is_numbered,
    most_bytes,
    most_numbered,
    remove_outdated,
)
from rlhf_lab.training.restore import load_policy

GPT2 = {
    "gpt2-small": {"n_layers": 12, "d_model": 768, "n_heads": 12},
    "gpt2-medium": {"n_layers": 24, "d_model": 1024, "n_heads": 16},
}


def shape_of(preset: str) -> TransformerWithValueHead:
    """The policy of a preset on the meta device: shapes without weights."""
    sizes = {"d_head": 64, "d_vocab": 50257, "n_ctx": 1024, "act_fn": "gelu_new", "device": "meta"}
    with torch.device("meta"):
        model = make_model(**GPT2[preset], **sizes, init_weights=False)
        return TransformerWithValueHead(model)


def test_gpt2_medium_takes_at_most_12_gb_on_the_disk_of_26_without_a_bound():
    """P weights: best and twice the state are 4 P + 2 x 12 P bytes; phase 0 adds its value head."""
    policy = shape_of("gpt2-medium")
    n = sum(p.numel() for p in policy.parameters())
    head = sum(p.numel() for p in policy.value_head.parameters())
    assert n == 410_539_090 and head == 4_202_497
    args = RLHFArgs(preset="gpt2-medium")
    most = most_bytes(args, policy)
    assert most == pytest.approx(28 * n + 4 * head, rel=1e-4)
    assert most <= 12e9
    unbounded = most_bytes(RLHFArgs(keep_checkpoints=None), policy)
    assert unbounded == pytest.approx((9 + 1 + 6) * 4 * n, rel=1e-4)


def test_gpt2_small_takes_at_most_8_gb_on_the_disk():
    policy = shape_of("gpt2-small")
    assert 6e9 < most_bytes(RLHFArgs(preset="gpt2-small"), policy) <= 8e9


@pytest.mark.parametrize(
    "keep, save_every, total, most",
    [
        (None, 1, 8, 4),  # 1, 2, 4, 8
        (0, 1, 100, 0),
        (1, 1, 100, 2),  # the older one goes when last is of the newer one's phase
        (1, 10, 8, 4),  # last is saved at the end alone
        (2, 10, 100, 4),  # 1, 2, 4, 8 before the first save
        (2, 10, 7, 3),
        (3, 3, 100, 4),  # 1, 2 | 4 | 8 | 16 and one that goes
        (9, 1, 100, 7),
    ],
)
def test_the_most_numbered_ones_at_a_time_worked_by_hand(keep, save_every, total, most):
    fields = {"keep_checkpoints": keep, "save_every": save_every, "total_phases": total}
    assert most_numbered(RLHFArgs(preset="reel", warmup_steps=1, **fields)) == most


@pytest.mark.parametrize("keep", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("save_every", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("total", [1, 7, 33, 64])
def test_the_most_at_a_time_is_what_a_run_of_files_comes_to(tmp_path, keep, save_every, total):
    """The files alone, made and removed as the recorder does."""
    fields = {"keep_checkpoints": keep, "save_every": save_every, "total_phases": total}
    args, most = RLHFArgs(preset="reel", warmup_steps=0, **fields), 0
    for phase in range(total + 1):
        if is_numbered(phase, keep):
            (tmp_path / f"phase_{phase:06d}.safetensors").touch()
        most = max(most, len(list(tmp_path.iterdir())) - 1)
        if phase == total or phase % save_every == 0:
            remove_outdated(tmp_path, keep, phase)
    assert most == most_numbered(args)


def test_only_numbered_checkpoints_of_a_run_are_removed(tmp_path):
    names = "phase_000000 phase_000001 phase_000002 phase_000008 phase_final last best".split()
    for name in names:
        (tmp_path / f"{name}.safetensors").touch()
    (tmp_path / "phase_000001.txt").touch()
    remove_outdated(tmp_path, 0, 4)
    left = {path.name for path in tmp_path.iterdir()}
    gone = {"phase_000001.safetensors", "phase_000002.safetensors"}
    assert left == {f"{name}.safetensors" for name in names} - gone | {"phase_000001.txt"}


BOUNDED = {
    "everything": {},
    "few": {"keep_checkpoints": 1},
    "none": {"keep_checkpoints": 0, "save_every": 3},
    "adapters": {"keep_checkpoints": 1, "lora_rank": 8},
    "critic": {"keep_checkpoints": 1, "value_head": "separate"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BOUNDED)
def test_the_files_of_a_run_come_within_a_hundredth_of_the_bound(make_trainer, monkeypatch, case):
    """What lies in the folder each time a file has been written beside the older ones."""
    trainer, taken = make_trainer(total_phases=4, **BOUNDED[case]), []
    save_file = checkpoint.save_file

    def save(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        taken.append(sum(file.stat().st_size for file in path.parent.iterdir()))

    monkeypatch.setattr(checkpoint, "save_file", save)
    trainer.train()
    most = trainer.recorder.most_bytes()
    assert max(taken) <= most <= 1.01 * max(taken)
    assert isinstance(trainer.policy, TransformerWithCritic) == (case == "critic")


@pytest.fixture
def bounded(make_trainer):
    trainer = make_trainer(total_phases=4, keep_checkpoints=1)
    first = {name: p.detach().clone() for name, p in weights(trainer.policy).items()}
    trainer.train()
    return trainer, first


@pytest.mark.slow
def test_an_older_one_goes_only_when_last_is_of_the_newer_ones_phase(make_trainer):
    trainer, seen = make_trainer(total_phases=5, keep_checkpoints=1, save_every=3), []

    @trainer.on("checkpoint")
    def look(ctx):
        there = ctx.checkpoint.parent
        numbers = sorted(int(path.stem[-6:]) for path in there.glob("phase_*"))
        last = there / "last.safetensors"
        seen.append(
            (ctx.checkpoint.stem[-6:], numbers, last.exists() and read_notes(last)["phase"])
        )

    trainer.train()
    assert [entry for entry in seen if entry[0] != "best"] == [
        ("000000", [0], False),
        ("last", [0], 0),
        ("000001", [0, 1], 0),
        ("000002", [0, 1, 2], 0),
        ("last", [0, 2], 3),
        ("000004", [0, 2, 4], 3),
        ("last", [0, 4], 5),
    ]


@pytest.mark.slow
def test_phase_0_is_loaded_as_it_was_from_what_it_left_where_it_was(bounded):
    trainer, first = bounded
    saved = load_file(trainer.run.checkpoints / "phase_000000.safetensors")
    assert saved.keys() == {name for name in first if name.startswith("value_head.")}
    policy, _ = load_policy(trainer.run.path, 0)
    loaded = weights(policy)
    assert loaded.keys() == first.keys()
    assert all(torch.equal(loaded[name], first[name]) for name in first)
    assert load_file(trainer.run.checkpoints / "phase_000004.safetensors").keys() == first.keys()


@pytest.mark.slow
def test_phase_0_of_a_base_model_that_has_changed_is_refused(bounded, monkeypatch):
    from rlhf_lab.training import restore

    def other(args, device):
        policy = load(args, device)
        with torch.no_grad():
            policy.base_model.embed.W_E[0, 0] += 1
        return policy

    load = restore.load_policy_and_critic
    monkeypatch.setattr(restore, "load_policy_and_critic", other)
    with pytest.raises(RunError, match="phase_000000.*they have changed; restore") as error:
        load_policy(bounded[0].run.path, 0)
    assert "\n" not in str(error.value)
    load_policy(bounded[0].run.path, 4)


@pytest.mark.slow
def test_a_policy_of_the_callers_own_is_saved_whole_at_phase_0(make_trainer):
    policy = make_trainer().policy
    trainer = make_trainer({"policy": policy}, keep_checkpoints=0)
    trainer.train()
    tensors, notes = load_checkpoint(trainer.run.checkpoints / "phase_000000.safetensors")
    assert tensors.keys() == weights(policy).keys() and "as_loaded" not in notes


@pytest.mark.slow
def test_one_that_was_not_kept_is_one_sentence(bounded):
    path = bounded[0].run.path
    words = "phase 2 was not kept, since the run has keep_checkpoints=1; there are best, last, "
    with pytest.raises(RunError, match=words + "phase_000000, phase_000004") as error:
        load_policy(path, 2)
    assert "\n" not in str(error.value)
    with pytest.raises(RunError, match="there is no checkpoint .*phase_000003"):
        load_policy(path, 3)


Usage = namedtuple("Usage", "total used free")


@pytest.mark.slow
@pytest.mark.parametrize("spare, warned", [(-1, 1), (0, 0)])
def test_a_disk_with_too_little_room_is_said_before_the_run(
    make_trainer, monkeypatch, spare, warned
):
    trainer = make_trainer(total_phases=2)
    free = trainer.recorder.most_bytes() + spare
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, free))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.start()
        said = [str(w.message) for w in told if "make room" in str(w.message)]
    assert len(said) == warned
    for sentence in said:
        assert (
            sentence.startswith("the checkpoints of this run take up to") and "\n" not in sentence
        )
        assert str(trainer.run.path) in sentence and "keep_checkpoints" in sentence


@pytest.mark.slow
def test_what_a_resumed_run_has_already_counts_as_room(make_trainer, monkeypatch):
    trainer = make_trainer(total_phases=2)
    trainer.run_phase()
    trainer.recorder.writer.wait()
    there = sum(path.stat().st_size for path in trainer.run.checkpoints.iterdir())
    free = trainer.recorder.most_bytes() - there
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, free))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type(trainer).resume(trainer.run.path).start()


def test_a_run_of_before_keeps_all_its_checkpoints_when_it_goes_on():
    fields = RLHFArgs(preset="gpt2-medium").to_dict()
    assert RLHFArgs.from_dict(json.loads(json.dumps(fields))).keep_checkpoints == 0
    del fields["keep_checkpoints"]
    assert RLHFArgs.from_dict(fields).keep_checkpoints is None


@pytest.mark.parametrize(
    "size, words", [(11_510_000_000, "11.5 GB"), (4_000_000, "4.0 MB"), (1200, "1.2 kB")]
)
def test_sizes_in_words(size, words):
    assert in_words(size) == words
