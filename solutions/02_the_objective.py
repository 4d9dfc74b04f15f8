# %% [markdown]
# # 02 The objective
#
# For each minibatch, PPO with a KL leash computes one number, the objective, and takes a step up its
# gradient:
#
# $$J(\theta) = L^{\mathrm{clip}}(\theta) - L^{V}(\theta) + c_H H(\theta) - \beta \, \mathrm{KL}(\theta)$$
#
# the clipped surrogate, the value loss, the entropy bonus and the KL penalty. You write every term,
# see why it has the form that it has and what it does to a real policy, put the sum together, and hand
# your functions to the real trainer.
#
# **Afterwards you can**
# - derive why one may climb ratio times advantage, and what the KL penalty's gradient leaves out,
# - predict where the gradient of the clipped surrogate is zero, and for which sign of the advantage,
# - say what clipping does that a KL penalty does not, and the other way round,
# - let a controller hold the KL, and say in which unit.
#
# **What to inspect** when a run looks wrong:
#
# | you see | look at | because |
# |---|---|---|
# | KL below 0 | the estimator, and the mask | exact KL is never negative; a k1 estimate may be |
# | KL above 0 before the first step | policy and reference on the same tokens | equal weights give exactly 0 |
# | reward goes up, text falls apart | KL per sequence | the leash is too long: raise `kl_coef` |
# | nothing moves | gradient norm, `clip_fraction`, `kl_coef` | a detached term, all tokens clipped, or a leash too short |
# | ratio is not 1 on the first minibatch | temperature, top-k, off by one | the policy that is trained is not the policy that sampled |
# | `kl_coef` climbs although the KL is tiny | the unit of its target | nats per token are 26 times fewer than nats per sequence |
# | explained variance stays at 0 | value loss and its sign | the value head does not learn |

# %%
# first cell

# %% [markdown]
# About 125 minutes of work; a good place to rest is before the clipped surrogate. All cells together
# run in about 50 seconds on one core, without a network. Cells that take more than 3 seconds say so,
# as the imports do here:
#
# (6 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import copy

import torch
from IPython.display import display
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress, show_table
from rlhf_lab.functional import (
    calc_kl_penalty,
    generated_logits,
    generated_values,
    get_logprobs,
    kl_per_token,
    log_probs,
    masked_mean,
    normalize_reward,
)
from rlhf_lab.models import unembed_residuals
from rlhf_lab.training import ReplayMemory, objective_terms
from rlhf_lab.views import curves, sparkline, tokens_html

SETTINGS = dict(
    preset="reel",
    total_phases=8,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    seed=1,
)
predictions = Predictions()
over_seeds = SeedFigures("the_objective", SETTINGS)  # this run beside stored ones of other seeds

# %% [markdown]
# `SETTINGS` decides what all of this runs on: Reel, a tiny language of movie reviews, a transformer of
# two layers that speaks it, and a classifier that rewards positive reviews. On a GPU with a network,
# write `preset="gpt2-medium"` instead. The text between the cells tells what came out on Reel; GPT-2
# learns more slowly: raise `total_phases`, too.
#
# Notation, as in {lesson:start}: $s_t$ is the text before generated token $t$, $a_t$ that token, $\pi$ the
# policy, $\pi_\mathrm{old}$ the policy that sampled, $\pi_\mathrm{ref}$ the reference, $R$ the reward of a
# whole review, $V$ the value head, $A_t$ the advantage.
#
# From now on jaxtyping checks the shapes you promise: `Float[Tensor, "batch gen"]` is a tensor of
# floats with one row per sequence and one column per generated token. If your function returns
# another shape, the error says which axis is wrong.
#
# ## A policy that has learned a little
#
# At the start, policy and reference are the same, and every KL is 0. To have something to look at, let
# the package train for five phases, and stop it there. (The trainer can be stopped between any two
# phases.)
#
# (4 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("warm-up"))
for _ in range(5):
    report = trainer.run_phase()
    print(f"phase {report.phase}: reward {report.mean_reward:.3f}")

rollout = trainer.rollout_phase()
rows = zip(rollout.raw_rewards[:4].tolist(), rollout.texts[:4], strict=True)
show_table(["reward", "text"], rows, digits=2)

# %% [markdown]
# A rollout holds 128 reviews and their rewards. The learning phase cuts the rollout into minibatches.
# Take one minibatch, and run policy and reference over it.
#
# `prefix_len` counts the tokens of the prompt. The logits that chose the first generated token
# stand at position `prefix_len - 1`: a position's logits are about the *next* token.
# `generated_logits` and `generated_values` cut out exactly the states before each generated token,
# so from here on everything is `[batch gen]` or `[batch gen d_vocab]`.
#
# `mask` is True on real tokens. A review ends at its stop token, and what stands behind it is
# padding, which must not count in any mean. (Reel's reviews almost always fill all their places, so
# you will not see much of it here. The checks do not let you forget it.)

# %%
# deals the rollout out in minibatches, once (`passes`: how often each review is learned from);
# the lesson on PPO writes it
memory = ReplayMemory(rollout, args.num_minibatches, passes=1)
minibatch = next(memory.get_minibatches(torch.Generator().manual_seed(0)))
prefix_len, mask = minibatch.prefix_len, minibatch.mask

