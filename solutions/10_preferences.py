# %% [markdown]
# # 10 Preferences
#
# By the end of this lesson, you will be able to train a reward model on pairwise comparisons, watch a policy exploit
# its errors, and train a policy with DPO, which needs no reward model.
#
# Nobody can write down a formula for a good text. But if you show people two texts, they can usually say which one is
# better. A reward model learns from such choices, and PPO then maximizes its score. On Reel, you know exactly how much
# the rater values each text, so you can check every step.
#
# **You need** {lesson:the_kl_penalty} for the optimal policy $\pi^*$, and {lesson:the_objective}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 40 seconds on one CPU core and needs no internet
# access. Cells that take longer than 3 seconds are labeled with their run time, like this one:
#
# (5 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, progress, show_table
from rlhf_lab.course.seed_figures import stored_figures
from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import Grammar, Reward, build_graph, grammar_policy, grammatical
from rlhf_lab.organism import optimal_policy, true_reward
from rlhf_lab.organism.rewards import sentiment_logit, true_log_odds
from rlhf_lab.rewards import LearnedReward, RewardModel, reel_pairs
from rlhf_lab.rewards.preference_eval import judge, reading_of
from rlhf_lab.supervised import fit
from rlhf_lab.tuning.examples import encode_examples, text_logprobs
from rlhf_lab.views import curves

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=12,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    normalize_reward=False,
    kl_coef=0.03,
    kl_in="reward",
    kl_estimator="k1",
)
SEED = SETTINGS["seed"]
predictions = Predictions()
over_seeds = SeedFigures("preferences", SETTINGS)
stored = stored_figures("preference_runs")
grammar = Grammar()

# %% [markdown]
# ## A rater
#
# Suppose each text $x$ has a *utility* $u(x)$ for the rater. When the rater compares two texts, the one with the higher
# utility usually wins, but not always. The Bradley-Terry model (1952) gives the probability that text $a$ beats text $b$:
#
# $$P(a \succ b) = \sigma\big(u(a) - u(b)\big), \qquad \sigma(d) = \frac{1}{1 + e^{-d}}$$
#
# Note that only the *difference* in utility matters. Our rater's utility is the exact log odds that a review is
# positive. `reel_pairs` samples pairs of reviews, along with the rater's choices:

# %%
fresh = reel_pairs(1500, 1000 + SEED)
gaps = torch.from_numpy(fresh.true_reward_gaps)
show_table(
    ["utility of chosen minus rejected", "chosen", "rejected"],
    [[gaps[i].item(), fresh.chosen[i], fresh.rejected[i]] for i in range(3)],
)

# %% [markdown]
# Now imagine a judge who knows $u$ exactly and always picks the text with the higher utility. How often does this judge
# agree with the rater?

# %%
best_judge = "above 0.95"  # predict: "below 0.8", "0.8 to 0.95" or "above 0.95"

# %%
agrees = ((gaps.sign() + 1) / 2).double()  # a tie counts half
ceiling = bootstrap_interval(agrees, generator=torch.Generator().manual_seed(0))
print(f"accuracy of the best judge: {ceiling}")
limits = {"below 0.8": 0.8, "0.8 to 0.95": 0.95, "above 0.95": np.inf}
predictions.compare("accuracy of the best judge", best_judge, ceiling.value, limits)

# %% [markdown]
# Even the best possible judge has an accuracy of only 0.89, because the rater's choice between two nearly equal texts
# is close to a coin flip. Keep this ceiling in mind whenever you interpret a reward model's accuracy.
#
# ## The likelihood and its gradient
#
# A reward model $r_\theta$ maps each text to a number. We train it to make the observed choices likely. With $d =
# r_\theta(\text{chosen}) - r_\theta(\text{rejected})$, the loss for one pair is
#
# $$L(d) = -\log \sigma(d) = \log(1 + e^{-d})$$
#
# Since $\sigma' = \sigma (1 - \sigma)$ and $1 - \sigma(d) = \sigma(-d)$, its derivatives are
#
# $$\frac{dL}{dd} = -\sigma(-d), \qquad \frac{d^2 L}{dd^2} = \sigma(d)\, \sigma(-d) > 0$$
#
# The slope is minus the probability the model assigned to the *other* outcome. So a surprising pair has a large gradient, while
# a pair the model already gets right by a wide margin has almost none. If you add a constant to all rewards, the loss stays the
# same, which means that preferences don't determine a reward model's mean. If you care about the mean, you can keep it near 0
# by penalizing the squared sum of the two scores. This is known as *centering* (`center_coef` in the exercise).

