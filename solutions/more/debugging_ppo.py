# %% [markdown]
# # Debugging PPO
#
# By the end of this appendix to {lesson:ppo}, you will be able to track down a bug in a trainer from nothing but its dashboard.
#
# You'll start by writing the package's training phases yourself. Then you'll test your trainer on rewards so easy that
# you know the outcome in advance, find the bugs in three broken runs, and write an alarm that detects broken runs
# automatically.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 40 seconds on one CPU core and needs no internet
# access. The imports below take 4 of these seconds.

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import inspect
from typing import Any

import torch
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, debugging, hint, new_run, progress, show_table
from rlhf_lab.course.debugging import CULPRITS, RUNGS, SUSPECTS, falls_from
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.functional import compute_gae, token_rewards
from rlhf_lab.views import sparkline

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
# The numbers quoted in the text are for Reel, and each run you see uses a single seed. For comparison, the package ships with
# stored dashboards of healthy and broken runs, which use the same settings and three seeds each. The tables below show them
# next to your run.
#
# ## From a batch to steps
#
# Rollouts are expensive, so PPO uses each one more than once. `ReplayMemory` splits a rollout into minibatches, and the
# optimizer takes one step per minibatch. Most of the class is already there; you write `get_minibatches`. (`_take` has
# a `padded` argument: read `self.rollout.samples.is_padded` once, before the loop, and pass it in.)

# %%
from rlhf_lab.training import ReplayMemory  # exercise

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("look"))

# %% [markdown]
# ## The optimizer
#
# The transformer already knows its language, so its weights should change only a little. The value head, on the other
# hand, starts from random weights and needs a higher learning rate.

# %%
from rlhf_lab.training import get_optimizer  # exercise

# %%
from rlhf_lab.training import get_optimizer_and_scheduler  # exercise

# %% [markdown]
# ## The rollout phase
#
# Each training phase has two halves, and each half is a function that takes the trainer, whose attributes include the
# policy, the reference, the optimizer, and the reward function. The first half, the rollout phase, generates samples,
# scores them, compares them with the reference, and assigns credit. The functions for the individual steps already
# exist, and your job is to put them together.
#
# What you write here is the real thing: these functions are the ones in `rlhf_lab/training/ppo.py`. Along the way you
# will meet two attributes. `trainer.overrides` contains any functions that were passed to the trainer (soon these will
# be yours), and `trainer.emit` runs the callbacks registered for an event. You can leave out `trainer.emit`, because
# training is the same without it.
#
# Let's start with credit assignment. `F.token_rewards(rewards, mask, kl_to_pay, kl_coef)` places the reward on the last
# real token and subtracts the coefficient times each token's KL. The coefficient is `trainer.kl_controller.kl_coef`, or
# 0 if `kl_to_pay` is None. If `args.whiten_rewards` is set, you then whiten the token rewards but keep their mean
# (`shift_mean=False`). `F.prompt_groups(len(rewards), args.samples_per_prompt)` returns each row's prompt number.
# Finally, `trainer.overrides` contains the two estimators, both of which take `args` first: `estimate_advantages(args,
# values, rewards, mask, token_rewards, group, greedy_rewards)` and `estimate_returns(args, advantages, values,
# token_rewards, mask)`.

# %%
from rlhf_lab.training.ppo import assign_credit  # exercise

# %% [markdown]
# The next function takes finished samples and computes everything the learning phase needs. `trainer.rewards` is the
# reward pipeline: it calls the reward function, and standardizes the scores if `args.normalize_reward` is set. To see a
# function's arguments or the fields of a `Rollout`, run a cell that ends in a question mark, such as
# `trainer.compare_with_reference?`.
#
# `trainer.compare_with_reference(samples)` runs the reference on the reviews. You don't have to run the policy again,
# because the sampler kept the final residual stream before each token, which the unembedding turns into logits. While
# the two models have the same weights, these residuals are identical, so the KL is exactly 0 before the first step.
#
# You need three more functions, each of which may return None:
#
# - `trainer.objective.reference_logprobs(trainer.reference, samples, ref_residuals)` returns None if the KL is exact;
# - `trainer.objective.kl_in_reward(samples, kl, ref_logprobs)` returns None if the KL is part of the loss;
# - `trainer.rewards.greedy_rewards(samples, scores.reward_moments)` returns None unless you use ReMax.

