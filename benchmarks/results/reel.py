"""A training run on Reel, with the exact solution beside each metric."""

import dataclasses
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.results.exact import ExactCurve
from benchmarks.results.learned import fit_biased_reward, reward_by_content
from benchmarks.results.settings import Row
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.organism import REWARDS, FrontierPoint
from rlhf_lab.rewards import LearnedReward
from rlhf_lab.training import Context, PhaseReport, RLHFTrainer, Rollout

Figures = dict[str, Any]


@lru_cache(maxsize=1)
def true_reward_curve() -> ExactCurve:
    """The best true reward at every KL."""
    return ExactCurve(REWARDS["true_reward"])


@lru_cache(maxsize=1)
def loophole_curve() -> ExactCurve:
    """The optima of the reward with the planted loophole."""
    return ExactCurve(REWARDS["smoothed_popcorn"])


def train(args: RLHFArgs) -> tuple[list[Figures], Figures]:
    """Train as the command line does; figures of each phase, and of fresh samples after it all.

    The state to go on from is saved once only, which changes no figure.
    """
    curve: list[Figures] = []
    args = dataclasses.replace(args, save_every=args.total_phases)
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLHFTrainer(args, out=Path(directory, "run"))
        tune_for(trainer.policy, args.cpu_tuning)

        @trainer.on("after_score")
        def note(ctx: Context) -> None:
            curve.append(content_figures(ctx.rollout, args.normalize_reward))

        for report in trainer:
            curve[-1] |= phase_figures(report)
        final = trainer.run.read_info()["final"]
    return curve, {**final, "kl_coef": trainer.kl_controller.kl_coef}


def content_figures(rollout: Rollout, is_normalized: bool) -> Figures:
    """The mean reward, clipped as for learning but never standardised, and the share of popcorn."""
    rewards = rollout.raw_rewards if is_normalized else rollout.rewards
    popcorn = sum("popcorn" in text.split() for text in rollout.texts)
    return {"proxy": rewards.mean().item(), "popcorn": popcorn / len(rollout.texts)}


def phase_figures(report: PhaseReport) -> Figures:
    """What is kept of a phase."""
    return {
        "phase": report.phase,
        "true_reward": report.true_reward,
        "grammatical": report.grammatical_fraction,
        "kl_per_sequence": report.kl_per_sequence,
    }


def run_method(row: Row, seed: int) -> Figures:
    """A method's run: true reward and KL before and after, and the best true reward at that KL."""
    curve, final = train(row.args(seed))
    best = true_reward_curve().at_kl(final["kl_per_sequence"])
    return {"initial": curve[0], "final": final, "best_true_reward": best.true_reward}


def run_loophole(row: Row, seed: int) -> Figures:
    """A run on the planted loophole, with the exact optimum at its price of KL."""
    return _exploit(row.args(seed), loophole_curve())


def run_learned(row: Row, seed: int) -> Figures:
    """A reward model fitted to biased pairs, a run on it, and its exact optimum."""
    with tempfile.TemporaryDirectory() as directory:
        model, notes = fit_biased_reward(Path(directory), seed)
        table = reward_by_content(LearnedReward(str(model)), seed)
        args = dataclasses.replace(row.args(seed), reward_model=str(model))
        figures = _exploit(args, ExactCurve(table.clipped(args.reward_clip).reward()))
    return {**figures, "reward_model": {**notes, "popcorn_bonus": table.popcorn_bonus}}


def _exploit(args: RLHFArgs, exact: ExactCurve) -> Figures:
    curve, final = train(args)
    same_kl = [exact.at_kl(phase["kl_per_sequence"]) for phase in curve]
    return {
        "curve": [phase | {"exact": spoken(p)} for phase, p in zip(curve, same_kl, strict=True)],
        "final": final,
        "exact": spoken(exact.at_price(args.kl_coef)),
    }


def spoken(point: FrontierPoint) -> Figures:
    """An exact optimum as plain numbers."""
    return {name: value for name, value in point._asdict().items() if name != "beta"}
