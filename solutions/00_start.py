# %% [markdown]
# # 00 Start
#
# What is RLHF, and what does it do to a language model in one minute? You see the whole loop once,
# learn its words on one review, pass your first checks, and then train a model to please a reward that
# you make up yourself.
#
# **Afterwards you can**
# - explain the loop of RLHF and its words: policy, state, action, reward, advantage, reference, KL,
# - write a function where a notebook leaves room for one, and read what its check says,
# - say why padding must not count in a mean,
# - write a reward, and see how a policy cheats it.
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
# | NameError | a cell further up was not run, in this session |
# | ✓ | done; the next cells use *your* function |

# %%
# first cell

# %% [markdown]
# About 40 minutes of work. All cells together run in about 30 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import torch
from IPython.display import display
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress, show_table
from rlhf_lab.functional import zero_masked
from rlhf_lab.training.ppo import score_samples
from rlhf_lab.views import curves, loop_diagram, tokens_html

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=8,
    warmup_steps=2,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
)
over_seeds = SeedFigures("start", SETTINGS)  # this run beside stored ones of other seeds
predictions = Predictions()

# %% [markdown]
# The first two lines switch on shape checking. `SETTINGS` decides what a lesson runs on, and appears
# in every lesson: Reel, a tiny language of movie reviews, with a transformer of two layers that speaks
# it. On a GPU with a network, change `preset="reel"` to `preset="gpt2-medium"`. The text between the
# cells tells what came out on Reel. What the other entries mean is said where they first matter.
#
# ## Why RLHF exists
#
# A language model is trained to continue text as people write it. *Likely* text is not *wanted* text:
# the likely continuation of a question may be another question, and the likely review of a bad movie is
# a bad review. Nobody can write down a loss for "helpful" or "true" that a gradient could follow. But
# people can say which of two answers they like better.
#
# Reinforcement learning from human feedback turns that into training. Collect such comparisons. Fit a network to them
# that gives each text a number, its *reward*, higher for what people prefer. This network is the *reward model*. Then
# let the language model write, score what it writes, and move its weights towards what scores higher, without letting
# it move far from the language it came from. That last condition matters: the reward model is only right near the
# texts that it was fitted to, and a model that is free to go anywhere finds the texts that it is wrong about.
#
# - 2017, Christiano et al. ([1706.03741](https://arxiv.org/abs/1706.03741)): robots learn a backflip from 900 comparisons.
# - 2019, Ziegler et al. ([1909.08593](https://arxiv.org/abs/1909.08593)): the same for GPT-2, with a penalty on
#   moving away. The method of these lessons.
# - 2020, Stiennon et al. ([2009.01325](https://arxiv.org/abs/2009.01325)): summaries that people prefer to human ones.
# - 2022, Ouyang et al. ([2203.02155](https://arxiv.org/abs/2203.02155)): InstructGPT, from which ChatGPT came.
#
# There is no human in these lessons. The reward is a formula or a classifier, so that one can know
# exactly what should happen, and check it. All that comes *after* the reward is the same.
#
# ## The loop

# %%
loop_diagram()

# %% [markdown]
# Run the loop once, with four reviews. Each line below is a box or an arrow of the drawing. The numbers
# above the boxes are the lessons that explain them.

# %%
trainer = RLHFTrainer(RLHFArgs(**SETTINGS | dict(batch_size=4, num_minibatches=1)))
samples = trainer.sample(trainer.next_prompts(), torch.Generator().manual_seed(4))  # policy writes
texts = samples.texts(trainer.tokenizer)
rewards = trainer.rewards.reward_fn(texts)  # reward
rollout = score_samples(trainer, samples, rewards)  # credit per token; KL from the reference
learned = trainer.learning_phase(rollout)  # objective, gradient steps
show_table(["reward", "text"], zip(rewards.tolist(), texts, strict=True), digits=2)

# %% [markdown]
# The reward here is a sentiment classifier: near 1 for a review that praises on the whole, near 0 for one
# that does not. `learned` holds statistics of the gradient steps, which {lesson:ppo} explains.
#
# ## The words, on one review
#
# A review is written one *token* at a time; on Reel a token is a word. It begins with a *prompt*, which is given.
# Here are the first tokens of the best of the four:

# %%
best = int(rewards.argmax())
words = [trainer.tokenizer.decode([token]) for token in samples.tokens[best].tolist()]
start = samples.prefix_len
show_table(
    [
        "t",
        "state: the text so far",
        "action: the next token",
        "its probability",
        "value of the state",
    ],
    [
        [
            t,
            " ".join(words[1 : start + t]),
            words[start + t],
            samples.logprobs[best, t].exp().item(),
            samples.values[best, t].item(),
        ]
        for t in range(7)
    ],
)
print(f"after the last token: reward {rewards[best].item():.3f}, once, for the whole review")

