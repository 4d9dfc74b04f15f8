"""Pictures of the built-in probes: a table of the fields that go to each picture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.views import records as draw
from rlhf_lab.views.intervals import mean_with_ends
from rlhf_lab.views.records import ENDS, MOST_ROWS, MOST_SLOTS, Column, Drawn, Snapshot, slots

# probe | kind | title | labels of rows, of columns | LABEL=FIELD ... | unit. In a label, _ is a
# space, __ is _; a field is one of the record, its tensors or COMPUTED; NAME,LOW,HIGH are three.
PICTURES = """
RunHealth | curves | reward | | mean_reward true_reward optimal_reward | reward
RunHealth | curves | KL from the reference | | kl_per_sequence optimal_kl_per_sequence |
 nats per sequence
KLByPosition | bars | exact KL and k1, n = {sequences[exact]} and {sequences[estimated]} | slots |
 exact=kl k1=k1_mean,k1_low,k1_high | nats per token
KLByPosition | table | estimators of the KL in nats, n = {sequences[estimated]} |
 slot=kl_slots | sequences=tokens_at
 k1=k1_mean,k1_low,k1_high k2=k2_mean,k2_low,k2_high k3=k3_mean,k3_low,k3_high sd_of_k1=k1_sd
 sd_of_k2=k2_sd sd_of_k3=k3_sd information_about_the_reward=information |
AttentionDrift | bars | shift by head and cause, n = {n} | heads |
 pattern_(QK)=qk values_(OV)=ov W__O=wo | logits
AttentionDrift | table | total variation of the pattern at {query} | head=heads |
 total_variation=tv_here |
AttentionDrift | diverging | shift by head and key, all causes | heads keys | by_key | logits
ComponentTransplant | bars | reward by component, {gain:+.3f} in all, n = {n} | groups |
 patched_in=put_in patched_out=taken_out Shapley=shapley | reward
GradTerms | cosine | cosines of the terms' whole gradients | terms terms | whole_cosines |
StepInfluence | bars | effect of step {number} on the {target} by cause | causes_of_step |
 effect=effects |
StepInfluence | strip | what each token did to the {target} | | moved=token_effects |
StepInfluence | diverging | change of the {target} by component and by the token's slot |
 groups slots | slot_effects |
StepLedger | strip | step {number} of {steps}: what each token adds to the objective | |
 share=share |
HackWatch | curves | reward minus true reward | | reward true_reward gap | reward
HackWatch | curves | grammatical texts | | grammatical | fraction
HackWatch | table | tokens, and probability that words won | text=sides |
 tokens=token_counts won=won_mass |
HackWatch | rows | by the logits: probability won in states of the policy's texts | | promoted |
HackWatch | rows | by the texts: log odds compared with the reference's texts | | taken_up |
KLAttribution | bars | {kl:.3g} nats per sequence, through which output, n = {n} | components |
 output | nats
KLAttribution | bars | {kl:.3g} nats per sequence, by whose weights, n = {n} | groups |
 weights | nats
KLAttribution | diverging | KL through outputs, by the next token | components slots |
 by_position | nats
ValueLens | fraction | R2 of {r2_against}, linear probes, held out, n = {held_out} | sites slots |
 defined_r2 |
ValueLens | bars | correlation of the value head with {r2_against}, n = {head_n} | slots |
 correlation=head_correlation |
ValueLens | diverging | value by layer, sequence 1, raw lens | sites slots | raw_lens |
ValueLens | diverging | value by layer, sequence 1, tuned lens | tuned_sites slots | last_lens |
ValueLens | table | R2 of both lenses as a forecast of the value | layer=tuned_sites |
 raw_lens=raw_r2 tuned_lens=tuned_r2 |
ValueAttribution | matrix | standard deviation of each component's part of the value |
 counted_slots components | sd |
ValueAttribution | bars | standard deviation of the values | counted_slots | value=value_sd |
Direction | accuracy | accuracy of the direction, held out, n = {sequences[held]} (*: the text up to
 there is informative) | sites_and_bayes informed_slots | accuracies |
FrozenProbe | table | all sites | sites | accuracy_frozen gap called shift cosine split_half
 moved_cosine accuracy_control size |
