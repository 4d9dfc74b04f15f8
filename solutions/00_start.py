# %% [markdown]
# # 00 Start
#
# By the end of this lesson, you will be able to train a small language model with RLHF on a reward function you wrote yourself,
# and to catch the model cheating.
#
# First, you run the RLHF loop once and learn the key terms by following a single review through it. Then you write your first
# functions and train the model on your own reward twice: once with a penalty for drifting away from the original model, and
# once without it.
#
# **You will also be able to**
# - name the parts of the RLHF loop: policy, state, action, reward, value, advantage, reference, KL;
# - fill in a function in a notebook, and understand what its check reports;
# - explain why padding must be left out of a mean;
# - write a reward function, and recognize reward hacking when you see it.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 40 seconds on one CPU core and needs no internet access. Cells
# that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import copy
import textwrap

import torch
from IPython.display import display
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress, show_table
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.functional import zero_masked
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.views import curves, loop_diagram, tokens_html

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=8,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
)
over_seeds = SeedFigures("start", SETTINGS)  # this run next to stored runs of other seeds
predictions = Predictions()

# %% [markdown]
# The first two lines turn on runtime shape checking. `SETTINGS` specifies the model and the reward. In this lesson, you use
# Reel, a tiny language of movie reviews, together with a two-layer transformer trained to generate it. If you have a GPU and
# internet access, you can set `preset` to `gpt2-medium`, but the results quoted in the text are for Reel.
#
# ## Why RLHF exists
#
# A language model learns to continue text the way people write it. But *likely* text is not the same as *wanted* text. The most
# likely continuation of a question may be another question, and the most likely review of a bad movie is a bad review. Nobody
# knows how to write a differentiable loss for "helpful" or "true". What people can do is look at two texts and pick the better
# one.
#
# Reinforcement learning from human feedback turns such comparisons into a training signal, in three steps:
#
# 1. Collect comparisons: show people two texts, and record which one they prefer.
# 2. Train a **reward model** on them. It gives each text a score, its *reward*, which should be higher for texts people prefer.
# 3. Let the language model generate texts, score them with the reward model, and update the weights so that high-scoring texts
#    become more likely, while the model stays close to where it started.
#
# That last condition matters. A reward model is only reliable near the texts it was trained on, and an unconstrained language
# model will find texts where the reward model is wrong. You will see this happen below.
#
# - 2017, Christiano et al. ([1706.03741](https://arxiv.org/abs/1706.03741)): a simulated robot learns a backflip from about 900
#   comparisons.
# - 2019, Ziegler et al. ([1909.08593](https://arxiv.org/abs/1909.08593)): the same idea applied to GPT-2, with a penalty for
#   moving away from the original model. This is the method you will implement.
# - 2020, Stiennon et al. ([2009.01325](https://arxiv.org/abs/2009.01325)): summaries that people prefer to human-written ones.
# - 2022, Ouyang et al. ([2203.02155](https://arxiv.org/abs/2203.02155)): InstructGPT. ChatGPT was trained with the same method.
#
# There are no humans in the loop in this lesson. The reward comes from a classifier or a formula, so we know what should happen
# and can check whether it does. Everything downstream of the reward works exactly as it would with human feedback.
#
# ## The loop

# %%
loop_diagram()

# %% [markdown]
# Let's go around the loop once, with four reviews. Each commented line below corresponds to a box or an arrow in the diagram,
# and the number next to a box refers to the lesson that explains it.

# %%
trainer = RLHFTrainer(RLHFArgs(**SETTINGS | dict(batch_size=4, num_minibatches=1)))
samples = trainer.sample(trainer.next_prompts(), torch.Generator().manual_seed(4))  # policy writes
texts = samples.texts(trainer.tokenizer)
rewards = trainer.rewards.reward_fn(texts)  # reward
rollout = score_samples(trainer, samples, rewards)  # credit per token; KL from the reference
learned = trainer.learning_phase(rollout)  # objective, gradient steps
show_table(["reward", "text"], zip(rewards.tolist(), texts, strict=True), digits=2)