# %%
from rlhf_lab.functional import bradley_terry_loss  # exercise

# %% [markdown]
# ## A reward model
#
# Our reward model is the policy's transformer with a linear head that reads the last token's state. The next cell uses
# your loss to train two reward models for the same number of steps, one on 64 pairs and the other on 1,024 pairs.
#
# (13 s on one core)


# %%
def fitted(n: int, steps: int, seed: int) -> RewardModel:
    """Train a reward model on n pairs for this number of steps."""
    model, rng = RewardModel(load_model("reel-nano"), seed=seed), np.random.default_rng(seed)
    pairs = reel_pairs(n, seed)
    tokens, real = model.encode(pairs.chosen + pairs.rejected)

    def batch_loss() -> Float[Tensor, ""]:
        batch = torch.from_numpy(rng.choice(n, min(n, 32), replace=False))
        both = torch.cat([batch, batch + n])
        chosen, rejected = model(tokens[both], real[both]).chunk(2)
        return bradley_terry_loss(chosen, rejected)

    fit(model, batch_loss, steps, 1e-3, "reward model", False)
    model.set_normalization(model.score(pairs.chosen[:64] + pairs.rejected[:64]))
    return model.requires_grad_(False)


few, many = fitted(64, steps=120, seed=SEED), fitted(1024, steps=120, seed=SEED)
models = {"64 pairs": few, "1,024 pairs": many}
won = torch.ones(len(fresh), dtype=torch.bool)
verdicts = {"the true utility": judge(gaps, gaps, won)}
for name, model in models.items():
    verdicts[name] = judge(model.score(fresh.chosen) - model.score(fresh.rejected), gaps, won)
show_table(
    ["reward", "accuracy", "ordered like the utility", "minus log-likelihood"],
    [[name, v.accuracy, v.as_truth, v.nll] for name, v in verdicts.items()],
)
print(f"n = {len(gaps)} fresh pairs; a coin has a log-likelihood of -{np.log(2):.3f} nats per pair")
minus_log = {name: verdicts[name].nll for name in models}
over_seeds.compare("minus log-likelihood", minus_log)

# %% [markdown]
# The model trained on 1,024 pairs has an accuracy of 0.85, which is close to the ceiling. The model trained on 64 pairs
# still ranks 73% of the fresh pairs correctly, yet for all three seeds, its log-likelihood is worse than a coin flip's.
# It is overconfident, and you can't see this from the accuracy alone. The appendix {lesson:reward_models} shows the
# calibration of both models.
#
# ## The words that a reward model responds to
#
# Accuracy doesn't tell you *why* a model is right. To find out which words it relies on, you can intervene on the text:
# change a single word in a review, and compare the scores before and after. `reading_of` replaces an adjective with its
# opposite of the same strength, "was" with "wasn't", and the verdict's verb with its opposite. As a control, it
# replaces "and" with "but", which doesn't change the utility. Which of these does the 64-pair model overlook: the first
# adjective, the third copula, or the verb?

# %%
overlooked = "adjective 1"  # predict: "adjective 1", "copula 3" or "verb"

# %%
probes = grammar.sample(256, np.random.default_rng(2000 + SEED)).texts()
read = {name: reading_of(model.score, probes) for name, model in models.items()}
later = stored["longer"]["4096 pairs, 400 steps"]
rows, fractions = [], {}
for edit in ("adjective 1", "adjective 3", "copula 3", "verb", "connector"):
    small, large = (read[name][edit][0].mean().item() for name in models)
    exact = read["64 pairs"][edit][1]
    rows.append([edit, small, large, float(np.mean([run[edit] for run in later])), exact])
    if edit in ("adjective 1", "copula 3", "verb"):
        fractions[edit] = small / exact
show_table(["replaced word", *models, "4,096 pairs, stored", "exact"], rows, digits=2)
print(f"mean score change in the utility's direction, {len(probes)} reviews; 4,096 pairs: 3 seeds")
predictions.compare("the 64-pair model overlooks", overlooked, min(fractions, key=fractions.get))

