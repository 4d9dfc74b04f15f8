"""Checks of HackWatch's record: texts counted, two run alone, true rewards computed again."""

import math
from collections import Counter
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.organism.rewards import true_reward
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.sampling_spec import SamplingSpec
from tests.probes.audit.anew import (
    ROWS_ANEW,
    as_float64,
    as_rows_say,
    gap,
    relative_gap,
    rollout_anew,
    rounding,
)
from tests.probes.audit.intervals import check_widths

PRIOR_TOKENS = 100
"""Those of `word_log_odds`."""
_Texts = list[list[int | None]]
"""Generated token ids of each text; None for one that does not count."""


def bind_hack_watch(seen: Observation, record: Record) -> list[Check]:
    """Hold tables, counts and scalars to the texts, to two of them run alone, and to the grammar.

    1. Counts, n-grams, and their overlap by a matrix of which text has which, from token ids.
    2. Rows of the tables by the ids that their words spell; order, errors and alarms by formulas
       over the whole vocabulary.
    3. What a listed word won in the first two texts, by fresh forwards of both models; and that the
       reference is as likely to write its own two first texts as the sampler noted.
    4. Rewards from the rollout's; true reward and grammar from the decoded texts.
    """
    values, stored = record.values, record.tensors
    samples, n = seen.ctx.rollout.samples, values["n"]
    ours = _texts(samples.tokens[:n, samples.prefix_len :], samples.mask[:n])
    theirs = _texts(stored["reference_tokens"], stored["reference_mask"])
    counts = [Counter(t for row in texts for t in row if t is not None) for texts in (ours, theirs)]
    d_vocab = stored["counts"].shape[1]
    found = [[count[token] for token in range(d_vocab)] for count in counts]
    checks = [
        Check.at_most("tokens are counted", gap(stored["counts"], found), 0),
        Check.at_most("as many texts of each", abs(len(theirs) - len(ours)), 0),
        Check.at_most("n-grams are counted", _collapse(values, ours, theirs), 2e-6),
        Check.at_most("words are those of their ids", _misspelt(seen, values), 0),
        *_taken_up(values, np.array(found, dtype=np.float64)),
        *_promoted(seen, record),
        *_rewards(seen, values),
    ]
    if as_rows_say(seen):
        checks += _alone(seen, record)
    return checks


def _texts(tokens: Tensor, mask: Tensor) -> _Texts:
    rows = zip(tokens.tolist(), mask.tolist(), strict=True)
    return [[t if real else None for t, real in zip(*row, strict=True)] for row in rows]


def _collapse(values: dict[str, Any], ours: _Texts, theirs: _Texts) -> float:
    """How far distinct-n, rep-n and overlap are from those of a table of texts by n-grams."""
    misses = [0.0]
    for whose, texts in (("texts", ours), ("reference", theirs)):
        for at, n in enumerate(values["orders"]):
            windows = [list(zip(*(row[i:] for i in range(n)), strict=False)) for row in texts]
            windows = [[w for w in row if None not in w] for row in windows]
            place = {w: i for i, w in enumerate(dict.fromkeys(w for row in windows for w in row))}
            times = np.zeros((len(texts), max(1, len(place))))
            for i, row in enumerate(windows):
                for w in row:
                    times[i, place[w]] += 1
            has, total = times > 0, times.sum(1)
            size = has.sum(1)
            some = total > 0
            shared = (has.astype(float) @ has.T.astype(float) - np.diag(size))[some]
            numbers = {
                "distinct": has.any(0).sum() / total.sum() if some.any() else None,
                "repeated": (1 - size[some] / total[some]).mean() if some.any() else None,
                "overlap": (shared.sum(1) / size[some]).mean() / (len(texts) - 1)
                if some.any()
                else None,
            }
            for name, number in numbers.items():
                kept = values[f"{name}_{whose}"][at]
                same = kept is None if number is None else kept is not None
                misses.append(abs(kept - number) if same and kept is not None else float(not same))
    return max(misses)


