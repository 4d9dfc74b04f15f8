"""A mutation suite of the probes: each planted fault must be told by the record's own checks."""

import itertools
import warnings
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import LabError
from rlhf_lab.probes import (
    Direction,
    KLByPosition,
    LogitShift,
    ReelTruth,
    Run,
    RunHealth,
    StepLedger,
    Suite,
    TextHeatmap,
    ValueLens,
    WeightDelta,
    attach,
)
from rlhf_lab.probes.text_heatmap import FIELDS
from rlhf_lab.training import RLHFTrainer
from tests.probes.faults import OTHERS, REVIEWED
from tests.probes.planting import Fault, planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]

ARGS = {
    "preset": "reel",
    "reward_fn": "sentiment",
    "total_phases": 2,
    "batch_size": 16,
    "num_minibatches": 2,
    "warmup_steps": 1,
    "gen_len": 26,
    "stop_tokens": "and",  # rows of unequal length
    "temperature": 0.9,
    "base_lr": 3e-3,
    "normalize_reward": True,
    "ent_coef": 0.01,
}
RUNS = {"plain": {}, "lora": {"lora_rank": 2}, "critic": {"value_head": "separate"}}


def suite_of(truth: ReelTruth) -> Suite:
    tokens, positive = truth.reviews(96, seed=5)
    probes = [
        TextHeatmap(fields=FIELDS),
        RunHealth(),
        StepLedger(),
        KLByPosition(n=12),
        ValueLens(every=1),
        Direction(every=1),
        LogitShift(pos=truth.grammar.slot("VERB") - 1, every=1),
        WeightDelta(words=("loved", "hated"), every=1),
    ]
    return Suite(*probes, eval_tokens=tokens, labels=positive)


def told(run: str, truth: ReelTruth, path: Path) -> set[str]:
    """The kinds of probes whose records of a run have a failed check, or that raised an error."""
    trainer = RLHFTrainer(RLHFArgs(**(ARGS | RUNS[run])), out=path)
    attached = attach(trainer, suite_of(truth))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    kinds = {name: type(probe).__name__ for name, probe in attached.probes.items()}
    found = {kinds[check.probe] for check in Run(path).checks() if not check.ok}
    return found | {kinds[name] for name in kinds.keys() - attached.plan.keys()}


@pytest.fixture(scope="module", params=RUNS)
def without_faults(request, truth, tmp_path_factory) -> set[str]:
    return told(request.param, truth, tmp_path_factory.mktemp("sound") / "run")


def test_nothing_is_told_where_nothing_is_wrong(without_faults):
    assert not without_faults


@pytest.fixture(scope="module")
def caught(truth, tmp_path_factory) -> dict[str, bool]:
    """Whether each fault was told, by name; a run has one fault in each probe."""
    by_probe: dict[tuple[str, str], list[Fault]] = defaultdict(list)
    for fault in (*REVIEWED, *OTHERS):
        by_probe[fault.run, fault.probe].append(fault)
    found = {}
    for run in RUNS:
        of_run = [faults for (which, _), faults in by_probe.items() if which == run]
        for faults in itertools.zip_longest(*of_run):
            with ExitStack() as stack:
                for fault in filter(None, faults):
                    stack.enter_context(planted(fault))
                kinds = told(run, truth, tmp_path_factory.mktemp("faulty") / "run")
            found |= {fault.name: fault.probe in kinds for fault in filter(None, faults)}
    return found


@pytest.mark.parametrize("fault", [*REVIEWED, *OTHERS], ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_records_own_checks(caught, fault):
    assert caught[fault.name]


def test_the_code_is_as_it_was_after_a_fault():
    fault = REVIEWED[0]
    before = TextHeatmap._numbers.__code__
    with planted(fault):
        pass
    assert TextHeatmap._numbers.__code__ is before
    with pytest.raises(AssertionError, match="has no"), planted(fault._replace(old="not there")):
        raise LabError("a fault was planted nowhere")
