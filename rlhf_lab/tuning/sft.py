"""Supervised fine-tuning (SFT): a policy learns to write given texts."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.fitting import Fitting, OwnTexts
from rlhf_lab.functional import sft_loss
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import RewardFn
from rlhf_lab.supervised import first_and_last, fit_rows, hold_out
from rlhf_lab.tuning.drift import Drift, DriftMeter
from rlhf_lab.tuning.examples import Examples, TokenRow, encode_examples, example_logprobs


@dataclass(frozen=True)
class SFTFit:
    """How a policy was fine-tuned, and what that did to texts that were held out.

    Args:
        first_loss, last_loss: of the first and last tenth of the steps, in nats per token.
        loss_before, loss_after: on the texts held out, in nats per token.
        drift: how far it moved on texts of its own, if that was measured.
    """

    fitting: Fitting
    train_texts: int
    held_out_texts: int
    held_out_tokens: int
    first_loss: float
    last_loss: float
    loss_before: float
    loss_after: float
    drift: Drift | None

    @property
    def perplexity_before(self) -> float:
        """e to the loss before: among how many equally likely tokens the model was undecided."""
        return math.exp(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """e to the loss after."""
        return math.exp(self.loss_after)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        figures = {k: v for k, v in asdict(self).items() if k != "fitting"}
        before, after = self.perplexity_before, self.perplexity_after
        perplexities = {"perplexity_before": before, "perplexity_after": after}
        return self.fitting.to_dict() | figures | perplexities

    def summary(self) -> list[str]:
        """What fine-tuning came to, a line each."""
        return [
            f"loss {self.loss_before:.3f} -> {self.loss_after:.3f} nats per token on "
            f"{self.held_out_texts} held-out texts ({self.held_out_tokens} tokens)",
            f"perplexity {self.perplexity_before:.2f} -> {self.perplexity_after:.2f}",
            *(self.drift.summary() if self.drift else []),
        ]


def fine_tune(
    model: HookedModel,
    examples: Examples,
    fitting: Fitting,
    max_tokens: int | None = None,
    own_texts: OwnTexts | None = None,
    gold_fn: RewardFn | None = None,
) -> SFTFit:
    """Fine-tune a model on examples, in place; every hook of the model fires on the way.

    1. Set some examples aside, and take the model's loss on them.
    2. Each step: lower the mean surprise at the tokens of some examples, prompts not counted.
    3. Take the loss on the examples set aside again, and the KL from the start on own texts.

    Args:
        max_tokens: longer rows are cut; to the model's context when None.
        own_texts: what to measure the KL on, which takes a copy of the model; nothing when None.
        gold_fn: the true reward of texts, where one is known.

    Raises:
        ConfigError: fewer than 2 examples, or texts that do not fit the model.
    """
    rng = np.random.default_rng(fitting.seed)
    held_out, train = hold_out(len(examples), fitting.held_out, rng)
    prompts, texts, rendered = examples.prompts, examples.texts, examples.rendered
    rows = encode_examples(model, prompts, texts, max_tokens, rendered)
    test = [rows[i] for i in held_out]
    prompts, size = [prompts[i] for i in held_out], fitting.batch_size
    meter = DriftMeter(model, prompts, own_texts, gold_fn, fitting.seed, size, rendered=rendered)

    def batch_loss(chosen: Int[np.ndarray, " batch"]) -> Float[Tensor, ""]:
        return sft_loss(*example_logprobs(model, [rows[i] for i in chosen]))

    before, _ = held_out_loss(model, test, size)
    first, last = first_and_last(fit_rows(model, train, batch_loss, fitting, rng, "fine-tuning"))
    after, tokens = held_out_loss(model, test, size)
    return SFTFit(
        fitting=fitting,
        train_texts=len(train),
        held_out_texts=len(test),
        held_out_tokens=tokens,
        first_loss=first,
        last_loss=last,
        loss_before=before,
        loss_after=after,
        drift=meter.measure(),
    )


@torch.no_grad()
def held_out_loss(model: HookedModel, rows: list[TokenRow], batch_size: int) -> tuple[float, int]:
    """The mean surprise over all tokens that count, in nats per token, and how many they are."""
    total, count = 0.0, 0
    for start in range(0, len(rows), batch_size):
        logprobs, counts = example_logprobs(model, rows[start : start + batch_size])
        total -= logprobs[counts].sum().item()
        count += int(counts.sum())
    return total / count, count
