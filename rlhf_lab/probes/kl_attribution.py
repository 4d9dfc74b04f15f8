"""KLAttribution: the KL from the reference, by where it shows and by whose weights cause it."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.diffing.groups import coarse_groups, fine_groups
from rlhf_lab.diffing.kl_attribution import TEXTS_PER_PASS, OutputKL, kl_by_output, kl_by_weights
from rlhf_lab.diffing.weight_line import NODES, WeightLine
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models.device import has_float64
from rlhf_lab.models.hooked_model import HookedModel, model_where_exact, without_hooks
from rlhf_lab.models.residual_parts import PART_SITES, residual_components, validate_additive
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
    mean_fields,
)
from rlhf_lab.probes.text_rows import TextRows, text_rows
from rlhf_lab.training.capture import capture_activations

MOST_HEADS = 32  # with more heads, groups of weights are whole layers
NUMBERS_AT_ONCE = 20_000_000


class KLAttribution(Probe):
    """The KL of the policy from the reference, split exactly by output and by weights.

    1. By output: the residual stream moves from the reference's to the policy's, and each component
       gets the effect of its change; the unembedding is separate.
    2. By weights: all weights move in a straight line, and each group gets all effects of its
       change, through later components as well.

    A late MLP gets in the first what an early one sent it, and the early one in the second. Both
    are in nats per sequence of the text, with hooks off.

    Checks: both sum to the KL.

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
    options = ("n", "text", "nodes", *Probe.options)
    n, nodes = 64, NODES

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        rows = text_rows(seen, self.text, self.n)
        names, output = _by_output(reference, model, rows, self.nodes)
        gained = torch.cat([output.rows, output.read_out[None]])
        by_row, kl = gained.sum(2), output.kl.sum(1)
        is_small = model.cfg.n_layers * model.cfg.n_heads <= MOST_HEADS
        groups = (fine_groups if is_small else coarse_groups)(reference)
        text = rows.tokens, rows.states, rows.attention_mask
        weights = kl_by_weights(WeightLine(reference, model), groups, *text, self.nodes)
        sizes = [len(part) for part in torch.arange(len(kl)).split(TEXTS_PER_PASS)]
        counts = torch.tensor(sizes, dtype=torch.float64)[:, None]
        found = bootstrap_means(
            weights.T, counts, statistic=lambda sums, n: sums / n, resamples=RESAMPLES
        )
        values = {
            "components": [*names, "read-out"],
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
            "weights": weights,
        }
        total, largest = weights.sum() / len(kl), max(1.0, kl.max().item())
        allowed = seen.allowed(1e-3, half=0.05)
        checks = [
            Check.at_most(f"{what} sum to the KL", (x - y).abs().max().item() / largest, allowed)
            for what, x, y in (("outputs", by_row.sum(0), kl), ("weights", total, kl.mean()))
        ]
        return Record(values, {name: x.float() for name, x in tensors.items()}, checks)


def _make_read_out(model: HookedModel) -> nn.Sequential:
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
    heads = map(_make_read_out, models)
    read = [lambda h, head=head: head(h[:, None])[:, 0] for head in heads]
    cfg, found, names = models[0].cfg, [], []
    of_row = (cfg.n_layers * (cfg.n_heads + 2) + 2) * rows.tokens.shape[1] * cfg.d_model
    index = torch.arange(len(rows.tokens), device=rows.tokens.device)
    for some in map(rows.take, index.split(max(1, NUMBERS_AT_ONCE // of_row))):
        both = []
        for each in models:
            with without_hooks(each):
                text = some.tokens, PART_SITES, None, some.attention_mask
                acts = capture_activations(each, *text)
            states = some.states.to(acts["hook_embed"].device)
            names, vectors = residual_components(each, {s: a[states] for s, a in acts.items()})
            both.append(vectors)
        found.append(kl_by_output(*both, *read, nodes))
    states, fields = rows.states.cpu(), []
    for parts in zip(*found, strict=True):
        x = torch.cat([part.cpu() for part in parts], -1)
        fields.append(x.new_zeros(*x.shape[:-1], *states.shape))
        fields[-1][..., states] = x
    return names, OutputKL(*fields)


def _by_position(
    gained: Float[Tensor, "component batch seq"], rows: TextRows
) -> Float[Tensor, "component place"]:
    places = rows.own_positions.clamp(min=0).cpu().flatten().expand(len(gained), -1)
    out = gained.new_zeros(len(gained), gained.shape[2])
    return out.scatter_add(1, places, gained.flatten(1)) / gained.shape[1]
