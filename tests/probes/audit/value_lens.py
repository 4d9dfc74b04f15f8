"""Checks of ValueLens's record: residuals put in the last one's place, and cells fitted again."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.models import TransformerWithCritic
from rlhf_lab.probes.policy_value import TextReward
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.tuned_lens import PENALTIES, spread_over
from rlhf_lab.training.capture import text_at
from tests.probes.audit.anew import (
    ROWS_ANEW,
    as_float64,
    as_rows_say,
    off_mask,
    relative_gap,
    value_rounding,
)
from tests.probes.audit.labels import check_slots
from tests.probes.audit.policy_value import bind_policy_values
from tests.probes.audit.tuned_lens import Residuals, Translator, r2_of, refit_translator

LENSES = 4
"""Sites whose lens is read anew in each record."""


def bind_value_lens(
    seen: Observation,
    record: Record,
    states: Residuals,
    on_eval: bool,
    reward: TextReward | None,
) -> list[Check]:
    """Hold what is stored to the residuals, texts and prefixes that its labels name.

    Args:
        states: the residuals by site, of the model whose last one the value head reads.
        on_eval: whether the text is the eval text.
        reward: whose expectation the policy's value is.
    """
    checks, translated = [], {}
    if "tuned_sites" in record.values:
        site, translator, checks = refit_translator(seen, record, states, on_eval)
        translated = {site: translator}
    if as_rows_say(seen):
        checks += _lenses(seen, record, states, translated, on_eval)
    if "r2" in record.values:
        checks += _readers(seen, record, states, on_eval)
    if "v_policy" in record.tensors:
        checks += bind_policy_values(seen, record, reward)
    return [*checks, _intervals(record)]


def _intervals(record: Record) -> Check:
    """How many stored intervals are upside down, or farther from their number than they are wide.

    A percentile interval of a skewed figure need not hold the figure itself.
    """
    wrong = 0
    for name in ("r2", "head_correlation", "raw_r2", "tuned_r2", "correlation"):
        if f"{name}_low" in record.values:
            fields = (name, f"{name}_low", f"{name}_high")
            value, low, high = (np.array(record.values[field], float) for field in fields)
            width = high - low
            there = np.isfinite(low) & np.isfinite(high)
            apart = (value < low - width - 1e-4) | (value > high + width + 1e-4)
            wrong += int((there & ((width < 0) | apart)).sum())
    return Check.at_most("intervals are about their numbers", wrong, 0)


def _some(sites: list[str], phase: int, n: int) -> list[int]:
    """The first, the last and some other sites; another choice in each phase."""
    between = np.random.default_rng(phase).permutation(np.arange(1, max(1, len(sites) - 1)))
    return sorted({0, len(sites) - 1, *between[: n - 2].tolist()})


def _lenses(
    seen: Observation,
    record: Record,
    states: Residuals,
    translated: dict[str, Translator],
    on_eval: bool,
) -> list[Check]:
    """The policy's own values, with a site's residual put in the place of the last one.

    So are the estimates behind one prefix, and the residual of one site that a translator, fitted
    again, has been applied to.
    """
    stored, values, sites = record.tensors, record.values, record.values["sites"]
    text = (seen.text.tokens, seen.text.attention_mask) if on_eval else text_at(seen.ctx)
    tokens, real = text
    some = _some(sites, seen.ctx.phase, LENSES)
    (site, translator), *_ = [*translated.items(), (None, None)]
    n = stored["lens"].shape[1]
    off = {name: stored[name].movedim(0, -1) for name in ("lens", "lens_tuned") if name in stored}
    misses, moved, among = [off_mask(off, real[:n].cpu())], [0.0], [0.0]

    def found_in(row: int) -> Float[Tensor, "lens seq"]:
        kept = real[row]
        residuals = [states[sites[at]][row][kept] for at in some]
        if site is not None:
            moved_on = translator(states[site][row][kept])
            residuals.append(moved_on.to(residuals[0]))
        return _read(seen, tokens[row][kept], torch.stack(residuals))

    for row in range(min(ROWS_ANEW, n)):
        found, kept = found_in(row), real[row].cpu()
        misses.append(relative_gap(stored["lens"][some, row][:, kept], found[: len(some)]))
        if site is not None:
            at = values["tuned_sites"].index(site)
            moved.append(relative_gap(stored["lens_tuned"][at, row][kept], found[-1]))
    if "estimates" in stored:
        number = seen.ctx.phase % len(values["prefix_rows"])
        row, pos = values["prefix_rows"][number], values["prefix_pos"]
        found = found_in(row)[:, int(real[row, : pos + 1].sum()) - 1]
        names = [f"raw {sites[at]}" for at in some] + [f"tuned {site}"] * (site is not None)
        at = [values["estimates"].index(name) for name in names]
        head = stored["estimates"][number, values["estimates"].index("head")]
        among.append(relative_gap(stored["estimates"][number, at], found))
        among.append(relative_gap(head, found[len(some) - 1]))
    allowed = value_rounding(seen)
    return [
        Check.at_most("the lens is the policy with that residual last", max(misses), allowed),
        Check.at_most("the tuned lens is the policy, translated", max(moved), 10 * allowed),
        Check.at_most("the estimates are of their prefixes", max(among), 10 * allowed),
    ]


def _read(
    seen: Observation, tokens: Int[Tensor, " seq"], residuals: Float[Tensor, "lens seq d_model"]
) -> Float[Tensor, "lens seq"]:
    """The policy's values of one text, with each of these residuals last."""
    policy = seen.ctx.policy
    model = policy.critic if isinstance(policy, TransformerWithCritic) else policy.base_model
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    put = lambda activation, hook: residuals.to(activation)
    with model.hooks(fwd_hooks=[(last, put)]):
        return policy(tokens.expand(len(residuals), -1))[1]


