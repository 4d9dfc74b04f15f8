"""Pictures of tokens: fields of a few samples, and the terms and shares of one PPO step."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from rlhf_lab.config import RLHFArgs
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.probes import Run
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.views import html
from rlhf_lab.views.color import Kind
from rlhf_lab.views.intervals import HOW, bracketed
from rlhf_lab.views.ledger import stored_ledger
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.tokens import color_key, largest, tokens_html

SHOWN_SAMPLES = 3
_Records = Sequence[dict[str, Any]]
STEP_COLUMNS = MappingProxyType(
    {
        "phase": "phase",
        "step": "step",
        "sequences": "n",
        "real_tokens": "tokens",
        "clipped_surrogate": "clipped surrogate",
        "value_loss": "− value loss",
        "entropy_bonus": "+ entropy bonus",
        "kl_penalty": "− KL penalty",
        "objective": "= objective",
        "kl_coef": "KL coefficient",
    }
)
"""The terms with the signs that they have in the objective."""
TERM_TENSORS = MappingProxyType(
    {
        "clipped_surrogate": "surrogate",
        "value_loss": "value_loss",
        "entropy_bonus": "entropy",
        "kl_penalty": "kl",
        "objective": "share",
    }
)
"""The stored column whose sum each term is, up to its coefficient."""


def text_heatmap_parts(run: Run, name: str, records: _Records) -> list[Picture | str]:
    """Every field of a few samples, in the first and in the last recorded phase."""
    parts: list[Picture | str] = []
    if run.args.normalize_reward:
        parts.append(
            "<p>Values and advantages are in units of the standardised reward; exact ones are in "
            "the reward's own.</p>"
        )
    for record in records[:1] + records[1:][-1:]:
        tensors = run.tensors(name, record["phase"])
        earned = ", ".join(f"{reward:.3f}" for reward in record["rewards"])
        parts.append(f"<h4>phase {record['phase']}</h4>")
        parts.append(f"<p>Rewards of the {len(record['rewards'])} samples stored: {earned}.</p>")
        for field in _field_order(tensors):
            parts.append(_field(record, tensors, field))
    return parts


def _field_order(tensors: dict[str, Any]) -> list[str]:
    """Each quantity followed by its exact counterpart."""
    own = [f for f in tensors if not f.startswith("true_") and not f.endswith("mask")]
    return [f for field in own for f in (field, f"true_{field}") if f in tensors]


def _field(record: dict[str, Any], tensors: dict[str, Any], field: str) -> str:
    """One quantity on the samples, all on one scale."""
    mask = tensors["truth_mask" if field.startswith("true_") else "mask"]
    kind = "sequential" if field in ("kl", "entropy", "true_value") else "diverging"
    limit = largest(tensors[field].flatten(), mask.flatten())
    label = field.replace("true_", "exact ").replace("_", " ")
    if limit == 0:
        return f"<p>{label} is 0 on every token of these samples.</p>"
    rows = zip(record["tokens"][:SHOWN_SAMPLES], tensors[field], mask, strict=False)
    lines = [_sample(*row, label, limit, kind) for row in rows]
    return color_key(label, limit, kind).fragment + "".join(lines)


def _sample(
    tokens: list[str],
    values: Float[Tensor, " gen"],
    mask: Bool[Tensor, " gen"],
    label: str,
    limit: float,
    kind: Kind = "diverging",
) -> str:
    """A prompt without colours, and the numbers of its generated tokens."""
    prefix_len = len(tokens) - len(mask)
    numbers, counts = functional.pad(values, (prefix_len, 0)), functional.pad(mask, (prefix_len, 0))
    return tokens_html(tokens, numbers, label, counts, limit, kind).fragment


def step_ledger_parts(run: Run, name: str, records: _Records) -> list[Picture | str]:
    """The terms of the objective in every recorded step, and the last of them token by token."""
    last = records[-1]
    ledger = stored_ledger(run, last["phase"], name)
    shares = ledger.entries["share"]
    limit = largest(shares.flatten())
    order = shares.abs().sum(1).argsort(descending=True).tolist()
    lines = [
        _sample(ledger.tokens[row], shares[row], ledger.mask[row], "share", limit)
        for row in order[:SHOWN_SAMPLES]
    ]
    note = (
        f"<h4>phase {last['phase']}, step {last['step'] + 1} of {last['steps']}: what each token "
        f"adds to the objective</h4><p>The {len(lines)} of {len(order)} sequences that weigh most, "
        f"and sequence {order[0]} in full.</p>"
    )
    key = color_key("share of the objective", limit).fragment
    rows = [_terms(record, run.tensors(name, record["phase"]), run.args) for record in records]
    terms = html.table(list(STEP_COLUMNS.values()), rows, words=())
    how = f"<p>Brackets: {HOW} of the minibatch.</p>"
    return [terms, how, note, key, *lines, ledger.html(order[0]).fragment]


def _terms(
    record: dict[str, Any], tensors: dict[str, Float[Tensor, "..."]], args: RLHFArgs
) -> list[object]:
    """A step's row of the table of terms, each with its interval."""
    interval = interval_of_terms(tensors, args.loss_aggregation == "token_mean")
    n = int(tensors["mask"].sum())
    weights = {"entropy_bonus": args.ent_coef / n, "kl_penalty": record["kl_coef"] / n}
    cells: list[object] = []
    for term in STEP_COLUMNS:
        if term == "sequences":
            cells.append(interval.n)
        elif term not in TERM_TENSORS:
            cells.append(record[term] + (term == "step"))
        elif interval.low is None:
            cells.append(record[term])
        else:
            at, weight = list(TERM_TENSORS).index(term), weights.get(term, 1.0)
            ends = (weight * end[at].item() for end in (interval.low, interval.high))
            cells.append(bracketed(record[term], *ends))
    return cells


def interval_of_terms(tensors: dict[str, Float[Tensor, "..."]], per_token: bool = True) -> Interval:
    """The sums of a step's stored columns, one per term, with their intervals over sequences.

    1. Sum each column over the tokens of each sequence; draw sequences with replacement.
    2. A term is a mean over real tokens: divide by how many were drawn, in units of how many there
       are. Where the objective averages over sequences, it is the sum of those drawn.
    """
    lengths = tensors["mask"].sum(1, keepdim=True)
    sums = torch.stack([tensors[column].sum(1) for column in TERM_TENSORS.values()], 1)
    n, tokens = len(lengths), lengths.sum().item()

    def total(means: Tensor, length: Tensor) -> Tensor:
        return means / length * tokens if per_token else means * n

    return bootstrap_means(sums, lengths, statistic=total, resamples=RESAMPLES)
