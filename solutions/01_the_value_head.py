# %% [markdown]
# # 01 The value head
#
# PPO needs to know, in the middle of a text, how well it is going: the *value* of a state is the reward
# to be expected from here,
#
# $$V(s_t) = \mathbb{E}_{x \sim \pi}\big[R(x) \mid s_t\big]$$
#
# A language model does not output this value, but its activations may contain it. In this lesson you attach a small
# network to an activation inside the transformer, train it to predict the reward, and then look for the first place in
# the transformer where the value can be read.
#
# **Afterwards you can**
# - find a hook point by its name, and say what goes through it, when, and in what shape,
# - hang a value head on a transformer without changing anything that it says,
# - say which of the 29 values of a review belongs to which of its 26 generated tokens,
# - measure where in a network something can be read, without fooling yourself.
#
# **What to inspect** when values look wrong:
#
# | you see | look at | because |
# |---|---|---|
# | logits change when the value head is on | what the hook returns | a hook that returns something replaces the activation |
# | values pile up, or runs get slower | hooks that are still attached | `add_hook` stays until it is reset, `hooks(...)` and `run_with_hooks` clean up |
# | the value moves one token too late | the slice of the values | a value belongs to the state *before* a token |
# | first values are far from 0 | the size of the last layer | a random last layer makes the first advantages noise |
# | explained variance does not leave 0 | `head_lr`, the hook, which reward goes with which row | the head does not learn, or cannot |
# | a probe reads everything, everywhere | sequences that it was fitted on | score it on others |

# %%
# first cell

# %% [markdown]
# About 100 minutes of work. All cells together run in about 40 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import copy

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
    show_intervals,
    show_table,
)
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.organism import (
    Grammar,
    build_graph,
    true_reward,
    grammar_policy,
    state_values,
    token_information,
)
from rlhf_lab.views import sparkline, tokens_html

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
over_seeds = SeedFigures("the_value_head", SETTINGS)
predictions = Predictions()

# %% [markdown]
# `SETTINGS` decides what this runs on: Reel, a tiny language of movie reviews, and a transformer of
# two layers that speaks it. With `preset="gpt2-medium"`, on a GPU with a network, the same cells
# run on GPT-2-medium; what is exactly known about Reel is then left out of the tables. The text
# between the cells tells what came out on Reel (GPT-2 is wider, and learns more slowly).
#
# ## Names for places
#
# A `HookedTransformer` computes what any transformer does, and at every step of the way passes the
# activation through a *hook point*. By itself a hook point does nothing. Hang a function on it, and
# the function gets to see (and may replace) what goes through.
#
# Attach a function to all of them that notes the name and the shape, and run the model on a text. Hook
# points are listed in the order in which they fire.

# %%
args = RLHFArgs(**SETTINGS)
model = load_model(args.base_model)
tokens = model.to_tokens("this movie honestly , the plot was really good but the ending was dull .")
fired = []


def note(activation: Tensor, hook: object) -> None:
    """Remember who fired, and what went through."""
    fired.append((hook.name, list(activation.shape)))


with torch.no_grad():
    model.run_with_hooks(tokens, fwd_hooks=[(lambda name: True, note)])
print("tokens:", list(tokens.shape), "- layers:", model.cfg.n_layers, "- width:", model.cfg.d_model)
last_block = f"blocks.{model.cfg.n_layers - 1}."
in_last_block = [(name, shape) for name, shape in fired if name.startswith(last_block)]
show_table(["hook point in the last block", "shape"], in_last_block)
print(len({name for name, _ in fired}), "hook points fired, of", len(model.hook_dict))

# %% [markdown]
# TransformerLens has the same names. The model itself is one file, `rlhf_lab/models/hooked_transformer.py`, with the
# shape of each activation next to its hook point.
#
# The *residual stream* is what runs through all blocks: each attention layer reads it and adds to
# it (`hook_resid_pre` is before that, `hook_resid_mid` after), then each MLP does (`hook_resid_post`
# after). Behind the last block two modules make the logits of it: `ln_final`, a LayerNorm, and
# `unembed`, a matrix.
#
# The value head is to read the same activation that `unembed` reads, up to a scale and a shift of each dimension.
# Which of these four hook points carries it?

# %%
hook_point = "ln_final.hook_normalized"  # predict: "blocks.1.hook_resid_post", "ln_final.hook_scale", "ln_final.hook_normalized" or "blocks.1.hook_mlp_out"

# %%
behind_the_blocks = fired[fired.index(in_last_block[-1]) + 1 :]
show_table(["fires behind the last block", "shape"], behind_the_blocks)
has_width = [name for name, shape in behind_the_blocks if shape[-1] == model.cfg.d_model]
predictions.compare("the value head belongs on", hook_point, has_width[0])