with torch.no_grad():
    all_logits, all_values = trainer.policy(minibatch.tokens, minibatch.attention_mask)
    logits = generated_logits(all_logits, prefix_len)
    values = generated_values(all_values, prefix_len)
    # the rollout stores the last residual stream of the reference, from which its logits follow
    ref_logits = unembed_residuals(trainer.reference, minibatch.ref_residuals)

scored_logits = all_logits
if minibatch.support is not None:
    scored_logits = minibatch.support.restrict(all_logits, prefix_len)

print("tokens    ", list(minibatch.tokens.shape), "of which prompt:", prefix_len)
print("logits    ", list(logits.shape))
print("values    ", list(values.shape))
print("real tokens", int(mask.sum()), "of", mask.numel())

# %% [markdown]
# (`support` is there when sampling was cut to the top k tokens: then log-probabilities are of the
# distribution that was really drawn from. With `top_k=None` nothing is cut.)
#
# The advantages in the minibatch come from the rewards of the whole batch, which `normalize_reward` brought to mean 0 and
# standard deviation 1 ({lesson:rewards_and_credit}). This rollout before and after:

# %%
raw = rollout.raw_rewards
normal = normalize_reward(raw)
show_table(
    ["", "mean", "std", "min", "max"],
    [
        [name, r.mean().item(), r.std().item(), r.min().item(), r.max().item()]
        for name, r in [("raw", raw), ("normalised", normal)]
    ],
)

# %% [markdown]
# ## The log-probability of what was said
#
# PPO changes how likely the sampled tokens are. So first we need `log pi(a_t | s_t)`, one number per generated
# token, which `get_logprobs` reads off the logits; you wrote it in {lesson:the_policy}.
#
# $$\log \pi(a_t \mid s_t) = \frac{z_{a_t}}{T} - \log \sum_v e^{z_v / T},
# \qquad z = \text{the logits at the position before generated token } t$$
#
# `logprobs` are of the sampled tokens, and always refer to the policy that they were computed with.
# The minibatch carries those of the policy *that sampled*; they stay as they are, while the policy
# moves on.
#
# The sampler noted its log-probabilities token by token, with a KV cache. The next
# cell computes them in one go, from finished sequences. The policy has not taken a step in between. Are they the
# same? ("equal" means up to rounding.)

# %%
same_policy = "equal"  # predict: "equal" or "different"

# %%
logprobs = get_logprobs(scored_logits, minibatch.tokens, prefix_len, args.temperature)
gap = (logprobs - minibatch.logprobs)[mask].abs().max().item()
print(f"largest difference: {gap:.0e}")
predictions.compare(
    "log-probabilities in one go and the sampler's are",
    same_policy,
    "equal" if gap < 1e-3 else "different",
)

# %% [markdown]
# This comparison catches a great deal: an off-by-one, a forgotten temperature or a forgotten top-k
# makes the two differ, and then the ratio is not 1 on the first minibatch. The trainer compares them in
# every phase, and warns.
#
# ## The leash: KL from the reference
#
# The policy drifts away from the language it came from, and `kl_per_token` says how far ({lesson:the_kl_penalty}): at each generated
# token, by how many nats the policy finds its own words likelier than the reference does, on average.

# %%
policy_logprobs = log_probs(logits, args.temperature)  # of the whole vocabulary
reference_logprobs = log_probs(ref_logits, args.temperature)
kl = kl_per_token(policy_logprobs, reference_logprobs)
swapped = kl_per_token(reference_logprobs, policy_logprobs)
mean_kl, mean_swapped = masked_mean(kl, mask).item(), masked_mean(swapped, mask).item()
print(
    f"KL(policy || reference) {mean_kl:.5f}, KL(reference || policy) {mean_swapped:.5f} per token"
)

# %% [markdown]
# Where did the policy move? Here are the eight states with the largest KL of this minibatch: what
# had been written, what came next, and the word each model held likeliest. Look at what kind of
# word the policy changes its mind about, and how few places carry most of the KL.

# %%
places = kl.masked_fill(~mask, -1.0).flatten().topk(8).indices.tolist()
tokenizer, gen_len = trainer.tokenizer, mask.shape[1]


def words(ids: Tensor) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=True)


rows = []
for row, t in [divmod(place_, gen_len) for place_ in places]:
    at = prefix_len + t
    rows.append(
        [
            kl[row, t].item(),
            "... " + words(minibatch.tokens[row, max(0, at - 5) : at]),
            words(minibatch.tokens[row, at : at + 1]),
            words(logits[row, t].argmax(keepdim=True)),
            words(ref_logits[row, t].argmax(keepdim=True)),
        ]
    )
