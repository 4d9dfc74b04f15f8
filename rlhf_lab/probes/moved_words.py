"""Words that won and lost probability together, and the components that shifted their logits."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import RunError
from rlhf_lab.functional import Interval
from rlhf_lab.functional.paired import t_two_sided
from rlhf_lab.probes.probe import decimals
from rlhf_lab.probes.run import Run

SAME_WORDS = 0.8  # cosine of the changes at two positions from which they are one contrast
LISTED = 0.9  # fraction of either side of a contrast that its listed words have
MOST_CONTRASTS, MOST_LISTED = 8, 20


class MovedWords(NamedTuple):
    """Words that won and lost probability at the same positions."""

    positions: list[int]  # the position with the largest change first
    weights: Float[Tensor, " word"]  # fractions of the probability won, minus those of the lost
    mass: Interval  # probability moved per text, at all these positions


def find_moved_words(won: Float[Tensor, "group position word"]) -> list[MovedWords]:
    """Find contrasts of words, ordered by the lower end of the probability that they moved.

    1. Average over the groups: D(v) at each position.
    2. Join a position to larger ones if the cosine of its D and theirs is above 0.8.
    3. Weigh words by D, with positive and negative weights that sum to 1 and -1.
    4. Moved mass of a group: half the sum of its D, with the signs of the other groups' mean.
       Noise has an expectation of 0; contrasts whose interval contains 0 are omitted.

    Args:
        won: mean of pi(v) - ref(v) over the texts of each group.
    """
    mean = won.mean(0)
    joined: list[list[int]] = []
    totals = mean[:0]
    for position in mean.abs().sum(1).argsort(descending=True).tolist():
        near = torch.cosine_similarity(totals, mean[position], 1) > SAME_WORDS
        i = int(near.int().argmax()) if near.any() else len(joined)
        if i == len(joined):
            joined.append([])
            totals = torch.cat([totals, torch.zeros_like(mean[:1])])
        joined[i].append(position)
        totals[i] += mean[position]
    others = (won.sum(0) - won) / (len(won) - 1)
    moved = (others.sign() * won).sum(2) / 2
    mass = t_interval(torch.stack([moved[:, x].sum(1) for x in joined], 1))
    up, down = (
        x / x.sum(1, keepdim=True).clamp(min=1e-30) for x in (totals.relu(), (-totals).relu())
    )
    found = [MovedWords(x, up[i] - down[i], mass[i]) for i, x in enumerate(joined)]
    return sorted((x for x in found if x.mass.low > 0), key=lambda x: -x.mass.low)


def t_interval(x: Float[Tensor, "group ..."]) -> Interval:
    """Return the mean over groups of texts, and its 95% t interval."""
    reach = t_two_sided(0.95, len(x) - 1) * x.std(0) / len(x) ** 0.5
    return Interval(x.mean(0), x.mean(0) - reach, x.mean(0) + reach, len(x))


def shift_parts(
    tensors: Mapping[str, Tensor], weights: Float[Tensor, "word ..."]
) -> Float[Tensor, "component group position ..."]:
    """Split the shift of a contrast of words by component, from a record of `WordsMoved`.

    The last component is the unembedding with the final norm's gain and bias. With v_c the mean of
    (c - mean c) / sigma and q = g W_U a, before (0) and after (1):
    component_c = <v_c1 - v_c0, q_0>
    unembedding = <sum_c v_c1, q_1 - q_0> + (b W_U a + b_U a)_1 - (b W_U a + b_U a)_0

    Args:
        weights: a(v) of the record's words.
    """
    before, after = (columns.double() @ weights for columns in tensors["columns"])
    constants = [row.double() @ weights for row in tensors["constants"]]
    parts = tensors["moved"].double() @ before
    rest = tensors["stream"].double() @ (after - before) + constants[1] - constants[0]
    return torch.cat([parts, rest[None]])


def describe_moved_words(
    tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return contrasts and words of a record of `WordsMoved` as JSON, with t intervals."""
    won, words, slots = tensors["won"].double(), values["words"], values["slots"]
    whole, moved = won.mean(0).abs().sum().item() / 2, find_moved_words(won)[:MOST_CONTRASTS]
    weights = torch.stack([won.new_zeros(len(words)), *(x.weights for x in moved)], 1)
    parts = shift_parts(tensors, weights)
    parts = torch.cat([parts, (tensors["measured"].double() @ weights)[None]])  # the shift is last
    rows, first = [], {"first": "", "parts": None}
    for i, x in enumerate(moved):
        by_group = parts[:, :, x.positions[0], i + 1].T
        interval = t_interval(by_group)
        largest = int(interval.value[:-1].abs().argmax())
        listed = {w: y for sign in (1, -1) for w, y in _listed(sign, x.weights, words)}
        sides = [", ".join(w for w, y in listed.items() if sign * y > 0) for sign in (1, -1)]
        if not rows:
            first = {"first": " - ".join(sides)} | _ends("parts", t_interval(by_group[:, :-1]))
        rows.append(
            {"words": " - ".join(sides), "weights": listed}
            | {"at": ", ".join(slots[position] for position in x.positions)}
            | {"fraction": round(x.mass.value.item() / whole, 6)}
            | _ends("mass", x.mass)
            | _ends("shift", interval[-1])
            | {"component": values["components"][largest]}
            | _ends("part", interval[largest])
        )
    each = t_interval(won.sum(1))
    surest = torch.maximum(each.low, -each.high)
    order = surest.argsort(descending=True)[:MOST_LISTED].tolist()
    table = [{"word": words[i]} | _ends("won", each[i]) for i in order if surest[i] > 0]
    return {"moved_mass": round(whole, 6), "contrasts": rows, "word_table": table} | first