# %% [markdown]
# The reward comes from a sentiment classifier, so it is close to 1 for a positive review and close to 0 for a negative one.
#
# ## The vocabulary, on one review
#
# The model generates a review one *token* at a time, and in Reel every token is a word. The first few words, called the
# *prompt*, are given. The table below follows the best of the four reviews through its first seven tokens.

# %%
best = int(rewards.argmax())
words = [trainer.tokenizer.decode([token]) for token in samples.tokens[best].tolist()]
start = samples.prefix_len
columns = ["state: the text so far", "action: the next token", "its probability"]
show_table(
    ["t", *columns, "value of the state"],
    [
        [
            t,
            " ".join(words[1 : start + t]),
            words[start + t],
            samples.logprobs[best, t].exp().item(),
            samples.values[best, t].item(),
        ]
        for t in range(7)
    ],
)
print(f"after the last token: reward {rewards[best].item():.3f}, once, for the whole review")

# %% [markdown]
# | term | in this example |
# |---|---|
# | **policy**, $\pi(a \mid s)$ | the language model. Given the text so far, it assigns a probability to each possible next token |
# | **state**, $s_t$ | the prompt and the tokens generated so far: one row of the table |
# | **action**, $a_t$ | the token generated next |
# | **episode** | one review, from the prompt to its end |
# | **reward**, $R$ | one number for the finished review |
# | **value**, $V(s_t)$ | the reward to expect from this state, predicted by the *value head*, a small network on top of the model. It is untrained so far, so its predictions are all close to 0 |
# | **advantage**, $A_t$ | how much better things went with this token than expected. This is the credit that the token receives |
# | **reference**, $\pi_\mathrm{ref}$ | a frozen copy of the model from before training |
# | **KL** | how far the policy has moved from the reference, in *nats*. One nat is a factor of $e \approx 2.7$ in probability |
# | **rollout** | a batch of finished reviews together with all these numbers |
# | **phase** | one trip around the loop: a rollout, followed by a few gradient steps |
#
# If you know reinforcement learning from games, three things are different here. The next state is known exactly, because it is
# just the text plus one token. There is only one reward, at the very end. And the policy is already good at the start: the hard
# part is not learning to write, but changing what the reviews say without breaking them.
#
# The goal of training fits on one line. $\mathbb{E}_{x \sim \pi}$ averages over reviews $x$ generated by the policy, and
# $\beta$ is the reward we give up for one nat of KL (`beta_eff` in `run_health`; `kl_coef` is in units of the whitened advantage):
#
# $$\max_\pi \;\; \mathbb{E}_{x \sim \pi}\big[R(x)\big] \;-\; \beta \, \mathrm{KL}(\pi \,\|\, \pi_\mathrm{ref})$$
#
# ## Masks
#
# Reviews can have different lengths, but they have to fit into one tensor, with one row per review and one column per token.
# Shorter rows are therefore padded, and a *mask* is True wherever a token is real. Here are three reviews with one number per
# token. The 9s are padding.

# %%
scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 9.0, 9.0], [7.0, 8.0, 2.0, 9.0]])
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
show_table(
    ["review", "scores", "mask"],
    [[i, scores[i].tolist(), mask[i].int().tolist()] for i in range(3)],
)

# %% [markdown]
# The package's `sequence_sum` adds up the real scores in each row. Look at its signature first: `x` is a
# `Float[Tensor, "batch gen"]`, so it contains floats, with one row per sequence and one column per generated token. The result
# is `Float[Tensor, " batch"]`, one float per sequence. The function uses three helpers. `zero_masked(x, mask)` puts 0 wherever
# the mask is False, and returns `x` unchanged if there is no mask. `check_same_shape` raises an error if the shapes differ, and
# `at_least_float32` converts half precision to float32.

# %%
from rlhf_lab.functional import sequence_sum  # given

# %%
show_table(["review", "sum of its real scores"], enumerate(sequence_sum(scores, mask).tolist()))

# %% [markdown]
# ## Your first function: a masked mean
#
# The mean over real tokens is this sum divided by a count. Getting that count wrong is one of the most common bugs in RLHF
# code. One of the three fractions below is the mean of the real scores, one counts the padding in the denominator, and one
# counts it in the numerator as well. Which one is the correct mean? Replace the dots with your answer before you read on. The
# notebook keeps track of your predictions, and at the end it shows you which results surprised you.

