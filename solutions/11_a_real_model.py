# %% [markdown]
# # 11 A real model, or its stand-in
#
# By the end of this lesson you can report the effect of RLHF on a model whose true rewards are unknown, with controls that take
# the place of the truth.
#
# **The cells run on a stand-in**, Reel with its true rewards hidden until the end, **unless you set the environment variable
# `RLHF_LAB_REAL_MODELS`** to a folder with SmolLM2 and a classifier. On Reel, an exact answer was always available. A real
# language does not have one. These replace it:
#
# | on Reel | on a real model | what it can show |
# |---|---|---|
# | true reward | a second rater that was not used in training | that the policy did more than please its own classifier |
# | optimal policy | best-of-n of the base model, at the same KL | whether training was worth its KL |
# | Bayes' rule next to a probe | a control task with random labels ({lesson:what_a_probe_memorizes}) | how much a probe memorizes |
# | an injected change | a *placebo* run, whose reward is a hash of the text | what training does with any reward |
#
# The placebo is the most valuable of these, and costs one run. A difference between base and tuned model that also exists
# between base and placebo is not an effect of the reward.
#
# **You need** {lesson:what_rlhf_changed} (patching) and {lesson:preferences}.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 40 seconds on a single core on the stand-in, and in about 7
# CPU minutes on SmolLM2. Cells that take more than 3 seconds on the stand-in have a note with their time:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import os
import zlib
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab import functional as F
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress
from rlhf_lab.course.claims import Claim, show_claims
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.course.tables import show_intervals, show_table
from rlhf_lab.diffing import PatchPlace, Side, patch_activations
from rlhf_lab.diffing.weights import truncations
from rlhf_lab.functional import bootstrap_means, log_probs
from rlhf_lab.models import (
    HookedTransformer,
    TransformerWithValueHead,
    merged_copy,
    without_adapters,
)
from rlhf_lab.organism import true_reward
from rlhf_lab.organism.lexicon import ADJECTIVES, VERBS, flat
from rlhf_lab.probes.logit_shift import single_token
from rlhf_lab.sampling import sample
from rlhf_lab.views import curves

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
# ## SmolLM2, stored
#
# One run of SmolLM2-135M-Instruct and its placebo are stored: **one seed**, six phases of 16 texts, 48 fresh texts of each
# model, about 7 CPU minutes.

# %%
RECORDS = ("a_real_model", "a_real_model_real")  # of the stand-in, and of the real model
tables = stored_figures(RECORDS[1])["tables"]
rows = [[table, name, x[0]] for table, found in tables.items() for name, x in found.items()]
show_table(["SmolLM2, seed 1", "model", "value"], rows, digits=2)

# %% [markdown]
# The placebo moved *further* than the run, by 1.54 nats and 1.35 nats. It shifted the difference of two logits by 0.49, and
# the run by 0.63. Without a placebo, a report would call most of this shift an effect of the reward. The classifier of the
# training run sees a difference of 0.66 standard deviations, and a second rater 0.40. One seed of a short run: not what SmolLM2
# does in general.
#
# ## The model
#
# `SCALE` chooses the model of the cells below: `"local"` for `smollm2/` and `minilm-sentiment/` in the folder of
# `RLHF_LAB_REAL_MODELS`, `"hub"` for the same language model and another classifier from the Hugging Face hub (0.5 GB), and
# `"stand-in"` for Reel. `"auto"` is local if the variable is set, and otherwise the stand-in. The reward is for the class that
# the base model generates less: *negative* for SmolLM2, *positive* for Reel. The text below calls it the wanted class.

# %%
SCALE = "auto"  # or "stand-in", "local", "hub"

folder = os.environ.get("RLHF_LAB_REAL_MODELS")
if SCALE == "auto":
    SCALE = "local" if folder else "stand-in"
