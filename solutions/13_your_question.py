# %% [markdown]
# # 13 A question of your own
#
# Can you defend a claim about what RLHF did to a model? In the other lessons the questions were given. Here you ask one,
# say beforehand what would refute you, let runs over several seeds decide it, and write it down so that somebody else
# can check it.
#
# **Needs** {lesson:what_rlhf_changed}, or {lesson:a_real_model} if your question is about a real model.
#
# **Afterwards you can**
# - turn a question into a claim that a pair of runs can refute,
# - give a difference over few seeds an interval that is wide enough,
# - say what n counts, and what the control is,
# - write and grade a report of one page,
# - write a run with a reward of your own, watched inside, in thirty lines.
#
# **What to inspect** before you believe a claim, your own above all:
#
# | you see | look at | because |
# |---|---|---|
# | a difference between two runs | the number of seeds | one seed shows what happened once |
# | n of several hundred | what n counts | reviews of one run say nothing about another run |
# | two settings that differ | which of them did it | a control differs in one thing |
# | the largest of many figures | how many were looked at | the best of many is large by chance |
# | an interval that holds 0 | its width | "no difference" and "too few seeds" look alike |
# | a part that can be read, or attends | a patch or an ablation | what is there need not be used |

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work, thirty of them for the last exercise, before your own question. All cells together run in about
# 55 seconds on one core, without a network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (6 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import (
    Predictions,
    check,
    hint,
    new_run,
    progress,
    show_intervals,
    show_table,
)
from rlhf_lab.diffing import PatchPlace, Side, part_places, patch_activations
from rlhf_lab.functional import Interval
from rlhf_lab.organism import true_reward
from rlhf_lab.organism.lexicon import WORD_IDS
from rlhf_lab.probes import (
    AttentionDrift,
    Direction,
    NeuronRank,
    Probe,
    ReelTruth,
    Run,
    Suite,
    attach,
)
from rlhf_lab.training import PhaseReport

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
SEEDS = (1, 2, 3)
predictions = Predictions()
truth = ReelTruth()
text, positive = truth.reviews(192, seed=0)
text = text[:, : truth.grammar.slot("VERB")]  # up to the verdict, which is not in it

# %% [markdown]
# Everything runs on Reel, with runs that are short on purpose: they show how a question is asked, and settle none.
# For a report of yours raise `total_phases` and `batch_size`, and take five seeds or more.
#
# ## A difference over seeds
#
# Two runs that differ in one setting differ in a figure. Would they differ in the same direction with another seed? Run
# both with each of n seeds. The two runs of a seed begin with the same weights and the same random numbers, so that they share much (unless
# the setting is about sampling, even the texts of phase 0). So take their difference first: with $d_i$ the difference of seed
# $i$,
#
# $$\bar d \pm t_{n-1} \, \frac{\operatorname{std}(d)}{\sqrt n}$$
#
# where $t_{n-1}$ is the factor of Student's t. A standard deviation of three numbers is itself uncertain, and the factor
# accounts for that. (A bootstrap, as in {lesson:the_policy}, resamples what there is. It is right for hundreds of reviews. With three
# numbers there is too little to resample.) `t_two_sided(level, degrees)` gives the factor.

# %%
from rlhf_lab.functional import seed_interval  # exercise

# %% [markdown]
# How often do intervals of 95 % hold the truth, if there are three seeds? Draw three differences, many thousand times, from a
# normal distribution of mean 0, and count. By bootstrap over the three: about 95 %, about two thirds, or less than half?

# %%
held_by_bootstrap = "two thirds"  # predict: "95 %", "two thirds" or "less than half"

# %%
draws = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
mean, error = draws.mean(1), draws.std(1) / 3**0.5
one = seed_interval(draws[0], torch.zeros(3))
factor = ((one.high - one.value) / error[0]).item()
picks = torch.tensor(list(product(range(3), repeat=3)))  # all resamples of three
ends = draws[:, picks].mean(-1).quantile(torch.tensor([0.025, 0.975]).double(), dim=1)
held = {
    "bootstrap": ((ends[0] <= 0) & (ends[1] >= 0)).double().mean().item(),
    "mean +- 1.96 standard errors": (mean.abs() <= 1.96 * error).double().mean().item(),
    f"mean +- {factor:.2f} standard errors": (mean.abs() <= factor * error).double().mean().item(),
}
show_table(["interval over three seeds", "holds the truth in"], list(held.items()))
share = held["bootstrap"]
kind = "95 %" if share > 0.9 else "two thirds" if share > 0.5 else "less than half"
predictions.compare("a bootstrap of three seeds holds the truth", held_by_bootstrap, kind)

