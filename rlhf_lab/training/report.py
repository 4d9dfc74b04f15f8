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
    """Means over the minibatches of one learning phase; each term has its weight and sign.

    Args:
        objective: clipped_surrogate - value_loss + entropy_bonus - kl_penalty, maximized.
        clip_fraction: fraction of tokens whose probability ratio left the clip range.
        approx_kl_per_token: k3 estimate of KL(old policy || policy), in nats per token.
        mean_ratio: mean over the tokens of the probability ratio, whose expectation is 1.
        ratio_first_minibatch: the probability ratio that is furthest from 1 before the first step;
            1 if the policy that is trained is the policy that sampled.
        grad_norm: global norm of the gradient before clipping.
        skipped_minibatches: number of those whose mean ratio exceeded ratio_threshold; they are
            in no mean.
        unused_minibatches: those left when target_kl ended the phase; 0 if it did not.
    """

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
    """Statistics of a batch of samples. None is a number that the run does not have.

    Args:
        mean_reward, reward_std: of the raw rewards.
        true_reward, grammatical_fraction: true reward on Reel.
        kl_per_token, kl_per_sequence: exact KL from the reference, in nats.
        entropy_per_token: in nats.
        response_length: mean number of real generated tokens, stop token included.
        explained_variance: of the returns by the values.
        uninformative_group_fraction: fraction of prompts whose responses have equal raw rewards.
        resampled_prompts: number of times that `dynamic_sampling` resampled prompts.
        engine_kl_per_token: k3 estimate of KL(rollout engine || policy) on the engine's samples, in
            nats, from the engine's log-probs.
        effective_sample_fraction: effective sample size of the tokens, weighted by policy over
            engine probability, divided by their number.
        reward_means: mean of each of several rewards, before its weight; `reward/NAME` in metrics.
        kl_to_initial_per_sequence: exact KL from the run's first reference, in nats.
        reference_phase: learning phases after which the policy became the reference.
    """

    mean_reward: float
    reward_std: float
    true_reward: float | None
    grammatical_fraction: float | None
    kl_per_token: float
    kl_per_sequence: float
    entropy_per_token: float
    response_length: float
    explained_variance: float
    uninformative_group_fraction: float | None = None
    resampled_prompts: int | None = None
    engine_kl_per_token: float | None = None
    effective_sample_fraction: float | None = None
    reward_means: dict[str, float] | None = None
    kl_to_initial_per_sequence: float | None = None
    reference_phase: int | None = None


@dataclass(frozen=True)
class Cost:
    """Times and memory of a phase; the only numbers that differ between two runs of one seed.

    Args:
        rollout_tokens_per_second: generated tokens per second of the rollout phase.
        learning_tokens_per_second: generated tokens times passes, per second of learning.
        peak_memory_bytes: of the process on CPU, of the allocator on CUDA and MPS, since the run
            began.
    """

    rollout_seconds: float
    learning_seconds: float
    rollout_tokens_per_second: float
    learning_tokens_per_second: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class PhaseReport:
    """One line of metrics.jsonl; numbers of its parts are attributes: `report.mean_reward`.

    Args:
        phase: counted from 0; the rollout is of the weights after `phase` learning phases.
        base_lr, head_lr, kl_coef: learning rates and weight of the KL penalty in this phase.
    """

    phase: int
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
