"""Preference pairs: files, datasets and Reel; judges compared with the truth."""

import math

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.organism import REWARDS, Grammar
from rlhf_lab.organism.rewards import true_log_odds
from rlhf_lab.rewards import Pairs, load_pairs, reel_pairs
from rlhf_lab.rewards.preference_eval import EDITS, judge, reading_of


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_pairs_of_files_and_the_hub_have_no_gaps(tmp_path, monkeypatch):
    rows = [{"chosen": "a", "rejected": "c"}, {"chosen": "d", "rejected": "f é"}]
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: rows)
    file = write(tmp_path / "x.csv", "rejected,id,chosen\nc,1,a\nf é,2,d\n")
    for got in (load_pairs(file, 0, 0), load_pairs("hub:some/data", 0, 0)):
        assert got.chosen == ["a", "d"] and got.rejected == ["c", "f é"]
        assert got.true_reward_gaps is got.bayes_accuracy() is got.true_reward_accuracy() is None
    for row, column in (("a", "rejected"), (" ,b", "chosen")):
        with pytest.raises(LoadError, match=f"line 2 .*'{column}'"):
            load_pairs(write(tmp_path / "x.csv", f"chosen,rejected\n{row}\n"), 0, 0)


@pytest.mark.parametrize("text", ["", '{"chosen": "a", "rejected": "a"}\n' * 2])
def test_pairs_without_preference_raise(tmp_path, text):
    with pytest.raises(ConfigError, match="no pair of different texts"):
        load_pairs(write(tmp_path / "x.jsonl", text), 0, 0)


def test_prompt_is_added_to_both_texts(tmp_path):
    lines = '{"prompt": "it was", "chosen": " good", "rejected": "it was bad"}\n' * 2
    path = write(tmp_path / "x.jsonl", lines)
    for column in ("prompt", None):
        pairs = load_pairs(path, 0, 0, column)
        assert pairs.chosen == ["it was good"] * 2 and pairs.rejected == ["it was bad"] * 2
        assert pairs[np.array([1])].prompts == ["it was"]
    with pytest.raises(LoadError, match="line 1 has no text under 'question'"):
        load_pairs(path, 0, 0, "question")


def test_margins_are_read_when_requested(tmp_path):
    table = "chosen,rejected,margin\na,b,1.5\nc,d,\n"
    path = write(tmp_path / "x.csv", table)
    assert load_pairs(path, 0, 0).margins is None
    with pytest.raises(LoadError, match="line 3 has no number under 'margin'"):
        load_pairs(path, 0, 0, with_margins=True)
    write(tmp_path / "x.csv", table.replace("c,d,", "c,d,2"))
    pairs = load_pairs(path, 0, 0, with_margins=True)
    assert pairs[np.array([1, 0])].margins.tolist() == [2.0, 1.5]


def test_accuracies_match_hand_computed():
    """Gaps log 3 and -log 9: the better text wins 3 times in 4 and 9 times in 10; mean .825."""
    pairs = Pairs(["x", "a", "b"], ["y", "c", "d"], np.array([9.0, math.log(3), -math.log(9)]))
    pairs = pairs[np.array([2, 1])]
    assert pairs.chosen == ["b", "a"] and pairs.rejected == ["d", "c"]
    assert pairs.bayes_accuracy() == pytest.approx(0.825) and pairs.true_reward_accuracy() == 0.5


@pytest.mark.usefixtures("no_type_checks")
def test_columns_become_lists_and_arrays_of_one_length():
    pairs = Pairs(np.array(["a", "xb"]), iter("cd"), [1.0, 2.0], ("", "x"), torch.tensor([0, 1]))
    assert pairs.chosen + pairs.rejected == ["a", "xb", "c", "xd"] and pairs.prompts == ["", "x"]
    assert pairs[np.array([1])].margins.tolist() == [1] and pairs.bayes_accuracy() > 0.7
    for other in (dict(rejected=["c"]), dict(margins=[1.0]), dict(prompts=[""] * 3)):
        with pytest.raises(ConfigError, match="columns have different lengths: {'chosen': 2, "):
            Pairs(**{"chosen": ["a", "b"], "rejected": ["c", "d"]} | other)
    with pytest.raises(ConfigError, match="rejected is a single text"):
        Pairs(["a", "b"], "ok")


def test_reel_pairs_have_gaps_and_margins_of_their_texts():
    pairs = reel_pairs(200, seed=1)
    p, q = (REWARDS["true_reward"](texts).double() for texts in (pairs.chosen, pairs.rejected))
    gaps = (p / (1 - p)).log() - (q / (1 - q)).log()
    np.testing.assert_allclose(pairs.true_reward_gaps, gaps.numpy(), atol=1e-2)
    assert (pairs.margins == pairs.true_reward_gaps.clip(min=0)).all()
    assert (pairs.true_reward_gaps < 0).any()
    assert reel_pairs(200, 1).chosen == pairs.chosen != reel_pairs(200, 2).chosen
    with pytest.raises(ConfigError, match="n_pairs=0"):
        load_pairs("reel", 0, 0)


def test_judge_matches_hand_computed():
    """Gaps log 3 and 0, true gaps log 3 and -log 3; the first text won both."""
    gaps, truth = torch.tensor([math.log(3), 0.0]), torch.tensor([math.log(3), -math.log(3)])
    result = judge(gaps, truth, torch.tensor([True, True]))
    assert result.accuracy == result.as_truth == pytest.approx(0.75)  # a win, and a tie
    assert result.error == pytest.approx((0 + 0.25) / 2)
    assert result.slope == pytest.approx(0.5)
    assert result.nll == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    assert result.best_nll == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)
    truth, wins = torch.tensor([2.0, -1.0, 0.0]), torch.tensor([True, False, True])
    best, worst = judge(truth, truth, wins), judge(-truth, truth, wins)  # without the true tie
    assert (best.as_truth, best.error, best.slope) == (1.0, 0.0, pytest.approx(1.0))
    assert worst.as_truth == 0.0 and worst.slope == pytest.approx(-1.0)


def test_scores_change_with_each_word_as_they_should():
    texts = Grammar().sample(20, np.random.default_rng(0)).texts()
    changes = reading_of(lambda texts: 0.5 * torch.from_numpy(true_log_odds(texts)), texts)
    assert changes.keys() == EDITS.keys()
    for change, exact in changes.values():
        assert change.tolist() == pytest.approx([exact / 2] * len(texts))
    popcorn = lambda texts: torch.tensor([-float("popcorn" in text) for text in texts])
    changes = reading_of(popcorn, [text for text in texts if "popcorn" not in text])
    assert changes["tag to popcorn"][0].mean() == 1.0  # its size, since the truth is unchanged
    assert changes["verb"][0].abs().max() == 0.0
