# %% [markdown]
# # Reward models
#
# By the end of this lesson, you will be able to measure a reward model's calibration, over-optimize it without any
# training, and predict how a bias in the preference pairs changes the reward.
#
# **You need** {lesson:preferences}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 20 seconds on one CPU core and needs no internet
# access.

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.course import Predictions, check, hint, progress, show_table
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.fitting import FitConfig
from rlhf_lab.functional import Interval, best_of_n_kl_bound, seed_interval
from rlhf_lab.models import load_model
from rlhf_lab.organism import true_reward
from rlhf_lab.organism.rewards import true_log_odds
from rlhf_lab.rewards import RewardModel, reel_pairs
from rlhf_lab.rewards.preference_eval import judge
from rlhf_lab.tuning import train_reward_model
from rlhf_lab.views import curves

SETTINGS = dict(preset="reel", gen_len=26, top_k=None, advantages="gae", kl_coef=0.3, seed=1)
SEED = SETTINGS["seed"]
predictions = Predictions()
stored = stored_figures("preference_runs")


def mean_and_range(runs: list[dict], what: str, digits: int = 2) -> str:
    """Format a number of several seeds."""
    values = [run[what] for run in runs]
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


# %% [markdown]
# ## Wrong labels
#
# Real preference labels are noisy. With a temperature of $T$, the rater sometimes prefers the text with the lower
# utility. On top of that, a fraction $e$ of all labels is flipped, for example because the rater clicked on the wrong
# text. If $d = u(a) - u(b)$ is the utility gap, the label is $a \succ b$ with probability
#
# $$(1 - e)\, \sigma(d / T) + e\, \sigma(-d / T)$$

# %%
from rlhf_lab.functional import sample_preferences  # exercise

# %% [markdown]
# With flipped labels, this probability stays between $e$ and $1 - e$, however large the gap is. So even a reward model
# that fits it perfectly never learns a gap of more than $\log \frac{1 - e}{e}$, which is 2.94 for 5% flipped labels and
# 1.39 for 20%. Large gaps shrink the most. The table shows results for stored reward models trained as in
# {lesson:preferences} and evaluated on 1,500 fresh pairs without flipped labels:

# %%
show_table(
    ["trained on", "accuracy", "slope of gaps", "minus log-likelihood"],
    [
        [name, *(mean_and_range(runs, what) for what in ("accuracy", "slope", "nll"))]
        for name, runs in (stored["reward models"] | stored["longer"]).items()
    ],
)
for e in (0.05, 0.2):
    print(f"{e:.0%} flipped labels: largest gap {np.log((1 - e) / e):.2f}")
print(
    f"mean and range of {len(stored['seeds'])} seeds; slope: 1 if they equal the gaps of the utility"
)

# %% [markdown]
# Flipped labels hurt the scale of the reward much more than its accuracy. With 1,024 pairs, flipping 20% of the labels
# lowers the accuracy only from 0.86 to 0.81, but it lowers the slope from 0.64 to 0.14. If you train a policy on such a
# reward, the same `kl_coef` is a much stronger penalty, because the reward's scale has shrunk.
#
# ## Calibration
#
# Suppose a reward model predicts that the first text wins with probability 0.7. The model is *calibrated* if the first
# text really does win in seven out of ten such pairs. To check this, sort the pairs by predicted probability, split
# them into equal-sized bins, and compare the mean prediction with the fraction of wins in each bin.

# %%
from rlhf_lab.functional import calibration_bins  # exercise

# %% [markdown]
# Let's train two reward models, one on 64 pairs and one on 1,024. With few pairs, which suffers more: the order of the
# texts, or the probabilities? To compare the two, we measure both losses on a scale from 0 (the true utility) to 1 (a
# coin flip).
#
# (13 s on one core)

# %%
spoiled_more = "the order"  # predict: "the order" or "the probabilities"

