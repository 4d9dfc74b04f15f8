"""The section of interventions: own weights and patched effects, and the form for another one."""

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.probes import Run
from rlhf_lab.views.html import failed_check
from rlhf_lab.views.jobs import (
    N_TEXTS,
    SECONDS_PER_JOB,
    PatchRequest,
    checkpoint_names,
    stored_interventions,
)
from rlhf_lab.views.pictures import Bars
from rlhf_lab.views.probe_pictures import fragment, in_grids

METHODS = ("own weights", "patched in", "patched out")


def interventions_html(run: Run, is_served: bool) -> str:
    """Return the stored interventions, and a form on a served page or a command in a file."""
    found = [in_grids(part for result in stored_interventions(run) for part in _result(result))]
    names = checkpoint_names(run)
    if len(names) < 2:
        return "".join(found) or "<p>The run has fewer than two checkpoints.</p>"
    last = names[-1]
    if not is_served:
        words = PatchRequest(names[0], last, "loved", "hated").command(run.path)
        command = escape(visible(shlex.join(["python", "-m", "rlhf_lab", *words])))
        note = (
            f"<p>Another one: <code>python -m rlhf_lab view</code>, or <code>{command}</code></p>"
        )
        return "".join(found) + note
    return "".join(found) + _form(names)


def _form(names: Sequence[str]) -> str:
    option = lambda name, chosen: f"<option{' selected' * (name == chosen)}>{name}</option>"
    select = lambda id, chosen: (
        f'<select id="{id}">{"".join(option(name, chosen) for name in names)}</select>'
    )
    return (
        f'<div id="job" class="js" hidden><label>from {select("job-base", names[0])}</label> '
        f"<label>to {select('job-tuned', names[-1])}</label> "
        '<label>word <input id="job-up" value="loved" size="9"></label> '
        '<label>minus <input id="job-down" value="hated" size="9"></label> '
        '<label>after tokens <input id="job-length" type="number" min="1" placeholder="all">'
        '</label> <button id="job-start">Patch</button> '
        '<button id="job-cancel" hidden>Cancel</button> <output id="job-state"></output>'
        f'<p class="note">Price: two checkpoints, {N_TEXTS} texts, two forward passes per '
        f"component (6 CPU seconds on Reel), at most {SECONDS_PER_JOB} s, in a process of low "
        "priority. The result is stored in the run.</p></div>"
    )


def _result(result: Mapping[str, Any]) -> list[str]:
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
    tags = map(failed_check, failed)
    note = f"{summarize_intervention(result)} n = {result['n']} texts: {result.get('text', '')}."
    return [*tags, fragment(Bars(parts, series, title, "logits", ends, note))]


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
