"""Custom functions of the trainer, and interventions for a whole run: they act or raise."""

import dataclasses
import functools
import inspect
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import TransformerWithValueHead, has_hooks, load_model, value_head
from rlhf_lab.probes import Run
from rlhf_lab.training import Overrides, RLHFTrainer, ppo
from rlhf_lab.training.overrides import validate_order
from tests.small_runs import DEVICE
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


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("advantages", DEFAULTS["advantages"]),
        ("advantages", lambda token_rewards: token_rewards.clone()),
        ("normalize_reward", DEFAULTS["normalize_reward"]),
    ],
)
def test_function_may_change_its_argument(make_trainer, name, function):
    @functools.wraps(function)
    def changing(*inputs, **named):
        result = function(*inputs, **named)
        [*inputs, *named.values()][0].zero_()
        return result

    plain, found = (make_trainer({name: f}).rollout_phase() for f in (function, changing))
    assert torch.equal(found.raw_rewards, plain.raw_rewards) and plain.raw_rewards.any()
    assert torch.equal(found.returns, plain.returns)


@pytest.mark.usefixtures("no_type_checks")  # of the tests; those of users accept the class
def test_policy_of_a_learners_class_trains_equally(make_trainer):
    """A notebook defines the whole class again, so its policy is not of the package's class."""
    namespace = dict(vars(value_head))
    exec(inspect.getsource(TransformerWithValueHead), namespace)
    reports, policies = [], []
    for kind in (TransformerWithValueHead, namespace["TransformerWithValueHead"]):
        policies.append(kind(load_model("reel-nano"), seed=1))
        report = make_trainer({"policy": policies[-1]}, ent_coef=0.01).run_phase()
        reports.append(dataclasses.asdict(report.learning))
    packaged, learners = policies
    assert not isinstance(learners, TransformerWithValueHead)
    assert learners.value_head[0].weight.grad.any()
    torch.testing.assert_close(copy_weights(learners), copy_weights(packaged), atol=1e-6, rtol=0)
    assert reports[1] == pytest.approx(reports[0], rel=1e-4, abs=1e-5)


def test_result_that_cannot_be_learned_from_raises(make_trainer):
    detached = lambda kl, kl_coef, mask: (kl_coef * F.masked_mean(kl, mask)).detach()
    for name, function, words in (
        ("value_loss", lambda x, *_: x.flatten(1), r"shape \(.*Return one number"),
        ("kl_penalty", detached, "a number without gradient"),
    ):
        with pytest.raises((ConfigError, ValueError), match=f"^{name} returned {words}"):
            make_trainer({name: function}, batches_per_learning_phase=2).run_phase()
    with pytest.raises(ConfigError, match=r"^kl_penalty is called with .*kl_per_token\("):
        make_trainer({"kl_penalty": F.kl_per_token})
    trainer = make_trainer({"advantages": lambda values, mask: values * float("nan")})
    with pytest.raises(RunError, match="became nan in phase 0. Check the custom advantages"):
        trainer.train()


def test_validate_order_accepts_functions_of_the_same_order_only():
    message = r"advantages is called with \(values, rewards, mask\)"
    names = ("values", "rewards", "mask")
    for function in (
        lambda values, rewards, mask: values,
        lambda v, r, mask=None: v,
        lambda *all: all,
        torch.where,
    ):
        validate_order(function, names, "advantages")
    for function in (
        lambda rewards, values, mask: values,
        lambda values, rewards: values,
        lambda values, rewards, mask, gamma: values,
    ):
        with pytest.raises(ConfigError, match=message):
            validate_order(function, names, "advantages")


SITE = "blocks.0.hook_attn_out"


def halve(activation: Tensor, where: Any) -> Tensor:
    return activation / 2


