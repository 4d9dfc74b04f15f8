"""Checks of AttentionDrift's record: heads run anew with one key's pattern or value changed."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.logit_shift import ModelEnd, model_end, own_reader, split_shift
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.reference import model_where_exact
from rlhf_lab.models.residual_parts import SITES
from rlhf_lab.probes.attention_places import FIRST, ITSELF, kind_of_token
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.text_rows import TextRows
from rlhf_lab.training.capture import capture_activations
from tests.probes.audit.anew import (
    as_float64,
    as_rows_say,
    component_names,
    relative_gap,
    unpadded_row,
)
from tests.probes.audit.intervals import check_widths
from tests.probes.audit.labels import check_slots
from tests.probes.audit.logit_shift import TWO_NODES

DRIFT_CAUSES = ("qk", "ov", "wo")
ROWS_ALONE, LAYERS_ANEW = 3, 2


class HeadsAnew(NamedTuple):
    """One row run alone up to a position: the heads of each layer there, and the model's end.

    Args:
        pattern: by layer, of the last query.
        value: by layer.
    """

    tokens: Int[Tensor, " seq"]
    pattern: list[Float[Tensor, "head key"]]
    value: list[Float[Tensor, "key value_head d_head"]]
    end: ModelEnd


def bind_attention_drift(
    seen: Observation,
    record: Record,
    words: tuple[str, str],
    rows: TextRows,
    at: Int[Tensor, " batch"],
) -> list[Check]:
    """Hold stored causes, keys and heads to ShiftSplit's rows and to heads that are changed.

    Args:
        words: whose logits are compared, and the second is taken off the first.
        at: the column before the word, in each of these rows.
    """
    stored, values = record.tensors, record.values
    means = max(
        relative_gap(values[name], as_float64(stored[name]).sum(2).mean(-1).flatten())
        for name in DRIFT_CAUSES
    )
    checks = [Check.at_most("stored means are those of the stored tensors", means, 1e-4)]
    checks += [_widths(record, name) for name in DRIFT_CAUSES if f"{name}_low" in values]
    checks += [check_slots(seen, record)] if seen.truth is not None else []
    if not as_rows_say(seen):
        return checks
    models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
    tokenizer = models[1].tokenizer
    ids = tuple(tokenizer.encode(word, add_special_tokens=False)[0] for word in words)
    texts = [unpadded_row(rows, row, end) for row, end in enumerate(at[:ROWS_ALONE].tolist())]
    anew = [[_run_alone(model, text, ids) for model in models] for text in texts]
    rng = np.random.default_rng(seen.ctx.phase)
    allowed = seen.allowed(1e-4, half=0.3)
    own = _own_misses(record, models[0], anew)
    keys = _key_misses(record, models, anew, rng)
    cells = _cell_misses(seen, record, models, rows, rng)
    return [
        *checks,
        Check.at_most("a head's three causes sum to its own part in ShiftSplit", own, allowed),
        Check.at_most(
            "causes by key are what heads write by the change of these keys", keys, allowed
        ),
        Check.at_most("distances are those of the attention scores", cells, allowed),
    ]


def _widths(record: Record, cause: str) -> Check:
    """Whether the stored intervals of one cause are as wide as the spread of its rows says."""
    x = as_float64(record.tensors[cause]).sum(2).flatten(0, 1).T.numpy()
    ends = record.values[f"{cause}_low"], record.values[f"{cause}_high"]
    return check_widths(f"{cause} by head", ends, x, np.ones(x.shape, dtype=bool))


@torch.no_grad()
def _run_alone(model: HookedModel, text: Int[Tensor, " seq"], ids: tuple[int, int]) -> HeadsAnew:
    """One row without its padding, up to the position."""
    layers = range(model.cfg.n_layers)
    sites = [f"blocks.{layer}.attn.hook_{part}" for layer in layers for part in ("pattern", "v")]
    acts = capture_activations(model, text[None], [*SITES, *sites])
    at_end = {site: act[:, -1] for site, act in acts.items() if site not in sites}
    pattern = [as_float64(acts[site])[0, :, -1] for site in sites[::2]]
    value = [as_float64(acts[site])[0] for site in sites[1::2]]
    return HeadsAnew(text, pattern, value, model_end(model, at_end, at_end, ids))


def _own_misses(record: Record, model: HookedModel, anew: Sequence[Sequence[HeadsAnew]]) -> float:
    """By how much the causes of the heads, found by their stored names, miss ShiftSplit's rows."""
    stored, names = record.tensors, record.values["heads"]
    found = sum(as_float64(stored[name]) for name in DRIFT_CAUSES).sum(2).flatten(0, 1)
    expected = []
    for before, after in anew:
        split = split_shift(before.end, after.end, is_centered(model.ln_final))
        expected.append((split.own_weights + split.inherited)[:-2, 0])
    parts = component_names(model)
    there = [parts.index(name) if name in parts else -1 for name in names]
    if -1 in there or len(set(there)) != len(there):
        return float("nan")
    wanted = torch.stack(expected, 1)[there]
    return relative_gap(found[:, : len(anew)], wanted, least=0.01)


