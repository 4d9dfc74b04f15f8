"""LensDivergence: the layer and token at which policy and reference say different things."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.diffing.lens import lens_divergence
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_means, kl_per_token, log_probs
from rlhf_lab.models import effective_weights, same_weights
from rlhf_lab.models.hooked_model import HookedModel, has_custom_forward, without_hooks
from rlhf_lab.models.padding import rotate_padding
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.text_rows import TextName, TextProbe, TextRows, text_rows
from rlhf_lab.probes.tuned_lens import (
    PENALTIES,
    Affine,
    best_ridge,
    fit_translator,
    ridge_errors,
    spread_over,
)
from rlhf_lab.training.capture import capture_activations

ROWS_READ = 8
FEWEST_ROWS_TUNED = 6
"""Below, nothing is fitted: two thirds fit, and a quarter of those choose the penalty."""


class LensDivergence(TextProbe):
    """KL of the policy's lens from the reference's, in nats per token, by layer and token.

    The logit lens decodes each layer's residual with the model's own final norm and unembedding.
    The tuned lens first applies an affine map to the last residual, fitted to the reference on the
    first two thirds of the texts and equal for both models; it is evaluated on the other texts.
    Hooks are off. A trained unembedding moves the lenses of all layers; with a frozen one, they are
    exactly 0 up to the first trained block.

    Checks: the last layer has the KL of the models' logits; equal models have none; layers
    before the first changed layer have none.

    Args:
        n: number of sequences.
        text: "eval" or "rollout".
        tuned: True to fit the tuned lens, which takes at least 6 sequences.
    """

    name = "lens_divergence"
    question = "At which layer and token do policy and reference diverge?"
    caveat = "With a trained unembedding every layer diverges."
    every = 10

    def __init__(
        self,
        n: int = 32,
        text: TextName = "eval",
        tuned: bool = True,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(text, every, name)
        self.n, self.tuned = n, tuned

    def check_model(self, model: HookedModel) -> None:
        if has_custom_forward(model):
            raise ConfigError(
                f"{self.name} decodes each layer with the model's final norm and unembedding, but "
                "the model's forward was replaced. Remove the probe, or change components of the "
                "model instead of its forward."
            )

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        rows = text_rows(seen, self.text, self.n)
        with without_hooks(model, reference):
            (own, other), true = both_streams((model, reference), rows)
            raw = lens_divergence(model, reference, own, other, rows.states)
            found: dict[str, Tensor] = {"raw": raw}
            values: dict[str, Any] = {"layers": layer_names(model), "n": len(raw[0])}
            cut = 2 * len(raw[0]) // 3
            if self.tuned and len(raw[0]) >= FEWEST_ROWS_TUNED:
                maps, fields = fit_translators(other[:, :cut], rows.written[:cut])
                moved = [
                    torch.stack(
                        [*(f(x) for f, x in zip(maps, h[:-1, cut:], strict=True)), h[-1, cut:]]
                    )
                    for h in (own, other)
                ]
                found["tuned"] = lens_divergence(model, reference, *moved, rows.states[cut:])
                values |= fields | {"held_out": len(raw[0]) - cut}
        states = rows.states.cpu()
        found = {name: x.cpu() for name, x in found.items()}
        for name, x in found.items():
            values |= _by_layer(name, x, states[-x.shape[1] :])
        if seen.truth is not None:
            values["slots"] = seen.truth.slot_names(rows.tokens.shape[1] + 1)[1:]
        mask = rows.attention_mask.cpu()
        turn = lambda x: rotate_padding(x, mask[-len(x) :], "right")
        tensors = {name: torch.stack([turn(layer) for layer in x]) for name, x in found.items()} | {
            "states": turn(states)
        }
        checks = self._checks(seen, found["raw"], true.cpu(), states)
        return Record(values, tensors, checks)

    def _checks(
        self,
        seen: Observation,
        raw: Float[Tensor, "layer batch seq"],
        true: Float[Tensor, "batch seq"],
        states: Bool[Tensor, "batch seq"],
    ) -> list[Check]:
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        missed = ((raw[-1] - true) * states).abs().max().item() / max(1.0, true.max().item())
        allowed = seen.allowed(1e-5, half=0.05)
        equal = raw[: unchanged_layers(model, reference)]
        checks = [
            Check.at_most("the last layer has the KL of the logits", missed, allowed),
            Check.at_most("no KL is negative", -raw.min().item(), seen.allowed(1e-6, half=1e-3)),
        ]
        if len(equal):
            name = "nothing diverges in front of what changed"
            checks.append(Check.at_most(name, equal.abs().max().item(), 0))
        if same_weights(model, reference):
            largest = raw.abs().max().item()
            checks.append(Check.at_most("equal models do not diverge", largest, 0))
        return checks


def layer_names(model: HookedModel) -> list[str]:
    """What each residual is behind: the embedding, and each block."""
    return ["embed", *(f"L{layer}" for layer in range(model.cfg.n_layers))]


def unchanged_layers(model: HookedModel, reference: HookedModel) -> int:
    """How many residuals, from the first on, are read the same in both models by their weights."""
    before, after = effective_weights(reference), effective_weights(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    first = model.cfg.n_layers + 1
    for name in changed:
        top, *rest = name.split(".")
        if top in ("ln_final", "unembed"):
            return 0
        first = min(first, int(rest[0]) + 1 if top == "blocks" else 0)
    return first


def both_streams(
    models: Sequence[HookedModel], rows: TextRows
) -> tuple[list[Float[Tensor, "layer batch seq d_model"]], Float[Tensor, "batch seq"]]:
    """Each model's residuals, and the KL of the first model's logits from the second's."""
    last = f"blocks.{models[0].cfg.n_layers - 1}.hook_resid_post"
    sites = ["blocks.*.hook_resid_pre", last, "logits"]
    streams, true = [[], []], []
    for some in torch.arange(len(rows.tokens), device=rows.tokens.device).split(ROWS_READ):
        part, logprobs = rows.take(some), []
        for kept, model in zip(streams, models, strict=True):
            acts = capture_activations(
                model, part.tokens, sites, attention_mask=part.attention_mask
            )
            logprobs.append(log_probs(acts.pop("logits")))
            kept.append(torch.stack(list(acts.values())))
        true.append(kl_per_token(*logprobs))
    return [torch.cat(kept, 1) for kept in streams], torch.cat(true)


def fit_translators(
    residuals: Float[Tensor, "layer batch seq d_model"], mask: Bool[Tensor, "batch seq"]
) -> tuple[list[Affine], dict[str, Any]]:
    """Return affine maps to the last residual, their penalties and their held-out errors."""
    mask, early = mask.to(residuals.device), residuals[:-1]
    fit = [(x, residuals[-1], mask) for x in early]
    some = spread_over(len(early))
    errors = torch.stack([ridge_errors(*fit[at], pooled=True) for at in some])
    ridge = best_ridge(errors)
    left = errors[:, 0, PENALTIES.index(ridge)]
    fields = {"tuned_ridge": ridge, "tuned_layers": some, "tuned_left": decimals(left, 4)}
    return [fit_translator(*each, ridge) for each in fit], fields


def _by_layer(
    name: str, x: Float[Tensor, "layer batch seq"], states: Bool[Tensor, "batch seq"]
) -> dict[str, Any]:
    sums, counts = x.double().sum(2).T, states.sum(1).double()[:, None]
    counts = counts.expand_as(sums)
    found = bootstrap_means(sums, counts, statistic=torch.div, resamples=RESAMPLES)
    return {name: decimals(found.value)} | interval_fields(name, found, 6)
