# %% [markdown]
# # Debugging PPO
#
# By the end of this appendix to {lesson:ppo} you can find a bug in a trainer from its dashboard alone.
#
# First you write the package's own phases, then you train with them on rewards that are so easy that you know the result
# in advance, find three bugs, and write an alarm for broken runs.
#
# **You will be able to**
# - write the optimizer, the minibatches and the two phases of the package's trainer;
# - choose a reward that shows in seconds which part of a trainer is wrong;
# - read a dashboard, and name the bug;
# - write and test a function that separates broken runs from healthy ones.

# %%
# first cell

# %% [markdown]
# About 180 minutes of work. All cells together run in about 45 seconds on a single core, without a network. Cells that take
# more than 3 seconds have a note with their time, as the imports here:
#
# (4 s on a single core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import inspect
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.course.bugs import SUSPECTS, culprit, reveal
from rlhf_lab.course.dashboards import COLUMNS, Dashboard, dashboard_of, stored_dashboards
from rlhf_lab.course.ladder import (
    LADDER_FIELDS,
    RUNGS,
    WRONG_CLIMBERS,
    climb,
    constant,
    falls_from,
    first_word,
    last_word,
    stored_climbs,
    stored_others,
    stored_texts,
)
from rlhf_lab.functional import (
    compute_advantages,
    compute_gae,
    compute_returns,
    token_rewards,
)
from rlhf_lab.views import curves, loop_diagram, sparkline, tokens_html

SETTINGS = dict(
    preset="reel",
    total_phases=8,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
)
predictions = Predictions()

# %% [markdown]
# The numbers in the text come from Reel. One run is one seed; the package has stored the dashboards of healthy and of
# broken runs with these settings, three seeds of each, and the tables below show them next to yours.
#
# ## From a batch to steps
#
# A rollout is expensive, and so it is used more than once. `ReplayMemory` splits it into
# minibatches, and the optimizer takes a step with each. Most of the class exists. Write
# `get_minibatches`. (`_take` wants to know whether the prompts are padded: ask the rollout's
# `samples.is_padded` once.)

# %%
from rlhf_lab.training import ReplayMemory  # exercise

# %% [markdown]
# `SETTINGS` has 128 reviews and 4 minibatches; each phase goes through the batch twice
# (`batches_per_learning_phase`). How many optimizer steps is that per phase?

# %%
steps_per_phase = 8  # predict: a number from 1 to 64

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("look"))
rollout = trainer.rollout_phase()
memory = ReplayMemory(rollout, args.num_minibatches, args.batches_per_learning_phase)
minibatches = list(memory.get_minibatches(torch.Generator().manual_seed(0)))
print("minibatch of", tuple(minibatches[0].tokens.shape), "tokens")
predictions.compare("optimizer steps per phase", steps_per_phase, len(minibatches))

# %% [markdown]
# A whole review stays in one minibatch; tokens are never split over minibatches. Why? The policy has
# to read the review from its beginning anyway to score any token of it.
#
# ## The optimizer
#
# Two things are trained, and they start from different places. The transformer knows its language
# already, and should hardly move. The value head starts from random weights, and has far to go.

# %%
from rlhf_lab.training import get_optimizer  # exercise

# %% [markdown]
# (`with_8bit_moments(optimizer)`, imported above the second function, is for models so large that
# Adam's moments do not fit next to them (`args.optimizer="adamw_8bit"`). The check does not
# try it.)

# %%
from rlhf_lab.training import lr_scale  # exercise

# %%
from rlhf_lab.training import get_optimizer_and_scheduler  # exercise

# %%
for warmup, final in [(2, 0.1), (0, 0.1), (5, 1.0)]:
    scales = [lr_scale(phase, warmup, 8, final) for phase in range(8)]
    row = " ".join(f"{scale:.2f}" for scale in scales)
    print(f"warm-up {warmup}, final {final}: {sparkline(scales)}  {row}")