# %% [markdown]
# (The norm changes the stream, so the last `hook_resid_post` is not the right one. `hook_scale` is the divisor, one number
# per position, and `blocks.1.hook_mlp_out` is only what the last MLP adds. On another model the hook point has the same name.)
#
# There are two ways to attach a hook. `model.add_hook(name, function)` leaves it there until somebody calls
# `model.reset_hooks()`, which removes the hooks of everybody else, too. `with
# model.hooks(fwd_hooks=[(name, function)]):` takes its own hooks off at the end, and only those,
# even if something fails in between. Prefer the second.
#
# A hook that returns nothing leaves the activation alone. Try what one does that returns something:

# %%
silenced = "different"  # predict: "the same" or "different"


# %%
def silence(activation: Tensor, hook: object) -> Tensor:
    """Put zeros in place of an activation."""
    return torch.zeros_like(activation)


with torch.no_grad():
    before = model(tokens)
    with model.hooks(fwd_hooks=[(f"{last_block}hook_mlp_out", silence)]):
        during = model(tokens)
    after = model(tokens)
predictions.compare(
    "logits without the last MLP are", silenced, "the same" if during.equal(before) else "different"
)
print("and after the with block:", "as before" if after.equal(before) else "still changed")

# %% [markdown]
# The trainer samples and learns with this forward pass, so a hook on its policy is called in both. A hook point without
# hooks costs next to nothing. For some lines torch has one operation that computes all of them: the normalization
# of `ln1`, `ln2` and `ln_final`, and the softmax of attention scores. `Norm.forward` and `Attention.attend` use this operation
# unless a hook is registered between the lines. Both ways give the same numbers up to rounding.
#
# ## A value head
#
# The value head is a small network from `d_model` numbers to one. Hook it to
# `ln_final.hook_normalized`, and one forward pass gives both: logits, and a value at each position.
#
# The cell contains the whole class, except for one method: look for `raise NotImplementedError`. `states` runs the blocks,
# and `hidden_and_values` runs the final norm, `with self.value_hook() as values`. Afterwards `values[0]` must be the values,
# `[batch seq]`. Write `value_hook`: make an empty list, register a hook that appends the values to it, and `yield` the list
# while the hook is registered. `VALUE_HOOK` is the name of the hook point, and `self.base_model.hook_dict[VALUE_HOOK]` the
# hook point, a torch module. Its method `register_forward_hook(function)` calls `function(hook_point, inputs, activation)` and
# returns a handle; `with` this handle, the hook is removed at the end. `with self.base_model.hooks(...)`, as above, works
# as well, but looks through all hook points of the model, and generating text enters this context for each token.

# %%
from rlhf_lab.models import TransformerWithValueHead  # exercise

# %% [markdown]
# Does the policy still say what the model said? And what are its first values, before any training:
# about 0, about 1, or anything?

# %%
logits_with_head = "the same"  # predict: "the same" or "different"
first_values = "about 0"  # predict: "about 0", "about 1" or "anything"

# %%
policy = TransformerWithValueHead(model, seed=args.seed)
with torch.no_grad():
    logits, values = policy(tokens)
print("logits", list(logits.shape), "values", list(values.shape))
print("largest value", f"{values.abs().max().item():.4f}")
gap = (logits - before).abs().max().item()
print("largest difference of the logits", f"{gap:.0e}")
predictions.compare(
    "the policy's logits are", logits_with_head, "the same" if gap < 1e-4 else "different"
)
size = values.abs().max().item()
kind = "about 0" if size < 0.1 else "about 1" if (values - 1).abs().max() < 0.1 else "anything"
predictions.compare("the first values are", first_values, kind)

# %% [markdown]
# (The logits are the same up to rounding: the hook is between two lines of the final norm.)
#
# The last layer of a fresh value head is drawn very small, so that all values begin near 0. What do the first
# advantages look like then? With values of 0 there is no surprise anywhere but at the last token, where the reward
# $R$ comes. How it is handed back to the tokens before it is derived in {lesson:rewards_and_credit}: the token that stands $k$ places
# before the last one gets $\lambda^k R$, with a setting $\lambda$ between 0 and 1 (`gae_lambda`). Only with
# $\lambda = 1$ are the first advantages the rewards themselves. With an ordinary random last layer they would be
# noise, and the policy would spend its first phases chasing it.
#
# ## Which value belongs to which token?
#
# The policy gives a value at every position. A value stands at a token, but means the state *after*
# reading it, in which the next token is to be chosen. PPO needs for each generated token the value
# of the state before it.

