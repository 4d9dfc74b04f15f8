"""Settings that may change when a run is resumed, and runs that cannot be resumed.

tests/bad_input/test_spoiled_runs.py damages the files of a run.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.__main__ import main
from rlhf_lab.errors import ConfigError, LoadError, RunError
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from rlhf_lab.training.optim import lr_scale
from rlhf_lab.training.resume import CHANGEABLE
from tests.training.recorded_runs import is_equal, read_metrics, train_partly

pytestmark = pytest.mark.slow
LAST = "checkpoints/last.safetensors"


@pytest.fixture
def saved_run(make_trainer) -> Callable[..., Path]:
    return lambda phases=2, parts=None, **fields: train_partly(
        make_trainer(parts, **({"total_phases": 5} | fields)), phases
    )


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory, reel_args) -> Path:
    args = reel_args(total_phases=5, warmup_steps=0)
    return train_partly(RLHFTrainer(args, out=tmp_path_factory.mktemp("shared") / "run"))


@pytest.fixture
def copied_run(shared_run, tmp_path) -> Path:
    return Path(shutil.copytree(shared_run, tmp_path / "run"))


def read_info(path: Path) -> dict[str, Any]:
    return json.loads((path / "run.json").read_text())


def test_changes_apply_from_their_phase_and_are_recorded(copied_run):
    changes = ["--total-phases", "7", "--base-lr", "1e-4", "--head-lr", "1e-3", "--kl-coef", "0.5"]
    assert main(["resume", str(copied_run), *changes, "--save-every", "2"]) == 0
    info, lines = read_info(copied_run), read_metrics(copied_run)[2:]
    assert info["status"] == "finished" and info["phases_done"] == 7
    changes = {c["field"]: (c["phase"], c["from"], c["to"]) for c in info["changes"]}
    assert changes.keys() == set(CHANGEABLE) - {"parallel"}
    assert changes["total_phases"] == (2, 5, 7) and changes["base_lr"][2] == 1e-4
    assert info["args"]["kl_coef"] == 0.5 and [line["kl_coef"] for line in lines] == [0.5] * 5
    for name, peak in (("base_lr", 1e-4), ("head_lr", 1e-3)):
        rates = [peak * lr_scale(n, 0, 7, info["args"]["final_scale"]) for n in range(2, 7)]
        assert [line[name] for line in lines] == pytest.approx(rates, rel=1e-12)


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
    assert is_equal(load_file(killed / LAST), load_file(path / LAST))
    assert read_metadata(killed / LAST) == read_metadata(path / LAST)
    assert read_info(killed)["changes"] == read_info(path)["changes"]


def test_finished_run_is_extended(copied_run):
    """First finished by a change: at the phases that are done."""
    finals = []
    for total in (2, 4):
        assert main(["resume", str(copied_run), "--total-phases", str(total)]) == 0
        info = read_info(copied_run)
        assert (info["status"], info["phases_done"]) == ("finished", total)
        finals.append(info["final"])
    lines = (copied_run / "samples.jsonl").read_text().splitlines()
    phases = [json.loads(line)["phase"] for line in lines]
    assert phases == [phase for phase in range(5) for _ in range(8)] and finals[0] != finals[1]


@pytest.mark.usefixtures("no_type_checks")
def test_resume_rejects_other_changes(shared_run):
    before = (shared_run / "run.json").read_bytes()
    for changes, words in (
        ({"gen_len": 9}, "gen_len=9 cannot change when a run is resumed, only total_phases, "),
        ({"seed": 3}, "seed=3 cannot change"),
        ({"total_phases": 1}, "total_phases=1 is below the 2 phases"),
        ({"total_phases": 4.5}, "total_phases"),
        ({"kl_coef": float("nan")}, "kl_coef"),
    ):
        with pytest.raises(ConfigError, match=words):
            RLHFTrainer.resume(shared_run, changes)
    assert (shared_run / "run.json").read_bytes() == before
    equal = {"total_phases": 5, "kl_coef": 0.3}
    assert RLHFTrainer.resume(shared_run, equal).recorder.changes == []


@pytest.mark.parametrize(("field", "value"), [("kl_coef", 50.0), ("seed", 4), ("gen_len", 7)])
def test_resume_rejects_settings_edited_in_run_json(copied_run, field, value):
    info = read_info(copied_run)
    info["args"][field] = value
    (copied_run / "run.json").write_text(json.dumps(info))
    with pytest.raises(RunError, match=f"run.json has {field}={value}"):
        RLHFTrainer.resume(copied_run)


def test_resume_rejects_a_checkpoint_without_a_moment(copied_run):
    tensors, metadata = load_checkpoint(copied_run / LAST)
    tensors.pop("optimizer.state.3.exp_avg")
    save_checkpoint(copied_run / LAST, tensors, metadata)
    with pytest.raises(RunError, match="contents .KeyError: 'optimizer.state.3"):
        RLHFTrainer.resume(copied_run)


def test_resume_requires_the_custom_components_of_the_run(saved_run, shared_run):
    parts = {"true_reward_fn": lambda texts: torch.arange(len(texts)) + 0.0}
    path = saved_run(1, parts)
    with pytest.raises(RunError, match="components: true_reward_fn. Resume it from Python.*"):
        RLHFTrainer.resume(path)
    assert RLHFTrainer.resume(path, **parts).phase == 1
    with pytest.raises(RunError, match="without a custom true_reward_fn"):
        RLHFTrainer.resume(shared_run, **parts)


def test_resume_warns_about_changed_prompts(saved_run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("this movie\nthis movie honestly ,\n")
    path = saved_run(1, prompts=str(file))
    file.write_text("this movie arguably ,\n")
    with pytest.warns(UserWarning, match="prompts=.*has changed since the run started"):
        RLHFTrainer.resume(path).run_phase()
    file.unlink()
    with pytest.raises(LoadError, match="prompts.txt"):
        RLHFTrainer.resume(path)
