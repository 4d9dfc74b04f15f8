"""Checks of NeuronRank's record: neurons taken out of a forward by hand, at the same scale."""

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models.hooked_model import HookedModel, without_hooks
from rlhf_lab.models.reference import model_where_exact
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.probe import Check, Observation, Record
from tests.probes.audit.anew import as_float64, gap
from tests.probes.audit.intervals import check_widths
from tests.probes.audit.logit_shift import (
    End,
    Upto,
    logit_loss,
    logit_losses,
    run_upto,
    upto_position,
)

LEAST_CONTRIBUTION = 0.01
"""Of a contribution: a logit difference is rounded to a thousandth of that."""


@torch.no_grad()
def bind_neuron_rank(
    seen: Observation, record: Record, words: Sequence[str], pos: int, n: int
) -> list[Check]:
    """Hold stored rows and names to what the logits lose with a neuron, or with many of them.

    1. A listed neuron, looked up by its stored name: set to 0 by hand, its row is what the logit
       difference loses at the scale that the forward used; one more of its activation adds its
       write; its activation is read at its hook.
    2. A random half of a layer's neurons, and the whole MLP: what the rows and b_out sum to.
    3. The table's order and columns, the groups, and the tokens, from what is stored of each.

    Args:
        words: whose logits are compared, and the second is taken off the first.
        pos: the position before the word.
    """
    values, stored = record.values, record.tensors
    rng = np.random.default_rng(seen.ctx.phase)
    tokenizer = seen.ctx.policy.base_model.tokenizer
    ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
    models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
    text = seen.text.first(n)
    upto = upto_position(text, pos, next(models[0].parameters()).device)
    name = values["neurons"][int(rng.integers(len(values["neurons"])))]
    allowed = seen.allowed(1e-2, half=0.5)
    with without_hooks(*models):
        ends = [run_upto(model, upto) for model in models]
        checks = [
            *_one(record, models, upto, ends, ids, name, allowed),
            *_many(record, models, upto, ends, ids, rng, allowed),
            _tokens(seen, record, models[1], text),
        ]
    return [*checks, *_table(record), _widths(record, stored["neuron_by_text"])]


def _place(name: str) -> tuple[int, int]:
    """The layer and the number that a name says."""
    found = re.fullmatch(r"L(\d+)N(\d+)", name)
    return int(found[1]), int(found[2])


def _lost(
    model: HookedModel,
    upto: Upto,
    end: End,
    ids: list[int],
    layer: int,
    keep: Float[Tensor, " neuron"],
    add: Float[Tensor, " neuron"],
) -> Float[Tensor, " rows"]:
    """What the logit difference loses where a layer's neurons are `keep` times themselves + `add`.

    At the scale that the forward used, and with later parts as they were.
    """
    edit = lambda act, hook: act * keep.to(act) + add.to(act)
    without = run_upto(model, upto, (f"blocks.{layer}.mlp.hook_post", edit))
    site = f"blocks.{layer}.hook_mlp_out"
    return logit_loss(model, end, end.acts[site] - without.acts[site], ids)


def _one(
    record: Record,
    models: Sequence[HookedModel],
    upto: Upto,
    ends: Sequence[End],
    ids: list[int],
    name: str,
    allowed: float,
) -> list[Check]:
    """Contribution, write and activation of one neuron, by its name."""
    values, stored, (layer, index) = record.values, record.tensors, _place(name)
    at = values["neurons"].index(name)
    lost, write, active = [], [], []
    for model, end in zip(models, ends, strict=True):
        keep = torch.ones(model.cfg.d_mlp)
        one = torch.zeros_like(keep)
        one[index] = 1
        lost.append(_lost(model, upto, end, ids, layer, keep - one, 0 * one))
        write.append(-_lost(model, upto, end, ids, layer, keep, one))
        active.append(_activation(model, upto, layer, index))
    row, moved = lost[1] - lost[0], active[1] - active[0]
    by_activation = (moved * (write[0] + write[1]) / 2).mean()
    size = max(LEAST_CONTRIBUTION, row.abs().max().item())
    part = max(LEAST_CONTRIBUTION / 10, by_activation.abs().item())
    missed = max(
        gap(stored["neuron_by_text"][at], row),
        gap(values["contribution"][at], row.mean()),
        gap(stored["neuron_contribution"][layer, index], row.mean()),
    )
    writes = torch.stack([w.mean() for w in write])
    apart = max(
        gap(stored["neuron_write"][:, layer, index], writes),
        gap(values["write"][at], writes.mean()),
    )
    shown = max(
        gap(values["activation"][at], active[0].mean()),
        gap(values["activation_shift"][at], moved.mean()),
        gap(stored["neuron_activation_shift"][layer, index], moved.mean()),
    )
    share = max(
        gap(values["by_activation"][at], by_activation),
        gap(stored["neuron_by_activation"][layer, index], by_activation),
    )
    large = max(LEAST_CONTRIBUTION, writes.abs().max().item())
    high = max(LEAST_CONTRIBUTION, max(x.abs().max().item() for x in active))
    return [
        Check.at_most("a neuron's row is what the logits lose with it", missed / size, allowed),
        Check.at_most("a neuron's write is what one more of it adds", apart / large, allowed),
        Check.at_most("a neuron's activation is that of its hook", shown / high, allowed),
        Check.at_most(
            "its activation's share is its shift times the write", share / part, allowed / 5
        ),
    ]


