"""The Probe interface: a probe's inputs, and the records with checks that it returns."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.identity import Check
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism.truth import Truth
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.training import Context, Event, RLHFTrainer
from rlhf_lab.training.callbacks import validate_every

RESAMPLES = 400  # of a record's intervals: enough for two digits; 20 ms for 150 intervals


@dataclass(frozen=True)
class Record:
    """Results of a probe in one phase.

    Args:
        values: plain JSON values.
        tensors: by name; keep them small.
        checks: checks, or functions that return one or several; at least one.
        errors: messages of the functions that raised, whose checks are left out.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    checks: list[Check | Callable[[], Check | list[Check]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        checks, errors = [], [*self.errors]
        for check in self.checks:
            try:
                found = check() if callable(check) else check
                checks += found if isinstance(found, list) else [found]
            except Exception as error:
                errors.append(f"a check raised {type(error).__name__}: {error}")
        object.__setattr__(self, "checks", checks)
        object.__setattr__(self, "errors", errors)


@dataclass(frozen=True)
class Observation:
    """Inputs of a probe at an event.

    Args:
        ctx: the event's context.
        args: the run's settings.
        prefix_len: prompt tokens of the rollout's sequences.
        custom_components: names of the trainer's custom components.
        acts: activations of the policy at the probe's sites, on the probe's text.
        reference_acts: those of the reference, on eval text only.
        text: the eval text, if any.
        truth: exact values, if the policy starts as the grammar of a bundled language.
        gradients: of the policy's parameters by name, before clipping; at after_backward only.
        optimizer: the run's; copy what you keep of its state.
        prepared: result of the probe's `prepare` in the same step.
    """

    ctx: Context
    args: RLHFArgs
    prefix_len: int
    custom_components: list[str]
    acts: dict[str, Tensor]
    reference_acts: dict[str, Tensor]
    text: EvalText | None
    truth: Truth | None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    prepared: Any = None

    @property
    def truth_fits_labels(self) -> bool:
        """True if the labels of the eval text can be its sentiment."""
        return self.truth is not None and self.truth.fits(self.text.tokens, self.text.labels)

    def allowed(self, whole: float, half: float) -> float:
        """Tolerance of identities of activations: for fp32, or for bf16 weights."""
        return whole if self.args.weight_precision == "fp32" else half


class Probe:
    """Base class of probes, which return records at named events; subclasses define `observe`.

    A probe has no state between calls, so a resumed run records the same as an uninterrupted one.
    `phase` counts the learning phases before the event.

    Attributes:
        options: names of the arguments, in order; the class has their defaults.
        name: of the probe's files.
        question, caveat: one sentence each: the question it answers, and the limits of its numbers.
        events, prepares: events of `observe`, and of `prepare` in the same step.
        text: text of the activations: "eval", "rollout", or None.
        sites: hook names, wildcards allowed, or "logits" or "values".
        pos, n: position of these activations, and number of texts, at least `fewest`; or None, all.
        step: step of the phase, at events of a step; all when None.
        every: period in phases; the suite's `record` when None. run_end is always observed.
        needs_labels: True to require a label per eval sequence.
        exact_reward: True to compare with exact values of the reward, if any.
    """

    options: tuple[str, ...] = ("every", "name")
    name: str = "probe"
    question: str = ""
    caveat: str = ""
    events: tuple[Event, ...] = ("after_score", "run_end")
    prepares: tuple[Event, ...] = ()
    text: Literal["eval", "rollout"] | None = None
    sites: tuple[str, ...] = ()
    pos: int | None = None
    n: int | None = None
    fewest: int = 1
    step: Literal["first", "last"] | None = None
    every: int | None = None
    needs_labels: bool = False
    exact_reward: bool = False

    def __init_subclass__(cls) -> None:
        if "options" in vars(cls) or cls.__init__ is Probe.__init__:  # for help and completion
            cls.__signature__ = cls._signature()

    @classmethod
    def _signature(cls) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature(
            [inspect.Parameter(name, kind, default=getattr(cls, name)) for name in cls.options]
        )

    def __init__(self, *values: Any, **named: Any) -> None:
        passed = self._signature().bind(*values, **named).arguments
        for option in self.options:
            value = passed.get(option)
            setattr(self, option, getattr(type(self), option) if value is None else value)
        if self.n is not None and self.n < self.fewest:
            raise ConfigError(f"n={self.n} of {self.name} must be at least {self.fewest}.")
        if self.step not in (None, "first", "last"):
            raise ConfigError(f"step={self.step!r} of {self.name} must be 'first' or 'last'.")
        if self.text not in (None, "eval", "rollout"):
            raise ConfigError(f"text={self.text!r} of {self.name} must be 'eval' or 'rollout'.")
        if "text" in self.options and self.text == "rollout":
            self.events = ("after_score",)
        if self.every is not None:
            validate_every(self.every, f" of {self.name}")
        if not self.name.replace("_", "").isalnum():
            raise ConfigError(f"name={self.name!r} names files; use letters, digits and _ only.")

    def check_model(self, model: HookedModel) -> None:
        """Raise ConfigError if the probe does not support the model."""

    def check_run(self, trainer: RLHFTrainer) -> None:
        """Raise ConfigError if the probe does not support the run."""

    def prepare(self, seen: Observation) -> Any:
        """Return, at an event of `prepares`, the `seen.prepared` of `observe` in the same step."""
        raise NotImplementedError(f"{type(self).__name__} has no prepare(); write one.")

    def observe(self, seen: Observation) -> Record:
        """Return the record of an event of `events`."""
        raise NotImplementedError(f"{type(self).__name__} has no observe(); write one.")

    def settings(self) -> dict[str, Any]:
        """Description of the probe in the run's store."""
        kept = {"events": list(self.events), "sites": list(self.sites), "pos": self.pos}
        return {"name": self.name, "kind": type(self).__name__, "every": self.every} | kept


def interval_fields(name: str, interval: Interval, digits: int = 4) -> dict[str, Any]:
    """Both ends of an interval, as fields of a record; empty without an interval."""
    if interval.low is None or interval.high is None:
        return {}
    return {f"{name}_{end}": decimals(getattr(interval, end), digits) for end in ("low", "high")}


def mean_fields(name: str, x: Float[Tensor, "n ..."], digits: int = 6) -> dict[str, Any]:
    """Return the mean over rows and its bootstrap interval, as fields of a record."""
    found = bootstrap_means(x, resamples=RESAMPLES)
    return {name: decimals(found.value, digits)} | interval_fields(name, found, digits)


def decimals(x: Float[Tensor, "..."], digits: int = 6) -> Any:
    """A tensor as nested lists of numbers, rounded so that records stay small."""

    def shorten(numbers: Any) -> Any:
        if isinstance(numbers, list):
            return [shorten(number) for number in numbers]
        return round(numbers, digits)

    return shorten(x.tolist())