if SCALE in ("local", "hub"):
    SETTINGS |= {"preset": "smol", "kl_coef": 0.1, "gen_len": 20, "keep_checkpoints": 0}
    SETTINGS |= {"total_phases": 6, "warmup_steps": 1, "batch_size": 16, "num_minibatches": 2}
MODELS = {}
if SCALE == "local":
    names = {"base_model": "smollm2", "reward_model": "minilm-sentiment"}
    MODELS = {field: str(Path(folder) / name) for field, name in names.items()}
over_seeds = SeedFigures(RECORDS[SCALE != "stand-in"], SETTINGS)
print(f"SCALE is {SCALE!r}: preset {SETTINGS['preset']!r}")

# %% [markdown]
# ## Train a run and a placebo
#
# Both runs use LoRA: the weights are frozen, and $\frac{\alpha}{r} A B$ of rank $r = 8$ is learned next to each attention
# matrix. Without the adapters the same model *is* the reference.
#
# The reward of the **placebo** is a hash of the text: a number between 0 and 1 that is always the same for the same text, and
# about which nothing can be learned. Settings, seed and number of steps are the same. How far will the placebo move from the
# reference, compared with the run, in KL per sequence?

# %%
placebo_moves = "under a third"  # predict: "under a third", "about as far" or "further"

# %% [markdown]
# (20 s on one core; minutes on the real model)


# %%
def hash_reward(texts: list[str]) -> Float[Tensor, " batch"]:
    """Return a number between 0 and 1 for each text, without any meaning."""
    return torch.tensor([zlib.crc32(text.encode()) / 2**32 for text in texts])


args = RLHFArgs(**SETTINGS, **MODELS, lora_rank=8, lora_targets="W_Q,W_K,W_V,W_O")
trainer = RLHFTrainer(args, out=new_run("run"))
placebo = RLHFTrainer(args, out=new_run("placebo"), reward_fn=hash_reward)
runs = {"run": trainer, "placebo": placebo}
on_reel, tokenizer, prefix_len = trainer.speaks_reel, trainer.tokenizer, len(trainer.prompt)
want = 1 if args.direction == "pos" else -1
reports = {
    name: [each.run_phase() for _ in range(args.total_phases)] for name, each in runs.items()
}
curves(
    {
        f"{name}: {what}": (range(len(found)), [getattr(r, field) for r in found])
        for name, found in reports.items()
        for what, field in (("reward", "mean_reward"), ("KL", "kl_per_sequence"))
    },
    "Reward and KL of both runs",
    y_label="reward; KL in nats per sequence",
)

# %% [markdown]
# From here on, forget the trainers. Three models remain: `base` (without adapters), `tuned` and `placebo`. Rewards logged in
# training belong to a policy that changed in the meantime, and each phase has few texts. So all three generate **fresh texts,
# with the same random numbers**: text $i$ starts the same way in each model.

# %%
base = without_adapters(trainer.policy.base_model)
models = {"base": base, "tuned": merged_copy(trainer.policy.base_model)}
models["placebo"] = merged_copy(placebo.policy.base_model)
n_texts = 256 if on_reel else 48


def generate(model: HookedTransformer, seed: int = 0):
    """Generate texts, with the same random numbers for each model."""
    generator, policy = torch.Generator().manual_seed(seed), TransformerWithValueHead(model)
    prompts = [trainer.prompt] * n_texts
    return sample(policy, prompts, trainer.sampling_spec, generator, trainer.forward)


samples = {name: generate(model) for name, model in models.items()}
texts = {name: found.texts(tokenizer) for name, found in samples.items()}
show_table(["model", "text"], [[name, texts[name][i]] for i in range(2) for name in texts])

# %% [markdown]
# ## A second rater
#
# The policy was optimized against the classifier, so of all raters this one is the least trustworthy. Take another that was not
# used in training. It need not be good; it must have *other* weaknesses. Here it is a list of words: the number of words of the
# wanted class minus those of the other class. (It does not understand "wasn't".)

