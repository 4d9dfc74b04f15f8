"""The policy: a hooked transformer whose final normalized residual feeds a small value head."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import ActivationCache

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import (
    HookedModel,
    NamedHook,
    call_model,
    final_residual,
    has_custom_forward,
    is_hooked,
    is_original,
    unembed,
)
from rlhf_lab.models.hooked_transformer import HookPoint, is_cached_by_default
from rlhf_lab.models.load import load_model
from rlhf_lab.models.padding import run_left_padded

VALUE_HOOK = "ln_final.hook_normalized"
SomePolicy = TypeVar("SomePolicy", bound=nn.Module)
InputIds, InputMask = Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]
LogitsAndValues = tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]


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
        """Compute the values without a gradient to the transformer."""
        return super().forward(normalized.detach())


def make_value_head(d_model: int, seed: int = 0, kind: type[ValueHead] = ValueHead) -> ValueHead:
    """Return a head d -> 4d -> 1 whose first values are near 0.

    With large random values the first advantages would be noise (Huang et al. 2024, "The N
    Implementation Details of RLHF with PPO").
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = kind(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, 1))
        nn.init.normal_(head[2].weight, std=1e-2 / (4 * d_model) ** 0.5)
        nn.init.zeros_(head[2].bias)
    return head


class PolicyStates(NamedTuple):
    """Residual stream after the last block, after the final norm, and values, per position."""

    residual: Float[Tensor, "batch seq d_model"]
    hidden: Float[Tensor, "batch seq d_model"]
    values: Float[Tensor, "batch seq"]