show_table(["KL", "after", "came", "policy likes", "reference likes"], rows)
share = kl[mask].sort(descending=True).values
tenth = (share[: len(share) // 10].sum() / share.sum()).item()
print(f"of {len(share)} tokens, the tenth with the most KL carries {tenth:.0%} of it")

# %% [markdown]
# The same on two whole reviews: the darker a token, the more KL at the state before it (hover for the
# numbers).

# %%
for row in range(2):
    ids = minibatch.tokens[row, prefix_len:].tolist()
    spelled = [f" {tokenizer.decode([token])} " for token in ids]
    display(tokens_html(spelled, kl[row], "KL", mask[row], kl.max().item(), "sequential"))

# %% [markdown]
# The objective needs a single number: the mean over the real tokens, times a coefficient. That is `calc_kl_penalty`.

# %%
penalty = calc_kl_penalty(kl, args.kl_coef, mask)
print(f"KL penalty at kl_coef {args.kl_coef}: {penalty.item():.5f}")

# %% [markdown]
# The functions of this lesson are of the same kind. To *blank* masked tokens is to put 0 there with
# `zero_masked(x, mask)`, and a `denominator` is passed on to `masked_mean`.
#
# ### Whose gradient?
#
# A right *value* need not have the right *gradient*. Take k1 ({lesson:the_kl_penalty}) over fixed tokens as a loss:
# $\mathbb{E}_{a \sim \pi}[\nabla d] = \sum_a \pi(a) \nabla \log \pi(a) = \sum_a \nabla \pi(a) = \nabla 1 = 0$. Its
# gradient is 0 on average, whatever the KL is: as a loss, k1 adds nothing but noise.
#
# The trainer's penalty is the exact KL at each token, and its gradient is that of the KL *at the states
# that were visited*. Is that the gradient of the KL of the whole review? For a review of tokens
# $a_0, a_1, \dots$ the KL is an average over the states to which the policy's own words lead:
#
# $$\mathrm{KL}(\theta) = \mathbb{E}_{x \sim \pi}\Big[\sum_t \mathrm{KL}_t(s_t)\Big], \qquad
# \nabla \mathrm{KL}(\theta) = \mathbb{E}_{x \sim \pi}\Big[\sum_t \nabla \mathrm{KL}_t(s_t)\Big] +
# \mathbb{E}_{x \sim \pi}\Big[\sum_t \nabla \log \pi(a_t \mid s_t) \sum_{t' > t} \mathrm{KL}_{t'}(s_{t'})\Big]$$
#
# The first part is the gradient of the penalty. The second part makes words less likely that *lead* to states with much
# KL, and the penalty leaves it out. Write a function whose gradient is the second part.

# %%
from rlhf_lab.functional import kl_of_later_states  # exercise

# %% [markdown]
# Does the second part matter? Take toys in which everything can be summed: two words one after the other, three choices
# each, random logits. The exact KL of the pair is one expression, and autograd gives its true gradient. In how many of
# 300 toys does the gradient of the penalty alone point another way, with a cosine below 0.5 to the true gradient?

# %%
points_another_way = "below 10 %"  # predict: "none", "below 10 %" or "10 % or more"


# %%
def toy_gradients(seed: int) -> tuple[float, float]:
    """Cosine with the true gradient of the penalty's alone, and the largest gap with the term."""
    generator = torch.Generator().manual_seed(seed)
    first, second, ref_first, ref_second = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((1, 1, 3), (3, 1, 3), (1, 1, 3), (3, 1, 3))
    )
    leaves = first.requires_grad_(), second.requires_grad_()
    logits = torch.cat([first.expand(3, 1, 3), second], dim=1)  # row a: the first word is a
    ref_logits = torch.cat([ref_first.expand(3, 1, 3), ref_second], dim=1)
    kl = kl_per_token(log_probs(logits), log_probs(ref_logits))
    p = first.softmax(-1)[0, 0]  # how often each row comes about
    logprobs = torch.stack([first.log_softmax(-1)[0, 0], torch.zeros(3)], dim=1)
    exact = (p * kl.sum(1)).sum()
    penalty = (p.detach() * kl.sum(1)).sum()
    missing = (p.detach() * kl_of_later_states(logprobs, kl).sum(1)).sum()
    true, alone, whole = (
        torch.cat([g.flatten() for g in torch.autograd.grad(x, leaves, retain_graph=True)])
        for x in (exact, penalty, penalty + missing)
    )
    return torch.cosine_similarity(true, alone, dim=0).item(), (true - whole).abs().max().item()


toys = [toy_gradients(seed) for seed in range(300)]
cosines, gaps = torch.tensor(toys).unbind(1)
away, against = ((cosines < limit).float().mean().item() for limit in (0.5, 0.0))
print(f"cosine with the true gradient, penalty alone: median {cosines.median().item():.2f},")
print(f"below 0.5 in {away:.1%} of 300 toys, below 0 in {against:.1%}")
predictions.compare(
    "penalty alone points another way",
    points_another_way,
    "none" if not away else "below 10 %" if away < 0.1 else "10 % or more",
)
print(f"with your term: largest difference from the true gradient {gaps.max().item():.0e}")
assert gaps.max() < 1e-6  # the derivation above, in numbers

# %% [markdown]
# So the penalty's value is right, and its gradient is that of a somewhat different leash, one that does not look ahead.
# In most toys the two gradients have nearly the same direction, in a few they do not. The trainer offers the other leash
# as well: with `kl_in="reward"` the KL of each token is subtracted from its reward, and GAE hands it back to the words
# that led there. (What each leash ends at is the subject of {lesson:the_kl_penalty}.)
#
# ## Entropy
#
# Entropy says how undecided the policy is at a token: the mean of $-\log \pi$ over the $n$ words that it may say,
#
# $$H(\pi) = -\sum_v \pi(v) \log \pi(v), \qquad 0 \le H(\pi) \le \log n$$
#
# The lower bound holds because no term is negative ($\pi(v) \le 1$, so $\log \pi(v) \le 0$); it is reached where one word
# has probability 1. The upper bound is Jensen's inequality for the logarithm, which is concave:
# $H = \sum_v \pi(v) \log \frac{1}{\pi(v)} \le \log \sum_v \pi(v) \frac{1}{\pi(v)} = \log n$; it is reached where all words are
# equally likely. A small bonus for entropy keeps a policy from settling too early.
#
# The input is again what `log_probs` returns, so the entropy and the KL share one log-softmax.

# %%
from rlhf_lab.functional import entropy_per_token  # exercise

# %%
from rlhf_lab.functional import calc_entropy_bonus  # exercise

# %% [markdown]
# The policy has had five phases of being paid for positive reviews. Is it less undecided than the
# reference by now, at the same states? Very little can have changed yet. Guess the direction.

# %%
entropy_now = "lower"  # predict: "lower" or "higher"

# %%
entropy, ref_entropy = (entropy_per_token(x) for x in (policy_logprobs, reference_logprobs))
now, then = masked_mean(entropy, mask).item(), masked_mean(ref_entropy, mask).item()
show_table(
    ["", "nats per token", "words it hesitates between"],
    [["policy", now, 2.718281828**now], ["reference", then, 2.718281828**then]],
)
predictions.compare("the policy's entropy is", entropy_now, "lower" if now < then else "higher")
print("by position:", sparkline(entropy.mean(0).tolist()))

# %% [markdown]
# ## The clipped surrogate
#
# Now the term that learns from rewards. Its form follows in four steps.
#
# **1. The gradient of an expected reward.** $\nabla \mathbb{E}_{x \sim \pi}[R(x)] =
# \mathbb{E}_{x \sim \pi}\big[R(x) \sum_t \nabla \log \pi(a_t \mid s_t)\big]$, the policy gradient that you derived in
# {lesson:rewards_and_credit}: make the tokens of a review likelier in proportion to its reward.
#
# **2. Why an advantage and not the reward.** Subtracting a baseline such as $V(s_t)$ changes nothing on average and
# takes noise away ({lesson:rewards_and_credit}). What is left is the *advantage* $A_t$; the minibatch carries it.
#
# **3. Samples from an older policy.** One rollout serves several steps, and after the first step the policy
# is no longer the one that sampled. Weigh each token by how much likelier it has become,
# $r_t = \pi(a_t \mid s_t) / \pi_\mathrm{old}(a_t \mid s_t)$: then
# $\mathbb{E}_{a \sim \pi_\mathrm{old}}[r A] = \mathbb{E}_{a \sim \pi}[A]$. So climb the mean of $r_t A_t$. At the first step
# $r = 1$ and $\nabla r = r \nabla \log \pi = \nabla \log \pi$: it *is* the policy gradient.
#
# (`MAX_LOG_RATIO`, imported above the function, is the docstring's 20. It limits the difference from above alone: the
# exponential of a very negative number is 0, which does no harm.)

# %%
from rlhf_lab.functional import policy_ratio  # exercise

# %% [markdown]
# **4. Why clip.** The weights $r_t$ correct for the *token*, at the state where it was sampled. They do not
# correct for the states: a policy that has changed visits others. And $r_t A_t$ has no upper end: a token with
# $A > 0$ could be made likelier without limit, on the word of one sample. PPO's answer: a token whose ratio has
# left $[1 - \epsilon, 1 + \epsilon]$ *in the direction that its advantage asks for* earns nothing more by going further.
#
# $$L^{\mathrm{clip}} = \operatorname{mean}_t \, \min\big(r_t A_t, \; \operatorname{clip}(r_t, 1 - \epsilon, 1 + \epsilon) \, A_t\big)$$
#
# (`whiten(x, mask, eps=eps)` brings x to mean 0 and standard deviation 1 over its real tokens.)

# %%
from rlhf_lab.functional import calc_clipped_surrogate_objective  # exercise

# %% [markdown]
# Take a single token at a time, with ratio r and advantage A, and ask for the gradient of the
# surrogate with respect to its log-probability. `clip_coef` is 0.2. Predict "zero" or "not zero":

# %%
ratio_high_advantage_positive = "zero"  # predict: "zero" or "not zero"
ratio_high_advantage_negative = "not zero"  # predict: "zero" or "not zero"
ratio_low_advantage_negative = "zero"  # predict: "zero" or "not zero"


# %%
def surrogate_gradient(ratio: float, advantage: float) -> float:
    """The gradient of one token's surrogate with respect to its log-probability."""
    new = torch.tensor([[ratio]]).log().requires_grad_()
    surrogate = calc_clipped_surrogate_objective(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), clip_coef=0.2, normalize=False
    )
    return torch.autograd.grad(surrogate, new)[0].item()


