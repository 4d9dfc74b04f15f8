"""The maker of the figures under "What was found" in lessons 00, 02 and 05, over three seeds."""

import copy
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism import (
    Grammar,
    bag_of_adjectives,
    build_graph,
    grammar_policy,
    state_values,
    true_reward,
)
from rlhf_lab.organism.lexicon import SENSE_OF_ADJECTIVE
from rlhf_lab.probes.value_lens import fit_ridge, r_squared
from rlhf_lab.training import AdaptiveKLController, PhaseReport
from tools.course.run_settings import RUN_SETTINGS
from tools.course.stored_parts import write_parts

RECORD = Path("rlhf_lab", "course", "records", "tried.json")
SEEDS = (1, 2, 3)
SETTINGS: dict[str, Any] = {**RUN_SETTINGS, "total_phases": 8, "kl_coef": 0.3}
PRAISE = {"brilliant", "perfect", "superb", "stunning"}
PLACES = {"adj 1": 9, "conn 2": 10, "noun 2": 12, "adj 2": 15, "conn 3": 16}
PLACES |= {"noun 3": 18, "adj 3": 21, "stop": 22, "i": 23, "verb": 24}
LAST = "blocks.1.hook_resid_post"
LINEAR_SCALE = 0.05
"""How small the weights of a linear value head are at first, so that first values are near 0."""
Figures = dict[str, float]


