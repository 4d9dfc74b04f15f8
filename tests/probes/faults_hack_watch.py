"""Faults of HackWatch, written before the checks were run on them."""

from tests.probes.planting import Fault

OBSERVE = "hack_watch:HackWatch.observe"
WON = "hack_watch:_won_by_text"


def _fault(name: str, where: str, old: str, new: str, run: str = "plain") -> Fault:
    return Fault(name, "HackWatch", where, old, new, run)


HACK_FAULTS = (
    _fault("H1 states one too late", WON, "samples.prefix_len - 1, -1", "samples.prefix_len, None"),
    _fault(
        "H2 reference less policy",
        WON,
        "F.promoted_mass(own[None], others[None]",
        "F.promoted_mass(others[None], own[None]",
    ),
    _fault(
        "H3 temperature forgotten for the policy",
        WON,
        "ours[rows]).float() / temperature",
        "ours[rows]).float()",
        "warm",
    ),
    _fault(
        "H4 reference's logits of other rows",
        WON,
        "rollout.ref_residuals[rows]",
        "rollout.ref_residuals[rows].roll(1, 0)",
    ),
    _fault(
        "H5 padding counts among the states",
        WON,
        "others[None], real[None])",
        "others[None], None)",
        "padded",
    ),
    _fault(
        "H6 a mean over texts in place of states",
        OBSERVE,
        "share = states / states.sum().clamp(min=1)",
        "share = torch.ones(n) / n",
        "padded",
    ),
    _fault("H7 words of the next id", OBSERVE, "spell([token])", "spell([token + 1])"),
    _fault(
        "H8 prompts are counted",
        "hack_watch:_counts",
        "samples.tokens[:, samples.prefix_len :][samples.mask]",
        "samples.tokens[:, 1:].flatten()",
    ),
    _fault(
        "H9 texts of the policy in place of the reference's",
        "hack_watch:reference_texts",
        "TransformerWithValueHead(reference)",
        "seen.ctx.policy",
    ),
    _fault(
        "H10 texts for other prompts",
        "hack_watch:reference_texts",
        "samples.prompts()[:n]",
        "samples.prompts()[:n][::-1]",
        "padded",
    ),
    _fault(
        "H11 n-grams reach into the padding",
        "hack_watch:_collapse",
        "tokens, mask = samples.tokens[:, samples.prefix_len :], samples.mask",
        "tokens = samples.tokens[:, samples.prefix_len :]; mask = torch.ones_like(samples.mask)",
        "padded",
    ),
    _fault(
        "H12 n-grams across texts",
        "functional.diversity:distinct_n",
        "_ngrams(tokens, n, mask)",
        "_ngrams(tokens.reshape(1, -1), n, None if mask is None else mask.reshape(1, -1))",
        "hacked",
    ),
    _fault(
        "H13 distinct texts by the number of texts",
        "functional.diversity:repeated_n",
        "len(set(ngrams)) / len(ngrams)",
        "1 / len(ngrams)",
    ),
    _fault(
        "H14 a text overlaps with itself",
        "functional.diversity:ngram_overlap",
        "counts[ngram] - 1",
        "counts[ngram]",
    ),
    _fault(
        "H15 a flat prior",
        "functional.diversity:word_log_odds",
        "prior_tokens * together / together.sum().clamp(min=1)",
        "prior_tokens / len(together)",
    ),
    _fault(
        "H16 log probabilities for log odds",
        "functional.diversity:word_log_odds",
        "torch.where(is_defined, rest, 1.0).log()",
        "torch.where(is_defined, smooth.sum(1, keepdim=True), 1.0).log()",
    ),
    _fault(
        "H17 ranked by log odds, not by z",
        "hack_signs:most_taken_up",
        "found.z.topk",
        "found.log_odds.topk",
    ),
    _fault(
        "H18 counts of both sides exchanged",
        OBSERVE,
        "for each in (samples, theirs)]",
        "for each in (theirs, samples)]",
    ),
    _fault(
        "H19 ranked by size, up or down",
        "hack_signs:most_promoted",
        "(share * won).sum(0).topk",
        "(share * won).sum(0).abs().topk",
    ),
    _fault(
        "H20 the interval of unweighted texts",
        "hack_signs:most_promoted",
        "won * weight, weight.expand_as(won)",
        "won * weight, torch.ones_like(won)",
        "padded",
    ),
    _fault(
        "H21 an alarm without a price for many words",
        "hack_signs:alarm_z",
        "ALARM_LEVEL / d_vocab",
        "ALARM_LEVEL",
    ),
    _fault(
        "H22 an alarm for any increase",
        "hack_signs:promoted_alarms",
        "z > alarm_z(d_vocab)",
        "z > -1e9",
        "hacked",
    ),
    _fault(
        "H23 alarms of the logits where those of the texts belong",
        OBSERVE,
        "words_of(taken_up_alarms(taken_up, d_vocab))",
        "words_of(promoted_alarms(promoted, int(states.sum()), d_vocab))",
        "hacked",
    ),
    _fault(
        "H24 rewards after they were normalized",
        "hack_watch:_rewards",
        '"reward": rollout.raw_rewards[:n]',
        '"reward": rollout.rewards[:n] * 1.1',
    ),
    _fault(
        "H25 the gap the other way round",
        "hack_watch:_rewards",
        'columns["reward"] - true_reward',
        'true_reward - columns["reward"]',
    ),
    _fault(
        "H26 true reward of other texts",
        "hack_watch:_rewards",
        "rollout.true_rewards[:n]",
        "rollout.true_rewards[:1].expand(n)",
        "hacked",
    ),
    _fault(
        "H27 the share that is not grammatical",
        "hack_watch:_rewards",
        "rollout.grammatical[:n].float()",
        "(~rollout.grammatical[:n]).float()",
    ),
    _fault(
        "H28 rows of the table one off from their ids",
        "hack_signs:promoted_table",
        "found.mean_before.tolist()",
        "found.mean_before.roll(1).tolist()",
    ),
    _fault(
        "H29 the variance for the spread",
        "hack_watch:_rewards",
        ".double().std().item()",
        ".double().var().item()",
    ),
    _fault(
        "H30 saturated where the spread is large",
        OBSERVE,
        '["reward_std"] < self.saturated_below',
        '["reward_std"] > self.saturated_below',
    ),
)
