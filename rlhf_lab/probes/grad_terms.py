"""GradTerms: gradients of the objective's four terms, by part of the model, and how they agree."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, restrict
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.device import exact
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.probes.policy_groups import policy_groups
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.probes.step_influence import ByWeight
from rlhf_lab.probes.step_shares import with_weights
from rlhf_lab.training import Objective, ReplayMinibatch, objective_terms

GRADIENT_TERMS = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
"""Fields of `ObjectiveTerms`, in the order of the stored rows."""
TERM_SIGNS = (1.0, -1.0, 1.0, -1.0)
"""With which each term enters the objective."""
SUM_ROUNDING = {"fp32": 1e-5, "tf32": 1e-2, "bf16": 5e-2}
ALONG = 1e-3
"""How far weights are moved for a central difference, as a share of their own norm."""
FINEST = 1e-7
"""What rounding may make of a term, in its own unit: a slope below it is none."""


def term_gradients(
    policy: TransformerWithValueHead,
    reference: HookedTransformer,
    minibatch: ReplayMinibatch,
    objective: Objective,
    kl_coef: float,
) -> list[dict[str, Tensor]]:
    """The gradient of each term of the objective, with its sign in it, by all trained weights.

    One forward pass and one backward pass for each term; 0 for weights that a term does not reach.
    """
    weights = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        terms = objective_terms(policy, reference, minibatch, objective, kl_coef)
        found = []
        for name, sign in zip(GRADIENT_TERMS, TERM_SIGNS, strict=True):
            term = getattr(terms, name)
            slopes = [None] * len(weights)
            if term.requires_grad:
                slopes = torch.autograd.grad(
                    sign * term, list(weights.values()), retain_graph=True, allow_unused=True
                )
            named = zip(weights.items(), slopes, strict=True)
            found.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in named})
    return found


def gradient_products(
    gradients: list[dict[str, Tensor]], groups: Groups
) -> Float[Tensor, "term term group"]:
    """<g_a, g_b> of every two terms within every group, in float64."""
    products = []
    for name in groups.names:
        parts = [restrict(gradient, groups, name) for gradient in gradients]
        flat = torch.stack([torch.cat([exact(x).flatten() for x in p.values()]) for p in parts])
        products.append(flat @ flat.T)
    return torch.stack(products, -1)


def cosines_of(products: Float[Tensor, "term term group"]) -> Float[Tensor, "term term group"]:
    """Cosines between terms within groups; 0 where one of the two has no gradient."""
    norms = products.diagonal(dim1=0, dim2=1).T.clamp(min=0).sqrt()
    size = norms[:, None] * norms[None]
    return torch.where(size > 0, products / size.clamp(min=1e-300), 0.0)


class GradTerms(Probe):
    """How hard each term of the objective pulls on each part of the model, and against which other.

    Norms of the gradients of surrogate, value loss, entropy bonus and KL penalty, with the signs
    that they have in the objective, in every attention, MLP, embedding and head; and the cosines
    between them. With a separate critic the value loss has a gradient there alone.

    Checks: the four gradients sum to the one that the trainer is about to climb; where policy and
    reference are the same, the KL has none; the value loss never reaches the unembedding; a norm
    and a cosine, chosen at random, are what moving the weights of the stored group does to the
    stored term.

    Args:
        step: "first" or "last" of the phase.

    Raises:
        ConfigError: another step.
    """

    name = "grad_terms"
    events = ("after_backward",)
    step = "first"
    every = 5

    def __init__(
        self, step: str = "first", every: int | None = None, name: str | None = None
    ) -> None:
        super().__init__(every, name)
        if step not in ("first", "last"):
            raise ConfigError(f"step={step!r} of {self.name} must be 'first' or 'last'.")
        self.step = step

    def check_run(self, trainer: Any) -> None:
        """Refuse a run that steps during the backward pass: its gradients are gone by then."""
        if trainer.args.optimizer_in_backward:
            raise ConfigError(
                f"optimizer_in_backward=True leaves no gradient for {self.name} to look at; leave "
                "it False, or the probe out."
            )

    def observe(self, seen: Observation) -> Record:
        """Take each term's gradient, and compare their sum with the trainer's."""
        ctx = seen.ctx
        groups = policy_groups(ctx.policy, fine=False)
        settings = ctx.minibatch, seen.objective, ctx.kl_coef
        gradients = term_gradients(ctx.policy, ctx.reference, *settings)
        products = gradient_products(gradients, groups)
        whole = products.sum(-1, keepdim=True)
        products = torch.cat([products, whole], -1)
        norms = products.diagonal(dim1=0, dim2=1).T.clamp(min=0).sqrt()
        squares = [exact(g).square().sum().item() for g in seen.gradients.values()]
        values = {
            "step": ctx.step,
            "steps": seen.args.num_minibatches * seen.args.batches_per_learning_phase,
            "terms": list(GRADIENT_TERMS),
            "groups": [*groups.names, "all"],
            "grad_norm": sum(squares) ** 0.5,
        }
        tensors = {"norms": norms.float().cpu(), "cosines": cosines_of(products).float().cpu()}
        checks = [
            Check.at_most(
                "the gradients of the terms sum to the trainer's",
                _sum_gap(gradients, seen.gradients),
                SUM_ROUNDING[seen.args.rounding],
            )
        ]
        return Record(values, tensors, checks)

    def bind(self, seen: Observation, record: Record) -> list[Check]:
        """Hold norms and cosines to what moving weights does, by the stored names."""
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


def _sum_gap(gradients: list[dict[str, Tensor]], expected: ByWeight) -> float:
    """The distance of the terms' sum from the trainer's gradient, as a share of its length."""
    apart = size = 0.0
    for name, gradient in expected.items():
        total = sum(exact(of_term[name]) for of_term in gradients)
        apart += (total - exact(gradient)).square().sum().item()
        size += exact(gradient).square().sum().item()
    return (apart / max(size, 1e-300)) ** 0.5


def _untouched(
    seen: Observation, values: dict[str, Any], norms: Float[Tensor, "term group"]
) -> list[Check]:
    """Gradients that are 0: the KL's at the reference, the value loss's at the unembedding."""
    checks, terms = [], values["terms"]
    row = lambda name: norms[terms.index(name)]
    same = seen.ctx.phase == 0 and seen.ctx.step == 0 and "reference" not in seen.own_parts
    if same and "policy" not in seen.own_parts and seen.args.kl_estimator == "exact":
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
    """A term's change along another's unit gradient in a group: the cosine times its own norm."""
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
        title = f"the change of {name} along the gradient of {terms[other]} is that of its own"
        # also a tenth of the way: on the whole of it a ReLU of the value head may switch
        slopes = [((at(by, name) - at(-by, name)) / (2 * by * step), by) for by in (1.0, 0.1)]
        misses = [abs(x - stored.item()) - FINEST / (2 * by * step) for x, by in slopes]
        miss = max(0.0, min(misses))
        checks.append(Check.at_most(title, miss / max(size, 1e-12), 0.02))
    return checks
