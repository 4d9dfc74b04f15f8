"""Weights & Biases: what a run logs, read back from the files of real offline runs."""

import json
import os
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Run
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.wandb_sink import wandb_mode_of
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
FIGURES = ("mean_reward", "gold_reward", "grammatical_fraction", "kl_per_sequence", "samples")

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


def info_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text("utf-8"))


def lines_of(run: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / file).read_text("utf-8").splitlines()]


def logged_curves(line: dict[str, Any]) -> dict[str, float]:
    """A line of metrics.jsonl as curves: without phase and nulls, costs under cost/."""
    curves = {f"cost/{name}": value for name, value in line["cost"].items()}
    return curves | {k: v for k, v in line.items() if k not in ("phase", "cost") and v is not None}


@pytest.fixture(scope="module")
def logged(warm_python, surroundings, tmp_path_factory) -> tuple[Any, Path, WandbFile]:
    """A run with probes that wandb's own variables send offline, against its settings."""
    place = tmp_path_factory.mktemp("wandb")
    arguments = lab(*SMALL, "--out", "first", "--wandb-mode", "online", "--log-probes")
    done = warm_python.run(arguments, cwd=place, env=surroundings | VARIABLES)
    assert done.returncode == 0 and "switched off" not in done.stderr, done.stderr
    return done, place / "first", only_file_of(place / "first")


def test_the_variables_of_wandb_say_what_the_run_is_called_and_where_it_is(logged):
    run = logged[2].run
    assert (run.display_name, run.project, run.entity) == ("first light", "reviews", "a-team")
    assert (run.run_group, list(run.tags)) == ("ablation", ["reel", "short"])
    assert (run.notes, run.job_type) == ("a first look", "ppo")
    assert logged[2].exit_codes == [0]


def test_the_settings_are_the_runs_config(logged):
    _, path, file = logged
    config = {name: value for name, value in file.config.items() if name != "_wandb"}
    assert config == info_of(path)["args"]


def test_every_number_of_every_phase_is_at_its_step(logged):
    _, path, file = logged
    lines = lines_of(path, "metrics.jsonl")
    assert [row["_step"] for row in file.history] == [line["phase"] for line in lines] == [0, 1, 2]
    for row, line in zip(file.history, lines, strict=True):
        expected = logged_curves(line)
        assert {name: row[name] for name in expected} == expected and len(expected) > 25


def test_the_tables_have_prompt_and_response_apart_and_what_is_known_of_each_sample(logged):
    _, path, file = logged
    tables = [file.table(row, "samples") for row in file.history]
    tables.append(file.table(file.history[-1], "final_samples"))
    columns = "text prompt response reward gold_reward kl_per_sequence response_length".split()
    for phase, table in enumerate(tables):
        written = [s for s in lines_of(path, "samples.jsonl") if s["phase"] == phase]
        assert table["columns"] == columns
        rows = [[sample[name] for name in columns] for sample in written[:16]]
        assert table["data"] == rows and len(rows) == 16
        for text, prompt, response, *_ in rows:
            assert (prompt, prompt + response) == ("this movie", text)


def test_a_samples_kl_and_length_have_the_means_of_the_phase(logged):
    _, path, _ = logged
    for line in lines_of(path, "metrics.jsonl"):
        samples = [s for s in lines_of(path, "samples.jsonl") if s["phase"] == line["phase"]]
        for name in ("kl_per_sequence", "response_length"):
            mean = sum(sample[name] for sample in samples) / len(samples)
            assert mean == pytest.approx(line[name], rel=1e-5, abs=1e-6)


def test_the_final_figures_are_in_the_summary(logged):
    _, path, file = logged
    final = info_of(path)["final"]
    assert {name: file.summary[f"final/{name}"] for name in FIGURES} == final
    assert final["samples"] == 4 * 24


def test_the_numbers_that_probes_record_are_logged_in_their_phase(logged):
    _, path, file = logged
    run = Run(path)
    records = run.records("run_health")
    assert records[0]["phase"] == 0
    for record in records:  # of every phase, unless the machine is busy and the probe is thinned
        row = file.history[record["phase"]]
        for name in ("mean_reward", "beta_eff", "optimal_kl_per_sequence"):
            assert row.get(f"probe/run_health/{name}") == record[name], name
    last = run.records("weight_delta")[-1]
    assert last["phase"] == 3
    assert file.summary["probe/weight_delta/total_norm"] == last["total_norm"] > 0
    assert 0 == file.history[0]["probe/weight_delta/total_norm"]


