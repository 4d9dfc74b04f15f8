"""WeightDelta: singular values and effective rank of the change of each weight matrix."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.weights import as_matrix, spectrum
from rlhf_lab.models import effective_weights
from rlhf_lab.models.device import where_exact
from rlhf_lab.probes.probe import Check, Observation, Probe, Record

ENERGY = 0.9


def describe_spectrum(s: Float[Tensor, " rank"]) -> tuple[float, int]:
    """Stable rank, and how many directions hold 90% of the energy; 0 and 0 of a zero delta.

    Args:
        s: singular values, the largest first; the energy of a direction is its value squared.

    stable rank = sum s^2 / max s^2   (Rudelson and Vershynin 2007)
    """
    energy = s.square()
    total = energy.sum()
    if total == 0:
        return 0.0, 0
    reached = energy.cumsum(0) >= ENERGY * total * (1 - 1e-12)
    return (total / energy[0]).item(), int(reached.long().argmax()) + 1


def unchanged_fraction(before: Tensor, after: Tensor) -> tuple[float, float]:
    """Return the fraction of equal entries, unrounded and after rounding both to bfloat16."""
    same = (before == after).double().mean().item()
    return same, (before.bfloat16() == after.bfloat16()).double().mean().item()


def describe_delta(name: str, before: Tensor, after: Tensor) -> dict[str, Any]:
    """Return the sizes, spectrum and sparsity of the change of one weight."""
    before, after = where_exact(before), where_exact(after)
    delta = as_matrix(name, after.double() - before.double())
    s = spectrum(delta)[0]
    stable_rank, k90 = describe_spectrum(s)
    same, same_bf16 = unchanged_fraction(before, after)
    norm, energy = delta.norm().item(), delta.square().sum()
    size = before.double().norm().item()
    return {
        "name": name,
        "norm": norm,
        "relative": norm / size if size else None,  # None if the weight was 0
        "stable_rank": stable_rank,
        "k90": k90,
        "unchanged": same,
        "unchanged_bf16": same_bf16,
        "s": [round(value, 8) for value in s[:16].tolist()],
        "energy_error": abs(s.square().sum() - energy).item() / max(energy.item(), 1e-30),
    }


class WeightDelta(Probe):
    """Policy minus reference, matrix by matrix.

    Checks: the squared singular values sum to the squared norm; before learning nothing changed.
    """

    name = "weight_delta"
    question = "How large is the change of each weight, and how many directions has it?"
    caveat = "A large change of a weight may have no effect on the logits."
    every = 10

    def observe(self, seen: Observation) -> Record:
        before = effective_weights(seen.ctx.reference)
        rows = [
            describe_delta(name, before[name], after)
            for name, after in effective_weights(seen.ctx.policy.base_model).items()
        ]
        errors = [row.pop("energy_error") for row in rows]
        total = sum(row["norm"] ** 2 for row in rows) ** 0.5
        name = "squared singular values sum to the squared norm"
        checks = [lambda: Check.at_most(name, max(errors), 1e-9)]
        starts_apart = seen.args.reference_model or "reference" in seen.custom_components
        if seen.ctx.phase == 0 and not starts_apart:
            checks.append(lambda: Check.at_most("no weight has changed before learning", total, 0))
        return Record({"total_norm": total, "rows": rows}, checks=checks)