# %%
from rlhf_lab.functional import generated_values  # exercise

# %%
trainer = RLHFTrainer(RLHFArgs(**SETTINGS | dict(base_lr=0.0)), policy=policy)
rollout = trainer.rollout_phase()
samples, prefix_len = rollout.samples, rollout.samples.prefix_len


def words_of(row: Int[Tensor, " seq"]) -> list[str]:
    """Each token as text."""
    return [trainer.tokenizer.decode([token]) for token in row.tolist()]


first_row = words_of(samples.tokens[0])
with torch.no_grad():
    _, all_values = policy(samples.tokens, samples.attention_mask)
cut = generated_values(all_values, prefix_len)
print("values of all positions", list(all_values.shape), "- of generated tokens", list(cut.shape))
show_table(
    ["t", "the state before it ends in", "position", "generated token"],
    [
        [t, first_row[prefix_len - 1 + t], prefix_len - 1 + t, first_row[prefix_len + t]]
        for t in range(3)
    ],
)
print("same as the sampler noted:", bool(torch.allclose(cut, samples.values, atol=1e-5)))

lam, gen = trainer.args.gae_lambda, int(samples.mask[0].sum())
places = (0, gen // 2, gen - 1)
show_table(
    ["token of review 1", "its advantage", "normalised reward times lambda ^ places to the end"],
    [
        [t, rollout.advantages[0, t].item(), rollout.rewards[0].item() * lam ** (gen - 1 - t)]
        for t in places
    ],
)

# %% [markdown]
# ## Train nothing but the head
#
# Your policy is in the trainer above. Its `base_lr` is 0: the transformer stays exactly as it is,
# only the value head learns. What can it learn from a transformer that was trained to continue
# reviews, and never heard of a reward?
#
# The *explained variance* says how much of the differences in outcome the values foresee: 0 is nothing, 1
# everything. With $G$ for the returns, which are the targets,
#
# $$EV = 1 - \operatorname{Var}(G - V) \,/\, \operatorname{Var}(G)$$
#
# Where will it be after eight phases?
#
# (6 s on one core)

# %%
explained = "0.1 to 0.7"  # predict: "below 0.1", "0.1 to 0.7" or "above 0.7"

# %%
policy = TransformerWithValueHead(model, seed=args.seed)
frozen = RLHFArgs(**SETTINGS | dict(base_lr=0.0))
trainer = RLHFTrainer(frozen, out=new_run("head"), policy=policy)
reports = trainer.train()
foreseen = [report.explained_variance for report in reports]
print("reward            ", " ".join(f"{report.mean_reward:6.3f}" for report in reports))
print("explained variance", " ".join(f"{ev:6.3f}" for ev in foreseen), sparkline(foreseen))
bracket = (
    "below 0.1" if foreseen[-1] < 0.1 else "0.1 to 0.7" if foreseen[-1] <= 0.7 else "above 0.7"
)
predictions.compare("explained variance after eight phases", explained, bracket)
over_seeds.compare("explained variance", {"phase 1": foreseen[0], "phase 8": foreseen[-1]})
ends = {"phase 1": reports[0].mean_reward, "phase 8": reports[-1].mean_reward}
over_seeds.compare("mean reward", ends)

# %% [markdown]
# Over the three seeds the mean reward neither rises in all nor falls in all, as expected: the policy does not
# change. The explained variance rises from 0 in each of them, without a single change to the transformer. So its residual
# stream already held information about the outcome.
#
# ## Colour a review by its value
#
# Blue is above 0, orange below; hover for the numbers. Rewards are normalised to mean 0, and so are
# the values. Find the words at which the value head changes its mind.

# %%
rollout = trainer.rollout_phase()
best, worst = int(rollout.raw_rewards.argmax()), int(rollout.raw_rewards.argmin())
# The value of the state after a token is the one before the next token.
after_each = rollout.samples.values[:, 1:]
show_table(["reward", "text"], [[rollout.raw_rewards[best].item(), rollout.texts[best]]])
words = [f" {word.strip()} " for word in words_of(rollout.samples.tokens[best])]
tokens_html(words[prefix_len:-1], after_each[best], "value")

# %%
show_table(["reward", "text"], [[rollout.raw_rewards[worst].item(), rollout.texts[worst]]])
words = [f" {word.strip()} " for word in words_of(rollout.samples.tokens[worst])]
tokens_html(words[prefix_len:-1], after_each[worst], "value")

# %% [markdown]
# ## Where does the transformer know it?
#
# The value head reads the end of the transformer. Can the value be read earlier: in which layer, and after which word? To
# find out, take the residual stream at one place, and fit the simplest *reader* there is, a linear one. If a linear map
# of the activations gives the value, no further computation is needed to read it.
#
# ### The reader
#
# *Ridge regression* is least squares with a penalty on large slopes: it minimises
#
# $$\sum_i (y_i - w \cdot x_i)^2 + n \rho v \, |w|^2, \qquad \text{so} \qquad (X^\top X + n \rho v I)\, w = X^\top y$$
#
# (set the gradient $-2 X^\top (y - Xw) + 2 n \rho v w$ to 0), with $x$ and $y$ centred, $v$ the mean variance of
# the columns of $x$ and $\rho$ `ridge`. With no more reviews than dimensions the fit needs the penalty, since without it
# the slopes fit noise. With some hundreds of reviews a small penalty is enough. The function fits many places at once:
# `*site` in the shapes stands for any number of leading axes, or none. Where $x$ never varies, the matrix that multiplies
# $w$ is 0 and the equations cannot be solved, so use `(ridge * variance).clamp(min=1e-12)` in the penalty.

# %%
from rlhf_lab.probes.value_lens import fit_ridge  # exercise

# %% [markdown]
# ### The truth
#
# On Reel we need not take the reward of the finished review for the truth about its middle. How a
# review will end is partly decided by words that have not been said, and nobody can read those. But
# the grammar of Reel is known, and with it the exact value of every prefix: the mean reward over all
# the ways in which the grammar might go on.
#
# Sample 512 reviews from the transformer (which has not changed), keep its residual stream at five
# places, and look the exact values up.

# %%
wide = RLHFArgs(**SETTINGS | dict(batch_size=512, seed=args.seed + 1))  # other reviews
reviews = RLHFTrainer(wide, out=new_run("reviews"), policy=policy).rollout_phase()
ids, speaks_reel = reviews.samples.tokens, args.preset == "reel"
sites = {"embedding": "blocks.0.hook_resid_pre"}
for layer in range(model.cfg.n_layers):
    sites[f"attention {layer}"] = f"blocks.{layer}.hook_resid_mid"
    sites[f"MLP {layer}"] = f"blocks.{layer}.hook_resid_post"
with torch.no_grad():
    _, cache = model.run_with_cache(ids, names_filter=list(sites.values()), device="cpu")
    values = policy(ids)[1].cpu()

n_fit = 2 * len(ids) // 3  # the reader is fitted to these reviews, and scored on the others
rewards = reviews.raw_rewards[:, None].cpu().double().expand(ids.shape)
target, known, ridge = rewards, torch.ones(ids.shape, dtype=torch.bool), 0.1
columns = {f"position {t}": t for t in range(prefix_len + 5, ids.shape[1], 6)}
if speaks_reel:
    grammar = grammar_policy(build_graph(Grammar()))
    target, known = state_values(grammar, true_reward, ids)
    ridge = 1e-6
    columns = {"adj 1": 9, "conn 2": 10, "noun 2": 12, "adj 2": 15, "conn 3": 16, "noun 3": 18}
    columns |= {"adj 3": 21, "stop": 22, "i": 23, "verb": 24}
else:
    print("no exact values here; the value is the reward of the finished text, at every position")
show_table(
    ["", *columns],
    [
        ["review 1", *(words_of(ids[0])[t] for t in columns.values())],
        ["value", *(f"{target[0, t]:.2f}" for t in columns.values())],
        ["review 2", *(words_of(ids[1])[t] for t in columns.values())],
        ["value", *(f"{target[1, t]:.2f}" for t in columns.values())],
    ],
)

# %% [markdown]
# These are the values *after* the words in the table: P(positive | the words so far). The reward that
# the classifier gives for a whole review is nearly that.
#
# Predict what the reader will find. The first adjective of a review, "good" or "dull", tells how the
# reviewer feels, unless there is a "wasn't" two words before it. The word behind it, "and" or "but",
# announces whether the next clause agrees. And the verb, "liked" or "hated", is the verdict. Between
# the third adjective and the verb stand "." and "i", which are always the same and tell nothing.
#
# One thing to know about the transformer: it was trained to guess the next word, and nothing else.
# And all reviews are built alike. A clause is "the", a noun, "was" or "wasn't", an adverb, an
# adjective; "and" or "but" joins three of them; then come ".", "i", the verb, "it", "." and a
# "thanks" or "bye".
# At which of six places is the value read *worst* off the last layer? (At some places the word itself carries the value.
# At others the model must have carried it there.)
#
# The reader is scored on reviews that it was not fitted to, by the share of the variance that it explains. With $y_i$ for
# the exact value in review $i$, and $\hat y_i$ for what the reader says,
#
# $$R^2 = 1 - \frac{\operatorname{mean}_i \, (y_i - \hat y_i)^2}{\operatorname{Var} y}$$
#
# 1 means that every value is read exactly. 0 means that the reader does no better than saying the mean of $y$ in every
# review. A negative $R^2$ means that it does worse than that: its slopes fit something that new reviews do not have.
#
# Each $R^2$ has a 95 % interval over the scored reviews, and predictions about it are scored by this interval: "nothing" if
# it reaches down to 0, "nearly all" if all of it lies above 0.9, and "some of it" otherwise. Places whose intervals
# overlap are not ranked: each place whose interval overlaps that of the lowest $R^2$ is accepted as the worst.

# %%
embedding_at_the_adjective = "some of it"  # predict: "nothing", "some of it" or "nearly all"
embedding_at_the_connector = "nothing"  # predict: "nothing", "some of it" or "nearly all"
last_layer_reads_worst_at = "adj 3"  # predict: "adj 1", "conn 2", "adj 3", "stop", "i" or "verb"


# %%
def readable(site: str | Tensor, t: int, y: Tensor, score: slice | None = None) -> Interval:
    """The share of y's variance at position t that is read off a site, with its interval.

    The reader is fitted to the first two thirds of the reviews, and scored on the last one, or on
    the reviews of `score`.
    """
    score = slice(n_fit, None) if score is None else score
    states = cache[sites[site]] if isinstance(site, str) else site
    x, y = states[:, t].double(), y[:, t].double()
    slope, intercept = fit_ridge(x[:n_fit], y[:n_fit], known[:n_fit, t], ridge)
    kept = known[score, t]
    true, read = y[score][kept], (x[score] @ slope + intercept)[kept]
    r2 = lambda error, mean, square: 1 - error / (square - mean.square())
    return bootstrap_means((true - read).square(), true, true.square(), statistic=r2)


share = {site: {name: readable(site, t, target) for name, t in columns.items()} for site in sites}
show_intervals("R2 at", share, "reviews")


# %%
def ends(r2: Interval) -> tuple[float, float]:
    """The ends of an interval; with too few reviews for one, everything is possible."""
    return (-torch.inf, torch.inf) if r2.low is None else (r2.low.item(), r2.high.item())


def in_words(r2: Interval) -> str:
    """How much of the variance is read, as far as the interval tells."""
    low, _ = ends(r2)
    return "nothing" if low <= 0 else "nearly all" if low > 0.9 else "some of it"


def read_worst(r2: dict[str, Interval]) -> tuple[str, ...]:
    """The place with the lowest R2, and those whose intervals overlap that of the lowest."""
    lowest = min(r2.values(), key=lambda found: found.value)
    return tuple(name for name, found in r2.items() if ends(found)[0] <= ends(lowest)[1])


if speaks_reel:
    first, last = share["embedding"], share[list(sites)[-1]]
    six_places = ("adj 1", "conn 2", "adj 3", "stop", "i", "verb")
    six = {name: last[name] for name in six_places}
    for question, guess, found in [
        ("embedding, adj 1", embedding_at_the_adjective, in_words(first["adj 1"])),
        ("embedding, conn 2", embedding_at_the_connector, in_words(first["conn 2"])),
        ("of six, the last layer reads worst at", last_layer_reads_worst_at, read_worst(six)),
    ]:
        predictions.compare(question, guess, found)
    missed = {name: 1 - r2.value.item() for name, r2 in six.items()}
    over_seeds.compare("the reader misses at", missed)

# %% [markdown]
# Is it the *transformer* that knows, or would anything do that sees the words? As a control, take the same
# transformer with the numbers of every weight matrix in a random order: same architecture, same sizes, same words,
# nothing learned. Attention still mixes words; which ones is chance. How much can be read off its last layer?

# %%
control_at_i = "nothing"  # predict: "nothing", "some of it" or "nearly all"

# %%
shuffled_model = copy.deepcopy(model)
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for parameter in shuffled_model.parameters():
        order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].view_as(parameter))


