"""Training on data: the loss of each method, its reference, the values, and what is learned."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import add_lora, load_model
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import Pairs, RewardModel, reel_pairs
from rlhf_lab.supervised import hold_out
from rlhf_lab.tuning import (
    DPOLoss,
    DriftEvalConfig,
    FitConfig,
    KTOLoss,
    LabeledExamples,
    ORPOLoss,
    RewardLoss,
    encode_examples,
    fine_tune,
    load_examples,
    losses,
    split_pairs,
    text_logprobs,
    train_on_labels,
    train_on_pairs,
    train_reward_model,
)
from rlhf_lab.tuning.examples import TokenRow
from rlhf_lab.tuning.fit import _minimize, held_out_loss
from tests.training.recorded_runs import move_weights

PROMPTS = ["w8 w9", "w6"] * 4
GOOD, BAD = ["w1 w2", "w3"] * 4, ["w4 w5 w6 w7", "w4"] * 4
PAIRS = Pairs(
    [" ".join(pair) for pair in zip(PROMPTS, GOOD, strict=True)],
    [" ".join(pair) for pair in zip(PROMPTS, BAD, strict=True)],
    prompts=PROMPTS,
)
REEL = dict(drift_eval=DriftEvalConfig(96, 28), true_reward_fn=REWARDS["true_reward"])


def fitting(steps=3, batch_size=8, learning_rate=1e-3, held_out=0.2, seed=0):
    return FitConfig(steps, batch_size, learning_rate, held_out, seed, show_progress=False)


@pytest.fixture
def nano():
    return load_model("reel-nano")


def logprobs_alone(directory, prompt, text, model):
    """Log-probabilities of a text's tokens by transformers, EOS included, without the prompt."""
    plain = AutoModelForCausalLM.from_pretrained(str(directory), local_files_only=True).eval()
    (row,) = encode_examples(model, [prompt], [text])
    with torch.no_grad():
        logprobs = plain(torch.tensor([row.ids])).logits[0].double().log_softmax(-1)
    return [logprobs[t - 1, row.ids[t]].item() for t in range(row.prefix_len, len(row.ids))]


def log_ratios(tuned, start, prompts, texts):
    """Differences of log-probabilities, one text at a time."""
    ratios = []
    for prompt, text in zip(prompts, texts, strict=True):
        rows = encode_examples(tuned, [prompt], [text])
        with torch.no_grad():
            ratios.append((text_logprobs(tuned, rows) - text_logprobs(start, rows)).item())
    return np.array(ratios)


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_held_out_loss_is_mean_over_all_tokens(model_dir, batch_size):
    model, prompts = load_model(str(model_dir)), ["", "w9 w1", ""]
    texts = ["w1", "w2 w3 w4", "w5 w6 w7 w8 w0"]
    logprobs = [
        x
        for pair in zip(prompts, texts, strict=True)
        for x in logprobs_alone(model_dir, *pair, model)
    ]
    loss, tokens = held_out_loss(model, encode_examples(model, prompts, texts), batch_size)
    assert tokens == len(logprobs) == 2 + 4 + 6
    assert loss == pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-5)


@pytest.mark.slow
def test_result_is_json_and_text(nano):
    fit = fine_tune(nano, load_examples("reel", 10, 0), fitting(), drift_eval=DriftEvalConfig(2, 3))
    stored = fit.to_dict()
    assert stored["steps"] == 3 and "show_progress" not in stored
    assert stored["perplexity_before"] == pytest.approx(math.exp(stored["loss_before"]))
    assert stored["drift"]["samples"] == 2 and stored["drift"]["true_reward_after"] is None
    lines = fit.summary()
    assert "held out texts 2" in lines and f"loss after {stored['loss_after']:.3f}" in lines
    assert not any("None" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [DPOLoss(0.2), DPOLoss(0.2, 0.1), DPOLoss(0.2, 0.0, "ipo")], ids=str
)
def test_dpo_matches_hand_computed(model_dir, loss, monkeypatch):
    """From two models apart, text by text; their log-ratio is taken with the prompt, which cancels.

    -log sigmoid(h) with h = beta * difference, smoothed; IPO: (difference - 1 / (2 beta))^2.
    """
    start, model = load_model(str(model_dir)), load_model(str(model_dir))
    policy = move_weights(load_model(str(model_dir)))
    move_weights(model)
    monkeypatch.setattr(losses, "make_reference", lambda _: start)
    values = train_on_pairs(model, PAIRS, fitting(1, 4, 1e-12, 0.5, 1), loss).values
    held_out, train = hold_out(8, 0.5, np.random.default_rng(1))
    good, bad = (log_ratios(policy, start, PROMPTS, texts) for texts in (GOOD, BAD))
    h = 0.2 * (good - bad)[train]
    expected = -(1 - loss.label_smoothing) * log_sigmoid(h) - loss.label_smoothing * log_sigmoid(-h)
    if loss.kind == "ipo":
        expected = ((good - bad)[train] - 1 / 0.4) ** 2
    assert values["first_loss"] == pytest.approx(expected.mean(), abs=1e-4)
    assert values["margin"] == pytest.approx(0.2 * (good - bad)[held_out].mean(), abs=1e-4)
    won = np.heaviside(np.round((good - bad)[held_out], 5), 0.5)
    assert values["accuracy"] == pytest.approx(won.mean())
    assert (values["train_pairs"], values["held_out_pairs"]) == (4, 4)


