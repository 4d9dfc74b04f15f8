"""The critic: a separate transformer that computes the values, and its KV cache."""

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.models.hooked_model import HookedModel, call_model, empty_cache, final_residual
from rlhf_lab.models.reference import normalized_residuals, trainable_copy
from rlhf_lab.models.value_head import PolicyStates, TransformerWithValueHead


class LinearValueHead(nn.Linear):
    """A value head of one layer, as in reward models."""

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """Compute the value of each state, in the dtype of the weights."""
        return super().forward(normalized.to(self.weight.dtype))


class TransformerWithCritic(TransformerWithValueHead):
    """A policy whose values come from a separate transformer, the critic.

    Args:
        critic: a model with as many layers; a trainable copy of `base_model` if None.
    """

    def __init__(
        self,
        base_model: HookedModel,
        value_head: nn.Module | None = None,
        seed: int = 0,
        critic: HookedModel | None = None,
    ) -> None:
        super().__init__(base_model, value_head, seed)
        self.critic = trainable_copy(base_model) if critic is None else critic

    def states(
        self,
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        past_kv_cache: Any = None,
    ) -> PolicyStates:
        """Return residual and hidden states of the policy, and values of the critic."""
        policy_cache, critic_cache = past_kv_cache or (None, None)
        values = self.critic_values(tokens, attention_mask, critic_cache)
        residual = final_residual(self.base_model, tokens, attention_mask, policy_cache)
        return PolicyStates(residual, self.base_model.ln_final(residual), values)

    def critic_values(
        self, tokens: Int[Tensor, "batch seq"], mask: Tensor | None, cache: Any
    ) -> Float[Tensor, "batch seq"]:
        """Run the critic and the value head."""
        return self.value_head(normalized_residuals(self.critic, tokens, mask, cache))[..., 0]

    def call_base_model(
        self, tokens: Int[Tensor, "batch seq"], mask: Tensor | None, cache: Any
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """Call a base model whose `forward` was replaced or hooked, and the critic."""
        policy_cache, critic_cache = cache or (None, None)
        values = self.critic_values(tokens, mask, critic_cache)
        return call_model(self.base_model, tokens, mask, policy_cache), values


def init_cache(policy: TransformerWithValueHead, batch_size: int) -> Any:
    """Return an empty KV cache for a policy; with a critic, a pair of caches."""
    cache = empty_cache(policy.base_model, batch_size)
    if isinstance(policy, TransformerWithCritic):
        return cache, empty_cache(policy.critic, batch_size)
    return cache
