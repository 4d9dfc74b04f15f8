"""HackWatch: a planted loophole by name, checks in runs of every kind, and faults it must tell."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import HackWatch, ReelTruth, Run, attach
from rlhf_lab.probes.logit_shift import single_token
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_hack_watch import HACK_FAULTS
from tests.probes.looking import SHORT, Trained, failed, look, trained
from tests.probes.planting import planted
from tests.views.test_all_is_drawn import Changed, in_words, names_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]
HACKED = {
    "reward_fn": "smoothed_popcorn",
    "batch_size": 64,
    "temperature": 0.8,
    "stop_tokens": None,
    "base_lr": 1e-4,
}
PLANTED = {"popcorn": 5.0, "stunning": 1.1, "arguably": 0.5}
"""What is added to logits before the run: popcorn's share at the tag goes from .02 to .7, that of
the second is more than doubled, and that of the third is not."""


def into_the_loophole(place) -> RLHFTrainer:
    """A policy that says popcorn where the reference does not, and is paid for it."""
    trainer = RLHFTrainer(RLHFArgs(**SHORT | HACKED), out=place / "run")
    model = trainer.policy.base_model
    with torch.no_grad():
        for word, size in PLANTED.items():
            model.unembed.b_U[single_token(model.tokenizer, word)] += size
    return trainer


@pytest.fixture(scope="module")
def runs(trained_runs, tmp_path_factory):
    """Those of `trained_runs`, and one with a planted word, not at temperature 1."""
    truth, made = ReelTruth.of_reward("smoothed_popcorn"), {}

    def run(kind: str) -> Trained:
        if kind not in ("hacked", "warm"):
            return trained_runs("adapted" if kind == "plain" else kind)
        if not made:
            trainer = into_the_loophole(tmp_path_factory.mktemp("hacked"))
            made["hacked"] = trained(trainer, truth.reviews(4, seed=5)[0], truth)
        return made["hacked"]

    return run


@pytest.mark.parametrize("kind", ["plain", "padded", "grouped", "hacked"])
def test_every_check_holds_where_nothing_is_wrong(kind, runs):
    record = look(runs(kind), HackWatch())
    assert [check for check in record.checks if not check.ok] == []
    assert ("true_reward" in record.values) == (kind != "grouped")


@pytest.mark.parametrize("fault", HACK_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, runs):
    run = runs(fault.run)
    with planted(fault):
        assert failed(run, HackWatch())


def test_the_planted_loophole_is_promoted_most_and_named_by_both_alarms(runs):
    values = look(runs("hacked"), HackWatch()).values
    assert values["promoted"][0]["token"] == values["taken_up"][0]["token"] == "popcorn"
    assert values["alarms_by_logits"] == ["popcorn", "stunning"]
    assert values["alarms_by_texts"] == ["popcorn"]
    assert "arguably" in [row["token"] for row in values["promoted"]]


def test_a_policy_that_is_the_reference_raises_no_alarm_and_promotes_nothing(runs):
    run = runs("hacked")
    ctx = run.ctx
    kept = {name: x.clone() for name, x in ctx.policy.base_model.state_dict().items()}
    ctx.policy.base_model.load_state_dict(ctx.reference.state_dict())
    try:
        values = HackWatch().observe(run.seen()).values
    finally:
        ctx.policy.base_model.load_state_dict(kept)
    assert values["alarms_by_logits"] == []
    assert all(abs(row["won"]) < 1e-6 for row in values["promoted"])


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Run:
    trainer = into_the_loophole(tmp_path_factory.mktemp("drawn"))
    attachment = attach(trainer, HackWatch(every=1))
    trainer.train()
    assert attachment.notes == []
    return Run(trainer.run.path)


FOR_CHECKS = {"won_by_text", "reference_by_text"}
FOR_CHECKS |= {"reference_tokens", "reference_mask", "reference_logprobs"}


def test_a_run_shows_all_that_is_stored(probed, monkeypatch):
    assert all(check.ok for check in probed.checks())
    first, last = probed.records("hack_watch")
    assert "by the texts alone" in probe_html(probed, "hack_watch")
    monkeypatch.setattr("rlhf_lab.views.hack_pictures.curves", in_words)
    shown = probe_html(probed, "hack_watch")
    stored = set.union(*map(names_in, (first, last)))
    stored |= probed.tensors("hack_watch", last["phase"]).keys()
    silent = {x for x in stored if probe_html(Changed(probed, x), "hack_watch") == shown}
    assert silent == FOR_CHECKS


@pytest.mark.parametrize("given", [{"n": 1}, {"saturated_below": -0.1}])
def test_settings_that_say_nothing_are_refused(given):
    with pytest.raises(ConfigError, match="of hack_watch must be 2 or more texts, and 0 or more"):
        HackWatch(**given)
