"""Weights & Biases: what a run logs, read back from the files of real offline runs."""

import json
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console

from rlhf_lab.__main__ import main, parse
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import Run, RunHealth, WeightDelta, attach
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.sinks import choose_wandb_mode, to_values
from rlhf_lab.views.terminal import train_on_terminal
from tests.training.recorded_runs import train_partly
from tests.wandb_file import WandbFile, items

SWEEP = Path(__file__).parents[2] / "docs" / "sweep.yaml"
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


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb without output; runs of earlier tests are closed."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def read_files(run: Path) -> list[WandbFile]:
    """Return the offline directories of a run by age, when the last has been closed."""
    deadline = monotonic() + 10
    while True:
        files = [WandbFile(path) for path in sorted(run.glob("wandb/offline-run-*"))]
        if files[-1].exit_codes:
            return files
        assert monotonic() < deadline, "a run of wandb was not closed"
        sleep(0.05)


def steps(file: WandbFile) -> list[int]:
    return [row["_step"] for row in file.history]


def identity(file: WandbFile) -> tuple[Any, ...]:
    run = file.run
    return run.display_name, run.project, run.entity, run.run_group, list(run.tags), run.notes


NAMES = ("first light", "reviews", "a-team", "ablation", ["reel", "short"], "a first look")


@pytest.fixture(scope="module")
def logged(reel_args, tmp_path_factory) -> list[tuple[Path, WandbFile]]:
    """Two runs at once, which WANDB_MODE sends offline; the second has probes and TensorBoard."""
    identity = {"project_name": "mine", "entity": "me", "group": "pairs", "notes": "my own"}
    settings = {f"wandb_{name}": value for name, value in identity.items()}
    changes = {"loggers": "tensorboard", "log_probes": True, "batch_size": 24}
    trainers, out = [], tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (VARIABLES | {"WANDB_SILENT": "true"}).items():
            patch.setenv(name, value)
        for fields in (settings | {"wandb_tags": "a, b"}, changes):
            args = reel_args(total_phases=3, wandb_mode="online", **fields)
            trainers.append(RLHFTrainer(args, out=out / f"run{len(trainers)}"))
        attach(trainers[1], RunHealth(), WeightDelta(every=2))
        for _ in zip(*trainers, strict=True):
            pass
    return [(each.run.path, file) for each in trainers for file in read_files(each.run.path)]


@pytest.mark.process
def test_settings_come_before_variables(logged):
    files = [file for _, file in logged]
    expected = [("first light", "mine", "me", "pairs", ["a", "b"], "my own"), NAMES]
    assert [identity(file) for file in files] == expected
    assert [file.run.job_type for file in files] == ["ppo"] * 2


@pytest.mark.process
def test_offline_run_matches_its_directory(logged):
    path, file = logged[1]
    info = json.loads((path / "run.json").read_text("utf-8"))
    config = items(file.run.config.update)
    assert {k: v for k, v in config.items() if k != "_wandb"} == info["args"]
    assert {k: file.summary[f"final/{k}"] for k in info["final"]} == info["final"]
    assert info["final"]["samples"] == 4 * 24 and file.exit_codes == [0]
    lines, samples = (
        [json.loads(line) for line in open(path / f"{name}.jsonl", encoding="utf-8")]
        for name in ("metrics", "samples")
    )
    assert steps(file) == [line["phase"] for line in lines] == [0, 1, 2]
    for row, line in zip(file.history, lines, strict=True):
        curves = {f"cost/{name}": value for name, value in line["cost"].items()}
        curves |= {k: v for k, v in line.items() if k not in ("phase", "cost") and v is not None}
        assert {name: row[name] for name in curves} == curves and len(curves) > 25
    tables = [file.table(row, "samples") for row in file.history]
    tables.append(file.table(file.summary, "final_samples"))
    columns = "text prompt response reward true_reward kl_per_sequence response_length"
    columns = [*columns.split(), "grammatical"]
    for phase, table in enumerate(tables):
        expected = [[s[name] for name in columns] for s in samples if s["phase"] == phase]
        assert table == table | {"columns": columns, "data": expected[:16]}


@pytest.mark.process
def test_probe_numbers_and_pictures_are_logged(logged):
    path, file = logged[1]
    rows = file.history
    for record in Run(path).records("run_health"):
        for name in ("mean_reward", "beta_eff", "optimal_kl_per_sequence"):
            assert rows[record["phase"]].get(f"probe/run_health/{name}") == record[name], name
    name = "probe/weight_delta/picture_1"
    assert [f"{name}.path" in row for row in rows] == [True, False, True]
    name = "probe/run_health/picture_2"
    page = (file.directory / "files" / rows[0][f"{name}.path"]).read_text(encoding="utf-8")
    assert "KL from the reference" in page and "<svg" in page and "<script" not in page


