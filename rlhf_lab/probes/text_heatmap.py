"""TextHeatmap: advantage, value and KL of every token of a few samples."""

from os.path import commonprefix

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab import functional as F
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, decimals
from rlhf_lab.training import Rollout

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
        if seen.truth is not None:
            tokens = samples.tokens[:n]
            values, advantages, defined = seen.truth.generated(tokens, samples.prefix_len)
            tensors |= {"true_value": values, "true_advantage": advantages}
            tensors["truth_mask"] = defined & samples.mask[:n]
            beliefs = seen.truth.beliefs_by_name(tokens)
            tensors |= {f"true_{name}": x[:, samples.prefix_len :] for name, x in beliefs.items()}
        tokenizer = seen.ctx.policy.base_model.tokenizer
        values = {
            "tokens": [spell_tokens(tokenizer, row) for row in samples.tokens[:n]],
            "prefix_len": samples.prefix_len,
            "rewards": decimals(rollout.raw_rewards[:n]),
        }
        if seen.truth is not None and (steps := seen.truth.steps(samples.tokens[:n])):
            values["steps"] = steps
        return Record(values, tensors, [lambda: _check_kl(rollout, seen)])


def spell_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Int[Tensor, " seq"]) -> list[str]:
    """Return the decoded text that each token adds, U+FFFD for an unfinished character."""
    ids = tokens.tolist()
    prefixes = [ids[:end] for end in range(1, len(ids) + 1)]
    texts = ["", *tokenizer.batch_decode(prefixes, skip_special_tokens=False)]
    return [
        text[len(commonprefix([before, text])) :]
        for before, text in zip(texts, texts[1:], strict=False)
    ]


def _check_kl(rollout: Rollout, seen: Observation) -> list[Check]:
    kl = F.zero_masked(rollout.kl, rollout.samples.mask)
    checks = [Check.at_most("KL per token is not below 0", max(0.0, -kl.min().item()), 1e-5)]
    starts_apart = {"reference", "interventions"} & set(seen.custom_components)
    if seen.ctx.phase == 0 and not (starts_apart or seen.args.reference_model):
        checks.append(Check.at_most("KL is 0 before learning", kl.abs().max().item(), 1e-6))
    return checks
