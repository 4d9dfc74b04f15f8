"""Broken training runs with one wrong component each, and the answers."""

import inspect
import textwrap
from types import MappingProxyType
from typing import Any, Literal

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.debugging import CULPRITS
from rlhf_lab.functional import calc_kl_penalty, compute_gae, token_rewards
from rlhf_lab.models import TransformerWithValueHead, load_model

BuggyRun = Literal["A", "B", "C"]


def _reference_that_learns(args: RLHFArgs) -> dict[str, Any]:
    policy = TransformerWithValueHead(load_model(args.base_model), seed=args.seed)
    return {"policy": policy, "reference": policy.base_model}


def _rewards_of_others(args: RLHFArgs) -> dict[str, Any]:
    def advantages(
        values: Float[Tensor, "batch gen"],
        rewards: Float[Tensor, " batch"],
        mask: Bool[Tensor, "batch gen"],
    ) -> Float[Tensor, "batch gen"]:
        shuffled = token_rewards(rewards.roll(1), mask)
        return compute_gae(values, shuffled, args.gamma, args.gae_lambda, mask)

    return {"advantages": advantages}


def _kl_rewarded(args: RLHFArgs) -> dict[str, Any]:
    def kl_penalty(
        kl: Float[Tensor, "batch gen"],
        kl_coef: float,
        mask: Bool[Tensor, "batch gen"],
    ) -> Float[Tensor, ""]:
        return calc_kl_penalty(kl, -kl_coef, mask)

    return {"kl_penalty": kl_penalty}


_PARTS = MappingProxyType({"A": _reference_that_learns, "B": _rewards_of_others, "C": _kl_rewarded})


def broken_parts(run: BuggyRun, args: RLHFArgs) -> dict[str, Any]:
    """Return the components for `RLHFTrainer(args, **parts)` that break a run."""
    return _PARTS[run](args)


def culprit(run: BuggyRun) -> str:
    """Return the suspect that broke a run."""
    return CULPRITS[run]


def reveal(run: BuggyRun) -> str:
    """Return the source of the function that broke a run."""
    return textwrap.dedent(inspect.getsource(_PARTS[run]))
