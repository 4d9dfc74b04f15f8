"""JSON schema reward: what is JSON, what fits a schema, and which schemas are refused."""

import json
import sys
import time

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


def pays(response, schema=True, **options):
    (paid,) = JsonSchemaReward(schema, **options)([response]).tolist()
    return paid


@pytest.mark.parametrize(
    "response",
    [
        '{"name": "Ann", "age": 3}',
        ' {"name": "Ann"}\n',
        '{"name": "Ann", "age": 3.0}',
    ],
)
def test_what_fits_earns_1(response):
    assert pays(response, PERSON) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        '{"age": 3}',
        '{"name": 3}',
        '{"name": "Ann", "age": -1}',
        '{"name": "Ann", "age": 2.5}',
        '{"name": "Ann", "more": 1}',
        '["name"]',
        "null",
    ],
)
def test_what_is_json_and_does_not_fit_earns_what_it_is_said_to(response):
    assert pays(response, PERSON) == 0.0
    assert pays(response, PERSON, json_earns=0.25) == 0.25


@pytest.mark.parametrize(
    "response",
    [
        "",
        "NaN",
        "[Infinity]",
        "[-Infinity]",
        "1e999",
        '{"a": 1, "a": 2}',
        '[{"a": {"b": 1, "b": 1}}]',
        "{'a': 1}",
        "[1,]",
        "1 2",
        'here it is: {"a": 1}',
        '```json\n{"a": 1}\n```',
        "[" * 33 + "]" * 33,
        "[" * 100_000,
        '{"a":' * 3000,
        '"' + "x" * 20_000 + '"',
        "9" * 10_000,
        "True",
        '"\x01"',
    ],
    ids=lambda response: f"{response:.12}",
)
def test_what_is_no_json_earns_nothing_whatever_the_schema(response):
    assert pays(response, json_earns=0.25) == 0.0


def test_levels_are_counted_to_the_bound():
    assert pays("[" * 32 + "]" * 32) == 1.0
    assert pays('"' + "x" * 19_998 + '"') == 1.0


def schema_file(tmp_path, content):
    path = tmp_path / "schema.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_schema_is_read_from_its_file(tmp_path):
    assert pays('{"name": "x"}', schema_file(tmp_path, PERSON)) == 1.0


REMOTE = "https://example.com/schema.json"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "is no JSON"),
        ('{"type": "object", "type": "array"}', "name stands twice"),
        ("[]", "holds list, not an object"),
        ({"type": "text"}, "no JSON schema"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "draft 2020-12"),
        ({"$ref": REMOTE}, "nothing is fetched"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "nothing is fetched"),
        ({"allOf": [{"$dynamicRef": REMOTE}]}, "nothing is fetched"),
        ({"$ref": "#/$defs/lost"}, "does not hold"),
        ({"$ref": "#lost"}, "does not hold"),
        ({"$ref": "#"}, "refers to itself without end"),
        ({"patternProperties": {"^a": True}}, "patternProperties"),
        ({"items": {"pattern": "("}}, "no JSON schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(tmp_path, schema, words):
    with pytest.raises(ConfigError, match=words) as caught:
        JsonSchemaReward(schema_file(tmp_path, schema))
    assert "json_schema:" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_type_checks")
def test_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read json_schema"):
        JsonSchemaReward(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="holds int"):
        JsonSchemaReward(3)


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[rewards\]"'):
        JsonSchemaReward(True)


def test_a_name_that_looks_like_a_keyword_is_a_name():
    schema = {"properties": {"$ref": {"type": "string"}, "pattern": {"type": "integer"}}}
    assert pays('{"$ref": "https://a.b", "pattern": 1}', schema) == 1.0
    assert pays('{"pattern": "x"}', schema) == 0.0


def test_a_pattern_is_found_anywhere_and_ends_in_time():
    assert pays('"abc"', {"pattern": "b"}) == 1.0
    assert pays('"abc"', {"pattern": "^b"}) == 0.0
    assert pays("3", {"pattern": "b"}) == 1.0
    began = time.monotonic()
    with pytest.warns(UserWarning, match="took longer"):
        assert pays(f'"{"a" * 40}c"', {"pattern": "^(a|a)+b"}) == 0.0
    assert time.monotonic() - began < 10


def test_a_schema_may_refer_to_itself_where_values_end():
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert pays("[[], [[]]]", tree) == 1.0 and pays("[[1]]", tree) == 0.0
    assert pays("1e308", {"multipleOf": 0.1}) in (0.0, 1.0)
