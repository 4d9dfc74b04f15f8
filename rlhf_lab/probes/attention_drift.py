"""AttentionDrift: change of heads since the reference, by pattern, values and W_O, by key."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.attention import AttentionSplit, HeadCache, attention_split, pattern_distance
from rlhf_lab.diffing.logit_shift import logit_reader, own_reader
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.residual_parts import validate_additive
from rlhf_lab.probes.eval_text import gather_columns
from rlhf_lab.probes.probe import Check, Observation, Probe, Record, mean_fields
from rlhf_lab.probes.text_rows import TextRows, text_rows
from rlhf_lab.probes.word_pair import WordPairProbe
from rlhf_lab.training.capture import capture_activations

SCALE = "ln_final.hook_scale"
DRIFT_SITES = (*(f"blocks.*.attn.hook_{part}" for part in ("pattern", "v", "z")), SCALE)


class Places(NamedTuple):
    """Names of places, and the index of the name of each query and each key."""

    query_names: list[str]
    key_names: list[str]
    query: Int[Tensor, "batch query"]  # -1 without a token
    key: Int[Tensor, "batch query key"]  # -1 without a token, or after the query


class AttentionDrift(WordPairProbe):
    """Change of each head since the reference, by pattern, values and W_O, key by key.

    The part of a logit difference by a head's own change (see `split_shift`) is split exactly into
    its pattern (qk), values (ov) and W_O (wo), in logits. The record also has the total variation
    of every pattern. Keys and queries are named by the slots of Reel and sums; elsewhere queries
    are pooled, and keys are named by their distance. With hooks on the policy, their change after
    pattern and values is stored as well.

    Checks: total variation is at most 1; without hooks, the causes sum to the head's own part.

    Args:
        word, other: single tokens; or weights by word as `word`.
        pos: the position before the word, in each eval text or as a column of the rollout. When
            None, the text's last, or the last of the prompt. Texts without it are omitted.
        n: number of sequences.
        text: "eval" or "rollout".
    """

    name = "attention_drift"
    question = "Which heads attend elsewhere or carry something else?"
    caveat = "A pattern may shift between keys whose values are equal, without an effect."
    options = ("word", "other", "pos", "n", "text", *Probe.options)
    pos, every = None, 5

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.at, self.pos = self.pos, None  # texts without a token there are omitted

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"pos": self.at}

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)
        super().check_model(model)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        models = seen.ctx.reference, seen.ctx.policy.base_model
        words = self.contrast(models[1])
        rows, at = self.select_rows(seen)
        text = rows.tokens, DRIFT_SITES, None, rows.attention_mask
        both = [capture_activations(model, *text) for model in models]
        scales = [1 / exact(gather_columns(acts[SCALE], at)[:, 0]) for acts in both]
        readers, is_hooked = [logit_reader(m, words) for m in models], has_hooks(models[1])
        reader = own_reader(scales, readers, is_centered(models[1].ln_final))
        places = distance_places(rows)
        if seen.truth is not None:
            places = slot_places(rows, seen.truth.slot_names(rows.tokens.shape[1]))
        to_keys = _one_hot(gather_columns(places.key, at), len(places.key_names)).to(reader.device)
        parts, effects, distances, here = [], [], [], []
        for layer in range(models[0].cfg.n_layers):
            split, written = _layer(layer, models, both, at, reader)
            parts.append([torch.einsum("bhk,bkg->hgb", cause, to_keys) for cause in split])
            effects.append(written)
            patterns = [exact(acts[f"blocks.{layer}.attn.hook_pattern"]) for acts in both]
            moved = pattern_distance(*patterns)
            distances.append(_sum_places(moved, places))
            here.append(gather_columns(moved.transpose(1, 2), at).sum(-1).T)
        causes = zip(*parts, strict=True)
        tensors = dict(zip(AttentionSplit._fields, map(torch.stack, causes), strict=True))
        own = torch.stack(effects)
        rest = own - sum(tensors.values()).sum(2)
        tensors |= {"own": own, "tv": torch.stack(distances)}
        if is_hooked:
            tensors["hooks"] = rest

        def check_sum() -> Check:
            gap = rest.abs().max().item() / max(own.abs().max().item(), 0.01)
            name = "pattern, values and W_O sum over keys to the head's own part"
            return Check.at_most(name, gap, seen.allowed(1e-4, half=0.3))

        beyond = max(0.0, tensors["tv"].sum(-1).max().item() - 1)
        checks = [Check.at_most("total variation is at most 1", beyond, 1e-4)]
        queries = gather_columns(places.query, at).unique().tolist()
        heads = range(models[0].cfg.n_heads)
        values = {
            "heads": [f"L{layer}H{head}" for layer in range(len(effects)) for head in heads],
            "keys": places.key_names,
            "queries": places.query_names,
            "n": len(at),
            "query": ", ".join(places.query_names[place] for place in queries),
            **mean_fields("tv_here", torch.cat(here).T),
        }
        if seen.truth is not None:
            values["slots"] = places.key_names
        for name in AttentionSplit._fields:
            values |= mean_fields(name, tensors[name].sum(2).flatten(0, 1).T)
        checks += [] if is_hooked else [check_sum]
        return Record(values, {name: x.float() for name, x in tensors.items()}, checks)

    def select_rows(self, seen: Observation) -> tuple[TextRows, Int[Tensor, " batch"]]:
        """Return the rows that have a token at the position, and its column in each."""
        rows = text_rows(seen, self.text, self.n)
        if self.text == "eval":
            at = seen.text.first(self.n).columns(-1 if self.at is None else self.at)
        else:
            column = rows.prefix_len - 1 if self.at is None else self.at % rows.tokens.shape[1]
            at = torch.full((len(rows.tokens),), column, device=rows.tokens.device)
        there = (at >= 0) & (at < rows.tokens.shape[1])
        there &= gather_columns(rows.written, at.clamp(0, rows.tokens.shape[1] - 1))
        if not there.any():
            raise ConfigError(f"{self.name} looks at pos={self.at}, where no text has a token.")
        return rows.take(there), at[there]


def slot_places(rows: TextRows, slots: Sequence[str]) -> Places:
    """Return each position of a row as a place."""
    pos = rows.own_positions.masked_fill(~rows.written, -1)
    keys = pos[:, None, :].expand(-1, pos.shape[1], -1)
    return Places(list(slots), list(slots), pos, keys.masked_fill(~_is_before(pos), -1))


def distance_places(rows: TextRows) -> Places:
    """Return all queries as one place, and keys as first token or by distance: 1, 2, 3 to 4, ..."""
    pos = rows.own_positions.masked_fill(~rows.written, -1)
    names, edges, last = ["first token", "itself"], [0], 1
    while edges[-1] < pos.shape[1] - 1:
        start = edges[-1] + 1
        names.append(f"{start} back" if start == last else f"{start} to {last} back")
        edges.append(last)
        last *= 2
    back = pos[:, :, None] - pos[:, None, :]
    steps = torch.bucketize(back, torch.tensor(edges, device=pos.device))
    key = torch.where(pos[:, None, :] == 0, 0, steps + 1).masked_fill(~_is_before(pos), -1)
    return Places(["all tokens"], names, pos.clamp(max=0), key)


def _is_before(pos: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq seq"]:
    return (pos[:, None, :] >= 0) & (pos[:, None, :] <= pos[:, :, None])


def _layer(
    layer: int,
    models: Sequence[HookedModel],
    both: Sequence[dict[str, Tensor]],
    at: Int[Tensor, " batch"],
    reader: Float[Tensor, "batch d_model"],
) -> tuple[AttentionSplit, Float[Tensor, "head batch"]]:
    site, caches, written = f"blocks.{layer}.attn.hook_", [], []
    W_O = [exact(model.blocks[layer].attn.W_O) for model in models]
    for acts, weight in zip(both, W_O, strict=True):
        pattern = gather_columns(acts[site + "pattern"].transpose(1, 2), at)
        caches.append(HeadCache(exact(pattern), exact(acts[site + "v"])))
        z = exact(gather_columns(acts[site + "z"], at))
        written.append(torch.einsum("bhd,hdm,bm->hb", z, weight, reader))
    return attention_split(*caches, *W_O, reader), written[1] - written[0]


def _one_hot(places: Tensor, n: int) -> Float[Tensor, "*shape place"]:
    return (places[..., None] == torch.arange(n, device=places.device)).double()


def _sum_places(
    moved: Float[Tensor, "batch head query key"], places: Places
) -> Float[Tensor, "head query_place key_place"]:
    to_key = _one_hot(places.key, len(places.key_names)).to(moved.device)
    to_query = _one_hot(places.query, len(places.query_names)).to(moved.device)
    summed = torch.einsum("bhqk,bqkg,bqp->hpg", moved, to_key, to_query)
    return summed / to_query.sum((0, 1)).clamp(min=1)[:, None]
