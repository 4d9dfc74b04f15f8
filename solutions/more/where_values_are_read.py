# %% [markdown]
# # Where values are read
#
# By the end of this lesson you can measure in which layer, and after which word, the value of a review can be read from
# a transformer, and you can test such a measurement with controls.
#
# {Lesson:the_value_head} trains a value head on the final residual stream of a frozen transformer. Here you replace the
# head by the simplest probe, a linear one, and apply it to every layer and position.
#
# **You will also be able to**
# - fit a ridge regression in closed form;
# - compare a probe with a control that has learned nothing;
# - explain why a probe must be scored on samples that it was not fitted to.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 30 seconds on one core, without a network. Cells that take
# more than 3 seconds are labeled:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import copy

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import (
    Predictions,
    SeedFigures,
    check,
    hint,
    new_run,
    progress,
    show_intervals,
    show_table,
)
from rlhf_lab.functional import Interval, bootstrap_means, zero_masked
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead, load_model
from rlhf_lab.organism import (
    Grammar,
    build_graph,
    grammar_policy,
    state_values,
    token_information,
    true_reward,
)

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
over_seeds = SeedFigures("where_values_are_read", SETTINGS)
predictions = Predictions()

# %% [markdown]
# First train a value head on the frozen transformer for eight phases, as in {lesson:the_value_head}.
#
# (6 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
model = load_model(args.base_model)
policy = TransformerWithValueHead(model, seed=args.seed)
trainer = RLHFTrainer(RLHFArgs(**SETTINGS | dict(base_lr=0.0)), out=new_run("head"), policy=policy)
reports = trainer.train()
print(f"explained variance of the value head: {reports[-1].explained_variance:.2f}")

# %% [markdown]
# ## A linear probe
#
# *Ridge regression* is least squares with a penalty on large slopes. It minimizes
#
# $$\sum_i (y_i - w \cdot x_i)^2 + n \rho v \, |w|^2, \qquad \text{so} \qquad (X^\top X + n \rho v I)\, w = X^\top y$$
#
# (set the gradient $-2 X^\top (y - Xw) + 2 n \rho v w$ to 0), with $x$ and $y$ centered, $v$ the mean variance of the
# columns of $x$ and $\rho$ `ridge`. If there are no more reviews than dimensions, the fit needs the penalty, since without
# it the slopes fit noise. With some hundreds of reviews a small penalty is enough. The function fits many activations at
# once: `*site` in the shapes is any number of leading axes, or none. If $x$ never varies, the matrix that multiplies $w$
# is 0 and the equations cannot be solved, so use `(ridge * variance).clamp(min=1e-12)` in the penalty.

# %%
from rlhf_lab.probes.value_lens import fit_ridge  # exercise

# %% [markdown]
# ## Exact values
#
# On Reel the target need not be the reward of the finished review, which partly depends on words that are not written yet.
# The grammar of Reel is known, and with it the exact value of every prefix: the mean reward over all continuations.
#
# Sample 512 reviews from the transformer, keep its residual stream after five components, and look up the exact values.

# %%
wide = RLHFArgs(**SETTINGS | dict(batch_size=512, seed=args.seed + 1))  # other reviews
reviews = RLHFTrainer(wide, out=new_run("reviews"), policy=policy).rollout_phase()
ids, prefix_len = reviews.samples.tokens, reviews.samples.prefix_len
sites = {"embedding": "blocks.0.hook_resid_pre"}
for layer in range(model.cfg.n_layers):
    sites[f"attention {layer}"] = f"blocks.{layer}.hook_resid_mid"
    sites[f"MLP {layer}"] = f"blocks.{layer}.hook_resid_post"
last_site = list(sites)[-1]
with torch.no_grad():
    _, cache = model.run_with_cache(ids, names_filter=list(sites.values()), device="cpu")
    values = policy(ids)[1].cpu()

n_fit = 2 * len(ids) // 3  # the probe is fitted to these reviews, and scored on the others
rewards = reviews.raw_rewards[:, None].cpu().double().expand(ids.shape)
grammar = grammar_policy(build_graph(Grammar()))
target, known = state_values(grammar, true_reward, ids)
columns = {"adj 1": 9, "conn 2": 10, "noun 2": 12, "adj 2": 15, "conn 3": 16, "noun 3": 18}
columns |= {"adj 3": 21, "stop": 22, "i": 23, "verb": 24}


