# %% [markdown]
# # 06 The KL penalty and the optimal policy
#
# By the end of this lesson, you will be able to compute the exact optimal policy for any KL penalty, and measure how close PPO
# gets to it.
#
# How far should a policy move away from its reference? With a real language model, the only way to find out is to train and
# see. Reel's grammar is so small that you can compute the answer instead: for every penalty strength, there is exactly one best
# policy. You will derive this policy, compute it token by token, and compare PPO with it.
#
# **You will also be able to**
# - explain what the exact KL and the estimators k1, k2 and k3 measure, and which of them to trust for a single token;
# - read a plot of reward against KL, and explain why the frontier has slope $\beta$;
# - predict where PPO and best-of-n sampling land on that plot.
#
# **If your run's KL looks odd**
#
# | you see | look at | because |
# |---|---|---|
# | the reward stays below what you know is possible | your run next to the frontier | the penalty may be too strong, or the run too short |
# | KL grows late in the run although `kl_coef` is fixed | the standard deviation of the rewards | with normalized rewards, the same coefficient becomes a weaker penalty |
# | two runs with the same `kl_coef` end at different KL | whether `kl_in` is `"loss"` or `"reward"` | the two placements have different optima |
#
# **You need** {lesson:start} (policy, reference, KL) and {lesson:rewards_and_credit} (values, exact advantages).
# Everything in this lesson runs on Reel.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 35 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.functional import best_of_n_kl_bound, log_probs
from rlhf_lab.organism import Grammar, GraphPolicy, best_of_n, build_graph, frontier
from rlhf_lab.organism import grammar_policy, optimal_policy, token_information, true_reward
from rlhf_lab.probes import ReelTruth
from rlhf_lab.views import bars, curves

SETTINGS = dict(
    preset="reel",
    seed=1,
    reward_fn="true_reward",
    total_phases=24,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    gae_lambda=1.0,
    normalize_reward=False,
    normalize_advantages=False,
    kl_coef=0.3,
    kl_in="reward",
    kl_estimator="k1",
)
predictions = Predictions()
reference = grammar_policy(build_graph(Grammar()))
final_rewards = true_reward.score(reference.graph.final_features())
print("states of a review:", sum(map(len, reference.graph.states)))
print(f"mean reward of the reference: {reference.mean(final_rewards):.3f}")

# %% [markdown]
# Here the reference is the Reel grammar itself, which the bundled transformer was trained to imitate. A review's reward is
# `true_reward`: the exact probability that the review is positive.
#
# ## Exact KL
#
# The *KL divergence*, measured in *nats*, tells you how far the policy is from the reference. It is an average over texts
# sampled from the *policy*:
#
# $$\mathrm{KL}(\pi \,\|\, \mathrm{ref}) = \mathbb{E}_{x \sim \pi}\Big[\log \frac{\pi(x)}{\mathrm{ref}(x)}\Big]
# = \mathbb{E}_{x \sim \pi}\Big[\sum_t \mathrm{KL}_t(s_t)\Big], \qquad \mathrm{KL}_t(s) = \sum_a \pi(a \mid s) \log
# \frac{\pi(a \mid s)}{\mathrm{ref}(a \mid s)} \ge 0$$
#
# The second form is the *chain rule*: a review's KL is the sum of its tokens' KLs. This lets you find the tokens where a policy
# differs from its reference.
#
# `log_probs(logits)` returns log-probabilities over the whole vocabulary. A token with probability 0 gets -1e30 rather than
# -inf, because 0 times -inf is nan. If the policy can sample a token that has probability 0 under the reference, the true KL is
# infinite. In that case, your sum will come out absurdly large, far above `MAX_KL` (which is already imported).

# %%
from rlhf_lab.functional import kl_per_token  # exercise

