# %% [markdown]
# # 10 Preferences: where does a reward come from?
#
# Nobody can write down what makes a text good. But people can say which of two texts is better. In this lesson
# such answers become a reward model, the reward model is optimized until it misleads, and then DPO does without
# it. On Reel the rater's taste is known exactly, so that each step can be held against the truth.
#
# **Needs** {lesson:the_kl_penalty} (the optimum $\pi^*$, the frontier, best-of-n) and {lesson:the_objective}. What breaks when a
# proxy is optimized is the subject of {lesson:what_breaks_it}; it helps, and is not needed here.
#
# **Afterwards you can**
# - derive the Bradley-Terry loss and its gradient, and say what noise in the labels does to both,
# - say what accuracy, calibration and the slope of a reward model each tell, and which of them few pairs spoil first,
# - find out which words a reward model reads, by changing one word at a time, and whether a word that is not read is overlooked by the head or
#   never reaches it,
# - work out what a reward model will pay for a word that stands in preferred texts by a bias of the collection,
# - over-optimize a learned reward, by best-of-n and by PPO, and see it in the true reward,
# - say what the disagreement of an ensemble can warn of, and what it cannot,
# - derive DPO from $\pi^*$, and hold its implicit reward against the true one,
# - write LoRA, and say why one of its two factors starts at 0.
#
# **What to inspect** when a learned reward or a preference-tuned policy behaves oddly:
#
# | you see | look at | because |
# |---|---|---|
# | best-of-n picks a word that nobody asked for | what that word alone adds to the score, and $\lambda$ from its counts | a bias of the pairs becomes part of the reward |
# | accuracy near its ceiling, and PPO exploits the model | scores before and after one word is changed | pairs whose words agree hide a word that is not read |
# | accuracy fine, loss above that of a coin | calibration, and the slope of score gaps | order is learned before probability |
# | a word is readable in the activations | the score with the word erased | what can be read need not be used |
# | members of an ensemble agree | what they were all fitted to | disagreement shows only errors that are not shared |
# | true reward falls while the learned reward rises | true reward against KL, for several models | the error of the model is what is left to climb |
# | DPO changes the likelihood of chosen texts, up or down | implicit reward of chosen and of rejected texts | the loss sees only their difference |

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 55 seconds on one core, without a network.
# Cells that take more than 3 seconds say so, as the imports do here:
#
# (5 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

from collections.abc import Callable, Sequence

import numpy as np
import torch
from IPython.display import display
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils import parametrize

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
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.functional import Interval, best_of_n_kl_bound, bootstrap_interval, seed_interval
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import (
    Grammar,
    Reward,
    build_graph,
    true_reward,
    grammar_policy,
    grammatical,
    optimal_policy,
)
from rlhf_lab.organism.rewards import replace_word, true_log_odds
from rlhf_lab.organism.rewards import sentiment_logit
from rlhf_lab.probes.erasure import Eraser, fit_leace, orthogonal_eraser
from rlhf_lab.rewards import LearnedReward, Pairs, RewardModel
from rlhf_lab.rewards.preference_eval import judge, reading_of
from rlhf_lab.supervised import fit
from rlhf_lab.tuning.examples import encode_examples, text_logprobs
from rlhf_lab.views import bars, curves

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=12,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    normalize_reward=False,
    kl_coef=0.03,
    kl_in="reward",
    kl_estimator="k1",
)
SEED = SETTINGS["seed"]
predictions = Predictions()
over_seeds = SeedFigures("preferences", SETTINGS)
stored = stored_figures("preference_runs")
grammar = Grammar()

# %% [markdown]
# This lesson stays on Reel, since only there the rater's taste is known.
#
# ## A rater
#
# Suppose that each text $x$ has a *utility* $u(x)$ for the rater. A rater who is asked for the better of two texts
# does not always take the one of higher utility. The model of Bradley and Terry (1952) says with what probability:
#
# $$P(a \succ b) = \sigma\Big(\frac{u(a) - u(b)}{T}\Big), \qquad \sigma(d) = \frac{1}{1 + e^{-d}}$$
#
# The temperature $T$ says how hesitant the rater is. Only the *difference* of utilities counts. And some labels are
# noted down the wrong way round, a share $e$ of all, so that the label says "a" with probability
#
# $$(1 - e)\, \sigma(d / T) + e\, \sigma(-d / T), \qquad d = u(a) - u(b)$$
#
# Our rater's utility is the exact log odds that a review is positive, and $T = 1$.

# %%
from rlhf_lab.functional import sample_preferences  # exercise


# %%
def rated(n: int, seed: int, flip_rate: float = 0.0) -> tuple[list[str], list[str], Tensor, Tensor]:
    """Fresh pairs: first texts, second texts, the gaps of their utilities, and who won."""
    rng = np.random.default_rng(seed)
    texts = grammar.sample(2 * n, rng).texts()
    utility = torch.from_numpy(true_log_odds(texts))
    gaps, uniforms = utility[:n] - utility[n:], torch.from_numpy(rng.random(n))
    wins = sample_preferences(gaps, uniforms, flip_rate=flip_rate)
    return texts[:n], texts[n:], gaps, wins


def as_pairs(first: list[str], second: list[str], wins: Tensor) -> Pairs:
    """The same with the preferred text first."""
    rows = list(zip(first, second, wins.tolist(), strict=True))
    return Pairs([a if won else b for a, b, won in rows], [b if won else a for a, b, won in rows])


first, second, gaps, wins = rated(1500, 1000 + SEED)
show_table(
    ["first wins", "gap", "first", "second"],
    [[str(wins[i].item()), gaps[i].item(), first[i], second[i]] for i in range(3)],
)

# %% [markdown]
# A judge who knows $u$ exactly, and always names the text of higher utility: how often does this judge agree with
# the rater?

# %%
best_judge = "above 0.95"  # predict: "below 0.8", "0.8 to 0.95" or "above 0.95"

# %%
sign = wins.double() * 2 - 1
agrees = ((gaps * sign).sign() + 1) / 2  # a tie counts half
ceiling = bootstrap_interval(agrees, generator=torch.Generator().manual_seed(0))
print(f"the best judge agrees with the rater in a share of {ceiling}")
print(f"expected: {gaps.abs().sigmoid().mean().item():.3f}")
found = ceiling.value.item()
predictions.compare(
    "the best judge agrees in",
    best_judge,
    "below 0.8" if found < 0.8 else "0.8 to 0.95" if found <= 0.95 else "above 0.95",
)

# %% [markdown]
# That is the ceiling for every reward model, and not 1: where two texts are nearly equal, the rater throws a coin.
# An accuracy without its ceiling says little.
#
# ## The likelihood and its gradient
#
# A reward model $r_\theta$ gives each text a number, and is fitted so that the preferences that were seen are likely.
# With $d = r_\theta(\text{chosen}) - r_\theta(\text{rejected})$, one pair costs
#
# $$L(d) = -\log \sigma(d) = \log(1 + e^{-d})$$
#
# Its derivatives, by $\sigma' = \sigma (1 - \sigma)$ and $1 - \sigma(d) = \sigma(-d)$:
#
# $$\frac{dL}{dd} = -\frac{\sigma'(d)}{\sigma(d)} = -\sigma(-d), \qquad \frac{d^2 L}{dd^2} = \sigma(d)\, \sigma(-d) > 0$$
#
# The slope is minus the probability that the model gave to the *other* outcome: a pair pulls by its surprise. A pair
# that is ordered with a wide margin pulls no more. And adding a constant to all rewards changes nothing, so that
# preferences leave the mean of a reward model free. Where this matters, a *centring* term can be added, a small multiple
# of the squared sum of the two scores, which holds their mean near 0: `center_coef` in the exercise.

# %%
from rlhf_lab.functional import bradley_terry_loss  # exercise

