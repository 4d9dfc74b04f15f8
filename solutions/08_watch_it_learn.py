# %% [markdown]
# # 08 Watch it learn
#
# A reward curve says *that* a policy learns. Here you look inside while it does: what does each layer
# know, who gets the credit, and which parts move?
#
# Reel makes this more than a set of pretty pictures. It is a language whose grammar is known, so for
# every prefix of every review the exact value, the exact advantage and the exact probability of a
# happy ending can be worked out. Each measurement below has its true answer beside it, and some of
# them will be wrong.
#
# **Afterwards you can**
# - attach a suite of probes and a recorder of your own to a run, and read them back without it,
# - read values out of every layer, and say where in the text the model knows how it will end,
# - compare the credit that GAE hands out with the exact one, and say what lambda trades for what,
# - say which terms and which tokens push a choice, and test it by leaving their push out,
# - find a direction by layer and phase, erase it, and test whether the model *uses* what a probe can *read*,
# - say which heads moved, and when.
#
# **What to inspect**
#
# | question | look at | trust it because |
# |---|---|---|
# | did the probes disturb the run? | weights with and without them | they must be equal to the bit |
# | are the records sound? | `run.checks()` | every record carries an identity that it must satisfy |
# | where is value known? | R2 of a linear read-out, by layer and slot | fitted on some reviews, scored on others |
# | who deserves the credit? | exact advantages | they sum to the reward minus the first value |
# | who gets it? | what GAE makes of the critic's values, for several lambdas | compare with the exact ones |
# | what does a step push? | gradients by term, pushes by token | the same training with the push left out |
# | is there a sentiment direction? | held-out accuracy beside Bayes' rule | no probe beats Bayes' rule, but by luck |
# | is it still the same one? | a reader that stays as it is, beside one that is fitted anew | the same reviews for both |
# | is it used? | erase it in the middle, look at the verdict | erasing shuffled labels must change little |

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 110 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import random
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
from rlhf_lab.functional import (
    Interval,
    bootstrap_interval,
    bootstrap_means,
    compute_gae,
    token_rewards,
)
from rlhf_lab.probes import (
    Direction,
    FrozenProbe,
    GradTerms,
    ReelTruth,
    Run,
    RunHealth,
    StepInfluence,
    Suite,
    TextHeatmap,
    ValueLens,
)
from rlhf_lab.probes.amnesic import decide_without, erasing, forgotten
from rlhf_lab.probes.direction import project
from rlhf_lab.probes.erasure import Eraser, orthogonal_eraser
from rlhf_lab.probes.logit_shift import SITES, residual_components, single_token
from rlhf_lab.probes.suite import tokenize_eval_text
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.probes.tuned_lens import fit_translator
from rlhf_lab.probes.value_lens import RESIDUAL_SITES, held_out_fits, r2_interval
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import (
    Html,
    bars,
    color_key,
    curves,
    heatmap,
    short_site,
    sparkline,
    tokens_html,
)

SETTINGS = dict(
    preset="reel",
    total_phases=12,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    keep_checkpoints=None,  # all of them: what was learned by phase 2 is looked at later
    seed=1,
)
predictions = Predictions()
over_seeds = SeedFigures("watch_it_learn", SETTINGS)

args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args)
truth = ReelTruth.of_reward(args.reward_fn) if trainer.speaks_reel else None

# %% [markdown]
# The line `SETTINGS` decides what all of this runs on: Reel, a tiny language of movie reviews. On a
# GPU with a network, write `preset="gpt2-medium"` instead. The cells about exact truth then have
# nothing to show and say so; all others run on GPT-2-medium. The text between the cells tells what
# came out on Reel; GPT-2 has other layers and heads, and learns more slowly: raise `total_phases`,
# too.
#
# ## Text that stays the same
#
# What a policy writes changes while it learns. To see what the *policy* does and not its text, look
# at the same text in every phase. On Reel that is 768 reviews that the grammar wrote, and for each
# of them its hidden sentiment. Elsewhere it is short sentences with a good or a bad word in them.

# %%


def labeled_text() -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, " batch"]]:
    """Sequences of one length, and whether each of them is positive."""
    if truth is not None:
        return truth.reviews(768, seed=0)
    words = {
        True: "good great wonderful fantastic excellent brilliant lovely perfect",
        False: "bad terrible awful horrible boring poor weak stupid",
    }
    phrases = [
        (f"The {noun} was {word}. I", kind)
        for noun in ("movie", "film", "plot", "story", "acting", "script")
        for kind, line in words.items()
        for word in line.split()
    ]
    random.Random(0).shuffle(phrases)
    texts, kinds = zip(*phrases, strict=True)
    return tokenize_eval_text(trainer, texts), torch.tensor(kinds)


def bracket(found: Interval, *index: int) -> str:
    """An estimate with its interval, as `0.42 [0.31, 0.53]`."""
    one = found[index] if index else found
    return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


