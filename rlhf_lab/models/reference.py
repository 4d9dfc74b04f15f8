"""The reference model: a frozen copy of the policy's transformer, kept as residuals, not logits."""

import copy
from types import FunctionType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import autocast, has_float64
from rlhf_lab.models.lora import effective_weights, take_adapters_off
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.transformer_lens import (
    HookedTransformer,
    KVCache,
    final_residual,
    has_own_forward,
)


def frozen_copy(model: HookedTransformer) -> HookedTransformer:
    """A deep copy in eval mode, without gradients and without the hooks of the original.

    Raises:
        ConfigError: a forward was replaced by a function that calls the original's parts.
    """
    refuse_lent_forwards(model)
    reference = copy.deepcopy(model)
    reference.reset_hooks(including_permanent=True)
    return reference.requires_grad_(False).eval()


def merged_copy(model: HookedTransformer) -> HookedTransformer:
    """A `frozen_copy` whose weights are the effective ones: adapters are added to what they change.

    Raises:
        ConfigError: see `frozen_copy`.
    """
    merged = frozen_copy(model)
    take_adapters_off(merged, lambda module, name: nn.Parameter(getattr(module, name).detach()))
    return merged.requires_grad_(False)


def model_where_exact(model: HookedTransformer) -> HookedTransformer:
    """The model itself where its device has float64; else a copy on the CPU, hooks included."""
    device = next(model.parameters()).device
    return model if has_float64(device) else copy.deepcopy(model).to("cpu", print_details=False)


def trainable_copy(model: HookedTransformer) -> HookedTransformer:
    """A copy to train on its own, without the hooks of the original.

    Weights that can be trained are copied; those that are frozen are shared.

    Raises:
        ConfigError: see `frozen_copy`.
    """
    refuse_lent_forwards(model)
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    copied = copy.deepcopy(model, frozen)
    copied.reset_hooks(including_permanent=True)
    return copied


def refuse_lent_forwards(model: HookedTransformer) -> None:
    """Raise ConfigError for a model some part of which runs a function that reaches other parts.

    A deep copy keeps functions as they are: the copy's part would go on calling the original's.
    """
    for name, part in model.named_modules():
        if _reaches_modules(vars(part).get("forward")):
            raise ConfigError(
                f"base_model{'.' * bool(name)}{name}.forward was replaced by a function that calls "
                "the model's own parts, and a copy of the model would call them, too; hand in a "
                "reference= that was copied before, or replace it by a hook."
            )


def _reaches_modules(forward: object) -> bool:
    """Whether a function holds modules, or methods of theirs, in its closure or by global name."""
    if not isinstance(forward, FunctionType):
        return False
    held = [cell.cell_contents for cell in forward.__closure__ or ()]
    held += [forward.__globals__.get(name) for name in forward.__code__.co_names]
    held += forward.__defaults__ or ()
    return any(isinstance(getattr(x, "__self__", x), nn.Module) for x in held)


def final_residuals(
    model: HookedTransformer,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    dtype: torch.dtype | None = None,
    padded: bool | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream after the last block, through the hooked modules.

    It is what is worth keeping of the reference: d_model numbers per token instead of d_vocab
    logits.

    Args:
        attention_mask, padded: see `run_left_padded`.
        dtype: of the matrix products; the model's own when None.

    Raises:
        ConfigError: the model has a forward of its own, which need not read its logits from there.
    """
    if has_own_forward(model):
        raise ConfigError(
            "the model has a forward of its own, so that its logits need not be those of its last "
            "residual; change or hook its parts in place of its forward."
        )

    def run(tokens: Int[Tensor, "batch seq"]) -> tuple[Float[Tensor, "batch seq d_model"]]:
        with autocast(tokens.device, dtype):
            return (final_residual(model, tokens),)

    return run_left_padded(run, input_ids, attention_mask, padded)[0]


def same_weights(model: HookedTransformer, reference: HookedTransformer) -> bool:
    """Whether two models use the same weights, bit for bit, with what adapters add to them."""
    own, other = effective_weights(model), effective_weights(reference)
    smallest_first = sorted(own, key=lambda name: own[name].numel())
    return own.keys() == other.keys() and all(
        torch.equal(own[name], other[name]) for name in smallest_first
    )


def normalized_residuals(
    model: HookedTransformer,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Int[Tensor, "batch seq"],
    past_kv_cache: KVCache | None = None,
) -> Float[Tensor, "batch seq d_model"]:
    """The input of a head hooked to `ln_final.hook_normalized`, without the unembedding.

    Every hook up to there fires. The mask is TransformerLens's own: no padding on the left.
    """
    heard: list[Tensor] = []
    listen = lambda normalized, hook: heard.append(normalized)
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", listen)]):
        model.ln_final(final_residual(model, input_ids, attention_mask, past_kv_cache))
    return heard[0]
