"""Checks of ValueAttribution's record: a part by its name, through the head's own module."""

import copy

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.training.capture import capture_activations
from tests.probes.audit.anew import ROWS_ANEW, gap, relative_gap, value_rounding

HALF_STEP = 1e-6
"""Of the central difference, in units of the part's deviation; the head is linear between kinks."""


def bind_value_attribution(seen: Observation, record: Record) -> list[Check]:
    """Hold one part's rows at one slot, chosen at random, to what its stored name says.

    1. Capture that part anew, at the stored position, and centre and scale it.
    2. The slope half-way: the head itself, moved along the part's deviation to both sides.
    3. The row: each hidden unit's slope is the share of the line on which it is on.
    4. The values: the head's hook point, in texts that are run alone; and the standard deviation of
       the stored rows, and the share of hidden units that are never on.
    """
    values, tensors = record.values, record.tensors
    chosen = np.random.default_rng(seen.ctx.phase)
    at = int(chosen.integers(len(values["positions"])))
    name = values["components"][int(chosen.integers(len(values["components"])))]
    which, pos = values["components"].index(name), values["positions"][at]
    real = tensors["mask"][at]
    states, part = _read_anew(seen, name, pos, len(real))
    states, part = states[real.to(states.device)], part[real.to(part.device)]
    origin, moved = states.mean(0), part - part.mean(0)
    stored = {kind: tensors[kind][at, which][real] for kind in ("rows", "midway")}
    size = max(1e-3, tensors["rows"][at].abs().max().item())
    allowed = value_rounding(seen)
    checks = [
        Check.at_most(
            "a named part's slope half-way is the head's own",
            gap(stored["midway"], _difference(seen, (states + origin) / 2, moved)) / size,
            allowed,
        ),
        Check.at_most(
            "a named part's row is the share of the line that is on",
            gap(stored["rows"], _by_shares(seen, origin, states, moved)) / size,
            allowed,
        ),
        Check.at_most("stored values are the head's", _values(seen, record), allowed),
        Check.at_most("the spread is of the stored rows", _spread(record), 1e-4),
        Check.at_most("as many units are dead", _dead(seen, record), 1e-6),
    ]
    if seen.truth is not None:
        names = [seen.truth.grammar.slots[pos].name for pos in values["positions"]]
        apart = sum(a != b.split(" ")[0] for a, b in zip(names, values["slots"], strict=True))
        checks.append(Check.at_most("slots are those of the grammar", apart, 0))
    return checks


def _read_anew(
    seen: Observation, name: str, pos: int, n: int
) -> tuple[Float[Tensor, "n d_model"], Float[Tensor, "n d_model"]]:
    """What the head reads at a position, and the share in it of the part of this name."""
    model = seen.ctx.policy.base_model
    layer = int(name[1:].split("H")[0].split(" ")[0]) if name[0] == "L" else 0
    site, head = f"blocks.{layer}.hook_mlp_out", None
    if name in ("embed", "pos_embed"):
        site = f"hook_{name}"
    elif "H" in name:
        site, head = f"blocks.{layer}.attn.hook_z", int(name.split("H")[1])
    elif name.endswith("b_O"):
        site = None
    tokens, real = seen.text.tokens[:n], seen.text.attention_mask[:n]
    sites = ["ln_final.hook_normalized", "ln_final.hook_scale", *([site] if site else [])]
    acts = capture_activations(model, tokens, sites, pos, real)
    if site is None:
        part = exact(model.blocks[layer].attn.b_O).expand(n, -1)
    elif head is None:
        part = exact(acts[site])
    else:
        part = exact(acts[site])[:, head] @ exact(model.blocks[layer].attn.W_O)[head]
    if is_centered(model.ln_final):
        part = part - part.mean(-1, keepdim=True)
    return exact(acts["ln_final.hook_normalized"]), part / exact(acts["ln_final.hook_scale"])


def _difference(
    seen: Observation, middle: Float[Tensor, "n d_model"], moved: Float[Tensor, "n d_model"]
) -> Float[Tensor, " n"]:
    """The central difference of a copy of the head in float64."""
    head = copy.deepcopy(seen.ctx.policy.value_head).to(middle)
    ahead, behind = (head(middle + way * HALF_STEP * moved)[:, 0] for way in (1, -1))
    return (ahead - behind) / (2 * HALF_STEP)


def _by_shares(
    seen: Observation,
    origin: Float[Tensor, " d_model"],
    states: Float[Tensor, "n d_model"],
    moved: Float[Tensor, "n d_model"],
) -> Float[Tensor, " n"]:
    """Rows by the place on the line at which each hidden unit changes between on and off."""
    first, _, last = seen.ctx.policy.value_head
    weight, bias = exact(first.weight), exact(first.bias)
    start, end = origin @ weight.T + bias, states @ weight.T + bias
    turn = (start / (start - end)).nan_to_num(0.0, 0.0, 0.0).clamp(0, 1)
    on = torch.where(end > 0, 1 - turn * (start <= 0), turn * (start > 0))
    return ((moved @ weight.T) * on * exact(last.weight)[0]).sum(-1)


def _values(seen: Observation, record: Record) -> float:
    """How far stored values are from the head's hook point, in texts that are run alone."""
    policy, misses = seen.ctx.policy, [0.0]
    for row in range(min(ROWS_ANEW, record.tensors["mask"].shape[1])):
        real = seen.text.attention_mask[row]
        alone = seen.text.tokens[row][real][None]
        _, cache = policy.run_with_cache(alone, names_filter="value_head.hook_value")
        found = cache["value_head.hook_value"][0, :, 0]
        for at, pos in enumerate(record.values["positions"]):
            if bool(record.tensors["mask"][at, row]):
                place = int(real[: pos + 1].sum()) - 1
                misses.append(relative_gap(record.tensors["value"][at, row], found[place]))
    return max(misses)


def _spread(record: Record) -> float:
    """How far stored standard deviations are from those of the stored rows and values."""
    misses = [0.0]
    tensors, values = record.tensors, record.values
    for at, real in enumerate(tensors["mask"]):
        rows = tensors["rows"][at][:, real].numpy()
        misses.append(relative_gap(values["sd"][at], rows.std(1)))
        misses.append(
            relative_gap(values["value_sd"][at], tensors["value"][at][real].numpy().std())
        )
        misses.append(abs(values["n"][at] - int(real.sum())))
    return max(misses)


def _dead(seen: Observation, record: Record) -> float:
    """How far the share of hidden units that are never on is from that of their hook point."""
    n = record.tensors["mask"].shape[1]
    tokens, real = seen.text.tokens[:n], seen.text.attention_mask[:n]
    policy = seen.ctx.policy

    def hidden_of(tokens: Tensor) -> tuple[Tensor]:
        site = "value_head.hook_hidden"
        return (policy.run_with_cache(tokens, names_filter=site)[1][site],)

    (hidden,) = run_left_padded(hidden_of, tokens, real)
    ever = torch.zeros(hidden.shape[-1], dtype=torch.bool)
    for at, pos in enumerate(record.values["positions"]):
        ever |= (hidden[record.tensors["mask"][at].to(hidden.device), pos] > 0).any(0).cpu()
    return abs(record.values["dead"] - (1 - ever.double().mean().item()))