# %% [markdown]
# ## The rollout phase
#
# Now the two halves themselves. They are functions of the trainer, which holds the parts: the
# policy, the reference, the optimizer, the reward function. The rollout phase samples, scores,
# compares, and spreads the credit. All the pieces exist; you write how they hang together.
#
# What you write here is the trainer's own code: `rlhf_lab/training/ppo.py` is these functions and
# nothing else. `trainer.overrides` has the functions that are passed to the trainer (yours, soon),
# and `trainer.emit` calls the callbacks of an event; a run learns the same without it.
#
# First the credit. `F.token_rewards(rewards, mask, kl_to_pay, kl_coef)` puts the reward at the last real token and
# subtracts each token's KL times the coefficient, which is `trainer.kl_controller.kl_coef`, or 0 if `kl_to_pay` is None.
# With `args.whiten_rewards` the rewards of the tokens are whitened, and keep their mean (`shift_mean=False`).
# `F.prompt_groups(len(rewards), args.samples_per_prompt)` numbers the rows by their prompt. The estimators take
# `args` first: `estimate_advantages(args, values, rewards, mask, token_rewards, group, greedy_rewards)` and
# `estimate_returns(args, advantages, values, token_rewards, mask)`, both of `trainer.overrides`.

# %%
from rlhf_lab.training.ppo import assign_credit  # exercise

# %% [markdown]
# Then everything that is known of a batch once it is written. `trainer.rewards` is the reward
# pipeline: it calls the reward function, and standardizes with `args.normalize_reward`. To see the arguments of
# a function or the fields of a `Rollout`, run a cell with a question mark:
# `trainer.compare_with_reference?`.
#
# `trainer.compare_with_reference(samples)` runs the reference over the reviews. The policy need not run again:
# the sampler kept its last residual before each token, and the unembedding turns it into logits. While both have the
# same weights, one set of residuals serves for both, so that the KL before the first step is exactly 0.
#
# The others that you need: `trainer.objective.reference_logprobs(trainer.reference, samples, ref_residuals)` gives None where the
# KL is exact, `trainer.objective.kl_in_reward(samples, kl, ref_logprobs)` None if the KL is in the loss, and
# `trainer.rewards.greedy_rewards(samples, scores.reward_moments)` None except for ReMax.

# %%
from rlhf_lab.training.ppo import score_samples  # exercise

# %% [markdown]
# And the phase: sample, then score. `phase_generator(seed, phase, stream)` gives random numbers that
# depend on nothing else. That is how two runs of one seed can be equal to the last bit, even if one
# of them is stopped in between.

# %%
from rlhf_lab.training.ppo import rollout_phase  # exercise

# %% [markdown]
# Look at one review of your rollout. Blue tokens have an advantage above 0, orange ones below
# (hover for the number). The value head is not trained yet: who gets the credit?

# %%
mine = rollout_phase(trainer)
best = int(mine.rewards.argmax())
words = [" " + trainer.tokenizer.decode([token]) for token in mine.samples.tokens[best].tolist()]
prefix_len = mine.samples.prefix_len
show_table(["reward", "text"], [[mine.rewards[best].item(), mine.texts[best]]], digits=2)
tokens_html(words[prefix_len:], mine.advantages[best], "advantage", mine.samples.mask[best])

# %% [markdown]
# Every token gets some, and later tokens get more. Two things sort this out. In a batch of many reviews, good words
# occur in good reviews more often than in bad ones. And the value head learns: the same picture with a trained value
# head is below, after the training.
#
# ## The learning phase
#
# `objective_terms(policy, reference, minibatch, trainer.objective, kl_coef)` computes the terms of a minibatch.
# `PolicyUpdate(trainer)` is about memory and safety and not about PPO: clipping, micro-batches (its `accumulate`, which
# you do not need), and no step after something was not finite. Call `backward(terms.objective)`,
# `clip(args.max_grad_norm)`, which returns the norm before clipping, and `step()`.
#
# `PhaseStats(trainer)` counts. Before the gradient, `judge(terms, minibatch)` returns "step", "skip" or "stop";
# `add(terms, minibatch, grad_norm)` takes in a step that was taken, and `learning_stats(memory)` is what the phase
# returns. (`trainer.rewards.remember(rollout.reward_moments)` at the end is for rewards that are scaled over phases.)

# %%
from rlhf_lab.training.ppo import learning_phase  # exercise

# %% [markdown]
# ## Your trainer
#
# Both functions take the trainer as their first argument, and that makes them methods. Here is a
# trainer whose phases, minibatches, optimizer and schedule are yours, with the advantages of {lesson:rewards_and_credit}:


# %%
class MyTrainer(RLHFTrainer):
    """The package's trainer with my own phases, optimizer and schedule."""

    rollout_phase = rollout_phase
    learning_phase = learning_phase

    def __init__(self, args: RLHFArgs, **parts: Any) -> None:
        super().__init__(args, **parts)
        self.optimizer, self.scheduler = get_optimizer_and_scheduler(args, self.policy)


