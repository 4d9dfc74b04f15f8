"""Unusual arguments from Python: components, rewards, callbacks, probes and steps."""

import copy
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_lab import RLHFTrainer
from rlhf_lab import diffing as D
from rlhf_lab import functional as F
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import true_reward
from rlhf_lab.probes import Check, Probe, Record, Run, Suite, attach
from rlhf_lab.probes.erasure import fit_leace
from rlhf_lab.rewards import CountReward, SentimentReward, WeightedRewards
from rlhf_lab.sampling import SamplingSpec
from tests.bad_input.command_outcome import refuses, settings, untouched
from tests.bad_input.conftest import count_e, lines
from tests.training.recorded_runs import copy_weights, is_equal

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
        return self.record


class Misspelled(Mine):
    events = ("after_scores",)


class Elsewhere(Mine):
    sites = ("blocks.7.hook_nothing",)
    text = "rollout"


def frozen(trainer: RLHFTrainer) -> Any:
    return copy.deepcopy(trainer.policy).requires_grad_(False)


def build(args: Any = None, **parts: Any) -> Callable[[RLHFTrainer], Any]:
    return lambda t: RLHFTrainer(args or settings(), **parts)


def probe(kind: type[Probe], name: str = "mine") -> Callable[[RLHFTrainer], Any]:
    return lambda t: attach(t, Suite(kind(name=name)))


def step(**changes: Any) -> Callable[[RLHFTrainer], Any]:
    fitting = {"queries": ["this movie"] * 16, "responses": ["was so good"] * 16}
    return lambda t: t.step(**(fitting | {"scores": [1.0, 0.0] * 8} | changes))


class Rewarded(RLHFTrainer):
    reward_fn = count_e


def GPT2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9))


def minimize(trainer: RLHFTrainer) -> None:
    trainer.optimizer = torch.optim.AdamW(trainer.policy.parameters())  # which would minimize
    trainer.start()


REJECTED: dict[str, tuple[Callable[[RLHFTrainer], Any], list[str]]] = {
    "no prompts": (build(prompts=[]), ["prompts=[] contains no"]),
    "a prompt that is a number": (build(prompts=["this movie", 3]), ["contains 3, which is not"]),
    "settings as a dict": (build({"preset": "reel"}), ["args={'preset'", "RLHFArgs(preset="]),
    "a method that does not exist": (lambda t: settings(method="grpoo"), ["Choose one of: 'ppo'"]),
    "no head": (lambda t: build(policy=t.policy.base_model)(t), ["policy", "WithValueHead(model)"]),
    "a frozen policy": (lambda t: build(policy=frozen(t))(t), ["trainable"]),
    "a reference by name": (build(reference="reel-nano"), ["reference='reel-nano'", "load_model"]),
    "a policy of GPT-2": (lambda t: build(policy=GPT2())(t), ["policy=GPT2LM", "load_model"]),
    "a model without tokenizer": (lambda t: load_model(GPT2()), ["source=GPT2", "tokenizer="]),
    "another policy": (lambda t: setattr(t, "policy", t.policy), ["trainer.policy", "another"]),
    "another optimizer": (minimize, ["trainer.optimizer"]),
    "a component misspelled": (build(rewad_fn=count_e), ["rewad_fn", "reward_fn"]),
    "TRL's tokenizer": (build(tokenizer=1), ["Use policy.base_model.set_tokenizer."]),
    "a score of text": (step(scores=[1.0] * 15 + ["1"]), ["scores[15]"]),
    "nothing to learn from": (step(response_masks=[[0] * 3] * 16), []),
    "settings for a trainer": (lambda t: attach(t.args, Mine()), ["RLHFArgs is not a trainer"]),
    "no gradients": (torch.no_grad()(lambda t: t.train()), ["no_grad"]),
    "a reward method": (lambda t: Rewarded(settings()), ["reward_fn is not called", "reward_fn="]),
    "a probe's event": (probe(Misspelled), ["after_scores"]),
    "a probe's site": (probe(Elsewhere), ["blocks.7"]),
    "a probe's path": (probe(Mine, "../../evil"), ["evil"]),
    "adapters": (lambda t: RLHFTrainer(settings(lora_rank=2), policy=t.policy), ["lora_rank=2"]),
    "a critic": (lambda t: RLHFTrainer(settings(value_head="separate"), policy=t.policy), ["sepa"]),
    "prompts in a dict": (build(prompts={"prompt": ["so"]}), ["is a dict. Pass a list"]),
    "one evaluation text": (lambda t: attach(t, Mine(), eval_text="so good"), ["is a str"]),
    "one review": (lambda t: true_reward("this movie"), ["'this movie' is a str"]),
    "weights": (lambda t: WeightedRewards([count_e], {"count_e": 0.5}), ["0.5} is a dict"]),
    "nothing to count": (lambda t: CountReward("")(["good"]), ["no text to count"]),
    "a stop token alone": (lambda t: SamplingSpec(4, stop_tokens=1), ["stop_tokens=1 must be a"]),
    "a stop text": (lambda t: SamplingSpec(4, stop_tokens=("so",)), ["('so',) must be a tuple"]),
    "settings to resume": (lambda t: RLHFTrainer.resume("RUN", t.args), ["changes=RLHFArgs"]),
    "a callback that is a number": (lambda t: t.on("after_phase")(5), ["5 at after_phase"]),
    "an unknown word": (
        lambda t: t.policy.base_model.to_tokens(["this movie", "a zebra"]),
        ["the text 'a zebra' (number 2 of 2) has the word 'a'", "vocabulary"],
    ),
    "a copy": (copy.copy, ["trainer cannot be copied", "RLHFTrainer.resume"]),
    "a direction": (lambda t: SentimentReward("reel-sentiment", "positive"), ["one of: pos, neg"]),
    "no reviews": (lambda t: D.transplant(t.reference, t.reference, None, count_e, 0, 0), ["n=0"]),
}