def last_layer_of(other: HookedTransformer) -> dict[str, Interval]:
    """What can be read at each place off the last layer of another model, on the same reviews."""
    with torch.no_grad():
        _, own = other.run_with_cache(ids, names_filter=[sites[list(sites)[-1]]], device="cpu")
    states = next(iter(own.values()))
    return {name: readable(states, t, target) for name, t in columns.items()}


control = last_layer_of(shuffled_model)
series = {
    "embedding": share["embedding"],
    "last layer, weights shuffled": control,
    "last layer": share[list(sites)[-1]],
}
show_intervals("R2 at", series, "reviews")
if speaks_reel:
    predictions.compare("shuffled weights, at i", control_at_i, in_words(control["i"]))

# %% [markdown]
# Read the table by columns (the brackets are intervals over the reviews that were scored):
#
# - The embedding knows nothing but the word. The verb alone explains much of the variance, an adjective
#   some of it (the "wasn't" before it is not in its embedding), "and" next to nothing.
# - The shuffled transformer shows what mixing alone is worth. At "i" the interval includes 0: with these reviews it
#   cannot be told from nothing. What the trained transformer has beyond the shuffled one, it has learned.
# - Attention brings in the words before, "wasn't" among them. "wasn't dull" is not the sum of its words: one
#   turns the other round. Attention can still combine them, because the query comes from the adjective: how
#   much of "wasn't" is read depends on which adjective reads.
#
# Now read it by rows. The reader misses most at "adj 3" in two of the three seeds of its table, and at "stop" in the
# third. The intervals of these two places overlap, so they cannot be ranked. At "adj 3", "stop" and "i" the value is the
# same number (look at the two reviews above), and yet more of it can be read at "i" than at the other two. Of the three
# places only "i" stands before a word that depends on how good the movie was. Does this hold for this one model only? The
# package has two more models of the same training, which differ in the seed alone. The same reviews, read by all three:

