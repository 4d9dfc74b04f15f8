"""The choice of an advantage estimator or a policy loss, by name or as a function."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.advantages import (
    compute_advantages,
    compute_gae,
    grpo_advantages,
    rloo_advantages,
)
from rlhf_lab.functional.aggregation import Aggregation, aggregate
from rlhf_lab.functional.baselines import (
    dr_grpo_advantages,
    opo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rewards_to_go,
)
from rlhf_lab.functional.by_name import call_by_name, look_up
from rlhf_lab.functional.masks import (
    Denominator,
    check_same_shape,
    sequence_sum,
    whiten,
    zero_masked,
)
from rlhf_lab.functional.policy_loss import (
    cispo_surrogate,
    gspo_surrogate,
    policy_gradient_surrogate,
    ppo_surrogate,
)

__all__ = ["ADVANTAGES", "POLICY_OBJECTIVES", "calc_policy_objective", "estimate_advantages"]


def _one_step(
    values: Float[Tensor, "batch gen"],
    token_rewards: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    gamma: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """`compute_advantages` by the rewards of each token: its own parameter is named `rewards`."""
    return compute_advantages(values, token_rewards, mask, gamma)


ADVANTAGES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "one_step": _one_step,
        "gae": compute_gae,
        "reinforce": rewards_to_go,
        "reinforce++": reinforce_plus_plus_advantages,
        "reinforce++_baseline": reinforce_plus_plus_baseline_advantages,
        "remax": remax_advantages,
        "rloo": rloo_advantages,
        "grpo": grpo_advantages,
        "dr_grpo": dr_grpo_advantages,
        "opo": opo_advantages,
    }
)
"""Estimators of advantages by name, as `estimate_advantages` looks them up."""

POLICY_OBJECTIVES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "ppo": ppo_surrogate,
        "gspo": gspo_surrogate,
        "cispo": cispo_surrogate,
        "policy_gradient": policy_gradient_surrogate,
    }
)
"""Policy objectives by name, as `calc_policy_objective` looks them up."""


def estimate_advantages(
    estimator: str | Callable[..., Tensor],
    values: Float[Tensor, "batch gen"] | None,
    token_rewards: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    group: Int[Tensor, " batch"] | None = None,
    greedy_rewards: Float[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Estimate advantages with an estimator of `ADVANTAGES`, or with one that is handed in.

    1. Look the estimator up, if it is a name.
    2. Call it with those of `values`, `rewards` (the sum over each sequence's real tokens),
       `token_rewards`, `mask`, `gamma`, `lam`, `group` and `greedy_rewards` that its parameters
       name, in any order; `compute_gae` and `rloo_advantages` can be handed in as they are. One
       that takes `*args` gets values, rewards and mask.
    3. An estimator that gives one number per sequence gives it to each of its tokens.
    4. Put 0 where the mask is False.

    Raises ValueError for an unknown name, for a parameter that nothing is given for, and for a
    result that is neither [batch] nor [batch gen].
    """
    function = look_up(estimator, ADVANTAGES, "advantages")
    check_same_shape(mask=mask, token_rewards=token_rewards, values=values)
    check_same_shape(mask.shape[:1], group=group, greedy_rewards=greedy_rewards)
    available = {
        "values": values,
        "rewards": sequence_sum(token_rewards, mask),
        "token_rewards": token_rewards,
        "mask": mask,
        "gamma": gamma,
        "lam": lam,
        "group": group,
        "greedy_rewards": greedy_rewards,
    }
    result = call_by_name(function, available, "advantages", ("values", "rewards", "mask"))
    if result.shape == mask.shape[:1]:
        result = result[:, None].expand(mask.shape)
    if result.shape != mask.shape:
        raise ValueError(
            f"advantages came back with shape {tuple(result.shape)} for a mask of shape "
            f"{tuple(mask.shape)}; return one number per token, or one per sequence."
        )
    return zero_masked(result, mask)


def calc_policy_objective(
    objective: str | Callable[..., Tensor],
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    *,
    clip_coef: float = 0.2,
    clip_coef_high: float | None = None,
    dual_clip: float | None = None,
    normalize: bool = False,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Compute a policy objective of `POLICY_OBJECTIVES`, or one that is handed in; maximised.

    1. Look the objective up, if it is a name.
    2. If `normalize`, whiten the advantages over the real tokens (they must be all of them: the
       parts of a cut minibatch need advantages that were whitened together).
    3. Call it with those of `logprobs`, `old_logprobs`, `advantages`, `mask`, `clip_coef`,
       `clip_coef_high` and `dual_clip` that its parameters name (`*args`: the first five of them
       in the order logprobs, old_logprobs, advantages, clip_coef, mask).
    4. Aggregate what it gives each token (see `aggregate`).

    Raises ValueError for an unknown name, for a parameter that nothing is given for, for a setting
    that the objective has no parameter for, and for a result that is not [batch gen].
    """
    function = look_up(objective, POLICY_OBJECTIVES, "policy_objective")
    settings = {"clip_coef_high": clip_coef_high, "dual_clip": dual_clip}
    _refuse_unused(function, settings, "policy_objective")
    available = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "advantages": whiten(advantages, mask) if normalize else advantages,
        "mask": mask,
        "clip_coef": clip_coef,
    }
    in_order = ("logprobs", "old_logprobs", "advantages", "clip_coef", "mask")
    result = call_by_name(function, available | settings, "policy_objective", in_order)
    if result.shape != mask.shape:
        raise ValueError(
            f"policy_objective came back with shape {tuple(result.shape)} for a mask of shape "
            f"{tuple(mask.shape)}; return one number per token, and leave the mean to aggregation."
        )
    return aggregate(result, mask, aggregation, denominator)


def _refuse_unused(function: Callable[..., Any], settings: Mapping[str, Any], field: str) -> None:
    """Refuse a setting that is given to a function which has no parameter for it."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, value in settings.items():
        if value is not None and name not in parameters and not takes_all:
            raise ValueError(
                f"{name} is {value}, but {field} {getattr(function, '__name__', function)} has no "
                f"such setting; leave {name} out, or choose another {field}."
            )
