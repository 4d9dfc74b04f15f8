# %% [markdown]
# # 03 PPO
#
# By the end of this lesson you can write PPO for a language model from scratch, in one function of about fifty lines,
# whose rewards match the package's to six digits in every phase.
#
# So far you have the parts: a policy with a value head, and an objective for one minibatch. What is missing is the loop
# around them. A phase of PPO has two halves. The **rollout** samples a batch of reviews, scores them, and computes an
# advantage for each token. The **learning** half takes several gradient steps on that batch. You write both, train the
# model, read the dashboard of your run, and finally look at the activations while it trains.
#
# **You will be able to**
# - read a training dashboard: which numbers must be exactly 1 or 0, and which should rise or fall;
# - record activations during training without changing the run.
#
# **You need** {lesson:the_value_head} and {lesson:the_objective}.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 80 seconds on a single core, without a network. Cells that
# take more than 3 seconds have a note with their time, as the imports here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

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
# Two things are trained, and they start from different points. The transformer already knows its language and should
# move only a little. The value head starts from random weights and has far to go. So they get different learning rates
# (`base_lr` and `head_lr`), which both warm up for two phases and then decay. This function sets it up with AdamW and
# `maximize=True`, because we *maximize* the objective:

# %%
from rlhf_lab.training import get_optimizer_and_scheduler  # given

# %% [markdown]
# Adam divides each gradient by its own recent size. Take two weights, one with a gradient of 0.001 and one with a
# gradient of 1, and do one step with learning rate 0.1. How far does the second weight move, compared with the first?

# %%
second_moves = "as far"  # predict: "as far", "30 times as far" or "1000 times as far"

# %%
pair = torch.nn.Parameter(torch.ones(2))
adam = torch.optim.AdamW([pair], lr=0.1, weight_decay=0.0, maximize=True)
(pair * torch.tensor([0.001, 1.0])).sum().backward()
adam.step()
moves = (pair.detach() - 1).tolist()
print("moves:", [round(move, 4) for move in moves])
factor = min((1, 30, 1000), key=lambda f: abs(f - moves[1] / moves[0]))
predictions.compare(
    "the second weight moves", second_moves, "as far" if factor == 1 else f"{factor} times as far"
)

# %% [markdown]
# Just as far. The learning rate, not the size of the gradient, sets the size of the step. That has two consequences.
# Multiplying the *whole objective* by a constant changes almost nothing. And the first phases are dangerous, because
# Adam takes full-sized steps on gradients that are mostly noise. That is the reason for the warm-up.
#
# Does it follow that the scale of the *reward* is irrelevant? Multiply the classifier's score by 0.001, and train
# without normalizing rewards and advantages. What happens?

# %%
small_reward = "learns little"  # predict: "learns as usual", "learns little" or "falls apart"

# %% [markdown]
# (25 s on one core)

# %%
rows, score = [], SentimentReward(args.reward_model)
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
print("phase 5: mean score of 128 reviews, before scaling; KL in nats per review")
small, usual = rows[0][3], rows[1][3]
result = (
    "learns as usual" if small > usual - 0.1 else "learns little" if small > 0.3 else "falls apart"
)
predictions.compare("with a tiny reward it", small_reward, result)

# %% [markdown]
# The reward is only one term of the objective, and it competes with the others. With a tiny reward the KL penalty wins:
# the score ends at 0.46, with a KL of 0.001 nats. With a huge one nothing keeps the policy close to the reference: 23
# nats, for a score of 0.64. The trainer normalizes rewards and advantages: this is the reason why its runs do not
# depend on the scale of the reward.
#
# ## The loop
#
# *Rollout.* Sample a batch of reviews with `sample`, and score them. The normalized reward is the reward of the last
# token of each review (`token_rewards`). Generalized advantage estimation turns it into an advantage for each token:
# $\hat A_t = \delta_t + \gamma \lambda \hat A_{t+1}$ with $\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$. (This function
# is given here and derived in {lesson:rewards_and_credit}.)

# %%
from rlhf_lab.functional import compute_gae  # given

# %% [markdown]
# A review of four tokens with a reward of 1 at the end. Advantage plus value is the *return*, the target of the value
# head:

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
# *Learning.* Go through the batch `args.batches_per_learning_phase` times, each time in a new random order, cut into
# `args.num_minibatches` minibatches. For each minibatch, run the policy, compute the objective of
# {lesson:the_objective}, and take a step. Advantages, returns and the old log-probabilities stay fixed. Step the
# scheduler once per phase.

# %%
from rlhf_lab.course.exercises.objective import whole_objective  # given