ratios = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.5]
show_table(
    ["A", *(f"r = {r}" for r in ratios)],
    [[f"{a:+.0f}", *(surrogate_gradient(r, a) for r in ratios)] for a in (1.0, -1.0)],
    digits=2,
)
for question, guess, (r, a) in [
    ("r = 1.5, A = +1: gradient", ratio_high_advantage_positive, (1.5, 1.0)),
    ("r = 1.5, A = -1: gradient", ratio_high_advantage_negative, (1.5, -1.0)),
    ("r = 0.5, A = -1: gradient", ratio_low_advantage_negative, (0.5, -1.0)),
]:
    predictions.compare(question, guess, "not zero" if surrogate_gradient(r, a) else "zero")

# %%
ratio_axis = torch.linspace(0.4, 1.6, 61)


def surrogate_at(ratio: float, advantage: float) -> float:
    """The surrogate of one token, by your function."""
    new = torch.tensor([[ratio]]).log()
    return calc_clipped_surrogate_objective(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), clip_coef=0.2, normalize=False
    ).item()


curves(
    {
        f"A = {a:+.0f}": (ratio_axis.tolist(), [surrogate_at(r, a) for r in ratio_axis.tolist()])
        for a in (1.0, -1.0)
    },
    "One token's surrogate, clip_coef 0.2 (flat: nothing more to earn)",
    "r = new over old probability",
    "L(r)",
)