# %% [markdown]
# KL is not symmetric. To see what this means in practice, suppose the reference has two peaks, but the policy can only have
# one. Which single peak minimizes the KL? In $\mathrm{KL}(\pi \,\|\, \mathrm{ref})$, each word is weighted by its probability
# under the *policy*. In $\mathrm{KL}(\mathrm{ref} \,\|\, \pi)$, it is weighted by its probability under the *reference*. RLHF
# uses the first one. Will the best policy cover one peak or both? (The cell splits the words into two halves, and prints how
# much probability this policy puts on the less likely half.)

# %%
policy_side = "one peak"  # predict: "one peak" or "both peaks"

# %%
words = torch.arange(60.0)


def peak(center: Float[Tensor, "*n"], width: Float[Tensor, "*n"]) -> Float[Tensor, "*n words"]:
    """Compute logits of a normal curve over 60 words."""
    return -((words - center[..., None]) ** 2) / (2 * width[..., None] ** 2)


left, right, width = torch.tensor(15.0), torch.tensor(45.0), torch.tensor(3.0)
two = torch.logaddexp(peak(left, width), peak(right, width))
centers, widths = torch.meshgrid(torch.arange(5.0, 55.0), torch.arange(2.0, 25.0), indexing="ij")
single = peak(centers.flatten(), widths.flatten())[None]
log_single, log_two = log_probs(single), log_probs(two.expand_as(single))
first = single[0, kl_per_token(log_single, log_two)[0].argmin()].softmax(-1)
second = single[0, kl_per_token(log_two, log_single)[0].argmin()].softmax(-1)
on_the_right = first[30:].sum().item()
bins = {"one peak": 0.2, "both peaks": 0.8}
beyond = min(on_the_right, 1 - on_the_right)
predictions.compare("KL(policy || reference) covers", policy_side, beyond, bins=bins)
peaks = {
    "reference": two.softmax(-1),
    "least KL(policy || reference)": first,
    "least KL(reference || policy)": second,
}
drawn = {name: (words.tolist(), y.tolist()) for name, y in peaks.items()}
curves(drawn, "The closest single peak", "word", "probability")

# %% [markdown]
# RLHF uses KL(policy || reference) for two reasons. It can be estimated from the policy's own samples, and it penalizes text
# the reference would never write. Note that it does not protect diversity: a policy that always writes the same
# high-probability text can still be close to the reference.
#
# ## Estimates of the KL
#
# Computing the KL exactly requires both full distributions at every token. Often, you only have the log-probabilities of the
# sampled tokens, so you need an estimator. With $d = \log \pi(a) - \log \mathrm{ref}(a)$:
#
# - **k1** $= d$. Its mean under $\pi$ *is* the KL, but individual values can be negative and vary a lot.
# - **k3** $= e^{-d} - 1 + d$. It is never negative, and its mean is also the KL, because $\mathbb{E}_{a \sim \pi}[e^{-d}]
#   = \sum_a \mathrm{ref}(a) = 1$. (With top-k sampling this sum is less than 1, which makes k3 too small.)
# - **k2** $= d^2 / 2$. For small $d$ it is almost the same as k3. Its mean is not the KL, but it comes close when $d$ is
#   small.
#
# You only need to implement these three; the package also supports others.

# %%
from rlhf_lab.functional import kl_estimate  # exercise

# %% [markdown]
# Let's compare the estimators on a reference distribution over 1,000 words, with one policy close to it and one far from it.
# The cell samples many words from each policy. For the close policy, k3 has a smaller standard deviation than k1. Which of the
# two has the smaller standard deviation for the distant policy?

# %%
smaller_spread_far = "k1"  # predict: "k1" or "k3"

# %%
generator, n, rows = torch.Generator().manual_seed(0), 100_000, []
ref_logits, change = torch.randn(2, 1, 1, 1000, generator=generator)
for name, size in {"close": 0.3, "far": 2.0}.items():
    logits = ref_logits + size * change
    exact = kl_per_token(log_probs(logits), log_probs(ref_logits)).item()
    drawn = torch.multinomial(logits[0, 0].softmax(-1), n, True, generator=generator)
    pair = [x.log_softmax(-1)[0, :, drawn] for x in (logits, ref_logits)]
    estimates = {kind: kl_estimate(*pair, kind).double() for kind in ("k1", "k2", "k3")}
    for kind, x in estimates.items():
        row = [exact, x.mean().item(), 1.96 * x.std().item() / n**0.5, x.std().item()]
        rows.append([f"{name}: {kind}", *row])
