"""Checks of LogitShift's record: components taken out of the last residual, one after another."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.models.hooked_model import HookedModel, is_centered, model_where_exact
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.probe import Check, Observation, Record
from tests.probes.audit.anew import (
    as_float64,
    as_rows_say,
    component_names,
    gap,
    relative_gap,
)

TEXTS = 8
HEADS_ANEW = 8
"""How many heads are left out in turn in each record; all, where a model has no more."""
PARTS_AT_ONCE = 16
"""How many parts go through the unembedding together, with a logit for each word."""


class End(NamedTuple):
    """The end of a forward at one position."""

    acts: dict[str, Float[Tensor, "rows d_model"]]
    residual: Float[Tensor, "rows d_model"]
    scale: Float[Tensor, "rows 1"]
    logits: Float[Tensor, "rows d_vocab"]


def bind_logit_shift(
    seen: Observation, record: Record, words: tuple[str, str], pos: int
) -> list[Check]:
    """Hold stored rows and labels to what the logits lose with each component.

    Args:
        words: whose logits are compared, and the second is taken off the first.
        pos: the position before the word.
    """
    stored, values = record.tensors, record.values
    shift, before = as_float64(stored["shift"]), as_float64(stored["reference"])
    found = {"shift": shift, "reference": before, "policy": before + shift}
    means = max(relative_gap(values[name], rows.mean(1)) for name, rows in found.items())
    means = max(means, gap(values["measured_shift"], as_float64(stored["measured"]).mean()))
    checks = [Check.at_most("stored means are those of the stored rows", means, 1e-5)]
    if not as_rows_say(seen):
        return checks
    tokenizer = seen.ctx.policy.base_model.tokenizer
    ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
    text = seen.text.first(min(TEXTS, shift.shape[1]))
    misses: dict[str, float] = {}
    measured = []
    for model, rows in ((seen.ctx.policy.base_model, before + shift), (seen.ctx.reference, before)):
        model = model_where_exact(model)
        upto = upto_position(text, pos, next(model.parameters()).device)
        end = run_upto(model, upto)
        measured.append(end.logits[:, ids[0]] - end.logits[:, ids[1]])
        for name, row in _rows(model, upto, end, ids, seen.ctx.phase).items():
            at = values["components"].index(name)
            miss = relative_gap(rows[at, : len(row)], row)
            misses[name] = max(miss, misses.get(name, 0.0))
    allowed = seen.allowed(1e-3, half=0.3)
    missed = relative_gap(stored["measured"][: len(measured[0])], measured[0] - measured[1])
    worst = max(misses, key=misses.get)
    expected = [*component_names(seen.ctx.reference), "norm bias", "b_U"]
    named = [name for name in values["components"] if name != "hooks"]
    if "own_weights" in stored:
        upto = upto_position(text, pos, next(model.parameters()).device)
        checks += _causes(seen, record, ids, upto, allowed)
    return [
        *checks,
        Check.at_most("the measured shift is a fresh forward's", missed, allowed),
        Check.at_most("a component's row is what the logits lose with it", misses[worst], allowed),
        Check.at_most("components are named in their order", float(named != expected), 0),
    ]


class Upto(NamedTuple):
    """Texts as far as the position that is looked at; what is later has no part in it."""

    tokens: Int[Tensor, "rows seq"]
    last: Int[Tensor, " rows"]

    def at_last(self, x: Float[Tensor, "*all"]) -> Float[Tensor, "*ends"]:
        """What `[rows seq ...]` has at the last token of each row: `[rows ...]`."""
        return torch.stack([row[int(end)] for row, end in zip(x, self.last, strict=True)])


def upto_position(text: EvalText, pos: int, device: torch.device) -> Upto:
    """The texts up to a position of each, which counts from its last real token if negative."""
    real = [row[mask] for row, mask in zip(text.tokens, text.attention_mask, strict=True)]
    cut = [row[: pos % len(row) + 1].tolist() for row in real]
    tokens, _ = pad_rows(cut, device)
    return Upto(tokens, torch.tensor([len(row) - 1 for row in cut], device=device))


def run_upto(model: HookedModel, upto: Upto, *hooks: tuple) -> End:
    """One forward, and what it has at the last position."""
    tokens = upto.tokens
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: object) -> None:
        kept[hook.name] = upto.at_last(activation)

    layers = range(model.cfg.n_layers)
    sites = ["ln_final.hook_scale", "hook_embed", f"blocks.{layers[-1]}.hook_resid_post"]
    sites += ["hook_pos_embed"] if "hook_pos_embed" in model.hook_dict else []
    sites += [f"blocks.{layer}.hook_{part}" for layer in layers for part in ("attn_out", "mlp_out")]
    sites = [site for site in sites if site in model.hook_dict]
    with model.hooks(fwd_hooks=[*hooks, *((site, keep) for site in sites)]):
        logits = upto.at_last(model(tokens, attention_mask=torch.ones_like(tokens)))
    scale, residual = kept.pop(sites[0]), kept.pop(f"blocks.{layers[-1]}.hook_resid_post")
    return End(kept, residual, scale, as_float64(logits))


def _differences(
    model: HookedModel,
    residuals: Float[Tensor, "part rows d_model"],
    end: End,
    ids: list[int],
) -> Float[Tensor, "part rows"]:
    """The logit differences that residuals have, at the scale that the forward used."""
    found = []
    for some in residuals.split(PARTS_AT_ONCE):
        scales = end.scale.repeat(len(some), 1)[:, None]
        hold = lambda scale, hook, scales=scales: scales.to(scale)
        with model.hooks(fwd_hooks=[("ln_final.hook_scale", hold)]):
            logits = model.unembed(model.ln_final(some.flatten(0, 1)[:, None]))
        first, other = as_float64(logits[:, 0, ids]).unbind(-1)
        found.append((first - other).unflatten(0, some.shape[:2]))
    return torch.cat(found)


def logit_losses(
    model: HookedModel, end: End, parts: Float[Tensor, "part rows d_model"], ids: list[int]
) -> Float[Tensor, "part rows"]:
    """What the logit difference loses without each vector of the last residual, at its scale."""
    without = _differences(model, end.residual - parts, end, ids)
    return _differences(model, end.residual[None], end, ids) - without


def _rows(
    model: HookedModel, upto: Upto, end: End, ids: list[int], phase: int
) -> dict[str, Float[Tensor, " rows"]]:
    """What the logit difference loses without a component; for heads, without it in its layer."""
    parts = {"embed": end.acts["hook_embed"]}
    if "hook_pos_embed" in end.acts:
        parts["pos_embed"] = end.acts["hook_pos_embed"]
    for layer, block in enumerate(model.blocks):
        if f"blocks.{layer}.hook_mlp_out" in end.acts:
            parts[f"L{layer} mlp"] = end.acts[f"blocks.{layer}.hook_mlp_out"]
        parts[f"L{layer} b_O"] = block.attn.b_O.expand_as(end.residual)
    heads = [
        (layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)
    ]
    order = np.random.default_rng(phase).permutation(len(heads))[:HEADS_ANEW]
    for layer, head in (heads[i] for i in order):

        def silence(z: Tensor, hook: object, head: int = head) -> Tensor:
            z = z.clone()
            z[:, :, head] = 0
            return z

        without = run_upto(model, upto, (f"blocks.{layer}.attn.hook_z", silence))
        site = f"blocks.{layer}.hook_attn_out"
        parts[f"L{layer}H{head}"] = end.acts[site] - without.acts[site]
    lost = logit_losses(model, end, torch.stack(list(parts.values())), ids)
    rows = dict(zip(parts, lost, strict=True))
    nothing = torch.zeros_like(end.residual)
    of_bias = as_float64(model.unembed(nothing[:, None])[:, 0, ids])
    rows["b_U"] = of_bias[:, 0] - of_bias[:, 1]
    rows["norm bias"] = _differences(model, nothing[None], end, ids)[0] - rows["b_U"]
    return rows


CAUSES = ("own_weights", "inherited", "scale", "read_out")
TWO_NODES = (0.5 - 12**-0.5, 0.5 + 12**-0.5)
"""Gauss and Legendre's two, which integrate polynomials of up to the third degree exactly."""


