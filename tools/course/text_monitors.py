"""The maker of lesson 07's record of monitors: readers of single texts that game a reward."""

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.functional import auc
from rlhf_lab.models import load_model
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism import REWARDS, Grammar, true_reward
from rlhf_lab.sampling import tokenize_prompts
from tools.course.run_settings import RUN_SETTINGS
from tools.course.stored_parts import write_parts

RECORD = Path("rlhf_lab", "course", "records", "text_monitors.json")
SEEDS, PHASES = (1, 2, 3), (0, 7, 19)
SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "reward_fn": "ignore_negation",
    "total_phases": 20,
    "kl_coef": 0.1,
}
FITTED_ON, READ, GAMED, SITE = 3000, 1024, 0.3, "blocks.1.hook_resid_mid"
Features = Callable[[Sequence[str]], Float[Tensor, "text feature"]]


def gamed(texts: Sequence[str]) -> Bool[Tensor, " text"]:
    """Which texts the proxy pays at least 0.3 more than the true reward."""
    return REWARDS["ignore_negation"](texts) - true_reward(texts) > GAMED


def beginning(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text before the verb of the verdict."""
    return [text.split()[: Grammar().slot("VERB") - 1] for text in texts]


def states_in(model: HookedModel) -> Features:
    """What a reader sees of activations: behind block 1's attention, before the verdict."""

    @torch.no_grad()
    def states(texts: Sequence[str]) -> Float[Tensor, "text feature"]:
        begun = [" ".join(words) for words in beginning(texts)]
        tokens = torch.tensor(tokenize_prompts(model.tokenizer, begun, True))
        kept: list[Tensor] = []
        keep = lambda residual, hook: kept.append(residual[:, -1])
        with model.hooks(fwd_hooks=[(SITE, keep)]):
            model(tokens)
        return kept[0]

    return states


def counts_of(fitted_on: Sequence[str], apart: int) -> Features:
    """What a reader sees of words: how often each word is there, or each pair so far apart."""

    def terms(words: Sequence[str]) -> list[tuple[str, ...]]:
        later = words[apart:] if apart else words
        return list(zip(words, later, strict=False)) if apart else [(word,) for word in later]

    known = {term for words in beginning(fitted_on) for term in terms(words)}
    column = {term: i for i, term in enumerate(sorted(known))}

    def counts(texts: Sequence[str]) -> Float[Tensor, "text feature"]:
        table = torch.zeros(len(texts), len(column))
        for row, words in enumerate(beginning(texts)):
            for term in terms(words):
                if term in column:
                    table[row, column[term]] += 1
        return table

    return counts


def fitted_reader(
    view: Features, texts: Sequence[str], ridge: float = 1e-3
) -> Callable[[Float[Tensor, "text feature"]], Float[Tensor, " text"]]:
    """A logistic reader of which texts are gamed, on standardized features, with a ridge."""
    x, label = view(texts), gamed(texts).float()
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-3)
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")
    standard = (x - mean) / spread

    def loss() -> Tensor:
        optimizer.zero_grad()
        said = standard @ weight + bias
        value = torch.nn.functional.binary_cross_entropy_with_logits(said, label)
        value = value + ridge * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda seen: ((seen - mean) / spread @ weight + bias).detach()


def auc_or_none(scores: Float[Tensor, " text"], labels: Bool[Tensor, " text"]) -> float | None:
    """How often a gamed text scores higher than another one; None without one of either kind."""
    one_kind = bool(labels.all()) or not labels.any()
    return None if one_kind else auc(scores, labels).item()


def monitored(seed: int) -> dict[str, Any]:
    """Fit readers to reviews of the grammar, train on the proxy, read what the policy writes."""
    grammar_texts = Grammar().sample(FITTED_ON, np.random.default_rng(seed)).texts()
    base = load_model("reel-nano")
    views = {
        "the reference's activations": states_in(base),
        "words": counts_of(grammar_texts, 0),
        "pairs of words two apart": counts_of(grammar_texts, 2),
    }
    readers = {name: fitted_reader(view, grammar_texts) for name, view in views.items()}
    own = "the policy's activations"
    readers[own] = readers["the reference's activations"]
    trainer = RLHFTrainer(RLHFArgs(**SETTINGS | {"seed": seed}), true_reward_fn=true_reward)
    found: dict[str, Any] = {"gamed": {}, "n": {}, "AUC": {}}

    def read_at(phase: int) -> None:
        policy = copy.deepcopy(trainer.policy)
        args = RLHFArgs(**SETTINGS | {"seed": seed + 100 + phase, "batch_size": READ})
        texts = RLHFTrainer(args, policy=policy, true_reward_fn=true_reward).rollout_phase().texts
        texts = [text for text in texts if len(text.split()) >= Grammar().slot("VERB") - 1]
        label = gamed(texts)
        found["gamed"][str(phase)], found["n"][str(phase)] = int(label.sum()), len(texts)
        views[own] = states_in(policy.base_model)
        found["AUC"][str(phase)] = {
            name: auc_or_none(readers[name](view(texts)), label) for name, view in views.items()
        }

    read_at(0)
    for phase, _ in enumerate(trainer, 1):
        if phase in PHASES:
            read_at(phase)
    return found


def make_monitors(path: Path) -> None:
    """Train once per seed, and write the figures, rounded to 4 digits."""
    heading = {
        "made_by": "python -m tools.course.text_monitors",
        "settings": SETTINGS,
        "seeds": SEEDS,
        "fitted_on": FITTED_ON,
    }
    parts = {"runs": lambda: [monitored(seed) for seed in SEEDS]}
    write_parts(path, heading, parts, [], digits=4)


if __name__ == "__main__":
    sys.exit(make_monitors(RECORD))