text, positive = labeled_text()
seq = text.shape[1]
slots = truth.slot_names(seq) if truth else [str(i) for i in range(seq)]
verdict = truth.grammar.slot("VERB") - 1 if truth else seq - 1
words = ("loved", "hated") if truth else (" loved", " hated")
fit = slice(0, 2 * len(text) // 3)
test = slice(fit.stop, None)
show_table(
    ["verdict", "text"],
    [
        ["positive" if positive[row] else "negative", trainer.tokenizer.decode(text[row])]
        for row in range(3)
    ],
)

# %% [markdown]
# Every place in a review has a name: `ADJ 2` is the adjective of the second clause, `CONN 2` the
# "and" or "but" that opens it, `ASP` its noun, `COP` "was" or "wasn't", `ADV` its adverb; `STOP`, `I`,
# `VERB` (the verdict), `IT`, `END` and `TAG` make the end (". i loved it . thanks"). A number at a slot
# is about the state *behind* that token. `verdict` is the state behind "i", where the model is about
# to say what it thinks.
#
# ## A suite, and a recorder of your own
#
# A suite is a set of probes that look at one run together. Each says at which moments it looks, and
# writes records with identities that they must satisfy.
#
# And any function can listen. `trainer.capture(sites, ...)` runs the policy over the text at a moment
# and hands you the activations. This one keeps what every head and MLP adds to the residual stream
# at the verdict, every fourth phase. We need it at the end. (A listener can be called at ten moments, in this order:
# `run_start`, `after_rollout`, `after_score`, `before_minibatch`, `after_loss`, `after_backward`, `after_step`,
# `after_phase`, `checkpoint`, `run_end`.)

# %%
trainer = RLHFTrainer(args, out=new_run("watched"))
of_steps = [GradTerms(step="last", every=3)]
if truth is not None:
    of_steps.append(StepInfluence(pos=verdict, n=32, fine=False, every=3))
suite = Suite(
    RunHealth(),
    TextHeatmap(every=4),
    ValueLens(text="eval" if truth else "rollout", ridge=1e-6, every=4),
    Direction("sentiment", "lda", every=4),
    FrozenProbe(pos=verdict, every=4),
    *of_steps,
    eval_tokens=text,
    labels=positive,
)
suite.attach(trainer)
parts, reports = {}, []


@trainer.capture(SITES, pos=verdict, at="after_score", every=4, tokens=text)
def remember_parts(ctx, acts):
    parts[ctx.phase] = residual_components(ctx.policy.base_model, acts)


# %% [markdown]
# (19 s on one core)

# %%
reports += trainer.train()  # run again, nothing is left to train
parts[len(reports)] = residual_components(
    trainer.policy.base_model, capture_activations(trainer.policy, text, SITES, pos=verdict)
)
run = Run(trainer.run.path)
print("reward", sparkline([r.mean_reward for r in reports]), f"{reports[-1].mean_reward:.3f}")
print("KL    ", sparkline([r.kl_per_sequence for r in reports]), end=" ")
print(f"{reports[-1].kl_per_sequence:.3f} nats per sequence")
over_seeds.compare(
    "reward and KL",
    {
        "reward of the first phase": reports[0].mean_reward,
        "reward of the last phase": reports[-1].mean_reward,
        "KL of the last phase": reports[-1].kl_per_sequence,
    },
)
show_table(
    ["probe", "records", "checks", "passed"],
    [
        [name, len(run.phases(name)), len(found), sum(one.ok for one in found)]
        for name in run.probes()
        for found in [[one for one in run.checks() if one.probe == name]]
    ],
)

# %% [markdown]
# `Run` reads everything back from the run's folder; the trainer is no longer needed. A failed check
# is a reason to distrust a record before you interpret it.
#
# Did all this looking disturb the run? A twin with nothing attached trains for two phases. Compare
# its weights with what the watched run saved after two.

# %%
twin_weights = "equal to the bit"  # predict: "equal to the bit", "nearly equal" or "different"

# %%
twin = RLHFTrainer(args, out=new_run("twin"))
for _ in range(2):
    twin.run_phase()
pairs = list(zip(twin.policy.parameters(), run.policy(2).parameters(), strict=True))
gap = max((a.cpu() - b).abs().max().item() for a, b in pairs)
found = "equal to the bit" if gap == 0 else "nearly equal" if gap < 1e-5 else "different"
predictions.compare("weights with and without probes", twin_weights, found)

# %% [markdown]
# (Probes and `capture` run separate forward passes and leave no hooks on the model. A hook that you
# leave there with `add_hook` is also called in sampling and learning. If it is on an attention pattern,
# on attention scores or in a norm, torch computes these lines one by one instead of as one operation, and the
# trained weights are equal up to rounding, but not bitwise identical.)
#
# ## Value, layer by layer
#
# The value head listens to the last residual, behind the final norm. What would it say of an earlier
# layer, as if all later layers did nothing? Bring each layer's residual to the same point, and ask
# it. That point is easy to get wrong: TransformerLens calls it `ln_final.hook_normalized`, and it is
# *before* the norm's gain and bias. Write that norm.

# %%
from rlhf_lab.probes.value_lens import normalize_residual  # exercise

# %%
policy = run.policy("last")
acts = capture_activations(policy, text, [*RESIDUAL_SITES, "values"])
head_said = acts.pop("values").cpu()
sites = list(acts)
layers = [short_site(site) for site in sites]


@torch.no_grad()
def head_of(residual: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq"]:
    """What the value head says of a residual."""
    return policy.value_head(normalize_residual(policy.base_model, residual))[..., 0].cpu()


def correlation(a: Float[Tensor, "batch n"], b: Float[Tensor, "batch n"]) -> Float[Tensor, ""]:
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]


print(
    f"last layer's lens against the value: {(head_of(acts[sites[-1]]) - head_said).abs().max():.0e}"
)

# %% [markdown]
# The head was trained on the last residual only. An earlier one may be written in another basis: the same fact
# along other directions. The *tuned lens* (Belrose et al. 2023, [2303.08112](https://arxiv.org/abs/2303.08112))
# translates first: an affine map per layer, fitted to give the last residual, and then the head. Does the raw
# lens agree with the head's final opinion behind block 0?

# %%
raw_lens = "below 0.5"  # predict: "below 0.5", "0.5 to 0.9" or "above 0.9"

# %%
everywhere = torch.ones_like(text, dtype=torch.bool)
lenses, agreement = {"raw": [], "tuned": []}, []
for name, site in zip(layers, sites, strict=True):
    translate = fit_translator(acts[site][fit], acts[sites[-1]][fit], everywhere[fit], ridge=1e-4)
    opinions = {"raw": head_of(acts[site]), "tuned": head_of(translate(acts[site]))}
    found = {
        kind: bootstrap_interval(x[test], head_said[test], statistic=correlation, resamples=400)
        for kind, x in opinions.items()
    }
    agreement.append([name, *map(bracket, found.values())])
    for kind, x in opinions.items():
        lenses[kind].append(x[0].tolist())
    if name == short_site("blocks.0.hook_resid_post"):
        at_block_0 = found["raw"].value.item()
show_table(["behind", "raw lens", "tuned lens"], agreement)
print(
    f"correlation with the head's own value; 95 % of resamples of the {len(head_said[test])} held out"
)
bracketed = "below 0.5" if at_block_0 < 0.5 else "0.5 to 0.9" if at_block_0 <= 0.9 else "above 0.9"
predictions.compare("raw lens behind block 0 agrees with the head by", raw_lens, bracketed)
spelled = [word.strip() for word in spell_tokens(trainer.tokenizer, text[0])]
heatmap(lenses["tuned"], layers, spelled, "the head's opinion, tuned lens, one review", "diverging")

# %% [markdown]
# *What to look for in the figure: from which row on a word has the color that it has in the last one.*
#
# The raw lens at an early layer measures two things at once: what is known there, and whether it is already
# written the head's way. Read the raw rows with care, and the tuned ones as "what the head would say if it had
# learned this layer's basis". (The first column is the start token, whose residual is like no other.)
#
# A more direct question: *could* the value be read from a layer?
# Fit a linear map at each layer and slot to the exact value on two thirds of the reviews, and score
# it on the last third. R2 = 1 is perfect, and 0 is no better than the mean. ValueLens has done this in
# phase 0, before any learning.
#
# A figure of some reviews would be another on other reviews. How far off it may be is said by its
# interval, between *from* and *to*, or in brackets behind it as in `0.42 [0.31, 0.53]`: the reviews
# are drawn again with replacement, many times, whole reviews since the tokens of one are not
# independent, and 95 % of the figures that this gives lie between the two. Two figures whose intervals
# overlap widely are not told apart by so few reviews.
#
# A reader who knows the grammar has all that the clauses say as soon as the third adjective is there.
# The full stop and the "i" behind it say nothing: at `ADJ 3`, `STOP` and `I` the exact value is one
# and the same number. One thing to know about this model: it was trained to guess the next word, and
# nothing else. Behind which of the three is the value read *worst* from the last layer?

# %%
worst_read_at = "ADJ 3"  # predict: "ADJ 3", "STOP", "I" or "equally well"

# %%
first = run.records("value_lens")[0]
if truth is None:
    print("no exact values here; R2 of the returns, all positions together:")
    show_table(["layer", "R2"], zip(layers, [row[0] for row in first["r2"]], strict=True))
else:
    r2 = torch.tensor(first["r2"])
    shown = [i for i, slot in enumerate(slots) if first["defined"][0][i]]
    of_last_layer = {slot: r2[-1, slots.index(slot)].item() for slot in ("ADJ 3", "STOP", "I")}
    ends = first["r2_low"][-1], first["r2_high"][-1]
    show_table(
        ["slot", "R2 at the last layer", "from", "to"],
        [[slot, x, *(end[slots.index(slot)] for end in ends)] for slot, x in of_last_layer.items()],
    )
    print(f"from and to: 95 % of resamples of the {first['held_out']} reviews held out")
    low = min(of_last_layer, key=of_last_layer.get)
    even = max(of_last_layer.values()) - min(of_last_layer.values()) < 0.02
    predictions.compare("value is read worst at", worst_read_at, "equally well" if even else low)

heatmap(
    r2[:, shown],
    layers,
    [slots[i] for i in shown],
    "R2 of the exact value, read linearly, before learning",
    limits=(0, 1),
) if truth else None

# %% [markdown]
# *What to look for in the figure: columns that change from one row to the next. What changes there, that
# block has worked out.*
#
# The same number is legible to 0.75 at the adjective, to 0.79 at the full stop, and to 0.99 at "i".
# The transformer does not read like a parser. Behind "i" comes the verdict, and of the three next
# words only this one depends on the number.
#
# One base model is a sample of one. The package has two more of the same training, which differ in the seed
# alone, `reel-nano-b` and `reel-nano-c`. Which of this holds for them?

# %%
base_models = {"reel-nano": run.policy(0)} if truth else {}
for name in ("reel-nano-b", "reel-nano-c"):
    if truth:
        base_models[name] = RLHFTrainer(RLHFArgs(**SETTINGS | {"base_model": name})).policy
if truth:
    exact_values, defined = truth.values(text)
    by_model = {
        name: r2_interval(
            held_out_fits(
                capture_activations(model, text, sites[-1:])[sites[-1]][None],
                exact_values,
                defined,
            ),
            len(text) - fit.stop,
        )
        for name, model in base_models.items()
    }
    show_table(
        ["R2 at the last layer", *by_model],
        [
            [slot, *(bracket(found, 0, slots.index(slot)) for found in by_model.values())]
            for slot in ("THE 2", "ASP 2", "ADJ 2", "COP 3", "ADJ 3", "STOP", "I")
        ],
    )
    print(f"brackets: 95 % of resamples of the {len(text) - fit.stop} reviews held out")

# %% [markdown]
# In all three the value is read best at "i", with intervals that do not overlap those of the other two. Which of
# the other two is worse is not the same, or not told apart.
#
# But the next word does not settle what is there. At `THE 2` and `ASP 2` come a noun and "was" or
# "wasn't", whatever was said, and the value is read there to 0.95 and more in all three models.
# At `ADJ 2` and `COP 3` they differ by a tenth and more. What a probe finds in one model need not be in the next.
#
# The picture shows two more things. Block 0 understands a clause by itself: at `ADJ 1` its attention
# has put "wasn't" and "dull" together, before any MLP. To add clauses up well takes block 1, as the rows of `ADJ 2`
# and `ADJ 3` show. The first row holds embeddings only. It knows something at `ADJ` and `VERB`, where the word itself
# tells, and nothing anywhere else.
#
# ### Counted, or weighed?
#
# What does "i" have that the last adjective lacks? At both, the exact value depends on one thing: how
# many of the three clauses are positive. But it does not grow evenly with this count. For 0, 1, 2 and
# 3 positive clauses it is 0.005, 0.15, 0.85 and 0.995: the step in the middle is nearly five times
# each of the others. A straight line in the count explains most of the variance of the value and misses this
# bend. Read the two separately, the count, and the bend (what the value is beyond the line), at
# `ADJ 3` and at `I`, behind the attention of the last block and behind its MLP. At which of these
# four places is more than half of the bend? (Think of the numbers above.)

# %%
bend_is_read = "at I"  # predict: "at all four", "at I", "behind the MLP" or "at I, behind the MLP"


# %%
def read_bend(model, count: Float[Tensor, " n"], bend: Float[Tensor, " n"]) -> dict[str, Interval]:
    """R2 of the count and of the bend, behind attention and MLP, at ADJ 3 and at I."""
    states = torch.stack(list(capture_activations(model, fresh, sites[-2:]).values()))[:, :, at]
    both = torch.ones(len(fresh), 2, dtype=torch.bool)
    return {
        name: r2_interval(
            held_out_fits(states, y[:, None].expand(-1, 2), both),
            len(fresh) - 2 * len(fresh) // 3,
        )
        for name, y in {"count": count, "bend": bend}.items()
    }


if truth is None:
    print("no votes to count here")
else:
    fresh, _ = truth.reviews(3000, seed=1)
    at = [slots.index("ADJ 3"), slots.index("I")]
    value = truth.values(fresh)[0][:, at[0]].double()
    # Four numbers, in ascending order: the place of each is the count of positive clauses.
    levels, count = value.round(decimals=3).unique(return_inverse=True)
    line = torch.stack([torch.ones_like(value), count.double()], dim=1)
    bend = value - line @ torch.linalg.lstsq(line, value[:, None]).solution[:, 0]
    print("values:", [round(level, 3) for level in levels.tolist()])
    print(f"the best line in the count gives {1 - bend.var() / value.var():.3f} of the value")

# %% [markdown]
# Now both are read, at the two slots and behind both parts, in all three models.

# %%
if truth is not None:
    read = {name: read_bend(model, count.double(), bend) for name, model in base_models.items()}
    show_table(
        ["R2", "count, reel-nano", *(f"bend, {name}" for name in read)],
        [
            [
                f"at {slot}, behind the {part}",
                bracket(read["reel-nano"]["count"], i, j),
                *(bracket(found["bend"], i, j) for found in read.values()),
            ]
            for j, slot in enumerate(("ADJ 3", "I"))
            for i, part in enumerate(("attention", "MLP"))
        ],
    )
    there = read["reel-nano"]["bend"]
    print(f"brackets: 95 % of resamples of the {there.n} reviews held out")
    # Behind the attention at ADJ 3 and at I, then behind the MLP.
    answers = {
        "at all four": [[True, True], [True, True]],
        "at I": [[False, True], [False, True]],
        "behind the MLP": [[False, False], [True, True]],
        "at I, behind the MLP": [[False, False], [False, True]],
    }
    where = (there.value > 0.5).tolist()
    found = next((answer for answer, each in answers.items() if each == where), "none of these")
    predictions.compare("most of the bend is read", bend_is_read, found)

# %% [markdown]
# A straight line in the count explains 94 % of the variance of the value, the bend the other 6 %. At `ADJ 3` the
# count is read, and of the bend 0.11 at most, in all three models. At "i" more of the bend is read in each, and
# behind the MLP, which need not be linear, more than behind the attention. There it is of use: the chance of a
# word of praise grows evenly with the value, not with the count. How much of the bend is there differs between
# the models by more than a factor of two.
#
# ## Who deserves the credit?
#
# The exact advantage of a token is the exact value behind it minus the one before it. Which tokens
# have any? Adjectives, surely, and the verdict. What about "and" and "but", which by themselves say
# nothing about the movie? And which of the three adjectives has most?

# %%
connectors_have_credit = "yes"  # predict: "yes" or "no"
most_credit = "ADJ 1"  # predict: "ADJ 1", "ADJ 2", "ADJ 3" or "VERB"

# %%
if truth is None:
    print("no exact advantages here")
else:
    prefix_len = len(trainer.prompt)
    value_before, exact, _ = truth.generated(text, prefix_len)
    sizes = bootstrap_means(exact.abs())
    with_credit = [i for i, size in enumerate(sizes.value.tolist()) if size > 1e-6]
    show_table(
        ["slot", "mean size of the exact advantage"],
        [[slots[prefix_len + i], bracket(sizes, i)] for i in with_credit],
    )
    print(f"exactly 0 at the other {exact.shape[1] - len(with_credit)} slots; {sizes.n} reviews")
    have = any(slots[prefix_len + i].startswith("CONN") for i in with_credit)
    predictions.compare(
        "connectors have exact credit", connectors_have_credit, "yes" if have else "no"
    )
    most = slots[prefix_len + int(sizes.value.argmax())]
    predictions.compare("most exact credit at", most_credit, most)

    lines = [color_key("exact advantage", exact[:3].abs().max().item()).fragment]
    for row in range(3):
        spelled = spell_tokens(trainer.tokenizer, text[row])
        numbers = [0.0] * prefix_len + exact[row].tolist()
        counts = [False] * prefix_len + [True] * exact.shape[1]
        line = tokens_html(spelled, numbers, "advantage", counts, exact[:3].abs().max().item())
        lines.append(line.fragment)

Html("".join(lines)) if truth else None

# %% [markdown]
# Adjectives have most, and the earlier the more: the first one moves the probability of a happy
# ending by 0.35, the third finds it nearly settled. And the connectors do have credit: "but" announces
# that the next clause will disagree with this one, and an announcement is news. It is no more than the
# last adjective's, though, and the verdict has no more, either: by then nearly all has been said.
# Everything else is worth exactly nothing, and that is most of the text.
#
# ## Who gets it?
#
# PPO does not know exact advantages. It builds them from the critic's values. Begin with the plainest way, one
# step: what the value changes by at a token is that token's credit. To look at the critic alone, train a critic
# and nothing else: `base_lr=0` keeps the policy what it is, which also keeps the exact
# values what they are. Then compare, on the same reviews.
#
# A guess first: when you correlate the critic's *values* with the exact values, and its one-step
# *credit* with the exact credit, which of the two correlations is higher? And of the first adjective
# and what follows it ("*dull but the* plot"), where does the critic hand out most?
#
# (7 s on one core)

# %%
better_correlated = "values"  # predict: "values", "credit" or "about the same"
critic_credits = "CONN 2"  # predict: "ADJ 1", "CONN 2" or "THE 2"

# %%
if truth is None:
    print("no exact advantages here")
else:
    only_critic = dict(base_lr=0.0, head_lr=1e-2, batches_per_learning_phase=4)
    critic = RLHFTrainer(RLHFArgs(**SETTINGS | only_critic), out=new_run("critic"))
    last_report = critic.train()[-1]  # the critic learns rewards that are standardized
    mean_reward, spread = last_report.mean_reward, last_report.reward_std
    # States from the end of the prompt to the tag; the end of the text is paid, not valued.
    written = slice(prefix_len - 1, seq - 1)
    guessed = capture_activations(critic.policy, text, ["values"])["values"].cpu()[:, written]
    names = slots[prefix_len : seq - 1]
    guessed_credit, true_credit = spread * guessed.diff(dim=1), exact[:, :-1]
    of_values = bootstrap_interval(guessed, value_before, statistic=correlation, resamples=400)
    of_credit = bootstrap_interval(
        guessed_credit, true_credit, statistic=correlation, resamples=400
    )
    print(f"correlation with the truth, values: {of_values}")
    print(f"correlation with the truth, one-step credit: {of_credit}")
    which = "values" if of_values.value > of_credit.value + 0.05 else "credit"
    which = "about the same" if abs(of_values.value - of_credit.value) <= 0.05 else which
    predictions.compare("correlates better with the truth", better_correlated, which)
    given = dict(zip(names, guessed_credit.abs().mean(0).tolist(), strict=True))
    top = max(("ADJ 1", "CONN 2", "THE 2"), key=given.get)
    predictions.compare("of these, the critic credits most", critic_credits, top)
    over_seeds.compare(
        "one-step credit of the critic",
        {
            "correlation of values": of_values.value.item(),
            "correlation of credit": of_credit.value.item(),
            **{f"mean size at {slot}": given[slot] for slot in ("ADJ 1", "CONN 2", "THE 2")},
        },
    )

bars(
    names,
    {"exact": true_credit.abs().mean(0).tolist(), "critic's": list(given.values())},
    "mean size of one-step credit, by slot",
    "share of the reward",
) if truth else None

# %% [markdown]
# *What to look for in the figure: slots where one of the two bars is high and the other is missing.*
#
# The critic's values follow the exact ones, and its one-step credit hardly follows the exact credit: a value may
# be right on average and jump at the wrong word, and one-step credit is made of the jumps. The first adjective,
# which deserves most, gets little. Its credit comes later, at the "and" or "but" behind it and at "the", which
# deserves nothing.
#
# The model does know: at `ADJ 1` the value is legible to a linear map of that slot's own (above). But one head
# reads all slots. A head that reads the value well at one word and badly at the next books the change as credit.
#
# ### Which lambda?
#
# The run that you watched does not use one step. GAE adds the later surprises ({lesson:rewards_and_credit}, with $\gamma = 1$):
#
# $$\hat A_t = \sum_k \lambda^k \delta_{t+k}, \qquad \delta_t = r_t + V(s_{t+1}) - V(s_t)$$
#
# so credit that comes a word late still reaches the adjective, and so does everything else that happens later.
# The same critic, at phase 1, at phase 5 and at the end, with five lambdas, on the same reviews: which `lam`
# correlates best with the exact advantage for the last critic? And is it the same for the critic of phase 1?

# %%
best_lambda = 0.95  # predict: 0, 0.5, 0.8, 0.95 or 1
same_for_young_critic = "no"  # predict: "yes" or "no"


# %%
def parts_of_error(
    error: Float[Tensor, "batch gen"], situation: Float[Tensor, "batch gen key"]
) -> tuple[float, float]:
    """Root mean squares of the mean error in each situation, and of what varies around it."""
    _, group = situation.flatten(0, 1).unique(dim=0, return_inverse=True)
    flat = error.flatten().double()
    count = group.bincount()
    mean = torch.zeros(len(count), dtype=flat.dtype).index_add_(0, group, flat) / count
    around = flat - mean[group]
    return mean[group].square().mean().sqrt().item(), around.square().mean().sqrt().item()


if truth is None:
    print("no exact advantages here")
else:
    lams = (0.0, 0.5, 0.8, 0.95, 1.0)
    ages = {f"phase {n}": n for n in (1, 5) if n <= SETTINGS["total_phases"]} | {"the end": "last"}
    # The reward of a whole review, as the critic is paid it, at the last token.
    paid = token_rewards(
        (truth.values(text)[0][:, -1] - mean_reward) / spread, torch.ones_like(exact).bool()
    )
    place = torch.arange(exact.shape[1]).expand_as(exact).float()
    situation = torch.stack([place, value_before.round(decimals=3), exact.round(decimals=3)], -1)
    by_lambda, rows = {}, []
    for age, phase in ages.items():
        young = Run(critic.run.path).policy(phase)
        guessed = capture_activations(young, text, ["values"])["values"].cpu()[:, written]
        for lam in lams:
            credit = spread * compute_gae(guessed, paid, 1.0, lam)
            fitted = bootstrap_interval(credit, exact, statistic=correlation, resamples=400)
            by_lambda[age, lam] = fitted
            rows.append([age, lam, bracket(fitted), *parts_of_error(credit - exact, situation)])
    show_table(["critic of", "lam", "correlation", "systematic error", "scatter"], rows, digits=2)
    print(f"brackets: 95 % of resamples of {len(text)} reviews; errors in units of the reward")

# %%
curves(
    {
        f"{error}, {age}": (lams, [row[column] for row in rows if row[0] == age])
        for age in ages
        for error, column in {"systematic": 3, "scatter": 4}.items()
    },
    "errors of GAE's advantages, by the critic's age",
    "lambda",
    "units of the reward",
) if truth else None

# %% [markdown]
# *What to look for in the figure: the lambda at which the two errors of a critic are least, and which of the two
# grows towards lambda 1.*

# %%
if truth is not None:
    best_of = {age: max(lams, key=lambda lam: by_lambda[age, lam].value) for age in ages}
    predictions.compare("best lambda for the last critic", best_lambda, best_of["the end"])
    same = "yes" if best_of["phase 1"] == best_of["the end"] else "no"
    predictions.compare("the same for the critic of phase 1", same_for_young_critic, same)
    over_seeds.compare(
        "correlation by lambda",
        {f"lam {lam}, the end": by_lambda["the end", lam].value.item() for lam in lams}
        | {f"lam {lam}, phase 1": by_lambda["phase 1", lam].value.item() for lam in (0.95, 1.0)},
    )

curves(
    {age: (lams, [by_lambda[age, lam].value.item() for lam in lams]) for age in ages},
    "correlation of GAE with the exact advantage",
    "lambda",
    "correlation",
    {
        age: tuple(
            [getattr(by_lambda[age, lam], end).item() for lam in lams] for end in ("low", "high")
        )
        for age in ages
    },
) if truth else None

# %% [markdown]
# *What to look for in the figure: where each curve has its top, and whether the bands of its neighbors
# reach as high.*
#
# *Systematic error* is the mean error of all tokens in the same situation (slot, exact value before it, exact
# advantage): more reviews do not take it away. *Scatter* is what varies around it, and averages out over a batch.
# For the last critic both are smallest at lambdas between 0.5 and 0.8, and at 1 the scatter is about three times as large.
# The correlation is best at 0.95 all the same: with lambda the credit that is right grows, too, and PPO standardizes
# advantages, so that their size does not count. The critic of phase 1 knows next to nothing yet; the best that can be
# done with it is to give every token what came out in the end, lambda 1.
#
# The credit of a single token stays a rough estimate at every lambda. PPO learns all the same since the
# scatter of many reviews averages out, and the part that is right does not.
#
# ## What does a step push?
#
# Credit is not yet a change. A step climbs the gradient of the objective, which is a sum over the terms of the
# objective and over the tokens of a minibatch, and two probes of the suite took it apart. `GradTerms` kept the
# gradient of each term in the last step of every third phase: its norm, and the cosines between terms. Before the very
# first step the KL has no gradient, since policy and reference are one and the same model. By phase 9, how long is its
# gradient, beside that of the surrogate?

# %%
kl_pull = "10 to 50 %"  # predict: "less than 10 %", "10 to 50 %" or "more than 50 %"

# %%
records = run.records("grad_terms")
tensors = [run.tensors("grad_terms", record["phase"]) for record in records]
terms = [name for name in records[0]["terms"] if name != "entropy_bonus"]  # its price is 0 here
row = {name: records[0]["terms"].index(name) for name in terms}
length = {name: [x["norms"][row[name], -1].item() for x in tensors] for name in terms}
opposed = [x["cosines"][row["clipped_surrogate"], row["kl_penalty"], -1].item() for x in tensors]
at_phases = [record["phase"] for record in records]
show_table(
    ["phase", *(name.replace("_", " ") for name in terms), "cosine of surrogate and KL"],
    list(zip(at_phases, *length.values(), opposed, strict=True)),
)
both = zip(length["kl_penalty"], length["clipped_surrogate"], strict=True)
share = {phase: kl / gain for phase, (kl, gain) in zip(at_phases, both, strict=True)}
over_seeds.compare(
    "KL's gradient over the surrogate's",
    {f"phase {phase}": x for phase, x in share.items()},
    largest=False,
)
later = share[at_phases[-1]]
said = "less than 10 %" if later < 0.1 else "10 to 50 %" if later <= 0.5 else None
predictions.compare("the KL's gradient beside the surrogate's", kl_pull, said or "more than 50 %")
curves(
    {name.replace("_", " "): (at_phases, y) for name, y in length.items()},
    "norm of each term's gradient, last step of a phase",
    y_label="objective per unit of weight",
)

# %% [markdown]
# *What to look for in the figure: which curve is level, and which begin near 0.*
#
# Early, the surrogate pushes alone: in the last step of the first phase the KL's gradient is a few hundredths of its length. Three
# phases later it is a fifth to a third, in this run and in the stored ones, and there it stays, while the surrogate's is as
# long late as early. The cosine of the two is below 0 at each of these phases: the KL pulls back along what the surrogate changes most. (A
# gradient is not a step: Adam divides each weight's gradient by the size that it usually has.)
#
# ### Which tokens push?
#
# `StepInfluence` gives each token of a minibatch its share in what the step did to a target, term by term. The target is the
# lean here, the logit of "loved" less that of "hated" behind "i", on text that stays the same. A verdict is chosen at one slot.
# But weights are shared, and an adjective that is praised or blamed moves them, too. In the first half of the run, whose
# surrogate pushes the lean up: that of the verdicts in the minibatch, of the adjectives, or of both alike?

# %%
pushed_by = "verdicts"  # predict: "verdicts", "adjectives" or "both alike"


# %%
def pushes(records: list[dict], term: str) -> dict[str, Interval]:
    """What a step's tokens of each kind do to the lean, in thousandths of a nat, over reviews."""
    found = [run.tensors("step_influence", record["phase"]) for record in records]
    row = records[0]["term_names"].index(term)
    by_slot = torch.cat([1000 * len(x["mask"]) * x["terms"][row].double() for x in found])
    names = records[0]["slots"]
    kind = ["verdicts" if n == "VERB" else "adjectives" if "ADJ" in n else "others" for n in names]
    return {
        name: bootstrap_means(by_slot[:, [k == name for k in kind]].sum(1))
        for name in ("verdicts", "adjectives", "others")
    }


if truth is None:
    print("no slots here")
else:
    records = run.records("step_influence")
    half = (len(records) + 1) // 2
    halves = {"first": records[:half], "second": records[half:] or records}
    pushed = {
        f"{name}, {which} half": pushes(some, term)
        for which, some in halves.items()
        for name, term in {"surrogate": "surrogate", "KL": "kl"}.items()
    }
    show_intervals("tokens", pushed, "reviews", digits=1)

# %%
if truth is not None:
    whole = sum(record["linear"] for record in records)
    carried = sum(run.tensors("step_influence", r["phase"])["momentum"].sum() for r in records)
    print(
        f"of these {len(records)} steps' push, {carried / whole:.2f} is momentum of earlier steps"
    )
    over_seeds.compare(
        "push of the lean, nats / 1000 per step",
        {
            f"{column}: {name}": found.value.item()
            for column, of_kind in pushed.items()
            for name, found in of_kind.items()
            if name != "others"
        },
        largest=False,
    )
    first_half = pushed["surrogate, first half"]
    verdicts, adjectives = (first_half[name].value.item() for name in ("verdicts", "adjectives"))
    said = "verdicts" if verdicts > 2 * adjectives else "adjectives"
    said = said if max(verdicts, adjectives) > 2 * min(verdicts, adjectives) else "both alike"
    predictions.compare("the lean is pushed up by", pushed_by, said)

bars(
    [*first_half],
    {name: [x.value.item() for x in of_kind.values()] for name, of_kind in pushed.items()},
    'what the tokens of a step do to the lean to "loved"',
    "nats / 1000 per step",
    {
        name: tuple([getattr(x, end).item() for x in of_kind.values()] for end in ("low", "high"))
        for name, of_kind in pushed.items()
    },
) if truth else None

# %% [markdown]
# *What to look for in the figure: intervals that do not reach 0.*
#
# The KL pulls the lean down, at verdicts and at adjectives, early and late, in every one of the seeds. What the surrogate does is larger
# and less certain: it hangs on the few reviews of a minibatch whose verdict was a surprise, and two minibatches of 32 cannot tell whether
# the adjectives push as well. In one stored run they push more than the verdicts, late in the run. And of the whole step most is
# *momentum*, the gradients of earlier steps: so what a token pushes now counts for little, unless the tokens of other minibatches
# push the same way.
#
# Here are the reviews of the second recorded step whose tokens moved the lean most, in either direction. Blue tokens pushed towards "loved".

# %%
if truth is not None:
    record = records[min(1, len(records) - 1)]
    by_token = 1000 * run.tensors("step_influence", record["phase"])["rows"].sum(0)
    strongest = by_token.abs().sum(1).argsort(descending=True)[:4].tolist()
    limit = by_token[strongest].abs().max().item()
    lines = [color_key("push of the lean, nats / 1000", limit).fragment]
    for row in strongest:
        numbers = [0.0] * record["prefix_len"] + by_token[row].tolist()
        counts = [False] * record["prefix_len"] + [True] * by_token.shape[1]
        lines.append(tokens_html(record["tokens"][row], numbers, "push", counts, limit).fragment)

Html("".join(lines)) if truth else None

# %% [markdown]
# It is the verdict, in each of these, and not its meaning that decides the direction: "hated" pushes towards "loved" where the policy is made
# to say it less, and "enjoyed" behind bad clauses pushes away from it. Hardly any other word of these reviews pushes.
#
# ### Take the push away
#
# A row says what a token did in one step. To see what comes of it, leave it out: a callback that changes the rollout is no
# probe any more but an intervention. It sets the advantages at some slots to 0 while a run trains for four
# phases; the KL stays as it is. Without the verdicts' advantages, how much of the lean is learned? The control leaves out the adjectives', which
# are three times as many.

# %%
without_verdicts = "next to nothing"  # predict: "all of it", "about half" or "next to nothing"
without_adjectives = "all of it"  # predict: "all of it", "about half" or "next to nothing"


# %%
@torch.no_grad()
def lean_of(policy) -> Interval:
    """How far a policy leans to the first word at the verdict, over the reviews."""
    logits = policy.base_model(text.to(policy.device))[:, verdict]
    word, other = (single_token(trainer.tokenizer, name) for name in words)
    return bootstrap_means((logits[:, word] - logits[:, other]).cpu())


def trained_without(kind: str, phases: int) -> tuple[Interval, float]:
    """The lean and the last reward of a run in which one kind of slot has no advantages."""
    arm = RLHFTrainer(RLHFArgs(**SETTINGS), out=new_run("without"))
    kept = torch.tensor([not slot.startswith(kind) for slot in slots[len(trainer.prompt) :]])

    @arm.on("after_score")
    def leave_out(ctx) -> None:
        ctx.rollout.advantages.mul_(kept.to(ctx.rollout.advantages.device))

    last = [arm.run_phase() for _ in range(phases)][-1]
    return lean_of(arm.policy), last.mean_reward


# %%
if truth is None:
    print("no slots here")
else:
    phases = min(4, len(reports) - 1)
    leans = {"before training": (lean_of(run.policy(0)), reports[0].mean_reward)}
    while twin.phase < phases:  # the twin has the weights of the run
        twin.run_phase()
    leans["as it is"] = lean_of(twin.policy), reports[phases - 1].mean_reward
    for name, kind in {"without the verdicts": "VERB", "without the adjectives": "ADJ"}.items():
        leans[name] = trained_without(kind, phases)
    show_table(
        ["advantages", "lean, nats", f"reward of phase {phases - 1}"],
        [[name, bracket(lean), reward] for name, (lean, reward) in leans.items()],
        digits=2,
    )
    print(f"brackets: 95 % of resamples of {len(text)} reviews; {phases} phases of training")
    over_seeds.compare(
        "lean after four phases, nats",
        {name: lean.value.item() for name, (lean, _) in leans.items()},
        largest=False,
    )
    start, end = (leans[name][0].value.item() for name in ("before training", "as it is"))
    for name, guess in (
        ("without the verdicts", without_verdicts),
        ("without the adjectives", without_adjectives),
    ):
        part = (leans[name][0].value.item() - start) / (end - start)
        said = "all of it" if part > 0.75 else "next to nothing" if part < 0.25 else "about half"
        predictions.compare(f"of the lean, {name}, is learned", guess, said)

# %% [markdown]
# Now it is settled. Without the advantages of one slot, the verdict's, the lean does not rise at all, in any of the seeds. Without those of
# three slots it rises as far as before, or further. So the adjectives' pushes above, of either sign, add up to nothing: they were the
# noise of single minibatches. The rewards tell the other half, in this run: without the adjectives' advantages the policy says "loved" and earns
# no more than before training, and without the verdict's it earns most of what it would.
#
# A row describes one step, from the weights that it began with. That a push adds up over steps is a claim about training, and needs the
# training.
#
# ## A direction for sentiment
#
# Is "this review is going to be positive" a direction in the residual stream? Two ways to find one:
# the difference of the two class means, and Fisher's discriminant (lda), which also divides by the
# covariance within the classes.

# %%
from rlhf_lab.probes.direction import fit_direction  # exercise

# %% [markdown]
# How well does the better one decode the hidden sentiment at the verdict, on reviews that it has not
# seen? Reviews are ambiguous: three clauses may disagree with the sentiment that wrote them. Bayes'
# rule, which knows the grammar, is the best that anybody can do.

# %%
lda_accuracy = "as good as Bayes' rule"  # predict: "more than 2 points worse", "as good as Bayes' rule" or "better than it"

# %%
base, tuned = run.policy(0), run.policy("last")
columns, fits, right = {}, {}, {}
for name, model in {"before": base, "after": tuned}.items():
    acts = capture_activations(model, text, RESIDUAL_SITES, pos=verdict)
    x = torch.stack(list(acts.values()))
    for method in ("mean", "lda"):
        fitted = fit_direction(x[:, fit], positive[fit], method)
        halves = [fit_direction(x[-1, fit][i::2], positive[fit][i::2], method) for i in (0, 1)]
        fits[method, name] = fitted.direction[-1], (halves[0][0] * halves[1][0]).sum().item()
        decided = project(x[:, test], fitted.direction) > fitted.threshold[:, None]
        found = bootstrap_means((decided == positive[test]).double().T)
        columns[f"{method}, {name}"] = [bracket(found, i) for i in range(len(sites))]
        right[method, name] = found.value[-1].item()
show_table(["layer", *columns], zip(layers, *columns.values(), strict=True))
print(f"accuracy; brackets: 95 % of resamples of the {len(text[test])} reviews held out")
turned = {m: (fits[m, "before"][0] * fits[m, "after"][0]).sum().item() for m in ("mean", "lda")}
show_table(
    ["direction", "cosine of before and after", "cosine of two halves, before"],
    [[method, turned[method], fits[method, "before"][1]] for method in turned],
)
over_seeds.compare(
    "directions at the verdict, last layer",
    {f"accuracy of {method}, after": right[method, "after"] for method in turned}
    | {f"cosine of {method}, before and after": turned[method] for method in turned},
)
if truth is not None:
    belief, _ = truth.beliefs(text[test])
    bayes = ((belief[:, verdict] > 0.5) == positive[test]).float().mean().item()
    print(f"Bayes' rule on the same reviews: {bayes:.3f}")
    best = right["lda", "before"]
    said = "as good as Bayes' rule" if abs(best - bayes) <= 0.02 else "more than 2 points worse"
    said = "better than it" if best > bayes + 0.02 else said
    predictions.compare("the lda direction at the last layer is", lda_accuracy, said)

# %% [markdown]
# Read down the columns. The embedding of "i" knows nothing, block 0 and the attention of block 1 bring most of it, and
# behind the MLP of block 1 both readers are where Bayes' rule is: before training the model knows at the verdict
# all there is to know there. After training lda reads nearly as well; the difference of means is worse, in this run and in the
# stored ones.
#
# Mind the cosines. The difference of means has hardly turned. The cosine of the two lda directions looks like a big
# turn, but two halves of the same reviews, before any training, give lda directions with a cosine of 0.36: many
# directions decode well when a residual has dozens of dimensions, and lda picks one of them by the finest details of the
# covariance. Before you say of a direction that it turned, print what two fits of the same thing give.

# %%
records = run.records("direction_sentiment")
last_site = len(records[0]["sites"]) - 1
heatmap(
    [record["accuracy"][last_site] for record in records]
    + ([records[0]["bayes_accuracy"]] if truth else []),
    [f"phase {record['phase']}" for record in records] + (["Bayes' rule"] if truth else []),
    slots,
    "accuracy of the lda direction at the last layer, by slot and phase",
    limits=(0.5, 1),
)

# %% [markdown]
# *What to look for in the figure: each column from top to bottom, and how far it stays below Bayes' rule.*
#
# From top to bottom little changes at most slots: the policy learned to *say* other things, more than to *know*
# other things. And the picture of the value comes back: in the first phase the decoder does at "i" what Bayes' rule
# does, and falls behind it at the slots before. (Some of the gap is the decoder's own: it fits a number for each
# dimension of the residual, and saw two thirds of 768 reviews.)
#
# ### A reader that stays as it is
#
# All of these readers were fitted anew in every phase. What if you fit a reader before training, and leave it?
# `FrozenProbe` keeps the difference of means of phase 0, with its threshold, and reads every phase with it. By
# the end, how well does it do beside one that is fitted anew?

# %%
frozen_reader = "more than 5 points worse"  # predict: "as good", "1 to 5 points worse" or "more than 5 points worse"

# %%
records = run.records("frozen_probe")
at_last = len(records[0]["sites"]) - 1
rows = []
for record in records:
    accuracy, gap = record["accuracy_frozen"][at_last], record["gap"][at_last]
    low, high = (record[f"gap_{end}"][at_last] for end in ("low", "high"))
    called = record["called"][at_last]
    rows.append([record["phase"], accuracy, accuracy - gap, f"{gap:.2f} [{low:.2f}, {high:.2f}]"])
    rows[-1] += [called, record["cosine"][at_last]]
show_table(
    ["phase", "frozen", "fitted anew", "difference", "frozen: says positive", "cosine of both"],
    rows,
)
print(f"n = {records[0]['sequences']['held']}; {records[0]['positive']:.2f} of them are positive")
over_seeds.compare(
    "frozen reader at the last layer",
    {
        "frozen, phase 0": rows[0][1],
        "frozen, last phase": rows[-1][1],
        "fitted anew, last phase": rows[-1][2],
        "frozen says positive, last phase": rows[-1][4],
        "cosine of both, last phase": rows[-1][5],
    },
)
behind = rows[-1][2] - rows[-1][1]
said = "as good" if behind < 0.01 else "1 to 5 points worse" if behind <= 0.05 else None
predictions.compare("the frozen reader is", frozen_reader, said or "more than 5 points worse")

# %% [markdown]
# The frozen reader falls behind the one that is fitted anew, and its axis has hardly turned. Look at what it says: it calls
# far more reviews positive than there are. The policy now leans to praise whatever the review says, all states
# have moved along the axis, and the threshold stayed where it was. A monitor that is fitted once fails in this way in
# all of these runs: what it reads is still written in the same direction, and no longer at the same place.
#
# ## Reading, erasing, using
#
# A probe that decodes sentiment shows that it is *there*. Does the model *use* it when it
# chooses between "loved" and "hated"? Take it out of the activations, and see. To take out a direction is
# called ablation.

# %%
from rlhf_lab.probes.direction import ablate  # exercise

# %% [markdown]
# ### An experiment that is algebra
#
# Positive and negative reviews differ in the logit of "loved" minus that of "hated", by some nats on average.
# The obvious experiment: ablate a direction in the last residual, at the verdict, and see how much of this gap is
# left. Its result is known before. Behind the last residual comes (but for the norm's scale) a linear read-out $u$,
# and with $\mu$ the difference of the class means the gap is $u \cdot \mu$. Without the unit direction $d$,
#
# $$u \cdot (\mu - (d \cdot \mu)\, d) = u \cdot \mu \; \left(1 - \frac{\cos(d, \mu) \cos(d, u)}{\cos(\mu, u)}\right)$$
#
# Three cosines decide it; whether the model uses the direction does not come in. Here they are.

# %%
loved, hated = (single_token(trainer.tokenizer, word) for word in words)
x = capture_activations(base, text, sites[-1:], pos=verdict)[sites[-1]]
mu = x[test][positive[test]].mean(0) - x[test][~positive[test]].mean(0)
leaf = x[test].clone().requires_grad_()
logits = base.base_model.unembed(base.base_model.ln_final(leaf[:, None]))[:, 0]
(logits[:, loved] - logits[:, hated]).sum().backward()
read_out = leaf.grad.mean(0)
noise = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0))
candidates = {
    "lda": fit_direction(x[fit], positive[fit], "lda").direction.float().cpu(),
    "difference of means": fit_direction(x[fit], positive[fit], "mean").direction.float().cpu(),
    "a random direction": noise / noise.norm(),
}


