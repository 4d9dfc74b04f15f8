"""KL of a tuned model from the model it started from, on its own samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_lab import functional as F
from rlhf_lab.chat import template_stops
from rlhf_lab.fitting import DriftEvalConfig
from rlhf_lab.models import TransformerWithValueHead, compare_with_reference, make_reference
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import RewardFn
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec, check_context, sample, tokenize_prompts


@dataclass(frozen=True)
class KLEstimate:
    """Change of a model, measured on its own samples."""

    samples: int  # number of texts
    kl_per_token: float  # exact KL of the tuned model from its start, in nats
    kl_per_sequence: float
    true_reward_before: float | None  # mean true reward of its texts, if known
    true_reward_after: float | None


class KLMeter:
    """Record of a model's start, from which its KL is measured later.

    Args:
        prompts: prompts to continue, in turn; too long ones are left out. "" is BOS only.
        drift_eval: size of the sample.
        true_reward_fn: the true reward of texts, if known.
        reference: a frozen copy of the model; made if None and needed.
        rendered: True if a chat template rendered the prompts, whose stop tokens end a sample.
    """

    def __init__(
        self,
        model: HookedModel,
        prompts: Sequence[str],
        drift_eval: DriftEvalConfig,
        true_reward_fn: RewardFn | None = None,
        seed: int = 0,
        batch_size: int = 64,
        reference: HookedModel | None = None,
        rendered: bool = False,
    ) -> None:
        self.model, self.true_reward_fn = model, true_reward_fn
        self.seed, self.batch_size = seed, batch_size
        tokenizer, gen_len, n = model.tokenizer, drift_eval.gen_len, drift_eval.samples
        check_context(model, 1, gen_len)
        stops = template_stops(tokenizer) if rendered else ()
        at_eos = tokenizer.eos_token_id is not None
        self.spec = SamplingSpec(gen_len, stop_at_eos=at_eos, stop_tokens=stops)
        with_bos = tokenizer.bos_token_id is not None and not rendered
        rows = tokenize_prompts(tokenizer, prompts[:n], with_bos)
        rows = [ids for ids in rows if 0 < len(ids) <= model.cfg.n_ctx - gen_len]
        self.prompts = [rows[i % len(rows)] for i in range(n)] if rows else []
        self.reference = reference or make_reference(model)
        self.true_reward_before = None
        if self.prompts and true_reward_fn is not None:
            self.true_reward_before = self._true_reward(self.sample())

    def measure(self) -> KLEstimate | None:
        """Sample from the model as trained so far; None without prompts."""
        if not self.prompts:
            return None
        samples = self.sample()
        kl = compare_with_reference(self.model, self.reference, samples, 1.0, self.batch_size).kl
        return KLEstimate(
            samples=len(self.prompts),
            kl_per_token=F.masked_mean(kl, samples.mask).item(),
            kl_per_sequence=F.kl_per_sequence(kl, samples.mask).mean().item(),
            true_reward_before=self.true_reward_before,
            true_reward_after=self._true_reward(samples),
        )

    def sample(self) -> Samples:
        """Continue the prompts, with the same noise at each call."""
        policy = TransformerWithValueHead(self.model)
        generator = torch.Generator().manual_seed(self.seed)
        size = self.batch_size
        return sample(policy, self.prompts, self.spec, generator, part_size=size)

    def _true_reward(self, samples: Samples) -> float | None:
        if self.true_reward_fn is None:
            return None
        return self.true_reward_fn(samples.texts(self.model.tokenizer)).mean().item()
