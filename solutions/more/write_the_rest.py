# %% [markdown]
# # Write the rest
#
# By the end of this lesson you can write the functions that the lessons give or only mention.
#
# Each exercise is independent of the others. The formulas are in the docstrings.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. The cells run in a few seconds.

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
# Add the real scores of each sequence.

# %%
from rlhf_lab.functional import sequence_sum  # exercise

# %% [markdown]
# ## Terms of the objective, from {lesson:the_objective}
#
# The entropy of the policy at each token, and the bonus for it. `entropy_per_token` takes the output of `log_probs`.

# %%
from rlhf_lab.functional import entropy_per_token  # exercise

# %%
from rlhf_lab.functional import calc_entropy_bonus  # exercise

# %% [markdown]
# The ratio of new to old probability. `MAX_LOG_RATIO` limits the difference from above only: the exponential of a very
# negative number is 0, which does no harm.

# %%
from rlhf_lab.functional import policy_ratio  # exercise

# %% [markdown]
# The loss of the value head. With a `clip`, a value cannot make its error small by jumping away from its old value.

# %%
from rlhf_lab.functional import calc_value_function_loss  # exercise

# %% [markdown]
# ## Sampling and hooks, from {lesson:the_policy}
#
# Draw a token from each row with one random number. It is the first token whose cumulative probability is greater
# than the number; a token of probability 0 must never be drawn.

# %%
from rlhf_lab.sampling import draw_token  # exercise

# %% [markdown]
# An *ablation* replaces the output of heads, by zeros or by their mean over the batch. The mean removes only what
# distinguishes the texts. Copy the activation before you write into it.

# %%
from rlhf_lab.diffing import ablate_heads  # exercise

# %% [markdown]
# The recovered fraction with its interval. `bootstrap_means(*columns, statistic=...)` gives the interval of a statistic of
# the means of columns, and `bootstrap_interval` that of any statistic. If the interval of clean minus corrupted includes 0,
# return `Interval(None, None, None, n, level, why="...")`.

# %%
from rlhf_lab.functional import recovered_fraction  # exercise

# %% [markdown]
# ## Residual streams
#
# The value head reads the residual stream after the final norm, without the gain and bias of the norm. Bring the residual
# stream of any layer to the same point, as if no later layer existed.

# %%
from rlhf_lab.probes.value_lens import normalize_residual  # exercise

# %% [markdown]
# Ablation removes a direction from activations. ({Lesson:watch_it_learn} shows how little it proves without a control.)

# %%
from rlhf_lab.probes.direction import ablate  # exercise

# %% [markdown]
# ## Rewards and credit, from {lesson:rewards_and_credit}
#
# The probability of the rewarded class, by a classifier. Texts of different length are padded: pass the attention mask.

# %%
from rlhf_lab.rewards import sentiment_reward  # exercise

# %% [markdown]
# Rewards with mean 0 and standard deviation 1, and 0 if all are equal.

# %%
from rlhf_lab.functional import normalize_reward  # exercise

# %% [markdown]
# The reward minus the mean of the other rewards of the same prompt.

# %%
from rlhf_lab.functional import rloo_advantages  # exercise

# %% [markdown]
# One-step advantages, which are GAE with lambda 0, and returns, the targets of the value head.

# %%
from rlhf_lab.functional import compute_advantages  # exercise

# %%
from rlhf_lab.functional import compute_returns  # exercise

# %% [markdown]
# Each row of `gradients` is the gradient of a review or of a block. A batch is n consecutive rows, and rows left over at
# the end are not used. The result has one cosine for each batch.

# %%
from rlhf_lab.functional import gradient_cosine  # exercise

# %% [markdown]
# ## The implicit reward, from {lesson:preferences}
#
# The reward for which a policy is optimal, up to a constant.

# %%
from rlhf_lab.functional import implicit_rewards  # exercise

# %% [markdown]
# ## LoRA
#
# To tune a policy you need all its weights, their gradients, two moments of the optimizer, and a copy of the weights for the
# reference. *LoRA* (Hu et al. 2021, [2106.09685](https://arxiv.org/abs/2106.09685)) freezes a weight $W$ and learns a change of
# low rank:
#
# $$W' = W + \frac{\alpha}{r} A B, \qquad A: \text{inputs} \times r, \quad B: r \times \text{outputs}$$
#
# Without the adapters, the same weights are the reference. With $G$ the gradient for $W'$,
#
# $$\nabla_A = \frac{\alpha}{r}\, G B^\top, \qquad \nabla_B = \frac{\alpha}{r}\, A^\top G$$
#
# If A and B both start at 0, both gradients are always 0. If neither does, the first policy is not the reference. So B starts
# at 0, and A as noise of variance 1 / inputs, so $xA$ has about the size of $x$. (`merged` in the exercise is the finished sum,
# which the trainer sets while it samples a batch, and None otherwise.)

# %%
from rlhf_lab.models.lora import LoRALinear  # exercise

# %% [markdown]
# ## A KL budget, from {lesson:the_kl_penalty}
#
# `solve(beta)` returns reward and KL of the optimum. Find the beta between `1e-4` and `1e4` whose optimum has a given KL,
# and raise `ValueError` if no beta has it.

# %%
from rlhf_lab.organism import best_at_budget  # exercise

# %% [markdown]
# ## Numbers that warn
#
# The variety of a batch of texts, from {lesson:what_breaks_it}:

# %%
from rlhf_lab.functional import distinct_n  # exercise

# %% [markdown]
# The words that have gained the most probability, whether or not they were sampled (an alarm of `docs/investigations.md`):

# %%
from rlhf_lab.functional import promoted_mass  # exercise

# %%
progress()