def _causes(
    seen: Observation, record: Record, ids: list[int], upto: Upto, allowed: float
) -> list[Check]:
    """The causes of one block's parts, by an integral along the line between the two models.

    The block is run alone, by its modules, on what the other model's block reads.
    """
    models = tuple(map(model_where_exact, (seen.ctx.reference, seen.ctx.policy.base_model)))
    layer = int(np.random.default_rng(seen.ctx.phase).integers(models[0].cfg.n_layers))
    streams = [_streams(model, upto.tokens, layer) for model in models]
    outputs = [
        [_block_parts(model, layer, upto, *stream) for stream in streams] for model in models
    ]
    readers = [_reader(model, ids) for model in models]
    scales = [1 / as_float64(run_upto(model, upto).scale) for model in models]
    stored, names = record.tensors, record.values["components"]
    misses = []
    for name in outputs[0][0]:
        corners = [[outputs[i][j][name] for j in (0, 1)] for i in (0, 1)]
        found = _integrated(corners, readers, scales, is_centered(models[0].ln_final))
        at = names.index(name)
        misses += [
            relative_gap(stored[cause][at, : len(upto.tokens)], found[cause]) for cause in CAUSES
        ]
    unfed = [at for at, name in enumerate(names) if name in ("embed", "pos_embed") or "b_" in name]
    inherits = as_float64(stored["inherited"])[unfed].abs().max().item()
    return [
        Check.at_most("causes are those of a path between the models", max(misses), allowed),
        Check.at_most("what reads no other part inherits nothing", inherits, allowed),
    ]


