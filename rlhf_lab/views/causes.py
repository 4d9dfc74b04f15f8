"""The section of interventions: own weights and patched effects, and the form for another one."""

import shlex
from collections.abc import Mapping
from html import escape
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.probes import Run
from rlhf_lab.views.jobs import PatchRequest, checkpoint_names, stored_interventions
from rlhf_lab.views.pictures import Html, Picture, failed_check
from rlhf_lab.views.plots import bars
from rlhf_lab.views.probe_pictures import in_grids

METHODS = ("own weights", "patched in", "patched out")


def interventions_html(run: Run, is_served: bool) -> str:
    """Return the stored interventions, and a place for a form or, in a file, a command."""
    found = in_grids(part for result in stored_interventions(run) for part in _result(result))
    names = checkpoint_names(run)
    if len(names) < 2:
        return found or "<p>The run has fewer than two checkpoints.</p>"
    if is_served:
        return found + f'<div id="job" data-names="{" ".join(names)}"></div>'
    words = PatchRequest(names[0], names[-1], "loved", "hated").command(run.path)
    command = escape(visible(shlex.join(["python", "-m", "rlhf_lab", *words])))
    note = f"<p>Another one: <code>python -m rlhf_lab view</code>, or <code>{command}</code></p>"
    return found + note


def _result(result: Mapping[str, Any]) -> list[Html | Picture]:
    """Return failed checks, and one picture with own weights and patched effects on one axis."""
    request, effects, parts = result["request"], result["effects"], result["parts"]
    words = " − ".join(map(str, result["words"]))
    series, ends = {}, {}
    for method in METHODS:
        rows = effects.get(method)
        if rows:
            series[method] = [row[0] for row in rows]
            if all(len(row) == 3 for row in rows):
                ends[method] = [row[1] for row in rows], [row[2] for row in rows]
    where = f" after {request['length']} tokens" if request.get("length") else ""
    last = f"last (phase {result['last_phase']})" if "last_phase" in result else "last"
    base, tuned = (last if x == "last" else x for x in (request["base"], request["tuned"]))
    title = f"{words}{where}, checkpoint {base} to {tuned}"
    failed = [name for name, ok in result.get("checks", {}).items() if not ok]
    note = f"{summarize_intervention(result)} n = {result['n']} texts: {result.get('text', '')}."
    return [*map(failed_check, failed), bars(parts, series, title, "logits", ends, note)]


def summarize_intervention(result: Mapping[str, Any]) -> str:
    """Return the component with the largest patched effect, and whether own weights agree."""
    effects, parts = result["effects"], result["parts"]
    largest = {
        method: max(range(len(parts)), key=lambda i: abs(effects[method][i][0]))
        for method in ("own weights", "patched in")
        if effects.get(method)
    }
    if len(largest) < 2:
        return ""
    by_weights, patched = largest.values()
    agree = "also" if by_weights == patched else "not"
    also = f"It is {agree} the largest by own weights"
    also += "." if by_weights == patched else f" ({parts[by_weights]} is)."
    return (
        f"{parts[patched]} patched in brings {effects['patched in'][patched][0]:+.3f} of "
        f"{result['shift'][0]:+.3f} logits. {also}"
    )
