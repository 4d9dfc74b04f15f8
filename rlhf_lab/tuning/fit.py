"""The loop of fine-tuning: fit a policy by SFT, DPO, IPO, ORPO or KTO, and measure the result."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss
from rlhf_lab.functional import auc, preference_accuracy
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import Pairs, RewardFn
from rlhf_lab.supervised import first_and_last, fit_rows, hold_out
from rlhf_lab.tuning.examples import Examples, TokenRow, encode_examples, example_logprobs
from rlhf_lab.tuning.kl_meter import KLMeter
from rlhf_lab.tuning.labels import LabeledExamples
from rlhf_lab.tuning.losses import TuningMethod, dpo_method, kto_method, orpo_method, sft_method
from rlhf_lab.tuning.results import KTOFitResult, PolicyFitResult, SFTFitResult


def fine_tune(
    model: HookedModel,
    examples: Examples,
    fitting: FitConfig,
    max_tokens: int | None = None,
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
) -> SFTFitResult:
    """Fine-tune a model on examples, in place; prompts are not learned.

    Args:
        max_tokens: length to which rows are cut; the model's context if None.
        drift_eval: sample on which to measure the KL from the start; nothing if None.
        true_reward_fn: the true reward of texts, if known.

    Raises:
        ConfigError: If there are fewer than 2 examples, or texts that do not fit the model.
    """
    rng = np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(examples), fitting.held_out, rng)
    prompts, rendered = examples.prompts, examples.rendered
    rows = encode_examples(model, prompts, examples.texts, max_tokens, rendered)
    prompts, test = [prompts[i] for i in held_out], [rows[i] for i in held_out]
    before, _ = held_out_loss(model, test, fitting.batch_size)
    method = sft_method(model, rows)
    result = _run(model, method, train, fitting, rng, prompts, drift_eval, true_reward_fn, rendered)
    after, tokens = held_out_loss(model, test, fitting.batch_size)
    return SFTFitResult(
        **result,
        train_texts=len(train),
        held_out_texts=len(test),
        held_out_tokens=tokens,
        loss_before=before,
        loss_after=after,
    )


def train_on_pairs(
    model: HookedModel,
    pairs: Pairs,
    fitting: FitConfig,
    loss: DPOLoss | ORPOLoss | None = None,
    max_tokens: int | None = None,
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
) -> PolicyFitResult:
    """Train a model on preference pairs, in place: DPO by default, whose reference is its start.

    Arguments and errors as in `fine_tune`, also if all pairs are equal after the cut. ORPO has no
    reference.
    """
    loss, rng = loss or DPOLoss(), np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(pairs), fitting.held_out, rng)
    test, make = pairs[held_out], orpo_method if isinstance(loss, ORPOLoss) else dpo_method
    method, prompts = make(model, pairs, loss, max_tokens), test.prompts or [""]
    result = _run(model, method, train, fitting, rng, prompts, drift_eval, true_reward_fn)
    chosen, rejected = _held_out_rewards(method, held_out, fitting.batch_size)
    return PolicyFitResult(
        **result,
        loss=loss,
        train_pairs=len(train),
        held_out_pairs=len(test),
        accuracy=preference_accuracy(exact(chosen), exact(rejected)).item(),
        bayes_accuracy=test.bayes_accuracy(),
        true_reward_accuracy=test.true_reward_accuracy(),
        chosen_reward=chosen.mean().item(),
        rejected_reward=rejected.mean().item(),
    )


def train_on_labels(
    model: HookedModel,
    examples: LabeledExamples,
    fitting: FitConfig,
    loss: KTOLoss | None = None,
    max_tokens: int | None = None,
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
) -> KTOFitResult:
    """Train a model on labeled texts by KTO, in place, with its start as the reference.

    Arguments and errors as in `fine_tune`; a batch needs at least 2 texts.
    """
    loss, rng = loss or KTOLoss(), np.random.default_rng(fitting.seed)
    held_out, train = examples.hold_out(fitting.held_out, rng)
    if min(fitting.batch_size, len(train)) < 2:
        raise ConfigError(
            f"batch_size={fitting.batch_size} with {len(train)} texts to train on is too small for "
            "KTO, which combines prompts with the responses to others. Allow at least 2."
        )
    method = kto_method(model, examples, loss, max_tokens)
    prompts = [examples.prompts[i] for i in held_out]
    result = _run(model, method, train, fitting, rng, prompts, drift_eval, true_reward_fn)
    rewards = exact(_held_out_rewards(method, held_out, fitting.batch_size))
    labels, train_labels = torch.from_numpy(examples.is_good[held_out]), examples.is_good[train]
    has_both = bool(labels.any() and not labels.all())
    return KTOFitResult(
        **result,
        loss=loss,
        train_good=int(train_labels.sum()),
        train_bad=int((~train_labels).sum()),
        held_out_good=int(labels.sum()),
        held_out_bad=int((~labels).sum()),
        reference_point=first_and_last(torch.stack(method.reference_points))[1],
        accuracy=auc(rewards, labels).item() if has_both else None,
        good_reward=rewards[labels].mean().item() if has_both else None,
        bad_reward=rewards[~labels].mean().item() if has_both else None,
    )


def _run(
    model: HookedModel,
    method: TuningMethod,
    train: Int[np.ndarray, " train"],
    fitting: FitConfig,
    rng: np.random.Generator,
    prompts: Sequence[str],
    drift_eval: DriftEvalConfig | None,
    true_reward_fn: RewardFn | None,
    rendered: bool = False,
) -> dict[str, Any]:
    """Minimize the loss on the training rows; return the fields of a `FitResult`."""
    sampling = (fitting.seed, fitting.batch_size, method.reference, rendered)
    meter = KLMeter(model, prompts, drift_eval, true_reward_fn, *sampling)
    losses = fit_rows(model, train, method.loss, fitting, rng, method.title)
    first, last = first_and_last(losses)
    return dict(fitting=fitting, first_loss=first, last_loss=last, drift=meter.measure())


@torch.no_grad()
def _held_out_rewards(
    method: TuningMethod, held_out: Int[np.ndarray, " held_out"], size: int
) -> Float[Tensor, "*side held_out"]:
    parts = np.array_split(held_out, -(-len(held_out) // size))
    return torch.cat([method.rewards(part) for part in parts], -1)


@torch.no_grad()
def held_out_loss(model: HookedModel, rows: list[TokenRow], batch_size: int) -> tuple[float, int]:
    """Return the mean surprise over all learned tokens, in nats per token, and their number."""
    total, count = 0.0, 0
    for start in range(0, len(rows), batch_size):
        logprobs, mask = example_logprobs(model, rows[start : start + batch_size])
        total -= logprobs[mask].sum().item()
        count += int(mask.sum())
    return total / count, count