# %%
which_mean = "38 / 9"  # predict: "38 / 9", "38 / 12" or "65 / 12"

# %% [markdown]
# Now it's your turn. The numbered lines in the docstring describe the steps. Replace the last line of the next cell with your
# code, run the cell, and then run the check below it. It goes beyond our example, and also tests other sizes, a
# single row, a single token, no mask, very large numbers, and the gradient.
#
# Run the check once before you write anything, to see what an unsolved exercise looks like. If you get stuck, run
# `hint("masked_mean")` in a new cell. Each exercise has three hints: the idea, the shapes, and finally the code itself. (Save
# `denominator` for last: it is only needed when a minibatch is split into pieces to save memory. The imported
# `real_entries(x, mask)` returns the mask, or all True if there is no mask.)
#
# | you see | it means |
# |---|---|
# | ○ not written yet | the function still ends in `raise NotImplementedError` |
# | ✗ and a table | your result next to the expected one, at the first entry that differs |
# | ✗ and an error | your function raised it; the line number is counted from the top of its cell |
# | likely: ... | the mistake that produces exactly your results |
# | `TypeCheckError` | a tensor has a different shape or dtype than the signature promises |
# | `NameError` | an earlier cell has not been run in this session |

# %%
from rlhf_lab.functional import masked_mean  # exercise

# %%
mean = masked_mean(scores, mask).item()
real, everything = scores[mask].sum().item(), scores.sum().item()
print(f"sum of the real scores {real:.0f}, of all {everything:.0f}; your mean {mean:.3f}")
candidates = {"38 / 9": 38 / 9, "38 / 12": 38 / 12, "65 / 12": 65 / 12}
nearest = min(candidates, key=lambda name: abs(candidates[name] - mean))
predictions.compare("the mean of the real scores is", which_mean, nearest)

# %% [markdown]
# Neither mistake raises an error. The result is simply wrong, and the more padding there is, the more wrong it gets.
#
# ## Your own reward
#
# Now make up a reward. It can be any function from texts to numbers, so what would you like this model to write? There are no
# steps to follow and no right answer. The check only tests that each text gets one finite float (an empty list gets none),
# always the same one, no matter which other texts are in the batch, and that not all rewards are equal.
#
# If nothing comes to mind, reward gushing praise: count the words brilliant, perfect, superb and stunning. (All Reel reviews
# have nearly the same length, so a reward for length teaches the model nothing.) The next cell prints every token that the
# model can use.

# %%
print(textwrap.fill(" ".join(sorted(trainer.tokenizer.get_vocab())[:100]), 100))

# %%
from rlhf_lab.course.exercises.rewards import my_reward  # exercise

# %% [markdown]
# The policy has no idea what you *meant*. It just finds the texts that score highest. So before you train, think like the
# policy: how could you get a high score without doing what your reward is supposed to encourage? Replace the dots with one
# sentence in quotes. It isn't graded, but you will see it again next to the policy's reviews.

# %%
cheated_by = "it will say the praise words and forget the rest"  # predict: in words

# %% [markdown]
# Next, train the model twice with your reward, starting from the same weights: once with the KL penalty (`kl_coef` 0.3) and
# once without it. Which run will end up with the higher reward, and which will end up with the higher KL?
#
# (7 s on one core)

# %%
more_reward = "without"  # predict: "with penalty", "without" or "about the same"
more_kl = "without"  # predict: "with penalty", "without" or "about the same"

# %%
trainers, reports, early = {}, {}, {}
for name, kl_coef in {"with penalty": 0.3, "without": 0.0}.items():
    args = RLHFArgs(**SETTINGS | dict(kl_coef=kl_coef))
    trainers[name] = RLHFTrainer(args, out=new_run(name), reward_fn=my_reward)
    reports[name] = []
    for report in trainers[name]:  # phase by phase: you may stop here, look, and continue
        reports[name].append(report)
        if report.phase == 0:
            early[name] = copy.deepcopy(trainers[name].policy)
    last = reports[name][-1]
    print(f"{name}: reward {last.mean_reward:.2f}, KL {last.kl_per_sequence:.2f} nats per review")


