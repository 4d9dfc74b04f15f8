"""WordsMoved: words that won and lost probability since the reference, and by which components."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered, model_where_exact, unembed
from rlhf_lab.models.residual_parts import PART_SITES, residual_components, validate_additive
from rlhf_lab.probes.moved_words import describe_moved_words, shift_parts
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.probes.text_rows import text_rows
from rlhf_lab.training.capture import capture_activations

NORMALIZED, SCALE = "ln_final.hook_normalized", "ln_final.hook_scale"
WORD_SITES = (*PART_SITES, SCALE, NORMALIZED)
TEXT_GROUPS = 8  # of texts, for intervals
MOST_HEADS = 32  # with more, heads of a layer are one component
MOST_WORDS = 128  # with the largest changes; others are not stored


class ModelMeans(NamedTuple):
    """Means of one model over the states of each group of texts, in float64."""

    names: list[str]
    parts: Float[Tensor, "component group position d_model"]  # (c - mean c) / sigma
    logits: Float[Tensor, "group position d_vocab"]
    probs: Float[Tensor, "group position d_vocab"]


class WordsMoved(Probe):
    """Words that won and lost probability since the reference, and by which components.

    Words are found by `find_moved_words`. On Reel and sums a position is a slot; elsewhere
    all states are one position. `parts_over_phases` splits the shift of these or any other stored
    words. With hooks on the policy, their effect is a component.

    Checks: components and unembedding sum to the measured shift, for every word minus the mean of
    all words.

    Args:
        n: number of texts, in groups of equal size for intervals.
        text: "eval" or "rollout".
    """

    name = "words_moved"
    question = "Which words became more or less likely, and which components did it?"
    caveat = "Parts are direct effects on the logits: later components can undo or repeat them."

    options = ("n", "text", *Probe.options)
    n, fewest, text = 32, 2, "eval"

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.sites = WORD_SITES if self.text == "eval" else ()

    def check_model(self, model: HookedModel) -> None:
        validate_additive(model, self.name)

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
        rows, acts = text_rows(seen, self.text, self.n), [seen.reference_acts, seen.acts]
        if self.text == "rollout":
            text = rows.tokens, WORD_SITES, None, rows.attention_mask
            acts = [capture_activations(model, *text) for model in models]
        groups, pooled = min(TEXT_GROUPS, len(rows.tokens)), seen.truth is None
        if groups < 2:
            raise ConfigError(f"{self.name} needs at least 2 texts, for intervals. Pass more.")
        n = len(rows.tokens) // groups * groups
        counts = where_exact(rows.states)[:n].unflatten(0, (groups, -1)).sum(1)
        pooled = pooled or not counts.amin(0).any()  # no position that all groups have
        columns = (counts.sum(0) if pooled else counts.amin(0)).nonzero()[:, 0]
        states = where_exact(rows.states)[:n, columns].unflatten(0, (groups, -1))
        weights = _group_weights(states, pooled)
        mean = lambda x: weights.to(x) @ x.flatten(2).reshape(*weights.mT.shape[:2], -1)
        acts = [{site: where_exact(x)[:n, columns] for site, x in each.items()} for each in acts]
        hooked, temperature = has_hooks(seen.ctx.policy.base_model), seen.args.temperature
        before, after = (
            _model_means(model, each, mean, temperature, hooked)
            for model, each in zip(models, acts, strict=True)
        )
        won = after.probs - before.probs
        ids = won.abs().sum((0, 1)).topk(min(MOST_WORDS, won.shape[2])).indices.sort().values
        columns_of, constants = zip(*(_readers(model, ids) for model in models), strict=True)
        tensors = {
            "won": won[..., ids],
            "measured": (after.logits - before.logits)[..., ids],
            "moved": after.parts - before.parts,
            "stream": after.parts.sum(0),
            "columns": torch.stack(columns_of),
            "constants": torch.stack(constants),
        }
        tensors = {name: x.float().cpu() for name, x in tensors.items()}
        half, allowed = tensors | {"moved": tensors["moved"].half()}, seen.allowed(1e-3, half=0.2)
        tensors = half if _error(half) <= allowed / 2 else tensors  # half the size, if exact enough
        slots = ["all states"]
        if not pooled:
            names = seen.truth.slot_names(rows.tokens.shape[1] + 1)
            slots = [names[column + 1] for column in columns.tolist()]
        values = {
            "n": n,
            "ids": ids.tolist(),
            "words": spell_ids(models[1], ids.tolist()),
            "slots": slots,
            "components": [*before.names, "unembedding"],
        }
        name = "parts sum to the measured shift"
        check = lambda: Check.at_most(name, _error(tensors), allowed)
        return Record(values | describe_moved_words(tensors, values), tensors, [check])


def spell_ids(model: HookedModel, ids: list[int]) -> list[str]:
    """Return each token as text; tokens that decode to the same text also have their id."""
    words = model.tokenizer.batch_decode([[token] for token in ids])
    counts = Counter(words)
    pairs = zip(words, ids, strict=True)
    return [word if counts[word] == 1 else f"{word} (token {token})" for word, token in pairs]


def _group_weights(
    states: Bool[Tensor, "group row seq"], pooled: bool
) -> Float[Tensor, "group position entry"]:
    """Return the weight of each state of a group in each mean: of one position, or of all."""
    mask = states[:, None].double()
    if not pooled:
        mask = mask * torch.eye(states.shape[2], device=mask.device).double()[:, None]
    return (mask / mask.sum((2, 3), keepdim=True)).flatten(2)


def _model_means(
    model: HookedModel,
    acts: Mapping[str, Tensor],
    mean: Callable[..., Tensor],
    temperature: float,
    hooked: bool,
) -> ModelMeans:
    norm, inverse = model.ln_final, 1 / exact(acts[SCALE])
    scaled = {
        site: mean(exact(x).flatten(2) * inverse).flatten(0, 1).unflatten(-1, x.shape[2:])
        for site, x in acts.items()
        if site not in (SCALE, NORMALIZED)
    }
    names, parts = residual_components(model, scaled)
    parts[[name.endswith(" b_O") for name in names]] *= mean(inverse).flatten(0, 1)
    parts = parts - parts.mean(-1, keepdim=True) if is_centered(norm) else parts
    if hooked:  # what hooks changed after the components
        rest = mean(exact(acts[NORMALIZED])).flatten(0, 1) - parts.sum(0)
        names, parts = [*names, "hooks"], torch.cat([parts, rest[None]])
    if model.cfg.n_layers * model.cfg.n_heads > MOST_HEADS:  # sum the heads of a layer
        layers = [re.sub(r"(H\d+| b_O)$", " attn", name) for name in names]
        names = list(dict.fromkeys(layers))
        index = torch.tensor([names.index(name) for name in layers], device=parts.device)
        parts = parts.new_zeros(len(names), *parts.shape[1:]).index_add(0, index, parts)
    hidden = acts[NORMALIZED] * getattr(norm, "w", 1.0) + getattr(norm, "b", 0.0)
    logits = unembed(model, hidden).float()
    probs = mean((logits / temperature).softmax(-1))
    return ModelMeans(names, parts.unflatten(1, probs.shape[:2]), mean(logits), probs)


def _readers(
    model: HookedModel, ids: Int[Tensor, " word"]
) -> tuple[Float[Tensor, "d_model word"], Float[Tensor, " word"]]:
    norm, W_U = model.ln_final, exact(model.unembed.W_U[:, ids])
    ones = torch.ones_like(W_U[:, 0])
    gain, bias = exact(getattr(norm, "w", ones)), exact(getattr(norm, "b", 0 * ones))
    return gain[:, None] * W_U, bias @ W_U + exact(model.unembed.b_U[ids])


def _error(tensors: Mapping[str, Tensor]) -> float:
    means = {name: x.double().mean(-3, keepdim=True) for name, x in tensors.items() if x.ndim > 2}
    means |= {name: tensors[name] for name in ("columns", "constants")}
    means["moved"] = means["moved"].sum(0, keepdim=True)
    n = tensors["won"].shape[-1]
    against_mean = torch.eye(n).double() - 1 / n  # each word minus the mean of all
    gap = shift_parts(means, against_mean).sum(0) - means["measured"] @ against_mean
    return gap.abs().max().item()
