# %% [markdown]
# # 11 A real model
#
# On Reel every question had an exact answer to be compared with: the grammar knows what a review is
# worth. No real language has a grammar that knows. What of the lessons before can still be claimed of
# a real model, and what takes the place of the truth?
#
# **Needs** {lesson:watch_it_learn} (probes and their controls), {lesson:what_rlhf_changed} (patching) and {lesson:preferences} (LoRA).
#
# **Afterwards you can**
# - train a language model with LoRA against a classifier, beside a run whose reward means nothing,
# - compare two models text by text, with a test that you wrote, and be a blind judge yourself,
# - say how much of what a probe reads it could have memorised,
# - patch, switch adapters off by layer and cut ranks on a model of any size, with intervals,
# - write a report whose claims can be refuted, and mark it.
#
# **What replaces the truth**
#
# | on Reel | here | what it can show |
# |---|---|---|
# | true reward | a second rater that nothing was trained on, and your own reading, blind | that the policy did more than please its own classifier |
# | exact frontier | best-of-n of the old model, at the same KL | whether the training was worth its KL |
# | Bayes' rule beside a probe | a control task: labels that mean nothing | how much a probe memorises |
# | no probe beats Bayes' rule | words that the probe has not seen | that nothing leaks |
# | a planted change | a *placebo* run: the reward is a hash of the text | what training does whatever it is paid for |
# | many runs, exactly compared | a few seeds, and intervals over texts | whether an order is a finding |
#
# The last but one is the most valuable, and costs one run. Whatever differs between the old model and
# the new one *and also* between the old one and the placebo is not about the reward.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 50 seconds on one core on the stand-in.
# On SmolLM2 they took 408 processor seconds. Cells that take more than 3
# seconds on the stand-in say so:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import (
    Claim,
    Predictions,
    SeedFigures,
    check,
    hint,
    new_run,
    progress,
    show_claims,
    show_intervals,
    show_table,
    stored_figures,
)
from rlhf_lab.diffing import PatchPlace, Side, patch_activations
from rlhf_lab.diffing.patching import Patched
from rlhf_lab.diffing.weights import truncations
from rlhf_lab.functional import (
    Interval,
    best_of_n_kl_bound,
    best_of_n_mean,
    bootstrap_means,
    generated_logits,
    kl_per_sequence,
    kl_per_token,
    log_probs,
    masked_mean,
    promoted_mass,
    recovered_fraction,
)
from rlhf_lab.models import TransformerWithValueHead, lora_layers, merged_copy, without_adapters
from rlhf_lab.models import HookedTransformer
from rlhf_lab.organism import true_reward
from rlhf_lab.organism.lexicon import ADJECTIVES, ASPECTS, VERBS, flat
from rlhf_lab.probes.direction import Fitted, accuracy, fit_direction, project
from rlhf_lab.probes.logit_shift import single_token
from rlhf_lab.sampling import sample
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import bars, curves, heatmap

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=12,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    base_lr=1e-3,  # adapters take a higher rate than weights
)
predictions = Predictions()

# %% [markdown]
# ## Which model
#
# The text below is the same for every model, so it names no number of one: the tables do. `SCALE`
# chooses.
#
# - `"local"`: SmolLM2-135M-Instruct and a sentiment classifier of two classes, in the folder that the
#   environment variable `RLHF_LAB_REAL_MODELS` names, as `smollm2/` and `minilm-sentiment/`.
# - `"hub"`: the same language model and another classifier from the Hugging Face hub (0.5 GB).
# - `"stand-in"`: Reel, **with the truth of its grammar hidden** until the end. It takes seconds, and it
#   is more than a makeshift: when your report is written, you open the envelope and mark it.
# - `"auto"`: local where the variable is set, else the stand-in.
#
# The policy is asked for the opposite of what it does by itself: SmolLM2 is friendly about movies, so it
# is paid for the class *negative*; on Reel, half of the reviews are bad ones, and it is paid for
# *positive*. Everything below is about "the wanted class".

# %%
SCALE = "auto"  # or "stand-in", "local", "hub"

folder = os.environ.get("RLHF_LAB_REAL_MODELS")
if SCALE == "auto":
    SCALE = "local" if folder else "stand-in"
if SCALE in ("local", "hub"):
    SETTINGS |= {"preset": "smol", "kl_coef": 0.1, "gen_len": 20}
    SETTINGS |= {"keep_checkpoints": 0}
    SETTINGS |= {"total_phases": 6, "warmup_steps": 1, "batch_size": 16, "num_minibatches": 2}
MODELS = {}
if SCALE == "local":
    found = {"base_model": "smollm2", "reward_model": "minilm-sentiment"}
    MODELS = {field: str(Path(folder) / name) for field, name in found.items()}
RECORDS = ("a_real_model", "a_real_model_real")  # of the stand-in, and of the real model
over_seeds = SeedFigures(RECORDS[SCALE != "stand-in"], SETTINGS)
print(f"SCALE is {SCALE!r}: preset {SETTINGS['preset']!r}")

