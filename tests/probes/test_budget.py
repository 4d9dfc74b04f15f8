"""What probes may cost: measured time and stored megabytes, on clocks and records made by hand."""

from pathlib import Path

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import Budget, Check, Probe, Record, Run, attach
from rlhf_lab.training import RLHFTrainer
from tests.clock import Clock

FINE = Check.at_most("fine", 0, 0)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in ("probes.attachment", "training.trainer"):
        monkeypatch.setattr(f"rlhf_lab.{module}.perf_counter", clock)
    return clock


class Slow(Probe):
    """Each call takes some seconds."""

    def __init__(self, clock: Clock, seconds: float, name: str, every: int = 1) -> None:
        super().__init__(every, name)
        self.clock, self.seconds = clock, seconds

    def observe(self, seen):
        self.clock.now += self.seconds
        return Record(checks=[FINE])


class Large(Probe):
    """Each call stores some megabytes."""

    def __init__(self, mb: float, name: str = "large", every: int = 1) -> None:
        super().__init__(every, name)
        self.values = round(mb * 2**20 / 4)

    def observe(self, seen):
        return Record(tensors={"x": torch.zeros(self.values)}, checks=[FINE])


def phases_of_ten_seconds(trainer: RLHFTrainer, clock: Clock) -> None:
    """Six for the rollout, and one for each of 4 minibatches."""

    @trainer.on("after_rollout")
    def sample(ctx):
        clock.now += 6

    @trainer.on("before_minibatch")
    def learn(ctx):
        clock.now += 1


@pytest.mark.slow
def test_a_suite_over_its_time_budget_is_thinned_and_says_so(make_trainer, clock):
    trainer = make_trainer(total_phases=8)
    phases_of_ten_seconds(trainer, clock)
    attachment = attach(trainer, Slow(clock, 3, "costly"))
    # 8 phases of 10 s: every 1 -> 9 calls of 3 s = 34 % of 80 s; every 2 -> 5 calls = 19 %;
    # every 4 -> 3 calls = 11 %; every 8 -> 2 calls = 7 %, under 10 %.
    with pytest.warns(UserWarning, match="costly: every 4 phases -> every 8"):
        trainer.train()
    assert attachment.plan == {"costly": 8}
    run = Run(trainer.run.path)
    assert run.phases("costly") == [0, 8]
    first, second, third = (note["note"] for note in run.notes())
    assert first.startswith("every 1 phases -> every 2, because a projected 34% of the run's time")
    assert "19% of the run's time is over time_frac=0.1; a larger" in second
    assert "11% of the run's time is over time_frac=0.1; a larger" in third


@pytest.mark.slow
def test_the_most_expensive_probe_is_thinned_first(make_trainer, clock):
    trainer = make_trainer(total_phases=8)
    phases_of_ten_seconds(trainer, clock)
    probes = Slow(clock, 0.1, "cheap"), Slow(clock, 4, "dear")
    # 9 calls of 0.1 s and of 4 s: 36.9 of 80 s; dear every 2: 0.9 + 20 = 26 %; every 4: 16 %.
    with pytest.warns(UserWarning, match="dear: every 2 phases -> every 4"):
        attachment = attach(trainer, *probes, budget=Budget(time_frac=0.2))
        trainer.train()
    assert attachment.plan == {"cheap": 1, "dear": 4} and len(attachment.notes) == 2


@pytest.mark.slow
def test_probes_within_their_budget_are_left_alone(make_trainer, clock):
    trainer = make_trainer(total_phases=4)
    phases_of_ten_seconds(trainer, clock)
    # 5 calls of 1.9 s are 24 % of 40 s, and of 0.1 MB half a megabyte.
    budget = Budget(time_frac=0.25, mb=0.51)
    attachment = attach(trainer, Slow(clock, 1.9, "slow"), Large(0.1), budget=budget)
    trainer.train()
    assert attachment.notes == [] and attachment.plan == {"slow": 1, "large": 1}


@pytest.mark.slow
def test_under_two_seconds_in_all_nothing_is_thinned(make_trainer, clock):
    trainer = make_trainer(total_phases=2)
    phases_of_ten_seconds(trainer, clock)
    attachment = attach(trainer, Slow(clock, 0.6, "slow"), budget=Budget(time_frac=0.01))
    trainer.train()
    assert attachment.notes == [] and clock.now == pytest.approx(20 + 3 * 0.6)


