"""Names of settings in TRL, torchtune, OpenRLHF and torchrl, and those that they have here."""

import difflib
from collections.abc import Collection, Mapping
from types import MappingProxyType

FIELDS_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "base_lr and head_lr",
        "lr": "base_lr and head_lr",
        "actor_learning_rate": "base_lr",
        "critic_learning_rate": "head_lr",
        "steps": "total_phases",
        "num_steps": "total_phases",
        "epochs": "total_phases",
        "mini_batch_size": "num_minibatches, their number, and micro_batch_size",
        "ppo_batch_size": "num_minibatches, their number",
        "train_batch_size": "num_minibatches, their number",
        "gradient_accumulation_steps": "micro_batch_size",
        "micro_train_batch_size": "micro_batch_size",
        "rollout_batch_size": "batch_size",
        "forward_batch_size": "generation_batch_size",
        "micro_rollout_batch_size": "generation_batch_size",
        "ppo_epochs": "batches_per_learning_phase",
        "max_epochs": "batches_per_learning_phase",
        "n_samples_per_prompt": "samples_per_prompt",
        "num_generations": "samples_per_prompt",
        "group_size": "samples_per_prompt",
        "n_phases": "total_phases",
        "max_new_tokens": "gen_len",
        "max_generated_tokens": "gen_len",
        "init_kl_coef": "kl_coef",
        "kl_coeff": "kl_coef",
        "beta": "kl_coef",
        "adap_kl_ctrl": "kl_controller",
        "kl_penalty": "kl_estimator",
        "target": "kl_target",
        "horizon": "kl_horizon",
        "ref_model_sync_steps": "reset_reference_every",
        "lam": "gae_lambda",
        "lambd": "gae_lambda",
        "lmbda": "gae_lambda",
        "cliprange": "clip_coef",
        "epsilon": "clip_coef",
        "eps_clip": "clip_coef",
        "cliprange_value": "vf_clip",
        "value_clip_range": "vf_clip",
        "value_coeff": "vf_coef",
        "use_score_scaling": "reward_scaling",
        "use_score_norm": "reward_scaling",
        "score_clip": "reward_clip",
        "early_stopping": "target_kl",
        "token_level_loss": "loss_aggregation",
        "dtype": "precision, and weight_precision",
        "model_name": "base_model",
        "pretrain": "base_model",
        "query_dataset": "prompts",
        "dataset": "prompts",
        "input_key": "prompts_column",
        "apply_chat_template": "chat",
        "chat_template": "chat",
        "peft_config": "lora_rank, lora_alpha and lora_targets",
        "adapter_name_or_path": "adapter_from",
        "enable_activation_checkpointing": "activation_checkpointing",
        "gradient_checkpointing": "activation_checkpointing",
        "optimizer_in_bwd": "optimizer_in_backward",
        "log_with": "loggers, and wandb_mode",
        "use_wandb": "wandb_mode",
        "use_tensorboard": "loggers",
        "metric_logger": "loggers, and wandb_mode",
        "tracker_project_name": "wandb_project_name",
    }
)
"""Each by what takes its place; values may be of another kind, see docs/settings.md."""


def instead_of(name: str, fields: Collection[str]) -> str | None:
    """What to write in place of a setting that is not there; None where nothing comes near."""
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.8)
    parts = [field for field in fields if name in field.split("_")]
    if not near and len(parts) == 1:  # "phases" for "total_phases"
        near = parts
    return FIELDS_ELSEWHERE.get(name) or next(iter(near), None)
