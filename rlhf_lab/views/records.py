"""Records of probes: their fields, what is computed from them, and pictures of both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views.intervals import mean_with_ends, sample_ends
from rlhf_lab.views.pictures import Drawn, Picture, Table
from rlhf_lab.views.plots import bars, curves, heatmap
from rlhf_lab.views.templates import formatted
from rlhf_lab.views.tokens import Strip

Fields = Mapping[str, Any]
EMPTY: Fields = MappingProxyType({})
MOST_ROWS, MOST_SLOTS = 24, 60  # of bars or a table; of positions
ENDS = ("", "_low", "_high")
# the name of a field, whose interval is in NAME_low and NAME_high; of a TENSOR:HOW (see REDUCED);
# or of a column of COMPUTED; in a tuple with the indices of one of its numbers
Column = str | tuple[str | int, ...]
SCALES = {  # kind and ends of the scale of a matrix
    "fraction": ("sequential", (0.0, 1.0)),
    "accuracy": ("sequential", (0.5, 1.0)),
    "diverging": ("diverging", None),
}
STORE_TENSORS = (  # classes of probes whose every record has tensors
    *("AttentionDrift", "Direction", "HackWatch", "LogitShift", "NeuronRank", "StepInfluence"),
    *("StepLedger", "TextHeatmap", "ValueLens", "WordsMoved"),
)
SHIFTS = {  # labels of the shift and of its causes
    "shift": "shift",
    "own_weights": "own weights",
    "inherited": "inherited from earlier components",
    "scale": "the scale of the norm",
    "read_out": "unembedding",
}


class Snapshot(dict[str, Any]):
    """One record of a probe with its tensors, which are also items if no field has their name."""

    def __init__(self, record: Fields, tensors: Fields = EMPTY, settings: Fields = EMPTY) -> None:
        super().__init__(record)
        self.tensors, self.settings = tensors, settings
        for name, tensor in tensors.items():
            self.setdefault(name, tensor)

    def read(self, column: Column) -> tuple[Any, Any, Any]:
        """Return the values of a column and the ends of their intervals, None if unknown."""
        name, *index = (column,) if isinstance(column, str) else column
        tensor, _, how = name.partition(":")
        if how and tensor in self.tensors:
            found = REDUCED[how](self.tensors[tensor])
        elif name in COMPUTED:
            found = COMPUTED[name](self)
        else:
            found = tuple(self.get(name + end) for end in ENDS)
            found = (self.get(f"{name}_mean"), *found[1:]) if found[0] is None else found
        parts = found if isinstance(found, tuple) else (found, None, None)
        parts = [x.tolist() if isinstance(x, Tensor) else x for x in parts]
        for i in index:
            parts = [None if x is None else x[i] for x in parts]
        return tuple(parts) if None not in parts else (parts[0], None, None)

    def slots(self, n: int) -> list[str]:
        return self.get("slots") or [str(i) for i in range(n)]


def read_snapshots(run: Run, name: str | None) -> list[Snapshot]:
    """Return the records of a probe; metrics of RunHealth get intervals over the samples."""
    if name is None:
        return []
    records, probes = run.records(name), run.store.read_suite()["probes"]
    settings = next((probe for probe in probes if probe["name"] == name), {})
    if settings.get("kind") == "RunHealth":
        ends = sample_ends(run)[0]
        for record in records:
            found = ends.get(record["phase"], {})
            record |= {k: x for k, x in found.items() if k.rpartition("_")[0] in record}
    stored = settings.get("kind") in STORE_TENSORS
    read = lambda record: run.tensors(name, record["phase"]) if stored else EMPTY
    return [Snapshot(record, read(record), settings) for record in records]


def short_site(site: str) -> str:
    """Return a hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


REDUCED: Mapping[str, Callable[[Tensor], Any]] = {
    "mean": mean_with_ends,
    "sum0": lambda t: t.sum(0),
    "sum1": lambda t: t.sum(1),
    "first": lambda t: t[:, 0, :MOST_SLOTS],
    "moved": lambda t: [t.abs().sum().item() / 2, None],
}


def _cause_sums(at: Snapshot) -> tuple[Any, ...]:
    known = [at.tensors[name].sum(0) for name in SHIFTS if name in at.tensors]
    return mean_with_ends(torch.stack(known))


def _effects(at: Snapshot) -> dict[str, float]:
    sums = at.tensors["terms"].flatten(1).sum(1).tolist()
    whole = {name: at.tensors[name].sum().item() for name in ("momentum", "decay")}
    return dict(zip(at["term_names"], sums, strict=True)) | whole


