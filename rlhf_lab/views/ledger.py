"""The ledger of one PPO step: what every token of a minibatch contributes to the objective."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformer_lens import HookedTransformer

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.training import ReplayMinibatch
from rlhf_lab.training.objective import run_models
from rlhf_lab.views.colour import colour_of, ink_on
from rlhf_lab.views.html import Html
from rlhf_lab.views.html import table as html_table

COLUMNS = (
    "old_logprob",
    "logprob",
    "ratio",
    "clipped",
    "advantage",
    "whitened",
    "return",
    "value",
    "kl",
    "entropy",
    "surrogate",
    "value_loss",
    "share",
)


@dataclass(frozen=True)
class Ledger:
    """Every token of one minibatch, under the policy as it was handed in.

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
        """One row per real token of a sequence: its text, then its entries."""
        real = self.mask[sequence].nonzero().flatten().tolist()
        texts = self.tokens[sequence][self.prefix_len :]
        return [
            [texts[t].strip(), *(self._cell(name, sequence, t) for name in COLUMNS)] for t in real
        ]

    def _cell(self, name: str, sequence: int, t: int) -> object:
        value = self.entries[name][sequence, t].item()
        return bool(value) if name == "clipped" else value

    def table(self, sequence: int = 0) -> Table:
        """The rows of a sequence for the terminal; shares are coloured by sign and size."""
        share = f"{self.entries['share'][sequence].sum().item():.5f}"
        title = f"sequence {sequence}: {share} of the objective {self.objective:.5f}"
        table = Table("token", *COLUMNS, title=title, box=None, padding=(0, 1))
        for column in table.columns[1:]:
            column.justify = "right"
        limit = self.entries["share"].abs().max().item()
        for row in self.rows(sequence):
            cells = [row[0], *(_spoken(value) for value in row[1:-1])]
            background = colour_of(row[-1], limit)
            style = "rgb({},{},{}) on rgb({},{},{})".format(*ink_on(background), *background)
            table.add_row(*cells, Text(_spoken(row[-1]), style=style))
        return table

    def html(self, sequence: int = 0) -> Html:
        """The rows of a sequence as a table, with their sum and the whole objective below."""
        total = self.entries["share"][sequence].sum().item()
        body = html_table(["token", *COLUMNS], self.rows(sequence))
        said = (
            f"<p>Sequence {sequence} adds {total:.6f}; all {int(self.mask.sum())} tokens of the "
            f"minibatch together give the objective, {self.objective:.6f}.</p>"
        )
        return Html(body + said)


@torch.no_grad()
def step_ledger(
    policy: TransformerWithValueHead,
    reference: HookedTransformer,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
) -> Ledger:
    """Take the objective of a minibatch apart, token by token.

    1. Run the policy once, as the objective does; take log-probabilities, values, KL and entropy.
    2. Whiten the advantages over the minibatch, if the run does.
    3. Give each token its part of the four means; over the real tokens the parts sum to the
       objective.

    Call it at before_minibatch or after_loss, before the step is taken. It follows the package's
    own functions: with a caller's own in the trainer, the shares sum to what these would have been.

    share_t = (min(r_t A_t, clip(r_t) A_t) - vf_coef/2 (V - R)^2 + ent_coef H_t - kl_coef KL_t) / N
    """
    mask = minibatch.mask
    out = run_models(policy, reference, minibatch, args.temperature)
    ratio = F.policy_ratio(out.logprobs, minibatch.logprobs)
    advantages = minibatch.advantages
    whitened = F.whiten(advantages, mask) if args.normalize_advantages else advantages
    clipped_ratio = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef)
    surrogate = torch.minimum(ratio * whitened, clipped_ratio * whitened)
    entries = {
        "old_logprob": minibatch.logprobs,
        "logprob": out.logprobs,
        "ratio": ratio,
        "clipped": (clipped_ratio * whitened < ratio * whitened).to(ratio.dtype),
        "advantage": advantages,
        "whitened": whitened,
        "return": minibatch.returns,
        "value": out.values,
        "kl": F.kl_per_token(out.logits, out.ref_logits),
        "entropy": F.entropy_per_token(out.logits),
        "surrogate": surrogate,
        "value_loss": _value_losses(out.values, minibatch, args),
    }
    return _close(entries, minibatch, policy, args)


def _value_losses(
    values: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, "minibatch gen"]:
    """vf_coef / 2 times the squared error of each value, clipped as the run clips it."""
    errors = (values - minibatch.returns).square()
    if args.vf_clip is not None:
        moved = (values - minibatch.values).clamp(-args.vf_clip, args.vf_clip)
        errors = torch.maximum(errors, (minibatch.values + moved - minibatch.returns).square())
    return 0.5 * args.vf_coef * errors


def _close(
    entries: dict[str, Float[Tensor, "minibatch gen"]],
    minibatch: ReplayMinibatch,
    policy: TransformerWithValueHead,
    args: RLHFArgs,
) -> Ledger:
    """Add up: parts of the means over all real tokens, and their sum."""
    mask = minibatch.mask
    n = mask.sum()
    bonus = args.ent_coef * entries["entropy"] - args.kl_coef * entries["kl"]
    share = (entries["surrogate"] - entries["value_loss"] + bonus) / n
    parts = {name: entries[name] / n for name in ("surrogate", "value_loss")}
    closed = {name: F.zero_masked(x, mask) for name, x in (entries | parts).items()}
    closed["share"] = F.zero_masked(share, mask)
    tokenizer = policy.base_model.tokenizer
    return Ledger(
        tokens=[spell_tokens(tokenizer, row) for row in minibatch.tokens],
        prefix_len=minibatch.prefix_len,
        mask=mask,
        entries=closed,
        objective=closed["share"].sum().item(),
    )


def _spoken(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}"
