# %% [markdown]
# # 09 What RLHF changed
#
# A run is over. It left two checkpoints, the model before and the model after, and the question what
# happened between them. "It has learned to be positive" is not an answer. *Where* in the text does it
# choose differently, which parts and which weights *cause* that, and is there a simpler description,
# such as one vector that is added?
#
# **Afterwards you can**
# - draw the KL divergence token by token beside the best possible policy's, and prove by forcing a token
#   why a policy leaves a word out,
# - split the change of a logit difference exactly over the parts of the model and over its causes,
# - patch activations between two checkpoints and between minimal pairs, and say what that proves,
# - graft weights, cut a change down to a few directions, and walk along the line between two models,
# - test the claim that a fine-tuned model is the old one plus a steering vector.
#
# **What to inspect**
#
# | question | look at | what it is |
# |---|---|---|
# | where does it choose differently? | KL by slot, beside the exact optimum | a description: it sums to the KL per sequence |
# | why does it leave out a word? | values behind the word, forced | an intervention on the text |
# | how did the weights change? | norms, spectra, unchanged entries | a description |
# | which outputs make up the shift? | own output, scale and read-out of each part | an exact sum at one state |
# | which activations cause it? | patches into the base and out of the tuned model, at two words | an intervention on activations |
# | which weights cause it? | grafts, ranks, the line | an intervention on weights |
# | is it a steering vector? | true reward over layer and strength | an intervention on activations |
#
# A description says what is different. Only an intervention says what *makes* a difference. And one run is
# one run: tables that end in "largest in" show three runs that differ in the seed alone, and so whether
# an order is a finding.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 55 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (6 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
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
from rlhf_lab.course.bugs import broken_parts, culprit, reveal
from rlhf_lab.diffing import (
    PatchPlace,
    Side,
    graft_groups,
    mean_difference,
    part_places,
    patch_activations,
    patch_path,
    path,
    steering_sweep,
    transplant,
    truncate,
)
from rlhf_lab.diffing.effects import layer_groups
from rlhf_lab.diffing.logit_shift import ends_of
from rlhf_lab.functional import (
    Interval,
    bootstrap_interval,
    bootstrap_means,
    generated_logits,
    kl_per_sequence,
    kl_per_token,
    log_probs,
    masked_mean,
    recovered_fraction,
)
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models import HookedTransformer
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.organism import true_reward, grammatical, optimal_policy, state_values
from rlhf_lab.organism.lexicon import ADJECTIVES, WORD_IDS, flat
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.probes.logit_shift import SITES, Attribution, residual_components, single_token
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.probes.weight_delta import as_matrix, spectrum
from rlhf_lab.sampling import sample
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import Html, bars, color_key, curves, sparkline, tokens_html

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
    keep_checkpoints=None,  # all of them: several are looked at below
)
predictions = Predictions()
over_seeds = SeedFigures("what_rlhf_changed", SETTINGS)

# %% [markdown]
# The line `SETTINGS` decides what all of this runs on: Reel, a tiny language of movie reviews. On a
# GPU with a network, write `preset="gpt2-medium"` instead, and it runs on GPT-2-medium; what takes the
# truth of the grammar is left out there, and the cells say so. The text between the cells tells
# what came out on Reel; GPT-2 has other layers and heads, and learns more slowly: raise
# `total_phases`, too.
#
# ## Two checkpoints
#
# Train, and then forget the trainer. A run's folder holds the weights after 0, 1, 2, 3, 5, ... phases
# and the last ones. What a text is worth is its **true reward**, the exact probability that the review is
# meant positively; the classifier that the run was paid by has no say in what follows.
#
# (10 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("run"))
reports = trainer.train()
print("reward", sparkline([r.mean_reward for r in reports]), f"{reports[-1].mean_reward:.3f}")

run = Run(trainer.run.path)
base, tuned = (run.policy(which).to(trainer.device) for which in (0, "last"))
before, after = base.base_model, tuned.base_model
tokenizer, prefix_len, on_reel = trainer.tokenizer, len(trainer.prompt), trainer.speaks_reel
truth = ReelTruth.of_reward(args.reward_fn) if on_reel else None
worth = true_reward if on_reel else trainer.reward_fn
words = ("loved", "hated") if on_reel else (" good", " bad")
ids = tuple(single_token(tokenizer, word) for word in words)
n_texts = 256 if on_reel else 16


def write(policy, n: int = n_texts, seed: int = 0):
    """Let a policy write n texts, with the same noise for each policy."""
    generator = torch.Generator().manual_seed(seed)
    prompts, spec = [trainer.prompt] * n, trainer.sampling_spec
    return sample(policy, prompts, spec, generator)


def worth_of(model: HookedTransformer, n: int = n_texts, seed: int = 1) -> Float[Tensor, " n"]:
    """What each text of a model is worth; the noise is the same for each model."""
    return worth(write(TransformerWithValueHead(model), n, seed).texts(tokenizer)).cpu()


