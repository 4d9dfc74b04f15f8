"""Names of settings in TRL, torchtune, OpenRLHF and torchrl, and the fields that replace them."""

import difflib
from collections.abc import Collection
from types import MappingProxyType

_NAMES = {
    "base_lr and head_lr": "learning_rate lr",
    "base_lr": "actor_learning_rate",
    "head_lr": "critic_learning_rate",
    "total_phases": "steps epochs n_phases",
    "total_phases (torchtune's; torchrl's window of steps does not exist here)": "num_steps",
    "num_minibatches, their number, and micro_batch_size": "mini_batch_size",
    "num_minibatches, their number": "ppo_batch_size train_batch_size",
    "micro_batch_size": "gradient_accumulation_steps micro_train_batch_size",
    "batch_size": "rollout_batch_size",
    "generation_batch_size": "forward_batch_size micro_rollout_batch_size",
    "batches_per_learning_phase": "ppo_epochs max_epochs",
    "samples_per_prompt": "n_samples_per_prompt num_generations group_size",
    "gen_len": "max_new_tokens max_generated_tokens",
    "kl_coef": "init_kl_coef kl_coeff beta",
    "kl_controller": "adap_kl_ctrl",
    "kl_estimator": "kl_penalty",
    "kl_target": "target",
    "kl_horizon": "horizon",
    "reference_model": "teacher_model teacher_model_name_or_path ref_model",
    "reset_reference_every": "ref_model_sync_steps",
    "gae_lambda": "lam lambd lmbda",
    "clip_coef": "cliprange epsilon eps_clip",
    "vf_clip": "cliprange_value value_clip_range",
    "vf_coef": "value_coeff",
    "reward_scaling": "use_score_scaling use_score_norm",
    "reward_clip": "score_clip",
    "target_kl": "early_stopping",
    "loss_aggregation": "token_level_loss",
    "precision and weight_precision": "dtype",
    "base_model": "model_name pretrain",
    "prompts": "query_dataset dataset",
    "prompts_column": "input_key",
    "chat": "apply_chat_template chat_template",
    "lora_rank, lora_alpha and lora_targets": "peft_config",
    "adapter_path": "adapter_name_or_path",
    "activation_checkpointing": "enable_activation_checkpointing gradient_checkpointing",
    "optimizer_in_backward": "optimizer_in_bwd",
    "loggers and wandb_mode": "log_with metric_logger",
    "wandb_mode": "use_wandb",
    "loggers": "use_tensorboard",
    "wandb_project_name": "tracker_project_name",
}
# the values may differ, see docs/settings.md
ALIASES = MappingProxyType({name: to for to, names in _NAMES.items() for name in names.split()})


def suggest_field(name: str, fields: Collection[str]) -> str | None:
    """Return the field to use instead of an unknown one; None if no field is similar."""
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.8)
    near += [field for field in fields if name in field.split("_")]  # total_phases for phases
    return ALIASES.get(name) or next(iter(near), None)