@pytest.mark.process
def test_stopped_run_keeps_its_phases_records_and_exit_code(make_trainer):
    """wandb.log in a callback, without a step, completes the step that is open."""
    import wandb

    trainer = make_trainer(total_phases=9, wandb_mode="offline", log_probes=True)
    attach(trainer, WeightDelta(every=9))
    trainer.on("after_phase")(lambda ctx: wandb.log({"mine": ctx.phase}))
    trainer.on("after_rollout")(lambda ctx: wandb.log({"rolled": ctx.phase}, commit=False))
    trainer.on("after_phase", every=2)(lambda ctx: trainer.request_stop() if ctx.phase else None)
    trainer.train()
    (file,) = read_files(trainer.run.path)
    rows = [row for row in file.history if "mean_reward" in row]
    found = [(row["_step"], row["mine"], row["rolled"]) for row in rows]
    assert found == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert file.exit_codes == [130] and "final/mean_reward" not in file.summary
    last = Run(trainer.run.path).records("weight_delta")[-1]
    assert file.summary["probe/weight_delta/total_norm"] == last["total_norm"] > 0


@pytest.mark.parametrize(
    ("setting", "variable", "expected"),
    [
        (None, "", "disabled"),
        (None, "DryRun ", "offline"),
        ("offline", "online", "offline"),
        ("disabled", "online", "disabled"),
    ],
)
def test_mode_is_the_more_private_of_setting_and_variable(setting, variable, expected):
    args = RLHFArgs(wandb_mode=setting)
    assert choose_wandb_mode(args, {"WANDB_MODE": variable}) == expected


@pytest.mark.slow
def test_settings_that_do_not_fit_wandb_warn_or_raise(make_trainer, monkeypatch, recwarn):
    import wandb

    make_trainer(wandb_group="a", wandb_mode="disabled")
    make_trainer(loggers="trackio", wandb_project_name="a")
    assert not recwarn
    with pytest.warns(UserWarning, match="wandb_tags='a' is ignored, since wandb is off"):
        make_trainer(wandb_tags="a")
    monkeypatch.setattr(wandb, "login", lambda **options: False)
    for mode, settings, message in (
        ("sometimes", {}, "WANDB_MODE='sometimes'.*disabled, offline, online"),
        ("online", {}, "requires a login.*offline"),
        ("offline", {"wandb_project_name": "a/b"}, "wandb rejects.*'a/b'"),
        ("disabled", {"log_probes": True}, "log_probes=True requires a logger"),
    ):
        monkeypatch.setenv("WANDB_MODE", mode)
        with pytest.raises(ConfigError, match=f"(?i){message}"):
            make_trainer(wandb_mode="online", **settings)


@pytest.mark.process
def test_killed_run_resumes_under_its_id_and_names(make_trainer, monkeypatch, capsys):
    """Saved after 2 phases, killed after 3: the third is done again."""
    import wandb

    with monkeypatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        path = train_partly(make_trainer(total_phases=4, save_every=2), 3)
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert main(["resume", str(path)]) == 0
    first, second = read_files(path)
    assert second.run.run_id == first.run.run_id and identity(first) == identity(second) == NAMES
    assert (steps(first), steps(second)) == ([0, 1, 2], [2, 3]) and second.exit_codes == [0]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "wandb sync" in line]
    paths = [str(file.directory) for file in (first, second)]
    assert line.partition("send it with: ")[2].split() == ["wandb", "sync", *paths]


@pytest.mark.slow
def test_url_of_an_online_run_is_printed_once(make_trainer, monkeypatch):
    import wandb

    url = "https://wandb.test/a-team/reviews/runs/abc"
    online = SimpleNamespace(id="abc", url=url, step=0, summary={})
    online.log = online.finish = lambda *values, **options: None
    monkeypatch.setattr(wandb, "login", lambda **options: True)
    monkeypatch.setattr(wandb, "init", lambda **options: online)
    trainer, shown = make_trainer(total_phases=2, wandb_mode="online"), StringIO()
    console = Console(file=shown, force_terminal=False, width=100)
    assert train_on_terminal(trainer, console) == 0
    assert shown.getvalue().count(url) == 1 and "wandb sync" not in shown.getvalue()
    assert trainer.run.read_info()["wandb_url"] == url


def test_sweep_file_has_settings_and_a_logged_metric(runs):
    """wandb's agent appends `--name=value` for each parameter to the command."""
    sweep = yaml.safe_load(SWEEP.read_text(encoding="utf-8"))
    values = {name: [*rule.values()][-1] for name, rule in sweep["parameters"].items()}
    values |= {name: x[-1] for name, x in values.items() if isinstance(x, list)}
    words = [*sweep["command"][4:-1], *(f"--{name}={x}" for name, x in values.items())]
    args = parse(words).keywords["args"]
    assert {name: getattr(args, name) for name in values} == values
    final = runs("plain").trainer.run.read_info()["final"]
    assert sweep["metric"]["name"] in to_values(final, [], "final/")