@pytest.mark.slow
def test_orpo_matches_transformers(model_dir, monkeypatch):
    """-log P(c) + lambda log(1 + odds(r) / odds(c)), of means over tokens without the prompt."""
    monkeypatch.setattr(losses, "make_reference", None)  # ORPO does not make one
    model = load_model(str(model_dir))
    settings, no_drift = fitting(1, 4, 1e-12, 0.5, 3), DriftEvalConfig(0)
    fit = train_on_pairs(model, PAIRS, settings, ORPOLoss(0.7), None, no_drift)
    held_out, train = hold_out(8, 0.5, np.random.default_rng(3))
    c, r = (
        np.array([np.mean(logprobs_alone(model_dir, PROMPTS[i], side[i], model)) for i in range(8)])
        for side in (GOOD, BAD)
    )
    odds_c, odds_r = (np.exp(x) / (1 - np.exp(x)) for x in (c, r))
    losses_by_hand = -c + 0.7 * np.log1p(odds_r / odds_c)
    assert fit.values["first_loss"] == pytest.approx(losses_by_hand[train].mean(), abs=1e-4)
    for name, odds in (("chosen_reward", odds_c), ("rejected_reward", odds_r)):
        assert fit.values[name] == pytest.approx(np.log(odds)[held_out].mean(), abs=1e-4)
    assert fit.values["accuracy"] == (odds_c > odds_r)[held_out].mean()
    assert fit.drift is None


@pytest.mark.slow
def test_pairs_of_reel_raise_true_reward(nano):
    """1,000 pairs, 200 of them held out: a standard error of .03."""
    fit = train_on_pairs(nano, reel_pairs(1000, 0), fitting(40, 16, 3e-4), **REEL)
    values, drift = fit.values, fit.drift
    assert values["accuracy"] > 0.65 and values["margin"] > 0
    assert values["true_reward_accuracy"] > 0.8 and 0.8 < values["bayes_accuracy"] < 0.95
    assert drift.true_reward_after > drift.true_reward_before + 0.1 and drift.kl_per_sequence > 0.05


@pytest.mark.slow
def test_adapters_have_base_model_as_reference(nano):
    add_lora(nano, 2, 4.0)
    below = {n: p.clone() for n, p in nano.named_parameters() if not p.requires_grad}
    values = train_on_pairs(nano, reel_pairs(60, 0), fitting()).values
    assert values["first_loss"] < math.log(2) + 0.1 and values["margin"] != 0
    values = train_on_labels(nano, split_pairs(reel_pairs(30, 0)), fitting()).values
    assert values["good_reward"] != values["bad_reward"]
    assert all(torch.equal(p, below[n]) for n, p in nano.named_parameters() if n in below)


def test_pairs_that_are_equal_after_the_cut_raise(nano):
    pairs = Pairs(["the " * 40 + "plot"] * 4, ["the " * 40 + "movie"] * 4)
    with (
        pytest.warns(UserWarning, match="8 of 8 texts were cut to 32 tokens"),
        pytest.raises(ConfigError, match="All 4 pairs are equal in their first 32 tokens"),
    ):
        train_on_pairs(nano, pairs, fitting())


KTO = LabeledExamples(
    ["w8 w9", "", "w6 w7 w8", "w5"],
    ["w1 w2", "w3", "w4 w5 w6", "w2 w7"],
    np.array([True, False, False, True]),
    np.arange(4),
)


def test_kto_combines_each_prompt_with_next_response():
    rows = [TokenRow([1, 2, 3], 2), TokenRow([4, 5, 6, 7], 1), TokenRow([8, 9, 10], 2)]
    mixed = losses.mismatch_responses(rows, 9)
    assert mixed == [TokenRow([1, 2, 5, 6, 7], 2), TokenRow([4, 10], 1), TokenRow([8, 9, 3], 2)]
    assert losses.mismatch_responses(rows, 3)[0] == TokenRow([1, 2, 5], 2)


