"""Hooked models: loading, the value head, the critic, the frozen reference, LoRA, export."""

from rlhf_lab.models.build import build_policy, make_policy, make_reference
from rlhf_lab.models.export import export_policy
from rlhf_lab.models.forward import Forward
from rlhf_lab.models.hooked_model import final_residuals, frozen_copy, has_hooks, unembed_residuals
from rlhf_lab.models.hooked_transformer import HookedTransformer
from rlhf_lab.models.load import load_model
from rlhf_lab.models.lora import (
    LoRALinear,
    adapters_off,
    add_lora,
    effective_weights,
    lora_layers,
    merged_copy,
    same_weights,
    without_adapters,
)
from rlhf_lab.models.model_config import ModelConfig
from rlhf_lab.models.outputs import compare_with_reference, run_policy
from rlhf_lab.models.peft_format import export_adapter, load_adapter
from rlhf_lab.models.token_stats import token_stats_chunked
from rlhf_lab.models.value_head import (
    TransformerWithCritic,
    TransformerWithValueHead,
    make_value_head,
)

__all__ = [
    "Forward",
    "HookedTransformer",
    "LoRALinear",
    "ModelConfig",
    "TransformerWithCritic",
    "TransformerWithValueHead",
    "adapters_off",
    "add_lora",
    "build_policy",
    "compare_with_reference",
    "effective_weights",
    "export_adapter",
    "export_policy",
    "final_residuals",
    "frozen_copy",
    "has_hooks",
    "load_adapter",
    "load_model",
    "lora_layers",
    "make_policy",
    "make_reference",
    "make_value_head",
    "merged_copy",
    "run_policy",
    "same_weights",
    "token_stats_chunked",
    "unembed_residuals",
    "without_adapters",
]