# %% [markdown]
# What is called 95 % has to hold the truth in 95 %. Only the last line does.
#
# ## A claim
#
# "What does the KL coefficient do?" is a question. "After six phases the mean reward is higher with one coefficient
# than with another" is a claim: it can turn out wrong. A claim that a pair of runs can decide has
#
# - a sentence with a *direction*,
# - an outcome that would *refute* it, written down before the runs,
# - a *measure*: one number per run,
# - a *treated* run and a *control* that differ in one setting,
# - the *seeds*,
# - the *smallest effect* that would matter to anybody.
#
# Write one. `kl_coef`, `kl_in`, `gae_lambda`, `advantages`, `base_lr`, `temperature`, `ent_coef` and `reward_fn` are
# settings to think about; the measure is a number of `PhaseReport`, such as `mean_reward`, `true_reward`,
# `kl_per_sequence`, `entropy_per_token` or `explained_variance`. The check does not judge whether you are right. It
# judges whether you could be wrong.

# %%
from rlhf_lab.course.exercises.question import seed_claim  # exercise

# %% [markdown]
# Now the runs decide. What will they say of your claim?
#
# (13 s on one core)

# %%
verdict_of_seed_claim = "holds"  # predict: "holds", "refuted" or "undecided"


# %%
def reports_of(seed: int, **changes: Any) -> list[PhaseReport]:
    """Train without storing the run, and return the reports of its phases."""
    return RLHFTrainer(RLHFArgs(**SETTINGS | changes | {"seed": seed})).train()


def train(seed: int, probes: Sequence[Probe] = (), reward: Any = None, **changes: Any) -> tuple:
    """The reports of a run of these settings, and the stored run with its checkpoints."""
    trainer = RLHFTrainer(
        RLHFArgs(**SETTINGS | changes | {"seed": seed}),
        out=new_run(f"seed {seed}"),
        reward_fn=reward,
    )
    if probes:
        Suite(*probes, eval_tokens=text, labels=positive).attach(trainer)
    return trainer.train(), Run(trainer.run.path)


def last(reports: Sequence[PhaseReport], measure: str) -> float:
    """A number of the last phase."""
    return float(getattr(reports[-1], measure))


def decide(claim: Mapping[str, Any], found: Interval) -> str:
    """Whether a claim holds, is refuted, or is left undecided by an interval."""
    sign, least = claim["direction"], claim["smallest effect"]
    low, high = sorted((sign * found.low.item(), sign * found.high.item()))
    return "refuted" if high < least else "holds" if low > 0 else "undecided"


claim = seed_claim()
figures = {
    side: [last(reports_of(seed, **claim[side]), claim["measure"]) for seed in claim["seeds"]]
    for side in ("treated", "control")
}
found = seed_interval(torch.tensor(figures["treated"]), torch.tensor(figures["control"]))
show_table(
    [claim["measure"], *(f"seed {seed}" for seed in claim["seeds"])],
    [[f"{side}: {claim[side]}", *numbers] for side, numbers in figures.items()],
)
print(f"claim: {claim['claim']}\nrefuted by: {claim['refuted by']}")
print(f"treated - control: {found} (n counts seeds); verdict: {decide(claim, found)}")
predictions.compare("my claim", verdict_of_seed_claim, decide(claim, found))

# %% [markdown]
# *Refuted* means that the whole interval lies below the smallest effect that would matter. That is so, too, where it lies above 0: there is an
# effect, and it is too small for what you claimed. *Holds* means that it is not refuted, and that the whole interval lies on your side of
# 0. Everything else is *undecided*, and the honest next step is more seeds. Adding seeds until
# it holds, and stopping then, is not: decide on their number first.
#
# ## The report
#
# One page. This is the template, with the lines that your runs have filled in:

# %%
the_rest = {name: SETTINGS[name] for name in SETTINGS if name not in claim["treated"]}
report = f"""
CLAIM       {claim["claim"]}
WHY         (one sentence: who would do what differently, if it is true?)
REFUTED BY  {claim["refuted by"]}
METHOD      treated {claim["treated"]}, control {claim["control"]}; else {the_rest}
MEASURE     {claim["measure"]} of the last phase; smallest effect that matters: {claim["smallest effect"]}
RESULT      {found}, n counts seeds {claim["seeds"]}; verdict: {decide(claim, found)}
LOOKED AT   (how many measures, phases and settings were looked at before this one was chosen?)
INSIDE      (which part did it: a patch or an ablation, with its control)
AGAINST     (the best other explanation, and which run would tell)
NOT SHOWN   (where this may not hold: other base models, rewards, lengths)
AGAIN       (one command or cell that makes the numbers again)
"""
print(report)

