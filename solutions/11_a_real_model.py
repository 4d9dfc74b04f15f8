# %% [markdown]
# # 11 A real model, or its stand-in
#
# By the end of this lesson, you will be able to measure the effect of RLHF when the true reward is unknown, using controls.
#
# **The cells run on a stand-in**, Reel with its true rewards hidden until the end, **unless you set the environment
# variable `RLHF_LAB_REAL_MODELS`** to a folder with SmolLM2 and a classifier. On Reel, you could always compute an
# exact answer. For real language you can't, so you need substitutes:
#
# | on Reel | on a real model | what it can show |
# |---|---|---|
# | true reward | a second rater that was not used in training | whether the policy did more than please its classifier |
# | optimal policy | best-of-n of the base model, at the same KL | whether training was worth its KL |
# | Bayes' rule next to a probe | a control task with random labels ({lesson:what_a_probe_memorizes}) | how much a probe memorizes |
# | an injected change | a *placebo* run, whose reward is a hash of the text | what training does with any reward |
#
# The placebo is the most valuable of these, and it only costs one more run. If a difference between the tuned model and
# the base model also shows up between the placebo and the base model, it is not an effect of the reward.
#
# **You need** {lesson:what_rlhf_changed} (patching) and {lesson:preferences}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 40 seconds on one CPU core with the stand-in, and in
# about 4 CPU minutes with SmolLM2. Cells that take longer than 3 seconds are labeled with their run time, like this one:
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
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead
from rlhf_lab.models import merged_copy, without_adapters
from rlhf_lab.organism import true_reward
from rlhf_lab.organism.lexicon import ADJECTIVES, VERBS, flat
from rlhf_lab.probes.logit_shift import single_token
from rlhf_lab.sampling import sample
from rlhf_lab.views import curves
from rlhf_lab.views.dots import seed_dots

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
# We trained SmolLM2-135M-Instruct with the real reward and with a placebo reward, using **three seeds** for each. Each run
# lasted six phases of 16 texts, and we evaluated the final models on 48 fresh texts. For each run, the figure shows how much
# the scores of two raters rose (in standard deviations, sd), how far the model moved from the reference, and how a logit
# difference changed.

# %%
RECORDS = ("a_real_model", "a_real_model_real")  # of the stand-in, and of the real model
tables = stored_figures(RECORDS[1])["tables"].values()
labels = zip(("{}, sd", "KL of the {}, nats", "logit difference, {}, nats"), tables, strict=True)
rows = {text.format(name): (x[0], x[1:]) for text, found in labels for name, x in found.items()}
seed_dots(rows, "SmolLM2 and its placebo, stored runs", digits=2, this="the run with seed 1")

# %% [markdown]
# Three seeds are too few to measure an effect's size, but you can check whether it has the same direction in all of them. In
# all three seeds, the run beats its placebo on both raters' scores and on the logit difference. Compared with the base model,
# the classifier's score rises by 0.47 to 0.75 sd, and the second rater's score by 0.13 to 0.37 sd.
#
# Now look at the placebo. Its reward is meaningless, yet it moves 0.99 to 1.35 nats away from the base model, compared
# with 1.32 to 2.05 nats for the run. With one of the seeds, the classifier's score rises by 0.35 sd for the placebo,
# and by 0.47 sd for the run. Without a placebo, you would have attributed all of the 0.47 to the reward. (These runs
# are too short to show what SmolLM2 does in general.)
#
# ## The model
#
# `SCALE` selects the model for the cells below. `"local"` uses `smollm2/` and `minilm-sentiment/` from the folder in
# `RLHF_LAB_REAL_MODELS`. `"hub"` downloads the same language model and another classifier from the Hugging Face Hub (0.5
# GB). `"stand-in"` uses Reel. `"auto"` means local if the variable is set, and otherwise the stand-in. The reward favors
# the class the base model generates less often, which we call the *wanted* class: negative for SmolLM2, positive for Reel.

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
# Both runs use LoRA: the weights are frozen, and each attention matrix gets a learned update $\frac{\alpha}{r} A B$ of
# rank $r = 8$. Without these adapters, the model *is* the reference.
#
# The **placebo**'s reward is a hash of the text: a number between 0 and 1 that is always the same for the same text,
# but has no pattern the policy could learn. In all other respects, the two runs are identical. How far will the placebo
# run move from the reference, compared with the real run? (We measure this as KL per sequence.)

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
# From here on, ignore the rewards logged by the trainers: the policy changed from phase to phase, and each phase has
# only a few texts. Instead, we compare three models: `base` (without adapters), `tuned`, and `placebo`. They generate
# **fresh texts with the same random numbers**, so text $i$ starts out the same for all three.

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
# The policy was optimized against the classifier, so the classifier is the rater you should trust least. You need a second
# rater. It doesn't have to be good, but its weaknesses have to be *different*. Here we use a word list: its score is the
# number of words from the wanted class minus the number from the other class. (It doesn't understand "wasn't".)

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
# Are these differences more than noise? The texts come in pairs that share their random numbers, so you can test the
# *differences*. If two models were equal, you could flip a coin to decide which text in a pair to call tuned and which
# to call base. So each difference could just as well have the opposite sign. Draw random signs many times, and count
# how often the mean difference ends up at least as far from 0 as the observed one. This is a **permutation test**
# (Fisher 1935), and it assumes nothing about the distribution.

# %%
from rlhf_lab.functional import paired_permutation_test  # exercise

