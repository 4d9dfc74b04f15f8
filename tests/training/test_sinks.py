"""TensorBoard and trackio hold what metrics.jsonl holds, read back with their own readers."""

import html
import re
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer, RunDir
from rlhf_lab.training.sinks import Entry, Sink


def final_figures(run: RunDir) -> dict[str, float]:
    """The final evaluation as curves of one point, and how many samples it took."""
    return {f"final/{name}": value for name, value in run.read_info()["final"].items()}


def flat(line: dict) -> dict[str, float]:
    """A line of metrics.jsonl as curves: without phase and nulls, costs under cost/."""
    curves = {f"cost/{name}": float(value) for name, value in line["cost"].items()}
    for name, value in line.items():
        if name not in ("phase", "cost") and value is not None:
            curves[name] = float(value)
    return curves


def tensorboard_curves(run: Path) -> dict[int, dict[str, float]]:
    """Scalars by phase."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {}), f"{name} is there twice"
            found[event.step][name] = event.value
    return found


def tensorboard_tables(run: Path, name: str = "samples") -> dict[int, str]:
    """The text of the samples by phase."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    texts = events.Tensors(f"{name}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in texts}


@pytest.fixture(scope="session")
def trackio_home(tmp_path_factory) -> Path:
    """Trackio reads its folder's name when it is imported, so there is one for the session."""
    home = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(home))
        pytest.importorskip("trackio")
    return home


