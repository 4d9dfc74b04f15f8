# %% [markdown]
# # 03 PPO
#
# By the end of this lesson, you will be able to write PPO for a language model from scratch, in one function of about fifty
# lines. In every phase, your rewards will match the package's to six digits.
#
# You already have the parts: a policy with a value head, and an objective for one minibatch. What's missing is the loop around
# them. Each phase of PPO has two halves. In the **rollout**, you sample a batch of reviews, score them, and compute an
# advantage for each token. In the **learning** half, you take several gradient steps on that batch. You will write both halves
# and train the model with them. Then you will read your run's training dashboard, and look at the model's activations as it
# trains.
#
# **You will also be able to**
# - read a training dashboard, and know which numbers must be exactly 1 or 0 and which should rise or fall;
# - record activations during training without changing the run.
#
# **You need** {lesson:the_value_head} and {lesson:the_objective}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 80 seconds on one CPU core and needs no internet access. Cells
# that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.course.debugging import make_dashboard
from rlhf_lab.functional import compute_returns, token_rewards
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.probes import ReelTruth
from rlhf_lab.rewards import SentimentReward
from rlhf_lab.views import curves, loop_diagram, sparkline

SETTINGS = dict(
    preset="reel",
    total_phases=8,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
)
args = RLHFArgs(**SETTINGS)
predictions = Predictions()

# %%
loop_diagram()

# %% [markdown]
# ## The optimizer
#
# We train two things, and they start from very different points. The transformer can already write reviews, so its weights
# should move only a little. The value head starts from random weights and has a long way to go. So the two get different
# learning rates, `base_lr` and `head_lr`. Both learning rates warm up for two phases and then decay. The function below sets
# this up with AdamW. Note `maximize=True`: we *maximize* the objective.

# %%
from rlhf_lab.training import get_optimizer_and_scheduler  # given

# %% [markdown]
# ## The loop
#
# *Rollout.* Sample a batch of reviews with `sample`, and score them. Each review gets its normalized reward at its last token
# (`token_rewards`). Then generalized advantage estimation (GAE) turns this one reward into an advantage for each token:
# $\hat A_t = \delta_t + \gamma \lambda \hat A_{t+1}$ with $\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$. The GAE function is
# given here; you will derive it in {lesson:rewards_and_credit}.

# %%
from rlhf_lab.functional import compute_gae  # given

# %% [markdown]
# The example below is a four-token review with a reward of 1 at the end. The *return*, which the value head learns to predict,
# is the advantage plus the value:

# %%
values = torch.tensor([[0.5, 0.4, 0.9, 0.8]])
at_the_end = token_rewards(torch.tensor([1.0]), torch.ones_like(values, dtype=torch.bool))
credit = compute_gae(values, at_the_end, 1.0, 0.95)
columns = [values, at_the_end, credit, compute_returns(credit, values)]
show_table(
    ["token", "value before it", "reward", "advantage (lambda 0.95)", "return"],
    [[t, *(column[0, t].item() for column in columns)] for t in range(4)],
)

# %% [markdown]
# *Learning.* Go through the batch `args.batches_per_learning_phase` times. Each time, shuffle the batch and split it into
# `args.num_minibatches` minibatches. For each minibatch, run the policy, compute the objective from {lesson:the_objective}, and
# take a gradient step. The advantages, the returns and the old log-probabilities stay fixed throughout. At the end of the
# phase, step the scheduler once.

# %%
from rlhf_lab.course.exercises.objective import whole_objective  # given

# %% [markdown]
# Now write `ppo`. Here is what you need:
# - `prompts = tokenize_prompts(tokenizer, [args.prefix] * args.batch_size, prepend_bos=True)` gives you the prompts, and
#   `spec = SamplingSpec.from_args(args, tokenizer)` gives you the sampling settings. The tokenizer is
#   `policy.base_model.tokenizer`.
# - `samples = sample(policy, prompts, spec, generator)` contains `tokens` (`[batch seq]`), and `mask`, `logprobs` and `values`
#   for each generated token (`[batch gen]`). `samples.texts(tokenizer)` returns the texts, and `samples.prefix_len` is the
#   number of prompt tokens.
# - `phase_generator(args.seed, phase, stream)` returns a reproducible random generator for one phase. Set `stream` to
#   "sampling" for the rollout and to "minibatches" for shuffling, and your run will draw the same random numbers as the
#   package's.
# - To assign credit, use `normalize_reward(rewards)`, `compute_gae` with `args.gamma` and `args.gae_lambda`, and
#   `compute_returns(advantages, values)`.
# - `policy(tokens)` returns logits and values at all positions, and `reference(tokens)` returns only logits.
#   `generated_logits`, `generated_values` and `get_logprobs` take `prefix_len`, and keep only the positions right before the
#   generated tokens.
# - `kl_per_token` and `entropy_per_token` take the output of `log_probs`. You don't need gradients for the reference.
# - Before each step, clip the gradient norm to `args.max_grad_norm`.
#
# (The check below takes up to 10 s on one core if it has to find a mistake.)

