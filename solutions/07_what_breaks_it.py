# %% [markdown]
# # 07 What breaks RLHF
#
# By the end of this lesson, you will be able to predict when the true reward falls while the reward rises, explain why,
# and measure how much of a run's KL was wasted.
#
# A *proxy* is the reward a policy trains on. The *true reward* is what you actually want. On Reel, that is the exact
# probability that a review is meant to be positive, and 0 for a text that isn't a review at all. Outside Reel, nobody
# can compute it. Here you can watch both numbers as a run goes wrong.
#
# **You will also be able to**
# - compute the slope of the true reward along the optimal policies, and predict its sign;
# - compute how much KL a run spent beyond what its true reward required;
# - diagnose a bad run from its reward, KL, and explained variance.
#
# **You need** {lesson:ppo} and {lesson:the_kl_penalty}.
#
# | you see | look at | because |
# |---|---|---|
# | the reward is near its maximum | samples with a high reward | the reward model may never have been trained on such texts |
# | reward and KL rise fast | a score that the policy is not trained on | far from the reference, the proxy and the goal differ |
# | entropy stays the same, but texts become similar | distinct n-grams | entropy is measured at each state, not between texts |
# | explained variance is high | whether the reward changes at all | a value head can also predict the rewards of a policy that learns nothing |

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 75 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import (
    Predictions,
    SeedFigures,
    check,
    hint,
    new_run,
    progress,
    show_table,
)
from rlhf_lab.course.blind_tuning import BlindTuning
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.organism import (
    REWARDS,
    Grammar,
    bag_of_adjectives,
    build_graph,
    frontier,
    grammar_policy,
    smoothed_popcorn,
    true_reward,
)
from rlhf_lab.organism.optimum import tilted
from rlhf_lab.views import bars, curves

SETTINGS = dict(
    preset="reel",
    seed=1,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
)
over_seeds = SeedFigures("what_breaks_it", SETTINGS)
predictions = Predictions()
mean = lambda reports, name: sum(getattr(r, name) for r in reports) / len(reports)


def plot_run(reports, title: str, **more: list[float]):
    """Plot reward, true reward and other series over phases."""
    series = {"reward": "mean_reward", "true reward": "true_reward"}
    series = {name: [getattr(r, field) for r in reports] for name, field in series.items()}
    phases = list(range(len(reports)))
    return curves(
        {name: (phases, y) for name, y in (series | more).items()},
        title,
        "phase",
        "mean",
    )


# %% [markdown]
# ## A flaw that nobody planted
#
# On reviews, the bundled classifier agrees with the true reward. Let's train a policy on the classifier's score without
# a KL penalty. The score will rise all the way to its maximum. Where will the true reward end up: at the reward, below
# the reward, or even below its starting value?
#
# (14 s on one core)

# %%
ends_at = "at the reward"  # predict: "at the reward", "below the reward" or "below its start"

# %%
free_args = RLHFArgs(**SETTINGS, reward_fn="sentiment", kl_coef=0.0, total_phases=14)
trainer = RLHFTrainer(free_args, out=new_run("free"))
rollouts = []


@trainer.on("after_score")
def keep_rollout(ctx):
    rollouts.append(ctx.rollout)


free = trainer.train()
late = free[-4:]
ends = {
    "reward": mean(late, "mean_reward"),
    "true reward": mean(late, "true_reward"),
    "lowest true reward": min(r.true_reward for r in free[7:]),
}
over_seeds.compare("no KL penalty, last four phases", ends)
print(f"KL in the last four phases: {mean(late, 'kl_per_sequence'):.2f} nats per review")
found = "below the reward" if ends["true reward"] < ends["reward"] - 0.02 else "at the reward"
found = "below its start" if ends["true reward"] < free[0].true_reward else found
predictions.compare("without a KL penalty, the true reward ends up", ends_at, found)
grammatical = [r.grammatical_fraction for r in free]
plot_run(free, "kl_coef=0, the classifier's reward", grammatical=grammatical)

