"""KLByPosition: KL from the reference at each position, exact and by k1, k2, k3."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.models import final_residuals, unembed_residuals
from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.training import Rollout

KINDS = ("k1", "k2", "k3")


def interval_by_position(
    per_token: Float[Tensor, "batch *kind gen"], mask: Bool[Tensor, "batch *kind gen"]
) -> Interval:
    """Return the mean of real tokens at each position and its bootstrap interval over sequences.

    A position without a real token has nan.
    """
    kept = F.zero_masked(exact(per_token), where_exact(mask))
    return bootstrap_means(kept, exact(mask), statistic=torch.div, resamples=RESAMPLES)


def estimates_by_position(
    logprobs: Float[Tensor, "batch gen"],
    ref_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
) -> dict[str, list[float]]:
    """Return k1, k2 and k3 at each position, in nats: the mean and its interval.

    They are over the sequences that have a real token at the position; see `kl_estimate`.
    """
    estimates = [F.kl_estimate(logprobs, ref_logprobs, kind) for kind in KINDS]
    columns = torch.stack(estimates, 1)
    intervals = interval_by_position(columns, mask[:, None].expand_as(columns))
    fields = {}
    for i, (kind, estimate) in enumerate(zip(KINDS, estimates, strict=True)):
        fields[f"{kind}_mean"] = decimals(F.masked_mean(estimate, mask, dim=0))
        fields |= interval_fields(kind, intervals[i], 6)
    return fields


class KLByPosition(Probe):
    """Exact KL at each position of the policy's samples, and by k1, k2 and k3, with intervals.

    On Reel and sums it stores slot names, and on Reel the information I_t of each position about
    the reward, which the KL should follow (Young 2026, arXiv 2603.04851).

    Checks: the positions sum to the KL per sequence.

    Args:
        n: sequences for the estimators.
    """

    name = "kl_by_position"
    question = "At which positions did the policy leave the reference?"
    caveat = "Late positions have fewer samples. On Reel, ADJ 2 is the adjective of clause 2."
    exact_reward = True
    events = ("after_score",)
    options = ("n", *Probe.options)
    n, fewest = 32, 2

    def observe(self, seen: Observation) -> Record:
        rollout: Rollout = seen.ctx.rollout
        samples, n = rollout.samples, min(self.n, len(rollout.texts))
        kl, mask = rollout.kl, samples.mask
        logits, ref_logits = both_logits(seen, slice(n))
        tokens = samples.tokens[:n, samples.prefix_len :]
        logprobs, ref_logprobs = (
            F.token_logprobs(F.log_probs(x), tokens) for x in (logits, ref_logits)
        )
        by_position = F.masked_mean(kl, mask, dim=0)
        values = {"kl": decimals(by_position), "tokens_at": mask.sum(0).tolist()}
        values |= {"sequences": {"exact": len(mask), "estimated": n}}
        values |= interval_fields("kl", interval_by_position(kl, mask), 6)
        values |= estimates_by_position(logprobs, ref_logprobs, mask[:n])
        if seen.truth is not None:
            values |= _truth(seen, samples.prefix_len, kl.shape[1])

        def check_sum() -> Check:
            total = (by_position * mask.sum(0)).sum() / len(mask)
            gap = abs(total.item() - F.kl_per_sequence(kl, mask).mean().item())
            return Check.at_most("positions sum to the KL per sequence", gap, 1e-4)

        return Record(values, checks=[check_sum])


def both_logits(seen: Observation, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the logits of policy and reference at the run's temperature, before each token."""
    rollout, temperature = seen.ctx.rollout, seen.args.temperature
    samples, model = rollout.samples, seen.ctx.policy.base_model
    residuals = final_residuals(model, samples.tokens[rows], samples.attention_mask[rows])
    logits = unembed_residuals(model, residuals[:, samples.prefix_len - 1 : -1]).float()
    ref_logits = unembed_residuals(seen.ctx.reference, rollout.ref_residuals[rows]).float()
    return logits / temperature, ref_logits / temperature


def _truth(seen: Observation, prefix_len: int, gen_len: int) -> dict[str, list]:
    seq = prefix_len + gen_len
    slots, information = seen.truth.slot_names(seq)[prefix_len:], seen.truth.information
    if information is None:
        return {"slots": slots}
    information = torch.nn.functional.pad(information, (0, seq))[:seq]
    return {"slots": slots, "information": decimals(information[prefix_len:], 9)}
