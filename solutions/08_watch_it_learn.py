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
# - tell exact credit from what a critic hands out,
# - find a direction by layer and phase, and test whether the model *uses* what a probe can *read*,
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
# | who gets it? | differences of the critic's values | compare with the exact ones |
# | is there a sentiment direction? | held-out accuracy beside Bayes' rule | no probe beats Bayes' rule, but by luck |
# | is it used? | ablate it, look at the next word | a random direction must change little |

# %%
# first cell

# %% [markdown]
# About 115 minutes of work. All cells together run in about 24 seconds on one core, without a
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
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.probes import (
    Budget,
    Direction,
    ReelTruth,
    Run,
    RunHealth,
    Suite,
    TextHeatmap,
    ValueLens,
)
from rlhf_lab.probes.direction import accuracy, project
from rlhf_lab.probes.logit_shift import SITES, residual_components, single_token
from rlhf_lab.probes.suite import tokenize_eval_text
from rlhf_lab.probes.text_heatmap import spell_tokens
from rlhf_lab.probes.value_lens import RESIDUAL_SITES, held_out_fits, r2_interval
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import Html, bars, color_key, curves, heatmap, sparkline, tokens_html
from rlhf_lab.views.probe_pictures import short_site

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
    keep_checkpoints=None,  # all of them: what was learned by phase 2 is looked at later
)
predictions = Predictions()

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
# writes records with identities that they must satisfy. Its budget is 10 % of the run's time, or it
# thins itself out and says so; here, where looking is the point, it may cost more.
#
# And any function can listen. `trainer.capture(sites, ...)` runs the policy over the text at a moment
# and hands you the activations. This one keeps what every head and MLP adds to the residual stream
# at the verdict, every fourth phase. We need it at the end.

# %%
trainer = RLHFTrainer(args, out=new_run("watched"))
suite = Suite(
    RunHealth(),
    TextHeatmap(every=4),
    ValueLens(text="eval" if truth else "rollout", ridge=1e-6, prefixes=0, every=4),
    Direction("sentiment", "lda", every=4),
    eval_tokens=text,
    labels=positive,
    budget=Budget(time_frac=20),
)
suite.attach(trainer)
parts, reports = {}, []


@trainer.capture(SITES, pos=verdict, at="after_score", every=4, tokens=text)
def remember_parts(ctx, acts):
    parts[ctx.phase] = residual_components(ctx.policy.base_model, acts)


# %% [markdown]
# (7 s on one core)

# %%
reports += trainer.train()  # run again, nothing is left to train
parts[len(reports)] = residual_components(
    trainer.policy.base_model, capture_activations(trainer.policy, text, SITES, pos=verdict)
)
run = Run(trainer.run.path)
print("reward", sparkline([r.mean_reward for r in reports]), f"{reports[-1].mean_reward:.3f}")
print("KL    ", sparkline([r.kl_per_sequence for r in reports]), end=" ")
print(f"{reports[-1].kl_per_sequence:.3f} nats per sequence")
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
# (Probes and `capture` look through forward passes of their own, and leave nothing hanging on the
# model. A hook that you leave there with `add_hook` is called in sampling and learning, too. While it
# is there, the trainer runs the model module by module instead of in larger steps, and the weights
# that come out are equal up to rounding, but not to the bit.)
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
sites = [site for site in acts if site != "values"]
layers = [short_site(site) for site in sites]
with torch.no_grad():
    lens = torch.cat(
        [
            policy.value_head(normalize_residual(policy.base_model, acts[site]))[None, ..., 0]
            for site in sites
        ]
    )
print(f"last layer's lens against the value: {(lens[-1] - acts['values']).abs().max():.0e}")
spelled = [word.strip() for word in spell_tokens(trainer.tokenizer, text[0])]
heatmap(lens[:, 0], layers, spelled, "the value head's opinion, layer by layer", "diverging")

