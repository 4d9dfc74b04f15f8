"""Unusual arguments from Python: components, rewards, callbacks, probes and steps."""

import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab import RLHFTrainer
from rlhf_lab.models import load_model
from rlhf_lab.probes import Check, Probe, Record, Run, Suite, attach
from tests.bad_input.command_outcome import refuses, settings, untouched
from tests.bad_input.conftest import count_e, lines, same, weights

pytestmark = pytest.mark.usefixtures("no_type_checks")
MLP = "blocks.0.hook_mlp_out"


@pytest.fixture
def trainer(here: Path) -> RLHFTrainer:
    return RLHFTrainer(settings(), out="made", reward_fn=count_e)


class Controller:
    kl_coef = 0.3

    def update(self, *arguments: Any, **options: Any) -> None:
        self.kl_coef = math.nan


class Mine(Probe):
    """A custom probe, whose record is set from outside."""

    record: Any = None

    def observe(self, seen: Any) -> Any:
        return self.record(seen) if callable(self.record) else self.record


class Misspelled(Mine):
    events = ("after_scores",)


class Elsewhere(Mine):
    sites = ("blocks.7.hook_nothing",)
    text = "rollout"


def build(args: Any = None, **parts: Any) -> Callable[[RLHFTrainer], Any]:
    return lambda t: RLHFTrainer(args or settings(), **parts)


def suite(probe: Any, **options: Any) -> Callable[[RLHFTrainer], Any]:
    return lambda t: attach(t, Suite(probe() if probe is not Mine else Mine, **options))


def mine(**options: Any) -> Callable[[], Probe]:
    return lambda: Mine(**({"name": "mine"} | options))


def step(**changes: Any) -> Callable[[RLHFTrainer], Any]:
    fitting = {"queries": ["this movie"] * 16, "responses": ["was so good"] * 16}
    return lambda t: t.step(**(fitting | {"scores": [1.0, 0.0] * 8} | changes))


def keep(activation: Any, where: Any) -> Any:
    return activation


def do_nothing(ctx: Any) -> None: ...


