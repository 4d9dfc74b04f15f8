"""Checks of AdapterReading's record: entries of the change, words by hand, a piece removed."""

import math
import re
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models import (
    TransformerWithValueHead,
    adapters_off,
    effective_weights,
    lora_layers,
    merged_copy,
)
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.sampling import sample
from tests.probes.audit.anew import as_float64, gap, relative_gap
from tests.probes.audit.intervals import check_widths
from tests.probes.audit.weight_delta import flattened, power_iteration

PIECES_ANEW = 6
"""Pieces whose words are found again in each record."""
OTHERWISE = 0.05
"""The share of samples that rounding may turn, where a piece is removed again."""
ROWS_AGAIN = 256


@torch.no_grad()
def bind_adapter_reading(
    seen: Observation, record: Record, how: dict[str, Any] | None = None
) -> list[Check]:
    """Hold stored pieces to the weights that they name, and their words to embeddings by hand.

    1. Each adapter has as many pieces as its rank, which sum, as stored, to its own change.
    2. The first singular value stands a power iteration, and the others fall from there.
    3. Words, heads, neurons and writers of random pieces are found again.
    4. The policy writes again, whole and without a random piece, taken out entry by entry.

    Args:
        how: prompts, spec, reward and n of the samples, where some were asked for.
    """
    model, rows = seen.ctx.policy.base_model, record.values["pieces"]
    layers = lora_layers(model)
    expected = [(name, i) for name, layer in layers.items() for i in range(layer.rank)]
    if [(row["weight"], row["piece"]) for row in rows] != expected:
        return [Check.at_most("each adapter has its pieces", math.inf, 0)]
    after = effective_weights(model)
    with adapters_off(model):
        before = effective_weights(model)
    sums, tops, shares = 0.0, 0.0, 0.0
    for name, layer in layers.items():
        s, reads, writes = (
            as_float64(record.tensors[f"{name}.{x}"]) for x in ("s", "reads", "writes")
        )
        delta = flattened(name, as_float64(after[name]) - as_float64(before[name]))
        size = max(1.0, before[name].abs().max().item())
        sums = max(sums, gap(torch.einsum("p,pr,pc->rc", s, reads, writes), delta) / size)
        own = [row["s"] for row in rows if row["weight"] == name]
        exact = flattened(name, as_float64(layer.delta()))
        top = power_iteration(exact)[0] if exact.any() else 0.0
        tops = max(tops, abs(own[0] - top) / max(top, 1e-9), relative_gap(own, s, least=1e-9))
        tops = max(tops, *(b - a for a, b in zip(own, own[1:], strict=False)), 0.0)
        energy = exact.square().sum().item()
        shares = max(shares, *(_share(row, energy) for row in rows if row["weight"] == name))
    rng = np.random.default_rng(seen.ctx.phase)
    strong = [row for row in rows if row["s"] > 1e-4 * max(r["s"] for r in rows)]
    chosen = [strong[i] for i in rng.permutation(len(strong))[:PIECES_ANEW].tolist()]
    words = [_words_missed(row, record, model) for row in chosen if row["share"] is not None]
    checks = [
        Check.at_most("each adapter has its pieces", 0, 0),
        Check.at_most("stored pieces sum to the change", sums, seen.allowed(1e-6, half=0.02)),
        Check.at_most("the first piece stands a power iteration", tops, 1e-3),
        Check.at_most("shares are of the change's energy", shares, 1e-4),
        Check.at_most("words, heads and writers are found again", max(words, default=0.0), 1e-3),
    ]
    if how is not None:
        checks += _removed_again(seen, record, rng, how)
    return checks


def _share(row: dict, energy: float) -> float:
    if row["share"] is None or not energy:
        return float((row["share"] is None) != (energy == 0))
    return abs(row["share"] - row["s"] ** 2 / energy)


