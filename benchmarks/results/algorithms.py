"""Model diffs of four algorithms on Reel: PPO, GRPO, DPO and SFT, all at the same KL."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.results.settings import ALGORITHM_KL, ALGORITHM_SLACK, Row
from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import coarse_groups, graft_groups, restrict
from rlhf_lab.diffing.logit_shift import ends_of, split_shift
from rlhf_lab.diffing.weights import as_matrix
from rlhf_lab.errors import RunError
from rlhf_lab.fitting import DPOLoss, FitConfig
from rlhf_lab.models import TransformerWithValueHead, compare_with_reference, load_model
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.organism import grammatical, true_reward
from rlhf_lab.probes import ReelTruth
from rlhf_lab.probes.logit_shift import SITES, single_token
from rlhf_lab.probes.weight_delta import describe_spectrum, spectrum
from rlhf_lab.rewards import SentimentReward, reel_pairs
from rlhf_lab.sampling import SamplingSpec, sample
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.tuning import Examples, fine_tune, train_on_pairs

Figures = dict[str, Any]
BASE = "reel-nano"
SPEC = SamplingSpec(26, stop_at_eos=True)
SAMPLES, GRAFT_SAMPLES, REVIEWS = 1024, 256, 256
N_PAIRS, N_BEST, BEST_OF = 5_000, 512, 16
TRIES = 10


class Written(NamedTuple):
    """Samples of a model: the true reward and KL of each text, and which are reviews."""

    true_reward: Float[Tensor, " n"]
    grammatical: Float[Tensor, " n"]
    kl: Float[Tensor, " n"]


# a model, and its phase or number of steps
Tuned = tuple[HookedModel, Figures]


def run_algorithm(row: Row, seed: int) -> Figures:
    """Train until the KL has its target, and measure the difference from the base model."""
    base = load_model(BASE)
    tuned, chosen, written = at_the_kl(candidates(row, seed), base)
    return {"chosen": chosen, **texts(written), **differences(base, tuned, seed)}


def candidates(row: Row, seed: int) -> Iterator[Tuned]:
    """Yield models of one run, or of runs with other numbers of steps, the best guess first."""
    kind = row.fields["algorithm"]
    if kind in ("ppo", "grpo"):
        fields = {name: value for name, value in row.fields.items() if name != "algorithm"}
        yield from run_phases(RLHFArgs(preset="reel", seed=seed, **fields))
    else:
        yield from searched(row, seed, tune_dpo if kind == "dpo" else tune_sft)


def run_phases(args: RLHFArgs) -> Iterator[Tuned]:
    """Yield the policy before each phase of a run, nearest KL first."""
    kept: list[tuple[float, int, dict[str, Tensor]]] = []
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLHFTrainer(args, out=Path(directory, "run"))
        weights = copy.deepcopy(trainer.policy.base_model.state_dict())
        for report in trainer:  # the KL of a phase is measured before it learns
            kept.append((abs(report.kl_per_sequence - ALGORITHM_KL), report.phase, weights))
            weights = copy.deepcopy(trainer.policy.base_model.state_dict())
    model = load_model(BASE)
    for _, phase, weights in sorted(kept, key=lambda one: one[0]):
        model.load_state_dict(weights)
        yield model, {"phases": phase}


def searched(
    row: Row, seed: int, tune: Callable[[HookedModel, dict[str, Any], int, int], None]
) -> Iterator[Tuned]:
    """Yield runs with more or fewer steps, each with a complete learning-rate schedule.

    The next number of steps assumes that the KL grows with their square; between a number that is
    too low and one that is too high, it is their geometric mean.
    """
    steps, low, high = row.fields["steps"], None, None
    for _ in range(TRIES):
        model = load_model(BASE)
        tune(model, row.fields, steps, seed)
        yield model, {"steps": steps}
        kl = write(model, load_model(BASE), GRAFT_SAMPLES).kl.mean().item()
        low, high = (steps, high) if kl < ALGORITHM_KL else (low, steps)
        if low is None or high is None:
            steps = max(1, round(steps * (ALGORITHM_KL / kl) ** 0.5))
        else:
            steps = round((low * high) ** 0.5)


def tune_dpo(model: HookedModel, fields: dict[str, Any], steps: int, seed: int) -> None:
    """Tune by DPO on reviews of the grammar, with a rater who knows the true reward."""
    fitting = FitConfig(steps, 32, fields["learning_rate"], seed=seed, show_progress=False)
    train_on_pairs(model, reel_pairs(N_PAIRS, seed), fitting, DPOLoss(fields["beta"]))


def tune_sft(model: HookedModel, fields: dict[str, Any], steps: int, seed: int) -> None:
    """Tune by SFT on the best of 16 samples of the base by the classifier that rewards PPO."""
    classifier = SentimentReward("reel-sentiment")
    generator = torch.Generator().manual_seed(seed)
    policy, best = TransformerWithValueHead(load_model(BASE)), []
    for _ in range(N_BEST // 64):
        drawn = sample(policy, [prompt(model)] * (64 * BEST_OF), SPEC, generator)
        written = drawn.texts(model.tokenizer)
        top = classifier(written).view(64, BEST_OF).argmax(1) + torch.arange(64) * BEST_OF
        best += [written[i] for i in top.tolist()]
    examples = Examples([""] * len(best), best)
    fitting = FitConfig(steps, 32, fields["learning_rate"], seed=seed, show_progress=False)
    fine_tune(model, examples, fitting)


def at_the_kl(models: Iterator[Tuned], base: HookedModel) -> tuple[HookedModel, Figures, Written]:
    """Return the first model whose KL is within the tolerance of the target."""
    nearest = None
    for model, chosen in models:
        written = write(model, base, SAMPLES)
        kl = written.kl.mean().item()
        miss = abs(kl - ALGORITHM_KL)
        if nearest is None or miss < nearest[0]:
            nearest = miss, kl
        if miss <= ALGORITHM_SLACK:
            return model, chosen, written
    raise RunError(
        f"no checkpoint has a KL of {ALGORITHM_KL} +- {ALGORITHM_SLACK} nats per review, the "
        f"nearest {nearest[1]:.2f}; train with another learning rate."
    )


def prompt(model: HookedModel) -> list[int]:
    """<bos> this movie."""
    tokenizer = model.tokenizer
    return [tokenizer.bos_token_id, *tokenizer.encode("this movie", add_special_tokens=False)]


@torch.no_grad()
def write(model: HookedModel, base: HookedModel, n: int) -> Written:
    """Sample from a model, with the same noise for every model."""
    policy = TransformerWithValueHead(model)
    drawn = sample(policy, [prompt(model)] * n, SPEC, torch.Generator().manual_seed(0))
    kl = compare_with_reference(model, base, drawn, 1.0, 256).kl
    texts = drawn.texts(model.tokenizer)
    return Written(true_reward(texts), grammatical(texts).float(), (kl * drawn.mask).sum(1))


def texts(written: Written) -> Figures:
    """Means over the texts."""
    return {name: column.mean().item() for name, column in written._asdict().items()}


def differences(base: HookedModel, tuned: HookedModel, seed: int) -> Figures:
    """Measure causes of the shift, weights by group, ranks and the reward of each group."""
    groups = coarse_groups(base)
    before, after = dict(base.named_parameters()), dict(tuned.named_parameters())
    delta = {name: (after[name] - before[name]).detach() for name in before}
    norm = lambda weights: sum(w.double().square().sum() for w in weights.values()).sqrt().item()
    relative = {
        name: norm(restrict(delta, groups, name)) / norm(restrict(before, groups, name))
        for name in groups.names
    }
    ranks = [
        describe_spectrum(spectrum(as_matrix(name, delta[name]))[0])
        for name in delta
        if min(as_matrix(name, delta[name]).shape) > 1
    ]
    added = {}
    floor, top = (write(model, base, GRAFT_SAMPLES).true_reward for model in (base, tuned))
    for name in groups.names:
        others = [other for other in groups.names if other != name]
        put = write(graft_groups(base, tuned, groups, [name]), base, GRAFT_SAMPLES).true_reward
        left = write(graft_groups(base, tuned, groups, others), base, GRAFT_SAMPLES).true_reward
        added[name] = [(put - floor).mean().item(), (top - left).mean().item()]
    return {
        "shift": shift(base, tuned, seed),
        "relative": relative,
        "stable_rank": median(rank for rank, _ in ranks),
        "k90": median(k90 for _, k90 in ranks),
        "grafts": added,
    }


def shift(base: HookedModel, tuned: HookedModel, seed: int) -> Figures:
    """Measure the shift of loved minus hated at the verdict, by cause."""
    truth = ReelTruth()
    pos = truth.grammar.slot("VERB") - 1
    tokens = truth.reviews(REVIEWS, seed)[0][:, : pos + 1]
    models = (base, tuned)
    words = tuple(single_token(base.tokenizer, word) for word in ("loved", "hated"))
    acts = tuple(capture_activations(model, tokens, SITES, pos) for model in models)
    causes = split_shift(*ends_of(models, acts, tokens, pos, words), is_centered(base.ln_final))
    return {name: column.sum(0).mean().item() for name, column in causes._asdict().items()}
