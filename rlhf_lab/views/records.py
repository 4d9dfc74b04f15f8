"""Records of probes: their fields, what is computed from them, and pictures of both."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views.intervals import bracketed, mean_with_ends, sample_ends
from rlhf_lab.views.marks import Kind, Names
from rlhf_lab.views.pictures import Picture, Table
from rlhf_lab.views.plots import Limits, bars, curves, heatmap
from rlhf_lab.views.tokens import Strip

MOST_ROWS, MOST_SLOTS = 24, 60  # of bars or a table; of positions
ENDS = ("", "_low", "_high")
# the name of a field, whose interval is in NAME_low and NAME_high; three names; or a function
Column = str | tuple[str, ...] | Callable[["Snapshot"], Any]
Columns = Mapping[str, Column]
Scale = tuple[Kind, Limits | None]
SHIFTS = {  # labels of the shift and of its causes
    "shift": "shift",
    "own_weights": "own weights",
    "inherited": "inherited from earlier components",
    "scale": "the scale of the norm",
    "read_out": "unembedding",
}


class Snapshot:
    """One record of a probe with its tensors."""

    def __init__(self, run: Run, name: str, record: Mapping[str, Any]) -> None:
        self.run, self.name, self.record, self.phase = run, name, record, record["phase"]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors stored with the record, if it has some."""
        has_file = self.run.store.tensor_path(self.name, self.phase).is_file()
        return self.run.tensors(self.name, self.phase) if has_file else {}

    def __getitem__(self, name: str) -> Any:
        """Return a field of the record, or a tensor as lists."""
        is_tensor = name not in self.record and name in self.tensors
        return self.tensors[name].tolist() if is_tensor else self.record[name]

    def get(self, name: str) -> Any:
        return self[name] if name in self.record or name in self.tensors else None

    def read(self, column: Column) -> tuple[Any, Any, Any]:
        """Return the values of a column and the ends of their intervals, None if unknown."""
        if callable(column):
            found = column(self)
        else:
            names = [column + end for end in ENDS] if isinstance(column, str) else column
            found = tuple(map(self.get, names))
        parts = found if isinstance(found, tuple) else (found, None, None)
        parts = [x.tolist() if isinstance(x, Tensor) else x for x in parts]
        return tuple(parts) if None not in parts else (parts[0], None, None)

    def slots(self, n: int) -> list[str]:
        return self.get("slots") or [str(i) for i in range(n)]

    def title(self, text: str) -> str:
        """Return a title with the fields or settings in braces."""
        probes = self.run.store.read_suite()["probes"] if "{" in text else []
        settings = next((probe for probe in probes if probe["name"] == self.name), {})
        return f"phase {self.phase}: {text.format_map({**settings, **self.record})}"


def read_snapshots(run: Run, name: str | None) -> list[Snapshot]:
    """Return the records of a probe; metrics of RunHealth get intervals over the samples."""
    records = run.records(name) if name else []
    if records and run.kinds().get(name) == "RunHealth":
        ends = sample_ends(run)[0]
        for record in records:
            found = ends.get(record["phase"], {})
            record |= {k: x for k, x in found.items() if k.rpartition("_")[0] in record}
    return [Snapshot(run, name, record) for record in records]


