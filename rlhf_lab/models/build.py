"""Building the policy and the reference model from a run's configuration."""

import torch

from rlhf_lab.config import AdapterArgs, RLHFArgs
from rlhf_lab.models.critic import TransformerWithCritic, make_policy
from rlhf_lab.models.load import load_model
from rlhf_lab.models.lora import add_lora, lora_layers, without_adapters
from rlhf_lab.models.peft_format import load_adapter
from rlhf_lab.models.reference import frozen_copy
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.models.value_head import TransformerWithValueHead


def build_policy(args: RLHFArgs, device: str | torch.device = "cpu") -> TransformerWithValueHead:
    """The policy before training: base model, adapters if asked for, value head.

    Raises:
        LoadError: the base model was not found.
        ConfigError: adapters that do not fit it.
    """
    base_model = load_with_adapters(args.base_model, args, device, args.seed)
    return make_policy(base_model, args.value_head, args.seed)


def in_weight_precision(
    policy: TransformerWithValueHead, weight_precision: str
) -> TransformerWithValueHead:
    """The policy, and its critic if it has one, with weights rounded to bfloat16 in place.

    The value head stays in float32, as do buffers such as rotary tables; "fp32" changes nothing.
    """
    if weight_precision == "fp32":
        return policy
    rounded = [policy.base_model]
    rounded += [policy.critic] if isinstance(policy, TransformerWithCritic) else []
    for model in rounded:
        model.cfg.dtype = torch.bfloat16
        for weight in model.parameters():
            weight.data = weight.data.to(torch.bfloat16)
    return policy


def load_with_adapters(
    base_model: str, adapters: AdapterArgs, device: str | torch.device = "cpu", seed: int = 0
) -> HookedTransformer:
    """A model to train: all its weights, or adapters alone, fresh ones or those of a directory.

    Raises:
        LoadError: the base model or the adapter was not found.
        ConfigError: adapters that do not fit it.
    """
    model = load_model(base_model, device=device)
    if adapters.adapter_from is not None:
        load_adapter(model, adapters.adapter_from, base_model)
    elif adapters.lora_rank:
        targets = adapters.lora_targets.replace(",", " ").split()
        add_lora(model, adapters.lora_rank, adapters.lora_alpha, targets, seed)
    return model


def make_reference(model: HookedTransformer) -> HookedTransformer:
    """What a policy's transformer is compared with: as it is now, frozen.

    Fresh adapters change nothing yet: below them is the model itself. Others are part of a copy.
    """
    layers = lora_layers(model).values()
    if layers and not any(layer.B.any() for layer in layers):
        return without_adapters(model)
    return frozen_copy(model)