# %%
texts = [text for rollout in rollouts[7:] for text in rollout.texts]
scores, exact = (
    torch.cat([rollout.raw_rewards for rollout in rollouts[7:]]),
    true_reward(texts),
)
fooled = scores - exact > 0.5
print(f"{int(fooled.sum())} of {len(texts)} texts have a reward that is too high by more than 0.5;")
print(f"{int((exact[fooled] == 0).sum())} of these have a true reward of 0, for example:")
for i in (scores - exact).argsort(descending=True)[:3].tolist():
    print(f"reward {scores[i]:.3f}: {texts[i]}")

# %% [markdown]
# These texts aren't reviews. The classifier was trained only on reviews, so its score for anything else is meaningless,
# and the policy gets rewarded for finding such texts. In this run, the true reward falls after phase 6, recovers until
# phase 10, and then falls again. (We didn't investigate why it recovers.) How far it falls depends on the seed.
#
# Do the texts also become more similar to each other? Entropy per token can't tell you, but *distinct-n* can: it is the
# number of distinct n-grams in a batch divided by the total number of n-grams.

# %%
from rlhf_lab.functional import distinct_n  # given

# %%
for n in (1, 2, 3):
    start, end = (
        distinct_n(r.samples.tokens[:, r.samples.prefix_len :], n, r.samples.mask)
        for r in (rollouts[0], rollouts[-1])
    )
    print(f"distinct {n}-grams: {start:.3f} -> {end:.3f}, a fraction of {end / start:.2f}")

# %% [markdown]
# The longer the n-grams, the larger the drop. The policy still uses most of the same words, but it combines them in fewer ways.
#
# ## Why the true reward falls
#
# In {lesson:the_kl_penalty}, you derived the optimal policy for a penalty of $\beta$. With $\lambda = 1 / \beta$, it is
#
# $$\pi_\lambda(x) = \frac{\mathrm{ref}(x)\, e^{\lambda r(x)}}{Z(\lambda)}, \qquad Z(\lambda) = \sum_x \mathrm{ref}(x)\, e^{\lambda r(x)}$$
#
# How does the mean of some other score $h$ change as $\lambda$ grows? Since $\frac{d}{d\lambda} \log Z =
# \mathbb{E}_\lambda[r]$, we have $\frac{d}{d\lambda} \log \pi_\lambda(x) = r(x) - \mathbb{E}_\lambda[r]$, and therefore
#
# $$\frac{d}{d\lambda} \mathbb{E}_\lambda[h] = \sum_x \pi_\lambda(x)\, \big(r(x) - \mathbb{E}_\lambda[r]\big)\, h(x) = \mathrm{Cov}_\lambda(h, r)$$
#
# If $h$ is the reward itself, this derivative is a variance, so *the proxy never falls*. If $h$ is the true reward, the
# derivative is a covariance *over the texts the policy currently generates*. That's why you can't rely on a high
# correlation on the reference's texts: later in training, the covariance can change sign. The KL is $\lambda
# \mathbb{E}_\lambda[r] - \log Z$, and its derivative is $\lambda \mathrm{Var}_\lambda(r)$, so
#
# $$\frac{d\, \mathbb{E}[h]}{d\, \mathrm{KL}} = \frac{\mathrm{Cov}_\lambda(h, r)}{\lambda\, \mathrm{Var}_\lambda(r)}$$

# %%
from rlhf_lab.functional import tilt_slopes  # exercise

# %% [markdown]
# Now let's look at a flaw we built in ourselves. `smoothed_popcorn` is $\sigma(\mathrm{logit} / 4 + 4\,
# [\text{popcorn}])$, where the logit is the true reward's log odds. In other words, it takes a quarter of these log
# odds and adds 4 if the word *popcorn* appears. On the reference's texts, its correlation with the true reward is 0.95.
# As the penalty gets weaker, does the optimal policy's true reward only go up, or does it also fall along the way?

