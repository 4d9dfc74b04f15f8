"""Runs of the results page: their names, and their fields in addition to a preset."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rlhf_lab.config import RLHFArgs

SEEDS = (1, 2, 3, 4, 5)

NO_VALUES = MappingProxyType({"vf_coef": 0.0})
GROUPS = MappingProxyType({"samples_per_prompt": 8, **NO_VALUES})

# the KL in the reward, by k1, so that the objective is E[reward] - kl_coef KL itself
IN_REWARD = MappingProxyType(
    {"kl_in": "reward", "kl_estimator": "k1", "normalize_reward": False, "target_kl": 0.01}
)

# methods as published; ReMax, which has no clip, diverges at the preset's learning rate
NAMES = "grpo rloo reinforce++ remax dr_grpo opo dapo gspo cispo".split()
PUBLISHED = MappingProxyType(dict.fromkeys(NAMES, {}) | {"remax": {"base_lr": 1e-4}})

# PPO, and estimators of other methods with PPO's other settings; their fields only
METHODS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "PPO, shared critic": {},
        "PPO, detached critic": {"value_head": "detached"},
        "PPO, separate critic": {"value_head": "separate"},
        "GRPO estimator": {"advantages": "grpo", **GROUPS},
        "RLOO estimator": {"advantages": "rloo", **GROUPS},
        "REINFORCE++ estimator": {
            **{"advantages": "reinforce++", "kl_coef": 0.05, **IN_REWARD, **NO_VALUES}
        },
        "ReMax estimator": {"advantages": "remax", "normalize_reward": False, **NO_VALUES},
    }
)

# trained weights: all, or adapters, with a higher learning rate
WEIGHTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "all": {},
        "LoRA": {
            "lora_rank": 8,
            "lora_targets": "W_Q,W_K,W_V,W_O,W_in,W_out",
            "base_lr": 1e-3,
        },
    }
)

# KL coefficient: constant, or adapted to 1.2 nats per review, by at most a fifth per phase
CONTROLLERS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "constant": {},
        "adaptive": {"kl_controller": "adaptive", "kl_target": 1.2, "kl_horizon": 256},
    }
)

# `kl_coef` in the runs on the planted loophole, and on the learned one
KL_COEFS, LEARNED_KL_COEFS = (0.1, 0.03), (0.5, 0.1)

LOOPHOLE = MappingProxyType(
    {"reward_fn": "smoothed_popcorn", "total_phases": 40, "warmup_steps": 8, **IN_REWARD}
)

# rewards of a reward model have standard deviation 1, and are clipped there
LEARNED = MappingProxyType({**LOOPHOLE, "reward_fn": "learned", "reward_clip": 1.0})

# the biased pairs, and how long a reward model is trained on them
PREFERENCES = MappingProxyType({"n_pairs": 10_000, "steps": 100, "popcorn_share": 0.5})

ALGORITHM_KL, ALGORITHM_SLACK = 1.5, 0.2  # nats per review at the comparison, and tolerance
# compared at one KL; `steps` is the first guess for DPO and SFT
ALGORITHMS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "PPO": {"algorithm": "ppo"},
        "GRPO": {"algorithm": "grpo", "advantages": "grpo", **GROUPS},
        "DPO": {"algorithm": "dpo", "beta": 0.5, "learning_rate": 1e-4, "steps": 121},
        "SFT": {"algorithm": "sft", "learning_rate": 3e-4, "steps": 100},
    }
)

REAL: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "plain": {},
        "LoRA": {"lora_rank": 8, "lora_targets": "W_Q,W_K,W_V,W_O", "base_lr": 3e-4},
        "bf16": {"precision": "bf16"},
    }
)
# real models on the preset `smol`, for a few phases: memory is steady, the reward is a trend
REAL_COMMON = MappingProxyType(
    {"total_phases": 6, "warmup_steps": 1, "base_lr": 3e-5, "kl_coef": 0.1}
)


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    part: str
    labels: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    preset: str = "reel"
    seeds: tuple[int, ...] = SEEDS

    @property
    def name(self) -> str:
        """The labels as one word, for --only."""
        words = " ".join(self.labels).lower().replace("+", "p").replace(",", "")
        return words.replace(" ", "-")

    def args(self, seed: int) -> RLHFArgs:
        """Return the settings of one run."""
        return RLHFArgs(preset=self.preset, seed=seed, **self.fields)


def method_rows() -> list[Row]:
    """List methods as published, and estimators by trained weights and KL controller."""
    published = [
        Row("methods", (name, "all", "constant"), {"method": name} | fields)
        for name, fields in PUBLISHED.items()
    ]
    return published + [
        Row("methods", (method, weights, controller), fields | trained | steered)
        for controller, steered in CONTROLLERS.items()
        for weights, trained in WEIGHTS.items()
        for method, fields in METHODS.items()
    ]


def kl_coef_rows(part: str, fields: Mapping[str, Any], kl_coefs: tuple[float, ...]) -> list[Row]:
    """List one row per KL coefficient."""
    return [Row(part, (f"kl_coef {x:g}",), fields | {"kl_coef": x}) for x in kl_coefs]


def real_rows() -> list[Row]:
    """List the rows of the real model: plain, with adapters, in bf16."""
    return [
        Row("real", (label,), REAL_COMMON | fields, preset="smol", seeds=(1,))
        for label, fields in REAL.items()
    ]


def all_rows() -> list[Row]:
    """List every row of the page, in order."""
    return [
        *method_rows(),
        *kl_coef_rows("loophole", LOOPHOLE, KL_COEFS),
        *kl_coef_rows("learned", LEARNED, LEARNED_KL_COEFS),
        *(Row("algorithms", (name,), dict(fields)) for name, fields in ALGORITHMS.items()),
        *real_rows(),
    ]


def command_line(preset: str, fields: dict[str, Any]) -> str:
    """Format the command of a run with these fields, without its seed and directory."""
    words = [f"python -m rlhf_lab train --preset {preset}"]
    for name, value in fields.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option} {value}")
    return " ".join(words)
