# %% [markdown]
# # 13 Your own question
#
# By the end of this lesson, you will be able to turn a question about RLHF into a claim that runs can refute, test it
# over several seeds, and report the result so that others can check it.
#
# In the other lessons, we chose the questions. Now it's your turn. Everything runs on Reel, and the runs are
# deliberately short: they show you the method, but they don't settle any question. For a real report, raise
# `total_phases` and `batch_size`, and use at least five seeds.
#
# **Before you believe a claim, including your own, check:**
#
# | if you see | check | because |
# |---|---|---|
# | a difference between two runs | the number of seeds | one seed only shows what happened once |
# | an n of several hundred | what n counts | many reviews from one run tell you nothing about another run |
# | two settings that differ | which of them is the cause | a control differs in only one thing |
# | the largest of many numbers | how many numbers were compared | the largest of many numbers is often large by chance |
# | an interval that contains 0 | its width | "no difference" and "too few seeds" look the same |
# | a component that attends to a word, or lets a probe read it | a patch or an ablation | the model may not use it |
#
# **You need** {lesson:what_rlhf_changed}, or {lesson:a_real_model} if your question is about a real model.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 25 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
#
# (6 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.diffing import PatchPlace, Side, patch_activations
from rlhf_lab.functional import Interval, t_two_sided
from rlhf_lab.probes import AttentionDrift, Direction, NeuronRank, ReelTruth, Run, attach

SETTINGS = dict(
    preset="reel",
    total_phases=6,
    warmup_steps=2,
    batch_size=32,
    num_minibatches=2,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    keep_checkpoints=None,  # all of them: a question may be about any phase
)
predictions = Predictions()

# %% [markdown]
# ## A difference over seeds
#
# Suppose two runs differ in one setting and end with different rewards. Would the difference have the same sign with
# another seed? To find out, train both runs with each of n seeds. The two runs for a seed start from the same weights
# and draw the same random numbers, so they have a lot in common. What they share cancels if you first take the
# difference $d_i$ for each seed and then compute
#
# $$\bar d \pm t_{n-1} \, \frac{\operatorname{std}(d)}{\sqrt n}$$
#
# Here $t_{n-1}$ is the factor from Student's t distribution, which `t_two_sided(level, degrees)` returns. It accounts
# for the fact that a standard deviation of three numbers is itself uncertain. (Why not the bootstrap from
# {lesson:the_policy}? It resamples the data, which works well for hundreds of reviews, but not for three numbers.)

# %%
from rlhf_lab.functional import seed_interval  # exercise

# %% [markdown]
# How often does a 95% interval over three seeds contain the true mean? To find out, let's repeatedly draw three
# differences from a normal distribution with mean 0, and count how often the interval contains 0. How often will the
# bootstrap interval contain 0: about 95% of the time, about two thirds of the time, or less than half the time?

# %%
bootstrap_covers = "95 %"  # predict: "95 %", "two thirds" or "less than half"

# %%
generator = torch.Generator().manual_seed(0)
draws = torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
mean, error = draws.mean(1), draws.std(1) / 3**0.5
picks = torch.tensor(list(product(range(3), repeat=3)))  # all resamples of three
ends = draws[:, picks].mean(-1).quantile(torch.tensor([0.025, 0.975]).double(), dim=1)
factor = t_two_sided(0.95, 2)
covers = {
    "bootstrap": (ends[0] <= 0) & (ends[1] >= 0),
    "mean +- 1.96 standard errors": mean.abs() <= 1.96 * error,
    f"mean +- {factor:.2f} standard errors": mean.abs() <= factor * error,
}
coverage = {name: found.double().mean().item() for name, found in covers.items()}
show_table(["95 % interval over three seeds", "contains the true mean in"], coverage.items())
limits = {"less than half": 0.5, "two thirds": 0.9, "95 %": 1.0}
predictions.compare("the bootstrap", bootstrap_covers, coverage["bootstrap"], limits)

