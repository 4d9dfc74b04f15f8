"""Dicts that callbacks return: stored, read back, rejected, and rewound when a run resumes."""

import functools

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.probes import Run
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.callbacks import MOST_NUMBERS, function_name, to_json

pytestmark = pytest.mark.usefixtures("no_type_checks")


def reward_and_kl(ctx):
    return {"reward": ctx.rollout.raw_rewards.mean(), "kl": ctx.rollout.kl[0, :2]}


@pytest.mark.slow
def test_returned_dicts_are_stored_and_read_back(make_trainer):
    trainer, seen = make_trainer(total_phases=3), []
    trainer.on("after_score", every=2)(reward_and_kl)
    trainer.on("after_score", every=2)(lambda ctx: seen.append(ctx.rollout))
    for number in (1, 2):
        trainer.on("run_start")(lambda ctx, number=number: {"number": number})
    for value in (None, 3, [1], "words"):
        trainer.on("after_phase")(lambda ctx, value=value: value)

    @trainer.capture("blocks.1.hook_resid_post", pos=-1, tokens=torch.tensor([[1, 2, 3]]))
    def norm(ctx, acts):
        return {"norm": acts[0].norm()}

    trainer.rollout_phase()  # without a run, nothing is stored
    seen.clear()
    trainer.train()
    run = Run(trainer.run.path)
    assert sorted(run.functions()) == ["lambda_2", "lambda_3", "norm", "reward_and_kl"]
    assert [run.returned(f"lambda_{n}")[0]["number"] for n in (2, 3)] == [1, 2]
    assert run.returned("reward_and_kl") == [
        {"phase": phase, "event": "after_score"}
        | {"reward": rollout.raw_rewards.mean().item(), "kl": rollout.kl[0, :2].tolist()}
        for phase, rollout in zip((0, 2), seen, strict=True)
    ]
    _, cache = trainer.policy.base_model.run_with_cache(torch.tensor([[1, 2, 3]]))
    expected = cache["resid_post", 1][0, -1].norm().item()
    assert run.returned("norm")[-1]["norm"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RunError, match="no dicts of a function 'kl'; there are .*reward_and_kl"):
        run.returned("kl")


def test_name_is_that_of_the_function_or_class():
    for function, name in (
        (functools.partial(reward_and_kl), "reward_and_kl"),
        (RLHFTrainer.train, "train"),
        (torch.nn.ReLU(), "ReLU"),
        (lambda ctx: None, "lambda"),
    ):
        assert function_name(function) == name


def test_to_json_returns_plain_values():
    """0.5, 1 and 2 are exact in every format; numbers that are not finite become None."""
    for value, expected in (
        (torch.tensor([[0.5, 1.0]], dtype=torch.bfloat16), [[0.5, 1.0]]),
        (torch.tensor(2.0, requires_grad=True), 2.0),
        (np.array([1, 2]), [1, 2]),
        (np.float32(0.5), 0.5),
        (torch.tensor([True]), [True]),
        ([float("nan"), torch.tensor(float("inf")), None], [None, None, None]),
        ({"a": (1, "b")}, {"a": [1, "b"]}),
    ):
        assert to_json({"x": value}, "the dict") == {"x": expected}
    assert len(to_json(torch.zeros(MOST_NUMBERS), "x")) == MOST_NUMBERS


def test_to_json_rejects_what_json_lacks():
    for value, words in (
        ({1}, r"the dict\['x'\] is a set, which cannot be stored. Return numbers"),
        ([{"y": object()}], r"the dict\['x'\]\[0\]\['y'\] is a object"),
        (torch.tensor([1j]), r"the dict\['x'\]\[0\] is a complex"),
        ({3: 1}, r"the dict\['x'\] has the key 3. Use keys of type str"),
        (np.zeros((MOST_NUMBERS, 2)), "has 200,000 numbers, more than 100,000"),
    ):
        with pytest.raises(ConfigError, match=words):
            to_json({"x": value}, "the dict")


def register(trainer):
    """Register a function at every event that a resumed run repeats exactly."""

    @trainer.on("after_rollout")
    @trainer.on("after_step")
    @trainer.on("after_phase")
    @trainer.on("checkpoint")
    @trainer.on("run_end")
    def watched(ctx):
        weights = sum(p.double().sum().item() for p in ctx.policy.parameters())
        return {"weights": weights, "coef": ctx.kl_coef}


@pytest.mark.slow
@pytest.mark.parametrize(("save_every", "first_phase"), [(1, 3), (2, 2)])
def test_resumed_run_stores_each_record_once(make_trainer, save_every, first_phase):
    """Interrupted in phase 3; its records, with save_every=2 also those of phase 2, come twice."""
    whole, broken = (make_trainer(total_phases=5, save_every=save_every) for _ in range(2))
    register(whole)
    whole.train()
    register(broken)
    for _ in range(3):
        broken.run_phase()
    broken.learning_phase(broken.rollout_phase())
    again = RLHFTrainer.resume(broken.run.path)
    assert again.phase == first_phase
    register(again)
    again.train()
    expected, found = (Run(t.run.path).returned("watched") for t in (whole, again))
    assert found == expected
    where = [(r["event"], r["phase"], r.get("step"), r.get("checkpoint")) for r in expected]
    saves = [0, *range(save_every, 6, save_every)] + [5] * (5 % save_every)
    assert [x[1] for x in where if x[3] == "last"] == saves
    assert [x for x in where if x[0] == "after_step"] == [
        ("after_step", phase, step, None) for phase in range(5) for step in range(4)
    ]
    events = ("after_rollout", "after_phase", "run_end")
    assert [x[0] for x in where if x[0] in events] == [*events[:2] * 5, events[2]]