# %%
from rlhf_lab.course.exercises.ppo import ppo  # exercise

# %% [markdown]
# Now train twice from the same seed, once with your loop and once with the package's trainer. Will the two runs get the same
# rewards?
#
# (10 s on one core)

# %%
same_run = "the same"  # predict: "the same" or "not the same"

# %%
score = SentimentReward(args.reward_model)
mine = ppo(
    args,
    policy=TransformerWithValueHead(load_model(args.base_model), seed=args.seed),
    reference=load_model(args.base_model),
    reward_fn=score,
)
reports = RLHFTrainer(args, out=new_run("package")).train()
theirs = [report.mean_reward for report in reports]
print("mine         ", " ".join(f"{reward:.6f}" for reward in mine))
print("the package's", " ".join(f"{reward:.6f}" for reward in theirs))
equal = all(abs(a - b) < 1e-5 for a, b in zip(mine, theirs, strict=True))
predictions.compare("the two runs are", same_run, "the same" if equal else "not the same")

# %% [markdown]
# That's it: you have written all of PPO for language models. On top of this, the package adds checkpoints, logs, callbacks,
# other estimators and objectives, faster forward passes, and checks for NaNs.
#
# ## The dashboard
#
# What should a healthy run look like? Before the first step of each phase, the ratio is 1, because the policy you are training
# is still the one that generated the samples. The KL slowly rises from 0 and stays below a few nats. The clip fraction is a few
# percent at most, and the entropy falls slowly. The explained variance is the fraction of the variance in the returns that the
# value head explains. It rises from 0 to about 0.3 in this run, and cannot reach 1.