# %% [markdown]
# Only the last interval contains the true mean 95% of the time.
#
# ## A claim
#
# "What does the KL coefficient do?" is a question. "After six phases the mean reward is higher with `kl_coef` 0.1 than
# with 1.0" is a claim, because it can be wrong. To test a claim with pairs of runs, you need
#
# - a sentence that states a *direction*;
# - a *measure*, which is one number per run;
# - the *smallest effect* that matters and an outcome that would *refute* the claim, written down before the runs;
# - a *treated* run and a *control*, which differ in one setting;
# - the *seeds*.
#
# Now write a claim. Settings to try include `kl_coef`, `kl_in`, `gae_lambda`, `advantages`, `base_lr`, `temperature`,
# `ent_coef`, and `reward_fn`. The measure is a number from `PhaseReport`, such as `mean_reward`, `true_reward`,
# `kl_per_sequence`, `entropy_per_token`, or `explained_variance`. Note that the check doesn't test whether your claim
# is true, only whether it can be refuted.

# %%
from rlhf_lab.course.exercises.claims import seed_claim  # exercise

# %% [markdown]
# ## The decision
#
# To decide on a claim, measure the effect in the claimed direction, and compare the whole interval with the smallest
# effect that matters:
#
# | interval | verdict |
# |---|---|
# | its upper end is below the smallest effect | *refuted*, even if the interval is above 0 |
# | its lower end is at least the smallest effect | *holds* |
# | its lower end is above 0 | *a difference, size open* |
# | anything else | *undecided* |
#
# Why doesn't the table use a looser rule that accepts a claim as soon as the lower end is above 0? Suppose the true effect is
# only half the smallest effect that matters, so the claim is false. As you add seeds, does the looser rule accept the claim
# more often or less often?

# %%
with_more_seeds = "less often"  # predict: "less often" or "more often"

# %%
smallest, spread, rows = 0.04, 0.03, []  # spread: standard deviation of a difference over seeds
for effect in (0.5 * smallest, 2 * smallest):
    for n in (3, 5, 8):
        draws = effect + spread * torch.randn(20_000, n, generator=generator, dtype=torch.float64)
        low = draws.mean(1) - t_two_sided(0.95, n - 1) * draws.std(1) / n**0.5
        rates = [(low > limit).double().mean().item() for limit in (0.0, smallest)]
        rows.append([f"{effect / smallest:g} x smallest", n, *rates])
show_table(["true effect", "seeds", "accepted if low > 0", "if low >= smallest"], rows)
trend = "more often" if rows[2][2] > rows[0][2] else "less often"
predictions.compare("with more seeds, low > 0 accepts a false claim", with_more_seeds, trend)

# %% [markdown]
# With three seeds, the looser rule accepts the false claim 11% of the time, and with eight seeds, 37% of the time. The
# rule in the table accepts it at most 0.3% of the time. And if the true effect is twice the smallest one, so that the
# claim is true, the table's rule accepts it more often as you add seeds. But fix the number of seeds before you start.
# If you keep adding seeds until the claim holds, and then stop, you haven't tested it.
#
# Here is a stored example with five seeds. The claim is "after eight phases, the mean reward is lower with `gae_lambda`
# 0.5 than with 1.0", and the smallest effect is 0.1.


# %%
def decide(claim: Mapping[str, Any], found: Interval) -> str:
    """Compare an interval over seeds with the smallest effect of a claim."""
    sign, least = claim["direction"], claim["smallest effect"]
    low, high = sorted((sign * found.low.item(), sign * found.high.item()))
    if high < least or low >= least:
        return "refuted" if high < least else "holds"
    return "a difference, size open" if low > 0 else "undecided"


