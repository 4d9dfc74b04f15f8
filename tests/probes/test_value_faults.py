"""A mutation suite of the probes of value: faults are planted while they look at a policy."""

import warnings

import pytest

from rlhf_lab.probes import (
    Check,
    Observation,
    Probe,
    Record,
    ReelTruth,
    ValueAttribution,
    ValueLens,
    attach,
)
from tests.probes.faults_value_attribution import ATTRIBUTION_FAULTS
from tests.probes.faults_value_lens import VALUE_FAULTS
from tests.probes.planting import Fault, planted

pytestmark = pytest.mark.slow

SETTINGS = {
    "reward_fn": "sentiment",
    "batch_size": 16,
    "gen_len": 26,
    "temperature": 0.9,
    "top_k": 20,
    "base_lr": 3e-3,
    "head_lr": 1e-2,
}


FAULTS = (*VALUE_FAULTS, *ATTRIBUTION_FAULTS)


class Faulty(Probe):
    """Looks as another probe does, then once more with each fault, and keeps what was told."""

    def __init__(self, probe: Probe, faults: tuple[Fault, ...]) -> None:
        super().__init__(every=2, name=probe.name)
        self.probe, self.faults = probe, faults
        self.text, self.sites = probe.text or "eval", probe.sites
        self.told: dict[str, list[str]] = {}

    def observe(self, seen: Observation) -> Record:
        if seen.ctx.event == "run_end":
            for fault in self.faults:
                self.told[fault.name] = self._with(fault, seen)
        return self.probe.observe(seen)

    def bind(self, seen: Observation, record: Record) -> list[Check]:
        return self.probe.bind(seen, record)

    def _with(self, fault: Fault, seen: Observation) -> list[str]:
        with planted(fault):
            try:
                record = self.probe.observe(seen)
                checks = [*record.checks, *self.probe.bind(seen, record)]
            except Exception as error:
                return [f"raised {error}"]
        return [check.name for check in checks if not check.ok]


@pytest.fixture(scope="module")
def told(
    truth: ReelTruth, tmp_path_factory: pytest.TempPathFactory, no_type_checks: None
) -> dict[str, list[str]]:
    """The failed checks of each fault, and of the sound probe under the name of none."""
    from rlhf_lab.config import RLHFArgs
    from rlhf_lab.probes import Run
    from rlhf_lab.training import RLHFTrainer

    args = RLHFArgs(preset="reel", total_phases=2, num_minibatches=2, warmup_steps=1, **SETTINGS)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("faulty") / "run")
    lens = Faulty(ValueLens(prefixes=8), VALUE_FAULTS)
    parts = Faulty(ValueAttribution(slots=(5, 9, 24)), ATTRIBUTION_FAULTS)
    tokens = truth.reviews(60, seed=5)[0]
    attach(trainer, lens, parts, eval_tokens=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    sound = [check.name for check in Run(trainer.run.path).checks() if not check.ok]
    return lens.told | parts.told | {"": sound}


def test_nothing_is_told_of_the_sound_probe(told):
    assert told[""] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_told_by_the_records_own_checks(told, fault):
    assert told[fault.name]
