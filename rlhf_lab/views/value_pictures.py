"""Pictures of value by layer: linear readers, both lenses, and estimates of the policy's value."""

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.probes.tuned_lens import PENALTIES
from rlhf_lab.views import html
from rlhf_lab.views.intervals import HOW, bracketed
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import Ends, bars, curves, heatmap
from rlhf_lab.views.selection import best_cell, held_out

_Parts = list[Picture | str]
SHOWN_STATES = 60
PREFIXES_SHOWN = 32


def value_lens_parts(run: Run, name: str, records: Sequence[dict[str, Any]]) -> _Parts:
    """Everything of the first and of the last record, or of the only one."""
    parts: _Parts = []
    for record in [*records[:1], *records[1:][-1:]]:
        tensors = run.tensors(name, record["phase"])
        parts += _readers(record)
        parts += _lenses(record, tensors)
        if "correlation" in record:
            parts += _policy(record, tensors)
        parts += _penalties(record, tensors)
    return parts


def short_site(site: str) -> str:
    """A hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


def _readers(record: dict[str, Any]) -> _Parts:
    """R2 of linear readers by layer and position, and the head's correlation."""
    if "r2" not in record:
        return []
    sites, slots = [short_site(site) for site in record["sites"]], record["slots"]
    grid = [
        [x if there else None for x, there in zip(row, flags, strict=True)]
        for row, flags in zip(record["r2"], record["defined"], strict=True)
    ]
    of = record.get("r2_against", "value")
    title = f"phase {record['phase']}: R2 of {of}, read linearly, held out{held_out(record)}"
    if len(slots) == 1:  # all positions pooled: one number per layer
        series = {"R2": (list(range(len(sites))), [row[0] for row in grid])}
        bands = {}
        if "r2_low" in record:
            low, high = ([row[0] for row in record[f"r2_{end}"]] for end in ("low", "high"))
            bands = {"R2": (low, high)}
        picture = curves(series, title, f"site, from {sites[0]} to {sites[-1]}", "R2", bands)
    else:
        picture = heatmap(grid, sites, slots, title, limits=(0.0, 1.0))
    parts: _Parts = [picture]
    parts.append(best_cell(record, "r2", grid, sites, slots))
    if "head_correlation" in record:
        there = [i for i, x in enumerate(record["head_correlation"]) if x is not None]
        n = record["head_n"]
        title = f"phase {record['phase']}: correlation of the head with {of}, n = {n}"
        names = [slots[i] for i in there]
        parts.append(_with_whiskers(record, "head_correlation", there, names, title))
    return parts


def _with_whiskers(
    record: dict[str, Any], field: str, which: Sequence[int], names: Sequence[str], title: str
) -> Picture | str:
    """Some entries of a field as bars with their intervals."""
    if not which:
        return f"<p>{escape(title)}: undefined, since one of the two does not vary.</p>"
    values, ends = _some(record[field], which), _ends_of(record, field, which)
    whiskers = {} if ends is None else {HOW: ends}
    return bars(names, {HOW: values}, title, whiskers=whiskers)


def _some(values: Sequence[Any], which: Sequence[int]) -> list[Any]:
    return [values[i] for i in which]


def _ends_of(record: dict[str, Any], field: str, which: Sequence[int]) -> Ends | None:
    if f"{field}_low" not in record:
        return None
    return _some(record[f"{field}_low"], which), _some(record[f"{field}_high"], which)


def _lenses(record: dict[str, Any], tensors: dict[str, Tensor]) -> _Parts:
    """The lens of the first sequence, layer by layer, and how far each lens is the value."""
    sites = [short_site(site) for site in record["sites"]]
    what = f"phase {record['phase']}: what the head says of each layer, sequence 1"
    parts: _Parts = [_lens(tensors["lens"], sites, record, f"{what}, raw lens")]
    if "tuned_sites" not in record:
        return parts
    tuned = [short_site(site) for site in record["tuned_sites"]]
    parts.append(_lens(tensors["lens_tuned"], tuned, record, f"{what}, tuned lens"))
    rows = [
        [site, *(_figure(record, f"{lens}_r2", i) for lens in ("raw", "tuned"))]
        for i, site in enumerate(tuned)
    ]
    note = (
        f"<p>R2 of both lenses as a forecast of the model's own value, on "
        f"{record['lens_held_out']} held-out sequences ({HOW}). The tuned "
        "lens reads what an affine map makes of the layer; the raw lens, the layer itself.</p>"
    )
    return [*parts, note, html.table(["layer", "raw lens", "tuned lens"], rows)]


