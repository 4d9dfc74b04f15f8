# %% [markdown]
# # 05 The objective
#
# PPO with a KL leash climbs one number per minibatch:
#
# > objective = clipped surrogate - value loss + entropy bonus - KL penalty
#
# You write every term of it, see what each one does to a real policy, and then hand your functions
# to the real trainer and watch them train it.
#
# **Afterwards you can**
# - read a log-probability out of logits without being off by one,
# - say what exact KL, k1, k2 and k3 measure, and which of them you can trust on a single token,
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
# About 110 minutes of work. All cells together run in about 33 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import tempfile
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, progress, show_table
from rlhf_lab.functional import generated_logits, generated_values, masked_mean, masked_std
from rlhf_lab.models import read_out
from rlhf_lab.training import Objective, ReplayMemory, objective_terms
from rlhf_lab.views import sparkline

SETTINGS = dict(
    preset="reel",
    forward="hooked",  # the modules and functions that you read are what runs
    total_phases=8,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
)
place = Path(tempfile.mkdtemp())
predictions = Predictions()

# %% [markdown]
# The line `SETTINGS` decides what all of this runs on. As it stands, that is Reel: a tiny language
# of movie reviews, a transformer of two layers that speaks it, and a classifier that rewards
# positive ones. On a GPU with a network, write `preset="gpt2-medium"` instead, and everything below
# runs on GPT-2-medium and a sentiment classifier trained on IMDb. The text between the cells tells
# what came out on Reel; GPT-2 learns more slowly: raise `total_phases`, too.
#
# From now on jaxtyping checks the shapes you promise: `Float[Tensor, "batch gen"]` is a tensor of
# floats with one row per sequence and one column per generated token. If your function returns
# another shape, the error says which axis is wrong.
#
# ## A policy that has learned a little
#
# At the start, policy and reference are the same and every KL is 0, which is no fun to look at. So
# let the package train for five phases, and then stop it. The trainer can be stopped between any
# two phases: take out what you want to see, and go on.

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=place / "warm-up")
for _ in range(5):
    report = trainer.run_phase()
    print(f"phase {report.phase}: reward {report.mean_reward:.3f}")

rollout = trainer.rollout_phase()
rows = zip(rollout.raw_rewards[:4].tolist(), rollout.texts[:4], strict=True)
show_table(["reward", "text"], rows, digits=2)

# %% [markdown]
# That is a rollout: 128 reviews and their rewards. The learning phase deals it out in minibatches.
# Take one, and run policy and reference over it.
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
memory = ReplayMemory(rollout, args.num_minibatches, passes=1)
minibatch = next(memory.get_minibatches(torch.Generator().manual_seed(0)))
prefix_len, mask = minibatch.prefix_len, minibatch.mask

with torch.no_grad():
    all_logits, all_values = trainer.policy(minibatch.tokens, minibatch.attention_mask)
    logits = generated_logits(all_logits, prefix_len) / args.temperature
    values = generated_values(all_values, prefix_len)
    ref_logits = read_out(trainer.reference, minibatch.ref_residuals) / args.temperature

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
# ## Rewards of a batch
#
# A classifier's rewards lie between 0 and 1, another model's might lie around 40. What matters for
# learning is which reviews did better than the others, and so the batch is brought to mean 0 and
# standard deviation 1.
#
# Write it, and run the check below it. The check compares your function with the package's on
# several inputs; if something differs, it shows the first number that does and, where it knows the
# mistake, says what it is. The steps in a docstring are all you have to do; what it says about
# errors it raises you may skip. The helpers that the package's own version uses are imported above
# it: `at_least_float32` turns half precision into float32 and leaves everything else alone,
# `zero_masked(x, mask)` puts 0 where the mask is False (on logits, too: a mask `[batch gen]` blanks
# whole rows of the vocabulary), and `masked_mean` and `masked_std` count only what the mask counts.
# All three take `None` for a mask that counts everything. You need not use them; but the check
# tries half precision wherever a docstring speaks of it, and puts nan where the mask is False.

# %%
from rlhf_lab.functional import normalize_reward  # exercise

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
# If *every* review gets the same reward, there is nothing to learn from. What should the normalised
# rewards be then? Put "zero", "one" or "nan" in place of the dots before you run.

# %%
equal_rewards = "zero"  # predict: "zero", "one" or "nan"

# %%
same = normalize_reward(torch.full((8,), 0.7))
found = "nan" if same.isnan().any() else "zero" if same.abs().max() < 0.1 else "one"
predictions.compare("eight equal rewards become", equal_rewards, found)