# %% [markdown]
# ### The rubric
#
# Let somebody else grade it, and grade theirs.
#
# | | nothing | half | full |
# |---|---|---|---|
# | claim | a topic | a direction | a direction, a measure and a smallest effect |
# | refutation | none | afterwards | beforehand, with a number |
# | control | none | differs in several things | differs in one thing, and the rest is shown to be equal |
# | n | not said | said | said, with what it counts, and enough of it |
# | interval | none | of the wrong unit (tokens, reviews of one run) | over what the claim is about |
# | selection | not said | said | said, and the figure taken again on fresh seeds |
# | inside | "attention shows" | a reading with a control | a change of the activation, with a control |
# | other explanation | none | named | named, and a run that tells |
# | again | no | with changes | as it stands |
#
# ## Six starters
#
# Each begins with what is known, and with a program that runs as it is, at a size that settles nothing. Change it until
# it decides something. The first three share these runs:
#
# (13 s on one core)

# %%
watched = {
    seed: train(
        seed,
        [
            NeuronRank("loved", "hated", pos=-1, every=3),
            Direction("sentiment", "mean", every=3),
        ],
    )
    for seed in SEEDS
}
for seed, (reports, run) in watched.items():
    print(f"seed {seed}: reward {last(reports, 'mean_reward'):.2f}; records of {run.probes()}")

# %% [markdown]
# ### 1. Does the same neuron lead, and from the same phase on?
#
# *Known*: an MLP's part in "loved against hated" grows in training ({lesson:what_rlhf_changed}). *Look in* `NeuronRank`, which charges each
# neuron with its share of the shift, in nats of "loved" less "hated": a negative share works for "hated". *Refuted* if over seeds other neurons
# lead, or at other phases. All three runs start from one base model, so that the same neuron over seeds is weak evidence: take another
# base (starter 4). Records are made every three phases, and say no more than that about "since". *Control*, which the program
# does not have yet: a neuron of equal size that is not in the list.

# %%
rows = []
for seed, (_, run) in watched.items():
    name = next(name for name in run.probes() if name.startswith("neuron_rank"))
    records = [record for record in run.records(name) if record["phase"]]
    leaders = [record["neurons"][0] for record in records]
    since = next(i for i in range(len(leaders)) if len(set(leaders[i:])) == 1)
    rows.append([seed, leaders[-1], records[since]["phase"], records[-1]["contribution"][0]])
show_table(["seed", "leads in the end", "since phase", "its share, nats"], rows)

# %% [markdown]
# ### 2. Is a sentiment direction that was fitted before training still the one that is read afterwards?
#
# *Known*: readers age ({lesson:watch_it_learn}). *Look in* `Direction`: the cosine of the axis that is fitted after training with the one fitted before. Two fits
# to the two halves of the same texts do not agree fully either; their cosine says what chance alone does. *The claim*: it is
# another direction now, so that the cosine with the old axis is below that of the halves. *Refuted* if it is not below in every seed.
# *Control*: shuffled labels, whose accuracy stands in the record as `accuracy_shuffled`.

# %%
rows = []
for seed, (_, run) in watched.items():
    name = next(name for name in run.probes() if name.startswith("direction"))
    record = run.records(name)[-1]
    at = record["sites"].index("blocks.1.hook_resid_post")
    rows.append(
        [seed, *(record[key][at][-1] for key in ("cosine_with_reference", "split_half_cosine"))]
    )
show_table(["seed, block 1, last position", "cosine with the old axis", "of two halves"], rows)

# %% [markdown]
# ### 3. Which part suffices to bring the change, and is it the same part over seeds?
#
# *Known*: patched into the old model, the new output of a part causes a fraction of the shift ({lesson:what_rlhf_changed}). *Look in*
# `patch_activations`. *Refuted* if no part brings nearly all of the shift (in these runs none does), or if the order of parts differs from seed to seed. The intervals below are
# over the reviews of one run each: for "over seeds" take the largest part's share once per seed, and `seed_interval`. *Control*: the
# part's output on other texts.

# %%
ids = WORD_IDS["loved"], WORD_IDS["hated"]


def shares(run: Run) -> dict[str, Interval]:
    """How much of the shift each part of the tuned model brings into the old one."""
    base, tuned = (run.policy(which).base_model for which in (0, "last"))
    places = part_places(base, positions=(-1,))
    return patch_activations(Side(base, text), Side(tuned, text), places, -1, ids).fractions()


