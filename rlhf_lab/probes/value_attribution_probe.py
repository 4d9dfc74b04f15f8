"""ValueAttribution: which parts of the model make the values of a slot differ from text to text."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models import TransformerWithCritic
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, has_hooks, is_centered, model_where_exact
from rlhf_lab.models.residual_parts import PART_SITES, residual_components, validate_additive
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.value_attribution import ValueRows, refuse_other_heads, secant_value_rows
from rlhf_lab.training import RLHFTrainer


class ValueAttribution(Probe):
    """Contribution of each component to the value of a text, against the mean state of the slot.

    The value minus that of the mean state is split exactly over embedding, heads and MLPs (see
    `secant_value_rows`), with the actual scale of the final norm. The standard deviation of a
    component's rows over the texts measures how much it makes values differ.

    Checks: the rows sum to the value's difference, and the value is the model's own.

    Args:
        slots: positions of the eval text; four evenly spaced ones when None.
        n: number of texts.
    """

    name = "value_attribution"
    question = "Which components make the values of a position differ between texts?"
    caveat = "Rows split one state's value and do not show effects through later components."
    text = "eval"
    sites = (*PART_SITES, "ln_final.hook_scale", "values")
    every = 5

    def __init__(
        self,
        slots: tuple[int, ...] | None = None,
        n: int = 64,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        if n < 2 or slots == ():
            raise ConfigError(
                f"n={n} and slots={slots} of {self.name} must be 2 or more texts and at least one "
                "position."
            )
        self.slots, self.n = slots, n

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)

    def check_run(self, trainer: RLHFTrainer) -> None:
        if isinstance(trainer.policy, TransformerWithCritic):
            raise ConfigError(
                "value_head='separate' has values that come from another model's parts; use "
                "'shared' or 'detached', or leave out value_attribution."
            )
        refuse_other_heads(trainer.policy.value_head)

    def observe(self, seen: Observation) -> Record:
        policy = seen.ctx.policy
        if has_hooks(policy):
            raise ConfigError(
                "hooks are on the policy, and what they change is no part's; take them off, or "
                "leave out value_attribution."
            )
        slots = self._slots(seen)
        names, split, masks, gaps = [], [], [], []
        for pos in slots:
            names, parts, own = normalized_parts(seen, pos, self.n)
            real = seen.text.attention_mask[: len(own), pos].to(parts.device)
            kept = parts[:, real]
            split.append(secant_value_rows(policy.value_head, kept, kept.mean(1)))
            gaps.append((split[-1].value - exact(own)[real]).abs().max().item())
            masks.append(real.cpu())
        fields, tensors = _figures(split, torch.stack(masks))
        values = {"components": names, "positions": slots, **fields}
        if seen.truth is not None:
            every = seen.truth.slot_names(seen.text.tokens.shape[1])
            values["slots"] = [every[pos] for pos in slots]
        missed = [(s.rows.sum(0) - (s.value - s.base)).abs().max().item() for s in split]
        scale = max(1.0, max(s.value.abs().max().item() for s in split))
        checks = [
            Check.at_most("the rows sum to the value less the mean state's", max(missed), 1e-9),
            Check.at_most(
                "the parts give the model's own value",
                max(gaps) / scale,
                seen.allowed(1e-4, half=5e-2),
            ),
        ]
        return Record(values, tensors, checks)

    def _slots(self, seen: Observation) -> list[int]:
        seq = seen.text.tokens.shape[1]
        given = self.slots
        if given is None:
            given = tuple(torch.linspace(0, seq - 1, min(5, seq)).round().long().tolist())[-4:]
        wrong = [pos for pos in given if not -seq <= pos < seq]
        if wrong:
            raise ConfigError(
                f"slots has {wrong[0]}, outside texts of {seq} tokens; choose from {-seq} to "
                f"{seq - 1}."
            )
        slots = [pos % seq for pos in given]
        there = seen.text.attention_mask[: self.n].sum(0)
        slots = [pos for pos in slots if there[pos] >= 2]
        if not slots:
            raise ConfigError(
                f"slots={self.slots} of {self.name} are padding in all texts but one; give later "
                "positions, or more texts."
            )
        return slots


def normalized_parts(
    seen: Observation, pos: int, n: int
) -> tuple[list[str], Float[Tensor, "component n d_model"], Float[Tensor, " n"]]:
    """Parts that sum to what the value head reads at a position of the first texts; the values."""
    model = seen.ctx.policy.base_model
    acts = {site: act[:n, pos] for site, act in seen.acts.items()}
    where = model_where_exact(model)
    names, parts = residual_components(where, {s: exact(act) for s, act in acts.items()})
    if is_centered(model.ln_final):
        parts = parts - parts.mean(-1, keepdim=True)
    return names, parts / exact(acts["ln_final.hook_scale"]), acts["values"]


def _figures(
    split: list[ValueRows], masks: Bool[Tensor, "slot text"]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    n_texts = masks.shape[1]
    spreads = [
        bootstrap_means(
            rows.rows.T, rows.rows.T.square(), statistic=_deviation, resamples=RESAMPLES
        )
        for rows in split
    ]
    ends = [interval_fields("sd", each, 6) for each in spreads]
    on = torch.cat([rows.on for rows in split])
    fields = {
        "sd": [decimals(each.value) for each in spreads],
        **{name: [each[name] for each in ends] for name in ends[0]},
        "value_sd": [round(rows.value.std(correction=0).item(), 6) for rows in split],
        "n": masks.sum(1).tolist(),
        "dead": round(1 - on.any(0).double().mean().item(), 6),
    }
    tensors = {"base": torch.stack([rows.base for rows in split]), "mask": masks}
    for name in ("rows", "value"):
        wide = [getattr(rows, name).cpu() for rows in split]
        padded = [torch.zeros(*x.shape[:-1], n_texts, dtype=x.dtype) for x in wide]
        for whole, x, mask in zip(padded, wide, masks, strict=True):
            whole[..., mask] = x
        tensors[name] = torch.stack(padded)
    return fields, {name: x.cpu() for name, x in tensors.items()}


def _deviation(mean: Tensor, square: Tensor) -> Tensor:
    return (square - mean.square()).clamp(min=0).sqrt()
