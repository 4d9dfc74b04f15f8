# %% [markdown]
# # 09 What RLHF changed
#
# A run is over. It left two checkpoints, the model before and the model after, and the question what
# happened between them. "It has learned to be positive" is not an answer. *Where* in the text does it
# choose differently, which weights moved, through which parts of the model does the change reach the
# words, and could one have had it by adding a single vector?
#
# **Afterwards you can**
# - draw the KL divergence token by token, and set it against the best possible policy's,
# - describe what happened to a weight matrix: how much, in how many directions, in which entries,
# - split the change of a logit difference exactly over embeddings, heads and MLPs,
# - test the claim that a fine-tuned model is the old one plus a steering vector.
#
# **What to inspect**
#
# | question | look at | trust it because |
# |---|---|---|
# | where does it choose differently? | KL by slot | it sums to the KL per sequence |
# | was that necessary? | KL by slot of the exact optimum | worked out from the grammar |
# | how large is the change of a matrix? | norm of the delta over norm of the matrix | squared singular values sum to it |
# | is it low-rank? | stable rank, directions for 90 % of the energy | known for planted deltas |
# | is it sparse? | share of unchanged entries, in which precision | compared to the bit |
# | which part changed its mind? | rows of the logit shift | they sum to the measured shift |
# | is it a steering vector? | reward over alpha | beside a random vector of the same length |

# %%
# first cell

# %% [markdown]
# About 60 minutes of work. All cells together run in about 18 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.functional import (
    bootstrap_interval,
    generated_logits,
    kl_per_sequence,
    kl_per_token,
    masked_mean,
    recovered_fraction,
)
from rlhf_lab.organism import grammatical, optimal_policy
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.probes.logit_shift import SITES, Attribution, residual_components, single_token
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.probes.weight_delta import as_matrix, spectrum
from rlhf_lab.sampling import sample
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import Html, bars, color_key, curves, sparkline, tokens_html

SETTINGS = dict(
    preset="reel",
    forward="hooked",  # the modules and functions that you read are what runs
    total_phases=12,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    keep_checkpoints=None,  # all of them: several are looked at below
)
predictions = Predictions()

# %% [markdown]
# The line `SETTINGS` decides what all of this runs on: Reel, a tiny language of movie reviews. On a
# GPU with a network, write `preset="gpt2-medium"` instead, and it runs on GPT-2-medium; only the exact
# optimum of the grammar is not known there, and the cells say so. The text between the cells tells
# what came out on Reel; GPT-2 has other layers and heads, and learns more slowly: raise
# `total_phases`, too.
#
# ## Two checkpoints
#
# Train, and then forget the trainer. A run's folder holds the weights after 0, 1, 2, 4, 8, ... phases
# and the last ones.
#
# (4 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("run"))
reports = trainer.train()
print("reward", sparkline([r.mean_reward for r in reports]), f"{reports[-1].mean_reward:.3f}")

run = Run(trainer.run.path)
base, tuned = (run.policy(which).to(trainer.device) for which in (0, "last"))
tokenizer, prefix_len, on_reel = trainer.tokenizer, len(trainer.prompt), trainer.speaks_reel
truth = ReelTruth.of_reward(args.reward_fn) if on_reel else None
words = ("loved", "hated") if on_reel else (" good", " bad")
n_texts = 256 if on_reel else 32


def write(policy, n: int = n_texts, seed: int = 0):
    """Let a policy write n texts."""
    generator = torch.Generator().manual_seed(seed)
    prompts, spec = [trainer.prompt] * n, trainer.sampling_spec
    return sample(policy, prompts, spec, generator, trainer.forward)


