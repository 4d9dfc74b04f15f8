"""Unusual arguments from Python: components, rewards, callbacks, probes and steps."""

import json
import math
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_lab import RLHFTrainer
from rlhf_lab.errors import LabError
from rlhf_lab.models import load_model
from rlhf_lab.probes import Check, Probe, Record, Run, Suite, attach
from tests.bad_input.command_outcome import TRAIN, accepted, refuses, settings, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")
MLP = "blocks.0.hook_mlp_out"


def weights(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def count_e(texts: list[str]) -> torch.Tensor:
    """A reward that differs between texts: a tenth of the number of e's."""
    return torch.tensor([text.count("e") / 10 for text in texts])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after two phases with the reward `count_e` and nothing else."""
    out = tmp_path_factory.mktemp("plain") / "run"
    trainer = RLHFTrainer(settings(), out=out, reward_fn=count_e)
    trainer.train()
    return weights(trainer)


@pytest.fixture(scope="module")
def idle() -> RLHFTrainer:
    """A trainer that never starts."""
    return RLHFTrainer(settings())


@pytest.fixture
def trainer(here: Path) -> RLHFTrainer:
    return RLHFTrainer(settings(), out="made", reward_fn=count_e)


async def later(texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


GOOD_REWARDS = {
    "integers and flags": lambda texts: [True, 0] * (len(texts) // 2),
    "NumPy numbers": lambda texts: tuple(np.float32(0.5) for _ in texts),
    "an array of float64": lambda texts: np.full(len(texts), 0.5),
    "half precision": lambda texts: torch.full((len(texts),), 0.5, dtype=torch.float16),
    "with a gradient": lambda texts: torch.full((len(texts),), 0.5, requires_grad=True) * 1,
}
BAD_REWARDS = {
    "a column": lambda texts: torch.zeros(len(texts), 1),
    "one number": lambda texts: 0.5,
    "one too few": lambda texts: [0.0] * (len(texts) - 1),
    "numbers as text": lambda texts: ["0.5"] * len(texts),
    "None for one text": lambda texts: [0.5] * (len(texts) - 1) + [None],
    "a dictionary": lambda texts: dict.fromkeys(texts, 0.5),
    "nothing": lambda texts: None,
    "complex numbers": lambda texts: torch.zeros(len(texts), dtype=torch.complex64),
    "beyond float32": lambda texts: np.full(len(texts), 1e300),
    "a coroutine": later,
}


@pytest.mark.parametrize("name", GOOD_REWARDS)
def test_reward_accepts_one_number_per_text(idle: RLHFTrainer, name: str) -> None:
    trainer = RLHFTrainer(settings(), policy=idle.policy, reward_fn=GOOD_REWARDS[name])
    rewards = trainer.rollout_phase().raw_rewards
    assert rewards.mean() == 0.5 and rewards.dtype == torch.float32 and not rewards.requires_grad


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("name", BAD_REWARDS)
def test_reward_of_another_shape_or_kind_is_rejected(here, idle, name: str) -> None:
    parts = {"out": "made", "policy": idle.policy, "reward_fn": BAD_REWARDS[name]}
    refuses(lambda: RLHFTrainer(settings(total_phases=1), **parts), "reward_fn")
    assert not Path("made").exists()


def test_run_resumes_after_the_reward_raised(here, plain) -> None:
    calls = []

    def fails_once(texts: list[str]) -> torch.Tensor:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyError("the server is down")
        return count_e(texts)

    with pytest.raises((KeyError, LabError)):
        RLHFTrainer(settings(), out="made", reward_fn=fails_once).train()
    resumed = RLHFTrainer.resume("made", reward_fn=count_e)
    resumed.train()
    assert same(weights(resumed), plain)


def clear_texts(texts: list[str]) -> torch.Tensor:
    rewards = count_e(texts)
    texts.clear()
    return rewards


def change_modes(texts: list[str]) -> torch.Tensor:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    np.random.seed(0)
    return count_e(texts).float()


@pytest.mark.parametrize("reward_fn", [clear_texts, change_modes])
def test_side_effects_of_a_reward_change_no_weight(here, plain, reward_fn) -> None:
    trainer = RLHFTrainer(settings(), out="made", reward_fn=reward_fn)
    try:
        trainer.train()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert same(weights(trainer), plain)
    assert all(line["text"] for line in lines("made/samples.jsonl"))


def test_reward_may_reuse_its_buffer(here) -> None:
    buffer = torch.zeros(16)

    def reusing(texts: list[str]) -> torch.Tensor:
        buffer[: len(texts)] = count_e(texts)
        return buffer[: len(texts)]

    results = []
    for reward_fn in (count_e, reusing):
        args = settings(advantages="remax", vf_coef=0.0, normalize_reward=False)
        trainer = RLHFTrainer(args, out=reward_fn.__name__, reward_fn=reward_fn)
        trainer.train()
        results.append(weights(trainer))
    assert same(*results)


DEAD = ["--penalize-no-eos", "--base-lr 0 --head-lr 0", "--reward-fn count:zebra"]


@pytest.mark.parametrize("options", DEAD)
def test_dead_learning_is_reported(here, options: str) -> None:
    outcome = accepted([*TRAIN, "--total-phases", 3, "--out", "made", *options.split()])
    (finding,) = json.loads(Path("made/run.json").read_text())["diagnostics"].values()
    assert re.search("nothing (tells|learns)", finding["text"]) and finding["text"] in outcome.out


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
    "a name as reward": (build(reward_fn="sentiment"), ["reward_fn"]),
    "a number as true reward": (build(true_reward_fn=3), ["true_reward_fn"]),
    "a name as policy": (build(policy="reel-nano"), ["policy"]),
    "a name as reference": (build(reference="reel-nano"), ["reference"]),
    "no prompts": (build(prompts=[]), ["prompts"]),
    "a prompt that is a number": (build(prompts=["this movie", 3]), ["prompts"]),
    "a number as controller": (build(kl_controller=0.3), ["kl_controller"]),
    "a component misspelled": (build(rewad_fn=count_e), ["rewad_fn", "reward_fn"]),
    "an optimizer class": (build(optimizer=torch.optim.SGD), ["optimizer"]),
    "a dictionary as settings": (build({"preset": "reel"}), ["RLHFArgs"]),
    "one text to continue": (lambda t: t.generate("this movie"), []),
    "no tokens": (lambda t: t.generate([[]]), []),
    "an unknown token": (lambda t: t.generate([[10**6]]), []),
    "texts and tokens": (lambda t: t.generate(["this movie", [1, 2]]), []),
    "scores of text": (step(scores=["1"] * 16), []),
    "score nan": (step(scores=[math.nan] * 16), []),
    "scores in rows of two": (step(scores=torch.zeros(16, 2)), []),
    "a score too few": (step(scores=[0.0] * 15), []),
    "unknown tokens": (step(queries=[[1]] * 16, responses=[[10**6]] * 16), []),
    "a mask of another length": (step(response_masks=[[1] * 7] * 16), []),
    "nothing to learn from": (step(response_masks=[[0] * 3] * 16), []),
    "a decorator without event": (lambda t: t.on(do_nothing), []),
    "an event misspelled": (lambda t: t.on("after_scores"), ["after_scores", "after_score"]),
    "half a phase": (lambda t: t.on("after_score", every=1.5), ["every"]),
    "no function": (lambda t: t.on("after_score")(3), []),
    "a layer too many": (lambda t: t.capture("blocks.9.hook_mlp_out")(do_nothing), ["blocks.9"]),
    "no sites": (lambda t: t.capture([])(do_nothing), ["hook_names"]),
    "no function at a site": (lambda t: t.intervene(MLP, 3), []),
    "half of a run as text": (lambda t: t.intervene(MLP, keep, during="rollouts"), ["during"]),
    "no name": (lambda t: t.intervene(MLP, keep, name=""), ["name"]),
    "a probe's event": (suite(lambda: Misspelled(name="mine")), ["after_scores"]),
    "a probe's site": (suite(lambda: Elsewhere(name="mine")), ["blocks.7"]),
    "a probe class": (suite(Mine), ["Mine"]),
    "a probe's path": (suite(mine(name="../../evil")), ["evil"]),
    "never": (suite(mine(every=0)), ["every"]),
    "labels of another number": (
        suite(mine(), eval_text=["this movie"] * 3, labels=torch.tensor([True, False])),
        ["labels"],
    ),
    "no text": (suite(mine(), eval_text=[]), ["eval_text"]),
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
