"""Settings that may change when a run is resumed, and checkpoints that a run resumes from."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.__main__ import main
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from rlhf_lab.training.optim import lr_scale
from rlhf_lab.training.restore import load_policy
from rlhf_lab.training.resume import CHANGEABLE

pytestmark = pytest.mark.slow
LAST = "checkpoints/last.safetensors"


def train_partly(trainer: RLHFTrainer, phases: int = 2) -> Path:
    """A run that was stopped after a few phases, as a killed one leaves it."""
    for _ in range(phases):
        trainer.run_phase()
    trainer.recorder.break_off()
    return trainer.run.path


@pytest.fixture
def saved_run(make_trainer) -> Callable[..., Path]:
    return lambda phases=2, parts=None, **fields: train_partly(
        make_trainer(parts, **({"total_phases": 5} | fields)), phases
    )


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory, reel_args) -> Path:
    trainer = RLHFTrainer(
        reel_args(total_phases=5, warmup_steps=0), out=tmp_path_factory.mktemp("shared") / "run"
    )
    return train_partly(trainer)


@pytest.fixture
def copied_run(shared_run, tmp_path) -> Path:
    return Path(shutil.copytree(shared_run, tmp_path / "run"))


def info_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text())


def edit_info(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    info = info_of(path)
    change(info)
    (path / "run.json").write_text(json.dumps(info))


def test_changes_apply_from_their_phase_and_are_recorded(copied_run):
    changes = ["--total-phases", "7", "--base-lr", "1e-4", "--head-lr", "1e-3", "--kl-coef", "0.5"]
    assert main(["resume", str(copied_run), *changes, "--save-every", "2"]) == 0
    info = info_of(copied_run)
    lines = [json.loads(x) for x in (copied_run / "metrics.jsonl").read_text().splitlines()]
    assert info["status"] == "finished" and info["phases_done"] == 7
    changes = {c["field"]: (c["phase"], c["from"], c["to"]) for c in info["changes"]}
    assert changes.keys() == set(CHANGEABLE) - {"parallel"}
    assert changes["total_phases"] == (2, 5, 7) and changes["base_lr"][2] == 1e-4
    assert info["args"]["kl_coef"] == 0.5
    assert [line["kl_coef"] for line in lines][2:] == [0.5] * 5
    for name, peak in (("base_lr", 1e-4), ("head_lr", 1e-3)):
        rates = [peak * lr_scale(n, 0, 7, info["args"]["final_scale"]) for n in range(2, 7)]
        assert [line[name] for line in lines][2:] == pytest.approx(rates, rel=1e-12)


def test_killed_change_equals_uninterrupted_change(saved_run):
    """Killed once before and once after the first checkpoint under the new settings."""
    path = saved_run(kl_controller="adaptive", kl_target=0.01, kl_horizon=20)
    killed = Path(shutil.copytree(path, path.with_name("killed")))
    changes = {"total_phases": 6, "base_lr": 3e-4, "kl_coef": 1.5, "save_every": 2}
    RLHFTrainer.resume(path, changes).train()
    for phases in (1, 1, 2):
        train_partly(RLHFTrainer.resume(killed, changes), phases)
        changes = None
    RLHFTrainer.resume(killed).train()
    ours, theirs = load_file(killed / LAST), load_file(path / LAST)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_metadata(killed / LAST) == read_metadata(path / LAST)
    assert info_of(killed)["changes"] == info_of(path)["changes"]


def test_finished_run_is_extended(make_trainer, capsys):
    trainer = make_trainer(total_phases=2)
    trainer.train()
    path, final = trainer.run.path, info_of(trainer.run.path)["final"]
    assert main(["resume", str(path), "--total-phases", "4"]) == 0
    info = info_of(path)
    assert (info["status"], info["phases_done"]) == ("finished", 4) and info["final"] != final
    phases = [line["phase"] for line in trainer.run.read("samples.jsonl")]
    assert phases == [phase for phase in range(5) for _ in range(8)]
    assert main(["resume", str(path)]) == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gen-len", "9"], "--gen-len"),
        (["--seed=3"], "--seed"),
        (["--no-normalize-reward"], "--no-normalize-reward"),
        (["--total-phases", "1"], "total_phases=1 is below the 2 phases"),
        (["--base-lr", "-1"], "base_lr=-1.0"),
        (["--kl-coef", "nan"], "kl_coef"),
        (["--save-every", "0"], "save_every"),
    ],
)
def test_resume_rejects_other_changes(shared_run, capsys, options, words):
    before = (shared_run / "run.json").read_bytes()
    assert main(["resume", str(shared_run), *options]) == 2
    message = capsys.readouterr().err
    assert words in message and message.count("\n") == 1
    assert (shared_run / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gen_len": 9}, "gen_len=9 cannot change"),
        ({"total_phases": "5"}, "total_phases"),
        ({"total_phases": 4.5}, "total_phases"),
        ({"base_lr": None}, "base_lr"),
        ({"kl_coef": True}, "kl_coef"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_python_resume_rejects_changes_of_wrong_kind(shared_run, changes, word):
    with pytest.raises(ConfigError, match=word):
        RLHFTrainer.resume(shared_run, changes)


def test_change_to_the_same_value_is_not_recorded(copied_run):
    trainer = RLHFTrainer.resume(copied_run, {"total_phases": 5, "kl_coef": 0.3})
    assert trainer.recorder.changes == []


def test_total_phases_already_done_finish_the_run(saved_run):
    path = saved_run(warmup_steps=0)
    assert main(["resume", str(path), "--total-phases", "2"]) == 0
    info = info_of(path)
    assert info["status"] == "finished" and info["phases_done"] == 2


@pytest.mark.parametrize(("field", "value"), [("kl_coef", 50.0), ("seed", 4), ("gen_len", 7)])
def test_resume_rejects_settings_edited_in_run_json(copied_run, capsys, field, value):
    edit_info(copied_run, lambda info: info["args"].update({field: value}))
    assert main(["resume", str(copied_run)]) == 2
    assert f"run.json has {field}={value}" in capsys.readouterr().err


def test_resume_rejects_a_run_of_another_version(copied_run, capsys):
    edit_info(copied_run, lambda info: info.pop("format"))
    for command in ("resume", "report", "sample"):
        assert main([command, str(copied_run)]) == 2
        message = capsys.readouterr().err
        assert "was written by another version of rlhf_lab" in message and message.count("\n") == 1


def resave(path: Path, change: Callable[[dict, dict], Any]) -> None:
    tensors, metadata = load_checkpoint(path / LAST)
    change(tensors, metadata)
    save_checkpoint(path / LAST, tensors, metadata)


def cast(dtype: torch.dtype) -> Callable[[Path], None]:
    name = "base_model.embed.W_E"
    return lambda path: resave(path, lambda t, m: t.update({name: t[name].to(dtype)}))


def flip_bit(path: Path) -> None:
    raw = bytearray((path / LAST).read_bytes())
    raw[-20] ^= 1
    (path / LAST).write_bytes(raw)


def dangle(path: Path) -> None:
    (path / LAST).unlink()
    (path / LAST).symlink_to(path / "gone")


def shrink(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    tensors["base_model.embed.W_E"] = torch.zeros(50, 64)


def rename_optimizer(tensors: dict[str, torch.Tensor], metadata: dict[str, Any]) -> None:
    metadata["optimizer"]["class"] = "SGD"


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (flip_bit, "is corrupt .checksum differs"),
    "truncated": (lambda p: os.truncate(p / LAST, 999), "is corrupt"),
    "missing": (lambda p: (p / LAST).unlink(), "No checkpoint .*last.safetensors. Available: best"),
    "all missing": (lambda p: shutil.rmtree(p / "checkpoints"), "None has been saved yet"),
    "dangling": (dangle, "No checkpoint .*last.safetensors"),
    "numbered": (
        lambda p: shutil.copy(p / "checkpoints/phase_000002.safetensors", p / LAST),
        "is a copy of this run's phase_000002",
    ),
    "fp16": (cast(torch.float16), "W_E' is torch.float16 .*, expected torch.float32"),
    "int32": (cast(torch.int32), "W_E' is torch.int32"),
    "shape": (lambda p: resave(p, shrink), "another model: 'base_model.embed.W_E' is .*50, 64"),
    "lost moment": (
        lambda p: resave(p, lambda t, m: t.pop("optimizer.state.3.exp_avg")),
        "unexpected contents .KeyError: 'optimizer.state.3.exp_avg'",
    ),
    "optimizer": (lambda p: resave(p, rename_optimizer), "trained with optimizer=SGD, and this"),
    "run.json cut": (lambda p: os.truncate(p / "run.json", 50), "run.json is unreadable"),
    "run.json gone": (lambda p: (p / "run.json").unlink(), "has no run.json"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_resume_rejects_a_spoiled_run_and_changes_nothing(copied_run, capsys, how):
    spoil, words = SPOILED[how]
    spoil(copied_run)
    files = {p: p.read_bytes() for p in copied_run.rglob("*") if p.is_file()}
    assert main(["resume", str(copied_run)]) == 2
    message = capsys.readouterr().err
    assert re.search(words, message) and message.count("\n") == 1, message
    assert {p: p.read_bytes() for p in copied_run.rglob("*") if p.is_file()} == files


def test_last_of_another_run_is_rejected(copied_run, saved_run):
    shutil.copy(saved_run(seed=2) / LAST, copied_run / LAST)
    for load in (RLHFTrainer.resume, load_policy):
        with pytest.raises(RunError, match="last.safetensors is a checkpoint of another run"):
            load(copied_run)


def test_moved_or_copied_run_resumes(copied_run, tmp_path):
    os.rename(copied_run, tmp_path / "moved")
    assert RLHFTrainer.resume(tmp_path / "moved").phase == 2


@pytest.mark.parametrize("name", ["reward_fn", "true_reward_fn"])
def test_resume_requires_the_custom_components(saved_run, name):
    parts = {name: lambda texts: torch.arange(len(texts)) + 0.0}
    path = saved_run(1, parts)
    with pytest.raises(RunError, match=f"custom components: {name}. Resume it from Python.*"):
        RLHFTrainer.resume(path)
    assert RLHFTrainer.resume(path, **parts).phase == 1


def test_resume_rejects_a_component_the_run_did_not_have(shared_run):
    with pytest.raises(RunError, match="without a custom reward_fn"):
        RLHFTrainer.resume(shared_run, reward_fn=lambda texts: torch.zeros(len(texts)))


def test_resume_warns_about_changed_prompts(saved_run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("this movie\nthis movie honestly ,\n")
    path = saved_run(1, prompts=str(file))
    file.write_text("this movie arguably ,\n")
    with pytest.warns(UserWarning, match="prompts=.*has changed since the run started"):
        RLHFTrainer.resume(path).run_phase()
    file.unlink()
    with pytest.raises(Exception, match="prompts.txt"):
        RLHFTrainer.resume(path)


def test_run_json_records_the_phases_done(make_trainer):
    trainer = make_trainer(total_phases=4)
    for phase in range(3):
        trainer.run_phase()
        assert info_of(trainer.run.path)["phases_done"] == phase + 1
