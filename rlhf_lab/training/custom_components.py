"""Own parts of a trainer: refusal of what cannot be a part, before a run begins."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.hooked_model import HookedModel

MODEL_KINDS = {
    "policy": ("base_model", "a TransformerWithValueHead, or name it as base_model"),
    "reference": ("cfg", "a HookedModel, such as make_reference(...) gives"),
}
"""What a model of one's own must have, so that a class of a learner's may take the place too."""


def refuse_other_kinds(args: Any, parts: Mapping[str, Any]) -> None:
    """Refuse settings, models, functions and controllers that are something else.

    Raises:
        ConfigError: the first of them.
    """
    if not isinstance(args, RLHFArgs):
        raise ConfigError(
            f"args={args!r:.60} are no settings; give RLHFArgs, such as RLHFArgs(preset='reel')."
        )
    for name, (attribute, remedy) in MODEL_KINDS.items():
        part = parts[name]
        if part is not None and not (isinstance(part, nn.Module) and hasattr(part, attribute)):
            raise ConfigError(f"{name}={parts[name]!r:.60} is no such model; give {remedy}.")
    for name in ("reward_fn", "gold_fn"):
        if name == "reward_fn" and isinstance(parts[name], Mapping | list | tuple):
            continue  # several, each of which `WeightedRewards` looks at
        if parts[name] is not None and not callable(parts[name]):
            raise ConfigError(
                f"{name}={parts[name]!r:.60} is no function; give one from a list of texts to one "
                "number each. A reward is named in RLHFArgs(reward_fn=...)."
            )
    controller = parts["kl_controller"]
    if controller is not None and not (
        hasattr(controller, "kl_coef") and callable(getattr(controller, "update", None))
    ):
        raise ConfigError(
            f"kl_controller={controller!r:.60} has no kl_coef, or no update(kl, n_sequences); give "
            "an object with both, such as FixedKLController(0.3)."
        )


def refuse_other_weights(args: RLHFArgs, dtype: torch.dtype) -> None:
    """Refuse a policy of one's own whose weights are not in the format that the settings name.

    Raises:
        ConfigError: `weight_precision` is bf16, and the policy's weights are not.
    """
    if args.weight_precision != "fp32" and dtype != torch.bfloat16:
        raise ConfigError(
            f"weight_precision={args.weight_precision!r} is for weights in bfloat16, and the "
            f"policy's are in {dtype}; convert them, or set weight_precision='fp32'."
        )


def refuse_unfit_models(policy: TransformerWithValueHead, reference: HookedModel) -> None:
    """Refuse a policy that cannot learn, and a reference with other tokens.

    A reference that learns with the policy, as where a mistake is studied, is warned of.

    Raises:
        ConfigError: no weight of the policy is trained, or the two have different vocabularies.
    """
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError(
            "policy has no weight that is trained (requires_grad is False for all); set it where "
            "weights are to learn."
        )
    if isinstance(reference, nn.Module) and trained & set(map(id, reference.parameters())):
        warnings.warn(
            "reference has weights of the policy's that are trained, so that the KL between the "
            "two is always 0; leave it out, or give a copy (models.frozen_copy).",
            stacklevel=2,
        )
    sizes = policy.base_model.cfg.d_vocab, reference.cfg.d_vocab
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"reference has a vocabulary of {sizes[1]} tokens and the policy one of {sizes[0]}; "
            "give a model with the same tokens."
        )