def test_the_pictures_of_probes_are_logged_after_1_2_4_phases_and_at_the_end(logged):
    _, _, file = logged
    name, captions = "probe/run_health/picture_2", []
    shown = [row for row in file.history if f"{name}.path" in row]
    assert shown[0] == file.history[0]
    for row in shown:
        picture = Image.open(file.directory / "files" / row[f"{name}.path"])
        assert picture.size == (row[f"{name}.width"], row[f"{name}.height"]) == (768, 384)
        assert len(set(picture.convert("L").tobytes())) > 20
        captions.append(row[f"{name}.caption"])
    assert all(caption.startswith("KL from the reference") for caption in captions)
    ends = [
        row["probe/weight_delta/picture_1.sha256"] for row in (file.history[0], file.history[2])
    ]
    assert ends[0] != ends[1]
    assert "probe/weight_delta/picture_1.path" not in file.history[1]


def test_the_command_says_once_how_to_send_an_offline_run(logged, warm_python, surroundings):
    done, path, file = logged
    (line,) = [line for line in done.stdout.splitlines() if "wandb" in line]
    command = line.partition("send it with: ")[2].split()
    assert command == ["wandb", "sync", str(file.directory.relative_to(path.parent))]
    assert "wandb" not in done.stderr
    assert info_of(path)["wandb_directories"] == command[2:]
    tried = warm_python.run(
        ["-m", *command, "--dry-run"],
        cwd=path.parent,
        env={name: value for name, value in surroundings.items()},
    )
    assert tried.returncode == 0 and "Would sync 1 run" in tried.stdout + tried.stderr


