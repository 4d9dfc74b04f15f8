"""JSON schema reward: standard JSON, valid values, and schemas that are rejected."""

import json
import sys

import pytest

from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards import JsonSchemaReward

pytest.importorskip("jsonschema")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def score(response, schema=True, **options):
    (reward,) = JsonSchemaReward(schema, **options)([response]).tolist()
    return reward


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"name": "Ann", "age": 3}', 1.0),
        (' {"name": "Ann"}\n', 1.0),
        ('{"name": "Ann", "age": 3.0}', 1.0),
        ('{"age": 3}', 0.25),
        ('{"name": "Ann", "age": -1}', 0.25),
        ('{"name": "Ann", "more": 1}', 0.25),
        ('["name"]', 0.25),
        ("null", 0.25),
        ('{"name": "Ann"', 0.0),
    ],
)
def test_valid_json_gets_1_and_other_json_less(response, expected):
    assert score(response, PERSON, json_earns=0.25) == expected
    assert score(response, PERSON) == (expected == 1.0)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "NaN",
        "[-Infinity]",
        '[{"a": {"b": 1, "b": 1}}]',
        "{'a': 1}",
        "[1,]",
        "1 2",
        'the answer: {"a": 1}',
        '```json\n{"a": 1}\n```',
        "[" * 100_000,
        "9" * 10_000,
        "True",
        '"\x01"',
    ],
    ids=lambda response: f"{response:.12}",
)
def test_other_than_standard_json_gets_0(response):
    assert score(response, json_earns=0.25) == 0.0


def schema_file(tmp_path, content):
    path = tmp_path / "schema.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_schema_is_read_from_file(tmp_path):
    assert score('{"name": "x"}', schema_file(tmp_path, PERSON)) == 1.0


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "not valid JSON"),
        ('{"type": "object", "type": "array"}', "has a name twice"),
        ("[]", "not a valid JSON schema"),
        ({"type": "text"}, "not a valid JSON schema"),
        ({"$ref": "https://example.com/schema.json"}, "not in the schema"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "not in the schema"),
        ({"$ref": "#/$defs/lost"}, "not in the schema"),
        ({"items": {"pattern": "("}}, "not a valid JSON schema"),
    ],
)
def test_invalid_schema_raises(tmp_path, schema, words):
    with pytest.raises(ConfigError, match=f"json_schema:.*{words}"):
        JsonSchemaReward(schema_file(tmp_path, schema))


def test_missing_file_or_package_raises(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot read json_schema"):
        JsonSchemaReward(tmp_path / "nowhere.json")
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[rewards\]"'):
        JsonSchemaReward(True)


def test_schema_may_recurse_and_have_properties_like_keywords():
    schema = {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "integer"}}}
    assert score('{"$ref": "https://a.b", "pattern": 1}', schema) == 1.0
    assert score('{"pattern": "x"}', schema) == 0.0
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert score("[[], [[]]]", tree) == 1.0 and score("[[1]]", tree) == 0.0
    assert score('"abc"', {"pattern": "b"}) == 1.0 and score('"abc"', {"pattern": "^b"}) == 0.0
