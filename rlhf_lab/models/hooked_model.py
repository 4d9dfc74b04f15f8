"""Hooks, forward passes, caches and copies of a `HookedModel`, ours or TransformerLens's."""

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import autocast, has_float64
from rlhf_lab.models.hooked_transformer import HookedTransformer, Unembed, is_hooked, soft_cap
from rlhf_lab.models.kv_cache import KVCache
from rlhf_lab.models.padding import run_left_padded

# attributes in which torch stores the hooks of a module, and TransformerLens those of a hook point
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOK_STATE = ("fwd_hooks", "bwd_hooks", "context_level")
FORWARD, UNEMBED = HookedTransformer.forward, Unembed.forward
TokenIds, TokenMask = Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"]
Residuals, Logits = Float[Tensor, "batch seq d_model"], Float[Tensor, "batch seq d_vocab"]
VALUE_HOOK = "ln_final.hook_normalized"  # its activation is the input of a value head


class ByAttribute(type(Protocol)):
    """Checks instances by hasattr, as Python 3.11 does: 3.12 does not see torch's submodules."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return all(hasattr(instance, name) for name in cls.__annotations__)


@runtime_checkable
class HookedModel(Protocol, metaclass=ByAttribute):
    """A transformer with TransformerLens's names for components, hook points and `cfg` fields."""

    __call__: Callable[..., Tensor]  # logits; for its options, see `HookedTransformer.forward`
    cfg: Any
    tokenizer: PreTrainedTokenizerBase | None
    blocks: nn.ModuleList
    ln_final: nn.Module
    unembed: nn.Module
    hook_dict: dict[str, nn.Module]
    hooks: Callable[..., AbstractContextManager]  # (fwd_hooks, bwd_hooks), for a context
    reset_hooks: Callable[..., None]  # (including_permanent)


def final_residual(
    model: HookedModel, tokens: TokenIds, attention_mask: TokenMask | None = None, cache: Any = None
) -> Residuals:
    """Compute the residual stream after the last block; `cache` is made by `empty_cache`."""
    if has_custom_forward(model):
        raise ConfigError(
            "The model's forward was replaced or hooked, so logits may not follow from the last "
            "residual. Change or hook its modules instead."
        )
    if not isinstance(model, HookedTransformer):  # TransformerLens guesses a mask from the tokens
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        attention_mask = mask.long()
    options = {"attention_mask": attention_mask, "past_kv_cache": cache}
    return model(tokens, **options, stop_at_layer=model.cfg.n_layers)


def normalized_residual(model: HookedModel, *inputs: Any) -> Residuals:
    """Compute the activation at `VALUE_HOOK` (see `final_residual`)."""
    activations: list[Tensor] = []
    keep = lambda hook_point, inputs, normalized: activations.append(normalized)
    with model.hook_dict[VALUE_HOOK].register_forward_hook(keep):
        model.ln_final(final_residual(model, *inputs))
    return activations[0]


def unembed(model: HookedModel, hidden: Residuals) -> Logits:
    return soft_cap(model.unembed(hidden), model.cfg.output_logits_soft_cap)


def final_residuals(
    model: HookedModel,
    input_ids: TokenIds,
    attention_mask: TokenMask | None = None,
    dtype: torch.dtype | None = None,
    padded: bool | None = None,
) -> Residuals:
    """Compute the last residual, with products in `dtype` if set (see `run_left_padded`)."""
    run = lambda tokens: (final_residual(model, tokens),)
    with autocast(next(model.parameters()).device, dtype):
        return run_left_padded(run, input_ids, attention_mask, padded)[0]


def unembed_residuals(
    model: HookedModel, residuals: Residuals, dtype: torch.dtype | None = None
) -> Logits:
    """Compute the logits of residuals that `final_residuals` returned."""
    with autocast(residuals.device, dtype):
        return unembed(model, model.ln_final(residuals))


def is_original(module: nn.Module, method: Callable) -> bool:
    """Return True if the module's method of this name is `method`, or TransformerLens's."""
    kind, name = type(module), method.__name__
    is_theirs = kind.__module__.startswith("transformer_lens.")
    return name not in vars(module) and (is_theirs or getattr(kind, name, None) is method)


