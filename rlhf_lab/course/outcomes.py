"""Outcomes of a call: results, gradients, changed arguments, errors; and where two differ."""

import inspect
import linecache
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_lab.course import containment
from rlhf_lab.course.containment import Stopped, contained
from rlhf_lab.course.exercise import Answer, Case, Exercise

RTOL, ATOL = 1e-4, 1e-5
KEPT_WORDS = 64
_NOTHING = object()
"""Stands where one of two lists has ended."""
_WORDS: dict[int, tuple[Any, str]] = {}
"""The last values that were put into words: a value is compared with every known mistake."""


@dataclass(frozen=True)
class Outcome:
    """What came of one call: results and gradients by name, arguments changed in place, an error.

    A result that has no gradient although it should is noted as not `attached`.
    """

    results: Mapping[str, Any]
    gradients: Mapping[str, Tensor]
    changed: tuple[str, ...] = ()
    attached: bool = True
    error: str | None = None


@dataclass(frozen=True)
class Difference:
    """The first thing about an outcome that is not as expected, as rows of yours and expected."""

    kind: Literal["error", "type", "shape", "dtype", "value", "gradient", "in place"]
    rows: tuple[tuple[str, str, str], ...]
    case: Case | None = None


def observe(exercise: Exercise, fn: Answer, case: Case) -> Outcome:
    """Call a function on a case, and note everything that is compared.

    1. Give it copies of the tensors, so that a change in place shows and harms nothing.
    2. Note its results by name; an error becomes one line.
    3. Take the gradient of a fixed random weighting of the results.

    Raises NotImplementedError, as a stub does; a stub that it calls is an error. Raises Stopped
    where the function would not come back (see `containment`).
    """
    leaves = {
        name: value.detach().clone().requires_grad_(name in exercise.gradients)
        for name, value in case.arguments.items()
        if isinstance(value, Tensor)
    }
    copies = {name: leaf.clone() for name, leaf in leaves.items()}
    try:
        with contained():
            results = _named(exercise.observe(fn, {**case.arguments, **copies}))
            gradients, attached = _gradients(results, leaves)
    except Exception as error:
        if _unwritten(error) in (exercise.name, *exercise.methods):
            raise
        return Outcome({}, {}, error=_one_line(error, fn))
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    changed = tuple(n for n, x in leaves.items() if not torch.allclose(x, copies[n], **exact))
    return Outcome(results, gradients, changed, attached)


def _named(result: Any) -> dict[str, Any]:
    if isinstance(result, dict):
        return result
    if isinstance(result, tuple):
        return {f"result[{i}]": part for i, part in enumerate(result)}
    return {"result": result}


def _gradients(
    results: Mapping[str, Any], leaves: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], bool]:
    """Gradients of a random weighting of the results, and whether they depend on the arguments."""
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    parts = [r for r in results.values() if isinstance(r, Tensor) and r.requires_grad]
    if not wanted or not parts:
        return {}, not wanted
    generator = torch.Generator().manual_seed(0)
    weighted = [(part * torch.randn(part.shape, generator=generator)).sum() for part in parts]
    found = torch.autograd.grad(sum(weighted), list(wanted.values()), allow_unused=True)
    pairs = zip(wanted.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in pairs}, True


def _unwritten(error: Exception) -> str | None:
    """The name of the stub that an error comes from, or None."""
    if not isinstance(error, NotImplementedError) or str(error):
        return None
    return traceback.extract_tb(error.__traceback__)[-1].name


def _one_line(error: Exception, fn: Answer) -> str:
    """An error and the line of the learner's code that it came from, without the stack."""
    lines = _words_of(str, error).splitlines()
    if _unwritten(error):
        return f"{_unwritten(error)} is called, and is not written yet"
    if type(error).__name__ == "TypeCheckError":
        kept = ("Type-check", "Actual", "Expected")
        return "\n".join(line for line in lines if line.startswith(kept))
    message = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    message += _remedy(error)
    home = _files_of(fn)
    numbers = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename in home]
    if not numbers:
        return message
    line = _words_of(str, linecache.getline(_file_at(error, home), numbers[-1]).strip())
    shown = f": {line[:80]}" if line else ""
    return f"{message} (line {numbers[-1]} of the cell{shown})"


def _file_at(error: Exception, home: set[str]) -> str:
    """The file of the learner's last line that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.filename for frame in frames if frame.filename in home][-1]


def _remedy(error: Exception) -> str:
    """What to do about a name that is not there."""
    if isinstance(error, NameError) and error.name:
        return f"; run the cell above that defines or imports {error.name} first"
    return ""


def _words_of(as_words: Callable[[Any], str], value: Any) -> str:
    """A learner's value or error in words, although its own `__repr__` or `__str__` may fail."""
    try:
        with contained(min(containment.SECONDS_PER_WORDS, containment.SECONDS_PER_CALL)):
            return as_words(value).encode(errors="backslashreplace").decode()
    except (Exception, Stopped) as error:
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def _without_line(error: str | None) -> str | None:
    return error and error.split(" (line ")[0]


