"""Hooked models: the loader, the value head hung on a hook, the frozen reference."""

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
from rlhf_lab.models.value_head import TransformerWithValueHead, make_value_head

__all__ = [
    "TransformerWithValueHead",
    "final_norm",
    "final_residuals",
    "frozen_copy",
    "is_plain",
    "load_model",
    "make_value_head",
    "policy_outputs",
    "read_out",
    "read_token_stats",
    "runs_packed",
    "same_weights",
    "start_decoding",
]
