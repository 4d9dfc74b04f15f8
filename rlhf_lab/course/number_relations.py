"""Relations between the numbers of a wrong answer and those of the right one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.outcomes import Outcome

Pair = tuple[Tensor, Tensor]
"""Yours and the expected one."""
NumberRelation = tuple[Callable[[Tensor, Tensor], bool], str]


def number_relation(
    found: Sequence[Outcome], wanted: Sequence[Outcome], relations: Sequence[NumberRelation]
) -> str | None:
    """A relation of all numbers that differ, in every case; with their names, if there are others.

    A factor and a difference are looked for behind the relations of `OF_ALL_NUMBERS`.
    """
    pairs = [
        pair
        for yours, theirs in zip(found, wanted, strict=True)
        for pair in _differing(yours, theirs)
    ]
    if 2 * len(pairs) < len(found) or sum(theirs.numel() for _, theirs in pairs) < 2:
        return None
    of = _names_of_differing(found, wanted)
    for holds, words in relations:
        if all(_is_safe(holds, pair) for pair in pairs):
            return of + words
    if relations is not OF_ALL_NUMBERS:
        return None
    words = _factor(pairs) or _difference(pairs)
    return words and of + words


def _names_of_differing(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> str:
    """The names of the results that differ and a colon; nothing where all of them do."""
    numeric = [name for name, value in wanted[0].results.items() if _is_numeric(value)]
    pairs = list(zip(found, wanted, strict=True))
    wrong = [
        name
        for name in numeric
        if any(not is_close(y.results.get(name), t.results.get(name)) for y, t in pairs)
    ]
    return "" if len(wrong) == len(numeric) else f"{' and '.join(wrong)}: "


def _differing(outcome: Outcome, expected: Outcome) -> list[Pair]:
    """The results that differ and are finite; empty where one cannot be compared."""
    pairs = []
    for name, theirs in expected.results.items():
        yours = outcome.results.get(name)
        if not _is_numeric(theirs):
            continue
        if not _is_numeric(yours):
            return []
        yours, theirs = _tensor(yours), _tensor(theirs)
        if yours.shape != theirs.shape:
            return []
        if is_close(yours, theirs):
            continue
        if not torch.equal(yours.isfinite(), theirs.isfinite()):
            return []
        if yours.isfinite().all():
            pairs.append((yours, theirs))
    return pairs


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and not value.is_meta and value.layout == torch.strided
    if isinstance(value, list):
        return bool(value) and all(isinstance(x, float) for x in value)
    return isinstance(value, float)


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().double()


def is_close(yours: Any, theirs: Any) -> bool:
    """Whether two results are the same numbers, but for rounding."""
    if not (_is_numeric(yours) and _is_numeric(theirs)):
        return False
    yours, theirs = _tensor(yours), _tensor(theirs)
    if yours.shape != theirs.shape:
        return False
    finite = theirs[theirs.isfinite()].abs()
    atol = 1e-5 * max(1e-3, finite.max().item() if finite.numel() else 0.0)
    return torch.allclose(yours, theirs, rtol=1e-3, atol=atol, equal_nan=True)


def _is_safe(holds: Callable[[Tensor, Tensor], bool], pair: Pair) -> bool:
    return bool(pair[0].isfinite().all() and pair[1].isfinite().all()) and holds(*pair)


def _backwards(yours: Tensor, theirs: Tensor) -> bool:
    return yours.ndim > 0 and yours.shape[-1] > 1 and is_close(yours.flip(-1), theirs)


def _late(yours: Tensor, theirs: Tensor) -> bool:
    return yours.ndim > 0 and yours.shape[-1] > 2 and is_close(yours[..., 1:], theirs[..., :-1])


def _early(yours: Tensor, theirs: Tensor) -> bool:
    return _late(theirs, yours)


ZERO: NumberRelation = (lambda yours, theirs: bool((yours == 0).all()), "everything is 0")


OF_ALL_NUMBERS: tuple[NumberRelation, ...] = (
    (lambda yours, theirs: is_close(-yours, theirs), "the sign is the other way round"),
    (_backwards, "the numbers are right, but stand in backward order"),
    (_late, "the numbers are right, but stand one place too late"),
    (_early, "the numbers are right, but stand one place too early"),
    (lambda yours, theirs: is_close(yours.exp(), theirs), "this is the logarithm of what is due"),
    (lambda yours, theirs: is_close(yours, theirs.exp()), "this is the exponential of what is due"),
    (lambda yours, theirs: is_close(1 / yours, theirs), "this is 1 over what is due"),
    (
        lambda yours, theirs: is_close(yours, theirs.abs()),
        "this is the absolute value of what is due",
    ),
    (lambda yours, theirs: is_close(yours, theirs.square()), "this is the square of what is due"),
)


def _factor(pairs: Sequence[Pair]) -> str | None:
    """A factor between the two that is the same for all numbers of a case."""
    factors = []
    for yours, theirs in pairs:
        kept = theirs.abs() > 1e-9
        if not (yours.isfinite().all() and theirs.isfinite().all() and kept.any()):
            return None
        factor = (yours[kept] / theirs[kept]).median()
        if not is_close(yours, factor * theirs):
            return None
        factors.append(factor.item())
    if all(abs(factor - factors[0]) < 1e-3 * abs(factors[0]) for factor in factors):
        return f"all numbers are {factors[0]:.3g} times what is due: look for a factor"
    if all(theirs.numel() == 1 for _, theirs in pairs):
        return None
    return "all numbers of a case are off by one factor: by what is divided, or multiplied?"


def _difference(pairs: Sequence[Pair]) -> str | None:
    """A difference between the two that is the same for all numbers of a case."""
    differences = []
    for yours, theirs in pairs:
        apart = yours - theirs
        if not apart.isfinite().all() or not is_close(yours, theirs + apart.mean()):
            return None
        differences.append(apart.mean().item())
    if all(abs(d - differences[0]) < 1e-3 * abs(differences[0]) for d in differences):
        way = "high" if differences[0] > 0 else "low"
        return f"all numbers are {abs(differences[0]):.3g} too {way}"
    if all(theirs.numel() == 1 for _, theirs in pairs):
        return None
    return "all numbers of a case are off by the same amount: what is added, or missing?"
