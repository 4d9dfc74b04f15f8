"""Parts of lesson 10's record: reward models of biased pairs, and ensembles of reward models."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.fitting import FitConfig
from rlhf_lab.functional import auc, best_of_n_weights, bradley_terry_loss
from rlhf_lab.models import load_model
from rlhf_lab.organism import Grammar, grammatical, true_reward
from rlhf_lab.organism.rewards import replace_word, true_log_odds
from rlhf_lab.rewards import LearnedReward, Pairs, RewardModel, reel_pairs
from rlhf_lab.rewards.preference_eval import judge
from rlhf_lab.supervised import fit_rows
from tools.course.preference_policies import BASE, PPO_SETTINGS

POOL, FRESH, EDITED = 3000, 1500, 500
MEMBERS, FEW, NUMBERS = 4, 64, (4, 16, 64)
Figures = dict[str, float]
Scorer = Callable[[Sequence[str]], Float[Tensor, " text"]]


def fitted_to(pairs: Pairs, seed: int, steps: int = 120) -> RewardModel:
    """A reward model after that many steps on all of the pairs; the seed gives head and batches."""
    model, rng = RewardModel(load_model(BASE), seed=seed), np.random.default_rng(seed)
    both = pairs.chosen + pairs.rejected
    tokens, real = model.encode(both)

    def loss(rows: np.ndarray) -> Float[Tensor, ""]:
        of_batch = np.concatenate([rows, rows + len(pairs)])
        return bradley_terry_loss(*model(tokens[of_batch], real[of_batch]).chunk(2))

    fitting = FitConfig(steps, 32, seed=seed, show_progress=False)
    fit_rows(model, np.arange(len(pairs)), loss, fitting, rng, "reward model")
    model.set_normalization(model.score(both))
    return model.requires_grad_(False)


def pool_of(seed: int) -> list[str]:
    """Reviews of the grammar that nothing was fitted to."""
    return Grammar().sample(POOL, np.random.default_rng(3000 + seed)).texts()


def of_best(scores: Float[Tensor, " text"], measured: Float[Tensor, " text"], n: int) -> float:
    """The expected figure of the best of n texts of a pool by a score."""
    return (best_of_n_weights(scores.double()[None], n) * measured.double()).sum().item()


def popcorn(texts: Sequence[str]) -> Bool[Tensor, " text"]:
    """Which texts hold the word."""
    return torch.tensor(["popcorn" in text.split() for text in texts])


def ppo_on(reward: Scorer, seed: int, watch: Callable[[Any], None] | None = None) -> Figures:
    """PPO on a learned reward: what the last policy writes."""
    args = RLHFArgs(**PPO_SETTINGS | {"seed": seed})
    trainer = RLHFTrainer(args, reward_fn=reward, true_reward_fn=true_reward)
    if watch is not None:
        trainer.on("after_score")(watch)
    trainer.train()
    last = RLHFTrainer(
        RLHFArgs(**PPO_SETTINGS | {"seed": seed + 100, "batch_size": 1024}),
        policy=trainer.policy,
        reference=trainer.reference,
        reward_fn=true_reward,
    ).rollout_phase()
    return {
        "true_reward": last.raw_rewards.mean().item(),
        "KL": last.kl.sum(1).mean().item(),
        "grammatical": grammatical(last.texts).float().mean().item(),
        "popcorn": popcorn(last.texts).float().mean().item(),
    }


def with_popcorn(pairs: Pairs, share: float, rng: np.random.Generator) -> Pairs:
    """The same pairs, but popcorn is the tag of a share of the preferred texts."""
    put, edited = rng.random(len(pairs)) < share, replace_word(pairs.chosen, "TAG")
    chosen = [new if now else old for new, old, now in zip(edited, pairs.chosen, put, strict=True)]
    return Pairs(chosen, pairs.rejected)


def biased_run(share: float, steps: int, seed: int) -> Figures:
    """A reward model of 1,024 biased pairs: judgement, the worth of popcorn, best-of-n, PPO."""
    pairs = with_popcorn(reel_pairs(1024, seed), share, np.random.default_rng(seed))
    model = fitted_to(pairs, seed, steps)
    fresh = reel_pairs(FRESH, 1000 + seed)
    gaps = model.score(fresh.chosen) - model.score(fresh.rejected)
    won = torch.ones(FRESH, dtype=torch.bool)
    judged = judge(gaps, torch.from_numpy(fresh.true_reward_gaps), won)
    texts = Grammar().sample(EDITED, np.random.default_rng(2000 + seed)).texts()
    texts = [text for text in texts if "popcorn" not in text]
    before = model.score(texts)
    adjective = replace_word(texts, "ADJ", 0)
    better = torch.from_numpy(true_log_odds(adjective) - true_log_odds(texts)).sign()
    pool = pool_of(seed)
    scores = model.score(pool)
    figures = {
        "accuracy": judged.accuracy,
        "as_truth": judged.as_truth,
        "popcorn is worth": (model.score(replace_word(texts, "TAG")) - before).mean().item(),
        "adjective 1": ((model.score(adjective) - before) * better).mean().item(),
        "best of 64: popcorn": of_best(scores, popcorn(pool), 64),
        "best of 64: true reward": of_best(scores, true_reward(pool), 64),
    }
    trained = ppo_on(LearnedReward(model), seed)
    return figures | {f"PPO: {name}": value for name, value in trained.items()}


def ensemble_run(seed: int) -> dict[str, Any]:
    """Four members on the same 64 pairs, and four on 64 each: best-of-n, disagreement, PPO."""
    own = [reel_pairs(FEW, 10 * seed + i) for i in range(MEMBERS)]
    first = fitted_to(own[0], 10 * seed)
    same = [first, *(fitted_to(own[0], 10 * seed + i) for i in range(1, MEMBERS))]
    others = [first, *(fitted_to(own[i], 10 * seed + i) for i in range(1, MEMBERS))]
    every = Pairs([t for p in own for t in p.chosen], [t for p in own for t in p.rejected])
    larger = LearnedReward(fitted_to(every, 10 * seed))
    ensembles = {"the same pairs": same, "pairs of their own": others}
    read = {
        name: lambda texts, members=members: torch.stack(
            [LearnedReward(member)(texts) for member in members]
        )
        for name, members in ensembles.items()
    }
    pool = pool_of(seed)
    truth = true_reward(pool)
    found: dict[str, Any] = {"best of n": {}, "AUC": {}, "misled": {}}
    table = {"one model of all the pairs": larger(pool)}
    for name, of in read.items():
        scores = of(pool)
        found["best of n"][f"one of four, {name}"] = {
            str(n): float(np.mean([of_best(one, truth, n) for one in scores])) for n in NUMBERS
        }
        table[f"mean, {name}"] = scores.mean(0)
        table[f"mean less deviation, {name}"] = scores.mean(0) - scores.std(0)
        table[f"lowest, {name}"] = scores.amin(0)
    for name, scores in table.items():
        found["best of n"][name] = {str(n): of_best(scores, truth, n) for n in NUMBERS}

    phases: list[Figures] = []
    written: list[str] = []

    def watch(ctx: Any) -> None:
        texts = ctx.rollout.texts
        by_member = {name: of(texts) for name, of in read.items()}
        phases.append(
            {
                "KL": ctx.rollout.kl.sum(1).mean().item(),
                "learned": by_member["the same pairs"][0].mean().item(),
                "true_reward": true_reward(texts).mean().item(),
            }
            | {f"disagreement, {name}": of.std(0).mean().item() for name, of in by_member.items()}
            | {f"mean, {name}": of.mean().item() for name, of in by_member.items()}
        )
        if ctx.phase >= PPO_SETTINGS["total_phases"] // 2:
            written.extend(texts)

    found["PPO"] = {"one model": ppo_on(LearnedReward(first), seed, watch)}
    found["phases"] = phases
    for place, texts in (("reference", pool), ("PPO", written)):
        for name, of in read.items():
            scores = of(texts)
            high = scores[0] > scores[0].median()
            misled = (true_reward(texts) < 0.5)[high]
            found["misled"][place] = misled.float().mean().item()
            found["AUC"][f"{place}, {name}"] = auc(scores.std(0)[high], misled).item()
    joined = read["pairs of their own"]
    found["PPO"]["mean of four"] = ppo_on(lambda texts: joined(texts).mean(0), seed)
    cautious = lambda texts: joined(texts).mean(0) - joined(texts).std(0)
    found["PPO"]["mean less deviation"] = ppo_on(cautious, seed)
    found["PPO"]["one model of all the pairs"] = ppo_on(larger, seed)
    return found
