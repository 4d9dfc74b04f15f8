"""Unusual arguments from Python: components, rewards, callbacks, probes and steps."""

import json
import math
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_lab import RLHFTrainer
from rlhf_lab.errors import ConfigError, LabError
from rlhf_lab.models import load_model
from rlhf_lab.probes import Check, Probe, Record, Run, Suite, attach
from tests.doors.door import TRAIN, accepted, refuses, settings, untouched

pytestmark = pytest.mark.usefixtures("no_type_checks")


def weights(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def long_texts(texts: list[str]) -> torch.Tensor:
    """A reward that differs between texts: a tenth of the number of e's."""
    return torch.tensor([text.count("e") / 10 for text in texts])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after two phases with the reward `long_texts` and nothing else."""
    out = tmp_path_factory.mktemp("plain") / "run"
    trainer = RLHFTrainer(settings(), out=out, reward_fn=long_texts)
    trainer.train()
    return weights(trainer)


@pytest.fixture(scope="module")
def idle() -> RLHFTrainer:
    """A trainer that never starts."""
    return RLHFTrainer(settings())


# Rewards, and learning that is dead or explodes


GOOD_REWARDS = {
    "a list": lambda texts: [0.5] * len(texts),
    "a list of integers and flags": lambda texts: [True, 0] * (len(texts) // 2),
    "a tuple of NumPy numbers": lambda texts: tuple(np.float32(0.5) for _ in texts),
    "an array of float64": lambda texts: np.full(len(texts), 0.5),
    "integers": lambda texts: torch.tensor([1, 0] * (len(texts) // 2)),
    "half precision": lambda texts: torch.full((len(texts),), 0.5, dtype=torch.float16),
    "with a gradient": lambda texts: torch.full((len(texts),), 0.5, requires_grad=True) * 1,
}


@pytest.mark.parametrize("name", GOOD_REWARDS)
def test_reward_accepts_any_numbers_one_per_text(idle: RLHFTrainer, name: str) -> None:
    trainer = RLHFTrainer(settings(), policy=idle.policy, reward_fn=GOOD_REWARDS[name])
    rewards = trainer.rollout_phase().raw_rewards
    assert rewards.mean() == 0.5 and rewards.dtype == torch.float32 and not rewards.requires_grad


async def later(texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


BAD_REWARDS = {
    "a column": lambda texts: torch.zeros(len(texts), 1),
    "one number": lambda texts: 0.5,
    "a tensor without axes": lambda texts: torch.tensor(0.5),
    "one too few": lambda texts: [0.0] * (len(texts) - 1),
    "numbers as text": lambda texts: ["0.5"] * len(texts),
    "none for one text": lambda texts: [0.5] * (len(texts) - 1) + [None],
    "a dictionary": lambda texts: {text: 0.5 for text in texts},
    "nothing": lambda texts: None,
    "complex numbers": lambda texts: torch.zeros(len(texts), dtype=torch.complex64),
    "beyond float32": lambda texts: np.full(len(texts), 1e300),
    "an integer beyond floats": lambda texts: [10**400] * len(texts),
    "a coroutine": later,
    "rows of two": lambda texts: [[0.5, 0.5]] * len(texts),
}


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("name", BAD_REWARDS)
def test_reward_of_another_shape_or_kind_is_rejected(
    here: Path, idle: RLHFTrainer, name: str
) -> None:
    given = {"out": "made", "policy": idle.policy, "reward_fn": BAD_REWARDS[name]}
    refuses(lambda: RLHFTrainer(settings(total_phases=1), **given), "reward_fn")
    assert not Path("made").exists()


def test_run_resumes_after_the_reward_raised(here: Path, plain: dict[str, torch.Tensor]) -> None:
    calls = []

    def fails_once(texts: list[str]) -> torch.Tensor:
        calls.append(len(texts))
        if len(calls) == 2:
            raise KeyError("the judge's server is down")
        return long_texts(texts)

    trainer = RLHFTrainer(settings(), out="made", reward_fn=fails_once)
    with pytest.raises((KeyError, LabError)):
        trainer.train()
    del trainer
    again = RLHFTrainer.resume("made", reward_fn=long_texts)
    again.train()
    assert same(weights(again), plain)


def spoil_texts(texts: list[str]) -> torch.Tensor:
    rewards = long_texts(texts)
    texts.clear()
    return rewards


def turn_off_gradients(texts: list[str]) -> torch.Tensor:
    torch.set_grad_enabled(False)
    return long_texts(texts)


def seed_everything(texts: list[str]) -> torch.Tensor:
    torch.manual_seed(0)
    np.random.seed(0)
    return long_texts(texts)


def change_the_default(texts: list[str]) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return long_texts(texts).float()


@pytest.mark.parametrize(
    "reward_fn", [spoil_texts, turn_off_gradients, seed_everything, change_the_default]
)
def test_side_effects_of_a_reward_change_no_weight(
    here: Path, plain: dict[str, torch.Tensor], reward_fn: Callable[..., torch.Tensor]
) -> None:
    trainer = RLHFTrainer(settings(), out="made", reward_fn=reward_fn)
    try:
        trainer.train()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert same(weights(trainer), plain)
    assert all(line["text"] for line in lines(Path("made/samples.jsonl")))


def test_reward_may_reuse_its_buffer(here: Path) -> None:
    buffer = torch.zeros(16)

    def reusing(texts: list[str]) -> torch.Tensor:
        buffer[: len(texts)] = long_texts(texts)
        return buffer[: len(texts)]

    found = []
    for reward_fn in (long_texts, reusing):
        args = settings(advantages="remax", vf_coef=0.0, normalize_reward=False)
        trainer = RLHFTrainer(args, out=reward_fn.__name__, reward_fn=reward_fn)
        trainer.train()
        found.append(weights(trainer))
    assert same(*found)


DEAD = {
    "nothing ends": ["--penalize-no-eos"],
    "nothing learns": ["--base-lr", 0, "--head-lr", 0],
    "no reward, scaled": "--reward-fn zero --reward-scaling scale --no-normalize-reward".split(),
    "a word that never comes": ["--reward-fn", "count:zebra"],
}


@pytest.mark.parametrize("name", DEAD)
def test_dead_learning_is_reported(here: Path, name: str) -> None:
    ending = accepted([*TRAIN, "--total-phases", 3, "--out", "made", *DEAD[name]])
    found = json.loads(Path("made/run.json").read_text())["diagnostics"]
    (finding,) = found.values()
    assert re.search("nothing (tells|learns)", finding["text"]) and finding["text"] in ending.out
    for path in here.glob("made/*.json*"):
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


# The Python API's doors


PARTS = {
    "a name as reward": ({"reward_fn": "sentiment"}, ["reward_fn"]),
    "a number as truth": ({"true_reward_fn": 3}, ["true_reward_fn"]),
    "a name as policy": ({"policy": "reel-nano"}, ["policy"]),
    "a name as reference": ({"reference": "reel-nano"}, ["reference"]),
    "one text as prompts": ({"prompts": "this movie"}, ["prompts"]),
    "no prompts": ({"prompts": []}, ["prompts"]),
    "a prompt that is a number": ({"prompts": ["this movie", 3]}, ["prompts"]),
    "a number as controller": ({"kl_controller": 0.3}, ["kl_controller"]),
    "a name as penalty": ({"kl_penalty": "exact"}, ["kl_penalty"]),
    "a part misspelt": ({"rewad_fn": long_texts}, ["rewad_fn", "reward_fn"]),
    "an optimizer class": ({"optimizer": torch.optim.SGD}, ["optimizer"]),
    "a directory that is a number": ({"out": 3}, ["out"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_trainer_rejects_components_of_another_kind(here: Path, name: str) -> None:
    parts, words = PARTS[name]
    with untouched(here):
        refuses(lambda: RLHFTrainer(settings(), **parts), *words)


@pytest.mark.parametrize("args", [{"preset": "reel"}, "reel", None], ids=repr)
def test_trainer_rejects_other_settings(here: Path, args: Any) -> None:
    refuses(lambda: RLHFTrainer(args), "RLHFArgs")


def test_shared_reference_warns(idle: RLHFTrainer) -> None:
    """A warning only: a lesson studies such a run."""
    policy = idle.policy
    with pytest.warns(UserWarning, match="reference shares trained weights"):
        RLHFTrainer(settings(), policy=policy, reference=policy.base_model)


def test_reference_with_another_vocabulary_is_rejected(idle: RLHFTrainer, gpt2_dir: Path) -> None:
    parts = {"policy": idle.policy, "reference": load_model(str(gpt2_dir))}
    refuses(lambda: RLHFTrainer(settings(), **parts), "reference")


def test_frozen_policy_is_rejected(here: Path) -> None:
    policy = RLHFTrainer(settings()).policy
    policy.requires_grad_(False)
    refuses(lambda: RLHFTrainer(settings(), policy=policy), "policy")


def test_advantages_of_another_shape_raise(here: Path) -> None:
    def my_advantages(rewards: torch.Tensor) -> torch.Tensor:
        return rewards[:, None]

    trainer = RLHFTrainer(settings(total_phases=1), out="made", advantages=my_advantages)
    with pytest.raises(ValueError, match=r"advantages .* \(16, 1\) .* one number per token"):
        trainer.train()


def test_controller_that_returns_nan_is_rejected(here: Path) -> None:
    class Controller:
        kl_coef = 0.3

        def update(self, *arguments: Any, **options: Any) -> None:
            self.kl_coef = math.nan

    trainer = RLHFTrainer(settings(), out="made", kl_controller=Controller())
    refuses(trainer.train, "kl_co")


PROMPTS = {
    "one text": "this movie",
    "no prompts": [],
    "no tokens": [[]],
    "a token beyond the words": [[10**6]],
    "a token below 0": [[-1]],
    "texts and tokens": ["this movie", [1, 2]],
    "a number": 3,
}


@pytest.mark.parametrize("name", PROMPTS)
def test_generate_rejects_other_prompts(idle: RLHFTrainer, name: str) -> None:
    refuses(lambda: idle.generate(PROMPTS[name]))


def test_generate_rejects_an_empty_prompt(here: Path, idle: RLHFTrainer) -> None:
    trainer = RLHFTrainer(settings(prepend_bos=False), policy=idle.policy)
    refuses(lambda: trainer.generate([""]), "prompts[0]")


STEPS = {
    "scores of text": {"scores": ["1"] * 16},
    "score nan": {"scores": [math.nan] * 16},
    "scores in rows of two": {"scores": torch.zeros(16, 2)},
    "a score too few": {"scores": [0.0] * 15},
    "tokens beyond the words": {"queries": [[1]] * 16, "responses": [[10**6]] * 16},
    "nothing to learn from": {"response_masks": [[0] * 3] * 16},
    "a mask of another length": {"response_masks": [[1] * 7] * 16},
    "one text": {"responses": "was so good" * 16},
}


@pytest.mark.parametrize("name", STEPS)
def test_step_rejects_unfit_arguments(idle: RLHFTrainer, name: str) -> None:
    fitting = {"queries": ["this movie"] * 16, "responses": ["was so good"] * 16}
    fitting |= {"scores": [1.0, 0.0] * 8}
    before = weights(idle)
    refuses(lambda: idle.step(**(fitting | STEPS[name])))
    assert same(weights(idle), before) and idle.run is None


@pytest.mark.parametrize("name", ["../../RUN/metrics", "../run", "/etc/passwd", ""])
def test_record_names_stay_in_the_run_directory(here: Path, name: str) -> None:
    Path("RUN/returned").mkdir()
    refuses(lambda: Run("RUN").returned(name))
    refuses(lambda: Run("RUN").records(name))
    refuses(lambda: Run("RUN").tensors(name, 0))


# Callbacks, captures, probes and interventions of the user's own


@pytest.fixture
def trainer(here: Path) -> RLHFTrainer:
    return RLHFTrainer(settings(), out="made", reward_fn=long_texts)


@pytest.mark.parametrize("name", ["../../../evil", "x" * 400, "", "a\0b", ".", "con"])
def test_callback_names_never_leave_the_run(
    trainer: RLHFTrainer, tmp_path: Path, name: str
) -> None:
    def mine(ctx: Any) -> dict[str, Any]:
        return {"value": ctx.phase}

    mine.__name__ = name
    trainer.on("after_phase")(mine)
    before = {path for path in tmp_path.iterdir()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run_phase()
    assert len(lines(Path("made/metrics.jsonl"))) == 1
    assert {path for path in tmp_path.iterdir()} - before == {tmp_path / "made"}
    assert caught or [Run("made").returned(found) for found in Run("made").functions()]


def leave(ctx: Any) -> None:
    sys.exit(0)


def keep(activation: Any, where: Any) -> Any:
    return activation


def no_gradients(ctx: Any) -> None:
    torch.set_grad_enabled(False)


def freeze(ctx: Any) -> None:
    ctx.policy.eval()


def spoil_rewards(ctx: Any) -> dict[Any, Any]:
    return {("a", 1): {2: object()}}


def register_more(ctx: Any) -> None:
    REGISTERING[0].on("after_score")(register_more)


REGISTERING: list[RLHFTrainer] = []


@pytest.mark.parametrize("function", [no_gradients, freeze, spoil_rewards, register_more])
def test_side_effects_of_a_callback_change_no_weight(
    trainer: RLHFTrainer, plain: dict[str, torch.Tensor], function: Callable[..., Any]
) -> None:
    REGISTERING[:] = [trainer]
    trainer.on("after_score")(function)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
    finally:
        torch.set_grad_enabled(True)
    assert same(weights(trainer), plain)


def test_callback_that_trains_changes_no_weight(
    trainer: RLHFTrainer, plain: dict[str, torch.Tensor]
) -> None:
    @trainer.on("after_phase")
    def again(ctx: Any) -> None:
        trainer.run_phase()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert [line["phase"] for line in lines(Path("made/metrics.jsonl"))] == [0, 1]
    assert same(weights(trainer), plain)


LISTENING = {
    "a decorator without its event": (lambda t: t.on(leave), []),
    "an event misspelt": (lambda t: t.on("after_scores"), ["after_scores", "after_score"]),
    "half a phase": (lambda t: t.on("after_score", every=1.5), ["every"]),
    "no function": (lambda t: t.on("after_score")(3), []),
    "a site misspelt": (lambda t: t.capture("blocks.0.hook_resid")(leave), ["blocks.0.hook_resid"]),
    "a layer too many": (lambda t: t.capture("blocks.9.hook_mlp_out")(leave), ["blocks.9"]),
    "no sites": (lambda t: t.capture([])(leave), ["hook_names"]),
    "no function at a site": (lambda t: t.intervene("blocks.0.hook_mlp_out", 3), []),
    "half of a run as text": (
        lambda t: t.intervene("blocks.0.hook_mlp_out", keep, during="rollouts"),
        ["during"],
    ),
    "no half of a run": (
        lambda t: t.intervene("blocks.0.hook_mlp_out", keep, during=()),
        ["during"],
    ),
    "no name": (lambda t: t.intervene("blocks.0.hook_mlp_out", keep, name=""), ["name"]),
}


@pytest.mark.parametrize("name", LISTENING)
def test_trainer_rejects_unknown_events_and_sites(idle: RLHFTrainer, name: str) -> None:
    act, words = LISTENING[name]
    refuses(lambda: act(idle), *words)


def test_capture_of_a_missing_position_warns(
    trainer: RLHFTrainer, plain: dict[str, torch.Tensor]
) -> None:
    seen = []

    def look(ctx: Any, acts: torch.Tensor) -> None:
        seen.append(acts)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.capture("blocks.0.hook_mlp_out", pos=999)(look)
        except ConfigError as error:
            assert "pos" in str(error)
            return
        trainer.train()
    assert any("pos" in str(warning.message) for warning in caught)
    assert not seen and same(weights(trainer), plain)


CHANGERS = {
    "another shape": lambda act, where: act[:, :1],
    "a number": lambda act, where: 0.0,
    "a text": lambda act, where: "zero",
    "not a number": lambda act, where: act * math.nan,
    "more precision": lambda act, where: act.double(),
}


@pytest.mark.parametrize("name", CHANGERS)
def test_intervention_must_return_an_activation(trainer: RLHFTrainer, name: str) -> None:
    trainer.intervene("blocks.0.hook_mlp_out", CHANGERS[name], name="changer")
    words = [] if name == "not a number" else ["changer"]
    refuses(trainer.train, *words)


class Mine(Probe):
    """A probe of a user's own, whose record is set from outside."""

    record: Any = None

    def observe(self, seen: Any) -> Any:
        return self.record(seen) if callable(self.record) else self.record


FINE = Check("all is well", 0.0, 1.0, True)
TABLE = torch.arange(6.0).reshape(2, 3)
RECORDS = {
    "tensors that share memory": (Record(tensors={"a": TABLE, "b": TABLE}, checks=[FINE]), True),
    "a transposed tensor": (Record(tensors={"a": TABLE.T}, checks=[FINE]), True),
    "a tensor with a gradient": (
        Record(tensors={"a": TABLE.clone().requires_grad_() * 2}, checks=[FINE]),
        True,
    ),
    "nothing": (None, False),
    "a dictionary": ({"values": {}}, False),
    "no checks": (Record(values={"a": 1}), False),
    "what JSON has not": (Record(values={"a": object()}, checks=[FINE]), False),
    "an error": (lambda seen: 1 / 0, False),
}


@pytest.mark.parametrize("name", RECORDS)
def test_probe_records_are_stored_or_warned_about(trainer: RLHFTrainer, name: str) -> None:
    Mine.record, stored = RECORDS[name]
    if callable(Mine.record):
        Mine.record = staticmethod(Mine.record)
    attach(trainer, Mine(name="mine"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.run_phase()
    assert len(lines(Path("made/metrics.jsonl"))) == 1
    if stored:
        assert torch.equal(
            Run("made").tensors("mine", 0)["a"].flatten().sort()[0][:1], TABLE[0, :1]
        )
    else:
        assert any("mine" in str(warning.message) for warning in caught)


class Misspelt(Mine):
    events = ("after_scores",)


class Elsewhere(Mine):
    sites = ("blocks.7.hook_nothing",)
    text = "rollout"


SUITES = {
    "an event misspelt": (lambda: Suite(Misspelt(name="mine")), ["after_scores"]),
    "a site misspelt": (lambda: Suite(Elsewhere(name="mine")), ["blocks.7"]),
    "a class": (lambda: Suite(Mine), ["Mine"]),
    "a name that leaves": (lambda: Suite(Mine(name="../../evil")), ["evil"]),
    "a name of nothing": (lambda: Suite(Mine(name="")), ["name"]),
    "never": (lambda: Suite(Mine(name="mine", every=0)), ["every"]),
    "labels of another number": (
        lambda: Suite(
            Mine(name="mine"), eval_text=["this movie"] * 3, labels=torch.tensor([True, False])
        ),
        ["labels"],
    ),
    "tokens beyond the words": (
        lambda: Suite(Mine(name="mine"), eval_tokens=torch.full((2, 3), 10**6)),
        ["eval_tokens"],
    ),
    "no text": (
        lambda: Suite(Mine(name="mine"), eval_text=[]),
        ["eval_text"],
    ),
}


@pytest.mark.parametrize("name", SUITES)
def test_attach_rejects_unfit_suites(idle: RLHFTrainer, name: str) -> None:
    make, words = SUITES[name]
    refuses(lambda: attach(idle, make()), *words)


def test_trainer_runs_in_a_thread(trainer: RLHFTrainer, plain: dict[str, Any]) -> None:
    errors = []

    def train() -> None:
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(60)
    assert not errors and same(weights(trainer), plain)
