# %% [markdown]
# # 08 Watch it learn
#
# By the end of this lesson, you will be able to track what a policy represents as it trains, and test whether the model
# uses the information a probe finds.
#
# A reward curve shows *that* a policy learns, but not what changes inside it. To look inside, you train *probes* on its
# activations: small classifiers that predict a property of the text. A probe tells you that information is present, but
# not whether the model uses it. To find out, you erase the information and see whether the behavior changes.
#
# **You will also be able to**
# - attach probes to a run, and check that they don't change it;
# - recognize when a probe has gone stale during training;
# - erase a label from activations with LEACE, and choose the controls such an experiment needs.
#
# **You need** {lesson:the_policy}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 90 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress, show_table
from rlhf_lab.probes import Direction, FrozenProbe, ReelTruth, Run, RunHealth, Suite
from rlhf_lab.probes.amnesic import decide_without, erasing, forgotten
from rlhf_lab.probes.erasure import Eraser, orthogonal_eraser
from rlhf_lab.probes.logit_shift import single_token
from rlhf_lab.sampling import tokenize_prompts
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import bars, curves, heatmap, short_site

SETTINGS = dict(
    preset="reel",
    total_phases=12,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    keep_checkpoints=None,  # all of them
    seed=1,
)
predictions = Predictions()
over_seeds = SeedFigures("watch_it_learn", SETTINGS)

args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args)
truth = ReelTruth.of_reward(args.reward_fn) if trainer.speaks_reel else None

# %% [markdown]
# ## Probes on a run
#
# As a policy learns, the texts it samples change. But you want to see how the *policy* changes, so the probes need a
# fixed set of texts. Here we use 768 reviews sampled from the grammar, each with a hidden label: positive or negative.

# %%
if truth is not None:
    text, positive = truth.reviews(768, seed=0)
    slots = truth.slot_names(text.shape[1])
    verdict = truth.grammar.slot("VERB") - 1  # the position of "i", before the verb
else:
    adjectives = "good great lovely perfect bad terrible awful boring".split()
    nouns = "movie film plot story acting script".split()
    phrases = [f"The {noun} was {word}. I" for noun in nouns for word in adjectives]
    text = torch.tensor(tokenize_prompts(trainer.tokenizer, phrases, args.prepend_bos))
    positive = torch.tensor([word in adjectives[:4] for _ in nouns for word in adjectives])
    slots = [str(i) for i in range(text.shape[1])]
    verdict = text.shape[1] - 1
words = ("loved", "hated") if truth else (" loved", " hated")
pair = tuple(single_token(trainer.tokenizer, word) for word in words)
for row in range(2):
    print("positive:" if positive[row] else "negative:", trainer.tokenizer.decode(text[row]))

# %% [markdown]
# Each position in a review has a name. `ADJ 2` is the adjective in the second clause, `ASP 2` its noun, `COP 2` "was"
# or "wasn't", `ADV 2` its adverb, and `CONN 2` the "and" or "but" before that clause. `STOP`, `I`, `VERB`, `IT`, `END`,
# and `TAG` make up the end of the review (". i loved it . thanks"). All measurements at a position refer to the state
# *after* that token. So at `I`, the model is about to choose the verdict.
#
# A suite is a set of probes that record the same run. `Direction` fits a new probe for the label at every position, in
# every recorded phase. `FrozenProbe` fits one probe at `I` in phase 0, and keeps using it in later phases.
#
# (9 s on one core)

# %%
trainer = RLHFTrainer(args, out=new_run("watched"))
suite = Suite(
    RunHealth(),
    Direction("sentiment", "lda", every=4),
    FrozenProbe(pos=verdict, every=4),
    eval_tokens=text,
    labels=positive,
)
suite.attach(trainer)
reports = trainer.train()
run = Run(trainer.run.path)
print(f"reward {reports[0].mean_reward:.2f} -> {reports[-1].mean_reward:.2f} in the last phase")
print(f"{sum(c.ok for c in run.checks())} of {len(run.checks())} checks of the records passed")

# %% [markdown]
# `Run` loads everything back from the run's folder and checks identities that every record must satisfy. Did the probes
# change the run? To find out, train a twin without probes for two phases, and compare its weights with the first run's
# weights after two phases. Will they be bitwise identical, nearly equal, or different?

# %%
twin_weights = "bitwise identical"  # predict: "bitwise identical", "nearly equal" or "different"

# %%
twin = RLHFTrainer(args, out=new_run("twin"))
for _ in range(2):
    twin.run_phase()