# %%
rows = []
for name, numbers in make_dashboard(reports).items():
    curve = sparkline(numbers) if max(numbers) - min(numbers) > 5e-4 else "flat"
    rows.append([name, numbers[0], numbers[len(numbers) // 2], numbers[-1], curve])
show_table(["", "first", "middle", "last", "over the phases"], rows)

# %% [markdown]
# Pay close attention to numbers that are *exactly* 0 or 1, or that should be. If the first ratio is not 1, the sampler and the
# learner disagree about the log-probabilities. If the KL is still exactly 0 after a step, the reference is being trained as
# well. A rising reward proves little, because many broken trainers manage to learn an easy reward.
#
# ## Step size and reward scale
#
# Adam divides each gradient by a running average of its size, so the learning rate sets the step size, not the gradient. This
# has two consequences. First, multiplying the *whole objective* by a constant changes almost nothing. Second, Adam takes
# full-sized steps even while the gradients are mostly noise, which is why the learning rates warm up.
#
# Does this mean that the scale of the *reward* doesn't matter either? Suppose you multiply the classifier's score by 0.001, and
# train without normalizing the rewards and advantages. What happens to the policy?

# %%
small_reward = "learns little"  # predict: "learns as usual", "learns little" or "falls apart"

# %% [markdown]
# (25 s on one core)

# %%
rows = []
for scale in (0.001, 1.0, 1000.0):
    row = [f"{scale:g}"]
    for normalize in (True, False):
        scaled = RLHFTrainer(
            RLHFArgs(
                **SETTINGS | {"total_phases": 6},
                normalize_reward=normalize,
                normalize_advantages=normalize,
            ),
            out=new_run("scaled"),
            reward_fn=lambda texts, scale=scale: scale * score(texts),
        )
        last = scaled.train()[-1]
        row += [last.mean_reward / scale, last.kl_per_sequence]
    rows.append(row)
columns = ["score", "KL", "score, not normalized", "KL, not normalized"]
show_table(["reward multiplied by", *columns], rows)
print("phase 5: mean score of 128 reviews before scaling, and KL in nats per review")
small, usual = rows[0][3], rows[1][3]
result = (
    "learns as usual" if small > usual - 0.1 else "learns little" if small > 0.3 else "falls apart"
)
predictions.compare("with a tiny reward, the policy", small_reward, result)

# %% [markdown]
# It does matter, because the reward has to compete with the other terms in the objective. When the reward is tiny, the KL
# penalty dominates: the policy stays within 0.001 nats of the reference, and its score ends up at only 0.46. When the reward
# is huge, the policy moves 23 nats away from the reference and still only scores 0.64. By default, the trainer normalizes
# rewards and advantages, so its results do not depend on the reward scale.
#
# ## Inside the run
#
# The policy now praises nearly every movie. Has it stopped noticing that a movie is bad, or does it notice and praise the movie
# anyway? To find out, collect reviews where the reviewer is disappointed, and cut them off right before the verdict ("... .
# i"). In every phase, measure how likely the model is to continue with praise. You can measure this at the output, and also
# after every component: decode the residual stream there, as if the rest of the model did nothing. This is called the *logit lens* ({lesson:the_policy} explains it and its limits):

# %%
from rlhf_lab.diffing import logit_lens  # given

# %% [markdown]
# To access the activations, decorate one of your functions with `@trainer.capture(hook_names, pos=..., at=..., tokens=...)`.
# The trainer then calls this function with the run's context (`ctx.policy` is the policy) and a dictionary of activations,
# keyed by name. These activations come from a separate forward pass over `tokens`, so the run itself is not affected. `at` is
# the event that triggers your function: "after_score" happens once per phase, after sampling and before the first gradient
# step.
#
# (If it has to find a mistake, this check takes up to 10 s as well.)

# %%
from rlhf_lab.course.exercises.ppo import look  # exercise

# %% [markdown]
# Before you run this, make a prediction. Suppose you decode the probability of praise after the last block's attention layer.
# By the last phase, will it still be close to its value before training, or will it have moved at least half as far as the
# probability at the output?

# %%
last_attention = "has moved"  # predict: "is still close" or "has moved"

# %% [markdown]
# (15 s on one core)

# %%
watched = {
    seed: RLHFTrainer(RLHFArgs(**SETTINGS, seed=seed), out=new_run("look")) for seed in (1, 2, 3)
}
model = watched[1].policy.base_model
word_id = lambda word: model.tokenizer.encode(" " + word, add_special_tokens=False)[0]
praise = [word_id(word) for word in ("liked", "loved", "enjoyed")]
blame = [word_id(word) for word in ("disliked", "hated", "despised")]
if watched[1].speaks_reel:
    truth = ReelTruth()
    reviews, positive = truth.reviews(256, seed=0)
    bad = reviews[~positive, : truth.grammar.slot("VERB")]  # up to the "i" before the verdict
else:
    bad = torch.tensor([model.tokenizer.encode("This movie was boring and stupid. I")])
first, last = 0, model.cfg.n_layers - 1
places = {
    f"block {first}, attention": f"blocks.{first}.hook_resid_mid",
    f"block {first}, MLP": f"blocks.{first}.hook_resid_post",
    f"block {last}, attention": f"blocks.{last}.hook_resid_mid",
    "output": f"blocks.{last}.hook_resid_post",
}
seen = {seed: look(run, bad, [*places.values()], praise, blame) for seed, run in watched.items()}
rewards = {seed: [r.mean_reward for r in run.train()] for seed, run in watched.items()}
print("same rewards as without look:", rewards[args.seed] == theirs)

# %%
phases = list(range(args.total_phases))
curves(
    {name: (phases, seen[1][place]) for name, place in places.items()},
    "P(praise) after a bad review, by the logit lens (seed 1)",
    "phase",
    "probability of a positive verdict",
)

# %%
show_table(
    ["decoded after", "phase 0", *(f"last phase, seed {seed}" for seed in seen)],
    [
        [name, seen[1][place][0], *(seen[s][place][-1] for s in seen)]
        for name, place in places.items()
    ],
    digits=2,
)
moved = {name: seen[1][place][-1] - seen[1][place][0] for name, place in places.items()}
attention = moved[f"block {last}, attention"]
predictions.compare(
    "praise decoded after the last attention layer",
    last_attention,
    "has moved" if attention > moved["output"] / 2 else "is still close",
)

# %% [markdown]
# Before training, the probability of praise after a bad review is lowest (0.10) if you decode the residual stream right after
# block 1's attention. By the last phase, it has risen to 0.47 at this point and to 0.62 at the output, so the model now praises
# more than half of the movies it has just complained about. The change is spread throughout the model: even after block 0's
# MLP, which has just one attention layer before it, the probability of praise has doubled from 0.23 to 0.46. With the other two
# seeds, the probability at the output ends up at 0.59 and 0.51.
#
# This plot does not show *which* of these changes causes the behavior, or whether the model still represents that the review is
# bad. {Lesson:watch_it_learn} and {lesson:what_rlhf_changed} address these two questions.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# Break a line in your `ppo` on purpose. Which row of the dashboard gives the bug away? The appendix {lesson:debugging_ppo}
# turns this into a game.
#
# Next: {lesson:the_policy}, where you open up the policy and find the attention head that carries a fact.