@pytest.mark.parametrize("name", REJECTED)
def test_trainer_rejects_argument(here: Path, idle: RLHFTrainer, name: str) -> None:
    act, words = REJECTED[name]
    before = copy_weights(idle.policy)
    with untouched(here):
        refuses(lambda: act(idle), *words)
    assert is_equal(copy_weights(idle.policy), before) and idle.run is None


def test_reference_that_does_not_fit_is_rejected_or_warns(idle: RLHFTrainer, gpt2_dir) -> None:
    policy = idle.policy
    with pytest.warns(UserWarning, match="reference shares trained weights"):
        RLHFTrainer(settings(), policy=policy, reference=policy.base_model)
    other = {"policy": policy, "reference": load_model(str(gpt2_dir))}
    refuses(lambda: RLHFTrainer(settings(), **other), "reference")
    refuses(lambda: RLHFTrainer(settings(reference_device="cpu"), **other), "reference_device=")


def test_generated_prompts_and_a_reference_with_a_head_work(idle: RLHFTrainer) -> None:
    texts = ["this movie", "this movie honestly ,"]
    reference = TransformerWithValueHead(load_model("reel-nano"))
    trainer = RLHFTrainer(settings(), prompts=iter(texts), reference=reference)
    assert trainer.prompts.texts == texts and trainer.reference is reference.base_model
    with pytest.warns(UserWarning, match="prompts='p.csv' is ignored, since prompts= is set"):
        RLHFTrainer(settings(prompts="p.csv"), prompts=texts)


def test_masks_and_labels_of_0_and_1_are_no_indices() -> None:
    model, site, x = load_model("reel-nano"), "blocks.0.hook_resid_post", torch.randn(4, 3)
    tokens, mask = torch.tensor([[0, 2, 8], [0, 2, 9]]), torch.tensor([[0, 1, 1], [0, 0, 1]])
    store = D.ActivationStore(mb=1, models=["a"])
    for call in (
        lambda mask: D.mean_difference(model, model, tokens, site, mask),
        lambda mask: D.mean_difference(model, model, tokens, site, mask[:, 0].bool()),
        lambda mask: D.collect_activations(store, {"a": model}, tokens, site, mask),
        lambda mask: D.collect_activations(store, {"a": model}, tokens, site, mask[:1].bool()),
        lambda mask: F.bootstrap_interval(x[:2], mask=mask, statistic=lambda x, mask: x[mask]),
    ):
        with pytest.raises(ValueError, match="mask has (dtype torch.int64|shape)"):
            call(mask)
    D.collect_activations(store, {"a": model}, tokens, site, mask.bool(), torch.ones_like(mask))
    labels = torch.tensor([0, 1, 1, 0])
    assert len(store) == 3 and F.auc(x[:, 0], labels) == F.auc(x[:, 0], labels.bool())
    assert all(map(torch.equal, fit_leace(x, labels), fit_leace(x, labels.bool())))


def test_single_stop_token_raises() -> None:
    with pytest.raises(ValueError, match="stop_tokens=2 must be a list of token ids"):
        F.response_mask(torch.zeros(1, 2, dtype=torch.long), 2)