# %% [markdown]
# ## Train, and train a placebo
#
# A full fine-tuning of a model needs memory for its gradients and for two moments of each weight. With
# LoRA ({lesson:preferences} has you write it), the weights stay as they are and $\frac{\alpha}{r} A B$ of rank $r$
# is learned beside each chosen matrix. It has a second use here: with the adapters off, the very same
# model *is* the reference, and one can switch them off layer by layer.
#
# The second run is the **placebo**. Its reward is a hash of the text: a number between 0 and 1 that is
# the same for the same text, and about which nothing can be learned. Settings, seed, number of steps
# and the leash are those of the first run.
#
# How far will the placebo move from the reference, in KL per sequence?

# %%
placebo_moves = "under a third"  # predict: "under a third", "about as far" or "further"

# %% [markdown]
# (20 s on one core; minutes on the real model)


# %%
def hash_reward(texts: list[str]) -> Float[Tensor, " batch"]:
    """A number between 0 and 1 for each text, without any meaning."""
    return torch.tensor([zlib.crc32(text.encode()) / 2**32 for text in texts])


ADAPTERS = {"lora_rank": 8, "lora_targets": "W_Q,W_K,W_V,W_O"}
args = RLHFArgs(**SETTINGS, **MODELS, **ADAPTERS)
trainer = RLHFTrainer(args, out=new_run("run"))
sham = RLHFTrainer(args, out=new_run("placebo"), reward_fn=hash_reward)
on_reel, tokenizer, prefix_len = trainer.speaks_reel, trainer.tokenizer, len(trainer.prompt)
want = 1 if args.direction == "pos" else -1

runs = {"run": trainer, "placebo": sham}
reports = {
    name: [each.run_phase() for _ in range(args.total_phases)] for name, each in runs.items()
}
learning = [p for p in trainer.policy.base_model.parameters() if p.requires_grad]
every = sum(p.numel() for p in trainer.policy.base_model.parameters())
print(f"numbers that learn: {sum(p.numel() for p in learning):,} of {every:,}")
phases = range(args.total_phases)
curves(
    {
        f"{name}: {what}": (phases, [getattr(r, field) for r in found])
        for name, found in reports.items()
        for what, field in (("reward", "mean_reward"), ("KL", "kl_per_sequence"))
    },
    "Reward and KL of both runs",
    y_label="reward; KL in nats per sequence",
)

# %% [markdown]
# *What to look for in the figure: one reward rises, the other one stays; the KL of the run leaves 0, and that of the placebo
# leaves it much less (a table below has its value).* The placebo's KL is what PPO does with noise: whitening makes advantages of any reward that has a spread.
#
# Now forget the trainers. Three models are left: the old one (`base`, the adapters off), the new one
# (`tuned`) and the `placebo`, each with its adapters added into its weights. Rewards that were logged
# in training are of a policy that changed in the meantime, and each phase's texts are few. So all three
# write **fresh texts, with the same noise**: text $i$ of one model and text $i$ of another begin alike,
# and part where the models do.

# %%
base = without_adapters(trainer.policy.base_model)
models = {"base": base, "tuned": merged_copy(trainer.policy.base_model)}
models["placebo"] = merged_copy(sham.policy.base_model)
n_texts = 256 if on_reel else 48


def write(model: HookedTransformer, n: int, seed: int = 0):
    """Let a model write n texts, with the same noise for each model."""
    generator = torch.Generator().manual_seed(seed)
    policy = TransformerWithValueHead(model)
    return sample(policy, [trainer.prompt] * n, trainer.sampling_spec, generator, trainer.forward)


@torch.no_grad()
def logits_of(
    model: HookedTransformer, tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "b gen v"]:
    """A model's logits before each generated token."""
    parts = [generated_logits(model(rows), prefix_len) for rows in tokens.split(16)]
    return torch.cat(parts) / args.temperature


written = {name: write(model, n_texts) for name, model in models.items()}
texts = {name: samples.texts(tokenizer) for name, samples in written.items()}
for name, found in texts.items():
    show_table([name], [[text] for text in found[:3]])

# %% [markdown]
# ## A second rater
#
# The classifier that paid the run has been optimised against: of all raters, its judgement is worth least.
# Take one that nothing was trained on. It need not be good, it must only have *other* weaknesses: here
# a list of words, which counts the words of the wanted class less those of the other one. (It does not
# understand "wasn't".) A larger classifier from elsewhere would be a better one.

# %%
GOOD = """good great wonderful fantastic excellent brilliant lovely perfect superb amazing beautiful
charming clever delightful enjoyable impressive incredible outstanding pleasant remarkable nice fine
fun funny fresh exciting gorgeous magnificent memorable solid strong smart fascinating terrific
thrilling splendid touching inspiring elegant engaging""".split()
BAD = """bad terrible awful horrible boring poor weak stupid dull tedious ugly disappointing dreadful
painful ridiculous silly annoying miserable messy cheap flat confusing crude dumb empty nasty offensive
predictable sad shallow slow tired wrong worthless useless""".split()
NOUNS = """movie film plot story acting script music ending book scene cast dialogue picture drama comedy
performance direction sound camera humor opening novel episode series""".split()
if on_reel:
    GOOD, BAD = (list(flat(ADJECTIVES[sign])) for sign in (1, -1))
    NOUNS = list(ASPECTS)
