# %% [markdown]
# # 05 Rewards, advantages and credit
#
# One number comes at the end of a review. Which of its 26 tokens earned it, and how does one climb it?
#
# In the first half you take a reward from a classifier, compute by backward recursion what every token of a
# review was truly worth, and derive the gradient that RLHF climbs. In the second half the truth is taken away: you
# estimate the credit, and measure what each estimator gets wrong, against the truth of the first half.
#
# **Needs** {lesson:start} and {lesson:the_value_head} (policy, state, reward, value head).
#
# **Afterwards you can**
# - take a reward from a classifier without its depending on the other texts of a batch,
# - derive the policy gradient, and say what a baseline may depend on,
# - compute exact values and advantages by backward recursion,
# - derive GAE, which weights estimates of one step and of many by a factor lambda, and choose lambda with a reason,
# - tell an advantage's error from a gradient's error.
#
# **What to inspect** when credit looks wrong:
#
# | you see | look at | because |
# |---|---|---|
# | a text's reward changes with its batch | the attention mask | without it the classifier reads padding |
# | the policy moves although all rewards are equal, or nearly | the spread before normalising | dividing by a tiny spread turns rounding into full-sized rewards |
# | the value head changes while only the policy should | `detach` | an advantage is a number to the policy's gradient |
# | a prompt teaches nothing | the spread within its group | a group of equal rewards has no advantage |
# | advantages far from the truth, and the gradient right | what the error depends on | an error that depends on the state alone costs only noise |
# | more reviews do not help | the bias | averaging removes noise and nothing else |

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work; a good break is after the baselines. All cells together run in about 55 seconds
# on one core, without a network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np
import torch
from IPython.display import display
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs
from rlhf_lab.course import Predictions, SeedFigures, check, hint, progress, show_table
from rlhf_lab.functional import (
    Interval,
    bootstrap_interval,
    get_logprobs,
    kept_share,
    noise_scale,
    token_rewards,
)
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.value_head import make_value_head
from rlhf_lab.organism import (
    Grammar,
    build_graph,
    true_reward,
    grammar_policy,
    state_values,
    token_information,
)
from rlhf_lab.rewards import SentimentReward
from rlhf_lab.sampling import SamplingSpec, sample
from rlhf_lab.views import bars, curves, tokens_html

SETTINGS = dict(preset="reel", gen_len=26, top_k=None, seed=1)
args = RLHFArgs(**SETTINGS)
predictions = Predictions()
over_seeds = SeedFigures("rewards_and_credit", SETTINGS)

# %% [markdown]
# This lesson stays on Reel, because only there the truth is known that everything is compared with. A figure that
# has a column for other seeds was measured on each of them by these same cells.
#
# ## A reward from a classifier
#
# A sentiment classifier reads a text and gives a logit $z_k$ for each of its classes. The reward is the probability
# of the class that is wanted,
#
# $$R(x) = \frac{e^{z_+(x)}}{\sum_k e^{z_k(x)}}$$
#
# Texts of unequal length go through it as one batch. The shorter ones are filled up with padding, and the attention
# mask tells the classifier which tokens are real. The check below loads a classifier and scores texts with many wrong
# answers, too.
#
# (9 s on one core)

# %%
from rlhf_lab.rewards import sentiment_reward  # exercise

# %% [markdown]
# Let the bundled policy write 512 reviews and score them. On Reel the classifier can be held against the formula
# that it was trained to learn, `true_reward`: the exact probability that a review is positive.

# %%
model = load_model(args.base_model)
policy = TransformerWithValueHead(model, seed=args.seed)
classifier = SentimentReward(args.reward_model)
bos = model.tokenizer.bos_token_id
prefix = [bos, *model.tokenizer.encode(args.prefix, add_special_tokens=False)]
prefix_len = len(prefix)


def write(prompts: Sequence[Sequence[int]], seed: int) -> Int[Tensor, "batch seq"]:
    """Whole reviews that begin with these prompts, which are of one length."""
    spec = SamplingSpec(prefix_len + args.gen_len - len(prompts[0]))
    generator = torch.Generator().manual_seed(seed)
    return sample(policy, prompts, spec, generator).tokens


def texts_of(tokens: Int[Tensor, "batch seq"]) -> list[str]:
    """The text of each row, without the tokens for its beginning and end."""
    return model.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def score(texts: Sequence[str]) -> Float[Tensor, " batch"]:
    """My reward, from the bundled classifier."""
    return sentiment_reward(
        texts, classifier.tokenizer, classifier.model, classifier.rewarded_class
    )


whole = texts_of(write([prefix] * 512, args.seed))
rewards, truth = score(whole), true_reward(whole)
show_table(
    ["reward", "true_reward", "text"],
    [[rewards[i].item(), truth[i].item(), whole[i]] for i in range(3)],
    3,
)
correlation = torch.corrcoef(torch.stack([rewards, truth]))[0, 1].item()
agree = ((rewards > 0.5) == (truth > 0.5)).float().mean().item()
print(
    f"correlation with true reward {correlation:.4f}, same side of 0.5 {agree:.1%}, n = {len(whole)}"
)

# %% [markdown]
# What if the mask is forgotten? All reviews of Reel have one length, so that there is no padding, and the mistake
# would stay invisible. Cut 256 of them off at a random word, and score each beside the whole ones, with the mask and
# without. Which share of the cut texts changes sides, from above 0.5 to below or back?

# %%
without_mask = "about a tenth"  # predict: "none", "about a tenth" or "about half"

# %%
places = torch.randint(4, 22, (256,), generator=torch.Generator().manual_seed(0)).tolist()
cut = [" ".join(text.split()[:n]) for text, n in zip(whole, places, strict=False)]
alone = torch.cat([score([text]) for text in cut])
together = score(cut + whole[256:])[:256]
batch = classifier.tokenizer(cut + whole[256:], padding=True, return_tensors="pt")
with torch.no_grad():
    logits = classifier.model(input_ids=batch["input_ids"]).logits[:256]
unmasked = logits.softmax(-1)[:, classifier.rewarded_class]


def shown(found: Interval, digits: int = 3) -> str:
    """An estimate and its interval."""
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


rows = []
for name, found in [("with the mask", together), ("without", unmasked)]:
    change = (found - alone).abs()
    flips = ((found > 0.5) != (alone > 0.5)).float()
    mean, flipped = bootstrap_interval(change), bootstrap_interval(flips)
    rows.append([name, shown(mean), change.max().item(), shown(flipped)])
