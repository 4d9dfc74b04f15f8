import warnings
from dataclasses import replace

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Check, Record, StepInfluence, attach
from rlhf_lab.training import RLHFTrainer
from tests.probes.faults_step_influence import STEP_INFLUENCE
from tests.probes.planting import planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]

ARGS = {
    "preset": "reel",
    "reward_fn": "true_reward",
    "total_phases": 1,
    "batch_size": 8,
    "num_minibatches": 2,
    "warmup_steps": 0,
    "gen_len": 14,
    "stop_tokens": "and",  # rows of unequal length
    "temperature": 0.9,
    "base_lr": 3e-4,
    "ent_coef": 0.01,
}
RUNS = {"plain": {}, "clipped": {"max_grad_norm": 0.05}, "kl": {}}


class Sweep(StepInfluence):
    """Takes the same step apart once for each fault, and keeps what the checks say of it."""

    def __init__(self, faults, **options):
        super().__init__(**options)
        self.faults, self.told = faults, {}

    def prepare(self, seen):
        whole = super().prepare
        return {name: self._under(fault, whole, seen) for name, fault in self.faults}

    def observe(self, seen):
        for name, fault in self.faults:
            found = seen.prepared[name]
            if not isinstance(found, Exception):
                whole = replace(seen, prepared=found)
                found = self._under(fault, self._checked, whole)
            raised = isinstance(found, Exception)
            failed = [] if raised else [check.name for check in found if not check.ok]
            self.told[name] = [repr(found)] if raised else failed
        return Record({}, {}, [Check.at_most("swept", 0, 0)])

    def _checked(self, seen):
        record = StepInfluence.observe(self, seen)
        if not all(check.ok for check in record.checks):  # told already: save the time of the rest
            return record.checks
        return [*record.checks, *StepInfluence.bind(self, seen, record)]

    def bind(self, seen, record):
        return []

    def _under(self, fault, function, seen):
        try:
            if fault is None:
                return function(seen)
            with planted(fault):
                return function(seen)
        except Exception as error:
            return error


@pytest.fixture(scope="module")
def told(truth, tmp_path_factory) -> dict[str, list[str]]:
    """The failed checks of each fault, by name; of no fault in each run, by the run's name."""
    found = {}
    tokens, _ = truth.reviews(4, seed=5)
    for fault in STEP_INFLUENCE:  # one that cannot be planted is not to count as told
        with planted(fault):
            pass
    for run, overrides in RUNS.items():
        faults = [(run, None), *((f.name, f) for f in STEP_INFLUENCE if f.run == run)]
        trainer = RLHFTrainer(
            RLHFArgs(**(ARGS | overrides)), out=tmp_path_factory.mktemp("swept") / "run"
        )
        target = "kl" if run == "kl" else "logit_difference"
        sweep = Sweep(faults, fine=run == "kl", target=target, pos=truth.grammar.slot("VERB") - 1)
        attached = attach(trainer, sweep, eval_tokens=tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        assert attached.notes == []
        found |= sweep.told
    return found


@pytest.mark.parametrize("run", RUNS)
def test_nothing_is_told_where_nothing_is_wrong(told, run):
    assert told[run] == []


@pytest.mark.parametrize("fault", STEP_INFLUENCE, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_records_own_checks(told, fault):
    assert told[fault.name]
