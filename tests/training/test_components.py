"""Custom functions of the trainer, and interventions for a whole run: they act or raise."""

import dataclasses
import inspect
import json
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import TransformerWithValueHead, has_hooks, load_model, value_head
from rlhf_lab.probes import Run, TextHeatmap, attach
from rlhf_lab.training import Overrides, RLHFTrainer, ppo
from tests.training.recorded_runs import assert_same_run, copy_weights, is_equal

pytestmark = pytest.mark.slow

DEFAULTS = {
    **{field.name: field.default for field in dataclasses.fields(Overrides)},
    "advantages": lambda values, rewards, mask: F.compute_advantages(values, rewards, mask),
    "policy_loss": lambda logprobs, old_logprobs, advantages, clip_coef, mask: F.ppo_surrogate(
        logprobs, old_logprobs, advantages, clip_coef, mask=mask
    ),
    "kl_estimator": lambda logprobs, ref_logprobs: F.kl_estimate(logprobs, ref_logprobs, "k1"),
}
FIELDS = {"advantages": "one_step", "normalize_advantages": False, "ent_coef": 0.01}


def run_halves(trainer):
    trainer.learning_phase(trainer.rollout_phase())
    return copy_weights(trainer.policy)


@pytest.fixture(scope="module")
def default_weights(reel_args):
    return run_halves(RLHFTrainer(reel_args(**FIELDS)))


@pytest.mark.parametrize("name", DEFAULTS)
def test_custom_function_is_called_and_changes_the_run(make_trainer, default_weights, name):
    calls = []

    def doubled(*inputs):
        calls.append(inputs)
        return 2 * DEFAULTS[name](*inputs)

    trainer = make_trainer({name: doubled}, **FIELDS)
    assert trainer.custom_components == [name]
    assert not is_equal(run_halves(trainer), default_weights)
    assert len(calls) == (1 if name in ("advantages", "normalize_reward") else 4)


@pytest.mark.usefixtures("no_type_checks")  # of the tests; those of users accept the class
def test_policy_of_a_learners_class_trains_equally(make_trainer):
    """A notebook defines the whole class again, so its policy is not of the package's class."""
    namespace = dict(vars(value_head))
    exec(inspect.getsource(TransformerWithValueHead), namespace)
    reports, policies = [], []
    for kind in (TransformerWithValueHead, namespace["TransformerWithValueHead"]):
        policies.append(kind(load_model("reel-nano"), seed=1))
        reports.append(make_trainer({"policy": policies[-1]}, ent_coef=0.01).run_phase())
    packaged, learners = policies
    assert not isinstance(learners, TransformerWithValueHead)
    assert learners.value_head[0].weight.grad.any()
    torch.testing.assert_close(copy_weights(learners), copy_weights(packaged), atol=1e-6, rtol=0)
    for name in ("mean_reward", "kl_per_sequence", "grad_norm"):
        expected = getattr(reports[0], name)
        assert getattr(reports[1], name) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_term_that_is_not_one_number_raises(make_trainer):
    tensor, number = lambda x, *_: x.flatten(1), lambda *_: 0.5
    for name, function, result in (
        ("clipped_surrogate", tensor, r"a tensor of shape \("),
        ("value_loss", tensor, r"a tensor of shape \("),
        ("entropy_bonus", number, "0.5"),
        ("kl_penalty", number, "0.5"),
    ):
        with pytest.raises(ConfigError, match=f"^{name} returned {result}.*Return one number"):
            make_trainer({name: function}).run_phase()


SITE = "blocks.0.hook_attn_out"


def halve(activation: Tensor, where: Any) -> Tensor:
    return activation / 2


def halve_in_place(activation: Tensor, where: Any) -> None:
    with torch.no_grad():
        activation.mul_(0.5)


def test_intervention_acts_on_the_policy_in_each_phase(make_trainer):
    """Also after a callback has called reset_hooks; the reference has none."""
    trainer, seen, watched = make_trainer(), set(), "blocks.0.attn.hook_pattern"
    trainer.intervene(SITE, halve)
    trainer.intervene(watched, lambda activation, where: seen.add(where), name="watch")
    trainer.intervene("value_head.hook_value", lambda value, where: value + 1, name="shift")
    means = []
    trainer.on("after_score")(lambda ctx: means.append(ctx.rollout.samples.values.mean().item()))
    trainer.on("after_rollout")(lambda ctx: ctx.policy.base_model.reset_hooks())
    first, second = trainer.train()
    for report in (first, second):
        assert abs(report.ratio_first_minibatch - 1) < 1e-5 and report.kl_per_token > 1e-6
    assert not has_hooks(trainer.reference) and means == pytest.approx([1, 1], abs=0.5)
    plain = make_trainer().run_phase()
    assert plain.kl_per_token == 0 and plain.entropy_per_token != first.entropy_per_token
    stages = [(phase, stage) for phase in (0, 1) for stage in ("rollout", "learning")]
    evaluation = (2, "rollout")
    assert set(map(tuple, seen)) == {(*stage, watched) for stage in (*stages, evaluation)}


def test_penalty_without_gradient_raises(make_trainer):
    def detached(kl, kl_coef, mask):
        return (kl_coef * F.masked_mean(kl, mask)).detach()

    trainer = make_trainer({"kl_penalty": detached}, batches_per_learning_phase=2)
    with pytest.raises(ConfigError, match="kl_penalty returned a number without gradient"):
        trainer.train()


