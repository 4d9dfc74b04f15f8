"""Weights & Biases: what a run logs, read back from the files of real offline runs."""

import json
import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import Run
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.sinks import choose_wandb_mode
from tests.wandb_file import WandbFile

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "docs" / "sweep.yaml"
SMALL = (
    "train --preset reel --total-phases 3 --batch-size 24 --num-minibatches 2 --warmup-steps 1"
    " --gen-len 8 --seed 1"
).split()
VARIABLES = {
    "WANDB_MODE": "offline",
    "WANDB_NAME": "first light",
    "WANDB_PROJECT": "reviews",
    "WANDB_ENTITY": "a-team",
    "WANDB_RUN_GROUP": "ablation",
    "WANDB_TAGS": "reel,short",
    "WANDB_NOTES": "a first look",
    "WANDB_JOB_TYPE": "ppo",
}

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of wandb's but that it prints nothing; no run of an earlier test is open."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    import wandb

    wandb.teardown()


def lab(*arguments: Any) -> list[str]:
    """What follows `python`."""
    return ["-m", "rlhf_lab", *map(str, arguments)]


def files_of(run: Path, n_open: int = 0) -> list[WandbFile]:
    """The offline directories of a run, in the order in which they were begun.

    All but the last `n_open` have to be closed, which wandb's own process does a moment later.
    """
    directories, patience = sorted(run.glob("wandb/offline-run-*")), monotonic() + 10
    files = [WandbFile(path) for path in directories]
    while not all(file.exit_codes for file in files[: len(files) - n_open]):
        assert monotonic() < patience, "a run of wandb's was not closed"
        sleep(0.05)
        files = [WandbFile(path) for path in directories]
    return files


def only_file_of(run: Path, n_open: int = 0) -> WandbFile:
    (found,) = files_of(run, n_open)
    return found


def read_lines(run: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / file).read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def logged(warm_python, surroundings, tmp_path_factory) -> tuple[Any, Path, WandbFile]:
    """A run with probes that wandb's own variables send offline, against its settings."""
    place = tmp_path_factory.mktemp("wandb")
    arguments = lab(*SMALL, "--out", "first", "--wandb-mode", "online", "--log-probes")
    done = warm_python.run(arguments, cwd=place, env=surroundings | VARIABLES)
    assert done.returncode == 0 and "switched off" not in done.stderr, done.stderr
    return done, place / "first", only_file_of(place / "first")


def test_offline_run_matches_its_directory(logged):
    _, path, file = logged
    run, info = file.run, json.loads((path / "run.json").read_text("utf-8"))
    assert (run.display_name, run.project, run.entity) == ("first light", "reviews", "a-team")
    assert (run.run_group, list(run.tags)) == ("ablation", ["reel", "short"])
    assert (run.notes, run.job_type) == ("a first look", "ppo")
    assert {k: v for k, v in file.config.items() if k != "_wandb"} == info["args"]
    assert {k: file.summary[f"final/{k}"] for k in info["final"]} == info["final"]
    assert info["final"]["samples"] == 4 * 24 and file.exit_codes == [0]
    lines = read_lines(path, "metrics.jsonl")
    assert [row["_step"] for row in file.history] == [line["phase"] for line in lines] == [0, 1, 2]
    for row, line in zip(file.history, lines, strict=True):
        curves = {f"cost/{name}": value for name, value in line["cost"].items()}
        curves |= {k: v for k, v in line.items() if k not in ("phase", "cost") and v is not None}
        assert {name: row[name] for name in curves} == curves and len(curves) > 25
    tables = [file.table(row, "samples") for row in file.history]
    tables.append(file.table(file.history[-1], "final_samples"))
    columns = "text prompt response reward true_reward kl_per_sequence response_length".split()
    for phase, table in enumerate(tables):
        samples = [s for s in read_lines(path, "samples.jsonl") if s["phase"] == phase]
        assert table["columns"] == columns and len(table["data"]) == 16
        assert table["data"] == [[sample[name] for name in columns] for sample in samples[:16]]
        assert all(prompt + response == text for text, prompt, response, *_ in table["data"])
        for name in ("kl_per_sequence", "response_length") if phase < 3 else ():
            mean = sum(sample[name] for sample in samples) / len(samples)
            assert mean == pytest.approx(lines[phase][name], rel=1e-5, abs=1e-6)


