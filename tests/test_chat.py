"""Chats: reading and rendering conversations, and their ends."""

import pytest

from rlhf_lab.chat import read_turns, render_chat, template_stops
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.sampling import SamplingSpec
from tests.tiny_models import CHAT_TEMPLATE, chat_tokenizer

ASK = {"role": "user", "content": "w1 w2"}
SAY = {"role": "assistant", "content": "w3"}
RULE = {"role": "system", "content": "w9"}


def test_render_chat_matches_transformers_with_one_bos():
    tokenizer = chat_tokenizer()
    for turns in ([ASK], [RULE, ASK], [ASK, SAY, ASK]):
        text = render_chat(tokenizer, turns, "it")
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
        assert ids == expected["input_ids"] and ids.count(tokenizer.bos_token_id) == 1
        start = "<|im_start|> assistant "
        assert text == render_chat(tokenizer, turns, "it", for_answer=False) + start


@pytest.mark.parametrize(
    ("template", "stop"),
    [
        (CHAT_TEMPLATE, ["<|im_end|>"]),
        ("{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}", ["</s>"]),
        ("{% for m in messages %}{{ m.content }} <|im_end|> </s> {% endfor %}", ["<|im_end|>"]),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} w0 w1 {% endfor %}", []),
        ("{% for m in messages %}<s> {{ m.role }} {% endfor %}", []),
    ],
)
def test_the_end_of_an_answer_is_what_the_template_puts_behind_it(template, stop):
    tokenizer = chat_tokenizer(template)
    assert tokenizer.convert_ids_to_tokens(template_stops(tokenizer)) == stop


def test_spec_stops_at_the_end_of_a_turn_and_other_stops():
    tokenizer = chat_tokenizer()
    settings = {"preset": "reel", "stop_at_eos": False}
    end, eos, other = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "</s>", "w4"))
    spec = lambda given: SamplingSpec.from_args(RLHFArgs(**(settings | given)), tokenizer)
    stops = lambda **given: set(spec(given).stops(tokenizer))
    assert stops() == set()
    assert stops(chat=True) == {end}
    assert stops(chat=True, stop_at_eos=True, stop_tokens="w4") == {end, eos, other}
    bare = chat_tokenizer("{% for m in messages %}{{ m.content }} {% endfor %}")
    with pytest.raises(ConfigError, match="has no token after a response.*stop_at_eos=True"):
        SamplingSpec.from_args(RLHFArgs(**settings, chat=True), bare)
    assert SamplingSpec.from_args(RLHFArgs(preset="reel", chat=True), bare).stops(bare) == (eos,)


def test_read_turns_keeps_role_and_content_only():
    assert read_turns("w1", "it", "user") == [{"role": "user", "content": "w1"}]
    noisy = [RULE | {"weight": 1, "tool_calls": None}, ASK | {"name": "x", "tool_calls": []}]
    assert read_turns(noisy, "it", "user") == [RULE, ASK]


@pytest.mark.parametrize(
    ("found", "last", "message"),
    [
        ("  ", "user", "row 7 has no messages. Use a text"),
        (["w1"], "user", "row 7, message 1, is 'w1'. Use an object with a role"),
        ([ASK, {"role": "tool", "content": "w1"}], "user", "message 2, is {'role': 'tool'"),
        ([SAY | {"tool_calls": [{"id": 1}]}, ASK], "user", "message 1, calls a tool"),
        ([ASK, SAY | {"content": None, "function_call": {"n": 1}}], "assistant", "calls a tool"),
        ([ASK | {"content": " \n"}], "user", "a text as content"),
        ([ASK, RULE], "user", "a system message after the first. Put it first"),
        ([ASK, SAY], "user", "ends with a message of 'assistant', not of 'user'"),
    ],
)
def test_read_turns_names_row_and_message(found, last, message):
    with pytest.raises(LoadError) as error:
        read_turns(found, "row 7", last)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("row 7")


def test_render_chat_raises_without_a_fitting_template():
    with pytest.raises(LoadError, match="chat=True, but the tokenizer of .* has no chat template"):
        render_chat(chat_tokenizer(None), [ASK], "row 7")
    with pytest.raises(LoadError, match=r"row 7 does not fit the chat template \(late system\)"):
        render_chat(chat_tokenizer(), [ASK, RULE], "row 7")
    with pytest.raises(LoadError, match="row 7 does not fit the chat template"):
        render_chat(chat_tokenizer("{% for %}"), [ASK], "row 7")
