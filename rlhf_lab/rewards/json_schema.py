"""JSON schema reward: 1 for a response that is JSON of the wanted form; nothing is executed."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.extras import import_extra
from rlhf_lab.rewards.responses import ResponseReward
from rlhf_lab.rewards.verifiable import compiled, found_in

DRAFT = "https://json-schema.org/draft/2020-12/schema"
MOST_JSON_CHARACTERS = 20_000
MOST_LEVELS = 32
"""Of lists and objects within each other, in a response and in a schema."""
REFERENCES = ("$ref", "$dynamicRef")
BY_PYTHONS_RE = ("patternProperties",)
"""Keywords whose patterns jsonschema leaves to `re`, which no time limit holds."""


class JsonSchemaReward(ResponseReward):
    """1 for a response that is JSON and fits a schema of draft 2020-12, else 0.

    No JSON is what standard JSON is not: NaN and Infinity, an object with a name twice, more than
    one value, words around it. Nor are numbers beyond float64, texts of more than 20,000
    characters, and more than 32 levels of lists and objects.

    Args:
        schema: the schema, or the path of its file.
        json_earns: what a response earns that is JSON and does not fit.

    Raises:
        ConfigError: no such file, no schema of that draft, one that refers to another place, or the
            package jsonschema is missing.
    """

    __name__ = "json_schema"

    def __init__(self, schema: str | Path | dict[str, Any] | bool, json_earns: float = 0.0) -> None:
        super().__init__(self._fits)
        self.json_earns = json_earns
        where = f"json_schema:{schema}" if isinstance(schema, str | Path) else "the schema"
        if isinstance(schema, str | Path):
            schema = _read_schema(Path(schema), where)
        self.validator = _validator(schema, where)

    def _fits(self, prompts: Sequence[str], responses: Sequence[str]) -> Float[Tensor, " batch"]:
        return torch.tensor([self.score(response) for response in responses])

    def score(self, response: str) -> float:
        """What one response earns."""
        try:
            value = strict_json(response)
        except ValueError:
            return 0.0
        return 1.0 if _is_valid(self.validator, value) else self.json_earns


def strict_json(text: str) -> Any:
    """The value of a text that is JSON, and nothing else than JSON.

    Raises:
        ValueError: it is not, or it is larger or deeper than what is read here.
    """
    if len(text) > MOST_JSON_CHARACTERS:
        raise ValueError(f"{len(text)} characters are more than {MOST_JSON_CHARACTERS}")
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_with_names_once,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if levels(value) > MOST_LEVELS:
        raise ValueError(f"it has more than {MOST_LEVELS} levels")
    return value


def levels(value: Any) -> int:
    """How many lists and objects stand within each other; 0 for a plain value."""
    deepest, layer = 0, [value]
    while layer := [x for x in layer if isinstance(x, list | dict)]:
        deepest += 1
        layer = [inner for x in layer for inner in (x.values() if isinstance(x, dict) else x)]
    return deepest


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is beyond float64")
    return value


def _with_names_once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        raise ValueError("a name stands twice in an object")
    return found


def _read_schema(path: Path, where: str) -> Any:
    """The contents of a schema's file.

    Raises:
        ConfigError: it cannot be read, or is no JSON.
    """
    try:
        return strict_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {where} ({error.strerror or error}); name a file with a JSON schema."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON ({error}); correct it.") from None


def _validator(schema: Any, where: str) -> Any:
    """What validates values against a schema, with patterns that a time limit holds.

    Raises:
        ConfigError: it is no schema of draft 2020-12, or cannot be used without risk.
    """
    jsonschema = import_extra("jsonschema", where, "rewards")
    from referencing import Registry  # a dependency of jsonschema

    base = jsonschema.Draft202012Validator
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"{where} holds {type(schema).__name__}, not an object; correct it.")
    if levels(schema) > MOST_LEVELS:
        raise ConfigError(f"{where} has more than {MOST_LEVELS} levels; refer to parts in $defs.")
    if isinstance(schema, dict) and schema.get("$schema", DRAFT) not in (DRAFT, f"{DRAFT}#"):
        raise ConfigError(
            f"{where} is of {schema['$schema']!r:.80}, and draft 2020-12 is read here; write "
            f"{DRAFT!r} as its $schema, or leave $schema out."
        )
    try:
        base.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(
            f"{where} is no JSON schema ({error.message:.200}); correct it."
        ) from None
    _refuse_risks(schema, where)
    kind = jsonschema.validators.extend(base, {"pattern": _pattern})
    validator = kind(schema, registry=Registry())  # one that fetches nothing
    for value in (None, True, 0, "", [], {}):
        try:
            validator.is_valid(value)
        except RecursionError:
            raise ConfigError(f"{where} refers to itself without end; correct its $ref.") from None
    return validator


def _refuse_risks(schema: Any, where: str) -> None:
    """Refuse what leads out of a schema, and patterns that no time limit holds.

    Raises:
        ConfigError: the first of them.
    """
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).crawl().resolver()
    for keyword, value in _keywords(schema):
        if keyword in BY_PYTHONS_RE:
            raise ConfigError(
                f"{where} uses {keyword}, whose patterns could take forever on what a model "
                "writes; use propertyNames with a pattern, or properties."
            )
        if not isinstance(value, str):
            continue
        if keyword == "pattern":
            compiled(value, f"the pattern of {where}")
        if keyword in REFERENCES and not value.startswith("#"):
            raise ConfigError(
                f"{where} refers to {value!r:.80}, and nothing is fetched; put it under $defs "
                "and refer to #/$defs/NAME."
            )
        try:
            if keyword in REFERENCES:
                resolver.lookup(value)
        except Unresolvable:
            raise ConfigError(
                f"{where} refers to {value!r:.80}, which it does not hold; correct it."
            ) from None


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Every name with its value in a schema, however deep."""
    if isinstance(schema, dict):
        yield from schema.items()
    inner = schema.values() if isinstance(schema, dict) else schema
    for part in inner if isinstance(schema, dict | list) else ():
        yield from _keywords(part)


def _is_valid(validator: Any, value: Any) -> bool:
    """Whether a value fits; one on which a schema's arithmetic fails does not."""
    try:
        return validator.is_valid(value)
    except (ArithmeticError, RecursionError):
        return False


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """The keyword `pattern`: found anywhere in a text, in the time that it may take."""
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not found_in(pattern, instance):
        yield ValidationError(f"{instance!r:.80} does not match {pattern!r:.80}")
