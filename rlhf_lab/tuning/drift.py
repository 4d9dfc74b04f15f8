"""KL of a tuned model from the model it started from, on its own samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_lab import functional as F
from rlhf_lab.chat import template_stops
from rlhf_lab.fitting import DriftEvalConfig
from rlhf_lab.models import TransformerWithValueHead, compare_with_reference
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.rewards import RewardFn
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts


@dataclass(frozen=True)
class KLEstimate:
    """Change of a model, measured on its own samples."""

    samples: int  # number of texts
    kl_per_token: float  # exact KL of the tuned model from its start, in nats
    kl_per_sequence: float
    true_reward_before: float | None  # mean true reward of its texts, if known
    true_reward_after: float | None


def measure_drift(
    model: HookedModel,
    reference: HookedModel,
    prompts: Sequence[str],
    drift_eval: DriftEvalConfig,
    true_reward_fn: RewardFn | None = None,
    seed: int = 0,
    batch_size: int = 64,
    rendered: bool = False,
) -> KLEstimate | None:
    """Measure a model's KL from its start on samples of both; None if no prompt fits.

    Args:
        reference: frozen copy of the model at its start.
        prompts: prompts to continue, in turn; too long ones are left out. "" is BOS only.
        drift_eval: size of the sample.
        true_reward_fn: the true reward of texts, if known.
        seed: seed of the noise, which is the same for both models.
        rendered: True if a chat template rendered the prompts, whose stop tokens end a sample.
    """
    tokenizer, n = model.tokenizer, drift_eval.samples
    stops = template_stops(tokenizer) if rendered else ()
    at_eos = tokenizer.eos_token_id is not None
    spec = SamplingSpec(drift_eval.gen_len, stop_at_eos=at_eos, stop_tokens=stops)
    with_bos = tokenizer.bos_token_id is not None and not rendered
    rows = tokenize_prompts(tokenizer, prompts[:n], with_bos)
    rows = [ids for ids in rows if 0 < len(ids) <= model.cfg.n_ctx - spec.gen_len]
    if not rows:
        return None
    repeated = [rows[i % len(rows)] for i in range(n)]

    def draw(source: HookedModel) -> Samples:
        policy, noise = TransformerWithValueHead(source), torch.Generator().manual_seed(seed)
        return sample(policy, repeated, spec, noise, part_size=batch_size)

    samples, true_rewards = draw(model), (None, None)
    kl = compare_with_reference(model, reference, samples, 1.0, batch_size).kl
    if true_reward_fn is not None:
        texts = draw(reference).texts(tokenizer), samples.texts(tokenizer)
        true_rewards = [true_reward_fn(each).mean().item() for each in texts]
    return KLEstimate(
        n,
        F.masked_mean(kl, samples.mask).item(),
        F.kl_per_sequence(kl, samples.mask).mean().item(),
        *true_rewards,
    )