def larger_in(field: str, margin: float) -> str:
    """Name the run with the larger metric in its last phase."""
    penalized, free = (getattr(run[-1], field) for run in reports.values())
    if abs(penalized - free) < margin:
        return "about the same"
    return "with penalty" if penalized > free else "without"


spread = reports["with penalty"][-1].reward_std
predictions.compare("more reward", more_reward, larger_in("mean_reward", 0.2 * spread))
predictions.compare("more KL", more_kl, larger_in("kl_per_sequence", 0.1))

# %%
phases = [report.phase for report in reports["without"]]
means = {name: [r.mean_reward for r in run] for name, run in reports.items()}
errors = {name: [r.reward_std / args.batch_size**0.5 for r in run] for name, run in reports.items()}
curves(
    {name: (phases, means[name]) for name in reports},
    "Mean reward of the reviews, with 95 % intervals",
    y_label="mean reward",
    bands={
        name: tuple(
            [m + side * 1.96 * e for m, e in zip(means[name], errors[name], strict=True)]
            for side in (-1, 1)
        )
        for name in reports
    },
)

# %%
curves(
    {name: (phases, [r.kl_per_sequence for r in run]) for name, run in reports.items()},
    "Distance from the reference",
    y_label="KL, nats per review",
)

# %% [markdown]
# Look at the two plots together. If you rewarded the praise words, the reward goes up in both runs. The run without the penalty
# gains more, but it also moves further away from the reference. Does the same happen with your reward?
#
# Curves like these are noisy. For example, the reward for praise words dips at phase 1. Did the first learning phase make the
# policy worse, or was it just bad luck? Each band is a 95% confidence interval for the mean over one phase's reviews. Both runs
# draw the same random numbers, so a dip caused by noise would show up in both. To find out, let's generate 2,048 fresh reviews
# before the first learning phase, and 2,048 after it.
#
# (4 s on one core)

# %%
before = RLHFTrainer(RLHFArgs(**SETTINGS), reward_fn=my_reward)
many = RLHFArgs(**SETTINGS | dict(batch_size=16 * args.batch_size, seed=args.seed + 1))
rows = []
for i, (name, policy) in enumerate(
    {"before learning": before.policy, "after phase 0": early["with penalty"]}.items()
):
    fresh = RLHFTrainer(many, policy=policy, reward_fn=my_reward).rollout_phase().raw_rewards
    standard_error = fresh.std().item() / len(fresh) ** 0.5
    small = means["with penalty"][i], errors["with penalty"][i]
    rows.append([name, *small, fresh.mean().item(), standard_error])
show_table(["policy", "reward in the run", "s.e.", f"{len(fresh)} fresh", "s.e."], rows, digits=2)
is_praise = my_reward(["brilliant superb", "it was bad"]).tolist() == [2.0, 0.0]
gained = {name: run[-1].mean_reward - run[0].mean_reward for name, run in reports.items()}
if is_praise:  # the stored runs have this reward
    over_seeds.compare("reward gained", gained, digits=2)

# %% [markdown]
# For the praise words, it was just bad luck: on fresh reviews, the mean reward goes up during the first learning phase. Before
# you interpret a change in your own reward, compare it with the standard errors (s.e.) in the table. For praise words, a mean
# over 128 reviews has a standard error of 0.06 to 0.08, so differences of that size mean nothing. The dots compare your run
# with two stored runs that used different seeds. (Stored runs exist only for the praise words, so other rewards show no dots.)
#
# ### The reviews of the three policies
#
# Below are three reviews from each policy. Each word's color shows how much the reward drops if you leave that word out.


# %%
def reward_per_word(text: str) -> tuple[list[str], list[float]]:
    """Split a text into words, and compute the loss in reward without each of them."""
    words = text.split()
    without = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
    rewards = my_reward([text, *without])
    return words, (rewards[0] - rewards[1:]).tolist()