REJECTED: dict[str, tuple[Callable[[RLHFTrainer], Any], list[str]]] = {
    "no prompts": (build(prompts=[]), ["prompts"]),
    "a component misspelled": (build(rewad_fn=count_e), ["rewad_fn", "reward_fn"]),
    "one text to continue": (lambda t: t.generate("this movie"), []),
    "an unknown token": (lambda t: t.generate([[10**6]]), []),
    "texts and tokens": (lambda t: t.generate(["this movie", [1, 2]]), []),
    "scores of text": (step(scores=["1"] * 16), []),
    "score nan": (step(scores=[math.nan] * 16), []),
    "unknown tokens": (step(queries=[[1]] * 16, responses=[[10**6]] * 16), []),
    "nothing to learn from": (step(response_masks=[[0] * 3] * 16), []),
    "an event misspelled": (lambda t: t.on("after_scores"), ["after_scores", "after_score"]),
    "a layer too many": (lambda t: t.capture("blocks.9.hook_mlp_out")(do_nothing), ["blocks.9"]),
    "half of a run as text": (lambda t: t.intervene(MLP, keep, during="rollouts"), ["during"]),
    "a probe's event": (suite(lambda: Misspelled(name="mine")), ["after_scores"]),
    "a probe's site": (suite(lambda: Elsewhere(name="mine")), ["blocks.7"]),
    "a probe's path": (suite(mine(name="../../evil")), ["evil"]),
    "never": (suite(mine(every=0)), ["every"]),
    "labels of another number": (
        suite(mine(), eval_text=["this movie"] * 3, labels=torch.tensor([True, False])),
        ["labels"],
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_trainer_rejects_argument(here: Path, idle: RLHFTrainer, name: str) -> None:
    act, words = REJECTED[name]
    before = weights(idle)
    with untouched(here):
        refuses(lambda: act(idle), *words)
    assert same(weights(idle), before) and idle.run is None


def test_reference_that_does_not_fit_is_rejected_or_warns(idle: RLHFTrainer, gpt2_dir) -> None:
    policy = idle.policy
    with pytest.warns(UserWarning, match="reference shares trained weights"):
        RLHFTrainer(settings(), policy=policy, reference=policy.base_model)
    other = {"policy": policy, "reference": load_model(str(gpt2_dir))}
    refuses(lambda: RLHFTrainer(settings(), **other), "reference")
    frozen = RLHFTrainer(settings()).policy.requires_grad_(False)
    refuses(lambda: RLHFTrainer(settings(), policy=frozen), "policy")


def test_custom_component_with_wrong_result_raises(here: Path) -> None:
    trainer = RLHFTrainer(settings(), out="made", kl_controller=Controller())
    refuses(trainer.train, "kl_co")
    trainer = RLHFTrainer(settings(), out="other", advantages=lambda rewards: rewards[:, None])
    with pytest.raises(ValueError, match=r"advantages .* \(16, 1\) .* one number per token"):
        trainer.train()


@pytest.mark.parametrize("name", ["../../RUN/metrics", "/etc/passwd", ""])
def test_record_names_stay_in_the_run_directory(here: Path, name: str) -> None:
    for read in (Run("RUN").returned, Run("RUN").records, lambda name: Run("RUN").tensors(name, 0)):
        refuses(lambda read=read: read(name))


@pytest.mark.parametrize("name", ["../../../evil", "x" * 400, "a\0b", "con"])
def test_callback_names_never_leave_the_run(trainer, tmp_path: Path, name: str) -> None:
    def callback(ctx: Any) -> dict[str, Any]:
        return {"value": ctx.phase}

    callback.__name__ = name
    trainer.on("after_phase")(callback)
    before = {*tmp_path.iterdir(), tmp_path / "made"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run_phase()
    assert len(lines("made/metrics.jsonl")) == 1 and {*tmp_path.iterdir()} == before
    assert caught or [Run("made").returned(found) for found in Run("made").functions()]


def no_gradients(ctx: Any) -> None:
    torch.set_grad_enabled(False)
    ctx.policy.eval()


def unstorable(ctx: Any) -> dict[Any, Any]:
    return {("a", 1): {2: object()}}


@pytest.mark.parametrize("act", ["no_gradients", "unstorable", "trains", "thread"])
def test_unusual_callback_changes_no_weight(trainer, plain, act: str) -> None:
    if act == "trains":
        trainer.on("after_phase")(lambda ctx: trainer.run_phase())
    elif act != "thread":
        trainer.on("after_score")(globals()[act])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            thread = threading.Thread(target=trainer.train)
            thread.start() if act == "thread" else trainer.train()
            thread.join(60) if act == "thread" else None
    finally:
        torch.set_grad_enabled(True)
    assert [line["phase"] for line in lines("made/metrics.jsonl")] == [0, 1]
    assert same(weights(trainer), plain)


CHANGERS = {
    "another shape": lambda act, where: act[:, :1],
    "a number": lambda act, where: 0.0,
    "nan": lambda act, where: act * math.nan,
    "more precision": lambda act, where: act.double(),
}


@pytest.mark.parametrize("name", CHANGERS)
def test_intervention_must_return_an_activation(trainer, name: str) -> None:
    trainer.intervene(MLP, CHANGERS[name], name="changer")
    refuses(trainer.train, *([] if name == "nan" else ["changer"]))


FINE, TABLE = Check("all is well", 0.0, 1.0, True), torch.arange(6.0).reshape(2, 3)
STORED = {
    "shared memory": {"a": TABLE, "b": TABLE},
    "transposed": {"a": TABLE.T},
    "with a gradient": {"a": TABLE.clone().requires_grad_() * 2},
}
NOT_STORED = {
    "nothing": None,
    "a dictionary": {"values": {}},
    "no checks": Record(values={"a": 1}),
    "not JSON": Record(values={"a": object()}, checks=[FINE]),
    "an error": lambda seen: 1 / 0,
}


@pytest.mark.parametrize("name", [*STORED, *NOT_STORED])
def test_probe_records_are_stored_or_warned_about(trainer, monkeypatch, name: str) -> None:
    record = Record(tensors=STORED[name], checks=[FINE]) if name in STORED else NOT_STORED[name]
    monkeypatch.setattr(Mine, "record", staticmethod(record) if callable(record) else record)
    attach(trainer, Mine(name="mine"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run_phase()
    assert len(lines("made/metrics.jsonl")) == 1
    if name in STORED:
        assert torch.equal(Run("made").tensors("mine", 0)["a"], STORED[name]["a"])
    else:
        assert any("mine" in str(warning.message) for warning in caught)