def test_nan_of_a_custom_function_names_it(make_trainer):
    trainer = make_trainer({"advantages": lambda values, mask: values * float("nan")})
    with pytest.raises(RunError, match="became nan in phase 0. Check the custom advantages"):
        trainer.train()


def test_edit_in_place_equals_a_returned_tensor(make_trainer):
    reports = []
    for fn in (halve, halve_in_place, lambda x, where: x / 2 if where.event == "rollout" else x):
        trainer = make_trainer()
        during = "rollout" if len(reports) < 2 else ("rollout", "learning")
        trainer.intervene(SITE, fn, during=during, name="halve")
        with pytest.warns(UserWarning, match="not the policy that sampled.*intervention 'halve'"):
            reports.append(trainer.run_phase().to_dict() | {"cost": None})
    assert reports[0] == reports[1] == reports[2]


def test_intervention_acts_in_a_replaced_learning_phase(make_trainer):
    trainer, stages = make_trainer(), set()
    trainer.intervene(SITE, lambda activation, where: stages.add(where.event), name="watch")
    trainer.learning_phase = lambda rollout: ppo.learning_phase(trainer, rollout)
    trainer.run_phase()
    assert stages == {"rollout", "learning"}


def test_resumed_run_requires_it_and_continues_bitwise(make_trainer):
    whole, broken_off = make_trainer(), make_trainer()
    for trainer in (whole, broken_off):
        trainer.intervene("blocks.*.hook_mlp_out", halve)
    whole.train()
    broken_off.run_phase()
    path = broken_off.run.path
    with pytest.raises(ConfigError, match=r"intervention 'halve'.*interventions=\{'halve': fn\}"):
        RLHFTrainer.resume(path)
    with pytest.raises(ConfigError, match="no intervention 'other'; there are halve"):
        RLHFTrainer.resume(path, interventions={"halve": halve, "other": halve})
    with pytest.warns(UserWarning, match="intervention halve has changed since the run started"):
        RLHFTrainer.resume(path, interventions={"halve": halve_in_place})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = RLHFTrainer.resume(path, interventions={"halve": halve})
    again.train()
    assert_same_run(path, whole.run.path)
    info = json.loads((path / "run.json").read_text())
    record = {"name": "halve", "site": "blocks.*.hook_mlp_out", "during": ["rollout", "learning"]}
    assert info["interventions"] == [record] and info["custom_components"] == ["interventions"]
    run = Run(path)
    with pytest.raises(ConfigError, match="trained with the intervention 'halve'"):
        run.policy()
    tokens = torch.arange(2, 8)[None]
    found = run.policy(interventions={"halve": halve})(tokens)[0]
    assert torch.equal(found, again.policy(tokens)[0])
    plain = run.policy(interventions={"halve": lambda activation, where: None})(tokens)[0]
    assert (found - plain).abs().max() > 1e-2


def test_second_trainer_on_a_policy_replaces_the_first(make_trainer):
    """Both would train the same weights, and the record of each would be false."""
    alone = make_trainer()
    alone.train()
    first = make_trainer()
    second = make_trainer({"policy": first.policy})
    second.train()
    trained = zip(second.policy.parameters(), alone.policy.parameters(), strict=True)
    assert all(map(torch.equal, *zip(*trained, strict=True)))
    with pytest.raises(ConfigError, match="Another trainer trains this policy"):
        first.train()
    assert first.run is None
    late = make_trainer({"policy": second.policy})
    second.rollout_phase()
    late.run_phase()
    with pytest.raises(ConfigError, match="Another trainer trains this policy"):
        second.run_phase()
    copies = [make_trainer({"policy": deepcopy(make_trainer().policy)}) for _ in range(2)]
    for _ in zip(*copies, strict=True):  # interleaved
        pass
    for weights in zip(*(x.policy.parameters() for x in (*copies, alone)), strict=True):
        assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[2])


def test_policy_with_interventions_of_another_trainer_raises(make_trainer):
    first = make_trainer()
    clean = deepcopy(first.policy)
    first.intervene(SITE, halve)
    for policy in (first.policy, deepcopy(first.policy)):
        with pytest.raises(ConfigError, match="policy has the intervention 'halve' of another"):
            make_trainer({"policy": policy})
    first.run_phase()
    make_trainer({"policy": clean}).run_phase()


def test_invalid_interventions_raise(make_trainer):
    trainer = make_trainer()
    for site, message in {"blocks.9.hook_mlp_out": "does not have", "logits": "output"}.items():
        with pytest.raises(ConfigError, match=message):
            trainer.intervene(site, halve)
    trainer.intervene(SITE, halve)
    with pytest.raises(ConfigError, match="name='halve' is taken by another"):
        trainer.intervene(SITE, halve)
    trainer.run_phase()
    with pytest.raises(ConfigError, match="The run has begun without the intervention"):
        trainer.intervene(SITE, halve, name="late")


def test_probes_expect_no_kl_of_zero_with_it(make_trainer):
    names = []
    for sites in ([], [SITE]):
        trainer = make_trainer()
        attach(trainer, TextHeatmap())
        for site in sites:
            trainer.intervene(site, halve)
        trainer.run_phase()
        checks = Run(trainer.run.path).checks()
        assert all(check.ok for check in checks)
        names.append({check.name for check in checks})
    assert names[0] - names[1] == {"KL is 0 before learning"}
