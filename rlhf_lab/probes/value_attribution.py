"""ValueAttribution: which components make values of one slot differ, an exact sum."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_means, zero_masked
from rlhf_lab.models import TransformerWithCritic
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered, model_where_exact
from rlhf_lab.models.residual_parts import PART_SITES, residual_components, validate_additive
from rlhf_lab.models.value_head import ValueHead
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.training import RLHFTrainer

LEAST_STEP = 1e-12  # of a hidden unit's input, in float64: below, the secant is the slope


class ValueRows(NamedTuple):
    """Difference of the value of each state from that of an origin, by component.

    Args:
        rows: contribution of each component's deviation; they sum to value minus base.
        on: hidden units that are active in each state; none in a dead head.
        base: value of the origin.
    """

    rows: Float[Tensor, "component n"]
    on: Bool[Tensor, "n hidden"]
    value: Float[Tensor, " n"]
    base: Float[Tensor, ""]


@torch.no_grad()
def secant_value_rows(
    head: nn.Module,
    parts: Float[Tensor, "component n d_model"],
    origin: Float[Tensor, "component d_model"],
) -> ValueRows:
    """Split a value head's output exactly over the parts that sum to its input, in float64.

    The integral of a ReLU's slope along the straight line from the origin is the secant, so a
    part's row is its deviation from the origin through the secants; a part equal in all states has
    0.

    Args:
        parts: such as each head's output, centered and divided by the final norm's scale.
        origin: state to compare with, such as the mean of each part over the states of a slot.

    row_c = sum_j w2_j (relu(p_j) - relu(p0_j)) / (p_j - p0_j) <W1_j, k_c - k0_c>
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365, in closed form)

    Raises:
        ConfigError: If the head is not two linear layers with a ReLU between.
    """
    validate_head(head)
    first, _, last = head
    weight, bias = exact(first.weight), exact(first.bias)
    out, constant = exact(last.weight)[0], exact(last.bias)[0]
    parts, origin = exact(parts), exact(origin)
    here, there = parts.sum(0) @ weight.T + bias, origin.sum(0) @ weight.T + bias
    step, rise = here - there, here.relu() - there.relu()
    moved = step.abs() > LEAST_STEP
    slopes = torch.where(moved, rise / torch.where(moved, step, 1.0), (there > 0).to(here))
    rows = torch.einsum("cnd,nd->cn", parts - origin[:, None], (slopes * out) @ weight)
    value, base = (x.relu() @ out + constant for x in (here, there))
    return ValueRows(rows, here > 0, value, base)


def validate_head(head: nn.Module) -> None:
    """Raise ConfigError for a value head that is not two linear layers with a ReLU between."""
    layers = [head[i] for i in range(3)] if isinstance(head, ValueHead) else []
    if len(layers) != 3 or not all(map(isinstance, layers, (nn.Linear, nn.ReLU, nn.Linear))):
        raise ConfigError(
            f"value_head is a {type(head).__name__}, and value_attribution reads two linear layers "
            "with a ReLU between. Leave the probe out, or use make_value_head's."
        )


class ValueAttribution(Probe):
    """Contribution of each component to the value of a text, against the mean state of the slot.

    The value minus that of the mean state is split exactly over embedding, heads and MLPs (see
    `secant_value_rows`), with the actual scale of the final norm. The standard deviation of a
    component's rows over the texts measures how much it makes values differ.

    Checks: the rows and the value of the mean state sum to the model's value.

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
    options = ("slots", "n", *Probe.options)
    slots: tuple[int, ...] | None = None
    n = 64

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)

    def check_run(self, trainer: RLHFTrainer) -> None:
        if isinstance(trainer.policy, TransformerWithCritic):
            raise ConfigError(
                "value_head='separate' has values of another model's parts. Use 'shared' or "
                "'detached', or leave out value_attribution."
            )
        validate_head(trainer.policy.value_head)

    def observe(self, seen: Observation) -> Record:
        head, slots = seen.ctx.policy.value_head, self._slots(seen)
        split, measured, masks, rows = [], [], [], []
        for pos in slots:
            names, parts, values = normalized_parts(seen, pos, self.n)
            real = seen.text.attention_mask[: self.n, pos].to(parts.device)
            found = secant_value_rows(head, parts, parts[:, real].mean(1))
            kept = (x[real] for x in (found.on, found.value))
            split.append(ValueRows(found.rows[:, real], *kept, found.base))
            measured.append(exact(values)[real])
            masks.append(real.cpu())
            rows.append(zero_masked(found.rows, real.expand_as(found.rows)).cpu())
        fields = {"components": names, "positions": slots, **_summarize(split)}
        if seen.truth is not None:
            every = seen.truth.slot_names(seen.text.tokens.shape[1])
            fields["slots"] = [every[pos] for pos in slots]
        tensors = {"rows": torch.stack(rows), "mask": torch.stack(masks)}

        def check_values() -> Check:
            pairs = zip(split, measured, strict=True)
            gaps = [(s.rows.sum(0) + s.base - x).abs().max().item() for s, x in pairs]
            gap = max(gaps) / max(1.0, max(s.value.abs().max().item() for s in split))
            return Check.at_most(
                "rows sum to the model's value", gap, seen.allowed(1e-4, half=5e-2)
            )

        return Record(fields, tensors, [check_values])

    def _slots(self, seen: Observation) -> list[int]:
        seq, slots = seen.text.tokens.shape[1], self.slots
        if slots is None:
            slots = torch.linspace(0, seq - 1, min(5, seq)).round().long().tolist()[-4:]
        counts = seen.text.attention_mask[: self.n].sum(0)
        found = [pos % seq for pos in slots if counts[pos] >= 2]
        if not found:
            raise ConfigError(
                f"slots={slots} are real tokens of fewer than 2 of n={self.n} texts. Use other "
                "positions, or more texts."
            )
        return found


def normalized_parts(
    seen: Observation, pos: int, n: int
) -> tuple[list[str], Float[Tensor, "component n d_model"], Float[Tensor, " n"]]:
    """Return parts that sum to the head's input at a position of the first texts, and values."""
    model = seen.ctx.policy.base_model
    acts = {site: act[:n, pos] for site, act in seen.acts.items()}
    where = model_where_exact(model)
    names, parts = residual_components(where, {s: exact(act) for s, act in acts.items()})
    if is_centered(model.ln_final):
        parts = parts - parts.mean(-1, keepdim=True)
    return names, parts / exact(acts["ln_final.hook_scale"]), acts["values"]


def _summarize(split: list[ValueRows]) -> dict[str, Any]:
    deviation = lambda mean, square: (square - mean.square()).clamp(min=0).sqrt()
    options = {"statistic": deviation, "resamples": RESAMPLES}
    spreads = [bootstrap_means(x.rows.T, x.rows.T.square(), **options) for x in split]
    ends = [interval_fields("sd", each, 6) for each in spreads]
    return {
        "sd": [decimals(each.value) for each in spreads],
        **{name: [each[name] for each in ends] for name in ends[0]},
        "value_sd": [round(x.value.std(correction=0).item(), 6) for x in split],
        "n": [x.rows.shape[1] for x in split],
        "dead": round(1 - torch.cat([x.on for x in split]).any(0).double().mean().item(), 6),
    }
