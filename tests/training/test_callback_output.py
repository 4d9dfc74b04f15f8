"""Dicts that functions on events return: stored, read back, refused, rewound."""

import functools
import json

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
def test_a_returned_dict_is_stored_and_read_back(make_trainer):
    trainer = make_trainer(total_phases=3)
    seen = []
    trainer.on("after_score", every=2)(reward_and_kl)
    trainer.on("after_score", every=2)(lambda ctx: seen.append(ctx.rollout))
    trainer.train()
    run = Run(trainer.run.path)
    assert run.functions() == ["reward_and_kl"]
    expected = [
        {
            "phase": phase,
            "event": "after_score",
            "reward": rollout.raw_rewards.mean().item(),
            "kl": rollout.kl[0, :2].tolist(),
        }
        for phase, rollout in zip((0, 2), seen, strict=True)
    ]
    assert run.returned("reward_and_kl") == expected
    lines = (trainer.run.path / "returned" / "reward_and_kl.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected


@pytest.mark.slow
def test_what_is_no_dict_and_a_phase_without_a_run_store_nothing(make_trainer):
    trainer = make_trainer()
    trainer.on("after_rollout")(lambda ctx: {"x": 1})
    trainer.rollout_phase()
    trainer = make_trainer()
    for answer in (None, 3, [1], "words"):
        trainer.on("after_step")(lambda ctx, answer=answer: answer)
    trainer.train()
    assert Run(trainer.run.path).functions() == []
    assert not (trainer.run.path / "returned").exists()


@pytest.mark.slow
def test_what_a_capture_returns_is_stored_under_its_function_s_name(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)

    @trainer.capture("blocks.1.hook_resid_post", pos=-1, tokens=torch.tensor([[1, 2, 3]]))
    def verdict(ctx, acts):
        return {"norm": acts[0].norm()}

    trainer.train()
    (record,) = Run(trainer.run.path).returned("verdict")
    _, cache = trainer.policy.base_model.run_with_cache(torch.tensor([[1, 2, 3]]))
    assert record["norm"] == pytest.approx(cache["resid_post", 1][0, -1].norm().item(), rel=1e-5)


@pytest.mark.slow
def test_each_step_and_each_event_of_a_function_has_its_line(make_trainer):
    """Two minibatches, two passes: four steps; at checkpoints the line says which."""
    trainer = make_trainer(total_phases=1, warmup_steps=0)

    def told(ctx):
        return {"n": 1}

    for event in ("run_start", "after_step", "checkpoint", "run_end"):
        trainer.on(event)(told)
    trainer.train()
    records = Run(trainer.run.path).returned("told")
    events = [(r["event"], r["phase"], r.get("checkpoint")) for r in records]
    assert [r["step"] for r in records if r["event"] == "after_step"] == [0, 1, 2, 3]
    assert events == [
        ("run_start", 0, None),
        ("checkpoint", 0, "phase_000000"),
        ("checkpoint", 0, "last"),
        ("checkpoint", 0, "best"),
        *[("after_step", 0, None)] * 4,
        ("checkpoint", 1, "phase_000001"),
        ("checkpoint", 1, "last"),
        ("run_end", 1, None),
    ]


@pytest.mark.slow
def test_functions_of_one_name_have_a_file_each(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    for number in (1, 2):
        trainer.on("after_phase")(lambda ctx, number=number: {"number": number})
    trainer.train()
    run = Run(trainer.run.path)
    assert run.functions() == ["lambda", "lambda_2"]
    assert [run.returned(name)[0]["number"] for name in run.functions()] == [1, 2]


class Norms:
    def __call__(self, ctx):
        return {}

    def of_weights(self, ctx):
        return {}


def test_a_name_is_that_of_the_function_or_of_the_class():
    norms = Norms()
    found = [
        function_name(f) for f in (Norms(), norms.of_weights, functools.partial(reward_and_kl))
    ]
    assert found == ["Norms", "of_weights", "reward_and_kl"]


def test_plain_values_are_those_of_json():
    """0.5, 1 and 2 are exact in every format; what is not finite becomes None."""
    given = {
        "tensor": torch.tensor([[0.5, 1.0]], dtype=torch.bfloat16),
        "parameter": torch.tensor(2.0, requires_grad=True),
        "array": np.array([1, 2]),
        "scalar": np.float32(0.5),
        "flag": torch.tensor([True]),
        "odd": [float("nan"), torch.tensor(float("inf")), None],
        "nested": {"a": (1, "b")},
    }
    assert to_json(given, "the dict") == {
        "tensor": [[0.5, 1.0]],
        "parameter": 2.0,
        "array": [1, 2],
        "scalar": 0.5,
        "flag": [True],
        "odd": [None, None, None],
        "nested": {"a": [1, "b"]},
    }


UNSTORABLE = {
    "a_set": ({"x": {1}}, r"the dict\['x'\] is a set, which cannot be stored. Return numbers"),
    "deep": ({"x": [{"y": object()}]}, r"the dict\['x'\]\[0\]\['y'\] is a object"),
    "complex": ({"x": torch.tensor([1j])}, r"the dict\['x'\]\[0\] is a complex"),
    "a_key": ({"x": {3: 1}}, r"the dict\['x'\] has the key 3. Use keys of type str"),
    "too_long": ({"x": torch.zeros(MOST_NUMBERS + 1)}, "has 100,001 numbers, more than 100,000"),
    "a_taken_key": ({"phase": 3}, "has a key 'phase', which each record has. Rename it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNSTORABLE)
def test_what_cannot_be_stored_is_said_once_and_the_run_goes_on(make_trainer, case):
    returned, words = UNSTORABLE[case]
    trainer = make_trainer()
    calls = []

    @trainer.on("after_phase")
    def odd(ctx):
        calls.append(ctx.phase)
        return returned

    with pytest.warns(UserWarning, match=f"odd raised ConfigError at after_phase.*{words}") as told:
        assert len(trainer.train()) == 2
    assert calls == [0] and sum("odd" in str(w.message) for w in told) == 1
    assert "\n" not in str(told[0].message)
    assert Run(trainer.run.path).functions() == []


@pytest.mark.slow
def test_a_tensor_of_the_most_numbers_is_still_stored():
    assert len(to_json(torch.zeros(MOST_NUMBERS), "x")) == MOST_NUMBERS
    with pytest.raises(ConfigError):
        to_json(np.zeros((MOST_NUMBERS, 2)), "x")


@pytest.mark.slow
def test_a_function_that_returned_nothing_is_refused_with_those_that_did(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    trainer.on("after_score")(reward_and_kl)
    trainer.train()
    with pytest.raises(RunError, match="no dicts of a function 'kl'; there are reward_and_kl"):
        Run(trainer.run.path).returned("kl")


def register(trainer):
    """A function of one name at every event that a resumed run repeats exactly."""

    @trainer.on("after_rollout")
    @trainer.on("after_step")
    @trainer.on("after_phase")
    @trainer.on("checkpoint")
    @trainer.on("run_end")
    def watched(ctx):
        weights = sum(p.double().sum().item() for p in ctx.policy.parameters())
        return {"weights": weights, "coef": ctx.kl_coef}


@pytest.mark.slow
@pytest.mark.parametrize("save_every, goes_on_at", [(1, 3), (2, 2)])
def test_a_resumed_run_stores_what_an_uninterrupted_one_does(make_trainer, save_every, goes_on_at):
    """Broken off within phase 3, so that records of it, and with rare saves of 2, come twice."""
    whole, broken = (make_trainer(total_phases=5, save_every=save_every) for _ in range(2))
    register(whole)
    whole.train()
    register(broken)
    for _ in range(3):
        broken.run_phase()
    broken.learning_phase(broken.rollout_phase())
    again = RLHFTrainer.resume(broken.run.path)
    assert again.phase == goes_on_at
    register(again)
    again.train()
    expected, found = (Run(t.run.path).returned("watched") for t in (whole, again))
    assert {r["event"] for r in expected} == {
        "after_rollout",
        "after_step",
        "after_phase",
        "checkpoint",
        "run_end",
    }
    assert found == expected


@pytest.mark.slow
def test_storing_leaves_the_weights_bit_for_bit(make_trainer, parameters_of):
    plain_run, watched = make_trainer(), make_trainer()
    watched.on("after_backward")(
        lambda ctx: {n: p.grad.norm() for n, p in ctx.policy.named_parameters()}
    )
    plain_run.train(), watched.train()
    assert len(Run(watched.run.path).returned("lambda")) == 8
    found, expected = parameters_of(watched.policy), parameters_of(plain_run.policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