show_intervals(
    "patched in, last position",
    {f"seed {seed}": shares(run) for seed, (_, run) in watched.items()},
    "reviews",
)

# %% [markdown]
# ### 4. Does another base model use the same part?
#
# *Known*: `reel-nano-b` and `reel-nano-c` speak the same language with other weights. *Look in* the table above, and ask
# for the same *kind* of part and place, not for the same number of a head. *Refuted* if another kind leads. *Control*:
# two seeds of one base model. (Again, the intervals are over reviews of one run.)
#
# (4 s on one core)

# %%
bases = {
    "reel-nano": watched[1][1],
    "reel-nano-b": train(1, base_model="reel-nano-b")[1],
}
show_intervals(
    "patched in, last position", {name: shares(run) for name, run in bases.items()}, "reviews"
)

# %% [markdown]
# ### 5. KL in the loss or in the reward: does a short run show the difference?
#
# *Known*: the two have other optima ({lesson:the_kl_penalty}), and in short runs the order differs from seed to seed. *Look in* `kl_in`.
# *Refuted* if the interval over seeds holds 0 at a size where {lesson:the_kl_penalty} predicts a difference that you can name.
# *Control*: the same seeds with the KL in the loss, which are the runs of above.
#
# (6 s on one core)

# %%
in_reward = [reports_of(seed, kl_in="reward", kl_estimator="k1") for seed in SEEDS]
for measure in ("mean_reward", "kl_per_sequence"):
    treated, control = (
        torch.tensor([last(reports, measure) for reports in side])
        for side in (in_reward, [reports for reports, _ in watched.values()])
    )
    print(f"{measure}, KL in the reward - in the loss: {seed_interval(treated, control)}")

# %% [markdown]
# ### 6. A reward of your own: when does it part from what you meant?
#
# *Known*: the policy writes praise after "wasn't", too ({lesson:start}). *Look in* `true_reward` and `mean_reward` of each
# phase. *Refuted* if the true reward rises with the reward in every seed. *Control*: the classifier's reward.
#
# (4 s on one core)


# %%
def praise(texts: list[str]) -> Float[Tensor, " batch"]:
    """The number of strong praise words."""
    paid = {"brilliant", "perfect", "superb", "stunning"}
    return torch.tensor([float(sum(word in paid for word in t.split())) for t in texts])


paid_for_praise = [train(seed, reward=praise)[1] for seed in SEEDS[:2]]
rows = []
for seed, run in zip(SEEDS[:2], paid_for_praise, strict=True):
    written = [[s["text"] for s in run.samples(phase)] for phase in (0, len(run.metrics()) - 1)]
    rows.append(
        [seed, *(x(texts).mean().item() for x in (praise, true_reward) for texts in written)]
    )
show_table(
    ["seed", "praise, first phase", "last phase", "true reward, first phase", "last phase"], rows
)
before, after = (torch.tensor([row[i] for row in rows]) for i in (3, 4))
print(
    f"means of {len(written[0])} texts each; true reward, last less first phase: {seed_interval(after, before)}"
)

# %% [markdown]
# ## What there is to watch with
#
# | to watch | a probe of the package, and what its record has, among others | by hand, with `trainer.capture` |
# |---|---|---|
# | attention patterns | `AttentionDrift(word, other)`: `heads`, and for each `tv_here`, how far its pattern moved from the reference's (0 to 1) | `blocks.*.attn.hook_pattern` |
# | neurons | `NeuronRank(word, other)`: `neurons`, the leading ones of that phase, and the nats of each, `contribution` | `blocks.*.mlp.hook_post` |
# | a direction | `Direction(label, method)`, fitted anew each time: `auc` by site and position; `FrozenProbe(pos)`, fitted once | `blocks.*.hook_resid_post` |
# | what each part does to a word | `LogitShift(word, other)`: `components` and `shift`; `KLAttribution()` | `logits` |
# | the value head | `ValueLens()`: `r2` by site and position; `ValueAttribution()` | `values` |
# | one update | `GradTerms()`, `StepInfluence(word=..., other=...)` | gradients: `trainer.on("after_backward")` |
# | the run | `RunHealth()`, `KLByPosition()`, `HackWatch()` | `trainer.on("after_phase")` |
#
# All of them come from `rlhf_lab.probes`. `list(record)` tells what else a record has.
#
#
# - *When they look.* A probe of the policy looks before the update of a phase, and once more after the last. Its phases are 0, 1, 2, 3, 5, 8, ...
#   and the end, of which 0 is the policy before any training; `every=1` or `attach(..., record="every")` records each phase. `capture`
#   runs in each phase, after the update by default.
# - *Where it is kept.* `run.records(name)` has what a probe found (`run.records("direction_sentiment")`), `run.returned(name)` what your
#   own function returned, `run.metrics()` rewards and KL.
# - *What it costs.* `attach` returns an object whose `seconds` has the time of each probe; a larger `every` costs less.
#
# ## From memory
#
# The last exercise has no check. Close the other notebooks, scroll so that the cell below this text is out of sight, and write in a new cell
# a run with a reward of your own, in which attention patterns, neurons and a direction are watched over phases, and one part
# is patched in the end. The imports are those at the top.