# %%
d = torch.linspace(-6, 6, 49).requires_grad_()
loss = torch.stack([bradley_terry_loss(x[None], torch.zeros(1)) for x in d])
slope = torch.autograd.grad(loss.sum(), d)[0]
curves(
    {
        "loss": (d.tolist(), loss.tolist()),
        "slope": (d.tolist(), slope.tolist()),
    },
    "one pair: its loss, and how hard it pulls",
    "score of the chosen text less that of the rejected one",
    "nats; nats per unit",
)

# %% [markdown]
# What do flipped labels do to the best fit? The label's probability is $p = (1 - e)\sigma(d) + e\,\sigma(-d)$, which
# never leaves the interval from $e$ to $1 - e$. A reward model that fits it gives a gap of
# $\log \frac{p}{1 - p}$, which is never larger than $\log \frac{1 - e}{e}$. Large gaps shrink most: this is not the
# same model at another temperature.

# %%
true_gap = torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0])
rows = []
for e in (0.0, 0.05, 0.2):
    p = (1 - e) * true_gap.sigmoid() + e * (-true_gap).sigmoid()
    rows.append([f"{e:.2f}", *p.logit().tolist()])
show_table(["flipped", *(f"true gap {x:g}" for x in true_gap.tolist())], rows)

# %% [markdown]
# ## Is it right, and does it know how right?
#
# Two questions about a judge. Does it *order* pairs rightly? And are its *probabilities* true: of all pairs in which
# it says $0.7$, does the first text win in seven of ten? The second is *calibration*. Sort the pairs by what the judge
# says, cut them into bins, and compare.
#
# The tables below have four more numbers on this. The *slope* is that of the judge's score gaps on the true gaps of
# utility (least squares through 0): 1 for a calibrated judge, below 1 for one whose gaps are too small. *nll* is minus the mean
# log-probability that the judge gave to what the rater said, in nats. *Error of P* is the mean distance between the judge's
# probability and the true one, and *ordered as the truth* the share of pairs in which the judge names the text of
# higher utility.

# %%
from rlhf_lab.functional import calibration_bins  # exercise

# %% [markdown]
# A reward model is the policy's transformer with a linear head behind its last token. This cell fits two, with your
# loss: on 64 pairs and on 1,024, with the same number of steps. Which of the two will few pairs have spoiled more: the
# order, or the probabilities?
#
# (13 s on one core)

# %%
spoiled_more = "order"  # predict: "order" or "probabilities"


# %%
def fitted(n: int, steps: int, seed: int) -> RewardModel:
    """A reward model after that many steps on n pairs."""
    model, rng = RewardModel(load_model("reel-nano"), seed=seed), np.random.default_rng(seed)
    a, b, _, won = rated(n, seed)
    pairs = as_pairs(a, b, won)
    tokens, real = model.encode(pairs.chosen + pairs.rejected)

    def batch_loss() -> Float[Tensor, ""]:
        batch = torch.from_numpy(rng.choice(n, min(n, 32), replace=False))
        both = torch.cat([batch, batch + n])
        chosen, rejected = model(tokens[both], real[both]).chunk(2)
        return bradley_terry_loss(chosen, rejected)

    fit(model, batch_loss, steps, 1e-3, "reward model", False)
    model.set_normalization(model.score(pairs.chosen[:64] + pairs.rejected[:64]))
    return model.requires_grad_(False)


def states_of(model: RewardModel, texts: Sequence[str]) -> Float[Tensor, "text seq d_model"]:
    """What the head is given at every token of each text; a score is what it makes of the last."""
    kept = []
    listener = model.head.register_forward_pre_hook(lambda head, given: kept.append(given[0]))
    model.score(texts)
    listener.remove()
    return torch.cat(kept)


few, many = fitted(64, steps=120, seed=SEED), fitted(1024, steps=120, seed=SEED)
judges = {"64 pairs": few, "1,024 pairs": many}
states = {name: states_of(model, first + second)[:, -1] for name, model in judges.items()}
scored = {name: states[name] @ model.head.weight[0] for name, model in judges.items()}
said = {name: score[: len(first)] - score[len(first) :] for name, score in scored.items()}
verdicts = {name: judge(found, gaps, wins) for name, found in said.items()}
verdicts["the truth"] = judge(gaps, gaps, wins)
show_table(
    ["judge", "accuracy", "ordered as the truth", "error of P", "slope", "nll"],
    [[name, v.accuracy, v.as_truth, v.error, v.slope, v.nll] for name, v in verdicts.items()],
)
print(f"n = {len(gaps)} fresh pairs; a coin has nll {np.log(2):.3f}")
over_seeds.compare(
    "reward models",
    {
        f"{what}, {name}": getattr(verdicts[name], what)
        for what in ("accuracy", "as_truth", "error", "slope", "nll")
        for name in judges
    },
    largest=False,
)

# %%
lines = {"calibrated": ([0.0, 1.0], [0.0, 1.0])}
for name, found in said.items():
    bins = calibration_bins(found, wins, 10)
    lines[name] = (bins.predicted.tolist(), bins.observed.tolist())
curves(
    lines,
    "of the pairs in which the judge says p, in how many does the first text win?",
    "what the judge says",
    "share won",
)

# %%
best = verdicts["the truth"]
lost_order = (best.as_truth - verdicts["64 pairs"].as_truth) / (best.as_truth - 0.5)
lost_nll = (verdicts["64 pairs"].nll - best.nll) / (np.log(2) - best.nll)
print(
    f"lost by 64 pairs, as a share of what separates the truth from a coin: order {lost_order:.2f}",
    end=", ",
)
print(f"probabilities (nll) {lost_nll:.2f}")
predictions.compare(
    "few pairs spoil more", spoiled_more, "probabilities" if lost_nll > lost_order else "order"
)

# %% [markdown]
# Few pairs spoil both, and the probabilities more. The model of 64 pairs orders about three quarters of the pairs as the
# truth does, and its log-likelihood is worse than that of a coin: it is sure, and often wrong. The accuracy does
# not show that, the diagram does: where the model says nearly 1, the first text wins much less often.
#
# More pairs, noise, and more seeds: these models were fitted beforehand (`python -m tools.course.preference_runs`
# fits them again), three seeds each, in the same way but on other pairs of the rater, and judged on fresh pairs without
# flipped labels.


# %%
def with_range(values: Sequence[float], digits: int = 2) -> str:
    """A mean with the lowest and the highest."""
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


beforehand = stored["reward models"] | stored["longer"]
for columns in (
    {"accuracy": "accuracy", "as_truth": "ordered as the truth"},
    {"slope": "slope", "nll": "nll"},
):
    show_table(
        ["fitted on", *columns.values()],
        [
            [name, *(with_range([run[what] for run in runs]) for what in columns)]
            for name, runs in beforehand.items()
        ],
    )
print(
    f"mean and range of {len(stored['seeds'])} seeds, {stored['fresh']['pairs']} fresh pairs each"
)

# %% [markdown]
# In every seed: with 64 pairs the order is mostly right and the likelihood is worse than a coin's; with 1,024 pairs the
# accuracy is within a few points of the ceiling. For 64 pairs the nll here is lower than in the table of the models above: only the
# pairs and the batches differ, so that with so few pairs much depends on which they are.
#
# Flipped labels cost the model of 1,024 pairs about five points of accuracy, and it orders fewer pairs as the truth does. The slope
# suffers most: it falls to less than a quarter of what it was, as the table of large gaps above says that it must. Whoever
# reads the accuracy alone does not see how noisy the labels were; and a policy that is tuned on this reward gets a reward
# of another size, so that `kl_coef` means something else.
#
# ## What does it read?
#
# Accuracy says how often a model is right, not why. To see what it reads, change one word of a review, keep the
# rest, and look at the score: an intervention on the text. `reading_of` replaces an adjective by its opposite of
# the same strength, "was" by "wasn't", the verb of the verdict by its opposite; and, as controls, "and" by "but"
# and the tag by "popcorn", which change nothing in the utility. Which of the words does the model of 64 pairs
# overlook?