# %% [markdown]
# The minimum is what makes this asymmetric. A token that has become *likelier* although its
# advantage is negative went the wrong way, and is pulled back however far it went.
#
# One more. Before the first step every ratio is 1, and the advantages of a minibatch are whitened,
# so their mean is 0: the surrogate is 0. Is its gradient 0 as well?

# %%
gradient_at_start = "not zero"  # predict: "zero" or "not zero"

# %%
new = minibatch.logprobs.clone().requires_grad_()
surrogate = calc_clipped_surrogate_objective(
    new, minibatch.logprobs, minibatch.advantages, args.clip_coef, mask
)
slope = torch.autograd.grad(surrogate, new)[0]
print(
    f"surrogate {surrogate.item():.1e}, largest gradient of a token {slope.abs().max().item():.1e}"
)
predictions.compare(
    "gradient where the surrogate is 0", gradient_at_start, "not zero" if slope.any() else "zero"
)

# %% [markdown]
# So do not judge a run by the value of the surrogate: at the start of each phase it is near 0, whatever
# the policy learns. Judge it by the reward.
#
# ## The value loss
#
# The value head predicts, before each token, how the review will turn out. Its target is the return
# $G_t = A_t + V_\mathrm{old}(s_t)$, and its loss half the squared error:
#
# $$L^V = \frac{c_V}{2} \operatorname{mean}_t \big(V(s_t) - G_t\big)^2$$
#
# With a `clip`, a value cannot make its error small by jumping away from its old one.

# %%
from rlhf_lab.functional import calc_value_function_loss  # exercise

# %%
value_loss = calc_value_function_loss(values, minibatch.returns, args.vf_coef, mask)
by_a_constant = calc_value_function_loss(
    torch.full_like(values, masked_mean(minibatch.returns, mask).item()),
    minibatch.returns,
    args.vf_coef,
    mask,
)
print(f"value loss {value_loss.item():.4f}; of the best constant {by_a_constant.item():.4f}")

# %% [markdown]
# ## All together
#
# Four terms, two of them with a minus. Write the whole objective from your own functions. There are no
# steps: the formula at the top of this lesson is all. Hand each function the coefficient that is its own and the mask;
# the surrogate whitens the advantages, and nothing else has to be done to them. (The check uses a policy that has
# already taken steps, and an `ent_coef` above 0, so that no term is 0.)

# %%
from rlhf_lab.course.exercises.objective import whole_objective  # exercise

# %% [markdown]
# Compare it with the trainer's own objective, on a minibatch of this run with an `ent_coef` of 0.01, after one step away
# from the policy that sampled. (`objective_terms` is the package's function: it runs the policy over a minibatch and
# returns the four terms and their sum. `other.objective` holds what it needs of the trainer's settings, such as the
# coefficients and the functions that compute the terms.) Are the two equal?

# %%
changed = RLHFArgs(**SETTINGS | dict(ent_coef=0.01, total_phases=6))
other = RLHFTrainer(changed, policy=copy.deepcopy(trainer.policy), reference=trainer.reference)
part = next(memory.get_minibatches(torch.Generator().manual_seed(1)))
objective_terms(other.policy, other.reference, part, other.objective).objective.backward()
other.optimizer.step()  # one step, so that ratios are not 1

with torch.no_grad():
    now_logits, now_values = other.policy(minibatch.tokens, minibatch.attention_mask)
    scored = now_logits
    if minibatch.support is not None:
        scored = minibatch.support.restrict(now_logits, prefix_len)
    now_logprobs = log_probs(generated_logits(now_logits, prefix_len), changed.temperature)
    mine_now = whole_objective(
        get_logprobs(scored, minibatch.tokens, prefix_len, changed.temperature),
        minibatch.logprobs,
        minibatch.advantages,
        generated_values(now_values, prefix_len),
        minibatch.returns,
        entropy_per_token(now_logprobs),
        kl_per_token(now_logprobs, reference_logprobs),
        mask,
        changed.clip_coef,
        changed.vf_coef,
        changed.ent_coef,
        changed.kl_coef,
    )
    theirs = objective_terms(other.policy, other.reference, minibatch, other.objective)
names = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty", "objective")
show_table(
    ["the trainer's", "on this minibatch"],
    [[name.replace("_", " "), getattr(theirs, name).item()] for name in names],
    digits=6,
)
print(f"your objective: {mine_now.item():.6f}")
assert torch.allclose(mine_now, theirs.objective, atol=1e-5)

# %% [markdown]
# ## Your functions drive the trainer
#
# Every one of these functions can be handed to the trainer by name. Two runs of eight phases: one
# with yours, one with the package's. Will their rewards be the same, to the last digit?
#
# (9 s on one core)

