"""Checks of GradTerms's record: norms and cosines compared with finite differences."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.groups import restrict
from rlhf_lab.models.device import exact
from rlhf_lab.probes.grad_terms import GRADIENT_TERMS, SUM_ROUNDING, TERM_SIGNS, term_gradients
from rlhf_lab.probes.policy_groups import policy_groups
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.step_shares import with_weights
from rlhf_lab.training import objective_terms

ALONG = 1e-3  # length of a central difference, relative to the norm of the weights
FINEST = 1e-7  # absolute rounding error of a term


def bind_grad_terms(seen: Observation, record: Record) -> list[Check]:
    """Compare norms and cosines with finite differences, looked up by stored names."""
    values, norms = record.values, exact(record.tensors["norms"])
    cosines = exact(record.tensors["cosines"])
    parts, whole = norms[:, :-1].square().sum(1).sqrt(), norms[:, -1]
    total = max(values["grad_norm"], 1e-12)
    gram = (cosines[..., -1] * whole[:, None] * whole[None]).sum().clamp(min=0).sqrt()
    checks = [
        Check.at_most(
            "groups make up the whole", ((parts - whole).abs().max() / total).item(), 1e-5
        ),
        Check.at_most(
            "norms and cosines make up the trainer's gradient",
            (gram - total).abs().item() / total,
            10 * SUM_ROUNDING[seen.args.rounding],
        ),
        *_untouched(seen, values, norms),
        *_moved(seen, record, norms, cosines),
    ]
    return checks


def _untouched(
    seen: Observation, values: dict[str, Any], norms: Float[Tensor, "term group"]
) -> list[Check]:
    """Check the zeros: KL gradient at the reference, value-loss gradient at the unembedding."""
    checks, terms = [], values["terms"]
    row = lambda name: norms[terms.index(name)]
    same = seen.ctx.phase == 0 and seen.ctx.step == 0 and "reference" not in seen.custom_components
    if same and "policy" not in seen.custom_components and seen.args.kl_estimator == "exact":
        pull = row("kl_penalty").max().item() / max(values["grad_norm"], 1e-12)
        checks.append(Check.at_most("the KL has no gradient at the reference", pull, 1e-5))
    if "unembed" in values["groups"]:
        reached = row("value_loss")[values["groups"].index("unembed")].item()
        checks.append(Check.at_most("the value loss does not reach the unembedding", reached, 0))
    return checks


def _moved(
    seen: Observation,
    record: Record,
    norms: Float[Tensor, "term group"],
    cosines: Float[Tensor, "term term group"],
) -> list[Check]:
    """Check that a term's slope along another term's unit gradient is cosine times norm."""
    ctx, random = seen.ctx, torch.Generator().manual_seed(seen.ctx.phase)
    draw = lambda n: int(torch.randint(n, (), generator=random))
    names, terms = record.values["groups"], record.values["terms"]
    groups = policy_groups(ctx.policy, fine=False)
    group, term, other = draw(len(names) - 1), draw(len(terms)), draw(len(terms))
    if norms[other, group] <= 1e-6 * norms[:, -1].max():
        other = int(norms[:, group].argmax())
    settings = ctx.minibatch, seen.objective, ctx.kl_coef
    gradients = dict(
        zip(GRADIENT_TERMS, term_gradients(ctx.policy, ctx.reference, *settings), strict=True)
    )
    signs = dict(zip(GRADIENT_TERMS, TERM_SIGNS, strict=True))
    if names[group] not in groups.names or terms[other] not in gradients:
        return [Check.at_most("norms and cosines are changes along a gradient", float("nan"), 0)]
    along = restrict(gradients[terms[other]], groups, names[group])
    length = sum(exact(x).square().sum().item() for x in along.values()) ** 0.5
    weights = {n: p.detach() for n, p in ctx.policy.named_parameters() if n in along}
    step = ALONG * sum(exact(x).square().sum().item() for x in weights.values()) ** 0.5

    def at(by: float, name: str) -> float:
        moved = {n: w + by * step / max(length, 1e-300) * along[n] for n, w in weights.items()}
        found = with_weights(
            ctx.policy, moved, lambda policy: objective_terms(policy, ctx.reference, *settings)
        )
        return signs[name] * getattr(found, name).item()

    checks = []
    for name, stored in (
        (terms[term], cosines[term, other, group] * norms[term, group]),
        (terms[other], norms[other, group]),
    ):
        size = max(norms[terms.index(name), group].item(), 1e-3 * norms[:, group].max().item())
        title = f"the change of {name} along the gradient of {terms[other]} equals its slope"
        # also a tenth of the way: on the whole of it a ReLU of the value head may switch
        slopes = [((at(by, name) - at(-by, name)) / (2 * by * step), by) for by in (1.0, 0.1)]
        errors = [abs(x - stored.item()) - FINEST / (2 * by * step) for x, by in slopes]
        error = max(0.0, min(errors))
        checks.append(Check.at_most(title, error / max(size, 1e-12), 0.02))
    return checks