# %% [markdown]
# The head was trained on the last row only. Above it, it reads a language that is not its own, and
# its opinions there mean little.
#
# A fairer question: *could* the value be read from a layer, by somebody who learned its language?
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
# The same number is legible to 0.75 at the adjective, to 0.79 at the full stop, and to 0.99 at "i".
# The transformer does not read like a parser. Behind "i" comes the verdict, and of the three next
# words only this one depends on the number. The package has two more models of the same training,
# which differ in the seed alone, `reel-nano-b` and `reel-nano-c`. In all three the value is read best
# at "i", by 0.14 at the least; which of the other two is worst is not the same (for `reel-nano-b` it
# is the full stop).
#
# But the next word does not settle what is there. At `THE 2` and `ASP 2` come a noun and "was" or
# "wasn't", whatever was said, and the value is read there to 0.95 and more in all three models.
# Elsewhere they differ: at `ADJ 2` the last layer has 0.84, 1.00 and 0.90, at `COP 3` 0.81, 0.89 and
# 0.53. What a probe finds in one model need not be in the next.
#
# The picture shows two more things. Block 0 understands a clause by itself: at `ADJ 1` its attention
# has put "wasn't" and "dull" together, before any MLP. To add clauses up well takes block 1: behind
# block 0 the value is legible to 0.48 at `ADJ 2` and to 0.62 at `ADJ 3`, behind block 1 to 0.84 and 0.75.
# (Lesson 02 fits fewer reviews, and reads a little less.)
#
# The first row holds embeddings only. It knows something at `ADJ` and `VERB`, where the word itself
# tells, and nothing anywhere else.
#
# ### Counted, or weighed?
#
# What does "i" have that the last adjective lacks? At both, the exact value depends on one thing: how
# many of the three clauses are positive. But it does not grow evenly with this count. For 0, 1, 2 and
# 3 positive clauses it is 0.005, 0.15, 0.85 and 0.995: the step in the middle is nearly five times
# each of the others. The best straight line in the count gives most of the value and misses this
# bend. Read the two separately, the count, and the bend (what the value is beyond the line), at
# `ADJ 3` and at `I`, behind the attention of the last block and behind its MLP. At which of these
# four places is more than half of the bend? (Think of the numbers above.)

# %%
bend_is_read = "at I"  # predict: "at all four", "at I", "behind the MLP" or "at I, behind the MLP"

