# %% [markdown]
# # Debugging PPO
#
# By the end of this appendix to {lesson:ppo} you can find a bug in a trainer from its dashboard alone.
#
# First you write the package's own phases, then you train with them on rewards that are so easy that you know the
# result in advance, find three bugs, and write an alarm for broken runs.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work, and about 40 CPU seconds without a network, 4 of them for these imports.

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
# The numbers in the text come from Reel. One run is one seed; the package has stored the dashboards of healthy and of
# broken runs with these settings, three seeds of each, and the tables below show them next to yours.
#
# ## From a batch to steps
#
# A rollout is expensive, and so it is used more than once. `ReplayMemory` splits it into minibatches, and the
# optimizer takes a step with each. Most of the class exists. Write `get_minibatches`. (`_take` has an argument `padded`:
# read `self.rollout.samples.is_padded` once, before the loop.)

# %%
from rlhf_lab.training import ReplayMemory  # exercise

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("look"))

# %% [markdown]
# ## The optimizer
#
# The transformer is already trained on its language, and its weights should change little. The value head starts from
# random weights, and needs a higher learning rate.

# %%
from rlhf_lab.training import get_optimizer  # exercise

# %%
from rlhf_lab.training import get_optimizer_and_scheduler  # exercise

# %% [markdown]
# ## The rollout phase
#
# A phase of training has two halves, and each is a function of the trainer, which has the policy, the reference, the
# optimizer and the reward function. The rollout phase samples, scores, compares with the reference, and assigns credit.
# The functions for each step exist; you write the code that combines them.
#
# What you write here is the trainer's own code: `rlhf_lab/training/ppo.py` has these functions and the objective.
# `trainer.overrides` has the functions that are passed to the trainer (yours, soon), and `trainer.emit` calls the
# callbacks of an event; a run learns the same without it.
#
# First the credit. `F.token_rewards(rewards, mask, kl_to_pay, kl_coef)` puts the reward at the last real token and
# subtracts each token's KL times the coefficient, which is `trainer.kl_controller.kl_coef`, or 0 if `kl_to_pay` is
# None. With `args.whiten_rewards` the rewards of the tokens are whitened, and keep their mean (`shift_mean=False`).
# `F.prompt_groups(len(rewards), args.samples_per_prompt)` numbers the rows by their prompt. The estimators take
# `args` first: `estimate_advantages(args, values, rewards, mask, token_rewards, group, greedy_rewards)` and
# `estimate_returns(args, advantages, values, token_rewards, mask)`, both of `trainer.overrides`.

# %%
from rlhf_lab.training.ppo import assign_credit  # exercise

# %% [markdown]
# Next, compute everything that learning needs from finished samples. `trainer.rewards` is the reward pipeline: it calls the
# reward function, and standardizes with `args.normalize_reward`. To see the arguments of a function or the fields of
# a `Rollout`, run a cell with a question mark: `trainer.compare_with_reference?`.
#
# `trainer.compare_with_reference(samples)` runs the reference over the reviews. The policy need not run again: the
# sampler kept its last residual before each token, and the unembedding turns it into logits. While both have the same
# weights, one set of residuals serves for both, so the KL before the first step is exactly 0.
#
# The others that you need: `trainer.objective.reference_logprobs(trainer.reference, samples, ref_residuals)` gives
# None where the KL is exact, `trainer.objective.kl_in_reward(samples, kl, ref_logprobs)` None if the KL is in the
# loss, and `trainer.rewards.greedy_rewards(samples, scores.reward_moments)` None except for ReMax.

# %%
from rlhf_lab.training.ppo import score_samples  # exercise

# %% [markdown]
# The rollout phase samples, then scores. The random numbers of `phase_generator(seed, phase, stream)` depend on its
# three arguments only. So two runs of one seed are bitwise identical, even if one of them is stopped and resumed.

# %%
from rlhf_lab.training.ppo import rollout_phase  # exercise

# %% [markdown]
# ## The learning phase
#
# `objective_terms(policy, reference, minibatch, trainer.objective, kl_coef)` computes the terms of a minibatch.
# `PolicyUpdate(trainer)` does what is not specific to PPO: it clips gradients, splits minibatches to save memory (with
# `accumulate`, which you do not need), and takes no step if a number is not finite. Call `backward(terms.objective)`,
# `clip(args.max_grad_norm)`, which returns the norm before clipping, and `step()`.
#
# `PhaseStats(trainer)` collects metrics. Before the gradient, `judge(terms, minibatch)` returns "step", "skip" or "stop";
# after a step, call `add(terms, minibatch, grad_norm)`. The phase returns `learning_stats(memory)`. (`trainer.rewards.remember(rollout.reward_moments)` at the end is for rewards that are scaled over phases.)

# %%
from rlhf_lab.training.ppo import learning_phase  # exercise

# %% [markdown]
# ## Your trainer
#
# Both functions take the trainer as their first argument, and that makes them methods. Here is a trainer whose
# phases, minibatches, optimizer and schedule are yours, with the advantages of {lesson:rewards_and_credit}:


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
# Two runs of eight phases from the same seed, yours and the package's. Are their rewards the same to the last digit?
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
stored = debugging.stored_dashboards()


