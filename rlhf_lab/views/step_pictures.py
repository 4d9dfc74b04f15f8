"""Pictures of StepInfluence: tokens coloured by what they moved, and parts of the model by slot."""

from collections.abc import Sequence
from html import escape
from typing import Any

from torch.nn import functional

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import heatmap
from rlhf_lab.views.tokens import color_key, largest, tokens_html

MOST_SAMPLES = 3
EFFECTS = ("f_before", "f_after", "linear", "remainder", "kappa")


def step_influence_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """The step's parts in every recorded phase; of the last, its tokens and its map by slot."""
    last = records[-1]
    found, target = run.tensors(name, last["phase"]), last["target"].replace("_", " ")
    parts: list[Picture | str] = [_table(run, name, records)]
    if "note" in last:
        parts.append(f"<p>{escape(last['note'].capitalize())}.</p>")
    by_token, mask = found["rows"].sum(0), found["mask"]
    limit = largest(by_token.flatten(), mask.flatten())
    order = by_token.sum(1).abs().argsort(descending=True).tolist()[:MOST_SAMPLES]
    parts.append(
        f"<h4>phase {last['phase']}, step {last['step'] + 1} of {last['steps']}: what each token "
        f"did to the {escape(target)}</h4><p>The {len(order)} of {len(mask)} samples that moved it "
        "most; a row is a share of the step, held at Adam's actual denominator.</p>"
    )
    parts.append(color_key(f"change of the {target}", limit).fragment)
    ahead = (last["prefix_len"], 0)
    for row in order:
        numbers, counts = functional.pad(by_token[row], ahead), functional.pad(mask[row], ahead)
        tokens = last["tokens"][row]
        parts.append(tokens_html(tokens, numbers, "moved", counts, limit).fragment)
    by_slot = found["rows"].sum(1)
    slots = last.get("slots", [str(t) for t in range(by_slot.shape[1])])
    title = f"phase {last['phase']}: change of the {target} by part and by the token's slot"
    parts.append(heatmap(by_slot, last["groups"], slots[: by_slot.shape[1]], title, "diverging"))
    return parts


def _table(run: Run, name: str, records: Sequence[dict[str, Any]]) -> str:
    """What each recorded step did, and by what: terms of the objective, momentum and decay."""
    terms = records[-1]["term_names"]
    columns = ["phase", "step", *EFFECTS, *terms, "momentum", "decay"]
    rows = []
    for record in records:
        found = run.tensors(name, record["phase"])
        sums = [*found["terms"].sum((1, 2)), found["momentum"].sum(), found["decay"].sum()]
        known = [record["phase"], record["step"] + 1, *(record[effect] for effect in EFFECTS)]
        rows.append([*known, *(float(x) for x in sums)])
    return html.table(columns, rows, words=())