# %%
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

    states = torch.stack(list(capture_activations(run.policy(0), fresh, sites[-2:]).values()))
    everywhere = torch.ones(len(fresh), 2, dtype=torch.bool)
    fits = {
        name: held_out_fits(states[:, :, at], y.double()[:, None].expand(-1, 2), everywhere)
        for name, y in {"count": count, "bend": bend, "value": value}.items()
    }
    read = {
        name: r2_interval(of_y, len(fresh) - 2 * len(fresh) // 3) for name, of_y in fits.items()
    }

    def in_brackets(r2_of, i, j):
        return f"{r2_of.value[i, j]:.2f} [{r2_of.low[i, j]:.2f}, {r2_of.high[i, j]:.2f}]"

    show_table(
        ["R2", *read],
        [
            [
                f"at {slot}, behind the {part}",
                *(in_brackets(r2_of, i, j) for r2_of in read.values()),
            ]
            for j, slot in enumerate(("ADJ 3", "I"))
            for i, part in enumerate(("attention", "MLP"))
        ],
    )
    print(f"brackets: 95 % of resamples of the {read['bend'].n} reviews held out")
    # Behind the attention at ADJ 3 and at I, then behind the MLP.
    answers = {
        "at all four": [[True, True], [True, True]],
        "at I": [[False, True], [False, True]],
        "behind the MLP": [[False, False], [True, True]],
        "at I, behind the MLP": [[False, False], [False, True]],
    }
    there = (read["bend"].value > 0.5).tolist()
    said = next((answer for answer, where in answers.items() if where == there), "none of these")
    predictions.compare("most of the bend is read", bend_is_read, said)

# %% [markdown]
# The line gives 0.94 of the value, the bend is the other 0.06. At `ADJ 3` the count is read to 0.85, and
# of the bend next to nothing. At "i" the count is there to 0.98 and more, and most of the bend: behind
# the attention 0.57 of it, and the MLP, which need not be linear, adds to that. There it is of use:
# the chance of a word of praise grows evenly with the value, not with the count. (In all three models
# the bend is read to less than 0.12 at `ADJ 3`, and better at "i", where the MLP adds to it. But how
# much there is behind the MLP differs: 0.76, 0.95 and 0.32.) Behind the
# adjective comes a full stop. To tell good from bad reviews a count will do: from two positive clauses
# of three up, positive is more likely, so that a count and one threshold decide as Bayes' rule does.
# Only the probability needs the bend.
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
    _, exact, _ = truth.generated(text, prefix_len)
    exact_credit = exact.abs().mean(0)
    with_credit = [i for i, size in enumerate(exact_credit.tolist()) if size > 1e-6]
    show_table(
        ["slot", "mean size of the exact advantage"],
        [[slots[prefix_len + i], exact_credit[i].item()] for i in with_credit],
    )
    print(f"exactly 0 at the other {len(exact_credit) - len(with_credit)} slots")
    have = any(slots[prefix_len + i].startswith("CONN") for i in with_credit)
    predictions.compare(
        "connectors have exact credit", connectors_have_credit, "yes" if have else "no"
    )
    most = slots[prefix_len + int(exact_credit.argmax())]
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
# PPO does not know exact advantages. It builds them from the critic's values: what the value changes
# by at a token is that token's credit (with GAE, a sum of such changes over the tokens to come). So
# train a critic and nothing else: `base_lr=0` keeps the policy what it is, which also keeps the exact
# values what they are. Then compare, on the same reviews.
#
# A guess first: when you correlate the critic's *values* with the exact values, and the critic's
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
    spread = critic.train()[-1].reward_std
    exact_values, _ = truth.values(text)
    # States from the end of the prompt to the tag; the end of the text is paid, not valued.
    states = slice(prefix_len - 1, seq - 1)
    guessed = (
        spread * capture_activations(critic.policy, text, ["values"])["values"].cpu()[:, states]
    )
    exact_values = exact_values[:, states]
    names = slots[prefix_len : seq - 1]
    guessed_credit, true_credit = guessed.diff(dim=1), exact_values.diff(dim=1)

    def correlation(a: Float[Tensor, "batch n"], b: Float[Tensor, "batch n"]) -> float:
        return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()

    of_values = correlation(guessed, exact_values)
    of_credit = correlation(guessed_credit, true_credit)
    print(f"correlation with the truth: values {of_values:.2f}, credit {of_credit:.2f}")
    which = "values" if of_values > of_credit + 0.05 else "credit"
    which = "about the same" if abs(of_values - of_credit) <= 0.05 else which
    predictions.compare("correlates better with the truth", better_correlated, which)
    sizes = dict(zip(names, guessed_credit.abs().mean(0).tolist(), strict=True))
    top = max(("ADJ 1", "CONN 2", "THE 2"), key=sizes.get)
    predictions.compare("of these, the critic credits most", critic_credits, top)

bars(
    names,
    {"exact": true_credit.abs().mean(0).tolist(), "critic's": list(sizes.values())},
    "mean size of the credit, by slot",
) if truth else None

# %% [markdown]
# The values are good, and of the credit made of them most is noise. A value may be right on average
# and jump at the wrong moments; credit is made of nothing but the jumps. The first adjective, which
# deserves most, gets next to nothing. Its credit comes a word late, at the "and" or "but" behind it,
# and "the" after that, which deserves nothing, gets nearly as much again. It is not that the model
# does not know: at `ADJ 1` the value was legible to 0.97, and at `THE 2` to 0.99. But at the adjective
# the states of good and of bad differ very little, and at the connector much (lesson 02 measures
# both), and one head reads them all. It overlooks the value at the adjective, and sees it at the
# connector: what is read well at one word and badly at the next is booked as credit, either way. So is
# what the critic makes of the "i" and of the tag at the end ("cheers", "bye"), which have nothing to do
# with anything and get nearly as much.
#
# That PPO learns all the same is no contradiction. The sum of the credit over a review is right (it is
# the reward minus the first value, whatever the critic says), and noise averages out over a batch.
# What a better critic buys is fewer samples.
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
found, fits = {}, {}
for name, model in {"before": base, "after": tuned}.items():
    acts = capture_activations(model, text, RESIDUAL_SITES, pos=verdict)
    x = torch.stack(list(acts.values()))
    for method in ("mean", "lda"):
        fitted = fit_direction(x[:, fit], positive[fit], method)
        fits[method, name] = fitted.direction
        along = project(x[:, test], fitted.direction)
        right = accuracy(along, fitted.threshold, positive[test])
        found[f"{method}, {name}"] = right.tolist()
        decided = (along[-1] > fitted.threshold[-1]) == positive[test]
        print(f"{method}, {name}, at the last layer: {bootstrap_interval(decided)}")
columns = [dict(zip(layers, row, strict=True)) for row in found.values()]
show_table(
    ["layer", *found],
    [[layer, *(column[layer] for column in columns)] for layer in layers],
)
for method in ("mean", "lda"):
    turned = (fits[method, "before"][-1] * fits[method, "after"][-1]).sum().item()
    print(f"{method}: cosine of the last layer's direction before and after {turned:.2f}")
best = found["lda, before"][-1]
if truth is not None:
    belief, _ = truth.beliefs(text[test])
    bayes = ((belief[:, verdict] > 0.5) == positive[test]).float().mean().item()
    print(f"Bayes' rule on the same reviews: {bayes:.3f}")
    said = "as good as Bayes' rule" if abs(best - bayes) <= 0.02 else "more than 2 points worse"
    said = "better than it" if best > bayes + 0.02 else said
    predictions.compare("the lda direction at the last layer is", lda_accuracy, said)

# %% [markdown]
# The embedding of "i" knows nothing, block 0 leaves it five points short, the attention of block 1
# one to three, and its MLP takes it to Bayes' rule: before training the model knows all there is to
# know there. After training both are worse at the last layer in this run, lda by three points, the
# difference of means by ten.
#
# Mind the two cosines. The difference of means hardly turned. The lda direction is more than seventy
# degrees from what it was, and still decodes well! Many directions do, when a residual has 64
# dimensions and the classes are far apart, and lda picks one of them by the finest details of the
# covariance. So a cosine between two lda directions does not tell you that anything has turned.

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
# From top to bottom little changes at most places; most at `ADJ 3`, where the decoder loses five points.
# The policy learned to *say* other things, more than to *know* other things. And the picture of the
# value comes back: in the first phase the decoder does at "i" what Bayes' rule does, at `ADJ 3` and
# `STOP` it is about eight points below, and at `THE 3` and `COP 3` about eleven. After the verdict it
# falls again. (Some of the gap is the decoder's own: 512 reviews are few for 64 numbers.)
#
# ## Readable is not used
#
# A probe that decodes sentiment shows that it is *there*. Does the model use that direction when it
# chooses between "loved" and "hated"? Take the direction out of the activations, and see. That is
# called ablation.

# %%
from rlhf_lab.probes.direction import ablate  # exercise

# %% [markdown]
# Reviews that are positive and reviews that are negative differ in the logit of "loved" minus that
# of "hated", by some nats on average. Ablate a direction at the last layer, at the verdict, and ask
# how much of that gap is left. There are three candidates: lda, the difference of means, and a
# random direction. What is left after ablating the lda direction, which decodes so well?

# %%
left_without_lda = "all of it"  # predict: "all of it", "about half" or "next to nothing"
left_without_mean = "next to nothing"  # predict: "all of it", "about half" or "next to nothing"

# %%
loved, hated = (single_token(trainer.tokenizer, word) for word in words)
site = sites[-1]


@torch.no_grad()
def verdict_gap(model, direction: Float[Tensor, " d_model"] | None) -> float:
    """How much further positive reviews lean to "loved" than negative ones."""

    def take_out(residual, hook):
        changed = residual.clone()
        changed[:, verdict] = ablate(residual[:, verdict], direction)
        return changed

    hooks = [] if direction is None else [(site, take_out)]
    with model.base_model.hooks(fwd_hooks=hooks):
        logits = model(text[test])[0][:, verdict]
    lean = logits[:, loved] - logits[:, hated]
    return (lean[positive[test]].mean() - lean[~positive[test]].mean()).item()


x = capture_activations(base, text[fit], [site], pos=verdict)[site]
noise = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(0))
candidates = {
    "nothing": None,
    "lda": fit_direction(x, positive[fit], "lda").direction.float(),
    "difference of means": fit_direction(x, positive[fit], "mean").direction.float(),
    "a random direction": noise / noise.norm(),
}
gaps = {name: verdict_gap(base, direction) for name, direction in candidates.items()}
show_table(
    ["ablated", "gap in nats", "share left"],
    [[name, gap, gap / gaps["nothing"]] for name, gap in gaps.items()],
)