def _activation(model: HookedModel, upto: Upto, layer: int, index: int) -> Float[Tensor, " rows"]:
    """What a neuron's hook shows at the position."""
    kept: list[Tensor] = []
    look = lambda act, hook: kept.append(as_float64(upto.at_last(act))[:, index])
    run_upto(model, upto, (f"blocks.{layer}.mlp.hook_post", look))
    return kept[0]


def _many(
    record: Record,
    models: Sequence[HookedModel],
    upto: Upto,
    ends: Sequence[End],
    ids: list[int],
    rng: np.random.Generator,
    allowed: float,
) -> list[Check]:
    """A random half of one layer's neurons, and each whole MLP, taken out together."""
    stored, values = record.tensors, record.values
    layer = int(rng.integers(models[0].cfg.n_layers))
    half = torch.from_numpy(rng.integers(0, 2, models[0].cfg.d_mlp)).float()
    lost, whole = [], []
    for model, end in zip(models, ends, strict=True):
        lost.append(_lost(model, upto, end, ids, layer, 1 - half, 0 * half).mean())
        layers = range(model.cfg.n_layers)
        mlps = torch.stack([end.acts[f"blocks.{at}.hook_mlp_out"] for at in layers])
        whole.append(logit_losses(model, end, mlps, ids).mean(1))
    exchanged = _exchanged(models, upto, ends, ids, layer, half)
    by_activation = (as_float64(stored["neuron_by_activation"])[layer] * half).sum()
    rows = as_float64(stored["neuron_contribution"])
    size = max(LEAST_CONTRIBUTION, rows[layer].abs().sum().item() / math.sqrt(len(half)))
    found, mlp = lost[1] - lost[0], whole[1] - whole[0]
    sums = gap(values["mlp"], rows.sum(1) + as_float64(values["b_out"]))
    large = max(LEAST_CONTRIBUTION, mlp.abs().max().item())
    return [
        Check.at_most(
            "half of a layer's neurons sum to what the logits lose with them",
            gap((rows[layer] * half).sum(), found) / size,
            allowed,
        ),
        Check.at_most(
            "their activations' share is what exchanging these does, in both models",
            gap(by_activation, exchanged) / max(LEAST_CONTRIBUTION, exchanged.abs().item()),
            allowed / 10,
        ),
        Check.at_most(
            "an MLP's row is what the logits lose with it", gap(values["mlp"], mlp) / large, allowed
        ),
        Check.at_most(
            "neurons and b_out sum to the stored rows of the MLPs", sums / large, allowed
        ),
    ]


def _exchanged(
    models: Sequence[HookedModel],
    upto: Upto,
    ends: Sequence[End],
    ids: list[int],
    layer: int,
    half: Float[Tensor, " neuron"],
) -> Float[Tensor, ""]:
    """What the policy's activations of some neurons do in the reference, and without, in itself."""
    site, kept = f"blocks.{layer}.mlp.hook_post", []
    keep = lambda act, hook: kept.append(act)
    for model in models:
        run_upto(model, upto, (site, keep))
    lost = []
    for model, end, other in zip(models, ends, reversed(kept), strict=True):
        swap = lambda act, hook, other=other: torch.where(half.to(act) > 0, other.to(act), act)
        changed = run_upto(model, upto, (site, swap)).acts[f"blocks.{layer}.hook_mlp_out"]
        part = end.acts[f"blocks.{layer}.hook_mlp_out"] - changed
        lost.append(logit_loss(model, end, part, ids).mean())
    return (lost[1] - lost[0]) / 2