show_table(["policy", "exact KL", "mean", "+-", "standard deviation"], rows, digits=4)
spread = {kind: estimates[kind].std().item() for kind in ("k1", "k3")}
predictions.compare("smaller spread far from it", smaller_spread_far, min(spread, key=spread.get))
low, high, count = -4.0, 12.0, 16
histogram = lambda x: (torch.histc(x.clamp(low, high), count, low, high) / n).tolist()
bars(
    [f"{low + i:g}" for i in range(count - 1)] + ["11 or more"],
    {k: histogram(x) for k, x in estimates.items()},
    "Estimates from one token, far from the reference, by the lower edge of each bin",
    "fraction of the tokens",
)

# %% [markdown]
# Both k1 and k3 have the right mean, while k2 does not. Far from the reference, most k3 values are closer together than the k1
# values. But $e^{-d}$ is enormous for the few words that are much more likely under the reference than under the policy. Those
# words end up in the last bin, and they are the reason k3 has the larger standard deviation.
#
# ## The best policy for one choice
#
# With a penalty of $\beta$ per nat, RLHF maximizes a single number:
#
# $$J(\pi) = \sum_x \pi(x)\, r(x) - \beta \sum_x \pi(x) \log \frac{\pi(x)}{\mathrm{ref}(x)}$$
#
# Define $\pi^*(x) = \mathrm{ref}(x)\, e^{r(x) / \beta} / Z$, where $Z = \sum_x \mathrm{ref}(x)\, e^{r(x) / \beta}$ makes
# the probabilities sum to 1. Solve this for the reward, $r(x) = \beta \log \frac{\pi^*(x)}{\mathrm{ref}(x)} + \beta \log
# Z$, and substitute it into $J$. For *any* policy you get:
#
# $$J(\pi) = \beta \log Z - \beta\, \mathrm{KL}(\pi \,\|\, \pi^*)$$
#
# The first term does not depend on $\pi$. The second is 0 at $\pi^*$ and negative everywhere else. So $\pi^*$ is the
# optimum, and **RLHF minimizes the KL to $\pi^*$**, no matter which method you train with. Reweighting a distribution by
# $e^{r / \beta}$ is called *tilting* it:

# %%
from rlhf_lab.functional import tilt  # exercise

# %%
endings = ["i liked it", "it was fine", "i loved it", "it was perfect"]
chances, rewards = torch.tensor([0.6, 0.3, 0.09, 0.01]), torch.tensor([0.5, 0.4, 0.9, 1.0])
tilted = {beta: tilt(chances, rewards, beta).tolist() for beta in (1.0, 0.3, 0.1, 0.03)}
factors = zip(endings, chances.tolist(), (rewards / 0.3).exp().tolist(), tilted[0.3], strict=True)
show_table(["ending", "reference", "× exp(reward / 0.3)", "÷ Z = best policy"], factors)

# %%
names = [f"{e}: reward {r:.1f}" for e, r in zip(endings, rewards.tolist(), strict=True)]
series = {"reference": chances.tolist()} | {f"beta {beta}": row for beta, row in tilted.items()}
bars(names, series, "The best policy over four endings", "probability")

