"""Resumed runs: equal to uninterrupted ones after every signal, with settings that may change."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf_lab.__main__ import main
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.rewards import ResponseReward
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint, read_metadata, save_checkpoint
from rlhf_lab.training.optim import lr_scale
from rlhf_lab.training.overrides import describe_source
from rlhf_lab.training.resume import CHANGEABLE, load_policy
from rlhf_lab.training.run_dir import LOCK
from tests.bad_input.command_outcome import accepted
from tests.training.recorded_runs import (
    CONFIGURATIONS,
    assert_same_run,
    copy_weights,
    is_equal,
    needs_bitsandbytes,
    read_files,
    read_metrics,
    train_partly,
)

pytestmark = pytest.mark.slow
TRAIN = (
    "train --preset reel --total-phases 5 --batch-size 8 --num-minibatches 2 --warmup-steps 1"
    " --gen-len 8 --top-k 12 --keep-checkpoints 1 --out"
).split()
DRIVER = """
import json, os, signal, sys

import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer, checkpoint

where, phase, names, *arguments = sys.argv[1:]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
save_file = checkpoint.save_file


def stop(is_here=True):
    for name in names.split() if is_here else ():
        os.kill(os.getpid(), getattr(signal, name))


def save_half(tensors, path, metadata):
    save_file(tensors, path, metadata=metadata)
    if where in str(path) and json.loads(metadata["metadata"])["phase"] == int(phase):
        os.truncate(path, os.path.getsize(path) // 2)
        stop()


class Stopped(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if "." not in where:
            self.on(where)(lambda ctx: stop(ctx.phase == int(phase)))


checkpoint.save_file = save_half
rlhf_lab.training.trainer.RLHFTrainer = Stopped
sys.exit(main(arguments))
"""
# an event, or a checkpoint that is then half written; a phase; `save_every`
KILLS = [
    ("after_backward", 2, 3),
    (".last.safetensors", 3, 1),
    pytest.param("run_start", 0, 1, marks=pytest.mark.nightly),
    pytest.param("after_step", 0, 1, marks=pytest.mark.nightly),
    pytest.param("checkpoint", 5, 1, marks=pytest.mark.nightly),
    pytest.param(".best.safetensors", 0, 1, marks=pytest.mark.nightly),
]
SIGNALS = [
    ("SIGINT SIGINT", "after_backward", 2, 130, 2),
    ("SIGTERM", "after_rollout", 2, 128 + 15, 3),
    pytest.param("SIGHUP SIGHUP", "after_backward", 2, 128 + 1, 3, marks=pytest.mark.nightly),
    pytest.param("SIGINT", "after_rollout", 4, 0, 5, marks=pytest.mark.nightly),
]
# parts of their settings are resumed in the other configurations
NIGHTLY = ("adapters, critic", "critic from a reward model", "resets")
NIGHTLY += ("token rewards", "several rewards")
RESUMED = [name for name, each in CONFIGURATIONS.items() if not each.hook]


def marks(name: str) -> list[pytest.MarkDecorator]:
    is_nightly = CONFIGURATIONS[name].is_golden or name in NIGHTLY
    nightly = [pytest.mark.nightly] if is_nightly else []
    return nightly + ([needs_bitsandbytes] if name.startswith("8-bit") else [])


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.filterwarnings("error:.*has changed since the run started")
@pytest.mark.parametrize("name", [pytest.param(x, marks=marks(x)) for x in RESUMED])
def test_resumed_run_equals_uninterrupted_run(runs, resumed, name):
    """The latter has callbacks at every event, which therefore change nothing."""
    whole, again = runs(name), resumed(name)
    assert_same_run(again.run.path, whole.path)
    assert vars(again.kl_controller) == vars(whole.trainer.kl_controller)
    assert again.reference_phase == whole.trainer.reference_phase
    assert is_equal(copy_weights(again.policy), whole.weights[-1])
    assert is_equal(copy_weights(again.reference), copy_weights(whole.trainer.reference))
    assert not is_equal(whole.weights[-1], whole.weights[0])
    assert all(weight.isfinite().all() for weight in whole.weights[-1].values())


@pytest.fixture
def stop(warm_python, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `train` in a process that sends itself signals."""

    def run(where: str, phase: int, signals: str, *more: Any) -> subprocess.CompletedProcess[str]:
        arguments = [where, phase, signals, *TRAIN, tmp_path / "run", *more]
        return warm_python.run(["-c", DRIVER, *map(str, arguments)])

    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*TRAIN, str(out)]) == 0
    return out


