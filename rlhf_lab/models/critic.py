"""The critic: shared with the policy, a detached value head, or a separate transformer."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel, empty_cache, final_residual
from rlhf_lab.models.reference import normalized_residuals, trainable_copy
from rlhf_lab.models.value_head import (
    PolicyStates,
    TransformerWithValueHead,
    ValueHead,
    make_value_head,
)


class DetachedValueHead(ValueHead):
    """A value head whose gradient stops at its input."""

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """Compute the values without a gradient to the transformer."""
        return super().forward(normalized.detach())


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
        """Return residual and hidden states of the policy, and values of the critic.

        A `past_kv_cache` has the layers of both models; it comes from `init_cache`.
        """
        policy_cache, critic_cache = split_cache(past_kv_cache, self.base_model.cfg.n_layers)
        values = self.critic_values(tokens, attention_mask, critic_cache)
        residual = final_residual(self.base_model, tokens, attention_mask, policy_cache)
        if past_kv_cache is not None:
            past_kv_cache.previous_attention_mask = policy_cache.previous_attention_mask
        return PolicyStates(residual, self.base_model.ln_final(residual), values)

    def critic_values(
        self, tokens: Int[Tensor, "batch seq"], mask: Tensor | None, cache: Any
    ) -> Float[Tensor, "batch seq"]:
        """Run the critic and the value head."""
        return self.value_head(normalized_residuals(self.critic, tokens, mask, cache))[..., 0]

    def call_model(
        self, tokens: Int[Tensor, "batch seq"], mask: Tensor | None = None, cache: Any = None
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """Call the transformer as a whole (see `TransformerWithValueHead`), and the critic."""
        policy_cache, critic_cache = split_cache(cache, self.base_model.cfg.n_layers)
        values = self.critic_values(tokens, mask, critic_cache)
        mask = torch.ones_like(tokens) if mask is None else mask.long()
        logits = self.base_model(tokens, attention_mask=mask, past_kv_cache=policy_cache)
        if cache is not None:
            cache.previous_attention_mask = policy_cache.previous_attention_mask
        return logits, values


def split_cache(cache: Any, n_layers: int) -> tuple[Any, Any]:
    """Return the caches of policy and critic, each of `n_layers` layers; None without a cache."""
    if cache is None:
        return None, None
    if len(cache.entries) != 2 * n_layers:
        raise ValueError(
            f"past_kv_cache has {len(cache.entries)} layers, expected {n_layers} of the policy and "
            f"{n_layers} of the critic. Make it with init_cache(policy, batch_size)."
        )
    first, second = cache.entries[:n_layers], cache.entries[n_layers:]
    return dataclasses.replace(cache, entries=first), dataclasses.replace(cache, entries=second)


def init_cache(policy: TransformerWithValueHead, batch_size: int) -> Any:
    """Return an empty KV cache for the layers of a policy, then those of its critic."""
    cache = empty_cache(policy.base_model, batch_size)
    if isinstance(policy, TransformerWithCritic):
        critic = empty_cache(policy.critic, batch_size)
        cache = dataclasses.replace(cache, entries=cache.entries + critic.entries)
    return cache


def make_policy(
    base_model: HookedModel, value_head: str = "shared", seed: int = 0
) -> TransformerWithValueHead:
    """Return a policy with a value head of one of three kinds.

    - "shared": it reads the policy's residual, and its gradient flows into the transformer.
    - "detached": it reads the same residual, without a gradient to the transformer.
    - "separate": it reads the residual of a critic (see `TransformerWithCritic`).
    """
    if value_head == "shared":
        return TransformerWithValueHead(base_model, seed=seed)
    if value_head == "detached":
        head = DetachedValueHead(*make_value_head(base_model.cfg.d_model, seed))
        return TransformerWithValueHead(base_model, head)
    if value_head == "separate":
        return TransformerWithCritic(base_model, seed=seed)
    raise ConfigError(f"Unknown value_head {value_head!r}. Choose shared, detached or separate.")