LIST = {word: sign for sign, words in ((1, GOOD), (-1, BAD)) for word in words}
LIST |= {word: sign for sign in (1, -1) for word in VERBS[sign]}


def word_list(texts: list[str]) -> Float[Tensor, " batch"]:
    """Words of the wanted class less words of the other one, per text."""
    counts = [sum(LIST.get(word.strip(".,!?;:"), 0) for word in t.lower().split()) for t in texts]
    return want * torch.tensor(counts, dtype=torch.float32)


raters = {"classifier": trainer.reward_fn, "word list": word_list}
rated = {
    rater: {name: judge(found).float().cpu() for name, found in texts.items()}
    for rater, judge in raters.items()
}
show_intervals(
    "model",
    {
        rater: {name: bootstrap_means(found) for name, found in by_model.items()}
        for rater, by_model in rated.items()
    },
)

# %% [markdown]
# Are the differences more than chance? The texts come in pairs (same noise), and a pair shares much, so
# test the *differences*. If two models were alike, chance alone would decide which of a pair is called
# tuned and which base: each difference could as well have had the other sign. Draw signs many times, and
# see how often the mean difference is as far from 0 as the real one: a **permutation test** (Fisher
# 1935), which assumes nothing about the distribution.

# %%
from rlhf_lab.functional import paired_permutation_test  # exercise

# %% [markdown]
# The two raters have different units. To compare how much they see, divide each mean difference by
# the standard deviation of the rater over the base's texts. Which of the two will see the larger effect?

# %%
sees_more = "classifier"  # predict: "classifier", "word list" or "about the same"

# %%
rows, effects = [], {}
for rater, found in rated.items():
    for name in ("tuned", "placebo"):
        difference = found[name] - found["base"]
        size = (difference.mean() / found["base"].std()).item()
        p = paired_permutation_test(found[name], found["base"])
        effects[f"{rater}, {name}"] = size
        rows.append([rater, f"{name} - base", str(bootstrap_means(difference)), size, f"{p:.4f}"])
show_table(["rater", "models", "mean difference", "in sd of base", "p"], rows)
over_seeds.compare("difference from base, in sd", effects)
ratio = effects["classifier, tuned"] / (effects["word list, tuned"] or 1e-9)
said = "classifier" if ratio > 1.25 else "word list" if 0 < ratio < 0.8 else "about the same"
predictions.compare("larger effect on", sees_more, said if ratio > 0 else "classifier")
of_kl = {name: found[-1].kl_per_sequence for name, found in reports.items()}
over_seeds.compare("KL of the last phase, nats per sequence", of_kl)
moved = of_kl["placebo"] / max(of_kl["run"], 1e-9)
how_far = "under a third" if moved < 1 / 3 else "about as far" if moved < 1.5 else "further"
predictions.compare("the placebo moves", placebo_moves, how_far)

# %% [markdown]
# Two raters that agree on the direction are worth more than one that is certain. If the classifier saw
# much and the word list nothing, the policy would have learned to please the classifier. (The rows of the
# placebo are tests in which nothing is to be found: of such tests, one in twenty is "significant". These rows share their
# texts, so that they are not independent tests. And a p-value near 0.05 and an interval that just holds 0, or just does not, are no
# contradiction: the test asks what chance does if the models are alike, the interval how well the mean is known.)
#
# ### You are the judge
#
# Below are pairs of texts, one by the tuned model and one by the base, in an order that a coin decided.
# Read them, and say for each pair which one is more of the wanted class. (The pairs are the first ones
# that differ: they were not chosen.) Until you have filled in `mine`, the word list answers in your place.

# %%
differ = [i for i in range(n_texts) if texts["tuned"][i] != texts["base"][i]][:10]
coins = torch.randint(2, (len(differ),), generator=torch.Generator().manual_seed(3)).bool()
pairs = [
    [texts[name][i] for name in (("tuned", "base") if coin else ("base", "tuned"))]
    for i, coin in zip(differ, coins.tolist(), strict=True)
]
print("wanted:", "positive" if want > 0 else "negative")
show_table(["", "A", "B"], [[str(i), *pair] for i, pair in enumerate(pairs, 1)])

