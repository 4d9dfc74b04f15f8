"""Functions of the trainer that the caller can override, by name."""

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError

COMPONENTS = "policy reference prompts reward_fn true_reward_fn kl_controller optimizer".split()
COMPONENTS += "scheduler rollout_engine".split()
# names in TRL, and what replaces them
ELSEWHERE = dict(model="policy", ref_model="reference", reward_model="reward_fn", dataset="prompts")
ELSEWHERE |= dict(reward_funcs="reward_fn", lr_scheduler="scheduler", callbacks="trainer.on(event)")
ELSEWHERE |= dict.fromkeys(("tokenizer", "processing_class"), "policy.base_model.set_tokenizer")
ELSEWHERE |= dict(data_collator="prompts=[...], texts that the trainer tokenizes and pads")
PerToken = Float[Tensor, "batch gen"]
# functions that are called with positional arguments, and with which
CALLED_WITH = {
    "normalize_reward": "rewards",
    "logprobs": "logits tokens prefix_len temperature",
    "clipped_surrogate": "logprobs old_logprobs advantages clip_coef mask normalize",
    "value_loss": "values returns vf_coef mask old_values clip",
    "entropy_bonus": "entropy ent_coef mask",
    "kl_penalty": "kl kl_coef mask",
}


@dataclass(frozen=True)
class Overrides:
    """Functions of advantages and objective; each can be overridden.

    Args:
        normalize_reward: `(rewards)`, used if `args.normalize_reward`.
        advantages: any of `values`, `rewards`, `token_rewards`, `mask`, `gamma`, `lam`, `group` and
            `greedy_rewards`, by parameter name (`*args`: values, rewards, mask); None for the
            estimator that `args.advantages` names.
        logprobs: `(logits, tokens, prefix_len, temperature)`.
        clipped_surrogate: `(logprobs, old_logprobs, advantages, clip_coef, mask, normalize)`, of
            PPO in its plain form; `normalize` is False if the advantages are whitened already.
        policy_loss: what each token adds to the policy objective; any of `logprobs`,
            `old_logprobs`, `advantages`, `mask`, `clip_coef`, `clip_coef_high` and `dual_clip`, by
            parameter name (`*args`: logprobs, old_logprobs, advantages, clip_coef, mask); None for
            the one that `args.policy_loss` names.
        value_loss: `(values, returns, vf_coef, mask, old_values, clip)`.
        entropy_bonus: `(entropy, ent_coef, mask)`, of the entropy of each token.
        kl_penalty: `(kl, kl_coef, mask)`, of the exact KL of each token, for `kl_in="loss"`.
        kl_estimator: KL of each token from those of `logprobs`, `ref_logprobs` and `mask` that it
            has as parameters (`*args`: the first two); None for `args.kl_estimator`.
    """

    normalize_reward: Callable[..., Tensor] = F.normalize_reward
    advantages: Callable[..., Tensor] | None = None
    logprobs: Callable[..., Tensor] = F.get_logprobs
    clipped_surrogate: Callable[..., Tensor] = F.calc_clipped_surrogate_objective
    policy_loss: Callable[..., Tensor] | None = None
    value_loss: Callable[..., Tensor] = F.calc_value_function_loss
    entropy_bonus: Callable[..., Tensor] = F.calc_entropy_bonus
    kl_penalty: Callable[..., Tensor] = F.calc_kl_penalty
    kl_estimator: Callable[..., Tensor] | None = None

    @classmethod
    def choose(cls, given: dict[str, Any]) -> "Overrides":
        """Return the defaults with custom functions in their place, which are validated."""
        names = [*COMPONENTS, *(field.name for field in dataclasses.fields(cls))]
        for name, function in given.items():
            if name not in names:
                remedy = f"Use {ELSEWHERE[name]}" if name in ELSEWHERE else ""
                remedy = remedy or f"Choose one of: {', '.join(names)}"
                raise ConfigError(f"RLHFTrainer has no component {name!r}. {remedy}.")
            if name in CALLED_WITH and function is not None:
                try:
                    F.check_order(function, CALLED_WITH[name].split(), name)
                except ValueError as error:
                    raise ConfigError(str(error)) from error
        return cls(**{name: fn for name, fn in given.items() if fn is not None})

    def estimate_advantages(
        self,
        args: RLHFArgs,
        values: PerToken,
        rewards: Float[Tensor, " batch"] | PerToken,
        mask: Bool[Tensor, "batch gen"],
        token_rewards: PerToken | None = None,
        group: Int[Tensor, " batch"] | None = None,
        greedy_rewards: Float[Tensor, " batch"] | None = None,
    ) -> PerToken:
        """Compute advantages with the custom estimator, or the one that `args.advantages` names."""
        if token_rewards is None:
            token_rewards = F.token_rewards(rewards, mask)
        compared = {"group": group, "greedy_rewards": greedy_rewards}
        inputs = self._estimator(args), values, token_rewards, mask
        return F.estimate_advantages(*inputs, gamma=args.gamma, lam=args.gae_lambda, **compared)

    def estimate_returns(
        self,
        args: RLHFArgs,
        advantages: PerToken,
        values: PerToken,
        token_rewards: PerToken,
        mask: Bool[Tensor, "batch gen"],
    ) -> PerToken:
        """Compute the value head's targets: advantages plus values, or rewards to go."""
        parameters = self.estimator_parameters(args)
        if "values" in parameters or any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
            return F.compute_returns(advantages, values, mask)
        return F.rewards_to_go(token_rewards, args.gamma, mask)

    def _estimator(self, args: RLHFArgs) -> Callable[..., Tensor]:
        name = args.advantages if self.advantages is None else self.advantages
        return F.look_up(name, F.ADVANTAGES, "advantages")

    def estimator_parameters(self, args: RLHFArgs) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the advantage estimator by name, such as greedy_rewards."""
        return inspect.signature(self._estimator(args)).parameters


def validate_terms(*terms: Any) -> None:
    """Raise ConfigError unless each term is one number with a gradient, or 0."""
    names = "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty"
    for name, term in zip(names, terms, strict=True):
        if not isinstance(term, Tensor) or term.ndim:
            what = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else term
            raise ConfigError(
                f"{name} returned {what}. Return one number in a tensor, such as the masked_mean "
                "over the real tokens."
            )
        if torch.is_grad_enabled() and not term.requires_grad and term.item():
            raise ConfigError(f"{name} returned a number without gradient. Do not detach it.")


def describe_source(part: Any) -> str:
    """Return the name of a function or class, and a digest of its source and arguments."""
    if isinstance(part, Mapping):
        return ", ".join(f"{name}: {describe_source(each)}" for name, each in part.items())
    if isinstance(part, list | tuple):
        return ", ".join(map(describe_source, part))
    if isinstance(part, functools.partial):
        name = describe_source(part.func)
        held = [*part.args, *part.keywords, *part.keywords.values()]
    else:
        cells = getattr(part, "__closure__", None) or ()  # empty before a variable is assigned
        held = [cell.cell_contents for cell in cells if cell != CellType()]
        owner = part.__self__ if inspect.ismethod(part) else part
        held += vars(owner).values() if hasattr(owner, "__dict__") else ()
        part = part if hasattr(part, "__qualname__") else type(part)
        name = part.__qualname__
    try:
        source = inspect.getsource(part)
    except (OSError, TypeError):  # built in, or typed at a prompt
        source = ""
    values = json.dumps(held, skipkeys=True, default=lambda x: getattr(x, "__qualname__", None))
    return f"{name} {hashlib.sha256(f'{source}{values}'.encode()).hexdigest()[:12]}"
