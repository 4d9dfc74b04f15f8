# %% [markdown]
# # 00 Start
#
# In a quarter of an hour: everything runs, you have passed two checks, taken a hint, and trained a
# language model to please a reward that you made up.
#
# **Afterwards you can**
# - write a function where a notebook leaves room for one, and read what its check says,
# - take a hint, and see how far you are,
# - stop the trainer between two phases, look, and go on,
# - say why padding must not count in a mean.
#
# **What to inspect** when something does not work here:
#
# | you see | it means |
# |---|---|
# | ○ not written yet | the function still ends in `raise NotImplementedError` |
# | ✗ and a table | your result beside the expected one, at the first place where they differ |
# | ✗ and an error | your function raised it; the line is counted from the top of its cell (Shift+L numbers them) |
# | likely: ... | the mistake that gives exactly your results |
# | TypeCheckError, or "Type-check error" | a tensor has another shape or type than the function promises |
# | ✓ | done; the next cells use *your* function |

# %%
# first cell

# %% [markdown]
# About 15 minutes of work. All cells together run in about 8 seconds on one core, without a
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
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, progress, show_table
from rlhf_lab.functional import zero_masked
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
# The first two lines switch on shape checking, the last three statements are those of every lesson.
# `SETTINGS` decides what a lesson runs on: Reel, a tiny language of movie reviews with a transformer
# that speaks it, in seconds and without a network. On a GPU, change `preset="reel"` to
# `preset="gpt2-medium"`, and it runs on GPT-2-medium. The text between the cells tells what came out
# on Reel. GPT-2 learns more slowly (its learning rate is a fifteenth of Reel's): raise
# `total_phases`, too.
#
# ## A function of yours
#
# Reviews have different lengths. They are kept in one tensor all the same, a row per review and a
# column per token, and short rows are filled up with padding. A *mask* says which tokens are real.
# Here are three reviews, with a number for each token; the 9s are padding.

# %%
scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 9.0, 9.0], [7.0, 8.0, 2.0, 9.0]])
mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
show_table(
    ["review", "scores", "mask"],
    [[i, scores[i].tolist(), mask[i].int().tolist()] for i in range(3)],
)

# %% [markdown]
# The next cell is yours. The signature says what goes in and what comes out: `x` is
# `Float[Tensor, "batch gen"]`, floats with a row per sequence and a column per generated token, and
# the result is `Float[Tensor, " batch"]`, one float per sequence. The numbered lines say what to
# do. Put it in place of the last line, run the cell, and run the check behind it.
#
# `mask` may be left out, and is then `None`: every token counts. `zero_masked(x, mask)`, imported
# in the first cell, knows both: it puts 0 where the mask is False, and gives `x` back if there is
# no mask. The other imports of a cell like this one are what the package's own version uses;
# `at_least_float32` turns half precision into float32 and leaves everything else alone. You need
# not use them, and what a docstring says about errors that are raised you may skip.
#
# Run the check once before you write anything, to see what that looks like. And if you get stuck,
# put a cell of your own anywhere and run `hint(sequence_sum)`. There are three hints: an idea, the
# shapes, and finally the line. Nobody counts them but you.

# %%
from rlhf_lab.functional import sequence_sum  # exercise

# %%
show_table(["review", "sum of its real scores"], enumerate(sequence_sum(scores, mask).tolist()))

# %% [markdown]
# The check tried more than this: other sizes, a single row, a single token, a mask, very large
# numbers, and the gradient. A function that is right by luck on one example does not get through.
#
# ## A mean
#
# A mean over real tokens is nearly the same thing, and the one thing that everybody gets wrong once.
# All nine real scores are in the table above. Which is their mean: 38 / 9, or 38 / 12, or 65 / 12?
# Put one of them in place of the dots before you go on; at the end you see what surprised you.

# %%
which_mean = "38 / 9"  # predict: "38 / 9", "38 / 12" or "65 / 12"

