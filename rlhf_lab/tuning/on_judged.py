"""Kahneman-Tversky optimization (KTO): a policy learns from texts judged one by one."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import Fitting, KTOLoss, OwnTexts
from rlhf_lab.functional import auc, implicit_rewards, kto_loss, kto_reference_point
from rlhf_lab.models import make_reference
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import RewardFn
from rlhf_lab.supervised import first_and_last, fit_rows
from rlhf_lab.tuning.drift import Drift, DriftMeter
from rlhf_lab.tuning.examples import TokenRow, encode_examples, room_of, text_logprobs
from rlhf_lab.tuning.judged import Judged


@dataclass(frozen=True, kw_only=True)
class KTOFit:
    """How a policy was tuned on judged texts, and how it judges texts that were held out.

    Args:
        first_loss, last_loss: of the first and last tenth of the steps, per text.
        reference_point: the mean estimate of the KL in the last tenth of the steps, in nats.
        accuracy: how often a good text that was held out has a higher implicit reward than a bad
            one, over all such pairs; None where one of the kinds is missing.
        good_reward, bad_reward: mean implicit rewards of the held-out texts; None likewise.
        drift: how far the policy moved on texts of its own, if that was measured.
    """

    fitting: Fitting
    loss: KTOLoss
    train_good: int
    train_bad: int
    held_out_good: int
    held_out_bad: int
    first_loss: float
    last_loss: float
    reference_point: float
    accuracy: float | None
    good_reward: float | None
    bad_reward: float | None
    drift: Drift | None

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        figures = {k: v for k, v in asdict(self).items() if k not in ("fitting", "loss")}
        return self.fitting.to_dict() | asdict(self.loss) | figures

    def summary(self) -> list[str]:
        """What tuning came to, a line each."""
        counts = f"{self.held_out_good} good and {self.held_out_bad} bad held-out texts"
        judged = f"implicit reward of {counts}: none of one kind to compare with"
        if self.accuracy is not None:
            judged = (
                f"accuracy {self.accuracy:.3f} by implicit reward on {counts}, "
                f"{self.good_reward:+.3f} good, {self.bad_reward:+.3f} bad"
            )
        return [
            f"loss {self.first_loss:.3f} -> {self.last_loss:.3f} per text, reference point "
            f"{self.reference_point:.3f} nats",
            judged,
            *(self.drift.summary() if self.drift else []),
        ]


def mismatched(batch: list[TokenRow], room: int) -> list[TokenRow]:
    """Each prompt of a batch with the response to the next one, the last with that to the first.

    Cut to `room` tokens; a prompt leaves room for one at least.
    """
    pairs = zip(batch, [*batch[1:], *batch[:1]], strict=True)
    return [
        TokenRow((own.ids[: own.prefix_len] + other.ids[other.prefix_len :])[:room], own.prefix_len)
        for own, other in pairs
    ]


def tune_on_judged(
    model: HookedModel,
    judged: Judged,
    fitting: Fitting,
    loss: KTOLoss | None = None,
    max_tokens: int | None = None,
    own_texts: OwnTexts | None = None,
    gold_fn: RewardFn | None = None,
) -> KTOFit:
    """Tune a model on texts judged one by one, in place; every hook of it fires on the way.

    1. Keep the model as it is for a reference, and set some texts aside.
    2. Each step: estimate the KL of the policy from the reference on prompts of the batch with the
       responses to others, without a gradient.
    3. Take the log-probability of the batch's own responses, and lower the loss.
    4. Take the implicit rewards of the texts set aside, and the KL from the start on own texts.

    Args:
        max_tokens: longer texts are cut; to the model's context when None.
        own_texts: what to measure the KL on; nothing when None.
        gold_fn: the true reward of texts, where one is known.

    Raises:
        ConfigError: fewer than 2 texts, batches of 1, or texts that do not fit the model.
    """
    loss, rng = loss or KTOLoss(), np.random.default_rng(fitting.seed)
    held_out, train = judged.hold_out(fitting.held_out, rng)
    if min(fitting.batch_size, len(train)) < 2:
        raise ConfigError(
            f"batch_size={fitting.batch_size} with {len(train)} texts to train on is too small for "
            "KTO, which puts prompts together with the responses to others; allow at least 2."
        )
    reference, size = make_reference(model), fitting.batch_size
    rows = encode_examples(model, judged.prompts, judged.texts, max_tokens)
    is_good = torch.from_numpy(judged.is_good)
    prompts = [judged.prompts[i] for i in held_out]
    meter = DriftMeter(model, prompts, own_texts, gold_fn, fitting.seed, size, reference)
    points = []

    def batch_loss(chosen: Int[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        own = [rows[i] for i in chosen]
        mixed = mismatched(own, room_of(model, max_tokens))
        with torch.no_grad():
            start, start_mixed = text_logprobs(reference, own + mixed).chunk(2)
            point = kto_reference_point(text_logprobs(model, mixed), start_mixed)
        points.append(point)
        labels = is_good[chosen].to(start.device)
        return kto_loss(text_logprobs(model, own), start, labels, point, **asdict(loss))

    first, last = first_and_last(fit_rows(model, train, batch_loss, fitting, rng, "KTO"))
    rewards = torch.cat(
        [
            implicit_rewards(*_both(model, reference, [rows[i] for i in part]), loss.beta)
            for part in np.array_split(held_out, -(-len(held_out) // size))
        ]
    )
    rewards, labels = exact(rewards), is_good[held_out]
    compares = bool(labels.any() and not labels.all())
    return KTOFit(
        fitting=fitting,
        loss=loss,
        train_good=int(is_good[train].sum()),
        train_bad=int((~is_good[train]).sum()),
        held_out_good=int(labels.sum()),
        held_out_bad=int((~labels).sum()),
        first_loss=first,
        last_loss=last,
        reference_point=first_and_last(torch.stack(points))[1],
        accuracy=auc(rewards, labels).item() if compares else None,
        good_reward=rewards[labels].mean().item() if compares else None,
        bad_reward=rewards[~labels].mean().item() if compares else None,
        drift=meter.measure(),
    )


@torch.no_grad()
def _both(
    model: HookedModel, reference: HookedModel, rows: list[TokenRow]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """The log-probabilities of texts under policy and reference."""
    return text_logprobs(model, rows), text_logprobs(reference, rows)