def cosine(a: Float[Tensor, " d_model"], b: Float[Tensor, " d_model"]) -> float:
    return torch.cosine_similarity(a.cpu(), b.cpu(), dim=0).item()


show_table(
    ["direction d", "cos(d, mu)", "cos(d, u)", "cos(mu, u)"],
    [[n, cosine(d, mu), cosine(d, read_out), cosine(mu, read_out)] for n, d in candidates.items()],
)

# %% [markdown]
# What share of the gap is left without lda, and without the difference of means?

# %%
left_without_lda = "all of it"  # predict: "all of it", "about half" or "next to nothing"
left_without_mean = "next to nothing"  # predict: "all of it", "about half" or "next to nothing"


# %%
def in_words(share: float) -> str:
    return "all of it" if share > 0.9 else "next to nothing" if share < 0.25 else "about half"


def gap_of(residual: Float[Tensor, "n d_model"]) -> float:
    """How much further positive reviews lean to "loved" than negative ones."""
    with torch.no_grad():
        logits = base.base_model.unembed(base.base_model.ln_final(residual[:, None]))[:, 0]
    lean = logits[:, loved] - logits[:, hated]
    return (lean[positive[test]].mean() - lean[~positive[test]].mean()).item()


whole, rows = gap_of(x[test]), []
for name, d in candidates.items():
    from_cosines = 1 - cosine(d, mu) * cosine(d, read_out) / cosine(mu, read_out)
    without = ablate(x, d.to(x.device))
    reader = fit_direction(without[fit], positive[fit], "lda")
    correct = (project(without[test], reader.direction) > reader.threshold) == positive[test]
    rows.append(
        [
            name,
            from_cosines,
            gap_of(without[test]) / whole,
            bracket(bootstrap_means(correct.double())),
        ]
    )
