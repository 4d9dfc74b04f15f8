"""Losses of training on encoded examples: SFT, reward model, DPO, IPO, ORPO and KTO."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import DPOLoss, KTOLoss, ORPOLoss, RewardLoss
from rlhf_lab.models import make_reference
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import Pairs, RewardModel
from rlhf_lab.tuning.examples import TokenRow, encode_examples, example_logprobs, text_logprobs
from rlhf_lab.tuning.labels import LabeledExamples, split_pairs

RowNumbers = Int[np.ndarray, " row"]


@dataclass(frozen=True)
class TuningMethod:
    """A loss of some examples, and the rewards that rank their texts."""

    title: str  # of the progress bar
    loss: Callable[[RowNumbers], Float[Tensor, ""]]  # of the examples with these row numbers
    # of the texts in these rows; of pairs `[2 pair]`, chosen first
    rewards: Callable[[RowNumbers], Float[Tensor, "*side row"]] | None = None
    reference: HookedModel | None = None  # frozen copy of the model at the start, if used
    reference_points: list[Float[Tensor, ""]] = field(default_factory=list)  # KTO's KL, each step


def sft_method(model: HookedModel, rows: list[TokenRow]) -> TuningMethod:
    """Supervised fine-tuning: mean surprise at the tokens of the texts."""
    loss = lambda batch: F.sft_loss(*example_logprobs(model, [rows[i] for i in batch]))
    return TuningMethod("fine-tuning", loss)


def reward_method(model: RewardModel, pairs: Pairs, loss: RewardLoss) -> TuningMethod:
    """Bradley-Terry loss of the scores of both texts; ConfigError for a margin without a column."""
    if loss.margin and pairs.margins is None:
        raise ConfigError(f"margin={loss.margin} requires a column margin. Or set margin=0.")
    leads = np.zeros(len(pairs)) if pairs.margins is None else pairs.margins
    margins = (loss.margin * torch.from_numpy(leads)).to(model.mean)

    def batch_loss(rows: RowNumbers) -> Float[Tensor, ""]:
        batch = pairs[rows]
        chosen, rejected = model(*model.encode(batch.chosen + batch.rejected)).chunk(2)
        return F.bradley_terry_loss(chosen, rejected, margins[rows], loss.centering)

    def rewards(rows: RowNumbers) -> Float[Tensor, "2 row"]:
        batch = pairs[rows]
        return torch.stack([model.score(batch.chosen), model.score(batch.rejected)])

    return TuningMethod("reward model", batch_loss, rewards)


def dpo_method(
    model: HookedModel, pairs: Pairs, loss: DPOLoss, max_tokens: int | None = None
) -> TuningMethod:
    """DPO or IPO of whole texts: a common beginning, such as the prompt, cancels."""
    reference, texts = make_reference(model), pairs.chosen + pairs.rejected
    both_sides = _encode_pairs(model, [""] * len(texts), texts, max_tokens)

    def logprobs(batch: RowNumbers) -> tuple[Tensor, Tensor]:
        rows = both_sides(batch)
        with torch.no_grad():
            start = text_logprobs(reference, rows)
        return text_logprobs(model, rows), start

    def batch_loss(batch: RowNumbers) -> Float[Tensor, ""]:
        policy, ref = logprobs(batch)
        return F.dpo_loss(*policy.chunk(2), *ref.chunk(2), **asdict(loss))

    def rewards(batch: RowNumbers) -> Float[Tensor, "2 row"]:
        return F.implicit_rewards(*logprobs(batch), loss.beta).unflatten(0, (2, -1))

    return TuningMethod("DPO", batch_loss, rewards, reference)


def orpo_method(
    model: HookedModel, pairs: Pairs, loss: ORPOLoss, max_tokens: int | None = None
) -> TuningMethod:
    """ORPO of the texts after the prompts, whose mean over tokens counts."""
    sides = split_pairs(pairs)
    both_sides = _encode_pairs(model, sides.prompts, sides.texts, max_tokens)

    def logprobs(batch: RowNumbers) -> Float[Tensor, " text"]:
        return F.masked_mean(*example_logprobs(model, both_sides(batch)), dim=-1)

    batch_loss = lambda batch: F.orpo_loss(*logprobs(batch).chunk(2), **asdict(loss))
    rewards = lambda batch: F.log_odds(logprobs(batch)).unflatten(0, (2, -1))
    return TuningMethod("ORPO", batch_loss, rewards)


def kto_method(
    model: HookedModel, examples: LabeledExamples, loss: KTOLoss, max_tokens: int | None = None
) -> TuningMethod:
    """KTO; the reference point is estimated on prompts combined with other responses."""
    reference, points = make_reference(model), []
    rows = encode_examples(model, examples.prompts, examples.texts, max_tokens)
    room = min(max_tokens or model.cfg.n_ctx, model.cfg.n_ctx)
    is_good = torch.from_numpy(examples.is_good)

    def batch_loss(batch: RowNumbers) -> Float[Tensor, ""]:
        texts = [rows[i] for i in batch]
        mixed = mismatch_responses(texts, room)
        with torch.no_grad():
            ref, ref_mixed = text_logprobs(reference, texts + mixed).chunk(2)
            points.append(F.kto_reference_point(text_logprobs(model, mixed), ref_mixed))
        labels = is_good[batch].to(ref.device)
        return F.kto_loss(text_logprobs(model, texts), ref, labels, points[-1], **asdict(loss))

    def rewards(batch: RowNumbers) -> Float[Tensor, " row"]:
        texts = [rows[i] for i in batch]
        policy, ref = text_logprobs(model, texts), text_logprobs(reference, texts)
        return F.implicit_rewards(policy, ref, loss.beta)

    return TuningMethod("KTO", batch_loss, rewards, reference, points)


def mismatch_responses(batch: list[TokenRow], room: int) -> list[TokenRow]:
    """Combine each prompt with the response to the next one, cut to `room` tokens."""
    pairs = zip(batch, [*batch[1:], *batch[:1]], strict=True)
    return [
        TokenRow((row.ids[: row.prefix_len] + other.ids[other.prefix_len :])[:room], row.prefix_len)
        for row, other in pairs
    ]


def _encode_pairs(
    model: HookedModel, prompts: list[str], texts: list[str], max_tokens: int | None
) -> Callable[[RowNumbers], list[TokenRow]]:
    """Return a function from pairs to their token rows, the chosen ones first."""
    rows = encode_examples(model, prompts, texts, max_tokens)
    n = len(rows) // 2
    if rows[:n] == rows[n:]:
        raise ConfigError(
            f"All {n} pairs are equal in their first {max(len(row.ids) for row in rows)} tokens, "
            "the limit of max_tokens or the model's context. Use texts that differ earlier."
        )
    return lambda batch: [rows[i] for i in [*batch, *(batch + n)]]
