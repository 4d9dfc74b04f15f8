"""Claims about runs with effect, control and refuting measurement, and their report."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_lab.course.tables import show_intervals, show_table
from rlhf_lab.functional import Interval


@dataclass(frozen=True)
class Claim:
    """A claim about a run, with its effect, its control and a refuting measurement.

    Args:
        says: the claim as one sentence.
        effect: the effect, tuned minus base, with its interval and n.
        beyond_control: the same, tuned minus control.
        holds: True if the measurements confirm the claim.
        refuted_by: a measurement and a number that would refute it.
    """

    says: str
    effect: Interval
    beyond_control: Interval
    holds: bool
    refuted_by: str


def show_claims(claims: Mapping[str, Claim]) -> None:
    """Print claims as a report, ordered by figure, with the measurements that would refute them."""
    rows = [[name, claim.says, "yes" if claim.holds else "no"] for name, claim in claims.items()]
    show_table(["measure", "claim", "holds"], rows)
    columns = {
        "tuned - base": {name: claim.effect for name, claim in claims.items()},
        "tuned - control": {name: claim.beyond_control for name, claim in claims.items()},
    }
    show_intervals("measure", columns)
    refuted = [[name, claim.refuted_by] for name, claim in claims.items()]
    show_table(["measure", "refuted by"], refuted)