show_table(["ablated", "left, from cosines", "left, measured", "lda fitted anew reads"], rows)
print(
    f"gap {whole:.2f} nats; brackets: 95 % of resamples of the {len(text[test])} reviews held out"
)
for row, guess in zip(rows, (left_without_lda, left_without_mean), strict=False):
    predictions.compare(f"of the gap, without {row[0]}, is left", guess, in_words(row[2]))

# %% [markdown]
# The cosines foretell the table. And look at the last column: lda, fitted anew after *its own direction* is gone, reads as
# well as before. Nothing has been erased, so the experiment could not tell whether the model uses it. The lda axis
# holds almost none of the difference between the classes (its cosine with `mu` is near 0), and the difference of means holds
# all of it, used or not: its result would be next to nothing in any model whose read-out is not at a right angle to `mu`.
#
# ### Erase what a line can read
#
# When is every linear reader blind to a label $z$? A reader $w \cdot x$ tells nothing about $z$ if it does not
# covary with it, and that holds for all $w$ exactly if $\mathrm{Cov}(x, z) = 0$: for two classes, if their means are
# equal. LEACE (Belrose et al. 2023, [2306.03819](https://arxiv.org/abs/2306.03819)) is the affine map with this
# property that moves $x$ least. In five lines, with $\Sigma$ the covariance of $x$ and $\mu$ the difference of the means:
#
# 1. Whiten: $y = \Sigma^{-1/2} (x - \bar x)$ has variance 1 in every direction, and its class means differ by $v = \Sigma^{-1/2} \mu$.
# 2. An affine map $y \to A y + b$ makes the means equal exactly if $A v = 0$.
# 3. Of these maps the orthogonal projection moves $y$ least: $y - v \, (v \cdot y) / (v \cdot v)$.
# 4. Back: $x - \Sigma^{1/2} v \, (v \cdot y) / (v \cdot v)$, and $\Sigma^{1/2} v = \mu$.
# 5. With $v \cdot y = \mu^\top \Sigma^{-1} (x - \bar x)$, that is
#
# $$r(x) = x - \mu \; w \cdot (x - \bar x), \qquad w = \frac{\Sigma^{-1} \mu}{\mu^\top \Sigma^{-1} \mu}$$
#
# (Least is least in the norm $\Sigma^{-1}$ here; the paper proves it for every such norm at once.) It reads with lda's
# direction $\Sigma^{-1}\mu$, and moves along $\mu$. These two are one and the same component of the data: $\Sigma^{-1}\mu$ is its
# *filter*, how to read it, and $\mu$ its *pattern*, where it lies (Haufe et al. 2014, NeuroImage 87). To ablate a filter
# as though it were a pattern is the mistake of the experiment above.