def _lens(
    lens: Float[Tensor, "site keep seq"], sites: list[str], record: dict[str, Any], title: str
) -> Picture:
    shown = lens[:, 0, :SHOWN_STATES]
    slots = record.get("slots", [])
    states = slots if len(slots) == lens.shape[2] else [str(i) for i in range(lens.shape[2])]
    return heatmap(shown, sites, states[: shown.shape[1]], title, "diverging")


def _figure(record: dict[str, Any], field: str, at: int) -> str:
    """A number with its interval."""
    low, high = (record.get(f"{field}_{end}", {at: None})[at] for end in ("low", "high"))
    return bracketed(record[field][at], low, high)


def _policy(record: dict[str, Any], tensors: dict[str, Tensor]) -> _Parts:
    """The policy's value behind each prefix, the grammar's, and how all estimates go with it."""
    estimates, n = record["estimates"], len(record["prefix_rows"])
    where = record["slots"][record["prefix_pos"]] if "slots" in record else record["prefix_pos"]
    value, error = tensors["v_policy"], tensors["v_policy_se"]
    order = value.argsort()[:PREFIXES_SHOWN]
    half = 1.96 * error[order]
    series = {"policy": value[order].tolist()}
    means = f"the policy's value averages {value.mean():.3f}"
    if "grammar" in estimates:
        grammar = tensors["estimates"][:, estimates.index("grammar")]
        series["grammar"] = grammar[order].nan_to_num().tolist()
        means += f", the grammar's {grammar.nanmean():.3f}"
    names = [f"text {record['prefix_rows'][i]}" for i in order.tolist()]
    title = f"phase {record['phase']}: value behind {where}, by continuations, n = {n}"
    ends = (value[order] - half).tolist(), (value[order] + half).tolist()
    parts: _Parts = [bars(names, series, title, whiskers={"policy": ends})]
    parts.append(
        f"<p>Over {n} prefixes, {escape(means)}; each is of {record['continuations']} "
        f"continuations, with a standard error of {error.mean():.3f} on average (whiskers: 1.96 of "
        f"them). {record['reliability']:.0%} of the variance between prefixes is no noise, so that "
        f"a perfect estimate correlates by about {record['reliability'] ** 0.5:.2f}.</p>"
    )
    there = [i for i, x in enumerate(record["correlation"]) if x is not None]
    labels = [" ".join(map(short_site, estimates[i].split(" "))) for i in there]
    title = f"phase {record['phase']}: correlation with {record['correlation_against']}, n = {n}"
    return [*parts, _with_whiskers(record, "correlation", there, labels, title)]


def _penalties(record: dict[str, Any], tensors: dict[str, Tensor]) -> _Parts:
    """What each penalty leaves on texts that were held out of the fit, and which was chosen."""
    chosen = {
        "readers": (record.get("ridge"), tensors.get("ridge_errors")),
        "translators": (record.get("tuned_ridge"), tensors.get("tuned_ridge_errors")),
    }
    found = {
        f"{name} (chosen: {ridge:g})": errors.flatten(0, -2).nanmean(0)
        for name, (ridge, errors) in chosen.items()
        if ridge is not None and errors is not None
    }
    if not found:
        return []
    rows = [
        [f"{ridge:g}", *(_share(errors[i]) for errors in found.values())]
        for i, ridge in enumerate(PENALTIES)
    ]
    note = (
        f"<p>Share of the variance that is left on texts held out of the fit, by penalty, of "
        f"{len(PENALTIES)} compared:</p>"
    )
    return [note, html.table(["ridge", *found], rows)]


def _share(x: Float[Tensor, ""]) -> str:
    return f"{x.item():.4f}" if torch.isfinite(x) else "undefined"
