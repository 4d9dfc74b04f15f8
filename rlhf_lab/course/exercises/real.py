"""Lesson 11, a real model: a control task, a test of pairs, and a claim that could be refuted."""

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.course.claims import Claim
from rlhf_lab.course.exercise import Case, make_exercise
from rlhf_lab.functional import Interval, bootstrap_means, paired_permutation_test
from rlhf_lab.probes import control_labels

DRAWN = 100
"""Draws from which the chance of each word type's label is estimated."""

NO_GENERATOR = 200
"""As many draws mean that the function is called without a generator."""


def my_claim(
    tuned: Float[Tensor, " n"], base: Float[Tensor, " n"], control: Float[Tensor, " n"]
) -> Claim:
    """A claim about a run, from one figure of n texts each of three models.

    Row i of the three was written with the same noise. `tuned` is the run that the claim is about,
    `control` a run of the same length whose reward meant nothing. The claim is that the run moved
    the figure, up or down, and by more than training moves it whatever the reward. Give a
    `Claim(says, effect, beyond_control, holds, refuted_by)`: the sentence; tuned less base and
    tuned less control, each as an `Interval`, such as `bootstrap_means` makes; whether the claim
    holds; and the measurement, with a number, that would refute it.
    """
    effect, beyond = bootstrap_means(tuned - base), bootstrap_means(tuned - control)
    ends = (effect.low, effect.high, beyond.low, beyond.high)
    known = None not in ends
    holds = known and (min(ends).item() > 0 or max(ends).item() < 0)
    way = "raised" if effect.value > 0 else "lowered"
    return Claim(
        says=f"training {way} the figure by {abs(effect.value.item()):.2f}",
        effect=effect,
        beyond_control=beyond,
        holds=bool(holds),
        refuted_by=f"on {2 * effect.n} fresh texts of each model, an interval that holds 0",
    )


def _label_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(10, 50, (40,), generator=generator)
    spread = torch.tensor([1000, 3, 77, 1000, 3, 1000, 5, 8, 9, 77])
    return (
        Case("40 places, half True", {"tokens": words, "share": 0.5}),
        Case("a fifth True", {"tokens": words, "share": 0.2}),
        Case("four fifths True", {"tokens": words, "share": 0.8}),
        Case("rows and columns", {"tokens": words.reshape(8, 5), "share": 0.5}),
        Case("ids far apart", {"tokens": spread, "share": 0.5}),
        Case("two words", {"tokens": torch.tensor([4, 9, 9, 9, 4, 9]), "share": 0.5}),
    )


def _observe_labels(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    tokens, share = arguments["tokens"], arguments["share"]
    draw = lambda seed: fn(tokens, torch.Generator().manual_seed(seed), share)
    first = draw(0)
    facts: dict[str, Any] = {"a tensor comes back": isinstance(first, Tensor)}
    if not facts["a tensor comes back"]:
        return facts
    facts["its shape is that of tokens"] = tuple(first.shape) == tuple(tokens.shape)
    facts["its numbers are True and False"] = first.dtype == torch.bool
    if not all(facts.values()):
        return facts
    types, inverse = tokens.flatten().unique(return_inverse=True)
    drawn = torch.stack([draw(seed).flatten() for seed in range(DRAWN)])
    of_types = torch.stack([drawn[:, inverse == i][:, 0] for i in range(len(types))], 1)
    facts["a word has the same label everywhere"] = torch.equal(of_types[:, inverse], drawn)
    varies = bool((of_types != of_types[0]).any(0).all())
    facts["each word is now True, now False"] = varies
    facts["their number is not always the same"] = len(of_types.sum(1).unique()) > 1
    by_id = (of_types.long().diff(dim=1) <= 0).all()
    facts["the True words are not always those of the smallest ids"] = not bool(by_id)
    state = torch.random.get_rng_state()
    facts["one seed gives one drawing"] = torch.equal(first, draw(0))
    facts["no other random state is used"] = torch.equal(state, torch.random.get_rng_state())
    chance = of_types.double().mean().item()
    near = 5 * (share * (1 - share) / of_types.numel()) ** 0.5
    if varies:
        facts["chance of True"] = share if abs(chance - share) < near else round(chance, 1)
    return facts


def _pair_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, generator=generator)

    def case(label: str, a: Tensor, b: Tensor, draws: int = 2000) -> Case:
        return Case(label, {"a": a, "b": b, "draws": draws})

    shared, small = 20 * draw(10), draw(10)
    ties = torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 0])
    few = torch.tensor([0.2, 0.9, 1.4, 0.3, 0.8, 0.1, 0.5])
    return (
        case("a is larger", few + 0.5, few.flip(0)),
        case("a is smaller", few.flip(0), few + 0.5),
        case("pairs far apart", shared + 0.6 + small, shared),
        case("few values, many ties", ties, 1 - ties.flip(0)),
        case("all pairs agree, few draws", few + 1, few - torch.arange(7), 100),
        case("alike", few, few.clone()),
        case("one pair", torch.tensor([2.0]), torch.tensor([1.0])),
        case("one text decides", torch.tensor([0.1, 0.2, -0.3, 9.0, -0.1]), torch.zeros(5)),
        case("b is near 0", few + 0.4, torch.tensor([0.01, 1, 1, 1, 1, 1, -0.01])),
        case("12 pairs", draw(12) + 0.4, draw(12)),
        case("12 pairs, all one way", 1 + draw(12).abs(), torch.zeros(12), 100),
        case("no generator is given", few + 0.1, few.flip(0), NO_GENERATOR),
    )


