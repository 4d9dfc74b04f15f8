"""Settings of supervised training, for Python and the command line alike; needs no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

from rlhf_lab.config.checks import AT_LEAST_0, AT_LEAST_1, POSITIVE, SEED, Range, check_range
from rlhf_lab.errors import ConfigError

RATE = Range(POSITIVE.holds, "finite and greater than 0")
SHARE = Range(lambda v: 0 < v < 1, "a share, such as 0.2")


@dataclass(frozen=True)
class FitConfig:
    """How something is fitted to examples, some of which are held out.

    Raises:
        ConfigError: a number out of range.
    """

    steps: int = 400
    """Optimizer steps."""
    batch_size: int = 64
    """Examples per step."""
    learning_rate: float = 1e-3
    """Peak learning rate; lower it for models larger than reel-nano."""
    held_out: float = 0.2
    """Share of the examples that is set aside to measure on."""
    seed: int = 0
    """Seeds the choice of examples, the share set aside, the batches and the samples."""
    show_progress: bool = True
    """Draw a bar with the loss and the time that is left."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_1, steps=self.steps, batch_size=self.batch_size)
        check_range(SHARE, held_out=self.held_out)
        check_range(SEED, seed=self.seed)
        check_range(RATE, learning_rate=self.learning_rate)

    def to_dict(self) -> dict[str, int | float]:
        """What decides the outcome, as plain JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "show_progress"}


@dataclass(frozen=True)
class RewardLoss:
    """The loss of a reward model on a pair of texts.

    Raises:
        ConfigError: a number below 0, or not finite.
    """

    margin: float = 0.0
    """The chosen text has to lead by this times the pair's own margin: the column margin, or on
    Reel the gap of the true rewards.
    """
    centering: float = 0.0
    """Weight of the squared sum of a pair's two scores, which holds their mean near 0."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_0, margin=self.margin, centering=self.centering)


@dataclass(frozen=True)
class DPOLoss:
    """The loss of a policy on a pair of texts. Watch the KL: with a high learning rate the
    likelihood of all texts of the pairs falls, and the model comes to write others.

    Raises:
        ConfigError: values that `dpo_loss` refuses, or a beta that is not finite.
    """

    beta: float = 0.1
    """The larger, the closer the policy stays to the reference for a preference."""
    label_smoothing: float = 0.0
    """Conservative DPO: the share of pairs that is taken to be the wrong way round."""
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO, or IPO, which drives every pair to a margin of 1 / (2 beta) nats and no further."""

    def __post_init__(self) -> None:
        import torch  # --help makes no instance, and so starts without it

        from rlhf_lab.functional import dpo_loss

        with _as_config_error():
            dpo_loss(*torch.zeros(4, 1), **asdict(self))
        check_range(RATE, beta=self.beta)


@dataclass(frozen=True)
class KTOLoss:
    """The loss of a policy on texts that are judged one by one. Where there are several times as
    many good ones as bad ones, or the reverse, weigh those that are rare, so that number times
    weight is about the same for both.

    Raises:
        ConfigError: values that `kto_loss` refuses, or that are not finite.
    """

    beta: float = 0.1
    """The larger, the closer the policy stays to the reference for what it is told."""
    good_weight: float = 1.0
    """Weight of texts that are judged good (lambda_D)."""
    bad_weight: float = 1.0
    """Weight of texts that are judged bad (lambda_U)."""

    def __post_init__(self) -> None:
        import torch  # --help makes no instance, and so starts without it

        from rlhf_lab.functional import kto_loss

        with _as_config_error():
            kto_loss(*torch.zeros(2, 1), torch.ones(1).bool(), 0.0, **asdict(self))
        check_range(RATE, beta=self.beta)
        check_range(AT_LEAST_0, good_weight=self.good_weight, bad_weight=self.bad_weight)


@dataclass(frozen=True)
class ORPOLoss:
    """The loss of a policy on a pair of texts, without a reference: it is fine-tuned on the chosen
    one, and the odds of the chosen one are raised above those of the rejected one.

    Raises:
        ConfigError: a weight that `orpo_loss` refuses, or that is not finite.
    """

    odds_weight: float = 0.1
    """Weight of the odds beside the surprise at the chosen text (lambda); SFT alone when 0."""

    def __post_init__(self) -> None:
        import torch  # --help makes no instance, and so starts without it

        from rlhf_lab.functional import orpo_loss

        with _as_config_error():
            orpo_loss(*torch.zeros(2, 1), **asdict(self))
        check_range(AT_LEAST_0, odds_weight=self.odds_weight)


@contextmanager
def _as_config_error() -> Iterator[None]:
    """What a loss refuses, as an error that the command line answers in one sentence."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class DriftEvalConfig:
    """What a model writes before and after it is tuned, to say how far it has moved.

    Raises:
        ConfigError: a number out of range.
    """

    samples: int = 256
    """Texts that the model writes; not done when 0."""
    gen_len: int = 28
    """Tokens of each at most, up to the end-of-sequence token if there is one."""

    def __post_init__(self) -> None:
        check_range(AT_LEAST_1, gen_len=self.gen_len)
        check_range(AT_LEAST_0, samples=self.samples)
