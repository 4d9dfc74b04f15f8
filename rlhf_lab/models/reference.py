"""The reference model: a frozen copy of the policy's transformer, and its residuals."""

import copy
from types import FunctionType

import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import autocast, has_float64
from rlhf_lab.models.hooked_model import (
    HookedModel,
    Logits,
    Residuals,
    TokenIds,
    TokenMask,
    final_residual,
    unembed,
)
from rlhf_lab.models.lora import effective_weights, remove_adapters
from rlhf_lab.models.padding import run_left_padded


def frozen_copy(model: HookedModel) -> HookedModel:
    """Return a deep copy in eval mode, without gradients and without hooks.

    Raises:
        ConfigError: If a replaced `forward` calls modules of the original.
    """
    validate_forwards(model)
    reference = copy.deepcopy(model)
    reference.reset_hooks(including_permanent=True)
    return reference.requires_grad_(False).eval()


def merged_copy(model: HookedModel) -> HookedModel:
    """Return a `frozen_copy` with adapters merged into the weights."""
    merged = frozen_copy(model)
    remove_adapters(merged, lambda module, name: nn.Parameter(getattr(module, name).detach()))
    return merged.requires_grad_(False)


def model_where_exact(model: HookedModel) -> HookedModel:
    """Return the model if its device has float64, otherwise a copy on the CPU, hooks included."""
    device = next(model.parameters()).device
    return model if has_float64(device) else copy.deepcopy(model).to("cpu", print_details=False)


def trainable_copy(model: HookedModel) -> HookedModel:
    """Return a copy without hooks that shares frozen weights and copies trainable ones."""
    validate_forwards(model)
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    copied = copy.deepcopy(model, frozen)
    copied.reset_hooks(including_permanent=True)
    return copied


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


def final_residuals(
    model: HookedModel,
    input_ids: TokenIds,
    attention_mask: TokenMask | None = None,
    dtype: torch.dtype | None = None,
    padded: bool | None = None,
) -> Residuals:
    """Compute the residual stream after the last block, which is smaller than the logits.

    Args:
        attention_mask, padded: see `run_left_padded`.
        dtype: dtype of the matrix products; that of the weights if None.
    """
    run = lambda tokens: (final_residual(model, tokens),)
    with autocast(input_ids.device, dtype):
        return run_left_padded(run, input_ids, attention_mask, padded)[0]


def unembed_residuals(
    model: HookedModel, residuals: Residuals, dtype: torch.dtype | None = None
) -> Logits:
    """Compute the logits of residuals that `final_residuals` returned."""
    with autocast(residuals.device, dtype):
        return unembed(model, model.ln_final(residuals))


def same_weights(model: HookedModel, reference: HookedModel) -> bool:
    """Return True if two models have bitwise identical weights, merged adapters included."""
    first, second = effective_weights(model), effective_weights(reference)
    return first.keys() == second.keys() and all(
        torch.equal(weight, second[name]) for name, weight in first.items()
    )