def _files_of(fn: Answer) -> set[str]:
    """The files, or cells, that a function or the methods of a class are written in."""
    fn = inspect.unwrap(fn)
    parts = [inspect.unwrap(part) for part in vars(fn).values() if inspect.isfunction(part)]
    written = [part for part in (fn, *parts) if part.__module__ == fn.__module__]
    return {part.__code__.co_filename for part in written if hasattr(part, "__code__")}


def compare_outcomes(
    outcome: Outcome, expected: Outcome, case: Case | None = None
) -> Difference | None:
    """The first difference, or None: error, results, arguments changed in place, gradients."""
    if _without_line(outcome.error) != _without_line(expected.error):
        return Difference("error", (("raised", outcome.error or "nothing", "no error"),), case)
    for name, value in expected.results.items():
        if name not in outcome.results:
            return Difference("type", ((name, "missing", _shown(value)),), case)
        difference = _compare_results(name, outcome.results[name], value, case)
        if difference:
            return difference
    if outcome.changed != expected.changed:
        rows = tuple((name, "changed in place", "untouched") for name in outcome.changed)
        return Difference("in place", rows, case)
    if outcome.attached != expected.attached:
        return Difference(
            "gradient", (("gradient", "none: the result is detached", "there"),), case
        )
    for name, gradient in expected.gradients.items():
        rows = _differing(f"gradient of {name}", outcome.gradients[name], gradient)
        if rows:
            return Difference("gradient", rows, case)
    return None


def _compare_results(name: str, value: Any, expected: Any, case: Case | None) -> Difference | None:
    if not isinstance(expected, Tensor):
        same = _same_plain(value, expected)
        return None if same else Difference("value", _plain_rows(name, value, expected), case)
    if not isinstance(value, Tensor):
        return Difference("type", ((name, _shown(value), "a tensor"),), case)
    if value.shape != expected.shape:
        rows = ((f"{name}: shape", str(list(value.shape)), str(list(expected.shape))),)
        return Difference("shape", rows, case)
    if value.device != expected.device:
        return Difference(
            "type", ((f"{name}: device", str(value.device), str(expected.device)),), case
        )
    if value.dtype != expected.dtype:
        return Difference(
            "dtype", ((f"{name}: dtype", str(value.dtype), str(expected.dtype)),), case
        )
    rows = _differing(name, value, expected)
    return Difference("value", rows, case) if rows else None


def _same_plain(value: Any, expected: Any) -> bool:
    """Equal, or close where numbers stand; numbers in lists and tuples, too."""
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(_same_plain(v, e) for v, e in pairs)
    if isinstance(expected, float) and isinstance(value, (int, float)):
        return math.isclose(value, expected, rel_tol=RTOL, abs_tol=1e-12)
    return type(value) is type(expected) and bool(value == expected)  # numpy has bools of its own


def _plain_rows(name: str, value: Any, expected: Any) -> tuple[tuple[str, str, str], ...]:
    """Rows about what differs; of lists the first entry that does, and their lengths if unequal."""
    kinds = (list, tuple)
    if not (isinstance(value, kinds) and isinstance(expected, kinds)):
        return ((name, _shown(value), _shown(expected)),)
    there = list(zip_longest(value, expected, fillvalue=_NOTHING))
    at = next(i for i, (v, e) in enumerate(there) if v is _NOTHING or not _same_plain(v, e))
    shown = ["nothing" if x is _NOTHING else _shown(x) for x in there[at]]
    rows = ((f"{name}[{at}]", *shown),)
    if len(value) != len(expected):
        rows += ((f"{name}: entries", str(len(value)), str(len(expected))),)
    return rows


def _differing(name: str, value: Tensor, expected: Tensor) -> tuple[tuple[str, str, str], ...]:
    """Rows about the first entry that differs and how many do; none where all are close."""
    differs = _differing_entries(value, expected)
    if not differs.any():
        return ()
    index = tuple(differs.nonzero()[0].tolist())
    where = f" at {list(index)}" if index else ""
    rows = [(f"{name}{where}", _shown(value[index].item()), _shown(expected[index].item()))]
    if differs.numel() > 1:
        rows.append(("entries that differ", f"{int(differs.sum())} of {differs.numel()}", "0"))
    return tuple(rows)


def _differing_entries(value: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors of one shape differ by more than rounding."""
    if not expected.is_floating_point():
        return value != expected
    finite = expected[expected.isfinite()].abs()
    atol = ATOL * max(1.0, finite.max().item() if finite.numel() else 0.0)
    return ~torch.isclose(
        value.detach(), expected.detach().to(value.dtype), RTOL, atol, equal_nan=True
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    kept = _WORDS.get(id(value))
    if kept is None or kept[0] is not value:
        as_words = str if isinstance(value, (str, bool, int, list, tuple)) else repr
        text = _words_of(as_words, value)
        if len(_WORDS) >= KEPT_WORDS:
            _WORDS.clear()
        _WORDS[id(value)] = value, text if len(text) <= 60 else text[:57] + "..."
    return _WORDS[id(value)][1]