@torch.no_grad()
def logits_of(policy, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch gen d_vocab"]:
    """A policy's logits before each generated token."""
    return generated_logits(policy(tokens)[0], prefix_len) / args.temperature


own = write(tuned)
show_table(["text"], [[text] for text in own.texts(tokenizer)[:3]])
at_base, at_tuned = worth_of(before), worth_of(after)
show_intervals(
    "model", {"true_reward": {"old": bootstrap_means(at_base), "new": bootstrap_means(at_tuned)}}
)

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
kl = kl_per_token(*(log_probs(logits_of(model, own.tokens)) for model in (tuned, base)))
by_slot = masked_mean(kl, own.mask, dim=0)
gen_len = kl.shape[1]
slots = truth.slot_names(prefix_len + gen_len) if truth else [str(i) for i in range(gen_len)]
slots = slots[-gen_len:]
series = {"this run": by_slot.tolist()}
per_text = kl_per_sequence(kl, own.mask)
show_intervals("KL per sequence, nats", {"": {"this run": bootstrap_means(per_text)}})

if truth is None:
    print("no exact optimum here")
else:
    reached = worth(own.texts(tokenizer)).mean().item()
    betas = [0.05 * 1.05**i for i in range(60)]
    beta = min(betas, key=lambda b: abs(truth.optimum(b).reward - reached))
    best = optimal_policy(truth.policy, truth.reward, beta)
    best_kl = best.kl_by_position(truth.policy)
    series["best policy of the same reward"] = best_kl[prefix_len - 1 :].tolist()
    print(f"the best policy of true reward {reached:.3f} needs {best_kl.sum():.3f} nats")
    kinds = ("ADJ", "CONN", "COP", "VERB", "OPEN")
    found = {
        kind: [
            sum(x for slot, x in zip(slots, y, strict=True) if slot.startswith(kind))
            for y in series.values()
        ]
        for kind in kinds
    }
    show_table(["slots, all clauses together", *series], [[kind, *x] for kind, x in found.items()])
    spent = {kind: x[0] for kind, x in found.items()}
    predictions.compare("most KL at", most_kl_at, max(spent, key=spent.get))
    predictions.compare("KL at the copula", kl_at_copula, "some" if spent["COP"] > 0.01 else "none")
    over_seeds.compare("KL, nats per sequence", spent)
    ratio = (per_text.mean() / best_kl.sum()).item()
    over_seeds.compare("KL", {"times the best policy's": ratio})
bars(slots, series, "KL from the old model by slot", "nats per token")

# %% [markdown]
# *What to look for in the figure: slots where this run's bar is high and the best policy's is 0.*
# The run spends about twice the KL that its true reward is worth. Adjectives and the verdict are where the
# best policy spends too. At the connectors the best policy spends a little, and this run next to
# nothing. But the best policy spends *nothing* on the copula, and this run spends more there than
# on the verdict, in each of the seeds: it has taken a detour. (The opening words, a matter of
# style, were all but left alone, as they should be.)
#
# ### A detour, proved by forcing a token
#
# The grammar says "wasn't" one time in five, and to say it costs nothing if the adjective is chosen
# to match. So why would a policy pay for leaving it out? A table of rewards with and without a
# negation would not tell: the texts that have one may differ in other ways. Force the word instead.
# Take openings of the grammar up to the first copula, write "was" or "wasn't" there *whatever the
# policy wanted*, and let the policy go on. The difference of the true reward is $V^\pi(\dots \text{was}) -
# V^\pi(\dots \text{wasn't})$, what the word itself costs this policy; the same openings and the
# same noise stand on both sides. What will it be before training, and what after 8 of the phases?
#
# (3 s on one core)

# %%
gap_at_start = "about 0"  # predict: "below -0.1", "about 0" or "above 0.1"
gap_in_training = "above 0.1"  # predict: "below -0.1", "about 0" or "above 0.1"


# %%
def forced(policy, word: str) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """The true reward of what a policy writes behind a copula that it did not choose, and whether the adjective
    that follows is a nice one.
    """
    prompts = [[*row, WORD_IDS[word]] for row in openings.tolist()]
    spec = replace(trainer.sampling_spec, gen_len=truth.grammar.seq_len - len(prompts[0]))
    generator = torch.Generator().manual_seed(2)
    written = sample(policy, prompts, spec, generator)
    nice = torch.isin(written.tokens[:, openings.shape[1] + 2].cpu(), nice_words)
    return worth(written.texts(tokenizer)), nice.float()


def share_of_negations(policy) -> Interval:
    """How many of its copulas are "wasn't"."""
    texts = write(policy, n=512, seed=3).texts(tokenizer)
    negated = torch.tensor([[text.count("wasn't"), text.count("was ")] for text in texts])
    counts = negated[:, 0].double(), negated.sum(1).double()
    return bootstrap_means(*counts, statistic=lambda some, every: some / every)


# %%
if truth is None:
    print("no negation to look at here")
else:
    openings = truth.reviews(512, seed=3)[0][:, : truth.grammar.slot("COP", 0)]
    nice_words = torch.tensor([WORD_IDS[word] for word in flat(ADJECTIVES[1])])
    columns = {name: {} for name in ('share of "wasn\'t"', "nice after was", "nice after wasn't")}
    gaps = {}
    for which in (*(phase for phase in (0, 2, 8) if phase < len(reports)), "last"):
        policy = run.policy(which).to(trainer.device)
        (with_was, nice_was), (with_not, nice_not) = (forced(policy, w) for w in ("was", "wasn't"))
        cells = share_of_negations(policy), bootstrap_means(nice_was), bootstrap_means(nice_not)
        for column, found in zip(columns.values(), cells, strict=True):
            column[f"phase {which}"] = found
        gaps[f"phase {which}"] = bootstrap_means(with_was - with_not)
    columns["V(was) - V(wasn't)"] = gaps
    show_intervals("policy", columns, "reviews")
    for name, policy in {"the grammar": truth.policy, "the best policy": best}.items():
        behind = [
            torch.cat([openings, torch.full((len(openings), 1), WORD_IDS[word])], 1)
            for word in ("was", "wasn't")
        ]
        values = [state_values(policy, truth.reward, rows)[0][:, -1] for rows in behind]
        print(f"exactly, for {name}: V(was) - V(wasn't) = {(values[0] - values[1]).mean():+.3f}")


# %%
if truth is not None:

    def sized(gap: Interval) -> str:
        return "above 0.1" if gap.value > 0.1 else "below -0.1" if gap.value < -0.1 else "about 0"

    middle = "phase 8" if "phase 8" in gaps else "phase last"
    predictions.compare("V(was) - V(wasn't) before training", gap_at_start, sized(gaps["phase 0"]))
    predictions.compare(f"V(was) - V(wasn't), {middle}", gap_in_training, sized(gaps[middle]))
    over_seeds.compare("V(was) - V(wasn't)", {at: gap.value.item() for at, gap in gaps.items()})
    shares = columns['share of "wasn\'t"']
    over_seeds.compare('share of "wasn\'t"', {at: x.value.item() for at, x in shares.items()})

# %% [markdown]
# Read the last column downwards. To the old model the two words are worth the same, as they are,
# exactly, to the grammar and to the best policy. Two phases later "wasn't" costs a tenth of the
# the true reward and more, while the policy still writes it as often as before; only then does it become rare.
# And the columns in the middle say why it costs: the policy has learned to write nice adjectives,
# behind "wasn't" nearly as much as behind "was", where it should have learned the opposite. *Wasn't
# lovely* is not praise.
#
# What is proved, and what is not: that "wasn't" costs *this* policy the true reward is proved, since nothing
# but the word was changed. That it became rare *because* it costs is what the policy gradient would
# do, and the order in time agrees with it; it was not tested by an intervention on training. A
# policy that matched its adjectives would have kept its "wasn't". That is what a detour looks like
# in a KL map: a change that the goal did not ask for, but the way there did.
#
# *What to look for in the four texts below: the color at each "was", and at the adjectives.*

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
# ## Which weights? A description
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
old_weights, new_weights = (
    {name: weight.detach() for name, weight in model.named_parameters()}
    for model in (before, after)
)
everything = [torch.cat([w.flatten() for w in ws.values()]) for ws in (old_weights, new_weights)]
exactly, coarsely = unchanged_fraction(*everything)
print(f"unchanged: {exactly:.2%} in float32, {coarsely:.2%} after rounding to bfloat16")
share = "less than 10 %" if exactly < 0.1 else "10 to 70 %" if exactly < 0.7 else "more than 70 %"
predictions.compare("weights that have not changed", unchanged, share)

# %% [markdown]
# On Reel no weight at all is as it was, and in bfloat16 only a few in a hundred are. So the
# observation does not carry over: it needs steps so small that bfloat16 rounds them away, and
# Reel's learning rate of 3e-4 is far above a large model's. Unchanged entries say as much about
# precision and step size as about RL.
#
# If not few entries, then few *directions*? The delta of a matrix, after minus before, has singular
# values: how much it stretches each of its directions. Two numbers sum them up.

# %%
from rlhf_lab.probes.weight_delta import describe_spectrum  # exercise

# %% [markdown]
# The rank of a matrix can be as high as its shorter side: `d_model` or `d_head` in most. How many directions do their deltas really have, by the
# stable rank? And in which kind of matrix is the delta largest, compared with the matrix?

# %%
typical_rank = "1 to 6"  # predict: "1 to 6", "6 to 30" or "more than 30"
largest_relative = "attention"  # predict: "attention", "MLP" or "embedding"

# %%
rows = []
for name, weight in old_weights.items():
    if weight.ndim < 2 or ".b_" in name:
        continue
    delta = as_matrix(name, new_weights[name] - weight)
    stable_rank, k90 = describe_spectrum(spectrum(delta)[0])
    relative = (delta.norm() / weight.norm()).item()
    rows.append([name, delta.norm().item(), relative, stable_rank, k90])
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

groups = layer_groups(before)
members = {name: [weight for weight, _ in groups.of(name)] for name in groups.names}
length = lambda ws, names: torch.cat([ws[name].flatten() for name in names]).norm().item()
deltas = {name: new_weights[name] - weight for name, weight in old_weights.items()}
relative = {
    part: length(deltas, names) / length(old_weights, names) for part, names in members.items()
}
over_seeds.compare("norm of the delta over the part's", relative)

# %% [markdown]
# A few directions, in every matrix. (The same work on large models reports deltas of nearly full
# rank. Rank counts every direction however weak; the stable rank asks for strength. Say which one
# you mean.) Attention has changed most for its size, and the read-out, which is the final norm and
# the unembedding, least.
#
# All of this describes *how much* changed. It does not say what any of it does. Before you read on,
# write down which part's change you would expect to earn the most true reward; the answer comes under
# "Which weights cause it?".
#
# ## Which part changed its mind? A sum at one state
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
# words. Which parts will have the largest share of the shift: the MLP or all heads together, of block 0
# or of block 1? Block 1 is the last one, directly before the unembedding.

# %%
biggest_part = "L0 mlp"  # predict: "L0 heads", "L0 mlp", "L1 heads" or "L1 mlp"

# %%
if truth is not None:
    verdict = truth.grammar.slot("VERB") - 1
    text, positive = truth.reviews(256, seed=0)
    text = text[:, : verdict + 1].to(trainer.device)
else:
    text = write(base).tokens[:, : prefix_len + 4]
old_acts, new_acts = (capture_activations(model, text, SITES, pos=-1) for model in (before, after))
old, new = (
    attribute_logits(model, acts, *ids) for model, acts in ((before, old_acts), (after, new_acts))
)
moved = new.rows - old.rows
measured = new.logit_difference - old.logit_difference
error = (moved.sum(0) - measured).abs().max().item()
print(f"measured shift {bootstrap_interval(measured)}; rows sum to it within {error:.0e}")
shift = dict(zip(new.components, moved.mean(1).tolist(), strict=True))
order = sorted(shift, key=lambda name: -abs(shift[name]))[:8]
at = {name: new.components.index(name) for name in order}
by_row = lambda table: {name: bootstrap_means(table[at[name]]) for name in order}
show_intervals(
    "part",
    {"before": by_row(old.rows), "after": by_row(new.rows), "shift": by_row(moved)},
    "reviews",
)
last_blocks = [f"L{block}" for block in range(before.cfg.n_layers)][-2:]
kinds = {f"{block} mlp": shift[f"{block} mlp"] for block in last_blocks}
for block in last_blocks:
    kinds[f"{block} heads"] = sum(x for name, x in shift.items() if name.startswith(f"{block}H"))
if on_reel:
    predictions.compare("most of the shift stands with", biggest_part, max(kinds, key=kinds.get))
over_seeds.compare("rows of the shift", kinds)

# %% [markdown]
# What would a tool have said that takes gain and bias as folded away? Leave them out, and see how far
# the rows are from the truth.

# %%
names, pieces = residual_components(after, new_acts)
u = (after.unembed.W_U[:, ids[0]] - after.unembed.W_U[:, ids[1]]).double()
centered = pieces - pieces.mean(-1, keepdim=True) if is_centered(after.ln_final) else pieces
folded = centered @ u / new_acts["ln_final.hook_scale"][:, 0]
off = (folded.sum(0) - new.logit_difference).abs()
print(f"without gain and bias: off by {off.mean():.2f} nats on average, {off.max():.2f} at most")
print(f"with them: off by {new.error:.0e} at most")

# %% [markdown]
# ### What the single column hides
#
# A row of that table is `new - old` of a product: what the part writes, times one over the norm's
# scale, times the read-out $q$ (the gain times $u$). All three have changed, and the column charges
# everything to the part. Split it. With $k$ the part's output, $s$ one over the scale, 0 the old
# and 1 the new model,
#
# $$k_1 q_1 s_1 - k_0 q_0 s_0 = \underbrace{\text{own output}}_{\Delta k} +
# \underbrace{\text{norm's scale}}_{\Delta s} + \underbrace{\text{read-out}}_{\Delta q}$$
#
# where each factor gets what its change adds, averaged over all orders in which the three can
# change (its Shapley value). In one fixed order the sum would be exact as well, and the shares a
# matter of taste. A part's own output changes for two reasons, too: its own weights, and what it
# reads. What a `ModelEnd` and a `ShiftCauses` hold, `ModelEnd?` and `ShiftCauses?` tell in a cell of their own.

# %%
from rlhf_lab.diffing.logit_shift import split_shift  # exercise

# %% [markdown]
# Over all parts together, which cause is the largest? And of the largest row above, what share is
# the part's own output?

# %%
largest_hidden = "own output"  # predict: "own output", "norm's scale" or "read-out"
own_share = "70 to 90 %"  # predict: "more than 90 %", "70 to 90 %" or "less than 70 %"


# %%
def causes_of(model0: HookedTransformer, model1: HookedTransformer) -> dict[str, Tensor]:
    """The causes of the shift between two models, a row per component."""
    acts = tuple(capture_activations(model, text, SITES, pos=-1) for model in (model0, model1))
    ends = ends_of((model0, model1), acts, text, -1, ids)
    found = split_shift(*ends, is_centered(model0.ln_final))
    return {
        "own output": found.own_weights + found.inherited,
        "of it inherited": found.inherited,
        "norm's scale": found.scale,
        "read-out": found.read_out,
    }


causes = causes_of(before, after)
exclusive = ("own output", "norm's scale", "read-out")
error = (sum(causes[name] for name in exclusive) - moved).abs().max()
print(f"own output, scale and read-out sum to the rows above within {error:.0e}")
show_intervals("part", {name: by_row(cause) for name, cause in causes.items()}, "reviews")
total = {name: causes[name].sum(0).mean().item() for name in causes}
over_seeds.compare("causes, all parts together", total)
leading = max(("own output", "norm's scale", "read-out"), key=lambda name: abs(total[name]))
predictions.compare("largest cause", largest_hidden, leading)
first = order[0]
ours = causes["own output"][at[first]].mean().item() / shift[first]
said = "more than 90 %" if ours > 0.9 else "70 to 90 %" if ours > 0.7 else "less than 70 %"
print(f"of the row of {first}, its own output is {ours:.0%}")
predictions.compare("own output's share of the largest row", own_share, said)

# %% [markdown]
# The three columns sum to the single one exactly, and say what it hides. The row of the largest
# part holds a good piece of read-out: the part writes a large vector, and any turn of the read-out
# shows in it. Part of the heads' own output is *inherited*: it would be there with their old
# weights, since what they read has changed. And the norm's scale takes a little back from all.
#
# Is the split right, and not only exact? Plant a change whose cause is known: the old model with
# nothing but the new read-out. Every own output must be 0 then. What does the single column say?

# %%
only_read_out = graft_groups(before, after, groups, ["read-out"])
planted = causes_of(before, only_read_out)
blamed = sum(planted[name] for name in exclusive)
worst = blamed.mean(1).abs().argmax()
own_part = planted["own output"].abs().max().item()
print(f"read-out alone exchanged: the single column has {new.components[worst]} first,")
print(f"with {blamed.mean(1)[worst]:+.2f}; own outputs are {own_part:.1f} on every row and review")

# %% [markdown]
# ## Patching: what causes the shift
#
# The single column would have blamed a part that was not touched at all. The split does not; but it
# is a sum at one position, with everything before it as it happened to be. It does not say what
# would happen *if* a part were exchanged. For that, exchange it: run one model and put the other's
# activation in its place. Rules that keep this honest (Heimersheim and Nanda 2024,
# arXiv:[2404.15255](https://arxiv.org/abs/2404.15255); Zhang and Nanda 2023,
# arXiv:[2309.16042](https://arxiv.org/abs/2309.16042)):
#
# 1. Measure a logit difference and not a probability, which saturates.
# 2. Go both ways. New into old asks what *suffices*, old into new what is *needed*; with redundant
#    or with cooperating parts the two differ.
# 3. Say at which positions. A patch at the last one leaves out what the part did earlier in the
#    text.
# 4. Patch sets of parts too: effects of single parts need not add up.
# 5. Give an interval, and a fraction of an effect that is there at all: `recovered_fraction`, which
#    you wrote in {lesson:the_policy}, does both.
#
# Both models read the same reviews; the fraction is of the shift at the verdict. Which single part
# brings most of it into the old model, when it is patched at all positions? And how does that
# compare with patching the same part at the last position only?
#
# (4 s on one core)

# %%
at_all = "L0 mlp"  # predict: "a head of L0", "L0 mlp", "a head of L1" or "L1 mlp"
all_over_verdict = "about twice"  # predict: "about the same", "about twice" or "over five times"

# %%
n_layers = before.cfg.n_layers
places = part_places(before) | {
    f"all heads of L{layer}": PatchPlace(f"blocks.{layer}.hook_attn_out")
    for layer in range(n_layers)
}
places["all up to L0"] = PatchPlace("blocks.0.hook_resid_post")
places["last residual"] = PatchPlace(f"blocks.{n_layers - 1}.hook_resid_post")
if not on_reel:  # hundreds of heads
    places = {name: place for name, place in places.items() if place.head is None}
only_last = {name: place._replace(positions=(-1,)) for name, place in places.items()}
sides = Side(before, text), Side(after, text)
patched = {
    "into the old, all positions": patch_activations(sides[0], sides[1], places, -1, ids),
    "into the old, last position": patch_activations(sides[0], sides[1], only_last, -1, ids),
    "out of the new, all positions": patch_activations(sides[1], sides[0], places, -1, ids),
}
shares = {
    how: {
        name: recovered_fraction(found.end, found.start, row)
        for name, row in zip(found.names, found.patched, strict=True)
    }
    for how, found in patched.items()
}
show_intervals("part", shares, "reviews")
value = lambda found: float("nan") if found.value is None else found.value.item()
single = [name for name in part_places(before) if name in places]
together = [name for name in places if name not in single]
for how, found in shares.items():
    over_seeds.compare(f"{how}: single parts", {name: value(found[name]) for name in single})
    over_seeds.compare(f"{how}: together", {name: value(found[name]) for name in together})
into, at_last = ({name: value(shares[how][name]) for name in single} for how in [*shares][:2])
leader = max(single, key=lambda name: into[name])
if on_reel:
    kind = f"a head of {leader[:2]}" if "H" in leader else leader
    predictions.compare("largest single part, all positions", at_all, kind)
    ratio = into[leader] / at_last[leader]
    said = "about the same" if ratio < 1.4 else "about twice" if ratio < 5 else "over five times"
    predictions.compare("all positions over the last one", all_over_verdict, said)
    sums = {how: sum(value(found[name]) for name in single) for how, found in shares.items()}
    show_table(["single parts, added up", "share"], sums.items())

# %% [markdown]
# Compare the columns. The leading part brings about half as much when it is patched at the last
# position only: the other half it does at earlier words, through whatever reads them there. Heads
# of the last block have no later reader but the last position itself, so that both columns are the
# same for them. So the *position set can decide who leads*: at the last position the heads of the
# last block together bring more than the first MLP in this run (in two of the three seeds), and at
# all positions less (in all three). The last residual brings all but the read-out's share. Out of
# the new model the single parts add up to more than into the old one: a part is needed more than it
# suffices. And the sum of the section before is no substitute: it puts the heads of the last block
# first in two seeds of three, where the patch at all positions has the first MLP ahead in every
# seed.
#
# (Which heads they are is a matter of this base model: heads have no names in common. An order is a
# finding only where "largest in" says so.)
#
# ### The same at an adjective
#
# So much for the verdict. But most of the KL is spent on adjectives (the first figure). Take the clause whose adjective has
# most of it, reviews with "was" in that clause, and the state before the adjective. The pair of words is the one
# whose probability rises most and the one whose probability falls most. Which part leads here, when it is patched at all positions?

# %%
leads_at_adjective = "L0 mlp"  # predict: "a head of L0", "L0 mlp", "a head of L1" or "L1 mlp"

# %%
if truth is None:
    print("no adjectives to look at here")
else:
    at_slot = max((i for i, s in enumerate(slots) if "ADJ" in s), key=lambda i: by_slot[i].item())
    reviews = truth.reviews(512, seed=4)[0].to(trainer.device)
    plain = reviews[:, prefix_len + at_slot - 2] == WORD_IDS["was"]
    openings = reviews[plain][:256, : prefix_len + at_slot]
    with torch.no_grad():
        chances = [model(openings)[:, -1].softmax(-1).mean(0) for model in (before, after)]
    gained = chances[1] - chances[0]
    pair = int(gained.argmax()), int(gained.argmin())
    up, down = (tokenizer.decode([word]).strip() for word in pair)
    print(f'before {slots[at_slot]}: "{up}" {gained.max():+.3f}, "{down}" {gained.min():+.3f}')

# %%
if truth is not None:
    there = [
        attribute_logits(model, capture_activations(model, openings, SITES, pos=-1), *pair)
        for model in (before, after)
    ]
    row_of = dict(zip(there[0].components, there[1].rows - there[0].rows, strict=True))
    patched_there = patch_activations(
        Side(before, openings), Side(after, openings), places, -1, pair
    )
    effect = patched_there.end - patched_there.start
    shares_there = {
        name: recovered_fraction(patched_there.end, patched_there.start, row)
        for name, row in zip(patched_there.names, patched_there.patched, strict=True)
    }
    rows_there = {name: bootstrap_means(row_of[name]) for name in places if name in row_of}
    print(f"shift in nats: {bootstrap_means(effect)}")
    show_intervals(
        "part", {"row of the sum, nats": rows_there, "patched in, share": shares_there}, "reviews"
    )
    over_seeds.compare(
        "patched in before an adjective: single parts",
        {name: value(shares_there[name]) for name in single},
    )
    leader_there = max(single, key=lambda name: value(shares_there[name]))
    kind = f"a head of {leader_there[:2]}" if "H" in leader_there else leader_there
    predictions.compare("largest single part before the adjective", leads_at_adjective, kind)

# %% [markdown]
# Before the first adjective the shift is the same in nearly every review (hence the narrow intervals): nothing has been said
# yet, and the new model prefers its nice word whatever the movie's aspect is. The first MLP leads here, too, with more of the
# shift than at the verdict. The second place is another: here it is the MLP of the last block, which brings nothing at
# the verdict, while the heads of the last block, which bring a good part there, do little. Both hold in each of
# the seeds. An adjective is chosen from what stands directly before it, and a verdict from clauses that heads
# must fetch: a change of one policy, and two mechanisms, so that what was found at the verdict is not yet
# an account of most of the KL.
#
# And compare the two columns: in the sum the MLP of the last block stands nearly as high as the first, and patched in it brings
# less than half as much. A patch of the first one counts what it brings about through later parts as well; the sum
# books that where it is written.
#
# ### Along which paths?
#
# Half of the first MLP's effect comes from earlier positions or goes through later parts. Which
# ones? Path patching lets a change of the sender reach the logits along one path alone, with every
# other head and MLP held at what it was (Wang et al. 2022,
# arXiv:[2211.00593](https://arxiv.org/abs/2211.00593)). Where does most of it go?

# %%
which_path = "through the heads behind it"  # predict: "directly", "through the heads behind it" or "through the MLP behind it"

# %%
early = max((name for name in single if name.startswith("L0")), key=lambda name: into[name])
routes = {
    "directly": PatchPlace(f"blocks.{n_layers - 1}.hook_resid_post"),
    "through the heads behind it": PatchPlace("blocks.1.attn.hook_z"),
    "through the MLP behind it": PatchPlace("blocks.1.hook_mlp_out"),
}
through = {}
for route, place in routes.items():
    found = patch_path(*sides, places[early], [place], -1, ids)
    through[route] = recovered_fraction(found.end, found.start, found.patched[0])
show_intervals(f"from {early}", {"share of the shift": through}, "reviews")
predictions.compare(
    f"most of {early}'s change goes", which_path, max(through, key=lambda k: value(through[k]))
)
over_seeds.compare(
    "the first MLP's change", {route: value(share) for route, share in through.items()}
)

# %% [markdown]
# ### Minimal pairs: what does the model read?
#
# Directly means by the residual stream, past everything; through the heads means by what they read
# of it, at any position, and by whatever reads *them*. The path through the next MLP goes the other
# way: it undoes some of the rest. (Paths overlap in what comes behind them, so they need not add
# up.)
#
# Patching between two *models* asks what training changed. Patching between two *texts* in one
# model asks what carries a difference of the texts. A minimal pair: the same review with all three
# adjectives turned into their opposites, "brilliant" into "awful". Each pair's better twin is the
# donor, the worse one the receiver. How strongly does the lean to "loved" differ between twins,
# before and after training?

# %%
sensitivity = "less"  # predict: "less", "as much" or "more"

# %%
if truth is None:
    print("no dictionary of opposites here")
else:
    swap = torch.arange(before.cfg.d_vocab)
    pairs = [
        zip(good, bad, strict=True) for good, bad in zip(ADJECTIVES[1], ADJECTIVES[-1], strict=True)
    ]
    for good, bad in (pair for tier in pairs for pair in tier):
        swap[WORD_IDS[good]], swap[WORD_IDS[bad]] = WORD_IDS[bad], WORD_IDS[good]
    twin = swap[text]
    belief, other = (truth.beliefs(rows)[0][:, -1] for rows in (text, twin))
    is_better = (belief > other)[:, None]
    better, worse = torch.where(is_better, text, twin), torch.where(is_better, twin, text)
    kept, effects = {}, {}
    for label, model in {"before": before, "after": after}.items():
        found = patch_activations(Side(model, worse), Side(model, better), only_last, -1, ids)
        effects[label] = found.end - found.start
        kept[label] = {
            name: recovered_fraction(found.end, found.start, row)
            for name, row in zip(found.names, found.patched, strict=True)
        }
        effects[f"{label}, after the worse twin"] = found.start
        effects[f"{label}, after the better twin"] = found.end
    show_intervals("part, at the last position", kept, "pairs")
    lean = {name: bootstrap_means(rows) for name, rows in effects.items()}
    show_intervals("lean to loved", {"nats": lean}, "pairs")
    over_seeds.compare("lean, nats", {name: found.value.item() for name, found in lean.items()})
    ratio = lean["after"].value.item() / lean["before"].value.item()
    over_seeds.compare("effect of the twins", {"after over before": ratio})
    said = "less" if ratio < 0.9 else "as much" if ratio < 1.1 else "more"
    predictions.compare("the new model reads the adjectives", sensitivity, said)

# %%
if truth is not None:
    edges = torch.linspace(0, 1, 9)
    place = torch.bucketize(belief.contiguous(), edges[1:-1])
    middle = [i for i in range(8) if (place == i).sum() >= 8]
    x = [belief[place == i].mean().item() for i in middle]
    ys, bands = {}, {}
    for label, attribution in {"before": old, "after": new}.items():
        means = [bootstrap_means(attribution.logit_difference[place == i]) for i in middle]
        ys[label] = (x, [m.value.item() for m in means])
        bands[label] = tuple([getattr(m, end).item() for m in means] for end in ("low", "high"))
    title = "Lean to loved over what the review says"
    axes = "exact probability that it is positive", "nats"
curves(ys, title, *axes, bands) if truth is not None else print("no posterior here")

# %% [markdown]
# *What to look for in the figure: after training the curve stands higher everywhere, and rises
# less.* Behind the worse twin the old model leans to "hated", and the new one to "loved", if only
# just in one of the seeds: the threshold has moved. The twins are closer together than before, by
# anything from a few percent to a third, as the range of "after over before" shows; so how much
# *less* the new model makes of what was said is not settled by three seeds, only that it makes no
# more of it. It was paid for saying nice things, not for reading well. The table names the parts
# that carry the difference, at the last position; a negative share is a part that works against the
# others. (Shares are of each model's own effect.)
#
# ## Which weights cause it?
#
# Activations say through which outputs a change reaches one word of one kind of text. The weights
# are what was trained, and the true reward is what they were trained for (or should have been). So put the new
# weights of one part into the old model, let it write, and see what it earns.

# %%
from rlhf_lab.diffing.weights import graft  # exercise

# %% [markdown]
# Again there are two directions: put one part into the old model, or take it out of the new one.
# And there is the Shapley value, a part's average over all orders in which parts can be put in,
# from every coalition of the parts. Look at the norms of the deltas above once more. Which kind of part earns
# most when it is put in? And taken out one by one, how much of the gain do all parts together lose?
#
# (6 s on one core)

# %%
best_graft = "an MLP"  # predict: "embed", "an attention", "an MLP" or "read-out"
sum_taken_out = "less than a third"  # predict: "less than a third", "about half" or "about all"

# %%
put_in, taken_out = {}, {}
for part, names in members.items():
    belongs = set(names).__contains__
    put_in[part] = bootstrap_means(worth_of(graft(before, after, belongs)) - at_base)
    taken_out[part] = bootstrap_means(at_tuned - worth_of(graft(after, before, belongs)))
gain = at_tuned - at_base
columns = {"put into the old": put_in, "taken out of the new": taken_out}
if on_reel:
    every = transplant(before, after, groups, worth, n=64, seed=1)
    shapley = every.shapley()
    columns[f"Shapley, n = {every.rewards.shape[1]}"] = {
        part: shapley[i] for i, part in enumerate(every.groups)
    }
show_intervals("part of the change", columns)
print(f"all of it: {bootstrap_means(gain)}")
for how, found in columns.items():
    over_seeds.compare(how, {part: x.value.item() for part, x in found.items()})
sums = {how: sum(x.value.item() for x in found.values()) for how, found in columns.items()}
over_seeds.compare("parts added up", sums | {"all of it": gain.mean().item()})
top = max(put_in, key=lambda part: put_in[part].value.item())
kind = {"attn": "an attention", "mlp": "an MLP"}.get(top.split()[-1], top)
predictions.compare("put in, it earns most", best_graft, kind)
lost = sums["taken out of the new"] / gain.mean().item()
said = "less than a third" if lost < 1 / 3 else "about half" if lost < 2 / 3 else "about all"
predictions.compare("taken out one by one, they lose", sum_taken_out, said)

# %% [markdown]
# Set the table beside the norms of the deltas. The part that changed *most* for its size earns
# *least*, put in, taken out and on average, in each of the seeds: a norm says how far weights
# moved, not what the way was worth. The part that earns most is the same in all seeds too, but look
# at the intervals before you order the rest: neighbours overlap. And taken out one by one the parts
# lose less than the whole gain, since the true reward is near its ceiling and the others stand in.
#
# So the description named one part, and the interventions another: patches at one word and grafts over
# whole texts agree on the first place here. Below it they part: the heads of the last block bring much
# of the shift at the verdict, and their weights earn next to nothing. They are answers to different
# questions. Say which one you asked.
#
# ### How many directions does it take?
#
# The stable ranks above said "a few directions". That is a description as well. Does the *behavior*
# need more than these few? Move every matrix of the old model by the strongest directions of its
# change alone, and let it write.

# %%
from rlhf_lab.diffing.weights import truncate_delta  # exercise

# %% [markdown]
# The cell first holds your function to a law: what a truncation misses has as its square the sum of
# the squared singular values that were left out (Eckart and Young 1936). Biases and gains are the
# new ones throughout, so that rank 0 is what they alone do. How much of the way does one direction
# per matrix go?

# %%
rank_one = "over two thirds"  # predict: "less than a third", "about half" or "over two thirds"

# %%
matrices = [name for name, weight in old_weights.items() if weight.ndim == 2 and ".b_" not in name]
name = max(matrices, key=lambda name: deltas[name].norm())
s = spectrum(deltas[name])[0]
for rank in (0, 1, 4, 16):
    missed = new_weights[name] - truncate_delta(old_weights[name], new_weights[name], rank)
    squares = missed.square().sum().item(), s[rank:].square().sum().item()
    print(f"{name}, rank {rank}: missed {squares[0]:.4f}, squares left out {squares[1]:.4f}")

by_rank = {rank: worth_of(truncate(before, after, rank)) for rank in (0, 1, 2, 4, 8)}
shown = {f"rank {rank}": bootstrap_means(found) for rank, found in by_rank.items()}
way = {
    f"rank {rank}": recovered_fraction(at_tuned, at_base, found) for rank, found in by_rank.items()
}
show_intervals("every matrix's change", {"true_reward": shown, "share of the way": way})
over_seeds.compare(
    "true reward by rank", {name: found.value.item() for name, found in shown.items()}
)
third = lambda x: (
    "less than a third" if x < 1 / 3 else "about half" if x < 2 / 3 else "over two thirds"
)
predictions.compare("share of the way at rank 1", rank_one, third(value(way["rank 1"])))

# %% [markdown]
# ### Along the line
#
# One direction per matrix goes more than half of the way, and four go practically all of it: here
# the description and the intervention agree. What happens between the two models, and beyond the
# new one? Go along the straight line of weights (Frankle et al. 2020,
# arXiv:[1912.05671](https://arxiv.org/abs/1912.05671); as task arithmetic: Ilharco et al. 2022,
# arXiv:[2212.04089](https://arxiv.org/abs/2212.04089)). At 1.5 the model has moved half as far
# again as training moved it.

# %%
half_again = "worse"  # predict: "better", "as good" or "worse"

# %%
alphas = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
on_line, reviews = {}, {}
for alpha, model in zip(alphas, path(before, after, alphas), strict=True):
    texts = write(TransformerWithValueHead(model), seed=1).texts(tokenizer)
    on_line[f"alpha {alpha:g}"] = bootstrap_means(worth(texts).cpu())
    if on_reel:
        reviews[f"alpha {alpha:g}"] = bootstrap_means(grammatical(texts).float())
show_intervals(
    "old + alpha (new - old)",
    {"true_reward": on_line, "grammatical": reviews} if on_reel else {"reward": on_line},
)
over_seeds.compare(
    "true reward on the line", {name: found.value.item() for name, found in on_line.items()}
)
beyond = on_line["alpha 1.5"].value.item() - on_line["alpha 1"].value.item()
predictions.compare(
    "alpha = 1.5 is",
    half_again,
    "worse" if beyond < -0.02 else "better" if beyond > 0.02 else "as good",
)
curves(
    {"true_reward": (alphas, [x.value.item() for x in on_line.values()])}
    | ({"grammatical": (alphas, [x.value.item() for x in reviews.values()])} if on_reel else {}),
    "On the line from the old model through the new one",
    "alpha",
    "mean over texts",
)

# %% [markdown]
# ## Is it a steering vector?
#
# *What to look for in the figure: the true reward and grammar part nowhere between the models, and fall
# together beyond.* On the way everything is smooth. A quarter beyond the new model next to nothing
# is gained, at 1.5 the true reward falls, and at 2 the language itself is gone.
#
# Now to the simplest description of all. Adding the mean difference of activations to a model is
# known as activation addition (Turner et al. 2023,
# arXiv:[2308.10248](https://arxiv.org/abs/2308.10248)) or contrastive steering (Rimsky et al. 2023,
# arXiv:[2312.06681](https://arxiv.org/abs/2312.06681)); that preference tuning *is* such a vector,
# so that adding it gives the tuned model and subtracting it gives back the old one, is claimed of
# DPO by Raina et al. 2025 (arXiv:[2512.11838](https://arxiv.org/abs/2512.11838)). Test it for this
# run. Take the mean difference over all places of the text at a site, add alpha times it at every
# position while the *old* model writes. Sweep the site and alpha. The control is random vectors of
# the same length; the true reward, the classifier's reward and the share of grammatical texts stand side by
# side.
#
# At which kind of site will the vector do most? And at its best, how much of the way to the new
# model does it go?
#
# (7 s on one core)

# %%
best_layer = "in between"  # predict: "at the embeddings", "in between" or "behind the last block"
how_far = "about half"  # predict: "less than a third", "about half" or "over two thirds"

# %%
blocks = sorted({0, n_layers // 2, n_layers - 1})
sites = ["blocks.0.hook_resid_pre"]
sites += [f"blocks.{block}.hook_resid_{where}" for block in blocks for where in ("mid", "post")]
states = torch.zeros_like(own.tokens, dtype=torch.bool)
states[:, prefix_len - 1 : -1] = own.mask
vectors = {site: mean_difference(base, tuned, own.tokens, site, states) for site in sites}
figures = {"true_reward": worth, "reward": trainer.reward_fn}
if on_reel:
    figures["grammatical"] = lambda texts: grammatical(texts).float()
strengths = (1, 2, 4, 8)
sampling = dict(spec=trainer.sampling_spec, figures=figures)
few, many = ([trainer.prompt] * n for n in ((96, 128) if on_reel else (8, 8)))
sweep = steering_sweep(base, vectors, strengths, few, controls=0, seed=5, **sampling)
print("the sweep's own checks:", "all hold" if all(found.ok for found in sweep.checks) else "fail")
cells = {(row.site, row.alpha): row.figures for row in sweep.rows}
plain = {site: site.replace("blocks.", "block ").replace(".hook_", ", ") for site in sites}
along = {
    name: {site: [cells[site, alpha][name].mean().item() for alpha in strengths] for site in sites}
    for name in figures
}
for name, by_site in along.items():
    headings = [f"{name}, n = {len(few)}", *(f"alpha {alpha}" for alpha in strengths)]
    show_table(headings, [[plain[site], *y] for site, y in by_site.items()], digits=2)
curves(
    {plain[site]: (strengths, y) for site, y in along["true_reward"].items()},
    "True reward of the old model with alpha times the vector added",
    "alpha",
    "true_reward",
)

# %%
most, best_site, best_alpha = max(
    (y, site, alpha)
    for site in sites
    for alpha, y in zip(strengths, along["true_reward"][site], strict=True)
)
where = {sites[0]: "at the embeddings", sites[-1]: "behind the last block"}
predictions.compare("the vector does most", best_layer, where.get(best_site, "in between"))
by_name = lambda name, i: {plain[site]: y[i] for site, y in along[name].items()}
over_seeds.compare("true reward, alpha 1", by_name("true_reward", 0))
over_seeds.compare("true reward, alpha 8", by_name("true_reward", -1))
over_seeds.compare("classifier's reward, alpha 8", by_name("reward", -1))
at_best = {best_site: vectors[best_site]}
true_reward_alone = sampling | {"figures": {"true_reward": worth}}
beside = steering_sweep(base, at_best, strengths, few, controls=3, seed=5, **true_reward_alone)
of_random = [
    [
        row.figures["true_reward"].mean().item()
        for row in beside.rows
        if row.alpha == alpha and row.direction != "vector"
    ]
    for alpha in strengths
]
series = {name: (strengths, along[name][best_site]) for name in figures}
series["true reward, random vectors"] = (strengths, [sum(x) / len(x) for x in of_random])
curves(
    series,
    f"The vector at {plain[best_site]}, and random ones of its length",
    "alpha",
    "mean over texts",
    {"true reward, random vectors": ([min(x) for x in of_random], [max(x) for x in of_random])},
)

# %% [markdown]
# *What to look for in the figures: lines for the true reward that rise and then fall to 0, and in the second
# one the classifier's reward, which stays high where the true reward is 0.* Behind the last block a constant
# can do little: up to the norm it adds one number to each word's logit, whatever was said. Earlier,
# later layers can make something of it. And with a large alpha the classifier is content with texts
# of which none is a review: steering hacks a reward as well as training does. Without the true reward in the
# picture one would have called it a success.
#
# The best of all sites and strengths was *chosen* on these texts, so its height is flattered.
# Measure it again on fresh noise, beside 10 random vectors of the same length, and also the other
# way: subtract it from the new model.
#
# (4 s on one core)


# %%
def true_reward_with(policy, alpha: float | int, controls: int = 0) -> list[Float[Tensor, " n"]]:
    """The true reward of each text with alpha times the vector added, and then with each random one."""
    found = steering_sweep(
        policy, at_best, [alpha], many, controls=controls, seed=6, **true_reward_alone
    )
    return [row.figures["true_reward"] for row in found.rows]


(at_start,), (at_end,) = true_reward_with(base, 0), true_reward_with(tuned, 0)
rows, of_vector = [], {}
for alpha in sorted({1, best_alpha}):
    found = true_reward_with(base, alpha, controls=10 if alpha == best_alpha else 0)
    of_added, *of_random = (recovered_fraction(at_end, at_start, worths) for worths in found)
    undoes = recovered_fraction(at_start, at_end, true_reward_with(tuned, -alpha)[0])
    random = sorted(value(share) for share in of_random)
    span = f"{random[0]:.2f} to {random[-1]:.2f}" if random else "not tried"
    rows.append([alpha, of_added, span, undoes])
    of_vector[alpha] = value(of_added)
key = {"the vector": of_vector[best_alpha], "best of 10 random ones": random[-1]}
over_seeds.compare("share of the way", key | {"undone in the new": value(undoes)})
headings = ["alpha", "share of the way", "10 random vectors", "share undone in the new model"]
show_table(headings, rows)
predictions.compare("share of the way, at its best", how_far, third(of_vector[best_alpha]))

# %% [markdown]
# Read the range over seeds: at its best site the vector goes between a quarter and a half of the
# way, and no random vector of its length goes anywhere. It is no noise. Nor is it the new model:
# more than half of the way is missing, and stronger doses break the language. Taken off the new
# model it undoes part of what was learned, how much depends on the strength and on the seed.
#
# So: the change *has* a steering vector in it, and is not one. A vector cannot say what depends on
# what was said before: which adjective, behind which copula, before which verdict. For another
# model, method or layer the answer may differ. Now you have the test: every layer, fresh texts,
# the true reward beside the reward, and the control that belongs to it.
#
# ## A diff with a diagnosis
#
# One run of the bug hunt of {lesson:ppo} is broken, and this time you are not shown its curves: only
# the last log line, and the two checkpoints. No steps and no check. Say from the *diff* what was
# wrong, among three: the reference learns along, so that nothing holds the policy back; each text
# is paid with the reward of another; the policy is paid for KL instead of charged. Then back your
# answer with one intervention of this lesson, one that would come out otherwise if you were wrong.
#
# (6 s on one core)

# %%
ticket = 1  # another number, another broken run
letter = "ABC"[ticket % 3]
odd = RLHFTrainer(args, out=new_run("odd"), **broken_parts(letter, args))
odd_reports = odd.train()
suspect = Run(odd.run.path).policy("last").to(trainer.device)
logged = odd_reports[-1]
print(f"logged in the last phase: reward {logged.mean_reward:.3f}, KL {logged.kl_per_sequence:.3f}")

# %%
diagnosis = "rewards of others"  # predict: "the reference learns along", "rewards of others" or "paid for KL"

# %%
print("your diff of `base` and `suspect`, with any function of this lesson")

# %%
print("your intervention: what would the model do if your diagnosis were wrong?")

# %%
names = ("the reference learns along", "rewards of others", "paid for KL")
predictions.compare("what was wrong", diagnosis, names["ABC".index(letter)])
print(culprit(letter), reveal(letter), sep="\n\n")

# %% [markdown]
# One way to do it: measure the KL from the *old checkpoint*, which no log line of a broken run can
# be trusted for, and walk along the line between the two, far beyond the new model. With a
# reference that learned along, the KL is many times what was logged, and the true reward is high; paid for KL,
# it is enormous, and the true reward is gone. Here the KL agrees with the log, the true reward did not move, and it does
# not move along the line either: the weights went somewhere, but in no direction that the reward
# knows about. (If the true reward rose between 1 and 3, the direction would be right and the step too small.)

# %%
odd_text = write(suspect)
odd_kl = kl_per_token(*(log_probs(logits_of(m, odd_text.tokens)) for m in (suspect, base)))
print(f"KL from the old model: {bootstrap_means(kl_per_sequence(odd_kl, odd_text.mask))}")
odd_line = {
    f"alpha {alpha:g}": bootstrap_means(worth_of(model))
    for alpha, model in zip((0, 1, 3), path(before, suspect.base_model, (0, 1, 3)), strict=True)
}
show_intervals("old + alpha (suspect - old)", {"true_reward": odd_line})

# %% [markdown]
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Attribute and patch a third choice: "was" against "wasn't", at `COP 1`. Which part is it there?
# - Compare the weights after 8 phases with those after 12: does the delta grow, or turn?
# - Add `base_model="reel-nano-b"` or `"reel-nano-c"` to `SETTINGS`: the same recipe, trained from
#   another seed. Which orders hold? With one base model, "this head" is a statement about one model,
#   however many runs start from it.
# - Run with `reward_fn="smoothed_popcorn"` and 40 phases, and find the loophole from the KL map alone.
# - Read on: all of this with checks and with five seeds per table is the page "Two models side by
#   side" of the documentation; crosscoders and the attribution of the KL itself are in
#   `rlhf_lab.diffing`.