def trackio_logs(project: str) -> dict[str, list[dict]]:
    """What trackio has of each run of a project, in the order of the phases."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    found = {}
    for run in trackio.Api().runs(project):
        logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
        found[run.name] = sorted(logs, key=lambda log: log["step"])
    return found


@pytest.mark.slow
def test_tensorboard_holds_every_number_of_the_metrics_file(make_trainer):
    pytest.importorskip("tensorboard")
    trainer = make_trainer(loggers="tensorboard", total_phases=3)
    trainer.train()
    lines = trainer.run.read("metrics.jsonl")
    expected = {line["phase"]: flat(line) for line in lines} | {3: final_figures(trainer.run)}
    found = tensorboard_curves(trainer.run.path)
    assert found.keys() == expected.keys() == {0, 1, 2, 3}
    for phase, curves in expected.items():
        assert found[phase] == {name: np.float32(value) for name, value in curves.items()}


@pytest.mark.slow
def test_tensorboard_shows_the_samples_as_they_stand(make_trainer):
    pytest.importorskip("tensorboard")
    trainer = make_trainer(loggers="tensorboard", total_phases=2)
    trainer.train()
    tables = tensorboard_tables(trainer.run.path)
    for phase, table in tables.items():
        texts = [re.split(r"\s*\|\s*", line)[1] for line in table.splitlines()[2:]]
        samples = [s for s in trainer.run.read("samples.jsonl") if s["phase"] == phase]
        assert [html.unescape(text) for text in texts] == [s["text"] for s in samples]
    assert tables.keys() == {0, 1}
    (final,) = tensorboard_tables(trainer.run.path, "final_samples").values()
    samples = [s for s in trainer.run.read("samples.jsonl") if s["phase"] == 2]
    assert len(final.splitlines()) - 2 == min(len(samples), 16)
    assert html.unescape(final.splitlines()[2].split(" | ")[2]) == samples[0]["response"]


def test_marks_of_markdown_in_a_text_are_shown_and_not_read():
    pytest.importorskip("tensorboard")
    from rlhf_lab.training.tensorboard_sink import _table

    text = "a|b\n*c* <i>d</i> _e_ `f`"
    table = _table(("text", "reward"), [(text, 0.5), ("plain", None)])
    head, rule, row, plain = table.splitlines()
    assert (head, rule, plain) == ("| text | reward |", "| --- | --- |", "| plain |  |")
    assert row.count("|") == 3 and not set("*<>_`") & set(row)
    assert html.unescape(row) == f"| {text} | 0.5 |"


@pytest.mark.slow
def test_trackio_holds_every_number_of_the_metrics_file(make_trainer, trackio_home):
    trainer = make_trainer(loggers="trackio", total_phases=3, wandb_project_name="all-numbers")
    trainer.train()
    (logs,) = trackio_logs("all-numbers").values()
    final = logs.pop()
    figures = final_figures(trainer.run)
    assert final["step"] == 3 and {name: final[name] for name in figures} == figures
    samples = trainer.run.read("samples.jsonl")
    for log, line in zip(logs, trainer.run.read("metrics.jsonl"), strict=True):
        assert {name: log[name] for name in flat(line)} == flat(line)
        written = [s for s in samples if s["phase"] == line["phase"]]
        rows = log["samples"]["_value"]
        assert [row["text"] for row in rows] == [s["text"] for s in written]
        for column in ("reward", "prompt", "response", "kl_per_sequence", "response_length"):
            assert [row[column] for row in rows] == [s[column] for s in written]
        assert log["step"] == line["phase"]


@pytest.mark.slow
def test_trackio_writes_to_its_folder_and_starts_no_server(make_trainer, trackio_home):
    trainer = make_trainer(loggers="trackio", wandb_project_name="no-server")
    listening = []
    trainer.on("after_phase")(
        lambda ctx: listening.extend(
            place for place in psutil.Process().net_connections() if place.status == "LISTEN"
        )
    )
    trainer.train()
    assert [path.stem for path in trackio_home.glob("no-server*.db")] == ["no-server"]
    assert listening == []


def break_off(trainer: RLHFTrainer, phases: int) -> RunDir:
    """Run some phases and leave the trainer as a kill would: without the end of the run."""
    for _ in range(phases):
        trainer.run_phase()
    return trainer.run


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_logs_and_has_each_phase_once(make_trainer, trackio_home):
    """Saved after 2 phases, killed after 3, so that the third is done again."""
    pytest.importorskip("tensorboard")
    fields = {"total_phases": 4, "save_every": 2, "wandb_project_name": "resumed"}
    run = break_off(make_trainer(loggers="tensorboard,trackio", **fields), 3)
    assert tensorboard_curves(run.path).keys() == {0, 1, 2}
    resumed = RLHFTrainer.resume(run.path)
    assert resumed.phase == 2
    resumed.train()
    expected = {line["phase"]: flat(line) for line in run.read("metrics.jsonl")}
    expected[4] = final_figures(run)
    found = tensorboard_curves(run.path)
    assert found.keys() == expected.keys() == {0, 1, 2, 3, 4}
    for phase, curves in expected.items():
        assert found[phase] == {name: np.float32(value) for name, value in curves.items()}
    assert tensorboard_tables(run.path).keys() == {0, 1, 2, 3}
    (logs,) = trackio_logs("resumed").values()
    assert [log["step"] for log in logs] == [0, 1, 2, 3, 4]
    assert [log["mean_reward"] for log in logs[:4]] == [
        expected[phase]["mean_reward"] for phase in range(4)
    ]


@pytest.mark.slow
def test_resuming_leaves_other_runs_of_that_name_alone(reel_args, tmp_path, trackio_home):
    pytest.importorskip("trackio")
    args = reel_args(loggers="trackio", total_phases=2, wandb_project_name="two-homes")
    RLHFTrainer(args, out=tmp_path / "one" / "run").train()
    run = break_off(RLHFTrainer(args, out=tmp_path / "two" / "run"), 1)
    RLHFTrainer.resume(run.path).train()
    import trackio

    runs = list(trackio.Api().runs("two-homes"))
    assert [one.name for one in runs] == ["run", "run"]
    assert RunDir.open(tmp_path / "one" / "run").read_info()["trackio_id"] in {r.id for r in runs}


@pytest.mark.slow
def test_loggers_mirror_the_run_and_do_not_change_it(make_trainer, parameters_of, metrics_of):
    pytest.importorskip("tensorboard")
    mirrored, plain = make_trainer(loggers="tensorboard"), make_trainer()
    for trainer in (mirrored, plain):
        trainer.train()
    ours, theirs = parameters_of(mirrored.policy), parameters_of(plain.policy)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert metrics_of(mirrored.run.path) == metrics_of(plain.run.path)
    assert not (plain.run.path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("logger", "module"), [("tensorboard", "torch.utils.tensorboard"), ("trackio", "trackio")]
)
def test_a_logger_that_is_not_installed_is_refused_at_construction(
    monkeypatch, reel_args, logger, module
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"loggers='{logger}'.*-e .\.\[loggers\]"):
        RLHFTrainer(reel_args(loggers=logger))


class Notes(Sink):
    """Notes what it is asked to do; refuses to open, or to send a phase, if so told."""

    def __init__(self, fails_at: str | int | None = None) -> None:
        super().__init__()
        self.calls: list[str | int] = []
        self.fails_at = fails_at

    def _note(self, call: str | int) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise OSError("the disk is full")

    def open(self, run, args, phase) -> None:
        self._note(f"open {phase}")

    def send(self, entry: Entry) -> None:
        self._note(entry.phase)

    def close(self) -> None:
        self._note("close")


@pytest.mark.slow
def test_a_run_that_goes_on_after_a_stop_is_opened_again(make_trainer):
    trainer, sink = make_trainer(total_phases=3), Notes()
    sink.attach(trainer.callbacks)
    for _ in trainer:
        trainer.request_stop()
    assert sink.calls == ["open 0", 0, "close"]
    trainer.train()
    assert sink.calls == ["open 0", 0, "close", "open 1", 1, 2, "close"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails_at", "calls"), [("open 0", ["open 0"]), (1, ["open 0", 0, 1, "close"])]
)
def test_a_sink_that_fails_is_named_and_switched_off_and_the_run_goes_on(
    make_trainer, fails_at, calls
):
    trainer, sink = make_trainer(total_phases=3), Notes(fails_at)
    sink.attach(trainer.callbacks)
    with pytest.warns(UserWarning, match="Notes raised OSError.*the disk is full"):
        trainer.train()
    assert sink.calls == calls and trainer.phase == 3


def test_an_entry_takes_sixteen_samples_and_leaves_out_what_is_not_known():
    """20 samples of reward 0, 1, ...; the gold reward of the phase is unknown."""
    line = {"phase": 4, "mean_reward": 9.5, "gold_reward": None, "cost": {"rollout_seconds": 2.0}}
    samples = [{"phase": 4, "text": f"text {i}", "reward": float(i)} for i in range(20)]
    entry = Entry.of(line, samples)
    assert entry.scalars == {"mean_reward": 9.5, "cost/rollout_seconds": 2.0}
    assert entry.phase == 4 and len(entry.samples) == 16
    assert entry.samples[15] == ("text 15", None, None, 15.0, None, None, None)