# %%
same_run = "the same"  # predict: "the same" or "not the same"

# %%
mine = dict(
    normalize_reward=normalize_reward,
    logprobs=get_logprobs,
    clipped_surrogate=calc_clipped_surrogate_objective,
    value_loss=calc_value_function_loss,
    entropy_bonus=calc_entropy_bonus,
    kl_penalty=calc_kl_penalty,
)


trained = {}


def run(name: str, functions: dict, **changes: int | float) -> list:
    """Train with these functions, store nothing, and return the reports of all phases."""
    trained[name] = RLHFTrainer(RLHFArgs(**SETTINGS | changes), **functions)
    return trained[name].train()


runs = {"yours": run("yours", mine), "the package's": run("package", {})}
for name, reports in runs.items():
    print(f"{name:14}", " ".join(f"{report.mean_reward:.3f}" for report in reports))
rewards = [[report.mean_reward for report in reports] for reports in runs.values()]
predictions.compare(
    "the two runs are", same_run, "the same" if rewards[0] == rewards[1] else "not the same"
)

# %% [markdown]
# (The two runs compute log-probabilities in different ways: your `get_logprobs` gets the logits of the whole
# vocabulary, and the package computes its own a few rows at a time. The results are equal up to rounding, and the
# trained weights nearly equal. The reviews, and with them the rewards, would differ only where two words are so close
# to a tie that rounding decides which of them is drawn.)
#
# Now change the leash. `kl_coef` is 0.3 in this run. With 3 instead, or with none at all: where is
# the final reward highest, and where the KL?
#
# (9 s on one core)

# %%
highest_reward = 0.0  # predict: 0.0, 0.3 or 3.0
highest_kl = 0.0  # predict: 0.0, 0.3 or 3.0

# %%
leashes = {
    0.0: run("no leash", mine, kl_coef=0.0),
    0.3: runs["yours"],
    3.0: run("short leash", mine, kl_coef=3.0),
}
policies = {0.0: trained["no leash"], 0.3: trained["yours"], 3.0: trained["short leash"]}
show_table(
    ["kl_coef", "reward, last phase", "+-", "KL per sequence", "entropy per token"],
    [
        [
            coef,
            reports[-1].mean_reward,
            1.96 * reports[-1].reward_std / args.batch_size**0.5,
            reports[-1].kl_per_sequence,
            reports[-1].entropy_per_token,
        ]
        for coef, reports in leashes.items()
    ],
)


def last(name: str) -> float:
    """The leash whose last phase has the most of something."""
    return max(leashes, key=lambda coef: getattr(leashes[coef][-1], name))


predictions.compare("highest reward at kl_coef", highest_reward, last("mean_reward"))
predictions.compare("highest KL at kl_coef", highest_kl, last("kl_per_sequence"))

# %%
curves(
    {
        f"kl_coef {coef}": ([r.kl_per_sequence for r in reports], [r.mean_reward for r in reports])
        for coef, reports in leashes.items()
    },
    "What is earned for the distance: one mark per phase",
    "KL from the reference, nats per review",
    "mean reward",
)

# %% [markdown]
# How far can these differences be trusted? Each figure is a mean of 128 reviews of one seed, and "+-" gives the 95 %
# interval of the reward. This interval covers other reviews of the same policy, not other runs. The next table covers
# other runs: it shows these figures beside those of other seeds.

# %%
for line, field in [("reward", "mean_reward"), ("KL per review", "kl_per_sequence")]:
    over_seeds.compare(
        f"{line}, last phase",
        {f"kl_coef {coef}": getattr(reports[-1], field) for coef, reports in leashes.items()},
    )

# %% [markdown]
# In all three stored seeds the KL follows the leash, and so does the reward: highest without a leash, by far lowest
# with the short one. The gap between no leash and 0.3 is small. Three seeds agree about its direction; if there were
# no difference, three seeds would agree on one or the other direction in one of four cases, so this alone is weak
# evidence. That the ranges do not overlap is better evidence.
#
# What do the three policies write? Three reviews of each after training, not chosen: the first of a fresh rollout.

# %%
for coef, policy_trainer in policies.items():
    written = policy_trainer.rollout_phase()
    print(f"kl_coef {coef}: mean reward {written.raw_rewards.mean().item():.2f}", end=", ")
    if written.grammatical is not None:
        print(f"grammatical {written.grammatical.float().mean().item():.0%}", end=", ")
    print(f"different texts {len(set(written.texts))} of {len(written.texts)}")
    show_table(
        ["reward", "text"],
        zip(written.raw_rewards[:3].tolist(), written.texts[:3], strict=True),
        digits=2,
    )