def test_the_variable_alone_logs_offline_under_the_directorys_name(make_trainer, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = make_trainer(total_phases=2)
    trainer.train()
    run = only_file_of(trainer.run.path).run
    assert (run.display_name, run.project) == (trainer.run.path.name, "rlhf_transformers")


def test_fields_come_before_the_variables(make_trainer, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(
        total_phases=2,
        wandb_project_name="mine",
        wandb_entity="me",
        wandb_group="pairs",
        wandb_tags="one, two",
        wandb_notes="of my own",
    )
    trainer.train()
    run = only_file_of(trainer.run.path).run
    assert (run.project, run.entity, run.run_group) == ("mine", "me", "pairs")
    assert (list(run.tags), run.notes) == (["one", "two"], "of my own")


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
def test_of_field_and_variable_the_one_that_sends_less_holds(field, variable, expected):
    environment = {} if variable is None else {"WANDB_MODE": variable}
    assert wandb_mode_of(RLHFArgs(wandb_mode=field), environment) == expected


def test_the_variable_switches_wandb_off(make_trainer, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    trainer = make_trainer(total_phases=2, wandb_mode="offline")
    trainer.train()
    assert files_of(trainer.run.path) == [] and "wandb_id" not in trainer.run.read_info()


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({"WANDB_MODE": "sometimes"}, [], "WANDB_MODE='sometimes'.*disabled, offline, online"),
        ({"WANDB_MODE": "online"}, [], "WANDB_MODE=online needs a login.*offline"),
        ({}, ["--wandb-mode=offline", "--wandb-project-name=a/b"], "wandb refuses.*'a/b'"),
        ({}, ["--wandb-mode=offline", f"--wandb-tags=short,{'x' * 65}"], "wandb refuses.*tag"),
        ({"WANDB_SILENT": "perhaps"}, ["--wandb-mode=offline"], "wandb refuses.*silent.*perhaps"),
        ({}, ["--log-probes"], "log_probes=True has no logger.*wandb_mode"),
    ],
)
def test_what_wandb_would_refuse_is_refused_first(
    warm_python, surroundings, tmp_path, variables, options, expected
):
    done = warm_python.run(
        lab(*SMALL, "--out", "run", *options), cwd=tmp_path, env=surroundings | variables
    )
    last = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(last) == 1, done.stderr
    assert re.search(expected, last[0], re.IGNORECASE), last
    assert not (tmp_path / "run").exists()


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


def test_a_killed_run_goes_on_under_its_id_and_names(warm_python, surroundings, tmp_path):
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
    assert second.summary["final/mean_reward"] == info_of(tmp_path / "run")["final"]["mean_reward"]
    (line,) = [line for line in resumed.stdout.splitlines() if "wandb sync" in line]
    assert line.endswith(" ".join(f"run/wandb/{part.directory.name}" for part in (first, second)))


def test_a_run_that_is_given_more_phases_begins_with_a_new_step(make_trainer):
    trainer = make_trainer(total_phases=2, wandb_mode="offline")
    trainer.train()
    RLHFTrainer.resume(trainer.run.path, {"total_phases": 3}).train()
    first, second = files_of(trainer.run.path)
    assert [row["_step"] for row in first.history] == [0, 1]
    assert [row["_step"] for row in second.history] == [2]
    assert first.summary["final/mean_reward"] != second.summary["final/mean_reward"]


@pytest.mark.parametrize(("error", "exit_code"), [(ValueError, 1), (KeyboardInterrupt, 130)])
def test_the_exit_code_tells_of_an_error(make_trainer, monkeypatch, error, exit_code):
    trainer = make_trainer(total_phases=3, wandb_mode="offline")
    learn = trainer.learning_phase

    def fail(rollout: Any) -> Any:
        if trainer.phase == 1:
            raise error("no more")
        return learn(rollout)

    monkeypatch.setattr(trainer, "learning_phase", fail)
    with pytest.raises(error):
        trainer.train()
    file = only_file_of(trainer.run.path)
    assert file.exit_codes == [exit_code] and [row["_step"] for row in file.history] == [0]


def test_the_exit_code_tells_of_a_stop(make_trainer):
    trainer = make_trainer(total_phases=3, wandb_mode="offline")
    for _ in trainer:
        trainer.request_stop()
    file = only_file_of(trainer.run.path)
    assert file.exit_codes == [130] and "final/mean_reward" not in file.summary


def test_a_run_of_steps_is_closed_by_finish_and_by_a_with_statement(make_trainer):
    for finishes in (True, False):
        trainer = make_trainer(total_phases=3, wandb_mode="offline")
        with trainer:
            for _ in range(2):
                answers = trainer.generate(["this movie"] * trainer.args.batch_size)
                scores = [float(row % 3) for row in range(trainer.args.batch_size)]
                trainer.step(["this movie"] * len(answers), answers, scores)
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
    files = [only_file_of(trainer.run.path) for trainer in trainers]
    assert files[0].run.run_id != files[1].run.run_id
    for file, trainer in zip(files, trainers, strict=True):
        lines = trainer.run.read("metrics.jsonl")
        assert [row["mean_reward"] for row in file.history] == [r["mean_reward"] for r in lines]
        assert file.exit_codes == [0]


def test_the_first_trainers_run_is_the_one_that_callbacks_log_to(make_trainer):
    import wandb

    trainer = make_trainer(total_phases=2, wandb_mode="offline")
    trainer.on("after_phase")(lambda ctx: wandb.log({"my/number": 7 + ctx.phase}, step=ctx.phase))
    trainer.train()
    history = only_file_of(trainer.run.path).history
    assert [row["my/number"] for row in history] == [7, 8]
    assert "mean_reward" in history[1]


class OnlineRun:
    """Stands in for a run on wandb's servers."""

    id, url = "abc", "https://wandb.test/a-team/reviews/runs/abc"
    step, summary = 0, {}

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Take it."""

    def finish(self, exit_code: int) -> None:
        """Take it."""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_address_of_an_online_run_is_shown_once(make_trainer, monkeypatch, terminal):
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


def test_the_sweep_file_runs_as_wandbs_agent_runs_it(
    warm_python, surroundings, tmp_path, monkeypatch
):
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


@pytest.mark.parametrize("logger", ["tensorboard"])
def test_probes_are_logged_to_other_loggers_too(make_trainer, logger):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from rlhf_lab.probes import Budget, RunHealth, attach

    trainer = make_trainer(total_phases=2, loggers=logger, log_probes=True)
    attach(trainer, RunHealth(), budget=Budget(time_frac=1e6))
    trainer.train()
    events = accumulator.EventAccumulator(str(trainer.run.path / "tensorboard"))
    events.Reload()
    found = [event.value for event in events.Scalars("probe/run_health/mean_reward")]
    assert found == pytest.approx([r["mean_reward"] for r in trainer.run.read("metrics.jsonl")])
    pictures = events.Images("probe/run_health/picture_1")
    assert [picture.step for picture in pictures] == [0, 1]
    assert (pictures[0].width, pictures[0].height) == (768, 384)


def test_without_the_field_nothing_of_the_probes_is_logged(make_trainer):
    from rlhf_lab.probes import RunHealth, attach

    trainer = make_trainer(total_phases=2, wandb_mode="offline")
    attach(trainer, RunHealth())
    trainer.train()
    file = only_file_of(trainer.run.path)
    assert not [name for name in file.history[0] if name.startswith("probe/")]


def test_probes_that_are_logged_change_no_weight(make_trainer, parameters_of):
    from rlhf_lab.probes import RunHealth, attach

    ends = []
    for fields in ({}, {"wandb_mode": "offline", "log_probes": True}):
        trainer = make_trainer(total_phases=2, **fields)
        if fields:
            attach(trainer, RunHealth())
        trainer.train()
        ends.append(parameters_of(trainer.policy))
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])


def test_what_probes_find_at_the_end_of_a_stopped_run_is_in_its_summary(make_trainer):
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


def test_a_callback_that_logs_by_itself_keeps_every_phase(make_trainer):
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
