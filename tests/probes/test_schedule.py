"""A run's probes record by phase, never by the clock."""

from itertools import count

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import Check, Probe, Record, Run, attach, default_suite
from rlhf_lab.probes.defaults import affordable_rows
from rlhf_lab.training.checkpoint import load_checkpoint
from tests.probes.looking import same_weights

FINE = Check.at_most("fine", 0, 0)


class Plain(Probe):
    name = "plain"

    def observe(self, seen):
        return Record(checks=[FINE])


class Sampled(Plain):
    """Sees samples only, so has no record of the end."""

    name = "sampled"
    events = ("after_score",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "phases"),
    [("milestones", [0, 1, 2, 3, 5]), ("every", [0, 1, 2, 3, 4, 5, 6]), ([4], [4]), ([], [])],
)
def test_probes_record_the_phases_of_the_suite_and_the_end(make_trainer, record, phases):
    """`every` of a probe goes first; a probe of samples has the last rollout as its end."""
    trainer = make_trainer(total_phases=7, batch_size=4)
    attach(trainer, Plain(), Sampled(), Plain(every=4, name="own"), record=record)
    trainer.train()
    run = Run(trainer.run.path)
    assert run.phases("plain") == [*phases, 7]
    assert run.phases("sampled") == sorted({*phases, 6})
    assert run.phases("own") == [0, 4, 7]


def stored(path):
    """Return the contents of a file; safetensors store their metadata in any order."""
    if path.suffix != ".safetensors":
        return path.read_bytes()
    tensors, metadata = load_checkpoint(path)
    metadata.pop("run", None)  # of each run
    return metadata, {name: str(tensor.tolist()) for name, tensor in tensors.items()}


@pytest.mark.slow
def test_clock_changes_no_record(make_trainer, monkeypatch):
    """In the second run, each reading of the clock is an hour later than the last."""
    usual, slow, plain = (make_trainer(gen_len=26) for _ in range(3))
    attach(usual, default_suite(usual))
    usual.train(), plain.train()
    monkeypatch.setattr("rlhf_lab.probes.attachment.perf_counter", count(0, 3600).__next__)
    attached = attach(slow, default_suite(slow))
    slow.train()
    assert attached.seconds["run_health"] == 3600 * slow.args.total_phases
    first, second = (
        {path.relative_to(folder): stored(path) for path in folder.rglob("*.*")}
        for folder in (usual.run.path / "probes", slow.run.path / "probes")
    )
    assert len(first) > 15 and first == second
    assert same_weights(slow, plain)


def test_affordable_rows_cost_3_percent_of_a_run():
    """20 phases of 256 rows, read 2 times and trained on 3; 8 records at 1.5 of a row."""
    args = RLHFArgs(preset="reel", batch_size=256, total_phases=20, batches_per_learning_phase=3)
    rows = affordable_rows(args)
    assert rows * 8 * 1.5 <= 0.03 * 20 * 256 * (2 + 3 * 3) < (rows + 1) * 8 * 1.5
