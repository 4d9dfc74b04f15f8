"""Settings of supervised training, for Python and the command line; needs no torch."""

from dataclasses import asdict, dataclass
from typing import Literal

from rlhf_lab.config.checks import AT_LEAST_0, AT_LEAST_1, POSITIVE, SEED, Range, check_range
from rlhf_lab.errors import ConfigError


@dataclass(frozen=True)
class FitConfig:
    """Steps, batches and held-out examples of a fit.

    Raises:
        ConfigError: If a number is out of range.
    """

    steps: int = 400
    """Optimizer steps."""
    batch_size: int = 64
    """Examples per step; all if there are fewer."""
    learning_rate: float = 1e-3
    """Peak learning rate; lower it for models larger than reel-nano."""
    held_out: float = 0.2
    """Fraction of the examples that is held out to measure on."""
    seed: int = 0
    """Seed of the choice and the split of the examples, the batches and the samples."""
    show_progress: bool = True
    """Show a progress bar with the loss and the remaining time."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_1, steps=self.steps, batch_size=self.batch_size)
        check_range(Range(lambda v: 0 < v < 1, "above 0 and below 1"), held_out=self.held_out)
        check_range(SEED, seed=self.seed)
        check_range(POSITIVE, learning_rate=self.learning_rate)

    def to_dict(self) -> dict[str, int | float]:
        """Return the settings that determine the result, as plain JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "show_progress"}


@dataclass(frozen=True)
class RewardLoss:
    """Loss of a reward model on a pair of texts."""

    margin: float = 0.0
    """Factor of the pair's margin (column margin, or on Reel the gap of the true rewards), by
    which the chosen score must exceed the other.
    """
    centering: float = 0.0
    """Weight of the squared sum of a pair's two scores, which keeps their mean near 0."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_0, margin=self.margin, centering=self.centering)


@dataclass(frozen=True)
class DPOLoss:
    """Loss of a policy on a pair of texts. Watch the KL: with a high learning rate the likelihood
    of all texts of the pairs falls, and the model generates others.
    """

    beta: float = 0.1
    """Higher beta keeps the policy closer to the reference."""
    label_smoothing: float = 0.0
    """Conservative DPO: the fraction of pairs that is assumed to be reversed."""
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO, or IPO, which drives every pair to a margin of 1 / (2 beta) nats and no further."""

    def __post_init__(self) -> None:
        check_range(POSITIVE, beta=self.beta)
        largest = 0.5 if self.kind == "sigmoid" else 1e-9
        fraction = Range(lambda v: 0 <= v < largest, "at least 0 and below 0.5, and 0 for ipo")
        check_range(fraction, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class KTOLoss:
    """Loss of a policy on single texts labeled good or bad. If one kind is several times as
    frequent, weight the rare kind, so that number times weight is about equal.
    """

    beta: float = 0.1
    """Higher beta keeps the policy closer to the reference."""
    good_weight: float = 1.0
    """Weight of good texts (lambda_D)."""
    bad_weight: float = 1.0
    """Weight of bad texts (lambda_U)."""

    def __post_init__(self) -> None:
        check_range(POSITIVE, beta=self.beta)
        check_range(AT_LEAST_0, good_weight=self.good_weight, bad_weight=self.bad_weight)
        if not self.good_weight + self.bad_weight:
            raise ConfigError("good_weight and bad_weight are both 0. Raise one of them.")


@dataclass(frozen=True)
class ORPOLoss:
    """Loss of a policy on a pair of texts without a reference: fine-tuning on the chosen text, and
    higher odds of it than of the rejected one.
    """

    odds_weight: float = 0.1
    """Weight of the odds (lambda); SFT only when 0."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_0, odds_weight=self.odds_weight)


@dataclass(frozen=True)
class DriftEvalConfig:
    """Samples before and after tuning, for the KL between the two models."""

    samples: int = 256
    """Texts to sample; no evaluation when 0."""
    gen_len: int = 28
    """Largest number of tokens of each."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_1, gen_len=self.gen_len)
        check_range(AT_LEAST_0, samples=self.samples)
