"""Validation of components that the caller passes to the trainer."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel

# attributes of each component, so that a custom class can replace it, and what to pass instead
ATTRIBUTES = {
    "policy": ("base_model", "Pass a TransformerWithValueHead, or name it in base_model"),
    "reference": ("cfg", "Pass a HookedModel, such as make_reference(policy.base_model)"),
    "reward_fn": ("__call__", "Pass a function of a list of texts, or name it in RLHFArgs"),
    "true_reward_fn": ("__call__", "Pass a function of a list of texts"),
    "kl_controller": ("kl_coef update", "Pass an object such as FixedKLController(0.3)"),
}


def validate_component_kinds(args: Any, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings or a component of the wrong kind."""
    if not isinstance(args, RLHFArgs):
        raise ConfigError(
            f"args={args!r:.60} must be RLHFArgs. Pass RLHFArgs(preset='reel'), for example."
        )
    for name, (attributes, remedy) in ATTRIBUTES.items():
        component = given[name]
        is_several = name == "reward_fn" and isinstance(component, Mapping | list | tuple)
        if component is None or is_several:  # `WeightedRewards` validates each of several
            continue
        is_class = isinstance(component, type) and name != "reward_fn"
        missing = [each for each in attributes.split() if not hasattr(component, each)]
        if missing or is_class:
            what = f"has no {missing[0]}" if missing else "is a class"
            raise ConfigError(f"{name}={component!r:.60} {what}. {remedy}.")


def validate_models(policy: TransformerWithValueHead, reference: HookedModel) -> None:
    """Raise ConfigError if the policy cannot learn or the vocabularies differ.

    Warns of a reference that learns with the policy, since the KL between them is always 0.
    """
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError("policy has no weight with requires_grad=True. Set it for some weights.")
    if isinstance(reference, nn.Module) and trained & set(map(id, reference.parameters())):
        warnings.warn(
            "the reference shares trained weights with the policy, so the KL between them is "
            "always 0. Remove it, or pass a copy (models.frozen_copy).",
            stacklevel=2,
        )
    sizes = policy.base_model.cfg.d_vocab, reference.cfg.d_vocab
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference has a vocabulary of {sizes[1]} tokens, the policy one of {sizes[0]}. "
            "Pass a reference with the same tokens."
        )
