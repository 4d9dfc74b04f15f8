"""StepInfluence: which token of which sample moved a target in a PPO step, by part of the model."""

from typing import Any

from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.policy_groups import transformer_groups
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.probes.step_influence import (
    AdamStep,
    ByWeight,
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
    kl_target,
    logit_difference_target,
    shares_of,
    slope_of,
)
from rlhf_lab.probes.step_taken import (
    BeforeStep,
    before_step,
    moved_weights,
    refuse_other_steps,
)
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.training import RLHFTrainer

# largest error of the sum over tokens, as a fraction of the effect of the tokens
ROUNDING = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2}
CANCELLED = 0.01  # rows may cancel to this fraction before rounding shows in their sum
FIRST_STEPS = 0.99  # while b2^t is above this, these gradients dominate the second moment
SCALE_FREE = (
    "in the first steps Adam divides gradients by their own size: rows share out a step whose size "
    "no sample decides, so do not read a row as what would happen without it"
)


class StepInfluence(Probe):
    """Effect of every token of one optimizer step on a target, by component.

    The step is linear in the gradient for a fixed denominator of Adam, and the gradient is a sum
    over tokens. Each token, term and group of weights has a row; rows, momentum and weight decay
    sum to the target's slope along the step. The rest of the target's change is the remainder.
    `counterfactual` is the first-order effect of each sample including denominator and clipping:
    minus the change if the sample were left out. Between after_backward and after_step the probe
    keeps copies of weights, gradients and moments, four times the memory of the trained weights.

    Checks: the sum; the step's formula against the weights.

    Args:
        target: "logit_difference" of two words after position `pos` of the eval text, or "kl", the
            mean KL per token from the reference.
        word, other: single tokens of the tokenizer, for the logit difference.
        pos: the position before the word, in the eval text.
        n: sequences of the eval text.
        step: "first" or "last" of the phase.
        fine: True for a group per head, False for whole attentions and MLPs.

    Raises:
        ConfigError: If the target or step is unknown.
    """

    name = "step_influence"
    question = "Which token of which sample moved the target in one step?"
    caveat = "First-order: the remainder shows how far the step left the tangent."
    prepares = ("after_backward",)
    events = ("after_step",)
    text = "eval"
    step = "last"
    every = 5

    def __init__(
        self,
        target: str = "logit_difference",
        word: str = "loved",
        other: str = "hated",
        pos: int = -1,
        n: int = 64,
        step: str = "last",
        fine: bool = True,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        if target not in ("logit_difference", "kl"):
            raise ConfigError(
                f"target={target!r} of {self.name} must be 'logit_difference' or 'kl'."
            )
        if step not in ("first", "last"):
            raise ConfigError(f"step={step!r} of {self.name} must be 'first' or 'last'.")
        self.target, self.step, self.pos, self.n, self.fine = target, step, pos, n, fine
        self.word, self.other = word, other

    def settings(self) -> dict[str, Any]:
        own = {"target": self.target, "word": self.word, "other": self.other, "step": self.step}
        return super().settings() | own

    def check_run(self, trainer: RLHFTrainer) -> None:
        refuse_other_steps(self.name, trainer)

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
        values = {
            "step": ctx.step,
            "steps": seen.args.num_minibatches * seen.args.batches_per_learning_phase,
            "target": self.target,
            "pos": self.pos,
            "n": min(self.n, len(seen.text.tokens)),
            "groups": groups.names,
            "term_names": list(OBJECTIVE_TERMS),
            "prefix_len": minibatch.prefix_len,
            "tokens": [spell_tokens(ctx.policy.base_model.tokenizer, x) for x in minibatch.tokens],
            **self._effects(target, before.params, moved, inner(gradient, step.delta)),
            "kappa": step.kappa,
            "grad_norm": step.norm,
        }
        if self.target == "logit_difference":
            values |= {"word": self.word, "other": self.other}
        if seen.truth is not None and not minibatch.padded:
            slots = seen.truth.slot_names(minibatch.tokens.shape[1])
            values["slots"] = slots[minibatch.prefix_len :]
        if max(s.beta2 for s in before.settings.values()) ** before.number > FIRST_STEPS:
            values["note"] = SCALE_FREE
        tensors = {name: x.float().cpu() for name, x in kept.items()} | {"mask": minibatch.mask}
        checks = lambda: self._checks(seen, step, moved, values, tensors)
        return Record(values, tensors, [checks])

    def target_of(self, seen: Observation) -> Target:
        """The target as a function of the policy's weights, in float64."""
        model = exact_copy(seen.ctx.policy.base_model)
        text, device = seen.text.first(self.n), next(model.parameters()).device
        text = EvalText(text.tokens.to(device), text.attention_mask.to(device))
        if self.target == "kl":
            settings = seen.prefix_len, seen.args.temperature
            return kl_target(model, seen.ctx.reference, text, *settings)
        words = tuple(single_token(model.tokenizer, w) for w in (self.word, self.other))
        return logit_difference_target(model, text, self.pos, words)

    def _effects(
        self, target: Target, params: ByWeight, moved: ByWeight, linear: float
    ) -> dict[str, float]:
        f_before, f_after = (
            target({name: exact(x) + share * moved[name] for name, x in params.items()}).item()
            for share in (0.0, 1.0)
        )
        return {
            "f_before": f_before,
            "f_after": f_after,
            "linear": linear,
            "remainder": f_after - f_before - linear,
        }

    def _checks(
        self,
        seen: Observation,
        step: AdamStep,
        moved: ByWeight,
        values: dict[str, Any],
        tensors: dict[str, Tensor],
    ) -> list[Check]:
        rows, slopes = tensors["rows"].double(), ("momentum", "decay")
        total = rows.sum() + sum(tensors[name].double().sum() for name in slopes)
        # each row is rounded by its own size, also where all of them together come to little
        rounded = CANCELLED * rows.abs().sum().item()
        least = max(rows.sum((1, 2)).abs().sum().item(), abs(values["linear"]), rounded, 1e-12)
        apart = sum((step.delta[n] - x).square().sum().item() for n, x in moved.items()) ** 0.5
        length = sum(x.square().sum().item() for x in moved.values()) ** 0.5
        return [
            Check.at_most(
                "rows, momentum and decay sum to the slope along the step",
                abs(total.item() - values["linear"]) / least,
                ROUNDING[seen.args.rounding],
            ),
            Check.at_most("the step is that of the weights", apart / max(length, 1e-12), 1e-3),
        ]
