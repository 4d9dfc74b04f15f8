"""TextHeatmap: advantage, value, KL and entropy of every token of a few samples."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import unembed_residuals
from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, decimals
from rlhf_lab.training import Rollout

FIELDS = ("advantage", "value", "return", "kl", "log_ratio", "entropy")


def telescoping_error(
    advantages: Float[Tensor, "batch gen"],
    values: Float[Tensor, "batch gen"],
    rewards: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch gen"],
    gamma: float,
    lam: float,
) -> float:
    """Compute how far the advantages are from telescoping to reward minus first value.

    Returns the largest error over the rows. One-step estimates have gamma = 1, lam = 0.

    sum_t gamma^t (A_t - gamma lam A_{t+1}) = gamma^(T-1) r - V(s_0)
    (Schulman et al. 2016, arXiv 1506.02438, equations 11 and 16)
    """
    advantages, values, rewards = exact(advantages), exact(values), exact(rewards)
    mask = where_exact(mask)
    advantages = F.zero_masked(advantages, mask)
    # move the real tokens of each row together, in their order
    order = (~mask).int().sort(dim=1, stable=True).indices
    advantages, values, mask = (x.gather(1, order) for x in (advantages, values, mask))
    ahead = torch.cat([advantages[:, 1:], torch.zeros_like(advantages[:, :1])], dim=1)
    deltas = F.zero_masked(advantages - gamma * lam * ahead, mask)
    steps = torch.arange(mask.shape[1], device=mask.device)
    total = (deltas * gamma**steps).sum(1)
    last = mask.sum(1) - 1
    expected = rewards * gamma ** last.double() - values[:, 0]
    return (total - expected)[last >= 0].abs().max().item()


def sampled_log_ratio(rollout: Rollout, rows: int, observation: Observation) -> Tensor:
    """log pi - log pi_ref of each sampled token of the first rows `[rows gen]`.

    pi is the distribution that was sampled from; the reference is taken at the same temperature,
    over its whole vocabulary.
    """
    samples = rollout.samples
    logits = unembed_residuals(observation.ctx.reference, rollout.ref_residuals[:rows])
    ref_logprobs = (logits / observation.args.temperature).log_softmax(-1)
    tokens = samples.tokens[:rows, samples.prefix_len :, None]
    return samples.logprobs[:rows] - ref_logprobs.gather(-1, tokens)[..., 0]


def credited_by_values(seen: Observation) -> bool:
    """Return True if the advantages depend only on the values and the final reward."""
    args = seen.args
    by_values = (
        args.advantages in ("one_step", "gae") and "advantages" not in seen.custom_components
    )
    last_token_alone = args.kl_in == "loss" and seen.ctx.rollout.token_rewards is None
    return by_values and last_token_alone and not args.whiten_rewards


class TextHeatmap(Probe):
    """Numbers of each token of the first `n` samples of a phase, on Reel with the exact ones.

    Checks: the advantages telescope to reward minus first value; KL is not negative; in phase 0
    policy and reference agree; on Reel, the exact advantages telescope too.

    Args:
        fields: any of advantage, value, return, kl, log_ratio, entropy.
        n: samples per phase.

    Raises:
        ConfigError: If a field is unknown, or n is below 1.
    """

    name = "text_heatmap"
    question = "Which tokens of a sample get credit, and where does the KL accumulate?"
    caveat = "The first samples of a phase are few, and an advantage smears blame over tokens."
    exact_reward = True
    events = ("after_score",)

    def __init__(
        self,
        fields: tuple[str, ...] = ("advantage", "value", "kl"),
        n: int = 4,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        self.fields, self.n = fields, n
        unknown = [field for field in fields if field not in FIELDS]
        if unknown:
            raise ConfigError(f"Unknown field {unknown[0]!r}. Choose from {', '.join(FIELDS)}.")
        if n < 1:
            raise ConfigError(f"n={n} of {self.name} must be at least 1.")

    def observe(self, seen: Observation) -> Record:
        rollout: Rollout = seen.ctx.rollout
        samples, n = rollout.samples, min(self.n, len(rollout.texts))
        tokenizer = seen.ctx.policy.base_model.tokenizer
        tensors = self._numbers(seen, n) | {"mask": samples.mask[:n]}
        checks: list = [lambda: _checks(rollout, seen)]
        if seen.truth is not None:
            truth_tensors, check = _truth(rollout, n, seen)
            tensors |= truth_tensors
            checks.append(check)
        values = {
            "tokens": [spell_tokens(tokenizer, row) for row in samples.tokens[:n]],
            "prefix_len": samples.prefix_len,
            "rewards": decimals(rollout.raw_rewards[:n]),
        }
        return Record(values, tensors, checks)

    def _numbers(self, seen: Observation, n: int) -> dict[str, Tensor]:
        rollout: Rollout = seen.ctx.rollout
        everything = {
            "advantage": rollout.advantages,
            "value": rollout.samples.values,
            "return": rollout.returns,
            "kl": rollout.kl,
            "entropy": rollout.entropy,
        }
        if "log_ratio" in self.fields:
            everything["log_ratio"] = sampled_log_ratio(rollout, n, seen)
        return {name: everything[name][:n].float() for name in self.fields}


def spell_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Int[Tensor, " seq"]) -> list[str]:
    """Return what each token adds to the decoded text; joined, the pieces are the text."""
    ids = tokens.tolist()
    prefixes = [ids[:end] for end in range(1, len(ids) + 1)]
    texts = ["", *tokenizer.batch_decode(prefixes, skip_special_tokens=False)]
    return [
        text[len(before) :] if text.startswith(before) else text.rsplit(" ", 1)[-1]
        for before, text in zip(texts, texts[1:], strict=False)
    ]


def _checks(rollout: Rollout, seen: Observation) -> list[Check]:
    args, samples = seen.args, rollout.samples
    checks = []
    if credited_by_values(seen):
        is_gae = args.advantages == "gae"
        error = telescoping_error(
            rollout.advantages,
            samples.values,
            rollout.rewards,
            samples.mask,
            args.gamma,
            args.gae_lambda if is_gae else 0.0,
        )
        checks.append(Check.at_most("advantages telescope to r - V(s_0)", error, 1e-4))
    kl = F.zero_masked(rollout.kl, samples.mask)
    checks.append(Check.at_most("KL per token is not below 0", max(0.0, -kl.min().item()), 1e-5))
    starts_apart = {"reference", "interventions"} & set(seen.custom_components)
    if seen.ctx.phase == 0 and not starts_apart:
        checks.append(Check.at_most("KL is 0 before learning", kl.abs().max().item(), 1e-6))
    return checks


def _truth(rollout: Rollout, n: int, seen: Observation) -> tuple[dict[str, Tensor], Check]:
    samples, truth = rollout.samples, seen.truth
    values, advantages, defined = truth.generated(samples.tokens[:n], samples.prefix_len)
    spans_review = samples.tokens.shape[1] == truth.grammar.seq_len
    whole = defined.all(1) & spans_review
    rewards = truth.reward(rollout.texts[:n]).to(values.device)
    misses = (advantages.sum(1) - (rewards - values[:, 0])).abs()
    error = misses[whole].max().item() if bool(whole.any()) else 0.0
    check = Check.at_most("exact advantages telescope to the exact reward", error, 1e-5)
    tensors = {"true_value": values, "true_advantage": advantages, "truth_mask": defined}
    return tensors, check
