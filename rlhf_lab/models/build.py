"""The policy and the reference model of a run's configuration."""

import warnings

import torch

from rlhf_lab.config import AdapterArgs, RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.files import expand_home
from rlhf_lab.models.device import pick_device
from rlhf_lab.models.hooked_model import HookedModel, frozen_copy
from rlhf_lab.models.load import load_model
from rlhf_lab.models.lora import add_lora, lora_layers, without_adapters
from rlhf_lab.models.peft_format import load_adapter
from rlhf_lab.models.value_head import (
    DetachedValueHead,
    TransformerWithCritic,
    TransformerWithValueHead,
    make_value_head,
)


def build_policy(args: RLHFArgs, device: str | torch.device = "cpu") -> TransformerWithValueHead:
    """Make the policy before training: base model, adapters if configured, value head."""
    if (expand_home(args.base_model) / "value_head.safetensors").is_file():
        problem = f"the trained value head in base_model={args.base_model!r} is not used. To"
        warnings.warn(f"{problem} start with it, pass policy=... (load_value_head).", stacklevel=2)
    base_model = load_with_adapters(args.base_model, args, device, args.seed)
    return make_policy(base_model, args.value_head, args.seed)


def make_policy(
    base_model: HookedModel, value_head: str = "shared", seed: int = 0
) -> TransformerWithValueHead:
    """Return a policy with a value head of one of three kinds.

    - "shared": it reads the policy's residual, and its gradient flows into the transformer.
    - "detached": it reads the same residual, without a gradient to the transformer.
    - "separate": it reads the residual of a critic (see `TransformerWithCritic`).
    """
    if value_head == "shared":
        return TransformerWithValueHead(base_model, seed=seed)
    if value_head == "detached":
        head = make_value_head(base_model.cfg.d_model, seed, DetachedValueHead)
        return TransformerWithValueHead(base_model, head)
    if value_head == "separate":
        return TransformerWithCritic(base_model, seed=seed)
    raise ConfigError(f"Unknown value_head {value_head!r}. Choose shared, detached or separate.")


def in_weight_precision(
    policy: TransformerWithValueHead, weight_precision: str
) -> TransformerWithValueHead:
    """Round the weights of policy and critic to bfloat16 in place, except for the value head."""
    if weight_precision != "fp32":
        critics = [policy.critic] if isinstance(policy, TransformerWithCritic) else []
        for model in (policy.base_model, *critics):
            model.to(torch.bfloat16, print_details=False)
    return policy


def load_with_adapters(
    base_model: str, adapters: AdapterArgs, device: str | torch.device = "cpu", seed: int = 0
) -> HookedModel:
    """Load a model to train, with new adapters, those of a PEFT directory, or none."""
    model = load_model(base_model, device=device)
    if adapters.adapter_path is not None:
        load_adapter(model, adapters.adapter_path, base_model)
    elif adapters.lora_rank:
        targets = adapters.lora_targets.replace(",", " ").split()
        add_lora(model, adapters.lora_rank, adapters.lora_alpha, targets, seed)
    return model


def make_reference(
    model: HookedModel | TransformerWithValueHead, device: str | None = None
) -> HookedModel:
    """Return the frozen reference without hooks: a view if adapters are new, otherwise a copy.

    With `device`, it is a copy whose embedding and blocks are on that device. Its final norm and
    unembedding, which learning needs for every minibatch, stay on the model's.
    """
    model = getattr(model, "base_model", model)
    layers = lora_layers(model).values()
    is_new = layers and not any(layer.B.any() for layer in layers)
    if device is None:
        return without_adapters(model) if is_new else frozen_copy(model)
    reference, home = frozen_copy(model), model.unembed.W_U.device
    reference.to(str(pick_device(device, "reference_device")), print_details=False)
    reference.ln_final.to(home)
    reference.unembed.to(home)
    return reference


def freeze(model: HookedModel, device: str | None = None) -> HookedModel:
    """Freeze a model in place; with a device, return its `make_reference`."""
    model.requires_grad_(False).eval()
    return model if device is None else make_reference(model, device)