def my_advantages(
    values: Float[Tensor, "batch gen"],
    rewards: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch gen"],
) -> Float[Tensor, "batch gen"]:
    """My GAE, with the reward at the last real token of each review."""
    return compute_gae(values, token_rewards(rewards, mask), args.gamma, args.gae_lambda, mask)


# %% [markdown]
# Two runs of eight phases from the same seed, yours and the package's. While yours trains, a callback prints the first
# review of each phase: read what the policy writes before you look at any curve. Are their rewards the same to
# the last digit? And does the explained variance (how much of the returns the value head foresees;
# 1 is everything, 0 nothing) get near 1 within eight phases?
#
# (15 s on a single core)

# %%
same_run = "the same"  # predict: "the same" or "not the same"
variance_explained = "0.1 to 0.7"  # predict: "below 0.1", "0.1 to 0.7" or "above 0.7"

# %%
trained = MyTrainer(args, out=new_run("mine"), advantages=my_advantages)


@trained.on("after_score")
def read_one(ctx) -> None:
    """Print the first review of each phase, with its reward."""
    print(f"phase {ctx.phase}, reward {ctx.rollout.raw_rewards[0]:.2f}: {ctx.rollout.texts[0]}")


runs = {
    "mine": trained.train(),
    "the package's": RLHFTrainer(args, out=new_run("package")).train(),
}
for name, reports in runs.items():
    print(f"{name:14}", " ".join(f"{report.mean_reward:.3f}" for report in reports))
rewards_of = [[report.mean_reward for report in reports] for reports in runs.values()]
predictions.compare(
    "the two runs are", same_run, "the same" if rewards_of[0] == rewards_of[1] else "not the same"
)
final = runs["mine"][-1]
foreseen = final.explained_variance
bracket = "below 0.1" if foreseen < 0.1 else "0.1 to 0.7" if foreseen <= 0.7 else "above 0.7"
predictions.compare("explained variance in the last phase", variance_explained, bracket)

# %%
stored = stored_dashboards()
show_table(
    ["last phase, 128 reviews", "mine", "stored: seed 1", "seed 2", "seed 3"],
    [
        [line, numbers[-1], *(other[line][-1] for other in stored["healthy"])]
        for line, numbers in dashboard_of(runs["mine"]).items()
        if line in ("reward", "KL per sequence", "explained variance")
    ],
)

# %% [markdown]
# The explained variance cannot get to 1 even in principle: before the first adjective there is
# nothing in a review from which anybody could foresee its end.
#
# And who gets the credit now? The review with the lowest reward of a fresh rollout, by the trained value head:

# %%
late = trained.rollout_phase()
lowest = int(late.rewards.argmin())
spelled = [
    " " + trainer.tokenizer.decode([token]) for token in late.samples.tokens[lowest].tolist()
]
show_table(["reward", "text"], [[late.raw_rewards[lowest].item(), late.texts[lowest]]], digits=2)
tokens_html(spelled[prefix_len:], late.advantages[lowest], "advantage", late.samples.mask[lowest])

# %% [markdown]
# The blame still grows along the review, since GAE passes it back with a factor below 1 per token. After the verdict
# it falls: once the verb is sampled, the value head predicts a low reward, and a low reward that was predicted gives an
# advantage near 0.
#
# ## Reading a dashboard
#
# These are the numbers to look at, for your run. A healthy run has a ratio of 1 before the first
# step of each phase (the policy that is trained is the one that sampled), a KL that leaves 0 slowly
# and stays below a few nats, a clip fraction of a few percent at most, and an entropy that falls
# slowly.


