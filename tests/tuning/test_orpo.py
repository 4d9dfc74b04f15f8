"""ORPO: the loss of each pair, that no reference is made, what is reported, what is learned."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import FitConfig
from rlhf_lab.models import load_model
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import Pairs, reel_pairs
from rlhf_lab.supervised import hold_out
from rlhf_lab.tuning import DriftEvalConfig, ORPOLoss, encode_examples, train_on_pairs
from rlhf_lab.tuning import losses as module

PROMPTS = ["w8 w9", "w6"] * 3
PROMPTED = Pairs(
    [f"{prompt} w1 w2" for prompt in PROMPTS],
    [f"{prompt} w4 w5 w6 w7" for prompt in PROMPTS],
    prompts=PROMPTS,
)


@pytest.fixture
def nano():
    return load_model("reel-nano")


def mean_logprob(plain, model, prompt, text):
    """The mean over a text's tokens, EOS included, without those of its prompt."""
    (row,) = encode_examples(model, [prompt], [text])
    ids = torch.tensor([row.ids])
    labels = ids.clone()
    labels[:, : row.prefix_len] = -100
    with torch.no_grad():
        return -plain(ids, labels=labels).loss.item()


def odds(logp):
    return math.exp(logp) / (1 - math.exp(logp))


@pytest.mark.slow
def test_loss_and_figures_are_those_of_plain_transformers(model_dir):
    """With a rate too small to move, pair by pair: -log P(c) + lambda log(1 + odds(r) / odds(c))
    of those trained on, and log odds of those held out; prompts are not counted.
    """
    plain = AutoModelForCausalLM.from_pretrained(str(model_dir), local_files_only=True).eval()
    model = load_model(str(model_dir))
    fitted = train_on_pairs(model, PROMPTED, FitConfig(1, 6, 1e-12, 0.5, 3, False), ORPOLoss(0.7))
    held_out, train = hold_out(6, 0.5, np.random.default_rng(3))
    logps = {
        i: [mean_logprob(plain, model, PROMPTS[i], text) for text in ("w1 w2", "w4 w5 w6 w7")]
        for i in range(6)
    }
    losses = [-logps[i][0] + 0.7 * math.log1p(odds(logps[i][1]) / odds(logps[i][0])) for i in train]
    assert fitted.first_loss == pytest.approx(sum(losses) / 3, abs=1e-4)
    chosen, rejected = ([math.log(odds(logps[i][side])) for i in held_out] for side in (0, 1))
    assert fitted.chosen_reward == pytest.approx(sum(chosen) / 3, abs=1e-4)
    assert fitted.rejected_reward == pytest.approx(sum(rejected) / 3, abs=1e-4)
    won = [c > r for c, r in zip(chosen, rejected, strict=True)]
    assert fitted.accuracy == pytest.approx(sum(won) / 3)
    assert "by log odds per token on 3 held-out pairs" in "\n".join(fitted.summary())


def test_no_reference_is_made(nano, monkeypatch):
    def refuse(*_):
        raise AssertionError("a reference is made")

    monkeypatch.setattr(module, "make_reference", refuse)
    monkeypatch.setattr("rlhf_lab.tuning.kl_meter.make_reference", refuse)
    few = FitConfig(2, 8, 1e-3, show_progress=False)
    fitted = train_on_pairs(nano, reel_pairs(20, 0), few, ORPOLoss(), drift_eval=DriftEvalConfig(0))
    assert fitted.drift is None


def test_hooks_fire_on_every_step_and_on_the_pairs_held_out(nano):
    heard = []
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: heard.append(x.requires_grad))]
    with nano.hooks(fwd_hooks=hooks):
        train_on_pairs(nano, reel_pairs(20, 0), FitConfig(3, 8, show_progress=False), ORPOLoss())
    assert heard == [True] * 3 + [False]


@pytest.mark.slow
def test_odds_term_raises_true_reward_more_than_sft_alone(nano):
    fitting = FitConfig(40, 16, 3e-4, 0.2, 0, False)
    settings = {"drift_eval": DriftEvalConfig(96, 28), "true_reward_fn": REWARDS["true_reward"]}
    fitted = train_on_pairs(nano, reel_pairs(1000, 0), fitting, ORPOLoss(1.0), **settings)
    alone = train_on_pairs(
        load_model("reel-nano"), reel_pairs(1000, 0), fitting, ORPOLoss(0.0), **settings
    )
    assert fitted.drift.true_reward_after > fitted.drift.true_reward_before + 0.1
    assert fitted.accuracy > 0.55 and fitted.true_reward_accuracy > 0.8
    assert fitted.drift.true_reward_after > alone.drift.true_reward_after
    assert fitted.margin > alone.margin


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (-1.0, "odds_weight=-1.0 is out"),
        (math.nan, "odds_weight=nan is out"),
        (math.inf, "odds_weight=inf"),
    ],
)
def test_weights_that_the_loss_refuses_are_refused_at_the_door(weight, words):
    with pytest.raises(ConfigError, match=words):
        ORPOLoss(weight)