# %%
from rlhf_lab.training.ppo import score_samples  # exercise

# %% [markdown]
# Now put the two together: the rollout phase samples first, and then scores the samples. Its random numbers come from
# `phase_generator(seed, phase, stream)`, which depends only on its three arguments. This is why two runs with the same
# seed are bitwise identical, even if you stop one of them and resume it later.

# %%
from rlhf_lab.training.ppo import rollout_phase  # exercise

# %% [markdown]
# ## The learning phase
#
# `objective_terms(policy, reference, minibatch, trainer.objective, kl_coef)` computes the terms of the objective for
# one minibatch.
#
# `PolicyUpdate(trainer)` does the work that isn't specific to PPO. It clips gradients, skips the step if the loss or a
# gradient isn't finite, and can split minibatches to save memory (with `accumulate`, which you don't need here). For each minibatch,
# call `backward(terms.objective)`, then `clip(args.max_grad_norm)`, which returns the norm before clipping, and then
# `step()`.
#
# `PhaseStats(trainer)` collects the metrics. Before you compute the gradient, `judge(terms, minibatch)` tells you
# whether to "step", "skip", or "stop". After each step, call `add(terms, minibatch, grad_norm)`. At the end,
# `learning_stats(memory)` returns the result of the phase. If `rollout.reward_moments` isn't None, also pass it to
# `trainer.rewards.remember`, which matters for rewards that are scaled over several phases.

# %%
from rlhf_lab.training.ppo import learning_phase  # exercise

# %% [markdown]
# ## Your trainer
#
# Both functions take the trainer as their first argument, so you can use them as methods. Here is a trainer that runs
# on your phases, minibatches, optimizer, and schedule, along with the advantages from {lesson:rewards_and_credit}:


# %%
class MyTrainer(RLHFTrainer):
    """The package's trainer with my own phases, optimizer and schedule."""

    rollout_phase = rollout_phase
    learning_phase = learning_phase

    def __init__(self, args: RLHFArgs, **parts: Any) -> None:
        super().__init__(args, **parts)
        self.optimizer, self.scheduler = get_optimizer_and_scheduler(args, self.policy)