def test_probe_numbers_and_pictures_are_logged(logged):
    _, path, file = logged
    for record in Run(path).records("run_health"):
        row = file.history[record["phase"]]
        for name in ("mean_reward", "beta_eff", "optimal_kl_per_sequence"):
            assert row.get(f"probe/run_health/{name}") == record[name], name
    last = Run(path).records("weight_delta")[-1]
    assert last["phase"] == 3
    assert file.summary["probe/weight_delta/total_norm"] == last["total_norm"] > 0
    assert file.history[0]["probe/weight_delta/total_norm"] == 0
    name = "probe/weight_delta/picture_1"
    assert [f"{name}.path" in row for row in file.history] == [True, False, True]
    assert file.history[0][f"{name}.sha256"] != file.history[2][f"{name}.sha256"]
    name = "probe/run_health/picture_2"
    picture = Image.open(file.directory / "files" / file.history[0][f"{name}.path"])
    assert picture.size == (768, 384) and len(set(picture.convert("L").tobytes())) > 20
    assert file.history[0][f"{name}.caption"].startswith("KL from the reference")


def test_printed_command_sends_the_offline_run(logged, warm_python, surroundings):
    done, path, file = logged
    (line,) = [line for line in done.stdout.splitlines() if "wandb" in line]
    command = line.partition("send it with: ")[2].split()
    assert command == ["wandb", "sync", str(file.directory.relative_to(path.parent))]
    assert "wandb" not in done.stderr
    dry_run = ["-m", *command, "--dry-run"]
    tried = warm_python.run(dry_run, cwd=path.parent, env=dict(surroundings))
    assert tried.returncode == 0 and "Would sync 1 run" in tried.stdout + tried.stderr


def test_settings_come_before_variables(make_trainer, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    names = {"project_name": "mine", "entity": "me", "group": "pairs", "notes": "my own"}
    settings = {f"wandb_{name}": value for name, value in names.items()}
    trainer = make_trainer(wandb_tags="one, two", **settings)
    trainer.train()
    run = only_file_of(trainer.run.path).run
    assert (run.project, run.entity, run.run_group) == ("mine", "me", "pairs")
    assert (list(run.tags), run.notes) == (["one", "two"], "my own")


@pytest.mark.parametrize(
    ("field", "variable", "expected"),
    [
        (None, None, "disabled"),
        (None, "", "disabled"),
        (None, "offline", "offline"),
        (None, "dryrun", "offline"),
        (None, "online", "online"),
        ("offline", None, "offline"),
        ("online", "offline", "offline"),
        ("offline", "online", "offline"),
        ("offline", "disabled", "disabled"),
        ("disabled", "online", "disabled"),
    ],
)
def test_mode_is_the_more_private_of_setting_and_variable(field, variable, expected):
    environment = {} if variable is None else {"WANDB_MODE": variable}
    assert choose_wandb_mode(RLHFArgs(wandb_mode=field), environment) == expected


@pytest.mark.parametrize(
    ("variables", "settings", "message"),
    [
        ({"WANDB_MODE": "sometimes"}, {}, "WANDB_MODE='sometimes'.*disabled, offline, online"),
        ({"WANDB_MODE": "online"}, {}, "requires a login.*offline"),
        ({}, {"wandb_project_name": "a/b"}, "wandb rejects.*'a/b'"),
        ({}, {"wandb_tags": f"short,{'x' * 65}"}, "wandb rejects.*tag"),
        ({"WANDB_SILENT": "perhaps"}, {}, "wandb rejects.*silent.*perhaps"),
        ({"WANDB_MODE": "disabled"}, {"log_probes": True}, "log_probes=True requires a logger"),
    ],
)
def test_invalid_settings_raise_at_construction(
    make_trainer, monkeypatch, variables, settings, message
):
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **options: False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        make_trainer(
            **{"wandb_mode": "online" if "WANDB_MODE" in variables else "offline"} | settings
        )


KILLED = """
import os, signal, sys, time
import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer

class Killed(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.on("after_rollout")(self.die)
    def die(self, ctx):
        if ctx.phase == 3:
            time.sleep(2.5)  # as long as a phase may take, so that wandb writes what it has
            os.kill(os.getpid(), signal.SIGKILL)

rlhf_lab.training.RLHFTrainer = Killed
sys.exit(main(sys.argv[1:]))
"""


def test_killed_run_resumes_under_its_id_and_names(warm_python, surroundings, tmp_path):
    """Saved after 2 phases, killed in the fourth: the third is done again."""
    arguments = [*SMALL, "--total-phases", "4", "--save-every", "2", "--out", "run"]
    killed = warm_python.run(["-c", KILLED, *arguments], cwd=tmp_path, env=surroundings | VARIABLES)
    assert killed.returncode == -9
    first = only_file_of(tmp_path / "run", n_open=1)
    assert [row["_step"] for row in first.history] == [0, 1, 2]
    assert first.exit_codes == [] and "final/mean_reward" not in first.summary
    resumed = warm_python.run(
        lab("resume", "run"), cwd=tmp_path, env=surroundings | {"WANDB_MODE": "offline"}
    )
    assert resumed.returncode == 0, resumed.stderr
    first, second = (WandbFile(path) for path in sorted(tmp_path.glob("run/wandb/offline-run-*")))
    assert second.run.run_id == first.run.run_id
    for part in (first, second):
        run = part.run
        assert (run.display_name, run.project, run.entity) == ("first light", "reviews", "a-team")
        assert (list(run.tags), run.notes) == (["reel", "short"], "a first look")
    assert [row["_step"] for row in second.history] == [2, 3]
    assert second.exit_codes == [0]
    assert (
        second.summary["final/mean_reward"]
        == json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))["final"]["mean_reward"]
    )
    (line,) = [line for line in resumed.stdout.splitlines() if "wandb sync" in line]
    assert line.endswith(" ".join(f"run/wandb/{part.directory.name}" for part in (first, second)))