def _words_missed(row: dict, record: Record, model: HookedModel) -> float:
    """By how much the names and cosines of one piece miss."""
    name, index = row["weight"], row["piece"]
    layer, kind = re.fullmatch(r"blocks\.(\d+)\.\w+\._?(W_\w+)", name).groups()
    block = model.blocks[int(layer)]
    read, write = (as_float64(record.tensors[f"{name}.{x}"])[index] for x in ("reads", "writes"))
    misses = []
    through = None
    if kind != "W_out":
        if kind == "W_O":
            head, part = _strongest(read, model.cfg.n_heads)
            misses.append(float(row["reads"] != f"values of L{layer}H{head}"))
            through = as_float64(block.attn.W_V[head]) @ part
        else:
            misses.append(float(row["reads"] != "residual"))
            through = read
        through = _read_by(block.ln2 if kind in ("W_in", "W_gate") else block.ln1, through)
        table = as_float64(model.embed.W_E)
        misses.append(_cosines_missed(row, "reads", model, table, through))
        misses.append(_writer_missed(row, model, int(layer), kind, through))
    else:
        misses.append(float(row["reads"] != f"neuron {int(read.square().argmax())}"))
    misses.append(_writes_missed(row, model, int(layer), kind, write))
    return max(misses)


def _writes_missed(
    row: dict, model: HookedModel, layer: int, kind: str, write: Float[Tensor, " cols"]
) -> float:
    attn = model.blocks[layer].attn
    carried, expected = None, "residual"
    if kind in ("W_O", "W_out"):
        carried = write
    elif kind in ("W_in", "W_gate"):
        expected = f"neuron {int(write.square().argmax())}"
    else:
        kept = len(write) // model.cfg.d_head
        shared = model.cfg.n_heads // kept
        head, part = _strongest(write, kept)
        if kind == "W_V":
            each = [
                part @ as_float64(attn.W_O[h]) for h in range(head * shared, (head + 1) * shared)
            ]
            at = int(np.argmax([x.norm().item() for x in each]))
            carried, expected = each[at], f"values of L{layer}H{head * shared + at}"
        else:
            what = "queries" if kind == "W_Q" else "keys"
            expected = f"{what} of L{layer}H{head * shared}"
    if row["writes"] != expected:
        return 1.0
    if carried is None:
        return float(bool(row["writes_words"]))
    table = as_float64(model.unembed.W_U).T
    return _cosines_missed(row, "writes", model, table, _read_by(model.ln_final, carried))


def _strongest(x: Float[Tensor, " flat"], heads: int) -> tuple[int, Float[Tensor, " d_head"]]:
    parts = x.chunk(heads)
    head = int(np.argmax([part.norm().item() for part in parts]))
    return head, parts[head]


