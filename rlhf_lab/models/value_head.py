"""The policy: a hooked transformer and a value head, or a second transformer as the critic."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import ActivationCache, HookedRootModule

from rlhf_lab.errors import ConfigError, format_argument
from rlhf_lab.models.hooked_model import (
    VALUE_HOOK,
    HookedModel,
    Logits,
    Residuals,
    TokenIds,
    TokenMask,
    empty_cache,
    final_residual,
    is_original,
    normalized_residual,
    trainable_copy,
    unembed,
)
from rlhf_lab.models.hooked_transformer import HookPoint, is_cached_by_default, is_hooked
from rlhf_lab.models.load import load_model
from rlhf_lab.models.padding import run_left_padded

Policy = TypeVar("Policy", bound=nn.Module)
StateValues = Float[Tensor, "batch seq"]
LogitsAndValues = tuple[Logits, StateValues]


class ValueHead(nn.Sequential):
    """Two linear layers with a ReLU between them, and hook points."""

    def __init__(self, first: nn.Module, activation: nn.Module, last: nn.Module) -> None:
        super().__init__(first, activation, last)
        self.hook_in = HookPoint()  # [batch seq d_model]
        self.hook_hidden = HookPoint()  # [batch seq hidden], after the ReLU
        self.hook_value = HookPoint()  # [batch seq 1]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self[0], self[1], self[2]))  # hook points are not layers

    def __len__(self) -> int:
        return 3

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """Compute the value of each state, in the dtype of the weights."""
        x = self.hook_in(normalized.to(self[0].weight.dtype))
        hidden = self.hook_hidden(self[1](self[0](x)))
        return self.hook_value(self[2](hidden))


class DetachedValueHead(ValueHead):
    """A value head whose gradient stops at its input."""

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        return super().forward(normalized.detach())


def make_value_head(d_model: int, seed: int = 0, kind: type[ValueHead] = ValueHead) -> ValueHead:
    """Return a head d -> 4d -> 1. Its first values are near 0, since advantages would be noise.

    Huang et al. 2024, "The N Implementation Details of RLHF with PPO".
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = kind(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, 1))
        nn.init.normal_(head[2].weight, std=1e-2 / (4 * d_model) ** 0.5)
        nn.init.zeros_(head[2].bias)
    return head


class PolicyStates(NamedTuple):
    """Residual stream after the last block, the same after the final norm, and values."""

    residual: Residuals
    hidden: Residuals
    values: StateValues


