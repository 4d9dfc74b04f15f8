"""AttentionDrift: change of heads since the reference, by pattern, values and W_O, by key."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlhf_lab.diffing.attention import (
    AttentionSplit,
    HeadCache,
    attention_split,
    pattern_distance,
)
from rlhf_lab.diffing.contrast import Word, Words
from rlhf_lab.diffing.logit_shift import logit_reader, own_reader
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.residual_parts import validate_additive
from rlhf_lab.probes.attention_places import Places, distance_places, slot_places
from rlhf_lab.probes.probe import Check, Observation, Record, mean_fields
from rlhf_lab.probes.text_rows import TextProbe, TextRows, text_rows
from rlhf_lab.probes.word_pair import encode_contrast
from rlhf_lab.training.capture import capture_activations

DRIFT_SITES = ("blocks.*.attn.hook_pattern", "blocks.*.attn.hook_v", "blocks.*.attn.hook_z")
SCALE = "ln_final.hook_scale"
Captured = dict[str, Tensor]


class AttentionDrift(TextProbe):
    """Change of each head since the reference, by pattern, values and W_O, key by key.

    The part of a logit difference by a head's own change (see `split_shift`) is split exactly into
    its pattern (qk), values (ov) and W_O (wo). The record also has the shift of every pattern,
    which may have no effect, for example between keys of no value. Keys and queries are named by
    the grammar's slots on Reel; elsewhere queries by the kind of their token, and keys by distance.
    With hooks on the policy, their change after pattern and values is stored as well.

    Checks: pattern, values and W_O sum over keys to the head's own part; no attention to later
    tokens; total variation is between 0 and 1.

    Args:
        word, other: single tokens of the tokenizer; or weights by word as `word`.
        pos: the position before the word: in each eval text, from its end when negative; the column
            of the rollout. When None, the text's last, and the last of the prompt. Sequences
            without a token at the position are omitted.
        n: number of sequences.
        text: "eval" or "rollout".
    """

    name = "attention_drift"
    question = "Which heads attend elsewhere or carry something else?"
    caveat = "A pattern may shift between keys whose values are equal, without an effect."
    text = "eval"
    every = 5

    def __init__(
        self,
        word: Word | Words = "loved",
        other: Word | None = None,
        pos: int | None = None,
        n: int = 64,
        text: Literal["eval", "rollout"] = "eval",
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(text, every, name)
        self.word, self.other, self.at, self.n = word, other, pos, n
        self.sides: tuple[str, ...] = ("", "")

    def settings(self) -> dict[str, Any]:
        sides = dict(zip(("word", "other"), self.sides, strict=True))
        return super().settings() | sides | {"pos": self.at}

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)
        self.sides = encode_contrast(model, self.word, self.other).sides(model)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        words = encode_contrast(model, self.word, self.other)
        rows, at = self.select_rows(seen)
        capture = partial(_capture, rows=rows)
        both = capture(reference), capture(model)
        scales = [1 / exact(gather_columns(acts[SCALE], at)[:, 0]) for acts in both]
        readers = [logit_reader(m, words) for m in (reference, model)]
        reader = own_reader(scales, readers, is_centered(model.ln_final))
        places = named_places(seen, rows)
        to_keys = _one_hot(gather_columns(places.key, at), len(places.key_names)).to(reader.device)
        parts, own, distances = [], [], []
        for layer in range(model.cfg.n_layers):
            split, written = _layer(layer, (reference, model), both, at, reader)
            parts.append([torch.einsum("bhk,bkg->hgb", cause, to_keys) for cause in split])
            own.append(written)
            distances.append(_by_place(_patterns(both, layer), places))
        tensors = {
            name: torch.stack([part[i] for part in parts])
            for i, name in enumerate(AttentionSplit._fields)
        } | {"own": torch.stack(own), "tv": torch.stack(distances)}
        behind = tensors["own"] - sum(tensors[name] for name in AttentionSplit._fields).sum(2)
        if has_hooks(model):
            tensors["hooks"] = behind
        checks = [lambda: _range_check(tensors["tv"]), lambda: _causal_check(both, rows)]
        if not has_hooks(model):
            checks.append(lambda: _sum_check(seen, behind, tensors["own"]))
        here = [_compute_distance(_patterns(both, layer), at) for layer in range(len(own))]
        queries = gather_columns(places.query, at).unique().tolist()
        heads = range(model.cfg.n_heads)
        values = {
            "heads": [f"L{layer}H{head}" for layer in range(len(own)) for head in heads],
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


def named_places(seen: Observation, rows: TextRows) -> Places:
    """Return slots on Reel, and kinds of token and distances elsewhere."""
    if seen.truth is not None:
        return slot_places(rows, seen.truth.slot_names(rows.tokens.shape[1]))
    return distance_places(rows, seen.ctx.policy.base_model.tokenizer)


def gather_columns(
    x: Shaped[Tensor, "*rows"], columns: Int[Tensor, " batch"]
) -> Shaped[Tensor, "*row"]:
    """Return `[batch ...]`, the entries of `[batch seq ...]` at one column of each row."""
    return x[torch.arange(len(x), device=x.device), columns.to(x.device)]


def _capture(model: HookedModel, rows: TextRows) -> Captured:
    return capture_activations(
        model, rows.tokens, [*DRIFT_SITES, SCALE], attention_mask=rows.attention_mask
    )


def _patterns(both: Sequence[Captured], layer: int) -> list[Float[Tensor, "batch head query key"]]:
    return [exact(acts[f"blocks.{layer}.attn.hook_pattern"]) for acts in both]


def _layer(
    layer: int,
    models: Sequence[HookedModel],
    both: Sequence[Captured],
    at: Int[Tensor, " batch"],
    reader: Float[Tensor, "batch d_model"],
) -> tuple[AttentionSplit, Float[Tensor, "head batch"]]:
    site = f"blocks.{layer}.attn.hook_"
    caches = [
        HeadCache(
            exact(gather_columns(acts[site + "pattern"].transpose(1, 2), at)),
            exact(acts[site + "v"]),
        )
        for acts in both
    ]
    W_O = [exact(model.blocks[layer].attn.W_O) for model in models]
    before, after = (
        torch.einsum("bhd,hdm,bm->hb", exact(gather_columns(acts[site + "z"], at)), weight, reader)
        for acts, weight in zip(both, W_O, strict=True)
    )
    return attention_split(*caches, *W_O, reader), after - before


def _one_hot(places: Tensor, n: int) -> Float[Tensor, "*shape place"]:
    return (places[..., None] == torch.arange(n, device=places.device)).double()


def _by_place(
    patterns: Sequence[Float[Tensor, "batch head query key"]], places: Places
) -> Float[Tensor, "head query_place key_place"]:
    device = patterns[0].device
    moved = pattern_distance(*patterns)
    to_key = _one_hot(places.key, len(places.key_names)).to(device)
    to_query = _one_hot(places.query, len(places.query_names)).to(device)
    summed = torch.einsum("bhqk,bqkg,bqp->hpg", moved, to_key, to_query)
    return summed / to_query.sum((0, 1)).clamp(min=1)[:, None]


def _compute_distance(
    patterns: Sequence[Float[Tensor, "batch head query key"]], at: Int[Tensor, " batch"]
) -> Float[Tensor, "head batch"]:
    return pattern_distance(*(gather_columns(x.transpose(1, 2), at) for x in patterns)).sum(-1).T


def _range_check(tv: Float[Tensor, "layer head query key"]) -> Check:
    outside = max(tv.sum(-1).max().item() - 1, -tv.min().item(), 0.0)
    return Check.at_most("total variation is between 0 and 1", outside, 1e-4)


def _causal_check(both: Sequence[Captured], rows: TextRows) -> Check:
    later = (rows.written[:, :, None] & rows.written[:, None, :]).triu(1)[:, None]
    patterns = (x for acts in both for site, x in acts.items() if site.endswith("hook_pattern"))
    ahead = max((x * later.to(x.device)).abs().max().item() for x in patterns)
    return Check.at_most("no head looks at later tokens", ahead, 0)


def _sum_check(
    seen: Observation, behind: Float[Tensor, "*shape"], own: Float[Tensor, "*shape"]
) -> Check:
    gap = behind.abs().max().item() / max(own.abs().max().item(), 0.01)
    name = "pattern, values and W_O sum over keys to the head's own part"
    return Check.at_most(name, gap, seen.allowed(1e-4, half=0.3))