def test_tensors_of_another_record_are_rejected(here: Path) -> None:
    store = Run("RUN").store
    store.write("mine", 0, Record(tensors={"x": torch.zeros(2)}))
    assert Run("RUN").tensors("mine", 0)["x"].tolist() == [0, 0]
    store.tensor_path("mine", 0).rename(store.tensor_path("mine", 1))
    refuses(lambda: Run("RUN").tensors("mine", 1), "'phase': 0}, expected")


def test_a_run_stands_for_its_directory(here: Path) -> None:
    run, tokens = Run("RUN"), torch.tensor([[0, 2, 8], [0, 2, 9]])
    found = D.compare(run, run.directory, tokens, methods=(), ranks=(), alphas=())
    assert found.shift.value == 0 and RLHFTrainer.resume(run).args == Run(run).args
    refuses(lambda: D.compare(run, run, ["so good"] * 2), "['so good', 'so good'] is not 2 or more")


def test_custom_component_with_wrong_result_raises(here: Path) -> None:
    trainer = RLHFTrainer(settings(), out="made", kl_controller=Controller())
    refuses(trainer.train, "kl_co")
    controller = type("Returns", (Controller,), {"update": lambda *arguments: 0.2})
    trainer = RLHFTrainer(settings(), out="returned", kl_controller=controller())
    refuses(trainer.train, "kl_controller.update returned 0.2 but did not set kl_coef")
    trainer = RLHFTrainer(settings(), out="other", advantages=lambda rewards: rewards[:, None])
    with pytest.raises(ValueError, match=r"advantages .* \(16, 1\) .* one number per token"):
        trainer.train()
    for name in ("advantages", "kl_estimator", "policy_loss", "logprobs", "normalize_reward"):
        trainer = RLHFTrainer(
            settings(), out=name, **{name: lambda *inputs: inputs[0].numpy(force=True)}
        )
        with pytest.raises(ValueError, match=r"returned ndarray .*Return one number per"):
            trainer.train()


def test_learning_phase_warns_at_second_call_in_one_phase(trainer, recwarn) -> None:
    trainer.learning_phase(trainer.rollout_phase())
    with pytest.warns(UserWarning, match=r"learning_phase ran twice in one phase.*run_phase\(\)"):
        trainer.learning_phase(trainer.rollout_phase())
    trainer.phase += 1
    trainer.learning_phase(trainer.rollout_phase())
    trainer.run_phase()
    assert not recwarn


def test_weights_added_later_warn_once(trainer, recwarn) -> None:
    trainer.run_phase()
    trainer.policy.value_head = torch.nn.Linear(64, 1)
    trainer.train()
    (warning,) = recwarn
    assert "added weights do not train." in str(warning.message)


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
    torch.set_default_dtype(torch.float64)
    ctx.policy.eval()


CALLBACKS = {
    "no gradients": lambda trainer: no_gradients,
    "unstorable": lambda trainer: lambda ctx: {("a", 1): {2: object()}},
    "trains": lambda trainer: lambda ctx: ctx.event == "after_phase" and trainer.run_phase(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CALLBACKS)
def test_unusual_callback_and_a_thread_change_no_weight(trainer, plain, kind: str) -> None:
    for event in ("after_score", "after_phase"):
        trainer.on(event)(CALLBACKS[kind](trainer))
    thread = threading.Thread(target=trainer.train)
    try:
        thread.start()
        thread.join(60)
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert [line["phase"] for line in lines("made/metrics.jsonl")] == [0, 1]
    assert is_equal(copy_weights(trainer.policy), plain)


@pytest.mark.parametrize(
    "change", [lambda x: x[:, :1], lambda x: 0.0, lambda x: x * math.nan, lambda x: x.double()]
)
def test_intervention_must_return_an_activation(trainer, change: Any) -> None:
    trainer.intervene(MLP, lambda x, where: change(x), name="changer")
    refuses(trainer.train, "changer")


def test_tensors_of_a_probe_are_stored(trainer, monkeypatch) -> None:
    table = torch.arange(6.0).reshape(2, 3)
    learned = table.clone().requires_grad_() * 2
    tensors = {"a": table, "b": table, "transposed": table.T, "learned": learned}
    record = Record(tensors=tensors, checks=[Check("all is well", 0.0, 1.0, True)])
    monkeypatch.setattr(Mine, "record", record)
    attach(trainer, Mine(name="mine"))
    trainer.run_phase()
    stored = Run("made").tensors("mine", 0)
    assert all(torch.equal(stored[name], x) for name, x in tensors.items())
