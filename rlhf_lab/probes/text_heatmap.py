"""TextHeatmap: advantage, value and KL of every token of a few samples."""

from itertools import pairwise
from os.path import commonprefix

from transformers import PreTrainedTokenizerBase

from rlhf_lab import functional as F
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, decimals
from rlhf_lab.samples import Samples
from rlhf_lab.training import ReplayMinibatch, Rollout

FIELDS = ("advantage", "value", "kl")


class TextHeatmap(Probe):
    """Numbers of each token of the first `n` samples of a phase, on Reel and sums with exact ones.

    On sums also the belief in each writer after a token, and each step as written and as true.

    Checks: KL is not negative; in phase 0 policy and reference agree.

    Args:
        n: samples per phase.
    """

    name = "text_heatmap"
    question = "Which tokens of a sample get credit, and where does the KL accumulate?"
    caveat = "The first samples of a phase are few, and an advantage smears blame over tokens."
    exact_reward = True
    events = ("after_score",)
    options = ("n", *Probe.options)
    n = 4

    def observe(self, seen: Observation) -> Record:
        rollout: Rollout = seen.ctx.rollout
        samples, n = rollout.samples, min(self.n, len(rollout.texts))
        columns = rollout.advantages, samples.values, rollout.kl
        tensors = {name: x[:n].float() for name, x in zip(FIELDS, columns, strict=True)}
        tensors["mask"] = samples.mask[:n]
        tokenizer, tokens = seen.ctx.policy.base_model.tokenizer, samples.tokens[:n]
        values = {
            "tokens": spell_tokens(tokenizer, samples, n),
            "prefix_len": samples.prefix_len,
            "rewards": decimals(rollout.raw_rewards[:n]),
        }
        if seen.truth is not None:
            true_values, advantages, defined = seen.truth.generated(tokens, samples.prefix_len)
            tensors |= {"true_value": true_values, "true_advantage": advantages}
            tensors["truth_mask"] = defined & samples.mask[:n]
            beliefs = seen.truth.beliefs_by_name(tokens)
            tensors |= {f"true_{name}": x[:, samples.prefix_len :] for name, x in beliefs.items()}
            values |= {"steps": steps} if (steps := seen.truth.steps(tokens)) else {}
        return Record(values, tensors, [lambda: _check_kl(rollout, seen)])


def spell_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Samples | ReplayMinibatch, n: int | None = None
) -> list[list[str]]:
    """Return the text that each token adds: "" on left padding, U+FFFD in unfinished characters."""
    rows, starts = [], (~texts.attention_mask[:n]).sum(1).tolist()
    for row, start in zip(texts.tokens[:n].tolist(), starts, strict=True):
        prefixes = [row[start:end] for end in range(start + 1, len(row) + 1)]
        spelled = ["", *tokenizer.batch_decode(prefixes, skip_special_tokens=False)]
        added = [text[len(commonprefix([before, text])) :] for before, text in pairwise(spelled)]
        rows.append([""] * start + added)
    return rows


def _check_kl(rollout: Rollout, seen: Observation) -> list[Check]:
    kl = F.zero_masked(rollout.kl, rollout.samples.mask)
    checks = [Check.at_most("KL per token is not below 0", max(0.0, -kl.min().item()), 1e-5)]
    starts_apart = {"reference", "interventions"} & set(seen.custom_components)
    if seen.ctx.phase == 0 and not (starts_apart or seen.args.reference_model):
        checks.append(Check.at_most("KL is 0 before learning", kl.abs().max().item(), 1e-6))
    return checks