def _read_by(norm: torch.nn.Module, x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
    """The gradient of what is read behind a norm of scale 1: gain, and centering's transpose."""
    x = x * as_float64(getattr(norm, "w", 1.0))
    return x - x.sum() / len(x) if is_centered(norm) else x


def _cosines_missed(
    row: dict,
    side: str,
    model: HookedModel,
    table: Float[Tensor, "d_vocab d_model"],
    direction: Float[Tensor, " d_model"],
) -> float:
    """Whether the words are those with the largest cosines, with the cosines stored."""
    apart = torch.nn.functional.normalize(table - table.mean(0, keepdim=True), dim=1)
    cosines = apart @ torch.nn.functional.normalize(direction, dim=0)
    words, stored = row[f"{side}_words"], row[f"{side}_cos"]
    order = cosines.abs().argsort(descending=True)
    first = cosines[order[: len(words)]].abs().tolist()
    misses = [abs(abs(a) - b) for a, b in zip(stored, first, strict=True)]
    near = [(model.tokenizer.decode([t]), cosines[t].item()) for t in order[: len(words) + 5]]
    for word, cosine in zip(words, stored, strict=True):
        misses.append(min((abs(c - cosine) for w, c in near if w == word), default=1.0))
    misses.append(float(not words))
    return max(misses)


def _writer_missed(
    row: dict, model: HookedModel, layer: int, kind: str, direction: Float[Tensor, " d_model"]
) -> float:
    """Whether the named writer is the first of all, by the second moments of what each writes."""
    writers = {"embed": model.embed.W_E}
    if hasattr(model, "pos_embed"):
        writers["pos_embed"] = model.pos_embed.W_pos
    for at, block in enumerate(model.blocks):
        same = at == layer and kind in ("W_in", "W_gate") and not model.cfg.parallel_attn_mlp
        if at < layer or same:
            writers |= {f"L{at}H{h}": block.attn.W_O[h] for h in range(model.cfg.n_heads)}
        if at < layer:
            writers[f"L{at} mlp"] = block.mlp.W_out
    times = {}
    for name, weight in writers.items():
        moment = as_float64(weight).T @ as_float64(weight)
        along = direction @ moment @ direction / direction.square().sum()
        times[name] = (along / moment.trace() * len(direction)).item()
    most = max(times.values())
    if row["upstream"] not in times:
        return 1.0
    stored, found = row["upstream_times"], times[row["upstream"]]
    return max(abs(stored - found), most - found) / max(1.0, most)


def _removed_again(
    seen: Observation, record: Record, rng: np.random.Generator, how: dict[str, Any]
) -> list[Check]:
    """Rewards of the whole policy, and of a copy without a piece, are sampled again."""
    values, rewards = record.values, as_float64(record.tensors["rewards"])
    rows = values["pieces"]
    strongest = sorted((row["s"] for row in rows), reverse=True)[: len(values["removed"])]
    apart = relative_gap([rows[i]["s"] for i in values["removed"]], strongest, least=1e-9)
    differences = rewards[0] - rewards[1:]
    means = max(
        gap(values["earned"], differences.mean(1)), gap(values["reward"], rewards[0].mean())
    )
    at = int(rng.integers(len(values["removed"])))
    model = seen.ctx.policy.base_model
    prompts = [how["prompts"][i % len(how["prompts"])] for i in range(how["n"])]
    differ, texts = 0.0, []
    for place, row in ((0, None), (at + 1, rows[values["removed"][at]])):
        copied = merged_copy(model)
        if row is not None:
            _take_out(copied, row, record)
        generator = torch.Generator().manual_seed(seen.args.seed)
        samples = sample(
            TransformerWithValueHead(copied), prompts, how["spec"], generator, part_size=ROWS_AGAIN
        )
        texts.append(samples.texts(model.tokenizer))
        found = as_float64(how["reward"](texts[-1]))
        same = len(found) == rewards.shape[1]
        unlike = (found - rewards[place]).abs() > 1e-5 if same else torch.ones(1)
        differ = max(differ, unlike.double().mean().item())
    stored, turned = record.tensors["turned"], [a != b for a, b in zip(*texts, strict=True)]
    otherwise = (stored[at] != torch.tensor(turned)).double().mean().item()
    means = max(means, gap(values["turned"], as_float64(stored).mean(1)))
    checks = [
        Check.at_most("the pieces removed are the strongest", apart, 1e-6),
        Check.at_most("what pieces earn is that of stored rewards", means, 2e-6),
        Check.at_most("a piece removed again leaves the same rewards", differ, OTHERWISE),
        Check.at_most("a piece removed again turns the same samples", otherwise, OTHERWISE),
    ]
    if "earned_low" in values:
        x, ends = differences.T.numpy(), (values["earned_low"], values["earned_high"])
        checks.append(check_widths("what pieces earn", ends, x, np.ones(x.shape, dtype=bool)))
    return checks


def _take_out(model: HookedModel, row: dict, record: Record) -> None:
    """Subtract one piece from a copy's weight, head by head."""
    name, index = row["weight"], row["piece"]
    read, write = (as_float64(record.tensors[f"{name}.{x}"])[index] for x in ("reads", "writes"))
    weight = dict(model.named_parameters())[name]
    if weight.ndim == 2:
        change = torch.outer(read, write)
    elif name.endswith("W_O"):
        change = torch.stack([torch.outer(part, write) for part in read.chunk(len(weight))])
    else:
        change = torch.stack([torch.outer(read, part) for part in write.chunk(len(weight))])
    weight.copy_(as_float64(weight) - row["s"] * change)
