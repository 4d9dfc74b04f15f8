"""Direct preference optimization (DPO, IPO) and ORPO: a policy learns from preference pairs."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import einops
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.fitting import DPOLoss, Fitting, ORPOLoss, OwnTexts
from rlhf_lab.functional import (
    dpo_loss,
    implicit_rewards,
    log_odds,
    masked_mean,
    orpo_loss,
    preference_accuracy,
)
from rlhf_lab.models import make_reference
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import Pairs, RewardFn
from rlhf_lab.rewards.preference_fit import PairFit
from rlhf_lab.supervised import first_and_last, fit_rows, hold_out
from rlhf_lab.tuning.drift import Drift, DriftMeter
from rlhf_lab.tuning.examples import TokenRow, encode_examples, example_logprobs, text_logprobs

OfPairs = Float[Tensor, "2 pair"]
"""A number for the chosen text of each pair, and one for the rejected one."""


@dataclass(frozen=True, kw_only=True)
class PolicyFit(PairFit):
    """How a policy was tuned on preferences, and how it judges pairs that were held out.

    Args:
        chosen_reward, rejected_reward: means over the held-out texts of what `accuracy` compares:
            the implicit reward; for ORPO, which has no reference, the log odds of a token.
        drift: how far the policy moved on texts of its own, if that was measured.
    """

    chosen_reward: float
    rejected_reward: float
    drift: Drift | None

    @property
    def margin(self) -> float:
        """The mean reward of the chosen text less that of the rejected one."""
        return self.chosen_reward - self.rejected_reward

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return super().to_dict() | {"margin": self.margin}

    def summary(self) -> list[str]:
        """What tuning came to, and what it can be compared with, a line each."""
        what = "log odds per token" if isinstance(self.loss, ORPOLoss) else "implicit reward"
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} per pair",
            f"accuracy {self.accuracy:.3f} by {what} on {self.held_out_pairs} held-out pairs",
            *self.best_judge(),
            f"{what} {self.chosen_reward:+.3f} chosen, {self.rejected_reward:+.3f} "
            f"rejected, margin {self.margin:.3f}",
            *(self.drift.summary() if self.drift else []),
        ]


@dataclass(frozen=True)
class _PairMethod:
    """A method of tuning on pairs: its loss, and the reward by which a policy judges texts.

    Args:
        loss, rewards: of the pairs of some rows, in a differentiable form.
        reference: the model that they compare with; None where they need none.
    """

    loss: Callable[[Int[np.ndarray, " pair"]], Float[Tensor, ""]]
    rewards: Callable[[Int[np.ndarray, " pair"]], OfPairs]
    reference: HookedModel | None


def tune_on_pairs(
    model: HookedModel,
    pairs: Pairs,
    fitting: Fitting,
    loss: DPOLoss | ORPOLoss | None = None,
    max_tokens: int | None = None,
    own_texts: OwnTexts | None = None,
    gold_fn: RewardFn | None = None,
) -> PolicyFit:
    """Tune a model on preference pairs, in place; every hook of the model fires on the way.

    1. Set some pairs aside; for DPO, keep the model as it is for a reference.
    2. Each step: take the log-probability of both texts of some pairs, and lower the loss.
    3. Take the rewards of the pairs set aside, and the KL from the start on own texts.

    Args:
        loss: DPO by default; ORPO compares with no reference, and makes none.
        max_tokens: longer texts are cut; to the model's context when None.
        own_texts: what to measure the KL on, which takes a copy of the model; nothing when None.
        gold_fn: the true reward of texts, where one is known.

    Raises:
        ConfigError: fewer than 2 pairs, or texts that do not fit the model.
    """
    loss, rng = loss or DPOLoss(), np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(pairs), fitting.held_out, rng)
    test, size = pairs[held_out], fitting.batch_size
    name, prepare = ("ORPO", _orpo) if isinstance(loss, ORPOLoss) else ("DPO", _dpo)
    method = prepare(model, pairs, loss, max_tokens)
    prompts = test.prompts or [""]
    meter = DriftMeter(model, prompts, own_texts, gold_fn, fitting.seed, size, method.reference)
    first, last = first_and_last(fit_rows(model, train, method.loss, fitting, rng, name))
    parts = np.array_split(held_out, -(-len(held_out) // size))
    with torch.no_grad():
        chosen, rejected = torch.cat([method.rewards(part) for part in parts], -1)
    return PolicyFit(
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


def _dpo(model: HookedModel, pairs: Pairs, loss: DPOLoss, max_tokens: int | None) -> _PairMethod:
    """DPO, of whole texts: what both texts of a pair start with cancels, the prompt above all."""
    reference, both = make_reference(model), pairs.chosen + pairs.rejected
    encoded = encode_examples(model, [""] * len(both), both, max_tokens)

    def logprobs(of: HookedModel, rows: Int[np.ndarray, " pair"]) -> OfPairs:
        return _of_both_sides(partial(text_logprobs, of), encoded, rows)

    def both_models(rows: Int[np.ndarray, " pair"]) -> tuple[OfPairs, OfPairs]:
        with torch.no_grad():
            start = logprobs(reference, rows)
        return logprobs(model, rows), start

    def batch_loss(rows: Int[np.ndarray, " pair"]) -> Float[Tensor, ""]:
        now, start = both_models(rows)
        return dpo_loss(*now, *start, **asdict(loss))

    def rewards(rows: Int[np.ndarray, " pair"]) -> OfPairs:
        sides = zip(*both_models(rows), strict=True)
        return torch.stack([implicit_rewards(now, start, loss.beta) for now, start in sides])

    return _PairMethod(batch_loss, rewards, reference)


def _orpo(model: HookedModel, pairs: Pairs, loss: ORPOLoss, max_tokens: int | None) -> _PairMethod:
    """ORPO: what stands behind the prompts, since the mean over its tokens is what counts."""
    prompts = pairs.prompts or [""] * len(pairs)
    both = zip(prompts * 2, pairs.chosen + pairs.rejected, strict=True)
    texts = [text.removeprefix(prompt) for prompt, text in both]
    encoded = encode_examples(model, prompts * 2, texts, max_tokens)

    def logprobs(rows: Int[np.ndarray, " pair"]) -> OfPairs:
        mean = lambda texts: masked_mean(*example_logprobs(model, texts), dim=-1)
        return _of_both_sides(mean, encoded, rows)

    def batch_loss(rows: Int[np.ndarray, " pair"]) -> Float[Tensor, ""]:
        return orpo_loss(*logprobs(rows), **asdict(loss))

    return _PairMethod(batch_loss, lambda rows: log_odds(logprobs(rows)), None)


def _of_both_sides(
    score: Callable[[list[TokenRow]], Float[Tensor, " text"]],
    encoded: list[TokenRow],
    rows: Int[np.ndarray, " pair"],
) -> OfPairs:
    """The scores of some pairs' texts, of which `encoded` holds all chosen, then all rejected."""
    texts = [encoded[i] for i in [*rows, *(rows + len(encoded) // 2)]]
    return einops.rearrange(score(texts), "(side pair) -> side pair", side=2)
