"""Reward model training on preference pairs, with accuracy on a hold-out set."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import DPOLoss, FitConfig, ORPOLoss, RewardLoss
from rlhf_lab.functional import bradley_terry_loss, preference_accuracy
from rlhf_lab.models.device import exact
from rlhf_lab.rewards.model import RewardModel
from rlhf_lab.rewards.pairs import Pairs
from rlhf_lab.supervised import first_and_last, fit_rows, hold_out


@dataclass(frozen=True, kw_only=True)
class PairFit:
    """The result of training on preference pairs.

    Args:
        first_loss, last_loss: of the first and last tenth of the steps, in nats per pair.
        accuracy: fraction of held-out pairs whose chosen text has the higher reward; a tie counts
            half.
        bayes_accuracy: the best possible accuracy on average, if the true rewards are known.
        true_reward_accuracy: the accuracy of the true rewards on the held-out pairs, if known.
    """

    fitting: FitConfig
    loss: RewardLoss | DPOLoss | ORPOLoss
    train_pairs: int
    held_out_pairs: int
    first_loss: float
    last_loss: float
    accuracy: float
    bayes_accuracy: float | None
    true_reward_accuracy: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain JSON values."""
        fields = asdict(self)
        del fields["fitting"], fields["loss"]
        return self.fitting.to_dict() | asdict(self.loss) | fields

    def best_judge(self) -> list[str]:
        """Return a line with the best possible accuracy, if the true rewards are known."""
        if self.bayes_accuracy is None:
            return []
        return [
            f"the best possible judge: {self.bayes_accuracy:.3f} on average, "
            f"{self.true_reward_accuracy:.3f} on these pairs"
        ]


@dataclass(frozen=True, kw_only=True)
class PreferenceFit(PairFit):
    """The result of training a reward model.

    Args:
        mean_score: of the training texts before normalization; `centering` keeps it near 0.
    """

    mean_score: float

    def summary(self) -> list[str]:
        """Return losses, accuracy and the best possible accuracy, one line each."""
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} nats per pair",
            f"accuracy {self.accuracy:.3f} on {self.held_out_pairs} held-out pairs",
            *self.best_judge(),
        ]


def train_reward_model(
    model: RewardModel,
    pairs: Pairs,
    fitting: FitConfig | None = None,
    loss: RewardLoss | None = None,
) -> PreferenceFit:
    """Train a reward model in place.

    1. Hold out some pairs.
    2. Each step: score both texts of a batch of pairs and lower the Bradley-Terry loss.
    3. Set the normalization to mean and standard deviation of the training texts' scores.
    4. Measure the accuracy on the held-out pairs.

    Raises:
        ConfigError: If there are fewer than 2 pairs, pairs without margins and a margin in the
            loss, or a word that is not in a closed vocabulary.
    """
    fitting, loss = fitting or FitConfig(), loss or RewardLoss()
    if loss.margin and pairs.margins is None:
        raise ConfigError(
            f"margin={loss.margin} requires the lead of each chosen text. Use pairs with a "
            "column margin, or set margin=0."
        )
    margins = torch.zeros(len(pairs)) if pairs.margins is None else torch.tensor(pairs.margins)
    margins = (loss.margin * margins).to(model.mean)
    rng = np.random.default_rng(fitting.seed)
    test_rows, train_rows = hold_out(len(pairs), fitting.held_out, rng)
    test, train = pairs[test_rows], pairs[train_rows]

    def batch_loss(rows: Int[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        batch = pairs[rows]
        chosen, rejected = model(*model.encode(batch.chosen + batch.rejected)).chunk(2)
        return bradley_terry_loss(chosen, rejected, margins[rows], loss.centering)

    losses = fit_rows(model, train_rows, batch_loss, fitting, rng, "reward model")
    first, last = first_and_last(losses)
    scores = model.score(train.chosen + train.rejected)
    model.set_normalization(scores)
    chosen, rejected = model.score(test.chosen), model.score(test.rejected)
    return PreferenceFit(
        fitting=fitting,
        loss=loss,
        train_pairs=len(train),
        held_out_pairs=len(test),
        first_loss=first,
        last_loss=last,
        accuracy=preference_accuracy(exact(chosen), exact(rejected)).item(),
        bayes_accuracy=test.bayes_accuracy(),
        true_reward_accuracy=test.true_reward_accuracy(),
        mean_score=scores.mean().item(),
    )