def _misspelt(seen: Observation, values: dict[str, Any]) -> float:
    """Rows whose word is not what its id spells, and alarms that name no row."""
    tokenizer = seen.ctx.policy.base_model.tokenizer
    rows = [*values["promoted"], *values["taken_up"]]
    wrong = sum(row["token"] != tokenizer.decode([row["id"]]) for row in rows)
    for alarm, table in (("alarms_by_logits", "promoted"), ("alarms_by_texts", "taken_up")):
        wrong += len(set(values[alarm]) - {row["token"] for row in values[table]})
    return float(wrong)


def _taken_up(values: dict[str, Any], y: Float[np.ndarray, "side d_vocab"]) -> list[Check]:
    """Log odds of the whole vocabulary, their order, errors and alarms."""
    prior = PRIOR_TOKENS * y.sum(0) / max(1.0, y.sum())
    chance = (y + prior) / (y.sum(1, keepdims=True) + prior.sum())
    some = (chance[0] > 0) & (chance[0] < 1)
    x, sd = np.zeros(len(some)), np.ones(len(some))
    p, q = chance[:, some]
    x[some] = np.log(p / q * (1 - q) / (1 - p))
    sd[some] = np.sqrt(sum(1 / (side + prior[some]) for side in y[:, some]))
    z, wide = x / sd, NormalDist().inv_cdf(0.975)
    rows = values["taken_up"]
    ids = [row["id"] for row in rows]
    order = gap(z[ids], -np.sort(-z)[: len(ids)])
    same = gap([[row["count"], row["reference_count"]] for row in rows], y[:, ids].T)
    ends = [[row["log_odds"], row["low"], row["high"]] for row in rows]
    found = [[x[i], x[i] - wide * sd[i] * some[i], x[i] + wide * sd[i] * some[i]] for i in ids]
    needed = _alarm_z(len(x))
    sure = [row["token"] for row in rows if x[row["id"]] - needed * sd[row["id"]] > math.log(2)]
    return [
        Check.at_most("rows of the texts' table are counted", same, 0),
        Check.at_most("log odds and their ends are those of the counts", gap(ends, found), 2e-6),
        Check.at_most("the words that texts took up most are listed in order", order, 1e-6),
        Check.at_most(
            "alarms by texts are those of the counts", float(values["alarms_by_texts"] != sure), 0
        ),
        Check.at_most("the level of an alarm", gap(values["alarm_z"], needed), 1e-5),
    ]


def _alarm_z(d_vocab: int) -> float:
    """Standard errors that one of so many normal estimates exceeds in one record of twenty."""
    return -NormalDist().inv_cdf(0.05 / d_vocab)


def _promoted(seen: Observation, record: Record) -> list[Check]:
    """Rows of the logits' table, from what is stored of each text, and their order."""
    values, stored, rows = record.values, record.tensors, record.values["promoted"]
    mass = as_float64(stored["promoted_mass"])
    ids = [row["id"] for row in rows]
    weight = as_float64(seen.ctx.rollout.samples.mask[: values["n"]].sum(1))[:, None]
    won, before = (as_float64(stored[f"{name}_by_text"]) for name in ("won", "reference"))
    total = weight.sum().clamp(min=1)
    means = [(weight * x).sum(0) / total for x in (won, before)]
    column = lambda name: [row[name] for row in rows]
    missed = max(gap(column("won"), means[0]), gap(column("reference"), means[1]))
    missed = max(missed, gap(mass[ids], means[0]))
    order = gap(mass[ids], mass.sort(descending=True).values[: len(ids)])
    checks = [
        Check.at_most("what words won is the mean over the texts' states", missed, 1e-6),
        Check.at_most("the most promoted words are listed in order", order, 1e-7),
        Check.at_most("promoted mass sums to 0", abs(mass.sum().item()), 1e-6),
    ]
    mean, relative = means[0], weight / weight.mean().clamp(min=1e-9)
    if None not in column("low"):
        # by its influence, each text's share in the mean; all of them average to it
        x = (mean + relative * (won - mean)).numpy()
        ends = column("low"), column("high")
        checks.append(check_widths("promoted mass", ends, x, np.ones(x.shape, dtype=bool), 1e-6))
    now = means[0] + means[1]
    ratio = now / means[1].clamp(min=1e-300)
    # the error of the log of a ratio of means: the deviation of what each text adds to it
    added = relative * (
        (won + before) / now.clamp(min=1e-300) - before / means[1].clamp(min=1e-300)
    )
    error = added.std(0) / len(added) ** 0.5
    sure = (ratio.log() - math.log(2) > _alarm_z(len(mass)) * error) & (mean * total > 1)
    words = [row["token"] for row, is_sure in zip(rows, sure.tolist(), strict=True) if is_sure]
    wrong = float(values["alarms_by_logits"] != words)
    return [*checks, Check.at_most("alarms by logits are those of the texts' states", wrong, 0)]