def test_intervention_acts_on_the_policy_in_each_phase(make_trainer):
    """Also after a callback has called reset_hooks; the reference has none."""
    trainer, seen = make_trainer(), set()
    trainer.intervene(SITE, halve)
    watch = lambda activation, where: seen.add(where)
    trainer.intervene("blocks.*.attn.hook_pattern", watch, name="watch")
    in_place = lambda value, where: (value.add_(1), None)[1]
    trainer.intervene("value_head.hook_value", in_place, name="shift")
    means = []
    trainer.on("after_score")(lambda ctx: means.append(ctx.rollout.samples.values.mean().item()))
    trainer.on("after_rollout")(lambda ctx: ctx.policy.base_model.reset_hooks())
    trainer.learning_phase = lambda rollout: ppo.learning_phase(trainer, rollout)  # a custom one
    with pytest.warns(UserWarning, match="'watch' returned None and changed nothing") as caught:
        reports = trainer.train()
    assert not [x for x in caught if "'shift'" in str(x.message)]
    for report in reports:
        assert abs(report.ratio_first_minibatch - 1) < 1e-5 and report.kl_per_token > 1e-6
    assert not has_hooks(trainer.reference) and means == pytest.approx([1, 1], abs=0.5)
    stages = [(phase, stage) for phase in (0, 1) for stage in ("rollout", "learning")]
    watched = [f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)]
    stages += [(2, "rollout")]
    assert set(map(tuple, seen)) == {(*stage, site) for stage in stages for site in watched}


def test_resumed_run_requires_it_and_continues_bitwise(make_trainer):
    whole, broken_off = make_trainer(), make_trainer()
    for trainer in (whole, broken_off):
        trainer.intervene("blocks.*.hook_mlp_out", halve, during="rollout")
    with pytest.warns(UserWarning, match="not the policy that sampled.*intervention 'halve'"):
        whole.train()
    broken_off.run_phase()
    path = broken_off.run.path
    with pytest.raises(ConfigError, match=r"intervention 'halve'.*interventions=\{'halve': fn\}"):
        RLHFTrainer.resume(path)
    with pytest.warns(UserWarning, match="intervention halve has changed since the run started"):
        RLHFTrainer.resume(path, interventions={"halve": lambda activation, where: None})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = RLHFTrainer.resume(path, interventions={"halve": halve})
    again.train()
    assert_same_run(path, whole.run.path)
    record = {"name": "halve", "site": "blocks.*.hook_mlp_out", "during": ["rollout"]}
    assert json.loads((path / "run.json").read_text())["interventions"] == [record]
    run = Run(path)
    with pytest.raises(ConfigError, match="trained with the intervention 'halve'"):
        run.policy()
    tokens = torch.arange(2, 8)[None]
    found = run.policy(interventions={"halve": halve}).to(DEVICE)(tokens)[0]
    assert torch.equal(found, again.policy(tokens)[0])
    seen = []
    plain = run.policy(interventions={"halve": lambda act, where: seen.append(where)})(tokens)[0]
    assert (found.cpu() - plain).abs().max() > 1e-2 and {where.phase for where in seen} == {2}


def test_second_trainer_on_a_policy_replaces_the_first(make_trainer):
    """Both would train the same weights, and the record of each would be false."""
    first = make_trainer()
    second = make_trainer({"policy": first.policy})
    second.run_phase()
    with pytest.raises(ConfigError, match="Another trainer trains this policy"):
        first.train()
    assert first.run is None


def test_invalid_interventions_raise(make_trainer):
    trainer = make_trainer()
    with pytest.raises(ConfigError, match="does not have"):
        trainer.intervene("blocks.9.hook_mlp_out", halve)
    trainer.intervene(SITE, halve)
    with pytest.raises(ConfigError, match="name='halve' is taken by another"):
        trainer.intervene(SITE, halve)
    with pytest.raises(ConfigError, match="policy has the intervention 'halve' of another"):
        make_trainer({"policy": trainer.policy})
    trainer.run_phase()
    with pytest.raises(ConfigError, match="The run has begun. Call intervene"):
        trainer.intervene(SITE, halve, name="late")