# %% [markdown]
# When the penalty is weak, the ending with the highest reward becomes the most likely one, even though the reference hardly
# ever uses it. With a moderate penalty, "i loved it" is the most likely, because its reward is nearly as high and choosing it
# costs less KL.
#
# ## Token by token
#
# A policy doesn't choose a whole review at once. It chooses one token at a time, so we need the optimum at each state.
# Define the *soft value* $W$ of a state:
#
# $$W(x) = \frac{r(x)}{\beta} \text{ at the end}, \qquad
# W(s) = \log \sum_a \mathrm{ref}(a \mid s)\, e^{W(sa)}, \qquad \pi^*(a \mid s) = \mathrm{ref}(a \mid s)\, e^{W(sa) -
# W(s)}$$
#
# If you multiply these probabilities along a review, the soft values in between cancel, and what remains is
# $\mathrm{ref}(x)\, e^{r(x)/\beta} / Z$ with $W(s_0) = \log Z$. So this is the same policy as before. You can compute it from
# the last token back to the first, just like the values in {lesson:rewards_and_credit}, except that at each state you take the
# log of a mean of exponentials instead of a plain mean. In the exercise, `later` contains the soft values of the states after
# the next token, `probability[s, a]` is $\mathrm{ref}(a \mid s)$, and `successor[s, a]` is the index of the state that word a
# leads to.

# %%
from rlhf_lab.organism import soft_backup  # exercise


# %%
def optimum(beta: float) -> GraphPolicy:
    """Compute the optimal policy with your backup, from the last position to the first."""
    later, tables = torch.from_numpy(final_rewards / beta), []
    levels = zip(reference.probability, reference.graph.successor, strict=True)
    for p, successor in reversed([*levels]):
        later, table = soft_backup(later, torch.from_numpy(p), torch.from_numpy(successor))
        tables.append(table.numpy())
    return GraphPolicy(reference.graph, tuple(tables[::-1]))


def review_kl(policy: GraphPolicy) -> float:
    """Compute the KL from the reference, in nats per review."""
    return float(policy.kl_by_position(reference).sum())


best, whole_reviews = optimum(0.3), torch.from_numpy(reference.occupancy()[-1])
whole = tilt(whole_reviews, torch.from_numpy(final_rewards), 0.3).numpy() @ final_rewards
print(f"beta 0.3: reward {best.mean(final_rewards):.4f}, KL {review_kl(best):.4f} nats")
print(f"reward by tilting whole reviews: {whole:.4f}")

# %% [markdown]
# ## Where the optimal policy uses its KL
#
# At $\beta = 0.3$, the optimal policy is about half a nat per review away from the reference. A review has three clauses, each
# with an adjective (ADJ); two connectors (CONN), "and" or "but"; and a verdict (VERB), such as "loved". Which of these words
# accounts for most of the KL?

# %%
most_of_it = "first adjective"  # predict: "first adjective", "last adjective" or "verdict"

# %%
slots = ReelTruth().slot_names(len(Grammar().slots))[1:]
by_slot = dict(zip(slots, best.kl_by_position(reference).tolist(), strict=True))
decides = dict(zip(slots, token_information(reference, true_reward).tolist(), strict=True))
large = [slot for slot in slots if by_slot[slot] > 1e-3]
most = max(large, key=by_slot.get)
names = {"ADJ 1": "first adjective", "ADJ 3": "last adjective", "VERB": "verdict"}
predictions.compare("most of the KL is at the", most_of_it, names.get(most, most))
print(f"{most}: {by_slot[most] / review_kl(best):.0%} of the KL")
bars(
    large,
    {
        "KL of the optimum, nats": [by_slot[slot] for slot in large],
        "variance of the reward that the token decides": [decides[slot] for slot in large],
    },
    "Where the optimum at beta 0.3 uses its KL",
)

# %% [markdown]
# The optimal policy spends its KL on the tokens that decide the reward. For a strong penalty, you can even derive how much. If
# $\beta$ is large, the optimal policy is only a small perturbation of the reference, so $W \approx V / \beta$, and a token's
# log-ratio is $\log \pi^* - \log \mathrm{ref} \approx A_t / \beta$. For a small perturbation, the KL is half the variance of
# the log-ratio $d$. The reason is the same as for k3: since $\mathbb{E}[e^{-d}] = 1$, we have
# $\mathbb{E}[d] \approx \mathbb{E}[d^2] / 2$. Let $I_t = \mathbb{E}[A_t^2]$ under the reference, which is the part of the
# reward's variance that token $t$ decides (shown in the figure above). Then:
#
# $$\mathrm{KL}_t \;\approx\; \tfrac12 \operatorname{Var}\!\big(A_t / \beta\big) \;=\; \frac{I_t}{2 \beta^2}$$
#
# How strong does the penalty have to be for this approximation to work?