def my_advantages(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """My GAE, with the reward at the last real token of each review."""
    return compute_gae(values, token_rewards(rewards, mask), args.gamma, args.gae_lambda, mask)


# %% [markdown]
# Now train twice from the same seed for eight phases, once with your trainer and once with the package's. Will the
# rewards match to the last digit?
#
# (15 s on one core)

# %%
same_run = "the same"  # predict: "the same" or "not the same"

# %%
trained = MyTrainer(args, out=new_run("mine"), advantages=my_advantages)
mine = trained.train()
theirs = RLHFTrainer(args, out=new_run("package")).train()
is_same = [report.mean_reward for report in mine] == [report.mean_reward for report in theirs]
predictions.compare("the two runs are", same_run, "the same" if is_same else "not the same")
stored = stored_figures("dashboards")["runs"]


# %%
def dashboard(found: dict[str, list[float]]) -> None:
    """Show each metric in the first, a middle and the last phase, and its curve."""
    rows = []
    for name, numbers in found.items():
        curve = sparkline(numbers) if max(numbers) - min(numbers) > 5e-4 else "flat"
        rows.append([name, numbers[0], numbers[len(numbers) // 2], numbers[-1], curve])
    show_table(["", "first", "middle", "last", "over the phases"], rows)


dashboard(debugging.make_dashboard(mine))

# %% [markdown]
# ## A ladder of rewards
#
# "The reward goes up" proves very little. A trainer with a bug often still learns an easy reward, just more slowly, and
# you don't know how fast a correct trainer would be. So before you train on anything that matters, climb a ladder of
# rewards so simple that you know in advance what has to happen. Each rung depends on one more part of the trainer. All
# rungs use texts of ten tokens, so they take only seconds.
#
# 1. **constant**: Every text gets a reward of 1, and rewards aren't normalized. There is nothing to gain, so the policy
#    shouldn't change, and the value before the last token should approach 1. This rung only tests the value loss and
#    the returns.
# 2. **last word**: The reward is 1 if the last word starts with a letter from a to m. The reward follows immediately,
#    so you don't need to assign credit to earlier tokens. This rung tests the sign of the objective, and whether
#    log-probs, actions, and rewards are lined up correctly.
# 3. **first word**: The reward depends on the first word in the same way. Now the credit has to reach a token nine
#    positions before the reward, so this rung tests the advantages, `lam`, and the masks.
# 4. **the real thing**: The reward comes from the classifier.
#
# Three other trainers, each with one broken part, have already climbed the ladder. The package contains their stored
# results and those of the package's trainer, with three seeds each. The cells below only run your trainer. First read the
# code of the broken parts, and predict the first rung that each trainer fails (4 if it passes the first three).

# %%
print("a climb changes of SETTINGS:", dict(debugging.LADDER_FIELDS))
wrong = [part for parts in debugging.WRONG_CLIMBERS.values() for part in parts.values()]
for function in (debugging.constant, debugging.last_word, debugging.first_word, *wrong):
    print(f"\n{inspect.getsource(function)}", end="")

# %%
one_token_late_falls_from = 1  # predict: 1, 2, 3 or 4
shifted_logprobs_falls_from = 2  # predict: 1, 2, 3 or 4
credit_for_the_last_falls_from = 3  # predict: 1, 2, 3 or 4

# %% [markdown]
# (12 s on one core)

# %%
parts = dict(advantages=my_advantages)
my_climb = {rung: debugging.climb(SETTINGS, rung, parts, MyTrainer) for rung in RUNGS}
stored_ladder = stored_figures("bug_hunt")["climbs"]
falls = {name: [falls_from(climbed) for climbed in runs] for name, runs in stored_ladder.items()}
rows = [["mine", *(my_climb[rung] for rung in RUNGS), str(falls_from(my_climb))]]
for name, climbs in stored_ladder.items():
    means = [sum(climbed[rung] for climbed in climbs) / len(climbs) for rung in RUNGS]
    rows.append([name, *means, ", ".join(map(str, falls[name]))])
show_table(["trainer", *RUNGS, "falls from"], rows, digits=2)
print("mine: one run; the others: means of three seeds")

# %%
for name, guess in [
    ("one token late", one_token_late_falls_from),
    ("shifted log-probs", shifted_logprobs_falls_from),
    ("credit for the last", credit_for_the_last_falls_from),
]:
    usual = max(falls[name], key=falls[name].count)
    predictions.compare(f"{name!r} falls from rung", guess, usual)

# %% [markdown]
# Each rung catches a bug the others miss. The most dangerous trainer is the one whose advantages are one token late. It
# *learns* both word rewards as if nothing were wrong, because with `lam` near 1, neighboring tokens have nearly equal
# advantages. Only the constant reward shows that its values are wrong. Also note that on rung 2, the trainer that only
# credits the last token gets a higher mean reward than the healthy one. The reason is that only the last token matters
# there, so credit for any other token is just noise.
#
# ## Three bugs to find
#
# Here are three more runs on the real reward, each with one broken part. This time you only see their dashboards. Each
# kind of run is stored with three seeds, and the cells below show seed 1. The three bugs are among these suspects:

# %%
for number, suspect in enumerate(SUSPECTS, start=1):
    print(f"{number}. {suspect}")

# %%
broken = {run: stored[CULPRITS[run]][0] for run in ("A", "B", "C")}
for name, numbers in broken.items():
    print("run", name)
    dashboard(numbers)

# %% [markdown]
# Compare each dashboard with your run's dashboard above, row by row. Which rows look normal, and which ones can't
# possibly be right? How would each suspect change these rows? Once you have decided, enter the culprits' numbers.

# %%
culprit_of_a = 8  # predict: a number from 1 to 8
culprit_of_b = 5  # predict: a number from 1 to 8
culprit_of_c = 7  # predict: a number from 1 to 8

# %%
for run, guess in [("A", culprit_of_a), ("B", culprit_of_b), ("C", culprit_of_c)]:
    predictions.compare(f"culprit of run {run}", guess, SUSPECTS.index(CULPRITS[run]) + 1)

# %% [markdown]
# Here is how you could have found them:
#
# - **A** reaches at least as high a reward as the healthy run. But its KL is exactly 0 in every phase, while the reward
#   rises from about 0.5 to above 0.9. A policy that generates different texts must have moved away from where it
#   started, so the reference must have moved with it. Be suspicious of any number that is *exactly* 0 or 1.
# - **B** hardly learns anything: its reward fluctuates and stays far below the healthy run's. Ratio, KL, clipping, and
#   gradient norm all look fine. The clue is the explained variance, which stays near 0. If the advantages had the wrong
#   sign, or were one token late, the value head would still learn something (see the stored dashboards below). In run B
#   it can't, because its targets have nothing to do with its states.
# - **C** starts out like the healthy run, and for six phases you can't tell it apart by its reward. But the KL penalty,
#   which can never be negative in a correct trainer, is below 0, and in the last phases the KL grows to tens of nats
#   per review. The entropy, which falls in a healthy run, rises here. This run *rewards* KL, so the policy learns to
#   produce tokens the reference considers almost impossible.
#
# **What to inspect** when a run looks wrong:
#
# | you see | look at | because |
# |---|---|---|
# | the first minibatch's ratio isn't 1 | log-probs, temperature | before the first step, the policy *is* the policy that generated the samples |
# | KL stays at exactly 0 | the reference | it must be a copy, and it must be frozen |
# | KL keeps growing | sign and size of the KL penalty | with the wrong sign or size, a larger KL increases the objective or hardly changes it |
# | reward is flat, explained variance stays at 0 | whether rewards and rows match | a state contains no information about another text's reward |
# | reward is flat, explained variance goes up | log-probs, first ratio | values match their targets, but the wrong tokens get the credit |
# | value loss grows, explained variance is high | the positions of the advantages | all values drift together, which explained variance doesn't notice |
# | reward falls | the sign of the advantages or of the objective | the policy learns the opposite of what you want |
# | explained variance is far below 0 | value loss, returns | values run away from their targets (or all returns are equal, and there is no variance to explain) |
# | reward rises | the reward ladder above | this proves nothing, because even a broken trainer can learn an easy reward |
#
# ## Your own alarm
#
# You won't look at every run yourself, so write a function that does. It receives the dashboard of a finished run, with
# all metrics and phases, and returns True if part of the trainer is broken. There is no single right answer, so this
# exercise has no steps. The check runs your alarm on the stored dashboards, where it must stay silent for every healthy
# run and go off for every broken one.
#
# Look at the stored dashboards first. Which metrics separate the broken runs from the healthy ones? Where would you put
# a threshold, so that runs with *other* seeds also end up on the right side of it? One suspect is particularly
# difficult: its reward is nearly as high as a healthy run's, and its explained variance is even *higher*. The explained
# variance does not detect an error that is the same for all values. Which metric does?

# %%
for line in ("reward", "explained variance", "value loss"):
    rows = [
        [kind, *(" ".join(f"{run[line][i]:.2f}" for i in (0, 4, -1)) for run in of_kind)]
        for kind, of_kind in stored.items()
    ]
    show_table([f"{line}: first, middle and last phase", "seed 1", "seed 2", "seed 3"], rows)

# %%
from rlhf_lab.course.exercises.debugging_ppo import alarm  # exercise

# %% [markdown]
# Now try your alarm on runs it hasn't seen. One is your own. The others are stored healthy runs with different settings
# and three seeds each: half the learning rate, and three times the KL penalty. Will your alarm stay silent for all of
# these runs?

# %%
silent_for_all = "yes"  # predict: "yes" or "no"

# %%
unseen = {"mine": [debugging.make_dashboard(mine)], **stored_figures("bug_hunt")["others"]}
rings = {name: sum(map(alarm, dashboards)) for name, dashboards in unseen.items()}
show_table(["run", "alarms", "of"], [[name, rings[name], len(unseen[name])] for name in unseen])
predictions.compare("silent for all six", silent_for_all, "no" if any(rings.values()) else "yes")

# %% [markdown]
# If you choose a threshold based on three seeds of one setting, it may only work for that setting. Conditions that are
# *impossible* in a correct trainer, such as a KL of exactly 0 after a step, a negative penalty, or a first ratio that
# isn't 1, work with any settings. Conditions that are merely *unusual*, such as a low explained variance or slow
# progress, need new thresholds for new settings.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - Build one of the other bugs into a trainer, and see whether a friend can find it from the dashboard.
# - Train on the constant reward *with* reward normalization. Every reward is now 0. Why does the policy move anyway?
#   (Think about what whitening does to advantages that are nearly 0.)