# %% [markdown]
# | word | here |
# |---|---|
# | **policy**, $\pi(a \mid s)$ | the language model: given the text so far, a probability for each next token |
# | **state**, $s_t$ | prompt and the tokens written so far: one row of the table |
# | **action**, $a_t$ | the token that is written next |
# | **episode** | one review, from the prompt to its end |
# | **reward**, $R$ | one number for the finished review |
# | **value**, $V(s_t)$ | the reward that is to be expected from here: the guess of the *value head*, a small network on top of the model, which has learned nothing yet |
# | **advantage**, $A_t$ | how much better it went with this token than expected: what each token is credited with |
# | **reference**, $\pi_\mathrm{ref}$ | a frozen copy of the model as it was |
# | **KL** | how far the policy has moved from the reference, in *nats*: 1 nat is a factor of $e \approx 2.7$ in probability |
# | **rollout** | a batch of finished reviews with all of these numbers |
# | **phase** | one time round the loop: a rollout, then some gradient steps |
#
# If you know reinforcement learning from games: here the next state is known (it is the text with one more
# token), the reward comes once, at the end, and the policy is good from the start. The difficulty is not to
# find out how to play. It is to change what is played without breaking it.
#
# The goal of the whole run, in one line ($\beta$ is `kl_coef`, the price of a nat, and $\mathbb{E}_{x \sim \pi}$ the mean
# over reviews $x$ that the policy writes):
#
# $$\max_\pi \;\; \mathbb{E}_{x \sim \pi}\big[R(x)\big] \;-\; \beta \, \mathrm{KL}(\pi \,\|\, \pi_\mathrm{ref})$$
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
# do. Write it in place of the last line, run the cell, and run the check behind it.
#
# `mask` may be left out, and is then `None`: every token counts. `zero_masked(x, mask)`, imported
# in the first cell, handles both cases: it puts 0 where the mask is False, and returns `x` if there
# is no mask. The imports above a function are what the package's own version uses; you need not use
# them. `at_least_float32` turns half precision into float32 and leaves everything else alone.
#
# Run the check once before you write anything, to see what that looks like. And if you get stuck,
# put a cell of your own anywhere and run `hint("sequence_sum")`. There are three hints: an idea, the
# shapes, and finally the line. (`progress()`, at the end, shows how many you took.)

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
# A mean over real tokens is this sum divided by a count, and a wrong count is a common mistake. Here are three fractions.
# One is the mean of the real scores, one counts the padding in the denominator, and one counts the padding in the
# numerator as well. Put the mean of the real scores in place of the dots before you go on; at the end you see what surprised you.

# %%
which_mean = "38 / 9"  # predict: "38 / 9", "38 / 12" or "65 / 12"

# %%
from rlhf_lab.functional import masked_mean  # exercise

# %%
mean = masked_mean(scores, mask).item()
real, everything = scores[mask].sum().item(), scores.sum().item()
print(f"sum of the real scores {real:.0f}, of all {everything:.0f}; your mean {mean:.3f}")
candidates = {"38 / 9": 38 / 9, "38 / 12": 38 / 12, "65 / 12": 65 / 12}
nearest = min(candidates, key=lambda name: abs(candidates[name] - mean))
predictions.compare("the mean of the real scores is", which_mean, nearest)

# %% [markdown]
# (No error is raised when padding counts in the numerator or in the denominator. The result is wrong, and the
# more padding there is, the more it is wrong. `denominator` is for a minibatch that is cut
# in pieces, *micro-batches*, to save memory; {lesson:the_kl_penalty} comes back to it.)
#
# ## A reward of yours
#
# Now make up a reward. It is any function from texts to numbers: what would you like this model to say?
# There are no steps this time and no right answer. The check asks only for what every reward must be:
# one float per text, the same for the same text, whatever else is in the batch.
#
# If nothing comes to mind, pay for strong praise: how many of the words brilliant, perfect, superb
# and stunning a review has. (Do not pay for something that never varies. All Reel reviews have nearly
# the same length, and a reward that is the same for all teaches nothing.)

# %%
from rlhf_lab.course.exercises.start import my_reward  # exercise

# %% [markdown]
# A policy does not know what you *meant*. It finds whatever earns most. Before you train: how will yours
# be cheated? Write one sentence, in quotes, in place of the dots. Nobody scores it; you will read it
# again beside what the policy wrote.

# %%
cheated_by = "it will say the praise words and forget the rest"  # predict: in words

# %% [markdown]
# Two runs from the same start, with your reward: one on a *leash*, a price on each nat of KL (`kl_coef` 0.3), and one
# without (0). Predict which of them ends with the higher reward, and which with the higher KL.
#
# (7 s on one core)