def _tokens(seen: Observation, record: Record, model: HookedModel, text: EvalText) -> Check:
    """Whether each neuron is most active at the tokens that are listed, and as much."""
    values, tokenizer = record.values, seen.ctx.policy.base_model.tokenizer
    places = [_place(name) for name in values["neurons"]]
    kept: dict[str, Tensor] = {}

    def keep(act: Tensor, hook: object) -> None:
        kept[hook.name] = as_float64(act)

    sites = {layer: f"blocks.{layer}.mlp.hook_post" for layer, _ in places}
    with model.hooks(fwd_hooks=[(site, keep) for site in sites.values()]):
        model(text.tokens.to(next(model.parameters()).device), return_type=None)
    ids = text.tokens[text.attention_mask].tolist()
    misses = [0.0]
    for (layer, index), words, listed in zip(
        places, values["tokens"], values["token_activations"], strict=True
    ):
        largest: dict[int, float] = {}
        active = kept[sites[layer]][text.attention_mask.cpu()][:, index].tolist()
        for token, x in zip(ids, active, strict=True):
            largest[token] = max(x, largest.get(token, -math.inf))
        order = sorted(largest, key=lambda token: -largest[token])
        missed = gap(listed, [largest[token] for token in order[: len(listed)]])
        for word, x in zip(words, listed, strict=True):
            same = [abs(x - y) for token, y in largest.items() if tokenizer.decode([token]) == word]
            missed = max(missed, min(same, default=math.inf))
        misses.append(missed / max(LEAST_CONTRIBUTION, max(map(abs, listed))))
    allowed = seen.allowed(1e-3, half=0.2)
    return Check.at_most("neurons are most active at the tokens listed", max(misses), allowed)


def _table(record: Record) -> list[Check]:
    """Columns of the table at the places that its names say, their order, and the groups."""
    values = record.values
    stored = {name: as_float64(x).numpy() for name, x in record.tensors.items()}
    rows = stored["neuron_contribution"]
    places = tuple(np.array([_place(name) for name in values["neurons"]]).T)
    columns = {
        "contribution": rows,
        "by_activation": stored["neuron_by_activation"],
        "activation_shift": stored["neuron_activation_shift"],
        "write": stored["neuron_write"].mean(0),
    }
    misses = [gap(values[name], x[places]) for name, x in columns.items()]
    misses.append(gap(values["contribution"], stored["neuron_by_text"].mean(1)))
    order = gap(np.abs(rows[places]), -np.sort(-np.abs(rows).flatten())[: len(places[0])])
    up, towards = stored["neuron_activation_shift"], stored["neuron_write"][0]
    named = {
        "writes the word, more active": (towards > 0) & (up > 0),
        "writes the word, less active": (towards > 0) & (up < 0),
        "writes the other, more active": (towards < 0) & (up > 0),
        "writes the other, less active": (towards < 0) & (up < 0),
    }
    wrong = float(sorted(named) != sorted(values["groups"]))
    for i, group in enumerate(values["groups"]):
        wrong += abs(values["group_size"][i] - named[group].sum())
        wrong += abs(values["group_contribution"][i] - rows[named[group]].sum()) > 1e-4
    own = [
        next((group for group, there in named.items() if there[place]), "unmoved")
        for place in zip(*places, strict=True)
    ]
    wrong += sum(a != b for a, b in zip(own, values["group"], strict=True))
    return [
        Check.at_most("columns of the table are those of its names", max(misses), 2e-6),
        Check.at_most("the neurons that contribute most are listed in order", order, 1e-6),
        Check.at_most("groups are those of the signs", float(wrong), 0),
    ]


def _widths(record: Record, rows: Tensor) -> Check:
    """Intervals of the listed neurons' contributions."""
    x = as_float64(rows).T.numpy()
    none = [math.nan] * x.shape[1]
    ends = [record.values.get(f"contribution_{end}", none) for end in ("low", "high")]
    return check_widths("the contributions", (ends[0], ends[1]), x, np.ones(x.shape, dtype=bool))
