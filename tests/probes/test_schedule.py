"""A run's probes record by phase, never by the clock, and stay within their megabytes."""

import pytest
import torch

from rlhf_lab.probes import Check, Probe, Record, Run, attach
from rlhf_lab.training import RLHFTrainer
from tests.clock import Clock

FINE = Check.at_most("fine", 0, 0)


class Slow(Probe):
    """Each call takes an hour."""

    name = "slow"
    clock = Clock()

    def observe(self, seen):
        self.clock.now += 3600
        return Record(checks=[FINE])


class Large(Probe):
    """Each call stores some megabytes."""

    def __init__(self, mb: float, name: str = "large", every: int = 1) -> None:
        super().__init__(every, name)
        self.values = round(mb * 2**20 / 4)

    def observe(self, seen):
        return Record({"text": "x"}, {"x": torch.zeros(self.values)}, [FINE])


def test_slow_probe_records_the_same_phases(make_trainer, monkeypatch):
    trainer = make_trainer(total_phases=4)
    monkeypatch.setattr("rlhf_lab.probes.attachment.perf_counter", Slow.clock)
    attachment = attach(trainer, Slow())
    trainer.train()
    assert Run(trainer.run.path).phases("slow") == [0, 1, 2, 3, 4] and attachment.notes == []
    assert attachment.seconds["slow"] >= 5 * 3600


def test_record_over_max_mb_switches_only_its_probe_off(make_trainer):
    trainer = make_trainer(total_phases=3)
    attachment = attach(trainer, Large(0.35), Large(0.01, "small"), max_mb=1)
    with pytest.warns(UserWarning, match=r"large: switched off: its record of 0.351 MB exceeds"):
        trainer.train()
    run = Run(trainer.run.path)
    assert attachment.plan == {"small": 1} and len(attachment.notes) == 1
    assert run.phases("large") == [0, 1] and run.phases("small") == [0, 1, 2, 3]
    assert "max_mb=1 with the 0.7" in run.notes()[0]["note"]


def test_resumed_run_counts_what_it_has_stored(make_trainer):
    """0.7 MB in phases 0 and 1: no room for as much again, though either half alone would fit."""
    trainer = make_trainer(total_phases=4)
    attach(trainer, Large(0.35), max_mb=10)
    trainer.run_phase(), trainer.run_phase()
    resumed = RLHFTrainer.resume(trainer.run.path)
    attachment = attach(resumed, Large(0.35), max_mb=1)
    with pytest.warns(UserWarning, match=r"exceeds max_mb=1 with the 0.7\d* MB stored before"):
        resumed.train()
    assert attachment.plan == {} and Run(trainer.run.path).phases("large") == [0, 1]