def row_words(row: int) -> list[str]:
    """Decode the words of one review at the columns of the tables."""
    return [trainer.tokenizer.decode([int(ids[row, t])]) for t in columns.values()]


rows = []
for row in range(2):
    rows.append([f"review {row + 1}", *row_words(row)])
    rows.append(["value", *(f"{target[row, t]:.2f}" for t in columns.values())])
show_table(["", *columns], rows)

# %% [markdown]
# A value in the table belongs to the state *after* the word: P(positive | the words so far).
#
# All reviews have the same form. A clause is "the", a noun, "was" or "wasn't", an adverb, an adjective. "and" or "but"
# joins three clauses. Then come ".", "i", the verb, "it", "." and a goodbye. The first adjective, "good" or "dull", shows
# the reviewer's opinion, unless there is a "wasn't" two words before. "and" or "but" announces whether the next clause
# agrees. The verb, "liked" or "hated", is the verdict.
#
# The probe is scored on reviews that it was not fitted to, by the fraction of the variance that it explains:
#
# $$R^2 = 1 - \frac{\operatorname{mean}_i \, (y_i - \hat y_i)^2}{\operatorname{Var} y}$$
#
# 1 means that every value is read exactly, 0 that the probe is as good as the mean of $y$, and a negative $R^2$ that it is
# worse. Each $R^2$ has a 95 % interval over the scored reviews, and predictions are scored by it: "nothing" if it reaches
# down to 0, "nearly all" if all of it is above 0.9, "some of it" otherwise. Positions with overlapping intervals are not
# ranked.
#
# How much of the value is in the embedding of the first adjective? And at which of six positions is the value read *worst*
# from the last layer?

# %%
embedding_at_the_adjective = "some of it"  # predict: "nothing", "some of it" or "nearly all"
last_layer_reads_worst_at = "adj 3"  # predict: "adj 1", "conn 2", "adj 3", "stop", "i" or "verb"


# %%
def read_value(
    site: str | Tensor, t: int, y: Float[Tensor, "batch seq"], score: slice | None = None
) -> Interval:
    """Compute the R2 of a probe at position t, fitted to the first two thirds of the reviews.

    It is scored on the last third, or on the reviews of `score`.
    """
    score = slice(n_fit, None) if score is None else score
    states = cache[sites[site]] if isinstance(site, str) else site
    x, y = states[:, t].double(), y[:, t].double()
    slope, intercept = fit_ridge(x[:n_fit], y[:n_fit], known[:n_fit, t], 1e-6)
    kept = known[score, t]
    exact, predicted = y[score][kept], (x[score] @ slope + intercept)[kept]
    r2 = lambda error, mean, square: 1 - error / (square - mean.square())
    return bootstrap_means((exact - predicted).square(), exact, exact.square(), statistic=r2)


r2 = {site: {name: read_value(site, t, target) for name, t in columns.items()} for site in sites}
show_intervals("R2 at", r2, "reviews")


# %%
def ends(interval: Interval) -> tuple[float, float]:
    """Return the ends of an interval; infinite if there were too few reviews for one."""
    if interval.low is None:
        return -torch.inf, torch.inf
    return interval.low.item(), interval.high.item()


def amount(interval: Interval) -> str:
    """Name the fraction of the variance that is read."""
    low, _ = ends(interval)
    return "nothing" if low <= 0 else "nearly all" if low > 0.9 else "some of it"


def read_worst(r2: dict[str, Interval]) -> tuple[str, ...]:
    """List the positions whose intervals overlap that of the lowest R2."""
    lowest = min(r2.values(), key=lambda interval: interval.value)
    return tuple(name for name, one in r2.items() if ends(one)[0] <= ends(lowest)[1])


six = {name: r2[last_site][name] for name in ("adj 1", "conn 2", "adj 3", "stop", "i", "verb")}
predictions.compare(
    "embedding, adj 1", embedding_at_the_adjective, amount(r2["embedding"]["adj 1"])
)
predictions.compare("the last layer reads worst at", last_layer_reads_worst_at, read_worst(six))
over_seeds.compare("1 - R2 at", {name: 1 - one.value.item() for name, one in six.items()})

