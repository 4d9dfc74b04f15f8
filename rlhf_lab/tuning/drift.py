"""Drift of a tuned model: its KL from the model it started from, on its own samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_lab import functional as F
from rlhf_lab.chat import template_stops
from rlhf_lab.fitting import OwnTexts
from rlhf_lab.models import TransformerWithValueHead, compare_with_reference, make_reference
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import RewardFn
from rlhf_lab.sampling import (
    Samples,
    SamplingSpec,
    check_context,
    sample_in_parts,
    tokenize_prompts,
)


@dataclass(frozen=True)
class Drift:
    """What changed in a model's own texts.

    Args:
        samples: how many texts the figures are means of.
        kl_per_token, kl_per_sequence: exact KL of the tuned model from where it started, in nats.
        gold_before, gold_after: the mean true reward of its texts, where one is known.
    """

    samples: int
    kl_per_token: float
    kl_per_sequence: float
    gold_before: float | None
    gold_after: float | None

    def summary(self) -> list[str]:
        """How far the model has moved, a line each."""
        lines = [
            f"KL from the start {self.kl_per_token:.4f} nats per token, "
            f"{self.kl_per_sequence:.3f} per sequence, on {self.samples} texts of its own"
        ]
        if self.gold_before is not None:
            lines.append(f"their gold reward {self.gold_before:.3f} -> {self.gold_after:.3f}")
        return lines


class DriftMeter:
    """Remembers a model as it is now, to say later how far it has moved.

    Args:
        prompts: what it is to continue, in turn; those that leave no room to write are left out.
            An empty prompt is BOS alone.
        own_texts: what to write; nothing is measured when None, or without samples.
        gold_fn: the true reward of texts, where one is known.
        reference: a copy of the model that stays as it is; made when None and needed.
        rendered: a chat template wrote the prompts, and ends what is written.

    Raises:
        ConfigError: its own texts are to be longer than the model's context.
    """

    def __init__(
        self,
        model: HookedModel,
        prompts: Sequence[str],
        own_texts: OwnTexts | None,
        gold_fn: RewardFn | None = None,
        seed: int = 0,
        batch_size: int = 64,
        reference: HookedModel | None = None,
        rendered: bool = False,
    ) -> None:
        self.model, self.seed, self.batch_size = model, seed, batch_size
        self.rendered = rendered
        self.prompts: list[list[int]] = []
        if own_texts is None or not own_texts.samples:
            return
        stops = model.tokenizer.eos_token_id is not None
        check_context(model, 1, own_texts.gen_len)
        ends = template_stops(model.tokenizer) if rendered else ()
        self.spec = SamplingSpec(own_texts.gen_len, stop_at_eos=stops, stop_tokens=ends)
        self.prompts = self._that_fit(prompts, own_texts.samples)
        self.reference, self.gold_fn = reference or make_reference(model), gold_fn
        self.gold_before = self._gold(self._write()) if self.prompts and self.gold_fn else None

    def measure(self) -> Drift | None:
        """Let the model write as it is by now; None without prompts to continue."""
        if not self.prompts:
            return None
        samples = self._write()
        kl = compare_with_reference(self.model, self.reference, samples, 1.0, self.batch_size).kl
        return Drift(
            samples=len(self.prompts),
            kl_per_token=F.masked_mean(kl, samples.mask).item(),
            kl_per_sequence=F.kl_per_sequence(kl, samples.mask).mean().item(),
            gold_before=self.gold_before,
            gold_after=self._gold(samples),
        )

    def _that_fit(self, prompts: Sequence[str], count: int) -> list[list[int]]:
        """Token ids of the prompts that leave room to write, over and over up to `count`."""
        tokenizer = self.model.tokenizer
        with_bos = tokenizer.bos_token_id is not None and not self.rendered
        encoded = tokenize_prompts(tokenizer, prompts[:count], with_bos)
        longest = self.model.cfg.n_ctx - self.spec.gen_len
        fitting = [ids for ids in encoded if 0 < len(ids) <= longest]
        return [fitting[i % len(fitting)] for i in range(count)] if fitting else []

    def _write(self) -> Samples:
        policy = TransformerWithValueHead(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        return sample_in_parts(
            policy, self.prompts, self.spec, generator, part_size=self.batch_size
        )

    def _gold(self, samples: Samples) -> float | None:
        if self.gold_fn is None:
            return None
        return self.gold_fn(samples.texts(self.model.tokenizer)).mean().item()