def test_extended_run_starts_with_a_new_step(make_trainer):
    trainer = make_trainer(total_phases=2, wandb_mode="offline")
    trainer.train()
    RLHFTrainer.resume(trainer.run.path, {"total_phases": 3}).train()
    first, second = files_of(trainer.run.path)
    assert [row["_step"] for row in first.history] == [0, 1]
    assert [row["_step"] for row in second.history] == [2]
    assert first.summary["final/mean_reward"] != second.summary["final/mean_reward"]


@pytest.mark.parametrize(
    ("error", "exit_code"), [(ValueError, 1), (KeyboardInterrupt, 130), (None, 130)]
)
def test_exit_code_names_how_the_run_ended(make_trainer, monkeypatch, error, exit_code):
    trainer = make_trainer(total_phases=3, wandb_mode="offline")

    @trainer.on("after_phase")
    def stop(ctx: Any) -> None:
        trainer.request_stop()

    def fail(rollout: Any) -> Any:
        raise error("no more")

    if error is None:
        trainer.train()
    else:
        monkeypatch.setattr(trainer, "evaluate", fail)
        trainer.run_phase()
        monkeypatch.setattr(trainer, "learning_phase", fail)
        with pytest.raises(error):
            trainer.train()
    file = only_file_of(trainer.run.path)
    assert file.exit_codes == [exit_code] and [row["_step"] for row in file.history] == [0]
    assert "final/mean_reward" not in file.summary


@pytest.mark.parametrize("finishes", [True, False])
def test_run_of_steps_is_closed_by_finish_and_by_with(make_trainer, finishes):
    trainer = make_trainer(total_phases=3, wandb_mode="offline")
    with trainer:
        for _ in range(2):
            responses = trainer.generate(["this movie"] * trainer.args.batch_size)
            scores = [float(row % 3) for row in range(trainer.args.batch_size)]
            trainer.step(["this movie"] * len(responses), responses, scores)
        assert only_file_of(trainer.run.path, n_open=1).exit_codes == []
        if finishes:
            trainer.finish()
            assert only_file_of(trainer.run.path).exit_codes == [0]
    file = only_file_of(trainer.run.path)
    assert file.exit_codes == [0] and [row["_step"] for row in file.history] == [0, 1]
    assert [row[3] for row in file.table(file.history[1], "samples")["data"]][:3] == [0, 1, 2]


def test_two_trainers_at_once_are_two_runs(make_trainer):
    trainers = [make_trainer(total_phases=2, wandb_mode="offline", seed=seed) for seed in (1, 2)]
    for _ in zip(*trainers, strict=True):
        pass
    for trainer in trainers:
        file, lines = only_file_of(trainer.run.path), trainer.run.read("metrics.jsonl")
        assert [row["mean_reward"] for row in file.history] == [r["mean_reward"] for r in lines]
        assert file.exit_codes == [0]


