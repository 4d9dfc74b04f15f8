"""An answer that gives two results for the same arguments."""

import warnings

import torch

from rlhf_lab.course.containment import Stopped
from rlhf_lab.course.exercise import Answer, Case, Exercise
from rlhf_lab.course.outcomes import Outcome, compare_outcomes, observe

SECONDS_PER_CALL, OTHER_SEED = 5.0, 1


def unrepeatable(exercise: Exercise, fn: Answer, case: Case, outcome: Outcome) -> str | None:
    """What is wrong in words, where a second call gives another result than the first did."""
    if outcome.error:
        return None
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(OTHER_SEED)  # each call of a check begins at one random state
            again = observe(exercise, fn, case, SECONDS_PER_CALL)
            is_same = compare_outcomes(outcome, again) is None
    except (Stopped, Exception):  # some results, such as meta tensors, cannot be compared
        return None
    if is_same:
        return None
    return (
        "called twice with the same arguments, it gives two results: it draws from torch's global "
        "random numbers, or keeps something from one call to the next"
    )