# %%
if speaks_reel:
    three = {name: load_model(name) for name in ("reel-nano", "reel-nano-b", "reel-nano-c")}
    of_model = {name: last_layer_of(other) for name, other in three.items()}
    show_intervals("R2 of the last layer at", of_model, "reviews")

# %% [markdown]
# In all three models more can be read at "i" than at "adj 3" or "stop", and the intervals do not overlap. But the word
# that comes next is not the whole explanation. After the first adjective comes "and" or "but", which tells whether two
# clauses agree, not whether they praise, and the value can be read at "adj 1" all the same, in all three models. Other
# places, such as "conn 3", differ from model to model (with so few reviews, small differences mean nothing). What a probe
# finds in one model need not be there in the next. ({Lesson:watch_it_learn} looks at all places of a review.)
#
# ### Fooling yourself
#
# The reader has 64 slopes, and was scored on reviews that it had not seen. What would its score be on the reviews that it
# was fitted to? Give it something that cannot be read: the values of the reviews in a random order. What R2 does it get
# on the reviews that it was fitted to, and what on new ones? ("About 0" is an interval that includes 0.)

# %%
nonsense_on_seen = "above 0"  # predict: "below 0", "about 0" or "above 0"
nonsense_on_new = "below 0"  # predict: "below 0", "about 0" or "above 0"