# %% [markdown]
# After eight phases nothing is broken yet: even without a leash nearly all reviews are grammatical, and all are
# different. The policies differ in what they say. With the short leash the policy still writes bad reviews now and then, as
# the reference does; without a leash it hardly ever does. In a short run a leash costs reward. {Lesson:what_breaks_it} shows what a long
# run without a leash ends at.
#
# ### Why a clip *and* a KL penalty?
#
# They limit different distances. The clip is about *one phase*: how far may the policy move from the one
# that sampled this rollout, before the samples are stale? It starts anew with every rollout, so a hundred
# phases can go anywhere. The KL penalty is about *the whole run*: how far from the language we started with?
# But it does not know whether *this* step is supported by *these* samples. Without the clip a single
# minibatch can break the policy. Without the penalty the policy finds, in many small and well-supported
# steps, the one sentence that the classifier likes best.
#
# ## A leash that adjusts itself
#
# Which `kl_coef` is right depends on the rewards, on the model and on the length of the run, and so far you
# chose it by trial. The alternative is to set a target for the KL, and to let a controller choose the
# coefficient. After each phase the controller compares the KL with the target: if the KL is above, it raises
# the coefficient, and if it is below, it lowers the coefficient. Three things matter.
#
# - *The unit.* The KL comes in nats per **sequence**: summed over the 26 tokens of a review, and
#   averaged over the reviews. The target is in the same unit.
# - *The clip.* Before the first step the KL is 0, an error of -100 %. One wild phase may give
#   several times that. The error counts as 20 % at most, either way (`MAX_ERROR`).
# - *The horizon.* A batch of n sequences moves the coefficient by its error times n / horizon. The
#   trainer's default horizon is 10,000: a batch of 128 moves it by a quarter of a percent at most.
#
# A controller is a small object. It holds its coefficient in `kl_coef`, where the trainer reads it,
# and `update` changes it. The fields are there. Write `update`.

# %%
from rlhf_lab.training import AdaptiveKLController  # exercise

# %% [markdown]
# Now it drives the trainer, for twenty phases. It begins at 3, the leash that was too short, and
# the target is 0.3 nats per sequence. With a horizon of 64, a batch of 128 moves the coefficient by
# up to twice 20 %: far too hasty for a long run, and just right for watching.
#
# Which way does the coefficient go after the first phase? Does the KL go past twice the target? There is
# also a second run, with a mistake in the unit: its target is 0.3 / 26, as if it were per token. Is its best
# reward as high as that of the first run, higher, or lower?
#
# (21 s on one core)

# %%
coefficient_goes = "down"  # predict: "up" or "down"
past_twice_the_target = "yes"  # predict: "yes" or "no"
reward_with_the_wrong_unit = "lower"  # predict: "as high", "higher" or "lower"

# %%
targets = {"per sequence": 0.3, "taken per token": 0.3 / args.gen_len}
steered = {
    name: run(
        name,
        mine | dict(kl_controller=AdaptiveKLController(kl_coef=3.0, target=target, horizon=64)),
        total_phases=20,
    )
    for name, target in targets.items()
}
for name, reports in steered.items():
    show_table(
        [f"target 0.3 {name}", "from phase to phase", "largest", "last"],
        [
            [what, sparkline(column), max(column), column[-1]]
            for what, column in {
                "kl_coef": [report.kl_coef for report in reports],
                "KL per sequence": [report.kl_per_sequence for report in reports],
                "reward": [report.mean_reward for report in reports],
            }.items()
        ],
        digits=2,
    )

phase_axis = [report.phase for report in steered["per sequence"]]
right, wrong = steered.values()
went = "up" if right[1].kl_coef > right[0].kl_coef else "down"
past = max(report.kl_per_sequence for report in right) > 2 * targets["per sequence"]
best_right, best_wrong = (max(r.mean_reward for r in reports) for reports in (right, wrong))
reached = "higher" if best_wrong > best_right + 0.05 else "as high"
reached = "lower" if best_wrong < best_right - 0.05 else reached
predictions.compare("the coefficient first goes", coefficient_goes, went)
predictions.compare("past twice the target", past_twice_the_target, "yes" if past else "no")
predictions.compare("reward with the wrong unit", reward_with_the_wrong_unit, reached)

# %%
over_seeds.compare(
    "best reward", {name: max(r.mean_reward for r in reports) for name, reports in steered.items()}
)
over_seeds.compare(
    "largest KL over its target",
    {
        name: max(r.kl_per_sequence for r in reports) / targets[name]
        for name, reports in steered.items()
    },
)

# %%
curves(
    {
        "KL": (phase_axis, [r.kl_per_sequence for r in right]),
        "target": (phase_axis, [targets["per sequence"]] * len(right)),
        "KL, wrong unit": (phase_axis, [r.kl_per_sequence for r in wrong]),
    },
    "What the controller holds",
    y_label="nats per review",
)

# %%
curves(
    {
        "target per review": (phase_axis, [r.kl_coef for r in right]),
        "wrong unit": (phase_axis, [r.kl_coef for r in wrong]),
    },
    "What it does for it",
    y_label="kl_coef",
)

