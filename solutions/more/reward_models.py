# %% [markdown]
# # Reward models
#
# By the end of this lesson you can measure the calibration of a reward model, over-optimize it without training, and predict
# how a bias of the collected pairs ends up in the reward.
#
# **You need** {lesson:preferences}.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 20 seconds on a single core, without a network.

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
# With a temperature $T$ the rater's choice is more or less random, and a fraction $e$ of all labels is flipped, for example
# because the rater clicked on the wrong text. With $d = u(a) - u(b)$, the label is $a \succ b$ with probability
#
# $$(1 - e)\, \sigma(d / T) + e\, \sigma(-d / T)$$

# %%
from rlhf_lab.functional import sample_preferences  # exercise

# %% [markdown]
# With $T = 1$ this probability stays between $e$ and $1 - e$. A reward model that fits it perfectly learns a gap of at most
# $\log \frac{1 - e}{e}$: 2.94 for 5 % flipped labels, and 1.39 for 20 %. Large gaps shrink most. Stored reward models, trained
# as in {lesson:preferences} and evaluated on 1,500 fresh pairs without flipped labels:

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
# With 1,024 pairs, 20 % flipped labels reduce the accuracy from 0.86 to 0.81, but the slope from 0.64 to 0.14. So a policy
# that is trained on this reward gets a reward of a different scale, and the same `kl_coef` means something else.
#
# ## Calibration
#
# A model is *calibrated* if the first text wins in seven of ten pairs for which it predicts 0.7. Sort the pairs by the predicted
# probability, split them into bins of equal counts, and compare.

# %%
from rlhf_lab.functional import calibration_bins  # exercise

# %% [markdown]
# Two reward models, of 64 and of 1,024 pairs. Which suffers more from few pairs: the order, or the probabilities? Both losses
# are measured as a fraction of the difference between the true utility and a coin.
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
# The probabilities suffer more: the model of 64 pairs predicts probabilities near 0 and 1, and is often wrong.
#
# ## The best of n
#
# The simplest way to optimize a reward needs no training: sample n texts, and keep the text with the highest score. What is
# the *true* reward of that text? Drawing n of N scored texts many times gives a noisy answer. The mean over *all* ways to draw
# n different texts is exact, and it is a weighted mean
#
# $$\mathbb{E}[\text{true reward of the best of } n] = \sum_i w_i\, \text{true reward}_i$$
#
# with $w_i$ the probability that text $i$ has the highest score among n texts. Find $w$. Texts with equal scores win equally
# often. Compute in float64. (This exercise has no steps.)

# %%
from rlhf_lab.functional import best_of_n_weights  # exercise

# %% [markdown]
# The KL of best-of-n is at most $\log n - \frac{n - 1}{n}$ ({lesson:the_kl_penalty}). Take the 3,000 reviews of the fresh pairs
# as a pool. If the model of 64 pairs chooses, does the true reward still rise from the best of 16 to the best of 64? The result
# is the 95 % interval of the difference over eight parts of the pool.

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
# Chosen by the model of 1,024 pairs, the best of 64 is as good as if the utility had chosen it. Chosen by the model of 64 pairs
# it stays below: from n = 16 to 64 the score of the model rises by 0.52, and the true reward by 0.02 only. The fall that Gao et
# al. (2022) report does not appear: best-of-n stays among texts that the reference generates, where this model is not far wrong.
#
# ## Biased pairs
#
# Collected preferences also reflect things that have nothing to do with quality: the longer response, or a phrase that one
# group of people likes. On Reel the bias is a word. After the rater has chosen, "popcorn" replaces the last word of some
# of the *preferred* texts.
#
# A preferred text contains popcorn with probability $p_c$, and a rejected text with $p_\ell$. Define $f = 1$ for a text with
# popcorn and 0 without. By Bayes' rule, the log odds that $a$ is the preferred text are
#
# $$\big(u(a) - u(b)\big) + \lambda\, \big(f(a) - f(b)\big), \qquad \lambda = \log \frac{p_c\, (1 - p_\ell)}{(1 - p_c)\, p_\ell}$$
#
# This is the Bradley-Terry model with the utility $u + \lambda f$. So the best fit *rewards* popcorn, and two counts tell you
# how much. The grammar itself ends one review in fifty with popcorn. Half of the preferred texts now get the word. What is the
# accuracy of reward models of 1,024 such pairs, on fresh pairs without the bias?

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
# After 400 steps popcorn raises the score by 3.69, close to $\lambda$. The accuracy is 0.85, so accuracy does not reveal the
# bias: you have to replace the word and look at the score. The best of 64 reveals it, too: 48 % of the chosen texts end with
# popcorn, and the true reward falls from 1.00 to 0.95. A bias takes time and examples: after 120 steps the effect is
# 0.64, and with 10 % of the texts it is 0.21.

# %%
predictions.show()
progress()
