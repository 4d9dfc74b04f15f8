"""The report of a phase; `views/report.py` makes the page of a run."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.samples import Samples


@dataclass(frozen=True)
class LearningStats:
    """Means over the minibatches of one learning phase; see docs/metrics.md."""

    objective: float
    clipped_surrogate: float
    value_loss: float
    entropy_bonus: float
    kl_penalty: float
    clip_fraction: float
    approx_kl_per_token: float
    mean_ratio: float
    ratio_first_minibatch: float
    grad_norm: float
    skipped_minibatches: int = 0
    unused_minibatches: int = 0


@dataclass(frozen=True)
class RolloutStats:
    """Statistics of a batch, None if the run has no such number; see docs/metrics.md."""

    mean_reward: float
    reward_std: float
    true_reward: float | None
    kl_per_token: float
    kl_per_sequence: float
    entropy_per_token: float
    response_length: float
    explained_variance: float
    grammatical_fraction: float | None = None
    steps_fraction: float | None = None
    faithful_fraction: float | None = None
    dropped_carry_fraction: float | None = None
    direct_fraction: float | None = None
    sure_fraction: float | None = None
    uninformative_group_fraction: float | None = None
    resampled_prompts: int | None = None
    engine_kl_per_token: float | None = None
    effective_sample_fraction: float | None = None
    reward_means: dict[str, float] | None = None
    kl_to_initial_per_sequence: float | None = None
    reference_phase: int | None = None


@dataclass(frozen=True)
class Cost:
    """Times and memory of a phase, which a seed does not determine; see docs/metrics.md."""

    rollout_seconds: float
    learning_seconds: float
    rollout_tokens_per_second: float
    learning_tokens_per_second: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class PhaseReport:
    """One line of metrics.jsonl; numbers of its parts are attributes: `report.mean_reward`."""

    phase: int  # learning phases before its rollout
    rollout: RolloutStats
    learning: LearningStats
    base_lr: float
    head_lr: float
    kl_coef: float
    cost: Cost

    def __getattr__(self, name: str) -> Any:
        for part in ("rollout", "learning", "cost"):
            if hasattr(self.__dict__.get(part), name):
                return getattr(self.__dict__[part], name)
        raise AttributeError(f"PhaseReport has no {name!r}; see `report.to_dict()`.")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: metrics flat, several rewards by name, then costs."""
        flat: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            flat |= value if name in ("rollout", "learning") else {name: value}
        means = flat.pop("reward_means") or {}
        return flat | {reward_metric(name): mean for name, mean in means.items()}


def reward_metric(name: str) -> str:
    """Return the name in metrics, samples and logs of one of several rewards."""
    return f"reward/{name}"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: of the device's allocator, or of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):
        return info.peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if psutil.MACOS else peak * 1024


def compute_cost(samples: Samples, args: RLHFArgs, rollout: float, learning: float) -> Cost:
    """Return the cost of a phase from the seconds of its two halves."""
    tokens = int(samples.mask.sum())
    learned, device = tokens * args.batches_per_learning_phase, samples.tokens.device
    return Cost(rollout, learning, tokens / rollout, learned / learning, peak_memory_bytes(device))