@pytest.mark.parametrize(("where", "phase", "save_every"), KILLS)
def test_killed_run_equals_uninterrupted_run(
    stop, uninterrupted, tmp_path, where, phase, save_every
):
    killed = stop(where, phase, "SIGKILL", "--save-every", save_every)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", uninterrupted)
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize(("signals", "event", "phase", "status", "done"), SIGNALS)
def test_signals_finish_the_phase_and_save(
    stop, uninterrupted, tmp_path, capsys, signals, event, phase, status, done
):
    """A second Ctrl-C ends the run at once, without its phase."""
    stopped, out = stop(event, phase, signals), tmp_path / "run"
    assert stopped.returncode == status and "Traceback" not in stopped.stderr
    words = rf"stopped after {done} of 5 phases; .*: python -m rlhf_lab resume {out}"
    assert bool(re.search(words, stopped.stdout)) == (done < 5)
    assert f"phase {done - 1} |" in stopped.stdout and f"phase {done} |" not in stopped.stdout
    capsys.readouterr()
    assert main(["resume", str(out)]) == 0
    text = capsys.readouterr().out
    assert done == 5 or "continuing" in text and f"phase {done}" in text
    assert_same_run(out, uninterrupted)


def test_resume_of_finished_run_changes_nothing(uninterrupted):
    files = read_files(uninterrupted)
    assert main(["resume", str(uninterrupted)]) == 0
    RLHFTrainer.resume(uninterrupted).train()
    assert read_files(uninterrupted) == files


def test_run_keeps_the_newest_numbered_checkpoints(uninterrupted):
    assert load_policy(uninterrupted, 5)[1].keep_checkpoints == 1
    with pytest.raises(RunError, match="Available: best, last, phase_000000, phase_000005 "):
        load_policy(uninterrupted, 2)


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
    assert main(["resume", str(copied_run), "--total-phases", "2"]) == 0
    before = read_info(copied_run)
    assert (before["status"], before["phases_done"]) == ("finished", 2)
    changes = {"total_phases": 7, "base_lr": 1e-4, "head_lr": 1e-3, "kl_coef": 0.5, "save_every": 2}
    train_partly(RLHFTrainer.resume(copied_run, changes), 1)
    assert before["final"] and "final" not in read_info(copied_run)
    assert main(["resume", str(copied_run)]) == 0
    info, lines = read_info(copied_run), read_metrics(copied_run)[2:]
    assert (info["status"], info["phases_done"]) == ("finished", 7)
    assert info["final"] != before["final"]
    changes = {c["field"]: (c["phase"], c["from"], c["to"]) for c in info["changes"]}
    assert changes.keys() == set(CHANGEABLE) - {"parallel"}
    assert changes["total_phases"] == (2, 2, 7) and changes["base_lr"][2] == 1e-4
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


@pytest.mark.usefixtures("no_type_checks")
def test_resume_rejects_other_changes(shared_run):
    files = read_files(shared_run)
    for changes, words in (
        ({"gen_len": 9}, "gen_len=9 cannot change when a run is resumed, only total_phases, "),
        ({"total_phases": 1}, "total_phases=1 must be >= 2, the phases done"),
        ({"kl_coef": float("nan")}, "kl_coef"),
    ):
        with pytest.raises(ConfigError, match=words):
            RLHFTrainer.resume(shared_run, changes)
    equal = {"total_phases": 5, "kl_coef": 0.3}
    assert RLHFTrainer.resume(shared_run, equal).recorder.changes == []
    assert read_files(shared_run) == files


def test_resume_rejects_edited_settings_and_a_missing_moment(copied_run):
    info = read_info(copied_run)
    edited = info | {"args": info["args"] | {"kl_coef": 50.0}}
    (copied_run / "run.json").write_text(json.dumps(edited))
    with pytest.raises(RunError, match="run.json has kl_coef=50.0"):
        RLHFTrainer.resume(copied_run)
    (copied_run / "run.json").write_text(json.dumps(info))
    tensors, metadata = load_checkpoint(copied_run / LAST)
    tensors.pop("optimizer.state.3.exp_avg")
    save_checkpoint(copied_run / LAST, tensors, metadata)
    with pytest.raises(RunError, match="contents .KeyError: 'optimizer.state.3"):
        RLHFTrainer.resume(copied_run)