# %%
GOOD = """good great wonderful fantastic excellent brilliant lovely perfect superb amazing beautiful
charming clever delightful enjoyable impressive fine fun funny fresh exciting strong smart""".split()
BAD = """bad terrible awful horrible boring poor weak stupid dull tedious ugly disappointing dreadful
painful ridiculous silly annoying messy cheap flat dumb empty sad slow wrong worthless""".split()
if on_reel:
    GOOD, BAD = (list(flat(ADJECTIVES[sign])) for sign in (1, -1))
LIST = {word: sign for sign, words in ((1, GOOD), (-1, BAD)) for word in words}
LIST |= {word: sign for sign in (1, -1) for word in VERBS[sign]}


def word_list(texts: list[str]) -> Float[Tensor, " batch"]:
    """Count words of the wanted class minus words of the other class in each text."""
    counts = [sum(LIST.get(word.strip(".,!?;:"), 0) for word in t.lower().split()) for t in texts]
    return want * torch.tensor(counts, dtype=torch.float32)


raters = {"classifier": trainer.reward_fn, "word list": word_list}
rated = {
    rater: {name: score(found).float().cpu() for name, found in texts.items()}
    for rater, score in raters.items()
}
means = {
    rater: {name: bootstrap_means(found) for name, found in by_model.items()}
    for rater, by_model in rated.items()
}
show_intervals("model", means)

# %% [markdown]
# Are the differences larger than noise? The texts come in pairs with the same random numbers, so test the *differences*. If
# two models were equal, a coin could decide which text of a pair is called tuned and which base: each difference could as well
# have the opposite sign. Draw signs many times, and count how often the mean difference is as far from 0 as the real one. This
# is a **permutation test** (Fisher 1935), which assumes nothing about the distribution.

# %%
from rlhf_lab.functional import paired_permutation_test  # exercise

# %% [markdown]
# The two raters have different units. To compare them, divide each mean difference by the standard deviation of the rater over
# the texts of the base. Which rater sees the larger effect?

# %%
sees_more = "classifier"  # predict: "about the same", "word list" or "classifier"

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
ratio = abs(effects["classifier, tuned"]) / max(abs(effects["word list, tuned"]), 1e-9)
limits = {"word list": 0.8, "about the same": 1.25, "classifier": np.inf}
predictions.compare("classifier's effect over word list's", sees_more, ratio, limits)
last_kl = {name: found[-1].kl_per_sequence for name, found in reports.items()}
over_seeds.compare("KL of the last phase, nats per sequence", last_kl)
moved = last_kl["placebo"] / max(last_kl["run"], 1e-9)
limits = {"under a third": 1 / 3, "about as far": 1.5, "further": np.inf}
predictions.compare("the placebo moves, relative to the run,", placebo_moves, moved, limits)

# %% [markdown]
# Two raters that agree on the direction are worth more than one rater that is certain. If only the classifier saw an effect, the
# policy would have learned to please the classifier. In the rows of the placebo there is nothing to find, and of such tests one
# in twenty has p < 0.05.
#
# ## Worth its KL?
#
# An optimal policy is not known here. But one policy needs no training: let the base generate $n$ texts, and keep the text with
# the highest score of the classifier. Its KL is at most $\log n - \frac{n-1}{n}$, and its mean reward can be estimated without
# bias from one pool of texts (`best_of_n_mean`). A run with less reward at the same KL was not worth training; a run with more
# reward *by the second rater* was. Where is the run?

# %%
position = "below"  # predict: "above", "on the line" or "below"


