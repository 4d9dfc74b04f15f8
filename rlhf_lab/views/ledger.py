"""Ledger of one PPO step: the contribution of every token of a minibatch to the objective."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes import Run
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.probes.step_ledger import ledger_entries
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.training import ReplayMinibatch
from rlhf_lab.views.html import Html, formatted
from rlhf_lab.views.html import table as html_table

LEDGER_COLUMNS = tuple(
    "old_logprob logprob ratio clipped advantage whitened return value kl entropy surrogate "
    "value_loss share".split()
)
TERM_TENSORS = {  # the column whose sum each term is, up to its coefficient
    "clipped_surrogate": "surrogate",
    "value_loss": "value_loss",
    "entropy_bonus": "entropy",
    "kl_penalty": "kl",
    "objective": "share",
}
PARTS = ("surrogate", "value_loss", "share")


@dataclass(frozen=True)
class Ledger:
    """Every token of one minibatch, with its terms of the objective before the step.

    Args:
        tokens: prompt and response of each sequence, as they add to the text.
        prefix_len: prompt tokens.
        mask: True on real generated tokens.
        entries: one `[minibatch gen]` tensor per column: log-probabilities old and new, their
            ratio, whether the clip binds (1 or 0), the advantage before and after whitening, the
            return, the value, KL and entropy in nats, and what the token adds to the clipped
            surrogate, to the value loss and, all terms together, to the objective.
        objective: the sum of the shares over all real tokens.
    """

    tokens: list[list[str]]
    prefix_len: int
    mask: Bool[Tensor, "minibatch gen"]
    entries: dict[str, Float[Tensor, "minibatch gen"]]
    objective: float

    def rows(self, sequence: int = 0) -> list[list[object]]:
        """Return a row per real token of a sequence: its text, then its entries."""
        texts, rows = self.tokens[sequence][self.prefix_len :], []
        for t in self.mask[sequence].nonzero().flatten().tolist():
            cells = {name: self.entries[name][sequence, t].item() for name in LEDGER_COLUMNS}
            cells["clipped"] = bool(cells["clipped"])
            rows.append([texts[t].strip(), *cells.values()])
        return rows

    def html(self, sequence: int = 0) -> Html:
        """Return the rows of a sequence as a table above their sum and the objective."""
        total = self.entries["share"][sequence].sum().item()
        columns = [name.replace("_", " ") for name in ("token", *LEDGER_COLUMNS)]
        body = html_table(columns, [_formatted(row) for row in self.rows(sequence)])
        note = (
            f"<p>Sequence {sequence} adds {total:.6f}; all {int(self.mask.sum())} tokens of the "
            f"minibatch together give the objective, {self.objective:.6f}. A large advantage need "
            "not be a large gradient: a token of log-probability 0 cannot become more likely.</p>"
        )
        return Html(body + note)


@torch.no_grad()
def step_ledger(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    kl_coef: float | None = None,
) -> Ledger:
    """Split the objective of a minibatch by token; see `ledger_entries`.

    Call it at before_minibatch or after_loss, before the step is taken. It follows the package's
    own functions: with a caller's own in the trainer, the shares sum to what these would have been.
    """
    entries = ledger_entries(policy, reference, minibatch, args, kl_coef)
    tokenizer = policy.base_model.tokenizer
    return Ledger(
        tokens=[spell_tokens(tokenizer, row) for row in minibatch.tokens],
        prefix_len=minibatch.prefix_len,
        mask=minibatch.mask,
        entries=entries,
        objective=entries["share"].sum().item(),
    )


def stored_ledger(run: Run, phase: int, probe: str = "step_ledger") -> Ledger:
    """Return the ledger that a `StepLedger` stored in a phase.

    Raises:
        RunError: If it has no record of this phase.
    """
    tensors = run.tensors(probe, phase)
    record = next(record for record in run.records(probe) if record["phase"] == phase)
    return Ledger(
        tokens=record["tokens"],
        prefix_len=record["prefix_len"],
        mask=tensors["mask"],
        entries={name: tensors[name] for name in LEDGER_COLUMNS},
        objective=record["objective"],
    )


def _formatted(row: list[object]) -> list[str]:
    cells = [str(row[0])]
    for name, value in zip(LEDGER_COLUMNS, row[1:], strict=True):
        digits = 5 if name in PARTS else 3
        is_flag = isinstance(value, bool)
        cells.append(formatted(value) if is_flag else f"{round(value, digits) + 0.0:.{digits}f}")
    return cells


def interval_of_terms(tensors: dict[str, Float[Tensor, "..."]], per_token: bool = True) -> Interval:
    """Return the terms of a step, sums of its columns, with intervals over sequences.

    1. Sum each column over the tokens of each sequence; draw sequences with replacement.
    2. A term is a mean over real tokens: multiply by real tokens / drawn tokens. If the objective
       averages over sequences, a term is the sum over the drawn sequences.
    """
    lengths = tensors["mask"].sum(1, keepdim=True)
    sums = torch.stack([tensors[column].sum(1) for column in TERM_TENSORS.values()], 1)
    n, tokens = len(lengths), lengths.sum().item()

    def total(means: Tensor, length: Tensor) -> Tensor:
        return means / length * tokens if per_token else means * n

    return bootstrap_means(sums, lengths, statistic=total, resamples=RESAMPLES)
