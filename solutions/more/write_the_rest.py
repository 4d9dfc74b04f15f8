# %% [markdown]
# # Write the rest
#
# By the end of this lesson, you will be able to write the functions the other lessons give you or only mention.
#
# The exercises don't depend on each other, so you can do them in any order. The docstrings contain the formulas.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The cells themselves take only a few seconds.

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.course import check, hint, progress

SETTINGS = dict(preset="reel", gen_len=26, top_k=None, advantages="gae", kl_coef=0.3)

# %% [markdown]
# ## A sum, from {lesson:start}
#
# Sum the scores of each sequence, but only over its real tokens.

# %%
from rlhf_lab.functional import sequence_sum  # exercise

# %% [markdown]
# ## Terms of the objective, from {lesson:the_objective}
#
# Compute the policy's entropy at each token, and the entropy bonus. `entropy_per_token` takes the output of
# `log_probs`.

# %%
from rlhf_lab.functional import entropy_per_token  # exercise

# %%
from rlhf_lab.functional import calc_entropy_bonus  # exercise

# %% [markdown]
# Next, compute the ratio of new to old probability. `MAX_LOG_RATIO` limits the log-ratio only from above. It needs no
# lower limit, because the exponential of a very negative number is just 0.

# %%
from rlhf_lab.functional import policy_ratio  # exercise

# %% [markdown]
# The value head's loss is next. With a `clip`, a value can't reduce its loss by jumping far away from its old value.

# %%
from rlhf_lab.functional import calc_value_function_loss  # exercise

# %% [markdown]
# ## Sampling and hooks, from {lesson:the_policy}
#
# Draw one token from each row, using one random number per row. Pick the first token whose cumulative probability is
# greater than the random number. Make sure you never draw a token with probability 0.

# %%
from rlhf_lab.sampling import draw_token  # exercise

# %% [markdown]
# An *ablation* replaces the output of some heads, either with zeros or with the mean over the batch. Mean ablation only
# removes what differs between the texts. Copy the activation before you write to it.

# %%
from rlhf_lab.diffing import ablate_heads  # exercise

# %% [markdown]
# Compute the recovered fraction and its interval. You can use `bootstrap_means(*columns, statistic=...)`, which returns
# the interval for a statistic of column means, or `bootstrap_interval`, which works for any statistic. If the interval
# of clean minus corrupted includes 0, return `Interval(None, None, None, n, level, why="...")`.

# %%
from rlhf_lab.functional import recovered_fraction  # exercise

# %% [markdown]
# ## Residual streams
#
# The value head reads the residual stream after the final norm, but without the norm's gain and bias. Apply the same
# normalization to the residual stream of any layer, as if there were no later layers.

# %%
from rlhf_lab.probes.value_lens import normalize_residual  # exercise

# %% [markdown]
# You can also ablate a single direction by removing it from the activations. ({Lesson:watch_it_learn} shows how little
# this proves without a control.)

# %%
from rlhf_lab.probes.direction import ablate  # exercise

# %% [markdown]
# ## Rewards and credit, from {lesson:rewards_and_credit}
#
# Use a classifier to compute the probability of the rewarded class. Because texts have different lengths, they are
# padded, so don't forget to pass the attention mask.

# %%
from rlhf_lab.rewards import sentiment_reward  # exercise

# %% [markdown]
# Normalize rewards to mean 0 and standard deviation 1. If all rewards are equal, return 0 for each of them.

# %%
from rlhf_lab.functional import normalize_reward  # exercise

# %% [markdown]
# For RLOO, subtract from each reward the mean of the other rewards for the same prompt.

# %%
from rlhf_lab.functional import rloo_advantages  # exercise

# %% [markdown]
# Compute one-step advantages, which are GAE with lambda 0, and the returns, which are the value head's targets.

# %%
from rlhf_lab.functional import compute_advantages  # exercise

# %%
from rlhf_lab.functional import compute_returns  # exercise

# %% [markdown]
# Measure how well each batch's mean gradient agrees with a reference gradient. Each row of `gradients` is the gradient
# of one review, or of a block of reviews. Every n consecutive rows form a batch, and leftover rows at the end are
# dropped. Return one cosine similarity per batch.

# %%
from rlhf_lab.functional import gradient_cosine  # exercise

# %% [markdown]
# ## The implicit reward, from {lesson:preferences}
#
# Every policy is optimal for some reward. Compute this reward, up to a constant.

# %%
from rlhf_lab.functional import implicit_rewards  # exercise

# %% [markdown]
# ## LoRA
#
# To fine-tune all of a policy's weights, you have to keep the weights, their gradients, two optimizer moments, and a
# second copy of the weights as the reference. *LoRA* (Hu et al. 2021, [2106.09685](https://arxiv.org/abs/2106.09685))
# needs much less: it freezes each weight $W$ and only learns a low-rank change.
#
# $$W' = W + \frac{\alpha}{r} A B, \qquad A: \text{inputs} \times r, \quad B: r \times \text{outputs}$$
#
# You don't need a separate reference either, because without the adapters, the same weights *are* the reference. If $G$
# is the gradient with respect to $W'$, the gradients of the adapters are
#
# $$\nabla_A = \frac{\alpha}{r}\, G B^\top, \qquad \nabla_B = \frac{\alpha}{r}\, A^\top G$$
#
# How should you initialize them? If A and B both start at 0, both gradients are 0 and nothing is ever learned. If both
# start out random, the initial policy differs from the reference. So B starts at 0, and A starts as noise with variance
# 1 / inputs, so that $xA$ is about the same size as $x$. (In the exercise, `merged` is the finished sum of weight and
# adapters. The trainer sets it while sampling; otherwise it is None.)

# %%
from rlhf_lab.models.lora import LoRALinear  # exercise

# %% [markdown]
# ## A KL budget, from {lesson:the_kl_penalty}
#
# `solve(beta)` returns the reward and KL of the optimum. Find the beta between `1e-4` and `1e4` whose optimum has a
# given KL. If there is no such beta, raise a `ValueError`.

# %%
from rlhf_lab.organism import best_at_budget  # exercise

# %% [markdown]
# ## Numbers that warn
#
# Measure the variety of a batch of texts, as in {lesson:what_breaks_it}:

# %%
from rlhf_lab.functional import distinct_n  # exercise

# %% [markdown]
# Find the words that have gained the most probability, even if they were never sampled. (`docs/investigations.md` uses
# this as an alarm.)

# %%
from rlhf_lab.functional import promoted_mass  # exercise

# %%
progress()
