"""The critic: shared with the policy, a detached value head, or a separate transformer."""

from collections.abc import Callable

import einops
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.reference import normalized_residuals, trainable_copy
from rlhf_lab.models.transformer_lens import (
    HookedTransformer,
    KVCache,
    empty_cache,
    join_caches,
    share_mask,
    split_cache,
)
from rlhf_lab.models.value_head import TransformerWithValueHead, ValueHead, make_value_head


class DetachedValueHead(ValueHead):
    """The layers of a value head, whose gradient stops at their input."""

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """The values, as a function of the head's own weights only."""
        return super().forward(normalized.detach())


class LinearValueHead(nn.Linear):
    """A value head of one layer, as reward models have it, in the precision of its own weights."""

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """The value of each state."""
        return super().forward(normalized.to(self.weight.dtype))


class TransformerWithCritic(TransformerWithValueHead):
    """A policy whose values come from `critic`, a copy of the language model that only learns them.

    Neither loss touches the other's weights, for twice the forwards. Hooks on `critic` fire like
    those on `base_model`.

    Args:
        critic: another model of as many layers, in place of the copy.
    """

    def __init__(
        self,
        base_model: HookedTransformer,
        value_head: nn.Module | None = None,
        seed: int = 0,
        critic: HookedTransformer | None = None,
    ) -> None:
        super().__init__(base_model, value_head, seed)
        self.critic = trainable_copy(base_model) if critic is None else critic

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        past_kv_cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """Logits of the policy and values of the critic; see `TransformerWithValueHead.forward`.

        A `past_kv_cache` holds the layers of both models; it comes from `init_cache`.
        """
        own = critics = None
        if past_kv_cache is not None:
            own, critics = split_cache(past_kv_cache, self.base_model.cfg.n_layers)

        def run(
            tokens: Int[Tensor, "batch seq"], mask: Tensor | None = None
        ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
            mask = torch.ones_like(tokens) if mask is None else mask.long()
            normalized = normalized_residuals(self.critic, tokens, mask, critics)
            values = einops.rearrange(self.value_head(normalized), "batch seq 1 -> batch seq")
            return self.base_model(tokens, attention_mask=mask, past_kv_cache=own), values

        if past_kv_cache is None:
            return run_left_padded(run, input_ids, attention_mask)
        outputs = run(input_ids, attention_mask)
        share_mask(past_kv_cache, own)
        return outputs

    def _apply(self, fn: Callable, recurse: bool = True) -> "TransformerWithCritic":
        """Move or cast everything, the critic's configuration included."""
        super()._apply(fn, recurse)
        self.critic.cfg.device = self.base_model.cfg.device
        self.critic.cfg.dtype = self.base_model.cfg.dtype
        return self


def init_cache(policy: TransformerWithValueHead, batch_size: int) -> KVCache:
    """An empty KV cache for a policy: its layers, then the critic's if it has one."""
    cache = empty_cache(policy.base_model.cfg, policy.device, batch_size)
    if isinstance(policy, TransformerWithCritic):
        more = empty_cache(policy.critic.cfg, policy.device, batch_size)
        cache = join_caches(cache, more)
    return cache


def make_policy(
    base_model: HookedTransformer, value_head: str = "shared", seed: int = 0
) -> TransformerWithValueHead:
    """A policy on a language model, with one of the three kinds of value head.

    - "shared": the head reads the policy's own residual, and its gradient flows into the trunk.
    - "detached": it reads the same residual, but its gradient stops there.
    - "separate": it reads the residual of a critic; see `TransformerWithCritic`.

    Raises:
        ConfigError: another kind.
    """
    if value_head == "shared":
        return TransformerWithValueHead(base_model, seed=seed)
    if value_head == "detached":
        head = DetachedValueHead(*make_value_head(base_model.cfg.d_model, seed))
        return TransformerWithValueHead(base_model, head)
    if value_head == "separate":
        return TransformerWithCritic(base_model, seed=seed)
    raise ConfigError(f"value_head={value_head!r} is unknown; choose shared, detached or separate.")
