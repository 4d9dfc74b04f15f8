"""What may change when a run goes on, what may not, and which checkpoints it goes on from."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.__main__ import main
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint, read_notes, save_checkpoint
from rlhf_lab.training.optim import lr_scale
from rlhf_lab.training.restore import load_policy
from rlhf_lab.training.resume_checks import CHANGEABLE

pytestmark = pytest.mark.slow
LAST = "checkpoints/last.safetensors"


def saved_run(make_trainer: Callable[..., RLHFTrainer], phases: int = 2, **fields: Any) -> Path:
    """A run that was stopped after so many phases, as a killed one leaves it."""
    trainer = make_trainer(**({"total_phases": 5} | fields))
    for _ in range(phases):
        trainer.run_phase()
    trainer.recorder.break_off()
    return trainer.run.path


def info_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text())


def edit_info(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    info = info_of(path)
    change(info)
    (path / "run.json").write_text(json.dumps(info))


def rates_of(path: Path) -> list[float]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line["base_lr"] for line in lines]


def test_changes_hold_from_their_phase_on_and_are_noted(make_trainer, capsys):
    path = saved_run(make_trainer)
    asked = ["--total-phases", "7", "--base-lr", "1e-4", "--head-lr", "1e-3", "--kl-coef", "0.5"]
    assert main(["resume", str(path), *asked, "--save-every", "2"]) == 0
    info, lines = info_of(path), (path / "metrics.jsonl").read_text().splitlines()
    assert info["status"] == "finished" and info["phases_done"] == 7
    changes = {c["field"]: (c["phase"], c["from"], c["to"]) for c in info["changes"]}
    assert changes.keys() == set(CHANGEABLE) - {"parallel"}  # which one process has no use for
    assert changes["total_phases"] == (2, 5, 7) and changes["base_lr"][2] == 1e-4
    assert info["args"]["kl_coef"] == 0.5
    assert [json.loads(line)["kl_coef"] for line in lines][2:] == [0.5] * 5
    new = [1e-4 * lr_scale(phase, 1, 7, info["args"]["final_scale"]) for phase in range(2, 7)]
    assert rates_of(path)[2:] == pytest.approx(new, rel=1e-12)


def test_a_change_that_was_killed_ends_as_one_that_was_not(make_trainer):
    """Killed once before and once after the first checkpoint under the new settings."""
    path = saved_run(make_trainer, kl_controller="adaptive", kl_target=0.01, kl_horizon=20)
    killed = path.with_name("killed")
    shutil.copytree(path, killed)
    changes = {"total_phases": 6, "base_lr": 3e-4, "kl_coef": 1.5, "save_every": 2}
    RLHFTrainer.resume(path, changes).train()
    for phases in (1, 1, 2):
        trainer = RLHFTrainer.resume(killed, changes)
        changes = None
        for _ in range(phases):
            trainer.run_phase()
        trainer.recorder.break_off()
    RLHFTrainer.resume(killed).train()
    ours, theirs = load_file(killed / LAST), load_file(path / LAST)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_notes(killed / LAST) == read_notes(path / LAST)
    assert info_of(killed)["changes"] == info_of(path)["changes"]


def test_a_finished_run_is_extended(make_trainer, capsys):
    trainer = make_trainer(total_phases=2)
    trainer.train()
    path, final = trainer.run.path, info_of(trainer.run.path)["final"]
    assert main(["resume", str(path), "--total-phases", "4"]) == 0
    info = info_of(path)
    assert (info["status"], info["phases_done"]) == ("finished", 4) and info["final"] != final
    assert [line["phase"] for line in trainer.run.read("samples.jsonl")] == [
        phase for phase in range(5) for _ in range(8)
    ]
    assert main(["resume", str(path)]) == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gen-len", "9"], "--gen-len cannot change when a run goes on, only total_phases, "),
        (["--seed=3"], "--seed=3 cannot change when a run goes on"),
        (["--no-normalize-reward"], "--no-normalize-reward cannot change"),
        (["--total-phases", "1"], "total_phases=1 is below the 2 phases"),
        (["--base-lr", "-1"], "base_lr=-1.0"),
    ],
)
def test_other_changes_are_refused_by_name(make_trainer, capsys, options, words):
    path = saved_run(make_trainer, warmup_steps=0)
    before = (path / "run.json").read_bytes()
    assert main(["resume", str(path), *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert (path / "run.json").read_bytes() == before


def test_from_python_other_changes_are_refused_too(make_trainer):
    with pytest.raises(ConfigError, match="gen_len=9 cannot change"):
        RLHFTrainer.resume(saved_run(make_trainer), {"gen_len": 9})


@pytest.mark.parametrize(("field", "value"), [("kl_coef", 50.0), ("seed", 4), ("gen_len", 7)])
def test_settings_that_were_edited_in_run_json_are_refused(make_trainer, capsys, field, value):
    path = saved_run(make_trainer)
    edit_info(path, lambda info: info["args"].update({field: value}))
    assert main(["resume", str(path)]) == 2
    assert f"run.json has {field}={value}" in capsys.readouterr().err


def test_a_place_that_was_corrected_in_run_json_is_told(make_trainer):
    path = saved_run(make_trainer)
    edit_info(path, lambda info: info["args"].update(device="cpu"))
    with pytest.warns(UserWarning, match="run.json has device='cpu'"):
        assert RLHFTrainer.resume(path).phase == 2


def lose(path: Path) -> None:
    (path / LAST).unlink()


def dangle(path: Path) -> None:
    lose(path)
    (path / LAST).symlink_to(path / "gone")


def number_over_last(path: Path) -> None:
    shutil.copy(path / "checkpoints/phase_000002.safetensors", path / LAST)


def resave(path: Path, change: Callable[[dict, dict], Any]) -> None:
    tensors, notes = load_checkpoint(path / LAST)
    change(tensors, notes)
    save_checkpoint(path / LAST, tensors, notes)


def halve_weights(path: Path) -> None:
    resave(path, lambda t, n: t.update({"base_model.embed.W_E": t["base_model.embed.W_E"].half()}))


def round_weights(path: Path) -> None:
    resave(path, lambda t, n: t.update({"base_model.embed.W_E": t["base_model.embed.W_E"].int()}))


def forget_half_the_moments(path: Path) -> None:
    def forget(tensors: dict[str, Any], notes: dict[str, Any]) -> None:
        names = sorted(name for name in tensors if name.startswith("optimizer."))
        for name in names[: len(names) // 2]:
            del tensors[name]

    resave(path, forget)


def forget_one_kind_of_moment(path: Path) -> None:
    def forget(tensors: dict[str, Any], notes: dict[str, Any]) -> None:
        notes["tensors"] = len(tensors) - 1
        del tensors["optimizer.3.exp_avg"]

    resave(path, forget)


def reshape_a_moment(path: Path) -> None:
    resave(path, lambda t, n: t.update({"optimizer.3.exp_avg": torch.zeros(7)}))


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lose, "last.safetensors is missing, though the run was saved"),
    "all_missing": (lambda p: shutil.rmtree(p / "checkpoints"), "no other checkpoints"),
    "dangling": (dangle, "last.safetensors links to nothing"),
    "numbered": (number_over_last, "is a copy of this run's phase_000002"),
    "fp16": (halve_weights, "W_E' as torch.float16, and the model as torch.float32"),
    "int32": (round_weights, "W_E' as torch.int32"),
    "half_the_moments": (forget_half_the_moments, "holds .* tensors of"),
    "one_kind_of_moment": (forget_one_kind_of_moment, "holds exp_avg_sq, step of parameter 3"),
    "shape_of_a_moment": (reshape_a_moment, "no fitting 'optimizer.3.exp_avg'"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_last_that_is_not_the_runs_own_is_refused(make_trainer, capsys, how):
    path = saved_run(make_trainer)
    spoil, words = SPOILED[how]
    spoil(path)
    files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert main(["resume", str(path)]) == 2
    said = capsys.readouterr().err
    assert re.search(words, said) and said.count("\n") == 1
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == files


def test_the_last_of_another_run_is_refused(make_trainer):
    path, other = saved_run(make_trainer), saved_run(make_trainer, seed=2)
    shutil.copy(other / LAST, path / LAST)
    for load in (RLHFTrainer.resume, load_policy):
        with pytest.raises(RunError, match="last.safetensors is a checkpoint of another run"):
            load(path)


def test_a_run_that_was_moved_or_copied_goes_on(make_trainer, tmp_path):
    path = saved_run(make_trainer)
    shutil.copytree(path, tmp_path / "copy")
    os.rename(path, tmp_path / "moved")
    assert RLHFTrainer.resume(tmp_path / "copy").phase == 2
    assert RLHFTrainer.resume(tmp_path / "moved").phase == 2


def strip_notes(path: Path) -> None:
    """What an earlier version would have written."""
    edit_info(path, lambda info: [info.pop(name) for name in ("id", "saved", "changes")])
    for file in (path / "checkpoints").iterdir():
        tensors, notes = load_checkpoint(file)
        for name in ("run", "name", "args", "tensors"):
            del notes[name]
        save_checkpoint(file, tensors, notes)


def test_a_run_of_an_earlier_version_goes_on_and_its_settings_may_change(make_trainer):
    path = saved_run(make_trainer)
    strip_notes(path)
    old = path.with_name("old")
    shutil.copytree(path, old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RLHFTrainer.resume(path).train()
    killed = RLHFTrainer.resume(old, {"kl_coef": 0.7})
    killed.start()
    killed.recorder.break_off()
    again = RLHFTrainer.resume(old)
    assert again.kl_controller.kl_coef == 0.7
    again.train()
    assert info_of(old)["status"] == info_of(path)["status"] == "finished"
    assert not torch.equal(
        load_file(old / LAST)["base_model.embed.W_E"],
        load_file(path / LAST)["base_model.embed.W_E"],
    )


@pytest.mark.parametrize("spoil", [lose, number_over_last])
def test_a_run_of_an_earlier_version_without_its_last_is_refused(make_trainer, spoil):
    path = saved_run(make_trainer)
    strip_notes(path)
    spoil(path)
    with pytest.raises(RunError, match="is missing, though|holds no optimizer state"):
        RLHFTrainer.resume(path)


def test_doubled_lines_of_metrics_are_mended_and_missing_ones_told(make_trainer):
    path = saved_run(make_trainer, phases=3)
    file = path / "metrics.jsonl"
    zero, one, two = file.read_text().splitlines(keepends=True)
    file.write_text(zero + two + two)
    trainer = RLHFTrainer.resume(path)
    with pytest.warns(UserWarning) as caught:
        trainer.start()
    said = [str(warning.message) for warning in caught]
    assert any("had phases twice or out of order" in words for words in said)
    assert any("lacks phase 1, which the run has done" in words for words in said)
    assert file.read_text() == zero + two


def test_run_json_says_how_far_a_run_is(make_trainer):
    trainer = make_trainer(total_phases=4)
    for phase in range(3):
        trainer.run_phase()
        assert info_of(trainer.run.path)["phases_done"] == phase + 1
