# %% [markdown]
# # 02 The objective
#
# By the end of this lesson, you will be able to write PPO's objective with a KL penalty, and train a policy with it.
#
# For each minibatch, PPO computes one number, the objective, and takes a gradient step that increases it:
#
# $$J(\theta) = L^{\mathrm{clip}}(\theta) - L^{V}(\theta) + c_H H(\theta) - \beta \, \mathrm{KL}(\theta)$$
#
# The four terms are the clipped surrogate, the value loss, the entropy bonus and the KL penalty. A *surrogate* stands in for
# the expected reward: you can compute it from samples, and at the first step it has the same gradient. You write the surrogate,
# the penalty and the sum. The other two terms are given.
#
# **You will also be able to**
# - test whether the policy you are training is the one that generated the samples;
# - predict where the gradient of the clipped surrogate is zero;
# - explain why PPO for language models needs both a clip *and* a KL penalty.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 45 seconds on one CPU core and needs no internet access. Cells
# that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import torch
from IPython.display import display
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress, show_table
from rlhf_lab.functional import generated_logits, generated_values, log_probs, masked_mean
from rlhf_lab.models import unembed_residuals
from rlhf_lab.training import ReplayMemory
from rlhf_lab.views import curves, tokens_html

SETTINGS = dict(
    preset="reel",
    total_phases=8,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    seed=1,
)
predictions = Predictions()
over_seeds = SeedFigures("the_objective", SETTINGS)  # this run next to stored runs of other seeds

# %% [markdown]
# As before, you use Reel, a two-layer transformer trained to generate it, and a sentiment classifier as the reward.
#
# Notation: $a_t$ is the $t$-th generated token, and $s_t$ is the text before it. $\pi$ is the policy, $\pi_\mathrm{old}$ is the
# policy that generated the samples, and $\pi_\mathrm{ref}$ is the reference. $R$ is a review's reward, $V$ is the value head,
# and $A_t$ is the advantage.
#
# ## A policy that has learned a little
#
# At the start, the policy is identical to the reference, so every KL is 0 and there is nothing to see yet. Let's first train
# for five phases with the package's functions.
#
# (4 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("warm-up"))
warm_up = [trainer.run_phase() for _ in range(5)]
print("reward by phase:", " ".join(f"{report.mean_reward:.3f}" for report in warm_up))
rollout = trainer.rollout_phase()
rows = zip(rollout.raw_rewards[:3].tolist(), rollout.texts[:3], strict=True)
show_table(["reward", "text"], rows, digits=2)

# %% [markdown]
# The learning phase splits a rollout into minibatches. Here we take one of them, and run the policy and the reference on it.
#
# Keep in mind that the logits at a position predict the *next* token, so the logits for the first generated token are at
# position `prefix_len - 1`. `generated_logits` and `generated_values` keep only the positions right before each generated
# token. From here on, every tensor has shape `[batch gen]` or `[batch gen d_vocab]`. `mask` is True for real tokens. A review
# may be padded after its stop token, and this padding must be left out of every mean.

# %%
memory = ReplayMemory(rollout, args.num_minibatches, passes=1)  # each review is used once
minibatch = next(memory.get_minibatches(torch.Generator().manual_seed(0)))
prefix_len, mask = minibatch.prefix_len, minibatch.mask

with torch.no_grad():
    all_logits, all_values = trainer.policy(minibatch.tokens, minibatch.attention_mask)
    logits = generated_logits(all_logits, prefix_len)
    values = generated_values(all_values, prefix_len)
    # the rollout stores the final residual stream of the reference, which gives its logits
    ref_logits = unembed_residuals(trainer.reference, minibatch.ref_residuals)

scored_logits = all_logits
if minibatch.support is not None:  # sampling was restricted to the top k tokens
    scored_logits = minibatch.support.restrict(all_logits, prefix_len)

print("tokens    ", list(minibatch.tokens.shape), "of which prompt:", prefix_len)
print("logits    ", list(logits.shape))
print("values    ", list(values.shape))
print("real tokens", int(mask.sum()), "of", mask.numel())