# %%
def dashboard(found: Dashboard) -> None:
    """Show each metric in the first, a middle and the last phase, and its curve."""
    rows = []
    for name, numbers in found.items():
        curve = sparkline(numbers) if max(numbers) - min(numbers) > 5e-4 else "flat"
        rows.append([name, numbers[0], numbers[len(numbers) // 2], numbers[-1], curve])
    show_table(["", "first", "middle", "last", "lowest to highest"], rows)


show_table(["line", "field of a phase's report"], COLUMNS.items())
dashboard(dashboard_of(runs["mine"]))

# %%
phases = [report.phase for report in runs["mine"]]

# %% [markdown]
# ## A ladder of rewards
#
# "The reward goes up" proves little. A trainer with a wrong part often learns an easy reward all the same, only more
# slowly, and you do not know how fast a right one would have been. So before you train on anything that matters,
# climb a ladder of rewards that are so simple that you know in advance what must happen. Each rung needs one more
# part to be right. All rungs use texts of ten tokens, and take seconds.
#
# 1. **constant**: every text gets 1, and rewards are not normalized. There is nothing to gain. The
#    value before the last token must become 1, and the policy must not move. This is about the
#    value loss and the returns, and nothing else.
# 2. **last word**: 1 if the last word begins with a letter from a to m. The reward follows at once,
#    and no credit has to travel. This is about the sign of the objective, and about
#    log-probabilities, actions and rewards that belong together.
# 3. **first word**: the same for the first word. Now the credit has to find its way back over nine
#    tokens. This is about advantages, `lam`, masks.
# 4. **the real thing**: the classifier.

# %%
print("a climb changes of SETTINGS:", dict(LADDER_FIELDS))
for reward_fn in (constant, last_word, first_word):
    print(f"\n{inspect.getsource(reward_fn)}", end="")

# %% [markdown]
# Three trainers climb it besides yours, with one wrong part each. Read the wrong parts, and say for
# each which rung is the first that it falls from (or 4, if it passes these three). Their climbs are
# stored, three seeds of each, and those of the package's own trainer (`python -m tools.course.hunt_runs climbs`
# climbs again). Yours climbs here.

# %%
for parts in WRONG_CLIMBERS.values():
    for part in parts.values():
        print(inspect.getsource(part), end="\n\n")

# %%
one_token_late_falls_from = 1  # predict: 1, 2, 3 or 4
shifted_logprobs_falls_from = 2  # predict: 1, 2, 3 or 4
credit_for_the_last_falls_from = 3  # predict: 1, 2, 3 or 4

# %% [markdown]
# (12 s on a single core)

# %%
my_climb = {
    rung: climb(SETTINGS, rung, dict(advantages=my_advantages), MyTrainer) for rung in RUNGS
}
look = MyTrainer(RLHFArgs(**SETTINGS | LADDER_FIELDS), reward_fn=last_word)
untrained = look.rollout_phase().raw_rewards.mean().item()
stored_ladder = stored_climbs()
falls = {name: [falls_from(figures) for figures in runs] for name, runs in stored_ladder.items()}


def with_range(numbers: list[float], digits: int = 2) -> str:
    """Mean, lowest and highest."""
    mean = sum(numbers) / len(numbers)
    return f"{mean:.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


rows = [["mine", *(f"{my_climb[rung]:.2f}" for rung in RUNGS), falls_from(my_climb)]]
rows += [
    [
        name,
        *(with_range([figures[rung] for figures in of_seeds]) for rung in RUNGS),
        ", ".join(map(str, falls[name])),
    ]
    for name, of_seeds in stored_ladder.items()
]
show_table(["trainer", *RUNGS, "falls from"], rows)
print(f"mine: one run; the others: mean (lowest to highest) of {len(falls['healthy'])} seeds")
print(f"last word, untrained: {untrained:.2f}; {look.args.batch_size} texts")

# %%
for name, guess in [
    ("one token late", one_token_late_falls_from),
    ("shifted log-probs", shifted_logprobs_falls_from),
    ("credit for the last", credit_for_the_last_falls_from),
]:
    usual = max(falls[name], key=falls[name].count)
    predictions.compare(f"{name!r} falls from rung", guess, usual)

# %% [markdown]
# Each rung catches what the others let through. The trainer whose advantages are one token late is the most
# dangerous: it *learns* both words as if nothing were wrong, since with `lam` near 1 neighboring tokens have nearly
# equal advantages. Only the constant reward shows that its values go wrong. And crediting the last token alone got a
# higher reward on rung 2 with all three seeds than the healthy trainer did: there the last token is all that matters, and the other tokens only
# add noise.
#
# You have climbed rung 4 above, where the classifier was the reward.
#
# ## Three bugs to find
#
# Three runs on the real reward, each with one wrong part. This time you do not see the part, only
# the dashboard. The runs are stored, three seeds of each kind; seed 1 is shown below. Somewhere
# among these suspects are the three culprits:

# %%
for number, suspect in enumerate(SUSPECTS, start=1):
    print(f"{number}. {suspect}")

# %%
broken = {run: stored[culprit(run)][0] for run in ("A", "B", "C")}
show_table(
    ["reward in phase", *(str(phase) for phase in phases)],
    [
        [name, *(f"{reward:.2f}" for reward in numbers["reward"])]
        for name, numbers in {"mine, healthy": dashboard_of(runs["mine"]), **broken}.items()
    ],
)

# %%
print("run A")
dashboard(broken["A"])

# %%
print("run B")
dashboard(broken["B"])

# %%
print("run C")
dashboard(broken["C"])

# %% [markdown]
# Numbers hide what a policy writes. Three reviews of each run, written after its last step:

# %%
my_late = list(zip(late.raw_rewards.tolist(), late.texts, strict=True))[:3]
texts_of = {"mine, healthy": my_late} | {run: stored_texts()[culprit(run)] for run in broken}
show_table(
    ["run", "reward", "text"],
    [[name, *row] for name, written in texts_of.items() for row in written],
    digits=2,
)

# %% [markdown]
# Compare each with your own dashboard above, line by line. Which lines are as they should be, and
# which cannot be? What would each suspect do to that line? Then name the culprits by their numbers.

# %%
culprit_of_a = 8  # predict: a number from 1 to 8
culprit_of_b = 5  # predict: a number from 1 to 8
culprit_of_c = 7  # predict: a number from 1 to 8

# %%
for run, guess in [("A", culprit_of_a), ("B", culprit_of_b), ("C", culprit_of_c)]:
    predictions.compare(f"culprit of run {run}", guess, SUSPECTS.index(culprit(run)) + 1)
    print(f"run {run}: {culprit(run)}\n")
    print(reveal(run))

# %% [markdown]
# Is it the same with other seeds? The dashboards of a healthy run and of all eight suspects are stored for three seeds
# each. In the last phase (mean, lowest and highest of the three seeds, 128 reviews each):

# %%
of_run = {"healthy": "healthy"} | {run: culprit(run) for run in ("A", "B", "C")}
show_table(
    ["last phase", "reward", "KL per sequence", "explained variance"],
    [
        [
            name,
            *(
                with_range([numbers[line][-1] for numbers in stored[kind]])
                for line in ("reward", "KL per sequence", "explained variance")
            ),
        ]
        for name, kind in of_run.items()
    ],
)

# %% [markdown]
# How it could be seen:
#
# - **A** gets the reward of the healthy run, or more. But its KL is exactly 0 in every phase, while its reward rises from
#   about 0.5 to above 0.9. A policy that has changed its texts has moved away from its start, so what it is compared
#   with must have moved along. Look twice at a number that is *exactly* 0 or 1.
# - **B** hardly learns: its reward wanders, far below the healthy one. Ratio, KL, clipping and gradient norm are all
#   as they should be. The clue is the explained variance, which stays near 0. With advantages of the wrong sign, or
#   one token late, the value head does learn something (see the stored dashboards below). Here it cannot: its targets
#   have nothing to do with its states.
# - **C** begins like the healthy run, and for six phases its reward does not give it away. But the KL penalty, a
#   number that cannot be negative, is below 0, and in the last phases the KL grows to tens of nats per review.
#   Entropy, which falls in a healthy run, rises. KL is *rewarded* here, so the policy writes tokens that the reference
#   finds almost impossible: read its three texts.
#
# **What to inspect** when a run looks wrong:
#
# | you see | look at | because |
# |---|---|---|
# | the ratio is not 1 on the first minibatch | log-probabilities, temperature | before the first step the policy *is* the one that sampled |
# | KL stays at exactly 0 | the reference | it must be a copy, and frozen |
# | KL grows without end | sign and size of the KL penalty | a larger KL increases the objective, or does not change it |
# | reward stays flat, explained variance at 0 | which reward goes with which row | there is nothing in the states that could predict a stranger's reward |
# | reward stays flat, explained variance goes up | log-probabilities, first ratio | values and their targets agree, but the credit goes to the wrong tokens |
# | value loss grows, explained variance is high | the positions of the advantages | values drift all together, which explained variance does not see |
# | reward falls | the sign of the advantages or of the objective | the policy is taught the opposite |
# | explained variance far below 0 | value loss, returns | values run away from their targets (or the returns are all the same, and there is nothing to explain) |
# | reward rises | nothing is proven | a wrong trainer can learn an easy reward: climb the ladder above |
#
# ## Your own alarm
#
# You will not look at every run. Design a function that does: it is given the dashboard of a finished run, all lines
# and phases, and returns whether a part of the trainer is broken. There are no steps and no one right answer. The
# check compares it with the stored dashboards: it must stay silent at every healthy run, and go off at every broken one.
#
# Look at them first. What does each line tell, and where would you draw the line so that *another* seed is on the
# right side of it, too? One suspect gets nearly the reward of a healthy run and has *more* explained variance. Explained
# variance does not see an error that is the same everywhere; which line does?

# %%
for line in ("reward", "explained variance", "value loss", "first ratio"):
    show_table(
        [f"{line}: first, middle and last phase", "seed 1", "seed 2", "seed 3"],
        [
            [kind, *(" ".join(f"{run[line][i]:.2f}" for i in (0, 4, -1)) for run in of_kind)]
            for kind, of_kind in stored.items()
        ],
    )

# %%
from rlhf_lab.course.exercises.alarm import alarm  # exercise

# %% [markdown]
# Now runs that it has not seen: yours, and two kinds that are healthy but different, with half the
# learning rate and with 3 times the KL penalty. These are stored, too, three seeds of each. Does your alarm
# stay silent for all six?

# %%
silent_for_all = "yes"  # predict: "yes" or "no"

# %%
unseen = {"mine": [dashboard_of(runs["mine"])], **stored_others()}
rings = {name: sum(map(alarm, dashboards)) for name, dashboards in unseen.items()}
show_table(
    ["run", "alarms", "of"], [[name, rings[name], len(of_kind)] for name, of_kind in unseen.items()]
)
others_ring = sum(rings[name] for name in stored_others())
predictions.compare("silent for all six", silent_for_all, "no" if others_ring else "yes")

# %% [markdown]
# A threshold that was fitted to three seeds of one setting is a claim about that setting. Signs of something
# *impossible* (a KL of exactly 0 after a step, a negative penalty, a first ratio that is not 1) carry over to other
# settings; signs of something *unusual* (a low explained variance, a slow reward) need new thresholds there.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - `reveal` shows how a part is broken. Pass one of the other suspects yourself, and see whether a
#   friend finds it from the dashboard.
# - Climb the ladder with `lam` 0 in `my_advantages`: at which rung does it fall, and what has to
#   happen before it can pass? ({Lesson:rewards_and_credit} has the answer.)
# - Give the constant reward to a trainer *with* normalized rewards. Every reward is 0 then. Why does
#   the policy move all the same? (Look at what whitening does to advantages that are nearly 0.)
#
# ## Investigations
#
# Each takes an hour or two. Write down first what you expect, and what would change your mind.
#
# - **How often may a rollout be used?** Hypothesis: more passes help until the ratios leave the clip range, and hurt
#   after that. Vary `batches_per_learning_phase` over 1, 2, 4 and 8 with three seeds each. Plot the reward and the
#   clip fraction after the same number of *optimizer steps*, and after the same number of *reviews*. Which of the two
#   is the fair comparison when sampling is expensive? (Schulman et al. 2017,
#   [1707.06347](https://arxiv.org/abs/1707.06347), use several passes; Andrychowicz et al. 2020,
#   [2006.05990](https://arxiv.org/abs/2006.05990), vary this among many other choices.)
# - **Which implementation details matter here?** PPO's gains over simpler methods were found to come largely from
#   details of the code: Engstrom et al. 2020 ([2005.12729](https://arxiv.org/abs/2005.12729)); for RLHF, Huang et al.
#   2024 ([2403.17031](https://arxiv.org/abs/2403.17031)). Switch one thing off at a time (`normalize_reward`, the
#   warm-up, `max_grad_norm`, whitening of advantages, the small last layer of the value head), with three seeds. A
#   difference counts if its range over the seeds does not overlap with that of the unchanged run.
# - **A better ladder.** Design a rung that "advantages one token late" falls from and that does not need the values:
#   a reward for one word at one position, with `lam` 0.5. Show with three seeds that it separates the two trainers.
#   (The idea of probe environments: Andy Jones, "Debugging RL, without the agonizing pain", 2021.)
# - **Is PPO needed at all?** With one pass per rollout the ratio is 1 at every step but the last few, and PPO is close
#   to REINFORCE with a baseline. Ahmadian et al. 2024 ([2402.14740](https://arxiv.org/abs/2402.14740)) argue that this
#   is enough for language models. Compare `advantages="rloo"` with `samples_per_prompt=4` at the same number of
#   reviews, with three seeds, on reward *and* KL.
# - **How noisy is a step?** Keep the gradient of each minibatch (a callback on "after_backward"), and take the cosine
#   between those of one phase. Does it grow with `batch_size`, as McCandlish et al. 2018
#   ([1812.06162](https://arxiv.org/abs/1812.06162)) describe with their gradient noise scale? What does it predict
#   about the largest useful batch?
