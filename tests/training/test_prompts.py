"""Prompts: files of three kinds, a seeded order, unequal lengths, groups, and resume."""

import json

import pytest

from rlhf_lab.training.prompts import deal, load_prompts

TEXTS = ["the film", "the script was", "this movie", "the acting was"]


@pytest.fixture
def files(tmp_path):
    """The same prompts as text, JSONL and CSV."""
    (tmp_path / "p.txt").write_text("\n".join(TEXTS[:2]) + "\n\n" + "\n".join(TEXTS[2:]))
    rows = [json.dumps({"id": i, "prompt": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "p.csv").write_text("prompt,id\n" + "".join(f'"{t}",1\n' for t in TEXTS))
    return tmp_path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
def test_text_jsonl_and_csv_have_the_same_prompts(files, kind):
    assert load_prompts(files / f"p.{kind}") == TEXTS


def test_column_and_number_of_words_select_prompts(files, movie_reviews):
    """Spaces between words become single; shorter texts stay."""
    (files / "titles.jsonl").write_text('{"title": "the film", "prompt": "no"}\n')
    assert load_prompts(files / "titles.jsonl", "title") == ["the film"]
    (files / "long.txt").write_text("the  film was long\nthis\n")
    assert load_prompts(files / "long.txt", words=2) == ["the film", "this"]
    assert load_prompts("movie-reviews:imdb", words=2) == ["a bad", "a fine", "a very"]


def test_every_round_has_each_prompt_once_in_a_new_order():
    """The order has no state and depends on the seed."""
    order = deal(5, 0, 40, seed=3)
    rounds = [tuple(order[i : i + 5]) for i in range(0, 40, 5)]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in rounds) and len(set(rounds)) > 4
    assert sum((deal(5, start, 8, seed=3) for start in range(0, 40, 8)), []) == order
    assert deal(5, 0, 40, seed=4) != order


def test_list_of_one_prompt_equals_a_prefix(make_trainer):
    by_prefix, by_list = make_trainer(prefix="the film"), make_trainer({"prompts": ["the film"]})
    assert by_prefix.rollout_phase().texts == by_list.rollout_phase().texts
