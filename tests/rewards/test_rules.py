"""Rule-based rewards on texts counted and compared by hand."""

import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards import (
    CountReward,
    Diversity,
    ExactMatch,
    JsonSchemaReward,
    RegexReward,
    TextBatch,
    score_batch,
)
from rlhf_lab.rewards.rules import zero


def score(reward, response, answer=None):
    """Return the reward of one response to the prompt "ask"."""
    batch = TextBatch([f"ask{response}"], ["ask"], None if answer is None else [answer])
    return score_batch(reward, batch).rewards.item()


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (zero, [0.0, 0.0, 0.0, 0.0]),
        (CountReward("good"), [2.0, 1.0, 0.0, 2.0]),
        (CountReward("a good"), [0.0, 1.0, 0.0, 0.0]),
        (CountReward("oo"), [2.0, 1.0, 1.0, 2.0]),
    ],
)
def test_zero_and_count_match_hand_computed(reward, expected):
    rewards = reward(["good good film", "a good film", "Good", "goodgood"])
    assert rewards.tolist() == expected and rewards.dtype == torch.float32
    assert reward([]).shape == (0,)


def fractions(n, *responses):
    return score_batch(Diversity(n), TextBatch(list(responses))).rewards.tolist()


@given(st.lists(st.text("ab ", max_size=8), max_size=6), st.integers(1, 3))
def test_diversity_matches_search_and_hand_computed(responses, n):
    def grams(text):
        words = text.split()
        return {" ".join(words[i : i + n]) for i in range(len(words)) if i + n <= len(words)}

    expected = []
    for i, response in enumerate(responses):
        others = set().union(*(grams(r) for j, r in enumerate(responses) if j != i))
        mine = grams(response)
        expected.append(len(mine - others) / len(mine) if mine else 0.0)
    assert fractions(n, *responses) == pytest.approx(expected)
    assert fractions(2, "a b c d", "a b x", "a") == pytest.approx([2 / 3, 1 / 2, 0.0])


@pytest.mark.usefixtures("no_type_checks")
def test_diversity_ignores_prompts_and_rejects_other_lengths():
    batch = TextBatch(["the film a b", "the film c d"], ["the film", "the film"])
    assert score_batch(Diversity(1), batch).rewards.tolist() == [1.0, 1.0]
    for n in (0, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="positive integer"):
            Diversity(n)


@pytest.mark.parametrize(
    ("options", "response", "answer", "expected"),
    [
        ((), " Paris\n", "Paris", 1.0),
        ((), "paris", "Paris", 0.0),
        ((), "", "Paris", 0.0),
        ((), "\ufb01ne", "fine", 1.0),
        (("ignore_case",), "STRASSE", "Straße", 1.0),
        (("ignore_punctuation",), "“Paris”.", "Paris", 1.0),
        (("ignore_punctuation",), "$5", "5", 0.0),
        (("ignore_case", "ignore_punctuation"), "PARIS!", "paris", 1.0),
        (("last_number",), "3 and 4 make 7.", "7", 1.0),
        (("last_number",), "7 is 3 and 4", "7", 0.0),
        (("last_number",), "1,000.0 apples", "so #### 1000", 1.0),
        (("last_number",), "no number", "5", 0.0),
        (("last_number",), "9" * 2000, "5", 0.0),
    ],
)
def test_exact_match_matches_hand_computed(options, response, answer, expected):
    assert score(ExactMatch(*options), response, answer) == expected


def test_exact_match_compares_with_answer_of_same_row():
    batch = TextBatch(["p1 a", "p2 b", "p1 b"], ["p1", "p2", "p1"], ["a", "b", "a"])
    assert score_batch(ExactMatch(), batch).rewards.tolist() == [1.0, 1.0, 0.0]