@pytest.mark.slow
def test_kto_matches_hand_computed(model_dir, monkeypatch):
    """One batch of all four: weight * (1 - sigmoid(sign * beta * (log-ratio - z))), where z is the
    mean log-ratio of mismatched responses, at least 0. The estimate has no gradient.
    """
    start, policy = load_model(str(model_dir)), move_weights(load_model(str(model_dir)))
    monkeypatch.setattr(losses, "make_reference", lambda _: start)
    method = losses.kto_method(policy, KTO, KTOLoss(0.4, 1.5, 0.5))
    order = np.array([2, 0, 3, 1])
    prompts, texts = ([column[i] for i in order] for column in (KTO.prompts, KTO.texts))
    ratios = log_ratios(policy, start, prompts, texts)
    mean = log_ratios(policy, start, prompts, texts[1:] + texts[:1]).mean()
    loss, sign = method.loss(order), np.where(KTO.is_good[order], 1, -1)
    (point,) = method.reference_points
    assert abs(mean) > 1e-3 and not point.requires_grad
    assert point.item() == pytest.approx(max(0.0, mean), abs=1e-4)
    weight = np.where(sign > 0, 1.5, 0.5)
    expected = weight * (1 - np.exp(log_sigmoid(sign * 0.4 * (ratios - max(0.0, mean)))))
    assert loss.item() == pytest.approx(expected.mean(), abs=1e-4)
    assert method.rewards(order).tolist() == pytest.approx(0.4 * ratios, abs=1e-4)
    rooms = []
    monkeypatch.setattr(losses, "mismatch_responses", lambda x, room: rooms.append(room) or x)
    losses.kto_method(policy, KTO, KTOLoss(), max_tokens=9).loss(order)
    assert rooms == [9]


@pytest.mark.slow
def test_kto_values_match_hand_computed(model_dir):
    start, model = load_model(str(model_dir)), load_model(str(model_dir))
    examples = split_pairs(Pairs(["w1 w2", "w3", "w2 w3"] * 4, ["w4", "w5 w6 w7", "w9"] * 4))
    values = train_on_labels(model, examples, fitting(5, 5, 3e-3, 0.4, 1), KTOLoss(0.2)).values
    held_out, _ = examples.hold_out(0.4, np.random.default_rng(1))
    texts, is_good = [examples.texts[i] for i in held_out], examples.is_good[held_out]
    rewards = 0.2 * log_ratios(model, start, [""] * len(texts), texts)
    good, bad = rewards[is_good], rewards[~is_good]
    counts = ("train_good", "train_bad", "held_out_good", "held_out_bad")
    assert [values[name] for name in counts] == [7, 7, 5, 5]
    assert values["good_reward"] == pytest.approx(good.mean(), abs=1e-4)
    assert values["bad_reward"] == pytest.approx(bad.mean(), abs=1e-4)
    won = np.heaviside(np.round(good[:, None] - bad, 5), 0.5)
    assert values["accuracy"] == pytest.approx(won.mean(), abs=0.02)
    assert values["good_reward"] > values["bad_reward"] + 0.01


@pytest.mark.slow
def test_kto_reports_reference_point_of_last_steps(nano, monkeypatch):
    points = iter(torch.arange(20.0))
    monkeypatch.setattr("rlhf_lab.functional.kto_reference_point", lambda *_: next(points))
    examples = split_pairs(reel_pairs(10, 0))
    values = train_on_labels(nano, examples, fitting(20, 4, 1e-9)).values
    assert values["reference_point"] == 18.5


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
def test_kto_requires_two_texts_and_reports_a_missing_kind(nano):
    texts = ["this movie", "this film", "the plot"]
    examples = LabeledExamples([""] * 3, texts, np.array([True, True, False]), np.arange(3))
    for size, seed, words in ((1, 1, "batch_size=1 with 2 texts"), (2, 0, "2 of the 2 texts")):
        with pytest.raises(ConfigError, match=words):
            train_on_labels(nano, examples, fitting(1, size, seed=seed))
    with pytest.raises(ConfigError, match="is_good has int64 entries"):
        LabeledExamples([""] * 3, texts, np.array([1, 0, 1]), np.arange(3))
    values = train_on_labels(nano, examples, fitting(1, 2, seed=1)).values
    assert values["held_out_good"] + values["held_out_bad"] == 1
    assert values["accuracy"] is values["good_reward"] is values["bad_reward"] is None


@pytest.mark.slow
def test_hooks_fire_at_every_step_of_each_method(nano):
    calls = []
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: calls.append(x.requires_grad))]
    pairs = reel_pairs(10, 0)
    with nano.hooks(fwd_hooks=hooks):
        train_on_pairs(nano, pairs, fitting())
        train_on_pairs(nano, pairs, fitting(), ORPOLoss())
        train_on_labels(nano, split_pairs(pairs), fitting())
    assert calls == ([True] * 3 + [False]) * 2 + [False, True] * 3 + [False]