# %%
from rlhf_lab.probes.erasure import fit_leace  # exercise

# %% [markdown]
# ### Does the verdict need it?
#
# Now in the middle of the network, where the answer is not algebra: behind block 0, at *every* position up to
# the verdict, since block 1 reads all of them. This is amnesic probing (Elazar et al. 2021,
# [2006.00995](https://arxiv.org/abs/2006.00995)): erase, and look at the behaviour. Four things are measured, on
# reviews that neither the eraser nor the readers were fitted to:
#
# - what is left of the gap,
# - how many reviews change their verdict (the sign of the lean),
# - what lda reads there, *fitted anew behind the erasure*,
# - and what it reads behind the last block.
#
# Two controls take out something else in the same way, 20 draws of each: LEACE of shuffled labels, and for the
# orthogonal ablations directions drawn with the covariance of the activations at each position.

# %%
gap_after_leace = "next to nothing"  # predict: "all of it", "about half" or "next to nothing"
there_after_leace = "near chance"  # predict: "as before", "in between" or "near chance"
back_at_the_end = "some of it"  # predict: "none of it", "some of it" or "all of it"


# %%
middle = f"blocks.{(len(base.base_model.blocks) - 1) // 2}.hook_resid_post"  # behind block 0
spare, spare_positive = truth.reviews(3000, seed=2) if truth else (text, positive)
cut, pair = len(spare) // 2, (loved, hated)
for_eraser, judged = spare_positive[:cut], (spare[cut:], spare_positive[cut:])
chance = torch.Generator().manual_seed(0)