# %%
more_reward = "without"  # predict: "on a leash", "without" or "about the same"
more_kl = "without"  # predict: "on a leash", "without" or "about the same"

# %%
trainers, reports = {}, {}
for name, kl_coef in {"on a leash": 0.3, "without": 0.0}.items():
    args = RLHFArgs(**SETTINGS | dict(kl_coef=kl_coef))
    trainers[name] = RLHFTrainer(args, out=new_run(name), reward_fn=my_reward)
    reports[name] = []
    for report in trainers[name]:  # phase by phase: you may stop here, look, and go on
        reports[name].append(report)
    last = reports[name][-1]
    print(f"{name}: reward {last.mean_reward:.2f}, KL {last.kl_per_sequence:.2f} nats per review")


def more(of: str, margin: float) -> str:
    """Which of the two runs has more of something in its last phase."""
    leash, free = (getattr(of_run[-1], of) for of_run in reports.values())
    if abs(leash - free) < margin:
        return "about the same"
    return "on a leash" if leash > free else "without"


spread = trainers["on a leash"].rollout_phase().raw_rewards.std().item()
predictions.compare("more reward", more_reward, more("mean_reward", 0.2 * spread))
predictions.compare("more KL", more_kl, more("kl_per_sequence", 0.1))

# %%
gained = {name: run[-1].mean_reward - run[0].mean_reward for name, run in reports.items()}
spent = {name: run[-1].kl_per_sequence for name, run in reports.items()}
price = {name: spent[name] / gained[name] for name in gained if gained[name]}
pays_for_praise = my_reward(["brilliant superb", "it was bad"]).tolist() == [2.0, 0.0]
if pays_for_praise:  # as the stored runs do
    over_seeds.compare("reward gained", gained, digits=2)
    over_seeds.compare("nats per unit of reward gained", price, digits=2)
else:
    show_table(["run", "reward gained"], gained.items(), digits=2)
    show_table(["run", "nats per unit of reward gained"], price.items(), digits=2)

# %%
phases = [report.phase for report in reports["without"]]
curves(
    {name: (phases, [r.mean_reward for r in of_run]) for name, of_run in reports.items()},
    "What the policy earns",
    y_label="mean reward of 128 reviews",
)

# %%
curves(
    {name: (phases, [r.kl_per_sequence for r in of_run]) for name, of_run in reports.items()},
    "How far it has moved",
    y_label="KL from the reference, nats per review",
)

# %% [markdown]
# Look at the two figures together. Both runs climb; without a leash the policy goes further away for what
# it earns. One seed of 8 phases is one seed: where the curves lie close, another `seed` in `SETTINGS` may
# swap them. With the praise words as the reward, the tables above have three seeds beside yours. "Largest in 3 of 3"
# says that in all three of them this run had the larger number.
#
# ### What does it say?
#
# Three reviews of the start and of each run. A word is coloured by what it is paid: how much the reward
# falls when this one word is left out.


# %%
def paid_per_word(text: str) -> tuple[list[str], list[float]]:
    """The words of a text, and what the reward loses without each of them."""
    words = text.split()
    without = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
    earned = my_reward([text, *without])
    return words, (earned[0] - earned[1:]).tolist()


before = RLHFTrainer(RLHFArgs(**SETTINGS), reward_fn=my_reward)
shown = {"before learning": before, **trainers}
praise, behind_wasnt = {"brilliant", "perfect", "superb", "stunning"}, {}
for name, trainer in shown.items():
    rollout = trainer.rollout_phase()
    # "wasn't so brilliant": an adverb stands between them
    adjectives = [
        adjective
        for words in map(str.split, rollout.texts)
        for verb, adjective in zip(words, words[2:], strict=False)
        if verb == "wasn't"
    ]
    behind_wasnt[name] = sum(word in praise for word in adjectives) / max(len(adjectives), 1)
    kl = sequence_sum(rollout.kl, rollout.samples.mask).mean().item()  # with your function
    earned = rollout.raw_rewards.mean().item()
    show_table(["", "reward", "KL per review"], [[name, earned, kl]], digits=2)
    for text in rollout.texts[:3]:
        words, paid = paid_per_word(text)
        display(tokens_html([f" {word} " for word in words], paid, "paid", limit=1.0))

if pays_for_praise:
    over_seeds.compare("praise words, share of what stands behind wasn't", behind_wasnt, digits=2)
predictions.recall("how it will be cheated", cheated_by)

