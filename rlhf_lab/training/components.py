"""Components of a trainer, made from the settings or taken from the caller, and sampling.

Custom components by name; each replaces what the settings name:

- `policy`, `reference`: the model to train, and the frozen one that the KL is measured from.
- `prompts`: texts to continue; with `args.chat` also lists of messages.
- `reward_fn`, `true_reward_fn`: from texts to rewards, and to the true reward to log with them.
  Several rewards, in a mapping by name or a list, are added with `reward_weights`.
- `kl_controller`: sets the coefficient of the KL penalty.
- `optimizer`: of torch, over parameters of the policy; it is set to maximize.
- `scheduler`: of that optimizer, stepped once per phase.
- `rollout_engine`: generates responses instead of the built-in sampler; see `RolloutEngine`.
- a function of `Overrides`, such as `kl_penalty` or `advantages`.
"""

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, format_argument
from rlhf_lab.models import TransformerWithCritic, TransformerWithValueHead
from rlhf_lab.models.device import (
    pick_device,
    product_dtype,
    validate_half_precision,
    validate_tf32,
)
from rlhf_lab.models.hooked_model import HookedModel, validate_forwards
from rlhf_lab.models.lora import lora_layers
from rlhf_lab.organism.language import validate_rewards
from rlhf_lab.parallel.launcher import is_grouped, n_processes, validate_single_process
from rlhf_lab.rewards import (
    JsonSchemaReward,
    RewardFn,
    RewardPipeline,
    SentimentReward,
    load_policy_and_critic,
    load_reward,
    resolve_custom_reward,
    split_rewards,
)
from rlhf_lab.samples import Samples
from rlhf_lab.training.checkpoint import checksum, checksum_model
from rlhf_lab.training.optim import get_optimizer_and_scheduler, validate_custom_optimizer
from rlhf_lab.training.overrides import warn_if_set
from rlhf_lab.training.rollout_engine import EngineSampler
from rlhf_lab.tuning.teacher import load_reference, validate_vocabulary

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


def choose_device(args: RLHFArgs) -> torch.device:
    """Return the device of this process; raise ConfigError if settings do not fit to it."""
    device = pick_device(args.device)
    if is_grouped(args.parallel):
        from rlhf_lab.parallel.validation import device_of_rank, validate_process_settings

        device = device_of_rank(device, args.device)
        validate_process_settings(args, n_processes())
    else:
        validate_single_process(args.parallel)
    validate_half_precision(device, product_dtype(args.precision), f"precision={args.precision!r}")
    validate_tf32(device, args.precision)
    return device


def load_models(
    args: RLHFArgs, device: torch.device, given: Mapping[str, Any]
) -> tuple[TransformerWithValueHead, HookedModel]:
    policy, reference = given["policy"], given["reference"]
    if policy is not None and not isinstance(getattr(policy, "base_model", None), HookedModel):
        remedy = "Pass TransformerWithValueHead(model), with model from load_model"
        raise ConfigError(f"policy={format_argument(policy)} has no value head. {remedy}.")
    reference = getattr(reference, "base_model", reference)
    if not isinstance(reference, HookedModel | None):
        name = format_argument(given["reference"])
        raise ConfigError(f"reference={name} is not a HookedModel. Load it with load_model.")
    if (teacher := args.reference_model) is not None and reference is not None:
        raise ConfigError(f"reference_model={teacher!r} conflicts with reference=. Remove one.")
    if policy is not None:
        validate_passed_policy(args, policy)
    policy = (load_policy_and_critic(args, device) if policy is None else policy).to(device)
    dtype = next(policy.parameters()).dtype
    validate_half_precision(device, dtype, f"a policy in {dtype}")
    if args.weight_precision != "fp32" and dtype != torch.bfloat16:
        raise ConfigError(
            f"weight_precision={args.weight_precision!r} requires weights in bfloat16, and the "
            f"policy's are in {dtype}. Convert them, or set weight_precision='fp32'."
        )
    if args.weight_precision == "fp32" and dtype.itemsize < 4:
        warnings.warn(
            f"the policy's weights are in {dtype}, so most steps are too small to change them. Use "
            "policy.float(), or weight_precision='bf16' with weights in bfloat16.",
            stacklevel=4,
        )
    if reference is None:
        reference = load_reference(args, policy)
    elif args.reference_device is not None:
        raise ConfigError(
            f"reference_device={args.reference_device!r} does not change a passed reference. Pass "
            "models.make_reference(reference, device), and set reference_device=None."
        )
    elif reference.unembed.W_U.device != policy.device:
        reference.to(str(policy.device), print_details=False)
    validate_models(policy, reference)
    if args.reset_reference_every is not None:
        validate_forwards(policy.base_model)
    if policy.base_model.tokenizer is None:
        raise ConfigError("policy.base_model has no tokenizer. Set one with set_tokenizer.")
    return policy, reference


