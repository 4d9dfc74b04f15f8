"""Kinds of module: the components of a TransformerLens model, and what in one was changed."""

import inspect
from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformer_lens.components import (
    Attention,
    Embed,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    PosEmbed,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
    Unembed,
)
from transformer_lens.components.mlps.gated_mlp import GatedMLP
from transformer_lens.components.mlps.mlp import MLP
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities.activation_functions import SUPPORTED_ACTIVATIONS
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformer_lens.utilities.typed_module_list import TypedModuleList

from rlhf_lab.models.transformer_lens.library import HookedTransformer

NORMS = (LayerNorm, LayerNormPre, RMSNorm, RMSNormPre)
ROLES: MappingProxyType[str, tuple[type, ...]] = MappingProxyType(
    {
        "embed": (Embed,),
        "pos_embed": (PosEmbed,),
        "attn": (Attention, GroupedQueryAttention),
        "mlp": (MLP, GatedMLP),
        "ln1": NORMS,
        "ln2": NORMS,
        "ln_final": NORMS,
        "unembed": (Unembed,),
    }
)
"""What may stand under each name of a module; blocks and hook points apart."""
CLASSES = (HookedTransformer, TransformerBlock, HookPoint, *dict.fromkeys(sum(ROLES.values(), ())))


def blocks_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of every transformer within a module, with their names in it."""
    for name, part in module.named_modules():
        if isinstance(part, TransformerBlock):
            yield name, part


def is_gated(mlp: nn.Module) -> bool:
    """Whether an MLP multiplies its hidden layer by a gate."""
    return isinstance(mlp, GatedMLP)


def is_centered(norm: nn.Module) -> bool:
    """Whether a norm takes the mean away before it scales: LayerNorm does, RMSNorm does not."""
    return isinstance(norm, LayerNorm | LayerNormPre)


def why_not_additive(model: HookedTransformer) -> str | None:
    """Why a model's logits are no sum over heads and MLPs, in words; None if they are.

    They are where what heads and MLPs write is added to the residual stream as it is, and the final
    norm, whose scale is known, and the unembedding are all that comes behind it.
    """
    cfg = model.cfg
    if cfg.use_normalization_before_and_after or (
        cfg.original_architecture in POST_NORM_ARCHITECTURES
    ):
        return "its blocks normalize what attention gives before it is added"
    if cfg.output_logits_soft_cap is not None and cfg.output_logits_soft_cap > 0:
        return f"its logits are capped at {cfg.output_logits_soft_cap:g}"
    return None


def key_value_weights(attn: nn.Module) -> tuple[torch.Tensor, ...]:
    """W_K, W_V, b_K and b_V, with as many heads as are stored (fewer than queries, if grouped)."""
    own = "_" if isinstance(attn, GroupedQueryAttention) else ""
    return tuple(getattr(attn, f"{own}{name}") for name in ("W_K", "W_V", "b_K", "b_V"))


BASES = dict.fromkeys(base for kind in CLASSES for base in kind.__mro__)
FUNCTIONS = tuple(
    (vars(base).get, base, name, function)
    for base in BASES
    if base.__module__.startswith("transformer_lens")
    for name, function in vars(base).items()
    if inspect.isfunction(function)
)
"""Each function of these classes and their bases, as it was when this was imported.

With the base's look-up of a name, the base, and the function's name.
"""
FORWARDS = MappingProxyType({kind: kind.forward for kind in CLASSES})
METHODS = MappingProxyType(
    {
        kind: frozenset(n for n in dir(kind) if callable(inspect.getattr_static(kind, n)))
        for kind in CLASSES
    }
)
"""The names of everything that can be called on an instance of each class."""
OF_A_POINT = len(vars(HookPoint()))


def odd_part(model: HookedTransformer) -> str | None:
    """The first part of a model that is not what TransformerLens makes, in words; None without any.

    1. The classes have the functions that they had when the package was imported.
    2. There are as many blocks as the configuration says.
    3. Each module is exactly of a class that belongs to its name, has no method of its own in place
       of the class's, and reads the model's own configuration. Weights may be parametrized: the
       result is what is read.
    4. Attention is over all earlier positions, and the activation function the one that is named.
    """
    for look_up, base, name, function in FUNCTIONS:
        if look_up(name) is not function:
            return f"{base.__name__}.{name} was replaced"
    for kind, forward in FORWARDS.items():
        if kind.forward is not forward:
            return f"{kind.__name__}.forward was replaced"
    if len(model.blocks) != model.cfg.n_layers:
        return f"it has {len(model.blocks)} blocks but cfg.n_layers={model.cfg.n_layers}"
    if type(model) is not HookedTransformer:
        return f"it is a {type(model).__name__}"
    if not METHODS[HookedTransformer].isdisjoint(model.__dict__):
        return f"it {_own_method(model)}"
    parents, methods = [model], METHODS[HookPoint]
    while parents:
        for name, part in parents.pop()._modules.items():
            # hook points are by far the most parts; with the attributes of a fresh one, and no
            # more, none of them stands in place of a method
            if type(part) is HookPoint and name[:5] == "hook_":
                if len(part.__dict__) == OF_A_POINT or methods.isdisjoint(part.__dict__):
                    continue
            if part is None or name == "parametrizations":
                continue
            odd = _oddity(model, name, part)
            if odd is not None:
                full = next(name for name, module in model.named_modules() if module is part)
                return f"{full} {odd}"
            if part._modules:
                parents.append(part)
    return None


def _oddity(model: HookedTransformer, name: str, part: nn.Module) -> str | None:
    """What is odd about one part of a model; None if nothing is."""
    kind = type(part)
    if kind is HookPoint and name.startswith("hook_"):
        return _own_method(part)
    if name == "blocks":
        return None if kind in (TypedModuleList, nn.ModuleList) else f"is a {kind.__name__}"
    kind = kind.__mro__[1] if parametrize.is_parametrized(part) else kind
    if kind not in ((TransformerBlock,) if name.isdigit() else ROLES.get(name, ())):
        return f"is a {kind.__name__}"
    if not METHODS[kind].isdisjoint(part.__dict__):
        return _own_method(part)
    if part.cfg is not model.cfg:
        return "has a cfg of its own"
    if kind in ROLES["attn"] and (part.attn_type != "global" or part._attention_dir_override):
        return f"has attn_type={part.attn_type!r}"
    if kind in ROLES["mlp"] and part.act_fn is not SUPPORTED_ACTIVATIONS.get(part.cfg.act_fn):
        return "has an act_fn of its own"
    return None


def _own_method(part: nn.Module) -> str:
    own = min(name for name in part.__dict__ if callable(getattr(type(part), name, None)))
    return f"has a {own} of its own"
