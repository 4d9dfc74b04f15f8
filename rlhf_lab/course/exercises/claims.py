"""Exercises on claims: a test of pairs, intervals, claims that can be refuted."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.claims import Claim
from rlhf_lab.course.exercise import Answer, exercise, make_exercise
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, bootstrap_means, paired_permutation_test, seed_interval
from rlhf_lab.training.report import LearningStats, RolloutStats


def my_claim(
    tuned: Float[Tensor, " n"], base: Float[Tensor, " n"], control: Float[Tensor, " n"]
) -> Claim:
    """Decide whether a claim about a run is confirmed, given one number for each of n texts.

    Text i was sampled with the same random numbers from all three models. `tuned` is the run that
    the claim is about, and `control` is a run of the same length with a meaningless reward. The
    claim is that the run raised or lowered the number by more than training with any reward does.
    Return `Claim(says, effect, beyond_control, holds, refuted_by)`: the claim in one sentence;
    tuned minus base and tuned minus control, each as an `Interval` from `bootstrap_means`; True if
    the claim is confirmed; and a measurement, with a number, that would refute it.
    """
    effect, beyond = bootstrap_means(tuned - base), bootstrap_means(tuned - control)
    ends = (effect.low, effect.high, beyond.low, beyond.high)
    known = None not in ends
    holds = known and (min(ends).item() > 0 or max(ends).item() < 0)
    way = "raised" if effect.value > 0 else "lowered"
    return Claim(
        says=f"training {way} the mean by {abs(effect.value.item()):.2f}",
        effect=effect,
        beyond_control=beyond,
        holds=bool(holds),
        refuted_by=f"on {2 * effect.n} fresh texts of each model, an interval that contains 0",
    )


def _observe_pairs(
    fn: Answer, a: Tensor, b: Tensor, draws: int, is_seeded: bool = True
) -> dict[str, Any]:
    if not is_seeded:
        state = torch.random.get_rng_state()
        found = {fn(a, b, draws) for _ in range(3)}
        fixed = torch.equal(state, torch.random.get_rng_state()) and len(found) == 1
        return {"without a generator, every call has the same signs": fixed}
    found = fn(a, b, draws=draws, generator=torch.Generator().manual_seed(0))
    # any way to draw the signs is right: compared with the p-value over all combinations of signs
    differences = (a - b).double()
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0]).double()] * len(a)).view(-1, len(a))
    reached = (signs @ differences).abs() >= differences.sum().abs() - 1e-9
    share = reached.double().mean().item()
    exact = (1 + draws * share) / (1 + draws)
    is_near = abs(found - exact) <= 5 * (share * (1 - share) / draws) ** 0.5 + 1e-6
    return {
        "it is above 0": found > 0,
        "p-value": round(exact, 3) if is_near and found > 0 else found,
    }


@exercise(paired_permutation_test, _observe_pairs)
def _pair_cases() -> Cases:
    draws = Draws(0)
    case = lambda a, b, draws=2000: {"a": a, "b": b, "draws": draws}
    shared, small = 20 * draws.normal(10), draws.normal(10)
    ties = torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 0])
    few = torch.tensor([0.2, 0.9, 1.4, 0.3, 0.8, 0.1, 0.5])
    return {
        "a is larger": case(few + 0.5, few.flip(0)),
        "a is smaller": case(few.flip(0), few + 0.5),
        "pairs that differ a lot from each other": case(shared + 0.6 + small, shared),
        "few values, many ties": case(ties, 1 - ties.flip(0)),
        "all pairs agree, few draws": case(few + 1, few - torch.arange(7), 100),
        "alike": case(few, few.clone()),
        "one pair": case(torch.tensor([2.0]), torch.tensor([1.0])),
        "one large difference": case(torch.tensor([0.1, 0.2, -0.3, 9.0, -0.1]), torch.zeros(5)),
        "b is near 0": case(few + 0.4, torch.tensor([0.01, 1, 1, 1, 1, 1, -0.01])),
        "12 pairs": case(draws.normal(12) + 0.4, draws.normal(12)),
        "12 pairs, all one way": case(1 + draws.normal(12).abs(), torch.zeros(12), 100),
        "without a generator": case(few + 0.1, few.flip(0)) | {"is_seeded": False},
    }


def _observe_claim(fn: Answer, tuned: Tensor, base: Tensor, control: Tensor) -> dict[str, Any]:
    found = fn(tuned, base, control)
    return {
        **interval_facts("effect", found.effect, bootstrap_means(tuned - base)),
        **interval_facts("beyond_control", found.beyond_control, bootstrap_means(tuned - control)),
        "holds": found.holds,
        "the sentence has more than three words": len(found.says.split()) > 3,
        "refuted_by has a number": any(letter.isdigit() for letter in found.refuted_by),
    }


@exercise(my_claim, _observe_claim)
def _claim_cases() -> Cases:
    draws = Draws(0)

    def case(n: int, effect: float, of_control: float, spread: float = 0.3) -> Arguments:
        base, noise = draws.normal(n), spread * draws.normal(2, n)
        tuned, control = base + noise - noise.mean(1, keepdim=True)
        return {"tuned": tuned + effect, "base": base, "control": control + of_control}

    return {
        "a large rise, no change in the control": case(64, 1.0, 0.0),
        "a large fall, no change in the control": case(64, -1.0, 0.0),
        "an equally large rise in the control": case(64, 1.0, 1.0),
        "no change at all": case(64, 0.0, 0.0),
        "no change in the run, a fall in the control": case(64, 0.0, -1.0),
        "a rise in the control only": case(64, 0.0, 1.0),
        "the control rises nearly as much, with some uncertainty": case(40, 0.14, 0.07),
        "a larger rise in the control": case(64, 0.5, 1.5),
        "a small rise, many texts": case(400, 0.15, 0.0, spread=0.6),
        "the same rise, few texts": case(20, 0.15, 0.0, spread=0.6),
        "a single text": case(1, 1.0, 0.0),
    }


def interval_facts(name: str, found: Any, expected: Interval) -> dict[str, Any]:
    """Compare an interval with that of a bootstrap, which may have used other random numbers."""
    facts = {
        f"value of {name}": torch.as_tensor(found.value).double().reshape(()),
        f"n of {name}": found.n,
        f"{name} has an interval": None not in (found.low, found.high),
    }
    if None in (found.low, found.high, expected.low):
        return facts
    width = expected.high - expected.low
    ratio = float((found.high - found.low) / width)
    apart = (found.low + found.high - expected.low - expected.high).abs() / 2
    return facts | {
        f"width of {name}'s interval": next(words for limit, words in WIDTHS if ratio < limit),
        f"the middle of {name}'s interval agrees with a bootstrap": bool(apart <= 0.15 * width),
    }


WIDTHS = (
    (0.6, "far too narrow"),
    (0.85, "too narrow"),
    (1.18, "as wide as a bootstrap's"),
    (1.7, "too wide"),
    (math.inf, "far too wide"),
)
DIRECTION = r"\b(higher|lower|larger|smaller|more|less|fewer|earlier|later)\b"


def seed_claim() -> dict[str, Any]:
    """Return what you claim, what would refute it, and the pair of runs that decides.

    - "claim": one sentence, including the direction in which the treated run differs.
    - "refuted by": one sentence on the outcome that would make you give up the claim.
    - "measure": the field of the last phase's report that decides, such as "mean_reward".
    - "direction": +1 if you expect more of it in the treated run, -1 if less.
    - "treated" and "control": each run's settings, with the same fields, one of which differs.
    - "seeds": a list of at least three seeds, which both runs use.
    - "smallest effect": the smallest difference that would matter, in the measure's unit.
    """
    return {
        "claim": "After six phases the mean reward is higher with kl_coef 0.1 than with 1.0.",
        "refuted by": "An interval over seeds whose upper end is below a mean_reward gain of 0.02.",
        "measure": "mean_reward",
        "direction": 1,
        "treated": {"kl_coef": 0.1},
        "control": {"kl_coef": 1.0},
        "seeds": [1, 2, 3],
        "smallest effect": 0.02,
    }


def _observe_interval(fn: Answer, **arguments: Any) -> dict[str, Any]:
    found = fn(**arguments)
    number = lambda x: "none" if x is None else "nan" if math.isnan(float(x)) else float(x)
    facts = {name: number(getattr(found, name)) for name in ("value", "low", "high")}
    if isinstance(facts["low"], float) and isinstance(facts["high"], float):
        facts["high - low"] = facts["high"] - facts["low"]
    return facts | {"n": found.n, "level": found.level}


@exercise(seed_interval, _observe_interval)
def _interval_cases() -> Cases:
    draws = Draws(0)

    def case(n: int, spread: float = 1.0, **more: float) -> Arguments:
        between = 5 * draws.normal(n)  # what a pair has in common
        treated, control = (between + spread * draws.normal(n) for _ in range(2))
        return {"treated": treated, "control": control} | more

    apart = draws.normal(4)
    return {
        "three seeds": case(3),
        "five seeds": case(5, 0.1),
        "twelve seeds": case(12),
        "two seeds": case(2),
        "one seed": case(1),
        "80 %": case(4, level=0.8),
        "99 %": case(4, level=0.99),
        "treated near a million, in float32": {"treated": apart + 1e6, "control": apart / 3 + 0.1},
    }


def _observe_seed_claim(fn: Answer) -> dict[str, Any]:
    found = fn()
    if not isinstance(found, dict) or found.keys() != seed_claim().keys():
        return {"a dict with exactly the required keys": False}
    claim, refuted = str(found["claim"]).strip(), str(found["refuted by"]).strip()
    treated, control, seeds = found["treated"], found["control"], found["seeds"]
    are_settings = isinstance(treated, dict) and isinstance(control, dict)
    same_fields = are_settings and treated.keys() == control.keys()
    apart = [name for name in treated if treated[name] != control[name]] if same_fields else []
    fields = set(treated) | set(control) if are_settings else set()
    known = fields <= set(RLHFArgs.__dataclass_fields__)
    effect, different = found["smallest effect"], set(map(str, seeds))
    return {
        "a dict with exactly the required keys": True,
        "the claim is a statement, not a question": claim != "" and "?" not in claim,
        "the claim has a direction": bool(re.search(DIRECTION, claim, re.IGNORECASE)),
        "the refutation differs from the claim": refuted not in ("", claim),
        "the refutation contains a number": bool(re.search(r"\d", refuted)),
        "the measure is a number of a phase's report": _is_measure(found["measure"]),
        "the direction is +1 or -1": found["direction"] in (1, -1),
        "treated and control set the same fields": same_fields,
        "they are not the same run": treated != control,
        "they differ in only one field": len(apart) <= 1,
        "the seed is not one of their fields": "seed" not in fields,
        "their fields are settings of a run": are_settings and known,
        "their values are allowed": not known or all(map(_can_be_run, (treated, control))),
        "the seeds are a list of integers": isinstance(seeds, list)
        and all(type(seed) is int for seed in seeds),
        "there are at least three different seeds": len(different) >= 3,
        "no seed is listed twice": len(different) == len(seeds),
        "the smallest effect is a number above 0": isinstance(effect, int | float) and effect > 0,
    }


def _can_be_run(settings: Mapping[str, Any]) -> bool:
    try:
        RLHFArgs(**{"preset": "reel"} | settings)
    except (ConfigError, TypeError):
        return False
    return True


def _is_measure(name: object) -> bool:
    fields = RolloutStats.__dataclass_fields__ | LearningStats.__dataclass_fields__
    return isinstance(name, str) and name in fields and fields[name].type in (float, int)


_seed_claim = make_exercise(seed_claim, lambda: {"your claim": {}}, _observe_seed_claim)
