"""Places of a miss: the entries, rows and cases in which a wrong answer is wrong, and no others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Case
from rlhf_lab.course.outcomes import Miss, Outcome, differing_entries

OF_CASES: Mapping[str, str] = {
    "batch of 1": "with a single row, squeeze() takes the batch's axis away, and a standard "
    "deviation over one row is nan",
    "one token": "with a single token, a slice from 1 on is empty, and squeeze() takes it away",
    "large numbers": "exp of a large number is inf, and inf - inf or inf / inf is nan: stay in "
    "logarithms, or subtract the largest first",
    "nan and inf at padding": "0 * nan is nan: put 0 where the mask is False, by torch.where or "
    "masked_fill, before anything is summed",
    "half precision": "half-precision numbers come in: turn them into float32 first",
    "with a denominator": "a denominator that is given stands in for the number of tokens",
    "other sizes": "is a size written into the code?",
    "one word has logit -inf": "a word that cannot be said has probability 0 and log-probability "
    "-inf, and 0 * -inf is nan",
    "no token is real": "nothing is left to average: 0 / 0 is nan, and 0 is due",
    "equal rewards": "the standard deviation is 0 here",
    "equal numbers": "the standard deviation is 0 here",
    "holes in the mask": "masked tokens stand between real ones here, not only at the end",
}
"""By a case's label: what is special about it, and what a plain answer forgets there."""

WhichPlaces = Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor | None]


def _masked(yours: Tensor, theirs: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    mask = given.get("mask")
    if not isinstance(mask, Tensor) or mask.shape != yours.shape or mask.all():
        return None
    return ~mask


def _in_padded_rows(yours: Tensor, theirs: Tensor, given: Mapping[str, Any]) -> Tensor | None:
    mask = given.get("mask")
    if not isinstance(mask, Tensor) or not yours.ndim or mask.shape[:1] != yours.shape[:1]:
        return None
    short = ~mask.flatten(1).all(1) if mask.ndim > 1 else ~mask
    if short.all() or not short.any():
        return None
    return short.reshape(-1, *[1] * (yours.ndim - 1)).expand_as(yours)


def _column(at: int) -> WhichPlaces:
    def places(yours: Tensor, theirs: Tensor, given: Mapping[str, Any]) -> Tensor | None:
        if not yours.ndim or yours.shape[-1] < 3:
            return None
        out = torch.zeros_like(yours, dtype=torch.bool)
        out[..., at] = True
        return out

    return places


def _where(test: Callable[[Tensor, Tensor], Tensor]) -> WhichPlaces:
    return lambda yours, theirs, given: test(yours, theirs)


INSIDE: Mapping[str, WhichPlaces] = {
    "only masked places are wrong: 0 is due there": _masked,
    "only rows with padding are wrong: what does a masked token do in them?": _in_padded_rows,
    "only the last place of each row is wrong: what comes behind it?": _column(-1),
    "only the first place of each row is wrong: what comes before it?": _column(0),
    "nan comes out where a number is due: look for 0 / 0, 0 * inf or inf - inf": _where(
        lambda yours, theirs: yours.isnan() & ~theirs.isnan()
    ),
    "inf comes out where a number is due: look for exp of a large number, or a division by 0": (
        _where(lambda yours, theirs: yours.isinf() & ~theirs.isinf())
    ),
}
"""WhichPlaces, of which all that is wrong is a part."""


def places(
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    misses: Sequence[Miss | None],
) -> str | None:
    """Where an answer is wrong, if that is a part of it that has a name; in this order:

    1. Cases of one kind, with what is special about them.
    2. Entries: masked ones, rows with padding, the first or last place, nan or inf.
    3. Where an argument is positive, negative or 0, and nowhere else.
    4. Some of several results.
    """
    missed = [i for i, miss in enumerate(misses) if miss]
    labels = {cases[i].label for i in missed}
    if len(missed) < len(cases):
        told = [OF_CASES[label] for label in sorted(labels) if label in OF_CASES]
        if len(labels) == 1 and told and _is_of_its_kind(outcomes[missed[0]], misses[missed[0]]):
            return f"everything is right but for one case, {min(labels)}; there, {told[0]}"
    trios = _trios(cases, outcomes, expected, missed)
    if trios:
        for says, where in INSIDE.items():
            if all(_within(trio, where) for trio in trios):
                return says
        signed = _by_sign(trios)
        if signed:
            return signed
    return _some_results(outcomes, expected, missed)


def _is_of_its_kind(outcome: Outcome, miss: Miss | None) -> bool:
    """Whether a case is missed as it is by plain code: an error, a shape, a type, nan or inf."""
    if miss is not None and miss.kind in ("error", "shape", "dtype", "type"):
        return True
    tensors = [x for x in outcome.results.values() if isinstance(x, Tensor)]
    return any(not bool(x.isfinite().all()) for x in tensors if x.is_floating_point())


Trio = tuple[Tensor, Tensor, Mapping[str, Any]]


def _trios(
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    missed: Sequence[int],
) -> list[Trio]:
    """Yours, expected and arguments of every result that differs; none where shapes differ."""
    found: list[Trio] = []
    for i in missed:
        for name, theirs in expected[i].results.items():
            yours = outcomes[i].results.get(name)
            if not isinstance(theirs, Tensor) or not theirs.is_floating_point():
                continue
            if not isinstance(yours, Tensor) or yours.shape != theirs.shape:
                return []
            if not theirs.ndim or not differing_entries(yours, theirs).any():
                continue
            found.append((yours.detach(), theirs.detach(), cases[i].arguments))
    return found


def _within(trio: Trio, where: WhichPlaces) -> bool:
    yours, theirs, given = trio
    inside = where(yours, theirs, given)
    return inside is not None and not bool((differing_entries(yours, theirs) & ~inside).any())


def _by_sign(trios: Sequence[Trio]) -> str | None:
    signs = {"above 0": torch.gt, "below 0": torch.lt}
    names = [n for n, x in trios[0][2].items() if isinstance(x, Tensor) and x.is_floating_point()]
    for name in names:
        for words, sign in signs.items():
            if all(_exactly(trio, name, sign) for trio in trios):
                return f"it is right but for the places where {name} is {words}"
    return None


def _exactly(trio: Trio, name: str, sign: Callable[[Tensor, float], Tensor]) -> bool:
    yours, theirs, given = trio
    argument = given.get(name)
    if not isinstance(argument, Tensor) or argument.shape != yours.shape:
        return False
    there, differs = sign(argument, 0.0), differing_entries(yours, theirs)
    return bool(there.any() and not there.all() and torch.equal(there, differs))


def _some_results(
    outcomes: Sequence[Outcome], expected: Sequence[Outcome], missed: Sequence[int]
) -> str | None:
    """Which of several results are right in every case, and which are not."""
    names = list(expected[0].results)
    if len(names) < 2 or any(outcomes[i].error for i in missed):
        return None
    wrong = [n for n in names if any(_differs(n, outcomes[i], expected[i]) for i in missed)]
    right = [n for n in names if n not in wrong]
    if not (wrong and right) or len(names) > 4:
        return None
    return f"{' and '.join(right)}: right in every case; only {' and '.join(wrong)}: wrong"


def _differs(name: str, outcome: Outcome, expected: Outcome) -> bool:
    yours, theirs = outcome.results.get(name), expected.results.get(name)
    if isinstance(yours, Tensor) and isinstance(theirs, Tensor):
        return yours.shape != theirs.shape or bool(differing_entries(yours, theirs).any())
    return yours != theirs
