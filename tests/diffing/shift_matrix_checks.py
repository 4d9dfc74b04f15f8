"""Checks of a sender x receiver matrix: rows made again by finite differences of whole models."""

import re

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.groups import Groups, restrict, weights_of_both
from rlhf_lab.diffing.patch_places import PatchPlace, Side, part_places
from rlhf_lab.diffing.patching import captured_at, logit_difference
from rlhf_lab.diffing.quadrature import quadrature
from rlhf_lab.diffing.shift_matrix import ShiftMatrix
from rlhf_lab.identity import Check
from rlhf_lab.models import HookedTransformer, merged_copy
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.models.reference import model_where_exact

TEXTS, STEP = 3, 0.02


@torch.no_grad()
def check_shift_matrix(
    found: ShiftMatrix,
    model0: HookedTransformer,
    model1: HookedTransformer,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    ids: tuple[int, int],
    groups: Groups,
    seed: int = 0,
    anew: int = 6,
) -> list[Check]:
    """Hold a matrix to the models themselves, row by row and under its stored names.

    1. The sum of all entries is the shift, which is what fresh forwards of both models say.
    2. Nothing acts backwards: weights of a later block do nothing through an earlier component.
    3. For some groups chosen at random, all of the row is made again on a few texts: models with
       weights on either side of each node, components read at hook points by their names.

    Args:
        anew: how many groups.
    """
    model0, model1 = model_where_exact(model0), model_where_exact(model1)
    ends = [logit_difference(Side(model, tokens), pos, ids) for model in (model0, model1)]
    missed = (ends[1] - ends[0] - found.measured).abs().max().item()
    rows = np.random.default_rng(seed).permutation(len(found.groups))[:anew]
    few = tokens[:TEXTS, : pos % tokens.shape[1] + 1]
    maker = Anew(model0, model1, few, ids)
    misses = []
    for row in rows:
        made = maker.row(groups, found.groups[row], found.columns)
        misses.append((found.values[row, :, : len(few)] - made).abs().max().item())
    size = found.values.abs().max().item()
    return [
        Check.at_most("the matrix sums to the shift", found.error, 1e-3),
        Check.at_most("the shift is that of fresh forwards", missed, 1e-4),
        Check.at_most("no part acts on an earlier one", _backwards(found), 0.0),
        Check.at_most("rows are those of models on the line", max(misses), max(5e-3 * size, 1e-4)),
    ]


def _backwards(found: ShiftMatrix) -> float:
    """The largest entry at which a later sender would act on an earlier receiver."""
    late = [(_depth(g), i) for i, g in enumerate(found.groups)]
    worst = 0.0
    for depth, row in late:
        before = [i for i, name in enumerate(found.columns) if _depth(name) < depth]
        entries = found.values[row, before]
        worst = max(worst, entries.abs().max().item() if entries.numel() else 0.0)
    return worst


def _depth(name: str) -> tuple[int, int]:
    """Where a part stands in the order in which the model runs: its block, attention or MLP."""
    if name in ("embed", "pos_embed"):
        return -1, 0
    block = re.match(r"L(\d+)", name)
    if block is None:
        return 10**6, 0  # the final norm and the read-out
    return int(block[1]), int(name.endswith("mlp"))


class Anew:
    """Rows of a matrix by central differences of a model's activations, without derivatives."""

    def __init__(
        self,
        model0: HookedTransformer,
        model1: HookedTransformer,
        tokens: Int[Tensor, "batch seq"],
        ids: tuple[int, int],
    ) -> None:
        self.before, self.after = weights_of_both(model0, model1)
        self.delta = {name: self.after[name] - self.before[name] for name in self.before}
        self.model, self.tokens, self.ids = merged_copy(model0), tokens, ids
        self.places = part_places(self.model)
        self.at_node: dict[float, dict[str, Tensor]] = {}

    def row(self, groups: Groups, name: str, columns: list[str]) -> Float[Tensor, "column batch"]:
        """What the change of one group does through each of the columns."""
        change, total = restrict(self.delta, groups, name), 0.0
        for node, weight in zip(*quadrature(), strict=True):
            here = {n: torch.lerp(self.before[n], self.after[n], node) for n in self.before}
            low, high = (
                self._read(here | {n: here[n] + sign * STEP * change[n] for n in change})
                for sign in (-1, 1)
            )
            if node not in self.at_node:
                self.at_node[node] = self._read(here)
            middle = self.at_node[node]
            moved = {n: (high[n] - low[n]) / (2 * STEP) for n in high}
            u = middle["reader"]
            parts = [(moved[n] @ u) * middle["scale"] for n in columns[:-2]]
            scale = (middle["residual"] @ u) * moved["scale"]
            rest = moved["difference"] - sum(parts) - scale
            total = total + weight * torch.stack([*parts, scale, rest])
        return total

    def _read(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The model's components, scale and logit difference at the last position, by name."""
        for name, parameter in self.model.named_parameters():
            parameter.copy_(weights[name])
        side = Side(self.model, self.tokens, torch.ones_like(self.tokens, dtype=torch.bool))
        last = f"blocks.{self.model.cfg.n_layers - 1}.hook_resid_post"
        from_sites = {"residual": last, "scale": "ln_final.hook_scale"}
        sites = [PatchPlace(site) for site in from_sites.values()]
        found = captured_at(side, [*self.places.values(), *sites])
        names = [*self.places, *from_sites]
        read = {n: act[:, -1].double() for n, act in zip(names, found, strict=True)}
        read["scale"] = 1 / read["scale"][:, 0]
        for layer, block in enumerate(self.model.blocks):
            read[f"L{layer} b_O"] = block.attn.b_O.double().expand_as(read["residual"])
        if is_centered(self.model.ln_final):
            vectors = [n for n, x in read.items() if x.ndim == 2]
            read |= {n: read[n] - read[n].mean(-1, keepdim=True) for n in vectors}
        unembed, gain = self.model.unembed, getattr(self.model.ln_final, "w", torch.ones(()))
        u = unembed.W_U[:, self.ids[0]] - unembed.W_U[:, self.ids[1]]
        read["reader"] = (gain * u).double()
        read["difference"] = logit_difference(side, -1, self.ids)
        return read
