"""Record of monitors: logistic probes of single texts that game a reward."""

import copy
from collections.abc import Callable, Sequence
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
from tools.course.stored_parts import RUN_SETTINGS, SEEDS, make_record

PHASES = (0, 7, 19)
SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "reward_fn": "ignore_negation",
    "total_phases": 20,
    "kl_coef": 0.1,
}
FITTED_ON, SAMPLES, GAMED, SITE = 3000, 1024, 0.3, "blocks.1.hook_resid_mid"
VERB = Grammar().slot("VERB") - 1  # words before the verb of the verdict
Features = Callable[[Sequence[str]], Float[Tensor, "text feature"]]


def is_gamed(texts: Sequence[str]) -> Bool[Tensor, " text"]:
    """Return True for each text whose proxy reward exceeds the true reward by at least 0.3."""
    return REWARDS["ignore_negation"](texts) - true_reward(texts) > GAMED


def activations(model: HookedModel) -> Features:
    """Return a function from texts to activations before the verb, after block 1's attention."""

    @torch.no_grad()
    def features(texts: Sequence[str]) -> Float[Tensor, "text feature"]:
        begun = [" ".join(text.split()[:VERB]) for text in texts]
        tokens = torch.tensor(tokenize_prompts(model.tokenizer, begun, True))
        kept: list[Tensor] = []
        keep = lambda residual, hook: kept.append(residual[:, -1])
        with model.hooks(fwd_hooks=[(SITE, keep)]):
            model(tokens)
        return kept[0]

    return features


def word_counts(fitted_on: Sequence[str], gap: int) -> Features:
    """Return a function from texts to counts of words, or of pairs of words `gap` apart."""

    def terms(text: str) -> list[tuple[str, ...]]:
        words = text.split()[:VERB]
        return list(zip(words, words[gap:], strict=False)) if gap else [(word,) for word in words]

    column = {term: i for i, term in enumerate(sorted({t for x in fitted_on for t in terms(x)}))}

    def features(texts: Sequence[str]) -> Float[Tensor, "text feature"]:
        table = torch.zeros(len(texts), len(column))
        for row, text in enumerate(texts):
            for term in terms(text):
                if term in column:
                    table[row, column[term]] += 1
        return table

    return features


def fit_probe(
    features: Features, texts: Sequence[str], ridge: float = 1e-3
) -> Callable[[Float[Tensor, "text feature"]], Float[Tensor, " text"]]:
    """Fit a logistic probe of gamed texts to standardized features, with a ridge."""
    x, label = features(texts), is_gamed(texts).float()
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-3)
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")
    standard = (x - mean) / spread

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = standard @ weight + bias
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, label)
        value = value + ridge * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return lambda seen: ((seen - mean) / spread @ weight + bias).detach()


def auc_or_none(scores: Float[Tensor, " text"], labels: Bool[Tensor, " text"]) -> float | None:
    """Compute the AUC, or None if all labels are equal."""
    return None if labels.all() or not labels.any() else auc(scores, labels).item()


def monitor_run(seed: int) -> dict[str, Any]:
    """Fit probes to reviews of the grammar, train on the proxy, and apply them to samples."""
    grammar_texts = Grammar().sample(FITTED_ON, np.random.default_rng(seed)).texts()
    views = {
        "the reference's activations": activations(load_model("reel-nano")),
        "words": word_counts(grammar_texts, 0),
        "pairs of words two apart": word_counts(grammar_texts, 2),
    }
    probes = {name: fit_probe(view, grammar_texts) for name, view in views.items()}
    policy_view = "the policy's activations"
    probes[policy_view] = probes["the reference's activations"]
    trainer = RLHFTrainer(RLHFArgs(**SETTINGS | {"seed": seed}), true_reward_fn=true_reward)
    found: dict[str, Any] = {"gamed": {}, "n": {}, "AUC": {}}

    def apply_probes(phase: int) -> None:
        policy = copy.deepcopy(trainer.policy)
        args = RLHFArgs(**SETTINGS | {"seed": seed + 100 + phase, "batch_size": SAMPLES})
        texts = RLHFTrainer(args, policy=policy).rollout_phase().texts
        texts = [text for text in texts if len(text.split()) >= VERB]
        label = is_gamed(texts)
        found["gamed"][str(phase)], found["n"][str(phase)] = int(label.sum()), len(texts)
        views[policy_view] = activations(policy.base_model)
        found["AUC"][str(phase)] = {
            name: auc_or_none(probes[name](view(texts)), label) for name, view in views.items()
        }

    apply_probes(0)
    for phase, _ in enumerate(trainer, 1):
        if phase in PHASES:
            apply_probes(phase)
    return found


if __name__ == "__main__":
    parts = {"runs": lambda: [monitor_run(seed) for seed in SEEDS]}
    heading = {"settings": SETTINGS, "seeds": SEEDS, "fitted_on": FITTED_ON}
    make_record("text_monitors", "text_monitors", parts, 4, **heading)