# %%
fresh = reel_pairs(1500, 1000 + SEED)
first_wins = torch.arange(len(fresh)) % 2 == 0  # every second pair with the rejected text first
sign = first_wins.double() * 2 - 1
true_gaps = sign * torch.from_numpy(fresh.true_reward_gaps)
models, gaps, lines = {}, {}, {"calibrated": ([0.0, 1.0], [0.0, 1.0])}
for name, n in {"64 pairs": 64, "1,024 pairs": 1024}.items():
    models[name] = RewardModel(load_model("reel-nano"), seed=SEED)
    config = FitConfig(steps=120, batch_size=32, seed=SEED, show_progress=False)
    train_reward_model(models[name], reel_pairs(round(n / 0.8), SEED), config)
    chosen, rejected = (models[name].score(side) for side in (fresh.chosen, fresh.rejected))
    gaps[name] = sign * (chosen - rejected).double()
    bins = calibration_bins(gaps[name], first_wins, 10)
    lines[name] = (bins.predicted.tolist(), bins.observed.tolist())
curves(
    lines,
    "Calibration on 1,500 fresh pairs",
    "predicted probability that the first text wins",
    "fraction in which it wins",
)

# %%
results = {name: judge(found, true_gaps, first_wins) for name, found in gaps.items()}
few, truth = results["64 pairs"], judge(true_gaps, true_gaps, first_wins)
lost_order = (truth.as_truth - few.as_truth) / (truth.as_truth - 0.5)
lost_likelihood = (few.nll - truth.nll) / (np.log(2) - truth.nll)
print(f"lost with 64 pairs: order {lost_order:.2f}, log-likelihood {lost_likelihood:.2f}")
kind = "the probabilities" if lost_likelihood > lost_order else "the order"
predictions.compare("few pairs cost more of", spoiled_more, kind)

# %% [markdown]
# The probabilities suffer more. With only 64 pairs, the model predicts probabilities near 0 and 1, and is often wrong.
#
# ## The best of n
#
# The simplest way to optimize a reward doesn't need any training: sample n texts, and keep the one with the highest
# score. But what is the *true* reward of this text? You could draw n of N scored texts many times, but this only gives
# you a noisy estimate. The mean over *all* ways to draw n different texts is exact, and you can write it as a weighted
# mean
#
# $$\mathbb{E}[\text{true reward of the best of } n] = \sum_i w_i\, \text{true reward}_i$$
#
# where $w_i$ is the probability that text $i$ has the highest score among n texts. Find $w$. Texts with the same score
# should win equally often. Do the computation in float64. (This exercise has no steps.)

# %%
from rlhf_lab.functional import best_of_n_weights  # exercise

# %% [markdown]
# The KL of best-of-n is at most $\log n - \frac{n - 1}{n}$ ({lesson:the_kl_penalty}). Our pool of texts is the 3,000
# reviews from the fresh pairs. Suppose the model trained on 64 pairs picks the best text. Is the true reward of the
# best of 64 still higher than that of the best of 16? To decide, we split the pool into eight parts and compute a 95%
# confidence interval for the difference.

# %%
later = "rises"  # predict: "rises", "undecided" or "falls"

# %%
pool, numbers = fresh.chosen + fresh.rejected, [1, 2, 4, 8, 16, 32, 64]
rewards = true_reward(pool).double()[None]
scores = {name: model.score(pool).double()[None] for name, model in models.items()}
scores["the utility"] = torch.from_numpy(true_log_odds(pool))[None]
bounds = [best_of_n_kl_bound(n) for n in numbers]
curves(
    {
        name: (bounds, [(best_of_n_weights(score, n) * rewards).sum().item() for n in numbers])
        for name, score in scores.items()
    },
    "True reward of the best of 1 to 64",
    "upper bound of the KL, nats per review",
    "true reward",
)