def in_words(share: float) -> str:
    return "all of it" if share > 0.9 else "next to nothing" if share < 0.25 else "about half"


for name, guess in [("lda", left_without_lda), ("difference of means", left_without_mean)]:
    left = in_words(gaps[name] / gaps["nothing"])
    predictions.compare(f"of the gap, without {name}, is left", guess, left)

# %% [markdown]
# The lda direction decodes to the limit of what is possible, and the model does not care whether it is
# there. Lda looks for an axis along which the classes are well separated *for their spread*, and finds
# one with very little of either; take it out, and all of the difference is still there along others.
# The difference of means is where the classes really lie apart, and without it "loved" and "hated" are
# chosen as if nothing had been read. (The random direction shares a little with everything; without
# it more than nine tenths are left.)
#
# A probe that reads well tells you what is there. Only an intervention tells you what is used.
#
# ## Which heads move?
#
# Your recorder kept what each head and each MLP adds at the verdict. Divide how far each has moved
# from phase 0 by how large it was then. Which block's heads move more, the first or the last?

# %%
moving_block = "last"  # predict: "first" or "last"

# %%
names, start = parts[0]
size = start.norm(dim=-1).mean(1)
moved = {
    phase: ((now - start).norm(dim=-1).mean(1) / size).tolist() for phase, (_, now) in parts.items()
}
there = [i for i in range(len(names)) if size[i] > 0]
order = sorted(there, key=lambda i: -moved[len(reports)][i])[:12]
show_table(
    ["part", "size at the start", *(f"moved by phase {phase}" for phase in moved if phase)],
    [[names[i], size[i].item(), *(row[i] for phase, row in moved.items() if phase)] for i in order],
)
heads = [i for i, name in enumerate(names) if "H" in name]
last_block = f"L{trainer.policy.base_model.cfg.n_layers - 1}H"
mean_move = {"first": [], "last": []}
for i in heads:
    for which, block in {"first": "L0H", "last": last_block}.items():
        if names[i].startswith(block):
            mean_move[which].append(moved[len(reports)][i])
