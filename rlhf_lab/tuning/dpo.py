"""Direct preference optimization (DPO): a policy learns from pairs, without a reward model."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import einops
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.fitting import DPOLoss, Fitting, OwnTexts
from rlhf_lab.functional import dpo_loss, implicit_rewards, preference_accuracy, sequence_sum
from rlhf_lab.models import make_reference
from rlhf_lab.models.device import exact
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.rewards import Pairs, RewardFn
from rlhf_lab.rewards.preference_fit import PairFit
from rlhf_lab.supervised import first_and_last, fit_rows, hold_out
from rlhf_lab.tuning.drift import Drift, DriftMeter
from rlhf_lab.tuning.examples import TokenRow, encode_examples, example_logprobs


@dataclass(frozen=True, kw_only=True)
class DPOFit(PairFit):
    """How a policy was tuned on preferences, and how its implicit reward judges held-out pairs.

    Args:
        chosen_reward, rejected_reward: mean implicit reward of the held-out texts.
        drift: how far the policy moved on texts of its own, if that was measured.
    """

    chosen_reward: float
    rejected_reward: float
    drift: Drift | None

    @property
    def margin(self) -> float:
        """The mean implicit reward of the chosen text less that of the rejected one."""
        return self.chosen_reward - self.rejected_reward

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return super().to_dict() | {"margin": self.margin}

    def summary(self) -> list[str]:
        """What tuning came to, and what it can be compared with, a line each."""
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} per pair",
            f"accuracy {self.accuracy:.3f} by implicit reward on {self.held_out_pairs} held-out "
            "pairs",
            *self.best_judge(),
            f"implicit reward {self.chosen_reward:+.3f} chosen, {self.rejected_reward:+.3f} "
            f"rejected, margin {self.margin:.3f}",
            *(self.drift.summary() if self.drift else []),
        ]


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
    gold_fn: RewardFn | None = None,
) -> DPOFit:
    """Tune a model on preference pairs, in place; every hook of the model fires on the way.

    1. Keep the model as it is for a reference, and set some pairs aside.
    2. Each step: take the log-probability of both texts of some pairs under policy and reference,
       and lower the loss. What both texts of a pair start with cancels, the prompt above all.
    3. Take the implicit rewards of the pairs set aside, and the KL from the start on own texts.

    Args:
        max_tokens: longer texts are cut; to the model's context when None.
        own_texts: what to measure the KL on; nothing when None.
        gold_fn: the true reward of texts, where one is known.

    Raises:
        ConfigError: fewer than 2 pairs, or texts that do not fit the model.
    """
    loss, rng = loss or DPOLoss(), np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(pairs), fitting.held_out, rng)
    test, reference = pairs[held_out], make_reference(model)
    both = pairs.chosen + pairs.rejected
    encoded = encode_examples(model, [""] * len(both), both, max_tokens)
    prompts, size = test.prompts or [""], fitting.batch_size
    meter = DriftMeter(model, prompts, own_texts, gold_fn, fitting.seed, size, reference)

    def logprobs(of: HookedTransformer, rows: Int[np.ndarray, " pair"]) -> Float[Tensor, "2 pair"]:
        """What a model says of each chosen and each rejected text."""
        texts = [encoded[i] for i in [*rows, *(rows + len(pairs))]]
        return einops.rearrange(text_logprobs(of, texts), "(side pair) -> side pair", side=2)

    def batch_loss(rows: Int[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        with torch.no_grad():
            start = logprobs(reference, rows)
        return dpo_loss(*logprobs(model, rows), *start, **asdict(loss))

    first, last = first_and_last(fit_rows(model, train, batch_loss, fitting, rng, "DPO"))
    parts = np.array_split(held_out, -(-len(held_out) // size))
    with torch.no_grad():
        now, start = (
            torch.cat([logprobs(of, part) for part in parts], -1) for of in (model, reference)
        )
    chosen, rejected = map(partial(implicit_rewards, beta=loss.beta), now, start)
    return DPOFit(
        fitting=fitting,
        loss=loss,
        train_pairs=len(train),
        held_out_pairs=len(test),
        first_loss=first,
        last_loss=last,
        accuracy=preference_accuracy(exact(chosen), exact(rejected)).item(),
        bayes_accuracy=test.bayes_accuracy(),
        gold_accuracy=test.gold_accuracy(),
        chosen_reward=chosen.mean().item(),
        rejected_reward=rejected.mean().item(),
        drift=meter.measure(),
    )
