"""The functions of the trainer that can be the caller's own, by name."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError

OBJECTS = (
    *("policy", "reference", "prompts", "reward_fn", "gold_fn", "kl_controller"),
    *("optimizer", "scheduler"),
)
"""The parts of a trainer besides these functions; see `Parts`."""
# The parts that are called with positional arguments, and with which.
CALLED_WITH = {
    "normalize_reward": "rewards",
    "logprobs": "logits tokens prefix_len temperature",
    "clipped_surrogate": "logprobs old_logprobs advantages clip_coef mask normalize",
    "value_loss": "values returns vf_coef mask old_values clip",
    "entropy_bonus": "entropy ent_coef mask",
    "kl_penalty": "kl kl_coef mask",
}


NAMES_ELSEWHERE = MappingProxyType(
    {
        "model": "policy",
        "ref_model": "reference",
        "actor": "policy",
        "dataset": "prompts",
        "reward_model": "reward_fn",
        "lr_scheduler": "scheduler, with its optimizer,",
        "kl_scheduler": "kl_controller",
    }
)
"""What parts are called in TRL, OpenRLHF and torchrl, and what they are called here."""


@dataclass(frozen=True)
class Overrides:
    """The functions that make advantages and objective; each can be the caller's own.

    Args:
        normalize_reward: `(rewards)`, used when `args.normalize_reward`.
        advantages: any of `values`, `rewards`, `token_rewards`, `mask`, `gamma`, `lam`, `group` and
            `greedy_rewards`, by the names of its parameters (`*args`: values, rewards, mask); None
            takes the estimator that `args.advantages` names.
        logprobs: `(logits, tokens, prefix_len, temperature)`.
        clipped_surrogate: `(logprobs, old_logprobs, advantages, clip_coef, mask, normalize)`, PPO's
            in its plain form; `normalize` is False where the advantages are whitened already (see
            `Objective.surrogate`).
        policy_loss: what each token adds to the policy's objective; any of `logprobs`,
            `old_logprobs`, `advantages`, `mask`, `clip_coef`, `clip_coef_high` and `dual_clip`, by
            the names of its parameters (`*args`: logprobs, old_logprobs, advantages, clip_coef,
            mask); None takes the one that `args.policy_loss` names.
        value_loss: `(values, returns, vf_coef, mask, old_values, clip)`.
        entropy_bonus: `(entropy, ent_coef, mask)`, of the entropy of each token.
        kl_penalty: `(kl, kl_coef, mask)`, of the exact KL of each token, for `kl_in="loss"`.
        kl_estimator: the KL of each token from those of `logprobs`, `ref_logprobs` and `mask` that
            its parameters name (`*args`: the first two); None takes what `args.kl_estimator` names.
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
        """The defaults, with those that the caller gives in their place.

        Raises:
            ConfigError: a name that is no part of the trainer, or a function that takes other
                arguments than that part is called with.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name, function in given.items():
            if name in NAMES_ELSEWHERE:
                raise ConfigError(
                    f"RLHFTrainer has no part {name!r}; hand in {NAMES_ELSEWHERE[name]} instead."
                )
            if name not in names:
                raise ConfigError(
                    f"RLHFTrainer has no part {name!r}; the parts are "
                    f"{', '.join([*OBJECTS, *names])}."
                )
            if not callable(function) and function is not None:
                raise ConfigError(f"{name}={function!r} is not callable. See `Overrides`.")
            if name in CALLED_WITH:
                try:
                    F.check_order(function, CALLED_WITH[name].split(), name)
                except ValueError as error:
                    raise ConfigError(str(error)) from error
        return cls(**given)

    def check(self, args: RLHFArgs) -> None:
        """Refuse a function of the caller's that these arguments would leave unused.

        Raises:
            ConfigError: there is one.
        """
        own_surrogate = self.clipped_surrogate is not F.calc_clipped_surrogate_objective
        if own_surrogate and not self.clips_plainly(args):
            raise ConfigError(
                "clipped_surrogate is called for the plain policy_loss='ppo' only; leave "
                "policy_loss, clip_coef_high, dual_clip and loss_aggregation as they were, or hand "
                "it in as policy_loss."
            )
        own_penalty = self.kl_penalty is not F.calc_kl_penalty
        if own_penalty and (args.kl_in != "loss" or self.sampled_kl(args) is not None):
            raise ConfigError(
                "kl_penalty is called for kl_in='loss' with kl_estimator='exact' only; leave them "
                "so, or hand in a kl_estimator of your own."
            )

    def sampled_kl(self, args: RLHFArgs) -> str | Callable[..., Tensor] | None:
        """What estimates the KL from sampled tokens; None where it is the exact one."""
        if self.kl_estimator is not None:
            return self.kl_estimator
        return None if args.kl_estimator == "exact" else args.kl_estimator

    def clips_plainly(self, args: RLHFArgs) -> bool:
        """Whether the policy's objective is `clipped_surrogate`: one clip, a mean over tokens."""
        return (
            self.policy_loss is None
            and (args.policy_loss, args.loss_aggregation) == ("ppo", "token_mean")
            and args.clip_coef_high is None
            and args.dual_clip is None
        )

    def estimate_advantages(
        self,
        args: RLHFArgs,
        values: Float[Tensor, "batch gen"],
        rewards: Float[Tensor, " batch"] | Float[Tensor, "batch gen"],
        mask: Bool[Tensor, "batch gen"],
        token_rewards: Float[Tensor, "batch gen"] | None = None,
        group: Int[Tensor, " batch"] | None = None,
        greedy_rewards: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch gen"]:
        """Advantages by the caller's estimator, or by the one that `args.advantages` names.

        Without `token_rewards`, the last real token has the reward; see `ppo.assign_credit`.
        """
        if token_rewards is None:
            token_rewards = F.token_rewards(rewards, mask)
        return F.estimate_advantages(
            self._estimator(args),
            values,
            token_rewards,
            mask,
            gamma=args.gamma,
            lam=args.gae_lambda,
            group=group,
            greedy_rewards=greedy_rewards,
        )

    def estimate_returns(
        self,
        args: RLHFArgs,
        advantages: Float[Tensor, "batch gen"],
        values: Float[Tensor, "batch gen"],
        token_rewards: Float[Tensor, "batch gen"],
        mask: Bool[Tensor, "batch gen"],
    ) -> Float[Tensor, "batch gen"]:
        """What the value head is trained towards.

        Advantages plus values; where the estimator does without values, the rewards to go.
        """
        parameters = self._parameters(args)
        any_order = inspect.Parameter.VAR_POSITIONAL in {p.kind for p in parameters.values()}
        if "values" in parameters or any_order:
            return F.compute_returns(advantages, values, mask)
        return F.rewards_to_go(token_rewards, args.gamma, mask)

    def wants_greedy(self, args: RLHFArgs) -> bool:
        """Whether the estimator of the advantages wants the rewards of greedy answers."""
        return "greedy_rewards" in self._parameters(args)

    def compares_groups(self, args: RLHFArgs) -> bool:
        """Whether the estimator of the advantages compares the answers to a prompt."""
        return "group" in self._parameters(args)

    def _estimator(self, args: RLHFArgs) -> Callable[..., Tensor]:
        """The caller's own estimator of advantages, or the one that `args` names."""
        return F.look_up(self.advantages or args.advantages, F.ADVANTAGES, "advantages")

    def _parameters(self, args: RLHFArgs) -> Mapping[str, inspect.Parameter]:
        """What the estimator of the advantages takes."""
        return inspect.signature(self._estimator(args)).parameters


def validate_terms(**terms: Any) -> None:
    """Refuse terms of the objective that are not one number each, in a tensor.

    Raises:
        ConfigError: one is not, as when the caller's function leaves out the mean.
    """
    for part, term in terms.items():
        if isinstance(term, Tensor) and not term.ndim:
            continue
        what = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else repr(term)
        raise ConfigError(
            f"{part} returned {what}; return one number in a tensor, such as the masked_mean over "
            "the real tokens."
        )