def _key_misses(
    record: Record,
    models: Sequence[HookedModel],
    anew: Sequence[Sequence[HeadsAnew]],
    rng: np.random.Generator,
) -> float:
    """The largest miss of the heads of some layers, in the sum over half of the keys by name."""
    values, worst = record.values, 0.0
    scale = max(as_float64(record.tensors["own"]).abs().max().item(), 0.01)
    n_layers = models[0].cfg.n_layers
    for layer in rng.permutation(n_layers)[:LAYERS_ANEW].tolist():
        heads = [at for at, name in enumerate(values["heads"]) if name.startswith(f"L{layer}H")]
        there = [[_key_name(values, len(row.tokens) - 1, k) for k in _keys(row)] for row, _ in anew]
        names = sorted({name for of_row in there for name in of_row})
        half = set(rng.permutation(names)[: -(-len(names) // 2)].tolist())
        at = [values["keys"].index(name) for name in half]
        for row, ends in enumerate(anew):
            keys = [k for k in _keys(ends[0]) if there[row][k] in half]
            expected = _head_causes(models, ends, layer, keys)
            for cause, wanted in zip(DRIFT_CAUSES, expected, strict=True):
                stored = as_float64(record.tensors[cause]).flatten(0, 1)[heads, :, row]
                worst = max(worst, (stored[:, at].sum(1) - wanted).abs().max().item() / scale)
    return worst


def _keys(row: HeadsAnew) -> range:
    return range(len(row.tokens))


def _key_name(values: dict, query: int, key: int) -> str:
    """The name of a key as seen from a query: its slot, or how far back it stands."""
    if "slots" in values:
        return values["slots"][key]
    if key in (0, query):
        return ITSELF if key else FIRST
    ends = {name: [int(end) for end in re.findall(r"\d+", name)] for name in values["keys"]}
    return next(name for name, at in ends.items() if at and at[0] <= query - key <= at[-1])


@torch.no_grad()
def _head_causes(
    models: Sequence[HookedModel],
    ends: Sequence[HeadsAnew],
    layer: int,
    keys: list[int],
) -> Float[Tensor, "3 head"]:
    """What the heads of a layer write more by the change of these keys, on the line between models.

    The attention of the layer runs, by its modules, with pattern and values put in their place:
    once as they are on the line, once with the keys' values moved on by their whole change, once
    with attention moved to the keys from all keys in proportion.
    """
    before, after = (end.end for end in ends)
    reader = own_reader(
        (before.inverse_scale, after.inverse_scale),
        (before.reader, after.reader),
        is_centered(models[0].ln_final),
    )[0].cpu()
    A, V = ([getattr(end, part)[layer] for end in ends] for part in ("pattern", "value"))
    W_O = [as_float64(model.blocks[layer].attn.W_O) @ reader for model in models]
    change, between = torch.zeros_like(A[0]), (A[0] + A[1]) / 2
    change[:, keys] = (A[1] - A[0])[:, keys]
    change = change - change.sum(1, keepdim=True) * between
    carried = torch.zeros_like(V[0])
    carried[keys] = (V[1] - V[0])[keys]
    found = torch.zeros(3, len(A[0]), dtype=torch.float64)
    for a in TWO_NODES:
        pattern, value, write = ((1 - a) * x[0] + a * x[1] for x in (A, V, W_O))
        only = torch.zeros_like(pattern)
        only[:, keys] = pattern[:, keys]
        wrote = lambda p, v: _z_of(models[1], layer, p, v)
        plain = wrote(pattern, value)
        found[0] += ((wrote(pattern + change, value) - plain) * write).sum(-1) / 2
        found[1] += ((wrote(pattern, value + carried) - plain) * write).sum(-1) / 2
        found[2] += (wrote(only, value) * (W_O[1] - W_O[0])).sum(-1) / 2
    return found


def _z_of(
    model: HookedModel,
    layer: int,
    pattern: Float[Tensor, "head key"],
    value: Float[Tensor, "key value_head d_head"],
) -> Float[Tensor, "head d_head"]:
    """What the heads of a layer make of a pattern for the last query and of values."""
    kept, attn = [], model.blocks[layer].attn
    site, seq = f"blocks.{layer}.attn.hook_", len(value)

    def put_pattern(x: Tensor, hook: object) -> Tensor:
        x = x.clone()
        x[0, :, -1] = pattern.to(x)
        return x

    hooks = [
        (site + "pattern", put_pattern),
        (site + "v", lambda x, hook: value[None].to(x)),
        (site + "z", lambda x, hook: kept.append(as_float64(x)[0, -1])),
    ]
    stream = torch.zeros(1, seq, model.cfg.d_model).to(attn.W_O)
    contexts = model.attention_contexts(torch.arange(seq)[None], None, 0)
    with model.hooks(fwd_hooks=hooks):
        attn(stream, contexts[model.cfg.layer_type(layer)])
    return kept[0]


def _cell_misses(
    seen: Observation,
    record: Record,
    models: Sequence[HookedModel],
    rows: TextRows,
    rng: np.random.Generator,
) -> float:
    """Stored distances of a query of a random name, beside those of softmaxed scores."""
    values = record.values
    layer = int(rng.integers(models[0].cfg.n_layers))
    head = int(rng.integers(models[0].cfg.n_heads))
    query = values["queries"][int(rng.integers(len(values["queries"])))]
    at = values["heads"].index(f"L{layer}H{head}")
    stored = as_float64(record.tensors["tv"]).flatten(0, 1)[at, values["queries"].index(query)]
    n_pad = (rows.written.cumsum(1) == 0).sum(1).tolist()
    scores = [_scores(model, layer, head, rows) for model in models]
    sums, count = torch.zeros_like(stored), 0
    for row, (start, real) in enumerate(zip(n_pad, rows.written.tolist(), strict=True)):
        for place in (q for q in range(start, len(real)) if real[q]):
            if _query_name(seen, values, rows, row, place - start) != query:
                continue
            count += 1
            both = [score[row, place, start : place + 1].softmax(-1) for score in scores]
            for key, moved in enumerate((both[1] - both[0]).abs().tolist()):
                name = _key_name(values, place - start, key)
                sums[values["keys"].index(name)] += moved / 2
    return relative_gap(stored, sums / max(count, 1), least=0.01)


def _scores(
    model: HookedModel, layer: int, head: int, rows: TextRows
) -> Float[Tensor, "batch query key"]:
    site = f"blocks.{layer}.attn.hook_attn_scores"
    acts = capture_activations(model, rows.tokens, [site], attention_mask=rows.attention_mask)
    return as_float64(acts[site][:, head])


def _query_name(seen: Observation, values: dict, rows: TextRows, row: int, own: int) -> str:
    if "slots" in values:
        return values["slots"][own]
    return kind_of_token(int(unpadded_row(rows, row)[own]), seen.ctx.policy.base_model.tokenizer)