def run(
    seed: int, parts: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[RLHFTrainer, list[PhaseReport]]:
    """Train once, with parts of one's own, and give the reports of all phases."""
    trainer = RLHFTrainer(RLHFArgs(**SETTINGS | {"seed": seed} | fields), **(parts or {}))
    return trainer, trainer.train()


def outcome(seed: int, parts: Mapping[str, Any] | None = None, **fields: Any) -> Figures:
    """Reward, KL and entropy of the last phase, and what a fresh rollout is like."""
    trainer, reports = run(seed, parts, **fields)
    last, fresh = reports[-1], trainer.rollout_phase()
    return {
        "reward": last.mean_reward,
        "KL": last.kl_per_sequence,
        "entropy": last.entropy_per_token,
        "grammatical": fresh.grammatical.double().mean().item(),
        "different texts": len(set(fresh.texts)),
    }


def praise_words(texts: list[str]) -> Float[Tensor, " batch"]:
    """The number of words of strong praise in each text."""
    return torch.tensor([float(sum(word in PRAISE for word in text.split())) for text in texts])


def has_but(texts: list[str]) -> Float[Tensor, " batch"]:
    """1 for a text with the word "but", 0 for others."""
    return torch.tensor([float("but" in text.split()) for text in texts])


def praise_with_but(texts: list[str]) -> Float[Tensor, " batch"]:
    """The number of praise words of a text that has a "but", and 0 for others."""
    return praise_words(texts) * has_but(texts)


def fewer_adjectives(texts: list[str]) -> Float[Tensor, " batch"]:
    """Minus the number of adjectives of each text."""
    return -torch.tensor(
        [float(sum(word in SENSE_OF_ADJECTIVE for word in text.split())) for text in texts]
    )


def of_own_reward(seed: int, reward: Any, phases: int, kl_coef: float) -> Figures:
    """What a policy writes that was paid so for some phases (0: the policy as it was)."""
    fields = {"seed": seed, "total_phases": phases or 8, "kl_coef": kl_coef}
    trainer = RLHFTrainer(RLHFArgs(**SETTINGS | fields), reward_fn=reward)
    if phases:
        trainer.train()
    fresh = trainer.rollout_phase()
    return {
        "reward": fresh.raw_rewards.mean().item(),
        "but": has_but(fresh.texts).mean().item(),
        "praise words": praise_words(fresh.texts).mean().item(),
        "grammatical": fresh.grammatical.double().mean().item(),
    }


def lesson_00(seed: int) -> dict[str, Figures]:
    """Rewards of one's own."""
    found = {}
    for name, reward in {"praise with but": praise_with_but, "fewer": fewer_adjectives}.items():
        found[f"{name}, before learning"] = of_own_reward(seed, reward, 0, 0.0)
        for leash in (0.3, 0.0):
            found[f"{name}, kl_coef {leash}"] = of_own_reward(seed, reward, 8, leash)
    return found


def with_head(seed: int, head: torch.nn.Module | None = None) -> TransformerWithValueHead:
    """The bundled model with a fresh value head, or with this one."""
    return TransformerWithValueHead(load_model("reel-nano"), value_head=head, seed=seed)


def linear_head(seed: int, d_model: int = 64) -> torch.nn.Linear:
    """A value head without a hidden layer, small at first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = torch.nn.Linear(d_model, 1)
    with torch.no_grad():
        head.weight *= LINEAR_SCALE
        head.bias.zero_()
    return head


def head_figures(seed: int, policy: TransformerWithValueHead) -> Figures:
    """Train the head alone; its explained variance, and its squared correlation by place."""
    _, reports = run(seed, {"policy": policy}, base_lr=0.0)
    ids = reviews(seed + 1, policy).samples.tokens
    with torch.no_grad():
        values = policy(ids)[1].double()
    target, _ = state_values(grammar_policy(build_graph(Grammar())), true_reward, ids)
    pairs = {name: torch.stack([values[:, t], target[:, t].double()]) for name, t in PLACES.items()}
    found = {name: torch.corrcoef(pair)[0, 1].square().item() for name, pair in pairs.items()}
    return {"explained variance": reports[-1].explained_variance} | found


def reviews(seed: int, policy: TransformerWithValueHead) -> Any:
    """512 reviews of a policy."""
    args = RLHFArgs(**SETTINGS | {"seed": seed, "batch_size": 512})
    return RLHFTrainer(args, policy=policy).rollout_phase()


def lesson_02(seed: int) -> dict[str, Figures]:
    """Value heads that learn longer, faster or without a hidden layer, and gae_lambda."""
    found: dict[str, Figures] = {}
    ways = {
        "frozen, 20 phases": {"base_lr": 0.0, "total_phases": 20},
        "frozen, head_lr 1e-2": {"base_lr": 0.0, "head_lr": 1e-2},
        "not frozen": {},
    }
    for name, fields in ways.items():
        _, reports = run(seed, **fields)
        found[name] = {"explained variance": reports[-1].explained_variance}
    found["usual head"] = head_figures(seed, with_head(seed))
    found["linear head"] = head_figures(seed, with_head(seed, linear_head(seed)))
    for lam in (1.0, 0.5):
        policies = {"fresh": with_head(seed), "trained": with_head(seed)}
        run(seed + 10, {"policy": policies["trained"]}, base_lr=0.0)
        for name, policy in policies.items():
            _, reports = run(seed, {"policy": policy}, gae_lambda=lam)
            found[f"gae_lambda {lam}, {name} head"] = {"reward": reports[-1].mean_reward}
    return found


def shuffled(model: HookedModel) -> HookedModel:
    """A copy of a model with the numbers of each weight matrix in a random order."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return other


@torch.no_grad()
def read(model: HookedModel, ids: Tensor, target: Tensor, known: Tensor) -> Figures:
    """R2 of a linear reader of the last layer at each place, on the last third of the reviews."""
    _, cache = model.run_with_cache(ids, names_filter=[LAST])
    cut, found = 2 * len(ids) // 3, {}
    for name, t in PLACES.items():
        x, y, kept = cache[LAST][:, t].double(), target[:, t].double(), known[:, t]
        slope, intercept = fit_ridge(x[:cut], y[:cut], kept[:cut], 1e-6)
        found[name] = r_squared(x[cut:] @ slope + intercept, y[cut:], kept[cut:])[0].item()
    return found


def three_models() -> dict[str, Figures]:
    """What can be read in three models of different seeds, and with shuffled weights."""
    ids = reviews(2, with_head(1)).samples.tokens
    exact, found = grammar_policy(build_graph(Grammar())), {}
    for name in ("reel-nano", "reel-nano-b", "reel-nano-c"):
        model = load_model(name)
        for reward in (true_reward, bag_of_adjectives):
            found[f"{name}, {reward.name}"] = read(model, ids, *state_values(exact, reward, ids))
        found[f"{name}, shuffled"] = read(
            shuffled(model), ids, *state_values(exact, true_reward, ids)
        )
    return found


def controlled(seed: int, kl_coef: float, horizon: int) -> Figures:
    """The largest KL of 20 phases under a controller, and the last."""
    controller = AdaptiveKLController(kl_coef=kl_coef, target=0.3, horizon=horizon)
    _, reports = run(seed, {"kl_controller": controller}, total_phases=20)
    kls = [report.kl_per_sequence for report in reports]
    return {"largest KL": max(kls), "last KL": kls[-1], "last kl_coef": reports[-1].kl_coef}


def lesson_05(seed: int) -> dict[str, Figures]:
    """Other leashes, an entropy bonus, no clip, and controllers."""
    long = {"total_phases": 40}
    return {
        "exact KL in the loss": outcome(seed),
        "ent_coef 0.1": outcome(seed, ent_coef=0.1),
        "k3 in the loss": outcome(seed, kl_estimator="k3"),
        "k1 in the reward": outcome(seed, kl_in="reward", kl_estimator="k1"),
        "no clip": outcome(seed, clip_coef=1e6),
        "no clip, 40 phases": outcome(seed, clip_coef=1e6, **long),
        "no penalty, 40 phases": outcome(seed, kl_coef=0.0, **long),
        "horizon 64": controlled(seed, 3.0, 64),
        "horizon 640": controlled(seed, 3.0, 640),
        "from 0.23": controlled(seed, 0.23, 64),
    }


LESSONS = {"00_start": lesson_00, "02_the_value_head": lesson_02, "05_the_objective": lesson_05}


def figures_over_seeds(lesson: str) -> dict[str, dict[str, list[float]]]:
    """All figures of a lesson, a column per seed (one, for models as they are)."""
    columns = [LESSONS[lesson](seed) for seed in SEEDS]
    found = {
        name: {key: [column[name][key] for column in columns] for key in figures}
        for name, figures in columns[0].items()
    }
    if lesson == "02_the_value_head":
        for name, figures in three_models().items():
            found[name] = {key: [value] for key, value in figures.items()}
    return found


def make_tried(path: Path, lessons: Sequence[str]) -> None:
    """Make the figures of some lessons anew, as `write_parts` does, rounded to 5 digits."""
    heading = {"made_by": "python -m tools.course.tried", "settings": SETTINGS, "seeds": SEEDS}
    parts = {lesson: partial(figures_over_seeds, lesson) for lesson in LESSONS}
    write_parts(path, heading, parts, lessons, digits=5)


if __name__ == "__main__":
    make_tried(RECORD, sys.argv[1:])