def _streams(
    model: HookedModel, tokens: Int[Tensor, "rows seq"], layer: int
) -> tuple[Tensor, Tensor | None]:
    """What one block's attention reads, and what its MLP does; None where they read the same."""
    kept: dict[str, Tensor] = {}

    def keep(activation: Tensor, hook: object) -> None:
        kept[hook.name] = activation

    sites = [f"blocks.{layer}.hook_resid_{place}" for place in ("pre", "mid")]
    with model.hooks(fwd_hooks=[(site, keep) for site in sites if site in model.hook_dict]):
        model(tokens, attention_mask=torch.ones_like(tokens))
    return kept[sites[0]], kept.get(sites[1])


def _block_parts(
    model: HookedModel, layer: int, upto: Upto, attended: Tensor, middle: Tensor | None
) -> dict[str, Float[Tensor, "rows d_model"]]:
    """What heads and MLP of one block write at the last position, from given streams."""
    block, kept = model.blocks[layer], {}

    def keep(z: Tensor, hook: object) -> None:
        kept["z"] = upto.at_last(z)

    with model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_z", keep)]):
        model(attended, start_at_layer=layer, stop_at_layer=layer + 1)
    parts = {
        f"L{layer}H{head}": as_float64(kept["z"][:, head]) @ as_float64(block.attn.W_O[head])
        for head in range(model.cfg.n_heads)
    }
    if middle is not None:
        parts[f"L{layer} mlp"] = as_float64(upto.at_last(block.mlp(block.ln2(middle))))
    return parts


def _reader(model: HookedModel, ids: list[int]) -> Float[Tensor, " d_model"]:
    """By how much the logit difference grows with each number behind the final norm's division."""
    u = as_float64(model.unembed.W_U)[:, ids[0]] - as_float64(model.unembed.W_U)[:, ids[1]]
    return u * as_float64(getattr(model.ln_final, "w", torch.ones(len(u))))


def _integrated(
    corners: list[list[Tensor]], readers: list[Tensor], scales: list[Tensor], centered: bool
) -> dict[str, Float[Tensor, " rows"]]:
    """int_0^1 of the logit difference's derivative by each cause, all moving in a straight line.

    Args:
        corners: the outputs by whose weights and whose streams.
        readers, scales: of both models; one over the scale.
    """
    if centered:
        corners = [[x - x.mean(-1, keepdim=True) for x in row] for row in corners]
    first, last = corners[0][0], corners[1][1]
    weights = (corners[1][0] - first + last - corners[0][1]) / 2
    found = dict.fromkeys(CAUSES, 0.0)
    for a in TWO_NODES:
        k, q = first + a * (last - first), readers[0] + a * (readers[1] - readers[0])
        s = (scales[0] + a * (scales[1] - scales[0]))[:, 0]
        found["own_weights"] = found["own_weights"] + (weights @ q) * s / 2
        found["inherited"] = found["inherited"] + ((last - first - weights) @ q) * s / 2
        found["scale"] = found["scale"] + (k @ q) * (scales[1] - scales[0])[:, 0] / 2
        found["read_out"] = found["read_out"] + (k @ (readers[1] - readers[0])) * s / 2
    return found
