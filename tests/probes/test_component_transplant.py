"""ComponentTransplant: effects by coalitions, unchanged weights, and errors."""

import itertools
import math
import warnings

import pytest

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import ComponentTransplant, attach
from tests.probes.looking import same_weights, train_soundly

pytestmark = pytest.mark.slow
CLAUSE = "the plot was pretty good"
SO_FAR = f"this movie honestly , {CLAUSE} and {CLAUSE} but the script was rather dull . i"
"""A review up to its verdict: few tokens remain, and the true reward depends on them."""
FAST = {"total_phases": 2, "base_lr": 0.02, "prefix": SO_FAR, "gen_len": 5}


def test_effects_match_coalitions_and_weights_are_unchanged(make_trainer, no_type_checks):
    plain, trainer = make_trainer(**FAST), make_trainer(**FAST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(trainer, ComponentTransplant(n=6))
        plain.train()
        run = train_soundly(trainer)
    assert same_weights(trainer, plain)
    record = run.records("component_transplant")[-1]
    tensors = run.tensors("component_transplant", record["phase"])
    assert len(record["groups"]) == 7 and tensors["rewards"].shape == (128, 6)
    assert record["gain"] != 0
    reward = {
        frozenset(members.nonzero()[:, 0].tolist()): rewards.double().mean().item()
        for members, rewards in zip(tensors["members"], tensors["rewards"], strict=True)
    }
    none, every = frozenset(), frozenset(range(7))
    assert record["gain"] == pytest.approx(reward[every] - reward[none], abs=1e-6)
    shapley = [0.0] * 7
    for order in itertools.permutations(range(7)):
        for i, group in enumerate(order):
            gained = reward[frozenset(order[: i + 1])] - reward[frozenset(order[:i])]
            shapley[group] += gained / math.factorial(7)
    put_in = [reward[frozenset([g])] - reward[none] for g in range(7)]
    taken_out = [reward[every] - reward[every - {g}] for g in range(7)]
    for name, expected in {"shapley": shapley, "put_in": put_in, "taken_out": taken_out}.items():
        assert record[name] == pytest.approx(expected, abs=1e-5), name


def test_invalid_runs_raise(make_trainer):
    with pytest.raises(ConfigError, match="n=1"):
        ComponentTransplant(n=1)
    trainer = make_trainer({"prompts": ["this movie", "this film"]})
    with pytest.raises(ConfigError, match="custom prompts"):
        attach(trainer, ComponentTransplant(n=2))