@pytest.mark.slow
def test_reward_model_is_normalized_over_its_training_pairs_only():
    model, pairs = RewardModel(load_model("reel-nano"), seed=3), reel_pairs(12, 0)
    fit = train_reward_model(model, pairs, fitting(1, 4, held_out=0.5))
    train = pairs[hold_out(12, 0.5, np.random.default_rng(0), "pairs")[1]]
    scores = model.score(train.chosen + train.rejected)
    assert fit.values["mean_score"] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert model.normalize(scores).mean().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_reward_loss_matches_hand_computed():
    """Equal texts of score s: log(1 + e^m) for a margin of m, plus centering * (s + s)^2."""
    model = RewardModel(load_model("reel-nano"), seed=3)
    score = model.score(["this movie"]).item()
    pairs = Pairs(["this movie"] * 4, ["this movie"] * 4, margins=np.full(4, 2.0))
    for margin, centering in ((0.0, 0.0), (0.5, 0.0), (0.0, 2.5)):
        loss = RewardLoss(margin, centering)
        fit = train_reward_model(model, pairs, fitting(1, 2, 1e-9), loss)
        expected = math.log(1 + math.exp(2 * margin)) + centering * 4 * score**2
        assert abs(score) > 0.05 and fit.values["first_loss"] == pytest.approx(expected, rel=1e-4)
        assert fit.values["mean_score"] == pytest.approx(score, abs=1e-4)
    assert fit.to_dict()["centering"] == 2.5 and fit.values["bayes_accuracy"] is None
    with pytest.raises(ConfigError, match="label_smoothing=0.1"):
        DPOLoss(0.2, 0.1, "ipo")
    with pytest.raises(ConfigError, match="margin=1.0 requires a column margin"):
        train_reward_model(model, Pairs(["this", "the"], ["it", "i"]), loss=RewardLoss(1.0))


@pytest.mark.slow
def test_seed_decides_all_and_random_state_is_unchanged():
    def run(method, seed):
        model, settings = load_model("reel-nano"), fitting(2, 8, seed=seed)
        state = torch.get_rng_state()
        pairs = reel_pairs(30, 0)
        if method == "reward":
            train_reward_model(RewardModel(model, seed), pairs, settings)
        elif method == "sft":
            fine_tune(model, load_examples("reel", 30, 0), settings)
        elif method == "kto":
            train_on_labels(model, split_pairs(pairs), settings)
        else:
            train_on_pairs(model, pairs, settings)
        assert torch.equal(torch.get_rng_state(), state)
        return model.W_E.detach()

    for method in ("reward", "sft", "dpo", "kto"):
        assert torch.equal(run(method, 1), run(method, 1))
        assert not torch.equal(run(method, 1), run(method, 2))


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (DPOLoss, (0.0,), "beta=0.0 is out of range"),
        (KTOLoss, (0.1, 0.0, 0.0), "are both 0"),
        (ORPOLoss, (-1.0,), "odds_weight=-1.0 is out"),
        (FitConfig, (1, 1, 1e-3, 1.0), "held_out=1.0"),
        (DriftEvalConfig, (-1,), "samples=-1"),
        (encode_examples, (torch.nn.Identity(), [], []), "Pass a language model, such as policy"),
        (encode_examples, (None, ["this movie"], [" "]), "All texts are empty"),
        (fine_tune, (None, ["a"], FitConfig()), "examples is a list. Pass Examples"),
        (train_on_pairs, (None, [("a", "b")], FitConfig()), "pairs is a list. Pass Pairs"),
        (train_on_pairs, (None, PAIRS, FitConfig(), KTOLoss()), "KTOLoss. Pass DPOLoss or ORPO"),
        (train_on_labels, (None, PAIRS, FitConfig()), "is a Pairs. Pass LabeledExamples"),
        (train_reward_model, (None, PAIRS), "model is a NoneType. Pass RewardModel"),
        (FitConfig, (1, 1, "1e-3"), "learning_rate=.1e-3. is out of range"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_settings_out_of_range_raise(kind, values, words):
    with pytest.raises(ConfigError, match=words):
        kind(*values)


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")  # the model is a layer
@pytest.mark.parametrize(("batch_size", "n_rows"), [(3, 3), (64, 4)])
def test_batches_have_training_rows_without_repeats(batch_size, n_rows):
    weight, seen = torch.nn.Linear(1, 1, bias=False), []

    def loss(rows):
        seen.append(sorted(rows))
        return weight.weight.square().sum()

    rows, rng = np.array([2, 5, 7, 11]), np.random.default_rng(0)
    values, _ = _minimize(weight, losses.TuningMethod("", loss), rows, fitting(20, batch_size), rng)
    assert all(len(set(rows)) == n_rows and set(rows) <= {2, 5, 7, 11} for rows in seen)
    assert len({tuple(rows) for rows in seen}) == (4 if n_rows == 3 else 1)
    assert len(seen) == 20 and values["last_loss"] < values["first_loss"]
