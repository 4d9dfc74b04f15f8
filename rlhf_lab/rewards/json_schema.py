"""JSON schema reward: 1 for a response that is JSON and valid by a schema; nothing is executed."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.extras import import_extra
from rlhf_lab.rewards.conversation import ResponseReward


class JsonSchemaReward(ResponseReward):
    """1 for a response that is JSON and valid by a schema, else 0.

    JSON is standard JSON: NaN, Infinity, a name twice in an object and words around the value are
    not. A schema without `$schema` is of draft 2020-12. References are not downloaded.

    Args:
        schema: the schema, or the path of its file.
        json_earns: the reward of a response that is JSON and not valid.

    Raises:
        ConfigError: If the file cannot be read, the schema is not valid, a `$ref` leads out of it,
            or the package jsonschema is missing.
    """

    __name__ = "json_schema"

    def __init__(self, schema: str | Path | dict[str, Any] | bool, json_earns: float = 0.0) -> None:
        super().__init__(self._scores)
        self.json_earns = json_earns
        name = f"json_schema:{schema}" if isinstance(schema, str | Path) else "the schema"
        jsonschema = import_extra("jsonschema", name, "rewards")
        from referencing import Registry, exceptions  # with jsonschema
        from referencing import jsonschema as drafts

        try:
            if isinstance(schema, str | Path):
                schema = strict_json(Path(schema).read_text(encoding="utf-8-sig"))
            validator = jsonschema.validators.validator_for(
                schema, default=jsonschema.Draft202012Validator
            )
            validator.check_schema(schema)
            self.validator = validator(schema, registry=Registry())  # does not download
            resource = drafts.DRAFT202012.create_resource(schema)
            resolver = Registry().with_resource("", resource).crawl().resolver()
            for reference in _references(schema):
                resolver.lookup(reference)
        except OSError as error:
            raise ConfigError(
                f"cannot read {name} ({error.strerror}). Pass a file with a JSON schema."
            ) from None
        except ValueError as error:
            raise ConfigError(f"{name} is not valid JSON ({error}). Correct it.") from None
        except jsonschema.SchemaError as error:
            message = f"{name} is not a valid JSON schema ({error.message:.200}). Correct it."
            raise ConfigError(message) from None
        except exceptions.Unresolvable as error:
            raise ConfigError(
                f"{name} has the reference {error.ref!r:.80}, which is not in the schema. Put it "
                "under $defs and refer to #/$defs/NAME."
            ) from None

    def _scores(self, prompts: Sequence[str], responses: Sequence[str]) -> Float[Tensor, " batch"]:
        return torch.tensor([self.score(response) for response in responses])

    def score(self, response: str) -> float:
        """Return the reward of one response."""
        try:
            value = strict_json(response)
            return 1.0 if self.validator.is_valid(value) else self.json_earns
        except (ValueError, RecursionError, ArithmeticError):
            return 0.0


def strict_json(text: str) -> Any:
    """Parse standard JSON. Raise ValueError for anything else."""
    return json.loads(text, parse_constant=_reject, object_pairs_hook=_unique_names)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not standard JSON")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a name twice")
    return fields


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    parts = schema.values() if isinstance(schema, dict) else schema
    for part in parts if isinstance(schema, dict | list) else ():
        yield from _references(part)