def parts_over_phases(
    run: Run, words: Mapping[str, float] | None = None, slot: str | None = None, name: str = ""
) -> list[dict[str, Any]]:
    """Return the shift of one contrast by component, with t intervals, in each recorded phase.

    A phase whose record lacks a word is omitted, unless the unembedding has not changed.

    Args:
        words: weights by word, such as {"was": 1, "wasn't": -1}; those that moved most if None.
        slot: the position; the one with the largest change if None.
        name: of the probe.

    Raises:
        RunError: If the run has no such records, or the last one lacks a word or the slot.
    """
    name = name or "words_moved"
    *_, last = records = run.records(name)
    weights, contrasts = torch.zeros(len(last["ids"])).double(), last["contrasts"]
    if words is None and not contrasts:
        return []
    words = contrasts[0]["weights"] if words is None else words
    slot = slot or (contrasts[0]["at"].split(", ")[0] if contrasts else last["slots"][0])
    if not set(words) <= set(last["words"]) or slot not in last["slots"]:
        raise RunError(
            f"The last record of {name} lacks a word of {list(words)} or the slot {slot!r}. Choose "
            f"from {', '.join(last['slots'])} and its words."
        )
    for word, weight in words.items():
        weights[last["words"].index(word)] += weight
    found, readers = [], run.tensors(name, last["phase"])
    for record in records:
        tensors = run.tensors(name, record["phase"])
        if record["ids"] != last["ids"]:
            last_readers = {key: readers[key] for key in ("columns", "constants")}
            if any(before.ne(after).any() for before, after in last_readers.values()):
                continue
            tensors |= last_readers
        parts = shift_parts(tensors, weights)[:, :, record["slots"].index(slot)]
        shares = dict(zip(record["components"], map(t_interval, parts), strict=True))
        found.append({"phase": record["phase"], "shift": t_interval(parts.sum(0)), "parts": shares})
    return found


def _listed(sign: int, weights: Tensor, words: list[str]) -> list[tuple[str, float]]:
    side = (sign * weights).relu().sort(descending=True, stable=True)
    n = int((side.values.cumsum(0) < LISTED).sum()) + 1
    pairs = zip(side.indices[:n].tolist(), side.values[:n].tolist(), strict=True)
    return [(words[i], round(sign * x, 6)) for i, x in pairs]


def _ends(name: str, interval: Interval) -> dict[str, Any]:
    ends = zip(("", "_low", "_high"), (interval.value, interval.low, interval.high), strict=True)
    return {name + end: decimals(x) for end, x in ends}
