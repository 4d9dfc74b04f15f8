"""Results of fine-tuning, as fields, JSON and lines of text."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_lab.fitting import FitConfig, KTOLoss, ORPOLoss
from rlhf_lab.rewards.preference_fit import PairFit
from rlhf_lab.tuning.kl_meter import KLEstimate


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of fine-tuning a policy.

    Args:
        first_loss, last_loss: mean over the first and last tenth of the steps.
        drift: KL from the start on samples of the model, if measured.
    """

    fitting: FitConfig
    first_loss: float
    last_loss: float
    drift: KLEstimate | None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        values = asdict(self)
        values.pop("fitting")
        return self.fitting.to_dict() | values.pop("loss", {}) | values


@dataclass(frozen=True, kw_only=True)
class SFTFitResult(FitResult):
    """Result of supervised fine-tuning; losses in nats per token, before and after on held-out."""

    train_texts: int
    held_out_texts: int
    held_out_tokens: int
    loss_before: float
    loss_after: float

    @property
    def perplexity_before(self) -> float:
        """Exponential of the loss before."""
        return math.exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """Exponential of the loss after."""
        return math.exp(self.loss_after)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and both perplexities as plain JSON values."""
        before, after = self.perplexity_before, self.perplexity_after
        return super().to_dict() | {"perplexity_before": before, "perplexity_after": after}

    def summary(self) -> list[str]:
        """Format the result, one line per quantity."""
        return [
            f"loss {self.loss_before:.3f} -> {self.loss_after:.3f} nats per token on "
            f"{self.held_out_texts} held-out texts ({self.held_out_tokens} tokens)",
            f"perplexity {self.perplexity_before:.2f} -> {self.perplexity_after:.2f}",
            *(self.drift.summary() if self.drift else []),
        ]


@dataclass(frozen=True, kw_only=True)
class PolicyFitResult(PairFit):
    """Result of training a policy on preference pairs.

    Args:
        chosen_reward, rejected_reward: mean over the held-out texts of the reward that `accuracy`
            compares: the implicit reward; for ORPO the log odds of a token.
        drift: KL from the start on samples of the model, if measured.
    """

    chosen_reward: float
    rejected_reward: float
    drift: KLEstimate | None

    @property
    def margin(self) -> float:
        """Mean reward of the chosen minus that of the rejected texts."""
        return self.chosen_reward - self.rejected_reward

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and the margin as plain JSON values."""
        return super().to_dict() | {"margin": self.margin}

    def summary(self) -> list[str]:
        """Format the result and the best possible one, one line per quantity."""
        what = "log odds per token" if isinstance(self.loss, ORPOLoss) else "implicit reward"
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} per pair",
            f"accuracy {self.accuracy:.3f} by {what} on {self.held_out_pairs} held-out pairs",
            *self.best_judge(),
            f"{what} {self.chosen_reward:+.3f} chosen, {self.rejected_reward:+.3f} "
            f"rejected, margin {self.margin:.3f}",
            *(self.drift.summary() if self.drift else []),
        ]


@dataclass(frozen=True, kw_only=True)
class KTOFitResult(FitResult):
    """Result of training a policy on labeled texts.

    Args:
        reference_point: mean estimate of the KL in the last tenth of the steps, in nats.
        accuracy: AUC of the implicit reward on held-out texts; None without good or bad ones.
        good_reward, bad_reward: mean implicit rewards of the held-out texts; None as well.
    """

    loss: KTOLoss
    train_good: int
    train_bad: int
    held_out_good: int
    held_out_bad: int
    reference_point: float
    accuracy: float | None
    good_reward: float | None
    bad_reward: float | None

    def summary(self) -> list[str]:
        """Format the result, one line per quantity."""
        counts = f"{self.held_out_good} good and {self.held_out_bad} bad held-out texts"
        line = f"implicit reward of {counts}: none of one kind to compare with"
        if self.accuracy is not None:
            line = (
                f"accuracy {self.accuracy:.3f} by implicit reward on {counts}, "
                f"{self.good_reward:+.3f} good, {self.bad_reward:+.3f} bad"
            )
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} per text, reference point "
            f"{self.reference_point:.3f} nats",
            line,
            *(self.drift.summary() if self.drift else []),
        ]