@torch.no_grad()
def logits_of(policy, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch gen d_vocab"]:
    """A policy's logits before each generated token."""
    return generated_logits(policy(tokens)[0], prefix_len) / args.temperature


own = write(tuned)
show_table(["text"], [[text] for text in own.texts(tokenizer)[:3]])

# %% [markdown]
# ## Where does it choose differently?
#
# At each token, how far is the new model's distribution from the old one's? On the new model's own
# text, and summed over the tokens, that is the KL per sequence that the leash was holding.
#
# Reel's reviews all have the same slots: an opening word, then per clause an aspect (`ASP`), "was" or
# "wasn't" (`COP`), an adverb and an adjective; "and" or "but" in between (`CONN`), and at the end a
# verdict (`VERB`) and a tag. Where has most of the KL gone? And has anything been spent on `COP`, where
# a negation costs nothing, since the adjective can make up for it?

# %%
most_kl_at = "ADJ"  # predict: "ADJ", "CONN", "COP" or "VERB"
kl_at_copula = "some"  # predict: "some" or "none"

# %%
kl = kl_per_token(logits_of(tuned, own.tokens), logits_of(base, own.tokens))
by_slot = masked_mean(kl, own.mask, dim=0)
gen_len = kl.shape[1]
slots = truth.slot_names(prefix_len + gen_len) if truth else [str(i) for i in range(gen_len)]
slots = slots[-gen_len:]
series = {"this run": by_slot.tolist()}
print(f"KL per sequence: {kl_per_sequence(kl, own.mask).mean():.3f} nats")

if truth is None:
    print("no exact optimum here")
else:
    reached = truth.reward(own.texts(tokenizer)).mean().item()
    betas = [0.05 * 1.05**i for i in range(60)]
    beta = min(betas, key=lambda b: abs(truth.optimum(b).reward - reached))
    best = optimal_policy(truth.policy, truth.reward, beta).kl_by_position(truth.policy)
    series["best policy of the same reward"] = best[prefix_len - 1 :].tolist()
    print(f"the best policy of reward {reached:.3f} needs {best.sum():.3f} nats")
    kinds = {
        kind: sum(
            x for slot, x in zip(slots, series["this run"], strict=True) if slot.startswith(kind)
        )
        for kind in ("ADJ", "CONN", "COP", "VERB", "OPEN")
    }
    show_table(["slots", "KL, all clauses together"], kinds.items())
    predictions.compare("most KL at", most_kl_at, max(kinds, key=kinds.get))
    spent = "some" if kinds["COP"] > 0.01 else "none"
    predictions.compare("KL at the copula", kl_at_copula, spent)
bars(slots, series, "KL from the old model, nats per token")

# %% [markdown]
# The run spent about twice the KL that its reward is worth. Adjectives and the verdict are where
# the best policy spends, too, and both spend most on the first adjective, though this run spends
# far more on the others. At the connectors the best policy spends a little, and this run next to
# nothing. But the best policy spends *nothing* on the copula, where this run spends more than on
# the verdict. (The opening words, a matter of style, were all but left alone, as they should be.)
#
# Here is what happened at the copula. The grammar says "wasn't" one time in five, and to say it costs
# nothing, if the adjective is chosen to match. What did the checkpoints do, and what did it bring them?

# %%
if truth is None:
    print("no negation to look at here")
else:
    rows = []
    for which in (*(phase for phase in (0, 2, 8) if phase < len(reports)), "last"):
        written = write(run.policy(which).to(trainer.device), n=1024).texts(tokenizer)
        gold, negations = truth.reward(written), torch.tensor([t.count("wasn't") for t in written])
        means = [gold[negations == n].mean().item() for n in (0, 1, 2)]
        rows.append([str(which), negations.float().mean().item() / 3, *means])
    show_table(["phases", 'share of "wasn\'t"', "reward with none", "with one", "with two"], rows)

# %% [markdown]
# At the start a negation makes little difference. But what the policy learns first is to say nice
# adjectives after "was". After "wasn't" it should say the others, and that it has not learned here:
# after eight phases a review without negation earns 0.95, one with two earns 0.61, and *wasn't lovely*
# is not praise. So to *this* policy negations have become costly, and it learns to avoid them. It did not
# have to; a policy that matched its adjectives would have kept its "wasn't". That is what a detour
# looks like in a KL map: a change that the goal did not ask for, but the way there did.

# %%
limit = kl[:4].max().item()
lines = [color_key("KL", limit, "sequential").fragment]
for row in range(4):
    spelled = spell_tokens(tokenizer, own.tokens[row])
    numbers = [0.0] * prefix_len + kl[row].tolist()
    counts = [False] * prefix_len + own.mask[row].tolist()
    lines.append(tokens_html(spelled, numbers, "KL", counts, limit, "sequential").fragment)
Html("".join(lines))

# %% [markdown]
# ## Which weights?
#
# "RL changes only a small part of the parameters" was found for large models (Mukherjee et al. 2025):
# most entries were *exactly* as before. That is a claim that you can check in one line. But in which
# precision? Large models are trained and stored in bfloat16, which has two to three significant
# digits; Reel is trained in float32. Write both.

# %%
from rlhf_lab.probes.weight_delta import unchanged_fraction  # exercise

# %% [markdown]
# What share of Reel's weights has not changed at all?

# %%
unchanged = "less than 10 %"  # predict: "less than 10 %", "10 to 70 %" or "more than 70 %"

# %%
before = {name: weight.detach() for name, weight in base.base_model.named_parameters()}
after = {name: weight.detach() for name, weight in tuned.base_model.named_parameters()}
everything = [torch.cat([w.flatten() for w in weights.values()]) for weights in (before, after)]
exactly, coarsely = unchanged_fraction(*everything)
print(f"unchanged: {exactly:.2%} in float32, {coarsely:.2%} after rounding to bfloat16")
share = "less than 10 %" if exactly < 0.1 else "10 to 70 %" if exactly < 0.7 else "more than 70 %"
predictions.compare("weights that have not changed", unchanged, share)

# %% [markdown]
# On Reel practically every weight has changed, and even in bfloat16 nearly all have. So the observation does
# not carry over: what it needs is a step so small that bfloat16 rounds it away, and Reel's learning
# rate of 3e-4 is far above a large model's. Unchanged entries say as much about precision and step size
# as about RL.
#
# If not few entries, then few *directions*? The delta of a matrix, after minus before, has singular
# values: how much it stretches each of its directions. Two numbers sum them up.

# %%
from rlhf_lab.probes.weight_delta import describe_spectrum  # exercise

# %% [markdown]
# Reel's matrices have a rank of up to 64. How many directions do their deltas really have, by the
# stable rank? And in which kind of matrix is the delta largest, compared with the matrix?

# %%
typical_rank = "1 to 6"  # predict: "1 to 6", "6 to 30" or "more than 30"
largest_relative = "attention"  # predict: "attention", "MLP" or "embedding"

# %%
rows = []
for name, weight in before.items():
    if weight.ndim < 2 or ".b_" in name:
        continue
    delta = as_matrix(name, after[name] - weight)
    s, _ = spectrum(delta)
    stable_rank, k90 = describe_spectrum(s)
    rows.append(
        [name, delta.norm().item(), (delta.norm() / weight.norm()).item(), stable_rank, k90]
    )
rows.sort(key=lambda row: -row[2])
show_table(
    ["matrix", "norm of the delta", "over the matrix's", "stable rank", "directions for 90 %"],
    rows[:16],
)
ranks = sorted(row[3] for row in rows)
middle = ranks[len(ranks) // 2]
inside = "1 to 6" if middle < 6 else "6 to 30" if middle < 30 else "more than 30"
predictions.compare("stable rank of the deltas", typical_rank, inside)
top = rows[0][0]
kind = "attention" if ".attn." in top else "MLP" if ".mlp." in top else "embedding"
predictions.compare("largest delta, relatively", largest_relative, kind)

# %% [markdown]
# A few directions, in every matrix: between one and a third and five by the stable rank, and
# with two to sixteen of them 90 % of the energy is there. (The same work on large models
# reports deltas of nearly full rank. Rank counts every direction however weak; the stable rank asks for strength. Say
# which one you mean.)
# Attention has changed most for its size, by 8 % at most; embeddings and unembedding least.
#
# ## Which part changed its mind?
#
# Behind "i" the model says "loved" or "hated". How much further does it lean to "loved" than before,
# and which parts made it?
#
# The logit difference is `<normalised residual, u>` with `u = W_U[:, loved] - W_U[:, hated]`, and the
# residual is a sum: embeddings, every head, every MLP. The final norm is in the way, but once its scale
# is known it is linear too. So the difference splits *exactly*. Two things are easily forgotten, since
# many tools fold them away before they start: the norm's gain and its bias. In a model that is being
# trained they are weights like all others, and they move.

# %%
from rlhf_lab.probes.logit_shift import attribute_logits  # exercise

# %% [markdown]
# The text to look at is what the grammar writes, not what a policy writes: both models read the same
# words. Which parts will have contributed most to the shift: the MLP or all heads together, of block 0
# or of block 1? Block 1 is the last one, directly before the unembedding.

# %%
biggest_part = "L1 heads"  # predict: "L0 heads", "L0 mlp", "L1 heads" or "L1 mlp"

# %%
if truth is not None:
    verdict = truth.grammar.slot("VERB") - 1
    text, positive = truth.reviews(384, seed=0)
    text = text[:, : verdict + 1]
else:
    text = torch.tensor([trainer.prompt])
word, other = (single_token(tokenizer, name) for name in words)
old_acts, new_acts = (capture_activations(model, text, SITES, pos=-1) for model in (base, tuned))
old = attribute_logits(base.base_model, old_acts, word, other)
new = attribute_logits(tuned.base_model, new_acts, word, other)
shift = new.rows - old.rows
measured = new.logit_difference - old.logit_difference
error = (shift.sum(0) - measured).abs().max().item()
print(f"measured shift {bootstrap_interval(measured)}; rows sum to it within {error:.0e}")
parts = dict(zip(new.components, shift.mean(1).tolist(), strict=True))
order = sorted(parts, key=lambda name: -abs(parts[name]))[:12]
groups = {"shift": torch.ones(len(text), dtype=torch.bool)}
if truth is not None:
    groups |= {"after positive reviews": positive, "after negative ones": ~positive}
index = [new.components.index(name) for name in order]
among = {name: bootstrap_interval(shift[i]) for name, i in zip(order, index, strict=True)}
show_table(
    ["part", "before", "after", *groups, "95 % of the shift"],
    [
        [
            name,
            old.rows[i].mean().item(),
            new.rows[i].mean().item(),
            *(shift[i, rows].mean().item() for rows in groups.values()),
            "-" if len(text) == 1 else f"{among[name].low:+.2f} to {among[name].high:+.2f}",
        ]
        for name, i in zip(order, index, strict=True)
    ],
)
last_blocks = [f"L{block}" for block in range(base.base_model.cfg.n_layers)][-2:]
kinds = {f"{block} mlp": parts[f"{block} mlp"] for block in last_blocks}
for block in last_blocks:
    heads = [name for name in parts if name.startswith(f"{block}H")]
    kinds[f"{block} heads"] = sum(parts[name] for name in heads)
show_table(["parts", "shift, all together"], kinds.items())
if on_reel:
    predictions.compare("most of the shift comes from", biggest_part, max(kinds, key=kinds.get))
bars(order, {"shift": [parts[name] for name in order]}, f"shift of logit({words[0]} - {words[1]})")

# %% [markdown]
# The MLP of block 0 is the largest single part. But all four heads of block 1 push the same way,
# L1H2 and L1H3 most, and together they have more. The rest hardly counts. Look at the last two
# columns. The MLP of block 0 pushes towards "loved" after every review, and more than twice as far
# after negative ones, where more is to be won. L1H1 moved about as far after both. L1H2 and L1H3
# changed after negative reviews above all. And the MLP of block 1, whose shift is nearly 0, has not
# kept still: it leans more to "loved" than before after positive reviews, and less after negative
# ones. A mean of 0 may hide that. (Which heads they are is a matter of the model: heads have no names
# in common.)
#
# What would a tool have said that takes gain and bias as folded away? Leave them out, and see how far
# the rows are from the truth.

# %%
names, pieces = residual_components(tuned.base_model, new_acts)
u = (tuned.base_model.unembed.W_U[:, word] - tuned.base_model.unembed.W_U[:, other]).double()
folded = (pieces - pieces.mean(-1, keepdim=True)) @ u / new_acts["ln_final.hook_scale"][:, 0]
off = (folded.sum(0) - new.logit_difference).abs()
print(f"without gain and bias: off by {off.mean():.2f} nats on average, {off.max():.2f} at most")
print(f"with them: off by {new.error:.0e} at most")

# %% [markdown]
# ## Is it a steering vector?
#
# "DPO is a steering vector" is another claim from the literature: add the mean difference of the
# activations to the old model, and you have the new one; subtract it from the new one, and you have
# the old. Test it. Take the mean difference at one layer over all places of the text, add alpha times
# it to the old model while it writes, and look at what it writes: reward, grammar, and the KL from the
# old model. The control is a random vector of the same length.
#
# How much of the way from the old reward to the new one does alpha = 1 go? And alpha = 4?
#
# (5 s on one core)

# %%
alpha_one = "less than a third"  # predict: "less than a third", "about half" or "over two thirds"
alpha_four = "less than a third"  # predict: "less than a third", "about half" or "over two thirds"

# %%
site = f"blocks.{base.base_model.cfg.n_layers - 1}.hook_resid_post"
states = slice(prefix_len - 1, -1)
activations = [
    capture_activations(model, own.tokens, [site])[site][:, states] for model in (base, tuned)
]
vector = (activations[1] - activations[0])[own.mask].mean(0)
noise = torch.randn(vector.shape, generator=torch.Generator().manual_seed(0)).to(vector)
noise = noise / noise.norm() * vector.norm()
length = activations[0].norm(dim=-1).mean()
print(f"length of the vector {vector.norm():.1f}, of a residual {length:.1f}")


def measure(policy, added: Float[Tensor, " d_model"] | None = None) -> list[float | str]:
    """Reward, share of grammatical texts and KL from the old model of what a policy writes.

    The reward of each text is kept in `paid`, in the order in which it is asked.
    """

    def add(residual, hook):
        return residual + added

    with policy.base_model.hooks(fwd_hooks=[] if added is None else [(site, add)]):
        written = write(policy, seed=1)
        logits = logits_of(policy, written.tokens)
    texts = written.texts(tokenizer)
    drift = kl_per_sequence(kl_per_token(logits, logits_of(base, written.tokens)), written.mask)
    well_formed = grammatical(texts).float().mean().item() if on_reel else "-"
    paid.append(trainer.reward_fn(texts))
    return [paid[-1].mean().item(), well_formed, drift.mean().item()]


paid = []
alphas = [0, 1, 2, 4, 8, 16]
steered = {alpha: measure(base, alpha * vector) for alpha in alphas}
control = {alpha: measure(base, alpha * noise) for alpha in alphas}
goal = measure(tuned)
paid_by_goal = paid[-1]
show_table(
    ["model", "alpha", "reward", "grammatical", "KL"],
    [
        *(["old + alpha vector", alpha, *row] for alpha, row in steered.items()),
        *(["old + alpha random", alpha, *row] for alpha, row in control.items() if alpha),
        *(["new - alpha vector", alpha, *measure(tuned, -alpha * vector)] for alpha in (1, 2, 4)),
        ["new", 0, *goal],
    ],
)
for alpha, guess in [(1, alpha_one), (4, alpha_four)]:
    recovered = recovered_fraction(paid_by_goal, paid[0], paid[alphas.index(alpha)])
    print(f"share of the way at alpha = {alpha}: {recovered}")
    way = (steered[alpha][0] - steered[0][0]) / (goal[0] - steered[0][0])
    said = (
        "less than a third" if way < 1 / 3 else "about half" if way < 2 / 3 else "over two thirds"
    )
    predictions.compare(f"share of the way at alpha = {alpha}", guess, said)
curves(
    {
        "the mean difference": (alphas, [row[0] for row in steered.values()]),
        "a random vector": (alphas, [row[0] for row in control.values()]),
        "the new model": (alphas, [goal[0]] * len(alphas)),
    },
    "reward of the old model with a vector added",
    x_label="alpha",
    y_label="reward",
)

# %% [markdown]
# Alpha = 1, which the claim is about, goes a tenth of the way; the vector is about an eighth as long
# as a residual. But it is no noise: twice the vector goes nearly a fifth of the way, at an eighth of
# the KL of the new model, and keeps the grammar of nearly all texts, where a random vector of that
# length hardly raises the reward. Four times it goes a quarter of the way, and a quarter of the texts
# lose their grammar. More of it breaks the language, and the reward it still gets for that is the
# classifier's opinion of rubble (look at the column "grammatical"). Nor can it be undone this way:
# the new model less the vector is nearly the new model, and less four times the vector, it has lost
# only a quarter of what it had gained, but the grammar of most texts, and is much *further* from the
# old model than before.
#
# So: it *has* a steering vector in it, and it is not one. What RLHF changed here depends on what was
# said before (which adjective, after which copula, before which verdict), and one vector for all places
# cannot say that. For another model, another method or another layer the answer may differ. Now you
# have the test, and the control that belongs to it.
#
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Take the vector at another layer (`blocks.0.hook_resid_post`), or at the verdict only.
# - Compare the weights after 8 phases with those after 12: does the delta grow, or turn?
# - Attribute another choice: "was" against "wasn't", at `COP 1`. Which part is it there?
# - Run with `reward_fn="soft_popcorn"` and 40 phases, and find the loophole from the KL map alone.
