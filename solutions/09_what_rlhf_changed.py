# %% [markdown]
# # 09 What RLHF changed
#
# By the end of this lesson, you will be able to find the activations and weights that cause the difference between two
# checkpoints, and test whether a simple description, such as a steering vector, captures it.
#
# A finished run leaves you with two checkpoints, and there are two ways to compare them. A *description* measures what is
# different, such as how far each weight has moved. An *intervention* swaps something between the two models and measures the
# effect. Only an intervention tells you what causes a difference, and in this lesson the two kinds of comparison disagree.
#
# **You will also be able to**
# - plot where in the text a policy differs from its reference, and compare this with the best possible policy;
# - decompose a logit difference exactly into contributions from the model's components;
# - patch activations and graft weights from one checkpoint into another, and state what each of these proves.
#
# **You need** {lesson:the_policy} and {lesson:watch_it_learn}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 45 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
#
# (6 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress
from rlhf_lab.diffing import (
    PatchPlace,
    Side,
    mean_difference,
    patch_activations,
    steering_sweep,
    transplant,
)
from rlhf_lab.diffing.effects import layer_groups
from rlhf_lab.functional import (
    bootstrap_means,
    generated_logits,
    kl_per_token,
    log_probs,
    masked_mean,
    recovered_fraction,
)
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead
from rlhf_lab.organism import grammatical, optimal_policy, true_reward
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.probes.logit_shift import SITES, single_token
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.sampling import sample
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import Html, bars, color_key, heatmap, patch_diagram, short_site, tokens_html

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=12,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    keep_checkpoints=None,  # all of them
)
predictions = Predictions()
over_seeds = SeedFigures("what_rlhf_changed", SETTINGS)

# %% [markdown]
# ## Two checkpoints
#
# The next cell trains for 12 phases, and loads the models from phase 0 and from the end of training. We score each text
# by its **true reward**: the exact probability, computed from Reel's grammar, that the review is meant to be positive.
# We'll come back to the reward model at the end of the lesson.
#
# (10 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("run"))
trainer.train()
run = Run(trainer.run.path)
base, tuned = (run.policy(which).to(trainer.device) for which in (0, "last"))
before, after = base.base_model, tuned.base_model
tokenizer, prefix_len, on_reel = trainer.tokenizer, len(trainer.prompt), trainer.speaks_reel
truth = ReelTruth.of_reward(args.reward_fn) if on_reel else None
score = true_reward if on_reel else trainer.reward_fn
words = ("loved", "hated") if on_reel else (" good", " bad")
ids = tuple(single_token(tokenizer, word) for word in words)
n_texts = 256 if on_reel else 16


def generate(policy, seed: int = 0):
    """Sample texts, with the same random numbers for each policy."""
    generator = torch.Generator().manual_seed(seed)
    return sample(policy, [trainer.prompt] * n_texts, trainer.sampling_spec, generator)


def compute_reward(model: HookedTransformer) -> Float[Tensor, " n_texts"]:
    """Compute the true reward of each of a model's texts."""
    return score(generate(TransformerWithValueHead(model), 1).texts(tokenizer)).cpu()


texts = generate(tuned)
at_base, at_tuned = compute_reward(before), compute_reward(after)
print(f"true reward: base model {at_base.mean():.2f}, tuned model {at_tuned.mean():.2f}")

# %% [markdown]
# ## Where the policy differs
#
# Let's compute the KL divergence from the base model at each token of the tuned model's texts. Summed over tokens, this
# is the KL per sequence that the KL penalty limits. A review has three clauses, each with a noun (`ASP`), "was" or
# "wasn't" (`COP`), an adverb, and an adjective (`ADJ`). `CONN` is "and" or "but", and `VERB` is the verdict.
#
# In {lesson:the_kl_penalty}, you computed the optimal policy for any penalty. The one with the same true reward as PPO
# spends no KL at `COP`, because "wasn't" does no harm if the adjective matches it. Does PPO spend some KL there, or none?

# %%
kl_at_copula = "some"  # predict: "some" or "none"


