"""Outcomes of a call: results, gradients, changed arguments, errors; and where two differ."""

import inspect
import linecache
import math
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from rlhf_lab.course.cases import Arguments
from rlhf_lab.course.containment import contained
from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.errors import LabError

RTOL, ATOL = 1e-4, 1e-5
DifferenceRow = tuple[str, str, str]  # name, yours, expected


@dataclass(frozen=True)
class Outcome:
    """Results and gradients of one call by name, arguments changed in place, and an error.

    `attached` is False if a result should have a gradient and has none.
    """

    results: Mapping[str, Any]
    gradients: Mapping[str, Tensor]
    changed: tuple[str, ...] = ()
    attached: bool = True
    error: str | None = None


@dataclass(frozen=True)
class Difference:
    """The first difference of an outcome from the expected one, in the case with this label."""

    kind: Literal["error", "type", "shape", "dtype", "value", "gradient", "in place"]
    rows: tuple[DifferenceRow, ...]
    case: str = ""


def observe(exercise: Exercise, fn: Answer, arguments: Arguments) -> Outcome:
    """Call a function with the arguments of a case, and record everything that is compared.

    1. Pass copies of the tensors, so that a change in place is found and has no effect.
    2. Record the results by name; an error becomes one line.
    3. Take the gradient of a fixed random weighting of the results.

    Raises:
        NotImplementedError: If the function is a stub; a stub that it calls is an error.
        Stopped: If the function does not return, see `containment`.
    """
    leaves = {
        name: value.detach().clone().requires_grad_(name in exercise.gradients)
        for name, value in arguments.items()
        if isinstance(value, Tensor)
    }
    copies = {name: leaf.clone() for name, leaf in leaves.items()}
    try:
        with contained():
            results = _get_results(exercise.observe(fn, **arguments | copies))
            gradients, attached = _gradients(results, leaves)
    except Exception as error:
        if _stub_name(error) in (exercise.name, *exercise.methods):
            raise
        return Outcome({}, {}, error=_one_line(error, fn, exercise.errors_tried))
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    changed = tuple(n for n, x in leaves.items() if not torch.allclose(x, copies[n], **exact))
    return Outcome(results, gradients, changed, attached)


def _get_results(result: Any) -> dict[str, Any]:
    if isinstance(result, tuple):
        return {f"result[{i}]": part for i, part in enumerate(result)}
    return result if isinstance(result, dict) else {"result": result}


def _gradients(
    results: Mapping[str, Any], leaves: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], bool]:
    inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    parts = [r for r in results.values() if isinstance(r, Tensor) and r.requires_grad]
    if not inputs or not parts:
        return {}, not inputs
    generator = torch.Generator().manual_seed(0)
    weighted = [(part * torch.randn(part.shape, generator=generator)).sum() for part in parts]
    gradients = torch.autograd.grad(
        sum(weighted), list(inputs.values()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, gradients, strict=True)), True


def _stub_name(error: Exception) -> str | None:
    if not isinstance(error, NotImplementedError) or str(error):
        return None
    return traceback.extract_tb(error.__traceback__)[-1].name


def _one_line(error: Exception, fn: Answer, errors_tried: bool) -> str:
    """Format an error with the line of the learner's code that it came from.

    If an exercise tries invalid arguments, any message of a ValueError or LabError is right.
    """
    if _stub_name(error):
        return f"{_stub_name(error)} is called, but it is not written yet"
    lines = str(error).splitlines() or ["no message"]
    if type(error).__name__ == "TypeCheckError":
        kept = ("Type-check", "Actual", "Expected")
        return "\n".join(line for line in lines if line.startswith(kept))
    has_message = not (errors_tried and isinstance(error, ValueError | LabError))
    message = type(error).__name__ + f": {lines[0]}" * has_message
    if isinstance(error, NameError) and error.name:
        message += f"; run the cell above that defines or imports {error.name} first"
    functions = [inspect.unwrap(part) for part in (fn, *vars(fn).values()) if callable(part)]
    functions = [part for part in functions if part.__module__ == fn.__module__]
    files = {part.__code__.co_filename for part in functions if hasattr(part, "__code__")}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    if not frames:
        return message
    line = linecache.getline(frames[-1].filename, frames[-1].lineno).strip()
    return f"{message} (line {frames[-1].lineno} of the cell{f': {line[:80]}' if line else ''})"


