"""Verifiable rewards: exact match and regular expressions, on texts judged by hand."""

import time

import pytest

from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards import ExactMatch, RegexReward, ResponseReward, TextBatch, score_batch


def pays(reward, response, answer=None):
    written = TextBatch([f"ask{response}"], ["ask"], None if answer is None else [answer])
    (reward_value,) = score_batch(reward, written).rewards.tolist()
    return reward_value


@pytest.mark.parametrize(
    ("options", "response", "answer", "output"),
    [
        ((), "Paris", "Paris", 1.0),
        ((), " Paris\n", "Paris", 1.0),
        ((), "New \t York", "New York", 1.0),
        ((), "paris", "Paris", 0.0),
        ((), "Paris.", "Paris", 0.0),
        ((), "It is Paris", "Paris", 0.0),
        ((), "", "Paris", 0.0),
        ((), "\ufb01ne", "fine", 1.0),
        (("ignore_case",), "pARIS", "Paris", 1.0),
        (("ignore_case",), "STRASSE", "Straße", 1.0),
        (("ignore_case",), "Paris.", "Paris", 0.0),
        (("ignore_punctuation",), "“Paris”.", "Paris", 1.0),
        (("ignore_punctuation",), "a - b", "a b", 1.0),
        (("ignore_punctuation",), "$5", "5", 0.0),
        (("ignore_case", "ignore_punctuation"), "PARIS!", "paris", 1.0),
        (("last_number",), "3 and 4 make 7.", "7", 1.0),
        (("last_number",), "7 is 3 and 4", "7", 0.0),
        (("last_number",), "1,000.0 apples", "so #### 1000", 1.0),
        (("last_number",), "-5", "5", 0.0),
        (("last_number",), "no number", "5", 0.0),
        (("last_number",), "0.10", "0.1", 1.0),
        (("last_number",), "9" * 2000, "5", 0.0),
    ],
)
def test_exact_match_by_hand(options, response, answer, output):
    assert pays(ExactMatch(*options), response, answer) == output


def test_each_response_is_compared_with_the_answer_to_its_own_prompt():
    written = TextBatch(["p1 a", "p2 b", "p1 b"], ["p1", "p2", "p1"], ["a", "b", "a"])
    assert score_batch(ExactMatch(), written).rewards.tolist() == [1.0, 1.0, 0.0]


def test_what_exact_match_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="no option 'case'"):
        ExactMatch("case")
    with pytest.raises(ConfigError, match="no number"):
        pays(ExactMatch("last_number"), "5", "five")
    with pytest.raises(ConfigError, match="exact_match compares .* set answers_column"):
        pays(ExactMatch(), "5")
    with pytest.raises(ConfigError, match="set answers_column"):
        ExactMatch()(["a text"])


@pytest.mark.parametrize(
    ("pattern", "response", "output"),
    [
        ("[0-9]+", "42", 1.0),
        ("[0-9]+", " 42 ", 1.0),
        ("[0-9]+", "42 apples", 0.0),
        ("[0-9]+", "the 42", 0.0),
        ("a{1,2}", "aaa", 0.0),
        (".*yes.*", "no, yes, no", 1.0),
        (".*", "two\nlines", 0.0),
        ("(?s).*", "two\nlines", 1.0),
        (r"\p{Lu}\w+", "Élan", 1.0),
        ("a*", "", 1.0),
        ("ask.*", " more", 0.0),
    ],
)
def test_a_pattern_has_to_match_the_whole_response(pattern, response, output):
    assert pays(RegexReward(pattern), response) == output


def test_a_pattern_without_end_pays_nothing_and_says_so():
    """2^40 ways to part 40 letters; in `re` it takes days."""
    began = time.monotonic()
    with pytest.warns(UserWarning, match="took longer than 0.25 s"):
        assert pays(RegexReward("(a|a)+b"), "a" * 40 + "c") == 0.0
    assert time.monotonic() - began < 10


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ConfigError, match="no pattern") as caught:
        RegexReward("(a")
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_type_checks")
def test_prompts_and_responses_are_given_apart_and_answers_where_they_are_asked_for():
    seen = []
    plain = ResponseReward(lambda *given: seen.append(given) or [0.0] * len(given[0]))
    asking = ResponseReward(plain.function, answers=True)
    written = TextBatch(["one two", "three four"], ["one", "three"], ["2", "4"])
    score_batch(plain, written)
    score_batch(asking, written)
    plain(["a text"])
    apart = ["one", "three"], [" two", " four"]
    assert seen == [apart, (*apart, ["2", "4"]), ([""], ["a text"])]
    with pytest.raises(ConfigError, match="has no function"):
        ResponseReward("exact_match")
