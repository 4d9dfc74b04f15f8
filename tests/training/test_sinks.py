"""TensorBoard and trackio, read back with their own readers, and custom sinks."""

import json
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from rlhf_lab.probes import WeightDelta, attach
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.sinks import Sink
from rlhf_lab.views.probe_logger import ProbeLogger
from tests.training.recorded_runs import tensorboard_events


def to_curves(line: dict) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl by their names in a logger."""
    curves = {f"cost/{name}": float(value) for name, value in line["cost"].items()}
    return curves | {
        k: float(v) for k, v in line.items() if k not in ("phase", "cost") and v is not None
    }


@pytest.mark.slow
def test_loggers_match_the_files_of_a_resumed_run(make_trainer):
    """Saved after 2 phases, killed after 3: the third runs twice."""
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    pytest.importorskip("tensorboard")
    killed = make_trainer(
        loggers="tensorboard,trackio", total_phases=4, save_every=2, wandb_project_name="resumed"
    )
    ports = []
    killed.on("after_phase")(lambda ctx: ports.extend(psutil.Process().net_connections()))
    for _ in range(3):
        killed.run_phase()
    assert not [port for port in ports if port.status == "LISTEN"]
    run = killed.run
    RLHFTrainer.resume(run.path).train()

    final = {f"final/{k}": float(v) for k, v in run.read_info()["final"].items()}
    expected = {line["phase"]: to_curves(line) for line in run.read("metrics.jsonl")} | {4: final}
    samples = {phase: [] for phase in range(5)}
    for sample in run.read("samples.jsonl"):
        samples[sample.pop("phase")].append(sample)

    events, found = tensorboard_events(run.path), {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in found.setdefault(event.step, {}), f"{name} is there twice"
            found[event.step][name] = event.value
    assert found.keys() == expected.keys() == {0, 1, 2, 3, 4}
    for phase, curves in expected.items():
        assert found[phase] == {name: np.float32(value) for name, value in curves.items()}
    texts = [*events.Tensors("samples/text_summary"), *events.Tensors("final_samples/text_summary")]
    assert {event.step for event in texts} == {0, 1, 2, 3, 4}
    for event in texts:
        text = event.tensor_proto.string_val[0].decode()
        assert [json.loads(line) for line in text.splitlines()] == samples[event.step]

    (logged,) = trackio.Api().runs("resumed")
    assert logged.name.startswith(run.path.name)
    logs = SQLiteStorage.get_logs("resumed", logged.name, run_id=logged.id)
    assert sorted(log["step"] for log in logs) == [0, 1, 2, 2, 3, 4]
    for log in logs:
        curves = {k: v for k, v in expected[log["step"]].items() if not k.startswith("cost/")}
        assert {name: log[name] for name in curves} == curves
        rows = log["final_samples" if log["step"] == 4 else "samples"]["_value"]
        assert rows == samples[log["step"]]


class Journal(Sink):
    """A sink that records its calls, and fails at one of them."""

    def __init__(self, fails_at: str | None = None) -> None:
        self.calls, self.fails_at = [], fails_at

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_at:
            raise OSError("the disk is full")

    def open(self, run, args, phase) -> None:
        self.note(f"open {phase}")

    def send(self, phase, values, is_final=False) -> None:
        self.note(f"final {phase}" if is_final else f"send {phase}")

    def close(self, exit_code) -> None:
        self.note(f"close {exit_code}")


@pytest.mark.slow
def test_sink_is_reopened_when_a_stopped_run_continues(make_trainer):
    """But one that fails is switched off."""
    trainer, sink = make_trainer(total_phases=3), Journal()
    failing = [Journal("open 0"), Journal("send 1")]
    for each in (sink, *failing):
        each.attach(trainer.callbacks)
    trainer.sinks.append(sink)
    with pytest.warns(UserWarning, match="raised OSError.*the disk is full"):
        for _ in trainer:
            trainer.request_stop()
        trainer.train()
    assert sink.calls[:3] == ["open 0", "send 0", "close 130"]
    assert sink.calls[3:] == ["open 1", "send 1", "send 2", "final 3", "close 0"]
    assert failing[0].calls == ["open 0"] and failing[1].calls[-1] == "close 0"


@pytest.mark.slow
def test_probe_logger_sends_earlier_records_only_once(make_trainer):
    trainer, sink = make_trainer(), Journal()
    attach(trainer, WeightDelta(every=9))
    trainer.run_phase()
    resumed = RLHFTrainer.resume(trainer.run.path)
    attach(resumed, WeightDelta(every=9))
    sink.attach(resumed.callbacks)
    ProbeLogger([sink], ["weight_delta"]).attach(resumed)
    resumed.run_phase()
    assert sink.calls == ["open 1", "send 1"]  # the metrics only


@pytest.mark.slow
def test_sink_gets_the_exit_code_of_an_error(make_trainer, monkeypatch):
    learn = Mock(side_effect=[ValueError, KeyboardInterrupt])
    monkeypatch.setattr(RLHFTrainer, "learning_phase", learn)
    for code in (1, 130):
        trainer, sink = make_trainer(), Journal()
        sink.attach(trainer.callbacks)
        trainer.sinks.append(sink)
        with pytest.raises((ValueError, KeyboardInterrupt)):
            trainer.train()
        assert sink.calls == ["open 0", f"close {code}"]
