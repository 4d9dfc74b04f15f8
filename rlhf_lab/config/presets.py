"""Presets: the fields that each sets; all others keep their defaults."""

from types import MappingProxyType
from typing import Any, Literal

from rlhf_lab.config.methods import PAPER_METHODS

Preset = Literal["reel", "sums", "sums-long", "sums-hot", "smol", "gpt2-small", "gpt2-medium"]
# GRPO as published, with a verifiable reward
_SUMS = PAPER_METHODS["grpo"] | {
    "base_model": "sums-nano",
    "reward_fn": "sums:exact",
    "prompts": "sums:2,3",
    "gen_len": 32,
    "stop_at_eos": True,
    "top_k": None,
    "total_phases": 20,
    "batch_size": 256,
    "base_lr": 3e-4,
    "warmup_steps": 2,
    "kl_coef": 0.0,
}
PRESETS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "reel": {
            "base_model": "reel-nano",
            "reward_model": "reel-sentiment",
            "prefix": "this movie",
            "gen_len": 26,
            "stop_at_eos": True,
            "top_k": None,
            "total_phases": 20,
            "batch_size": 256,
            "num_minibatches": 8,
            "base_lr": 3e-4,
            "head_lr": 3e-3,
            "warmup_steps": 2,
            "ent_coef": 0.0,
            "advantages": "gae",
            "kl_coef": 0.3,
        },
        "sums": _SUMS,
        "sums-long": _SUMS | {"prompts": "sums:2,3,4", "base_lr": 1e-3, "total_phases": 30},
        "sums-hot": _SUMS | {"base_lr": 3e-3},  # so high that pass@64 falls
        "smol": {
            "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "direction": "neg",
            "prefix": "This movie was really",
            "prepend_bos": False,
            "gen_len": 20,
            "total_phases": 30,
            "batch_size": 16,
            "warmup_steps": 2,
            "advantages": "gae",
            "kl_coef": 0.2,
            "save_every": 5,
        },
        # saving a state of 2 or 5 GB takes longer than a phase on a GPU
        "gpt2-small": {"base_model": "gpt2", "save_every": 10, "keep_checkpoints": 4},
        "gpt2-medium": {"save_every": 10, "keep_checkpoints": 0},
    }
)