LogitShift | curves | shift of the logit difference | | shift=measured_rows | logits
LogitShift | bars | shift of logit({word} - {other}) by component | components |
 shift=shift_rows own_weights=own_weights_rows
 inherited_from_earlier_components=inherited_rows the_scale_of_the_norm=scale_rows
 unembedding=read_out_rows | logits
LogitShift | table | sum over components | cause=causes | logits=cause_sums |
WordsMoved | curves | probability that words won per text | | moved_mass | probability
WordsMoved | rows | words that moved together, n = {n} | | contrasts |
WordsMoved | bars | shift of {first} by component | components | shift=parts | logits
WordsMoved | rows | words by probability won | | word_table |
NeuronRank | bars | shift by neuron, n = {n} | neurons | contribution by_activation | logits
NeuronRank | table | neurons | neurons | contribution by_activation activation activation_shift
 write most_active_at=active |
NeuronRank | bars | shift by MLP | layers | its_neurons=neuron_sums b__out=b_out both=mlp | logits
WeightDelta | rows | the largest changes of weights | norm | rows |
"""
SHIFTS = {  # labels of the shift and of its causes
    "shift": "shift",
    "own_weights": "own weights",
    "inherited": "inherited from earlier components",
    "scale": "the scale of the norm",
    "read_out": "unembedding",
}
SCALES = {  # kind and ends of the scale of a matrix
    "matrix": ("sequential", None),
    "fraction": ("sequential", (0.0, 1.0)),
    "accuracy": ("sequential", (0.5, 1.0)),
    "diverging": ("diverging", None),
    "cosine": ("diverging", (-1.0, 1.0)),
}


def tensor(name: str, read: Callable[[Tensor], Any]) -> Callable[[Snapshot], Any]:
    """Return a column: what a function returns of a tensor, or None without the tensor."""
    return lambda at: read(at.tensors[name]) if name in at.tensors else None


def _cause_sums(at: Snapshot) -> tuple[Any, ...]:
    known = [at.tensors[name].sum(0) for name in SHIFTS if name in at.tensors]
    return mean_with_ends(torch.stack(known))


def _effects(at: Snapshot) -> dict[str, float]:
    sums = at.tensors["terms"].flatten(1).sum(1).tolist()
    whole = {name: at.tensors[name].sum().item() for name in ("momentum", "decay")}
    return dict(zip(at["term_names"], sums, strict=True)) | whole


def _defined_r2(at: Snapshot) -> tuple[Any, ...] | None:
    grid, *ends = (at.get(f"r2{end}") for end in ENDS)
    if grid is None:
        return None
    pairs = (zip(*row, strict=True) for row in zip(grid, at["defined"], strict=True))
    return [[x if is_defined else None for x, is_defined in row] for row in pairs], *ends


def _accuracies(at: Snapshot) -> tuple[Any, ...]:
    grid, *ends = (at.get(f"accuracy{end}") for end in ENDS)
    return [*grid, *filter(None, [at.get("bayes_accuracy")])], *ends


def _informed_slots(at: Snapshot) -> list[str]:
    names = slots(at, len(at["accuracy"][0]))
    flags = at.get("informed") or [False] * len(names)
    return [name + " *" * flag for name, flag in zip(names, flags, strict=True)]


def _active(at: Snapshot) -> list[str]:
    pairs = zip(at["tokens"], at["token_activations"], strict=True)
    named = (zip(*pair, strict=True) for pair in pairs)
    return [", ".join(f"{word!r} {x:.3g}" for word, x in row) for row in named]


def _shift_by_key(at: Snapshot) -> Tensor:
    return sum(at.tensors[name] for name in ("qk", "ov", "wo")).mean(-1).flatten(0, 1)


COMPUTED: Mapping[str, Callable[[Snapshot], Any]] = MappingProxyType(
    {
        **{f"k{i}_sd": (lambda at, i=i: [x**0.5 for x in at[f"k{i}_var"]]) for i in (1, 2, 3)},
        **{x: tensor(x, lambda t: t.unbind(-1)) for x in ("put_in", "taken_out", "shapley")},
        **{f"{x}_rows": tensor(x, mean_with_ends) for x in SHIFTS},
        "measured_rows": tensor("measured", mean_with_ends),
        "cause_sums": _cause_sums,
        "causes": lambda at: [label for name, label in SHIFTS.items() if name in at.tensors],
        "by_key": _shift_by_key,
        "kl_slots": lambda at: slots(at, len(at["kl"])),
        "sites": lambda at: list(map(draw.short_site, at["sites"])),
        "tuned_sites": lambda at: list(map(draw.short_site, at.get("tuned_sites") or ())),
        "terms": lambda at: [term.replace("_", " ") for term in at["terms"]],
        "whole_cosines": tensor("cosines", lambda t: t[..., -1]),
        "causes_of_step": lambda at: list(_effects(at)),
        "effects": lambda at: list(_effects(at).values()),
        "token_effects": tensor("rows", lambda t: t.sum(0)),
        "slot_effects": tensor("rows", lambda t: t.sum(1)),
        "sides": lambda at: ["policy", "reference"],
        "token_counts": tensor("counts", lambda t: t.sum(1)),
        "won_mass": tensor("promoted_mass", lambda t: [t.abs().sum().item() / 2, None]),
        "defined_r2": _defined_r2,
        "raw_lens": tensor("lens", lambda t: t[:, 0, :MOST_SLOTS]),
        "last_lens": tensor("lens_tuned", lambda t: t[:, 0, :MOST_SLOTS]),
        "counted_slots": lambda at: [
            f"{slot}, n = {n}"
            for slot, n in zip(at.get("slots") or at["positions"], at["n"], strict=True)
        ],
        "sites_and_bayes": lambda at: [
            *map(draw.short_site, at["sites"]),
            *["Bayes' rule"] * (at.get("bayes_accuracy") is not None),
        ],
        "informed_slots": _informed_slots,
        "accuracies": _accuracies,
        "active": _active,
        "layers": lambda at: [f"L{i} mlp" for i in range(len(at["mlp"]))],
        "neuron_sums": tensor("neuron_contribution", lambda t: t.sum(1)),
    }
)


@dataclass(frozen=True)
class PictureRow:
    """One row of the table of pictures."""

    probe: str
    kind: str
    title: str
    labels: tuple[str, ...]
    columns: Mapping[str, Column]
    unit: str

    def draw(self, at: Snapshot) -> Drawn | None:
        """Return the picture of one record, or None without the fields."""
        (label, column), *_ = self.columns.items()
        if self.kind == "table":
            return draw.field_table(at, self.title, parse_columns(self.labels) | self.columns)
        if self.kind == "rows":
            return draw.row_table(at, self.title, column, *self.labels)
        if self.kind == "strip":
            return draw.strip(at, self.title, column, label, top=3)
        values = draw.read_column(at, column)[0] or [()]
        if self.kind == "bars":
            name, labels = self.labels[0], _read_labels(at, self.labels[0], len(values))
            most = MOST_SLOTS if name.endswith("slots") else MOST_ROWS
            return draw.field_bars(at, self.title, labels, self.columns, self.unit, most)
        labels = [_read_labels(at, name, len(values[0])) for name in self.labels]
        kind, limits = SCALES[self.kind]
        return draw.matrix(at, self.title, column, *labels, self.unit, kind, limits)


def _read_labels(at: Snapshot, name: str, positions: int) -> Sequence[str]:
    if name == "slots":
        return slots(at, positions)
    return draw.read_column(at, read_name(name))[0] or ()


def read_name(name: str) -> Column:
    """Return the column of a name of the table."""
    return COMPUTED.get(name) or (tuple(name.split(",")) if "," in name else name)


def parse_columns(words: Iterable[str]) -> dict[str, Column]:
    """Return columns by label."""
    pairs = [word.partition("=") for word in words]
    spaced = lambda label: label.replace("_", " ").replace("  ", "_")
    return {spaced(label): read_name(name or label) for label, _, name in pairs}


def parse_pictures(table: str) -> tuple[PictureRow, ...]:
    """Return the rows of the table of pictures."""
    rows = []
    for line in table.replace("\n ", " ").strip().splitlines():
        probe, kind, title, labels, columns, unit = (part.strip() for part in line.split("|"))
        columns = parse_columns(columns.split())
        rows.append(PictureRow(probe, kind, title, tuple(labels.split()), columns, unit))
    return tuple(rows)


PICTURE_ROWS = parse_pictures(PICTURES)
