"""Checks of the policy's own value in ValueLens's record: continuations that are drawn again."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float

from rlhf_lab.probes.policy_value import ROWS_TOGETHER, TextReward
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training.random_streams import phase_generator
from tests.probes.audit.anew import as_float64, gap


def bind_policy_values(seen: Observation, record: Record, reward: TextReward) -> list[Check]:
    """Hold the policy's values to continuations of the stored prefixes, drawn again.

    Those of one prefix, chosen at random, and of the prefixes that were sampled together with it,
    come out bit for bit. Their errors are counted again, as are the grammar's values, from the
    prefixes alone, and the correlation of one estimate.
    """
    values, tensors = record.values, record.tensors
    rows, pos, k = values["prefix_rows"], values["prefix_pos"], values["continuations"]
    chosen = np.random.default_rng(seen.ctx.phase)
    each = max(1, ROWS_TOGETHER // k)
    part = int(chosen.integers(len(rows))) // each
    together = slice(part * each, (part + 1) * each)
    rewards = _again(seen, rows[together], pos, k, part, reward)
    mean, error = tensors["v_policy"][together], tensors["v_policy_se"][together]
    spread = torch.from_numpy(rewards.std(1, ddof=1) / np.sqrt(k))
    checks = [
        Check.at_most("one prefix's continuations come again", gap(mean, rewards.mean(1)), 0),
        Check.at_most("their standard error is counted again", gap(error, spread), 1e-9),
        _correlation(record, int(chosen.integers(len(values["estimates"])))),
    ]
    if "grammar" in values["estimates"]:
        of_prefix, known = seen.truth.values(seen.text.tokens[rows, : pos + 1])
        stored = tensors["estimates"][:, values["estimates"].index("grammar")]
        known = (known & seen.text.attention_mask[rows, : pos + 1])[:, -1].cpu()
        apart = int((stored.isfinite() != known).sum()) + gap(stored, of_prefix[:, -1], known)
        checks.append(Check.at_most("the grammar's values are of the prefixes", apart, 1e-6))
    return checks


def _again(
    seen: Observation, rows: list[int], pos: int, k: int, part: int, reward: TextReward
) -> Float[np.ndarray, "prefix continuation"]:
    """The rewards of the continuations of some prefixes, drawn as they were."""
    policy, tokens = seen.ctx.policy, seen.text.tokens
    tokenizer = policy.base_model.tokenizer
    left = tokens.shape[1] - 1 - pos
    spec = replace(SamplingSpec.from_args(seen.args, tokenizer), gen_len=left)
    real = seen.text.attention_mask[:, : pos + 1]
    prompts = [tokens[row, : pos + 1][real[row]].tolist() for row in rows for _ in range(k)]
    generator = phase_generator(seen.args.seed, seen.ctx.phase, "continuations", part)
    written = sample(policy, prompts, spec, generator)
    return as_float64(reward(written.texts(tokenizer))).numpy().reshape(len(rows), k)


def _correlation(record: Record, at: int) -> Check:
    """One stored correlation, and the share of the values' variance that is not noise, by numpy."""
    estimate = record.tensors["estimates"][:, at].double().numpy()
    value, error = (record.tensors[name].numpy() for name in ("v_policy", "v_policy_se"))
    known, stored = np.isfinite(estimate), record.values["correlation"][at]
    misses = [0.0]
    if min(estimate[known].std(), value[known].std()) > 1e-5:
        misses.append(abs(stored - np.corrcoef(estimate[known], value[known])[0, 1]))
        signal = 1 - np.mean(error**2) / value.var(ddof=1)
        misses.append(abs(record.values["reliability"] - max(0.0, signal)))
    return Check.at_most("correlation and reliability are counted again", max(misses), 1e-3)
