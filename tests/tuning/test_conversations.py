"""Fine-tuning on conversations: the assistant's last turn is learned, and nothing else."""

import json

import pytest

from rlhf_lab.config import ChatArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.fitting import DriftEvalConfig, FitConfig
from rlhf_lab.models import load_model
from rlhf_lab.tuning import (
    Examples,
    KLMeter,
    encode_examples,
    example_logprobs,
    fine_tune,
    read_conversations,
    render_examples,
)
from tests.tiny_models import chat_tokenizer, tiny_chat

ASK, SAY = {"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}
TWICE = [ASK, SAY, {"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5 w6"}]
CHAT = ChatArgs(chat=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(tiny_chat(tmp_path_factory.mktemp("chat") / "model")))


def written(tmp_path, *rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def test_what_counts_is_the_last_answer_up_to_its_end(model):
    """The ids of transformers, less the word that the template puts behind the end of a turn."""
    tokenizer = model.tokenizer
    examples = render_examples(tokenizer, [[ASK, SAY], TWICE])
    rows = encode_examples(model, examples.prompts, examples.texts, rendered=True)
    for row, turns, learned in zip(rows, ([ASK, SAY], TWICE), ("w3", "w5 w6"), strict=True):
        whole = tokenizer.apply_chat_template(turns)["input_ids"]
        assert row.ids == whole[:-1] and row.ids.count(tokenizer.bos_token_id) == 1
        behind = tokenizer.convert_ids_to_tokens(row.ids[row.prefix_len :])
        assert behind == [*learned.split(), "<|im_end|>"]
    _, counts = example_logprobs(model, rows)
    assert counts.sum(1).tolist() == [2, 3]


def test_answers_and_prompts_may_stand_in_columns_of_their_own(tmp_path):
    rows = [
        {"ask": "w1 w2", "say": "w3"},
        {"ask": [ASK], "say": [SAY]},
        {"ask": TWICE[:3], "say": "w5 w6"},
    ]
    found = read_conversations(written(tmp_path, *rows), "say", "ask", CHAT)
    assert found == [[ASK, SAY], [ASK, SAY], TWICE]
    rule = {"role": "system", "content": "w9"}
    chat = ChatArgs(chat=True, system_prompt="w9")
    rows = [{"all": [ASK, SAY]}, {"all": [{"role": "system", "content": "w8"}, ASK, SAY]}]
    found = read_conversations(written(tmp_path, *rows), "all", None, chat)
    assert found == [[rule, ASK, SAY], rows[1]["all"]]


@pytest.mark.parametrize(
    ("row", "prompt_column", "complaint"),
    [
        ({"say": "w3"}, None, "line 1 begins with a response. Set prompt_column"),
        ({"say": [ASK]}, None, "line 1 ends with a message of 'user'"),
        ({"say": "w3", "ask": [ASK, SAY]}, "ask", "line 1 ends with a message of 'assistant'"),
        ({"say": "w3"}, "ask", "line 1 has no text under 'ask'"),
    ],
)
def test_a_row_without_an_answer_to_something_is_refused(tmp_path, row, prompt_column, complaint):
    with pytest.raises(LoadError, match=complaint):
        read_conversations(written(tmp_path, row), "say", prompt_column, CHAT)


def test_no_row_and_a_system_prompt_without_a_chat_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no conversation"):
        read_conversations(written(tmp_path), "say", None, CHAT)
    with pytest.raises(ConfigError, match="Set chat=True"):
        read_conversations(written(tmp_path), "say", None, ChatArgs(system_prompt="w1"))


def test_a_template_with_another_prompt_before_an_answer_is_refused():
    other = "{% for m in messages %}{{ m.content }} </s> {% endfor %}"
    other += "{% if add_generation_prompt %}w0{% endif %}"
    with pytest.raises(
        LoadError, match="conversation 1: the chat template renders a response after"
    ):
        render_examples(chat_tokenizer(other), [[ASK, SAY]])


def test_the_whole_answer_is_kept_where_it_names_the_end_itself():
    odd = [ASK, {"role": "assistant", "content": "w3 <|im_end|> w4"}]
    (text,) = render_examples(chat_tokenizer(), [odd]).texts
    assert text == "w3 <|im_end|> w4 <|im_end|>"


def test_own_texts_begin_with_the_prompts_as_rendered_and_end_with_the_turn(model):
    tokenizer = model.tokenizer
    examples = render_examples(tokenizer, [[ASK, SAY]])
    config = DriftEvalConfig(samples=32, gen_len=16)
    meter = KLMeter(model, examples.prompts, config, rendered=True)
    expected = tokenizer.apply_chat_template([ASK], add_generation_prompt=True)["input_ids"]
    assert meter.prompts == [expected] * 32
    samples = meter.sample()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ended = samples.tokens[:, samples.prefix_len :] == end
    assert (samples.mask.sum(1)[ended.any(1)] == ended.int().argmax(1)[ended.any(1)] + 1).all()
    assert ended.any()


@pytest.mark.slow
def test_fine_tuning_on_conversations_teaches_the_answer(tmp_path):
    model = load_model(str(tiny_chat(tmp_path / "model")))
    examples = render_examples(model.tokenizer, [[ASK, SAY], TWICE] * 4)
    assert isinstance(examples, Examples) and examples.rendered
    fitting = FitConfig(steps=30, batch_size=4, learning_rate=1e-2, held_out=0.25)
    fit = fine_tune(model, examples, fitting, drift_eval=DriftEvalConfig(samples=4, gen_len=4))
    assert fit.held_out_tokens in (4, 5, 6) and fit.loss_after < 0.3 * fit.loss_before
    assert fit.drift.samples == 4