# %% [markdown]
# ## A control
#
# Is the value in the *transformer*, or would anything do that sees the words? The control is the same transformer with
# the entries of every weight matrix in a random order: same architecture, same sizes, same words, nothing learned. How much
# can be read at "i" from its last layer?

# %%
control_at_i = "nothing"  # predict: "nothing", "some of it" or "nearly all"

# %%
shuffled_model = copy.deepcopy(model)
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for parameter in shuffled_model.parameters():
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].view_as(parameter))


def read_last_layer(other: HookedTransformer) -> dict[str, Interval]:
    """Compute the R2 at each position of another model's last layer, on the same reviews."""
    with torch.no_grad():
        _, found = other.run_with_cache(ids, names_filter=[sites[last_site]], device="cpu")
    states = next(iter(found.values()))
    return {name: read_value(states, t, target) for name, t in columns.items()}


control = read_last_layer(shuffled_model)
series = {"embedding": r2["embedding"], "weights shuffled": control, "last layer": r2[last_site]}
show_intervals("R2 at", series, "reviews")
predictions.compare("shuffled weights, at i", control_at_i, amount(control["i"]))

# %% [markdown]
# Read the table by columns:
#
# - The embedding contains only the word. The verb alone explains much of the variance, an adjective some of it (the
#   "wasn't" before it is not in its embedding), "and" next to nothing.
# - The shuffled transformer shows the effect of mixing alone: 0.30 [0.15, 0.42] at "i", and at most other positions
#   nothing. Everything that the trained transformer has in addition, it has learned.
# - Attention adds the words before, "wasn't" among them. "wasn't dull" is not the sum of its words: one reverses the other.
#   Attention can still combine them, because the query comes from the adjective.
#
# Now read it by rows. At "adj 3", "stop" and "i" the value is the same number (see the two reviews above), but more of it
# can be read at "i" than at the other two. Of the three positions only "i" is before a word that depends on the opinion.
# Is this so in this one model only? The package has two more models of the same training with other seeds.

# %%
three = {name: load_model(name) for name in ("reel-nano", "reel-nano-b", "reel-nano-c")}
of_model = {name: read_last_layer(other) for name, other in three.items()}
show_intervals("R2 of the last layer at", of_model, "reviews")

# %% [markdown]
# In all three models more can be read at "i" than at "adj 3" or "stop", and the intervals do not overlap. But the next word
# is not the whole explanation: after the first adjective comes "and" or "but", which is about agreement and not about
# praise, and the value can be read at "adj 1" in all three models. Other positions, such as "conn 3", differ from model to
# model. What a probe finds in one model need not be in the next.
#
# ## Overfitting
#
# The probe has a slope per dimension, and was scored on reviews that it had not seen. Give it a target that cannot be
# read: the values of the reviews in a random order. What R2 does it have on the reviews that it was fitted to?

# %%
nonsense_on_seen = "above 0"  # predict: "below 0", "about 0" or "above 0"