# %% [markdown]
# The verdict's verb matters more than any other word: replacing it changes the utility by 4.39. But it changes the
# 64-pair model's score by only 0.20. Even the score of the 1,024-pair model, whose accuracy is close to the ceiling,
# changes by only 1.19. A review's clauses usually agree with its verb, so a model can rank most pairs without looking
# at the verb. The model trained longer, on 4,096 pairs, does look at the verb: its score changes by 3.84.
#
# So high accuracy on samples from the reference doesn't guarantee correct scores for texts whose words contradict each
# other. And a policy trained on such a reward model may start producing exactly that kind of text.
#
# ## Over-optimization
#
# Let's use PPO to maximize the score of the 64-pair model, with a small KL coefficient. (The score is normalized to mean 0 and
# standard deviation 1 over the model's training pairs.) Will the true reward rise and stay high, or rise and then fall?
#
# (9 s on one core)

# %%
true_reward_of_ppo = "rises and stays"  # predict: "rises and stays" or "rises and falls"

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, reward_fn=LearnedReward(few), true_reward_fn=true_reward)
reports = trainer.train()
kls = [report.kl_per_sequence for report in reports]
learned, true_rewards = ([getattr(r, x) for r in reports] for x in ("mean_reward", "true_reward"))
curves(
    {
        "learned reward, divided by its maximum": (kls, [x / max(learned) for x in learned]),
        "true reward": (kls, true_rewards),
    },
    "PPO on the 64-pair reward model, phase by phase",
    "KL from the reference, nats per review",
    "reward",
)

# %%
far = int(np.argmax(kls))
print(f"phase {far} has the highest KL, {kls[far]:.2f} nats per review: learned reward ", end="")
print(f"{learned[far]:.3f} (maximum {max(learned):.3f}), true reward {true_rewards[far]:.3f}")
rollout = trainer.rollout_phase()
true_now = true_reward(rollout.texts).tolist()
rows = sorted(zip(rollout.raw_rewards.tolist(), true_now, rollout.texts, strict=True), reverse=True)
show_table(["learned reward", "true reward", "text"], rows[::25][:5])
two = {"true reward, maximum": max(true_rewards), "true reward, last phase": true_rewards[-1]}
over_seeds.compare("PPO on 64 pairs", two)
fell = max(true_rewards) - np.mean(true_rewards[-2:])
kind = "rises and falls" if fell > 0.05 else "rises and stays"
predictions.compare("true reward under PPO", true_reward_of_ppo, kind)

# %% [markdown]
# For all three seeds, the true reward ends at or near its maximum. On Reel, most words that raise the learned reward also
# raise the true reward. But look at the rightmost point of the plot: in phase 9, the learned reward peaks while the true
# reward is only 0.73. The policy is exploiting a flaw in the reward model, although it recovers later. (Keep in mind that
# this is a single phase of a single run.) The last text in the table shows another flaw: "i disliked it" gets a high learned
# reward because the model ignores the verb.
#
# Over-optimization (Gao et al. 2022) happens when a reward model is wrong about some texts and the policy finds them.
# {Lesson:what_breaks_it} shows how far it can go. {Lesson:reward_models} shows that best-of-n sampling can
# over-optimize without any training, and what happens if the collected pairs are biased.
#
# ## DPO: training without a reward model
#
# In {lesson:the_kl_penalty}, you derived the optimal policy for a reward, $\pi^*(x) = \frac{1}{Z}\, \mathrm{ref}(x)\,
# e^{r(x)/\beta}$. Now solve this for the reward instead:
#
# $$r(x) = \beta \log \frac{\pi^*(x)}{\mathrm{ref}(x)} + \beta \log Z$$
#
# In other words, *every* policy is optimal for some reward, called its *implicit reward*, and this formula gives it up
# to a constant. Since the Bradley-Terry model only uses differences, the constant cancels. For a chosen text $c$ and a
# rejected text $\ell$:
#
# $$P(c \succ \ell) = \sigma\Big(\beta \log \frac{\pi(c)}{\mathrm{ref}(c)} - \beta \log \frac{\pi(\ell)}{\mathrm{ref}(\ell)}\Big)$$
#
# The DPO loss is minus the log of this probability (Rafailov et al. 2023). So you can fit a policy to preferences
# directly, just as you would fit a reward model. In terms of the implicit reward $\hat r$, the gradient is
#
# $$\nabla L = -\beta\, \sigma(\hat r_\ell - \hat r_c)\, \big(\nabla \log \pi(c) - \nabla \log \pi(\ell)\big)$$
#
# Once again, the factor $\sigma(\cdot)$ is large for a surprising pair. The term in brackets makes the chosen text more
# likely and the rejected text less likely.

