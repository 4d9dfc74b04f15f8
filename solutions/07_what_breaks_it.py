# %% [markdown]
# # 07 What breaks RLHF
#
# The reward goes up. Is the policy getting better? And if it is not, which number says so, and how early? In
# this lesson you let a policy find a hole in its reward, derive when optimizing a stand-in harms what it stands
# for, measure how much KL a run has wasted, and compare three alarms.
#
# **Needs** {lesson:the_kl_penalty} (the tilted policy, the frontier) and {lesson:ppo} (a run, its dashboard).
#
# **Afterwards you can**
# - derive the slope of any score along the path of optimal policies, and say when the true reward falls as the proxy rises,
# - read reward, true reward, KL, grammatical share and explained variance together, and name a cause from its symptoms,
# - say how many nats a run has spent beyond the cheapest policy of the same quality,
# - say what an alarm inside the model adds to counting words in its texts.
#
# **What to inspect** when a reward looks too good:
#
# | you see | look at | because |
# |---|---|---|
# | reward near its maximum | texts of high reward, read by eye | a classifier never saw what the policy writes now |
# | reward rises, KL rises fast | a score that the policy does not train on | a proxy and the goal part far from the reference |
# | entropy as before, texts alike | different n-grams | entropy is measured in each state, not between texts |
# | explained variance high | whether the reward moves at all | a critic can know a policy that learns nothing |

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 55 seconds on one core, without a network.
# Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import (
    Predictions,
    check,
    hint,
    new_run,
    progress,
    show_table,
)
from rlhf_lab.course.seed_figures import SeedFigures, stored_figures
from rlhf_lab.functional import word_log_odds
from rlhf_lab.organism import (
    REWARDS,
    Grammar,
    bag_of_adjectives,
    build_graph,
    frontier,
    true_reward,
    grammar_policy,
    smoothed_popcorn,
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
by_phase = lambda numbers: (list(range(len(numbers))), numbers)  # a curve over phases 0, 1, ...
grammar = Grammar()
reference = grammar_policy(build_graph(grammar))
# the reviews by what rewards read of them, and the reference's probability of each
features, chances = reference.graph.final_features(), reference.occupancy()[-1]
print("reviews that the grammar can tell apart:", len(chances))

# %% [markdown]
# This lesson stays on Reel. *The true reward* is the exact probability that a review is positive, and 0 for a text that is no
# review. A *proxy* is what the policy is paid for in its place: a classifier, or a rule with a flaw. Only on Reel do
# we see both.
#
# Your predictions are compared with this run. Tables that name "this run" show it beside the mean, the lowest and the highest of
# three stored runs that differ in the seed alone: they say what holds for other seeds.
#
# ## A hole that nobody planted
#
# The bundled classifier judges reviews as well as anybody can (docs/running.md has the figures). What happens if it
# pays, and nothing keeps the policy near the reference: `kl_coef=0`?
#
# Where will the true reward end, while the reward goes to its maximum?
#
# (14 s on one core)

# %%
ends_at = "with the reward"  # predict: "with the reward", "below it" or "below where it began"

# %%
trainer = RLHFTrainer(
    RLHFArgs(**SETTINGS, reward_fn="sentiment", kl_coef=0.0, total_phases=14), out=new_run("free")
)
kept = {}


@trainer.on("after_score")
def keep_texts(ctx):
    kept[ctx.phase] = ctx.rollout


free = trainer.train()
curves(
    {
        name: by_phase([getattr(r, field) for r in free])
        for name, field in (
            ("reward", "mean_reward"),
            ("true_reward", "true_reward"),
            ("grammatical", "grammatical_fraction"),
        )
    },
    "No leash, the classifier's reward",
    "phase",
    "mean of 128 reviews",
)

# %%
late = free[-4:]  # of 128 reviews each
mean = lambda reports, name: sum(getattr(r, name) for r in reports) / len(reports)
lowest = min(r.true_reward for r in free[len(free) // 2 :])
over_seeds.compare(
    "no leash, mean of the last four phases",
    {
        "reward": mean(late, "mean_reward"),
        "true_reward": mean(late, "true_reward"),
        "grammatical": mean(late, "grammatical_fraction"),
        "KL, nats per review": mean(late, "kl_per_sequence"),
        "entropy, nats per token": mean(late, "entropy_per_token"),
        "lowest true reward, second half": lowest,
    },
    largest=False,
)
ends, pays = mean(late, "true_reward"), mean(late, "mean_reward")
started = free[0].true_reward
found = (
    "below where it began"
    if ends < started
    else "below it"
    if ends < pays - 0.02
    else "with the reward"
)
predictions.compare("without a leash, true reward ends", ends_at, found)

# %% [markdown]
# Read texts whose reward is high and whose true reward is not. They are no reviews: the next cell prints how many of them have a true reward of 0. The classifier was trained on reviews
# alone, so that its verdict on anything else means nothing. Nobody planted this hole; the policy is paid to find it. How
# far the true reward falls differs much between seeds, and between phases of one run: read the range, not the mean.

# %%
second_half = range(len(free) // 2, len(free))
texts = [text for phase in second_half for text in kept[phase].texts]
paid = torch.cat([kept[phase].raw_rewards for phase in second_half])
gaps = paid - true_reward(texts)
print(
    f"{(gaps > 0.5).float().mean().item():.3f} of {len(texts)} texts: reward above true reward by more than 0.5"
)
apart = gaps > 0.5
print(
    f"of these {int(apart.sum())}, {int((true_reward(texts)[apart] == 0).sum())} have true reward 0"
)
for i in gaps.argsort(descending=True)[:4].tolist():
    print(f"reward {paid[i]:.3f}  true reward {paid[i] - gaps[i]:.3f}  {texts[i]}")

# %% [markdown]
# ## Texts alike
#
# Does the policy still write different texts? Entropy per token is measured in each state by itself. *Distinct-n*
# counts over all texts together: how many different n-grams there are, by how many n-grams in all.

# %%
from rlhf_lab.functional import distinct_n  # exercise

# %% [markdown]
# Of which length do n-grams lose most of their variety?

# %%
loses_most = "single words"  # predict: "single words", "pairs" or "threes"


# %%
def distinct(phase: int, n: int) -> float:
    """Of the real tokens that a phase's reviews were given."""
    samples = kept[phase].samples
    return distinct_n(samples.tokens[:, samples.prefix_len :], n, samples.mask)


variety = {
    name: (distinct(0, n), distinct(len(free) - 1, n))
    for n, name in ((1, "single words"), (2, "pairs"), (3, "threes"))
}
shares = {name: after / before for name, (before, after) in variety.items()}
show_table(
    ["distinct n-grams", "first phase", "last phase", "what is left"],
    [[name, *both, shares[name]] for name, both in variety.items()],
)
over_seeds.compare("distinct n-grams, last phase by first", shares, largest=False)
predictions.compare("most variety is lost by", loses_most, min(shares, key=shares.get))

# %% [markdown]
# (The number depends on how many texts are counted, so that only batches of one size compare.)
#
# ## Why the proxy rises and the true reward falls
#
# {Lesson:the_kl_penalty} derived the best policy at a price $\beta$. Write $\lambda = 1 / \beta$: how hard the reward pulls.
#
# $$\pi_\lambda(x) = \frac{\mathrm{ref}(x)\, e^{\lambda r(x)}}{Z(\lambda)}, \qquad Z(\lambda) = \sum_x \mathrm{ref}(x)\, e^{\lambda r(x)}$$
#
# How does the mean of any other score $h$ change as $\lambda$ grows? The derivative of $\log Z$ is
# $\frac{1}{Z} \sum_x \mathrm{ref}(x)\, e^{\lambda r(x)}\, r(x) = \mathbb{E}_\lambda[r]$, so that
# $\frac{d}{d\lambda} \log \pi_\lambda(x) = r(x) - \mathbb{E}_\lambda[r]$, and therefore
#
# $$\frac{d}{d\lambda} \mathbb{E}_\lambda[h] = \sum_x \pi_\lambda(x)\, \big(r(x) - \mathbb{E}_\lambda[r]\big)\, h(x) = \mathrm{Cov}_\lambda(h, r)$$
#
# With $h = r$ this is a variance: **the proxy never falls**. With $h$ = true reward it is a covariance, and it is taken
# *among the texts that the policy writes now*. How well proxy and the true reward agree on the reference's texts says
# nothing about the sign later on. The KL is $\lambda \mathbb{E}_\lambda[r] - \log Z$; its derivative is
# $\lambda \mathrm{Var}_\lambda(r)$, and dividing one by the other,
#
# $$\frac{d\, \mathbb{E}[h]}{d\, \mathrm{KL}} = \frac{\mathrm{Cov}_\lambda(h, r)}{\lambda\, \mathrm{Var}_\lambda(r)}$$

# %%
from rlhf_lab.functional import tilt_slopes  # exercise

# %% [markdown]
# Now a hole that somebody did plant. The reward `smoothed_popcorn` is a quarter of the sentiment's log odds, plus 4
# if the word *popcorn* is in the text: $\sigma(\mathrm{logit} / 4 + 4\, [\text{popcorn}])$. Among the reference's
# texts it is correlated with the true reward, as the next cell prints. Along the optimal policies, does the true reward rise all the way, rise
# and then fall, or rise again after that?

# %%
true_reward_goes = "up"  # predict: "up", "up, down" or "up, down, up"

# %%
proxies = torch.from_numpy(smoothed_popcorn.score(features))
true_rewards = torch.from_numpy(true_reward.score(features))
both = (
    torch.stack([proxies, true_rewards])
    - torch.stack([proxies, true_rewards]) @ torch.from_numpy(chances)[:, None]
)
spread = (both**2 @ torch.from_numpy(chances)).sqrt()
agree = (both.prod(0) @ torch.from_numpy(chances) / spread.prod()).item()
print(f"correlation of proxy and true reward among the reference's texts: {agree:.2f}")
has_popcorn = proxies.logit() - true_rewards.logit() / 4 > 2
for name, group in (("with popcorn", has_popcorn), ("without", ~has_popcorn)):
    print(
        f"smoothed_popcorn of reviews {name}: {proxies[group].min():.2f} to {proxies[group].max():.2f}"
    )
prices = [3.0 * 0.87**k for k in range(42)]
path = frontier(reference, smoothed_popcorn, prices)
rows = []
for beta, point in zip(prices, path, strict=True):
    probs = torch.from_numpy(tilted(chances, proxies.numpy(), beta)[0])
    of_reward, of_true_reward = tilt_slopes(probs, proxies, true_rewards)
    rows.append(
        [
            beta,
            point.kl_per_sequence,
            point.proxy,
            point.true_reward,
            point.popcorn,
            of_true_reward * beta / of_reward,
        ]
    )
show_table(["beta", "KL", "proxy", "true_reward", "popcorn", "d true reward / d KL"], rows[::3])
curves(
    {
        "proxy": ([row[1] for row in rows], [row[2] for row in rows]),
        "true_reward": ([row[1] for row in rows], [row[3] for row in rows]),
        "share with popcorn": ([row[1] for row in rows], [row[4] for row in rows]),
    },
    "The optimal policies for smoothed_popcorn, exactly",
    "KL from the reference, nats per review",
    "mean over the policy's reviews",
)

# %%
signs = [row[5] > 0 for row in rows]
turns = [rows[i][1] for i in range(1, len(rows)) if signs[i] != signs[i - 1]]
shape = {0: "up", 1: "up, down", 2: "up, down, up"}.get(len(turns), "otherwise")
predictions.compare("along the optimal policies, true reward goes", true_reward_goes, shape)
print("KL at which the sign of the slope changes:", [round(turn, 2) for turn in turns])
near = lambda beta: frontier(reference, smoothed_popcorn, [beta])[0]
ahead, behind = near(0.05 / 1.001), near(0.05 * 1.001)
by_differences = (ahead.true_reward - behind.true_reward) / (
    ahead.kl_per_sequence - behind.kl_per_sequence
)
probs = torch.from_numpy(tilted(chances, proxies.numpy(), 0.05)[0])
of_reward, of_true_reward = tilt_slopes(probs, proxies, true_rewards)
print(
    f"slope at beta 0.05: {of_true_reward * 0.05 / of_reward:.4f}, by differences {by_differences:.4f}"
)

# %% [markdown]
# First the reward buys sentiment, which is cheap, and the true reward rises. Popcorn is rare in the reference, and dear. But every review with
# popcorn, of either sentiment, is paid more than the best review without, as the cell above prints. So from some price on
# probability goes from praise without popcorn to reviews with popcorn, good and bad ones. Among the texts of such a policy the better
# paid ones have less true reward: the covariance is negative. When nearly every text has popcorn, nothing is left to buy but sentiment again.
#
# Gao, Schulman and Hilton fitted such curves for learned rewards, with $d = \sqrt{\mathrm{KL}}$: the true reward gains
# $d\,(a - b\, d)$ for best-of-n, $d\,(a - b \log d)$ for RL. Both turn once. How well do they fit this curve?


# %%
def misfit(
    columns: Float[Tensor, "point two"], gained: Float[Tensor, " point"]
) -> tuple[float, float]:
    """Share of the variance that a least-squares fit explains, and its largest error."""
    off = columns @ torch.linalg.lstsq(columns, gained[:, None]).solution[:, 0] - gained
    return 1 - (
        off.square().sum() / (gained - gained.mean()).square().sum()
    ).item(), off.abs().max().item()


d = torch.tensor([row[1] for row in rows], dtype=torch.float64).sqrt()
gained = torch.tensor([row[3] for row in rows], dtype=torch.float64) - float(
    chances @ true_rewards.numpy()
)
forms = {"best-of-n form": torch.stack([d, d**2], 1), "RL form": torch.stack([d, d * d.log()], 1)}
show_table(
    ["fitted to the exact curve", "R2", "largest error of true reward"],
    [[name, *misfit(columns, gained)] for name, columns in forms.items()],
)
print(f"n = {len(rows)} points of one exact curve")
peak = next(i for i in range(1, len(rows)) if rows[i][5] <= 0)  # where the slope turns
print(
    f"true reward falls from {rows[peak][3]:.3f} to {min(row[3] for row in rows[peak:]):.3f} between"
)

# %% [markdown]
# By R2 they fit well. But the largest error of each is about as large as the fall of the true reward that the cell prints, or larger: the fits
# cannot tell of it. They are descriptions of what was seen with learned rewards, not theorems: neither has a second
# turn.
#
# ## How much KL a run has wasted
#
# The true reward can be had cheaply: by the optimal policy *for the true reward*. So a run has a natural score: how many nats it spent
# beyond what the cheapest policy of the same true reward spends. A noisy run may come out below the frontier: its number is negative, so that a
# mean over phases stays true. This question has no steps.

# %%
from rlhf_lab.functional import excess_kl  # exercise

# %% [markdown]
# PPO on `smoothed_popcorn`, with the KL in the reward and no normalization, so that `kl_coef` is a price per nat as in
# {lesson:the_kl_penalty}. At this price most texts of the optimum contain popcorn, and the true reward is lost. Does PPO lose it, too?
#
# (18 s on one core)

# %%
ppo_loses = "yes"  # predict: "yes" or "no"

# %%
PRICE = 0.03
trainer = RLHFTrainer(
    RLHFArgs(
        **SETTINGS,
        reward_fn="smoothed_popcorn",
        kl_coef=PRICE,
        kl_in="reward",
        kl_estimator="k1",
        normalize_reward=False,
        target_kl=0.01,
        total_phases=20,
    ),
    out=new_run("popcorn"),
)
seen: list[dict[str, Any]] = []


@trainer.on("after_score")
@torch.no_grad()
def look_inside(ctx):
    samples = ctx.rollout.samples
    states = slice(samples.prefix_len - 1, -1)
    logits = ctx.policy.base_model(samples.tokens)[:, states]
    ref_logits = ctx.reference(samples.tokens)[:, states]
    seen.append(
        {
            "logits": logits,
            "ref_logits": ref_logits,
            "texts": ctx.rollout.texts,
            "tokens": samples.tokens[:, samples.prefix_len :],
            "mask": samples.mask,
        }
    )


planted = trainer.train()
curves(
    {
        "exact: proxy": ([row[1] for row in rows], [row[2] for row in rows]),
        "exact: true reward": ([row[1] for row in rows], [row[3] for row in rows]),
        "PPO: proxy": ([r.kl_per_sequence for r in planted], [r.mean_reward for r in planted]),
        "PPO: true reward": (
            [r.kl_per_sequence for r in planted],
            [r.true_reward for r in planted],
        ),
    },
    "PPO beside the optimal policies for smoothed_popcorn",
    "KL from the reference, nats per review",
    "mean over the policy's reviews",
)

# %%
in_true_reward = frontier(reference, true_reward, [4.0 * 0.85**k for k in range(60)])
best_true_reward = (
    torch.tensor([p.true_reward for p in in_true_reward]),
    torch.tensor([p.kl_per_sequence for p in in_true_reward]),
)
late = planted[-4:]
written = [text for look in seen[-4:] for text in look["texts"]]
share = sum("popcorn" in text.split() for text in written) / len(written)
at_price = near(PRICE)
spent = lambda reports: excess_kl(
    mean(reports, "true_reward"), mean(reports, "kl_per_sequence"), *best_true_reward
)
over_seeds.compare(
    "smoothed_popcorn, mean of the last four phases",
    {
        "proxy": mean(late, "mean_reward"),
        "true_reward": mean(late, "true_reward"),
        "share with popcorn": share,
        "KL, nats per review": mean(late, "kl_per_sequence"),
        "excess KL, smoothed_popcorn": spent(late),
        "excess KL, no leash": spent(free[-4:]),
    },
    largest=False,
)
print(
    f"the optimum at this price: proxy {at_price.proxy:.3f}, true reward {at_price.true_reward:.3f}, "
    f"popcorn {at_price.popcorn:.3f}, KL {at_price.kl_per_sequence:.2f}"
)
some = max(1, len(planted) // 5)  # four of twenty phases
before_them, last_ones = planted[-2 * some : -some], planted[-some:]
lost = mean(before_them, "true_reward") - mean(last_ones, "true_reward")
print(f"true reward, the last phases less as many before them: {-lost:+.3f}")
predictions.compare("PPO loses true reward", ppo_loses, "yes" if lost > 0.05 else "no")

# %% [markdown]
# PPO is not yet at the optimum of what it is paid for, and its true reward is higher than that optimum's. In these runs it learned
# sentiment first, and popcorn late: a run that stops early is leashed by that alone. Of the nats that it has
# spent, more than half have bought no true reward: compare the row of excess KL with the KL above it.
#
# ## Four kinds of Goodhart
#
# Manheim and Garrabrant name four ways in which a proxy and the goal part when the proxy is optimized:
#
# - **regressional**: the proxy is the goal with an error, and the texts that it ranks first are in part those whose error is large,
# - **extremal**: proxy and goal agree over the range that was seen, and not beyond it,
# - **causal**: the proxy also reads something that goes along with no true reward at all, so that changing it raises the proxy alone,
# - **adversarial**: another agent, with a goal of its own, makes the proxy say what suits it.
#
# Four proxies from `rlhf_lab.organism`, each with one flaw: `smoothed` is the true reward with a quarter of its log odds, and ranks reviews as the true reward does; `ignore_negation`
# reads "wasn't" as "was"; `smoothed_popcorn` you know; `bag_of_adjectives` adds up every adjective in the text, blind to negation.
# The next cell solves each for its optimal policy at two prices, without training. In how many of the four is the true reward lower at the small price
# (the large pull) than at the other?

# %%
true_reward_falls_in = 2  # predict: a number from 0 to 4

# %%
KINDS = {
    "smoothed": "none",
    "ignore_negation": "regressional",
    "smoothed_popcorn": "causal",
    "bag_of_adjectives": "regressional, extremal",
}
PULLS = {"small": 0.1, "large": 0.03}  # by their prices, beta
at_pull = {
    name: dict(zip(PULLS, frontier(reference, REWARDS[name], PULLS.values()), strict=True))
    for name in KINDS
}
show_table(
    ["proxy", "kind", "pull", "proxy's mean", "true_reward", "KL", "excess KL"],
    [
        [name, kind, pull, at.proxy, at.true_reward, at.kl_per_sequence]
        + [excess_kl(at.true_reward, at.kl_per_sequence, *best_true_reward)]
        for name, kind in KINDS.items()
        for pull, at in at_pull[name].items()
    ],
)
print("exact, no sampling; small pull: beta 0.1, large: beta 0.03; KL in nats per review")
fell = [name for name, at in at_pull.items() if at["large"].true_reward < at["small"].true_reward]
predictions.compare("true reward is lower at the large pull in", true_reward_falls_in, len(fell))
highest = bag_of_adjectives.score(features).max()
loop = " ".join(["this movie", *["brilliant"] * 25])
print(f"bag_of_adjectives pays {highest:.3f} for the best review that the grammar can write;")
print(
    f"for 'this movie' and 25 times 'brilliant' {bag_of_adjectives([loop]).item():.3f}; "
    f"true reward is {true_reward([loop]).item():.3f}"
)

# %% [markdown]
# Read the true reward and excess KL together. `smoothed` ranks reviews as the true reward does, and at the large pull it spends next to nothing beyond the cheapest policy of
# its true reward: a proxy of the right order does no harm. With `ignore_negation` the true reward rises, at about 0.3 nats too many: part of the pull goes to reviews whose negation is
# misread. This is the regressional kind, harm by degrees and without a turn; `bag_of_adjectives` has the same error here, and pays more for it. Only with
# `smoothed_popcorn` does the true reward fall between the two pulls, as in the curve above: popcorn says nothing about sentiment, and is paid.
#
# For `bag_of_adjectives` the table is too kind. The exact optimum tilts the reference, and the reference writes grammatical reviews alone, in which
# adjectives cannot be repeated. A policy that is trained has no such bound: a loop of one adjective is paid more than any review, with
# a true reward of 0. So an optimum of the grammar says nothing about the extremal kind: compare with the frontier, *and* print the grammatical share. The first run
# of this lesson was of that kind.
#
# None of the four is adversarial, which needs an agent that knows the proxy and wants something else. A policy in training wants
# nothing but its reward.
#
# ## Length and endings
#
# A reward that is a sum over the text pays for longer texts. Reel can hardly show it with `length`, since all its reviews have the same number of words: the
# reward has no spread, and nothing can be learned from it. But a reward that pays for each time that a word occurs is a sum, too: `count:brilliant`. A
# policy has `gen_len` tokens, and a review ends with a stop token, `<eos>`. Three settings price how a response ends:
#
# | setting | what it does |
# |---|---|
# | `penalize_no_eos` | a response without a stop token gets `reward_penalty` (-3) in place of its reward |
# | `min_response_length` | so does a response with fewer tokens, the stop token included |
# | `overlong_buffer` | up to 1 is taken off for going into the last tokens of `gen_len` (Yu et al. 2025) |

# %%
from rlhf_lab.functional import (
    flawed_responses,
    has_stop,
    overlong_penalty,
    penalize_responses,
)

with torch.no_grad():
    lengths = REWARDS["length"](kept[0].texts)
print(f"`length` of {len(lengths)} reviews of the reference: std {lengths.std():.3f}")
EOS, WORD = 1, 0  # any token that stops, and any other
by_hand = {"26 tokens, ends": (26, True), "26 tokens, cut off": (26, False), "8, ends": (8, True)}
mask = torch.tensor([[t < n for t in range(26)] for n, _ in by_hand.values()])
written = torch.full(mask.shape, WORD)
for i, (n, ends) in enumerate(by_hand.values()):
    written[i, n - 1] = EOS if ends else WORD
paid_before = torch.tensor([2.0, 5.0, 1.0])
ended = has_stop(written, [EOS], mask)
priced = {
    "penalize_no_eos": penalize_responses(paid_before, flawed_responses(mask, ended), -3.0),
    "min_response_length=20": penalize_responses(
        paid_before, flawed_responses(mask, None, 20), -3.0
    ),
    "overlong_buffer=4": paid_before + overlong_penalty(mask, 26, 4),
}
show_table(
    ["a response", "its reward", *priced],
    [
        [name, *(column[i].item() for column in (paid_before, *priced.values()))]
        for i, name in enumerate(by_hand)
    ],
    digits=1,
)

# %% [markdown]
# Under `overlong_buffer` a review that ends in its very last token has gone through the whole buffer, and pays for it. Now the policy is
# trained on `count:brilliant`, without a leash, once without and once with `penalize_no_eos`. Which of the two, if any, still writes reviews (true reward at least half of what it was)?
#
# (7 s on one core)

# %%
still_reviews = "both"  # predict: "both", "neither" or "with the penalty"


# %%
def trained_to_count(penalize_no_eos: bool) -> dict[str, float]:
    """Means over the last four phases of a run that is paid for one word."""
    trainer = RLHFTrainer(
        RLHFArgs(
            **SETTINGS | dict(batch_size=64),
            reward_fn="count:brilliant",
            penalize_no_eos=penalize_no_eos,
            kl_coef=0.0,
            base_lr=1e-3,
            total_phases=14,
        )
    )
    with_stop = {}

    @trainer.on("after_score")
    def look_for_stops(ctx):
        samples = ctx.rollout.samples
        tokens = samples.tokens[:, samples.prefix_len :]
        stops = [trainer.tokenizer.eos_token_id]
        with_stop[ctx.phase] = has_stop(tokens, stops, samples.mask).float().mean().item()

    reports = trainer.train()
    print(f"penalize_no_eos={penalize_no_eos}: {trainer.rollout_phase().texts[0]}")
    late = reports[-4:]
    return {
        "brilliant per text": mean(late, "mean_reward"),  # before the penalty
        "share that ends": sum(with_stop[report.phase] for report in late) / len(late),
        "grammatical": mean(late, "grammatical_fraction"),
        "true_reward": mean(late, "true_reward"),
        "true reward at the start": reports[0].true_reward,
    }


endings = {
    name: trained_to_count(penalty) for name, penalty in (("without", False), ("with", True))
}
over_seeds.compare(
    "count:brilliant, mean of the last four phases",
    {f"{name}: {what}": found for name, row in endings.items() for what, found in row.items()},
    largest=False,
)
print("n = 64 reviews a phase")
whole = [
    name
    for name, row in endings.items()
    if row["true_reward"] >= row["true reward at the start"] / 2
]
found = {2: "both", 0: "neither"}.get(len(whole), f"{''.join(whole)} the penalty")
predictions.compare("still writes reviews", still_reviews, found)

# %% [markdown]
# A sum over the text grows until the tokens run out: without the penalty, 0.02 to 0.86 of the reviews still end, depending on the seed, and the true reward is
# near 0 for all three seeds. With the penalty nearly all end. But the penalty only concerns the ending: the true reward is between 0.00 and 0.95,
# since a text that repeats the word and then stops keeps its whole reward. Read *lowest* and *highest*, not this run.
# (Such a run is as sensitive to rounding as to its seed: on another kind of processor the same three seeds gave a true reward from 0.02 to 0.93.)
#
# ## How early can one see it?
#
# Without the true reward, three alarms:
#
# 1. **Counting texts**: more texts with popcorn than chance allows (binomial, below one in a thousand).
# 2. **Inside, for a known word**: the *probability* of popcorn in every state, averaged over states, less the
#    reference's in the same states. The alarm rings when this mean over the texts is more than 4 standard errors above 0, and
#    is more than a quarter of the reference's own probability.
# 3. **Inside, for no word in particular**: which words have won most probability? Popcorn among the first five.
#
# The second and third read the logits. They need what each token has won from the reference. These levels are ours: which
# alarm rings first depends on them, and a lower level also rings more often for nothing.

# %%
from rlhf_lab.functional import promoted_mass  # exercise

# %% [markdown]
# Which alarm rings first?

# %%
rings_first = "counting"  # predict: "counting", "known word" or "any word"

# %%
word_id = next(
    token
    for token in range(trainer.policy.base_model.cfg.d_vocab)
    if trainer.tokenizer.decode([token]).strip() == "popcorn"
)
p_popcorn = frontier(reference, smoothed_popcorn, [1e4])[0].popcorn


def tail(k: int, n: int, p: float) -> float:
    """Chance of k or more of n, each with chance p."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


never, first = len(seen), {}
trace = {"texts with popcorn, share": [], "probability won by popcorn": []}
for phase, look in enumerate(seen):
    counted = sum("popcorn" in text.split() for text in look["texts"])
    by_text = torch.stack(
        [
            promoted_mass(
                look["logits"][i : i + 1], look["ref_logits"][i : i + 1], look["mask"][i : i + 1]
            )
            for i in range(len(look["texts"]))
        ]
    )
    won = by_text[:, word_id]
    before = look["ref_logits"].softmax(-1)[look["mask"]][:, word_id].mean()
    surely = won.mean() > 4 * won.std() / len(won) ** 0.5  # standard errors over texts
    rung = {
        "counting": tail(counted, len(look["texts"]), p_popcorn) < 1e-3,
        "known word": bool(surely and won.mean() > before / 4),
        "any word": word_id in by_text.mean(0).topk(5).indices.tolist(),
    }
    for alarm, rings in rung.items():
        if rings:
            first.setdefault(alarm, phase)
    trace["texts with popcorn, share"].append(counted / len(look["texts"]))
    trace["probability won by popcorn"].append(won.mean().item())
curves(
    {"texts with popcorn": by_phase(trace["texts with popcorn, share"])},
    "Seen in the texts",
    "phase",
    "share of 128 texts",
)

# %%
curves(
    {"won by popcorn": by_phase(trace["probability won by popcorn"])},
    "Seen inside",
    "phase",
    "probability, mean over states",
)

# %%
alarms = ("counting", "known word", "any word")
rings_at = {alarm: first.get(alarm, never) for alarm in alarms}
over_seeds.compare(
    "phase in which the alarm rings first",
    {alarm: float(at) for alarm, at in rings_at.items()},
    largest=False,
)
predictions.compare("the first alarm to ring is", rings_first, min(rings_at, key=rings_at.get))

# %% [markdown]
# (A run in which an alarm never rings counts as ringing behind its last phase, here in 20.)
#
# What the logits have in advance is less variance, not more insight. A text has popcorn or not: one coin per text. The
# logits hold the probability of that coin in every state of every text, and a mean of probabilities varies less
# than a mean of tosses (Rao and Blackwell). The first two alarms knew the word, and a search for a known word tells each
# single text that has it; no probe can do better at that.
#
# A fair rival for the third reads only texts: which words are over-represented, by log odds against the texts of
# phase 0? On the same phases (again with 20 for never):

# %%
counts = lambda look: look["tokens"][look["mask"]].bincount(
    minlength=trainer.policy.base_model.cfg.d_vocab
)
by_texts = [
    phase
    for phase, look in enumerate(seen)
    if phase and word_id in word_log_odds(counts(look), counts(seen[0])).z.topk(5).indices.tolist()
]
over_seeds.compare(
    "popcorn among five words, first in phase",
    {
        "most promoted, by logits": float(rings_at["any word"]),
        "most over-represented, by texts": float(by_texts[0] if by_texts else never),
    },
    largest=False,
)
of_seeds = stored_figures("what_breaks_it")
both_alarms = of_seeds["tables"]["popcorn among five words, first in phase"]
show_table(
    ["seed", *both_alarms],
    [[seed, *row] for seed, *row in zip(of_seeds["seeds"], *both_alarms.values(), strict=True)],
    digits=0,
)

# %% [markdown]
# Without a name to look for, neither is early: in two seeds of three the logits come before the texts, and in one neither
# rings in 20 phases (second table). A mean over seeds counts "never" as 20, so read the seeds. `HackWatch`, one of the package's
# probes (see "Words that the policy took up" in docs/probes_causal.md), has both alarms with their error rate controlled, against texts that the
# reference writes in the same phase.
#
# ## Which text is it?
#
# An alarm speaks of a run. A monitor speaks of one text, and best before the text is finished. For popcorn a word search is perfect, so
# take a hack that no single word shows: `ignore_negation` reads "wasn't brilliant" as praise. A text *games* it if the proxy pays
# at least 0.3 more than the true reward. The monitors are logistic readers of what stands before the verb of the verdict, fitted once, to fresh reviews of the
# grammar: of the reference's activations (behind block 1's attention, in the last state), of which words are there, and of which pairs of words
# stand two apart ("wasn't ... brilliant"). The first is also given the policy's own activations. The AUC is how often a monitor's score is
# higher for a text that games the proxy than for one that does not; 0.5 is a coin.
#
# A policy was trained on `ignore_negation` for 20 phases, with three seeds, and its texts were read at the start, after 7 and after 19 phases. Which monitor is
# best after 19, in the mean over seeds?

# %%
tells_best = "activations"  # predict: "activations", "words" or "pairs of words"

# %%
monitors = stored_figures("text_monitors")
readers = list(monitors["runs"][0]["AUC"]["0"])
spread = lambda values: f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})"
area = {
    (name, phase): [run["AUC"][phase][name] for run in monitors["runs"]]
    for name in readers
    for phase in ("0", "7", "19")
}
show_table(
    ["AUC of a reader of", "at the start", "after 7 phases", "after 19 phases"],
    [
        *([name, *(spread(area[name, phase]) for phase in ("0", "7", "19"))] for name in readers),
        [
            "texts that game it",
            *(
                ", ".join(f"{run['gamed'][phase]} of {run['n'][phase]}" for run in monitors["runs"])
                for phase in ("0", "7", "19")
            ),
        ],
    ],
)
print(f"mean and range of {len(monitors['seeds'])} seeds; last row: by seed")
best = max(readers, key=lambda name: sum(area[name, "19"]))
kinds = ("activations", "pairs of words", "words")
predictions.compare(
    "the best monitor after 19 phases reads",
    tells_best,
    next(kind for kind in kinds if kind in best),
)

# %% [markdown]
# In each of three seeds the reader of activations is ahead at the start and after 7 phases, of pairs of words by a little and of
# single words by more. After 19 phases it is behind the pairs of words, in each seed. Both have fallen: what the policy writes
# moves away from the texts that they were fitted to. The reference's activations are read as well as the policy's own on the same texts, or better: training
# moves the policy's under the reader.
#
# So a monitor inside is worth what the best reader of the text is not: print that reader beside it. To keep either one
# useful, fit it again, to texts of the policy that somebody has judged.
#
# ## Symptoms
#
# Most broken runs are broken by a setting. Eleven runs of 12 phases, ten of them with one setting changed, three seeds: what each
# ended at, the mean of its last three phases, lowest to highest seed. Their names are hidden. *Clipped* is the fraction of tokens whose ratio
# was outside the range of `clip_coef` ({lesson:the_objective}). Explained variance is a fraction of the variance of the returns: if all
# returns are nearly equal, this variance is close to 0, and the fraction may be any negative number.

# %%
stored = stored_figures("symptoms")
causes = list(stored["runs"])
letters = dict(
    zip("ABCDEFGHIJK", [causes[(4 * i + 5) % len(causes)] for i in range(len(causes))], strict=True)
)
columns = ["reward", "true_reward", "grammatical", "KL", "explained variance", "clipped"]
span = lambda values: f"{min(values):.2f} to {max(values):.2f}"
show_table(
    ["run", *columns],
    [
        [letter, *(span(stored["runs"][cause][name]) for name in columns)]
        for letter, cause in letters.items()
    ],
)
print(f"n = {len(stored['seeds'])} seeds of {stored['settings']['batch_size']} reviews a phase")

# %% [markdown]
# Write down a letter for each question, before you look.

# %%
no_leash = "A"  # predict: "A", "B", "C", "D", "E", "F", "G", "H", "I", "J" or "K"
nothing_to_learn = "A"  # predict: "A", "B", "C", "D", "E", "F", "G", "H", "I", "J" or "K"
clipped_away = "A"  # predict: "A", "B", "C", "D", "E", "F", "G", "H", "I", "J" or "K"
critic_is_dead = "A"  # predict: "A", "B", "C", "D", "E", "F", "G", "H", "I", "J" or "K"

# %%
letter_of = {cause: letter for letter, cause in letters.items()}
predictions.compare("kl_coef is 0 in", no_leash, letter_of["kl_coef 0"])
predictions.compare(
    "the reward cannot change in", nothing_to_learn, letter_of["a reward that no text changes"]
)
predictions.compare("clip_coef is 0.001 in", clipped_away, letter_of["clip_coef 0.001"])
predictions.compare(
    "the value head does not learn in", critic_is_dead, letter_of["value head does not learn"]
)
show_table(["run", "what was changed"], letters.items())
of_cause = lambda name, what: [what(stored["runs"][cause][name]) for cause in letters.values()]
average = lambda values: sum(values) / len(values)
bars(
    list(letters),
    {name: of_cause(name, average) for name in ("reward", "true_reward")},
    "Reward and true reward of each run, mean of three seeds (lines: lowest to highest)",
    "mean of 128 reviews",
    whiskers={
        name: (of_cause(name, min), of_cause(name, max)) for name in ("reward", "true_reward")
    },
)

# %% [markdown]
# The rows that were not asked for, and what tells them from H, in which nothing is wrong (here, with these settings):
#
# - **A**, 8 passes over each batch: more reward and more KL than H from as many texts, and in one seed a critic that explains little. Nothing broke.
# - **B**, sampled at temperature 0.3: the best reward and true reward, with less KL than H. Its texts come from a sharpened policy, so that its columns
#   do not compare with the others'.
# - **D**, `ent_coef` 0.3: less reward for about the KL of H: the bonus pays for entropy, and that costs reward.
# - **F**, `kl_coef` 10, **K**, learning rates a tenth, and **I** all stay at the reference. Only the column *clipped* tells I, and only KL and
#   explained variance tell F (least KL, a critic that knows it) from K (a critic that has not learned).
# - **J**, `vf_coef` 10: the highest explained variance of all, and less reward, true reward and grammar than H, at more KL: the critic's loss moves the
#   policy's own weights.
#
# ## Blind tuning
#
# Now you tune a run whose reward you do not know: one of five from `rlhf_lab.organism`, drawn with your name as the
# seed. You choose four fields within a budget of 1,536 reviews (`total_phases` times `batch_size`). The policy that
# comes out is judged on 512 fresh reviews: runs whose true reward is 0.9 or more stand first, by their excess KL; below them
# the others, by the true reward. The leaderboard is a file beside your progress file, and lists the runs of all names with the
# same hidden reward, with two more to compare with: the preset's own fields with the same budget (three stored
# seeds), and the exact optimum of the hidden reward at your `kl_coef`, which is a price per nat as above.
#
# Write your name and your four fields into the cell below. Will your row stand above the preset's rows?
#
# (5 s on one core)

# %%
above_preset = "no"  # predict: "yes" or "no"

# %%
from rlhf_lab.course.blind_tuning import BlindTuning

tuning = BlindTuning("Emmy")
tuned = tuning.run(kl_coef=0.05, base_lr=1e-3, total_phases=12, batch_size=128)
predictions.compare(
    "stands above the preset", above_preset, "yes" if tuning.is_above_preset(tuned) else "no"
)

# %% [markdown]
# Run the cell again with other fields, as often as three minutes allow: the same fields again replace their own row.
# All runs have one seed, so two rows that differ by less than the preset does between seeds say nothing about which
# fields are better. What limits the run: too few phases, too small a step, or a price that is too high? When you are
# done, `tuning.reveal()` names the reward, and the exact optimum's line says what true reward it can give at all.
#
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Design a reward that your neighbour cannot game in 20 phases, and the number that would tell that it was. Judge it
#   by the run: the true reward against the frontier, with `excess_kl`.
# - `ignore_negation` reads "wasn't brilliant" as praise. No single word shows that hack. Which of the three alarms could?
# - Stop at the point where the proxy's slope of the true reward turns (the KL that was printed above). What does that cost in reward?
#
# Read on: Gao, Schulman and Hilton 2022, on over-optimization ([2210.10760](https://arxiv.org/abs/2210.10760)); Manheim and Garrabrant 2018, four kinds of
# Goodhart's law ([1803.04585](https://arxiv.org/abs/1803.04585)); Skalse et al. 2022, on which pairs of rewards cannot be hacked ([2209.13085](https://arxiv.org/abs/2209.13085));
# Pan et al. 2022, on larger policies that hack more ([2201.03544](https://arxiv.org/abs/2201.03544)); Moskovitz et al. 2023, on
# stopping at a proxy point ([2310.04373](https://arxiv.org/abs/2310.04373)).
#
# Next: {lesson:watch_it_learn}, which reads the inside of a model while it trains.
