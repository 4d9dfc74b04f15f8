"""Loop of fine-tuning and reward models: hold out, minimize one of the losses, and measure."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import DPOLoss, DriftEvalConfig, FitConfig, KTOLoss, ORPOLoss, RewardLoss
from rlhf_lab.models import make_reference
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import Pairs, RewardFn, RewardModel
from rlhf_lab.sampling_spec import check_context
from rlhf_lab.supervised import first_and_last, fit, hold_out
from rlhf_lab.tuning import losses
from rlhf_lab.tuning.drift import KLEstimate, measure_drift
from rlhf_lab.tuning.examples import Examples, TokenRow, encode_examples, example_logprobs
from rlhf_lab.tuning.labels import LabeledExamples
from rlhf_lab.tuning.results import FitResult


def fine_tune(
    model: HookedModel,
    examples: Examples,
    fitting: FitConfig,
    max_tokens: int | None = None,
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
) -> FitResult:
    """Fine-tune a model on examples, in place; prompts are not learned.

    Args:
        max_tokens: length to which rows are cut; the model's context if None.
        drift_eval: sample on which to measure the KL from the start; nothing if None.
        true_reward_fn: the true reward of texts, if known.

    Raises:
        ConfigError: If there are fewer than 2 examples, or texts that do not fit the model.
    """
    _check_type("examples", examples, Examples)
    rng = np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(examples), fitting.held_out, rng, "texts")
    prompts, rendered = examples.prompts, examples.rendered
    rows = encode_examples(model, prompts, examples.texts, max_tokens, rendered)
    prompts, test = [prompts[i] for i in held_out], [rows[i] for i in held_out]
    before, _ = held_out_loss(model, test, fitting.batch_size)
    method = losses.sft_method(model, rows)
    sampling = prompts, drift_eval, true_reward_fn, rendered
    values, drift = _minimize(model, method, train, fitting, rng, *sampling)
    after, tokens = held_out_loss(model, test, fitting.batch_size)
    counts = dict(train_texts=len(train), held_out_texts=len(test), held_out_tokens=tokens)
    values |= counts | dict(loss_before=before, loss_after=after)
    values |= dict(perplexity_before=math.exp(before), perplexity_after=math.exp(after))
    return FitResult(fitting, None, values, drift)


def train_reward_model(
    model: RewardModel,
    pairs: Pairs,
    fitting: FitConfig | None = None,
    loss: RewardLoss | None = None,
) -> FitResult:
    """Train a reward model on preference pairs, in place, and set its normalization.

    Raises:
        ConfigError: If there are fewer than 2 pairs, pairs without margins and a margin in the
            loss, or a word that is not in a closed vocabulary.
    """
    fitting, loss = fitting or FitConfig(), loss or RewardLoss()
    _check_type("model", model, RewardModel)
    _check_type("pairs", pairs, Pairs)
    rng = np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(pairs), fitting.held_out, rng, "pairs")
    method = losses.reward_method(model, pairs, loss)
    values, _ = _minimize(model, method, train, fitting, rng)
    scores = model.score(pairs[train].chosen + pairs[train].rejected)
    model.set_normalization(scores)
    rewards = _held_out_rewards(method, held_out, fitting.batch_size)
    values |= {"train_pairs": len(train)} | _compare_pairs(pairs[held_out], rewards)
    return FitResult(fitting, loss, values | {"mean_score": scores.mean().item()})


def train_on_pairs(
    model: HookedModel,
    pairs: Pairs,
    fitting: FitConfig,
    loss: DPOLoss | ORPOLoss | None = None,
    max_tokens: int | None = None,
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
) -> FitResult:
    """Train a model on preference pairs, in place: DPO by default, whose reference is its start.

    Arguments and errors as in `fine_tune`, also if all pairs are equal after the cut. ORPO has no
    reference.
    """
    loss, rng = loss or DPOLoss(), np.random.default_rng(fitting.seed)
    _check_type("pairs", pairs, Pairs)
    _check_type("loss", loss, DPOLoss, ORPOLoss)
    held_out, train = hold_out(len(pairs), fitting.held_out, rng, "pairs")
    make = losses.orpo_method if isinstance(loss, ORPOLoss) else losses.dpo_method
    method, sampling = make(model, pairs, loss, max_tokens), (drift_eval, true_reward_fn)
    prompts = pairs[held_out].prompts or [""]
    values, drift = _minimize(model, method, train, fitting, rng, prompts, *sampling)
    rewards = _held_out_rewards(method, held_out, fitting.batch_size)
    chosen, rejected = rewards.mean(-1).tolist()
    values |= {"train_pairs": len(train)} | _compare_pairs(pairs[held_out], rewards)
    values |= dict(chosen_reward=chosen, rejected_reward=rejected, margin=chosen - rejected)
    return FitResult(fitting, loss, values, drift)


def train_on_labels(
    model: HookedModel,
    examples: LabeledExamples,
    fitting: FitConfig,
    loss: KTOLoss | None = None,
    max_tokens: int | None = None,
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
) -> FitResult:
    """Train a model on labeled texts by KTO, in place, with its start as the reference.

    Arguments and errors as in `fine_tune`; a batch needs at least 2 texts.
    """
    loss, rng = loss or KTOLoss(), np.random.default_rng(fitting.seed)
    _check_type("examples", examples, LabeledExamples)
    _check_type("loss", loss, KTOLoss)
    held_out, train = examples.hold_out(fitting.held_out, rng)
    if (n_good := int(examples.is_good[train].sum())) in (0, len(train)):
        raise ConfigError(f"{n_good} of the {len(train)} texts to train on are good. Use both.")
    if min(fitting.batch_size, len(train)) < 2:
        raise ConfigError(
            f"batch_size={fitting.batch_size} with {len(train)} texts to train on is too small for "
            "KTO, which combines prompts with the responses to others. Allow at least 2."
        )
    method = losses.kto_method(model, examples, loss, max_tokens)
    sampling = [examples.prompts[i] for i in held_out], drift_eval, true_reward_fn
    values, drift = _minimize(model, method, train, fitting, rng, *sampling)
    rewards = exact(_held_out_rewards(method, held_out, fitting.batch_size))
    for part, rows in (("train", train), ("held_out", held_out)):
        n_good = int(examples.is_good[rows].sum())
        values |= {f"{part}_good": n_good, f"{part}_bad": len(rows) - n_good}
    values["reference_point"] = first_and_last(torch.stack(method.reference_points))[1]
    values |= dict(accuracy=None, good_reward=None, bad_reward=None)
    labels = torch.from_numpy(examples.is_good[held_out])
    if labels.any() and not labels.all():
        good, bad = rewards[labels].mean().item(), rewards[~labels].mean().item()
        values |= dict(accuracy=F.auc(rewards, labels).item(), good_reward=good, bad_reward=bad)
    return FitResult(fitting, loss, values, drift)


def _check_type(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} is a {type(value).__name__}. Pass {names}.")


def _minimize(
    model: HookedModel | RewardModel,
    method: losses.TuningMethod,
    train: losses.RowNumbers,
    fitting: FitConfig,
    rng: np.random.Generator,
    prompts: Sequence[str] = (),
    drift_eval: DriftEvalConfig | None = None,
    true_reward_fn: RewardFn | None = None,
    rendered: bool = False,
) -> tuple[dict[str, float | int | None], KLEstimate | None]:
    reference = None
    if drift_eval is not None and drift_eval.samples:
        check_context(model, 1, drift_eval.gen_len)
        reference = method.reference or make_reference(model)
    size, rate = min(fitting.batch_size, len(train)), fitting.learning_rate
    batch_loss = lambda: method.loss(rng.choice(train, size, replace=False))
    steps = fit(model, batch_loss, fitting.steps, rate, method.title, fitting.show_progress)
    first, last = first_and_last(steps)
    values = dict(first_loss=first, last_loss=last)
    if reference is None:
        return values, None
    sampling = true_reward_fn, fitting.seed, fitting.batch_size, rendered
    return values, measure_drift(model, reference, prompts, drift_eval, *sampling)


def _compare_pairs(test: Pairs, rewards: Float[Tensor, "2 pair"]) -> dict[str, float | int | None]:
    return dict(
        held_out_pairs=len(test),
        accuracy=F.preference_accuracy(*exact(rewards)).item(),
        bayes_accuracy=test.bayes_accuracy(),
        true_reward_accuracy=test.true_reward_accuracy(),
    )


@torch.no_grad()
def _held_out_rewards(
    method: losses.TuningMethod, held_out: losses.RowNumbers, size: int
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