show_table(["scored in a batch", "mean change", "largest", "share that changes sides"], rows)
share = flips.mean().item()
kind = "none" if share < 0.02 else "about a tenth" if share < 0.3 else "about half"
predictions.compare("without the mask, the share that changes sides", without_mask, kind)

# %% [markdown]
# With the mask a text's reward is its own, up to rounding. Without it the reward depends on the longest text that
# happened to be in the batch. Test any reward for that: score a text alone and among others.
#
# ### Normalising it
#
# Many trainers standardize the rewards of a batch,
#
# $$r'_i = \frac{r_i - \bar r}{\operatorname{std}(r) + \epsilon}, \qquad \epsilon = 10^{-5}$$
#
# so that the learning rate means the same for any reward. What matters for learning is which reviews did better than
# the others of the batch.
#
# The functions that you write from here on may use the helpers of the package. `at_least_float32` turns half precision
# into float32 and leaves everything else alone, `zero_masked(x, mask)` puts 0 where the mask is False, and
# `masked_mean` and `masked_std` count only what the mask counts. All of them take `None` for a mask that counts
# everything. You need not use them; but the check tries half precision wherever a docstring speaks of it, and puts nan
# where the mask is False.

# %%
from rlhf_lab.functional import normalize_reward  # exercise

# %% [markdown]
# If *every* review gets the same reward, there is nothing to learn from. What are the normalised rewards of eight equal
# ones? And what becomes of 128 rewards that differ by chance alone, with a spread of only 0.0001: what is their spread
# afterwards?

# %%
equal_rewards = "zero"  # predict: "zero", "one" or "nan"
spread_afterwards = "about 1"  # predict: "about 0.0001", "about 0.01" or "about 1"

# %%
chance = torch.randn(128, generator=torch.Generator().manual_seed(0))
spreads = {s: normalize_reward(0.5 + s * chance / chance.std()) for s in (0.2, 1e-3, 1e-4, 1e-5, 0)}
show_table(
    ["spread of the rewards", "spread afterwards"],
    [[f"{s:g}", found.std().item()] for s, found in spreads.items()],
)
spread = spreads[1e-4].std().item()
same = normalize_reward(torch.full((8,), 0.7))
became = "nan" if same.isnan().any() else "zero" if same.abs().max() < 0.1 else "one"
predictions.compare("eight equal rewards become", equal_rewards, became)
kind = min((0.0001, 0.01, 1), key=lambda size: abs(np.log(size / spread)))
predictions.compare("a spread of 0.0001 becomes", spread_afterwards, f"about {kind:g}")

# %% [markdown]
# The rewards of a classifier that is certain of every text may differ in the fourth digit alone, and after normalising
# that noise has the volume of a real reward. Only where $\epsilon$ is about as large as the spread, or larger, is it
# damped, and only exactly equal rewards give 0. Look at the spread *before* normalising when a policy moves and nobody knows why.
#
# From here on the reward is `true_reward`, so that values can be computed without an error.
#
# ## What every token is worth
#
# Let the policy $\pi$ stand in state $s$, the text so far. The *value* $V(s)$ is the reward to be expected from there;
# $Q(s, a)$ is the same once the token $a$ is chosen; their difference is the *advantage* of $a$:
#
# $$V(s) = \mathbb{E}[R \mid s], \qquad Q(s, a) = \mathbb{E}[R \mid s, a] = V(sa), \qquad A(s, a) = V(sa) - V(s)$$
#
# The next state is known, it is the text with $a$ behind it: that is why $Q(s,a)$ is simply $V(sa)$. At the end of a
# text there is nothing left to expect, and $V(x) = R(x)$. Before it, by the law of total expectation over the next
# token,
#
# $$V(s) = \sum_a \pi(a \mid s)\, V(sa)$$
#
# So values are known from the back to the front, one position at a time. Two texts with the same future have the
# same value, and Reel's grammar has few enough of these *states* to go through all of them. `graph.probability[t]`
# is a table [states, vocabulary] of the chances of the next word, and `graph.successor[t]` says which state each word
# leads to.

# %%
from rlhf_lab.organism import backward_values  # exercise

# %%
graph = build_graph(Grammar())
final = true_reward.score(graph.final_features())
tables = backward_values(final, graph.probability, graph.successor)
print(f"{sum(len(level) for level in tables):,} states, value at the start {tables[0][0]:.4f}")

# %% [markdown]
# Here is a review of the policy with the exact advantage of each of its tokens (the exact values are those of the
# grammar, which the policy has learned to speak). Before you look: of its 26 tokens, how many have an advantage that
# is not 0? And what do all 26 advantages add up to?

# %%
tokens_that_matter = 6  # predict: a number from 0 to 26
they_add_up_to = "R - V(start)"  # predict: "0", "R" or "R - V(start)"

# %%
tokens = write([prefix] * 8 * 256, args.seed)
exact, on_graph = state_values(grammar_policy(graph), true_reward, tokens)
R = true_reward(texts_of(tokens)).double()
values = exact[:, prefix_len - 1 : -1]  # of the state before each generated token
after = exact[:, prefix_len:]  # of the state behind it
A = after - values
mixed = int((A.abs().sum(1) - A.sum(1).abs()).argmax())  # the review that changes most to and fro
words = [f" {model.tokenizer.decode([token])}" for token in tokens[mixed, prefix_len:].tolist()]
matter = [t for t in range(len(words)) if A[mixed, t].abs() > 1e-9]
show_table(
    ["token", "word", "V before it", "V behind it", "advantage"],
    [[t, words[t].strip(), *(x[mixed, t].item() for x in (values, after, A))] for t in matter],
)
total, start = A[mixed].sum().item(), values[mixed, 0].item()
print(f"sum of the advantages {total:.4f}; R - V(start) {R[mixed] - start:.4f}; R {R[mixed]:.4f}")
counts = (A.abs() > 1e-9).sum(1)
grammatical = on_graph.all(1)
print(
    f"{grammatical.float().mean():.1%} of {len(A)} reviews are grammatical; in these, tokens that"
)
print(
    "matter:",
    dict(zip(*[x.tolist() for x in counts[grammatical].unique(return_counts=True)], strict=True)),
)
predictions.compare("tokens whose advantage is not 0", tokens_that_matter, len(matter))
sums = {"0": 0.0, "R": R[mixed].item(), "R - V(start)": R[mixed].item() - start}
predictions.compare("they add up to", they_add_up_to, min(sums, key=lambda s: abs(sums[s] - total)))