# %%
from rlhf_lab.functional import implicit_rewards  # given

# %% [markdown]
# Is the formula exact? You can check it on the grammar, where you can compute the optimal policy for the rater's
# utility. The difference between its implicit reward and the utility has to be the same constant for all reviews:

# %%
reference = grammar_policy(build_graph(grammar))
utility = Reward("utility", sentiment_logit)
utilities = torch.from_numpy(utility.score(reference.graph.final_features()))
start = torch.from_numpy(reference.occupancy()[-1])
for beta in (8.0, 4.0, 2.0):
    optimum = torch.from_numpy(optimal_policy(reference, utility, beta).occupancy()[-1])
    constant = implicit_rewards(optimum.log(), start.log(), beta) - utilities
    print(f"beta {beta:g}: the difference varies by {(constant.max() - constant.min()).item():.0e}")

# %%
from rlhf_lab.functional import dpo_loss  # exercise

# %% [markdown]
# Now train a policy on 1,024 pairs, using your loss with $\beta = 4$. Before you do, predict two things. First, will
# DPO make the *chosen* texts more likely than under the reference (a mean implicit reward above 0), or less likely?
# Second, if you plot the implicit reward against the utility, what will the slope be? For the optimal policy it is 1.
#
# (8 s on one core)

# %%
chosen_texts = "more likely"  # predict: "more likely" or "less likely"
steepness = "about 1"  # predict: "below 0.8", "about 1" or "above 1.2"

# %%
base, dpo_policy, beta, n = load_model("reel-nano"), load_model("reel-nano"), 4.0, 1024
pairs, rng = reel_pairs(n, SEED), np.random.default_rng(SEED)
rows = encode_examples(base, [""] * (2 * n), pairs.chosen + pairs.rejected)
with torch.no_grad():
    at_start = torch.cat([text_logprobs(base, rows[i : i + 256]) for i in range(0, 2 * n, 256)])