def states_of(model) -> Float[Tensor, "pos n d_model"]:
    """What an eraser is fitted to: the states in the middle, position by position."""
    acts = capture_activations(model, spare[:cut, : verdict + 1], [middle])[middle]
    return acts.transpose(0, 1).cpu()


def shuffled_leace(states: Float[Tensor, "pos n d_model"]) -> Eraser:
    return fit_leace(states, for_eraser[torch.randperm(cut, generator=chance)])


def drawn_direction(states: Float[Tensor, "pos n d_model"]) -> Eraser:
    """Ablation of a direction at each position, drawn with the covariance of its activations."""
    centered = (states - states.mean(1, keepdim=True)).double()
    d = torch.randn(cut, dtype=torch.float64, generator=chance) @ centered
    return orthogonal_eraser(d / d.norm(dim=-1, keepdim=True).clamp(min=1e-12))


def look(model, eraser: Eraser | None = None):
    return decide_without(model, *judged, middle, verdict, pair, eraser)


def in_two(accuracy: float, before: float) -> str:
    """How much of what a reader read before is still read."""
    still = (accuracy - 0.5) / (before - 0.5)
    return "as before" if still > 0.9 else "near chance" if still < 0.35 else "in between"


# %% [markdown]
# Three erasers, and the two controls, each judged in the same way:
#
# (29 s on one core)