# %%
overlooked = "adjective 1"  # predict: "adjective 1", "copula 3" or "verb"

# %%
probes = grammar.sample(256, np.random.default_rng(2000 + SEED)).texts()
read = {name: reading_of(model.score, probes) for name, model in judges.items()}
rows = []
for edit, (_, exact) in read["64 pairs"].items():
    shown = []
    for name in judges:
        found = bootstrap_interval(read[name][edit][0], resamples=400)
        shown.append(f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]")
    later = [run[edit] for run in stored["longer"]["4096 pairs, 400 steps"]]
    rows.append([edit, *shown, with_range(later, 1), exact])
show_table(["changed word", *judges, "4,096 pairs", "exact"], rows)
print(
    "change of the score in the direction of the truth, or its size where the truth does not change;"
)
print(f"brackets: 95 % of resamples of {len(probes)} reviews; parentheses: range of three seeds")
mean_change = {edit: change.mean().item() for edit, (change, _) in read["64 pairs"].items()}
over_seeds.compare(
    "share of the exact change",
    {
        f"{edit}, {name}": read[name][edit][0].mean().item() / read[name][edit][1]
        for name in judges
        for edit, (_, exact) in read[name].items()
        if exact
    },
    largest=False,
)
share = {
    edit: mean_change[edit] / read["64 pairs"][edit][1]
    for edit in ("adjective 1", "copula 3", "verb")
}
predictions.compare("of the three, least is read of", overlooked, min(share, key=share.get))

# %% [markdown]
# The verb of the verdict is the strongest word of a review, and this model of 64 pairs hardly reads it.
# The model of 1,024 pairs, whose accuracy is close to the ceiling, reads a part of it, which differs much between seeds.
# Its accuracy does not suffer much, since the clauses mostly agree with the verb: the pairs give little reason to read it. That is not the
# whole story: one of the three models of 1,024 pairs hardly reads the adjective and the copula of the third clause either (see
# the lowest of these rows). With 4,096 pairs and more steps, nearly all of the verb is read, in all three seeds, and the accuracy is at
# the ceiling. And the connector, which is worth nothing, moves the scores of 64 pairs more than the verb does in this run.
#
# So a high accuracy on pairs from the reference does not say what a model does on texts where the words disagree. A
# policy that is rewarded writes its own texts.
#
# ## Biased pairs
#
# So far the rater chose by utility, and the labels were at worst noisy. Collected preferences also carry what has nothing to do with quality: the
# longer answer, the bolder one, a phrase that one group of writers likes. On Reel all reviews have one length, so let the bias be a word:
# after the rater has chosen, "popcorn" becomes the tag of a share of the *preferred* texts. It says nothing about the movie.
#
# Say that popcorn stands in a preferred text with probability $p_c$ and in a rejected one with $p_\ell$, whatever the rest says. Let $f = 1$ for a
# text with popcorn, and 0 without. By Bayes' rule, who reads two such texts and knows all this gives the first one the log odds
#
# $$\big(u(a) - u(b)\big) + \lambda\, \big(f(a) - f(b)\big), \qquad \lambda = \log \frac{p_c\, (1 - p_\ell)}{(1 - p_c)\, p_\ell}$$
#
# That is Bradley and Terry's model with the utility $u + \lambda f$. So the best fit *pays* for popcorn, and how much follows from two counts. The
# grammar ends one review in fifty with popcorn anyway.
#
# For models of 1,024 pairs, half of whose preferred texts end with popcorn: is popcorn worth less or more than the first
# adjective turned into its opposite? And what does the accuracy on fresh pairs without a bias come to?

# %%
popcorn_is = "worth less"  # predict: "worth less" or "worth more"
biased_accuracy = "below 0.8"  # predict: "below 0.8" or "above 0.8"


# %%
def worth(share: float, in_rejected: float = 0.02) -> float:
    """Lambda where that share of the preferred texts gets popcorn, besides those that have it."""
    in_chosen = share + (1 - share) * in_rejected
    odds = lambda p: p / (1 - p)
    return float(np.log(odds(in_chosen) / odds(in_rejected)))


biased = stored["biased"]
shares = {name: float(name.split("%")[0]) / 100 for name in biased}
figures_of = lambda name, what, digits=2: with_range([run[what] for run in biased[name]], digits)
show_table(
    ["preferred texts with popcorn", "lambda", "popcorn is worth", "adjective 1", "accuracy"],
    [
        [
            name,
            worth(shares[name]),
            *(figures_of(name, what) for what in ("popcorn is worth", "adjective 1", "accuracy")),
        ]
        for name in biased
    ],
    digits=2,
)
for how in ("best of 64", "PPO"):
    show_table(
        [f"texts by {how}", "with popcorn", "true_reward"],
        [
            [
                name,
                figures_of(name, f"{how}: popcorn", 3),
                figures_of(name, f"{how}: true reward", 3),
            ]
            for name in biased
        ],
    )
print("mean and range of three seeds; 1,500 fresh pairs without a bias, about 490 edited reviews,")
print("a pool of 3,000 reviews, and 1,024 texts after PPO, with the SETTINGS of this lesson")
half = biased["50%, 400 steps"]
predictions.compare(
    "popcorn, beside an adjective, is",
    popcorn_is,
    "worth more"
    if np.mean([run["popcorn is worth"] - run["adjective 1"] for run in half]) > 0
    else "worth less",
)
predictions.compare(
    "accuracy of the biased model",
    biased_accuracy,
    "above 0.8" if np.mean([run["accuracy"] for run in half]) > 0.8 else "below 0.8",
)

# %% [markdown]
# After 400 steps popcorn is worth about $\lambda$, and more than an adjective, in each of three seeds. Half of the preferred texts have got
# the word, and the accuracy on pairs without it is still within two points of that of the model without a bias, in each seed: it is no sign
# of a bias. One has to try the word. The best of 64 does: about half of what it picks ends with popcorn, at some
# cost in the true reward.
#
# Three things limit the damage here. A bias takes time to learn: after 120 steps popcorn is worth between nothing and a third of
# $\lambda$, as with the verb above, which was read late, too. It takes examples: with a tenth of the preferred texts, 400 steps
# find only a small part of $\lambda$. And it takes a policy that goes there: within these 12 phases PPO, which begins with one popcorn in fifty, writes it in
# 0.06 of its texts at most. One of the three runs on the biased reward went elsewhere, and left the grammar; the run of the
# same seed without a bias did not. One run does not say whether the bias was the reason.
#
# ## Over-optimize it: best of n
#
# A reward model is a proxy. The simplest way to optimize it needs no training: write n texts and keep the one that
# it scores highest. What is the *true reward* reward of that text? To draw many times n of N scored texts and average is
# noisy and not necessary. The average over *all* ways to draw n different texts is a weighted mean,
#
# $$\mathbb{E}[\text{the true reward of the best of } n] = \sum_i w_i\, \mathrm{the true reward}_i$$
#
# with $w_i$ the probability that text $i$ has the highest score of n that are drawn. Find $w$. Among equal scores each
# wins as often as the others. Numbers are float64. (This exercise has no steps.)

# %%
from rlhf_lab.functional import best_of_n_weights  # exercise

# %% [markdown]
# The *KL* of best-of-n is at most $\log n - \frac{n - 1}{n}$ ({lesson:the_kl_penalty}). Take all 3,000 reviews of the fresh pairs as
# one pool, which both models have scored above. As n grows, the score of the best rises by construction. Its true reward need not. When the model of 64
# pairs chooses, does the true reward still rise from the best of 16 to the best of 64? The answer is the 95 % interval of the difference,
# over eight parts of the pool.

# %%
true_reward_of_best = "rises"  # predict: "rises", "not told from 0" or "falls"