def has_custom_forward(model: HookedModel) -> bool:
    """Return True if `forward` was replaced or hooked, so logits may not follow from modules."""
    return is_hooked(model) or not is_original(model, FORWARD)


def is_plain_unembed(model: HookedModel) -> bool:
    """Return True if the logits are hidden @ W_U + b_U: no soft cap, hook or custom forward."""
    is_capped = (model.cfg.output_logits_soft_cap or 0) > 0
    return is_original(model.unembed, UNEMBED) and not has_hooks(model.unembed) and not is_capped


def empty_cache(model: HookedModel, batch_size: int) -> Any:
    if isinstance(model, HookedTransformer):
        return KVCache(model.cfg.n_layers)
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as TheirCache

    return TheirCache.init_cache(model.cfg, next(model.parameters()).device, batch_size)


def select_cache_rows(cache: Any, rows: Int[Tensor, " batch"]) -> None:
    """Replace row i of a cache by row `rows[i]`, in place."""
    for entry in cache.entries:
        entry.past_keys, entry.past_values = entry.past_keys[rows], entry.past_values[rows]
    if cache.previous_attention_mask is not None:
        cache.previous_attention_mask = cache.previous_attention_mask[rows]


def named_blocks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every transformer block within a module."""
    for name, part in module.named_modules():
        if type(part).__name__ == "TransformerBlock":
            yield name, part


def is_centered(norm: nn.Module) -> bool:
    """Return True for LayerNorm, which subtracts the mean, and False for RMSNorm."""
    return getattr(norm, "is_centered", type(norm).__name__.startswith("LayerNorm"))


def has_hooks(module: nn.Module) -> bool:
    """Return True if the module or one of its submodules has a hook."""
    return any(map(is_hooked, module.modules()))


@contextlib.contextmanager
def without_hooks(*modules: nn.Module) -> Iterator[None]:
    """Return a context in which modules have no hooks; afterwards those before it are restored."""
    hooked = [part for module in modules for part in module.modules() if is_hooked(part)]
    hooks = [{table: vars(part)[table] for table in HOOK_TABLES} for part in hooked]
    for part in hooked:
        vars(part).update({table: OrderedDict() for table in HOOK_TABLES})
    try:
        yield
    finally:
        for part, tables in zip(hooked, hooks, strict=True):
            vars(part).update(tables)


def frozen_copy(model: HookedModel) -> HookedModel:
    """Return a deep copy in eval mode, without gradients and without hooks."""
    return copy_without_hooks(model, {}).requires_grad_(False).eval()


def trainable_copy(model: HookedModel) -> HookedModel:
    """Return a copy without hooks that shares frozen weights and copies trainable ones."""
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return copy_without_hooks(model, frozen)


def copy_without_hooks(model: HookedModel, shared: dict[int, Any]) -> HookedModel:
    """Return a deep copy without hooks, with the objects that are `shared` by id."""
    validate_forwards(model)
    copied = copy.deepcopy(model, shared)
    copied.reset_hooks(including_permanent=True)
    return copied


def model_where_exact(model: HookedModel) -> HookedModel:
    """Return the model if it is on one device with float64; if not, a copy, hooks included."""
    device = getattr(model, "base_model", model).unembed.W_U.device
    device = device if has_float64(device) else torch.device("cpu")
    if all(p.device == device for p in model.parameters()):
        return model
    return copy.deepcopy(model).to(str(device), print_details=False)


def validate_forwards(model: HookedModel) -> None:
    """Raise ConfigError if a replaced `forward` calls modules, which a deep copy would call too."""
    for name, part in model.named_modules():
        if _reaches_modules(vars(part).get("forward")):
            raise ConfigError(
                f"base_model{'.' * bool(name)}{name}.forward was replaced by a function that calls "
                "modules of the model, so a copy would call the original. Pass a reference= that "
                "was copied before, or use a hook."
            )


def _reaches_modules(forward: object) -> bool:
    if not isinstance(forward, FunctionType):
        return False
    held = [cell.cell_contents for cell in forward.__closure__ or ()]
    held += [forward.__globals__.get(name) for name in forward.__code__.co_names]
    held += forward.__defaults__ or ()
    return any(isinstance(getattr(x, "__self__", x), nn.Module) for x in held)