# %%
true_reward_goes = "up"  # predict: "up", "up, down" or "up, down, up"

# %%
reference = grammar_policy(build_graph(Grammar()))
# reviews in groups of equal rewards, and the probability of each group under the reference
features, probs = reference.graph.final_features(), reference.occupancy()[-1]
proxies, true_rewards = (
    torch.from_numpy(reward.score(features)) for reward in (smoothed_popcorn, true_reward)
)
both = torch.stack([proxies, true_rewards])
correlation = torch.cov(both, aweights=torch.from_numpy(probs))
correlation = correlation[0, 1] / correlation.diagonal().prod().sqrt()
print(f"correlation over the reference's texts: {correlation:.2f}")
has_popcorn = proxies.logit() - true_rewards.logit() / 4 > 2
print(f"proxy: at most {proxies[~has_popcorn].max():.2f} without popcorn", end=", ")
print(f"at least {proxies[has_popcorn].min():.2f} with it")
betas = [3.0 * 0.87**k for k in range(42)]
optima = frontier(reference, smoothed_popcorn, betas)
slopes = []
for beta in betas:
    tilted_probs = torch.from_numpy(tilted(probs, proxies.numpy(), beta)[0])
    of_proxy, of_true_reward = tilt_slopes(tilted_probs, proxies, true_rewards)
    slopes.append(of_true_reward * beta / of_proxy)
turns = [i for i in range(1, len(betas)) if (slopes[i] > 0) != (slopes[i - 1] > 0)]
for i in turns:
    print(f"the slope changes sign at KL {optima[i].kl_per_sequence:.2f}", end=", ")
    print(f"true reward {optima[i].true_reward:.2f}")
shape = {0: "up", 1: "up, down", 2: "up, down, up"}.get(len(turns), "otherwise")
predictions.compare("along the optimal policies, the true reward goes", true_reward_goes, shape)
kls = [point.kl_per_sequence for point in optima]
curves(
    {
        "proxy": (kls, [point.proxy for point in optima]),
        "true reward": (kls, [point.true_reward for point in optima]),
        "fraction with popcorn": (kls, [point.popcorn for point in optima]),
    },
    "Optimal policies for smoothed_popcorn, exact",
    "KL from the reference, nats per review",
    "mean",
)

# %% [markdown]
# At first, more positive sentiment is the cheapest way to increase the reward, so the true reward rises. Popcorn is
# rare in the reference, so writing it costs more KL. But every review with popcorn, good or bad, has a higher reward
# than the best review without it. Below some $\beta$, probability mass shifts from praise to popcorn. In this mixture,
# texts with a higher reward have a lower true reward, so the covariance is negative. Once nearly all texts contain
# popcorn, sentiment is the only thing left to improve, and the true reward rises again.
#
# ## PPO on the flawed reward
#
# Does PPO follow this curve? Let's train for 40 phases with the KL in the reward and no normalization, so that `kl_coef` is
# the $\beta$ in the formula. To find out how much of the KL was wasted, we'll compare the run with the optimal policies
# *for the true reward*: the run's *excess KL* is its KL minus the smallest KL that achieves the same true reward.

# %%
from rlhf_lab.functional import excess_kl  # exercise

# %% [markdown]
# The mean reward is higher in the last 8 of the 40 phases than in phases 8 to 15. What happens to the mean true reward?
#
# (36 s on one core)

# %%
forty_phases = "it falls"  # predict: "it rises", "no change" or "it falls"

# %%
BETA = 0.03
planted_args = RLHFArgs(
    **SETTINGS,
    reward_fn="smoothed_popcorn",
    kl_coef=BETA,
    kl_in="reward",
    kl_estimator="k1",
    normalize_reward=False,
    target_kl=0.01,
    total_phases=40,
)
trainer = RLHFTrainer(planted_args, out=new_run("popcorn"))
with_popcorn = []


@trainer.on("after_score")
def count_popcorn(ctx):
    with_popcorn.append(sum("popcorn" in text.split() for text in ctx.rollout.texts) / 128)


