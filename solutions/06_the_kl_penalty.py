# %% [markdown]
# # 06 The KL penalty and the optimal policy
#
# By the end of this lesson you can compute the best possible policy for any KL penalty, exactly, and measure how close PPO
# comes to it.
#
# How far from the reference should a policy go? On a real model you find out by trying. Reel's grammar is small enough that
# you can compute the answer: for every strength of the penalty there is one best policy. You derive it, compute it token by
# token, and plot PPO next to it.
#
# **You will also be able to**
# - explain what exact KL and the estimates k1, k2 and k3 measure, and which one to trust on a single token;
# - read a plot of reward against KL, and explain why the slope of its frontier is $\beta$;
# - explain where PPO and best-of-n are in that plot.
#
# **If the KL of a run looks odd**
#
# | you see | look at | because |
# |---|---|---|
# | the reward stops below what you know is possible | reward and KL next to the frontier | the penalty is too strong, or training too short |
# | KL grows late in the run although `kl_coef` is fixed | the standard deviation of the rewards | with normalized rewards the same coefficient becomes a weaker penalty |
# | two runs with the same `kl_coef` end at different KL | `kl_in`: `"loss"` or `"reward"` | the two placements have different optima |
#
# **You need** {lesson:start} (policy, reference, KL) and {lesson:rewards_and_credit} (values, exact advantages). The lesson
# runs on Reel only.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 35 seconds on one core, without a network. Cells that
# take more than 3 seconds have a note with their time, as the imports here:
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
# The reference is the grammar of Reel itself. (The bundled transformer was trained to reproduce it.) The reward of a review
# is `true_reward`, the exact probability that it is positive.
#
# ## Exact KL
#
# The *KL divergence* of a policy from the reference is a mean over texts of the *policy*, in *nats*:
#
# $$\mathrm{KL}(\pi \,\|\, \mathrm{ref}) = \mathbb{E}_{x \sim \pi}\Big[\log \frac{\pi(x)}{\mathrm{ref}(x)}\Big]
# = \mathbb{E}_{x \sim \pi}\Big[\sum_t \mathrm{KL}_t(s_t)\Big], \qquad \mathrm{KL}_t(s) = \sum_a \pi(a \mid s) \log
# \frac{\pi(a \mid s)}{\mathrm{ref}(a \mid s)} \ge 0$$
#
# The second form is the *chain rule*: the KL of a review is the sum over its tokens. So you can compute at which token a
# policy differs from its reference.
#
# `log_probs(logits)` computes log-probabilities of the whole vocabulary. A token with probability 0 has -1e30 there instead
# of -inf, because 0 times -inf is nan. If the policy can produce a token that the reference cannot, the KL is infinite;
# your sum is then a huge number, far above `MAX_KL` (imported above the function).

# %%
from rlhf_lab.functional import kl_per_token  # exercise

# %% [markdown]
# KL is not symmetric. Take a reference with two peaks, and the policy with a *single* peak that is closest to it. In
# $\mathrm{KL}(\pi \,\|\, \mathrm{ref})$ a word counts in proportion to its probability under the *policy*, and in
# $\mathrm{KL}(\mathrm{ref} \,\|\, \pi)$ under the *reference*. With the first, which RLHF uses, does the best policy
# cover one peak or both? (The cell prints the probability of the smaller side.)

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
curves(
    {
        "reference": (words.tolist(), two.softmax(-1).tolist()),
        "least KL(policy || reference)": (words.tolist(), first.tolist()),
        "least KL(reference || policy)": (words.tolist(), second.tolist()),
    },
    "The closest single peak",
    "word",
    "probability",
)

# %% [markdown]
# RLHF uses KL(policy || reference) because it is a mean over samples of the policy, and because it penalizes texts that the
# reference would not write. It does not protect variety: a policy that always writes the same likely text can be close to
# the reference.
#
# ## Estimates of the KL
#
# Exact KL needs the full distributions at each token. Often only the log-probabilities of the sampled tokens are available.
# With $d = \log \pi(a) - \log \mathrm{ref}(a)$:
#
# - **k1** $= d$. Its mean under $\pi$ *is* the KL, but single values can be negative and vary a lot.
# - **k3** $= e^{-d} - 1 + d$. It is never negative, and its mean is also the KL, because $\mathbb{E}_{a \sim \pi}[e^{-d}] =
#   \sum_a \mathrm{ref}(a) = 1$. (With top-k sampling the sum is below 1, and k3 is too small.)
# - **k2** $= d^2 / 2$ is nearly k3 for small $d$; k1 agrees with k3 only in the mean. Its mean is not the KL, but close
#   to it for small $d$. (Other names of `KL_ESTIMATORS`, and functions as `kind`, are not needed here.)

# %%
from rlhf_lab.functional import kl_estimate  # exercise

