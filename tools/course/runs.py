"""Records of runs that lessons show: each run is trained once per seed."""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import blind_tuning, debugging
from rlhf_lab.course.debugging import GAMMA, LAM, SUSPECTS, make_dashboard
from rlhf_lab.functional import (
    calc_kl_penalty,
    calc_value_function_loss,
    compute_gae,
    token_rewards,
)
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.probes import ReelTruth
from rlhf_lab.training.run_dir import SAMPLES
from tools.course import preference_runs
from tools.course.record import RUN_SETTINGS, SEEDS, Parts, columns, over_seeds
from tools.course.runner import REAL_MODELS

# symptoms: one setting changed, and the means of the last phases
SYMPTOM_SETTINGS: dict[str, Any] = {**RUN_SETTINGS, "total_phases": 12, "kl_coef": 0.3}
CAUSES: dict[str, dict[str, Any]] = {
    "nothing is wrong": {},
    "kl_coef 0": {"kl_coef": 0.0},
    "clip_coef 0.001": {"clip_coef": 0.001},
    "value head does not learn": {"head_lr": 0.0},
}
COLUMNS = {
    "reward": "mean_reward",
    "true_reward": "true_reward",
    "KL": "kl_per_sequence",
    "explained variance": "explained_variance",
    "clipped": "clip_fraction",
}
LAST_PHASES = 3
# claim_runs: the reward after eight phases with another lambda of GAE
CLAIM_SEEDS = (1, 2, 3, 4, 5)
# two_leashes: the KL penalty in loss or reward, and other coefficients
KL_SETTINGS: dict[str, Any] = {
    "preset": "reel",
    "reward_fn": "true_reward",
    "total_phases": 40,
    "batch_size": 256,
    "gen_len": 26,
    "top_k": None,
    "advantages": "gae",
    "gae_lambda": 1.0,
    "normalize_reward": False,
    "normalize_advantages": False,
    "kl_coef": 0.3,
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "loss": {"kl_in": "loss"},
    "reward": {"kl_in": "reward", "kl_estimator": "k1"},
}
PRICES = {str(beta): PLACEMENTS["reward"] | {"kl_coef": beta} for beta in (0.03, 0.1, 1.0, 3.0)}
FRESH_REVIEWS = 2048
# dashboards and bug_hunt: broken trainers, and other healthy runs
BROKEN_SETTINGS: dict[str, Any] = {**RUN_SETTINGS, "total_phases": 8, "kl_coef": 0.3}
HEALTHY_OTHERS = {
    "half the learning rate": {"base_lr": RLHFArgs(preset="reel").base_lr / 2},
    "3 times the KL penalty": {"kl_coef": 3 * BROKEN_SETTINGS["kl_coef"]},
}
# real_samples: reviews of a real model
PHASES, REVIEWS = (0, 5, 30), 3


class RecordOfRuns(NamedTuple):
    """A record's parts, its other entries, and the digits of its numbers."""

    parts: Parts
    heading: Mapping[str, Any]
    digits: int = 5


def last_metrics(cause: str, seed: int) -> dict[str, float]:
    """Train once with a setting changed; returns the mean of each metric over the last phases."""
    args = RLHFArgs(**SYMPTOM_SETTINGS | CAUSES[cause] | {"seed": seed})
    last = RLHFTrainer(args).train()[-LAST_PHASES:]
    return {
        name: sum(getattr(report, field) for report in last) / LAST_PHASES
        for name, field in COLUMNS.items()
    }


def last_rewards(gae_lambda: float) -> list[float]:
    """Train once per seed; returns the mean reward of each last phase."""
    fields = RUN_SETTINGS | {"total_phases": 8, "kl_coef": 0.3, "gae_lambda": gae_lambda}
    runs = (RLHFTrainer(RLHFArgs(**fields, seed=seed)) for seed in CLAIM_SEEDS)
    return [run.train()[-1].mean_reward for run in runs]


def evaluate_run(fields: dict[str, Any], seed: int) -> dict[str, float]:
    """Train once; returns reward and KL of fresh reviews, per review and at every slot."""
    settings = KL_SETTINGS | fields | {"seed": seed}
    trained = RLHFTrainer(RLHFArgs(**settings))
    trained.train()
    fresh = RLHFTrainer(
        RLHFArgs(**settings | {"batch_size": FRESH_REVIEWS}),
        policy=trained.policy,
        reference=trained.reference,
    ).rollout_phase()
    slots = ReelTruth().slot_names(fresh.samples.tokens.shape[1])[fresh.samples.prefix_len :]
    by_slot = dict(zip(slots, fresh.kl.mean(0).tolist(), strict=True))
    reward, kl = fresh.raw_rewards.mean().item(), fresh.kl.sum(1).mean().item()
    return {"reward": reward, "KL": kl} | by_slot


def _negative_advantages(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    return -compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask)


