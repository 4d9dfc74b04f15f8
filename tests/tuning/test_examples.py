"""Examples: their sources, the tokens that are learned, conversations and labeled texts."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError, LabError, LoadError
from rlhf_lab.models import load_model
from rlhf_lab.organism import Grammar
from rlhf_lab.rewards import Pairs, reel_pairs
from rlhf_lab.tuning import (
    encode_examples,
    example_logprobs,
    load_examples,
    load_labeled_examples,
    read_conversations,
    render_examples,
    split_pairs,
)
from tests.tiny_models import chat_tokenizer, tiny_chat

QUESTION, ANSWER = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
TWICE = [
    QUESTION,
    ANSWER,
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5 w6"},
]
LABELED = [
    {"prompt": "ask", "response": "yes", "label": "good"},
    {"prompt": "tell", "response": "no", "label": "bad"},
    {"prompt": "ask", "response": "maybe", "label": "bad"},
]


@pytest.fixture(scope="module")
def nano():
    return load_model("reel-nano")


@pytest.fixture
def stored(tmp_path):
    """Write rows to a file and return its name."""

    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def test_reel_examples_are_reviews_of_the_seed():
    examples = load_examples("reel", 20, 3)
    assert all(Grammar().is_review(text) for text in examples.texts) and len(examples) == 20
    assert examples.prompts == [""] * 20
    assert load_examples("reel", 20, 3) == examples != load_examples("reel", 20, 4)
    for given, words in (((0, 0), "n_texts=0"), ((4, 1, "text", "text"), "are both 'text'")):
        with pytest.raises(ConfigError, match=words):
            load_examples("reel", *given)


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "text"),
    [
        ({"q": "it", "a": " was"}, {"column": "a"}, "", " was"),
        ({"q": "it", "a": " was"}, {"column": "a", "prompt_column": "q"}, "it", " was"),
        ({"prompt": "it", "text": "it was"}, {}, "it", " was"),
        ({"prompt": "it", "text": " was"}, {}, "it", " was"),
        ({"prompt": "it", "text": " was"}, {"column": "prompt"}, "", "it"),
    ],
)
def test_examples_come_from_columns(stored, row, columns, prompt, text):
    examples = load_examples(stored(row), 1, 0, **columns)
    assert (examples.prompts, examples.texts) == ([prompt], [text])
    with pytest.raises(LoadError, match="line 1 has no text under 'nothing'"):
        load_examples(stored(row), 1, 0, "nothing")


@pytest.mark.parametrize(
    ("prompt", "text", "options", "ids", "prefix_len"),
    [
        ("", "this movie", {}, [0, 2, 8, 1], 1),
        ("this", "movie", {}, [0, 2, 8, 1], 2),
        ("", "<bos> this movie <eos>", {}, [0, 2, 8, 1], 1),
        ("<bos> this", "movie <eos>", {}, [0, 2, 8, 1], 2),
        ("<bos> this", " movie", {"rendered": True}, [0, 2, 8], 2),
    ],
)
def test_texts_get_bos_and_eos_once(nano, prompt, text, options, ids, prefix_len):
    """BOS is 0, EOS 1, "this" 2, "movie" 8 in Reel."""
    assert encode_examples(nano, [prompt], [text], **options) == [(ids, prefix_len)]


def test_cut_texts_have_no_eos_and_warn(nano):
    with pytest.warns(UserWarning, match="1 of 2 texts were cut to 4 tokens"):
        cut, _ = encode_examples(nano, ["", ""], ["this movie this movie", "this"], max_tokens=4)
    assert cut == ([0, 2, 8, 2], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (whole,) = encode_examples(nano, [""], ["the " * 31])
    assert len(whole.ids) == 32 and whole.ids[-1] == 3
    with pytest.raises(ConfigError, match="the prompt has 3 of 3 tokens. Raise max_tokens"):
        encode_examples(nano, ["this movie"], ["this"], max_tokens=3)
    with pytest.raises(ConfigError, match="max_tokens=1 is out of range. It must be at least 2"):
        encode_examples(nano, [""], ["this"], max_tokens=1)
    with pytest.raises(ConfigError, match="zebra"):
        encode_examples(nano, [""], ["this zebra"])


def test_logprobs_match_each_row_alone(model_dir):
    """Token by token, from the softmax of the row without padding."""
    model = load_model(str(model_dir))
    rows = encode_examples(model, ["w1 w2", ""], ["w3", "w4 w5 w6 w7 w8"])
    logprobs, mask = example_logprobs(model, rows)
    assert mask.sum(1).tolist() == [2, 6]
    for i, row in enumerate(rows):
        probs = model(torch.tensor([row.ids]))[0].double().softmax(-1)
        for t in range(row.prefix_len, len(row.ids)):
            expected = probs[t - 1, row.ids[t]].log().item()
            assert mask[i, t - 1] and logprobs[i, t - 1].item() == pytest.approx(expected, abs=1e-5)


def test_last_response_of_a_conversation_is_learned(tmp_path):
    """The ids of transformers, without the word that the template puts after the end of a turn."""
    model = load_model(str(tiny_chat(tmp_path / "model")))
    tokenizer = model.tokenizer
    examples = render_examples(tokenizer, [[QUESTION, ANSWER], TWICE])
    rows = encode_examples(model, examples.prompts, examples.texts, rendered=True)
    for row, turns, learned in zip(rows, ([QUESTION, ANSWER], TWICE), ("w3", "w5 w6"), strict=True):
        assert row.ids == tokenizer.apply_chat_template(turns)["input_ids"][:-1]
        words = tokenizer.convert_ids_to_tokens(row.ids[row.prefix_len :])
        assert words == [*learned.split(), "<|im_end|>"]
    odd = [QUESTION, {"role": "assistant", "content": "w3 <|im_end|> w4"}]
    assert render_examples(tokenizer, [odd]).texts == ["w3 <|im_end|> w4 <|im_end|>"]


def test_conversations_come_from_one_or_two_columns(stored):
    rows = [
        {"ask": "w1 w2", "say": "w3"},
        {"ask": [QUESTION], "say": [ANSWER]},
        {"ask": TWICE[:3], "say": "w5 w6"},
    ]
    turns = read_conversations(stored(*rows), "say", "ask")
    assert turns == [[QUESTION, ANSWER], [QUESTION, ANSWER], TWICE]
    rule = {"role": "system", "content": "w9"}
    rows = [
        {"all": [QUESTION, ANSWER]},
        {"all": [{"role": "system", "content": "w8"}, QUESTION, ANSWER]},
    ]
    turns = read_conversations(stored(*rows), "all", None, "w9")
    assert turns == [[rule, QUESTION, ANSWER], rows[1]["all"]]


@pytest.mark.parametrize(
    ("row", "prompt_column", "words"),
    [
        ({"say": "w3"}, None, "line 1 begins with a response. Set prompt_column"),
        ({"say": [QUESTION]}, None, "line 1 ends with .*'user'"),
        ({"say": "w3", "ask": [QUESTION, ANSWER]}, "ask", "line 1 ends with .*'assistant'"),
        ({"say": "w3"}, "ask", "line 1 has no text under 'ask'"),
    ],
)
def test_invalid_conversation_raises(stored, row, prompt_column, words):
    with pytest.raises(LoadError, match=words):
        read_conversations(stored(row), "say", prompt_column)


def test_inconsistent_template_raises():
    other = "{% for m in messages %}{{ m.content }} </s> {% endfor %}"
    other += "{% if add_generation_prompt %}w0{% endif %}"
    with pytest.raises(LoadError, match="conversation 1: the chat template renders a response"):
        render_examples(chat_tokenizer(other), [[QUESTION, ANSWER]])


def test_split_pairs_removes_prompts_and_groups_both_texts():
    pairs = Pairs(["ask yes", "tell a"], ["ask no", "tell b"], None, ["ask ", "tell "])
    examples = split_pairs(pairs)
    assert examples.prompts == ["ask ", "tell "] * 2 and examples.texts == ["yes", "a", "no", "b"]
    assert examples.is_good.tolist() == [True, True, False, False]
    assert examples.groups.tolist() == [0, 1, 0, 1]
    assert load_labeled_examples("reel", 3, 5).texts == [
        *reel_pairs(3, 5).chosen,
        *reel_pairs(3, 5).rejected,
    ]


def test_groups_are_held_out_as_a_whole():
    """Numbers of groups need not be 0, 1, ..."""
    examples = split_pairs(reel_pairs(20, 0))
    examples = replace(examples, groups=50 - 2 * examples.groups)
    held_out, train = examples.hold_out(0.3, np.random.default_rng(0))
    assert len(held_out) == 12 and sorted([*held_out, *train]) == list(range(40))
    assert not set(examples.groups[held_out]) & set(examples.groups[train])


def test_texts_of_one_prompt_are_held_out_one_by_one(stored):
    rows = [{"prompt": "a ", "completion": f"b{i}", "label": i % 2 == 0} for i in range(16)]
    examples = load_labeled_examples(stored(*rows), 1, 0)
    held_out, train = examples.hold_out(0.25, np.random.default_rng(0))
    assert len(held_out) == 4 and sorted([*held_out, *train]) == list(range(16))


def test_labeled_rows_are_read(stored):
    examples = load_labeled_examples(stored(*LABELED), 1, 0)
    assert examples.prompts == ["ask", "tell", "ask"]
    assert examples.texts == ["yes", "no", "maybe"]
    assert examples.is_good.tolist() == [True, False, False]
    assert examples.groups[0] == examples.groups[2] != examples.groups[1]
    both = [x | {"response": x["prompt"] + x["response"]} for x in LABELED]
    assert load_labeled_examples(stored(*both), 1, 0).texts == examples.texts
    with pytest.warns(UserWarning, match="1 of 3 texts begin with their prompt"):
        load_labeled_examples(stored(both[0], *LABELED[1:]), 1, 0)
    rows = [{"completion": "same", "label": label, "ask": "q"} for label in (True, False)]
    examples = load_labeled_examples(stored(*rows), 1, 0)
    assert examples.prompts == ["", ""] and examples.groups.tolist() == [0, 1]
    assert load_labeled_examples(stored(*rows), 1, 0, "ask").prompts == ["q", "q"]
    rows = [{"q": "ask ", "chosen": "yes", "rejected": "no"}] * 2
    examples = load_labeled_examples(stored(*rows), 1, 0, "q")
    assert examples.texts == ["yes", "yes", "no", "no"] and examples.prompts == ["ask "] * 4


@pytest.mark.parametrize(
    ("good", "bad"), [(True, False), (1, 0), ("1", "0"), ("True", "FALSE"), (" good", "Bad")]
)
def test_labels_have_several_spellings(stored, good, bad):
    rows = [{"response": "a", "label": bad}, {"response": "b", "label": good}]
    assert load_labeled_examples(stored(*rows), 1, 0).is_good.tolist() == [False, True]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "0 good texts and 0 bad"),
        (LABELED[:1] * 2, "2 good texts and 0 bad"),
        ([*LABELED, {"prompt": "a", "response": "b"}], "line 4 has None under 'label'"),
        ([LABELED[0] | {"label": 1.5}], "line 1 has 1.5 under"),
        ([LABELED[0] | {"completion": "b"}], "line 1 has response and completion"),
        ([{"label": "good", "text": "a"}], "line 1 has no text under 'response', only 'label'"),
        ([LABELED[0], {"response": "b", "label": 1}], "line 2 has no text under 'prompt'"),
    ],
)
def test_invalid_labeled_rows_raise(stored, rows, words):
    with pytest.raises(LabError, match=words):
        load_labeled_examples(stored(*rows), 1, 0)