planted = trainer.train()
best = frontier(reference, true_reward, [4.0 * 0.85**k for k in range(60)])
best = [
    torch.tensor([getattr(p, name) for p in best]) for name in ("true_reward", "kl_per_sequence")
]
early, late = planted[8:16], planted[-8:]
over_seeds.compare(
    "smoothed_popcorn",
    {
        "reward, phases 8 to 15": mean(early, "mean_reward"),
        "reward, last 8": mean(late, "mean_reward"),
        "true reward, phases 8 to 15": mean(early, "true_reward"),
        "true reward, last 8": mean(late, "true_reward"),
        "popcorn, last 8": sum(with_popcorn[-8:]) / 8,
    },
)
spent = mean(late, "kl_per_sequence")
excess = excess_kl(mean(late, "true_reward"), spent, *best)
over_seeds.compare("last 8 phases, nats per review", {"KL": spent, "excess KL": excess})
(optimum,) = frontier(reference, smoothed_popcorn, [BETA])
print(
    f"optimum: reward {optimum.proxy:.2f}, true reward {optimum.true_reward:.2f}",
    end=", ",
)
print(f"popcorn {optimum.popcorn:.2f}, KL {optimum.kl_per_sequence:.2f}")
change = mean(late, "true_reward") - mean(early, "true_reward")
found = "it falls" if change < -0.01 else "it rises" if change > 0.01 else "no change"
predictions.compare("true reward over 40 phases", forty_phases, found)
plot_run(planted, "PPO on smoothed_popcorn", **{"fraction with popcorn": with_popcorn})

# %% [markdown]
# Between phases 8 to 15 and the last 8 phases, the mean reward rises from 0.84 to 0.95, while the mean true reward
# *falls* from 0.97 to 0.93. The same happens for the other two seeds. By the end, 81% of the reviews contain popcorn,
# and 3.2 of the run's 3.8 nats are excess KL.
#
# During the first 15 phases, PPO learns sentiment, and the run looks healthy. It approaches the optimum only slowly, so
# in this case, early stopping protects the true reward.
#
# ## Kinds of flaws
#
# Manheim and Garrabrant 2018 ([1803.04585](https://arxiv.org/abs/1803.04585)) distinguish four ways a proxy and its
# goal can come apart:
#
# - **regressional**: the proxy is the goal plus an error, so the highest scores are partly due to errors. For example,
#   `ignore_negation` treats "wasn't" like "was".
# - **extremal**: the two agree within the observed range, but not beyond it. For example, `bag_of_adjectives` adds up
#   all adjectives, even in a text that isn't a review.
# - **causal**: the proxy also rewards something that doesn't affect the true reward. For example, `smoothed_popcorn`
#   depends on popcorn.
# - **adversarial**: somebody with a different goal knows the proxy and exploits it. This lesson has no example, since a
#   policy has no goal other than its reward.
#
# In contrast, `smoothed` has no flaw: it ranks reviews exactly as the true reward does. The next cell computes the
# optimal policies for `smoothed` and for the three flawed rewards, at $\beta$ = 0.1 and 0.03. For how many of these
# four rewards is the optimal policy's true reward lower at 0.03 than at 0.1?

# %%
falls_for = 2  # predict: a number from 0 to 4

# %%
names = ["smoothed", "ignore_negation", "smoothed_popcorn", "bag_of_adjectives"]
optima = [frontier(reference, REWARDS[name], (0.1, 0.03)) for name in names]
excess = lambda point: excess_kl(point.true_reward, point.kl_per_sequence, *best)
for name, (weak, strong) in zip(names, optima, strict=True):
    print(
        f"{name}: excess KL {excess(weak):.2f} at beta 0.1 and {excess(strong):.2f} at 0.03",
        end="; ",
    )
    print(f"true reward {weak.true_reward:.3f} and {strong.true_reward:.3f}")