pairs = zip(twin.policy.parameters(), run.policy(2).parameters(), strict=True)
gap = max((a.cpu() - b).abs().max().item() for a, b in pairs)
found = "bitwise identical" if gap == 0 else "nearly equal" if gap < 1e-5 else "different"
predictions.compare("weights with and without probes", twin_weights, found)

# %% [markdown]
# The probes run their own forward passes and don't draw from the run's random number generators, so the weights are identical.
#
# ## A direction for sentiment
#
# Is "this review will be positive" a direction in the residual stream? There are two common ways to find such a
# direction. One is the difference between the two class means. The other is Fisher's linear discriminant (LDA), which
# also divides by the within-class covariance $S$. Your function returns `Fitted(direction, threshold)`. The ridge term
# adds `ridge` times the mean of $S$'s diagonal to that diagonal.

# %%
from rlhf_lab.probes.direction import fit_direction  # exercise

# %% [markdown]
# How well does LDA at the last layer predict the hidden label at `I` on held-out reviews? No classifier can do better
# than Bayes' rule with the grammar's probabilities. Even Bayes' rule makes mistakes, because a positive reviewer
# sometimes writes negative clauses. Is LDA that good before training? (In the table, "0 pre" is the embedding of "i",
# and "post" means after a block's MLP.)

# %%
lda_accuracy = "as good as Bayes' rule"  # predict: "more than 2 points worse", "as good as Bayes' rule" or "better than it"

# %%
records = run.records("direction_sentiment")
before, after = records[0], records[-1]
at_verdict = lambda record, name: [row[verdict] for row in record[name]]
layers = [short_site(site) for site in before["sites"]]
columns = [at_verdict(before, "accuracy"), at_verdict(after, "accuracy")]
columns.append(at_verdict(after, "accuracy_shuffled"))
names = ["layer", "before training", "after training", "after, shuffled labels"]
show_table(names, zip(layers, *columns, strict=True))
print(f"accuracy of LDA at I on {before['sequences']['held']} held-out reviews")
cosines = [at_verdict(after, x)[-1] for x in ("cosine_with_reference", "split_half_cosine")]
print(f"cosine of LDA before and after training {cosines[0]:.2f}, of two halves {cosines[1]:.2f}")
if truth is not None:
    print(f"accuracy of Bayes' rule on the same reviews: {before['bayes_accuracy'][verdict]:.3f}")
    more = columns[0][-1] - before["bayes_accuracy"][verdict]
    found = "as good as Bayes' rule" if abs(more) <= 0.02 else "more than 2 points worse"
    found = "better than it" if more > 0.02 else found
    predictions.compare("before training, LDA at the last layer is", lda_accuracy, found)

# %% [markdown]
# Before training, LDA at the last layer is as good as Bayes' rule (0.96), so at `I` the model represents everything there is to
# know about the label. After training, LDA is almost as good (0.93). The embedding contains no information about the label.
#
# Be careful with cosines. The LDA directions before and after training have a cosine of only 0.29. But even LDA fits to
# two halves of the *same* activations have a cosine of only 0.42. With dozens of dimensions, many directions separate
# the classes, and small differences in the covariance determine which one LDA returns. Before you conclude that a
# direction has turned, check how much two fits to the same activations differ.

# %%
heatmap(
    [record["accuracy"][-1] for record in records] + ([before["bayes_accuracy"]] if truth else []),
    [f"phase {record['phase']}" for record in records] + (["Bayes' rule"] if truth else []),
    slots,
    "Accuracy of LDA at the last layer",
    limits=(0.45, 1),
)

# %% [markdown]
# Compare the rows of this heatmap: at most positions, training hardly changes the accuracy. The policy has learned to
# *write* something else, but it still represents which reviews are negative. LDA matches Bayes' rule at `I`, but not at adjectives.
#
# ### A probe from before training
#
# So far, we've fitted a new probe in each phase, but in practice, a monitor is often fitted only once. `FrozenProbe` keeps
# using the difference of means and the threshold from phase 0. How accurate is it in the last phase, compared with a new probe?

# %%
frozen_probe = "more than 5 points worse"  # predict: "as good", "1 to 5 points worse" or "more than 5 points worse"

