"""Rule-based rewards: zero, count, diversity, exact match, regular expression, JSON schema."""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config.checks import MATCH_OPTIONS
from rlhf_lab.errors import ConfigError, import_extra
from rlhf_lab.files import expand_home
from rlhf_lab.rewards.conversation import ResponseReward

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)


def zero(texts: Sequence[str]) -> Float[Tensor, " batch"]:
    """Return 0 for each text, which leaves KL penalty, entropy bonus and value loss to train on."""
    return torch.zeros(len(texts))


class CountReward:
    """The number of non-overlapping occurrences of `needle` in each text."""

    def __init__(self, needle: str) -> None:
        self.needle = needle

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """Count the occurrences in each text."""
        if isinstance(texts, str) or not isinstance(self.needle, str) or not self.needle:
            raise ConfigError("CountReward has no text to count, or no list of texts. Pass both.")
        return torch.tensor([float(text.count(self.needle)) for text in texts])


def _flags(is_match: Callable[..., bool]) -> Callable[..., Float[Tensor, " batch"]]:
    """Return a function from prompts, responses and, if read, answers to 1 for a match, else 0."""
    return lambda prompts, *columns: torch.tensor(
        [float(is_match(*row)) for row in zip(*columns, strict=True)]
    )


class Diversity(ResponseReward):
    """The fraction of a response's distinct n-grams that no other response of the batch has.

    The n-grams of a response are its runs of n words, split at spaces. A response of fewer than n
    words gets 0. The reward is only called on whole batches.

    Source: distinct-n (Li et al. 2016, arXiv 1510.03055) counts the distinct n-grams of all
    responses together; this is each response against the others, as in Self-BLEU (Zhu et al. 2018,
    arXiv 1802.01886).
    """

    __name__ = "diversity"

    def __init__(self, n: int) -> None:
        super().__init__(self._fractions, whole_batch=True)
        if type(n) is not int or n < 1:
            raise ConfigError("diversity:N requires a positive integer N, such as diversity:2.")
        self.n = n

    def _fractions(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> Float[Tensor, " batch"]:
        ngrams = [self.ngrams(response) for response in responses]
        counts = Counter(ngram for row in ngrams for ngram in row)
        unique = [sum(counts[ngram] == 1 for ngram in row) for row in ngrams]
        return torch.tensor([k / max(1, len(row)) for k, row in zip(unique, ngrams, strict=True)])

    def ngrams(self, response: str) -> set[tuple[str, ...]]:
        """Return the distinct runs of n words in a response."""
        words = response.split()
        return {tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)}


class ExactMatch(ResponseReward):
    """1 for a response that equals the right answer to its prompt, else 0.

    Spaces at the ends, runs of spaces and the forms of one character (Unicode NFKC) never count;
    case and punctuation count unless an option is set.

    Args:
        options: `ignore_case`; `ignore_punctuation`, which removes all characters of the Unicode
            category P; `last_number`, which compares the value of the last number of each
            (1,000.0 is 1000) and gives 0 if the response has none.

    Raises:
        ConfigError: If an option is unknown.

    Source: SQuAD (Rajpurkar et al. 2016) for the normalization, where articles are dropped as
    well; GSM8K (Cobbe et al. 2021) for the last number.
    """

    __name__ = "exact_match"

    def __init__(self, *options: str) -> None:
        super().__init__(_flags(self.is_match), answers=True)
        self.options = frozenset(options)
        if not self.options <= set(MATCH_OPTIONS):
            raise ConfigError(
                f"Unknown exact_match options {'+'.join(options)!r}. Choose from "
                f"{', '.join(MATCH_OPTIONS)}, with + between several."
            )

    def is_match(self, response: str, answer: str) -> bool:
        """Return True if a response equals this answer."""
        if "last_number" not in self.options:
            return self._normalized(response) == self._normalized(answer)
        target = last_number(answer)
        if target is None:
            raise ConfigError(
                f"the answer {answer!r:.80} has no number to compare with. Remove last_number, or "
                "correct the column of answers."
            )
        return last_number(response) == target

    def _normalized(self, text: str) -> str:
        text = unicodedata.normalize("NFKC", text)
        if "ignore_case" in self.options:
            text = text.casefold()
        if "ignore_punctuation" in self.options:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split())


def last_number(text: str) -> Fraction | None:
    """Return the value of the last number in a text, such as -1,000.5."""
    numbers = NUMBER.findall(text)
    return Fraction(numbers[-1].replace(",", "")) if numbers and len(numbers[-1]) < 1000 else None


class RegexReward(ResponseReward):
    """1 for a response that a pattern of Python's `re` matches as a whole, else 0.

    Spaces at the ends of the response do not count. The time is not limited: avoid nested
    repetitions such as `(a+)+`.

    Raises:
        ConfigError: If the pattern is not valid.
    """

    __name__ = "regex"

    def __init__(self, pattern: str) -> None:
        super().__init__(_flags(self.is_match))
        try:
            self.pattern = re.compile(pattern)
        except (re.error, OverflowError) as error:
            raise ConfigError(
                f"reward_fn='regex:{pattern:.80}' is not a valid pattern ({error}). Correct it."
            ) from None

    def is_match(self, response: str) -> bool:
        """Return True if the pattern matches a whole response."""
        return self.pattern.fullmatch(response.strip()) is not None


class JsonSchemaReward(ResponseReward):
    """1 for a response that is JSON and valid by a schema, else 0.

    NaN, Infinity and words around the value are not JSON. A schema without `$schema` is of draft
    2020-12. A `$ref` must point into the schema or a published metaschema.

    Args:
        schema: the schema, or the path of its file.

    Raises:
        ConfigError: If the schema cannot be read or is not valid, one of its references points
            elsewhere, or jsonschema is not installed.
    """

    __name__ = "json_schema"

    def __init__(self, schema: str | Path | dict[str, Any]) -> None:
        super().__init__(_flags(self.is_valid))
        name = "the schema" if isinstance(schema, dict) else f"json_schema:{schema}"
        jsonschema = import_extra("jsonschema", name, "rewards")
        from jsonschema_specifications import REGISTRY  # with jsonschema: the metaschemas
        from referencing import Registry, Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012

        try:
            if not isinstance(schema, dict):
                schema = json.loads(expand_home(schema).read_text("utf-8-sig"))
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            kind.check_schema(schema)
            root = Resource.from_contents(schema, default_specification=DRAFT202012)
            _check_references(root, REGISTRY.resolver_with_root(root))
        except (OSError, ValueError, jsonschema.SchemaError, Unresolvable) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                f"cannot read {name} ({reason:.200}). Pass the path of a file with a JSON schema."
            ) from None
        self.validator = kind(schema, registry=Registry())  # does not download

    def is_valid(self, response: str) -> bool:
        """Return True if a response is standard JSON and valid by the schema."""
        try:  # int raises ValueError for NaN and Infinity
            return self.validator.is_valid(json.loads(response, parse_constant=int))
        except (ValueError, RecursionError, ArithmeticError):
            return False


def _check_references(schema: Any, resolver: Any) -> None:
    """Raise Unresolvable for a reference into neither the schema nor a metaschema."""
    resolver = resolver.in_subresource(schema)
    fields = schema.contents if isinstance(schema.contents, dict) else {}
    for name in {"$ref", "$dynamicRef"} & fields.keys():
        resolver.lookup(fields[name])
    for part in schema.subresources():
        _check_references(part, resolver)
