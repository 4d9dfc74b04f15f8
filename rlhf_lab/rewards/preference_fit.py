"""Reward model training on preference pairs, with accuracy on a hold-out set."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bradley_terry_loss
from rlhf_lab.rewards.model import RewardModel
from rlhf_lab.rewards.pairs import Pairs
from rlhf_lab.supervised import Fitting, first_and_last


@dataclass(frozen=True)
class PreferenceFit:
    """How a reward model was trained, and how often it agrees with held-out preferences.

    Args:
        accuracy: share of held-out pairs whose chosen text scores higher; a tie counts half.
        bayes_accuracy: what the best judge would reach on average, where the truth is known.
        gold_accuracy: what the truth itself reaches on these very pairs, where it is known.
        first_loss, last_loss: of the first and last tenth of the steps, in nats per pair.
        mean_score: of the texts trained on, before it is normalised away; centring holds it near 0.
    """

    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    train_pairs: int
    held_out_pairs: int
    accuracy: float
    bayes_accuracy: float | None
    gold_accuracy: float | None
    first_loss: float
    last_loss: float
    margin: float = 0.0
    centering: float = 0.0
    mean_score: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return asdict(self)


def train_reward_model(
    model: RewardModel,
    pairs: Pairs,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    held_out: float = 0.2,
    seed: int = 0,
    show_progress: bool = True,
    margin: float = 0.0,
    centering: float = 0.0,
) -> PreferenceFit:
    """Train a reward model in place.

    1. Set some pairs aside.
    2. Each step: score both texts of some pairs, and lower the Bradley-Terry loss.
    3. Take mean and standard deviation of the scores of the texts trained on.
    4. Count how many of the pairs set aside it orders rightly.

    Args:
        margin: times each pair's own margin is by how much the chosen score has to lead.
        centering: weight of the squared sum of the two scores.

    Raises:
        ConfigError: a number out of range, a margin for pairs without any, or a word outside a
        closed vocabulary.
    """
    _check_coefficients(pairs, margin, centering)
    margins = torch.zeros(len(pairs)) if pairs.margins is None else torch.tensor(pairs.margins)
    margins = (margin * margins).to(model.mean)
    fitting = Fitting(steps, batch_size, learning_rate, held_out, seed, show_progress)
    rng = np.random.default_rng(seed)
    test_rows, train_rows = fitting.split(len(pairs), rng)
    test, train = pairs[test_rows], pairs[train_rows]

    def batch_loss(rows: Int[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        batch = pairs[rows]
        chosen, rejected = model(*model.encode(batch.chosen + batch.rejected)).chunk(2)
        return bradley_terry_loss(chosen, rejected, margins[rows], centering)

    first, last = first_and_last(fitting.fit(model, train_rows, batch_loss, rng, "reward model"))
    scores = model.score(train.chosen + train.rejected)
    model.set_normalization(scores)
    return PreferenceFit(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        train_pairs=len(train),
        held_out_pairs=len(test),
        accuracy=share_ordered(model.score(test.chosen) - model.score(test.rejected)),
        bayes_accuracy=test.bayes_accuracy(),
        gold_accuracy=None
        if test.gold_gaps is None
        else share_ordered(torch.from_numpy(test.gold_gaps)),
        first_loss=first,
        last_loss=last,
        margin=margin,
        centering=centering,
        mean_score=scores.mean().item(),
    )


def _check_coefficients(pairs: Pairs, margin: float, centering: float) -> None:
    for name, value in (("margin", margin), ("centering", centering)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={value} is out of range; it must be 0 or greater.")
    if margin and pairs.margins is None:
        raise ConfigError(
            f"margin={margin} needs to know by how much each chosen text is better; take pairs "
            "with a column margin, or set margin=0."
        )


def share_ordered(gaps: Float[Tensor, " pair"]) -> float:
    """The share of positive gaps; one of 0 counts half, as a coin would decide it."""
    return ((gaps > 0).double() + 0.5 * (gaps == 0).double()).mean().item()