def sides(batch: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of chosen and rejected texts, by the policy and by the reference."""
    both = [*batch, *(i + n for i in batch)]
    now = text_logprobs(dpo_policy, [rows[i] for i in both])
    return (*now.chunk(2), *at_start[both].chunk(2))


def batch_loss() -> Float[Tensor, ""]:
    return dpo_loss(*sides(rng.choice(n, 32, replace=False).tolist()), beta)


fit(dpo_policy, batch_loss, 120, 3e-4, "DPO", False)
with torch.no_grad():
    now_c, now_r, ref_c, ref_r = sides(range(256))
    examples = encode_examples(base, [""] * len(probes), probes)
    by_policy, by_base = (text_logprobs(model, examples) for model in (dpo_policy, base))
chosen, rejected = (
    implicit_rewards(now, ref, beta).mean().item() for now, ref in ((now_c, ref_c), (now_r, ref_r))
)
implied = implicit_rewards(by_policy, by_base, beta).double()
truth = torch.from_numpy(true_log_odds(probes))
line = torch.stack([implied, truth]).cov()
steep = (line[0, 1] / line[1, 1]).item()
print(f"slope of the implicit reward against the utility: {steep:.2f}, n = {len(probes)}")
print(f"mean implicit reward: chosen {chosen:.2f}, rejected {rejected:.2f}, n = 256 pairs")
change = "more likely" if chosen > 0 else "less likely"
predictions.compare("chosen texts become", chosen_texts, change)
limits = {"below 0.8": 0.8, "about 1": 1.2, "above 1.2": np.inf}
predictions.compare("slope of the implicit reward", steepness, steep, limits)
levels = truth.unique()
means = [implied[truth == level].mean().item() for level in levels]
exact = (levels + implied.mean() - truth.mean()).tolist()
curves(
    {"DPO, mean": (levels.tolist(), means), "exact, up to a constant": (levels.tolist(), exact)},
    "Implicit reward of the DPO policy",
    "utility, log odds",
    "implicit reward",
)

# %% [markdown]
# The implicit reward ranks reviews by their utility, but its slope is only 0.3 instead of 1. Once a pair's implicit
# rewards are far enough apart, its loss is already low, and a short run changes the policy only a little. On average,
# the chosen texts became somewhat more likely, and the rejected texts became much less likely. Since the loss only
# depends on the difference, nothing in it forces the chosen texts to become more likely.
#
# ## DPO and PPO on the same axis
#
# DPO with this $\beta$ has *the same* optimal policy as PPO with the reward $u$ and a KL coefficient of $\beta$. How close
# does each method get to this policy in a short run? Comparing the final policies would be unfair, because their KLs
# differ. Instead, the plot shows every phase of PPO, which lets you compare DPO with PPO at the same KL. The three stored
# PPO runs use this lesson's `SETTINGS` with a `kl_coef` of 4. Which method reaches the higher true reward at the same KL?

# %%
more_true_reward = "PPO"  # predict: "DPO", "PPO" or "the same within 0.02"

# %%
ppo = stored["PPO on the utility"]
evaluation = RLHFTrainer(
    RLHFArgs(**SETTINGS | {"batch_size": 1024, "seed": SEED + 100}),
    policy=TransformerWithValueHead(dpo_policy, seed=SEED),
    reference=base,
    reward_fn=true_reward,
).rollout_phase()
dpo = {
    "KL": evaluation.kl.sum(1).mean().item(),
    "true_reward": evaluation.raw_rewards.mean().item(),
    "grammatical": grammatical(evaluation.texts).float().mean().item(),
}
final = true_reward.score(reference.graph.final_features())
optima = [optimal_policy(reference, utility, beta) for beta in (64.0, 16.0, 8.0, 4.0, 3.0, 2.0)]
best = [(float(x.kl_by_position(reference).sum()), x.mean(final)) for x in optima]
show_table(
    ["policy at beta 4", *dpo],
    [
        ["DPO", *dpo.values()],
        ["PPO, mean of 3 stored seeds", *(float(np.mean([r[what] for r in ppo])) for what in dpo)],
        ["optimal", *best[3], 1.0],
    ],
    digits=2,
)
print("n = 1,024 texts per policy")
paths = {}
for seed, run in zip(stored["seeds"], ppo, strict=True):
    kl, rewards = run["KL by phase"] + [run["KL"]], run["true reward by phase"]
    by_kl = sorted(zip(kl, rewards + [run["true_reward"]], strict=True))
    paths[f"PPO, seed {seed}"] = tuple(map(list, zip(*by_kl, strict=True)))
curves(
    {
        "optimal": tuple(zip(*best, strict=True)),
        **paths,
        "DPO": ([dpo["KL"]], [dpo["true_reward"]]),
    },
    "True reward at each KL",
    "KL from the reference, nats per review",
    "true reward",
)

# %%
at_equal = [float(np.interp(dpo["KL"], *path)) for path in paths.values()]
print(f"true reward at {dpo['KL']:.2f} nats: DPO {dpo['true_reward']:.2f}, ", end="")
print("PPO", ", ".join(f"{x:.2f}" for x in at_equal))
apart = dpo["true_reward"] - float(np.mean(at_equal))
over_seeds.compare(
    "DPO at beta 4",
    {
        "slope of the implicit reward": steep,
        "implicit reward, chosen": chosen,
        "implicit reward, rejected": rejected,
        "true reward minus the best PPO at this KL": dpo["true_reward"] - max(at_equal),
    },
)
limits = {"PPO": -0.02, "the same within 0.02": 0.02, "DPO": np.inf}
predictions.compare("more true reward at equal KL", more_true_reward, apart, limits)

# %% [markdown]
# With this $\beta$ and number of steps, DPO reaches a higher true reward than any of the three PPO runs at the same KL,
# and this is true for all three DPO seeds. The true reward of both methods ends far below that of the optimal policy,
# but for opposite reasons. DPO stopped short of the optimal policy's KL, while PPO went past it, partly toward
# ungrammatical texts (4% of its texts). This lesson doesn't show whether more steps would bring either method closer.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# In the next lesson, {lesson:a_real_model}, you'll leave Reel and evaluate a run whose true reward you don't know.
