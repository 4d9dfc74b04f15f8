"""The policy: a hooked transformer whose final normalised residual feeds a small value head."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import einops
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.load import load_model
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.transformer_lens import (
    ActivationCache,
    HookedTransformer,
    HookPoint,
    KVCache,
    hook_level,
)

VALUE_HOOK = "ln_final.hook_normalized"
NamedHook = tuple[str, Callable[..., Tensor | None]]
SomePolicy = TypeVar("SomePolicy", bound=nn.Module)


class ValueHead(nn.Sequential):
    """Two linear layers with a ReLU between, and hook points where something can be looked at.

    `hook_in` `[batch seq d_model]` is what the head reads, `hook_hidden` `[batch seq hidden]` its
    hidden layer after the ReLU, `hook_value` `[batch seq 1]` the value. They are no layers: weights
    are called `0.weight`, `0.bias`, `2.weight` and `2.bias`.
    """

    def __init__(self, first: nn.Module, activation: nn.Module, last: nn.Module) -> None:
        super().__init__(first, activation, last)
        self.hook_in, self.hook_hidden, self.hook_value = HookPoint(), HookPoint(), HookPoint()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self[0], self[1], self[2]))

    def __len__(self) -> int:
        return 3

    def forward(self, normalized: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """The value of each state, in the precision of the head's weights."""
        first, activation, last = self
        x = self.hook_in(normalized.to(first.weight.dtype))
        hidden = self.hook_hidden(activation(first(x)))
        return self.hook_value(last(hidden))