runs = stored_figures("claim_runs")
show_table(
    ["mean reward of phase 7", *(f"seed {seed}" for seed in runs["seeds"])],
    [
        ["treated: gae_lambda 0.5", *runs["treated"]],
        ["control: gae_lambda 1.0", *runs["control"]],
    ],
)
example = {"direction": -1, "smallest effect": 0.1}
for n in (3, 5):
    found = seed_interval(*(torch.tensor(runs[side][:n]) for side in ("treated", "control")))
    print(f"treated - control: {found}; verdict: {decide(example, found)}")

# %% [markdown]
# The claim holds with five seeds, and even with three, because the whole interval is below -0.1.
#
# Now test your claim. Which verdict do you expect?
#
# (13 s on one core)

# %%
my_verdict = "holds"  # predict: "holds", "refuted", "a difference, size open" or "undecided"

# %%
claim = seed_claim()


def last_value(side: str, seed: int) -> float:
    """Train one run of the claim; returns its measure in the last phase."""
    trainer = RLHFTrainer(RLHFArgs(**SETTINGS | claim[side] | {"seed": seed}))
    return float(getattr(trainer.train()[-1], claim["measure"]))


values = {
    side: [last_value(side, seed) for seed in claim["seeds"]] for side in ("treated", "control")
}
found = seed_interval(*(torch.tensor(values[side]) for side in ("treated", "control")))
show_table(
    [claim["measure"], *(f"seed {seed}" for seed in claim["seeds"])],
    [[f"{side}: {claim[side]}", *numbers] for side, numbers in values.items()],
)
predictions.compare("my claim", my_verdict, decide(claim, found))

# %% [markdown]
# ## The report
#
# One page is enough. The next cell fills in the numbers from your runs, and you replace the text in parentheses.

# %%
the_rest = {name: SETTINGS[name] for name in SETTINGS if name not in claim["treated"]}
report = f"""
CLAIM       {claim["claim"]}
WHY         (one sentence: who would act differently, and how, if it is true?)
REFUTED BY  {claim["refuted by"]}
METHOD      treated {claim["treated"]}, control {claim["control"]}; both {the_rest}
MEASURE     {claim["measure"]} of the last phase; smallest effect: {claim["smallest effect"]}
RESULT      treated - control: {found}, seeds {claim["seeds"]}; verdict: {decide(claim, found)}
SELECTION   (how many measures, phases and settings did you look at before you chose this one?)
INSIDE      (which component is the cause: a patch or an ablation, with its control)
AGAINST     (the best other explanation, and the run that would distinguish the two)
NOT SHOWN   (where this may not be true: other base models, rewards, lengths)
REPRODUCE   (one command or cell that computes the numbers again)
"""
print(report)

# %% [markdown]
# Swap reports with someone and grade each other's. Each row of the table is worth half a point or a full point:
#
# | | half | full |
# |---|---|---|
# | claim | has a direction | also has a measure and a smallest effect |
# | refutation | written afterwards | written before the runs, with a number |
# | control | differs in several things | differs in one thing |
# | n | stated | also states what it counts |
# | interval | over tokens, or over reviews of one run | over the unit of the claim, which is seeds here |
# | selection | reported | also repeated on fresh seeds |
# | inside | a probe, with a control | an intervention on activations, with a control |
# | other explanation | named | also tested with a run |
#
# ## Thirty lines from memory
#
# This exercise has no check. Without looking at the other notebooks or at the cell below, write code that trains a
# policy on a custom reward. During the run, record attention patterns, neuron activations, and the projection onto
# a direction. At the end, patch a component.
# These may be useful:
#
# | what you record | a probe, with fields of its records | with `trainer.capture` |
# |---|---|---|
# | attention patterns | `AttentionDrift(word, other)`: `heads`, `tv_here` (distance from the reference, 0 to 1) | `blocks.*.attn.hook_pattern` |
# | neurons | `NeuronRank(word, other)`: `neurons`, `contribution` (nats) | `blocks.*.mlp.hook_post` |
# | a direction | `Direction(label, method)`: `auc` by layer and position | `blocks.*.hook_resid_post` |
# | each component's effect on a word | `LogitShift(word, other)`: `components`, `shift` | `logits` |
# | the value head | `ValueLens()`: `r2` by layer and position | `values` |
#
# Probes record before the update in phases 0, 1, 2, 3, 5, 8, ..., and after the last phase. With `every=3`, they record
# every third phase. `run.records(name)` returns what a probe measured, and `run.returned(name)` returns what your own
# function returned.

