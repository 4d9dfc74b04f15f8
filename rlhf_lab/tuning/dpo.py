"""Direct preference optimization (DPO): a policy learns from pairs, without a reward model."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.fitting import DPOLoss, Fitting, OwnTexts
from rlhf_lab.functional import dpo_loss, implicit_rewards, sequence_sum
from rlhf_lab.models import make_reference
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.rewards import Pairs
from rlhf_lab.rewards.preference_fit import best_judge, share_ordered
from rlhf_lab.supervised import first_and_last, fit_rows, hold_out
from rlhf_lab.tuning.drift import Drift, DriftMeter, GoldFn
from rlhf_lab.tuning.examples import TokenRow, encode_examples, example_logprobs


@dataclass(frozen=True)
class DPOFit:
    """How a policy was tuned on preferences, and how it judges pairs that were held out.

    Args:
        first_loss, last_loss: of the first and last tenth of the steps, per pair.
        accuracy: share of held-out pairs whose chosen text has the higher implicit reward.
        bayes_accuracy: what the best judge would reach on average, where the truth is known.
        gold_accuracy: what the truth itself reaches on these very pairs, where it is known.
        chosen_reward, rejected_reward: mean implicit reward of the held-out texts.
        drift: how far the policy moved on texts of its own, if that was measured.
    """

    fitting: Fitting
    loss: DPOLoss
    train_pairs: int
    held_out_pairs: int
    first_loss: float
    last_loss: float
    accuracy: float
    bayes_accuracy: float | None
    gold_accuracy: float | None
    chosen_reward: float
    rejected_reward: float
    drift: Drift | None

    @property
    def margin(self) -> float:
        """The mean implicit reward of the chosen text less that of the rejected one."""
        return self.chosen_reward - self.rejected_reward

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        figures = {k: v for k, v in asdict(self).items() if k not in ("fitting", "loss")}
        return self.fitting.to_dict() | asdict(self.loss) | figures | {"margin": self.margin}

    def summary(self) -> list[str]:
        """What tuning came to, and what it can be compared with, a line each."""
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} per pair",
            f"accuracy {self.accuracy:.3f} by implicit reward on {self.held_out_pairs} held-out "
            "pairs",
            *best_judge(self.bayes_accuracy, self.gold_accuracy),
            f"implicit reward {self.chosen_reward:+.3f} chosen, {self.rejected_reward:+.3f} "
            f"rejected, margin {self.margin:.3f}",
            *(self.drift.summary() if self.drift else []),
        ]


class _Judged(NamedTuple):
    """Implicit rewards of both texts of some pairs."""

    chosen: Float[Tensor, " pair"]
    rejected: Float[Tensor, " pair"]


class _EncodedPairs:
    """Pairs as tokens, and what policy and reference say of them."""

    def __init__(self, model: HookedTransformer, pairs: Pairs, max_tokens: int | None) -> None:
        self.model, self.reference = model, make_reference(model)
        blank = [""] * len(pairs)
        self.chosen = encode_examples(model, blank, pairs.chosen, max_tokens)
        self.rejected = encode_examples(model, blank, pairs.rejected, max_tokens)

    def logprobs(
        self, rows: Int[np.ndarray, " batch"]
    ) -> tuple[Float[Tensor, "2 batch"], Float[Tensor, "2 batch"]]:
        """The log-probability of each chosen and each rejected text: policy's, reference's."""
        both = [self.chosen[i] for i in rows] + [self.rejected[i] for i in rows]
        with torch.no_grad():
            reference = text_logprobs(self.reference, both)
        return text_logprobs(self.model, both).view(2, -1), reference.view(2, -1)

    @torch.no_grad()
    def judge(self, rows: Int[np.ndarray, " pair"], beta: float, batch_size: int) -> _Judged:
        """Implicit rewards, some pairs at a time."""
        parts = np.array_split(rows, -(-len(rows) // batch_size))
        found = torch.cat([torch.stack(self.logprobs(part)) for part in parts], -1)
        policy, reference = found
        return _Judged(*(implicit_rewards(policy[i], reference[i], beta) for i in range(2)))


def text_logprobs(model: HookedTransformer, rows: list[TokenRow]) -> Float[Tensor, " batch"]:
    """The log-probability of each whole text, in nats."""
    return sequence_sum(*example_logprobs(model, rows))


def tune_on_pairs(
    model: HookedTransformer,
    pairs: Pairs,
    fitting: Fitting,
    loss: DPOLoss | None = None,
    max_tokens: int | None = None,
    own_texts: OwnTexts | None = None,
    gold_fn: GoldFn | None = None,
) -> DPOFit:
    """Tune a model on preference pairs, in place; every hook of the model fires on the way.

    1. Keep the model as it is for a reference, and set some pairs aside.
    2. Each step: take the log-probability of both texts of some pairs under policy and reference,
       and lower the loss. What both texts of a pair start with cancels, the prompt above all.
    3. Take the implicit rewards of the pairs set aside, and the KL from the start on own texts.

    Args:
        loss: DPO with beta 0.1 when None.
        max_tokens: longer texts are cut; to the model's context when None.
        own_texts: what to measure the KL on; nothing when None.
        gold_fn: the true reward of texts, where one is known.

    Raises:
        ConfigError: fewer than 2 pairs, or texts that do not fit the model.
    """
    loss, rng = loss or DPOLoss(), np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(pairs), fitting.held_out, rng)
    test, encoded = pairs[held_out], _EncodedPairs(model, pairs, max_tokens)
    meter = DriftMeter(
        model,
        test.prompts or [""],
        own_texts,
        gold_fn,
        fitting.seed,
        fitting.batch_size,
        encoded.reference,
    )

    def batch_loss(rows: Int[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        policy, reference = encoded.logprobs(rows)
        return dpo_loss(*policy, *reference, **asdict(loss))

    first, last = first_and_last(fit_rows(model, train, batch_loss, fitting, rng, "DPO"))
    judged = encoded.judge(held_out, loss.beta, fitting.batch_size)
    gaps = test.gold_gaps
    return DPOFit(
        fitting=fitting,
        loss=loss,
        train_pairs=len(train),
        held_out_pairs=len(test),
        first_loss=first,
        last_loss=last,
        accuracy=share_ordered(judged.chosen - judged.rejected),
        bayes_accuracy=test.bayes_accuracy(),
        gold_accuracy=None if gaps is None else share_ordered(torch.from_numpy(gaps)),
        chosen_reward=judged.chosen.mean().item(),
        rejected_reward=judged.rejected.mean().item(),
        drift=meter.measure(),
    )
