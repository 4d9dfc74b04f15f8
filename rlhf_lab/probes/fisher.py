"""Fisher: the KL from the reference beside its quadratic form, by block, and for shorter steps."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.fisher import fisher_quadratic
from rlhf_lab.diffing.groups import coarse_groups, restrict
from rlhf_lab.diffing.weight_line import WeightLine
from rlhf_lab.functional import bootstrap_means, kl_per_token, log_probs
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.text_rows import TextName, TextProbe, TextRows, text_rows

SMALL_STEP = 0.03  # fraction of the change at which the quadratic form is accurate
SMALL_KL = 1e-6  # nats per sequence; limits the step when the policy is nearly deterministic
SHARES = (0.01, SMALL_STEP, 0.1, 0.3, 1.0)


class Fisher(TextProbe):
    """Exact KL from the reference compared with half of delta' F delta, Fisher's quadratic form.

    For the change of all weights at several fractions a, and by block, in float64, with hooks off.
    The ratio is 1 for small steps; elsewhere second-order arguments fail. Blocks do not add up.

    Checks: over both directions of a small step the KL is the quadratic form to 1 %; equal models
    have none.

    Args:
        n: number of sequences.
        text: "eval" or "rollout".
    """

    name = "fisher"
    question = "Is the KL from the reference still quadratic in the change of the weights?"
    caveat = "The forms of blocks do not sum to the form of the whole change."
    text = "eval"
    every = 20

    def __init__(
        self,
        n: int = 32,
        text: TextName = "eval",
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(text, every, name)
        self.n = n

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        rows = text_rows(seen, self.text, self.n)
        line, groups = WeightLine(reference, model, in_float64=True), coarse_groups(reference)
        changes = [restrict(line.delta, groups, name) for name in groups.names]
        quad = torch.stack([_quadratic(line, rows, change) for change in changes])
        kl = torch.stack([kl_of_step(line, rows, change, 1.0) for change in changes])
        whole = _quadratic(line, rows, line.delta)
        shares = torch.stack([kl_of_step(line, rows, line.delta, a) for a in SHARES])
        short = short_share(whole.mean().item())
        both = sum(kl_of_step(line, rows, line.delta, sign * short) for sign in (1, -1)) / 2
        values: dict[str, Any] = {"groups": list(groups.names), "n": len(whole)}
        for field, x in {"quad": quad, "kl": kl}.items():
            found = bootstrap_means(x.T, resamples=RESAMPLES)
            values |= {field: decimals(found.value)} | interval_fields(field, found, 6)
        values |= {"quad_whole": whole.mean().item(), "a": list(SHARES)}
        values["ratio"] = [_ratio(x, a, whole) for x, a in zip(shares, SHARES, strict=True)]
        found_ratio = _ratio(both, short, whole)
        missed = 0.0 if found_ratio is None else abs(found_ratio - 1)
        checks = [
            Check.at_most("the KL of a small step is the quadratic form", missed, 0.01),
            Check.at_most("no KL is negative", -min(kl.min().item(), shares.min().item()), 1e-9),
        ]
        tensors = {"quad": quad, "kl": kl, "quad_whole": whole, "kl_at": shares}
        return Record(values, {name: x.cpu().float() for name, x in tensors.items()}, checks)


def short_share(quad: float) -> float:
    """Return a fraction of the change at which the KL matches its quadratic form to 1 %."""
    return min(SMALL_STEP, (SMALL_KL / max(quad, 1e-30)) ** 0.5)


def kl_of_step(
    line: WeightLine, rows: TextRows, change: dict[str, Tensor], share: float
) -> Float[Tensor, " batch"]:
    """The exact KL of each sequence from the first model, behind a share of a change."""
    text = rows.tokens.to(line.text_device), rows.attention_mask.to(line.text_device)
    moved = {name: line.before[name] + share * x for name, x in change.items()}
    logprobs = log_probs(line.logits(line.before | moved, *text))
    kl = kl_per_token(logprobs, log_probs(line.logits(line.before, *text)))
    return kl.masked_fill(~rows.states.to(line.text_device), 0.0).sum(1)


def _quadratic(line: WeightLine, rows: TextRows, change: dict[str, Tensor]) -> Tensor:
    if not any(bool(x.any()) for x in change.values()):
        return torch.zeros(len(rows.tokens), dtype=torch.float64, device=line.text_device)
    return fisher_quadratic(line, rows.tokens, change, rows.states, rows.attention_mask)


def _ratio(kl: Tensor, share: float, quad: Tensor) -> float | None:
    size = share**2 * quad.sum().item()
    return round(kl.sum().item() / size, 6) if size > 0 else None