# %% [markdown]
# ## The log-probability of what was said
#
# PPO changes how likely the sampled tokens are. So first we need `log pi(a_t | s_t)`, one number
# per generated token: the log-softmax of the logits at the position *before* it, picked at the
# token's own number.
#
# `eindex` picks entries by name. `eindex(logprobs, tokens, "b s [b s+1]")` reads: for each batch
# row b and position s, take `logprobs[b, s, tokens[b, s+1]]`. Torch 2 has something to warn about
# in how it does so; the warning is harmless.
#
# `logprobs` are of the sampled tokens, and always refer to the policy that they were computed with.
# The minibatch carries those of the policy *that sampled*; they stay as they are, while the policy
# moves on.

# %%
from rlhf_lab.functional import get_logprobs  # exercise

# %% [markdown]
# The sampler noted its log-probabilities token by token, with a KV cache. You have computed
# them in one go, from finished sequences. The policy has not taken a step in between. Are they the
# same? ("equal" means up to rounding.)

# %%
same_policy = "equal"  # predict: "equal" or "different"

# %%
logprobs = get_logprobs(scored_logits, minibatch.tokens, prefix_len, args.temperature)
gap = (logprobs - minibatch.logprobs)[mask].abs().max().item()
print(f"largest difference: {gap:.0e}")
predictions.compare(
    "your log-probabilities and the sampler's are",
    same_policy,
    "equal" if gap < 1e-3 else "different",
)

# %% [markdown]
# This comparison is one of the best there is: an off-by-one, a forgotten temperature or a forgotten
# top-k makes the two differ, and makes the ratio differ from 1 on the first minibatch. The trainer
# makes it in every phase, and warns.
#
# ## The leash: KL from the reference
#
# The policy may drift away from the language it came from, and the KL divergence says how far:
# on average over what the *policy* would say, how much likelier does it hold that than the
# reference does?
#
# > KL(pi || pi_ref) = sum over words v of pi(v) (log pi(v) - log pi_ref(v))
#
# At each generated token both models give a whole distribution, so this can be computed exactly.
# Mind the words that cannot be said: their log-probability is -inf, and 0 times that is nan. A
# `torch.where` around the product fixes the value, but not the gradient; it must be fixed before.

# %%
from rlhf_lab.functional import kl_per_token  # exercise

# %% [markdown]
# Two questions before you run. What is the KL of the policy from *itself*? And if policy and
# reference trade places, is the number the same?

# %%
kl_with_itself = "zero"  # predict: "zero", "positive" or "negative"
other_way_round = "different"  # predict: "same" or "different"

