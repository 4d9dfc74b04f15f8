"""StepInfluence: effect of each token of one PPO step on a logit difference, by component."""

import copy
import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import AdamW

from rlhf_lab.diffing.groups import restrict, sum_by_group
from rlhf_lab.diffing.weight_line import derivatives_along
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact, has_float64
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.eval_text import gather_columns
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.step_influence import (
    AdamStep,
    BeforeStep,
    ByWeight,
    adam_step,
    before_step,
    inner,
    left_out_direction,
    row_direction,
    trained_groups,
    with_weights,
)
from rlhf_lab.probes.step_ledger import BEFORE_THE_OBJECTIVE, OBJECTIVE_TERMS, make_shares
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.probes.word_pair import WordPairProbe
from rlhf_lab.training import Overrides, RLHFTrainer

# largest error of the sum over tokens, as a fraction of the effect of the tokens
ROUNDING = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2}
CANCELED = 0.01  # fraction of their size to which rows cancel before rounding is visible


class StepInfluence(WordPairProbe):
    """Effect of every token of one optimizer step on a logit difference of words, by component.

    The step is linear in the gradient for a fixed denominator of Adam, and the gradient is a sum
    over tokens. Each token, term and group of weights has a row; rows, momentum and weight decay
    sum to the target's slope along the step, and the rest of its change is the remainder.
    `counterfactual`, by sample, is minus the first-order change if the sample were left out,
    including denominator and clipping. In the first steps Adam divides gradients by their own
    size, so a row is not the effect of leaving a token out. The probe needs four times the memory
    of the trained weights.

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
    options = (*WordPairProbe.options, "step", "fine")
    fine = True

    def check_run(self, trainer: RLHFTrainer) -> None:
        _validate_adamw(self.name, trainer)

    def prepare(self, seen: Observation) -> BeforeStep:
        return before_step(seen.ctx.policy, seen.gradients, seen.optimizer)

    def observe(self, seen: Observation) -> Record:
        ctx, minibatch, before = seen.ctx, seen.ctx.minibatch, seen.prepared
        step = adam_step(*before, seen.args.max_grad_norm)
        groups = trained_groups(ctx.policy, self.fine)
        target = self.target_of(seen)
        gradient = _read_gradient(target, before.params)
        shares = make_shares(ctx.policy, ctx.reference, minibatch, seen.args, ctx.kl_coef)
        p = row_direction(step, gradient, before.settings)
        directions = [restrict(p, groups, name) for name in groups.names]
        left_out = left_out_direction(step, gradient, before.grads)
        found = exact(derivatives_along(shares, before.params, [*directions, left_out]))
        entries = found[:-1].transpose(0, 1)
        along = lambda change: sum_by_group({n: x * change[n] for n, x in gradient.items()}, groups)
        tensors = {
            "rows": entries.sum(0),
            "terms": entries.sum(1),
            "momentum": along(step.momentum),
            "decay": along(step.decay),
            "counterfactual": found[-1].sum((0, 2)),
        }
        now = dict(ctx.policy.named_parameters())
        moved = {name: exact(now[name].detach()) - exact(x) for name, x in before.params.items()}
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
            "tokens": spell_tokens(ctx.policy.base_model.tokenizer, minibatch),
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
        tensors = {name: x.float().cpu() for name, x in tensors.items()} | {"mask": minibatch.mask}
        return Record(values, tensors, [lambda: _checks(seen, step, moved, linear, tensors)])

    def target_of(self, seen: Observation) -> Callable[[ByWeight], Float[Tensor, ""]]:
        """Return the mean logit difference as a function of the policy's weights, in float64."""
        model = seen.ctx.policy.base_model
        device = next(model.parameters()).device
        device = device if has_float64(device) else "cpu"
        model = copy.deepcopy(model).to(device, print_details=False)
        model = model.to(torch.float64, print_details=False)
        text, words = seen.text.first(self.n), self.contrast(model)
        tokens, columns = text.tokens.to(device), text.columns(self.pos).to(device)

        def difference(model: HookedModel) -> Float[Tensor, ""]:
            logits = model(tokens, attention_mask=torch.ones_like(tokens))
            return words.of(gather_columns(logits, columns)).mean()

        def target(weights: ByWeight) -> Float[Tensor, ""]:
            first, prefix = next(model.parameters()), "base_model."
            named = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
            return with_weights(model, {n: x.to(first) for n, x in named.items()}, difference)

        return target


def _checks(
    seen: Observation, step: AdamStep, moved: ByWeight, linear: float, tensors: dict[str, Tensor]
) -> list[Check]:
    rows = tensors["rows"].double()
    total = rows.sum() + sum(tensors[name].double().sum() for name in ("momentum", "decay"))
    rounded = CANCELED * rows.abs().sum().item()
    least = max(rows.sum((1, 2)).abs().sum().item(), abs(linear), rounded, 1e-12)
    gap, allowed = abs(total.item() - linear) / least, ROUNDING[seen.args.rounding]
    apart = sum((step.delta[n] - x).square().sum().item() for n, x in moved.items()) ** 0.5
    length = sum(x.square().sum().item() for x in moved.values()) ** 0.5
    name = "rows, momentum and decay sum to the slope along the step"
    formula = "the formula gives the step of the weights"
    return [
        Check.at_most(name, gap, allowed),
        Check.at_most(formula, apart / max(length, 1e-12), 1e-3),
    ]


def _read_gradient(target: Callable[[ByWeight], Tensor], params: ByWeight) -> dict[str, Tensor]:
    leaves = {name: exact(x).clone().requires_grad_() for name, x in params.items()}
    with torch.enable_grad():
        slopes = torch.autograd.grad(target(leaves), list(leaves.values()), allow_unused=True)
    found = zip(leaves, slopes, strict=True)
    return {name: slope for name, slope in found if slope is not None}


def _validate_adamw(name: str, trainer: RLHFTrainer) -> None:
    """Raise ConfigError for a run whose steps are not those of one AdamW in float32."""
    args, optimizer = trainer.args, trainer.optimizer
    replaceable = {f.name for f in dataclasses.fields(Overrides)} - set(BEFORE_THE_OBJECTIVE)
    custom = sorted(replaceable & set(trainer.custom_components))
    is_adamw = type(optimizer) is AdamW and not any(g["amsgrad"] for g in optimizer.param_groups)
    unsupported = {
        "optimizer='adamw_8bit'": args.optimizer == "adamw_8bit",
        "optimizer_in_backward=True": args.optimizer_in_backward,
        "parallel='fsdp'": args.parallel == "fsdp",  # moments are shards
        f"weight_precision={args.weight_precision!r}": args.weight_precision != "fp32",
        f"optimizer {type(optimizer).__name__}, or one with amsgrad,": not is_adamw,
        f"custom {', '.join(custom)}": bool(custom),
    }
    for setting, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{setting} cannot be combined with {name}, which splits steps of AdamW in fp32. "
                "Use the default, or remove the probe."
            )