# %%
mine = ""  # such as "ABBABABBAA", a letter for each pair


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share, which is sound for small n and for all right (Wilson 1927)."""
    middle, half = right + z * z / 2, z * (right * (n - right) / n + z * z / 4) ** 0.5
    return (middle - half) / (n + z * z), (middle + half) / (n + z * z)


if mine:
    answers = [letter == "A" for letter in mine.upper()]
else:
    answers = [bool(a > b) if a != b else None for a, b in map(word_list, pairs)]
given = [(a, c) for a, c in zip(answers, coins.tolist(), strict=True) if a is not None]
right = sum(a == c for a, c in given)
low, high = wilson(right, max(len(given), 1)) if given else (0.0, 1.0)
print(f"{'you' if mine else 'the word list, in your place'}: the tuned model's text is more of the")
print(f"wanted class in {right} of {len(given)} pairs, 95 % interval {low:.2f} to {high:.2f}")
print(f"pairs without an answer: {len(answers) - len(given)}")

# %% [markdown]
# With so few pairs the interval is wide, and only more pairs would make it narrower. Read blind all the same:
# whoever knows which text is whose finds what they look for. (The word list has an advantage here that you
# have not: it is also one of the raters above. Its agreement with itself is no second opinion.)
#
# ### Was it worth its KL?
#
# There is no exact frontier here. But there is a policy that costs no training: let the base write $n$
# texts, and keep the one that the classifier likes best. Its KL is at most $\log n - \frac{n-1}{n}$, and
# its mean reward can be estimated without bias from one pool of texts (`best_of_n_mean`, {lesson:the_kl_penalty}).
# It never leaves the base's language. A run that earns less at the same KL was not worth training; a run
# that earns more *by the second rater* was. Where will the run be?

# %%
beside = "below"  # predict: "above", "on the line" or "below"

# %%
pool = texts["base"] + write(base, n_texts, seed=7).texts(tokenizer)
scores = {rater: judge(pool).float().cpu()[None] for rater, judge in raters.items()}
best = {}
for rater in raters:
    found = [best_of_n_mean(scores["classifier"], scores[rater], 2**k).item() for k in range(6)]
    best[rater] = ([best_of_n_kl_bound(2**k) for k in range(6)], found)
kl = {}
for name in ("tuned", "placebo"):
    own = written[name]
    found = kl_per_token(*(log_probs(logits_of(m, own.tokens)) for m in (models[name], base)))
    kl[name] = (found, own.mask)
spent = {name: bootstrap_means(kl_per_sequence(*found)) for name, found in kl.items()}
show_intervals("KL from the base, nats per sequence", {"fresh texts": spent})

nats = spent["tuned"].value.item()
rows = {
    rater: [rated[rater]["tuned"].mean().item(), float(np.interp(nats, *best[rater]))]
    for rater in raters
}
show_table(["rater", "the run", "best-of-n at its KL"], [[r, *found] for r, found in rows.items()])
print(
    f"the run: n = {n_texts} texts; best-of-n: one pool of {len(pool)} texts, here taken as exact, at a KL"
    " that is at most its bound"
)
over_seeds.compare("run less best-of-n at its KL", {r: a - b for r, (a, b) in rows.items()})
gap = bootstrap_means(rated["classifier"]["tuned"] - rows["classifier"][1])
side = "above" if gap.low > 0 else "below" if gap.high < 0 else "on the line"
predictions.compare("the run, by the classifier, is", beside, side)
curves(
    {f"best-of-n, {rater}": best[rater] for rater in raters}
    | {f"the run, {rater}": ([nats], [rated[rater]["tuned"].mean().item()]) for rater in raters},
    "The run beside best-of-n of the base",
    "KL from the base, nats per sequence (best-of-n: its bound)",
    "mean over texts",
)

# %% [markdown]
# *What to look for in the figure: whether the run's dots lie on, above or below the line of the same
# rater.* (Best-of-n spends at most its bound, so that its true line lies to the left of the one that is drawn.) Best-of-n is a strong
# baseline for short runs. What it cannot do is be a policy: it writes $n$
# texts for each that it keeps.
#
# ## Where does it choose differently?
#
# KL by position says where in the text the new model's choices differ, on its own texts. The placebo
# stands beside it: its bars are what any training does there.

# %%
by_position = {}
for name, (found, mask) in kl.items():
    columns = [
        bootstrap_means(found[mask[:, t], t]) for t in range(found.shape[1]) if mask[:, t].sum() > 1
    ]
    by_position[name] = columns
shown = min(map(len, by_position.values()))


def value(found: Interval) -> float | None:
    """The estimate as a number; None where it is undefined."""
    return None if found.value is None else found.value.item()


def known(found: Mapping[str, Interval]) -> dict[str, float]:
    """The estimates that are defined, as numbers."""
    return {name: value(each) for name, each in found.items() if each.value is not None}


bars(
    [str(t) for t in range(shown)],
    {name: [value(found) for found in columns[:shown]] for name, columns in by_position.items()},
    "KL from the base by position, counted in generated tokens",
    "nats per token",
    {
        name: ([c.low.item() for c in columns[:shown]], [c.high.item() for c in columns[:shown]])
        for name, columns in by_position.items()
    },
)

# %% [markdown]
# And *what* does it choose? `promoted_mass` ({lesson:what_breaks_it}) averages over states what each word of the
# vocabulary has won from the base. Take the base's texts for both models, so that they are asked about
# the same states. Of the ten words that the run promotes most, how many does the placebo promote, too
# (by at least a third as much)?

# %%
also_placebo = "none to two"  # predict: "none to two", "three to six" or "seven to ten"

# %%
asked = written["base"][torch.arange(min(n_texts, 128 if on_reel else 24))]
of_base = logits_of(base, asked.tokens)
mass = {
    name: promoted_mass(logits_of(models[name], asked.tokens), of_base, asked.mask).cpu()
    for name in ("tuned", "placebo")
}
word = lambda i: repr(tokenizer.decode([i]))
top, bottom = (mass["tuned"].topk(10, largest=most).indices.tolist() for most in (True, False))
for heading, ids in (("promoted", top), ("demoted", bottom)):
    rows = [[word(i), 1e3 * mass["tuned"][i].item(), 1e3 * mass["placebo"][i].item()] for i in ids]
    show_table([heading, "run, thousandths", "placebo, thousandths"], rows, digits=2)
shared = sum(mass["placebo"][i].item() > mass["tuned"][i].item() / 3 for i in top)
predictions.compare(
    "of the ten, the placebo promotes",
    also_placebo,
    "none to two" if shared < 3 else "three to six" if shared < 7 else "seven to ten",
)
moved = {name: found.abs().sum().item() / 2 for name, found in mass.items()}
over_seeds.compare("mass moved, mean over states", moved)

# %% [markdown]
# A word that both models promote is what training does by itself, such as making likely words likelier.
# Only what the run promotes and the placebo does not is about the reward.
#
# ## What is known where?
#
# A probe is fitted to read from the activations whether the word just said was a good or a bad one. The
# texts are minimal: "The *plot* was *lovely* and", read at the last token, so that the model must have
# carried it there. On Reel, Bayes' rule said how good a probe can be. Here nobody knows. So ask how good
# it is at something that *cannot* be known: the **control task** of Hewitt and Liang (2019,
# arXiv:[1909.03368](https://arxiv.org/abs/1909.03368)). Each word gets a random label, always the same
# one. What a probe reads of that, it has memorised. The accuracy less the control's is its
# *selectivity*.

# %%
from rlhf_lab.probes import control_labels  # exercise

# %% [markdown]
# Two questions differ that look alike. *Words seen*: the probe is judged on sentences with other nouns,
# but with words it was fitted to. *Words unseen*: it is judged on words it has not been fitted to; there
# the control must be at chance, or something leaks. With the words seen, how well will a probe read the
# labels that mean nothing, at its best layer?

# %%
memorised = "nearly always"  # predict: "at chance", "in between" or "nearly always"

# %%
single = lambda word: len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1
good, bad, nouns = ([word for word in words if single(word)] for words in (GOOD, BAD, NOUNS))
nouns = nouns[:6]
words = good + bad
start = "this movie anyway , the {} was quite {} and" if on_reel else "The {} was {} and"
first = [tokenizer.bos_token_id] if on_reel else []
grid = [
    first + tokenizer.encode(start.format(noun, word), add_special_tokens=False)
    for noun in nouns
    for word in words
]
sentences = torch.tensor(grid)
word_of, noun_of = (torch.arange(len(grid)) % len(words), torch.arange(len(grid)) // len(words))
is_good = word_of < len(good)
layers = base.cfg.n_layers
sites = [f"blocks.{layer}.hook_resid_post" for layer in range(layers)]


def states_of(model: HookedTransformer) -> Float[Tensor, "layer n d_model"]:
    """Residuals behind every block, at the last token of every sentence."""
    acts = capture_activations(model, sentences, sites, pos=-1)
    return torch.stack([acts[site] for site in sites]).cpu().double()


def folds_of(seen: bool) -> list[Bool[Tensor, " n"]]:
    """Which sentences are held out, in turn: by noun, or by word."""
    groups = (
        noun_of
        if seen
        else torch.randperm(len(words), generator=torch.Generator().manual_seed(4))[word_of] % 6
    )
    return [groups == group for group in groups.unique()]


def hits(
    x: Float[Tensor, "layer n d_model"],
    labels: Bool[Tensor, " n"],
    seen: bool,
    readers: list[Fitted] | None = None,
) -> tuple[Float[Tensor, "layer word"], list[Fitted]]:
    """How often each word is read rightly where it is held out, by layer; and the readers."""
    right = torch.zeros(len(x), len(labels), dtype=torch.float64)
    held_out = folds_of(seen)
    if readers is None:
        readers = [fit_direction(x[:, ~held], labels[~held]) for held in held_out]
    for held, reader in zip(held_out, readers, strict=True):
        said = project(x[:, held], reader.direction) > reader.threshold[:, None]
        right[:, held] = (said == labels[held]).double()
    return torch.stack([right[:, word_of == w].mean(1) for w in range(len(words))], 1), readers


# %% [markdown]
# (4 s on one core)

# %%
states = {name: states_of(model) for name, model in models.items()}
draws = 20
generator = torch.Generator().manual_seed(5)
controls = [
    control_labels(word_of, generator, is_good.double().mean().item()) for _ in range(draws)
]
read = {}
for kind, seen in (("words seen", True), ("words unseen", False)):
    read[kind] = bootstrap_means(hits(states["base"], is_good, seen)[0].T)
    of_control = torch.stack([hits(states["base"], labels, seen)[0] for labels in controls])
    read[f"control, {kind}"] = bootstrap_means(of_control.mean(0).T)
    over_draws = of_control.mean(2).std(0).max().item() / draws**0.5
    print(f"control, {kind}: standard error over the draws of labels at most {over_draws:.3f}")
looked = sorted({i * (layers - 1) // 7 for i in range(8)})
columns = {name: {f"behind block {i}": found[i] for i in looked} for name, found in read.items()}
show_intervals(
    "base model", columns, f"words, with {len(nouns)} nouns each; control: {draws} draws"
)
(best_layer,), found = read["words unseen"].best()
print(f"words unseen, at the best layer, behind block {best_layer}: {found}")
_, of_chance = read["control, words seen"].best()
said = "nearly always" if of_chance.value > 0.9 else "in between"
if of_chance.low is not None and of_chance.low <= 0.5:
    said = "at chance"
predictions.compare("labels that mean nothing are read", memorised, said)
selective = {
    "words seen": read["words seen"].value - read["control, words seen"].value,
    "words unseen": read["words unseen"].value - 0.5,
}
over_seeds.compare("selectivity, best layer", {k: x.max().item() for k, x in selective.items()})
curves(
    {name: (range(layers), found.value.tolist()) for name, found in read.items()},
    "What a probe reads at the last token, base model",
    "behind block",
    "share of words read rightly",
    {name: (found.low.tolist(), found.high.tolist()) for name, found in read.items()},
)

# %% [markdown]
# *What to look for in the figure: the gap between the labels that mean something and those that mean
# nothing, for words seen; and whether the control of words unseen is at a half.* That gap is the selectivity. An
# accuracy on words that the probe was fitted to counts for nothing but what lies above its control, and
# the wider the model, the more its probe can memorise. With words unseen the control must be at a half,
# or something leaks (such as the same word in both parts). If every layer reads every word rightly, the
# question was too easy to tell layers apart: ask a harder one. On the stand-in this is so. The word was said a token before the last,
# and a share of 1 has no width under the bootstrap (Wilson's interval above has one): there, what follows about frozen and
# refitted readers answers nothing.
#
# The intervals in the table are over words, for these draws of labels. Each draw is another set of coins, so that the control's
# mean has a standard error over draws, too, which the first lines of the output give: a control that is off a half by two of
# these is no leak yet. More draws would tell.
#
# One trap was built into the draft of this lesson: with *exactly* half of the words True, the control of
# words unseen came out clearly below a half. If more of the fitted words are True, fewer of the held-out
# ones are, and a probe that leans to what it saw is wrong more often than not. Independent coins have no
# such memory. A control, too, must be looked at.
#
# Has training changed what is known? A **frozen** reader, fitted to the base and applied to the others,
# asks whether it is still in the same place; one that is **refitted** asks whether it is still there.

# %%
(at_best, readers) = hits(states["base"], is_good, seen=False)
columns = {"frozen": {}, "refitted": {}}
for name, x in states.items():
    for how, own in (("frozen", readers), ("refitted", None)):
        per_word = hits(x, is_good, seen=False, readers=own)[0][best_layer]
        columns[how][name] = bootstrap_means(per_word)
show_intervals("model", columns, "words")
drift = {how: value(found["tuned"]) - value(found["base"]) for how, found in columns.items()}
over_seeds.compare("accuracy of the tuned model less the base's", drift, largest=False)

# %% [markdown]
# ## What causes it?
#
# Everything so far describes. Now intervene, as in {lesson:what_rlhf_changed}. Two things exist at any size: prompts of one
# form, and the difference of two words' logits after them. How much has it shifted, and is the shift
# more than the placebo's?

# %%
lead = ("loved", "hated") if on_reel else (" great", " terrible")
ids = tuple(single_token(tokenizer, word) for word in (lead if want > 0 else lead[::-1]))
if on_reel:
    kept = written["base"].tokens[:64]
    stop = tokenizer.encode(".", add_special_tokens=False)[0]
    until = [int((row == stop).nonzero()[0]) + 2 if (row == stop).any() else 0 for row in kept]
    usual = max(set(until), key=until.count)
    prompts = kept[torch.tensor(until) == usual][:, :usual]
else:
    templates = [f"The {noun} was" for noun in NOUNS if single(noun)]
    prompts = torch.tensor([tokenizer.encode(t, add_special_tokens=False) for t in templates])
print(f"{len(prompts)} prompts, such as {tokenizer.decode(prompts[0])!r}; words {lead}")


@torch.no_grad()
def lean(model: HookedTransformer) -> Float[Tensor, " prompt"]:
    """The logit of the wanted word less the other's, behind each prompt."""
    logits = model(prompts)[:, -1]
    return (logits[:, ids[0]] - logits[:, ids[1]]).double()