# %%
total, betas = sum(decides.values()), (10.0, 3.0, 1.0, 0.3)
rows = [[f"{b:g}", review_kl(optimum(b)), total / (2 * b**2)] for b in betas]
show_table(["beta", "KL of the optimum", "sum of I / 2 beta^2"], rows, digits=4)

# %% [markdown]
# The approximation overestimates the KL by less than 2% at $\beta = 3$, and by 11% at $\beta = 1$. At $\beta = 0.3$, it
# predicts more than twice the true KL, because the probabilities have changed too much for a first-order approximation. The
# ranking survives, though: the optimal policy still spends most of its KL on the tokens that decide most of the reward.
#
# ## The frontier
#
# Together, the optima for all $\beta$ form the *frontier*: the highest reward that any policy can achieve at a given KL. Its
# slope has a simple interpretation. If you change the optimal policy a little, $J$ does not change to first order. So
# $dr = \beta\, d\mathrm{KL}$, which means that the slope $dr / d\mathrm{KL}$ is $\beta$. To find the $\beta$ whose optimum has
# a given KL, you can use bisection:

# %%
from rlhf_lab.organism import best_at_budget  # given


# %%
def solve(beta: float) -> tuple[float, float]:
    """Return reward and KL of the optimum."""
    point = frontier(reference, true_reward, [beta])[0]
    return point.proxy, point.kl_per_sequence


for beta in (0.5, 0.2):
    (r0, kl0), (r1, kl1) = solve(beta * 1.01), solve(beta / 1.01)
    print(f"slope of the frontier at beta {beta}: {(r1 - r0) / (kl1 - kl0):.3f}")
print(f"beta for 0.5 nats: {best_at_budget(solve, 0.5):.3f}")

# %% [markdown]
# ## PPO next to the optimum
#
# For a fair comparison, `kl_coef` has to match the $\beta$ in the formula. By default it doesn't, because the trainer
# normalizes rewards and advantages, but not the KL. The `SETTINGS` at the top of this lesson turn this normalization off. They
# also subtract the KL from each token's reward (`kl_in="reward"`), and set $\lambda = 1$ so that the advantages are unbiased.
# Over the last few phases, will this run end up below the frontier, on it, or above it?
#
# (14 s on one core)

# %%
phases_lie = "below"  # predict: "below", "on" or "above"

# %%
reports = RLHFTrainer(RLHFArgs(**SETTINGS), out=new_run("reward")).train()
thirds = np.array([[r.kl_per_sequence, r.mean_reward] for r in reports]).reshape(-1, 3, 2).mean(1)
stored = stored_figures("two_leashes")
runs = {0.3: stored["runs"]["reward"]} | {float(b): run for b, run in stored["prices"].items()}
seeds = sorted(np.mean([run["KL"], run["reward"]], axis=1).tolist() for run in runs.values())
line = [solve(beta)[::-1] for beta in (30.0, 3.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.01, 1e-3)]
last = reports[-6:]
kl, reward = (np.mean([getattr(r, x) for r in last]) for x in ("kl_per_sequence", "mean_reward"))
error = 2 * np.sqrt(np.mean([r.reward_std**2 for r in last]) / (6 * 128))
gap = reward - solve(best_at_budget(solve, kl))[0]
print(f"last six phases: KL {kl:.3f}, reward {reward:.3f}", end=", ")
print(f"{-gap:.3f} +- {error:.3f} below the frontier")
bins = {"below": -error, "on": error, "above": np.inf}
predictions.compare("the last phases are", phases_lie, gap, bins=bins)
points = {
    "frontier": tuple(zip(*line, strict=True)),
    "this run, means of three phases": tuple(thirds.T.tolist()),
    "five beta, 40 phases, mean of three seeds": tuple(zip(*seeds, strict=True)),
}
title, axis = "Reward and KL: PPO and the frontier", "KL from the reference, nats per review"
curves(points, title, axis, "reward")

