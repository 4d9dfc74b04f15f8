# ruff: noqa: E501 (a fault is a row of a table)
"""Faults that are planted in StepInfluence, one line each, to see whether a record's checks tell."""

from tests.probes.planting import Fault

PROBE = "StepInfluence"
OBSERVE = "step_influence_probe:StepInfluence.observe"
BEFORE = "step_taken:before_step"
STEP = "step_influence:adam_step"
SHARES = "step_shares:shares_of"


def _fault(name: str, where: str, old: str, new: str, run: str = "plain") -> Fault:
    return Fault(name, PROBE, where, old, new, run)


# Those of the design, then others; the run "clipped" has max_grad_norm .05, "kl" the other target.
STEP_INFLUENCE = (
    _fault(
        "I1 rows rolled by one token",
        OBSERVE,
        '"rows": entries.sum(0)',
        '"rows": entries.sum(0).roll(1, -1)',
    ),
    _fault(
        "I2 samples of the rows permuted",
        OBSERVE,
        '"rows": entries.sum(0)',
        '"rows": entries.sum(0).flip(1)',
    ),
    _fault(
        "I3 samples permuted everywhere",
        OBSERVE,
        "entries = exact(entries)",
        "entries = exact(entries).flip(2)",
    ),
    _fault(
        "I4 tokens rolled everywhere",
        OBSERVE,
        "entries = exact(entries)",
        "entries = exact(entries).roll(1, 3)",
    ),
    _fault(
        "I5 surrogate and KL swapped",
        OBSERVE,
        "entries = exact(entries)",
        "entries = exact(entries)[[3, 1, 2, 0]]",
    ),
    _fault(
        "I6 terms stored in another order",
        OBSERVE,
        '"terms": entries.sum(1)',
        '"terms": entries.sum(1).flip(0)',
    ),
    _fault("I7 sign of the advantage", SHARES, 'entries["surrogate"],', '-entries["surrogate"],'),
    _fault(
        "I8 rows of another group",
        OBSERVE,
        '"rows": entries.sum(0)',
        '"rows": entries.sum(0).roll(1, 0)',
    ),
    _fault(
        "I9 labels of other groups",
        OBSERVE,
        '"groups": groups.names',
        '"groups": groups.names[::-1]',
    ),
    _fault(
        "I10 momentum of -g taken for g",
        BEFORE,
        'sign = -1 if group["maximize"]',
        'sign = 1 if group["maximize"]',
    ),
    _fault(
        "I11 bias correction a step early", BEFORE, 'int(state["step"]) + 1', 'int(state["step"])'
    ),
    _fault(
        "I12 one learning rate for head and base",
        BEFORE,
        'float(group["lr"])',
        'float(optimizer.param_groups[0]["lr"])',
    ),
    _fault(
        "I13 the clip's kappa forgotten",
        STEP,
        "1.0 if max_norm is None or norm <= max_norm else max_norm / (norm + 1e-6)",
        "1.0",
        "clipped",
    ),
    _fault(
        "I14 kappa forgotten in the rows",
        "step_influence:row_direction",
        "* step.kappa * step.D",
        "* step.D",
        "clipped",
    ),
    _fault(
        "I15 norm without the value head",
        STEP,
        "exact(g).norm() for g in grads.values()",
        'exact(g).norm() for n, g in grads.items() if n.startswith("base")',
        "clipped",
    ),
    _fault(
        "I16 second moment = the first's square",
        BEFORE,
        'exact(state["exp_avg_sq"].clone())',
        'exact(state["exp_avg"].clone()).square()',
    ),
    _fault("I17 sign of the weight decay", STEP, "decay = -lr", "decay = lr"),
    _fault(
        "I18 momentum and decay exchanged",
        OBSERVE,
        "by_group(gradient, step.momentum, groups)",
        "by_group(gradient, step.decay, groups)",
    ),
    _fault(
        "I19 momentum of the next group",
        OBSERVE,
        "by_group(gradient, step.momentum, groups)",
        "by_group(gradient, step.momentum, groups).roll(1)",
    ),
    _fault(
        "I20 b1 forgotten in the momentum", STEP, "beta1 * D * first, decay", "D * first, decay"
    ),
    _fault(
        "I21 counterfactual without the denominator",
        STEP,
        " - climbed * steeper / (root + eps)",
        "",
    ),
    _fault(
        "I22 counterfactual without the clipping",
        "step_influence:left_out_direction",
        "if step.kappa == 1:",
        "if True:",
        "clipped",
    ),
    _fault("I23 counterfactuals of other samples", OBSERVE, ".sum((0, 2))", ".sum((0, 2)).flip(0)"),
    _fault(
        "I24 target one position early",
        "step_influence_probe:StepInfluence.target_of",
        "text, self.pos, words",
        "text, self.pos - 1, words",
    ),
    _fault(
        "I25 words exchanged",
        "step_shares:logit_difference_target",
        "word, other = words",
        "other, word = words",
    ),
    _fault(
        "I26 KL of the wrong order",
        "step_shares:kl_target",
        "F.kl_per_token(full_logprobs(model), known)",
        "F.kl_per_token(known, full_logprobs(model))",
        "kl",
    ),
    _fault(
        "I27 KL a state late",
        "step_shares:kl_target",
        "logits[:, prefix_len - 1 : -1]",
        "logits[:, prefix_len:]",
        "kl",
    ),
    _fault(
        "I28 slope at the weights behind the step",
        OBSERVE,
        "slope_of(target, before.params)",
        "slope_of(target, {n: x.detach() for n, x in ctx.policy.named_parameters()})",
    ),
    _fault(
        "I29 shares at the weights behind the step",
        OBSERVE,
        "token_influence(shares, before.params, p, groups)",
        "token_influence(shares, {n: x.detach() for n, x in ctx.policy.named_parameters()}, p, groups)",
    ),
    _fault("I30 mask inverted", OBSERVE, '{"mask": minibatch.mask}', '{"mask": ~minibatch.mask}'),
    _fault(
        "I31 tokens of other rows",
        OBSERVE,
        "for x in minibatch.tokens",
        "for x in minibatch.tokens.flip(0)",
    ),
    _fault(
        "I32 remainder is the whole change",
        "step_influence_probe:StepInfluence._effects",
        '"remainder": f_after - f_before - linear',
        '"remainder": f_after - f_before',
    ),
    _fault(
        "I33 a quarter of the step for half of it",
        "step_influence_probe:StepInfluence._effects",
        "(0.0, 0.5, 1.0)",
        "(0.0, 0.25, 1.0)",
    ),
    _fault(
        "I34 slots one early",
        OBSERVE,
        "slots[minibatch.prefix_len :]",
        "slots[minibatch.prefix_len - 1 :]",
    ),
    _fault(
        "I35 weight of the entropy forgotten",
        SHARES,
        'args.ent_coef * entries["entropy"] / n',
        'entries["entropy"] / n',
    ),
    _fault(
        "I36 KL averaged over masked tokens",
        SHARES,
        "n = minibatch.mask.sum()",
        "n = minibatch.mask.numel()",
    ),
    _fault(
        "I37 read-out's terms of another group",
        OBSERVE,
        "groups.names.index(READ_OUT)",
        "groups.names.index(READ_OUT) - 1",
    ),
    _fault(
        "I38 heads of a parameter all in one group",
        "policy_groups:policy_groups",
        '(f"base_model.{weight}", head) for',
        '(f"base_model.{weight}", None) for',
        "kl",
    ),
)