leans = {name: lean(model) for name, model in models.items()}
shifts = {name: leans[name] - leans["base"] for name in ("tuned", "placebo")}
show_intervals(
    "from the base to",
    {"shift, nats": {n: bootstrap_means(x) for n, x in shifts.items()}},
    "prompts",
)
over_seeds.compare("shift of the logit difference", {n: x.mean().item() for n, x in shifts.items()})

# %% [markdown]
# Three interventions on the same figure:
#
# 1. **Patch** what each layer's attention or MLP writes from the tuned model into the base, at all
#    positions: what suffices. (And from the base into the tuned: what is needed.)
# 2. **Switch adapters off** by layer, in the tuned model: what the weights of a layer are needed for.
# 3. **Cut the rank** of all changes: how few directions carry the shift.
#
# Note the number of comparisons: the largest of many effects is flattered, so look whether its interval
# stays apart from the next ones', not whether it is above 0. Where will the part be that brings most into
# the base?

# %%
where_most = "last third"  # predict: "first third", "middle third" or "last third"

# %%
parts = {
    f"L{i} {kind}": PatchPlace(f"blocks.{i}.hook_{kind}_out")
    for i in range(layers)
    for kind in ("attn", "mlp")
}
into = patch_activations(Side(base, prompts), Side(models["tuned"], prompts), parts, -1, ids)
out = patch_activations(Side(models["tuned"], prompts), Side(base, prompts), parts, -1, ids)
shares = {"into the base": into.fractions(), "out of the tuned": out.fractions()}
print(f"{len(parts)} parts, each patched both ways: {2 * len(parts)} comparisons")
brings = {name: 0.0 for name in parts} | known(shares["into the base"])
most = sorted(parts, key=lambda name: -brings[name])[:8]
show_intervals(
    "share of the shift",
    {how: {name: found[name] for name in most} for how, found in shares.items()},
    "prompts",
)
layer_of = int(most[0].split()[0][1:])
third = ("first third", "middle third", "last third")[min(3 * layer_of // layers, 2)]
if layers > 2:
    predictions.compare("most is brought by a part of the", where_most, third)
else:
    print(f"{layers} layers have no thirds: your prediction is for a larger model")
kinds = {kind: sum(brings[f"L{i} {kind}"] for i in range(layers)) for kind in ("attn", "mlp")}
over_seeds.compare("patched into the base, added up", kinds)
heatmap(
    [
        [value(shares[how][f"L{i} {kind}"]) for i in range(layers)]
        for how in shares
        for kind in ("attn", "mlp")
    ],
    [f"{kind}, {how}" for how in shares for kind in ("attn", "mlp")],
    [str(i) for i in range(layers)],
    "Share of the shift that a part brings (or takes away), by layer",
    "diverging",
)

# %% [markdown]
# *What to look for in the figure: colors on the attention rows, where the adapters are, and on the MLP
# rows, which have none. A negative share works against the shift.* An MLP without an adapter can still carry the shift: its weights are as they were, but
# what it reads has changed. Activations say where the change *passes*, weights say where it was *made*.
# So switch off what was learned, layer by layer.

# %%
adapters = lora_layers(trainer.policy.base_model)
layer_names = sorted({int(name.split(".")[1]) for name in adapters})


@contextmanager
def only(layers_on: Sequence[int]) -> Iterator[HookedTransformer]:
    """The tuned policy with the adapters of some layers on, and those of all others off."""
    before = {name: layer.enabled for name, layer in adapters.items()}
    try:
        for name, layer in adapters.items():
            layer.enabled = int(name.split(".")[1]) in layers_on
        yield trainer.policy.base_model
    finally:
        for name, layer in adapters.items():
            layer.enabled = before[name]


with only(layer_names) as model:
    print(f"all on is the tuned model: within {(lean(model) - leans['tuned']).abs().max():.0e}")
with only([]) as model:
    print(f"all off is the base: within {(lean(model) - leans['base']).abs().max():.0e}")
size = -(-layers // 6)
blocks = [list(range(i, min(i + size, layers))) for i in range(0, layers, size)]
alone, without = {}, {}
for some in blocks:
    name = f"layers {some[0]} to {some[-1]}" if len(some) > 1 else f"layer {some[0]}"
    with only(some) as model:
        alone[name] = recovered_fraction(leans["tuned"], leans["base"], lean(model))
    with only([i for i in layer_names if i not in some]) as model:
        without[name] = recovered_fraction(leans["base"], leans["tuned"], lean(model))
show_intervals("adapters", {"on alone: brings": alone, "off alone: takes away": without}, "prompts")
over_seeds.compare("brought by the adapters alone", known(alone))

# %% [markdown]
# Does the column of "brings" add up to 1? If it falls short, layers work together; if it exceeds 1, they
# are redundant. The first two lines of the output are the check that belongs to it: all on is the tuned
# model, all off the base. Now the rank: every adapter has rank 8. How much of the shift is left, if all of them are
# cut to the strongest direction?

# %%
at_rank_one = "over two thirds"  # predict: "under a third", "in between" or "over two thirds"

# %%
ranks = (0, 1, 2, 4, 8)
cut = {}
for rank, model in zip(ranks, truncations(base, models["tuned"], ranks), strict=True):
    cut[f"rank {rank}"] = recovered_fraction(leans["tuned"], leans["base"], lean(model))
show_intervals("all changes cut to", {"share of the shift": cut}, "prompts")
over_seeds.compare("share of the shift at a rank", known(cut), largest=False)
left = known(cut).get("rank 1", 0.0)
predictions.compare(
    "left at rank 1",
    at_rank_one,
    "under a third" if left < 1 / 3 else "over two thirds" if left > 2 / 3 else "in between",
)

# %% [markdown]
# ## The report
#
# A claim that a reader can doubt has five things: a sentence, a number with its interval and its $n$, a
# control, the decision, and a measurement that would refute it. In a `Claim` they are the fields `says`, `effect` (tuned less base),
# `beyond_control` (tuned less control), `holds` and `refuted_by`, which must name a number. You have three columns for each figure: tuned, base and
# placebo, text by text. When may you say that *the reward* moved the figure? Write the function that decides.
# There are no steps; the check knows cases in which the control moved as much, or more, or is not known
# well enough.

# %%
from rlhf_lab.course.exercises.real import my_claim  # exercise

# %% [markdown]
# Which of these four will hold? The classifier's reward, the word list, how long the texts are, and how
# many different words each has. The last two are what nobody asked for.

# %%
claims_hold = 2  # predict: a number from 0 to 4

# %%
count = lambda of: lambda texts: torch.tensor([float(of(text.split())) for text in texts])
figures = raters | {"words per text": count(len), "different words": count(lambda w: len(set(w)))}
report = {}
for figure, measure in figures.items():
    columns = [measure(texts[name]).float().cpu() for name in ("tuned", "base", "placebo")]
    report[figure] = my_claim(*columns)
show_claims(report)
predictions.compare("claims that hold", claims_hold, sum(claim.holds for claim in report.values()))
holding = {figure: float(claim.holds) for figure, claim in report.items()}
over_seeds.compare("claims that hold (1) or not (0)", holding, largest=False)

# %% [markdown]
# Say how many claims you looked at, and not only those that held. Of claims that are wrong, about one in
# forty holds by chance on one side of an interval of 95 %, and a report that tries enough of them finds some. In the table of seeds, look
# for a claim that holds in some of them and not in others.
#
# ### Opening the envelope
#
# On Reel, the truth was there all along: the **true reward** of each text. Which of the two raters would
# have told you more about it? Mark your report: the claim that matters, "the texts became better", with the true reward
# as the figure. On a real model this cell has nothing to open, and the report above is all there is.

# %%
nearer = "classifier"  # predict: "classifier" or "word list"

# %%
if on_reel:
    truth = {name: true_reward(found) for name, found in texts.items()}
    verdict = my_claim(truth["tuned"], truth["base"], truth["placebo"])
    show_claims({"true_reward": verdict})
    show_intervals(
        "model", {"true_reward": {name: bootstrap_means(x) for name, x in truth.items()}}
    )
    everywhere = torch.cat(list(truth.values()))
    agree = {
        rater: torch.corrcoef(torch.stack([torch.cat(list(found.values())), everywhere]))[
            0, 1
        ].item()
        for rater, found in rated.items()
    }
    over_seeds.compare("correlation with true reward, all texts", agree)
    predictions.compare("nearer to true reward", nearer, max(agree, key=agree.get))
    gains = {name: (truth[name] - truth["base"]).mean().item() for name in ("tuned", "placebo")}
    over_seeds.compare("true reward, difference from base", gains)
else:
    print("no truth to look up: the report is all there is")

# %% [markdown]
# ## The other scale
#
# The same cells ran on the other model; the figures that are stored of it, with the machine and the seeds,
# stand here. Put the tables side by side. Which of your findings are about Reel, and which would you have
# had on a model that nobody can look up?

# %%
elsewhere = stored_figures(RECORDS[SCALE == "stand-in"])
if elsewhere:
    print(f"{elsewhere.get('made_on', elsewhere['made_by'])}; seeds {elsewhere['seeds']}")
    for table, found in elsewhere["tables"].items():
        rows = [[name, sum(x) / len(x), min(x), max(x)] for name, x in found.items()]
        show_table([table, "mean", "lowest", "highest"], rows)

# %% [markdown]
# What is stored of SmolLM2 is **one seed** of a short run, with 48 texts of each model: read it as one run, and
# not as what SmolLM2 does. In that run the placebo moved *further* than the run, 1.54 nats against 1.35,
# and shifted the logit difference by 0.49 against 0.63: on the real model most of what a careless report
# would have called the effect of the reward is what PPO does with any reward. Of the four claims, only the one
# about the classifier, which paid the run, held. On Reel the placebo hardly moved, in three seeds of three.
# A placebo costs one more run, and you cannot know beforehand whether you need it.
#
# ## A question of your own
#
# No steps and no check. Take a figure that nobody asked the run to change, such as how often a text
# repeats itself, how early the first judging word comes, or what a probe reads at another token. Write
# down what you expect and why, then measure it on all three models, let `my_claim` decide, and write down
# what would refute it. If the placebo moves it too, you have learned something about PPO.

# %%
my_question = "the run uses fewer different words over all texts"  # predict: in words

# %%
# your figure on `texts`, your claim, and what would refute it

# %%
predictions.recall("my question", my_question)

# %% [markdown]
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Give the placebo another seed. Its KL and its promoted words are a distribution, of which you have
#   seen one draw.
# - Train with `kl_coef=0`: which of the two raters notices first that the texts are no texts?
# - Set `SCALE = "hub"` or a larger model on an accelerator: GPT-2-medium with the classifier
#   `lvwerra/distilbert-imdb` is `preset="gpt2-medium"`.
# - Read on: a crosscoder between base and tuned (`rlhf_lab.diffing.fit_crosscoder`; Minder et al. 2025,
#   arXiv:[2504.02922](https://arxiv.org/abs/2504.02922)), where sentiment lies in language models (Tigges
#   et al. 2023, arXiv:[2310.15154](https://arxiv.org/abs/2310.15154)), and what RLHF'd models learned of
#   their reward (Marks et al. 2023, arXiv:[2310.08164](https://arxiv.org/abs/2310.08164)).
