"""Checks of the tuned lens in ValueLens's record: a translator fitted again, and its figures."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import layer_norm

from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.tuned_lens import PENALTIES
from tests.probes.audit.anew import as_float64, relative_gap

Residuals = dict[str, Float[Tensor, "batch seq d_model"]]
Translator = Callable[[Float[Tensor, "*rows d_model"]], Float[Tensor, "*rows d_model"]]


def refit_translator(
    seen: Observation, record: Record, states: Residuals, on_eval: bool
) -> tuple[str, Translator, list[Check]]:
    """One stored site, its translator fitted again, and checks of its figures and its penalty.

    It is solved with a column of ones in place of centering. With it, the agreement of the tuned
    lens with the model's own value is counted again on the held-out texts, as is the raw lens's.
    """
    values, sites = record.values, record.values["sites"]
    at = seen.ctx.phase % len(values["tuned_sites"])
    site = values["tuned_sites"][at]
    counts = slice(None) if on_eval else slice(seen.prefix_len - 1, -1)
    x, last = (as_float64(states[s])[:, counts] for s in (site, sites[-1]))
    mask = (seen.text.attention_mask if on_eval else seen.ctx.rollout.samples.mask).cpu()
    cut = 2 * len(x) // 3
    fit, held = (
        [z[rows][mask[rows]] for z in (x, last)] for rows in (slice(cut), slice(cut, None))
    )
    translator = solved_translator(*fit, values["tuned_ridge"])
    own = as_float64(seen.acts["values"])[:, counts][cut:][mask[cut:]]
    misses = []
    for name, residual in {"raw": held[0], "tuned": translator(held[0])}.items():
        found = r2_of(_value_of(seen, residual), own) or 0.0
        misses.append(abs(values[f"{name}_r2"][at] - found) / max(1.0, abs(found)))
    checks = [Check.at_most("the lenses' R2 is counted again", max(misses), 0.02)]
    if "tuned_ridge_errors" in record.tensors:
        inner = cut * 3 // 4
        rows = [
            z[rows][mask[rows]] for rows in (slice(inner), slice(inner, cut)) for z in (x, last)
        ]
        checks += _penalty(record, at, *rows)
    return site, translator, checks


def _penalty(record: Record, at: int, *rows: Tensor) -> list[Check]:
    """The errors on held-out texts of the least, the chosen and the largest penalty."""
    x_fit, y_fit, x_held, y_held = rows
    errors, ridge = as_float64(record.tensors["tuned_ridge_errors"]), record.values["tuned_ridge"]
    total = (y_held - y_held.mean(0)).square().sum()
    misses = []
    for one in {PENALTIES[0], ridge, PENALTIES[-1]}:
        left = (y_held - solved_translator(x_fit, y_fit, one)(x_held)).square().sum() / total
        misses.append(relative_gap(errors[at, 0, PENALTIES.index(one)], left))
    means = errors.flatten(0, 1).nanmean(0)
    excess = (means[PENALTIES.index(ridge)] - means.min()).item()
    return [
        Check.at_most("a translator's held-out errors are found again", max(misses), 0.02),
        Check.at_most("the translators' penalty left least", excess, 1e-9),
    ]


def solved_translator(
    x: Float[Tensor, "n d_model"], y: Float[Tensor, "n d_model"], ridge: float
) -> Translator:
    """Ridge regression with an intercept that is one more column, without a penalty."""
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    penalty = max(ridge * float((x - x.mean(0)).square().sum()) / x.shape[1], 1e-12)
    diagonal = torch.full((ones.shape[1],), penalty, dtype=x.dtype)
    diagonal[-1] = 0.0
    found = torch.linalg.solve(ones.T @ ones + diagonal.diag(), ones.T @ y)
    return lambda rows: as_float64(rows) @ found[:-1] + found[-1]


def _value_of(seen: Observation, residual: Float[Tensor, "n d_model"]) -> Float[Tensor, " n"]:
    """The head behind the final norm, which is written in another way."""
    policy = seen.ctx.policy
    model = policy.base_model
    if is_centered(model.ln_final):
        normalized = layer_norm(residual, residual.shape[-1:], eps=model.cfg.eps)
    else:
        normalized = residual * (residual.square().mean(-1, keepdim=True) + model.cfg.eps).rsqrt()
    weight = next(policy.value_head.parameters())
    return as_float64(policy.value_head(normalized.to(weight)))[..., 0]


def r2_of(predicted: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float | None:
    """1 - (mean squared error) / (variance); None where y is the same for all rows."""
    if len(y) < 2 or y.var(correction=0) <= 1e-8:
        return None
    return 1 - ((predicted - y).square().mean() / y.var(correction=0)).item()