# %%
def later_rise(values: Float[Tensor, "1 pool"], chosen_by: Float[Tensor, "1 pool"]) -> Interval:
    """Compare the best of 64 with the best of 16 over eight parts of the pool."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(values.shape[1], generator=generator)
    values, chosen_by = (x[0, order].view(8, -1) for x in (values, chosen_by))
    few, many = ((best_of_n_weights(chosen_by, n) * values).sum(1) for n in (16, 64))
    return seed_interval(many, few)


rise = later_rise(rewards, scores["64 pairs"])
print(f"best of 64 minus best of 16, chosen by the model of 64 pairs: true reward {rise} (95 %)")
print(f"its own score: {later_rise(scores['64 pairs'], scores['64 pairs'])}")
kind = "rises" if rise.low > 0 else "falls" if rise.high < 0 else "undecided"
predictions.compare("the true reward from 16 to 64", later, kind)

# %% [markdown]
# When the model trained on 1,024 pairs does the choosing, the best of 64 is as good as if the utility had been used
# instead. The model trained on 64 pairs does worse: from n = 16 to n = 64, its score rises by 0.52, but the true reward
# only rises by 0.02. Still, we don't see the true reward fall, as it does in Gao et al. (2022). The reason is that
# best-of-n only chooses among texts from the reference, and on those texts this model isn't far off.
#
# ## Biased pairs
#
# People's preferences also reflect things that have nothing to do with quality. For example, raters may prefer longer
# responses or phrases that are common in their social group. On Reel, we use a single word as the bias: after the rater
# has chosen, we replace the last word of some *preferred* texts with "popcorn".
#
# Suppose a preferred text contains popcorn with probability $p_c$, and a rejected text with probability $p_\ell$. Let
# $f = 1$ for texts with popcorn and 0 for all others. By Bayes' rule, the log odds that $a$ is the preferred text are
#
# $$\big(u(a) - u(b)\big) + \lambda\, \big(f(a) - f(b)\big), \qquad \lambda = \log \frac{p_c\, (1 - p_\ell)}{(1 - p_c)\, p_\ell}$$
#
# This is a Bradley-Terry model with utility $u + \lambda f$. In other words, the best fit *rewards* popcorn, and you
# can predict the size of this reward just by counting. The grammar itself ends one review in fifty with popcorn, and
# now we add it to half of the preferred texts. Suppose you train reward models on 1,024 of these pairs. Will their
# accuracy on fresh, unbiased pairs be below or above 0.8?

# %%
biased_accuracy = "below 0.8"  # predict: "below 0.8" or "above 0.8"

# %%
biased = stored["biased"]
rows = []
for name, runs in biased.items():
    p = float(name.split("%")[0]) / 100
    p = p + (1 - p) * 0.02  # the grammar's own popcorn
    weight = np.log(p / (1 - p)) - np.log(0.02 / 0.98)
    names = ("popcorn is worth", "accuracy", "best of 64: popcorn", "best of 64: true reward")
    rows.append([name, weight, *(mean_and_range(runs, what) for what in names)])
show_table(
    [
        "popcorn added",
        "lambda",
        "effect on score",
        "accuracy",
        "best of 64: popcorn",
        "true reward",
    ],
    rows,
    digits=2,
)
print("mean and range of three seeds; best of 64: of a pool of 3,000 reviews")
half = np.mean([run["accuracy"] for run in biased["50%, 400 steps"]])
kind = "above 0.8" if half > 0.8 else "below 0.8"
predictions.compare("accuracy of the biased model", biased_accuracy, kind)

# %% [markdown]
# After 400 steps, popcorn raises the score by 3.69, which is close to $\lambda$. Yet the accuracy is still 0.85, so
# looking at accuracy won't reveal the bias. You have to swap the word and see how the score changes. Best-of-n sampling
# also reveals the bias: 48% of the best-of-64 texts end with popcorn, and their true reward falls from 1.00 to 0.95. A
# model needs time and examples to pick up a bias. After 120 steps, the effect on the score is only 0.64, and if popcorn
# is added to only 10% of the preferred texts, it is 0.21.

# %%
predictions.show()
progress()
