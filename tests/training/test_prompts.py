"""Prompts: files of three kinds, a seeded order, unequal lengths, groups, and resume."""

import json

import pytest

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.training import RLHFTrainer
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


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "line 2 has no text under 'prompt'"),
        ("b.jsonl", b'{"prompt"\n', "line 1: Expecting"),
        ("c.csv", b"text\nhello\n", "line 2 has no text under 'prompt'"),
        ("d.txt", b"\xff\xfe\x00", "not a valid .txt file in UTF-8"),
    ],
)
def test_file_without_prompts_raises(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=complaint) as error:
        load_prompts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_trainer_rejects_unusable_prompts(reel_args, tmp_path):
    with pytest.raises(LoadError, match="prompts=.* cannot be read"):
        RLHFTrainer(reel_args(prompts=str(tmp_path / "none.txt")))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="contains no prompt"):
        RLHFTrainer(reel_args(prompts=str(tmp_path / "empty.txt")))
    with pytest.raises(ConfigError, match="must be a list of texts"):
        RLHFTrainer(reel_args(), prompts="the film")
    with pytest.raises(ConfigError, match="exceeds the model's context"):
        RLHFTrainer(reel_args(), prompts=["the film", " ".join(["the"] * 100)])


def test_every_round_has_each_prompt_once_in_a_new_order():
    """The order has no state and depends on the seed."""
    order = deal(5, 0, 40, seed=3)
    rounds = [tuple(order[i : i + 5]) for i in range(0, 40, 5)]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in rounds) and len(set(rounds)) > 4
    assert sum((deal(5, start, 8, seed=3) for start in range(0, 40, 8)), []) == order
    assert deal(5, 0, 40, seed=4) != order


@pytest.mark.slow
def test_batch_of_prompts_of_unequal_length_starts_on_policy(make_trainer):
    """In pairs: four prompts, two responses each, one after the other."""
    trainer = make_trainer({"prompts": TEXTS}, top_k=5, samples_per_prompt=2, advantages="rloo")
    report = trainer.run_phase()
    samples = trainer.rollout_phase().samples
    prompts = [tuple(prompt) for prompt in samples.prompts()]
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) == 4
    assert not samples.prompt_mask.all()
    assert report.kl_per_token == 0.0 and abs(report.ratio_first_minibatch - 1) < 1e-4
    assert trainer.prompt == max(trainer.prompts.tokens, key=len)


def test_list_of_one_prompt_equals_a_prefix(make_trainer):
    by_prefix, by_list = make_trainer(prefix="the film"), make_trainer({"prompts": ["the film"]})
    assert by_prefix.rollout_phase().texts == by_list.rollout_phase().texts