# %%
records = run.records("frozen_probe")
names = dict(accuracy_frozen="accuracy", called="calls positive", cosine="cosine with a new fit")
columns = {name: [record[key][-1] for record in records] for key, name in names.items()}
worse = [-record["gap"][-1] for record in records]
columns["accuracy of a new fit"] = [a + b for a, b in zip(columns["accuracy"], worse, strict=True)]
last_phase = {name: column[-1] for name, column in columns.items()}
over_seeds.compare("frozen probe in the last phase", last_phase)
found = "1 to 5 points worse" if worse[-1] <= 0.05 else "more than 5 points worse"
predictions.compare("the frozen probe is", frozen_probe, "as good" if worse[-1] < 0.01 else found)
phases = [record["phase"] for record in records]
curves(
    {name: (phases, column) for name, column in columns.items()},
    "A probe fitted in phase 0, in later phases (last layer)",
    y_label="fraction of held-out reviews; cosine",
)

# %% [markdown]
# In the last phase, the frozen probe's accuracy is 0.71, while a newly fitted probe's accuracy is 0.86. Yet their
# directions have a cosine of 0.96, so the direction is not the problem. The problem is the threshold: the policy now leans
# toward praise in all reviews, which shifts all states along the direction, so the probe calls 82% of them positive. The
# same happens with other seeds. So if you fit a monitor before training, you have to recalibrate it later.
#
# ## Read, erase, use
#
# A probe shows that you can *read* sentiment from the activations. Does the model *use* it to choose between "loved"
# and "hated"? To find out, erase sentiment from the activations and see whether the choice changes. We measure the
# *gap*: how much larger, on average, the logit difference between "loved" and "hated" is in positive reviews than in
# negative ones. `decide_without` measures the gap on held-out reviews. It also reports the accuracy of a new LDA probe
# fitted *after the erasure*, both at the erased layer and at the last layer.

# %%
base = run.policy(0)
*_, last_site = before["sites"]
middle = f"blocks.{(len(base.base_model.blocks) - 1) // 2}.hook_resid_post"  # after block 0
spare, spare_positive = truth.reviews(3000, seed=2) if truth else (text, positive)
cut = len(spare) // 2
for_eraser, judged = spare_positive[:cut], (spare[cut:], spare_positive[cut:])


def residuals(model, site=middle) -> Float[Tensor, "pos n d_model"]:
    acts = capture_activations(model, spare[:cut, : verdict + 1], [site])[site]
    return acts.transpose(0, 1).cpu()


decide = lambda model, eraser, at=middle: decide_without(model, *judged, at, verdict, pair, eraser)


def measured(model, *erasers: Eraser | None, site=middle) -> Float[Tensor, "eraser 3"]:
    """Measure the gap left, and the accuracies at the erased and at the last layer."""
    untouched = decide(model, None)
    effects = [forgotten(decide(model, eraser, site), untouched) for eraser in erasers]
    return torch.tensor([[e.gap.value, e.read_there.value, e.read_last.value] for e in effects])


most = lambda x: "all of it" if x > 0.9 else "next to nothing" if x < 0.25 else "about half"

# %% [markdown]
# ### An experiment with a known result
#
# The obvious experiment is to remove a direction from the final residual stream and measure the gap. But at this hook
# point, the result follows from algebra alone. Up to the norm's scale, a linear map $u$ turns the final residual stream
# into the logit difference. If $d$ is the difference of class means, the gap is $u \cdot d$. After you remove a unit
# vector $a$ (in the code, $a$ is `d`, and $d$ is `axes["mean"]`), the gap is
#
# $$u \cdot (d - (a \cdot d)\, a) = u \cdot d \; \left(1 - \frac{\cos(a, d) \cos(a, u)}{\cos(d, u)}\right)$$
#
# How much of the gap is left after you ablate (remove) the LDA direction: all of it, about half, or next to nothing?

# %%
left_without_lda = "all of it"  # predict: "all of it", "about half" or "next to nothing"

# %%
states = residuals(base, last_site)
axes = {method: fit_direction(states, for_eraser, method).direction for method in ("lda", "mean")}
for name, d in axes.items():
    left, accuracy, _ = measured(base, orthogonal_eraser(d), site=last_site)[0]
    cosine = (d * axes["mean"])[-1].sum()  # the direction of the difference of means is mu
    print(f"{name}: cosine {cosine:.2f}; gap left {left:.2f}; accuracy of a new LDA {accuracy:.2f}")
    if name == "lda":
        predictions.compare("gap left without the LDA direction", left_without_lda, most(left))