# %%
states, untouched = states_of(base), look(base)
erasers = {
    "lda": orthogonal_eraser(fit_direction(states, for_eraser, "lda").direction),
    "difference of means": orthogonal_eraser(fit_direction(states, for_eraser).direction),
    "LEACE": fit_leace(states, for_eraser),
}
left = {"nothing": forgotten(untouched, untouched)}
left |= {name: forgotten(look(base, eraser), untouched) for name, eraser in erasers.items()}
controls = {
    "20 drawn directions": [drawn_direction(states) for _ in range(20)],
    "LEACE, shuffled, 20": [shuffled_leace(states) for _ in range(20)],
}
ranges = {
    name: torch.tensor([[f.value for f in forgotten(look(base, e), untouched)] for e in each])
    for name, each in controls.items()
}
show_table(
    ["erased", "gap left", "verdicts flipped", "refitted there", "at the last layer"],
    [[name, *map(bracket, found)] for name, found in left.items()]
    + [
        [name, *(f"{lo:.2f} to {hi:.2f}" for lo, hi in zip(*found.aminmax(dim=0), strict=True))]
        for name, found in ranges.items()
    ],
)
print(
    f"{middle}; brackets: 95 % of resamples of {left['LEACE'].gap.n} reviews; controls: their range"
)

# %%
leace, before = left["LEACE"], left["nothing"]
predictions.compare(
    "left of the gap after LEACE", gap_after_leace, in_words(leace.gap.value.item())
)
reads_there = in_two(leace.read_there.value.item(), before.read_there.value.item())
predictions.compare("lda fitted behind the erasure reads", there_after_leace, reads_there)
back = leace.read_last.value - leace.read_there.value
missing = before.read_last.value - leace.read_last.value
said = "none of it" if back < 0.02 else "all of it" if missing < 0.02 else "some of it"
predictions.compare("at the last layer comes back", back_at_the_end, said)

# %%
order = [name for name in left if name != "nothing"]
bars(
    [*order, *ranges],
    {
        "gap left": [left[name].gap.value.item() for name in order]
        + [found[:, 0].mean().item() for found in ranges.values()]
    },
    "what is left of the gap (controls: mean, and range of 20)",
    "share of the gap",
    {
        "gap left": (
            [left[name].gap.low.item() for name in order]
            + [found[:, 0].min().item() for found in ranges.values()],
            [left[name].gap.high.item() for name in order]
            + [found[:, 0].max().item() for found in ranges.values()],
        )
    },
)

# %% [markdown]
# *What to look for in the figure: whether a bar lies outside the range of its own control.*
#
# Four findings, each beside its control.
#
# - lda's direction can be taken out without anybody noticing, the probe included, here as at the end.
# - LEACE brings the reader near chance where it erases, takes most of the gap and turns about three verdicts in ten. LEACE
#   of shuffled labels does neither. So the verdict needs what a line reads behind block 0.
# - The ablation of the difference of means does as much as LEACE here. But its control is another: directions
#   that are drawn with the covariance, and mean nothing, take away up to six tenths of the gap, and leave nearly all of
#   what can be read. An ablation along a direction of large variance damages, whatever the direction means: without
#   its control the ablation says little.
# - Block 1 finds part of it again. At the last layer lda reads much more than behind block 0 (what is erased linearly
#   can be recomputed, here from what a line cannot read), and the verdict does not follow it: there you have a
#   label that is *readable and not used*.
#
# (The readers stay a little above chance behind LEACE since the eraser knows its own reviews only, and a
# thousand and five hundred are few for the dimensions of a residual at every position of the text.)
#
# Do the other two base models agree?

# %%
rows = []
for name, model in list(base_models.items())[1:]:
    its_states, its_own = states_of(model), look(model)
    found = forgotten(look(model, fit_leace(its_states, for_eraser)), its_own)
    rows.append([name, "LEACE", *map(bracket, found)])
    shuffled = [forgotten(look(model, shuffled_leace(its_states)), its_own) for _ in range(5)]
    each = torch.tensor([[f.value for f in one] for one in shuffled])
    lowest, highest = each.aminmax(dim=0)
    ends = [f"{lo:.2f} to {hi:.2f}" for lo, hi in zip(lowest, highest, strict=True)]
    rows.append([name, "LEACE, shuffled, 5", *ends])
if rows:
    show_table(
        ["model", "erased", "gap left", "flipped", "refitted there", "at the last layer"], rows
    )