policies = {"before learning": before, **trainers}
praise, after_wasnt, rows = {"brilliant", "perfect", "superb", "stunning"}, {}, []
for name, trainer in policies.items():
    rollout = trainer.rollout_phase()
    # "wasn't so brilliant": an adverb separates them
    adjectives = [
        adjective
        for words in map(str.split, rollout.texts)
        for verb, adjective in zip(words, words[2:], strict=False)
        if verb == "wasn't"
    ]
    after_wasnt[name] = sum(word in praise for word in adjectives) / max(len(adjectives), 1)
    kl = sequence_sum(rollout.kl, rollout.samples.mask).mean().item()
    rows.append([name, rollout.raw_rewards.mean().item(), kl])
    print(name)
    for text in rollout.texts[:3]:
        words, drops = reward_per_word(text)
        display(tokens_html([f" {word} " for word in words], drops, "reward", limit=1.0))

# %%
show_table(["policy", "reward", "KL per review, nats"], rows, digits=2)
if is_praise:
    over_seeds.compare("praise words after wasn't", after_wasnt, digits=2)
predictions.recall("how it will be cheated", cheated_by)

# %% [markdown]
# If you rewarded the praise words, you will find that the policy puts them wherever an adjective fits, even after "wasn't".
# After all, "the plot wasn't so brilliant" scores just as high as "the plot was so brilliant". Before training, 17% to 21% of
# the adjectives after "wasn't" are praise words. Training raises this fraction to between 46% and 56% with the penalty, and to
# between 70% and 76% without it (ranges over three seeds). If you wrote a different reward, look for reviews that score high
# without doing what you had in mind.
#
# A reward like this one is computed correctly, but it does not measure what you meant. Exploiting this gap is called **reward
# hacking**. Krakovna et al. (2020, "Specification gaming") maintain a long list of examples. Gao et al. (2022,
# [2210.10760](https://arxiv.org/abs/2210.10760)) train policies on learned rewards, and measure how the true quality first
# rises and then falls as the policy moves away from the reference.
#
# ### A real model
#
# Does this also happen outside a toy language? Here are stored reviews from a run in which SmolLM2, a real language model,
# continues the prompt "This movie was really". The reward is the probability that the text is *negative*, as predicted by a
# sentiment classifier.

# %%
stored = stored_figures("real_samples")
show_table(["phase", "mean reward of 16", "reviews with bad"], stored["means"], digits=2)
show_table(["phase", "reward", "the first three reviews"], stored["samples"], digits=2)

# %% [markdown]
# The mean reward rises from 0.13 to 0.98, but the model has not become a critic. It has merely learned to start with the word
# "bad", which it does in 15 of 16 reviews, and then it carries on as before. {Lesson:a_real_model} looks inside such a run.
#
# That's RLHF: generate, score, step toward a higher score, and stay close to the reference. The algorithm that just took the
# gradient steps for you is PPO (proximal policy optimization, Schulman et al. 2017,
# [1707.06347](https://arxiv.org/abs/1707.06347)). In the next lessons, you take the loop apart and rebuild it:
# {lesson:the_value_head} attaches the value head with a hook, {lesson:the_objective} builds PPO's objective, and {lesson:ppo}
# adds the training loop. [The map of the lessons](README.md) shows what you can do in an evening, in a weekend, and beyond.
#
# ## Where you are

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - **Reward two things at once**, but count the first only if the second is present: for example, count praise words, but only
#   in reviews that contain "but". Does the policy find the combination, or does it settle for one of the two?
#
#   <details><summary>Results (three seeds, 8 phases)</summary>
#
#   The policy learns both. Before training, 52 to 63% of the reviews contain "but", and the average review contains 0.5 to 0.6
#   praise words. After training with the penalty, 81 to 89% contain "but", and the average review contains 1.5 to 1.6 praise
#   words. Without the penalty, those numbers are 88 to 95% and 1.9 to 2.2. Even so, 86 to 94% of these reviews are still
#   grammatical.
#
#   </details>
#
# - **Fix your reward.** Change it so that the cheat you saw no longer gets a high reward, and train again. How many rounds does
#   it take to get ten reviews in a row without a cheat? And how could you be sure that no cheat is left?
#
# Next: {lesson:the_value_head}, where you teach the model to predict the reward while it is still writing.
