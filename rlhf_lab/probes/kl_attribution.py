"""KLAttribution: the KL from the reference, by where it shows and by whose weights cause it."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups
from rlhf_lab.diffing.kl_attribution import TEXTS_PER_PASS, OutputKL, kl_by_output, kl_by_weights
from rlhf_lab.diffing.weight_line import NODES, WeightLine
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models.device import has_float64
from rlhf_lab.models.hooked_model import HookedModel, model_where_exact, without_hooks
from rlhf_lab.models.lora import same_weights
from rlhf_lab.models.residual_parts import PART_SITES, residual_components, validate_additive
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Record,
    decimals,
    interval_fields,
    mean_fields,
)
from rlhf_lab.probes.text_rows import TextName, TextProbe, TextRows, text_rows
from rlhf_lab.training.capture import capture_activations

OF_READ_OUT = "read-out"
MOST_HEADS = 32  # with more heads, groups of weights are whole layers
NUMBERS_AT_ONCE = 20_000_000


class KLAttribution(TextProbe):
    """The KL of the policy from the reference, split exactly by output and by weights.

    1. By output: the residual stream moves from the reference's to the policy's, and each component
       gets the effect of its change; the unembedding is separate.
    2. By weights: all weights move in a straight line, and each group gets all effects of its
       change, through later components as well.

    A late MLP gets in the first what an early one sent it, and the early one in the second. Both
    are in nats per sequence of the text, with hooks off.

    Checks: both sum to the KL; the KL is not negative; equal models have none.

    Args:
        n: number of sequences.
        text: "eval" or "rollout".
        nodes: of the quadrature; increase them if a sum check fails.
    """

    name = "kl_attribution"
    question = "Which outputs and which weights make up the KL from the reference?"
    caveat = "The two splits answer different questions and need not agree."
    text = "eval"
    every = 10

    def __init__(
        self,
        n: int = 64,
        text: TextName = "eval",
        nodes: int = NODES,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(text, every, name)
        self.n, self.nodes = n, nodes

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        rows = text_rows(seen, self.text, self.n)
        names, output = _by_output(reference, model, rows, self.nodes)
        gained = torch.cat([output.rows, output.read_out[None]])
        by_row, kl = gained.sum(2), output.kl.sum(1)
        line, groups = WeightLine(reference, model), weight_groups(reference)
        text = rows.tokens, rows.states, rows.attention_mask
        weights = kl_by_weights(line, groups, *text, self.nodes)
        sizes = [len(part) for part in torch.arange(len(kl)).split(TEXTS_PER_PASS)]
        counts = torch.tensor(sizes, dtype=torch.float64)[:, None]
        found = bootstrap_means(
            weights.rows.T, counts, statistic=lambda sums, n: sums / n, resamples=RESAMPLES
        )
        values = {
            "components": [*names, OF_READ_OUT],
            **mean_fields("output", by_row.T),
            "n": len(kl),
            "kl": round(kl.mean().item(), 6),
            "groups": list(groups.names),
            "weights": decimals(found.value),
            **interval_fields("weights", found, 6),
        }
        if seen.truth is not None:
            values["slots"] = seen.truth.slot_names(rows.tokens.shape[1] + 1)[1:]
        tensors = {
            "output": by_row,
            "by_position": _by_position(gained, rows),
            "kl": kl,
            "weights": weights.rows,
        }
        total, mean = weights.rows.sum()[None] / len(kl), kl.mean()[None]
        checks = [
            lambda: _sum_check("outputs", by_row.sum(0), kl, seen),
            lambda: Check.at_most("the KL is not negative", -output.kl.min().item(), 1e-6),
            lambda: _sum_check("weights", total, mean, seen),
        ]
        if same_weights(model, reference):
            of_equal = "outputs and weights of equal models have no KL"
            ends = torch.cat([by_row.sum(0), total.to(by_row)])
            checks.append(lambda: Check.at_most(of_equal, ends.abs().max(), 1e-6))
        return Record(values, {name: x.float() for name, x in tensors.items()}, checks)


def weight_groups(model: HookedModel) -> Groups:
    """Return groups of single heads for a small model, and of whole layers for a large one."""
    heads = model.cfg.n_layers * model.cfg.n_heads
    return fine_groups(model) if heads <= MOST_HEADS else coarse_groups(model)


def make_read_out(model: HookedModel) -> nn.Sequential:
    """Copy the final norm and the unembedding in float64, without hooks."""
    with without_hooks(model.ln_final, model.unembed):
        copied = copy.deepcopy(nn.Sequential(model.ln_final, model.unembed))
    if hasattr(copied[0], "cfg"):  # a norm of TransformerLens casts to it
        copied[0].cfg.dtype = torch.float64
    device = next(model.parameters()).device
    return copied.requires_grad_(False).to(device if has_float64(device) else "cpu").double()


def _by_output(
    reference: HookedModel, model: HookedModel, rows: TextRows, nodes: int
) -> tuple[list[str], OutputKL]:
    models = [model_where_exact(each) for each in (reference, model)]
    read = [_make_state_fn(make_read_out(each)) for each in models]
    shape = (len(rows.tokens), rows.tokens.shape[1])
    names, parts, where = [], [], []
    for some, at in _batches(rows, models[0]):
        both = []
        for each in models:
            with without_hooks(each):
                acts = capture_activations(
                    each, some.tokens, PART_SITES, attention_mask=some.attention_mask
                )
            states = some.states.to(acts["hook_embed"].device)
            names, vectors = residual_components(each, {s: a[states] for s, a in acts.items()})
            both.append(vectors)
        parts.append(kl_by_output(*both, *read, nodes))
        where.append(at[:, None] * shape[1] + torch.arange(shape[1])[None])
        where[-1] = where[-1][some.states.cpu()]
    place = torch.cat(where)
    spread = [
        torch.cat([getattr(part, field).cpu() for part in parts], -1) for field in OutputKL._fields
    ]
    return names, OutputKL(*(_placed(x, place, shape) for x in spread))


def _make_state_fn(read: nn.Sequential) -> Any:
    return lambda h: read(h[:, None])[:, 0]


def _batches(rows: TextRows, model: HookedModel) -> Iterator[tuple[TextRows, Tensor]]:
    components = model.cfg.n_layers * (model.cfg.n_heads + 2) + 2
    of_row = components * rows.tokens.shape[1] * model.cfg.d_model
    for at in torch.arange(len(rows.tokens)).split(max(1, NUMBERS_AT_ONCE // of_row)):
        yield rows.take(at.to(rows.tokens.device)), at


def _placed(
    x: Float[Tensor, "*lead n"], place: Tensor, shape: tuple[int, int]
) -> Float[Tensor, "*lead batch seq"]:
    out = x.new_zeros(*x.shape[:-1], shape[0] * shape[1])
    out[..., place] = x
    return out.unflatten(-1, shape)


def _by_position(
    gained: Float[Tensor, "component batch seq"], rows: TextRows
) -> Float[Tensor, "component place"]:
    own = rows.own_positions.clamp(min=0).cpu().expand_as(gained[0])
    out = gained.new_zeros(len(gained), gained.shape[2])
    for component, row in zip(out, gained, strict=True):
        component.scatter_add_(0, own.flatten(), row.flatten())
    return out / gained.shape[1]


def _sum_check(
    what: str, total: Float[Tensor, " n"], kl: Float[Tensor, " n"], seen: Observation
) -> Check:
    gap = (total - kl).abs().max().item() / max(1.0, kl.max().item())
    return Check.at_most(f"{what} sum to the KL", gap, seen.allowed(1e-3, half=0.05))