# %%
@torch.no_grad()
def get_logits(model: HookedTransformer, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b g v"]:
    """Compute the logits before each generated token."""
    parts = [F.generated_logits(model(rows), prefix_len) for rows in tokens.split(16)]
    return torch.cat(parts) / args.temperature


pool = texts["base"] + generate(base, seed=7).texts(tokenizer)
scores = {rater: score(pool).float().cpu()[None] for rater, score in raters.items()}
bounds = [F.best_of_n_kl_bound(2**k) for k in range(6)]
best = {
    rater: [F.best_of_n_mean(scores["classifier"], score, 2**k).item() for k in range(6)]
    for rater, score in scores.items()
}
tuned = samples["tuned"]
both = (log_probs(get_logits(models[name], tuned.tokens)) for name in ("tuned", "base"))
kl = bootstrap_means(F.kl_per_sequence(F.kl_per_token(*both), tuned.mask))
at_kl = {rater: float(np.interp(kl.value.item(), bounds, line)) for rater, line in best.items()}
print(f"KL of the tuned model, nats per sequence: {kl}")
for rater in raters:
    print(f"{rater}: tuned {means[rater]['tuned']}; best-of-n at its KL {at_kl[rater]:.3f}")
gap = bootstrap_means(rated["classifier"]["tuned"] - at_kl["classifier"])
kind = "above" if gap.low > 0 else "below" if gap.high < 0 else "on the line"
predictions.compare("the run, by the classifier, is", position, kind)
lines = {"best-of-n": (bounds, best["classifier"])}
lines["tuned"] = ([kl.value.item()], [means["classifier"]["tuned"].value.item()])
curves(
    lines,
    "The tuned model and best-of-n of the base",
    "KL from the base, nats per sequence (best-of-n: upper bound)",
    "score of the classifier",
)

# %% [markdown]
# Best-of-n is a strong baseline for short runs. Its KL is at most the bound, so its true line is further left. But it is not a
# policy: it generates $n$ texts for each that it keeps.
#
# ## Causes
#
# So far you only described a difference. Now intervene, as in {lesson:what_rlhf_changed}. At any size you can take prompts of
# one form, and the difference of two logits after them. How large is its shift, and is it larger than that of the placebo?

# %%
lead = ("loved", "hated") if on_reel else (" great", " terrible")
ids = tuple(single_token(tokenizer, word) for word in (lead if want > 0 else lead[::-1]))
if on_reel:
    rows = samples["base"].tokens[:64]
    stop = tokenizer.encode(".", add_special_tokens=False)[0]
    ends = [int((row == stop).nonzero()[0]) + 2 if (row == stop).any() else 0 for row in rows]
    usual = max(set(ends), key=ends.count)
    prompts = rows[torch.tensor(ends) == usual][:, :usual]  # up to the "i" before the verdict
else:
    nouns = "movie film plot story acting script music ending book scene cast picture".split()
    prompts = [tokenizer.encode(f"The {noun} was", add_special_tokens=False) for noun in nouns]
    usual = min(map(len, prompts))
    prompts = torch.tensor([prompt for prompt in prompts if len(prompt) == usual])
print(f"{len(prompts)} prompts, such as {tokenizer.decode(prompts[0])!r}; words {lead}")


@torch.no_grad()
def logit_difference(model: HookedTransformer) -> Float[Tensor, " prompt"]:
    """Subtract the other word's logit from the wanted word's, after each prompt."""
    logits = model(prompts)[:, -1]
    return (logits[:, ids[0]] - logits[:, ids[1]]).double()


differences = {name: logit_difference(model) for name, model in models.items()}
shifts = {name: differences[name] - differences["base"] for name in ("tuned", "placebo")}
for name, shift in shifts.items():
    print(f"shift from base to {name}, nats: {bootstrap_means(shift)}")
over_seeds.compare("shift of the logit difference", {n: x.mean().item() for n, x in shifts.items()})

# %% [markdown]
# **Patch** the output of each layer's attention or MLP from the tuned model into the base (which outputs suffice?), and from
# the base into the tuned model (which are needed?). The table has the eight largest of many effects, so the largest is
# overestimated.

# %%
places = {
    f"L{i} {kind}": PatchPlace(f"blocks.{i}.hook_{kind}_out")
    for i in range(base.cfg.n_layers)
    for kind in ("attn", "mlp")
}
old, new = Side(base, prompts), Side(models["tuned"], prompts)
into = patch_activations(old, new, places, -1, ids).fractions()
out = patch_activations(new, old, places, -1, ids).fractions()
value = lambda found: 0.0 if found.value is None else found.value.item()
largest = sorted(into, key=lambda name: -value(into[name]))[:8]
show_intervals(
    "fraction of the shift",
    {
        how: {n: found[n] for n in largest}
        for how, found in (("into base", into), ("out of tuned", out))
    },
    "prompts",
)

# %% [markdown]
# An MLP without an adapter can carry the shift: its weights are unchanged, but its input has changed. All adapters have
# rank 8. Which fraction of the shift remains if you cut each to its strongest direction?

# %%
at_rank_one = "under a third"  # predict: "under a third", "in between" or "over two thirds"

# %%
ranks, cut = (0, 1, 2, 4, 8), {}
for rank, model in zip(ranks, truncations(base, models["tuned"], ranks), strict=True):
    fraction = F.recovered_fraction(
        differences["tuned"], differences["base"], logit_difference(model)
    )
    cut[f"rank {rank}"] = fraction
show_intervals("all changes cut to", {"fraction of the shift": cut}, "prompts")
limits = {"under a third": 1 / 3, "in between": 2 / 3, "over two thirds": np.inf}
predictions.compare("rank 1", at_rank_one, value(cut["rank 1"]), limits)

# %% [markdown]
# ## The report
#
# A claim that a reader can check has five parts: a sentence, a number with its interval and its $n$, a control, a decision, and
# a measurement that would refute it. In a `Claim` these are the fields `says`, `effect` (tuned minus base), `beyond_control`
# (tuned minus control), `holds` and `refuted_by`, which must contain a number. You have three columns for each measure: tuned,
# base and placebo, text by text. When may you claim that *the reward* moved the measure? Write the function that decides. It has
# no steps; the check knows cases in which the control moved as much, or more, or is not known precisely enough.

# %%
from rlhf_lab.course.exercises.real import my_claim  # exercise

# %% [markdown]
# Which of these four claims will hold: the score of the classifier, the word list, the length of the texts, and the number of
# different words in each?

# %%
claims_hold = 3  # predict: a number from 0 to 4

# %%
count = lambda number: lambda texts: torch.tensor([float(number(text.split())) for text in texts])
measures = raters | {"words per text": count(len), "different words": count(lambda w: len(set(w)))}
report = {}
for name, measure in measures.items():
    columns = [measure(texts[model]).float().cpu() for model in ("tuned", "base", "placebo")]
    report[name] = my_claim(*columns)
show_claims(report)
predictions.compare("claims that hold", claims_hold, sum(claim.holds for claim in report.values()))

# %% [markdown]
# Report how many claims you looked at, not only those that hold. Of wrong claims, about one in forty holds by chance on one
# side of a 95 % interval.
#
# ## The true reward
#
# On the stand-in, each text has a true reward. Grade your report with it. On a real model this cell has nothing to show, and the
# report above is all you have.

# %%
if on_reel:
    truth = {name: true_reward(found) for name, found in texts.items()}
    verdict = my_claim(truth["tuned"], truth["base"], truth["placebo"])
    print(f"{verdict.says}; holds: {verdict.holds}")
    print(*(f"true reward, {n}: {bootstrap_means(x)}" for n, x in truth.items()), sep="\n")
    for rater, found in rated.items():
        columns = torch.stack([torch.cat([*x.values()]).double() for x in (found, truth)])
        print(f"correlation with the true reward, {rater}: {columns.corrcoef()[0, 1].item():.2f}")

# %% [markdown]
# On the stand-in the claim is true: the true reward rises from 0.50 to 0.84, and that of the placebo does not (0.47). The
# classifier has a correlation of 0.99 with the true reward, and the word list 0.84. On a real model you know neither number,
# and the placebo and the second rater are your only evidence.
#
# ## What surprised you

# %%
predictions.show()
progress()