# %%
tokens_html(words, A[mixed], "advantage")

# %% [markdown]
# Three adjectives, two *connectors* ("and" and "but", which announce whether the next clause agrees) and the verb
# decide it; all other words leave the value where it was. The sum telescopes: each value in between is added once and
# subtracted once, and $\sum_t A_t = V(x) - V(s_0) = R - V(s_0)$.
#
# How much of the reward does each *position* decide, over all reviews? With $I_t = \mathbb{E}[A_t^2]$ the parts add
# up to the whole variance of the reward. Advantages have mean 0 whatever went before, $\mathbb{E}[A_k \mid s_k] = 0$,
# so for $t < k$ the product has mean $\mathbb{E}[A_t A_k] = \mathbb{E}\big[A_t\, \mathbb{E}[A_k \mid s_k]\big] = 0$,
# and the square of the sum is the sum of the squares:
#
# $$\operatorname{Var} R = \mathbb{E}\Big[\big(\textstyle\sum_t A_t\big)^2\Big] = \sum_t \mathbb{E}[A_t^2] = \sum_t I_t$$

# %%
information = token_information(grammar_policy(graph), true_reward)[prefix_len - 1 :]
names = [
    f"{slot.name} {slot.clause + 1}" if slot.clause is not None else slot.name
    for slot in Grammar().slots
]
names = names[prefix_len : prefix_len + args.gen_len]
deciding = {name: i.item() for name, i in zip(names, information, strict=True) if i > 1e-9}
show_table(
    ["position", "I, exactly", f"mean of A squared in {len(A)} reviews"],
    [
        [name, i, shown(bootstrap_interval(A[:, names.index(name)].square()), 4)]
        for name, i in deciding.items()
    ],
    4,
)
of_grammar = final @ (grammar_policy(graph).occupancy()[-1] * final) - tables[0][0] ** 2
print(f"sum {information.sum():.4f}, variance of R by the grammar {of_grammar:.4f}")
bars(
    list(deciding), {"I": list(deciding.values())}, "Which words decide the reward", "E[A squared]"
)

# %% [markdown]
# More than half of everything is decided by the first adjective, two words after "was". An estimator of credit is
# good if it finds that out. (In brackets: the interval over reviews. Where it leaves the exact number out, the policy
# does not speak the grammar exactly.)
#
# ## Why the gradient of R log pi is right
#
# What is to be climbed is the expected reward $J(\theta) = \sum_x \pi_\theta(x) R(x)$, over all texts $x$, with
# $\theta$ for the policy's weights. Everything is finite, so the gradient may go inside the sum. And because $\nabla \log \pi = \nabla \pi / \pi$,
#
# $$\nabla J = \sum_x R(x)\, \nabla \pi(x) = \sum_x \pi(x)\, R(x)\, \nabla \log \pi(x)
# = \mathbb{E}_{x \sim \pi}\big[R(x)\, \nabla \log \pi(x)\big]$$
#
# This is the *log-derivative trick*: the gradient of an expectation over samples has become an expectation of
# something that can be computed on each sample. The reward itself need not be differentiable. Steps along the mean of
# $R\, \nabla \log \pi$ over a batch are called *REINFORCE* (Williams 1992). By the chain rule of probability
# $\log \pi(x) = \sum_t \log \pi(a_t \mid s_t)$, one term per token, and no term for what the world does: the next
# state is the text with the token behind it.
#
# So the number whose gradient is wanted is a weight per token times the log-probability of that token. Write it with
# the weights called advantages, which they become below.

# %%
from rlhf_lab.functional import policy_gradient_objective  # exercise

# %% [markdown]
# Try it where the truth can be written down: a policy of one word out of five, softmax of five logits, with a reward
# for each word. There $\partial J / \partial z_v = \pi_v (R_v - \bar R)$ with $\bar R = \sum_v \pi_v R_v$, since
# $\partial \pi_u / \partial z_v = \pi_u (1_{u = v} - \pi_v)$. Compare it with 100,000 samples.

# %%
z = torch.tensor([0.5, -0.2, 0.1, 1.0, -1.0], requires_grad=True)
pays = torch.tensor([1.0, 0.0, 0.5, 0.2, 0.9])
pi = z.softmax(-1).detach()
exact_gradient = pi * (pays - pi @ pays)
n = 100_000
drawn = torch.multinomial(pi, n, replacement=True, generator=torch.Generator().manual_seed(0))
objective = policy_gradient_objective(z.log_softmax(-1)[drawn][:, None], pays[drawn][:, None])
(found,) = torch.autograd.grad(objective, z)
each = pays[drawn][:, None] * (torch.nn.functional.one_hot(drawn, 5) - pi)  # one row per sample
errors = each.std(0) / n**0.5
show_table(
    ["logit", "exact", f"mean of {n:,} samples", "standard error"],
    [[v, exact_gradient[v].item(), found[v].item(), errors[v].item()] for v in range(5)],
    4,
)
print(
    "largest difference in standard errors:",
    f"{((found - exact_gradient) / errors).abs().max():.1f}",
)

# %% [markdown]
# ## Baselines
#
# For any state, the mean of $\nabla \log \pi$ over the next token is 0, because probabilities add up to 1:
#
# $$\mathbb{E}_{a \sim \pi(\cdot \mid s)}[\nabla \log \pi(a \mid s)] = \sum_a \nabla \pi(a \mid s) = \nabla 1 = 0$$
#
# Three things follow.
#
# - **Causality.** A token cannot change what came before it. A reward $r_k$ that is paid at an earlier token,
#   $k < t$, is a number once $s_t$ is known, so $\mathbb{E}[r_k \nabla \log \pi(a_t \mid s_t)] = 0$ and it may be left
#   out: a token's weight is its *reward to go* $\sum_{k \ge t} r_k$. With one reward at the end that is $R$.
# - **Baseline.** Any $b(s_t)$ may be subtracted: $\mathbb{E}[b(s_t) \nabla \log \pi(a_t \mid s_t)] =
#   \mathbb{E}_{s_t}[b(s_t) \cdot 0] = 0$. It fails as soon as $b$ depends on $a_t$.
# - **Advantage.** Given $s_t$ and $a_t$, the mean of $R$ is $Q(s_t, a_t)$; with $b = V$,
#   $\nabla J = \mathbb{E}\big[\sum_t A(s_t, a_t)\, \nabla \log \pi(a_t \mid s_t)\big]$.
#
# A baseline changes nothing on average and takes noise away. The simplest one is a mean of other rewards of the same
# prompt. May the row's own reward be in that mean? It depends on $a_t$. With $n$ rows,
#
# $$\mathbb{E}[\bar R\, \nabla \log \pi(x_i)] = \tfrac1n \mathbb{E}[R_i \nabla \log \pi(x_i)]$$
#
# as the other rows have nothing to do with row $i$. The gradient shrinks to $(n-1)/n$ of itself and keeps its
# direction. Leaving the own reward out is exactly right, and is the same up to that factor:
#
# $$R_i - \tfrac{1}{n-1} \sum_{j \ne i} R_j = \tfrac{n}{n-1} (R_i - \bar R)$$
#
# This is *RLOO* (REINFORCE leave-one-out), where a group is the answers to one prompt; a run has it by
# `advantages="rloo", samples_per_prompt=8`. Below, `group` holds a number for
# each row, and rows of one number are a group, wherever they stand. `informative_groups(rewards, group)`, imported above
# the function, is True for the rows of groups whose rewards are not all equal: in the others rounding must not leave
# a remainder.

