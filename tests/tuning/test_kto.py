"""KTO: texts judged one by one, the estimate of the KL, what is reported, what is learned."""

import json
import math

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError, LabError
from rlhf_lab.fitting import FitConfig
from rlhf_lab.models import add_lora, load_model
from rlhf_lab.organism import REWARDS
from rlhf_lab.rewards import Pairs, reel_pairs
from rlhf_lab.tuning import (
    DriftEvalConfig,
    KTOLoss,
    LabeledExamples,
    encode_examples,
    load_labeled_examples,
    split_pairs,
    text_logprobs,
    train_on_labels,
)
from rlhf_lab.tuning.examples import TokenRow
from rlhf_lab.tuning.losses import mismatch_responses

FEW = FitConfig(steps=3, batch_size=8, learning_rate=1e-3, show_progress=False)
PROMPTS = ["w8 w9", "", "w6 w7 w8", "w5"]
TEXTS = ["w1 w2", "w3", "w4 w5 w6", "w2 w7"]
JUDGED = LabeledExamples(PROMPTS, TEXTS, np.array([True, False, False, True]), np.arange(4))


@pytest.fixture
def nano():
    return load_model("reel-nano")


def judged_pairs(n, seed=0):
    return split_pairs(reel_pairs(n, seed))


def shaken(model, seed):
    """A model with other weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return model


def test_each_prompt_goes_with_the_next_response():
    rows = [TokenRow([1, 2, 3], 2), TokenRow([4, 5, 6, 7], 1), TokenRow([8, 9, 10], 2)]
    found = mismatch_responses(rows, 9)
    assert found == [TokenRow([1, 2, 5, 6, 7], 2), TokenRow([4, 10], 1), TokenRow([8, 9, 3], 2)]
    assert mismatch_responses(rows, 3)[0] == TokenRow([1, 2, 5], 2)


@pytest.mark.slow
def test_the_loss_is_the_papers_text_by_text(model_dir, monkeypatch):
    """One step over all texts but the one held out; policy and reference differ from the start.

    Each log-ratio is taken on its own, one text and two models at a time; the batch's order, which
    decides who is put together with whom, is read where it is drawn.
    """
    start, model = load_model(str(model_dir)), shaken(load_model(str(model_dir)), 1)
    policy = shaken(load_model(str(model_dir)), 1)
    monkeypatch.setattr("rlhf_lab.tuning.losses.make_reference", lambda _: start)
    order = []

    class Noted(np.random.Generator):
        def choice(self, *args, **options):
            order.append(super().choice(*args, **options))
            return order[-1]

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Noted(np.random.PCG64(seed)))
    loss = KTOLoss(0.4, 1.5, 0.5)
    fitted = train_on_labels(model, JUDGED, FitConfig(1, 3, 1e-12, 0.2, 2, False), loss)

    def log_ratio(prompt, text):
        rows = encode_examples(policy, [prompt], [text])
        with torch.no_grad():
            return (text_logprobs(policy, rows) - text_logprobs(start, rows)).item()

    (batch,) = order
    following = [*batch[1:], batch[0]]
    mixed = [log_ratio(PROMPTS[i], TEXTS[j]) for i, j in zip(batch, following, strict=True)]
    point = max(0.0, sum(mixed) / 3)
    assert abs(sum(mixed)) > 1e-3
    missing = []
    for i in batch:
        sign, weight = (1, 1.5) if JUDGED.is_good[i] else (-1, 0.5)
        value = 1 / (1 + math.exp(-sign * 0.4 * (log_ratio(PROMPTS[i], TEXTS[i]) - point)))
        missing.append(weight * (1 - value))
    assert fitted.reference_point == pytest.approx(point, abs=1e-4)
    assert fitted.first_loss == pytest.approx(sum(missing) / 3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 5])
def test_the_figures_are_those_of_the_difference_from_the_start(model_dir, batch_size):
    start, model = load_model(str(model_dir)), load_model(str(model_dir))
    pairs = Pairs(["w1 w2", "w3", "w2 w3"] * 4, ["w4", "w5 w6 w7", "w9"] * 4)
    judged, fitting = split_pairs(pairs), FitConfig(5, batch_size, 3e-3, 0.4, 1, False)
    fitted = train_on_labels(model, judged, fitting, KTOLoss(0.2))
    held_out, train = judged.hold_out(0.4, np.random.default_rng(1))
    rewards = {True: [], False: []}
    for i in held_out:
        rows = encode_examples(model, [""], [judged.texts[i]])
        with torch.no_grad():
            gap = text_logprobs(model, rows) - text_logprobs(start, rows)
        rewards[bool(judged.is_good[i])].append(0.2 * gap.item())
    good, bad = rewards[True], rewards[False]
    assert (fitted.held_out_good, fitted.held_out_bad) == (len(good), len(bad)) == (5, 5)
    assert (fitted.train_good, fitted.train_bad) == (7, 7) and len(train) == 14
    assert fitted.good_reward == pytest.approx(sum(good) / 5, abs=1e-4)
    assert fitted.bad_reward == pytest.approx(sum(bad) / 5, abs=1e-4)
    won = [(g > b + 1e-5) + 0.5 * (abs(g - b) <= 1e-5) for g in good for b in bad]
    assert fitted.accuracy == pytest.approx(sum(won) / 25, abs=0.02)
    assert fitted.good_reward > fitted.bad_reward + 0.01
    assert fitted.last_loss < fitted.first_loss


@pytest.mark.slow
@pytest.mark.parametrize("loss", [KTOLoss(0.1), KTOLoss(0.3, 0.5, 1.0)])
def test_on_reel_it_raises_true_reward_and_learns_to_judge(nano, loss):
    """400 texts of 2,000 held out. Untrained, half of the comparisons would be right."""
    fitting = FitConfig(60, 16, 3e-4, 0.2, 0, False)
    settings = {"drift_eval": DriftEvalConfig(96, 28), "true_reward_fn": REWARDS["true_reward"]}
    fitted = train_on_labels(nano, judged_pairs(1000), fitting, loss, **settings)
    assert fitted.accuracy > 0.62 and fitted.good_reward > fitted.bad_reward
    assert fitted.drift.true_reward_after > fitted.drift.true_reward_before + 0.1
    assert fitted.drift.kl_per_sequence > 0.05


def test_the_reference_point_is_that_of_the_last_steps(nano, monkeypatch):
    given = iter(torch.arange(20.0))
    monkeypatch.setattr("rlhf_lab.tuning.losses.kto_reference_point", lambda *_: next(given))
    fitted = train_on_labels(nano, judged_pairs(10), FitConfig(20, 4, 1e-9, show_progress=False))
    assert fitted.reference_point == 18.5


def test_adapters_have_the_model_below_them_as_reference(nano):
    add_lora(nano, 2, 4.0)
    below = {n: p.clone() for n, p in nano.named_parameters() if not p.requires_grad}
    fitted = train_on_labels(nano, judged_pairs(30), FEW)
    assert fitted.first_loss == pytest.approx(0.5, abs=0.05)
    assert fitted.good_reward != fitted.bad_reward
    assert all(torch.equal(p, below[n]) for n, p in nano.named_parameters() if n in below)


def test_the_estimate_of_the_kl_has_no_gradient(nano):
    heard = []
    hooks = [("blocks.0.hook_resid_post", lambda x, hook: heard.append(x.requires_grad))]
    with nano.hooks(fwd_hooks=hooks):
        train_on_labels(nano, judged_pairs(10), FitConfig(3, 8, 1e-3, 0.2, 0, False))
    assert heard == [False, True] * 3 + [False]


@pytest.mark.slow
def test_a_seed_decides_all():
    def run(seed):
        model = load_model("reel-nano")
        train_on_labels(model, judged_pairs(15), FitConfig(2, 8, 1e-3, 0.2, seed, False))
        return model.W_E.detach()

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))


def test_where_one_kind_is_missing_among_those_held_out_nothing_is_compared(nano):
    texts = ["this movie", "the plot", "it was good"]
    judged = LabeledExamples([""] * 3, texts, np.array([True, True, False]), np.array([0, 1, 1]))
    fitting = next(
        FitConfig(1, 2, 1e-4, 0.5, seed, False)
        for seed in range(20)
        if list(judged.hold_out(0.5, np.random.default_rng(seed))[0]) == [0]
    )
    fitted = train_on_labels(nano, judged, fitting)
    assert (fitted.accuracy, fitted.good_reward, fitted.bad_reward) == (None, None, None)
    assert "1 good and 0 bad held-out texts: none of one kind" in "\n".join(fitted.summary())


TWO = LabeledExamples([""] * 2, ["this", "movie"], np.array([True, False]), np.arange(2))


@pytest.mark.parametrize(("size", "judged", "texts"), [(1, judged_pairs(4), 4), (8, TWO, 1)])
def test_a_batch_of_one_has_no_other_response_and_is_refused(nano, size, judged, texts):
    with pytest.raises(ConfigError, match=f"batch_size={size} with {texts} texts"):
        train_on_labels(nano, judged, FitConfig(1, size, 1e-4, 0.5, 0, False))


def test_texts_of_a_group_are_held_out_together():
    judged = judged_pairs(20)
    held_out, train = judged.hold_out(0.3, np.random.default_rng(0))
    assert len(held_out) == 12 and sorted([*held_out, *train]) == list(range(40))
    assert not set(judged.groups[held_out]) & set(judged.groups[train])


def test_texts_of_one_prompt_are_held_out_one_by_one(tmp_path):
    rows = [{"prompt": "a ", "completion": f"b{i}", "label": i % 2 == 0} for i in range(16)]
    examples = load_labeled_examples(written(tmp_path, rows), 1, 0)
    held_out, train = examples.hold_out(0.25, np.random.default_rng(0))
    assert len(held_out) == 4 and sorted([*held_out, *train]) == list(range(16))


def test_pairs_are_taken_apart_without_their_prompts():
    pairs = Pairs(["ask yes", "tell a"], ["ask no", "tell b"], None, ["ask ", "tell "])
    found = split_pairs(pairs)
    assert found.prompts == ["ask ", "tell "] * 2 and found.texts == ["yes", "a", "no", "b"]
    assert found.is_good.tolist() == [True, True, False, False]
    assert found.groups.tolist() == [0, 1, 0, 1]
    assert split_pairs(Pairs(["a"], ["b"])).prompts == ["", ""]


ROWS = [
    {"prompt": "ask", "response": "yes", "label": "good"},
    {"prompt": "tell", "response": "no", "label": "bad"},
    {"prompt": "ask", "response": "maybe", "label": "bad"},
]


def written(tmp_path, rows, name="x.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_file_of_judged_texts_is_read_as_it_stands(tmp_path):
    found = load_labeled_examples(written(tmp_path, ROWS), 1, 0)
    assert found.prompts == ["ask", "tell", "ask"] and found.texts == ["yes", "no", "maybe"]
    assert found.is_good.tolist() == [True, False, False]
    assert found.groups[0] == found.groups[2] != found.groups[1]


def test_rows_without_prompts_have_none_and_stand_alone(tmp_path):
    rows = [{"completion": "same", "label": True}, {"completion": "same", "label": False}]
    found = load_labeled_examples(written(tmp_path, rows), 1, 0)
    assert found.prompts == ["", ""] and found.groups.tolist() == [0, 1]
    named = [row | {"ask": "q"} for row in rows]
    assert load_labeled_examples(written(tmp_path, named), 1, 0, "ask").prompts == ["q", "q"]


@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), ("1", "0"), ("True", "FALSE"), (" good", "Bad")]
)
def test_labels_have_several_spellings(tmp_path, good, bad):
    rows = [{"response": "a", "label": bad}, {"response": "b", "label": good}]
    assert load_labeled_examples(written(tmp_path, rows), 1, 0).is_good.tolist() == [False, True]


def test_a_table_is_read_too(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("label,response\ngood,a fine one\n0,b\n", encoding="utf-8")
    found = load_labeled_examples(str(path), 1, 0)
    assert (found.texts, found.is_good.tolist()) == (["a fine one", "b"], [True, False])


def test_a_file_of_pairs_is_taken_apart(tmp_path):
    rows = [{"q": "ask ", "chosen": "yes", "rejected": "no"}] * 2
    found = load_labeled_examples(written(tmp_path, rows), 1, 0, "q")
    assert found.texts == ["yes", "yes", "no", "no"] and found.prompts == ["ask "] * 4
    assert found.is_good.tolist() == [True, True, False, False]


def test_reels_pairs_are_taken_apart():
    found, pairs = load_labeled_examples("reel", 3, 5), reel_pairs(3, 5)
    assert found.texts == pairs.chosen + pairs.rejected


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "0 good texts and 0 bad"),
        (ROWS[:1] * 2, "2 good texts and 0 bad"),
        (ROWS[1:], "0 good texts and 2 bad"),
        ([*ROWS, {"prompt": "a", "response": "b"}], "line 4 has None under 'label'"),
        ([ROWS[0] | {"label": "fine"}], "line 1 has 'fine' under 'label'"),
        ([ROWS[0] | {"label": 2}], "line 1 has 2 under"),
        ([ROWS[0] | {"label": 1.5}], "line 1 has 1.5 under"),
        ([ROWS[0] | {"label": ["good"]}], "line 1 has"),
        ([{"label": "good", "text": "a"}], "line 1 has no text under 'response', only 'label'"),
        ([ROWS[0], {"response": "b", "label": 1}], "line 2 has no text under 'prompt'"),
        ([3, 4], "line 1 has no text under 'response'"),
    ],
)
def test_rows_that_are_no_judged_texts_are_refused(tmp_path, rows, words):
    with pytest.raises(LabError, match=words) as caught:
        load_labeled_examples(written(tmp_path, rows), 1, 0)
    assert "\n" not in str(caught.value)


def test_a_prompt_column_that_is_not_there_is_named(tmp_path):
    with pytest.raises(LabError, match="line 1 has no text under 'q'"):
        load_labeled_examples(written(tmp_path, ROWS), 1, 0, "q")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0.0,), "beta=0.0 is out of range"),
        ((math.nan,), "beta=nan is out of range"),
        ((math.inf,), "beta=inf"),
        ((0.1, -1.0), "good_weight=-1.0 is out"),
        ((0.1, 1.0, math.nan), "bad_weight=nan is out"),
        ((0.1, math.inf), "good_weight=inf"),
    ],
)
def test_settings_that_the_loss_refuses_are_refused_at_the_door(values, words):
    with pytest.raises(ConfigError, match=words):
        KTOLoss(*values)
