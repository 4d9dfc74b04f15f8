"""StepInfluence: effect of each token of one PPO step on a logit difference, by component."""

from torch import Tensor

from rlhf_lab.diffing.contrast import Word, Words
from rlhf_lab.models.device import exact
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.policy_groups import transformer_groups
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.step_influence import (
    AdamStep,
    adam_step,
    by_group,
    derivative_along,
    inner,
    left_out_direction,
    row_direction,
    token_influence,
)
from rlhf_lab.probes.step_shares import (
    OBJECTIVE_TERMS,
    Target,
    exact_copy,
    logit_difference_target,
    shares_of,
    slope_of,
)
from rlhf_lab.probes.step_taken import BeforeStep, before_step, moved_weights, validate_adamw
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.probes.word_pair import WordPairProbe
from rlhf_lab.training import RLHFTrainer

# largest error of the sum over tokens, as a fraction of the effect of the tokens
ROUNDING = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2}
CANCELED = 0.01  # fraction of their size to which rows cancel before rounding is visible


class StepInfluence(WordPairProbe):
    """Effect of every token of one optimizer step on a logit difference of words, by component.

    The step is linear in the gradient for a fixed denominator of Adam, and the gradient is a sum
    over tokens. Each token, term and group of weights has a row; rows, momentum and weight decay
    sum to the target's slope along the step. The rest of the target's change is the remainder.
    `counterfactual` is the first-order effect of each sample including denominator and clipping:
    minus the change if the sample were left out. In the first steps Adam divides gradients by their
    own size, so do not read a row as the effect of leaving a token out. Between after_backward and
    after_step the probe keeps copies of weights, gradients and moments, four times the memory of
    the trained weights.

    Checks: the sum; the step's formula against the weights.

    Args:
        word, other: single tokens; or weights by word as `word`.
        pos: the position before the word, in the eval text.
        n: sequences of the eval text.
        step: "first" or "last" of the phase.
        fine: True for a group per head, False for whole attentions and MLPs.
    """

    name = "step_influence"
    question = "Which token of which sample moved the target in one step?"
    caveat = "First-order: the remainder shows how far the step left the tangent."
    prepares = ("after_backward",)
    events = ("after_step",)
    step = "last"
    every = 5

    def __init__(
        self,
        word: Word | Words = "loved",
        other: Word | None = None,
        pos: int = -1,
        n: int = 64,
        step: str = "last",
        fine: bool = True,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(word, other, pos, n, every, name, step)
        self.fine = fine

    def check_run(self, trainer: RLHFTrainer) -> None:
        validate_adamw(self.name, trainer)

    def prepare(self, seen: Observation) -> BeforeStep:
        return before_step(seen.ctx.policy, seen.gradients, seen.optimizer)

    def observe(self, seen: Observation) -> Record:
        ctx, minibatch, before = seen.ctx, seen.ctx.minibatch, seen.prepared
        step = adam_step(*before, seen.args.max_grad_norm)
        groups = transformer_groups(ctx.policy, self.fine)
        target = self.target_of(seen)
        gradient = slope_of(target, before.params)
        shares = shares_of(ctx.policy, ctx.reference, minibatch, seen.args, ctx.kl_coef)
        p = row_direction(step, gradient, before.settings)
        entries = token_influence(shares, before.params, p, groups)
        entries = exact(entries)
        left_out = left_out_direction(step, gradient, before.grads)
        without = derivative_along(shares, before.params, left_out)
        without = exact(without).sum((0, 2))
        kept = {
            "rows": entries.sum(0),
            "terms": entries.sum(1),
            "momentum": by_group(gradient, step.momentum, groups),
            "decay": by_group(gradient, step.decay, groups),
            "counterfactual": without,
        }
        moved = moved_weights(ctx.policy, before.params)
        f_before, f_after = (
            target({name: exact(x) + share * moved[name] for name, x in before.params.items()})
            for share in (0.0, 1.0)
        )
        linear = inner(gradient, step.delta)
        values = {
            "step": ctx.step,
            "steps": seen.args.num_minibatches * seen.args.batches_per_learning_phase,
            "target": "logit_difference",
            "word": self.sides[0],
            "other": self.sides[1],
            "pos": self.pos,
            "n": min(self.n, len(seen.text.tokens)),
            "groups": groups.names,
            "term_names": list(OBJECTIVE_TERMS),
            "prefix_len": minibatch.prefix_len,
            "tokens": [spell_tokens(ctx.policy.base_model.tokenizer, x) for x in minibatch.tokens],
            "f_before": f_before.item(),
            "f_after": f_after.item(),
            "linear": linear,
            "remainder": (f_after - f_before).item() - linear,
            "kappa": step.kappa,
            "grad_norm": step.norm,
        }
        if seen.truth is not None and not minibatch.padded:
            slots = seen.truth.slot_names(minibatch.tokens.shape[1])
            values["slots"] = slots[minibatch.prefix_len :]
        tensors = {name: x.float().cpu() for name, x in kept.items()} | {"mask": minibatch.mask}
        checks = lambda: _checks(seen, step, moved, linear, tensors)
        return Record(values, tensors, [checks])

    def target_of(self, seen: Observation) -> Target:
        """Return the target as a function of the policy's weights, in float64."""
        model = exact_copy(seen.ctx.policy.base_model)
        text, device = seen.text.first(self.n), next(model.parameters()).device
        text = EvalText(text.tokens.to(device), text.attention_mask.to(device))
        return logit_difference_target(model, text, self.pos, self.contrast(model))


def _checks(
    seen: Observation,
    step: AdamStep,
    moved: dict[str, Tensor],
    linear: float,
    tensors: dict[str, Tensor],
) -> list[Check]:
    rows = tensors["rows"].double()
    total = rows.sum() + sum(tensors[name].double().sum() for name in ("momentum", "decay"))
    rounded = CANCELED * rows.abs().sum().item()
    least = max(rows.sum((1, 2)).abs().sum().item(), abs(linear), rounded, 1e-12)
    apart = sum((step.delta[n] - x).square().sum().item() for n, x in moved.items()) ** 0.5
    length = sum(x.square().sum().item() for x in moved.values()) ** 0.5
    return [
        Check.at_most(
            "rows, momentum and decay sum to the slope along the step",
            abs(total.item() - linear) / least,
            ROUNDING[seen.args.rounding],
        ),
        Check.at_most(
            "the formula gives the step of the weights", apart / max(length, 1e-12), 1e-3
        ),
    ]