def _defined_r2(at: Snapshot) -> tuple[Any, ...]:
    """Return R2 by site and slot with its ends, None if it is not defined."""
    grid, *ends = at.read("r2")
    pairs = zip(grid or (), at.get("defined") or (), strict=True)
    known = [[x if real else None for x, real in zip(*row, strict=True)] for row in pairs]
    return known or None, *ends


def _accuracies(at: Snapshot) -> tuple[Any, ...]:
    _, *ends = at.read("accuracy")
    return [*at["accuracy"], *filter(None, [at.get("bayes_accuracy")])], *ends


def _sites_and_bayes(at: Snapshot) -> list[str]:
    return [*map(short_site, at["sites"]), *["Bayes' rule"] * bool(at.get("bayes_accuracy"))]


def _informed_slots(at: Snapshot) -> list[str]:
    names = at.slots(len(at["accuracy"][0]))
    flags = at.get("informed") or [False] * len(names)
    return [name + " *" * flag for name, flag in zip(names, flags, strict=True)]


def _active(at: Snapshot) -> list[str]:
    pairs = zip(at["tokens"], at["token_activations"], strict=True)
    named = (zip(*pair, strict=True) for pair in pairs)
    return [", ".join(f"{word!r} {x:.3g}" for word, x in row) for row in named]


COMPUTED: Mapping[str, Callable[[Snapshot], Any]] = {
    "cause_sums": _cause_sums,
    "causes": lambda at: [label for name, label in SHIFTS.items() if name in at.tensors],
    "by_key": lambda at: sum(at.tensors[x] for x in ("qk", "ov", "wo")).mean(-1).flatten(0, 1),
    "kl_slots": lambda at: at.slots(len(at["kl"])),
    "short_sites": lambda at: list(map(short_site, at["sites"])),
    "short_tuned_sites": lambda at: list(map(short_site, at.get("tuned_sites") or ())),
    "causes_of_step": lambda at: list(_effects(at)),
    "effects": lambda at: list(_effects(at).values()),
    "sides": lambda at: ["policy", "reference"],
    "defined_r2": _defined_r2,
    "sites_and_bayes": _sites_and_bayes,
    "informed_slots": _informed_slots,
    "accuracies": _accuracies,
    "refitted": lambda at: [a - b for a, b in zip(at["accuracy_frozen"], at["gap"], strict=True)],
    "active": _active,
    "layers": lambda at: [f"L{i} mlp" for i in range(len(at["mlp"]))],
}


@dataclass(frozen=True)
class PictureRow:
    """One row of the table of pictures; `draw` returns None without the fields."""

    probe: str
    kind: str
    title: str  # with names of fields or settings in braces
    labels: Sequence[str]  # of rows and columns; of a strip: scale, mask and number of texts
    columns: Mapping[str, Column]
    unit: str

    def draw(self, at: Snapshot) -> Drawn | None:
        found = {label: at.read(column) for label, column in self.columns.items()}
        known = {label: column for label, column in found.items() if column[0] is not None}
        if not known:
            return None
        draw = {"table": draw_table, "rows": draw_rows, "strip": draw_strip, "bars": draw_bars}
        title = f"phase {at['phase']}: {self.title.format_map({**at.settings, **at})}"
        return draw.get(self.kind, draw_matrix)(self, at, known, title)


Known = Mapping[str, tuple[Any, Any, Any]]  # values and ends of the columns of a record, by label


def draw_bars(row: PictureRow, at: Snapshot, known: Known, title: str) -> Picture:
    """Return bars of a record, of many those of the largest sizes."""
    n, note = len(next(iter(known.values()))[0]), ""
    labels = at.read(row.labels[0])[0] or range(n)
    top = MOST_SLOTS if row.labels[0].endswith("slots") else MOST_ROWS
    sizes = [max(abs(x[i] or 0.0) for x, *_ in known.values()) for i in range(n)]
    kept = sorted(sorted(range(n), key=lambda i: -sizes[i])[:top])
    pick = lambda values: [values[i] for i in kept]
    ends = {name: (pick(a), pick(b)) for name, (_, a, b) in known.items() if a is not None}
    if ends:
        note = "Whiskers: 95 % intervals. "
    if rest := set(range(n)) - set(kept):
        sums = [f"{k} {sum(x[i] or 0.0 for i in rest):+.3g}" for k, (x, *_) in known.items()]
        note += f"{len(rest)} others sum to {', '.join(sums)}."
    series = {name: pick(x) for name, (x, *_) in known.items()}
    return bars(list(map(str, pick(labels))), series, title, row.unit, ends, note)


