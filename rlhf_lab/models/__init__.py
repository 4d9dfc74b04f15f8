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