predictions.compare(
    "heads move more in the block that is",
    moving_block,
    max(mean_move, key=lambda which: sum(mean_move[which]) / len(mean_move[which])),
)
curves(
    {names[i]: (list(moved), [row[i] for row in moved.values()]) for i in order if i in heads},
    "how far each head's output at the verdict moved, as a share of its size",
)

# %% [markdown]
# On average the heads of block 1, which read the clauses for the verdict, move more than those of
# block 0. More than half of the way lies behind them by phase 4, and more than four fifths by phase 8.
#
# Relative movement makes much of small parts, though, and hides large ones. `L1H0` leads the table,
# and is the smallest head of block 1: multiply the columns, and it has moved less than any other of
# them. The MLP of block 0 stands far down, for it has moved by less than a third of its size;
# multiply, and it has moved farther than any head. And movement is not effect: whether a part moved
# the *choice* is the question of the next lesson.
#
# ## What surprised you

# %%
predictions.show()

# %% [markdown]
# ## Try
#
# - Give the suite a budget of `Budget(time_frac=0.05)`, and read `run.notes()`.
# - Replace `Direction("sentiment", ...)` by a direction for something that does not matter: label a
#   review by whether its first aspect is "plot". Where is that readable, and does training change it?
# - `python -m rlhf_lab report` on the run's folder writes all of its records as one page of HTML.
# - Train the critic with `advantages="one_step"`, and with ten times the phases. Does the credit move
#   to the adjective?
#
# Next: 09 what RLHF changed, where the run is over and the two ends of it are compared.
