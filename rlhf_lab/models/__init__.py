"""Hooked models: the loader, the value head hung on a hook, the frozen reference, LoRA."""

from rlhf_lab.models.decode import start_decoding
from rlhf_lab.models.load import load_model
from rlhf_lab.models.packed import runs_packed
from rlhf_lab.models.readout import (
    final_norm,
    is_plain,
    policy_outputs,
    read_out,
    read_token_stats,
)
from rlhf_lab.models.reference import final_residuals, frozen_copy, same_weights
from rlhf_lab.models.lora import (
    LORA_TARGETS,
    LoRALinear,
    adapters_off,
    add_lora,
    effective_weights,
    load_lora,
    lora_layers,
    merge_lora,
    merged_lora,
    save_lora,
    unmerge_lora,
    without_adapters,
)
from rlhf_lab.models.reference import final_residuals, frozen_copy, read_out
from rlhf_lab.models.value_head import TransformerWithValueHead, make_value_head

__all__ = [
    "LORA_TARGETS",
    "LoRALinear",
    "TransformerWithValueHead",
    "final_norm",
    "final_residuals",
    "frozen_copy",
    "is_plain",
    "adapters_off",
    "add_lora",
    "effective_weights",
    "final_residuals",
    "frozen_copy",
    "load_lora",
    "load_model",
    "lora_layers",
    "make_value_head",
    "policy_outputs",
    "read_out",
    "read_token_stats",
    "runs_packed",
    "same_weights",
    "start_decoding",
    "merge_lora",
    "merged_lora",
    "read_out",
    "save_lora",
    "unmerge_lora",
    "without_adapters",
]