class TransformerWithValueHead(nn.Module):
    """A `HookedTransformer` and a value head hooked to `ln_final.hook_normalized`.

    Hooks on `base_model` fire in sampling and in training. The value head's gradient flows into the
    transformer. The hook points of both are in `hook_dict`, those of the value head with names such
    as `value_head.hook_in`; `hooks` and `run_with_cache` accept any of these names.

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
        if VALUE_HOOK not in getattr(base_model, "hook_dict", ()):
            raise ConfigError(
                f"base_model={base_model!r:.60} is not a model with the hook point {VALUE_HOOK!r}. "
                f"Load a model by its name with {type(self).__name__}.from_pretrained."
            )
        self.base_model = base_model
        parameter = next(base_model.parameters())
        head = make_value_head(base_model.cfg.d_model, seed) if value_head is None else value_head
        self.value_head = head.to(device=parameter.device, dtype=parameter.dtype)
        for name, point in self._value_points().items():
            point.name = name

    @classmethod
    def from_pretrained(
        cls: type[SomePolicy], name: str, device: str | torch.device = "cpu", seed: int = 0
    ) -> SomePolicy:
        """Load a language model (see `load_model`) and add a new value head."""
        return cls(load_model(name, device=device), seed=seed)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: InputIds,
        attention_mask: InputMask | None = None,
        past_kv_cache: Any = None,
    ) -> LogitsAndValues:
        """Compute logits and values at every position.

        Args:
            attention_mask: False on padding, on the left of a prompt.
            past_kv_cache: keys and values of earlier tokens (see `init_cache`).
        """
        if past_kv_cache is not None:
            return self.call_once(input_ids, attention_mask, past_kv_cache)
        return run_left_padded(self.call_once, input_ids, attention_mask)

    def call_once(
        self, tokens: InputIds, mask: InputMask | None = None, cache: Any = None
    ) -> LogitsAndValues:
        """Compute logits and values without moving padding."""
        if has_standard_logits(self.base_model):
            states = self.states(tokens, mask, cache)
            return self.unembed(states.hidden), states.values
        return self.call_base_model(tokens, mask, cache)

    def states(
        self, tokens: InputIds, attention_mask: InputMask | None = None, past_kv_cache: Any = None
    ) -> PolicyStates:
        """Run the transformer up to its final norm, and the value head; all hooks fire."""
        residual = final_residual(self.base_model, tokens, attention_mask, past_kv_cache)
        return PolicyStates(residual, *self.hidden_and_values(residual))

    def hidden_and_values(
        self, residual: Float[Tensor, "batch seq d_model"]
    ) -> tuple[Float[Tensor, "batch seq d_model"], Float[Tensor, "batch seq"]]:
        """Apply the final norm to the last residual, and the value head to its activation."""
        with self.value_hook() as values:
            hidden = self.base_model.ln_final(residual)
        return hidden, values[0]

    def call_base_model(
        self, tokens: InputIds, mask: InputMask | None, cache: Any
    ) -> LogitsAndValues:
        """Call a base model whose `forward` was replaced or hooked, and the value head."""
        with self.value_hook() as values:
            logits = call_model(self.base_model, tokens, mask, cache)
        return logits, values[0]

    @contextlib.contextmanager
    def value_hook(self) -> Iterator[list[Float[Tensor, "batch seq"]]]:
        """Hook the value head to its hook point, and yield the list that receives the values."""
        values: list[Float[Tensor, "batch seq"]] = []

        def read_values(hook_point: nn.Module, inputs: tuple, normalized: Tensor) -> None:
            values.append(self.value_head(normalized)[..., 0])

        with self.base_model.hook_dict[VALUE_HOOK].register_forward_hook(read_values):
            yield values

    def unembed(
        self, hidden: Float[Tensor, "batch seq d_model"]
    ) -> Float[Tensor, "batch seq d_vocab"]:
        """Compute the logits of the final normalized residual."""
        return unembed(self.base_model, hidden)

    def _value_points(self) -> dict[str, HookPoint]:
        parts = self.value_head.named_modules(prefix="value_head")
        return {name: part for name, part in parts if isinstance(part, HookPoint)}

    @property
    def hook_dict(self) -> dict[str, nn.Module]:
        """All hook points by name."""
        return {**self.base_model.hook_dict, **self._value_points()}

    @contextlib.contextmanager
    def hooks(
        self, fwd_hooks: Sequence[NamedHook] = (), bwd_hooks: Sequence[NamedHook] = ()
    ) -> Iterator["TransformerWithValueHead"]:
        """Register hooks, pairs of a name and a function `(activation, hook)`, for a context.

        A function may return a replacement.

        Raises:
            ConfigError: If a name is not in `hook_dict`.
        """
        points = self.hook_dict
        with self.base_model.hooks():
            level = self.base_model.context_level  # hooks of this level end with the context
            try:
                for direction, hooks in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                    for name, function in hooks:
                        if name not in points:
                            choices = "Choose one of policy.hook_dict."
                            raise ConfigError(f"Unknown hook point {name!r}. {choices}")
                        points[name].add_hook(function, dir=direction, level=level)
                yield self
            finally:
                for point in self._value_points().values():
                    point.remove_hooks("both", level=level)

    def run_with_cache(
        self,
        input_ids: InputIds,
        attention_mask: InputMask | None = None,
        names_filter: str | Sequence[str] | Callable[[str], bool] = is_cached_by_default,
    ) -> tuple[LogitsAndValues, ActivationCache]:
        """Return logits and values, and the activations at hook points.

        Args:
            attention_mask: see `forward`. Activations of padded rows begin with their first token.
            names_filter: hook points to cache, by name or by a function of the name; all but
                `hook_result`, the largest, by default.
        """
        names = [names_filter] if isinstance(names_filter, str) else names_filter
        is_kept = names if callable(names) else names.__contains__
        activations: dict[str, Tensor] = {}

        def keep(activation: Tensor, hook: nn.Module) -> None:
            activations[hook.name] = activation.detach()

        with self.hooks([(name, keep) for name in self.hook_dict if is_kept(name)]):
            outputs = self(input_ids, attention_mask)
        return outputs, ActivationCache(activations, self.base_model)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)  # does not change `cfg` of a TransformerLens model
        parameter, cfg = next(self.base_model.parameters()), self.base_model.cfg
        cfg.device, cfg.dtype = str(parameter.device), parameter.dtype
        return self


FORWARD, UNEMBED = TransformerWithValueHead.forward, TransformerWithValueHead.unembed


def has_standard_logits(model: HookedModel) -> bool:
    """Return True if logits follow from the last residual: `forward` was not replaced or hooked."""
    return not (has_custom_forward(model) or is_hooked(model))


def has_standard_forward(policy: nn.Module) -> bool:
    """Return True if the logits are `unembed` of `states`: no method was replaced or hooked."""
    is_standard = is_original(policy, FORWARD) and is_original(policy, UNEMBED)
    return is_standard and not is_hooked(policy) and has_standard_logits(policy.base_model)
