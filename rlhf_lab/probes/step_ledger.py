"""StepLedger: the contribution of every token of one optimizer step to the objective."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import Forward, TransformerWithValueHead
from rlhf_lab.models.device import exact, product_dtype
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.outputs import PolicyOutputs
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.probes.step_influence import ByWeight, with_weights
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.training import Objective, Overrides, ReplayMinibatch, objective_terms
from rlhf_lab.training.objective import surrogate_per_token, token_weights

# tolerance of the sum over tokens, by format
SHARES_GAP = MappingProxyType({"fp32": 1e-5, "tf32": 1e-3, "bf16": 5e-3})
BEFORE_THE_OBJECTIVE = ("normalize_reward", "advantages")
OBJECTIVE_TERMS = ("surrogate", "value", "entropy", "kl")  # with their signs in the objective
Entries = dict[str, Float[Tensor, "minibatch gen"]]


def ledger_entries(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    kl_coef: float,
) -> Entries:
    """Split the objective of a minibatch by token; 0 where the mask is False.

    Each token gets its part of the four means; over the real tokens the parts sum to the objective.
    With gradients on, the entries have them. The KL is the loss's: the run's estimate, times the
    token's weight in `loss_aggregation` over that in a token mean; or 0 if the reward has the KL.

    share_t = (min(r_t A_t, clip(r_t) A_t) - vf_coef/2 (V - R)^2 + ent_coef H_t - kl_coef KL_t) / N
    (with PPO's plain loss; another one has its own first term)
    """
    mask = minibatch.mask
    objective = Objective(args, forward=Forward(product_dtype(args.precision)))
    out = objective.run_policy(minibatch, policy, reference)
    entries = _surrogate(out.logprobs, minibatch, args) | {
        "return": minibatch.returns,
        "value": out.values,
        "kl": _penalized_kl(out, minibatch, objective),
        "entropy": out.entropy,
        "value_loss": _value_losses(out.values, minibatch, args) / mask.sum(),
    }
    bonus = args.ent_coef * entries["entropy"] - kl_coef * entries["kl"]
    entries["share"] = entries["surrogate"] - entries["value_loss"] + bonus / mask.sum()
    return {name: F.zero_masked(column, mask) for name, column in entries.items()}


def _surrogate(
    logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Entries:
    advantages = minibatch.advantages
    ratio = F.policy_ratio(logprobs, minibatch.logprobs)
    whitened = minibatch.whitened_advantages() if args.normalize_advantages else advantages
    clipped = ratio.clip(1 - args.clip_coef, 1 + args.clip_coef) * whitened
    return {
        "old_logprob": minibatch.logprobs,
        "logprob": logprobs,
        "ratio": ratio,
        "clipped": (clipped < ratio * whitened).to(ratio.dtype),
        "advantage": advantages,
        "whitened": whitened,
        "surrogate": surrogate_per_token(logprobs, minibatch, args),
    }


def _penalized_kl(
    out: PolicyOutputs, minibatch: ReplayMinibatch, objective: Objective
) -> Float[Tensor, "minibatch gen"]:
    if objective.penalizes_exact_kl:
        return out.kl
    if objective.args.kl_in == "reward":
        return torch.zeros_like(out.logprobs)
    kind, mask = objective.args.kl_estimator, minibatch.mask
    kl = F.kl_estimate(out.logprobs, minibatch.ref_logprobs, kind, mask)
    if objective.average_kl == "token_mean":
        return kl
    return kl * token_weights(mask, objective.average_kl, objective.args.gen_len) * mask.sum()


def _value_losses(
    values: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, "minibatch gen"]:
    errors = (values - minibatch.returns).square()
    if args.vf_clip is not None:
        moved = (values - minibatch.values).clamp(-args.vf_clip, args.vf_clip)
        errors = torch.maximum(errors, (minibatch.values + moved - minibatch.returns).square())
    return 0.5 * args.vf_coef * errors


def make_shares(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    kl_coef: float,
) -> Callable[[ByWeight], Float[Tensor, "term minibatch gen"]]:
    """Return a function from weights to each token's contribution to the objective, by term.

    Contributions sum to the objective; they are 0 where the mask is False.
    """

    def shares(weights: ByWeight) -> Float[Tensor, "term minibatch gen"]:
        # shortcuts without second derivatives (chunks of logits, joint casts) do not run with hooks
        with policy.base_model.unembed.register_forward_hook(lambda *_: None):
            ledger = lambda model: ledger_entries(model, reference, minibatch, args, kl_coef)
            entries = with_weights(policy, weights, ledger)
        n = minibatch.mask.sum()
        return torch.stack(
            [
                entries["surrogate"],
                -entries["value_loss"],
                args.ent_coef * entries["entropy"] / n,
                -kl_coef * entries["kl"] / n,
            ]
        )

    return shares


class StepLedger(Probe):
    """Contribution of every token of one step of a phase to the objective.

    With custom functions in the objective, the record has the terms of the package's functions.

    Check: the contributions of all tokens sum to the trainer's objective.

    Args:
        step: "first", with ratios of 1, or "last".
    """

    name = "step_ledger"
    question = "What does each token add to the objective of one step?"
    caveat = "The terms are those before the step; one step is not the whole phase."
    events = ("after_loss",)
    options = ("step", *Probe.options)
    step = "last"

    def observe(self, seen: Observation) -> Record:
        ctx, minibatch = seen.ctx, seen.ctx.minibatch
        entries = ledger_entries(ctx.policy, ctx.reference, minibatch, seen.args, ctx.kl_coef)
        tokenizer = ctx.policy.base_model.tokenizer
        sums = {name: exact(column).sum().item() for name, column in entries.items()}
        n, args = int(minibatch.mask.sum()), seen.args
        values = {
            "step": ctx.step,
            "steps": args.num_minibatches * args.batches_per_learning_phase,
            "real_tokens": n,
            "clipped_surrogate": sums["surrogate"],
            "value_loss": sums["value_loss"],
            "entropy_bonus": args.ent_coef * sums["entropy"] / n,
            "kl_coef": ctx.kl_coef,
            "kl_penalty": ctx.kl_coef * sums["kl"] / n,
            "objective": sums["share"],
            "prefix_len": minibatch.prefix_len,
            "tokens": spell_tokens(tokenizer, minibatch),
        }
        tensors = {name: column.float() for name, column in entries.items()}
        summed = lambda: _sum_check(seen, values["objective"])
        return Record(values, tensors | {"mask": minibatch.mask}, [summed])


def _sum_check(seen: Observation, found: float) -> Check:
    ctx, terms = seen.ctx, seen.ctx.terms
    replaceable = {field.name for field in dataclasses.fields(Overrides)}
    if (replaceable - set(BEFORE_THE_OBJECTIVE)) & set(seen.custom_components):
        settings = ctx.minibatch, Objective(seen.args), ctx.kl_coef
        terms = objective_terms(ctx.policy, ctx.reference, *settings)
    target = terms.objective.item()
    gap = abs(found - target) / max(1.0, abs(target))
    return Check.at_most(
        "the contributions of tokens sum to the objective", gap, SHARES_GAP[seen.args.rounding]
    )