# %%
from rlhf_lab.functional import rloo_advantages  # exercise

# %% [markdown]
# *GRPO* (group relative policy optimisation) takes the mean of the whole group, and then divides by the group's
# standard deviation.

# %%
from rlhf_lab.functional import grpo_advantages  # exercise

# %% [markdown]
# Eight answers to a prompt, and each is right (1) or wrong (0). The standard deviation also contains the own reward,
# and it is different from prompt to prompt. If one of eight is right, what is that one's advantage by RLOO, and is
# GRPO's larger or smaller?

# %%
rloo_of_one_in_eight = "1.00"  # predict: "0.12", "0.88" or "1.00"
grpo_is = "larger"  # predict: "smaller", "the same" or "larger"

# %%
one_prompt = torch.zeros(8, dtype=torch.long)
rows = []
for right in (0, 1, 4, 7, 8):
    answers = (torch.arange(8) < right).float()
    by_rloo, by_grpo = rloo_advantages(answers, one_prompt), grpo_advantages(answers, one_prompt)
    rows.append([f"{right} of 8", *(x[i].item() for i in (0, 7) for x in (by_rloo, by_grpo))])
    if right == 1:
        lonely = by_rloo[0].item(), by_grpo[0].item()
show_table(["right", "a right one: RLOO", "GRPO", "a wrong one: RLOO", "GRPO"], rows)
predictions.compare("one of eight right, RLOO", rloo_of_one_in_eight, f"{lonely[0]:.2f}")
predictions.compare("GRPO's is", grpo_is, "larger" if lonely[1] > lonely[0] else "smaller")

# %% [markdown]
# What does that do to the gradient? Let a prompt be answered rightly with chance $p$, a single logit $\theta$ deciding
# it: $\nabla \log \pi = 1_{right} - p$, and the true gradient is $p (1 - p)$. All $2^8$ groups of eight can be gone
# through, so the mean gradient of each estimator is exact.

# %%
groups = torch.tensor(list(product((0.0, 1.0), repeat=8)))


def of_every_group(estimator: Callable[..., Tensor]) -> Float[Tensor, "groups eight"]:
    """The advantages that an estimator gives the answers of each group."""
    return torch.stack([estimator(group, one_prompt) for group in groups])


def mean_gradient(advantages: Float[Tensor, "groups eight"], p: float) -> float:
    """The exact mean gradient over all groups of eight, as a multiple of the true one."""
    chance = (p ** groups.sum(1)) * (1 - p) ** (8 - groups.sum(1))
    return (chance @ (advantages * (groups - p)).mean(1)).item() / (p * (1 - p))


difficulty = [0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.98]
by_each = {
    "own reward in the mean": groups - groups.mean(1, keepdim=True),
    "RLOO": of_every_group(rloo_advantages),
    "GRPO": of_every_group(grpo_advantages),
}
pulls = {
    name: [mean_gradient(advantages, p) for p in difficulty] for name, advantages in by_each.items()
}
show_table(
    ["chance of a right answer", *map(str, difficulty)], [[k, *v] for k, v in pulls.items()], 2
)
curves(
    {name: (difficulty, pull) for name, pull in pulls.items()},
    "Mean gradient of eight answers",
    "chance of a right answer",
    "multiple of the true gradient",
)

# %% [markdown]
# RLOO is at 1 for every prompt. The own reward in the mean costs an eighth of the gradient, the same for all. GRPO
# weights prompts by their difficulty: what is nearly always or nearly never right counts more than what is right half
# of the time. With one prompt, as in most of this course, that is a factor. With many prompts it is another
# objective. (Dr. GRPO, Liu et al. 2025, leaves the division out.)
#
# A good place to rest. Up to here all credit was exact; from here on it is estimated.
#
# ## One step, many steps
#
# Outside Reel nobody knows $V$. A value head gives $\hat V$, and the advantage of a token can be read off it in one
# step,
#
# $$\delta_t = r_t + \gamma \hat V(s_{t+1}) - \hat V(s_t), \qquad \hat V = 0 \text{ behind the end},$$
#
# where $r_t$ is 0 everywhere but at the last token. This is the *one-step error* of the value head: by how much what came
# differs from its guess. If the guess rises over a token, that token was good news.

# %%
from rlhf_lab.functional import compute_advantages  # exercise

# %% [markdown]
# Here is a review of four tokens. The value head starts out undecided, is pleased by the third token, and the reward
# turns out even better. What do the four advantages add up to?

# %%
sum_of_advantages = "0.5"  # predict: "0.5", "1.0" or "2.6"

# %%
four_values, one_reward = torch.tensor([[0.5, 0.4, 0.9, 0.8]]), torch.tensor([1.0])
one_step = compute_advantages(four_values, one_reward)
show_table(
    ["token", "value before it", "advantage"],
    [[t, four_values[0, t].item(), one_step[0, t].item()] for t in range(4)],
)
predictions.compare("the four advantages add up to", sum_of_advantages, f"{one_step.sum():.1f}")