falls = sum(strong.true_reward < weak.true_reward for weak, strong in optima)
predictions.compare("rewards whose true reward is lower at 0.03", falls_for, falls)
loop = " ".join(["this movie", *["brilliant"] * 25])
highest = bag_of_adjectives.score(features).max()
print(f"bag_of_adjectives: {highest:.2f} for the best review", end=", ")
print(f"{bag_of_adjectives([loop]).item():.2f} for 25 times 'brilliant'")
bars(
    names,
    {f"beta {beta}": [two[i].true_reward for two in optima] for i, beta in enumerate((0.1, 0.03))},
    "True reward of the optimal policies",
    "mean",
)

# %% [markdown]
# `smoothed`, which ranks texts correctly, does no harm. With the regressional flaw, the true reward still rises, but it
# costs more KL than necessary. Only the causal flaw makes the true reward fall.
#
# These numbers underestimate the extremal flaw, because the optimal policies only generate grammatical texts. A trained
# policy isn't limited to those: a text that just repeats one adjective scores higher than any review, and its true
# reward is 0. This is why you should also plot the fraction of grammatical texts.
#
# ## Symptoms
#
# Most bad runs are simply the result of a bad setting. The table below shows four stored runs, each trained for 12
# phases with three seeds. One of them is healthy, and each of the others has one bad setting. Each entry is the mean
# over the last three phases, shown as a range across seeds. In which run does the value head fail to learn?

# %%
no_value_head = "A"  # predict: "A", "B", "C" or "D"

# %%
stored = stored_figures("symptoms")
causes = dict(
    A="kl_coef 0",
    B="clip_coef 0.001",
    C="nothing is wrong",
    D="value head does not learn",
)
columns = ["reward", "true_reward", "KL", "explained variance", "clipped"]
span = lambda values: f"{min(values):.2f} to {max(values):.2f}"
runs = [[letter, stored["runs"][cause]] for letter, cause in causes.items()]
show_table(
    ["run", *columns],
    [[letter, *(span(run[c]) for c in columns)] for letter, run in runs],
)
found = next(letter for letter, cause in causes.items() if "value head" in cause)
predictions.compare("the value head does not learn in run", no_value_head, found)
print(causes)

# %% [markdown]
# Run A has the highest reward, but also the highest KL, because its `kl_coef` is 0. Run B learns nothing, and a fifth
# of its tokens are clipped, because its `clip_coef` is 0.001. Run C is the healthy one. In run D, the explained
# variance is 0, yet the policy still learns, although its reward ends up slightly lower than run C's. The reward alone
# would not have revealed this problem. {Lesson:debugging_ppo} has more bugs for you to find.
#
# ## Blind tuning
#
# Now tune a run without knowing its reward, which is drawn from five candidates using your name as the seed. You choose
# four settings within a budget of 1,536 reviews (`total_phases` times `batch_size`). On the leaderboard, runs with a
# true reward of at least 0.9 come first, sorted by excess KL. Will the run below rank above the preset's runs?
#
# (5 s on one core)

# %%
above_preset = "no"  # predict: "yes" or "no"

# %%
tuning = BlindTuning("Emmy")
tuned = tuning.run(kl_coef=0.05, base_lr=1e-3, total_phases=12, batch_size=128)
found = "yes" if tuning.is_above_preset(tuned) else "no"
predictions.compare("ranks above the preset", above_preset, found)

# %% [markdown]
# Run the cell again with different values. What is holding the run back: too few phases, steps that are too small, or a
# penalty that is too strong? When you are done, `tuning.reveal()` shows you which reward it was.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# Design a reward a friend can't hack in 20 phases.
#
# For further reading, see Gao et al. 2022 ([2210.10760](https://arxiv.org/abs/2210.10760)) on over-optimization, and
# Skalse et al. 2022 ([2209.13085](https://arxiv.org/abs/2209.13085)) on rewards that can't be hacked.
#
# In the next lesson, {lesson:watch_it_learn}, you'll look inside the policy as it trains.
