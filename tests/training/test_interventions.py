"""Interventions hold for a whole run: in sampling and learning, in run.json, when it is resumed."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.probes import Run, TextHeatmap, attach
from rlhf_lab.training import RLHFTrainer

SITE = "blocks.0.hook_attn_out"
PATTERN = "blocks.0.attn.hook_pattern"


def halve(activation: Tensor, where: Any) -> Tensor:
    """Half of what the site writes."""
    return activation / 2


def in_place(activation: Tensor, where: Any) -> None:
    """The same, by changing what is there."""
    with torch.no_grad():
        activation.mul_(0.5)


@pytest.mark.slow
def test_the_policy_writes_and_learns_with_it_and_the_reference_does_not(make_trainer):
    """The ratio is 1, and the KL in phase 0 is that of the halved policy from the plain one."""
    trainer = make_trainer()
    trainer.intervene(SITE, halve)
    report = trainer.run_phase()
    assert abs(report.ratio_first_minibatch - 1) < 1e-5
    assert report.kl_per_token > 1e-6
    assert not has_hooks(trainer.reference)
    plain = make_trainer().run_phase()
    assert plain.kl_per_token == 0 and plain.entropy_per_token != report.entropy_per_token


@pytest.mark.slow
@pytest.mark.parametrize("site", [SITE, PATTERN])
def test_it_is_told_phase_event_and_site(make_trainer, site):
    seen = set()
    trainer = make_trainer()
    trainer.intervene(site, lambda activation, where: seen.add(where), name="watch")
    trainer.train()
    assert {(w.phase, w.event) for w in seen} == {
        (0, "rollout"),
        (0, "learning"),
        (1, "rollout"),
        (1, "learning"),
        (2, "rollout"),  # the evaluation at the end
    }
    assert {w.site for w in seen} == {site}


@pytest.mark.slow
def test_an_edit_in_place_and_a_returned_tensor_are_the_same_run(make_trainer, metrics_of):
    runs = []
    for fn in (halve, in_place):
        trainer = make_trainer()
        trainer.intervene(SITE, fn, during=("rollout",), name="halve")
        with pytest.warns(UserWarning, match="not the policy that sampled.*intervention 'halve'"):
            trainer.train()
        runs.append(metrics_of(trainer.run.path))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_one_that_tells_the_events_apart_is_named_when_the_ratio_is_off(make_trainer):
    trainer = make_trainer()
    trainer.intervene(SITE, lambda x, where: x / 2 if where.event == "rollout" else x, name="half")
    with pytest.warns(UserWarning, match="not the policy that sampled.*the intervention 'half'"):
        trainer.run_phase()


@pytest.mark.slow
def test_an_intervention_in_the_value_head_is_told_and_moves_the_values(make_trainer):
    trainer, told = make_trainer(), []

    def shift(value: Tensor, where: Any) -> Tensor:
        told.append(where.site)
        return value + 1

    site = "value_head.hook_value"
    trainer.intervene(site, shift)
    values = trainer.rollout_phase().samples.values
    assert set(told) == {site}
    assert values.mean() == pytest.approx(1, abs=0.5)
    assert make_trainer().rollout_phase().samples.values.abs().max() < 0.5


@pytest.mark.slow
def test_wildcards_name_several_sites_and_it_is_written_in_run_json(make_trainer):
    trainer = make_trainer()
    trainer.intervene("blocks.*.hook_mlp_out", halve, during=("learning", "rollout"))
    trainer.run_phase()
    info = json.loads((trainer.run.path / "run.json").read_text())
    expected = {"name": "halve", "site": "blocks.*.hook_mlp_out", "during": ["learning", "rollout"]}
    assert info["interventions"] == [expected]
    assert info["custom_components"] == ["interventions"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_it_bit_for_bit(make_trainer, parameters_of, metrics_of):
    whole, broken_off = make_trainer(), make_trainer()
    for trainer in (whole, broken_off):
        trainer.intervene(SITE, halve)
    whole.train()
    broken_off.run_phase()
    path = broken_off.run.path
    with pytest.raises(ConfigError, match=r"intervention 'halve'.*interventions=\{'halve': fn\}"):
        RLHFTrainer.resume(path)
    with pytest.raises(ConfigError, match="no intervention 'other'; there are halve"):
        RLHFTrainer.resume(path, interventions={"halve": halve, "other": halve})
    again = RLHFTrainer.resume(path, interventions={"halve": halve})
    again.train()
    assert metrics_of(path) == metrics_of(whole.run.path)
    ours, theirs = parameters_of(again.policy), parameters_of(whole.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_the_policy_of_a_run_has_it_or_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.intervene(SITE, halve)
    trainer.train()
    run = Run(trainer.run.path)
    with pytest.raises(ConfigError, match="trained with the intervention 'halve'"):
        run.policy()
    tokens = torch.arange(2, 8)[None]
    found = run.policy(interventions={"halve": halve})(tokens)[0]
    assert torch.equal(found, trainer.policy(tokens)[0])
    plain = run.policy(interventions={"halve": lambda activation, where: None})(tokens)[0]
    assert (found - plain).abs().max() > 1e-2


@pytest.mark.slow
def test_a_plain_run_takes_no_interventions_when_it_is_resumed(make_trainer):
    trainer = make_trainer()
    trainer.run_phase()
    with pytest.raises(ConfigError, match="no intervention 'halve'; there are none"):
        RLHFTrainer.resume(trainer.run.path, interventions={"halve": halve})


@pytest.mark.slow
def test_a_kl_of_0_before_learning_is_not_expected_of_it(make_trainer):
    """The check is there without an intervention, and would fail with one, as those of fresh
    forwards might: the samples' rows are not run alone.
    """
    checks = {}
    for intervened in (False, True):
        trainer = make_trainer()
        attach(trainer, TextHeatmap())
        if intervened:
            trainer.intervene(SITE, halve)
        trainer.train()
        found = Run(trainer.run.path).checks()
        assert all(check.ok for check in found)
        checks[intervened] = {check.name for check in found}
    assert checks[False] - checks[True] == {"KL is 0 before learning"}


@pytest.mark.slow
def test_what_cannot_work_is_refused(make_trainer):
    trainer = make_trainer()
    refused = [
        (("blocks.9.hook_mlp_out", halve), {}, "does not have"),
        (("logits", halve), {}, "is an output"),
        ((SITE, halve), {"during": ()}, "must name rollout or learning"),
    ]
    for given, more, message in refused:
        with pytest.raises(ConfigError, match=message):
            trainer.intervene(*given, **more)
    trainer.intervene(SITE, halve)
    with pytest.raises(ConfigError, match="name='halve' is taken by another"):
        trainer.intervene(SITE, halve)
    trainer.run_phase()
    with pytest.raises(ConfigError, match="The run has begun without the intervention"):
        trainer.intervene(SITE, halve, name="late")


@pytest.mark.slow
def test_a_listener_that_resets_hooks_does_not_take_it_off(make_trainer):
    trainer = make_trainer()
    trainer.intervene(SITE, halve)
    trainer.on("after_rollout")(lambda ctx: ctx.policy.base_model.reset_hooks())
    first, second = trainer.train()
    assert first.kl_per_token > 1e-6 and abs(second.ratio_first_minibatch - 1) < 1e-5
