"""Checks of ValueLens's record: residuals put in the last one's place, and cells fitted again."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models import TransformerWithCritic
from rlhf_lab.probes.bindings.anew import (
    ROWS_ANEW,
    as_float64,
    as_rows_say,
    off_mask,
    relative_gap,
    value_rounding,
)
from rlhf_lab.probes.bindings.labels import check_slots
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.training.capture import text_at

LENSES = 4
"""Sites whose lens is read anew in each record."""
Residuals = dict[str, Float[Tensor, "batch seq d_model"]]


def bind_value_lens(
    seen: Observation, record: Record, states: Residuals, on_eval: bool, ridge: float
) -> list[Check]:
    """Hold the stored lens and R2 to the residuals that their labels name.

    Args:
        states: the residuals by site, of the model whose last one the value head reads.
        on_eval: whether the text is the eval text.
        ridge: the penalty of the readers.
    """
    checks = []
    if as_rows_say(seen):
        checks.append(_lens(seen, record, states, on_eval))
    if "r2" in record.values:
        checks += _readers(seen, record, states, on_eval, ridge)
    return checks


def _some(sites: list[str], phase: int, n: int) -> list[int]:
    """The first, the last and some other sites; another choice in each phase."""
    between = np.random.default_rng(phase).permutation(np.arange(1, max(1, len(sites) - 1)))
    return sorted({0, len(sites) - 1, *between[: n - 2].tolist()})


def _lens(seen: Observation, record: Record, states: Residuals, on_eval: bool) -> Check:
    """The policy's own values, with a site's residual put in the place of the last one."""
    policy, lens, sites = (
        seen.ctx.policy,
        as_float64(record.tensors["lens"]),
        record.values["sites"],
    )
    model = policy.critic if isinstance(policy, TransformerWithCritic) else policy.base_model
    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    text = (seen.text.tokens, seen.text.attention_mask) if on_eval else text_at(seen.ctx)
    tokens, real = text
    rows = lens.shape[1]
    misses = [off_mask({"lens": row}, real[:rows].cpu()) for row in lens]
    for at in _some(sites, seen.ctx.phase, LENSES):
        for row in range(min(ROWS_ANEW, lens.shape[1])):
            kept = real[row]
            residual = states[sites[at]][row][kept][None]
            put = lambda activation, hook, residual=residual: residual.to(activation)
            with model.hooks(fwd_hooks=[(last, put)]):
                _, values = policy(tokens[row][kept][None])
            misses.append(relative_gap(lens[at, row][kept.cpu()], values[0]))
    return Check.at_most(
        "the lens is the policy with that residual last", max(misses), value_rounding(seen)
    )


def _readers(
    seen: Observation, record: Record, states: Residuals, on_eval: bool, ridge: float
) -> list[Check]:
    """Some cells of R2, by least squares of rows that the penalty is written into."""
    values, sites = record.values, record.values["sites"]
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
        if on_eval and "head_r2" in values:
            stated = as_float64(seen.acts["values"][:, pos : pos + 1])
            found = r2_of(stated[mask], target[mask])
            heads.append(abs(values["head_r2"][pos] - (found or 0.0)) / max(1.0, abs(found or 0.0)))
    checks = [
        Check.at_most("R2 is that of another fit", max(misses), 0.02),
        Check.at_most("R2 is defined where the target varies", defined, 0),
        Check.at_most("the head's R2 is counted again", max(heads), 1e-3),
    ]
    if on_eval:
        checks.append(check_slots(seen, record))
    return checks


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


def r2_of(predicted: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float | None:
    """1 - (mean squared error) / (variance); None where y is the same for all rows."""
    if len(y) < 2 or y.var(correction=0) <= 1e-8:
        return None
    return 1 - ((predicted - y).square().mean() / y.var(correction=0)).item()