# %% [markdown]
# Take a reference over 1,000 words, a policy close to it and a policy far from it, and draw many words from each. Close to
# the reference, k3 has the smaller standard deviation. Which one has it far from the reference?

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
bars(
    [f"{low + i:g}" for i in range(count - 1)] + ["11 or more"],
    {
        k: (torch.histc(x.clamp(low, high), count, low, high) / n).tolist()
        for k, x in estimates.items()
    },
    "Estimates from one token, far from the reference, by the lower edge of each bin",
    "fraction of the tokens",
)

# %% [markdown]
# Both k1 and k3 have the right mean, and k2 does not. Far from the reference most values of k3 are closer together than
# those of k1, but $e^{-d}$ is enormous at the few words that the reference likes much better. They are in the last bin, and
# because of them k3 has the larger standard deviation.
#
# ## The best policy for one choice
#
# With a penalty $\beta$ per nat, the objective of RLHF is one number:
#
# $$J(\pi) = \sum_x \pi(x)\, r(x) - \beta \sum_x \pi(x) \log \frac{\pi(x)}{\mathrm{ref}(x)}$$
#
# Define $\pi^*(x) = \mathrm{ref}(x)\, e^{r(x) / \beta} / Z$, with $Z = \sum_x \mathrm{ref}(x)\, e^{r(x) / \beta}$ so that
# it adds up to 1. Then $r(x) = \beta \log \frac{\pi^*(x)}{\mathrm{ref}(x)} + \beta \log Z$. Insert this into $J$ of *any*
# policy:
#
# $$J(\pi) = \beta \log Z - \beta\, \mathrm{KL}(\pi \,\|\, \pi^*)$$
#
# The first term does not depend on $\pi$. The second is 0 at $\pi^*$ and negative elsewhere. So $\pi^*$ is the optimum, and
# **RLHF minimizes the KL to $\pi^*$**, with any training method. Reweighting by $e^{r / \beta}$ is called *tilting*:

# %%
from rlhf_lab.functional import tilt  # exercise

# %%
endings = ["i liked it", "it was fine", "i loved it", "it was perfect"]
chances, rewards = torch.tensor([0.6, 0.3, 0.09, 0.01]), torch.tensor([0.5, 0.4, 0.9, 1.0])
tilted = {beta: tilt(chances, rewards, beta).tolist() for beta in (1.0, 0.3, 0.1, 0.03)}
names = [f"{e}: reward {r:.1f}" for e, r in zip(endings, rewards.tolist(), strict=True)]
series = {"reference": chances.tolist()} | {f"beta {beta}": row for beta, row in tilted.items()}
bars(names, series, "The best policy over four endings", "probability")

# %% [markdown]
# With a weak penalty, the ending with the highest reward wins, although the reference hardly ever uses it. In between, "i
# loved it" wins: it has nearly the same reward for less KL.
#
# ## Token by token
#
# A policy chooses one token at a time. Define the *soft value* $W$ of a state:
#
# $$W(x) = \frac{r(x)}{\beta} \text{ at the end}, \qquad
# W(s) = \log \sum_a \mathrm{ref}(a \mid s)\, e^{W(sa)}, \qquad \pi^*(a \mid s) = \mathrm{ref}(a \mid s)\, e^{W(sa) -
# W(s)}$$
#
# The product over a review telescopes to $\mathrm{ref}(x)\, e^{r(x)/\beta} / Z$, with $W(s_0) = \log Z$: it is the same
# policy. And you can compute it from the last token to the first, like the values in {lesson:rewards_and_credit}, with the
# log of a mean of exponentials instead of the mean. `later` contains the soft values of the states after the next token,
# `probability[s, a]` is $\mathrm{ref}(a \mid s)$, and `successor[s, a]` is the index of the state to which word a leads.

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
# At $\beta = 0.3$ the optimal policy is about half a nat per review away from the reference. A review has three clauses,
# each with an adjective (ADJ); two connectors (CONN), "and" or "but"; and a verdict (VERB), such as "loved". Which word
# gets most of the KL?

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
# KL is used at the tokens that decide the reward, and for a strong penalty you can derive how much. If $\beta$ is large,
# the optimal policy is a small change of the reference. Then $W \approx V / \beta$, so the log-ratio of a token is $\log
# \pi^* - \log \mathrm{ref} \approx A_t / \beta$. The KL of a small change is half the variance of the log-ratio $d$: as
# in k3, $\mathbb{E}[e^{-d}] = 1$, so $\mathbb{E}[d] \approx \mathbb{E}[d^2] / 2$. With $I_t = \mathbb{E}[A_t^2]$ under
# the reference, the variance of the reward that token $t$ decides (in the figure above):
#
# $$\mathrm{KL}_t \;\approx\; \tfrac12 \operatorname{Var}\!\big(A_t / \beta\big) \;=\; \frac{I_t}{2 \beta^2}$$
#
# How strong does the penalty have to be for this to hold?