@pytest.mark.slow
def test_megabytes_count_every_call_and_the_largest_probe_is_thinned(make_trainer):
    trainer = make_trainer(total_phases=8)
    probes = Large(0.25), Large(0.01, "small")
    # 9 calls of 0.26 MB: 2.34; large every 2: 5 x 0.25 + 0.09 = 1.34; every 4: 0.84.
    with pytest.warns(UserWarning, match="large: every 1 phases -> every 2, because a projected"):
        attachment = attach(trainer, *probes, budget=Budget(mb=1, time_frac=1000))
        trainer.train()
    assert attachment.plan == {"large": 4, "small": 1}
    run = Run(trainer.run.path)
    assert run.phases("large") == [0, 4, 8]
    assert "2.34 MB is over mb=1; a larger budget" in run.notes()[0]["note"]
    assert "1.34 MB is over mb=1; a larger budget" in run.notes()[1]["note"]


@pytest.mark.slow
def test_a_probe_whose_record_does_not_fit_is_refused_and_no_other(make_trainer):
    trainer = make_trainer(total_phases=3)
    attachment = attach(
        trainer, Large(1.5), Large(0.1, "small"), budget=Budget(mb=1, time_frac=1000)
    )
    with pytest.warns(UserWarning, match="large: refused, because its record of 1.5 MB"):
        trainer.train()
    assert attachment.plan == {"small": 1} and len(attachment.notes) == 1
    run = Run(trainer.run.path)
    assert run.probes() == ["small"] and run.phases("small") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_resumed_run_counts_what_it_has_stored(make_trainer):
    """0.7 MB in phases 0 and 1: no room for as much again, though either half alone would fit."""
    trainer = make_trainer(total_phases=4)
    attach(trainer, Large(0.35), budget=Budget(mb=10, time_frac=1000))
    trainer.run_phase(), trainer.run_phase()
    resumed = RLHFTrainer.resume(trainer.run.path)
    attachment = attach(resumed, Large(0.35), budget=Budget(mb=1, time_frac=1000))
    with pytest.warns(UserWarning, match=r"large: refused, .* 0.35\d MB and the 0.70\d MB"):
        resumed.train()
    assert attachment.plan == {} and Run(trainer.run.path).phases("large") == [0, 1]


class Wordy(Probe):
    """Each call stores long lines, many checks, and some tensors of odd shapes."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name)

    def observe(self, seen):
        tensors = {"empty": torch.zeros(0), "one": torch.tensor(1.0), "deep": torch.zeros(2, 1, 3)}
        checks = [Check.at_most(f"identity {i} of this record", i / 7, i) for i in range(500)]
        return Record({"text": "\N{SNOWMAN}" * 9000}, tensors, checks)


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*because")
def test_a_run_that_wants_ten_times_as_much_stays_within_its_megabytes(make_trainer):
    """Lines, checks, tensors and notes, over a resume: what is on disk is within the bound."""
    trainer, budget = make_trainer(total_phases=6), Budget(mb=0.5, time_frac=1000)
    probes = lambda: (Large(0.4), Large(0.2, "small"), Wordy("wordy"), Wordy("talky"))
    per_call = 0.6 + 2 * (6 * 9000 + 500 * 100) / 2**20
    assert 7 * per_call > 10 * budget.mb
    attach(trainer, *probes(), budget=budget)
    for _ in range(3):
        trainer.run_phase()
    path = trainer.run.path / "probes"
    assert 0.2 * 2**20 < bytes_below(path) <= budget.mb * 2**20
    resumed = RLHFTrainer.resume(trainer.run.path)
    attachment = attach(resumed, *probes(), budget=budget)
    resumed.train()
    stored = bytes_below(path)
    assert 0.2 * 2**20 < stored <= budget.mb * 2**20
    assert sum(taken.total() for taken in attachment.bytes.values()) == stored


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="mb=0"):
        Budget(mb=0)
    with pytest.raises(ConfigError, match="time_frac=nan must be a number greater than 0"):
        Budget(time_frac=float("nan"))
