"""A training run on Reel, with the exact solution next to each metric."""

import dataclasses
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results.learned import fit_biased_reward, reward_by_content
from benchmarks.results.settings import Row
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.organism import (
    REWARDS,
    FrontierPoint,
    Grammar,
    Reward,
    build_graph,
    frontier,
    grammar_policy,
)
from rlhf_lab.rewards import LearnedReward
from rlhf_lab.training import Context, RLHFTrainer

Metrics = dict[str, Any]
GRID = tuple(np.geomspace(1e3, 1e-3, 600))  # betas, from the reference to the largest KL


class ExactCurve:
    """The exact optima of a reward at all betas, ordered by KL.

    The reference is the grammar; the bundled model differs by a few hundredths of a nat.
    """

    def __init__(self, proxy: Reward) -> None:
        self.reference, self.proxy = grammar_policy(build_graph(Grammar())), proxy
        self.points = frontier(self.reference, proxy, GRID)

    def at_beta(self, beta: float) -> FrontierPoint:
        """Return the optimum of E[proxy] - beta KL."""
        return frontier(self.reference, self.proxy, [beta])[0]

    def at_kl(self, kl_per_sequence: float) -> FrontierPoint:
        """Return the optimum with this KL, interpolated linearly; the last one above its KL."""
        kl = [point.kl_per_sequence for point in self.points]
        columns = zip(*self.points, strict=True)
        return FrontierPoint(*(float(np.interp(kl_per_sequence, kl, c)) for c in columns))


@lru_cache(maxsize=2)
def exact_curve(reward: str) -> ExactCurve:
    """Return the exact optima of a named reward."""
    return ExactCurve(REWARDS[reward])


def train(args: RLHFArgs) -> tuple[list[Metrics], Metrics]:
    """Train as the command line does; returns metrics of each phase, and of the final samples."""
    curve: list[Metrics] = []
    args = dataclasses.replace(args, save_every=args.total_phases)
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLHFTrainer(args, out=Path(directory, "run"))
        tune_for(trainer.policy, args.cpu_tuning)

        @trainer.on("after_score")
        def note(ctx: Context) -> None:
            rollout = ctx.rollout  # rewards are clipped as for learning, but never normalized
            rewards = rollout.raw_rewards if args.normalize_reward else rollout.rewards
            popcorn = sum("popcorn" in text.split() for text in rollout.texts)
            curve.append({"proxy": rewards.mean().item(), "popcorn": popcorn / len(rollout.texts)})

        for report in trainer:
            curve[-1] |= {
                "phase": report.phase,
                "true_reward": report.true_reward,
                "grammatical": report.grammatical_fraction,
                "kl_per_sequence": report.kl_per_sequence,
            }
        final = trainer.run.read_info()["final"]
    return curve, {**final, "kl_coef": trainer.kl_controller.kl_coef}


def run_method(row: Row, seed: int) -> Metrics:
    """Train a method; returns metrics before and after, and the best true reward at that KL."""
    curve, final = train(row.args(seed))
    best = exact_curve("true_reward").at_kl(final["kl_per_sequence"])
    return {"initial": curve[0], "final": final, "best_true_reward": best.true_reward}


def run_loophole(row: Row, seed: int) -> Metrics:
    """Train on the planted loophole, with the exact optimum at its beta."""
    return _exploit(row.args(seed), exact_curve("smoothed_popcorn"))


def run_learned(row: Row, seed: int) -> Metrics:
    """Fit a reward model to biased pairs, and train on it, with its exact optimum."""
    with tempfile.TemporaryDirectory() as directory:
        model, notes = fit_biased_reward(Path(directory), seed)
        table = reward_by_content(LearnedReward(str(model)), seed)
        args = dataclasses.replace(row.args(seed), reward_model=str(model))
        found = _exploit(args, ExactCurve(table.clipped(args.reward_clip).reward()))
    return {**found, "reward_model": {**notes, "popcorn_bonus": table.popcorn_bonus}}


def _exploit(args: RLHFArgs, exact: ExactCurve) -> Metrics:
    curve, final = train(args)
    same_kl = [exact.at_kl(phase["kl_per_sequence"]) for phase in curve]
    return {
        "curve": [phase | {"exact": _plain(p)} for phase, p in zip(curve, same_kl, strict=True)],
        "final": final,
        "exact": _plain(exact.at_beta(args.kl_coef)),
    }


def _plain(point: FrontierPoint) -> Metrics:
    return {name: value for name, value in point._asdict().items() if name != "beta"}
