"""DPO: the loss of each pair, what the reference is, what is reported, and what is learned."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import FitConfig
from rlhf_lab.models import add_lora, load_model
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import Pairs, reel_pairs
from rlhf_lab.supervised import hold_out
from rlhf_lab.tuning import (
    DPOLoss,
    DriftEvalConfig,
    encode_examples,
    text_logprobs,
    train_on_pairs,
)

FEW = FitConfig(steps=3, batch_size=8, learning_rate=1e-3, show_progress=False)
SAME = Pairs(["w1 w2", "w3"] * 4, ["w4", "w5 w6 w7"] * 4)


@pytest.fixture
def nano():
    return load_model("reel-nano")


def test_the_logprob_of_a_text_is_that_of_plain_transformers(model_dir):
    """The sum over its tokens, EOS included, from its mean loss; in one batch and padded."""
    plain = AutoModelForCausalLM.from_pretrained(str(model_dir), local_files_only=True).eval()
    model = load_model(str(model_dir))
    rows = encode_examples(model, ["", ""], ["w1", "w2 w3 w4 w5"])
    found = text_logprobs(model, rows)
    for row, logprob in zip(rows, found, strict=True):
        ids = torch.tensor([row.ids])
        expected = -plain(ids, labels=ids).loss.item() * (len(row.ids) - 1)
        assert logprob.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPOLoss(0.5), math.log(2)),
        (DPOLoss(0.5, 0.2), math.log(2)),
        (DPOLoss(0.5, 0.0, "ipo"), 1.0),
    ],
)
def test_the_first_loss_is_that_of_a_policy_equal_to_its_reference(model_dir, loss, expected):
    """h = 0: -log sigmoid(0) = log 2 whatever is smoothed, and for IPO (0 - 1 / (2 beta))^2 = 1."""
    model = load_model(str(model_dir))
    fitted = train_on_pairs(model, SAME, FitConfig(1, 4, 1e-3, 0.5, 0, False), loss)
    assert fitted.first_loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_figures_are_those_of_the_difference_from_the_start(model_dir):
    """Implicit rewards again, from two models apart, text by text: beta times the difference of
    the log-probabilities.
    """
    start, model = load_model(str(model_dir)), load_model(str(model_dir))
    fitting = FitConfig(5, 4, 3e-3, 0.5, 1, False)
    fitted = train_on_pairs(model, SAME, fitting, DPOLoss(0.2))
    held_out, _ = hold_out(8, 0.5, np.random.default_rng(1))
    means = {}
    for name, texts in (("chosen", SAME.chosen), ("rejected", SAME.rejected)):
        rewards = []
        for i in held_out:
            rows = encode_examples(model, [""], [texts[i]])
            with torch.no_grad():
                gap = text_logprobs(model, rows) - text_logprobs(start, rows)
            rewards.append(0.2 * gap.item())
        means[name] = sum(rewards) / len(rewards)
    assert fitted.chosen_reward == pytest.approx(means["chosen"], abs=1e-4)
    assert fitted.rejected_reward == pytest.approx(means["rejected"], abs=1e-4)
    assert fitted.margin == pytest.approx(means["chosen"] - means["rejected"], abs=1e-4)
    assert fitted.margin > 0.01 and fitted.last_loss < fitted.first_loss


def test_a_common_beginning_cancels(model_dir):
    """Two policies a step on from one start, with and without the prompt's own tokens in the sum:
    the gradient of the difference does not know them.
    """
    model = load_model(str(model_dir))
    whole = encode_examples(model, ["", ""], ["w1 w2 w3 w4", "w1 w2 w5"])
    after = encode_examples(model, ["w1 w2", "w1 w2"], ["w3 w4", "w5"])
    gradients = []
    for rows in (whole, after):
        chosen, rejected = text_logprobs(model, rows)
        model.zero_grad()
        (chosen - rejected).backward()
        gradients.append(model.embed.W_E.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [DPOLoss(0.1), DPOLoss(0.3, 0.1), DPOLoss(0.1, 0.0, "ipo")])
def test_on_reel_it_raises_true_reward_and_learns_to_judge(nano, loss):
    """1,000 pairs, 200 of them held out: a standard error of .03. Untrained, half would be right
    and nothing would move.
    """
    fitting = FitConfig(40, 16, 3e-4, 0.2, 0, False)
    settings = {"drift_eval": DriftEvalConfig(96, 28), "true_reward_fn": REWARDS["true_reward"]}
    fitted = train_on_pairs(nano, reel_pairs(1000, 0), fitting, loss, **settings)
    assert fitted.accuracy > 0.65 and fitted.margin > 0
    assert fitted.true_reward_accuracy > 0.8 and 0.8 < fitted.bayes_accuracy < 0.95
    assert fitted.drift.true_reward_after > fitted.drift.true_reward_before + 0.1
    assert fitted.drift.kl_per_sequence > 0.05


def test_adapters_have_the_model_below_them_as_reference(nano):
    add_lora(nano, 2, 4.0)
    below = {n: p.clone() for n, p in nano.named_parameters() if not p.requires_grad}
    fitted = train_on_pairs(nano, reel_pairs(60, 0), FEW)
    assert fitted.first_loss < math.log(2) + 0.1 and fitted.margin != 0
    assert all(torch.equal(p, below[n]) for n, p in nano.named_parameters() if n in below)


def test_hooks_fire_on_every_step_and_only_in_the_policy(nano):
    heard = []
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: heard.append(x.requires_grad))]
    with nano.hooks(fwd_hooks=hooks):
        train_on_pairs(nano, reel_pairs(20, 0), FEW)
    assert heard.count(True) == 3 and heard.count(False) == 1


def test_own_texts_continue_the_prompts_of_held_out_pairs(nano):
    prompts = ["this movie wow , the plot", "this film"] * 2
    pairs = Pairs([p + " was" for p in prompts], [p + " it" for p in prompts], None, prompts)
    fitted = train_on_pairs(nano, pairs, FEW, drift_eval=DriftEvalConfig(3, 2))
    assert fitted.drift.samples == 3


def test_pairs_that_are_equal_after_the_cut_are_rejected(nano):
    pairs = Pairs(["the " * 40 + "plot"] * 4, ["the " * 40 + "movie"] * 4)
    with (
        pytest.warns(UserWarning, match="8 of 8 texts were cut to 32 tokens"),
        pytest.raises(ConfigError, match="All 4 pairs are equal in their first 32 tokens"),
    ):
        train_on_pairs(nano, pairs, FEW)


@pytest.mark.slow
def test_a_seed_decides_all():
    def run(seed):
        model = load_model("reel-nano")
        train_on_pairs(model, reel_pairs(30, 0), FitConfig(2, 8, 1e-3, 0.2, seed, False))
        return model.W_E.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ((0.0,), "beta=0.0 is out of range"),
        ((-1.0,), "beta=-1.0 is out of range"),
        ((0.1, 0.5), "label_smoothing=0.5 is out"),
        ((0.1, 0.1, "ipo"), "label_smoothing=0.1 .* 0 for ipo"),
    ],
)
def test_settings_that_the_loss_refuses_are_refused_at_the_door(settings, word):
    with pytest.raises(ConfigError, match=word):
        DPOLoss(*settings)