# %% [markdown]
# As with the exact advantages, the sum telescopes to $R - \hat V(s_0)$: the value head decides only how it is shared out.
#
# ### Further than one step
#
# One step trusts $\hat V$ entirely. If the value head is wrong, and in the beginning it certainly is, the credit goes to
# whoever stood where it changed its mind. One can also wait $k$ steps and look then. The sum of $k$ one-step errors
# telescopes, as each $+\gamma^{l+1} \hat V(s_{t+l+1})$ meets the $-\gamma^{l+1} \hat V(s_{t+l+1})$ of the
# next term:
#
# $$\hat A_t^{(k)} = \sum_{l < k} \gamma^l \delta_{t+l}
# = \sum_{l < k} \gamma^l r_{t+l} + \gamma^k \hat V(s_{t+k}) - \hat V(s_t)$$
#
# With $k$ up to the end, $\hat V(s_t)$ is all that is left of the value head. *Generalised advantage estimation*
# (*GAE*) averages over all $k$, with weights $(1 - \lambda) \lambda^{k-1}$ that fall by a factor $\lambda$, *lambda*
# (the last one takes what is left, so that they add up to 1). The error $\delta_{t+l}$ stands in all estimates with
# $k > l$, whose weights add up to $(1-\lambda)(\lambda^l + \lambda^{l+1} + \dots) = \lambda^l$. Hence
#
# $$\hat A_t = \sum_l (\gamma \lambda)^l\, \delta_{t+l}$$
#
# and, from the back to the front, $\hat A_t = \delta_t + \gamma \lambda\, \hat A_{t+1}$. With $\lambda = 0$ that is one
# step. With $\lambda = 1$ and $\gamma = 1$ it is $R - \hat V(s_t)$: all that came after, less what was expected. All
# through this course $\gamma = 1$: a review has an end, and nothing is gained by hurrying.

# %%
from rlhf_lab.functional import compute_gae  # exercise

# %% [markdown]
# A fresh value head says 0 everywhere. What is the advantage of a token $k$ places before the end then, in a
# review with reward $R$ and with $\lambda = 0.8$?

# %%
with_a_fresh_head = "lambda^k R"  # predict: "R for all", "R for the last alone" or "lambda^k R"

# %%
fresh = {lam: compute_gae(torch.zeros(1, 6), torch.eye(6)[5:], 1.0, lam) for lam in (0.0, 0.8, 1.0)}
of_one_step = compute_advantages(torch.zeros(1, 6), torch.ones(1))
show_table(
    ["six tokens, R = 1, V = 0", *(f"token {t}" for t in range(6))],
    [
        ["one step", *of_one_step[0].tolist()],
        *([f"lambda {lam}", *a[0].tolist()] for lam, a in fresh.items()),
    ],
)
falls = bool((fresh[0.8][0, 1:] > fresh[0.8][0, :-1]).all())
predictions.compare(
    "with lambda 0.8 and V = 0, k places before the end",
    with_a_fresh_head,
    "lambda^k R" if falls else "R for all",
)

# %% [markdown]
# With $\hat V = 0$ a token that stands $k$ places before the end gets $\lambda^k R$. Only $\lambda = 1$ hands the
# reward itself to all. So $\lambda$ is a matter of trust: at 0 in the value head, at 1 in what came after, deserved or
# not.
#
# ### What the value head should have said
#
# The value head is trained towards *returns*, $G_t = \hat A_t + \hat V(s_t)$: what it said, corrected by how much better
# it went.

# %%
from rlhf_lab.functional import compute_returns  # exercise

# %% [markdown]
# With $\gamma$ and $\lambda$ at 1, what is the return of the third of the four tokens above, of value 0.9 and with a
# reward of 1 at the end?

# %%
return_of_the_third = "1.0"  # predict: "0.1", "0.9", "1.0" or "1.9"

# %%
at_the_end = token_rewards(one_reward, torch.ones_like(four_values, dtype=torch.bool))
returns = {
    lam: compute_returns(compute_gae(four_values, at_the_end, 1.0, lam), four_values)
    for lam in (0.0, 0.95, 1.0)
}
show_table(
    ["lambda", *(f"token {t}" for t in range(4))],
    [[lam, *row[0].tolist()] for lam, row in returns.items()],
)
predictions.compare("return of the third token", return_of_the_third, f"{returns[1.0][0, 2]:.1f}")

# %% [markdown]
# At $\lambda = 1$ the target is the reward itself, whatever the value head believes. At $\lambda = 0$ it is the value
# head's own next guess, which can learn only backwards, from the end to the beginning, a token at a time.
#
# ## What lambda trades
#
# Let $\hat V = V + e$, with an error $e$ for each state. The true advantages of later tokens have mean 0, so the mean
# of GAE, given $s_t$ and $a_t$, is
#
# $$\mathbb{E}[\hat A_t \mid s_t, a_t] = A_t - e(s_t) + (1 - \lambda) \sum_{l \ge 1} \lambda^{l-1}\,
# \mathbb{E}[e(s_{t+l}) \mid s_t, a_t]$$
#
# ($\delta_{t+l}$ holds $+e(s_{t+l+1}) - e(s_{t+l})$; collect the factors of each $e$.) Read the two errors:
#
# - $-e(s_t)$ depends on the state alone. It is an error of the advantage and, by the derivation above, none of the
#   gradient. It is a bad baseline.
# - the other depends on the token through the states it leads to. It is the bias of the *gradient*, and has the factor
#   $1 - \lambda$.
#
# The price of $\lambda = 1$ is noise: the token is paid for all luck that comes after it.
#
# To see both, take value heads of different age on the frozen policy. Each is trained towards the rewards of other
# reviews, and kept after so many steps. The oldest comes from many more steps than a short run of PPO has.
#
# (8 s on one core)

# %%
STEPS = (0, 16, 64, 1024)


