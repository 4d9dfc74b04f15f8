"""AdapterReading: pieces of a run's adapters, what they earn, and faults that are told."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import AdapterReading, Run, attach
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_adapter_reading import ADAPTER_READING_FAULTS
from tests.probes.looking import SHORT, Trained, failed, look
from tests.probes.planting import planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def probe_of(kind: str) -> AdapterReading:
    return AdapterReading(removed=2, n=24) if kind == "rewards" else AdapterReading()


@pytest.fixture(scope="module")
def run_of(trained_runs) -> Callable[[str], Trained]:
    """A run with adapters: on Reel, paid by its own reward, which varies with every word, or with
    an unembedding that is not the embedding's.
    """
    run = trained_runs("adapted")
    model = copy.deepcopy(run.ctx.policy.base_model)
    with torch.no_grad():
        model.unembed.W_U.copy_(model.unembed.W_U.flip(1))
    parts = vars(run.ctx) | {"policy": SimpleNamespace(base_model=model)}
    untied = run._replace(ctx=SimpleNamespace(**parts))
    runs = {"plain": run, "rewards": run._replace(truth=None), "untied": untied}
    return runs.__getitem__


@pytest.mark.parametrize("kind", ["plain", "rewards", "untied"])
def test_every_check_holds_where_nothing_is_wrong(kind, run_of):
    record = look(run_of(kind), probe_of(kind))
    assert [check for check in record.checks if not check.ok] == []
    pieces = record.values["pieces"]
    assert len(pieces) == 4 * 5 * 2  # rank, targets, layers
    assert all(row["s"] > 0 for row in pieces)
    by_weight = {row["weight"]: 0.0 for row in pieces}
    for row in pieces:
        by_weight[row["weight"]] += row["share"]
    assert list(by_weight.values()) == pytest.approx([1.0] * 10)
    if kind == "rewards":
        assert record.tensors["rewards"].shape == (3, 24)
        assert record.tensors["turned"].any() and record.tensors["rewards"].std() > 0
        assert pieces[record.values["removed"][0]]["s"] == max(row["s"] for row in pieces)


@pytest.mark.parametrize("fault", ADAPTER_READING_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, run_of):
    with planted(fault):
        found = failed(run_of(fault.run), probe_of(fault.run))
    assert found


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(tmp_path, weights_of):
    args = RLHFArgs(**SHORT | {"total_phases": 1, "warmup_steps": 0, "lora_rank": 2})
    plain, probed = (RLHFTrainer(args, out=tmp_path / name) for name in ("plain", "probed"))
    probe = AdapterReading(every=1, removed=1, n=8)
    attachment = attach(probed, probe)
    plain.train(), probed.train()
    assert attachment.notes == []
    found, expected = weights_of(probed.policy), weights_of(plain.policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    run = Run(probed.run.path)
    assert [check for check in run.checks() if not check.ok] == []
    first, last = run.records("adapter_reading")
    assert {row["share"] for row in first["pieces"]} == {None} and first["earned"] == [0.0]
    html = probe_html(run, "adapter_reading")
    assert html.count("<figure") == 2 and "n = 8" in html
    assert last["pieces"][0]["reads_words"][0] in html


def test_what_it_cannot_read_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="words=0"):
        AdapterReading(words=0)
    with pytest.raises(ConfigError, match="has none; train with lora_rank="):
        attach(make_trainer(), AdapterReading())
    trainer = make_trainer({"prompts": ["this movie", "this film"]}, lora_rank=2)
    attach(trainer, AdapterReading(name="pieces"))
    with pytest.raises(ConfigError, match="its own prompts"):
        attach(trainer, AdapterReading(removed=1))
