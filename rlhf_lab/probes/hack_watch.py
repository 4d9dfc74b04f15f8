"""HackWatch: collapse of samples, promoted words, and rewards above the true reward."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.hack_signs import alarm_z, promoted_words, taken_up_words
from rlhf_lab.probes.kl_by_position import both_logits
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, mean_fields
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training import Rollout
from rlhf_lab.training.random_streams import phase_generator

ORDERS = (1, 2, 3)
LOGITS_AT_ONCE = 20_000_000


class HackWatch(Probe):
    """Signs of reward hacking, without knowing which.

    1. Collapse: distinct-n, rep-n and the overlap of texts (see `functional.diversity`), compared
       with as many texts of the reference for the same prompts.
    2. Words by the logits: `promoted_mass`, the probability that a word gained at the states of the
       policy's own texts, before truncation.
    3. Words by the texts, as a baseline: log odds against the reference's (`word_log_odds`).
    4. Rewards: their spread, their excess over the true reward if it is known, and on Reel and
       sums the metrics of a language, such as the fraction of grammatical texts.

    A word raises an alarm if it is significantly more than twice as likely as in the reference (5%
    for all words together).

    Checks: promoted mass sums to 0.

    Args:
        n: number of texts, 2 or more.
    """

    name = "hack_watch"
    question = (
        "Does the policy exploit the reward: collapse, new words, or a gap to the true reward?"
    )
    caveat = "An alarm is not proof of hacking: honest learning promotes words as well."
    events = ("after_score",)
    every = 5
    options = ("n", *Probe.options)
    n, fewest = 128, 2

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        rollout: Rollout = seen.ctx.rollout
        n = min(self.n, len(rollout.texts))
        samples, theirs = rollout.samples[torch.arange(n)], reference_texts(seen, n)
        d_vocab = seen.ctx.reference.cfg.d_vocab
        won, before = _won_by_text(seen, n)
        states = samples.mask.sum(1).cpu()
        ids = (x.tokens[:, x.prefix_len :][x.mask].cpu() for x in (samples, theirs))
        counts = torch.stack([each.bincount(minlength=d_vocab) for each in ids])
        spell = seen.ctx.policy.base_model.tokenizer.decode
        promoted, alarms_by_logits = promoted_words(won, before, states, spell)
        taken_up, alarms_by_texts = taken_up_words(counts, spell)
        values = {
            "n": n,
            "orders": list(ORDERS),
            **_collapse(samples, "texts"),
            **_collapse(theirs, "reference"),
            "promoted": promoted,
            "taken_up": taken_up,
            "alarms_by_logits": alarms_by_logits,
            "alarms_by_texts": alarms_by_texts,
            "alarm_z": round(alarm_z(d_vocab), 6),
            **_rewards(rollout, n),
        }
        share = states / states.sum().clamp(min=1)
        mass = (share[:, None].double() * won).sum(0)
        tensors = {"promoted_mass": mass.float(), "counts": counts.int()}
        sums = lambda: Check.at_most("promoted mass sums to 0", abs(mass.sum().item()), 1e-6)
        return Record(values, {name: x.cpu() for name, x in tensors.items()}, [sums])


def reference_texts(seen: Observation, n: int) -> Samples:
    """Return samples of the reference for the prompts of the first n texts."""
    samples, reference = seen.ctx.rollout.samples, seen.ctx.reference
    spec = SamplingSpec.from_args(seen.args, reference.tokenizer)
    spec = replace(spec, gen_len=samples.mask.shape[1])
    generator = phase_generator(seen.args.seed, seen.ctx.phase, "reference_texts")
    return sample(TransformerWithValueHead(reference), samples.prompts()[:n], spec, generator)


def _won_by_text(
    seen: Observation, n: int
) -> tuple[Float[Tensor, "text d_vocab"], Float[Tensor, "text d_vocab"]]:
    samples, won, before = seen.ctx.rollout.samples, [], []
    at_once = max(1, LOGITS_AT_ONCE // (samples.mask.shape[1] * seen.ctx.reference.cfg.d_vocab))
    for start in range(0, n, at_once):
        rows = slice(start, min(n, start + at_once))
        for ours, others, real in zip(*both_logits(seen, rows), samples.mask[rows], strict=True):
            won.append(F.promoted_mass(ours[None], others[None], real[None]).cpu())
            probs = others.softmax(-1).masked_fill(~real[:, None], 0.0).sum(0)
            before.append((probs / real.sum().clamp(min=1)).cpu())
    return torch.stack(won), torch.stack(before)


def _collapse(samples: Samples, whose: str) -> dict[str, Any]:
    tokens, mask = samples.tokens[:, samples.prefix_len :], samples.mask
    repeated = [F.repeated_n(tokens, n, mask) for n in ORDERS]
    overlap = [F.ngram_overlap(tokens, n, mask) for n in ORDERS]
    return {
        f"distinct_{whose}": _known([F.distinct_n(tokens, n, mask) for n in ORDERS]),
        f"repeated_{whose}": _known([x.nanmean().item() for x in repeated]),
        f"overlap_{whose}": _known([x.nanmean().item() for x in overlap]),
    }


def _known(numbers: list[float]) -> list[float | None]:
    return [None if x != x else round(x, 6) for x in numbers]


def _rewards(rollout: Rollout, n: int) -> dict[str, Any]:
    columns = {"reward": rollout.raw_rewards[:n]}
    if rollout.true_rewards is not None:
        true_reward = rollout.true_rewards[:n].to(columns["reward"])
        columns |= {"true_reward": true_reward, "gap": columns["reward"] - true_reward}
    columns |= {k: x[:n] for k, x in rollout.text_metrics.items() if not x[:n].isnan().any()}
    values: dict[str, Any] = {"reward_std": round(columns["reward"].double().std().item(), 6)}
    for name, column in columns.items():
        values |= mean_fields(name, column)
    return values