def load_engine(trainer: "RLHFTrainer", engine: Any) -> EngineSampler | None:
    way = trainer.args.importance_correction
    if engine is None and way != "none":
        raise ConfigError(f"importance_correction={way!r} requires a rollout_engine. Pass one.")
    return None if engine is None else EngineSampler(trainer, engine)


def make_rewards(
    trainer: "RLHFTrainer", reward_fn: Any, true_reward_fn: RewardFn | None
) -> RewardPipeline:
    """Return the pipeline from samples to rewards, after a dry run of each reward function."""
    args, overrides, prompts = trainer.args, trainer.overrides, trainer.prompts
    estimator_reads = overrides.estimator_parameters(args)
    if reward_fn is None:
        if callable(getattr(type(trainer), "reward_fn", None)):
            raise ConfigError("The method reward_fn is not called. Pass reward_fn= to the trainer.")
        reward_fn = load_reward(args, trainer.device)
    else:
        reward_fn = resolve_custom_reward(reward_fn, args)
        warn_if_set(args, "reward_fn reward_model direction", "reward_fn= is set")
    source = "prompts" if "prompts" in trainer.custom_components else str(args.prompts or "prefix")
    true_reward_fn = true_reward_fn or getattr(trainer.language, "true_reward", None)
    scored_by = split_rewards(reward_fn) | {"true": true_reward_fn}
    validate_rewards(trainer.language, scored_by, prompts.texts, source)

    def read_by_rank(samples: Samples, read: Any) -> Any:
        return trainer.world.compute_by_rank(samples, read, "scoring its samples")

    rewards = RewardPipeline(
        args,
        trainer.tokenizer,
        reward_fn,
        true_reward_fn=true_reward_fn,
        stop_tokens=trainer.sampling_spec.stops(trainer.tokenizer),
        read_metrics=getattr(trainer.language, "read_metrics", None),
        normalize=overrides.normalize_reward,
        sample_greedily=trainer.sample_greedily if "greedy_rewards" in estimator_reads else None,
        compares="group" in estimator_reads,
        score_by_rank=read_by_rank if is_grouped(args.parallel) else None,
    )
    rewards.try_on(prompts.tokens, prompts.texts, prompts.labels, prompts.answers, prompts.turns)
    return rewards


def loaded_sources(reward_fn: RewardFn, **models: HookedModel) -> dict[str, Any]:
    """Return the class that a sentiment reward rewards, and checksums of models and schemas."""
    sources: dict[str, Any] = {"rewarded_class": None}
    for name, part in (models | split_rewards(reward_fn)).items():
        if isinstance(part, SentimentReward):
            sources["rewarded_class"] = {"index": part.rewarded_class, "label": part.rewarded_label}
        if isinstance(model := getattr(part, "model", part), nn.Module):
            sources[f"the model of {name}"] = checksum_model(model, all_weights=True)
        if isinstance(part, JsonSchemaReward):
            sources["json_schema"] = checksum({}, json.dumps(part.validator.schema))
    return sources


def make_optimizer(
    args: RLHFArgs, policy: TransformerWithValueHead, optimizer: Any, scheduler: Any
) -> tuple[Optimizer, LRScheduler]:
    if optimizer is None and scheduler is None:
        optimizer, scheduler = get_optimizer_and_scheduler(args, policy)
        if isinstance(policy, TransformerWithCritic):
            optimizer.param_groups[0]["params"].extend(policy.critic.parameters())
        return optimizer, scheduler
    warn_if_set(args, "optimizer base_lr head_lr weight_decay final_scale", "optimizer= is set")
    return validate_custom_optimizer(args, policy, optimizer, scheduler)


def validate_passed_policy(args: RLHFArgs, policy: TransformerWithValueHead) -> None:
    """Raise ConfigError if a passed policy lacks the adapters or the critic of the settings."""
    missing = [] if lora_layers(policy.base_model) else ["lora_rank", "adapter_path"]
    if args.value_head == "separate" and not hasattr(policy, "critic"):
        missing.append("value_head")  # critic_path is only valid with this value
    for name in missing:
        if value := getattr(args, name):
            problem = f"{name}={value!r} does not change a passed policy"
            raise ConfigError(f"{problem}. Pass that of build_policy(args), or remove {name}.")


def validate_models(policy: TransformerWithValueHead, reference: HookedModel) -> None:
    """Raise ConfigError if the vocabularies differ; warn if the models share trained weights."""
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    if not trained:
        raise ConfigError("No weight of the policy is trainable. Call policy.requires_grad_().")
    if isinstance(reference, nn.Module) and trained & set(map(id, reference.parameters())):
        warnings.warn(
            "the reference shares trained weights with the policy, so the KL between them is "
            "always 0. Remove it, or pass a copy (models.frozen_copy).",
            stacklevel=2,
        )
    validate_vocabulary(policy.base_model, reference)