# %% [markdown]
# The LDA direction has a cosine of about 0 with $d$. If $\cos(a, d) = 0$, the fraction in the formula is 0, so the
# whole gap remains, whether or not the model uses this direction. A new LDA probe, fitted after the ablation, is also
# as accurate as before, so no information was erased. The difference of means, on the other hand, is $d$ itself, so
# ablating it removes the gap in any model.
#
# ### LEACE
#
# When is a label invisible to every linear probe? A probe $w \cdot x$ is useless if it doesn't covary with the label, and
# this holds for every $w$ if and only if the two class means are equal. LEACE (Belrose et al. 2023,
# [2306.03819](https://arxiv.org/abs/2306.03819)) is the affine map that makes the means equal and moves $x$ as little as
# possible. Let $S$ and $\mu$ be the covariance and mean of all $x$, and $d$ the difference between the class means. Then:
#
# 1. Whiten: $y = S^{-1/2} (x - \mu)$. The class means now differ by $v = S^{-1/2} d$.
# 2. The smallest change that makes the means equal is a projection: $y - v \, (v \cdot y) / (v \cdot v)$.
# 3. Transform back. Since $S^{1/2} v = d$ and $v \cdot y = d^\top S^{-1} (x - \mu)$, you get
#
# $$r(x) = x - d \; w \cdot (x - \mu), \qquad w = \frac{S^{-1} d}{d^\top S^{-1} d}$$
#
# So LEACE reads along the LDA direction, $S^{-1} d$, and moves $x$ along $d$. Difference-of-means ablation removes the
# component along $d$, while LEACE removes what the best linear reader picks up. Your function returns an `Eraser(mean, axis,
# reader)`, whose fields are $\mu$, $d$, and $w$. Compute in float64 (`exact(x)`), with the same ridge as `fit_direction`.

# %%
from rlhf_lab.probes.erasure import fit_leace  # exercise

# %% [markdown]
# ### Does the verdict need it?
#
# Now erase the label in the middle of the network, where algebra doesn't determine the result. We do this after block 0
# and at *every* position up to `I`, because block 1 reads from all of them. This is known as amnesic probing (Elazar et
# al. 2021, [2006.00995](https://arxiv.org/abs/2006.00995)).
#
# Two controls erase something else, and each is repeated 20 times. One uses LEACE with shuffled labels, and the other
# ablates random directions drawn with the same covariance as the activations. How much of the gap is left after LEACE
# with the true labels?

# %%
gap_after_leace = "next to nothing"  # predict: "all of it", "about half" or "next to nothing"
random = torch.Generator().manual_seed(0)


def shuffled_leace(states: Float[Tensor, "pos n d_model"]) -> Eraser:
    return fit_leace(states, for_eraser[torch.randperm(cut, generator=random)])


def random_direction(states: Float[Tensor, "pos n d_model"]) -> Eraser:
    centered = (states - states.mean(1, keepdim=True)).double()
    d = torch.randn(cut, dtype=torch.float64, generator=random) @ centered
    return orthogonal_eraser(d / d.norm(dim=-1, keepdim=True).clamp(min=1e-12))


# %% [markdown]
# (35 s on one core)

# %%
states = residuals(base)
leace = fit_leace(states, for_eraser)
results = {
    "random directions": measured(base, *(random_direction(states) for _ in range(20))),
    "LEACE, shuffled": measured(base, *(shuffled_leace(states) for _ in range(20))),
    "nothing": measured(base, None),
    "lda": measured(base, orthogonal_eraser(fit_direction(states, for_eraser, "lda")[0])),
    "means": measured(base, orthogonal_eraser(fit_direction(states, for_eraser)[0])),
    "LEACE": measured(base, leace),
}
order = ["nothing", "lda", "means", "random directions", "LEACE", "LEACE, shuffled"]
for name in order:
    low, high = results[name].aminmax(dim=0)
    ends = zip(low.tolist(), high.tolist(), strict=True)
    gap, there, end = (f"{a:.2f}" + f" to {b:.2f}" * (a < b) for a, b in ends)
    print(f"{name}: gap left {gap}; accuracy {there}, at the last layer {end}")
predictions.compare("gap left after LEACE", gap_after_leace, most(results["LEACE"][0, 0]))
for name in ("reel-nano-b", "reel-nano-c") if truth else ():
    model = RLHFTrainer(RLHFArgs(**SETTINGS | {"base_model": name}), out=new_run(name)).policy
    its_states = residuals(model)
    left = measured(model, fit_leace(its_states, for_eraser))[0, 0]
    low, high = measured(model, *(shuffled_leace(its_states) for _ in range(5)))[:, 0].aminmax()
    print(f"{name}: gap left after LEACE {left:.2f}, after 5 shuffled {low:.2f} to {high:.2f}")

