"""A rollout: one batch of samples, compared with the reference, with everything about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens import HookedTransformer

from rlhf_lab import functional as F
from rlhf_lab.models import (
    final_norm,
    final_residuals,
    has_hooks,
    read_out,
    read_token_stats,
    runs_packed,
    same_weights,
)
from rlhf_lab.sampling import Samples
from rlhf_lab.training.report import RolloutStats

TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Rollout:
    """One batch of samples with everything that was computed about it before learning.

    Args:
        samples: tokens, masks, log-probabilities and values, as the sampler noted them.
        texts: what the reward function read.
        raw_rewards: as the reward function returned them.
        rewards: what the advantages were computed from: raw rewards after penalties, scaling,
            clipping and standardising, each if so asked.
        gold_rewards: the known truth beside the reward, where there is one (Reel).
        grammatical: whether each text parses, where that is known (Reel).
        kl: exact KL of the policy from the reference, in nats per token.
        entropy: of the policy, in nats per token.
        ref_residuals: the reference's final residual at the states before each generated token.
        advantages: of each generated token, before any whitening.
        returns: the value head's target.
        ref_logprobs: of the generated tokens under the reference, if the run estimates its KL from
            them; at the same temperature and truncation as the policy's.
        reward_moments: of all rewards of the run, these included, if rewards are scaled by them.
    """

    samples: Samples
    texts: list[str]
    raw_rewards: Float[Tensor, " batch"]
    rewards: Float[Tensor, " batch"]
    gold_rewards: Float[Tensor, " batch"] | None
    grammatical: Bool[Tensor, " batch"] | None
    kl: Float[Tensor, "batch gen"]
    entropy: Float[Tensor, "batch gen"]
    ref_residuals: Float[Tensor, "batch gen d_model"]
    advantages: Float[Tensor, "batch gen"]
    returns: Float[Tensor, "batch gen"]
    ref_logprobs: Float[Tensor, "batch gen"] | None = None
    reward_moments: F.RunningMoments | None = None

    def to_tensordict(
        self, kl_coef: float = 0.0, stop_tokens: Sequence[int] = (), pad_token: int = 0
    ) -> Any:
        """The rollout as a TensorDict of torchrl's kind; see `tensordict_view.to_tensordict`."""
        from rlhf_lab.training.tensordict_view import to_tensordict

        return to_tensordict(self, kl_coef, stop_tokens, pad_token)


@torch.no_grad()
def compare_with_reference(
    model: HookedTransformer,
    reference: HookedTransformer,
    samples: Samples,
    temperature: float,
    chunk_size: int,
    dtype: torch.dtype | None = None,
) -> tuple[
    Float[Tensor, "batch gen"], Float[Tensor, "batch gen"], Float[Tensor, "batch gen d_model"]
]:
    """Exact KL and entropy of the policy at each generated token, and the reference's residuals.

    1. Run the reference over finished sequences, as far as the last residual.
    2. Take the policy's last residuals as the sampler noted them; while the policy still has the
       reference's weights, they are the reference's. Where a hook listens, which might change what
       it hears, run the policy on the same path. Either way equal weights give a KL of exactly 0.
    3. Keep the states before each generated token, and read out both logits.
    4. Take KL and entropy; keep the reference's residuals, which are far smaller than its logits.

    Args:
        chunk_size: sequences at a time; more, where little memory is needed for more.
        dtype: of the matrix products; the models' own when None.
    """
    packed, padded = runs_packed(model, reference), samples.is_padded
    noted = packed and not has_hooks(model)
    same = noted and not has_hooks(reference) and same_weights(model, reference)
    kls, entropies, residuals = [], [], []
    states = slice(samples.prefix_len - 1, -1)
    batch, seq = samples.tokens.shape
    chunk_size = max(chunk_size, TOKENS_AT_ONCE // seq) if packed else chunk_size
    for rows in torch.arange(batch, device=samples.tokens.device).split(chunk_size):
        tokens, attention_mask = samples.tokens[rows], samples.attention_mask[rows]
        settings = (tokens, attention_mask, packed, dtype, False, padded)
        ref_residual = final_residuals(reference, *settings)[:, states]
        if same:
            residual = ref_residual
        elif noted and samples.residuals is not None:
            residual = samples.residuals[rows]
        else:
            residual = final_residuals(model, *settings)[:, states]
        if packed:
            hidden, written = final_norm(model, residual)[1], tokens[:, samples.prefix_len :]
            stats = read_token_stats(
                model, reference, hidden, ref_residual, written, temperature, dtype=dtype
            )
            kl, entropy = stats.kl, stats.entropy
        else:
            logits = read_out(model, residual) / temperature
            kl = F.kl_per_token(logits, read_out(reference, ref_residual) / temperature)
            entropy = F.entropy_per_token(logits)
        kls.append(kl)
        entropies.append(entropy)
        residuals.append(ref_residual)
    return torch.cat(kls), torch.cat(entropies), torch.cat(residuals)


@torch.no_grad()
def reference_logprobs(
    reference: HookedTransformer,
    samples: Samples,
    ref_residuals: Float[Tensor, "batch gen d_model"],
    temperature: float,
    chunk_size: int,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "batch gen"]:
    """Log-probability of each generated token under the reference, as the policy's is taken.

    1. Read out the reference's residuals at the same temperature.
    2. Where sampling was truncated, renormalise over the tokens that the policy kept, so that both
       log-probabilities are of distributions over the same tokens.

    Args:
        ref_residuals, chunk_size, dtype: see `compare_with_reference`.
    """
    written, support, found = samples.tokens[:, samples.prefix_len :], samples.support, []
    for rows in torch.arange(len(written), device=written.device).split(chunk_size):
        residual = ref_residuals[rows]
        kept = None if support is None else support[rows]
        if runs_packed(reference):
            hidden = final_norm(reference, residual)[1]
            pair = None if kept is None else (kept.tokens, kept.kept)
            stats = read_token_stats(
                reference, None, hidden, None, written[rows], temperature, pair, dtype
            )
            found.append(stats.logprobs)
        else:
            logits = read_out(reference, residual)
            logits = torch.cat([logits, logits[:, -1:]], dim=1)
            scored = logits if kept is None else kept.restrict(logits, 1)
            tokens = torch.cat([written[rows][:, :1], written[rows]], dim=1)
            found.append(F.get_logprobs(scored, tokens, 1, temperature))
    return torch.cat(found)


def summarize(rollout: Rollout) -> RolloutStats:
    """What the batch says about the policy that wrote it."""
    mask = rollout.samples.mask
    found = {
        "mean_reward": rollout.raw_rewards.mean(),
        "reward_std": F.masked_std(rollout.raw_rewards),
        "kl_per_token": F.masked_mean(rollout.kl, mask),
        "kl_per_sequence": F.kl_per_sequence(rollout.kl, mask).mean(),
        "entropy_per_token": F.masked_mean(rollout.entropy, mask),
        "response_length": mask.float().sum(1).mean(),
        "explained_variance": F.explained_variance(rollout.samples.values, rollout.returns, mask),
    }
    numbers = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
    return RolloutStats(
        gold_reward=_mean(rollout.gold_rewards),
        grammatical_fraction=_mean(rollout.grammatical),
        **numbers,
    )


def _mean(x: Tensor | None) -> float | None:
    return None if x is None else x.float().mean().item()