# %%
pool = first + second
true_reward_of_pool = true_reward(pool).double()[None]
scores = {name: score.double()[None] for name, score in scored.items()}
scores["the truth"] = torch.from_numpy(true_log_odds(pool))[None]
numbers = [1, 2, 4, 8, 16, 32, 64]
best_true_reward = {
    name: [(best_of_n_weights(score, n) * true_reward_of_pool).sum().item() for n in numbers]
    for name, score in scores.items()
}
show_table(
    ["n", *map(str, numbers)],
    [
        ["KL at most", *map(best_of_n_kl_bound, numbers)],
        *([name, *found] for name, found in best_true_reward.items()),
    ],
)
bounds = [best_of_n_kl_bound(n) for n in numbers]
curves(
    {name: (bounds, found) for name, found in best_true_reward.items()},
    "true reward of the best of n, by whose score it is chosen",
    "KL from the reference at most, nats per review",
    "true_reward",
)

# %%
over_seeds.compare(
    "true reward of the best of n",
    {
        f"n = {n}, {name}": best_true_reward[name][numbers.index(n)]
        for n in (4, 16, 64)
        for name in judges
    },
    largest=False,
)
PARTS = 8


def later_rise(rewards: Float[Tensor, "1 pool"], chosen_by: Float[Tensor, "1 pool"]) -> Interval:
    """Mean reward of the best of 64 less that of the best of 16, over parts of the pool."""
    rewards, chosen_by = rewards.view(PARTS, -1), chosen_by.view(PARTS, -1)
    part = rewards.shape[1]
    few, many = ((best_of_n_weights(chosen_by, min(n, part)) * rewards).sum(1) for n in (16, 64))
    return seed_interval(many, few)


rise = later_rise(true_reward_of_pool, scores["64 pairs"])
print(f"a pool of {len(pool)} reviews in {PARTS} parts:")
print(
    "the best of 64 less the best of 16, as the model of 64 pairs chooses, over parts of the pool:"
)
print(f"true reward {rise}; its own score {later_rise(scores['64 pairs'], scores['64 pairs'])}")
predictions.compare(
    "64 pairs: true reward from the best of 16 to the best of 64",
    true_reward_of_best,
    "rises" if rise.low > 0 else "falls" if rise.high < 0 else "not told from 0",
)

# %% [markdown]
# Chosen by the model of 1,024 pairs, the best of 64 is as good as if the truth had chosen it. Chosen by the model of 64
# pairs it stays below. From n = 16 on its own score still rises, and the interval of the true reward has 0 in it, in this run: one pool of 3,000
# reviews cannot tell whether the true reward still rises or already falls. The other two models of 64 pairs are wrong about other things, and one
# of them chooses nearly as well as the truth does.
# The large fall of the textbook figure (Gao et al. 2022) does not come about here. Best-of-n stays among texts that
# the reference writes, where a model of Reel is not wrong by much.
#
# ## A direction inside the reward model
#
# The scores say that the verb is not read by the model of 64 pairs. Why not? Its score is one linear function of the state $x$ behind the
# last token, $r = w \cdot x$. Either the verb stands in $x$ and $w$ pays no attention to it, or the verb is not in $x$.
#
# Take reviews, and the same reviews with one word replaced by its opposite, so that the two classes differ in that word alone. Let $a$ be
# the difference of the class means of $x$, and $\rho$ the best linear reader of the class, with $\rho \cdot a = 1$ (LEACE, {lesson:watch_it_learn}).
# *Readable* is the share of reviews whose class $\rho$ tells, on reviews that it was not fitted to; a coin tells half. To *erase* the word is to
# move every state along $a$ until $\rho$ reads nothing:
#
# $$x' = x - \big(\rho \cdot (x - \mu)\big)\, a, \qquad r' - r = -\underbrace{\rho \cdot (x - \mu)}_{\text{what can be read}}\;\underbrace{(w \cdot a)}_{\text{what the head makes of it}}$$
#
# So a word can be readable while the score does not use it, if $w \cdot a$ is near 0. And $w \cdot a$ needs no further measurement: $w$ is linear,
# hence $w \cdot a$ *is* the mean change of the score when the word is replaced. Reading is a property of the states, use one of states and
# head together, and erasing is an intervention, which shows use.
#
# The reader of a word is fitted in three models: before any fitting (with its random head), and after 64 and 1,024 pairs. Where the head
# reads, is the verb readable for more than three of four reviews, in the model of 64 pairs?
#
# (4 s on one core)

# %%
verb_inside = "readable, and not used"  # predict: "readable, and not used" or "hardly readable"

