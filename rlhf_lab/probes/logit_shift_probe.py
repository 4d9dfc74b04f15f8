"""LogitShift: the shift of the logit difference of two words, by part of the model and by cause."""

from typing import Any

import torch

from rlhf_lab.diffing.logit_shift import ends_of, split_shift
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models import has_hooks
from rlhf_lab.models.device import where_exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered, model_where_exact
from rlhf_lab.probes.logit_shift import (
    SITES,
    attribute_logits,
    attribute_with_hooks,
    single_token,
    validate_additive,
)
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Record,
    decimals,
    interval_fields,
)
from rlhf_lab.probes.word_pair import WordPairProbe


class LogitShift(WordPairProbe):
    """Shift of the logit difference of two words since the reference, by component and cause.

    The causes are a component's own weights, its inheritance from earlier components, the final
    norm's scale, and the unembedding (see `split_shift`). On Reel the record has the grammar's log
    odds, too. With hooks on the policy, their effect is one more component, and there is no split
    by cause.

    Checks: each model's rows sum to its logit difference; the rows of the shift sum to the
    measured shift; the causes sum to the rows.

    Args:
        word, other: single tokens of the tokenizer.
        pos: the position before the word, in each text; from its end when negative.
        n: number of sequences.
    """

    name = "logit_shift"
    sites = (*SITES, "ln_final.hook_normalized")
    every = 5

    def check_model(self, model: HookedModel) -> None:
        """Refuse a model whose logits are no sum over its parts."""
        validate_additive(model)
        super().check_model(model)

    def observe(self, seen: Observation) -> Record:
        """Attribute both models, and subtract."""
        model, reference = seen.ctx.policy.base_model, seen.ctx.reference
        word, other = (single_token(model.tokenizer, text) for text in (self.word, self.other))
        attribute = attribute_with_hooks if has_hooks(model) else attribute_logits
        models = model_where_exact(reference), model_where_exact(model)
        acts = tuple(
            {site: where_exact(act[: self.n]) for site, act in each.items()}
            for each in (seen.reference_acts, seen.acts)
        )
        before, now = (
            attribute(m, taken, word, other) for m, taken in zip(models, acts, strict=True)
        )
        shift = now.rows - before.rows
        measured = now.logit_difference - before.logit_difference
        values = {
            "components": now.components,
            "shift": decimals(shift.mean(1)),
            "policy": decimals(now.rows.mean(1)),
            "reference": decimals(before.rows.mean(1)),
            "measured_shift": round(measured.mean().item(), 6),
        }
        causes = {}
        if not has_hooks(model):
            text = seen.text.first(self.n)
            tokens = text.tokens.to(next(models[0].parameters()).device)
            ends = ends_of(models, acts, tokens, text.columns(self.pos), (word, other))
            causes = split_shift(*ends, is_centered(model.ln_final))._asdict()
            values |= {name: decimals(rows.mean(1)) for name, rows in causes.items()}
        if seen.truth is not None:
            values |= _truth(seen, self.pos, word, other, self.n)
        gap = (shift.sum(0) - measured).abs().max().item()
        allowed = seen.allowed(1e-4, half=0.2)  # a logit of 8 is rounded by up to 0.03 in bf16
        checks = [
            Check.at_most("the policy's rows sum to its logit difference", now.error, allowed),
            Check.at_most(
                "the reference's rows sum to its logit difference", before.error, allowed
            ),
            Check.at_most("the rows of the shift sum to the measured shift", gap, allowed),
        ]
        if causes:
            missed = (sum(causes.values()) - shift).abs().max().item()
            checks.append(Check.at_most("the causes sum to the rows of the shift", missed, allowed))
        tensors = {"shift": shift, "measured": measured, "reference": before.rows} | causes
        return Record(values, {name: x.float() for name, x in tensors.items()}, checks)


def _truth(seen: Observation, pos: int, word: int, other: int, n: int) -> dict[str, Any]:
    text = seen.text.first(n)
    columns = text.columns(pos).cpu()
    odds, defined = torch.zeros(len(columns)), torch.zeros(len(columns), dtype=torch.bool)
    for column in columns.unique().tolist():
        rows = columns == column
        odds[rows], defined[rows] = seen.truth.next_word_odds(
            text.tokens[rows.to(text.tokens.device)], column, word, other
        )
    if not bool(defined.any()):
        return {"grammar_log_odds": None, "reference_error": None}
    logits = seen.reference_acts["logits"][:n]
    gap = (logits[:, word] - logits[:, other]).cpu() - odds
    found = {"grammar_log_odds": odds[defined], "reference_error": gap[defined].abs()}
    values: dict[str, Any] = {"defined_sequences": int(defined.sum())}
    for name, numbers in found.items():
        interval = bootstrap_means(numbers, resamples=RESAMPLES)
        values |= {name: round(numbers.mean().item(), 6), **interval_fields(name, interval)}
    return values