def test_exact_match_raises_on_bad_option_and_missing_answers():
    with pytest.raises(ConfigError, match="Unknown exact_match options 'case'"):
        ExactMatch("case")
    with pytest.raises(ConfigError, match="no number"):
        score(ExactMatch("last_number"), "5", "five")
    with pytest.raises(ConfigError, match="exact_match compares .* set answers_column"):
        score(ExactMatch(), "5")
    with pytest.raises(ConfigError, match="set answers_column"):
        ExactMatch()(["a text"])


@pytest.mark.parametrize(
    ("pattern", "response", "expected"),
    [
        ("[0-9]+", " 42 ", 1.0),
        ("[0-9]+", "42 apples", 0.0),
        (".*yes.*", "no, yes, no", 1.0),
        (".*", "two\nlines", 0.0),
        ("(?s).*", "two\nlines", 1.0),
        ("ask.*", " more", 0.0),
    ],
)
def test_regex_matches_whole_response(pattern, response, expected):
    assert score(RegexReward(pattern), response) == expected


def test_regex_raises_on_invalid_pattern():
    with pytest.raises(ConfigError, match="not a valid pattern"):
        RegexReward("(a")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"name": "Ann", "age": 3}', 1.0),
        ('{"name": "Ann", "age": 3.0}', 1.0),
        ('{"name": "Ann", "age": -1}', 0.0),
        ('{"name": "Ann", "more": 1}', 0.0),
        ("null", 0.0),
        ('{"name": "Ann"', 0.0),
    ],
)
def test_json_schema_matches_hand_computed(response, expected, tmp_path):
    (tmp_path / "schema.json").write_text("\ufeff" + json.dumps(PERSON))
    for schema in (PERSON, tmp_path / "schema.json", str(tmp_path / "schema.json")):
        assert score(JsonSchemaReward(schema), response) == expected


@pytest.mark.parametrize(
    "response",
    ["", "NaN", "[-Infinity]", "{'a': 1}", "[1,]", "1 2", "so: 1", "[" * 100_000, "9" * 10_000],
    ids=lambda response: f"{response:.12}",
)
def test_other_than_standard_json_gets_0(response):
    assert score(JsonSchemaReward({}), response) == 0.0 and score(JsonSchemaReward({}), "1") == 1.0


@pytest.mark.parametrize("schema", ["{", "[]", '{"type": "text"}', '{"items": {"pattern": "("}}'])
def test_invalid_schema_raises(tmp_path, schema, monkeypatch):
    path = tmp_path / "schema.json"
    with pytest.raises(ConfigError, match="cannot read json_schema:.*No such file"):
        JsonSchemaReward(path)
    path.write_text(schema)
    with pytest.raises(ConfigError, match="cannot read json_schema:"):
        JsonSchemaReward(path)
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[rewards\]"'):
        JsonSchemaReward({})


@pytest.mark.parametrize("key", ["$ref", "$dynamicRef"])
@pytest.mark.parametrize("reference", ["https://example.org/a.json", "#/$defs/a", "b.json"])
def test_unresolvable_reference_raises_when_built(key, reference, no_network):
    schema = {"items": {"anyOf": [{key: reference}, {"type": "null"}]}}
    with pytest.raises(ConfigError, match=f"cannot read the schema .*{reference[-5:]}"):
        JsonSchemaReward(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "https://json-schema.org/draft/2020-12/schema"}, {"const": "a"}]},
        {
            "$id": "https://example.org/a",
            "$ref": "in/b",
            "$defs": {"x": {"$id": "in/b", "$ref": "c"}, "y": {"$id": "in/c", "type": "string"}},
        },
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "anyOf": [{"$ref": "#/definitions/word"}, {"required": ["$ref"], "type": "object"}],
            "definitions": {"word": {"type": "string"}},
        },
    ],
)
def test_reference_into_a_schema_or_metaschema_is_followed(schema, no_network):
    assert score(JsonSchemaReward(schema), '"a"') == 1.0
    assert score(JsonSchemaReward(schema), "1") == 0.0
