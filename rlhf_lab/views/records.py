"""Records of probes: their fields, and what is computed from them."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views.intervals import mean_with_ends, sample_ends

MOST_SLOTS = 60
ENDS = ("", "_low", "_high")
# the name of a field, whose interval is in NAME_low and NAME_high; three names; or a function
Column = str | tuple[str, ...] | Callable[["Snapshot"], Any]
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
        """Return a field or tensor, or None if the record has neither."""
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
        """Return the names of the slots, or n positions."""
        return self.get("slots") or [str(i) for i in range(n)]

    def title(self, text: str) -> str:
        """Return a title with the fields or settings in braces; {number} counts steps from 1."""
        probes = self.run.store.read_suite()["probes"] if "{" in text else []
        settings = next((probe for probe in probes if probe["name"] == self.name), {})
        fields = {"number": self.record.get("step", 0) + 1, **settings, **self.record}
        return f"phase {self.phase}: {text.format_map(fields)}"


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

    def read(at: Snapshot) -> tuple[Any, ...]:
        found = [at.get(field + end) for end in ENDS]
        for i in index:
            found = [None if x is None else x[i] for x in found]
        return tuple(found)

    return read


def reduced(name: str, how: str) -> Callable[[Snapshot], Any]:
    """Return a column: what `REDUCED` makes of a tensor, or None without the tensor."""
    return lambda at: REDUCED[how](at.tensors[name]) if name in at.tensors else None


REDUCED: Mapping[str, Callable[[Tensor], Any]] = MappingProxyType(
    {
        "mean": mean_with_ends,
        "ends": lambda t: t.unbind(-1),
        "sum0": lambda t: t.sum(0),
        "sum1": lambda t: t.sum(1),
        "last": lambda t: t[..., -1],
        "first": lambda t: t[:, 0, :MOST_SLOTS],
        "moved": lambda t: [t.abs().sum().item() / 2, None],
    }
)


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
    names = at.slots(len(at["accuracy"][0]))
    flags = at.get("informed") or [False] * len(names)
    return [name + " *" * flag for name, flag in zip(names, flags, strict=True)]


def _active(at: Snapshot) -> list[str]:
    pairs = zip(at["tokens"], at["token_activations"], strict=True)
    named = (zip(*pair, strict=True) for pair in pairs)
    return [", ".join(f"{word!r} {x:.3g}" for word, x in row) for row in named]


def _sites(name: str) -> Callable[[Snapshot], Sequence[str]]:
    return lambda at: list(map(short_site, at.get(name) or ()))


COMPUTED: Mapping[str, Callable[[Snapshot], Any]] = MappingProxyType(
    {
        **{f"k{i}_sd": (lambda at, i=i: [x**0.5 for x in at[f"k{i}_var"]]) for i in (1, 2, 3)},
        "cause_sums": _cause_sums,
        "causes": lambda at: [label for name, label in SHIFTS.items() if name in at.tensors],
        "by_key": lambda at: sum(at.tensors[x] for x in ("qk", "ov", "wo")).mean(-1).flatten(0, 1),
        "kl_slots": lambda at: at.slots(len(at["kl"])),
        "sites": _sites("sites"),
        "tuned_sites": _sites("tuned_sites"),
        "terms": lambda at: [term.replace("_", " ") for term in at["terms"]],
        "causes_of_step": lambda at: list(_effects(at)),
        "effects": lambda at: list(_effects(at).values()),
        "sides": lambda at: ["policy", "reference"],
        "defined_r2": _defined_r2,
        "counted_slots": lambda at: [
            f"{slot}, n = {n}"
            for slot, n in zip(at.get("slots") or at["positions"], at["n"], strict=True)
        ],
        "sites_and_bayes": lambda at: [
            *map(short_site, at["sites"]),
            *["Bayes' rule"] * (at.get("bayes_accuracy") is not None),
        ],
        "informed_slots": _informed_slots,
        "accuracies": _accuracies,
        "active": _active,
        "layers": lambda at: [f"L{i} mlp" for i in range(len(at["mlp"]))],
    }
)
