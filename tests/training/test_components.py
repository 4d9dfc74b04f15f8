"""Custom functions of the trainer: they are called and change a run, or are rejected."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model, value_head
from rlhf_lab.training import Overrides, RLHFTrainer
from tests.training.recorded_runs import copy_weights, is_equal

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_custom_functions_equal_to_the_defaults_change_nothing(make_trainer, default_weights):
    """A custom `logprobs` runs the hooked modules, which differ by rounding."""
    elsewhere = ("logprobs", "policy_loss", "kl_estimator")
    copies = {
        name: lambda *inputs, default=default: default(*inputs)
        for name, default in DEFAULTS.items()
        if name not in elsewhere
    }
    assert is_equal(run_halves(make_trainer(copies, **FIELDS)), default_weights)


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


# public functions with the name of a component, or like it, and other parameters
UNFIT = {
    "clipped_surrogate": F.ppo_surrogate,
    "kl_penalty": F.kl_per_token,
    "entropy_bonus": F.entropy_per_token,
    "value_loss": F.explained_variance,
    "logprobs": F.get_max_logprobs,
    "normalize_reward": F.scale_rewards,
}


def test_functions_with_other_parameters_raise():
    for name, function in UNFIT.items():
        with pytest.raises(ConfigError, match=rf"^{name} is called with .*{function.__name__}\("):
            Overrides.choose({name: function})
    fit = {name: default for name, default in DEFAULTS.items() if name in UNFIT}
    assert Overrides.choose(fit) == Overrides()
    # parameters may have other names, and torch's functions have no signature
    custom = lambda new, old, a, eps, mask, normalize=True: (new - old).sum()
    for name, function in {"clipped_surrogate": custom, "kl_penalty": torch.add}.items():
        assert getattr(Overrides.choose({name: function}), name) is function


UNUSED: dict[str, list[dict[str, Any]]] = {
    "kl_penalty": [{"kl_in": "reward"}, {"kl_estimator": "k1"}],
    "clipped_surrogate": [{"policy_loss": "gspo"}, {"dual_clip": 3.0}, {"clip_coef_high": 0.3}],
}


def test_custom_function_that_is_not_called_raises(reel_args):
    for name, fields in [(name, fields) for name, rows in UNUSED.items() for fields in rows]:
        with pytest.raises(ConfigError, match=f"^{name} is called for"):
            RLHFTrainer(reel_args(**fields), **{name: lambda *args: args[0].sum()})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty"])
def test_term_that_is_not_one_number_raises(make_trainer, name):
    results = {r"a tensor of shape \(": lambda x, *_: x.flatten(1), "0.5": lambda *_: 0.5}
    for result, function in results.items():
        with pytest.raises(ConfigError, match=f"^{name} returned {result}.*Return one number"):
            make_trainer({name: function}).run_phase()