# %%
from rlhf_lab.functional import masked_mean  # exercise

# %%
mean = masked_mean(scores, mask).item()
candidates = {"38 / 9": 38 / 9, "38 / 12": 38 / 12, "65 / 12": 65 / 12}
nearest = min(candidates, key=lambda name: abs(candidates[name] - mean))
predictions.compare("the mean of the real scores is", which_mean, nearest)

# %% [markdown]
# (38 / 12 divides by padding, and 65 / 12 counts it. Both are small mistakes that no error message
# will ever tell you about: the run just learns a little less, and short reviews less than long
# ones.)
#
# ## A reward of yours
#
# Now for the trainer. A reward is any function from texts to numbers. This one likes the word
# "quite", for no reason at all. (GPT-2 hardly ever says "quite", and what nobody says cannot be paid;
# there it is "the".) Two lines set up the training:

# %%
word = "quite" if SETTINGS["preset"] == "reel" else "the"


def likes_word(texts: list[str]) -> Float[Tensor, " batch"]:
    """How often each text says the word."""
    return torch.tensor([float(text.split().count(word)) for text in texts])


args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=place / word, reward_fn=likes_word)

# %% [markdown]
# The trainer can be walked through phase by phase. In each phase the policy writes a batch of
# texts (`rollout_phase`), they are scored, and the policy takes some steps towards higher rewards
# (`learning_phase`). Make one rollout by itself, and look at what the untrained policy wrote. A
# rollout holds `texts` and their `raw_rewards`, the `kl` of each token, and in `samples.mask` which
# tokens are real.

# %%
first = trainer.rollout_phase()
rows = zip(first.raw_rewards[:4].tolist(), first.texts[:4], strict=True)
show_table(["reward", "text"], rows, digits=0)

# %% [markdown]
# While the policy learns to say its word, does it stay as close to the language it came from? The KL
# divergence of a text says how far the policy has moved; it is 0 at the start. Predict which way
# it goes, and how often a text says "quite" at the end, when it is about 0.5 at the start. (A review
# in Reel has up to three places for it.)
#
# (3 s on one core)

# %%
kl_goes = "up"  # predict: "up", "down" or "nowhere"
words_at_the_end = "1 to 2"  # predict: "less than 1", "1 to 2" or "more than 2"

# %%
reports = []
for report in trainer:
    reports.append(report)
    print(f"phase {report.phase}: reward {report.mean_reward:.2f}, KL {report.kl_per_sequence:.2f}")

# %%
last = trainer.rollout_phase()
rows = zip(last.raw_rewards[:4].tolist(), last.texts[:4], strict=True)
show_table(["reward", "text"], rows, digits=0)

kl_start = sequence_sum(first.kl, first.samples.mask).mean().item()
kl_end = sequence_sum(last.kl, last.samples.mask).mean().item()
mean_reward = last.raw_rewards.mean().item()
print(f"KL per sequence, by your sequence_sum: {kl_start:.2f} before, {kl_end:.2f} after")
print("reward:", sparkline([report.mean_reward for report in reports]))

moved = "up" if kl_end > kl_start + 0.01 else "down" if kl_end < kl_start - 0.01 else "nowhere"
predictions.compare("the KL goes", kl_goes, moved)
reached = "less than 1" if mean_reward < 1 else "1 to 2" if mean_reward <= 2 else "more than 2"
predictions.compare(f"{word!r} per text at the end", words_at_the_end, reached)

# %% [markdown]
# That is RLHF, with an odd reward in place of a person: text, reward, a step towards more of it, and
# a leash. The other lessons take it apart. Each has its own notebook, and none needs the ones before
# it to be finished:
#
# - 02 the value head: what the policy expects, read off a hook,
# - 05 the objective: every term of what is climbed,
# - 06 PPO: minibatches, optimiser, rollout and learning phase.
#
# ## Where you are

# %%
predictions.show()
progress()