# %%
shuffled = target[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
nonsense = {
    "seen": read_value(last_site, columns["adj 1"], shuffled, slice(n_fit)),
    "new": read_value(last_site, columns["adj 1"], shuffled),
}
print("fitted to", n_fit, "reviews")
for where, score in nonsense.items():
    print(f"R2 on {where} reviews: {score}")
low, high = ends(nonsense["seen"])
kind = "below 0" if high < 0 else "above 0" if low > 0 else "about 0"
predictions.compare("R2 of nonsense on seen reviews", nonsense_on_seen, kind)

# %% [markdown]
# d slopes fitted to n reviews explain about d / n of the variance of any target. On new reviews the same slopes are worse
# than the mean. The score of a probe is evidence only on reviews that it was not fitted to.
#
# ## The ceiling
#
# The value head is not trained on exact values, but on rewards. How much of the *reward* can be predicted? After a prefix
# of exact value V the reward still varies, and V explains Var(V) / Var(reward) of it, which the grammar gives.

# %%
reward_r2 = {name: read_value(last_site, t, rewards) for name, t in columns.items()}
show_intervals("R2 of the reward at", {"last layer": reward_r2}, "reviews")
settled = token_information(grammar, true_reward).cumsum(0)
ceiling = [(settled[t - 1] / settled[-1]).item() for t in columns.values()]
show_table(["at most, at", *columns], [["of the grammar", *ceiling]], digits=2)
before_each = (settled[prefix_len - 2 : -1] / settled[-1]).mean().item()
print(f"at most, mean over the states before generated tokens: {before_each:.2f}")

# %% [markdown]
# (The ceiling is for all reviews of the grammar. A sample of 171 reviews can come out above or below it.) So an explained
# variance of about a third over all tokens does not mean a bad value head. Before the first adjective the ceiling is 0,
# only after the verb it is 1, and its mean over the states before generated tokens is 0.57.
#
# ## The value head and the probe
#
# The probe has one set of slopes for each position and was fitted to exact values. The value head has one set of weights
# for all positions, and has seen only rewards. At which position is it worst? (The table has squared correlations, since
# the values of the head are of normalized rewards.)
#
# A second table helps to understand the result. At each position it takes the mean state of the reviews with a value above
# average, minus the mean state of the others: its length, as a fraction of the mean length of a state, and its cosine with
# the difference at "i".

# %%
value_head_is_worst_at = "adj 1"  # predict: "adj 1", "conn 2", "adj 3", "stop", "i" or "verb"


# %%
def squared_correlation(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Interval:
    """Compute the R2 of the best line from one to the other, with its interval."""
    x, y = x.double(), y.double()
    r2 = lambda x, y, xy, xx, yy: (xy - x * y).square() / ((xx - x * x) * (yy - y * y))
    return bootstrap_means(x, y, x * y, x.square(), y.square(), statistic=r2)


def mean_difference(
    x: Float[Tensor, "batch d_model"], y: Float[Tensor, " batch"]
) -> Float[Tensor, " d_model"]:
    """Compute the mean state above the mean of y minus the one below, per mean length of a state."""
    good = y > y.mean()
    return (x[good].mean(0) - x[~good].mean(0)) / x.norm(dim=1).mean()


head = {name: squared_correlation(values[:, t], target[:, t]) for name, t in columns.items()}
show_intervals("R2 at", {"probe": r2[last_site], "value head": head}, "reviews")
states = cache[sites[last_site]]
apart = {name: mean_difference(states[:, t], target[:, t]) for name, t in columns.items()}
show_table(
    ["good minus bad at", *columns],
    [
        ["length", *(one.norm().item() for one in apart.values())],
        [
            "cosine with i",
            *(torch.cosine_similarity(x, apart["i"], dim=0).item() for x in apart.values()),
        ],
    ],
    digits=2,
)
predictions.compare("the value head is worst at", value_head_is_worst_at, read_worst(head))
over_seeds.compare(
    "1 - R2 of the value head at", {name: 1 - one.value.item() for name, one in head.items()}
)

# %% [markdown]
# In each of three seeds the value head misses nearly everything at "adj 1", although a probe of just that position misses
# next to nothing there. The second table gives part of the reason. At "adj 1" the mean states of good and of bad reviews
# differ by about a hundredth of a state's length. A probe of one position can multiply this small difference by any
# factor. The value head has the same weights at all positions, and so large a factor would spoil its other values. (The
# table does not explain the misses at "adj 3" and "stop".) In PPO the transformer changes as well, since the value loss
# also trains it.
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - **Another target.** Read `bag_of_adjectives` or `length` instead of `true_reward` (both from `rlhf_lab.organism`).
#
#   <details><summary>Results (three models, ten positions)</summary>
#
#   The lowest R2 of `bag_of_adjectives` is 0.78, that of `true_reward` 0.43. The value of `length` does not vary at these
#   positions, since nearly all reviews have the same length: its R2 is not defined.
#
#   </details>
#
# - **A linear value head.** Pass `torch.nn.Linear(model.cfg.d_model, 1)`, with small weights, as the head of
#   `TransformerWithValueHead`.
#
#   <details><summary>Results (three seeds, 8 phases, frozen transformer)</summary>
#
#   At "i" the squared correlation of the linear head is 0.56 to 0.65, that of the usual head 0.87 to 0.90. At "conn 3",
#   "adj 3" and "stop" the two differ by less than 0.1. The explained variance over all tokens is 0.12 to 0.14 with the
#   linear head, 0.27 to 0.34 with the usual one.
#
#   </details>