def _shuffled_rewards(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    return compute_gae(values, token_rewards(rewards.roll(1), mask), GAMMA, LAM, mask)


def _rewarded_kl(kl: Tensor, kl_coef: float, mask: Tensor) -> Tensor:
    return calc_kl_penalty(kl, -kl_coef, mask)


def _learning_reference(args: RLHFArgs) -> dict[str, Any]:
    policy = TransformerWithValueHead(load_model(args.base_model), seed=args.seed)
    return {"policy": policy, "reference": policy.base_model}


BROKEN_KINDS: dict[str, tuple[dict[str, float], Callable[[RLHFArgs], dict[str, Any]]]] = {
    "healthy": ({}, lambda args: {}),
    SUSPECTS[0]: ({"base_lr": 0.0, "head_lr": 0.0}, lambda args: {}),
    SUSPECTS[1]: ({}, lambda args: {"logprobs": debugging.shifted_logprobs}),
    SUSPECTS[2]: ({}, lambda args: {"advantages": _negative_advantages}),
    SUSPECTS[3]: ({}, lambda args: {"advantages": debugging.one_token_late}),
    SUSPECTS[4]: ({}, lambda args: {"advantages": _shuffled_rewards}),
    SUSPECTS[5]: ({}, lambda args: {"value_loss": lambda *x: -calc_value_function_loss(*x)}),
    SUSPECTS[6]: ({}, lambda args: {"kl_penalty": _rewarded_kl}),
    SUSPECTS[7]: ({}, _learning_reference),
}


def dashboard(kind: str, seed: int) -> dict[str, list[float]]:
    """Train a broken or healthy trainer, and return its dashboard."""
    fields, parts = BROKEN_KINDS.get(kind) or (HEALTHY_OTHERS[kind], lambda args: {})
    args = RLHFArgs(**BROKEN_SETTINGS | fields, seed=seed)
    return make_dashboard(RLHFTrainer(args, **parts(args)).train())


def climbs(climber: str, seed: int) -> dict[str, float]:
    """Run a trainer on every rung."""
    settings, parts = BROKEN_SETTINGS | {"seed": seed}, debugging.WRONG_CLIMBERS.get(climber, {})
    return {rung: debugging.climb(settings, rung, parts) for rung in debugging.RUNGS}


@cache
def reviews() -> dict[int, list[dict]]:
    """Train preset smol on the models in RLHF_LAB_REAL_MODELS; returns samples by phase.

    It takes about ten minutes. The last phase is the evaluation.
    """
    models = Path(os.environ[REAL_MODELS])
    found = {
        "base_model": str(models / "smollm2"),
        "reward_model": str(models / "minilm-sentiment"),
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLHFTrainer(
            RLHFArgs(preset="smol", keep_checkpoints=0, **found), out=Path(directory, "run")
        )
        trainer.train()
        lines = trainer.run.read(SAMPLES)
    return {phase: [line for line in lines if line["phase"] == phase] for phase in PHASES}


def means() -> list[list]:
    """Return each phase, its mean reward, and in how many reviews "bad" is a word."""
    is_bad = lambda line: "bad" in line["response"].translate(str.maketrans('.,"', "   ")).split()
    return [
        [phase, sum(x["reward"] for x in lines) / len(lines), sum(map(is_bad, lines))]
        for phase, lines in reviews().items()
    ]


def samples() -> list[list]:
    """Return the phase, reward and text of the first reviews of each phase."""
    return [
        [phase, line["reward"], " ".join(line["text"].split())]
        for phase, lines in reviews().items()
        for line in lines[:REVIEWS]
    ]


def _blind_presets() -> Any:
    run = lambda name, seed: blind_tuning.tuned_figures(name, blind_tuning.PRESET_FIELDS, seed)
    return over_seeds(run, *blind_tuning.HIDDEN)


RECORDS_OF_RUNS: dict[str, RecordOfRuns] = {
    "symptoms": RecordOfRuns(
        {"runs": lambda: columns(last_metrics, *CAUSES)},
        {"settings": SYMPTOM_SETTINGS, "changes": CAUSES, "seeds": SEEDS}
        | {"last_phases": LAST_PHASES},
    ),
    "claim_runs": RecordOfRuns(
        {"treated": lambda: last_rewards(0.5), "control": lambda: last_rewards(1.0)},
        {"seeds": CLAIM_SEEDS},
        digits=4,
    ),
    "two_leashes": RecordOfRuns(
        {
            "runs": lambda: columns(lambda x, seed: evaluate_run(PLACEMENTS[x], seed), *PLACEMENTS),
            "prices": lambda: columns(lambda x, seed: evaluate_run(PRICES[x], seed), *PRICES),
        },
        {"settings": KL_SETTINGS, "seeds": SEEDS, "fresh_reviews": FRESH_REVIEWS},
    ),
    "dashboards": RecordOfRuns(
        {"runs": lambda: over_seeds(dashboard, *BROKEN_KINDS)},
        {"settings": BROKEN_SETTINGS, "seeds": SEEDS},
    ),
    "bug_hunt": RecordOfRuns(
        {
            "climbs": lambda: over_seeds(climbs, "healthy", *debugging.WRONG_CLIMBERS),
            "others": lambda: over_seeds(dashboard, *HEALTHY_OTHERS),
        },
        {"settings": BROKEN_SETTINGS, "ladder": dict(debugging.LADDER_FIELDS), "seeds": SEEDS},
    ),
    "blind_tuning": RecordOfRuns(
        {"runs": _blind_presets},
        {
            "settings": {**blind_tuning.TUNING_SETTINGS, **blind_tuning.PRESET_FIELDS},
            "budget": blind_tuning.REVIEWS,
            "fresh_reviews": blind_tuning.FRESH_REVIEWS,
            "seeds": SEEDS,
        },
    ),
    "preference_runs": RecordOfRuns(preference_runs.PARTS, preference_runs.HEADING, digits=4),
    "real_samples": RecordOfRuns({"means": means, "samples": samples}, {}, digits=4),
}
