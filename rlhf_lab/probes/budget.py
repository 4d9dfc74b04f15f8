"""The compute budget of probes: what is thinned or refused to keep to it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.probe import ProbeCost, RunShape

MEGABYTE = 2**20


@dataclass(frozen=True)
class Budget:
    """What a suite may add to a run.

    Args:
        mb: megabytes stored over the whole run.
        time_frac: of the run's own time.

    Raises:
        ConfigError: a value that is not a number above 0.
    """

    mb: float | int = 64
    time_frac: float | int = 0.15

    def __post_init__(self) -> None:
        for name in ("mb", "time_frac"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, float | int) or not value > 0:
                raise ConfigError(f"{name}={value!r} must be a number greater than 0.")


@dataclass(frozen=True)
class Planned:
    """How often a probe is called and what a call costs; `every` 0 means that it is refused."""

    name: str
    every: int
    cost: ProbeCost
    shares_forward: bool = False

    def calls(self, phases: int) -> int:
        """Phases in which the probe is due, and the end of the run."""
        return -(-phases // self.every) + 1 if self.every else 0


@dataclass
class Timing:
    """Measured seconds: of each probe's calls so far, of the fastest, and of the run without
    probes.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    fastest: dict[str, float] = field(default_factory=dict)
    this_phase: float = 0.0
    run_seconds: float = 0.0
    phases: int = 0

    def note(self, probe: str, seconds: float, inside_phase: bool) -> None:
        """Add one call; the trainer's own times count what happens inside a phase."""
        self.seconds[probe] = self.seconds.get(probe, 0.0) + seconds
        self.fastest[probe] = min(seconds, self.fastest.get(probe, seconds))
        self.this_phase += seconds if inside_phase else 0.0


def forward_equivalents(cost: ProbeCost, shape: RunShape) -> float | int:
    """A cost in tokens of one forward, which takes two operations per parameter and token."""
    return cost.forward_tokens + cost.flops / (2 * shape.n_parameters)


def time_share(plan: list[Planned], shape: RunShape) -> float:
    """The estimated cost of a plan as a share of the run's own.

    1. Sum what the probes cost over all of their calls.
    2. Add one forward over the eval text for each call of the most frequent probe that looks at
       it: probes share that forward.
    """
    total = sum(forward_equivalents(p.cost, shape) * p.calls(shape.phases) for p in plan)
    sharing = [p.calls(shape.phases) for p in plan if p.shares_forward]
    total += shape.eval_tokens * max(sharing, default=0)
    return total / (shape.phase_tokens * shape.phases)


def stored_megabytes(plan: list[Planned], shape: RunShape) -> float:
    """The estimated size of what a plan stores over the whole run."""
    return sum(p.cost.bytes * p.calls(shape.phases) for p in plan) / MEGABYTE


def fit_plan(
    plan: list[Planned], shape: RunShape, budget: Budget
) -> tuple[list[Planned], list[tuple[str, str]]]:
    """Thin or refuse probes until the plan keeps to the budget; also says what was done to which.

    1. While the time is over budget, halve how often the most expensive probe is called.
    2. Likewise for the megabytes.
    3. A probe that is only called at the beginning and the end, and still too expensive, is
       refused.
    """
    notes: list[tuple[str, str]] = []

    def time_of(p: Planned) -> float | int:
        own = forward_equivalents(p.cost, shape) + shape.eval_tokens * p.shares_forward
        return own * p.calls(shape.phases)

    def size_of(p: Planned) -> float | int:
        return p.cost.bytes * p.calls(shape.phases)

    while (share := time_share(plan, shape)) > budget.time_frac:
        over = f"an estimated {share:.0%} of the run's time is over time_frac={budget.time_frac}"
        plan = _thin(plan, time_of, shape.phases, over, notes)
    while (size := stored_megabytes(plan, shape)) > budget.mb:
        over = f"an estimated {size:.3g} MB is over mb={budget.mb}"
        plan = _thin(plan, size_of, shape.phases, over, notes)
    return plan, notes


def _thin(
    plan: list[Planned],
    weight: Callable[[Planned], float | int],
    phases: int,
    over: str,
    notes: list[tuple[str, str]],
) -> list[Planned]:
    """Call the weightiest probe half as often, or refuse it when that is not possible.

    Probes that share a forward are called less often together, since one alone would save nothing.
    """
    worst = max(plan, key=weight)
    together = [p for p in plan if p is worst or (worst.shares_forward and p.shares_forward)]
    thinner = [p for p in together if 0 < p.every < phases]
    if not thinner:
        notes.append((worst.name, f"refused, because {over}."))
        return [replace(p, every=0) if p is worst else p for p in plan]
    for p in thinner:
        changed = f"every {p.every} phases -> every {2 * p.every}, because {over}."
        notes.append((p.name, changed))
    return [replace(p, every=2 * p.every) if p in thinner else p for p in plan]