# %%
measures = ("gap left", "LDA at the erased layer", "LDA at the last layer")
column = lambda i, summary: [summary(results[name][:, i]).item() for name in order]
bars(
    order,
    {name: column(i, torch.mean) for i, name in enumerate(measures)},
    "What is left after an erasure (controls: mean and range of 20)",
    "fraction of the gap; accuracy",
    {name: (column(i, torch.amin), column(i, torch.amax)) for i, name in enumerate(measures)},
)

# %% [markdown]
# Compare LEACE with its control (shuffled labels), and difference-of-means ablation with its control (random directions).
#
# - Ablating the LDA direction changes nothing, just as at the last layer, so it needs no control.
# - After LEACE, the probe's accuracy at the erased layer is close to a coin flip (0.58), and only 6% of the gap is left.
#   LEACE with shuffled labels has neither effect. So the verdict depends on what a linear probe can find after block 0.
# - Ablating the difference of means has the same effect as LEACE. But ablating a *random* direction leaves as little as
#   39% of the gap without changing the accuracy. Ablating any high-variance direction does damage, no matter what it
#   represents. So without this control, the ablation would prove little.
# - After LEACE, LDA at the last layer can read the label again (0.85). Block 1 recomputes it from nonlinearly encoded
#   information, but the verdict doesn't use it. So the label is *readable but not used*.
# - Two more base models, pretrained on Reel with different seeds, show the same effect.
#
# ### Training with the label erased
#
# `trainer.intervene` changes activations throughout a run, both during sampling and during training. The next cell
# trains a policy with the phase 0 eraser after block 0. As a control, it trains another one with an eraser fitted to
# shuffled labels. Does a policy still learn to get a high reward while the label is erased? (How does its reward
# compare with that of the run without an eraser?)
#
# (15 s on one core)

# %%
reward_if_erased = "as high"  # predict: "as high", "at least 0.1 lower" or "not learned"

# %%
policies, rewards = {"no eraser": run.policy("last")}, {"no eraser": reports[-1].mean_reward}
for name, eraser in {"label erased": leace, "shuffled erased": shuffled_leace(states)}.items():
    arm = RLHFTrainer(args, out=new_run(name.split()[0]))
    arm.intervene(middle, erasing(eraser), name="erased")
    rewards[name] = arm.train()[-1].mean_reward
    policies[name] = Run(arm.run.path).policy("last", {"erased": lambda act, where: act})
gaps, accuracies = {}, {}
for name, policy in policies.items():
    decided = decide(policy, leace)
    leans = [decided.lean[side].mean() for side in (decided.positive, ~decided.positive)]
    gaps[name] = (leans[0] - leans[1]).item()
    accuracies[name] = decided.read_there.double().mean().item()
rows = [[name, rewards[name], gaps[name], accuracies[name]] for name in policies]
show_table(["trained", "reward", "gap, label erased, nats", "LDA after the eraser"], rows, digits=2)
over_seeds.compare("gap with the label erased, nats", gaps)
found = "as high" if rewards["no eraser"] - rewards["label erased"] < 0.1 else "at least 0.1 lower"
found = found if rewards["label erased"] > reports[0].mean_reward + 0.05 else "not learned"
predictions.compare("the reward with the label erased is", reward_if_erased, found)

# %% [markdown]
# The reward is nearly as high as without an eraser (0.96 compared with 0.98). A policy can write praise without representing
# the review's sentiment.
#
# At the end of training, LDA reads the label after the eraser with an accuracy of 0.90. Has the policy found a way
# around the eraser? No, because the accuracy is just as high for the policy that trained without an eraser. Training
# simply moves the activations so far that the phase 0 eraser no longer fits them.
#
# If you erase the label in both policies, the one trained with the eraser has the larger gap for all three seeds (0.89,
# 1.52, and 2.09 nats, compared with 0.57, 0.70, and 0.87). Did it learn to use what the eraser leaves? This experiment
# *doesn't show* that. The control changes the gap by just as much in the other direction (to -0.21, -0.51, and -0.11),
# even though its eraser only removes a shuffled label. Don't call a difference between two runs an effect unless it
# exceeds the difference an irrelevant change makes.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# Pick a property you believe the model uses at `ASP 2` to choose between "was" and "wasn't". Test your claim with a probe,
# an eraser, a shuffled-label control, and a confidence interval. Before you start, write down which result would refute it.
#
# In the next lesson, {lesson:what_rlhf_changed}, you'll compare a policy before and after training and find out which
# of its parts caused the difference.