# %%
WORDS = {"adjective 1": ("ADJ", 0), "adjective 3": ("ADJ", 2), "verb": ("VERB", None)}
inside = {"no pairs": RewardModel(load_model("reel-nano"), seed=SEED)} | judges
fit_half = (torch.arange(len(probes)) < len(probes) // 2).repeat(2)


def reading(
    before: Float[Tensor, "n d_model"], after: Float[Tensor, "n d_model"], texts: list[str]
) -> tuple[Eraser, float]:
    """The eraser of a word, fitted to half of the reviews, and how it reads the other half."""
    positive = torch.from_numpy(true_log_odds(probes) - true_log_odds(texts)) > 0
    x, label = torch.cat([before, after]), torch.cat([positive, ~positive])
    eraser = fit_leace(x[fit_half], label[fit_half])
    said = (x.double() - eraser.mean) @ eraser.reader > 0
    return eraser, (said == label)[~fit_half].double().mean().item()


rows, erasers, readable, used = [], {}, {}, {}
edited = {word: replace_word(probes, *place) for word, place in WORDS.items()}
for name, model in inside.items():
    before, head = states_of(model, probes).detach(), model.head.weight[0].detach().double()
    for word, texts in edited.items():
        after = states_of(model, texts).detach()
        erasers[word, name], share = reading(before[:, -1], after[:, -1], texts)
        at_word = grammar.slot(*WORDS[word])
        own = reading(before[:, at_word], after[:, at_word], texts)[1]
        readable[word, name], used[word, name] = share, (head @ erasers[word, name].axis).item()
        rows.append([word, name, own, share, used[word, name]])
show_table(["word", "model of", "readable at the word", "readable at the head", "w . a"], rows)
print(f"readable: n = {len(probes)} texts, half as many reviews, to which nothing was fitted")

# %%
generator = torch.Generator().manual_seed(4000 + SEED)  # the head came from SEED itself
noise = torch.randn(20, states["64 pairs"].shape[1], generator=generator)
random = [orthogonal_eraser(direction / direction.norm()) for direction in noise]
lost, rows = {}, []
for name, model in judges.items():
    head = model.head.weight[0].double()
    for what, tried in (
        {w: [erasers[w, name]] for w in WORDS} | {"a random direction": random}
    ).items():
        score = torch.stack([eraser.erase(states[name]) @ head for eraser in tried])
        found = [judge(one[: len(first)] - one[len(first) :], gaps, wins).accuracy for one in score]
        lost[what, name] = verdicts[name].accuracy - float(np.mean(found))
        best_of_64 = best_of_n_weights(score, 64) * true_reward(first + second)
        rows.append([what, name, np.mean(found), lost[what, name], best_of_64.sum(1).mean().item()])
show_table(["erased", "model of", "accuracy", "lost", "true reward of the best of 64"], rows)
print(
    f"n = {len(gaps)} pairs; a pool of {len(first + second)} reviews; means of {len(noise)} random directions"
)
over_seeds.compare(
    "inside",
    {f"readable: {word}, {name}": readable[word, name] for word, name in readable}
    | {f"w . a: {word}, {name}": used[word, name] for word, name in used}
    | {f"lost: {what}, {name}": lost[what, name] for what, name in lost},
    largest=False,
)
predictions.compare(
    "64 pairs: the verb is",
    verb_inside,
    "readable, and not used" if readable["verb", "64 pairs"] > 0.75 else "hardly readable",
)

# %% [markdown]
# In each of three seeds, it is the second: where the head reads, the verb is hardly there. At its own place the word can be read without
# error (in this run, in all three models), but little of it gets to the last state. The head is not to blame, and no other head would help much: with so
# few pairs the transformer has not learned to fetch the verb. The model of 1,024 pairs has, and it uses what it fetched.
#
# The first adjective shows the other case. Before any pair was seen it is readable at the head in about nine of ten reviews, since
# the language model carries it there, and a random head makes little of it: readable, and not used. After 64 pairs the score depends on it most, although
# it is *less* readable than before. So what can be read says little about what is used, in either direction.
#
# Erasing tells the two apart. Without the verb, the model of 64 pairs loses a hundredth of accuracy at most; without the first adjective it
# loses at least five times as much, and random directions cost nothing. In the model of 1,024 pairs, both cost accuracy. Erasing at the head shows what this
# score uses, and no more: in earlier layers other paths are open.
#
# Did the pairs teach the head a direction that the language model has anyway? Take the reference's direction of
# sentiment behind the last token (the difference of the means of positive and of negative reviews), and its cosine with $w$.

# %%
positive = torch.from_numpy(true_log_odds(probes) > 0).double()


def of_sentiment(
    x: Float[Tensor, "n d_model"], label: Float[Tensor, " n"]
) -> Float[Tensor, " d_model"]:
    """The difference of the class means."""
    return label @ x / label.sum() - (1 - label) @ x / (1 - label).sum()


def cosine_with(head: Float[Tensor, " d_model"]) -> Callable[..., Float[Tensor, ""]]:
    """The cosine of a head with the direction of sentiment, as a function of reviews."""
    return lambda x, label: torch.cosine_similarity(head, of_sentiment(x, label), dim=0)


in_reference = states_of(inside["no pairs"], probes).detach()[:, -1].double()
found = {}
for name, model in inside.items():
    cosine_of = cosine_with(model.head.weight[0].detach().double())
    places = in_reference, states_of(model, probes).detach()[:, -1].double()
    found[name] = [bootstrap_interval(x, positive, statistic=cosine_of) for x in places]
started = inside["no pairs"].head.weight[0].detach()
rows = [
    [name, *(f"{x.value:.2f} [{x.low:.2f}, {x.high:.2f}]" for x in each)]
    + [torch.cosine_similarity(inside[name].head.weight[0].detach(), started, dim=0).item()]
    for name, each in found.items()
]
drawn = torch.cosine_similarity(noise.double(), of_sentiment(in_reference, positive)[None])
rows.append([f"{len(noise)} random heads", f"{drawn.min():.2f} to {drawn.max():.2f}", "", ""])
show_table(
    ["head of", "with the reference's direction", "with its own model's", "with its start"], rows
)
print(f"cosines; brackets: 95 % of resamples of {len(probes)} reviews")
over_seeds.compare(
    "cosine of the score with sentiment",
    {f"reference, {name}": each[0].value.item() for name, each in found.items()}
    | {f"own, {name}": each[1].value.item() for name, each in found.items()},
    largest=False,
)

# %% [markdown]
# It did not. The head's cosine with the reference's direction stays within a tenth of that of its random start, in each of the seeds, and
# the head lies along the sentiment of its own model. For it has hardly moved (last column): what the pairs changed is the transformer, which now writes
# the sentiment where the head reads. A search for the language model's direction of sentiment in the weights of a reward head would
# have found nothing.
#
# ## Over-optimize it: PPO
#
# Best-of-n stays within what the reference says. PPO does not have to: it can write texts that no pair ever had.
# The reward is the model of 64 pairs (with mean 0 and standard deviation 1 over its pairs), on a long leash. What does
# the true reward do?
#
# (9 s on one core)

# %%
true_reward_of_ppo = "rises and stays"  # predict: "rises and stays" or "rises and falls"

# %%
reward = LearnedReward(few)
trainer = RLHFTrainer(
    RLHFArgs(**SETTINGS), out=new_run("learned"), reward_fn=reward, true_reward_fn=true_reward
)
kl_of_reviews = []


@trainer.on("after_score")
def keep_kl(ctx) -> None:
    kl_of_reviews.append(ctx.rollout.kl.sum(1).clone())


reports = trainer.train()
kls = [report.kl_per_sequence for report in reports]
true_rewards = [report.true_reward for report in reports]
curves(
    {
        "learned reward, over its highest": (
            kls,
            [r.mean_reward / max(x.mean_reward for x in reports) for r in reports],
        ),
        "true_reward": (kls, true_rewards),
    },
    "PPO on a reward model of 64 pairs, phase by phase",
    "KL from the reference, nats per review",
    "reward",
)

# %%
far = int(np.argmax(kls))
print(f"phase {far} has the highest mean KL, {kls[far]:.2f} nats: ", end="")
print(f"median {kl_of_reviews[far].median():.2f}, largest {kl_of_reviews[far].max():.2f}, ", end="")
print(f"n = {len(kl_of_reviews[far])} reviews; ", end="")
print(f"learned reward {reports[far].mean_reward:.3f}, true reward {true_rewards[far]:.3f}")
written = trainer.rollout_phase()
order = written.raw_rewards.argsort(descending=True)
true_reward_now = true_reward(written.texts)
show_table(
    ["learned", "true_reward", "text"],
    [
        [written.raw_rewards[i].item(), true_reward_now[i].item(), written.texts[i]]
        for i in order[:: max(1, len(order) // 5)][:5].tolist()
    ],
)
over_seeds.compare(
    "PPO on 64 pairs",
    {
        "true reward at first": true_rewards[0],
        "true reward at its highest": max(true_rewards),
        "true reward at the end": true_rewards[-1],
        "learned reward at the end": reports[-1].mean_reward,
        "KL at the end": kls[-1],
    },
    largest=False,
)
fell = max(true_rewards) - np.mean(true_rewards[-2:])
predictions.compare(
    "true reward under PPO",
    true_reward_of_ppo,
    "rises and falls" if fell > 0.05 else "rises and stays",
)

# %% [markdown]
# At the end of the run the true reward is as high as it ever was, or nearly, in each of the three seeds: on Reel, most words that please the model please the rater, too. But
# look at the point farthest to the right. In that phase the learned reward is at its highest, and the true reward is well below
# that of the phases around it: what was gained there is what the model is wrong about. (The median KL of its reviews is high, too: most
# of them moved, not a few.) Afterwards the policy came back.
# That is one phase of one run. The last row of texts shows another place where the two
# rewards part: a verdict that the model does not read. Over-optimization is no law of nature: it needs a reward that is
# wrong where the policy goes, and a policy that goes there. {Lesson:what_breaks_it} is about rewards with a hole.
#
# ## An ensemble, and what its disagreement warns of
#
# Where the truth is not at hand, several reward models can be held against each other. Write the score of member $i$ as
# $r_i = u + s + e_i$: what all members get wrong alike, $s$, and an error of its own, $e_i$, independent of the others'. With k members
#
# $$\bar r = u + s + \bar e, \qquad \mathrm{Var}(\bar r - u) = \mathrm{Var}(s) + \tfrac{1}{k}\, \mathrm{Var}(e), \qquad \mathbb{E}\, \mathrm{Var}_i(r_i) = \mathrm{Var}(e)$$
#
# The mean takes away errors that members do not share, and the spread among members, their *disagreement*, shows those errors and no
# others. Whoever optimizes the mean climbs $s$, and no disagreement tells. So it matters what the members have in common. All are
# fitted from one base model. Beyond that, here are two ensembles of four: members on *the same* 64 pairs, which differ in head and
# batches, and members on 64 *pairs of their own*. One member belongs to both. The runs were made beforehand, with three seeds.
#
# Four times 64 pairs are 256 pairs. What would you rather maximize with PPO: the mean of four models of 64 pairs each, or one model of all
# 256, fitted with as many steps as each of the four?

# %%
better_reward = "the mean of four"  # predict: "the mean of four", "one model of all the pairs" or "no order over seeds"

# %%
ensembles = stored["ensembles"]
show_table(
    ["chosen by", *(f"best of {n}" for n in (4, 16, 64))],
    [
        [
            name,
            *(
                with_range([run["best of n"][name][n] for run in ensembles], 3)
                for n in ("4", "16", "64")
            ),
        ]
        for name in ensembles[0]["best of n"]
        if not name.startswith("lowest")
    ],
)
print(f"true reward, in a pool of 3,000 reviews: mean and range of {len(ensembles)} seeds")
by_seed = [f"seed {seed}" for seed in stored["seeds"]]
true_reward_after = {
    name: torch.tensor([run["PPO"][name]["true_reward"] for run in ensembles])
    for name in ensembles[0]["PPO"]
}
show_table(
    ["true reward after PPO on", *by_seed],
    [[name, *found.tolist()] for name, found in true_reward_after.items()],
)
print("1,024 texts of each trained policy")
apart = true_reward_after["one model of all the pairs"] - true_reward_after["mean of four"]
predictions.compare(
    "better to maximize",
    better_reward,
    "one model of all the pairs"
    if (apart > 0).all()
    else "the mean of four"
    if (apart < 0).all()
    else "no order over seeds",
)

# %% [markdown]
# The mean of four helps where one model fails: with seed 2, PPO on one model of 64 pairs ends far below the other two seeds, and PPO on
# the mean of the four does not. Where one model does well there is nothing to gain. But with the same 256 pairs, one model of all of
# them is the better reward for PPO, in each of three seeds. (For best-of-n there is no order between the two.) And to subtract the
# standard deviation over members, as is done for caution, gains nothing here: the best of 4 by it has less true reward than by the mean alone, in five of the six
# cases (two ensembles, three seeds).
#
# Does disagreement warn? Two ways to ask. Over a run: what becomes of the members' disagreement on the texts that the policy writes, while
# it maximizes one of them? And text by text: among the texts that this member scores above its median, does disagreement tell the bad ones,
# those with the true reward below one half, from the others?

# %%
KINDS = ("the same pairs", "pairs of their own")
lines, rows = {}, []
for seed, run in zip(stored["seeds"], ensembles, strict=True):
    phases = run["phases"]
    late = {what: float(np.mean([phase[what] for phase in phases[-3:]])) for what in phases[0]}
    left = [late[f"disagreement, {kind}"] / phases[0][f"disagreement, {kind}"] for kind in KINDS]
    rows.append([str(seed), run["PPO"]["one model"]["true_reward"], *left])
    rows[-1] += [late["learned"], *(late[f"mean, {kind}"] for kind in KINDS)]
    of_phase = [phase["disagreement, pairs of their own"] for phase in phases]
    lines[f"seed {seed}"] = (list(range(len(phases))), of_phase)
show_table(
    [
        "seed",
        "true reward after",
        *("left: same", "left: own", "learned", "mean: same", "mean: own"),
    ],
    rows,
    digits=2,
)
print(
    "left of disagreement, learned reward, and mean of the four members on the same pairs or their own:"
)
print("the last 3 phases, disagreement over that of the first phase; n = 128 texts a phase")
display(
    curves(
        lines,
        "PPO on one member: do the four members, fitted to pairs of their own, still agree?",
        "phase",
        "standard deviation over members",
    )
)
show_table(
    ["AUC of disagreement", *by_seed],
    [[name, *(run["AUC"][name] for run in ensembles)] for name in ensembles[0]["AUC"]]
    + [
        [f"share of bad texts, {place}", *(run["misled"][place] for run in ensembles)]
        for place in ("reference", "PPO")
    ],
)
print("reference: 1,500 of 3,000 reviews; PPO: half of the texts of the last 6 phases")

# %% [markdown]
# Over a run it warns, in these three. In the two good runs the members that were fitted to pairs of their own come to agree on what the policy writes:
# it writes texts that are plainly good. With seed 2, where PPO was misled, their disagreement is not lower in the end than at first. There,
# too, the learned reward is far above what the four say on average. The members on the same pairs see much less of it: their
# disagreement falls in all three runs, and their mean goes along with the learned reward. What they have in common, the 64 pairs, is what is wrong.
# That is one misled run of three, and no threshold comes of it.
#
# Text by text it is a weak warning. On texts of the reference, members on pairs of their own tell bad texts better than members on the
# same pairs, in each seed, and far from perfectly. On texts that PPO wrote, where one would need it, the two have no order over seeds,
# and members on pairs of their own are clearly above a coin's 0.5 with seed 2 alone. (With the other two seeds few of those texts are bad.)
#
# ## DPO: without a reward model
#
# {Lesson:the_kl_penalty} derived what RLHF is meant to end at: $\pi^*(x) = \frac{1}{Z}\, \mathrm{ref}(x)\, e^{r(x)/\beta}$. Solve it for
# the reward:
#
# $$r(x) = \beta \log \frac{\pi^*(x)}{\mathrm{ref}(x)} + \beta \log Z$$
#
# So *every* policy is the optimum of some reward, and this formula, with the policy in the place of $\pi^*$, says of
# which. It is the policy's *implicit reward*, known up to a constant. In Bradley and Terry's model only differences
# count, and the constant cancels:
#
# $$P(c \succ \ell) = \sigma\Big(\beta \log \frac{\pi(c)}{\mathrm{ref}(c)} - \beta \log \frac{\pi(\ell)}{\mathrm{ref}(\ell)}\Big)$$
#
# for a chosen text $c$ and a rejected one $\ell$. Minus the logarithm of this is the DPO loss: the policy is fitted to
# preferences as a reward model is. With $\hat r$ the implicit reward, its gradient is
#
# $$\nabla L = -\beta\, \sigma(\hat r_\ell - \hat r_c)\, \big(\nabla \log \pi(c) - \nabla \log \pi(\ell)\big)$$
#
# the surprise once more, times a step that makes the chosen text likelier and the rejected one less likely. (With
# several prompts, $Z$ depends on the prompt, which both texts of a pair have in common.)

# %%
from rlhf_lab.functional import implicit_rewards  # exercise

# %% [markdown]
# Is it exact? The optimum for the rater's utility can be computed on the grammar ({lesson:the_kl_penalty}). Its implicit reward must
# be the utility, up to a constant.

# %%
reference = grammar_policy(build_graph(grammar))
utility = Reward("utility", sentiment_logit)
utilities = torch.from_numpy(utility.score(reference.graph.final_features()))
start = torch.from_numpy(reference.occupancy()[-1])
for beta in (8.0, 4.0, 2.0):
    optimum = torch.from_numpy(optimal_policy(reference, utility, beta).occupancy()[-1])
    constant = implicit_rewards(optimum.log(), start.log(), beta) - utilities
    print(
        f"beta {beta:g}: implicit reward less utility lies within {(constant.max() - constant.min()).item():.0e}"
    )

# %%
from rlhf_lab.functional import dpo_loss  # exercise

# %% [markdown]
# Now tune a policy with your loss, on 1,024 pairs at $\beta = 4$. The reference's log-probabilities of all texts are
# worked out once. Will the implicit reward of the *chosen* texts be above 0 in the end, or below: does DPO make them
# likelier than the reference does? And how steep will the implicit reward be, as a function of the true utility? (1
# would be exact.)
#
# (8 s on one core)

# %%
chosen_texts = "likelier"  # predict: "likelier" or "less likely"
steepness = "about 1"  # predict: "below 0.8", "about 1" or "above 1.2"


# %%
def tuned(model, n: int, beta: float, steps: int, seed: int, rate: float = 3e-4):
    """Tune a policy on n pairs with DPO, in place; gives the implicit rewards of both sides."""
    base, rng = load_model("reel-nano"), np.random.default_rng(seed)
    a, b, _, won = rated(n, seed)
    pairs = as_pairs(a, b, won)
    rows = encode_examples(model, [""] * (2 * n), pairs.chosen + pairs.rejected)
    with torch.no_grad():
        at_start = torch.cat([text_logprobs(base, rows[i : i + 256]) for i in range(0, 2 * n, 256)])

    def sides(batch: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        both = [*batch, *(i + n for i in batch)]
        now = text_logprobs(model, [rows[i] for i in both])
        return (*now.chunk(2), *at_start[both].chunk(2))

    def batch_loss() -> Float[Tensor, ""]:
        return dpo_loss(*sides(rng.choice(n, min(n, 32), replace=False).tolist()), beta)

    fit(model, batch_loss, steps, rate, "DPO", False)
    with torch.no_grad():
        chosen, rejected, ref_chosen, ref_rejected = sides(range(min(n, 256)))
    return implicit_rewards(chosen, ref_chosen, beta), implicit_rewards(
        rejected, ref_rejected, beta
    )


base = load_model("reel-nano")
dpo_policy = load_model("reel-nano")
chosen, rejected = tuned(dpo_policy, 1024, beta=4.0, steps=120, seed=SEED)
rows = encode_examples(base, [""] * len(probes), probes)
with torch.no_grad():
    implied = implicit_rewards(
        text_logprobs(dpo_policy, rows), text_logprobs(base, rows), 4.0
    ).double()
truth = torch.from_numpy(true_log_odds(probes))


def line_through(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Float[Tensor, "2"]:
    """Slope of y on x, and R2."""
    x, y = x - x.mean(), y - y.mean()
    both = (x * y).mean()
    return torch.stack([both / x.square().mean(), both**2 / x.square().mean() / y.square().mean()])


line = bootstrap_interval(
    truth,
    implied,
    statistic=line_through,
    resamples=400,
    generator=torch.Generator().manual_seed(0),
)
for i, what in enumerate(("slope", "R2")):
    print(f"implicit reward on utility, {what}: {line[i]}")
print(
    f"mean implicit reward: chosen {chosen.mean():.3f}, rejected {rejected.mean():.3f}; n = {len(chosen)} pairs"
)
levels = truth.unique()
means = [implied[truth == level].mean().item() for level in levels]
curves(
    {
        "implicit reward, mean": (levels.tolist(), means),
        "exact, up to a constant": (
            levels.tolist(),
            (levels + implied.mean() - truth.mean()).tolist(),
        ),
    },
    "what the policy thinks that a review is worth",
    "true utility, log odds",
    "implicit reward",
)

# %%
over_seeds.compare(
    "DPO at beta 4",
    {
        "slope": line.value[0].item(),
        "R2": line.value[1].item(),
        "implicit reward, chosen": chosen.mean().item(),
        "implicit reward, rejected": rejected.mean().item(),
    },
    largest=False,
)
steep = line.value[0].item()
predictions.compare(
    "chosen texts become", chosen_texts, "likelier" if chosen.mean() > 0 else "less likely"
)
predictions.compare(
    "steepness",
    steepness,
    "below 0.8" if steep < 0.8 else "above 1.2" if steep > 1.2 else "about 1",
)

# %% [markdown]
# The implicit reward orders reviews by the true utility, and it is much less steep than the utility. The loss is low as
# soon as the two texts of a pair are far enough apart, and so short a run moves the policy little (the next section prints its
# KL); a policy at the optimum would have slope 1. On average the chosen texts have become a little likelier and the rejected ones much
# less likely. The loss sees only the difference: nothing in it says that what is chosen must become likely.
#
# ## DPO and PPO on one axis
#
# DPO at $\beta$ on a rater with $T = 1$, and PPO with reward $u$ and a price of $\beta$ per nat, have *one and the same*
# optimum, and the grammar gives it exactly. How near does each get in a short run? To compare them at one $\beta$ would
# be unfair, since they get to different KL. So PPO is drawn phase by phase, and DPO's policy is compared with PPO where
# PPO had spent as much KL. The three runs of PPO were made beforehand, with the `SETTINGS` of this lesson and another `kl_coef`; DPO's
# policy is the one that you have just tuned. Which of them has more true reward?

# %%
more_true_reward = "PPO"  # predict: "DPO", "PPO" or "the same within 0.02"

# %%
Figures = dict[str, float]


def own_figures(model, n: int = 1024) -> Figures:
    """KL, true reward and grammar of texts that a policy writes."""
    settings = SETTINGS | {"batch_size": n, "seed": SEED + 100}
    policy = TransformerWithValueHead(model, seed=SEED)
    judged = RLHFTrainer(RLHFArgs(**settings), policy=policy, reference=base, reward_fn=true_reward)
    texts = judged.rollout_phase()
    return {
        "KL": texts.kl.sum(1).mean().item(),
        "true_reward": texts.raw_rewards.mean().item(),
        "grammatical": grammatical(texts.texts).float().mean().item(),
    }


ppo = stored["PPO on the utility"]
dpo = own_figures(dpo_policy)
exact = optimal_policy(reference, utility, 4.0)
final_true_reward = true_reward.score(reference.graph.final_features())
of_optimum = (float(exact.kl_by_position(reference).sum()), exact.mean(final_true_reward), 1.0)
columns = ["KL", "true_reward", "grammatical"]
show_table(
    ["policy at beta 4", *columns],
    [
        ["DPO, this run", *dpo.values()],
        ["PPO, stored", *(with_range([run[what] for run in ppo], 3) for what in columns)],
        ["the optimum", *of_optimum],
    ],
)
print(f"n = 1,024 texts of each trained policy; PPO: mean and range of {len(ppo)} seeds")
prices = (64.0, 16.0, 8.0, 4.0, 3.0, 2.0)
optima = [optimal_policy(reference, utility, beta) for beta in prices]
paths = {
    f"PPO, seed {seed}": (run["KL by phase"], run["true reward by phase"])
    for seed, run in zip(stored["seeds"], ppo, strict=True)
}
curves(
    {
        "the optimum": (
            [float(one.kl_by_position(reference).sum()) for one in optima],
            [one.mean(final_true_reward) for one in optima],
        ),
        **paths,
        "DPO": ([dpo["KL"]], [dpo["true_reward"]]),
    },
    "true reward bought for KL",
    "KL from the reference, nats per review",
    "true_reward",
)

# %%
at_equal = []
for run, path in zip(ppo, paths.values(), strict=True):
    near = sorted([*zip(*path, strict=True), (run["KL"], run["true_reward"])])
    at_equal.append(float(np.interp(dpo["KL"], [kl for kl, _ in near], [g for _, g in near])))
apart = dpo["true_reward"] - float(np.mean(at_equal))
print(
    f"at {dpo['KL']:.2f} nats: DPO has true reward {dpo['true_reward']:.3f}, PPO {with_range(at_equal, 3)}"
)
for what in ("slope", "R2"):
    print(
        f"implicit reward of PPO's policies on utility, {what}: {with_range([run[what] for run in ppo], 3)}"
    )
over_seeds.compare(
    "DPO beside PPO at beta 4",
    {
        "KL, DPO": dpo["KL"],
        "true reward, DPO": dpo["true_reward"],
        "true reward, DPO less PPO at DPO's KL": apart,
        "true reward, DPO less the highest PPO there": dpo["true_reward"] - max(at_equal),
        "grammatical, DPO": dpo["grammatical"],
    },
    largest=False,
)
order = "DPO" if apart > 0.02 else "PPO" if apart < -0.02 else "the same within 0.02"
predictions.compare("more true reward at equal KL", more_true_reward, order)

# %% [markdown]
# At this price and with this number of steps, DPO has more true reward than each of the three runs of PPO had at the same KL; so it is with
# three seeds of DPO.
# Both are far below the optimum at this price, and for opposite reasons. DPO has spent less KL than the optimum does, PPO more,
# and on other things: some of its texts are not even grammatical. And the implicit reward of PPO's policy fits the truth worse
# than DPO's does. One reason may be that PPO has only ever seen texts of its own, while DPO was fitted to texts of the reference, and
# those are what is judged here. The optimum that both aim at is one and the same; that more steps would bring either there is not
# shown here.
#
# ## LoRA
#
# To tune a policy takes all of its weights, their gradients, the optimizer's two moments, and a copy of the weights
# for the reference. *LoRA* (Hu et al. 2021) freezes a weight $W$ and learns a change of low rank,
#
# $$W' = W + \frac{\alpha}{r} A B, \qquad A: \text{inputs} \times r, \quad B: r \times \text{outputs}$$
#
# With the adapters off, the very same weights are the reference. Where should A and B start? With $G$ the gradient
# by $W'$,
#
# $$\nabla_A = \frac{\alpha}{r}\, G B^\top, \qquad \nabla_B = \frac{\alpha}{r}\, A^\top G$$
#
# If both are 0, both gradients are 0, for ever. If neither is 0, the first policy is not the reference. So one is 0: B,
# while A is noise of variance 1 / inputs, so that $xA$ has about the size of $x$. And $\alpha / r$ is the scale of every step:
# whoever compares two ranks has to say whether $\alpha$ is held, or $\alpha / r$.
#
# (`merged` in the exercise is the finished sum, which the trainer's sampling sets for as long as a batch is written, and None otherwise.)

# %%
from rlhf_lab.models.lora import LoRALinear  # exercise

# %% [markdown]
# Hang your adapters into a frozen policy, and tune with DPO once more, for a few steps. Three arms, all with
# $\alpha / r = 8$, so that each differs from the next in one thing: rank 1 on all six matrices of each block; rank 1 on query and
# value alone, where LoRA was first tried (another place); rank 8 on query and value (another rank). Your adapters run in the
# first arm; all three were run beforehand with three seeds, on other pairs. Which of them ends with the least the true reward?
#
# (5 s on one core)

# %%
least_true_reward = "rank 1, everywhere"  # predict: "rank 1, everywhere", "rank 1, query and value" or "rank 8, query and value"


# %%
def with_adapters(rank: int, targets: Sequence[str]):
    """A fresh policy, frozen but for your adapters."""
    model, generator = load_model("reel-nano"), torch.Generator().manual_seed(SEED)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in targets:
            module = block.mlp if name in ("W_in", "W_out") else block.attn
            adapter = LoRALinear(getattr(module, name), rank, 8.0 * rank, generator, name == "W_O")
            parametrize.register_parametrization(module, name, adapter)
    return model


model = with_adapters(1, ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"))
with torch.no_grad():
    moved = (text_logprobs(model, rows) - text_logprobs(base, rows)).abs().max().item()
tuned(model, 512, beta=4.0, steps=60, seed=SEED, rate=3e-3)
weights = dict(model.named_parameters())
own = {k: w for k, w in weights.items() if k.endswith(".original")}
plain = lambda k: k.replace("parametrizations.", "").removesuffix(".original")
kept = sum(torch.equal(w, dict(base.named_parameters())[plain(k)]) for k, w in own.items())
numbers = sum(w.numel() for w in weights.values() if w.requires_grad)
everything = sum(p.numel() for p in base.parameters())
print(
    f"{moved:.0e} nats from the reference at first; {numbers} of {everything} numbers learn, ",
    end="",
)
print(
    f"{numbers / everything:.1%}; {kept} of {len(own)} frozen weights are equal to the bit afterwards"
)
adapted = own_figures(model)
arms = stored["adapters"]
show_table(
    ["what learns", *columns],
    [
        ["rank 1, everywhere: yours", *adapted.values()],
        *(
            [f"{arm}: stored", *(with_range([run[what] for run in runs], 3) for what in columns)]
            for arm, runs in arms.items()
        ),
    ],
)
print("n = 1,024 texts of each policy; stored: mean and range of three seeds")
in_arm = {arm: torch.tensor([run["true_reward"] for run in runs]) for arm, runs in arms.items()}
everywhere, one, eight = in_arm.values()
for what, a, b in (
    ("all six matrices less query and value, rank 1", everywhere, one),
    ("rank 8 less rank 1, query and value", eight, one),
    ("the first arm less the last", everywhere, eight),
):
    print(f"true reward, {what}: {seed_interval(a, b)}")
over_seeds.compare(
    "LoRA, rank 1, everywhere",
    {what: adapted[what] for what in ("true_reward", "KL")},
    largest=False,
)
predictions.compare(
    "least true reward", least_true_reward, min(in_arm, key=lambda arm: in_arm[arm].mean())
)

# %% [markdown]
# With rank 1 on all six matrices, two in a hundred of the numbers learn. In this run the true reward gets about as high as with all weights above,
# which had twice as many steps and pairs, at a tenth of the learning rate; the mean over seeds is lower (compare the two tables).
#
# Two things hold in each of the three stored seeds. At rank 1, query and value alone end with less true reward than all six matrices: the place
# counts. On query and value, rank 8 ends with more true reward than rank 1: the rank counts, too, when $\alpha / r$ is held. The first arm
# also ends ahead of the last, but three seeds cannot tell that difference from 0. Had all three had the same $\alpha$, as is
# common, rank 8 would have been scaled to an eighth, and its comparison with rank 1 would be one of scale as much as of rank.
#
# ## Your own question
#
# Difficulty: ●●●●○, about 30 minutes. There is no stub, no check and no single answer.
#
# Find two reviews that the model of 1,024 pairs orders wrongly *with confidence*: it gives the worse one more than 0.9.
# Say which word is to blame, and show it by changing that word alone. Then make a third reward model which agrees with it on
# nearly all held-out pairs, and is worse under best-of-64. Measure all three things: the two scores, the agreement with its
# n, and the true reward of the best of 64 with an interval over pools. Write down first how you will do it.

# %%
my_plan = "flip the verb: it reads the clauses and overlooks the verdict"  # predict: in words

# %%
predictions.recall("how I will find the pair and the third model", my_plan)

# %% [markdown]
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - The ensembles here share a base model. Fit members that start from base models of different seeds: does their disagreement tell more?
#   (Coste et al. 2023, [2310.02743](https://arxiv.org/abs/2310.02743))
# - Take the bias out again: fit a reward model on the biased pairs, and subtract $\lambda$ for popcorn, or erase its direction at the head.
#   Which of the two gives back the true reward of the best of 64?
# - Give `dpo_loss` a `label_smoothing` on pairs with flipped labels, and `kind="ipo"` (Azar et al. 2023,
#   [2310.12036](https://arxiv.org/abs/2310.12036)). Which of the two keeps the slope?
# - Draw DPO's credit per token, $\beta \log \pi / \mathrm{ref}$ slot by slot, next to the exact advantage of {lesson:rewards_and_credit}
#   (Rafailov et al. 2024, [2404.12358](https://arxiv.org/abs/2404.12358)).
#
# **Read on.** Preferences to rewards: Christiano et al. 2017, [1706.03741](https://arxiv.org/abs/1706.03741); Ouyang et al. 2022,
# [2203.02155](https://arxiv.org/abs/2203.02155). DPO: Rafailov et al. 2023, [2305.18290](https://arxiv.org/abs/2305.18290), and its over-optimization:
# [2406.02900](https://arxiv.org/abs/2406.02900). Over-optimized reward models: Gao, Schulman and Hilton 2022,
# [2210.10760](https://arxiv.org/abs/2210.10760); ensembles and centring: Eisenstein et al. 2023, [2312.09244](https://arxiv.org/abs/2312.09244).
# Noise in the labels: Zhu et al. 2024, [2401.16335](https://arxiv.org/abs/2401.16335). LoRA: Hu et al. 2021,
# [2106.09685](https://arxiv.org/abs/2106.09685). Best-of-n: Nakano et al. 2021, [2112.09332](https://arxiv.org/abs/2112.09332).
#
# Next: {lesson:a_real_model}, whose true rewards are unknown.