class OnlineRun:
    """Stands in for a run on wandb's servers."""

    id, url = "abc", "https://wandb.test/a-team/reviews/runs/abc"
    step, summary = 0, {}

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Take it."""

    def finish(self, exit_code: int) -> None:
        """Take it."""


@pytest.mark.parametrize("terminal", [True, False])
def test_url_of_an_online_run_is_printed_once(make_trainer, monkeypatch, terminal):
    import wandb

    from rlhf_lab.views.terminal import train_on_terminal

    monkeypatch.setattr(wandb, "login", lambda **options: True)
    monkeypatch.setattr(wandb, "init", lambda **options: OnlineRun())
    trainer, shown = make_trainer(total_phases=2, wandb_mode="online"), StringIO()
    console = Console(file=shown, force_terminal=terminal, width=100)
    assert train_on_terminal(trainer, console) == 0
    assert shown.getvalue().count(OnlineRun.url) == 1
    assert trainer.run.read_info()["wandb_url"] == OnlineRun.url
    assert "wandb sync" not in shown.getvalue()


def chosen(parameter: dict[str, Any]) -> Any:
    """A value that a sweep may choose."""
    if "values" in parameter:
        return parameter["values"][-1]
    return parameter.get("value", parameter.get("min"))


def test_sweep_file_runs_with_wandbs_agent(warm_python, surroundings, tmp_path, monkeypatch):
    """The agent's own code makes the command; the run is offline, as there is no server."""
    from wandb import wandb_agent
    from wandb.sdk.launch.sweeps.utils import load_sweep_config

    started: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb_agent, "AgentProcess", lambda **how: started.append(how) or how_of())
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_SILENT")
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep_config(str(SWEEP))
    values = {name: chosen(parameter) for name, parameter in sweep["parameters"].items()}
    assert values["normalize_reward"] is False and values["seed"] == 3
    values |= {"total_phases": 1, "batch_size": 16, "gen_len": 8, "top_k": None}
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep123")
    agent._sweep_command = sweep["command"]
    asked = {name: {"value": value} for name, value in values.items()}
    agent._command_run(
        {"type": "run", "run_id": "run45678", "program": sweep["program"], "args": asked}
    )
    (how,) = started
    env, python, *arguments = how["command"]
    assert (env, python) == ("/usr/bin/env", "python")
    named = {name: value for name, value in how["env"].items() if name.startswith("WANDB_")}
    done = warm_python.run(
        arguments, cwd=tmp_path, env=surroundings | named | {"WANDB_MODE": "offline"}
    )
    assert done.returncode == 0, done.stderr
    file = only_file_of(tmp_path)
    assert (file.run.run_id, file.run.sweep_id) == ("run45678", "sweep123")
    assert {name: file.config[name] for name in values} == values
    assert sweep["metric"]["name"] in file.summary


def how_of() -> Any:
    """Stands in for the process that the agent keeps."""
    return type("Process", (), {})()


def test_final_probe_records_of_a_stopped_run_are_in_its_summary(make_trainer):
    from rlhf_lab.probes import WeightDelta, attach

    trainer = make_trainer(total_phases=9, wandb_mode="offline", log_probes=True)
    attach(trainer, WeightDelta(every=9))
    for report in trainer:
        if report.phase == 3:
            trainer.request_stop()
    file = only_file_of(trainer.run.path)
    last = Run(trainer.run.path).records("weight_delta")[-1]
    assert file.summary["probe/weight_delta/total_norm"] == last["total_norm"] > 0
    picture = file.directory / "files" / file.summary["probe/weight_delta/picture_1.path"]
    assert Image.open(picture).size == (768, 384)
    begun = file.history[0]["probe/weight_delta/picture_1.sha256"]
    assert file.summary["probe/weight_delta/picture_1.sha256"] != begun
    assert [row["_step"] for row in file.history] == [0, 1, 2, 3]


def test_wandb_log_in_a_callback_keeps_every_phase(make_trainer):
    """wandb.log without a step completes the step that is open."""
    import wandb

    trainer = make_trainer(total_phases=3, wandb_mode="offline")
    trainer.on("after_phase")(lambda ctx: wandb.log({"mine": ctx.phase}))
    trainer.on("after_rollout")(lambda ctx: wandb.log({"rolled": ctx.phase}, commit=False))
    trainer.train()
    file = only_file_of(trainer.run.path)
    rows = [row for row in file.history if "mean_reward" in row]
    assert [(row["_step"], row["mine"]) for row in rows] == [(0, 0), (1, 1), (2, 2)]
    assert [row["rolled"] for row in rows] == [0, 1, 2]
    assert file.summary["final/samples"] == 32