# %%
@torch.no_grad()
def compute_log_probs(
    policy, tokens: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch gen d_vocab"]:
    """Return the log-probabilities of all words before each generated token."""
    return log_probs(generated_logits(policy(tokens)[0], prefix_len) / args.temperature)


kl = kl_per_token(*(compute_log_probs(policy, texts.tokens) for policy in (tuned, base)))
gen_len = kl.shape[1]
slots = truth.slot_names(prefix_len + gen_len)[-gen_len:] if truth else [*map(str, range(gen_len))]
series = {"PPO": masked_mean(kl, texts.mask, dim=0).tolist()}
if truth is not None:
    reached = score(texts.texts(tokenizer)).mean().item()
    betas = [0.05 * 1.05**i for i in range(60)]
    beta = min(betas, key=lambda b: abs(truth.optimum(b).reward - reached))
    optimal_kl = optimal_policy(truth.policy, truth.reward, beta).kl_by_position(truth.policy)
    series["optimal policy"] = optimal_kl[prefix_len - 1 :].tolist()
    kinds = ("ADJ", "CONN", "COP", "VERB", "OPEN")
    spent = {
        name: {k: sum(y for s, y in zip(slots, ys, strict=True) if s.startswith(k)) for k in kinds}
        for name, ys in series.items()
    }
    for name, ys in series.items():
        print(f"{name}: {sum(ys):.2f} nats; adjectives {spent[name]['ADJ']:.2f}", end=", ")
        print(f"copulas {spent[name]['COP']:.2f}, verdict {spent[name]['VERB']:.2f}")
    over_seeds.compare("KL, nats per sequence", spent["PPO"])
    found = "some" if spent["PPO"]["COP"] > 0.01 else "none"
    predictions.compare("PPO's KL at the copula", kl_at_copula, found)
bars(slots, series, "KL from the base model by position", "nats per token")

# %%
limit = kl[:3].max().item()
lines = [color_key("KL", limit, "sequential").fragment]
for row in range(3):
    spelled = spell_tokens(tokenizer, texts, 3)[row]
    numbers = [0.0] * prefix_len + kl[row].tolist()
    counts = [False] * prefix_len + texts.mask[row].tolist()
    lines.append(tokens_html(spelled, numbers, "KL", counts, limit, "sequential").fragment)
Html("".join(lines))

# %% [markdown]
# PPO uses 1.30 nats, while the optimal policy reaches the same true reward with only 0.61. Both policies spend most of
# their KL on the adjectives. For all three seeds, PPO also spends more KL on avoiding "wasn't" (here 0.20 nats) than on
# the verdict. After all, it has learned to write positive adjectives, and "wasn't lovely" is not praise.
#
# ## Contributions to a logit difference
#
# After "i", the model chooses between "loved" and "hated". How much has training raised the logit difference between
# them, and which components are responsible? The logit difference is $\langle \text{normalized residual stream}, u
# \rangle$ with $u = W_U[:, \text{loved}] - W_U[:, \text{hated}]$, and the residual stream is the sum of the outputs of
# the embeddings, heads, and MLPs. The final norm comes in between, but it is linear once its scale is known. So you can
# write the logit difference as an exact sum. Just don't forget the norm's gain and bias. Many tools fold them into
# other weights first, but here they are still separate parameters.

# %%
from rlhf_lab.probes.logit_shift import attribute_logits  # exercise

# %% [markdown]
# Both models get the same input: 256 reviews sampled from the grammar. Each model has two blocks, and each block contributes
# through its attention heads and through its MLP. Which of these four contributions increases the most?

# %%
largest_rise = "L0 mlp"  # predict: "L0 heads", "L0 mlp", "L1 heads" or "L1 mlp"

# %%
if truth is not None:
    text = truth.reviews(256, seed=0)[0][:, : truth.grammar.slot("VERB")].to(trainer.device)
else:
    text = generate(base).tokens[:, : prefix_len + 4]
old, new = (
    attribute_logits(model, capture_activations(model, text, SITES, pos=-1), *ids)
    for model in (before, after)
)
rise = new.logit_difference - old.logit_difference
print(f"the logit difference rises by {rise.mean():.2f} nats", end="; ")
print(f"the rows sum to it within {((new.rows - old.rows).sum(0) - rise).abs().max():.0e}")
moved = bootstrap_means((new.rows - old.rows).T)
shift = dict(zip(new.components, moved.value.tolist(), strict=True))
n_layers = before.cfg.n_layers
by_kind = {}
for block in (f"L{layer}" for layer in range(n_layers)):
    by_kind[f"{block} heads"] = sum(x for name, x in shift.items() if name.startswith(f"{block}H"))
    by_kind[f"{block} mlp"] = shift[f"{block} mlp"]
over_seeds.compare("contributions to the rise, nats", by_kind)
predictions.compare("largest rise in contribution", largest_rise, max(by_kind, key=by_kind.get))
top = sorted(range(len(shift)), key=lambda i: -abs(moved.value[i]))[:10]
bars(
    [new.components[i] for i in top],
    {"rise": moved.value[top].tolist()},
    'rise of logit("loved") - logit("hated"), by component',
    "nats",
    {"rise": (moved.low[top].tolist(), moved.high[top].tolist())},
)

# %% [markdown]
# The logit difference rises by 2.40 nats. The heads in block 1 contribute 1.35 nats of that, and the MLP in block 0
# contributes 0.91. (For one of the three seeds, the order is reversed.) The sum is exact, but it is only a description:
# it shows which components *write* the change at a single position. A component can write something new because its own
# weights changed, or because its input changed.
#
# ## Patching: what causes the rise
#
# To find causes, you run one model and replace one of its activations with the other model's:

# %%
steps = [(f"block {i}", part) for i in (0, 1) for part in ("heads", "MLP")]
steps = [("text", "up to “i”"), *steps, ("logits", "loved − hated")]
patch_diagram(("tuned model", "base model"), steps, patched=2)

# %% [markdown]
# Three rules help (Heimersheim and Nanda 2024, [2404.15255](https://arxiv.org/abs/2404.15255)). First, measure a logit
# difference, because probabilities saturate. Second, patch in both directions: patching into the base model shows what
# is *sufficient*, and patching into the tuned model shows what is *necessary*. Third, say which positions you patched,
# because a patch at the last position misses what the component did earlier in the text.
#
# Patching the output of the tuned model's block 0 MLP into the base model at all positions recovers a fraction of the
# rise. Compared with the fraction you recover by patching only the last position, is it about the same, about twice as
# large, or over five times as large?

# %%
all_positions = "about twice"  # predict: "about the same", "about twice" or "over five times"

# %%
places = {}
for layer in range(n_layers):
    places[f"L{layer} heads"] = PatchPlace(f"blocks.{layer}.hook_attn_out")
    places[f"L{layer} mlp"] = PatchPlace(f"blocks.{layer}.hook_mlp_out")
places["final residual"] = PatchPlace(f"blocks.{n_layers - 1}.hook_resid_post")
at_last = {name: place._replace(positions=(-1,)) for name, place in places.items()}
sides = Side(before, text), Side(after, text)
patched = {
    "into the base": patch_activations(*sides, places, -1, ids),
    "into the base, last position": patch_activations(*sides, at_last, -1, ids),
    "out of the tuned": patch_activations(*sides[::-1], places, -1, ids),
}
fractions = {
    how: [recovered_fraction(found.end, found.start, row) for row in found.patched]
    for how, found in patched.items()
}
ends = lambda found: ([x.low.item() for x in found], [x.high.item() for x in found])
effects = {how: [one.value.item() for one in found] for how, found in fractions.items()}
into, last = (dict(zip(places, effects[how], strict=True)) for how in [*effects][:2])
if on_reel:
    both = {"all": into, "last": last}.items()
    kept = {f"{name}, {p}": x[name] for p, x in both for name in ("L0 mlp", "L1 heads")}
    over_seeds.compare("fraction recovered, by positions", kept)
    ratio = into["L0 mlp"] / last["L0 mlp"]
    found = "about the same" if ratio < 1.4 else "about twice" if ratio < 5 else "over five times"
    predictions.compare("fraction, all positions over the last", all_positions, found)
bars(
    [*places],
    effects,
    "fraction of the rise that a patch recovers",
    "fraction of the rise",
    {how: ends(found) for how, found in fractions.items()},
)

# %% [markdown]
# Patching the MLP in block 0 at all positions recovers 46% of the rise, but patching it at the last position only
# recovers 20%. So more than half of its effect goes through earlier words, which later heads attend to. For the heads
# in block 1, both fractions are 36%, because no later head attends to their output. The choice of positions can decide
# which component ranks first. If you patch at all positions, the MLP in block 0 ranks first for all three seeds. If you
# only patch the last position, the heads in block 1 rank first in this run, which agrees with the exact sum above.
#
# ## Grafts: which weights cause it
#
# Now we swap weights instead of activations: copy a component's tuned weights into the base model, and measure the true reward.

# %%
from rlhf_lab.diffing.weights import graft  # exercise

# %% [markdown]
# Again, we graft in both directions. We also compute each component's *Shapley value*, which is its average effect over
# all orders of swapping the components. Relative to their size, the attention weights changed the most. Which graft
# raises the base model's true reward the most: the embedding, an attention layer, or an MLP?
#
# (6 s on one core)

# %%
best_graft = "an MLP"  # predict: "embed", "an attention" or "an MLP"

# %%
groups = layer_groups(before)
weights = [dict(model.named_parameters()) for model in (before, after)]
length = lambda ws: torch.cat([w.detach().flatten() for w in ws]).norm().item()
columns, norms = {"grafted into base": [], "removed from tuned": []}, {}
for part in groups.names:
    names = sorted(name for name, _ in groups.of(part))
    changes = [weights[1][name] - weights[0][name] for name in names]
    norms[part] = length(changes) / length(weights[0][name] for name in names)
    put_in = compute_reward(graft(before, after, names.__contains__)) - at_base
    taken_out = at_tuned - compute_reward(graft(after, before, names.__contains__))
    for column, effect in zip(columns.values(), (put_in, taken_out), strict=True):
        column.append(bootstrap_means(effect))
if on_reel:
    columns["Shapley value"] = transplant(before, after, groups, score, n=64, seed=1).shapley()
print("relative change:", ", ".join(f"{part} {norm:.3f}" for part, norm in norms.items()))
taken = sum(x.value.item() for x in columns["removed from tuned"])
print(f"gain {(at_tuned - at_base).mean():.2f}; sum of the drops, one at a time: {taken:.2f}")
gains = {p: x.value.item() for p, x in zip(groups.names, columns["grafted into base"], strict=True)}
over_seeds.compare("true reward, grafted into base", gains)
leader = max(gains, key=gains.get)
kind = {"attn": "an attention", "mlp": "an MLP"}.get(leader.split()[-1], leader)
predictions.compare("the best graft is", best_graft, kind)
bars(
    groups.names,
    {how: [x.value.item() for x in found] for how, found in columns.items()},
    "effect of a graft on the true reward",
    "change of the true reward",
    {how: ends(found) for how, found in columns.items()},
)

# %% [markdown]
# Relative to their size, the attention weights in block 1 changed the most (0.061), but grafting them raises the base model's
# true reward the least (by 0.03). For all three seeds, grafting the MLP in block 0 raises it the most. So the norm tells you
# how far the weights moved, but not how much the behavior changed. If you undo a single component's change in the tuned model,
# the true reward drops. These drops add up to less than the whole gain, because the other components compensate.
#
# Patches and grafts agree on which component ranks first, but not on the rest of the ranking. Patching the heads in
# block 1 recovers a third of the increase in the logit difference, while grafting their weights barely raises the true
# reward. That's not a contradiction: the two experiments answer different questions.
#
# ## A steering vector?
#
# The simplest description of a change is a single vector. *Steering* computes the mean difference between the two
# models' activations at one hook point and adds it at every position, scaled by alpha (Turner et al. 2023,
# [2308.10248](https://arxiv.org/abs/2308.10248)). Raina et al. 2025 ([2512.11838](https://arxiv.org/abs/2512.11838))
# claim that preference tuning *is* such a vector. Let's test that. Training has raised the true reward. With the best
# layer and alpha, how much of this rise does the steering vector recover?
#
# (7 s on one core)

# %%
how_far = "about half"  # predict: "less than a third", "about half" or "over two thirds"

# %%
blocks = sorted({0, n_layers // 2, n_layers - 1})
sites = ["blocks.0.hook_resid_pre"]
sites += [f"blocks.{block}.hook_resid_{where}" for block in blocks for where in ("mid", "post")]
states = torch.zeros_like(texts.tokens, dtype=torch.bool)
states[:, prefix_len - 1 : -1] = texts.mask
vectors = {site: mean_difference(base, tuned, texts.tokens, site, states) for site in sites}
figures = {"true_reward": score, "reward": trainer.reward_fn}
if on_reel:
    figures["grammatical"] = lambda texts: grammatical(texts).float()
strengths, sampling = (1, 2, 4, 8), dict(spec=trainer.sampling_spec, figures=figures)
few, many = ([trainer.prompt] * n for n in ((96, 128) if on_reel else (8, 8)))
sweep = steering_sweep(base, vectors, strengths, few, controls=0, seed=5, **sampling)
means = {(r.site, r.alpha): {k: v.mean().item() for k, v in r.figures.items()} for r in sweep}
best_site, best_alpha = max(means, key=lambda place: means[place]["true_reward"])
strongest = {name: f"{value:.2f}" for name, value in means[best_site, 8].items()}
print(f"best: {short_site(best_site)}, alpha {best_alpha}; the same with alpha 8: {strongest}")
heatmap(
    [[means[site, alpha]["true_reward"] for alpha in strengths] for site in sites],
    [short_site(site) for site in sites],
    [f"alpha {alpha}" for alpha in strengths],
    "true reward of the base model with a steering vector",
    limits=(0, 1),
)

# %% [markdown]
# We *chose* this hook point and alpha because they did best on these texts, so the result may be too optimistic. Let's
# repeat the experiment with a new seed, and compare our vector with 10 random vectors of the same norm. We also
# subtract our vector from the tuned model's activations.
#
# (4 s on one core)


# %%
def steered(policy, alpha: float | int, controls: int = 0) -> list[Float[Tensor, " n"]]:
    """Return the true rewards with the vector added, and with each random vector."""
    one = {best_site: vectors[best_site]}
    options = sampling | {"figures": {"true_reward": score}}
    found = steering_sweep(policy, one, [alpha], many, controls=controls, seed=6, **options)
    return [row.figures["true_reward"] for row in found]


(start,), (end,) = steered(base, 0), steered(tuned, 0)
added, *random = (recovered_fraction(end, start, x) for x in steered(base, best_alpha, 10))
undone = recovered_fraction(start, end, steered(tuned, -best_alpha)[0])
if added.value is None:
    print("both models have nearly the same reward, so the fraction is undefined")
else:
    way = {"the vector": added, "best of 10 random": max(random, key=lambda x: x.value)}
    way = {n: x.value.item() for n, x in (way | {"subtracted from tuned": undone}).items()}
    over_seeds.compare("fraction of the rise", way)
    half = way["the vector"]
    found = "about half" if half < 2 / 3 else "over two thirds"
    found = "less than a third" if half < 1 / 3 else found
    predictions.compare("fraction of the rise by steering", how_far, found)

# %% [markdown]
# Even at its best, the vector recovers only 38% of the rise in true reward (28% to 43% across the three seeds), and
# random vectors of the same norm recover nothing. So the change *contains* a steering vector, but it is more than that:
# over half of the rise is missing, and a larger alpha destroys the text. A single vector can't depend on the context,
# such as whether an adjective comes after "was" or "wasn't".
#
# The reward model doesn't detect this damage. At the same hook point with alpha 8, the texts have a reward of 0.99,
# while their true reward is 0.00. In other words, steering can hack a reward, just as training can. That's why we
# measured the true reward.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# Add `base_model="reel-nano-b"` to `SETTINGS`. Which of this lesson's rankings still hold with another base model? The appendix
# {lesson:weights_and_paths} examines the rank of the weight change, as well as models in between the base and tuned weights.
#
# In the next lesson, {lesson:preferences}, you'll learn the reward itself from pairwise comparisons.