def _readers(seen: Observation, record: Record, states: Residuals, on_eval: bool) -> list[Check]:
    """Some cells of R2, by least squares of rows that the penalty is written into."""
    values, sites, ridge = record.values, record.values["sites"], record.values["ridge"]
    batch = next(iter(states.values())).shape[0]
    cut, chosen = 2 * batch // 3, np.random.default_rng(seen.ctx.phase)
    misses, heads, defined = [0.0], [0.0], 0
    for at in _some(sites, seen.ctx.phase, 3):
        pos = int(chosen.integers(seen.text.tokens.shape[1])) if on_eval else 0
        target, mask = _target(seen, on_eval, pos)
        x = states[sites[at]]
        x = as_float64(x[:, pos : pos + 1] if on_eval else x[:, seen.prefix_len - 1 : -1])
        r2 = held_out_r2(x, target, mask, cut, ridge)
        there = bool(values["defined"][at][pos])
        defined += there != (r2 is not None)
        if there and r2 is not None:
            misses.append(abs(values["r2"][at][pos] - r2) / max(1.0, abs(r2)))
        if on_eval and there:
            stated = as_float64(seen.acts["values"][:, pos : pos + 1])
            found = np.corrcoef(stated[mask].numpy(), target[mask].numpy())[0, 1]
            heads.append(abs(values["head_correlation"][pos] - found))
    checks = [
        Check.at_most("R2 is that of another fit", max(misses), 0.02),
        Check.at_most("R2 is defined where the target varies", defined, 0),
        Check.at_most("the head's correlation is counted again", max(heads), 1e-3),
        *_penalty(seen, record, states, on_eval, cut),
    ]
    if on_eval:
        checks.append(check_slots(seen, record))
    return checks


def _penalty(
    seen: Observation, record: Record, states: Residuals, on_eval: bool, cut: int
) -> list[Check]:
    """The errors on held-out texts that the penalty was chosen by, in one cell, and the choice."""
    if "ridge_errors" not in record.tensors:
        return []
    sites = record.values["sites"]
    errors = as_float64(record.tensors["ridge_errors"])
    which = seen.ctx.phase % len(errors)
    site = sites[spread_over(len(sites))[which]]
    defined = errors[which, :, 0].isfinite().nonzero()[:, 0]
    if not len(defined):
        return []
    pos = int(defined[seen.ctx.phase % len(defined)])
    target, mask = _target(seen, on_eval, pos)
    x = as_float64(states[site])
    x = x[:, pos : pos + 1] if on_eval else x[:, seen.prefix_len - 1 : -1]
    rows = x[:cut], target[:cut], mask[:cut]
    found = [1 - held_out_r2(*rows, cut * 3 // 4, ridge) for ridge in PENALTIES]
    means = errors.flatten(0, 1).nanmean(0)
    chosen = (means[PENALTIES.index(record.values["ridge"])] - means.min()).item()
    return [
        Check.at_most(
            "held-out errors are found again", relative_gap(errors[which, pos], found), 0.02
        ),
        Check.at_most("the penalty is the one that left least", chosen, 1e-9),
    ]


def _target(
    seen: Observation, on_eval: bool, pos: int
) -> tuple[Float[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """What is read, taken from prefixes that end at the position itself, or from the rollout."""
    if not on_eval:
        rollout = seen.ctx.rollout
        return as_float64(rollout.returns), rollout.samples.mask.cpu()
    found, mask = seen.truth.values(seen.text.tokens[:, : pos + 1])
    return as_float64(found[:, -1:]), (mask & seen.text.attention_mask[:, : pos + 1])[:, -1:].cpu()


def held_out_r2(
    x: Float[Tensor, "batch pos d_model"],
    y: Float[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"],
    cut: int,
    ridge: float,
) -> float | None:
    """R2 on the sequences from `cut` on of a ridge regression on those before; None if undefined.

    The penalty is written as d_model more rows, sqrt(n ridge v) I with target 0, and least squares
    solved by singular values.
    """
    (x_fit, y_fit), (x_held, y_held) = (
        (x[rows][mask[rows]].numpy(), y[rows][mask[rows]].numpy())
        for rows in (slice(cut), slice(cut, None))
    )
    if not len(x_fit):
        return r2_of(torch.zeros(len(y_held)), torch.from_numpy(y_held))
    center, mean = x_fit.mean(0), y_fit.mean()
    moved = x_fit - center
    penalty = max(ridge * (moved**2).sum() / x_fit.shape[1], 1e-12)
    rows = np.concatenate([moved, np.sqrt(penalty) * np.eye(x_fit.shape[1])])
    targets = np.concatenate([y_fit - mean, np.zeros(x_fit.shape[1])])
    slope = np.linalg.lstsq(rows, targets, rcond=None)[0]
    predicted = (x_held - center) @ slope + mean
    return r2_of(torch.from_numpy(predicted), torch.from_numpy(y_held))