class TransformerWithValueHead(HookedRootModule):
    """A `HookedTransformer` with a value head hooked to `ln_final.hook_normalized`.

    Hooks on `base_model` fire in sampling and in training. The value head's gradient flows into the
    transformer. The hook points of both are in `hook_dict`, those of the value head with names such
    as `value_head.hook_in`; `hooks`, `add_hook` and `run_with_cache` accept any of these names.

    Args:
        value_head: any module `[batch seq d_model] -> [batch seq 1]`; `make_value_head` if None.
        seed: of the new value head.

    Raises:
        ConfigError: If the model is a name, or has no final norm to hook the value head to.
    """

    def __init__(
        self, base_model: HookedModel, value_head: nn.Module | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if not isinstance(base_model, HookedModel) or VALUE_HOOK not in base_model.hook_dict:
            raise ConfigError(
                f"base_model must be a model with the hook point {VALUE_HOOK!r}, got "
                f"{format_argument(base_model)}. Use load_model, or from_pretrained with a name."
            )
        self.base_model = base_model
        parameter = next(base_model.parameters())
        head = make_value_head(base_model.cfg.d_model, seed) if value_head is None else value_head
        self.value_head = head.to(device=parameter.device, dtype=parameter.dtype)
        for name, point in self.hook_dict.items():
            point.name = name

    @classmethod
    def from_pretrained(
        cls: type[Policy], name: str, device: str | torch.device = "cpu", seed: int = 0
    ) -> Policy:
        """Load a language model (see `load_model`) and add a new value head."""
        return cls(load_model(name, device=device), seed=seed)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: TokenIds,
        attention_mask: TokenMask | None = None,
        past_kv_cache: Any = None,
    ) -> LogitsAndValues:
        """Compute logits and values at every position.

        Args:
            attention_mask: False on padding, on the left of a prompt.
            past_kv_cache: keys and values of earlier tokens (see `init_cache`).
        """
        if past_kv_cache is not None:
            return self.logits_and_values(input_ids, attention_mask, past_kv_cache)
        return run_left_padded(self.logits_and_values, input_ids, attention_mask)

    def logits_and_values(self, *inputs: Any) -> LogitsAndValues:
        """Compute logits and values without moving padding (see `states`)."""
        states = self.states(*inputs)
        return self.unembed(states.hidden), states.values

    def states(
        self, tokens: TokenIds, attention_mask: TokenMask | None = None, past_kv_cache: Any = None
    ) -> PolicyStates:
        """Run the transformer up to its final norm, and the value head; all hooks fire."""
        residual = final_residual(self.base_model, tokens, attention_mask, past_kv_cache)
        return PolicyStates(residual, *self.hidden_and_values(residual))

    def hidden_and_values(self, residual: Residuals) -> tuple[Residuals, StateValues]:
        """Apply the final norm to the last residual, and the value head to its activation."""
        with self.value_hook() as values:
            hidden = self.base_model.ln_final(residual)
        return hidden, values[0]

    @contextlib.contextmanager
    def value_hook(self) -> Iterator[list[Float[Tensor, "batch seq"]]]:
        """Hook the value head to its hook point, and yield the list that receives the values."""
        values: list[Float[Tensor, "batch seq"]] = []

        def read_values(hook_point: nn.Module, inputs: tuple, normalized: Tensor) -> None:
            values.append(self.value_head(normalized).reshape(normalized.shape[:-1]))

        with self.base_model.hook_dict[VALUE_HOOK].register_forward_hook(read_values):
            yield values

    def unembed(self, hidden: Residuals) -> Logits:
        """Compute the logits of the final normalized residual."""
        return unembed(self.base_model, hidden)

    @property
    def hook_dict(self) -> dict[str, nn.Module]:
        """All hook points by name."""
        parts = self.value_head.named_modules(prefix="value_head")
        points = {name: part for name, part in parts if isinstance(part, HookPoint)}
        return {**self.base_model.hook_dict, **points}

    mod_dict = property(lambda self: self.hook_dict)  # where `add_hook` looks up names

    @contextlib.contextmanager
    def hooks(self, *hooks: Any, **options: Any) -> Iterator["TransformerWithValueHead"]:
        """Register hooks by name for a context (see `HookedRootModule.hooks`)."""
        with self.base_model.hooks():  # so each context of policy or model has its own level
            self.context_level = self.base_model.context_level - 1
            with super().hooks(*hooks, **options):
                yield self

    def run_with_cache(
        self, *inputs: Any, names_filter: Any = None, **options: Any
    ) -> tuple[LogitsAndValues, ActivationCache]:
        """Return logits and values, and the activations; in padded rows from their first token."""
        names_filter = names_filter or is_cached_by_default
        outputs, cache = super().run_with_cache(*inputs, names_filter=names_filter, **options)
        return outputs, ActivationCache(cache, self.base_model)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)  # does not change `cfg` of a TransformerLens model
        parameter, cfg = next(self.base_model.parameters()), self.base_model.cfg
        cfg.device, cfg.dtype = str(parameter.device), parameter.dtype
        return self


class TransformerWithCritic(TransformerWithValueHead):
    """A policy whose values are of a separate transformer, a trainable copy of it if not given."""

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
        self, tokens: TokenIds, attention_mask: TokenMask | None = None, past_kv_cache: Any = None
    ) -> PolicyStates:
        """Return residual and hidden states of the policy, and values of the critic."""
        policy_cache, critic_cache = past_kv_cache or (None, None)
        normalized = normalized_residual(self.critic, tokens, attention_mask, critic_cache)
        residual = final_residual(self.base_model, tokens, attention_mask, policy_cache)
        values = self.value_head(normalized.to(next(self.value_head.parameters()).dtype))
        values = values.reshape(residual.shape[:-1])
        return PolicyStates(residual, self.base_model.ln_final(residual), values)


def init_cache(policy: TransformerWithValueHead, batch_size: int) -> Any:
    """Return an empty KV cache for a policy; with a critic, a pair of caches."""
    cache = empty_cache(policy.base_model, batch_size)
    if isinstance(policy, TransformerWithCritic):
        return cache, empty_cache(policy.critic, batch_size)
    return cache


FORWARD, UNEMBED = TransformerWithValueHead.forward, TransformerWithValueHead.unembed


def has_standard_forward(policy: nn.Module) -> bool:
    """Return True if the logits are `unembed` of `states`: no method was replaced or hooked."""
    is_standard = is_original(policy, FORWARD) and is_original(policy, UNEMBED)
    return is_standard and not is_hooked(policy)