def short_site(site: str) -> str:
    """Return a hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


def cell(field: str, *index: int) -> Callable[[Snapshot], tuple[Any, ...]]:
    """Return a column: one entry of a field of lists, and its ends."""
    pick = lambda x: reduce(lambda part, i: None if part is None else part[i], index, x)
    return lambda at: tuple(pick(at.get(field + end)) for end in ENDS)


def reduced(name: str, how: str) -> Callable[[Snapshot], Any]:
    """Return a column: what `REDUCED` makes of a tensor, or None without the tensor."""
    return lambda at: REDUCED[how](at.tensors[name]) if name in at.tensors else None


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


def defined_r2(at: Snapshot) -> tuple[Any, ...]:
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
    "sites": lambda at: list(map(short_site, at["sites"])),
    "tuned_sites": lambda at: list(map(short_site, at.get("tuned_sites") or ())),
    "causes_of_step": lambda at: list(_effects(at)),
    "effects": lambda at: list(_effects(at).values()),
    "sides": lambda at: ["policy", "reference"],
    "defined_r2": defined_r2,
    "sites_and_bayes": _sites_and_bayes,
    "informed_slots": _informed_slots,
    "accuracies": _accuracies,
    "active": _active,
    "layers": lambda at: [f"L{i} mlp" for i in range(len(at["mlp"]))],
}


def _known(at: Snapshot, columns: Columns) -> dict[str, tuple[Any, Any, Any]]:
    found = {label: at.read(column) for label, column in columns.items()}
    return {label: column for label, column in found.items() if column[0] is not None}


def field_bars(
    at: Snapshot, title: str, labels: Names, columns: Columns, unit: str = "", top: int = MOST_ROWS
) -> Picture | None:
    """Return bars of a record, of many those of the largest sizes; None without the fields."""
    known, note = _known(at, columns), ""
    if not known or not labels:
        return None
    sizes = [max(abs(x[i] or 0.0) for x, *_ in known.values()) for i in range(len(labels))]
    kept = sorted(sorted(range(len(labels)), key=lambda i: -sizes[i])[:top])
    pick = lambda values: [values[i] for i in kept]
    ends = {name: (pick(a), pick(b)) for name, (_, a, b) in known.items() if a is not None}
    if ends:
        note = "Whiskers: 95 % intervals."
    if rest := set(range(len(labels))) - set(kept):
        sums = [f"{k} {sum(x[i] or 0.0 for i in rest):+.3g}" for k, (x, *_) in known.items()]
        note += f" {len(rest)} others sum to {', '.join(sums)}."
    series = {name: pick(x) for name, (x, *_) in known.items()}
    return bars(list(map(str, pick(labels))), series, at.title(title), unit, ends, note)


def matrix(
    at: Snapshot, title: str, values: Column, rows: Names, cols: Names, unit: str, scale: Scale
) -> Picture | None:
    """Return a grid of a record, or None without the field; None in it stays blank.

    If the values have intervals, a note names the largest of all cells.
    """
    (grid, low, high), note = at.read(values), ""
    if grid is None:
        return None
    first = enumerate(grid[: len(low or ())])
    cells = [(x, i, j) for i, row in first for j, x in enumerate(row) if x is not None]
    if cells:
        largest, i, j = max(cells)
        note = f"Largest of the {len(cells)} compared: {bracketed(largest, low[i][j], high[i][j])} "
        note += f"at {rows[i]}, {cols[j]} (95 % interval of this cell alone)."
    ends = (low or (), high or ())
    return heatmap(grid, rows, cols, at.title(title), *scale, unit, ends, note)


def field_table(at: Snapshot, title: str, columns: Columns) -> Table | None:
    """Return columns of a record as a table with intervals in brackets, or None."""
    known = _known(at, columns)
    cells = [
        x if low is None else [bracketed(*each) for each in zip(x, low, high, strict=True)]
        for x, low, high in known.values()
    ]
    rows = list(zip(*cells, strict=True))
    return Table(list(known), rows, at.title(title)) if rows else None


def row_table(at: Snapshot, title: str, field: str, order: str = "") -> Table | None:
    """Return a list of dicts of a record as a table, by size of `order`, without nested values."""
    found = at.get(field) or ()
    ranked = sorted(found, key=lambda row: -abs(row[order])) if order else found
    note = f"The {MOST_ROWS} largest of {len(found)}." if len(found) > MOST_ROWS else ""
    return dict_table(ranked[:MOST_ROWS], at.title(title), note) if found else None


def dict_table(dicts: Sequence[Mapping[str, Any]], title: str = "", note: str = "") -> Table:
    """Return the numbers and words of dicts as a table; ends of intervals become brackets."""
    cells = [(k, x) for row in dicts for k, x in row.items() if k != "prefix_len"]
    nested = {k for k, x in cells if isinstance(x, list | dict)}
    flat = dict.fromkeys(k for k, _ in cells if k not in nested)
    ends = {k: (f"{k}_low", f"{k}_high") for k in flat if f"{k}_low" in flat}
    names = [k for k in flat if not any(k in pair for pair in ends.values())]
    read = lambda row, k: bracketed(*map(row.get, (k, *ends[k]))) if k in ends else row.get(k)
    quoted = lambda x: repr(x) if isinstance(x, str) and x != x.strip() else x
    rows = [[quoted(read(row, k)) for k in names] for row in dicts]
    return Table([name.replace("_", " ") for name in names], rows, title, note)


def strip(
    at: Snapshot,
    title: str,
    values: Column,
    unit: str,
    kind: Kind,
    mask: str,
    top: int | None = None,
) -> Strip | None:
    """Return generated tokens with their values, of all or the `top` largest texts, or None."""
    found, rewards, rows = at.read(values)[0], at.get("rewards"), []
    if found is None:
        return None
    for i, pairs in enumerate(zip(found, at[mask], strict=True)):
        known = [x if real else None for x, real in zip(*pairs, strict=True)]
        prompt = [None] * (len(at["tokens"][i]) - len(known))
        label = f"text {i}" + (f", reward {rewards[i]:.4g}" if rewards else "")
        rows.append((label, at["tokens"][i], prompt + known))
    if top:
        rows = sorted(rows, key=lambda row: -sum(abs(x or 0.0) for x in row[2]))[:top]
    return Strip(rows, at.title(title), unit, kind)


def curves_over(
    records: Sequence[Snapshot] | Mapping[str, Sequence[Snapshot]],
    title: str,
    columns: Columns,
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
            series[label] = [at.phase for at in lines], values
            if any(None not in pair for pair in zip(low, high, strict=True)):
                bands[label] = low, high
    return curves(series, title, "phase", unit, bands, note=note) if series else None
