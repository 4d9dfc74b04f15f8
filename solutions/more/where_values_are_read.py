# %% [markdown]
# # Where values are read
#
# By the end of this lesson, you will be able to measure in which layer of a transformer, and after which word, a
# review's value can be decoded, and use controls to test whether such a measurement means anything.
#
# {Lesson:the_value_head} trains a value head on the final residual stream of a frozen transformer. Here you replace
# this head with the simplest possible probe, a linear one, and apply it to every layer and position.
#
# **You will also be able to**
# - fit a ridge regression in closed form;
# - compare a probe with a control that has learned nothing;
# - explain why you must score a probe on samples it wasn't fitted to.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 30 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
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
# First, train a value head on the frozen transformer for eight phases, as in {lesson:the_value_head}.
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
# (To get the second equation, set the gradient $-2 X^\top (y - Xw) + 2 n \rho v w$ to 0.) Here $x$ and $y$ are
# centered, $v$ is the mean variance of the columns of $x$, and $\rho$ is the argument `ridge`.
#
# Why do we need the penalty? Without it, the slopes would fit noise when there are no more reviews than dimensions.
# With a few hundred reviews, a small penalty is enough.
#
# Your function should be batched: in the shape annotations, `*site` stands for any number of leading axes, including none.
# There is one edge case: if $x$ is constant, the matrix that multiplies $w$ is 0, and the system is singular. To avoid this,
# use `(ridge * variance).clamp(min=1e-12)` as the ridge term.

# %%
from rlhf_lab.probes.value_lens import fit_ridge  # exercise

# %% [markdown]
# ## Exact values
#
# What should the probe predict? The obvious target is the reward of the finished review, but this partly depends on
# words that haven't been generated yet. On Reel we can do better. We know the grammar, so we can compute the exact
# value of every prefix, which is the mean reward over all continuations.
#
# The next cell samples 512 reviews from the transformer, stores its residual stream after five components, and looks up
# the exact values.

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
# Each value in the table belongs to the state *after* the word: it is P(positive | the words so far).
#
# All reviews have the same structure. There are three clauses, joined by "and" or "but", and each consists of "the", a
# noun, "was" or "wasn't", an adverb, and an adjective. After that come ".", "i", a verb, "it", "." and a goodbye. You
# can guess the reviewer's opinion from the first adjective ("good" or "dull"), unless there is a "wasn't" two words
# before it. The "and" or "but" tells you whether the next clause will agree. The verb ("liked" or "hated") is the final
# verdict.
#
# We score the probe on reviews it wasn't fitted to, by the fraction of variance it explains:
#
# $$R^2 = 1 - \frac{\operatorname{mean}_i \, (y_i - \hat y_i)^2}{\operatorname{Var} y}$$
#
# An $R^2$ of 1 means that the probe reads every value exactly, and 0 means that it does no better than always
# predicting the mean of $y$. If $R^2$ is negative, the probe does even worse.
#
# Each $R^2$ comes with a 95% confidence interval over the scored reviews, which we use to judge your predictions. "Nothing"
# means that the interval includes 0, and "nearly all" means that the whole interval is above 0.9. Anything else is "some of
# it". If the intervals of two positions overlap, we don't rank them.
#
# How much of the value can you read from the first adjective's embedding? And in the last layer, at which of six
# positions is R2 the *lowest*?

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
# Has the *transformer* computed the value, or could you read it from anything that sees the words? As a control, we use
# the same transformer with the entries of each weight matrix shuffled. Its architecture, weight magnitudes, and input
# words are the same, but it hasn't learned anything. How much of the value can you read from its last layer at "i"?

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
# First, compare the rows:
#
# - The embedding knows only the current word. The verb's embedding explains much of the variance, and an adjective's
#   explains some of it (but it doesn't know about the "wasn't" before it). The embedding of "and" explains almost
#   nothing.
# - The shuffled transformer shows how much you get just from mixing words: 0.30 [0.15, 0.42] at "i", and nothing at
#   most other positions. Anything beyond that must have been learned in training.
# - Attention adds information about earlier words, including "wasn't". Note that the meaning of "wasn't dull" isn't the
#   sum of its words, because "wasn't" reverses "dull". Attention can still combine the two, because the query comes
#   from the adjective.
#
# Now compare the columns. At "adj 3", "stop", and "i", the value is exactly the same (look at the two reviews above),
# yet you can read more of it at "i" than at the other two. What is special about "i"? Of the three, it is the only
# position where the next word depends on the reviewer's opinion.
#
# But maybe this is only true for this particular model. The package includes two more models trained the same way with
# different seeds, so let's check.