# %% [markdown]
# The controller is always late. The KL begins at 0, below any target, so the controller lowers the
# coefficient. When the KL has passed the target, the coefficient has to climb all the way back first. So
# the KL overshoots, comes back, and undershoots. A longer horizon makes the controller slower and the swings
# smaller, but the run has to be longer, too.
#
# With the wrong unit no error is raised. The controller aims at a twenty-sixth of the KL that was meant, where there is
# little reward to earn. Two numbers reveal the mistake: the coefficient climbs to several times its first value of 3, which
# was too high already, and the KL per review never reaches 0.3.
#
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# (The numbers under "What was found" come from three seeds on Reel. The cells of this lesson give them with the settings named there.)
#
# - Put a slip into one of your functions on purpose, such as a KL penalty without `kl_coef`. See what `check` reports.
#   Then pass the function to the trainer anyway. Which number of the report shows the slip? Hypothesis: it shows in
#   the KL, since the penalty is then more than three times as strong.
#
# - Give the controller a horizon of 640, or begin at the `kl_coef` that it ended with. How far does the KL swing now?
#   Hypothesis: both make the swings smaller.
#
#   <details><summary>What was found</summary>
#
#   Largest KL of 20 phases with the target of 0.3: with a horizon of 64, as above, 1.00 to 1.08; with a horizon of 640, 0.30
#   to 0.34, reached only at the end; beginning at 0.23, where the run above ended, 1.76 to 1.77. The last is larger, not
#   smaller. A possible reason: the coefficient was low because the KL had been below its target, and not because it was the
#   right one for a policy that has not learned yet.
#
#   </details>
#
# - `ent_coef` is 0 on Reel. Set it to 0.1 in `run(...)` and look at the entropy. Hypothesis: the entropy is higher, and the
#   reward lower.
#
#   <details><summary>What was found</summary>
#
#   In the last of eight phases at `kl_coef` 0.3: entropy 1.025 to 1.043 nats per token, and 0.991 to 1.002 without
#   the bonus; reward 0.84 to 0.86, and 0.90 to 0.92 without it.
#
#   </details>
#
# ## Investigations
#
# Each takes an hour or two. Each has a hypothesis: write down first whether you share it, and what would change your mind.
# Train with at least three seeds wherever you compare two runs.
#
# - **Does the KL's direction matter?** As a value k3 is unbiased, if the policy can produce every token that the
#   reference can (with top-k sampling it is too small, {lesson:the_kl_penalty}). As a loss on sampled tokens it has the gradient of
#   the *other* KL. Derive it (two lines), check it in the toy of `toy_gradients`, and then train with
#   `kl_estimator="k3"`. (Tang and Munos 2025, [2506.09477](https://arxiv.org/abs/2506.09477); GRPO, Shao et al. 2024,
#   [2402.03300](https://arxiv.org/abs/2402.03300), uses k3 as a loss; Wang et al. 2023,
#   [2309.16240](https://arxiv.org/abs/2309.16240), compare several divergences for DPO.) Hypothesis, from the two bumps
#   of {lesson:the_kl_penalty}: it keeps more variety at the same reward. Measure the number of different texts and the entropy at
#   several `kl_coef`, and compare at equal *reward*.
#
#   <details><summary>What was found</summary>
#
#   After eight phases at `kl_coef` 0.3, in three seeds: entropy 0.997 to 1.009 nats per token, reward 0.88 to 0.91 and KL
#   0.98 to 1.15 nats per review. With the exact KL: entropy 0.991 to 1.002, reward 0.90 to 0.92 and KL 0.84 to 1.05. The
#   entropy is higher and the reward lower in each seed, the KL is higher in two of three. All 128 texts of a rollout are
#   different in both. That is too little to tell the two directions apart, so train longer.
#
#   </details>
#
# - **The leash that looks ahead.** `kl_in="reward"` lets each token pay for the KL behind it, `kl_in="loss"` has the
#   exact gradient at each state but not the term of `kl_of_later_states`. At equal KL per review, which earns more?
#   What does the toy predict, and does Reel agree? Hypothesis: `kl_in="reward"` earns more, as {lesson:the_kl_penalty} computes for the
#   end of training, but not by much.
#
#   <details><summary>What was found</summary>
#
#   After eight phases at `kl_coef` 0.3 (with `kl_estimator="k1"`): reward 0.86 to 0.89 at a KL of 0.86 to 0.98
#   with `kl_in="reward"`, and 0.90 to 0.92 at 0.84 to 1.05 with `kl_in="loss"`. The reward is lower in each seed; the KL is
#   not equal, and these runs are short.
#
#   </details>
#
# - **Clip or KL, if you may have only one?** Train with `clip_coef` so large that it never clips, and with `kl_coef=0`,
#   for 8 phases and for five times as many. When does each go wrong, and which line of the report shows it first? (Schulman
#   et al. 2017, [1707.06347](https://arxiv.org/abs/1707.06347), section 4, compare both; Hilton et al. 2021,
#   [2110.00641](https://arxiv.org/abs/2110.00641), separate the two roles of the old policy.) Hypothesis: without the clip
#   a run goes wrong within a few phases, without the penalty late.
#
#   <details><summary>What was found</summary>
#
#   Not so for the clip. Without it, after 8 phases: reward 0.90 to 0.92, KL 0.97 to 1.20 nats per review; after five times as many,
#   reward 1.00, KL 1.86 to 2.03, and 97 % to 99 % of a fresh rollout are grammatical. With the clip and without the penalty,
#   after five times as many phases: reward 1.00, KL 2.83 to 3.99, and 84 % to 95 % are grammatical. (The steps of this lesson are small.)
#
#   </details>
#
# - **Reward against distance.** Gao et al. 2022 ([2210.10760](https://arxiv.org/abs/2210.10760)) plot the reward
#   against the root of the KL. Do it with the leashes of this lesson and three more: do points of different `kl_coef`
#   lie on one curve? Points that do not are runs that paid more KL than they had to. Hypothesis:
#   finished runs lie on one curve, and runs on a short leash that have not finished lie below it.
#
# Next: {lesson:ppo}, where you write the training loop around this objective.