# %%
to = lambda x: f"{min(x):.3f} to {max(x):.3f}"
rows = [
    [f"{b:g}", to(run["KL"]), solve(b)[1], to(run["reward"]), solve(b)[0]]
    for b, run in sorted(runs.items(), reverse=True)
]
show_table(["beta", "KL, 3 seeds", "KL, optimum", "reward, 3 seeds", "reward, optimum"], rows)
top = final_rewards > final_rewards.max() - 1e-6
print(f"-log P(highest reward): {-np.log(reference.occupancy()[-1][top].sum()):.3f} nats")

# %% [markdown]
# PPO stays below the frontier: in the last phases of this run, the reward is 0.080 below it. The plot and table also include
# longer stored runs (40 phases) with five values of $\beta$. At $\beta = 1$ and 0.3, PPO uses about as much KL as the optimum,
# but gets a lower reward. At 3, 0.1 and 0.03, it uses more KL than the optimum. For example, at 0.03, the optimum uses 0.846
# nats, while PPO uses 1.301 to 1.622. Even the highest possible reward costs only 1.285 nats: this is the KL of the reference
# restricted to reviews with that reward. Any KL beyond 1.285 nats is wasted. Note that these numbers don't show *why* PPO stays
# below the frontier.
#
# With the penalty in the loss (`kl_in="loss"`, the default), the optimum is a different policy with a lower $J$, because
# this penalty ignores how a word affects the KL of later words. The appendix {lesson:kl_placements} computes this optimum.
#
# ## Best of n
#
# The simplest method of all needs no training. *Best-of-n sampling* samples n reviews and keeps the best one. Its KL is at most
# $\log n - \frac{n-1}{n}$. If several reviews have the same reward, the KL is smaller, because the method has no preference
# among them. The next cell compares best-of-n sampling with the frontier:

# %%
rows = []
for p in best_of_n(reference, true_reward, (2, 4, 8, 16, 64)):
    there = solve(best_at_budget(solve, p.kl_per_sequence))[0]
    rows.append([p.n, p.proxy, there, p.kl_per_sequence, best_of_n_kl_bound(p.n)])
show_table(["n", "reward", "frontier there", "KL", "log n - (n-1)/n"], rows)

# %% [markdown]
# Best-of-n sampling also stays below the frontier. With n = 4, for example, its reward is 0.932, while the frontier reaches
# 0.957 at the same KL. (With n = 16 and 64, both round to 0.999.) This is because best-of-n sampling only considers which
# review is best, not how much better it is. As n grows, its KL levels off at 1.285 nats while the bound keeps rising: once
# every review it keeps has the highest reward, increasing n changes nothing.
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - What is the optimal policy for the reward you wrote in {lesson:start}? Before you compute it, write down three
#   sentences that you expect $\pi^*$ to produce at a `kl_coef` of 0.3, and three at 0.01.
# - Turn on `normalize_reward` and `normalize_advantages`, and plot that run next to the frontier. As the policy improves, its
#   rewards become more similar. How does this change the effective penalty?
# - `smoothed_popcorn` from `rlhf_lab.organism` has a loophole. Plot its frontier with the true reward on the y-axis.
#
# For further reading, see Korbak et al. 2022 on RL with KL penalties as Bayesian inference
# ([2205.11275](https://arxiv.org/abs/2205.11275)) and Beirami et al. 2024 on the KL of best-of-n
# ([2401.01879](https://arxiv.org/abs/2401.01879)).
#
# In the next lesson, {lesson:what_breaks_it}, the reward is no longer the goal, and you will see what happens to a policy that
# maximizes it anyway.
