"""Checks of StepLedger's record: the ledger counted again from its stored columns."""

import dataclasses

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.training import Overrides
from tests.probes.audit.anew import (
    as_float64,
    as_rows_say,
    gap,
    off_mask,
    relative_gap,
    rounding,
    states_anew,
    value_rounding,
)
from tests.probes.audit.labels import check_tokens

Columns = dict[str, Float[Tensor, "minibatch gen"]]
SMALL = 1e-9
"""A share of a step is one over thousands of tokens; its misses are taken as shares of it."""
STORED_TERMS = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")


def bind_step_ledger(seen: Observation, record: Record) -> list[Check]:
    """Hold the stored columns to the minibatch, to each other, and to the trainer's own terms."""
    minibatch, mask = seen.ctx.minibatch, record.tensors["mask"].cpu()
    columns = {name: as_float64(x) for name, x in record.tensors.items() if name != "mask"}
    given = {"old_logprob": minibatch.logprobs, "advantage": minibatch.advantages}
    given["return"] = minibatch.returns
    checks = [
        *check_tokens(seen, record, minibatch.tokens, mask, "minibatch"),
        Check.at_most("the stored mask is the minibatch's", gap(mask, minibatch.mask), 0),
        Check.at_most("nothing is stored for tokens that do not count", off_mask(columns, mask), 0),
        *(
            Check.at_most(f"the stored {name}s are the minibatch's", gap(columns[name], x, mask), 0)
            for name, x in given.items()
        ),
        *_within_ledger(seen, record, columns, mask),
        *_terms(seen, record, columns, mask),
    ]
    if as_rows_say(seen):
        checks += _models(seen, columns, mask)
    return checks


def _within_ledger(
    seen: Observation, record: Record, columns: Columns, mask: Bool[Tensor, "minibatch gen"]
) -> list[Check]:
    """Columns that follow from other stored columns."""
    args, n, minibatch = seen.args, mask.sum(), seen.ctx.minibatch
    kl_coef = record.values["kl_coef"]
    ratio = (columns["logprob"] - columns["old_logprob"]).exp()
    bonus = args.ent_coef * columns["entropy"] - kl_coef * columns["kl"]
    share = columns["surrogate"] - columns["value_loss"] + bonus / n
    squares = (columns["value"] - columns["return"]).square()
    if args.vf_clip is not None:
        old = as_float64(minibatch.values)
        near = torch.minimum(
            torch.maximum(columns["value"], old - args.vf_clip), old + args.vf_clip
        )
        squares = torch.maximum(squares, (near - columns["return"]).square())
    found = {
        "ratio": ratio,
        "share": share,
        "value_loss": args.vf_coef * squares / 2 / n,
        "whitened": whitened(columns["advantage"], minibatch, args, mask),
    }
    weighed = columns["ratio"] * columns["whitened"]
    low, high = 1 - args.clip_coef, 1 + args.clip_coef
    limited = columns["ratio"].clamp(low, high) * columns["whitened"]
    if (args.policy_loss, args.loss_aggregation, args.clip_coef_high) == (
        "ppo",
        "token_mean",
        None,
    ):
        if args.dual_clip is None and args.max_log_ratio is None:
            found["surrogate"] = torch.minimum(weighed, limited) / n
    # Where rounding may decide which of the two is less, either is right.
    clear = mask & ((weighed - limited).abs() > 1e-5)
    bound = gap(columns["clipped"], (limited < weighed).double(), clear)
    bound += (columns["clipped"] * (weighed == limited))[mask].sum().item()
    checks = [
        Check.at_most(
            f"{name} follows from the stored columns",
            relative_gap(columns[name], x, mask, SMALL),
            1e-5,
        )
        for name, x in found.items()
    ]
    return [*checks, Check.at_most("clipped tokens are those beyond the clip", bound, 0)]


def whitened(
    advantages: Float[Tensor, "minibatch gen"],
    minibatch: object,
    args: RLHFArgs,
    mask: Bool[Tensor, "minibatch gen"],
) -> Float[Tensor, "minibatch gen"]:
    """Advantages in units of their standard deviation over the tokens that teach; 0 elsewhere."""
    if not args.normalize_advantages:
        return advantages
    real = mask if minibatch.teaching is None else mask & minibatch.teaching.cpu()[:, None]
    among = advantages[real]
    if not len(among) or among.min() == among.max():
        return torch.zeros_like(advantages)
    scaled = (advantages - among.mean()) / (among.var(unbiased=len(among) > 1) + 1e-8).sqrt()
    return scaled * real


def _terms(
    seen: Observation, record: Record, columns: Columns, mask: Bool[Tensor, "minibatch gen"]
) -> list[Check]:
    """The trainer's own terms, values and log-probs, where all its functions are the package's."""
    names = {field.name for field in dataclasses.fields(Overrides)}
    if names & set(seen.custom_components):
        return []
    terms, values = seen.ctx.terms, record.values
    slack = 1e-4 if seen.args.rounding == "fp32" else 0.05
    slack = seen.allowed(slack, half=0.05)
    checks = []
    for name in STORED_TERMS:
        found = getattr(terms, name).item()
        miss = abs(values[name] - found) / max(1.0, abs(found))
        checks.append(Check.at_most(f"{name} is the trainer's", miss, slack))
    logprobs = relative_gap(columns["logprob"], terms.logprobs, mask)
    stated = relative_gap(columns["value"], terms.values, mask)
    # in a format of 8 bits, hooked and packed forwards may differ by more on the rarest of tokens
    checks.append(Check.at_most("log-probs are the trainer's", logprobs, 2 * rounding(seen)))
    checks.append(Check.at_most("values are the trainer's", stated, value_rounding(seen)))
    return checks


def _models(
    seen: Observation, columns: Columns, mask: Bool[Tensor, "minibatch gen"]
) -> list[Check]:
    """Entropy and KL of the first rows, from fresh forwards of both models."""
    args, texts = seen.args, seen.ctx.minibatch
    now = states_anew(seen.ctx.policy, texts, mask.shape[1], args.temperature)
    before = states_anew(seen.ctx.reference, texts, mask.shape[1], args.temperature)
    rows = len(now.logits)
    found = {"entropy": now.entropy()}
    if args.kl_in == "reward":
        found["kl"] = torch.zeros_like(columns["kl"][:rows])
    elif args.kl_estimator == "exact" and "kl_estimator" not in seen.custom_components:
        found["kl"] = now.kl(before)
    return [
        Check.at_most(
            f"the stored {name} is a fresh forward's",
            relative_gap(columns[name][:rows], column, mask[:rows]),
            2 * rounding(seen),
        )
        for name, column in found.items()
    ]