def states_of(tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch gen d_model"]:
    """What a value head reads before each generated token."""
    site, parts = "ln_final.hook_normalized", []
    for part in tokens[:, :-1].split(512):
        with torch.no_grad():
            _, cache = model.run_with_cache(part, names_filter=site)
        parts.append(cache[site][:, prefix_len - 1 :])
    return torch.cat(parts)


practice = write([prefix] * 8 * 256, args.seed + 1000)
read, outcome = states_of(practice), true_reward(texts_of(practice))
head, heads = make_value_head(model.cfg.d_model, args.seed), {}
optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(args.seed)
for step in range(max(STEPS) + 1):
    if step in STEPS:
        heads[f"{step} steps"] = copy.deepcopy(head).requires_grad_(False)
    some = torch.randint(len(read), (64,), generator=generator)
    loss = (head(read[some])[..., 0] - outcome[some, None]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
states = states_of(tokens)
critics = {name: head(states)[..., 0].double() for name, head in heads.items()}
critics["exact V"] = values


def correlation_with(truth: Tensor, found: Tensor) -> float:
    """The correlation of two tables of advantages, over all of their tokens."""
    return torch.corrcoef(torch.stack([truth.flatten(), found.flatten()]))[0, 1].item()


r2 = {name: 1 - ((v - values).square().mean() / values.var()).item() for name, v in critics.items()}
show_table(["value head after", "R2 of its values, against V"], list(r2.items()), 2)

# %% [markdown]
# (An R2 below 0 is worse than saying the mean: a fresh head says 0 where the mean reward is near a half.) Which
# $\lambda$ gives advantages that agree best with the exact ones? Of 0, 0.5, 0.8, 0.9, 0.95, 0.98 and 1,
# predict the best for the youngest head, for the oldest, and for the exact values.

# %%
best_lambda_of_the_youngest = "0.98 or 1"  # predict: "0", "0.5 to 0.95" or "0.98 or 1"
best_lambda_of_the_oldest = "0.5 to 0.95"  # predict: "0", "0.5 to 0.95" or "0.98 or 1"
best_lambda_of_the_exact = "0"  # predict: "0", "0.5 to 0.95" or "0.98 or 1"

# %%
LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
paid = token_rewards(R, torch.ones_like(A, dtype=torch.bool))
estimates = {
    (name, lam): compute_gae(v, paid, 1.0, lam) for name, v in critics.items() for lam in LAMBDAS
}
agreement = {
    name: {lam: correlation_with(A, estimates[name, lam]) for lam in LAMBDAS} for name in critics
}
show_table(["value head", *map(str, LAMBDAS)], [[k, *v.values()] for k, v in agreement.items()])
some = torch.arange(0, len(A), 4)  # the interval of one entry, over reviews
interval = bootstrap_interval(
    A[some], estimates["1024 steps", 0.8][some], statistic=correlation_with, resamples=200
)
print("an entry on a quarter of the reviews, with its interval: 1024 steps, lambda 0.8:", interval)
left = information.flip(0).cumsum(0).sum()  # of E (R - V)^2, over all tokens
print(f"exact V at lambda 1, without a sample: {(information.sum() / left).sqrt():.3f}")


def in_words(lam: float) -> str:
    """Where a lambda lies among the choices."""
    return "0" if lam == 0 else "0.98 or 1" if lam > 0.95 else "0.5 to 0.95"


best = {name: max(row, key=row.get) for name, row in agreement.items()}
for question, guess, name in [
    ("best lambda of the youngest", best_lambda_of_the_youngest, "0 steps"),
    ("best lambda of the oldest", best_lambda_of_the_oldest, "1024 steps"),
    ("best lambda of the exact V", best_lambda_of_the_exact, "exact V"),
]:
    predictions.compare(question, guess, in_words(best[name]))
display(
    curves(
        {name: (list(LAMBDAS), list(row.values())) for name, row in agreement.items()},
        "Agreement of GAE with exact advantages",
        "lambda",
        "correlation over tokens",
    )
)
for name in ("0 steps", "64 steps", "1024 steps"):
    figures = {f"lambda {lam:g}": found for lam, found in agreement[name].items()}
    over_seeds.compare(f"{name}, correlation", figures)

# %% [markdown]
# The best $\lambda$ falls as the value head learns: 1 for a head that knows nothing, and still after 64 steps; 0.9 after
# 1024 steps, in each of three seeds, which also differ in the reviews; and 0 for the exact values, where the one-step
# error is the advantage itself. The top is flat:
# 0.98 and 1 after 64 steps, and 0.9 and 0.95 for the oldest, differ by less than a hundredth.
#
# With the exact values even $\lambda = 1$ agrees with the truth to no more than about 0.3. That much is noise and
# nothing else, and needs no sample: there $\hat A_t = R - V(s_t) = \sum_{k \ge t} A_k$, whose parts are uncorrelated, so
# the correlation is $\sqrt{\sum_t I_t / \sum_t \sum_{k \ge t} I_k}$, which is printed before the figure.
#
#
# ### Bias and variance, by resets
#
# A correlation mixes bias and noise. A language model can be put back into any state: give it the text so far, and let
# it write on. Take prefixes that end in $s_t a_t$, let each be continued 16 times, and see for each what GAE says of
# $a_t$: the mean of the 16 minus the exact advantage is the bias, their spread is the noise. The variance of a mean
# of 16 is a 16th of the variance, which is subtracted from the squared bias (so that it may come out below 0 where
# there is none).
#
# Which value head has the least variance at $\lambda = 1$?
#
# (4 s on one core)

# %%
least_variance = "all the same"  # predict: "0 steps", "1024 steps", "exact V" or "all the same"

# %%
PLACES = [names.index(name) for name in ("ADJ 1", "ADJ 2", "ADJ 3", "VERB")]
RESETS, EACH = 64, 16
RESET_LAMBDAS = (0.0, 0.5, 0.8, 0.95, 1.0)
bias2 = {key: [] for key in product(critics, RESET_LAMBDAS)}
harmless, variance = copy.deepcopy(bias2), copy.deepcopy(bias2)
for place in PLACES:
    prompts = tokens[:RESETS, : prefix_len + place + 1].repeat_interleave(EACH, 0)
    again = write(prompts.tolist(), args.seed + 2000 + place)
    end = token_rewards(
        true_reward(texts_of(again)).double(), torch.ones(again[:, prefix_len:].shape) > 0
    )
    reached = states_of(again)
    guess = {name: head(reached)[..., 0].double() for name, head in heads.items()}
    guess["exact V"] = state_values(grammar_policy(graph), true_reward, again)[0][
        :, prefix_len - 1 : -1
    ]
    for name, lam in bias2:
        found = compute_gae(guess[name], end, 1.0, lam)[:, place].reshape(RESETS, EACH)
        noise = found.var(1)
        bias2[name, lam].append((found.mean(1) - A[:RESETS, place]) ** 2 - noise / EACH)
        variance[name, lam].append(noise)
        of_state = critics[name][:RESETS, place] - values[:RESETS, place]
        harmless[name, lam].append(of_state**2)


def over_reviews(parts: list[Tensor]) -> str:
    """The mean over places with its interval over reviews."""
    return shown(bootstrap_interval(torch.stack(parts, 1).mean(1)))


show_table(
    ["value head", "lambda", "squared bias", "e(s_t) squared", "variance"],
    [
        [name, f"{lam:g}", *(over_reviews(x[name, lam]) for x in (bias2, harmless, variance))]
        for name, lam in bias2
        if lam in (0.0, 0.95, 1.0)
    ],
)
print(f"intervals over n = {RESETS} reviews, {EACH} continuations at each of {len(PLACES)} places")
noise = {name: torch.stack(variance[name, 1.0]).mean().item() for name in critics}
same = max(noise.values()) - min(noise.values()) < 1e-6
predictions.compare(
    "least variance at lambda 1",
    least_variance,
    "all the same" if same else min(noise, key=noise.get),
)
at_95 = {name: torch.stack(bias2[name, 0.95]).mean().item() for name in critics}
over_seeds.compare("squared bias at lambda 0.95", at_95, 4)
curves(
    {
        f"{what}, {name}": (
            RESET_LAMBDAS,
            [torch.stack(of[name, lam]).mean().item() for lam in RESET_LAMBDAS],
        )
        for what, of in {"squared bias": bias2, "variance": variance}.items()
        for name in ("0 steps", "1024 steps", "exact V")
    },
    "Squared bias and variance of GAE's advantages",
    "lambda",
    "reward^2",
)

# %% [markdown]
# *What to look for in the figure: which curves fall and which rise with lambda, and where they meet.*
#
# At $\lambda = 1$ the variance is the same for every value head. There $\hat A_t = R - \hat V(s_t)$, and among
# continuations of one state $\hat V(s_t)$ is a constant. At $\lambda = 0$ there is no variance at all: $\delta_t$ depends
# on $s_t$ and $a_t$ alone. In between, both.
#
# Now compare the columns of the fresh head. At $\lambda = 1$ its squared bias is the largest of its column, and it is
# $e(s_t)^2$, up to rounding and chance: all of it is the harmless error of a bad baseline. At $\lambda = 0$ the bias is
# smaller, and it is the harmful one: the fresh head gives every token but the last an advantage of 0, so what is missing
# is the whole credit. Whoever chose $\lambda$ by the squared error of the advantages would choose wrongly.
#
#
# ## What the optimizer sees
#
# An optimizer never sees an advantage. It sees a gradient, averaged over a batch. So the question about an estimator
# is: with a batch of $n$ reviews, how well does its gradient agree with the gradient of $J$?
#
# If the estimate is right on average, the mean of $n$ is $g$ plus noise of squared length $\operatorname{tr}(S) / n$,
# with $S$ the covariance of one review's gradient. In many dimensions the noise is nearly at right angles to $g$, so
#
# $$\cos \approx \frac{|g|}{\sqrt{|g|^2 + \operatorname{tr}(S)/n}} = \frac{1}{\sqrt{1 + B/n}}, \qquad
# B = \frac{\operatorname{tr}(S)}{|g|^2}$$
#
# The *noise scale* $B$ is the batch size at which noise and signal are of one size (McCandlish et al. 2018). A biased
# estimate climbs the same kind of curve, towards a cosine below 1.
#
# The next exercise has no steps. Row i of `gradients` is the gradient of one review, or of a block of them. A batch is n
# rows that stand side by side, from the first row on; rows that are left over at the end are not used. One cosine comes
# back for each batch.

# %%
from rlhf_lab.functional import gradient_cosine  # exercise

# %% [markdown]
# Take the gradient of every block of 64 reviews by ten estimators, with your `policy_gradient_objective`. Only the
# transformer's weights count; the value head is not the policy's. The reference is the gradient with exact advantages
# on 16 times 256 other reviews.
#
# Which of these agrees best with it on 64 reviews, apart from the exact advantages: the reward minus its mean, GAE
# with $\lambda$ 0 or 1 and the old head (of 1024 steps)? And which stays far away on a large batch: R, or GAE with the
# young head (of 16 steps)?
#
# Beside the cosines stands the *share of $g$ kept*: the part of an estimator's gradient that lies along the reference,
# in lengths of the reference. Its mean over many blocks is 1 if the estimator is right on average, whatever its noise.
#
# (16 s on one core)

# %%
best_on_64 = "GAE 0, old head"  # predict: "R - mean", "GAE 0, old head" or "GAE 1, old head"
far_away = "GAE 0, young head"  # predict: "R", "GAE 0, young head" or "GAE 1, young head"

# %%
BLOCK = 64
weights_of_model = [p for name, p in model.named_parameters() if p.requires_grad]


def block_gradients(
    tokens: Int[Tensor, "batch seq"], estimators: Mapping[str, Float[Tensor, "batch gen"]]
) -> dict[str, Float[Tensor, "blocks parameters"]]:
    """The gradient of each block of reviews, by each estimator of the advantages."""
    found = {name: [] for name in estimators}
    for start in range(0, len(tokens), BLOCK):
        rows = slice(start, start + BLOCK)
        logprobs = get_logprobs(model(tokens[rows]), tokens[rows], prefix_len)
        for name, advantages in estimators.items():
            objective = policy_gradient_objective(logprobs, advantages[rows].float())
            parts = torch.autograd.grad(
                objective, weights_of_model, retain_graph=True, allow_unused=True
            )
            found[name].append(torch.cat([part.flatten() for part in parts if part is not None]))
    return {name: torch.stack(blocks) for name, blocks in found.items()}


young, old = f"{STEPS[1]} steps", f"{STEPS[-1]} steps"
estimators = {
    "R": R[:, None].expand_as(A),
    "R - mean": (R - R.mean())[:, None].expand_as(A),
    "GAE 0, young head": estimates[young, 0.0],
    "GAE 0.95, young head": estimates[young, 0.95],
    "GAE 1, young head": estimates[young, 1.0],
    "GAE 0, old head": estimates[old, 0.0],
    "GAE 0.95, old head": estimates[old, 0.95],
    "GAE 1, old head": estimates[old, 1.0],
    "R - exact V": R[:, None] - values,
    "exact A": A,
}
others = write([prefix] * 16 * 256, args.seed + 3000)
worth, _ = state_values(grammar_policy(graph), true_reward, others)
exact_advantages = {"exact A": worth[:, prefix_len:] - worth[:, prefix_len - 1 : -1]}
far = block_gradients(others, exact_advantages)["exact A"]
reference = far.mean(0)
halves = torch.cosine_similarity(far[0::2].mean(0), far[1::2].mean(0), dim=0)
print(f"{len(reference):,} parameters; halves of the reference agree to a cosine of {halves:.3f}")
blocks = block_gradients(tokens, estimators)

# %%
SIZES = (64, 256, 1024)
cosine = {
    name: [gradient_cosine(g, reference, size // BLOCK).mean().item() for size in SIZES]
    for name, g in blocks.items()
}
scale = {name: noise_scale(g, BLOCK).item() for name, g in blocks.items()}
kept = {name: bootstrap_interval(kept_share(g, reference)) for name, g in blocks.items()}
biased = {name for name, share in kept.items() if share.high < 0.9}
show_table(
    ["estimator", "cosine on 64", "on 256", "on 1,024", "B", "share of g kept", ""],
    [
        [name, *row, f"{scale[name]:.0f}", shown(kept[name]), "biased" if name in biased else ""]
        for name, row in cosine.items()
    ],
)
on_64 = {name: cosine[name][0] for name in ("R - mean", "GAE 0, old head", "GAE 1, old head")}
predictions.compare("best on 64 reviews", best_on_64, max(on_64, key=on_64.get))
on_1024 = {name: cosine[name][2] for name in ("R", "GAE 0, young head", "GAE 1, young head")}
predictions.compare("far away on 1,024 reviews", far_away, min(on_1024, key=on_1024.get))

# %%
drawn_ones = ("R - mean", "GAE 0, young head", "exact A")
lines = {name: (list(SIZES), cosine[name]) for name in drawn_ones}
lines["1 / sqrt(1 + B/n), R - mean"] = (
    list(SIZES),
    [1 / (1 + scale["R - mean"] / size) ** 0.5 for size in SIZES],
)
display(
    curves(
        lines,
        "Agreement with the gradient of J",
        "reviews in the batch",
        "cosine",
        log_x=True,
    )
)
over_seeds.compare("cosine on 64 reviews", {name: row[0] for name, row in cosine.items()})
over_seeds.compare("cosine on 1,024 reviews", {name: row[2] for name, row in cosine.items()})
over_seeds.compare("share of g kept", {name: share.value.item() for name, share in kept.items()}, 2)
of_old = {f"lambda {lam}": cosine[f"GAE {lam}, old head"][2] for lam in ("0", "0.95", "1")}
over_seeds.compare("old head, cosine on 1,024 reviews", of_old)

# %% [markdown]
# Read the table of the estimators by rows.
#
# - *Biased* is what keeps clearly less than the whole of $g$ (the interval lies below 0.9 altogether). These rows stop short of a cosine of 1 however large the
#   batch is. GAE with $\lambda = 0$ and a young head hardly grows at all: in three seeds it keeps 3 to 4 % of the gradient.
# - The others climb along a curve $1 / \sqrt{1 + B/n}$, drawn for R minus its mean, which has no free parameter but $B$. A better baseline lowers $B$,
#   and the exact advantages lower it most: on 64 reviews they are at 0.79 to 0.82 in three seeds, where R minus its mean
#   is at 0.39 to 0.40, and at 0.85 to 0.88 on 1,024.
# - An old head at $\lambda = 0.95$ loses some of the gradient and has less noise. Up to 1,024 reviews it is ahead of
#   $\lambda = 1$, in three seeds of three (the last table); with enough reviews the unbiased one must win in the end.
# - R minus its mean is RLOO with one prompt, up to the factor $n / (n - 1)$. A young head at $\lambda = 1$ is no better
#   than that: its values are little more than a mean.
#
# The other rows keep 0.93 to 1.00 in three seeds, and R, which has the most noise, 0.85 to 0.98. So most stay a little
# below 1. That may be the yardstick: the exact values are the grammar's, and the
# policy speaks the grammar nearly, not exactly (compare the two columns of the table of positions). Hence the tolerance
# of a tenth.
#
# ## From A to PPO
#
# Along a review that a *changed* policy $\pi$ writes, the old values telescope:
# $\sum_t [V_{old}(s_{t+1}) - V_{old}(s_t)] = R - V_{old}(s_0)$. Averaged over its reviews,
#
# $$J(\pi) - J(\pi_{old}) = \mathbb{E}_{x \sim \pi} \sum_t A_{old}(s_t, a_t)$$
#
# (the performance difference lemma, Kakade and Langford 2002). It is exact, but needs texts of $\pi$. On old texts the
# ratio $r_t = \pi(a_t \mid s_t) / \pi_{old}(a_t \mid s_t)$ repairs the choice of the token, not the state in which it is
# made. Near $\pi_{old}$ that is no matter: $\nabla (r A) = r A \nabla \log \pi$, and $r = 1$ there, which is the gradient
# of this lesson. Further away it is, and {lesson:the_objective} is about what to do then.
#
#
# ## What transfers
#
# | | Reel | elsewhere |
# |---|---|---|
# | reward from a classifier, mask, normalising | measured | the same code, and the same two mistakes |
# | policy gradient, baselines, leave-one-out, the weight of GRPO | derived | holds for any policy and reward |
# | GAE and its two errors | derived, then measured | the formula holds; the best $\lambda$ depends on the value head |
# | exact values | 23,211 states | not to be had: resets estimate them, at the price of many continuations (VinePPO) |
# | noise scales | tens to hundreds of reviews | another number for each task; it can be measured the same way |
#
# VinePPO: Kazemnejad et al. 2024, [2410.01679](https://arxiv.org/abs/2410.01679). GAE: Schulman et al. 2016,
# [1506.02438](https://arxiv.org/abs/1506.02438). RLOO for language models: Ahmadian et al. 2024,
# [2402.14740](https://arxiv.org/abs/2402.14740). GRPO: Shao et al. 2024,
# [2402.03300](https://arxiv.org/abs/2402.03300). The noise scale: McCandlish et al. 2018,
# [1812.06162](https://arxiv.org/abs/1812.06162).
#
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - Give `backward_values` the maximum in place of the mean, and draw it over a review beside the values: the best that
#   can still happen falls with every bad clause, and never rises.
# - Estimate the values of the places above by the mean of their continuations, and use them in GAE. Which $\lambda$ does
#   such a value function earn, and how many continuations does it need?
# - The baseline with the least noise is not $V$: it weights rewards with the squared length of $\nabla \log \pi$. Put it in
#   among the estimators. How much lower is its noise scale?
# - Write a reward that can be paid at single tokens, and compare reward to go with the whole sum.
#
# Next: {lesson:the_kl_penalty}, where a large KL costs reward.