# %% [markdown]
# The minibatch also contains an advantage for each token: how much better this token was than expected. To compute it, the
# trainer first rescales the rewards to mean 0 and standard deviation 1, and then combines them with the values.
# {Lesson:rewards_and_credit} derives the second step.
#
# ## Log-probabilities
#
# PPO changes how likely the sampled tokens are, so everything starts from their log-probabilities. Let $z$ be the logits at the
# position before token $t$, and let $T$ be the temperature that the sampler divides the logits by (1 in this lesson). Then:
#
# $$\log \pi(a_t \mid s_t) = \frac{z_{a_t}}{T} - \log \sum_v e^{z_v / T}$$

# %%
from rlhf_lab.functional import get_logprobs  # given

# %% [markdown]
# The minibatch also stores log-probabilities, which the sampler computed token by token while it generated the reviews.
# `get_logprobs` computes them in a single forward pass over the finished reviews. The policy has not been updated in between.
# Up to rounding, will the two results be equal or different?

# %%
same_policy = "equal"  # predict: "equal" or "different"

# %%
logprobs = get_logprobs(scored_logits, minibatch.tokens, prefix_len, args.temperature)
gap = (logprobs - minibatch.logprobs)[mask].abs().max().item()
print(f"largest difference: {gap:.0e}")
predictions.compare(
    "log-probabilities in one pass and the sampler's are",
    same_policy,
    "equal" if gap < 1e-3 else "different",
)

# %% [markdown]
# They are equal. This comparison catches many bugs, such as an off-by-one index, a forgotten temperature or a forgotten top-k.
# The trainer runs the same check in every phase and warns you if the results differ.
#
# ## The KL penalty
#
# As it learns, the policy drifts away from the reference. The KL divergence measures how far it has drifted. In each state, the
# KL is the policy's log-probability of the next token minus the reference's, averaged over the policy's distribution:
#
# $$\mathrm{KL}_t = \sum_v \pi(v \mid s_t) \big(\log \pi(v \mid s_t) - \log \pi_\mathrm{ref}(v \mid s_t)\big)$$

# %%
from rlhf_lab.functional import kl_per_token  # given

# %% [markdown]
# Here is the KL at each token of two reviews. The darker a token, the larger the KL in the state before it (hover for numbers).

# %%
policy_logprobs = log_probs(logits, args.temperature)  # of the whole vocabulary
reference_logprobs = log_probs(ref_logits, args.temperature)
kl = kl_per_token(policy_logprobs, reference_logprobs)
for row in range(2):
    ids = minibatch.tokens[row, prefix_len:].tolist()
    words = [f" {trainer.tokenizer.decode([token])} " for token in ids]
    display(tokens_html(words, kl[row], "KL", mask[row], kl.max().item(), "sequential"))
