"""Hooked models: loading, the value head, the critic, the frozen reference, LoRA, export."""

from rlhf_lab.models.build import build_policy, load_with_adapters, make_policy, make_reference
from rlhf_lab.models.critic import TransformerWithCritic
from rlhf_lab.models.decode import Decoder
from rlhf_lab.models.export import export_language_model, export_policy
from rlhf_lab.models.forward import Forward
from rlhf_lab.models.hooked_model import HookedModel, has_hooks, make_model
from rlhf_lab.models.hooked_transformer import HookedTransformer
from rlhf_lab.models.load import load_model
from rlhf_lab.models.lora import (
    LoRALinear,
    adapters_off,
    add_lora,
    effective_weights,
    lora_layers,
    merged_lora,
    without_adapters,
)
from rlhf_lab.models.model_config import ModelConfig
from rlhf_lab.models.outputs import (
    PolicyOutputs,
    ReferenceComparison,
    compare_with_reference,
    policy_outputs,
    reference_logprobs,
    run_policy,
)
from rlhf_lab.models.peft_format import export_adapter, load_adapter
from rlhf_lab.models.reference import (
    final_residuals,
    frozen_copy,
    merged_copy,
    same_weights,
    unembed_residuals,
)
from rlhf_lab.models.token_stats import token_stats_chunked
from rlhf_lab.models.value_head import (
    TransformerWithValueHead,
    make_value_head,
)

__all__ = [
    "Decoder",
    "Forward",
    "HookedModel",
    "HookedTransformer",
    "LoRALinear",
    "ModelConfig",
    "PolicyOutputs",
    "ReferenceComparison",
    "TransformerWithCritic",
    "TransformerWithValueHead",
    "adapters_off",
    "add_lora",
    "build_policy",
    "compare_with_reference",
    "effective_weights",
    "export_adapter",
    "export_language_model",
    "export_policy",
    "final_residuals",
    "frozen_copy",
    "has_hooks",
    "load_adapter",
    "load_model",
    "load_with_adapters",
    "lora_layers",
    "make_model",
    "make_policy",
    "make_reference",
    "make_value_head",
    "merged_copy",
    "merged_lora",
    "policy_outputs",
    "reference_logprobs",
    "run_policy",
    "same_weights",
    "token_stats_chunked",
    "unembed_residuals",
    "without_adapters",
]