# %%
three = {name: load_model(name) for name in ("reel-nano", "reel-nano-b", "reel-nano-c")}
of_model = {name: read_last_layer(other) for name, other in three.items()}
show_intervals("R2 of the last layer at", of_model, "reviews")

# %% [markdown]
# In all three models, you can read more of the value at "i" than at "adj 3" or "stop", and the intervals don't overlap.
# However, the next word can't be the whole explanation. After the first adjective comes "and" or "but", which signals
# agreement rather than praise, and still the value can be read at "adj 1" in all three models. Other positions, such as
# "conn 3", differ between models. So don't assume that a probe's finding in one model carries over to another.
#
# ## Overfitting
#
# With one slope per dimension, a probe can overfit, so we have scored it on held-out reviews. Let's see how much this
# matters. We give the probe a target it can't possibly recover: the same values, shuffled across reviews. What is its
# R2 on the reviews it was fitted to?

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
# If you fit d slopes to n reviews, they explain about d / n of the variance of *any* target. On new reviews, the same
# slopes do worse than the mean. So a probe's score only counts as evidence on reviews it wasn't fitted to.
#
# ## The ceiling
#
# The value head is trained on rewards, not on exact values. How much of the *reward* can be predicted at all? After
# a prefix with exact value V, the reward still varies. The best possible prediction is V, which explains the fraction
# Var(V) / Var(reward) of the variance. We can compute this fraction from the grammar.

# %%
reward_r2 = {name: read_value(last_site, t, rewards) for name, t in columns.items()}
show_intervals("R2 of the reward at", {"last layer": reward_r2}, "reviews")
settled = token_information(grammar, true_reward).cumsum(0)
ceiling = [(settled[t - 1] / settled[-1]).item() for t in columns.values()]
show_table(["at most, at", *columns], [["of the grammar", *ceiling]], digits=2)
before_each = (settled[prefix_len - 2 : -1] / settled[-1]).mean().item()
print(f"at most, mean over the states before generated tokens: {before_each:.2f}")

# %% [markdown]
# (The ceiling is computed over all reviews of the grammar, so a sample of 171 reviews can end up slightly above or
# below it.) A value head that explains only about a third of the variance over all tokens isn't necessarily a bad one.
# The ceiling is 0 before the first adjective and only reaches 1 after the verb. Averaged over the states before
# generated tokens, it is 0.57.
#
# ## The value head and the probe
#
# The probe has an advantage over the value head: it has separate slopes for each position and was fitted to exact
# values. The value head has to use the same weights everywhere and has only seen rewards. At which position is the
# value head's R2 lowest? (The table shows squared correlations, because the head predicts normalized rewards.)
#
# A second table will help you understand the result. At each position, we take the mean state of the reviews with an
# above-average value and subtract that of all other reviews. The table shows the norm of this difference relative to
# the mean norm of a state, and its cosine with the difference at "i".

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
# In all three seeds, the value head misses almost everything at "adj 1", while a probe for this position alone misses
# almost nothing. The second table explains part of this. At "adj 1", the mean states of good and bad reviews differ by
# only about a hundredth of a state's length. A probe for a single position can multiply this small difference by as
# large a factor as it needs. But the value head has the same weights at all positions, so such a large factor would
# make its values wrong elsewhere. (The table doesn't explain why the head also misses values at "adj 3" and "stop".) In
# PPO, the transformer can adapt as well, because it is also trained by the value loss.
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - **Another target.** Instead of `true_reward`, read `bag_of_adjectives` or `length` (both from `rlhf_lab.organism`).
#
#   <details><summary>Results (three models, ten positions)</summary>
#
#   The lowest R2 is 0.78 for `bag_of_adjectives`, and 0.43 for `true_reward`. For `length`, R2 is undefined: nearly all
#   reviews have the same length, so its value doesn't vary at these positions.
#
#   </details>
#
# - **A linear value head.** Use `torch.nn.Linear(model.cfg.d_model, 1)`, with small weights, as the head of
#   `TransformerWithValueHead`.
#
#   <details><summary>Results (three seeds, 8 phases, frozen transformer)</summary>
#
#   The linear head is clearly worse at "i", where its squared correlation is 0.56 to 0.65, compared with 0.87 to 0.90
#   for the usual head. At "conn 3", "adj 3", and "stop", the two differ by less than 0.1. Over all tokens, the linear
#   head explains 0.12 to 0.14 of the variance, and the usual head 0.27 to 0.34.
#
#   </details>