# %% [markdown]
# The two raters use different units, so we divide each mean difference by the rater's standard deviation over the base model's
# texts. Is the effect larger according to the classifier or according to the word list?

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
predictions.compare("the larger effect, by rater (ratio)", sees_more, ratio, limits)
last_kl = {name: found[-1].kl_per_sequence for name, found in reports.items()}
over_seeds.compare("KL of the last phase, nats per sequence", last_kl)
moved = last_kl["placebo"] / max(last_kl["run"], 1e-9)
limits = {"under a third": 1 / 3, "about as far": 1.5, "further": np.inf}
predictions.compare("compared with the run, the placebo moves", placebo_moves, moved, limits)

# %% [markdown]
# Two raters that agree on the direction are worth more than a single confident rater. If only the classifier detects an
# effect, the policy may simply have learned to please the classifier. The placebo's reward is meaningless, yet its
# effect can look significant: even without any real effect, one in twenty such tests has p < 0.05.
#
# ## Worth its KL?
#
# We can't compute the optimal policy here. But there is a baseline that needs no training: let the base model generate $n$
# texts, and keep the one the classifier scores highest. Its KL is at most $\log n - \frac{n-1}{n}$, and you can estimate its
# mean reward without bias from a single pool of texts (`best_of_n_mean`). If a trained model gets a lower score than this at
# the same KL, the training was not worth it. If its score is higher *according to the second rater*, the training was worth it.
# In a plot of the classifier's score against KL, will our run be above the best-of-n curve, on it, or below it?

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
predictions.compare("compared with best-of-n, the run is", position, kind)
lines = {"best-of-n": (bounds, best["classifier"])}
lines["tuned"] = ([kl.value.item()], [means["classifier"]["tuned"].value.item()])
curves(
    lines,
    "The tuned model and best-of-n of the base",
    "KL from the base, nats per sequence (best-of-n: upper bound)",
    "score of the classifier",
)

# %% [markdown]
# For short runs, best-of-n sampling is a strong baseline, and even stronger than the plot suggests: the plot uses an upper
# bound on the KL, so the true curve is farther to the left. But best-of-n generates $n$ samples for every one it keeps.
#
# ## Causes
#
# So far, you have only described a difference. Now let's intervene, as in {lesson:what_rlhf_changed}. Whatever the
# model's size, you can compare the logits of two words after prompts with the same structure. The next cell measures
# how far the run and the placebo shift this difference.

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
# **Patch** the output of each layer's attention or MLP from the tuned model into the base model to see which outputs
# are sufficient, and from the base model into the tuned model to see which are necessary. The table shows only the
# eight largest of many effects, so it overestimates the largest one.

# %%
sites = [(i, kind) for i in range(base.cfg.n_layers) for kind in ("attn", "mlp")]
places = {f"L{i} {kind}": PatchPlace(f"blocks.{i}.hook_{kind}_out") for i, kind in sites}
old, new = Side(base, prompts), Side(models["tuned"], prompts)
into = patch_activations(old, new, places, -1, ids).fractions()
out = patch_activations(new, old, places, -1, ids).fractions()
value = lambda found: 0.0 if found.value is None else found.value.item()
largest = sorted(into, key=lambda name: -value(into[name]))[:8]
effects = {"into base": into, "out of tuned": out}
effects = {how: {name: found[name] for name in largest} for how, found in effects.items()}
show_intervals("fraction of the shift", effects, "prompts")

# %% [markdown]
# Even an MLP, which has no adapter, can carry the shift, because its input changes even though its weights don't. All
# adapters have rank 8. What fraction of the shift remains if you reduce each of them to its strongest direction?

# %%
at_rank_one = "under a third"  # predict: "under a third", "in between" or "over two thirds"

# %%
ranks, cut = (0, 1, 2, 4, 8), {}
for rank, model in zip(ranks, truncations(base, models["tuned"], ranks), strict=True):
    ends = differences["tuned"], differences["base"]
    cut[f"rank {rank}"] = F.recovered_fraction(*ends, logit_difference(model))
show_intervals("all changes cut to", {"fraction of the shift": cut}, "prompts")
limits = {"under a third": 1 / 3, "in between": 2 / 3, "over two thirds": np.inf}
predictions.compare("the shift that remains at rank 1", at_rank_one, value(cut["rank 1"]), limits)

# %% [markdown]
# ## The report
#
# A claim a reader can check has five parts: a sentence, a number with its interval and $n$, a control, a decision, and
# a measurement that would refute it. `Claim` has a field for each of them: `says`, `effect` (tuned minus base),
# `beyond_control` (tuned minus control), `holds`, and `refuted_by`, which has to contain a number. For each measure,
# you get three columns with one number per text: tuned, base, and placebo. When can you claim that *the reward* changed
# the measure? Write the function that decides. This time there are no steps to follow. The check includes cases in
# which the control changed just as much or more, and cases in which the effect is too uncertain.

# %%
from rlhf_lab.course.exercises.claims import my_claim  # exercise

# %% [markdown]
# The next cell tests four claims: that training changed the classifier's score, the word list's score, the length of
# the texts, and the number of distinct words per text. How many of the four claims will hold?

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
# In a report, state how many claims you tested, not just the ones that held up. With a 95% confidence interval, about
# one in forty claims appears to hold by chance when there is no effect.
#
# ## The true reward
#
# With the stand-in, each text has a true reward, so you can now grade your report. With a real model, this cell prints nothing,
# and the report above is all you have.

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
# With the stand-in, the claim is true: training raises the true reward from 0.50 to 0.84, while the placebo ends at 0.47. The
# classifier's correlation with the true reward is 0.99, and the word list's is 0.84. With a real model you don't know either of
# these correlations, so the placebo and the second rater are your only evidence.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# In the last lesson, {lesson:your_question}, you'll apply all of this to a question of your choice.
