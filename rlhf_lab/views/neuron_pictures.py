"""Pictures of NeuronRank: the neurons that contribute most, the four groups, and each MLP."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.intervals import HOW, bracketed
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars


def neuron_rank_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Of the last record: bars of neurons, groups and MLPs, and the neurons as a table."""
    last = records[-1]
    if not any(last["contribution"]):
        return [f"<p>No neuron adds to a shift at phase {last['phase']}: the models are equal.</p>"]
    of = f"phase {last['phase']}, n = {last['n']}"
    tensors = run.tensors(name, last["phase"])
    rows = tensors["neuron_contribution"]
    whiskers = {}
    if "contribution_low" in last:
        whiskers = {"contribution": (last["contribution_low"], last["contribution_high"])}
    listed = {"contribution": last["contribution"], "by activation": last["by_activation"]}
    groups = [
        f"{group} ({size})" for group, size in zip(last["groups"], last["group_size"], strict=True)
    ]
    layers = [f"L{layer} mlp" for layer in range(len(last["mlp"]))]
    sums = {"its neurons": rows.sum(1).tolist(), "b_out": last["b_out"], "both": last["mlp"]}
    shown = rows.abs().sum().item()
    share = sum(map(abs, last["contribution"])) / shown if shown else 0.0
    moved = tensors["neuron_activation_shift"].abs().mean().item()
    wrote = tensors["neuron_write"].abs().mean((1, 2)).tolist()
    parts: list[Picture | str] = [
        '<div class="figures">',
        bars(last["neurons"], listed, f"{of}: shift by neuron", whiskers=whiskers),
        bars(groups, {"contribution": last["group_contribution"]}, f"{of}: by group of neurons"),
        bars(layers, sums, f"{of}: by MLP"),
        "</div>",
        f"<p>The {len(last['neurons'])} neurons have {share:.0%} of all neurons' contributions, "
        f"without their signs. Activations move by {moved:.3g} on average; writes are "
        f"{wrote[0]:.3g} in the reference and {wrote[1]:.3g} in the policy, without their signs. "
        f"Whiskers: {HOW}.</p>",
    ]
    columns = ["neuron", "contribution", "by activation", "activation before", "its shift", "write"]
    low = last.get("contribution_low", [None] * len(last["neurons"]))
    high = last.get("contribution_high", [None] * len(last["neurons"]))
    table = [
        [
            neuron,
            bracketed(last["contribution"][i], low[i], high[i]),
            last["by_activation"][i],
            last["activation"][i],
            last["activation_shift"][i],
            last["write"][i],
            last["group"][i],
            _tokens(last["tokens"][i], last["token_activations"][i]),
        ]
        for i, neuron in enumerate(last["neurons"])
    ]
    columns += ["group", "most active at"]
    return [*parts, html.table(columns, table, words=(0, 6, 7))]


def _tokens(words: Sequence[str], activations: Sequence[float]) -> str:
    """Tokens with the activation at each; blanks in front of one are shown."""
    pairs = zip(words, activations, strict=True)
    return ", ".join(f"{w if w == w.strip() else repr(w)} {x:.3g}" for w, x in pairs)
