"""Exercises on a question of your own: an interval over seeds, and a claim that can be refuted."""

import math
import re
from collections.abc import Mapping
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.cases import Arguments, Cases, Draws
from rlhf_lab.course.exercise import Answer, make_exercise
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import seed_interval
from rlhf_lab.training.report import LearningStats, RolloutStats

CLAIM_PARTS = {"claim", "refuted by", "measure", "direction", "treated", "control", "seeds"}
CLAIM_PARTS |= {"smallest effect"}
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


def _observe_interval(fn: Answer, **arguments: Any) -> dict[str, Any]:
    found = fn(**arguments)
    number = lambda x: "none" if x is None else "nan" if math.isnan(float(x)) else float(x)
    facts = {name: number(getattr(found, name)) for name in ("value", "low", "high")}
    if isinstance(facts["low"], float) and isinstance(facts["high"], float):
        facts["high - low"] = facts["high"] - facts["low"]
    return facts | {"n": found.n, "level": found.level}


def _observe_claim(fn: Answer) -> dict[str, Any]:
    found = fn()
    if not isinstance(found, dict) or set(found) != CLAIM_PARTS:
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


EXERCISES = (
    make_exercise(seed_interval, _interval_cases, _observe_interval),
    make_exercise(seed_claim, lambda: {"your claim": {}}, _observe_claim),
)