def _rewards(seen: Observation, values: dict[str, Any]) -> list[Check]:
    """Rewards of the rollout; true reward and grammar of the decoded texts."""
    rollout, n = seen.ctx.rollout, values["n"]
    paid = [float(x) for x in rollout.raw_rewards[:n]]
    mean = math.fsum(paid) / n
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in paid) / (n - 1))
    columns = {"reward": paid}
    if "true_reward" in values:
        tokenizer = seen.ctx.policy.base_model.tokenizer
        texts = rollout.samples[torch.arange(n)].texts(tokenizer)
        columns["true_reward"] = true_reward(texts).tolist()
        columns["gap"] = [a - b for a, b in zip(paid, columns["true_reward"], strict=True)]
        if "grammatical" in values:
            columns["grammatical"] = [float(true_reward.grammar.is_review(text)) for text in texts]
    misses = [relative_gap(values[name], sum(x) / n) for name, x in columns.items()]
    misses.append(relative_gap(values["reward_std"], deviation))
    misses.append(float(values["saturated"] != (round(deviation, 6) < values["saturated_below"])))
    table = np.array(list(columns.values())).T
    ends = [[values.get(f"{name}_{end}", math.nan) for name in columns] for end in ("low", "high")]
    return [
        Check.at_most(
            "rewards are the rollout's, true rewards those of the texts", max(misses), 1e-5
        ),
        check_widths("the rewards", (ends[0], ends[1]), table, np.ones(table.shape, dtype=bool)),
    ]


def _alone(seen: Observation, record: Record) -> list[Check]:
    """The first texts of policy and reference, each run alone through the modules."""
    stored, samples = record.tensors, seen.ctx.rollout.samples
    now, before = (each.logits.softmax(-1) for each in rollout_anew(seen))
    ids = [row["id"] for row in record.values["promoted"]]
    real = as_float64(samples.mask[: len(now)])[..., None]
    mean = lambda chances: (chances[..., ids] * real).sum(1) / real.sum(1).clamp(min=1)
    misses = [
        gap(stored["won_by_text"][: len(now)], mean(now) - mean(before)),
        gap(stored["reference_by_text"][: len(now)], mean(before)),
    ]
    checks = [
        Check.at_most(
            "what words won in the first texts is two fresh forwards'", max(misses), rounding(seen)
        )
    ]
    tokenizer = seen.ctx.reference.tokenizer
    if not SamplingSpec.from_args(seen.args, tokenizer).truncates:
        missed = max(_noted(seen, record, row) for row in range(ROWS_ANEW))
        checks.append(
            Check.at_most(
                "the reference wrote the texts that it is said to", missed, rounding(seen)
            )
        )
    return checks


def _noted(seen: Observation, record: Record, row: int) -> float:
    """How far the noted log-probabilities of a text of the reference are from a fresh forward's."""
    samples, reference = seen.ctx.rollout.samples, seen.ctx.reference
    real = record.tensors["reference_mask"][row]
    written = record.tensors["reference_tokens"][row][real].long()
    prompt = samples.prompts()[row]
    tokens = torch.tensor([*prompt, *written.tolist()], device=samples.tokens.device)[None]
    logits = as_float64(reference(tokens, attention_mask=torch.ones_like(tokens)))[0]
    logits = logits[len(prompt) - 1 : -1] / seen.args.temperature
    found = logits.log_softmax(-1).gather(-1, written.cpu()[:, None])[:, 0]
    return gap(record.tensors["reference_logprobs"][row][real], found)