def _observe_pairs(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments["draws"] == NO_GENERATOR:
        return _observe_default(fn, arguments)
    found = fn(**arguments, generator=torch.Generator().manual_seed(0))
    if not isinstance(found, float):
        return {"a float comes back": False}
    differences, draws = (arguments["a"] - arguments["b"]).double(), arguments["draws"]
    signs = torch.tensor(list(product((1.0, -1.0), repeat=len(differences)))).double()
    reached = (signs @ differences).abs() >= differences.sum().abs() - 1e-9
    share = reached.double().mean().item()
    due = (1 + draws * share) / (1 + draws)
    is_near = abs(found - due) <= 5 * (share * (1 - share) / draws) ** 0.5 + 1e-6
    return {
        "a float comes back": True,
        "it is above 0": found > 0,
        "p-value": round(due, 3) if is_near and found > 0 else _other_test(found, arguments),
    }


def _observe_default(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    state = torch.random.get_rng_state()
    found = [fn(**arguments) for _ in range(3)]
    untouched = torch.equal(state, torch.random.get_rng_state())
    torch.random.set_rng_state(state)
    fixed = untouched and len(set(found)) == 1
    return {"without a generator, every call has the same signs of its own": fixed}


def _other_test(found: float, arguments: Mapping[str, Any]) -> float | str:
    both = torch.cat([arguments["a"], arguments["b"]]).double()
    n, draws = len(both) // 2, 10_000
    order = torch.rand(draws, 2 * n, generator=torch.Generator().manual_seed(0)).argsort(1)
    apart = (both[order][:, :n].sum(1) - both[order][:, n:].sum(1)).abs()
    share = (apart >= (both[:n].sum() - both[n:].sum()).abs() - 1e-9).double().mean().item()
    reach = 5 * (share * (1 - share) * (1 / draws + 1 / arguments["draws"])) ** 0.5 + 1e-3
    return "that of a test across pairs" if abs(found - share) <= reach else found


def _claim_cases() -> tuple[Case, ...]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, generator=generator)

    def case(label: str, n: int, effect: float, of_control: float, spread: float = 0.3) -> Case:
        base = draw(n)
        noise = lambda: (lambda x: spread * (x - x.mean()))(draw(n))
        tuned, control = base + effect + noise(), base + of_control + noise()
        return Case(label, {"tuned": tuned, "base": base, "control": control})

    return (
        case("a large rise, nothing in the control", 64, 1.0, 0.0),
        case("a large fall, nothing in the control", 64, -1.0, 0.0),
        case("as large a rise in the control", 64, 1.0, 1.0),
        case("nothing anywhere", 64, 0.0, 0.0),
        case("nothing in the run, a fall in the control", 64, 0.0, -1.0),
        case("a rise in the control alone", 64, 0.0, 1.0),
        case("the control rises nearly as much, not quite certainly", 40, 0.14, 0.07),
        case("a larger rise in the control", 64, 0.5, 1.5),
        case("a small rise, many texts", 400, 0.15, 0.0, spread=0.6),
        case("the same rise, few texts", 20, 0.15, 0.0, spread=0.6),
        case("a single text", 1, 1.0, 0.0),
    )


def _observe_claim(fn: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    found = fn(**arguments)
    if not isinstance(found, Claim):
        return {"a Claim comes back": False}
    tuned, base, control = (arguments[name].double() for name in ("tuned", "base", "control"))
    facts: dict[str, Any] = {"a Claim comes back": True}
    for name, differences in (("effect", tuned - base), ("beyond_control", tuned - control)):
        facts |= _facts_of(name, getattr(found, name), differences)
    facts["holds"] = found.holds
    facts["the sentence says something"] = len(found.says.split()) > 3
    facts["refuted_by has a number"] = any(letter.isdigit() for letter in found.refuted_by)
    return facts


def _facts_of(name: str, found: Any, differences: Float[Tensor, " n"]) -> dict[str, Any]:
    if not isinstance(found, Interval) or found.value is None:
        return {f"{name} is an Interval": False}
    facts = {
        f"{name} is an Interval": True,
        f"n of {name}": found.n,
        f"value of {name}": round(float(found.value), 4),
    }
    if len(differences) == 1:
        return facts | {f"{name} of one text has no interval": found.low is None}
    if found.low is None or found.high is None:
        return facts | {f"{name} has an interval": False}
    due = 2 * 1.96 * differences.std().item() / len(differences) ** 0.5
    width = float(found.high - found.low) / due
    return facts | {f"{name}'s interval is as wide as it should be": 0.75 < width < 1.35}


EXERCISES = (
    make_exercise(paired_permutation_test, cases=_pair_cases, observe=_observe_pairs),
    make_exercise(control_labels, cases=_label_cases, observe=_observe_labels),
    make_exercise(my_claim, cases=_claim_cases, observe=_observe_claim),
)
