"""Mutants of a reference by how it is called: arguments ignored or changed, or the result.

Each comes with what it does wrong, in words.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Answer, Case, Exercise

Handling = Callable[[Tensor], Tensor]

OF_ARGUMENTS: dict[str, Handling] = {
    "{} had the opposite sign": lambda x: -x,
    "{} were detached": lambda x: x.detach(),
    "the exponential of {} stood where it is due": lambda x: x.exp(),
    "the logarithm of {} stood where it is due": lambda x: x.log(),
    "the softmax of {} stood where it is due": lambda x: x.softmax(-1),
    "the log_softmax of {} stood where it is due": lambda x: x.log_softmax(-1),
    "the absolute value of {} stood where it is due": lambda x: x.abs(),
    "the square of {} stood where it is due": lambda x: x.square(),
    "{} less its mean stood where it is due": lambda x: x - x.mean(),
    "{} less the mean of each row stood where it is due": lambda x: x - x.mean(-1, keepdim=True),
    "{} were whitened first": lambda x: (x - x.mean()) / (x.std() + 1e-8),
    "only the part of {} above 0 counted": lambda x: x.clamp(min=0),
    "{} were cut to the range from 0 to 1": lambda x: x.clamp(0, 1),
    "{} stood one place too late": lambda x: x.roll(1, -1),
    "{} stood one place too early": lambda x: x.roll(-1, -1),
    "{} stood in backward order": lambda x: x.flip(-1),
    "{} were summed from its start, place by place": lambda x: x.cumsum(-1),
    "every place had the mean of its row of {}": lambda x: x.mean(-1, keepdim=True).expand_as(x),
    "every place had the sum of its row of {}": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "every row had the mean over the rows of {}": lambda x: x.mean(0, keepdim=True).expand_as(x),
    "the rows of {} stood in another order": lambda x: x.roll(1, 0),
    "the two last axes of {} were exchanged": lambda x: x.transpose(-1, -2),
}
OF_MASKS: dict[str, Handling] = {
    "{} were the other way round: True where it is False": lambda m: ~m,
    "the last place that {} lets through were left out": lambda m: m & _followed(m),
    "{} were read one place too late": lambda m: m.roll(1, -1),
    "{} were read one place too early": lambda m: m.roll(-1, -1),
}
OF_RESULTS: dict[str, Handling] = {
    "the result were detached": lambda x: x.detach(),
    "the result were averaged over its last axis": lambda x: x.mean(-1),
    "the result were summed over its last axis": lambda x: x.sum(-1),
    "the result were averaged over its first axis": lambda x: x.mean(0),
    "the result were summed over its first axis": lambda x: x.sum(0),
    "the result were averaged over everything": lambda x: x.mean(),
    "the result were summed over everything": lambda x: x.sum(),
    "the result had its two last axes exchanged": lambda x: x.transpose(-1, -2),
    "the softmax of the result were taken": lambda x: x.softmax(-1),
    "the log_softmax of the result were taken": lambda x: x.log_softmax(-1),
    "the root of the result were taken": lambda x: x.sqrt(),
    "the result were less 1": lambda x: x - 1,
    "1 less the result came back": lambda x: 1 - x,
    "the result were cut off below 0": lambda x: x.clamp(min=0),
    "the result were cut to the range from 0 to 1": lambda x: x.clamp(0, 1),
    "the result were cut to the range from -1 to 1": lambda x: x.clamp(-1, 1),
    "the result were rounded": lambda x: x.round(),
    "the mean of the result were subtracted": lambda x: x - x.mean(),
    "the mean of each row were subtracted from the result": lambda x: x - x.mean(-1, keepdim=True),
    "the result were whitened": lambda x: (x - x.mean()) / (x.std() + 1e-8),
    "the result were scaled so that each row adds up to 1": lambda x: x / x.sum(-1, keepdim=True),
    "the result were divided by its length": lambda x: x / x.norm(dim=-1, keepdim=True),
    "the result were divided by the number of rows": lambda x: x / x.shape[0],
    "the result were divided by the number of its columns": lambda x: x / x.shape[-1],
    "the result were multiplied by the number of its columns": lambda x: x * x.shape[-1],
    "the result were a running sum from the start": lambda x: x.cumsum(-1),
    "the result were a running sum from the end": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "the differences of neighbours came back": lambda x: x.diff(dim=-1),
    "the first place of the result were left out": lambda x: x[..., 1:],
    "the last place of the result were left out": lambda x: x[..., :-1],
    "every place of the result had the mean of its row": (
        lambda x: x.mean(-1, keepdim=True).expand_as(x)
    ),
}
WITH_RESULT: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "{} were added to the result": lambda out, x: out + x,
    "{} were subtracted from the result": lambda out, x: out - x,
    "the result were subtracted from {}": lambda out, x: x - out,
    "the result were multiplied by {}": lambda out, x: out * x,
    "the result were divided by {}": lambda out, x: out / x,
}


def _followed(mask: Tensor) -> Tensor:
    """Where the next place is True, too."""
    return torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], dim=-1)


def handlings(exercise: Exercise) -> Iterator[tuple[str, Answer]]:
    """Every other way of calling a reference, with its words; none of a class.

    1. An argument that is not used: None, or the number that changes nothing.
    2. Two arguments of one kind exchanged.
    3. The result changed, alone or by an argument.
    4. An argument changed.
    """
    if inspect.isclass(exercise.reference):
        return
    signature = inspect.signature(inspect.unwrap(exercise.reference))
    cases = exercise.cases()
    for says, change in (*_ignored(signature), *_exchanged(signature)):
        yield says, _called(exercise.reference, signature, change)
    for says, step in OF_RESULTS.items():
        yield says, _followed_by(exercise.reference, signature, lambda out, _, step=step: step(out))
    floats, masks, numbers = _kinds(signature, cases)
    for name in (*floats, *numbers):
        for says, step in WITH_RESULT.items():
            yield (
                says.format(name),
                _followed_by(
                    exercise.reference,
                    signature,
                    lambda out, given, n=name, s=step: s(out, given[n]),
                ),
            )
    for names, steps in ((floats, OF_ARGUMENTS), (masks, OF_MASKS)):
        for name, (says, step) in itertools.product(names, steps.items()):
            yield says.format(name), _called(exercise.reference, signature, _changing(name, step))


def ignored(exercise: Exercise, wrong: Answer) -> Iterator[tuple[str, Answer]]:
    """A wrong answer that also ignores or exchanges arguments; none of a class."""
    if inspect.isclass(exercise.reference):
        return
    signature = inspect.signature(inspect.unwrap(exercise.reference))
    for says, change in (*_ignored(signature), *_exchanged(signature)):
        yield says, _called(wrong, signature, change)


def _kinds(
    signature: inspect.Signature, cases: tuple[Case, ...]
) -> tuple[list[str], list[str], list[str]]:
    """The arguments that are floats, masks and plain numbers in some case."""

    def named(kind: Callable[[Any], bool]) -> list[str]:
        return [n for n in signature.parameters if any(kind(c.arguments.get(n)) for c in cases)]

    return (
        named(lambda x: isinstance(x, Tensor) and x.is_floating_point()),
        named(lambda x: isinstance(x, Tensor) and x.dtype == torch.bool),
        named(lambda x: isinstance(x, int | float) and not isinstance(x, bool)),
    )


Arguments = dict[str, Any]
ChangedCall = Callable[[Arguments], None]


def _called(reference: Answer, signature: inspect.Signature, change: ChangedCall) -> Answer:
    """The reference, with its arguments changed before the call."""

    def called(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        change(given.arguments)
        return reference(*given.args, **given.kwargs)

    called.__name__ = reference.__name__
    return called


def _followed_by(
    reference: Answer,
    signature: inspect.Signature,
    step: Callable[[Tensor, Mapping[str, Any]], Any],
) -> Answer:
    """The reference, with its result changed; of several, all that are floats."""

    def followed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        out = reference(*args, **kwargs)
        if not isinstance(out, tuple):
            return step(out, given.arguments)
        parts = [step(p, given.arguments) if isinstance(p, Tensor) else p for p in out]
        return type(out)(*parts) if hasattr(out, "_fields") else tuple(parts)

    followed.__name__ = reference.__name__
    return followed


def _changing(name: str, step: Handling) -> ChangedCall:
    def change(given: Arguments) -> None:
        if isinstance(given[name], Tensor):
            given[name] = step(given[name])

    return change


def _ignored(signature: inspect.Signature) -> Iterator[tuple[str, ChangedCall]]:
    for name, parameter in signature.parameters.items():
        if parameter.default is None:
            yield f"{name} were not used", _setting(name, None)
        elif isinstance(parameter.default, int | float):
            usual = parameter.default
            yield f"{name} were always {usual}", _setting(name, usual)
        if parameter.annotation in (float, int, float | None):
            for neutral in (1, 0):
                kind = int if parameter.annotation is int else float
                yield f"{name} were always {neutral}", _setting(name, kind(neutral))
            yield f"{name} had the opposite sign", _mapping(name, lambda x: -x)
            yield f"1 - {name} stood where {name} is due", _mapping(name, lambda x: 1 - x)
            yield f"1 / {name} stood where {name} is due", _mapping(name, lambda x: 1 / x)
            yield f"{name} were squared", _mapping(name, lambda x: x * x)
            yield f"{name} were halved", _mapping(name, lambda x: x / 2)
            yield f"{name} were doubled", _mapping(name, lambda x: 2 * x)
            yield f"{name} were 1 more", _mapping(name, lambda x: x + 1)
            yield f"{name} were 1 less", _mapping(name, lambda x: x - 1)


def _setting(name: str, value: Any) -> ChangedCall:
    def change(given: Arguments) -> None:
        given[name] = value

    return change


def _mapping(name: str, step: Callable[[Any], Any]) -> ChangedCall:
    def change(given: Arguments) -> None:
        given[name] = step(given[name])

    return change


def _exchanged(signature: inspect.Signature) -> Iterator[tuple[str, ChangedCall]]:
    for one, two in itertools.combinations(signature.parameters.values(), 2):
        if one.annotation != two.annotation:
            continue

        def change(given: Arguments, one: str = one.name, two: str = two.name) -> None:
            given[one], given[two] = given[two], given[one]

        yield f"{one.name} and {two.name} were exchanged", change