# %% [markdown]
# Now write `ppo`. Its pieces:
# - `prompts = tokenize_prompts(tokenizer, [args.prefix] * args.batch_size, prepend_bos=True)`, all of one length
#   `prefix_len`, and `spec = SamplingSpec.from_args(args, tokenizer)`, with the tokenizer of `policy.base_model`.
# - `sample(policy, prompts, spec, generator)` returns `tokens` (`[batch seq]`), and for each generated token `mask`,
#   `logprobs` and `values` (`[batch gen]`); `samples.texts(tokenizer)` are the texts.
# - `phase_generator(args.seed, phase, stream)` gives each use of randomness its own reproducible stream: "sampling" or
#   "minibatches". With them your run and the package's draw the same numbers.
# - `policy(tokens)` returns logits and values of all positions. `generated_logits`, `generated_values` and
#   `get_logprobs` take `prefix_len` and keep the states before the generated tokens.
# - `kl_per_token` and `entropy_per_token` take the output of `log_probs`. The reference is not trained.
# - Clip the norm of the gradient to `args.max_grad_norm` before each step.

# %%
from rlhf_lab.course.exercises.ppo import ppo  # exercise

# %% [markdown]
# Train with your loop and with the package's trainer, from the same seed. Will the rewards be the same?
#
# (10 s on one core)

# %%
same_run = "the same"  # predict: "the same" or "not the same"

# %%
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
# That is all of PPO for language models. The package adds checkpoints, logs, callbacks, other estimators and
# objectives, faster forward passes, and checks for nan.
#
# ## The dashboard
#
# In a healthy run, the ratio is 1 before the first step of each phase (the policy that is trained is the one that
# sampled), the KL leaves 0 slowly and stays below a few nats, the clip fraction is a few percent at most, and the
# entropy falls slowly. Explained variance is the fraction of the variance of the returns that the value head predicts:
# 1 is everything, 0 nothing.

# %%
rows = []
for name, numbers in make_dashboard(reports).items():
    curve = sparkline(numbers) if max(numbers) - min(numbers) > 5e-4 else "flat"
    rows.append([name, numbers[0], numbers[len(numbers) // 2], numbers[-1], curve])
show_table(["", "first", "middle", "last", "lowest to highest"], rows)

# %% [markdown]
# Look twice at a number that is *exactly* 0 or 1. A first ratio that is not 1 means that the log-probabilities of the
# sampler and of the learner differ. A KL of exactly 0 after a step means that the reference is being trained too. A reward
# that rises proves little: many broken trainers learn an easy reward.
#
# ## Inside the run
#
# The policy now praises nearly every movie. Has it stopped noticing that a movie is bad, or does it notice and praise
# the movie anyway? Take reviews in which the reviewer is disappointed, cut them off before the verdict ("... . i"), and
# compute in every phase how likely the model is to continue with praise. You can do this after each component of the
# model: decode the residual stream there, as if the rest of the model did nothing. This is the *logit lens*
# ({lesson:the_policy} explains it and its limits):

# %%
from rlhf_lab.diffing import logit_lens  # given

# %% [markdown]
# `trainer.capture(hook_names, pos=..., at=..., tokens=...)` decorates a function of yours, which gets the context of
# the run (`ctx.policy` is the policy) and the activations by name. The activations come from a separate forward pass
# over `tokens`, so the run itself is unchanged. `at` is the event: "after_score" comes once per phase, after sampling
# and before the first step.

# %%
from rlhf_lab.course.exercises.ppo import look  # exercise

# %% [markdown]
# Before you use it: after the attention of the last block, is the probability of praise in the last phase still close
# to its value before training, or has it moved at least half as far as that of the output?

# %%
last_attention = "it has moved too"  # predict: "it is close" or "it has moved too"

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
    "the last attention",
    last_attention,
    "it has moved too" if attention > moved["output"] / 2 else "it is close",
)

# %% [markdown]
# Before training, praise after a bad review is least likely after the attention of block 1, with a probability of 0.10.
# In the last phase this probability is 0.47, and that of the output 0.62, so the model praises half or more of the
# movies it has just complained about. The change is spread over the model: even after the MLP of block 0, where only the
# attention of block 0 has read other words, the probability of praise has doubled, from 0.23 to 0.46. In the other two
# seeds the output ends at 0.59 and 0.51.
#
# This plot cannot show *which* of these changes causes the behavior, or whether the model still represents that the
# review is bad. {Lesson:watch_it_learn} and {lesson:what_rlhf_changed} try to answer that.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# Break a line of your `ppo`. Which line of the dashboard would show it? The trainer's own functions, with bugs to find
# from their dashboards alone, are in {lesson:debugging_ppo}.