# %%
def dashboard(found: dict[str, list[float]]) -> None:
    """Show each metric in the first, a middle and the last phase, and its curve."""
    rows = []
    for name, numbers in found.items():
        curve = sparkline(numbers) if max(numbers) - min(numbers) > 5e-4 else "flat"
        rows.append([name, numbers[0], numbers[len(numbers) // 2], numbers[-1], curve])
    show_table(["", "first", "middle", "last", "lowest to highest"], rows)


dashboard(debugging.make_dashboard(mine))

# %% [markdown]
# ## A ladder of rewards
#
# "The reward goes up" proves little. A trainer with a bug often still learns an easy reward, only more slowly, and
# you do not know how fast a correct trainer would be. So before you train on anything that matters,
# climb a ladder of rewards that are so simple that you know in advance what must happen. Each rung needs one more
# part to be right. All rungs use texts of ten tokens, and take seconds.
#
# 1. **constant**: every text gets 1, and rewards are not normalized. There is nothing to gain. The value before the
#    last token must become 1, and the policy must not move. This is about the value loss and the returns, and nothing
#    else.
# 2. **last word**: 1 if the last word begins with a letter from a to m. The reward follows immediately, so no credit
#    has to be assigned to earlier tokens. This is about the sign of the objective, and about log-probabilities, actions and rewards that belong
#    together.
# 3. **first word**: the same for the first word. The credit has to be assigned to a token nine positions before
#    the reward. This is about advantages, `lam` and masks.
# 4. **the real thing**: the classifier.
#
# Three trainers climb it in addition to yours, each with one wrong part. Read the wrong parts, and predict for each the
# first rung that it fails (4 if it passes these three). Their climbs and those of the package's own trainer are stored,
# three seeds of each. Yours climbs here.

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
stored_ladder = debugging.stored_hunt("climbs")
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
# Each rung catches what the others let through. The trainer whose advantages are one token late is the most
# dangerous: it *learns* both words as if nothing were wrong, since with `lam` near 1 neighboring tokens have nearly
# equal advantages. Only the constant reward shows that its values go wrong. And crediting the last token alone got a
# higher reward on rung 2 on average than the healthy trainer: there the last token is all that matters,
# and the other tokens only add noise.
#
# ## Three bugs to find
#
# Three runs on the real reward, each with one wrong part. This time you do not see the part, only the dashboard. The
# runs are stored, three seeds of each kind; seed 1 is shown below. The three culprits are among these suspects:

# %%
for number, suspect in enumerate(SUSPECTS, start=1):
    print(f"{number}. {suspect}")

# %%
broken = {run: stored[CULPRITS[run]][0] for run in ("A", "B", "C")}
for name, numbers in broken.items():
    print("run", name)
    dashboard(numbers)

# %% [markdown]
# Compare each with your own dashboard above, line by line. Which lines are normal, and which are impossible?
# What would each suspect do to such a line? Then name the culprits by their numbers.

# %%
culprit_of_a = 8  # predict: a number from 1 to 8
culprit_of_b = 5  # predict: a number from 1 to 8
culprit_of_c = 7  # predict: a number from 1 to 8

# %%
for run, guess in [("A", culprit_of_a), ("B", culprit_of_b), ("C", culprit_of_c)]:
    predictions.compare(f"culprit of run {run}", guess, SUSPECTS.index(CULPRITS[run]) + 1)

# %% [markdown]
# How it could be seen:
#
# - **A** gets the reward of the healthy run, or more. But its KL is exactly 0 in every phase, while its reward rises
#   from about 0.5 to above 0.9. A policy that has changed its texts has moved away from its start, so what it is
#   compared with must have moved along. Look twice at a number that is *exactly* 0 or 1.
# - **B** hardly learns: its reward wanders, far below the healthy one. Ratio, KL, clipping and gradient norm are all
#   as they should be. The clue is the explained variance, which stays near 0. With advantages of the wrong sign, or
#   one token late, the value head does learn something (see the stored dashboards below). Here it cannot: its targets
#   have nothing to do with its states.
# - **C** begins like the healthy run, and for six phases its reward does not give it away. But the KL penalty, a
#   number that cannot be negative, is below 0, and in the last phases the KL grows to tens of nats per review.
#   Entropy, which falls in a healthy run, rises. KL is *rewarded* here, so the policy writes tokens that the
#   reference finds almost impossible.
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
# check compares it with the stored dashboards: it must stay silent at every healthy run, and go off at every broken
# one.
#
# Look at them first. What does each line tell, and where would you draw the line so that *another* seed is on the
# right side of it, too? One suspect gets nearly the reward of a healthy run and has *more* explained variance.
# Explained variance does not see an error that is the same everywhere; which line does?

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
# Now runs that it has not seen: yours, and two kinds that are healthy but different, with half the learning rate and
# with 3 times the KL penalty. These are stored, too, three seeds of each. Does your alarm stay silent for all six?

# %%
silent_for_all = "yes"  # predict: "yes" or "no"

# %%
unseen = {"mine": [debugging.make_dashboard(mine)], **debugging.stored_hunt("others")}
rings = {name: sum(map(alarm, dashboards)) for name, dashboards in unseen.items()}
show_table(["run", "alarms", "of"], [[name, rings[name], len(unseen[name])] for name in unseen])
predictions.compare("silent for all six", silent_for_all, "no" if any(rings.values()) else "yes")

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
# - Pass one of the other suspects to a trainer yourself, and see whether a friend finds it from the dashboard.
# - Give the constant reward to a trainer *with* normalized rewards. Every reward is 0 then. Why does the policy move
#   all the same? (Look at what whitening does to advantages that are nearly 0.)