class Counting:
    def __init__(self, factor):
        self._factor, self.calls = factor, 0

    def __call__(self, texts):
        self.calls += 1
        return [self._factor * len(text) for text in texts]


def counting(factor, calls=0):
    def reward(texts):
        nonlocal calls
        calls += 1
        return [factor * len(text) for text in texts]

    return reward


def on_line(factor):
    return lambda texts: [len(x) in {3, factor} for x in texts]


def default(x):
    return lambda texts, *, x=x: x


OF_MODULE = """
def reward(texts):
    helpers.n += 1
    return helpers.scale, helpers.f(texts)
"""


def make_module_reward(scale, factor):
    """Return a reward that reads values and functions of a module, and counts its calls there."""
    helpers = ModuleType("helpers")
    vars(helpers).update(scale=scale, f=on_line(factor), n=0, __file__="helpers.py")
    exec(OF_MODULE, scope := {"helpers": helpers})
    return scope["reward"]


MAKERS = (
    *(Counting, counting, on_line),
    lambda x: partial(max, [x]),
    lambda x: default(ResponseReward(on_line(x))),
    lambda x: default(torch.full((2,), x)),
    lambda x: default({"a": [x]}),
    lambda x: default(nn.Embedding.from_pretrained(torch.full((1, 1), x))),
    lambda x: eval("lambda texts: [SCALE for _ in texts]", {"SCALE": x}),
    lambda x: make_module_reward(x, 4),
    lambda x: make_module_reward(4, x),
)


def test_resume_warns_about_another_function_of_the_same_name(saved_run, recwarn):
    path = saved_run(1, {"reward_fn": (reward := Counting(1.0))})
    RLHFTrainer.resume(path, reward_fn=reward)
    assert reward.calls and not [w for w in recwarn if "has changed since" in str(w.message)]
    with pytest.warns(UserWarning, match="reward_fn has changed since the run started, from"):
        RLHFTrainer.resume(path, reward_fn=Counting(2.0))
    assert "reward" not in accepted(["sample", path, "-n", "1"]).out
    for make in MAKERS:
        before = describe_source(reward := make(1.0))
        reward([])
        assert describe_source(reward) == before == describe_source(make(1.0))
        assert before != describe_source(make(2.0))
    lines = [describe_source(lambda texts: [len(x) in {3, 4} for x in texts])]
    lines += [describe_source(lambda texts: [len(x) in {3, 4} for x in texts])]
    assert lines[0] == lines[1] != describe_source(lambda texts: [len(x) in {3, 5} for x in texts])


def test_resume_warns_about_changed_prompts_and_models(saved_run, tmp_path):
    (file := tmp_path / "prompts.csv").write_text("prompt,answer\nthis movie,good\n")
    (schema := tmp_path / "schema.json").write_text("{}")
    fields = {"prompts": str(file), "answers_column": "answer", "lora_rank": 1}
    fields["reward_fn"] = f"exact_match,sentiment,json_schema:{schema}"
    for field, name in (("base_model", "reel-nano"), ("reward_model", "reel-sentiment")):
        fields[field] = str(shutil.copytree(weights_dir(name), tmp_path / name))
    path = saved_run(1, **fields)
    file.write_text("prompt,answer\nthis movie,bad\n")
    schema.write_text("true")
    for model in tmp_path.glob("*/model.safetensors"):
        save_file({k: x + 0.1 for k, x in load_file(model).items()}, model, {"format": "pt"})
    with pytest.warns(UserWarning, match="the frozen base model has changed"):
        load_policy(path)
    with pytest.warns(UserWarning, match="prompts has changed since the run started") as caught:
        RLHFTrainer.resume(path)
    texts = " ".join(str(warning.message) for warning in caught)
    names = "the model of reference", "the model of sentiment", "the frozen base model"
    assert all(f"{name} has" in texts for name in (*names, "json_schema"))
    best_of_n = ["best-of-n", path, "--n", "1", "--n-prompts", "1", "--checkpoint"]
    for checkpoint in ("0", "last"):
        err = accepted([*best_of_n, checkpoint]).err
        assert all(f"{name} has" in err for name in ("prompts", names[1], names[2]))
        assert (f"{names[0]} has" in err) == (checkpoint == "0")
    assert "prompts has" not in accepted([*best_of_n, "0", "--prompts", file]).err
    file.unlink()
    with pytest.raises(RunError, match="prompts.csv"):
        RLHFTrainer.resume(path)