# %% [markdown]
# With the praise words as the reward, the policy says them wherever an adjective fits, behind "wasn't",
# too: "the plot wasn't so brilliant" earns as much as "the plot was so brilliant". Before learning they are .18 of what
# stands there, after it .51 on a leash and .72 without (means of three seeds). It was paid for
# praise *words*, and that is what it learned. The reward was computed correctly, but it did not measure what was meant. This is
# *reward hacking*, and collecting examples of it is a sport of the field (Krakovna et al. 2020,
# "Specification gaming"; Gao et al. 2022, [2210.10760](https://arxiv.org/abs/2210.10760)).
#
# That was RLHF: text, reward, a step towards more of it, and a leash. The other lessons take it apart.
# An evening:
# - {Lesson:the_value_head}: the value head, on a hook,
# - {Lesson:the_objective}: the objective, term by term,
# - {Lesson:ppo}: PPO, from a batch to gradient steps.
#
# The rest of a weekend:
#
# - {Lesson:the_policy}: the policy and its hooks, from logits to a token,
# - {Lesson:rewards_and_credit}: rewards and credit, and which token earned the reward,
# - {Lesson:the_kl_penalty}: the KL penalty and the optimal policy,
# - {Lesson:what_breaks_it}: what breaks RLHF, and how early one can see it,
# - {Lesson:watch_it_learn}: probes inside the model, phase by phase,
# - {Lesson:what_rlhf_changed}: two checkpoints, side by side,
# - {Lesson:preferences}: a reward learned from comparisons, and a policy tuned on them,
# - {Lesson:a_real_model}: a real model, where the truth is not known,
# - {Lesson:your_question}: a question of your own.
#
# ## Where you are

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# (The numbers under "What was found" come from three seeds on Reel. The cells of this lesson give them with the settings named there.)
#
# - Pay for two things at once, one of them only if the other is there ("but" together with praise).
#   Does the policy find the combination, or settle for one of the two? Hypothesis: it finds both, but praise first, since
#   many reviews have a "but" already.
#
#   <details><summary>What was found</summary>
#
#   The reward was the number of the four praise words in a review with a "but", and 0 in other reviews. Before learning
#   52 % to 63 % of the reviews had a "but", and the mean number of praise words was 0.5 to 0.6. After eight phases on a leash
#   (`kl_coef` 0.3) these figures were 81 % to 89 % and 1.5 to 1.6, and without a leash 88 % to 95 % and 1.9 to 2.2. So the
#   policy finds both; which it finds first, these figures do not say. Without a leash 86 % to 94 % of the reviews were still
#   grammatical.
#
#   </details>
#
# - Pay minus the number of adjectives. What does the grammar of Reel let it do? Hypothesis: nothing. Each grammatical review
#   has three adjectives, so the policy can earn more only by breaking the grammar, and hardly a sample does.
#
#   <details><summary>What was found</summary>
#
#   The mean reward is -3.0 before learning and after eight phases, with a leash and without one. 98 % to 100 % of the
#   reviews stay grammatical.
#
#   </details>
#
# ## Investigations
#
# Each takes an hour. Each has a hypothesis: write down first whether you share it, and what would change your mind.
#
# - **A cheat that the KL does not show.** Find a reward whose cheat stays grammatical and close to the reference. What
#   number *would* show it? Skalse et al. 2022 ([2209.13085](https://arxiv.org/abs/2209.13085)) ask when a reward can
#   be hacked at all; Pan et al. 2022 ([2201.03544](https://arxiv.org/abs/2201.03544)) find that larger models hack more.
#   Hypothesis: a reward for one of several words that are equally likely costs little KL, and the number of different texts
#   shows it.
# - **Repair your reward.** Change one word of your reward so that the cheat you saw earns nothing, and train again. How
#   many rounds until you see no cheat, and how would you know that there is none? (Amodei et al. 2016,
#   [1606.06565](https://arxiv.org/abs/1606.06565), section 4.) Hypothesis: each repair brings out the next cheat, and the
#   third or fourth is one that you do not notice in ten reviews.
# - **How long must the leash be?** Train at five values of `kl_coef` and three seeds, and plot what you *meant* (read
#   ten reviews blind, and score them yourself) against KL. Does it rise and then fall, as Gao et al. 2022
#   ([2210.10760](https://arxiv.org/abs/2210.10760)) found with a learned reward? Hypothesis: it rises at first, and falls from
#   the `kl_coef` on at which the cheat appears.
# - **What no program can count.** Choose something that you can recognise but not program. Which comparisons would you
#   ask people for, and how many? Casper et al. 2023 ([2307.15217](https://arxiv.org/abs/2307.15217)) list what goes
#   wrong with the answers. Hypothesis: two people agree more often on which of two texts is better than on a score, and
#   their agreement is an upper limit for a reward model. {Lesson:preferences} puts people's comparisons back.