# %%
# your thirty lines

# %% [markdown]
# And here is one that stays within the words of these lessons, to compare yours with.
#
# (5 s on one core)


# %%
def no_negation(texts: list[str]) -> torch.Tensor:
    return torch.tensor([float("wasn't" not in words) for words in texts])


reviews, labels = ReelTruth().reviews(192, seed=0)
reviews = reviews[:, : ReelTruth().grammar.slot("VERB")]
settings = RLHFArgs(preset="reel", total_phases=6, batch_size=32, keep_checkpoints=None)
trainer = RLHFTrainer(settings, out=new_run("thirty lines"), reward_fn=no_negation)
probes = [Direction("sentiment", "lda", every=3), NeuronRank("loved", "hated", every=3)]
probes.append(AttentionDrift("loved", "hated", every=3))
attach(trainer, probes, eval_tokens=reviews, labels=labels)


@trainer.capture(["blocks.*.attn.hook_pattern", "blocks.*.mlp.hook_post"], tokens=reviews)
def look(ctx, acts):  # patterns are [batch head query key]: index the query, pos= cannot
    pattern, neurons = acts["blocks.0.attn.hook_pattern"], acts["blocks.1.mlp.hook_post"][:, -1]
    apart = (neurons[labels].mean(0) - neurons[~labels].mean(0)).abs()
    to_previous = pattern.diagonal(offset=-1, dim1=-2, dim2=-1).mean((0, 2))
    heads = {f"head {i} to previous": share for i, share in enumerate(to_previous.tolist())}
    return heads | {"neuron": apart.argmax().item(), "apart": apart.max().item()}


for phase in trainer.train():
    print(f"phase {phase.phase}: reward {phase.mean_reward:.2f}, KL {phase.kl_per_sequence:.2f}")
run = Run(trainer.run.path)
looks = run.returned("look")
shown = [name for name in looks[0] if name != "event"]
show_table(shown, [[each[name] for name in shown] for each in looks], digits=2)
print("AUC by layer:", [layer[-1] for layer in run.records("direction_sentiment")[-1]["auc"]])
print("neurons:", *run.records("neuron_rank")[-1]["neurons"][:3])
drift = run.records("attention_drift")[-1]
print(
    "patterns moved:",
    *(f"{h} {x:.2f}" for h, x in zip(drift["heads"], drift["tv_here"], strict=True)),
)
base, tuned = (Side(run.policy(which).base_model, reviews) for which in (0, "last"))
place = {"L0 mlp": PatchPlace("blocks.0.hook_mlp_out")}
patched = patch_activations(base, tuned, place, -1, ("loved", "hated"))
shift = (patched.end - patched.start).mean()
print(f"L0 mlp brings of {shift:.2f} nats this share:", patched.fractions()["L0 mlp"])

# %% [markdown]
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - Let `seed_claim` be refuted: find one that you believe and that three seeds refute.
# - Give starter 5 twelve seeds. How narrow does the interval become, and what would it take to halve it again?
# - Take one claim of a lesson of this course, and try to refute it with a base model that the lesson did not use.
#
# ## Read on
#
# - Agarwal et al. 2021, on what few runs can say ([2108.13264](https://arxiv.org/abs/2108.13264)).
# - Henderson et al. 2018, *Deep reinforcement learning that matters* ([1709.06560](https://arxiv.org/abs/1709.06560)).
# - Nosek et al. 2018, on writing the claim down first ([10.1073/pnas.1708274114](https://doi.org/10.1073/pnas.1708274114)).
# - Hewitt and Liang 2019, on controls for readers ([1909.03368](https://arxiv.org/abs/1909.03368)).
# - Heimersheim and Nanda 2024, on what a patch shows ([2404.15255](https://arxiv.org/abs/2404.15255)).