# %%
# your thirty lines

# %% [markdown]
# Here is one solution, which rewards reviews that don't contain "wasn't".
#
# (5 s on one core)


# %%
def no_negation(texts: list[str]) -> Float[Tensor, " batch"]:
    return torch.tensor([float("wasn't" not in text) for text in texts])


reviews, labels = ReelTruth().reviews(192, seed=0)
reviews = reviews[:, : ReelTruth().grammar.slot("VERB")]  # up to the verdict
trainer = RLHFTrainer(RLHFArgs(**SETTINGS), out=new_run("thirty lines"), reward_fn=no_negation)
probes = [Direction("sentiment", "lda", every=3), NeuronRank("loved", "hated", every=3)]
probes.append(AttentionDrift("loved", "hated", every=3))
attach(trainer, probes, eval_tokens=reviews, labels=labels)


@trainer.capture(["blocks.*.attn.hook_pattern", "blocks.*.mlp.hook_post"], tokens=reviews)
def look(ctx, acts):  # patterns are [batch head query key]
    pattern, neurons = acts["blocks.0.attn.hook_pattern"], acts["blocks.1.mlp.hook_post"][:, -1]
    gap = (neurons[labels].mean(0) - neurons[~labels].mean(0)).abs()
    previous = pattern.diagonal(offset=-1, dim1=-2, dim2=-1).mean((0, 2)).tolist()
    heads = {f"head {i} to previous": weight for i, weight in enumerate(previous)}
    return heads | {"neuron": gap.argmax().item(), "gap": gap.max().item()}


for phase in trainer.train():
    print(f"phase {phase.phase}: reward {phase.mean_reward:.2f}, KL {phase.kl_per_sequence:.2f}")
run = Run(trainer.run.path)
looks = run.returned("look")
names = [name for name in looks[0] if name != "event"]
show_table(names, [[each[name] for name in names] for each in looks], digits=2)
print("AUC by layer:", [layer[-1] for layer in run.records("direction_sentiment")[-1]["auc"]])
print("neurons:", *run.records("neuron_rank")[-1]["neurons"][:3])
drift = run.records("attention_drift")[-1]
moved = zip(drift["heads"], drift["tv_here"], strict=True)
print("distance of patterns:", *(f"{head} {x:.2f}" for head, x in moved))
base, tuned = (Side(run.policy(which).base_model, reviews) for which in (0, "last"))
place = {"L0 mlp": PatchPlace("blocks.0.hook_mlp_out")}
patched = patch_activations(base, tuned, place, -1, ("loved", "hated"))
shift = (patched.end - patched.start).mean()
print(f"L0 mlp causes this fraction of {shift:.2f} nats:", patched.fractions()["L0 mlp"])

# %% [markdown]
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Read on
#
# If you are looking for a question, start with `docs/investigations.md`. For more on methods, see Agarwal et al. 2021
# on what you can learn from a handful of runs ([2108.13264](https://arxiv.org/abs/2108.13264)), Henderson et al. 2018,
# *Deep reinforcement learning that matters* ([1709.06560](https://arxiv.org/abs/1709.06560)), and Nosek et al. 2018 on
# preregistration ([10.1073/pnas.1708274114](https://doi.org/10.1073/pnas.1708274114)).
#
# This was the last lesson. If you also want to write the functions the lessons gave you, continue with the appendix
# {lesson:write_the_rest}.