# %% [markdown]
# In all three models erasing the label takes most of the gap, and erasing a shuffled one takes next to none of it.
#
# ### Train with it erased
#
# One step further: leave the eraser in place, behind block 0, while PPO trains. `trainer.intervene` changes
# activations in the whole run, in writing and in learning, and `erasing(eraser)` is such a change. (It is
# fitted to the base model, and stays as it is.) A control trains with LEACE of shuffled labels. Does the policy
# still learn to please? And can sentiment be read, at the end, behind the eraser?
#
# (19 s on one core)

# %%
reward_if_erased = "as high"  # predict: "as high", "at least 0.1 lower" or "not learned"
read_if_erased = "in between"  # predict: "near chance", "in between" or "as before"

# %%
without_label = erasers["LEACE"]
arms = {"trained with it erased": without_label, "trained, shuffled erased": shuffled_leace(states)}
rows, after = [["before training", reports[0].mean_reward, "", base, without_label]], {}
rows.append(
    ["trained as it is", reports[-1].mean_reward, reports[-1].kl_per_sequence, tuned, without_label]
)
for name, eraser in arms.items():
    arm = RLHFTrainer(args, out=new_run(name.split()[1].strip(",")))
    arm.intervene(middle, erasing(eraser), name="erased")
    arm_reports = arm.train()
    trained = Run(arm.run.path).policy("last", {"erased": lambda act, where: act})
    rows.append(
        [name, arm_reports[-1].mean_reward, arm_reports[-1].kl_per_sequence, trained, without_label]
    )
shown = []
for name, reward, kl, model, eraser in rows:
    decided = look(model, eraser)
    there, end = (bootstrap_means(hit.double()) for hit in (decided.read_there, decided.read_last))
    lean = decided.lean[decided.positive].mean() - decided.lean[~decided.positive].mean()
    after[name] = reward, lean.item(), there.value.item(), end.value.item()
    shown.append([name, reward, kl, lean.item(), bracket(there), bracket(end)])
show_table(
    ["policy", "reward", "KL", "gap, erased", "refitted there, erased", "at the last layer"],
    shown,
    digits=2,
)
print(
    f"all read with LEACE behind block 0; n = {len(decided.lean)} reviews, rewards of {args.batch_size}"
)

# %%
over_seeds.compare(
    "trained with the label erased",
    {
        f"{what}, {name}": after[name][i]
        for i, what in enumerate(("reward", "gap", "read there", "read at the end"))
        for name in ("trained as it is", *arms)
    },
)
lower = after["trained as it is"][0] - after["trained with it erased"][0]
gained = after["trained with it erased"][0] - reports[0].mean_reward
said = "as high" if lower < 0.1 else "at least 0.1 lower" if gained > 0.05 else "not learned"
predictions.compare("reward when trained with it erased", reward_if_erased, said)
there = after["trained with it erased"][2]
predictions.compare(
    "sentiment behind the eraser, at the end",
    read_if_erased,
    in_two(there, before.read_there.value.item()),
)

# %% [markdown]
# With the label erased, the reward rises nearly as high as without: to please it is enough to write praise, and for that
# the policy need not know what the review has said.
#
# And sentiment is read behind the eraser, at the end, about as well as before the erasure. It is tempting to say that the policy
# has *found a way around* it. The second row forbids that: a policy that trained with no eraser at all
# shows the same when the eraser is put in afterwards. Twelve phases of ordinary training turn the activations
# far enough that an eraser of phase 0 no longer fits, whatever they were trained under. (Had it been fitted anew in every
# phase, the question would have another answer. You have the means to find out.)
#
# What does differ is the gap: under the eraser, the verdict of the policy that trained with it depends more on the
# review than that of the policy that did not, in this run (by little) and in both stored ones. Three seeds of one base
# model suggest that it relearned to *use* what it reads; they do not show how.
#
# ## Which heads move?
#
# Your recorder kept what each head and each MLP adds at the verdict. Divide how far each has moved
# from phase 0 by how large it was then. Which block's heads move more, the first or the last?

# %%
moving_block = "last"  # predict: "first" or "last"

# %%
names, start = parts[0]
size = start.norm(dim=-1)
movement = {phase: (now - start).norm(dim=-1) for phase, (_, now) in parts.items()}
share = {phase: far.mean(1) / size.mean(1).clamp(min=1e-9) for phase, far in movement.items()}
there = [i for i in range(len(names)) if size[i].mean() > 0]
order = sorted(there, key=lambda i: -share[len(reports)][i])[:12]
ends = bootstrap_means(movement[len(reports)].T, size.T, statistic=torch.div)
moved_at = [phase for phase in share if 0 < phase < len(reports)]
show_table(
    [
        "part",
        "size",
        *(f"moved by phase {phase}" for phase in moved_at),
        "moved at the end, of its size",
        "size times that",
    ],
    [
        [
            names[i],
            size[i].mean().item(),
            *(share[phase][i].item() for phase in moved_at),
            bracket(ends, i),
            movement[len(reports)][i].mean().item(),
        ]
        for i in order
    ],
    digits=2,
)
print(f"brackets: 95 % of resamples of {len(text)} reviews")

# %%
heads = [i for i, name in enumerate(names) if "H" in name]
last_block = f"L{trainer.policy.base_model.cfg.n_layers - 1}H"
mean_move = {
    which: sum(row) / len(row)
    for which, block in {"first": "L0H", "last": last_block}.items()
    if (row := [share[len(reports)][i].item() for i in heads if names[i].startswith(block)])
}
over_seeds.compare(
    "moved, as a share of its size",
    {f"heads of the {which} block": moved for which, moved in mean_move.items()}
    | {names[i]: share[len(reports)][i].item() for i in there if "mlp" in names[i]},
)
predictions.compare(
    "heads move more in the block that is", moving_block, max(mean_move, key=mean_move.get)
)
curves(
    {
        names[i]: (list(share), [row[i].item() for row in share.values()])
        for i in order
        if i in heads
    },
    "how far each head's output at the verdict moved",
    y_label="share of its size",
)

# %% [markdown]
# *What to look for in the figure: in which phases a curve is steep.*
#
# On average the heads of the last block, which read the clauses for the verdict, move more than those of
# the first, in this run and in the stored ones, and they do most of it in the first eight phases.
#
# Relative movement makes much of small parts, though, and hides large ones. The head that leads the table is
# the smallest of its block: by the last column it has moved less than any other of them. The MLP of block 0 has moved by less
# than a third of its size and stands far down, and farther than any head. And movement is not effect: whether a part moved
# the *choice* is the question of the next lesson.
#
# ## Your own question
#
# Difficulty: ●●●●○, about 30 minutes. There is no stub, no check and no single answer.
#
# At `ASP 2` the policy is about to write "was" or "wasn't". Choose a property of the review so far that *you*
# believe it uses there (is the first clause positive? was the last connector "but"? is the noun "plot"?), and
# settle it with four things:
#
# 1. a *reader*: can the property be read at the place where you say it is used, better than chance, held out?
# 2. an *eraser* of it at every position up to there: does a reader that is fitted anew fall to chance?
# 3. a *control*: the same eraser of shuffled labels, several draws,
# 4. an *interval*: for the change of the odds of "wasn't", over reviews.
#
# `decide_without(policy, tokens, labels, site, pos, words, eraser)` takes any label, position and pair of tokens, and
# `truth.reviews` writes as many reviews as you like; what stands at a slot is `text[:, slots.index("CONN 2")]`. Write
# down first what would make you give the claim up.

# %%
my_claim = "the connector: behind but, the second clause should disagree"  # predict: in words

# %%
predictions.recall("what I believe, and what would refute it", my_claim)

# %% [markdown]
# Look at your four answers together. Where the reader reads and the erasure changes nothing beyond the control, the
# property is there and not used *at this site by what reads it linearly*. Where the control changes as much as the
# eraser, you have learned nothing yet. Where the reader that is fitted anew still reads, you have not erased it.
#
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Pass `max_mb=0.05` to the suite, and read `run.notes()`.
# - Replace `Direction("sentiment", ...)` by a direction for something that does not matter: label a
#   review by whether its first aspect is "plot". Where is that readable, and does training change it?
# - Erase behind the attention of block 1 instead of behind block 0 (`middle`), or at the verdict alone. Which of the
#   two do other positions repair?
# - `GradTerms` keeps the norms by part of the model, too (`run.tensors("grad_terms", phase)["norms"]`). Do the parts that are
#   pulled hardest also move most? And in which parts does the KL pull as hard as the surrogate?
# - `python -m rlhf_lab report` on the run's folder writes all of its records as one page of HTML.
# - Train the critic with `advantages="one_step"`, and with ten times the phases. Does the credit move
#   to the adjective?
#
# **Read on.** What a probe can and cannot say: Belinkov 2022, [2102.12452](https://arxiv.org/abs/2102.12452), and with how
# many bits: Voita and Titov 2020, [2003.12298](https://arxiv.org/abs/2003.12298). Control tasks: Hewitt and Liang 2019,
# [1909.03368](https://arxiv.org/abs/1909.03368).
#
# Next: {lesson:what_rlhf_changed}, where the run is over and the two ends of it are compared.