def compare_outcomes(outcome: Outcome, expected: Outcome, case: str = "") -> Difference | None:
    """Return the first difference: error, results, arguments changed in place, gradients."""
    kind, rows = next(_differences(outcome, expected), (None, ()))
    return Difference(kind, rows, case) if kind else None


def _differences(
    outcome: Outcome, expected: Outcome
) -> Iterator[tuple[str, tuple[DifferenceRow, ...]]]:
    yours, theirs = (each.error and each.error.split(" (line ")[0] for each in (outcome, expected))
    if yours != theirs:
        row = ("raised", outcome.error or "nothing", theirs or "no error")
        yield "error" if yours else "value", (row,)
    for name, value in expected.results.items():
        if name in outcome.results:
            yield from _result_differences(name, outcome.results[name], value)
        else:
            yield "type", ((name, "missing", _format(value)),)
    if outcome.changed != expected.changed:
        yield "in place", tuple((name, "changed in place", "unchanged") for name in outcome.changed)
    if outcome.attached != expected.attached:
        yield "gradient", (("gradient", "none: the result is detached", "there"),)
    for name, gradient in expected.gradients.items():
        rows = _tensor_rows(f"gradient of {name}", outcome.gradients[name], gradient)
        if rows:
            yield "gradient", rows


def _result_differences(
    name: str, value: Any, expected: Any
) -> Iterator[tuple[str, tuple[DifferenceRow, ...]]]:
    if not isinstance(expected, Tensor):
        if not _is_same(value, expected):
            yield "value", _plain_rows(name, value, expected)
    elif not isinstance(value, Tensor):
        yield "type", ((name, _format(value), "a tensor"),)
    elif value.shape != expected.shape:
        yield "shape", ((f"{name}: shape", str(list(value.shape)), str(list(expected.shape))),)
    else:
        for kind, word in (("type", "device"), ("dtype", "dtype")):
            yours, theirs = getattr(value, word), getattr(expected, word)
            if yours != theirs:
                yield kind, ((f"{name}: {word}", str(yours), str(theirs)),)
        rows = _tensor_rows(name, value, expected)
        if rows:
            yield "value", rows


def _is_same(value: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(_is_same, value, expected))
    if isinstance(expected, float) and isinstance(value, (int, float)):
        is_close = math.isclose(value, expected, rel_tol=RTOL, abs_tol=1e-12)
        return is_close or (math.isnan(value) and math.isnan(expected))
    return type(value) is type(expected) and bool(value == expected)  # numpy has its own bool


def _plain_rows(name: str, value: Any, expected: Any) -> tuple[DifferenceRow, ...]:
    """Rows for a value, or for the first entry of a list that differs and the two lengths."""
    if not (isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple))):
        return ((name, _format(value), _format(expected)),)
    same = list(map(_is_same, value, expected))
    at = same.index(False) if False in same else len(same)
    entries = [_format(x[at]) if at < len(x) else "nothing" for x in (value, expected)]
    rows = ((f"{name}[{at}]", *entries),)
    if len(value) != len(expected):
        rows += ((f"{name}: entries", str(len(value)), str(len(expected))),)
    return rows


def _tensor_rows(name: str, value: Tensor, expected: Tensor) -> tuple[DifferenceRow, ...]:
    """Rows for the first entry that differs and the number that do; empty if all are close."""
    differs = value != expected
    if expected.is_floating_point():
        differs = ~close(value.detach(), expected.detach(), RTOL, ATOL, least=1.0)
    if not differs.any():
        return ()
    index = tuple(differs.nonzero()[0].tolist())
    where = f" at {list(index)}" if index else ""
    rows = [(f"{name}{where}", _format(value[index].item()), _format(expected[index].item()))]
    if differs.numel() > 1:
        rows.append(("entries that differ", f"{int(differs.sum())} of {differs.numel()}", "0"))
    return tuple(rows)


def close(
    value: Tensor, expected: Tensor, rtol: float, atol: float, least: float
) -> Bool[Tensor, "..."]:
    """Return where numbers are close; atol is in units of the largest expected one, or `least`."""
    finite = expected[expected.isfinite()].abs()
    scale = max(least, finite.max().item() if finite.numel() else 0.0)
    return torch.isclose(value, expected.to(value.dtype), rtol, atol * scale, equal_nan=True)


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