ordered = kl[mask].sort(descending=True).values
tenth = (ordered[: len(ordered) // 10].sum() / ordered.sum()).item()
print(f"{len(ordered)} tokens; the 10 % with the most KL account for {tenth:.0%} of all KL")

# %% [markdown]
# The policy has changed its mind about the words that carry an opinion, and about hardly anything else.
#
# The penalty in the objective is a single number: the mean KL over all real tokens, times a coefficient. Write this function
# now. (You don't have to do anything with `denominator`; just pass it on to `masked_mean`.)

# %%
from rlhf_lab.functional import calc_kl_penalty  # exercise

# %%
penalty = calc_kl_penalty(kl, args.kl_coef, mask)
print(f"KL penalty at kl_coef {args.kl_coef}: {penalty.item():.5f}")

# %% [markdown]
# ## Entropy
#
# The entropy $H(\pi) = -\sum_v \pi(v) \log \pi(v)$ measures how undecided the policy is. It is 0 if one token has probability
# 1, and $\log n$ if $n$ tokens are equally likely. A small entropy bonus keeps the policy from committing too early. The bonus
# is the masked mean of the entropy, times `ent_coef` (which is 0 for Reel).

# %%
from rlhf_lab.functional import entropy_per_token  # given

# %%
from rlhf_lab.functional import calc_entropy_bonus  # given

# %%
for name, of_model in {"policy": policy_logprobs, "reference": reference_logprobs}.items():
    entropy = masked_mean(entropy_per_token(of_model), mask).item()
    print(f"entropy of the {name}: {entropy:.3f} nats per token")

# %% [markdown]
# ## The clipped surrogate
#
# This is the term that learns from rewards. We'll derive it in four steps.
#
# **1. The gradient of an expected reward** is
# $\nabla \mathbb{E}_{x \sim \pi}[R(x)] = \mathbb{E}_{x \sim \pi}\big[R(x) \sum_t \nabla \log \pi(a_t \mid s_t)\big]$. In words:
# make a review's tokens more likely in proportion to its reward. This follows from $\nabla \pi = \pi \nabla \log \pi$, as
# {lesson:rewards_and_credit} shows.
#
# **2. Advantages instead of rewards.** You can subtract a baseline such as $V(s_t)$ from the reward. On average, this changes
# nothing, because $\mathbb{E}_{a \sim \pi}[\nabla \log \pi(a)] = 0$, but it reduces noise. What is left of the reward, roughly
# $R(x) - V(s_t)$, is the advantage $A_t$.
#
# **3. Samples from an older policy.** We want to take several steps on one rollout, but after the first step, the policy is no
# longer the one that generated the samples. To correct for this, weight each token by the ratio
# $r_t = \pi(a_t \mid s_t) / \pi_\mathrm{old}(a_t \mid s_t)$. Because
# $\mathbb{E}_{a \sim \pi_\mathrm{old}}[r A] = \mathbb{E}_{a \sim \pi}[A]$, we can then maximize the mean of $r_t A_t$. At the
# first step, $r = 1$ and $\nabla r = \nabla \log \pi$, so the gradient of this mean *is* the policy gradient.

# %%
from rlhf_lab.functional import policy_ratio  # given

# %% [markdown]
# **4. The clip.** The ratio corrects for how likely each token is under the new policy, but not for how likely the text before
# it is. Also, $r_t A_t$ has no upper bound, so a single sample could keep making a token with $A > 0$ more and more likely. PPO
# therefore stops rewarding a token once its ratio has left $[1 - \epsilon, 1 + \epsilon]$ *in the direction of its advantage*:
#
# $$L^{\mathrm{clip}} = \operatorname{mean}_t \, \min\big(r_t A_t, \; \operatorname{clip}(r_t, 1 - \epsilon, 1 + \epsilon) \, A_t\big)$$
#
# Your function can use two helpers: `zero_masked(x, mask)` puts 0 wherever the mask is False, and `whiten(x, mask, eps=eps)`
# rescales `x` to mean 0 and standard deviation 1 over the real tokens.

# %%
from rlhf_lab.functional import calc_clipped_surrogate_objective  # exercise

# %% [markdown]
# Consider a single token with a negative advantage (-1) that has nevertheless become *more* likely (its ratio is 1.5). If
# `clip_coef` is 0.2, is the gradient of this token's surrogate zero or not?

# %%
ratio_high_advantage_negative = "not zero"  # predict: "zero" or "not zero"


# %%
def token_surrogate(log_ratio: Tensor, advantage: float) -> Tensor:
    """Compute the surrogate of one token with your function."""
    return calc_clipped_surrogate_objective(
        log_ratio, torch.zeros(1, 1), torch.tensor([[advantage]]), clip_coef=0.2, normalize=False
    )


log_ratio = torch.tensor([[1.5]]).log().requires_grad_()
slope = torch.autograd.grad(token_surrogate(log_ratio, -1.0), log_ratio)[0].item()
predictions.compare(
    "r = 1.5, A = -1: the gradient is",
    ratio_high_advantage_negative,
    "not zero" if slope else "zero",
)
ratios = torch.linspace(0.4, 1.6, 61).tolist()
curves(
    {
        f"A = {a:+.0f}": (
            ratios,
            [token_surrogate(torch.tensor([[r]]).log(), a).item() for r in ratios],
        )
        for a in (1.0, -1.0)
    },
    "The surrogate of one token, clip_coef 0.2",
    "r, new over old probability",
    "surrogate",
)

# %% [markdown]
# Wherever a curve is flat, the gradient is zero. The minimum makes the two curves asymmetric: if a token with a negative
# advantage has become more likely, PPO pulls it back, no matter how far it has moved.
#
# Before the first step, every ratio is 1, and the advantages of a minibatch are whitened to mean 0, so the surrogate is 0. Is
# its gradient zero as well?

# %%
gradient_at_start = "not zero"  # predict: "zero" or "not zero"

# %%
new = minibatch.logprobs.clone().requires_grad_()
surrogate = calc_clipped_surrogate_objective(
    new, minibatch.logprobs, minibatch.advantages, args.clip_coef, mask
)
slope = torch.autograd.grad(surrogate, new)[0]
print(f"surrogate {surrogate.item():.0e}, largest gradient {slope.abs().max().item():.0e}")
predictions.compare(
    "gradient where the surrogate is 0", gradient_at_start, "not zero" if slope.any() else "zero"
)

# %% [markdown]
# It is not. So don't judge a run by its surrogate, which is near 0 at the start of every phase. Look at the reward instead.
#
# ## The value loss
#
# Before each token, the value head predicts the outcome of the review. Its target is the return
# $G_t = A_t + V_\mathrm{old}(s_t)$. The loss is half the squared error, times a coefficient $c_V$ (`vf_coef`):
#
# $$L^V = \frac{c_V}{2} \operatorname{mean}_t \big(V(s_t) - G_t\big)^2$$

# %%
from rlhf_lab.functional import calc_value_function_loss  # given

# %% [markdown]
# ## The whole objective
#
# Now write the sum, with one function call per term. There are no numbered steps this time, because the formula at the top of
# the lesson is all you need. Pass each function its coefficient and the mask. (The surrogate whitens the advantages itself.)

# %%
from rlhf_lab.course.exercises.objective import whole_objective  # exercise

# %%
objective = whole_objective(
    logprobs,
    minibatch.logprobs,
    minibatch.advantages,
    values,
    minibatch.returns,
    entropy_per_token(policy_logprobs),
    kl,
    mask,
    args.clip_coef,
    args.vf_coef,
    args.ent_coef,
    args.kl_coef,
)
value_loss = calc_value_function_loss(values, minibatch.returns, args.vf_coef, mask)
terms = f"surrogate {surrogate.item():.4f} - value loss {value_loss.item():.4f}"
print(f"objective {objective.item():.4f} = {terms} + bonus 0 - KL penalty {penalty.item():.4f}")

# %% [markdown]
# ## Your functions in the trainer
#
# You can pass each term to the trainer as a keyword argument. Train with your functions for eight phases, once each with
# `kl_coef` set to 0, 0.3 and 3. With 0.3, the first five phases should reproduce the run at the top of this lesson, which used
# the package's functions. Which `kl_coef` will lead to the highest KL in the last phase?
#
# (14 s on one core)

# %%
highest_kl = 0.0  # predict: 0.0, 0.3 or 3.0

# %%
mine = dict(
    logprobs=get_logprobs,
    clipped_surrogate=calc_clipped_surrogate_objective,
    value_loss=calc_value_function_loss,
    entropy_bonus=calc_entropy_bonus,
    kl_penalty=calc_kl_penalty,
)
trainers, runs = {}, {}
for coef in (0.0, 0.3, 3.0):
    trainers[coef] = RLHFTrainer(RLHFArgs(**SETTINGS | dict(kl_coef=coef)), **mine)
    runs[coef] = trainers[coef].train()
for name, reports in {"the package's": warm_up, "yours": runs[0.3][:5]}.items():
    print(f"{name:14}", " ".join(f"{report.mean_reward:.3f}" for report in reports))
last = {coef: reports[-1] for coef, reports in runs.items()}
predictions.compare(
    "highest KL at kl_coef", highest_kl, max(last, key=lambda coef: last[coef].kl_per_sequence)
)

# %% [markdown]
# The two runs have the same rewards, so your terms match the trainer's. If your rewards differ, start here:
#
# | you see | look at |
# |---|---|
# | KL below 0 | the formula and the mask: the exact KL is never negative |
# | KL above 0 before the first step | whether policy and reference get the same tokens: with equal weights, the KL is exactly 0 |
# | ratio is not 1 on the first minibatch | temperature, top-k, and off-by-one indices |
# | the reward and the KL stay flat | the gradient norm, `clip_fraction`, and whether `kl_coef` is too high |

# %%
curves(
    {
        f"kl_coef {coef}": ([r.kl_per_sequence for r in reports], [r.mean_reward for r in reports])
        for coef, reports in runs.items()
    },
    "Reward against distance, one mark per phase",
    "KL from the reference, nats per review",
    "mean reward",
)

# %%
for figure, name in {"reward": "mean_reward", "KL": "kl_per_sequence"}.items():
    at_end = {f"kl_coef {coef}": getattr(report, name) for coef, report in last.items()}
    over_seeds.compare(f"{figure} in the last phase", at_end, digits=2)
for coef, trained in trainers.items():
    after = trained.rollout_phase()
    print(f"kl_coef {coef}, one review: {after.raw_rewards[0].item():.2f}  {after.texts[0]}")

# %% [markdown]
# The smaller the coefficient, the further the policy moves from the reference, and the higher the reward. For both the KL and
# the reward, the ranges over three seeds don't overlap. In a run as short as this one, the penalty only lowers the reward.
# {Lesson:what_breaks_it} shows what happens in a long run without a penalty. (Each mark is a mean over only 128 reviews.)
#
# ### Why a clip *and* a KL penalty?
#
# The two limit different distances. The clip applies to *one phase*: how far can the policy move away from the policy that
# generated this rollout before the samples become stale? It resets with every rollout, so over a hundred phases, the policy can
# end up anywhere. The KL penalty applies to *the whole run*: how far are we from the language we started with? But it ignores
# whether the samples support a step. Without the clip, a single minibatch can break the policy. Without the penalty, many
# small, well-supported steps can lead the policy to the sentence that the classifier likes best.
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - **A bug on purpose.** Break one of your functions (for example, drop `kl_coef` from the KL penalty) and read the message
#   from its check. Then pass the broken function to the trainer anyway. Which number in the trainer's report reveals the bug?
#
# - **An entropy bonus.** Train with `ent_coef=0.1`. How does the bonus change the entropy and the reward?
#
#   <details><summary>Results (three seeds, last of eight phases, kl_coef 0.3)</summary>
#
#   With the bonus, the entropy is higher (1.025 to 1.043 nats per token, compared with 0.991 to 1.002 without it), but the
#   reward is lower (0.84 to 0.86, compared with 0.90 to 0.92 without it).
#
#   </details>
#
# - **No clip.** First, keep `kl_coef=0.3`, but disable clipping with a very large `clip_coef`. Then restore the clip and set
#   `kl_coef=0`. Compare the two runs after 8 phases, and again with `total_phases=40`.
#
#   <details><summary>Results (three seeds)</summary>
#
#   Without the clip, the reward is 0.90 to 0.92 after 8 phases, and the KL is 0.97 to 1.20 nats per review. After 40 phases,
#   the reward is 1.00, the KL is 1.86 to 2.03, and 97% to 99% of the reviews are grammatical. Without the penalty, the reward
#   after 40 phases is also 1.00, but the KL is 2.83 to 3.99, and only 84% to 95% of the reviews are grammatical. The gradient
#   steps in this lesson are so small that the clip is rarely needed.
#
#   </details>
#
# Next: {lesson:ppo}, where you write the training loop around this objective. (Appendix: {lesson:kl_placements}.)