# %%
total = sum(decides.values())
show_table(
    ["beta", "KL of the optimum", "sum of I / 2 beta^2"],
    [
        [f"{beta:g}", review_kl(optimum(beta)), total / (2 * beta**2)]
        for beta in (10.0, 3.0, 1.0, 0.3)
    ],
    digits=4,
)

# %% [markdown]
# At $\beta = 3$ the approximation is less than 2 % too large, and at $\beta = 1$ 11 %. At $\beta = 0.3$ it is more than
# twice the KL: the probabilities have changed so much that a first-order description fails. The order remains: the tokens
# that decide most of the reward still get most of the KL.
#
# ## The frontier
#
# The optima for all $\beta$ form the *frontier*: the highest reward at each KL. No policy is above it. Its slope has a
# meaning. At an optimum, $J$ does not change to first order when the policy changes a little, so $dr - \beta\, d\mathrm{KL}
# = 0$, and the slope $dr / d\mathrm{KL}$ is $\beta$. To find the $\beta$ for a given KL, use bisection:

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
# For a fair comparison `kl_coef` must be $\beta$. By default the trainer normalizes rewards and advantages, but not the
# KL. `SETTINGS` at the top switches this off, puts the KL into the reward of each token (`kl_in="reward"`), and sets
# $\lambda = 1$, so that the advantages are unbiased. Are the last phases below the frontier, on it, or above it?
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
print(
    f"last six phases: KL {kl:.3f}, reward {reward:.3f}, {-gap:.3f} +- {error:.3f} below the frontier"
)
bins = {"below": -error, "on": error, "above": np.inf}
predictions.compare("the last phases are", phases_lie, gap, bins=bins)
curves(
    {
        "frontier": tuple(zip(*line, strict=True)),
        "this run, means of three phases": tuple(thirds.T.tolist()),
        "five beta, 40 phases, mean of three seeds": tuple(zip(*seeds, strict=True)),
    },
    "Reward and KL: PPO and the frontier",
    "KL from the reference, nats per review",
    "reward",
)

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
# PPO stays below the curve, this run by 0.080 in its last phases. The five longer runs of 40 phases were trained
# beforehand. At $\beta = 1$ and 0.3 PPO uses about as much KL as the optimum, for less reward. At 3, 0.1 and 0.03 it uses
# more: at 0.03 the optimum has 0.846 nats, and PPO 1.301 to 1.622. The highest reward needs only 1.285 nats, the KL of
# the reference restricted to the reviews with that reward. A policy can use more than that, but gets nothing for it.
# These numbers do not show why PPO stays below the curve.
#
# With the penalty in the loss (`kl_in="loss"`, the default) the optimum is another policy, with a lower $J$: it ignores the
# KL of the states to which a word leads. {Lesson:kl_placements} computes it.
#
# ## Best of n
#
# The simplest method needs no training. *Best-of-n* draws n reviews and keeps the best. Its KL is at most $\log n -
# \frac{n-1}{n}$, and less if rewards are equal, because it has no preference among equal rewards. How far is it from the
# frontier?

# %%
points = best_of_n(reference, true_reward, (2, 4, 8, 16, 64))
show_table(
    ["n", "reward", "frontier there", "KL", "log n - (n-1)/n"],
    [
        [
            p.n,
            p.proxy,
            solve(best_at_budget(solve, p.kl_per_sequence))[0],
            p.kl_per_sequence,
            best_of_n_kl_bound(p.n),
        ]
        for p in points
    ],
)

# %% [markdown]
# Best-of-n is below the frontier: for n = 4 the reward is 0.932, and 0.957 on the frontier. (For n = 16 and 64 both print
# 0.999.) It does not know how much better the best review is, only that it is the best. Its KL stops at 1.285 nats, where
# the bound continues to grow: once all kept reviews have the highest reward, a larger n changes nothing.
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - What is the optimum for the reward that you wrote in {lesson:start}? First write down three sentences that $\pi^*$ would
#   produce at a `kl_coef` of 0.3, and three at 0.01.
# - Switch `normalize_reward` and `normalize_advantages` on, and plot that run next to the frontier. The spread of the
#   rewards shrinks as the policy improves. What does this do to the penalty?
# - `smoothed_popcorn` from `rlhf_lab.organism` has a loophole. Plot its frontier with the true reward on the y axis.
#
# Papers: Korbak et al. 2022, RL with KL penalties as Bayesian inference ([2205.11275](https://arxiv.org/abs/2205.11275));
# Beirami et al. 2024, the KL of best-of-n ([2401.01879](https://arxiv.org/abs/2401.01879)).
#
# Next: {lesson:what_breaks_it}, where the reward is no longer the goal. Appendix: {lesson:kl_placements} has the optimum of
# a penalty in the loss.
