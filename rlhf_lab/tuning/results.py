"""Result of training on data, as fields, JSON and lines of text."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_lab.fitting import DPOLoss, FitConfig, KTOLoss, ORPOLoss, RewardLoss
from rlhf_lab.tuning.drift import KLEstimate


@dataclass(frozen=True)
class FitResult:
    """Result of training on data, some of which was held out.

    `values` are by method:

    - all: `first_loss`, `last_loss`, means over the first and last tenth of the steps.
    - SFT: `train_texts`, `held_out_texts`, `held_out_tokens`; `loss_before` and `loss_after` of
      held-out texts in nats per token; `perplexity_before` and `perplexity_after`, their exp.
    - pairs: `train_pairs`, `held_out_pairs`; `accuracy`, the fraction of held-out pairs whose
      chosen text has the higher reward, where a tie counts half; the `bayes_accuracy` of the best
      possible judge and the `true_reward_accuracy` of the true rewards, None if unknown.
    - policies on pairs: `chosen_reward`, `rejected_reward`, means of the implicit reward, or of the
      log odds of a token for ORPO; `margin`, their difference.
    - reward models: `mean_score` of the training texts, which `centering` keeps near 0.
    - KTO: the numbers of good and bad texts in both parts; `reference_point`, the mean estimate of
      the KL in the last tenth of the steps; `accuracy`, the AUC of the implicit reward on held-out
      texts, and `good_reward`, `bad_reward`, its means; None without texts of a kind.
    """

    fitting: FitConfig
    loss: RewardLoss | DPOLoss | ORPOLoss | KTOLoss | None  # None for SFT
    values: Mapping[str, float | int | None]
    drift: KLEstimate | None = None  # KL from the start on samples of the model, if measured

    def to_dict(self) -> dict[str, Any]:
        """Return settings and results as plain JSON values."""
        loss = {} if self.loss is None else asdict(self.loss)
        drift = None if self.drift is None else asdict(self.drift)
        return self.fitting.to_dict() | loss | dict(self.values) | {"drift": drift}

    def summary(self) -> list[str]:
        """Format each value with its name, one per line."""
        values = self.values | ({} if self.drift is None else asdict(self.drift))
        return [
            f"{name.replace('_', ' ')} {value if isinstance(value, int) else f'{value:.3f}'}"
            for name, value in values.items()
            if value is not None
        ]