def draw_matrix(row: PictureRow, at: Snapshot, known: Known, title: str) -> Picture:
    """Return a grid of a record; of values with intervals, a note names the largest of all cells.

    None in the grid stays blank.
    """
    ((grid, low, high),), note = known.values(), ""
    rows, cols = (at.read(name)[0] or () for name in row.labels)
    first = enumerate(grid[: len(low or ())])
    if cells := [(x, i, j) for i, line in first for j, x in enumerate(line) if x is not None]:
        largest, i, j = max(cells)
        col = cols[j] if cols else j
        note = f"Largest of the {len(cells)} compared: {formatted(largest, low[i][j], high[i][j])} "
        note += f"at {rows[i]}, {col} (95 % interval of this cell alone)."
    ends = low or (), high or ()
    return heatmap(grid, rows, cols, title, *SCALES[row.kind], row.unit, ends, note)


def draw_table(row: PictureRow, at: Snapshot, known: Known, title: str) -> Table | None:
    """Return columns of a record as a table with intervals in brackets."""
    cells = [
        x if low is None else [formatted(*each) for each in zip(x, low, high, strict=True)]
        for x, low, high in known.values()
    ]
    rows = list(zip(*cells, strict=True))
    return Table(list(known), rows, title) if rows else None


def draw_rows(row: PictureRow, at: Snapshot, known: Known, title: str) -> Table | None:
    """Return a list of dicts as a table, by the size of a field if the labels name one."""
    ((dicts, *_),) = known.values()
    for order in row.labels:
        dicts = sorted(dicts, key=lambda each: -abs(each[order]))
    note = f"The {MOST_ROWS} largest of {len(dicts)}." if len(dicts) > MOST_ROWS else ""
    return dict_table(dicts[:MOST_ROWS], title, note) if dicts else None


def dict_table(dicts: Sequence[Fields], title: str = "", note: str = "") -> Table:
    """Return the numbers and words of dicts as a table; ends of intervals become brackets."""
    cells = [(k, x) for row in dicts for k, x in row.items() if k != "prefix_len"]
    nested = {k for k, x in cells if isinstance(x, list | dict | Tensor)}
    flat = dict.fromkeys(k for k, _ in cells if k not in nested)
    ends = {k: (f"{k}_low", f"{k}_high") for k in flat if f"{k}_low" in flat}
    names = [k for k in flat if not any(k in pair for pair in ends.values())]
    read = lambda row, k: formatted(*map(row.get, (k, *ends[k]))) if k in ends else row.get(k)
    quoted = lambda x: repr(x) if isinstance(x, str) and x != x.strip() else x
    rows = [[quoted(read(row, k)) for k in names] for row in dicts]
    return Table([name.replace("_", " ") for name in names], rows, title, note)


def draw_strip(row: PictureRow, at: Snapshot, known: Known, title: str) -> Strip:
    """Return generated tokens with their values, of all or the largest texts."""
    ((unit, (found, *_)),), (kind, mask, *top) = known.items(), row.labels
    rewards, lines = at.get("rewards"), []
    for i, values in enumerate(masked(found, at.read(mask)[0])):
        prompt = [None] * (len(at["tokens"][i]) - len(values))
        label = f"text {i}" + (f", reward {rewards[i]:.4g}" if rewards else "")
        lines.append((label, at["tokens"][i], prompt + values))
    if top:
        lines.sort(key=lambda line: -sum(abs(x or 0.0) for x in line[2]))
    return Strip(lines[: int(*top) or None], title, unit, kind)


def masked(rows: Sequence[Sequence[Any]], mask: Sequence[Sequence[bool]]) -> list[list[Any]]:
    """Return rows with None where the mask is False."""
    pairs = (zip(*each, strict=True) for each in zip(rows, mask, strict=True))
    return [[x if real else None for x, real in row] for row in pairs]


def curves_over(
    records: Sequence[Snapshot] | Mapping[str, Sequence[Snapshot]],
    title: str,
    columns: Mapping[str, Column],
    unit: str = "",
    note: str = "",
) -> Picture | None:
    """Return curves of columns over the records of all, or of each by its label, or None."""
    series, bands = {}, {}
    for label, column in columns.items():
        lines = records[label] if isinstance(records, Mapping) else records
        found = [at.read(column) for at in lines] or [(None, None, None)]
        values, low, high = zip(*found, strict=True)
        if any(x is not None for x in values):
            series[label] = [at["phase"] for at in lines], values
            if any(None not in pair for pair in zip(low, high, strict=True)):
                bands[label] = low, high
    if len(series) == 1 < len(columns):
        title += f": {next(iter(series))}"
    return curves(series, title, "phase", unit, bands, note=note) if series else None