def make_value_head(d_model: int, seed: int = 0) -> ValueHead:
    """Linear d -> 4d, ReLU, Linear 4d -> 1, the last so small that first values are near 0.

    A full-sized random last layer makes the first advantages noise; a small one makes them the
    reward (Huang et al. 2024, "The N Implementation Details of RLHF with PPO", section on value
    head initialisation).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = ValueHead(nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, 1))
        nn.init.normal_(head[2].weight, std=1e-2 / (4 * d_model) ** 0.5)
        nn.init.zeros_(head[2].bias)
    return head


class TransformerWithValueHead(nn.Module):
    """A `HookedTransformer` and a value head hooked to `ln_final.hook_normalized`.

    `base_model` stays an ordinary HookedTransformer: hooks attached to it fire as ever, in
    sampling and training. The value head's gradient flows into the trunk.

    The hook points of both are in `hook_dict`, the value head's under `value_head.hook_in` and so
    on; `hooks` and `run_with_cache` take any of these names.

    Args:
        base_model: the language model.
        value_head: any module `[batch seq d_model] -> [batch seq 1]`, which has no hook points
            unless it is a `ValueHead`; a fresh `make_value_head` when None.
        seed: seeds the fresh value head, and touches no other random state.

    Raises:
        ConfigError: the model is a name (see `from_pretrained`), or has no final norm to hook the
            value head to.
    """

    def __init__(
        self, base_model: HookedTransformer, value_head: nn.Module | None = None, seed: int = 0
    ) -> None:
        super().__init__()
        if isinstance(base_model, str):
            raise ConfigError(
                f"base_model={base_model!r} is a name; load it with "
                f"{type(self).__name__}.from_pretrained({base_model!r})."
            )
        self.base_model = base_model
        if VALUE_HOOK not in base_model.hook_dict:
            raise ConfigError(
                f"the model has no hook {VALUE_HOOK!r} for the value head, since its "
                f"normalization_type={base_model.cfg.normalization_type!r} leaves out the final "
                "norm; set it to 'LN', 'LNPre', 'RMS' or 'RMSPre'."
            )
        parameter = next(base_model.parameters())
        fresh = value_head is None
        head = make_value_head(base_model.cfg.d_model, seed) if fresh else value_head
        self.value_head = head.to(device=parameter.device, dtype=parameter.dtype)
        for name, point in self._value_points().items():
            point.name = name

    @classmethod
    def from_pretrained(
        cls: type[SomePolicy], name: str, device: str | torch.device = "cpu", seed: int = 0
    ) -> SomePolicy:
        """The language model of a bundled name, a directory or a hub id, with a fresh value head.

        Raises:
            LoadError: it was not found.
        """
        return cls(load_model(name, device=device), seed=seed)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        past_kv_cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """Logits and value estimates at every position, whatever the padding.

        Args:
            input_ids: tokens.
            attention_mask: False on padding to the left of a prompt; all other tokens True.
            past_kv_cache: keys and values of earlier tokens (sampling); `attention_mask` is then
                needed.
        """
        if past_kv_cache is not None:
            return self.logits_and_values(input_ids, attention_mask.long(), past_kv_cache)
        # rows without padding in front: each begins at its first token, and all are real
        return run_left_padded(
            lambda tokens: self.logits_and_values(tokens, torch.ones_like(tokens)),
            input_ids,
            attention_mask,
        )

    def logits_and_values(
        self,
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"],
        past_kv_cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]]:
        """One pass through the transformer, with a value at each position.

        1. Hang a hook on `ln_final.hook_normalized` that hands the activation to the value head.
        2. Run the transformer once, handing mask and cache on; all other hooks fire too.
        3. Take the hook off again.
        """
        values: list[Float[Tensor, "batch seq"]] = []

        def read_value(normalized: Float[Tensor, "batch seq d_model"], hook: HookPoint) -> None:
            values.append(einops.rearrange(self.value_head(normalized), "batch seq 1 -> batch seq"))

        with self.base_model.hooks(fwd_hooks=[(VALUE_HOOK, read_value)]):
            logits = self.base_model(
                tokens, attention_mask=attention_mask, past_kv_cache=past_kv_cache
            )
        return logits, values[0]

    def _value_points(self) -> dict[str, HookPoint]:
        """The hook points of the value head by name."""
        parts = self.value_head.named_modules(prefix="value_head")
        return {name: part for name, part in parts if isinstance(part, HookPoint)}

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Every hook point by name: those of `base_model`, then those of the value head."""
        return {**self.base_model.hook_dict, **self._value_points()}

    @contextlib.contextmanager
    def hooks(
        self, fwd_hooks: Sequence[NamedHook] = (), bwd_hooks: Sequence[NamedHook] = ()
    ) -> Iterator["TransformerWithValueHead"]:
        """Attach hooks for a while: `HookedTransformer.hooks`, with the value head's points, too.

        Args:
            fwd_hooks, bwd_hooks: pairs of the name of a hook point and a function
                `(activation, hook)`, which may return what is to go on in the activation's place.

        Raises:
            ConfigError: a name that is not in `hook_dict`.
        """
        points, own = self._value_points(), {"fwd": [], "bwd": []}
        for direction, given in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
            for name, function in given:
                if name not in points and name not in self.base_model.hook_dict:
                    raise ConfigError(f"{name!r} is no hook point; choose from policy.hook_dict.")
                own[direction].append((name, function))
        of_model = [[h for h in hooks if h[0] not in points] for hooks in own.values()]
        with self.base_model.hooks(*of_model):
            level = hook_level(self.base_model)
            try:
                for direction, hooks in own.items():
                    for name, function in hooks:
                        if name in points:
                            points[name].add_hook(function, dir=direction, level=level)
                yield self
            finally:
                for point in points.values():
                    point.remove_hooks("both", level=level)

    def run_with_cache(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        names_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
    ) -> tuple[
        tuple[Float[Tensor, "batch seq d_vocab"], Float[Tensor, "batch seq"]], ActivationCache
    ]:
        """Logits and values, and the activations at hook points of transformer and value head.

        Args:
            attention_mask: see `forward`. Activations of padded rows begin with their first token.
            names_filter: which activations to keep, by name or by a function of the name; all when
                None.
        """
        names = [names_filter] if isinstance(names_filter, str) else names_filter
        wanted = names if callable(names) else lambda name: names is None or name in names
        kept: dict[str, Tensor] = {}

        def keep(activation: Tensor, hook: HookPoint) -> None:
            kept[hook.name] = activation.detach()

        with self.hooks([(name, keep) for name in self.hook_dict if wanted(name)]):
            outputs = self(input_ids, attention_mask)
        return outputs, ActivationCache(kept, self.base_model)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        """Move or cast everything; `.to`, `.cuda`, `.half` and the rest all come through here."""
        super()._apply(fn, recurse)
        parameter = next(self.base_model.parameters())
        self.base_model.cfg.device = str(parameter.device)
        self.base_model.cfg.dtype = parameter.dtype
        return self
