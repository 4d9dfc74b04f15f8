"""ValueLens: the value by layer, through the value head, a tuned lens and linear probes."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.models import TransformerWithCritic, TransformerWithValueHead
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.tuned_lens import (
    Affine,
    best_ridge,
    fit_translator,
    held_out_translation,
    spread_over,
)
from rlhf_lab.probes.value_lens import (
    RESIDUAL_SITES,
    HeldOutFit,
    correlation_with,
    held_out_fits,
    r2_interval,
    value_lens,
)
from rlhf_lab.training.capture import capture_activations, text_at

KEEP = 4  # sequences whose lens is stored token by token
FEWEST_SEQUENCES = 6  # two thirds are fitted, and a third of these choose the penalty
States = dict[str, Float[Tensor, "batch seq d_model"]]


class ValueTarget(NamedTuple):
    """Values that linear probes predict, a mask of those that exist, and names of columns."""

    value: Float[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    names: list[str]
    against: str


class ValueLens(Probe):
    """Value by layer: the head's raw and tuned lens, and regressions on the exact value.

    The head is applied to the residual of each layer (raw lens), and to an affine map of it fitted
    to give the last layer's (tuned lens); both are compared with the model's own value on held-out
    texts. Ridge regressions predict the target: the exact value for eval text of Reel or sums,
    elsewhere, with `text="rollout"`, the phase's returns, all positions pooled. The layers are the
    policy's, or those of a separate critic.

    Checks: the last layer's lens is the model's own value.

    Args:
        text: "eval" for exact values on Reel and sums, "rollout" for returns.
        ridge: penalty of all fits, as a fraction of the mean variance of the activations; chosen on
            held-out texts when None, separately for regressions and translators.

    Raises:
        ConfigError: If the text is unknown.
    """

    name = "value_lens"
    question = "At which layer can the value of a text be read?"
    caveat = "A high R2 shows that a layer contains the value, not that the model uses it."
    exact_reward = True
    sites = (*RESIDUAL_SITES, "values")
    every = 5
    options = ("text", "ridge", *Probe.options)
    text = "eval"
    ridge: float | None = None

    def observe(self, seen: Observation) -> Record:
        policy, on_eval = seen.ctx.policy, self.text == "eval"
        text = (seen.text.tokens, seen.text.attention_mask) if on_eval else text_at(seen.ctx)
        real, states, head_values = text[1], _states(seen, *text), seen.acts["values"]
        residuals, kept_mask = torch.stack(list(states.values())), real[:KEEP]
        lens = value_lens(policy, residuals[:, :KEEP])
        values, tensors = {"sites": list(states)}, {"lens": _real_tokens(lens, kept_mask)}
        counts = slice(None) if on_eval else slice(seen.prefix_len - 1, -1)
        x, value = residuals[:, :, counts], head_values[:, counts]
        target = _target(seen) if on_eval else _returns(seen)
        if target is not None:
            values |= _predict_target(x, value, target, self.ridge, not on_eval)
        if len(head_values) >= FEWEST_SEQUENCES:
            mask = real if on_eval else seen.ctx.rollout.samples.mask
            translators, fields = _translate(policy, list(states), x, value, mask, self.ridge)
            values |= fields
            if translators:
                moved = [each(states[site][:KEEP]) for site, each in translators.items()]
                lens_tuned = value_lens(policy, torch.stack(moved))
                tensors["lens_tuned"] = _real_tokens(lens_tuned, kept_mask)

        def check_last() -> Check:
            gap = F.zero_masked(lens[-1] - head_values[:KEEP], kept_mask).abs().max().item()
            gap /= max(1.0, head_values.abs().max().item())
            allowed = seen.allowed(1e-5, half=5e-3)
            return Check.at_most("the last layer's lens is the value", gap, allowed)

        return Record(values, tensors, [check_last])


def _states(
    seen: Observation, tokens: Int[Tensor, "batch seq"], mask: Bool[Tensor, "batch seq"]
) -> States:
    sites, policy = [site for site in seen.acts if site != "values"], seen.ctx.policy
    if not isinstance(policy, TransformerWithCritic):
        return {site: seen.acts[site] for site in sites}
    return capture_activations(policy.critic, tokens, sites, attention_mask=mask)


def _real_tokens(
    lens: Float[Tensor, "site batch seq"], real: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "site batch seq"]:
    return F.zero_masked(lens, real.expand_as(lens)).float()


def _target(seen: Observation) -> ValueTarget | None:
    if seen.truth is None:
        return None
    tokens = seen.text.tokens
    values, mask = seen.truth.values(tokens)
    names = seen.truth.slot_names(tokens.shape[1])
    return ValueTarget(values, mask & seen.text.attention_mask, names, "V of the grammar")


def _returns(seen: Observation) -> ValueTarget:
    rollout = seen.ctx.rollout
    against = "returns of the policy's samples"
    return ValueTarget(rollout.returns, rollout.samples.mask, ["all"], against)


def _predict_target(
    residuals: Float[Tensor, "site batch seq d_model"],
    head_values: Float[Tensor, "batch seq"],
    target: ValueTarget,
    ridge: float | None,
    pooled: bool,
) -> dict[str, Any]:
    value, mask = target.value.to(residuals.device), target.mask.to(residuals.device)
    cut = 2 * len(value) // 3
    if ridge is None:
        some = residuals[spread_over(len(residuals)), :cut], value[:cut], mask[:cut]
        ridge = best_ridge(lambda penalty: held_out_fits(*some, penalty, pooled))
    fits = held_out_fits(residuals, value, mask, ridge, pooled)
    held = len(value) - cut
    r2 = r2_interval(fits, held)
    fields = {
        "slots": target.names,
        "r2_against": target.against,
        "ridge": ridge,
        "r2": decimals(r2.value.nan_to_num(), 4),
        "defined": (~r2.value.isnan()).tolist(),
        "held_out": held,
        **interval_fields("r2", r2),
    }
    if not pooled:
        found = correlation_with(head_values, value, mask, resamples=RESAMPLES)
        fields |= {"head_correlation": decimals(found.value, 4), "head_n": len(value)}
        fields |= interval_fields("head_correlation", found)
    return fields


def _translate(
    policy: TransformerWithValueHead,
    sites: list[str],
    residuals: Float[Tensor, "site batch seq d_model"],
    head_values: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    ridge: float | None,
) -> tuple[dict[str, Affine], dict[str, Any]]:
    """Return translators by site, and R2 of both lenses with the model's own value, held out."""
    cut = 2 * len(head_values) // 3
    early = [i for i in spread_over(len(sites)) if i != len(sites) - 1]
    fit = [(residuals[i, :cut], residuals[-1, :cut], mask[:cut]) for i in early]
    if ridge is None:
        ridge = best_ridge(lambda penalty: [held_out_translation(*rows, penalty) for rows in fit])
    found, held = [fit_translator(*rows, ridge) for rows in fit], residuals[early, cut:]
    moved = torch.stack([each(x) for each, x in zip(found, held, strict=True)])
    fields = {"tuned_sites": [sites[i] for i in early], "tuned_ridge": ridge}
    fields |= {"lens_held_out": len(head_values) - cut}
    whole = head_values[cut:].flatten()[None], mask[cut:].flatten()[None]
    for name, states in (("raw_r2", held), ("tuned_r2", moved)):
        fits = [HeldOutFit(lens.flatten()[None], *whole) for lens in value_lens(policy, states)]
        r2 = r2_interval(fits, len(head_values) - cut)[:, 0]
        fields |= {name: decimals(r2.value.nan_to_num(), 4)} | interval_fields(name, r2)
    return dict(zip(fields["tuned_sites"], found, strict=True)), fields