# %%
shuffled = target[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
last_site, last_column = list(sites)[-1], list(columns.values())[0]
scores = {
    "seen": readable(last_site, last_column, shuffled, slice(n_fit)),
    "new": readable(last_site, last_column, shuffled),
}
print("fitted to", n_fit, "reviews")
for where, score in scores.items():
    print(f"R2 on {where} reviews: {score}")
for where, guess in [("seen", nonsense_on_seen), ("new", nonsense_on_new)]:
    score = scores[where]
    low, high = ends(score)
    kind = "below 0" if high < 0 else "above 0" if low > 0 else "about 0"
    predictions.compare(f"R2 of nonsense on {where} reviews", guess, kind)

# %% [markdown]
# 64 slopes for 341 reviews explain about 64 / 341 of anything. On new reviews the same slopes are
# worse than the mean. Whenever someone shows you a probe, ask for the reviews it was scored on.
#
# ## How well can anybody know?
#
# The value head is not trained on exact values, which nobody has outside Reel. It is trained on what
# happened in the end. How much of *that* could be foreseen? After a prefix of exact value V, the
# reward still varies, and what V explains of it is Var(V) / Var(reward). For Reel the grammar says
# what that is. Could a perfect reader, after the first adjective, foresee the rewards with an R2 of
# 0.9?

# %%
perfect_reader_after_adj_1 = "no"  # predict: "yes" or "no"

# %%
foresees = {name: readable(last_site, t, rewards) for name, t in columns.items()}
show_intervals("R2 of the reward at", {"last layer": foresees}, "reviews")
if speaks_reel:
    settled = token_information(grammar, true_reward).cumsum(0)
    ceiling = [(settled[t - 1] / settled[-1]).item() for t in columns.values()]
    show_table(["at most, at", *columns], [["of the grammar", *ceiling]], digits=2)
    before_each = (settled[prefix_len - 2 : -1] / settled[-1]).mean().item()
    print(
        f"at most, mean over the states before the {samples.mask.shape[1]} tokens: {before_each:.2f}"
    )
    predictions.compare(
        "0.9 is possible", perfect_reader_after_adj_1, "yes" if ceiling[0] > 0.9 else "no"
    )

# %% [markdown]
# (The ceiling is for all reviews of the grammar, and for a reader that knows the grammar. A sample of 171 reviews can
# come out above it or below it, and slopes fitted to 341 chance outcomes lose some of the explained variance.) So an
# explained variance of 0.27 to 0.34 over all tokens, which is what three seeds gave, does not mean a bad value head. Before
# the first adjective the ceiling is 0, only behind the verb is it 1, and its mean over the states before generated
# tokens, the last line above, is 0.57.
#
# ## Your value head against the reader
#
# The reader has one set of slopes for each position and was fitted to the truth. Your value head
# serves all positions at once, and has seen nothing but rewards, in eight phases. How do its values
# compare with the exact ones, and where is it worst? (Squared correlation, since its values are of
# normalised rewards.)
#
# A second table helps to understand the result. At each place it takes the mean state of the reviews whose value is above
# average there, minus the mean state of the others. How long is this difference, as a share of the mean length of a state,
# and does it point in the same direction as the difference at "i"? (A cosine of 1 means the same direction, 0 a
# perpendicular one.)

# %%
value_head_is_worst_at = "adj 1"  # predict: "adj 1", "conn 2", "adj 3", "stop", "i" or "verb"


# %%
def squared_correlation(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Interval:
    """The R2 of the best line from one to the other, with its interval."""
    x, y = x.double(), y.double()
    r2 = lambda x, y, xy, xx, yy: (xy - x * y).square() / ((xx - x * x) * (yy - y * y))
    return bootstrap_means(x, y, x * y, x.square(), y.square(), statistic=r2)


def good_from_bad(
    x: Float[Tensor, "batch d_model"], y: Float[Tensor, " batch"]
) -> Float[Tensor, " d_model"]:
    """The mean state above the mean of y minus the one below, per mean length of a state."""
    good = y > y.mean()
    return (x[good].mean(0) - x[~good].mean(0)) / x.norm(dim=1).mean()


head = {name: squared_correlation(values[:, t], target[:, t]) for name, t in columns.items()}
show_intervals("R2 at", {"reader": share[last_site], "value head": head}, "reviews")
states, place_i = cache[sites[last_site]], columns.get("i", ids.shape[1] - 1)
apart = {t: good_from_bad(states[:, t], target[:, t]) for t in (*columns.values(), place_i)}
like_i = [torch.cosine_similarity(apart[t], apart[place_i], dim=0) for t in columns.values()]
show_table(
    ["good from bad at", *columns],
    [
        ["distance", *(apart[t].norm().item() for t in columns.values())],
        [f"as at {'i' if speaks_reel else 'the end'}", *(cosine.item() for cosine in like_i)],
    ],
    digits=2,
)
if speaks_reel:
    predictions.compare("your value head is worst at", value_head_is_worst_at, read_worst(head))
    missed = {name: 1 - r2.value.item() for name, r2 in head.items()}
    over_seeds.compare("the value head misses at", missed)
    distances = {name: apart[t].norm().item() for name, t in columns.items()}
    over_seeds.compare("distance of good from bad at", distances)

# %% [markdown]
# Over three seeds the value head misses 0.10 to 0.13 of the variance at "i", 0.17 to 0.19 at the verb and 0.26 to
# 0.40 at most other places. In each seed it misses more than half at "stop", more than two thirds at "adj 3", and
# nearly everything at "adj 1", although a reader of just that position misses next to nothing there. The second table
# gives part of the reason. At "adj 1" the mean states of good and of bad reviews differ by about a hundredth of a state's
# length, in each seed less than anywhere else in the table. A reader of one position with hardly any penalty on large
# slopes can multiply this small difference by any factor. The value head has the same weights at all positions, and a
# factor that large would spoil the values at the others. (The table does not explain what is missing at "adj 3" and
# "stop".) Where the mean states of good and bad reviews lie far apart, as at the verb, the head reads the difference even
# though it points in another direction than at "i". The head had eight phases, and a transformer that did not change. In
# PPO the transformer changes, too, since the value loss also trains the transformer.

# %% [markdown]
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# (The numbers under "What was found" come from three seeds on Reel. The cells of this lesson give them with the settings named there.)
#
# - `head_lr=1e-2`, or 20 phases: how far does the explained variance rise with the transformer frozen? And with `base_lr`
#   as the preset has it? Hypothesis: a head that learns longer or faster comes nearer to the ceiling of 0.57, and a
#   transformer that learns, too, helps it further.
#
#   <details><summary>What was found</summary>
#
#   In the last phase. Frozen, 20 phases: 0.40 to 0.41. Frozen, 8 phases with `head_lr=1e-2`: 0.31 to
#   0.42. The preset's `base_lr`, 8 phases: 0.27 to 0.34, no more than with the transformer frozen. (In the last case the
#   rewards change during the run, and with them what there is to explain, so the numbers are not strictly comparable.)
#
#   </details>
#
# - Read another quantity: `bag_of_adjectives` or `length` in place of `true_reward` (from `rlhf_lab.organism`; their docstrings say what they
#   pay for). Hypothesis: `bag_of_adjectives`, which adds up adjectives, can be read as well as `true_reward` or better, and the length of
#   the review cannot be read.
#
#   <details><summary>What was found</summary>
#
#   In `reel-nano` and in the two models of other seeds, over the ten places of the tables: the lowest R2 of `bag_of_adjectives` is
#   0.78, that of `true_reward` 0.43. The value of `length` does not vary at these places, since nearly all reviews are equally
#   long: its R2 is not defined.
#
#   </details>
#
# ## Investigations
#
# Each takes an hour or two. Each has a hypothesis: write down first whether you share it, and what would change your mind.
#
# - **What does the hidden layer do?** Hand `TransformerWithValueHead` a linear head,
#   `torch.nn.Linear(model.cfg.d_model, 1)`. Hypothesis: it does as well at the places where the second table of the
#   last section shows a cosine near 1, and worse elsewhere. Three seeds, explained variance by place.
#
#   <details><summary>What was found</summary>
#
#   Not so, after eight phases with the transformer frozen (a linear head with weights drawn small). At "i", where the
#   cosine is 1, the squared correlation of the linear head is 0.56 to 0.65, that of the usual head 0.87 to 0.90. At "conn 3",
#   "adj 3" and "stop" the two differ by less than 0.1 in each seed. The explained variance over all tokens is 0.12 to 0.14
#   with the linear head, 0.27 to 0.34 with the usual one.
#
#   </details>
#
# - **Is a probe's success evidence?** Hewitt and Liang 2019 ([1909.03368](https://arxiv.org/abs/1909.03368)) give
#   each *word type* a random label and ask how well a probe learns that: the difference to the real task is its
#   selectivity. Do it for the values of this lesson. Hypothesis: a random label of the word at a place is read nearly
#   perfectly there, so that selectivity is near 0 at "adj 1" and the verb; at "stop" and "i", where the label would be that
#   of an earlier word, selectivity is large. Belinkov 2022 ([2102.12452](https://arxiv.org/abs/2102.12452)) reviews what
#   probes can and cannot show.
# - **Read is not used.** Take the direction that the reader found at "i" out of the residual stream, and see whether
#   the verdict changes. A direction that can be read need not be one that the model reads (Elazar et al. 2021,
#   [2006.00995](https://arxiv.org/abs/2006.00995)). Hypothesis: fewer verdicts agree with the review than after the removal
#   of a random direction, but more than by chance, since the model can also read the value elsewhere. {Lesson:watch_it_learn} does it
#   with controls.
# - **Three models.** Repeat the shuffled control and the table by places for `reel-nano-b` and `reel-nano-c`. Which
#   sentences of this lesson hold for all three? Write down those that do not. Hypothesis: what is said of the embedding and
#   of mixing holds for all three, and what is said of a single place does not.
#
#   <details><summary>What was found</summary>
#
#   With shuffled weights the R2 at "i" is 0.12, 0.10 and 0.15, and at the verb 0.76, 0.77 and 0.80 (`reel-nano`, `-b`, `-c`).
#   In the trained models the R2 at "adj 3" is 0.74, 0.82 and 0.43, and at "stop" 0.76, 0.80 and 0.71: only in the last of
#   them do the intervals tell these two places apart.
#
#   </details>
#
# - **When does the value head help?** Compare `advantages="gae"` with `gae_lambda=1` and with 0.5, with a head that
#   was trained first (as here) and a fresh one, three seeds each. The better the head, the smaller `gae_lambda` may
#   be (Schulman et al. 2016, [1506.02438](https://arxiv.org/abs/1506.02438), section 6); where is the crossing?
#   Hypothesis: with the trained head 0.5 earns more than 1, with the fresh head less.
#
#   <details><summary>What was found</summary>
#
#   Reward in the last of eight phases, three seeds. With `gae_lambda=1`: 0.90 to 0.92 with a fresh head, 0.89 to 0.90 with
#   one that was trained for eight phases before. With 0.5: 0.58 to 0.66 and 0.66 to 0.75. So the trained head helps at 0.5,
#   in each seed, but not enough: 1 earns more with either head.
#
#   </details>
#
# Next: {lesson:the_objective}, where values and rewards become one objective.