# %%
kl = kl_per_token(logits, ref_logits)
itself = kl_per_token(logits, logits)
swapped = kl_per_token(ref_logits, logits)
sign = {True: "zero", False: "positive" if itself.min() >= 0 else "negative"}
predictions.compare("the KL of a policy from itself is", kl_with_itself, sign[not itself.any()])
mean_kl, mean_swapped = masked_mean(kl, mask).item(), masked_mean(swapped, mask).item()
print(
    f"KL(policy || reference) {mean_kl:.5f}, KL(reference || policy) {mean_swapped:.5f} per token"
)
close = abs(mean_kl - mean_swapped) < 1e-6
predictions.compare("the other way round it is", other_way_round, "same" if close else "different")

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
tenth = share[: len(share) // 10].sum() / share.sum()
print(f"the top tenth of the tokens carries {tenth:.0%} of the KL")

# %% [markdown]
# The objective needs a single number: the mean over the real tokens, times a coefficient. To
# *blank* masked tokens, in this docstring and the ones below, is to put 0 there with `zero_masked`.
# `masked_mean` takes the mean. Its `denominator` is for when a minibatch is cut in pieces to save
# memory: each piece then divides by the number of tokens of the whole minibatch, so that the pieces
# add up. Hand it on, and you are done with it.

# %%
from rlhf_lab.functional import calc_kl_penalty  # exercise

# %%
penalty = calc_kl_penalty(logits, ref_logits, args.kl_coef, mask)
print(f"KL penalty at kl_coef {args.kl_coef}: {penalty.item():.5f}")

# %% [markdown]
# ### Estimating it
#
# Exact KL needs the reference's whole distribution at each token. Often only the log-probabilities
# of the sampled tokens are at hand, and KL is estimated from `d = log pi - log pi_ref` at those.

# %%
from rlhf_lab.functional import kl_estimate  # exercise

# %% [markdown]
# k1 and k3 are unbiased: averaged over enough samples they give the exact KL. Which one would you
# rather have, when a token is all you have: which one has the smaller standard deviation? And which
# of the three can be negative on a single token?

# %%
smaller_spread = "k3"  # predict: "k1" or "k3"
can_be_negative = "k1"  # predict: "k1", "k2" or "k3"

# %%
with torch.no_grad():
    everything_real = torch.ones_like(minibatch.tokens)
    ref_all_logits = trainer.reference(minibatch.tokens, attention_mask=everything_real)
ref_logprobs = get_logprobs(ref_all_logits, minibatch.tokens, prefix_len, args.temperature)

estimates = {"exact": kl} | {k: kl_estimate(logprobs, ref_logprobs, k) for k in ("k1", "k2", "k3")}
show_table(
    ["estimator", "mean", "standard deviation", "smallest"],
    [
        [name, masked_mean(e, mask).item(), masked_std(e, mask).item(), e[mask].min().item()]
        for name, e in estimates.items()
    ],
    digits=5,
)
spread = {name: masked_std(e, mask).item() for name, e in estimates.items()}
predictions.compare("smaller spread", smaller_spread, min(("k1", "k3"), key=spread.get))
negative = [k for k in ("k1", "k2", "k3") if estimates[k][mask].min() < -1e-6]
predictions.compare("negative on some token", can_be_negative, " and ".join(negative))

# %% [markdown]
# With a few hundred tokens the means still scatter. The *gradient* is another matter, and a trap:
# the gradient of the mean of k1 over fixed tokens is 0 on average, whatever the KL is, since the
# log-probability's gradient averages to 0 under the policy. Used as a loss, k1 does nothing but add
# noise. The trainer's penalty is the exact KL, for which value and gradient are both right.
#
# ## Entropy
#
# Entropy says how undecided the policy is at a token, from 0 (certain) to the logarithm of the
# number of words. A small bonus for it keeps a policy from settling too early.

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
entropy, ref_entropy = entropy_per_token(logits), entropy_per_token(ref_logits)
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
# Now the term that learns from rewards. Each sampled token has an advantage: how much better things
# went than the value head expected. Make tokens with a positive advantage likelier, and the others
# less likely. What is differentiated is the ratio of new to old probability (`MAX_LOG_RATIO` is the
# docstring's 20):

# %%
from rlhf_lab.functional import policy_ratio  # exercise

# %% [markdown]
# One rollout serves several steps, and with each step the policy moves further from the one that
# sampled. Beyond some distance the samples say little about the new policy. PPO's answer: a token
# whose ratio has left `1 - clip_coef .. 1 + clip_coef` *in the direction that its advantage asks
# for* earns nothing more by going further. (`whiten(x, mask, eps=eps)` brings x to mean 0 and
# standard deviation 1 over its real tokens.)

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
# So do not judge a run by the value of the surrogate: it starts each minibatch near 0, whatever the
# policy learns. Judge it by the reward.
#
# ## The value loss
#
# The value head predicts, before each token, how the review will turn out. Its target is the
# return: the advantage plus the value it was computed from. The loss is half the squared error.
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
# Four terms, and two of the signs are minus. Put them together, and compare with what the trainer
# computes from the same minibatch.

# %%
terms = {
    "clipped surrogate": calc_clipped_surrogate_objective(
        logprobs,
        minibatch.logprobs,
        minibatch.advantages,
        args.clip_coef,
        mask,
        args.normalize_advantages,
    ),
    "value loss": calc_value_function_loss(
        values, minibatch.returns, args.vf_coef, mask, minibatch.values, args.vf_clip
    ),
    "entropy bonus": calc_entropy_bonus(logits, args.ent_coef, mask),
    "KL penalty": calc_kl_penalty(logits, ref_logits, args.kl_coef, mask),
}
objective = (
    terms["clipped surrogate"] - terms["value loss"] + terms["entropy bonus"] - terms["KL penalty"]
)
theirs = objective_terms(trainer.policy, trainer.reference, minibatch, Objective(args))
show_table(
    ["term", "yours", "the trainer's"],
    [
        *(
            [name, term.item(), getattr(theirs, name.lower().replace(" ", "_")).item()]
            for name, term in terms.items()
        ),
        ["objective", objective.item(), theirs.objective.item()],
    ],
    digits=6,
)
assert torch.allclose(objective, theirs.objective, atol=1e-5)

# %% [markdown]
# ## Your functions drive the trainer
#
# Every one of these functions can be handed to the trainer by name. Two runs of eight phases: one
# with yours, one with the package's. Will their rewards be the same, to the last digit?
#
# (6 s on one core)

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


def run(name: str, functions: dict, **changes: int | float) -> list:
    """Train with these functions, and return the reports of all phases."""
    return RLHFTrainer(RLHFArgs(**SETTINGS | changes), out=place / name, **functions).train()


runs = {"yours": run("yours", mine), "the package's": run("package", {})}
for name, reports in runs.items():
    print(f"{name:14}", " ".join(f"{report.mean_reward:.3f}" for report in reports))
rewards = [[report.mean_reward for report in reports] for reports in runs.values()]
predictions.compare(
    "the two runs are", same_run, "the same" if rewards[0] == rewards[1] else "not the same"
)

# %% [markdown]
# (They get there by different roads. Your functions are handed the logits of the whole vocabulary.
# The package's own log-probabilities, entropy and KL are computed a few rows at a time, so that the
# logits of a minibatch are never there all at once. Both are the same up to rounding, and so are the
# weights that come out, or nearly. The reviews, and with them the rewards, would differ only where
# two words are so close to a tie that rounding decides which of them is drawn.)
#
# Now change the leash. `kl_coef` is 0.3 in this run. With 3 instead, or with none at all: where is
# the final reward highest, and where the KL?
#
# (6 s on one core)

# %%
highest_reward = 0.0  # predict: 0.0, 0.3 or 3.0
highest_kl = 0.0  # predict: 0.0, 0.3 or 3.0

# %%
leashes = {
    0.0: run("no leash", mine, kl_coef=0.0),
    0.3: runs["yours"],
    3.0: run("short leash", mine, kl_coef=3.0),
}
show_table(
    ["kl_coef", "reward", "last", "KL per sequence", "last", "entropy"],
    [
        [
            coef,
            sparkline([report.mean_reward for report in reports]),
            reports[-1].mean_reward,
            sparkline([report.kl_per_sequence for report in reports]),
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

# %% [markdown]
# (Each curve runs from its own lowest to its own highest value, so compare shapes there, and heights
# in the numbers.)
#
# Eight phases are short, and one seed is one seed: the same runs with `seed=2` in `SETTINGS` tell
# you which of these differences you can trust.
#
# ### Why a clip *and* a KL penalty?
#
# They limit different distances. The clip is about *one phase*: how far may the policy move from
# the one that sampled this rollout, before the samples are stale? It forgets at every new rollout,
# so a hundred phases can go anywhere. The KL penalty is about *the whole run*: how far from the
# language we started with? It remembers, but says nothing about whether this step is supported by
# these samples. Without the clip a single minibatch can break the policy; without the penalty the
# policy finds, in many small and well-supported steps, the one sentence that the classifier likes
# best.
#
# ## A leash that adjusts itself
#
# Which `kl_coef` is right depends on the rewards, on the model and on the length of the run, and you
# found out by trying. The other way is to say how far the policy may go, and to leave the
# coefficient to a controller. After each phase it looks at the KL: above the target it raises the
# coefficient, below the target it lowers it. Three things matter.
#
# - *The unit.* The KL comes in nats per **sequence**: summed over the 26 tokens of a review, and
#   averaged over the reviews. The target is in the same unit.
# - *The clip.* Before the first step the KL is 0, an error of -100 %. One wild phase may give
#   +500 %. The error counts as 20 % at most, either way (`MAX_ERROR`).
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
# up to 40 %: far too hasty for a long run, and just right for watching.
#
# Which way does the coefficient go after the first phase? Does the KL come up to the target and
# stay there, or does it go past twice the target on the way? And in a second run somebody takes the
# target for one per token, and gives 0.3 / 26: does its reward get as high as in the first, or
# higher, or does it stay lower?
#
# (14 s on one core)

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

right, wrong = steered.values()
went = "up" if right[1].kl_coef > right[0].kl_coef else "down"
past = max(report.kl_per_sequence for report in right) > 2 * targets["per sequence"]
best_right, best_wrong = (max(r.mean_reward for r in reports) for reports in (right, wrong))
reached = "higher" if best_wrong > best_right + 0.05 else "as high"
reached = "lower" if best_wrong < best_right - 0.05 else reached
predictions.compare("the coefficient first goes", coefficient_goes, went)
predictions.compare("past twice the target", past_twice_the_target, "yes" if past else "no")
predictions.compare("reward with the wrong unit", reward_with_the_wrong_unit, reached)

# %% [markdown]
# The controller is always late. The KL begins at 0, below any target, so it lets go; and when the
# KL has passed the target, the coefficient must first come all the way back up. So the KL swings
# past the target, to more than three times of it, comes back, and swings past it again, downwards: by
# then the coefficient is higher than it began. A longer horizon makes a lazier controller; and it
# needs a longer run.
#
# With the wrong unit nothing breaks. The controller does what it was told, and aims at a
# twenty-sixth of the KL that was meant: next to the reference, where there is little to earn. What
# gives it away are two numbers side by side: a coefficient that climbs to several times what was
# too much already, and a KL per sequence that never reaches the 0.3 that were meant.
#
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Put a slip into one of your functions on purpose: drop `kl_coef`, or swap policy and reference.
#   See what `check` says. Then hand it to the trainer anyway, and see which number of the report
#   gives it away.
# - Give the controller a horizon of 640, or begin at the `kl_coef` that it ended with. How far does
#   the KL swing now?
# - `ent_coef` is 0 on Reel. Set it to 0.1 in `run(...)` and look at the entropy.
# - Use `kl_penalty=lambda logits, ref_logits, kl_coef, mask: ...` with the KL the other way round,
#   and compare the favourites of the two policies.
#
# Next: 06 PPO, where you write the phase around this objective.
