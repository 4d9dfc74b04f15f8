# %% [markdown]
# # 01 The value head
#
# By the end of this lesson, you will be able to attach a value head to a transformer with a hook, and train it to predict a
# review's reward while the review is still being generated.
#
# PPO, the algorithm that trains the policy, needs to know how well things are going partway through a text. The *value* of a
# state is the reward you can expect from there:
#
# $$V(s_t) = \mathbb{E}_{x \sim \pi}\big[R(x) \mid s_t\big]$$
#
# A language model does not output this value, but its activations may contain it. The value head is a small network that takes
# one of these activations as input and outputs one number per position.
#
# **You will also be able to**
# - find a hook point by its name, and know the shape of its activation;
# - match each of a review's 26 generated tokens with the right one of its 29 values;
# - measure how much a frozen transformer already knows about the reward.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 25 seconds on one CPU core and needs no internet access. Cells
# that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, SeedFigures, check, hint, new_run, progress, show_table
from rlhf_lab.models import load_model
from rlhf_lab.views import curves, tokens_html

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
over_seeds = SeedFigures("the_value_head", SETTINGS)  # this run next to stored runs of other seeds
predictions = Predictions()

# %% [markdown]
# `SETTINGS` specifies the model and the reward. As before, you use Reel, a tiny language of movie reviews, and a two-layer
# transformer trained to generate it. The results quoted in the text are for Reel.
#
# ## Names of activations
#
# A `HookedTransformer` is an ordinary transformer that passes every intermediate activation through a *hook point*. By default,
# a hook point does nothing. But if you register a function on it, that function receives the activation and can replace it. The
# cell below runs the model on one review, with a function on every hook point that records the activation's name and shape.
# (The names are the same as in TransformerLens.)

# %%
args = RLHFArgs(**SETTINGS)
model = load_model(args.base_model)
tokens = model.to_tokens("this movie honestly , the plot was really good but the ending was dull .")
fired = []


def record_shape(activation: Tensor, hook: object) -> None:
    """Record name and shape of an activation."""
    fired.append((hook.name, list(activation.shape)))


with torch.no_grad():
    model.run_with_hooks(tokens, fwd_hooks=[(lambda name: True, record_shape)])
print("tokens:", list(tokens.shape), "- layers:", model.cfg.n_layers, "- width:", model.cfg.d_model)
last_block = f"blocks.{model.cfg.n_layers - 1}."
in_last_block = [(name, shape) for name, shape in fired if name.startswith(last_block)]
show_table(["hook point in the last block", "shape"], in_last_block)

# %% [markdown]
# The *residual stream* runs through all blocks. In each block, the attention layer reads from the stream and adds its output
# back to it, and then the MLP does the same. So `hook_resid_pre` is the stream before attention, `hook_resid_mid` is the stream
# between attention and the MLP, and `hook_resid_post` is the stream after the MLP. After the last block, `ln_final` normalizes
# the stream, and the `unembed` matrix turns it into logits:
#
# ```text
# tokens -> embedding -> block 0 -> block 1 -> ln_final -+-> unembed    -> logits  [batch seq d_vocab]
#                                                        |
#                                                        +-> value head -> values  [batch seq]
# ```
#
# The value head should receive the same input as `unembed`, up to a per-dimension scale and shift. Which of these four hook
# points gives you that activation?

# %%
hook_point = "ln_final.hook_normalized"  # predict: "blocks.1.hook_resid_post", "ln_final.hook_scale", "ln_final.hook_normalized" or "blocks.1.hook_mlp_out"

# %%
after_the_blocks = fired[fired.index(in_last_block[-1]) + 1 :]
show_table(["hook point after the last block", "shape"], after_the_blocks)
has_width = [name for name, shape in after_the_blocks if shape[-1] == model.cfg.d_model]
predictions.compare("the value head belongs on", hook_point, has_width[0])

# %% [markdown]
# It is `ln_final.hook_normalized`. The last `hook_resid_post` comes too early, because the final norm is applied after it.
# `hook_scale` is just the number that the norm divides by at each position, and `blocks.1.hook_mlp_out` is just the output of
# the last MLP.
#
# There are two ways to register a hook. `model.add_hook(name, function)` keeps the hook until you call `model.reset_hooks()`,
# which removes all of the model's hooks. `with model.hooks(fwd_hooks=[(name, function)]):` removes only its own hooks at the
# end of the block, even if an exception is raised. We recommend the second.
#
# A hook that returns nothing leaves the activation unchanged. The hook below, however, returns a tensor of zeros. While it is
# registered, will the logits be the same as before, or different?

# %%
silenced = "different"  # predict: "the same" or "different"


# %%
def silence(activation: Tensor, hook: object) -> Tensor:
    """Replace an activation by zeros."""
    return torch.zeros_like(activation)


with torch.no_grad():
    before = model(tokens)
    with model.hooks(fwd_hooks=[(f"{last_block}hook_mlp_out", silence)]):
        during = model(tokens)
    after = model(tokens)
predictions.compare(
    "logits without the last MLP are", silenced, "the same" if during.equal(before) else "different"
)
print("after the with block they are", "the same" if after.equal(before) else "still different")

# %% [markdown]
# ## A value head
#
# The value head maps `d_model` numbers to one number. If you register it on `ln_final.hook_normalized`, a single forward pass
# gives you both the logits and the values.
#
# The cell below contains the whole class except for one method, `value_hook`, which you write. The rest of the class wraps the
# final norm in `with self.value_hook() as values:`, and then uses `values[0]`, which has shape `[batch seq]`. Your method is a
# context manager: make an empty list, register a hook that appends the values to this list, and `yield` the list while the hook
# is registered.
#
# The hook point is the torch module `self.base_model.hook_dict[VALUE_HOOK]`. Its `register_forward_hook(function)` method tells
# torch to call `function(hook_point, inputs, activation)` on every forward pass. It returns a handle: use it in a `with`
# statement, and torch removes the hook when the block ends.
#
# (If the logits change when you attach the value head, your hook is returning something, which then replaces the activation.)

# %%
from rlhf_lab.models import TransformerWithValueHead  # exercise

# %% [markdown]
# The next cell checks that the policy still computes the same logits as the model without a value head. How large are the
# predicted values before any training?

# %%
first_values = "about 0"  # predict: "about 0", "about 1" or "anything"

# %%
policy = TransformerWithValueHead(model, seed=args.seed)
with torch.no_grad():
    logits, values = policy(tokens)
print("logits", list(logits.shape), "values", list(values.shape))
gap = (logits - before).abs().max().item()
print(f"largest difference of the logits {gap:.0e}")
assert gap < 1e-4  # the value head changes nothing but rounding
size = values.abs().max().item()
print(f"largest value {size:.4f}")
kind = "about 0" if size < 0.1 else "about 1" if (values - 1).abs().max() < 0.1 else "anything"
predictions.compare("the first values are", first_values, kind)

# %% [markdown]
# The last layer of a new value head has very small random weights, so all values start out near 0. This is deliberate:
# advantages are computed from the reward and the values, so large random values would add a lot of noise to the first
# advantages.
#
# ## Values and tokens
#
# The policy outputs a value at every position. It is the value of the state *after* the token at that position, which is the
# state where the next token is chosen. PPO, however, needs the value of the state *before* each generated token. Write a
# function that selects these values. `prefix_len` is the number of tokens in the prompt.

# %%
from rlhf_lab.functional import generated_values  # exercise

# %%
trainer = RLHFTrainer(RLHFArgs(**SETTINGS | dict(base_lr=0.0)), policy=policy)
samples = trainer.rollout_phase().samples
prefix_len = samples.prefix_len


def token_texts(row: Int[Tensor, " seq"]) -> list[str]:
    """Decode each token of a row."""
    return [trainer.tokenizer.decode([token]) for token in row.tolist()]


first_row = token_texts(samples.tokens[0])
with torch.no_grad():
    _, all_values = policy(samples.tokens, samples.attention_mask)
cut = generated_values(all_values, prefix_len)
print("values of all positions", list(all_values.shape), "- of generated tokens", list(cut.shape))
show_table(
    ["t", "generated token", "last token of the state before it", "position of its value"],
    [
        [t, first_row[prefix_len + t], first_row[prefix_len - 1 + t], prefix_len - 1 + t]
        for t in range(3)
    ],
)
print("equal to the sampler's values:", bool(torch.allclose(cut, samples.values, atol=1e-5)))

# %% [markdown]
# The sampler computes its values token by token while it generates the review. Your values come from a single forward pass over
# the finished review. Since the two agree, you know that your function selects the right positions. (If your values are off by
# one token, you probably took the value *after* each token.)
#
# ## Training the head alone
#
# Now train the value head, but set `base_lr` to 0, so that the transformer does not change. The transformer was trained to
# continue reviews and has never been trained on a reward. How well can a value head predict the reward from its activations?
#
# To measure this, we use the *explained variance*: the fraction of the variance in the returns $G$ (the value head's targets)
# that the values $V$ explain, from 0 (none of it) to 1 (all of it):
#
# $$EV = 1 - \operatorname{Var}(G - V) \,/\, \operatorname{Var}(G)$$
#
# How large will the explained variance be in the last of eight phases?
#
# (6 s on one core)

# %%
explained = "0.1 to 0.7"  # predict: "below 0.1", "0.1 to 0.7" or "above 0.7"

# %%
policy = TransformerWithValueHead(model, seed=args.seed)
at_start = copy.deepcopy(model.state_dict())
frozen = RLHFArgs(**SETTINGS | dict(base_lr=0.0))
trainer = RLHFTrainer(frozen, out=new_run("head"), policy=policy)
reports = trainer.train()
now = policy.base_model.state_dict()
print("transformer unchanged:", all(now[name].equal(w) for name, w in at_start.items()))
predicted = [report.explained_variance for report in reports]
bins = {"below 0.1": 0.1, "0.1 to 0.7": 0.7, "above 0.7": torch.inf}
predictions.compare("explained variance in the last phase", explained, predicted[-1], bins)
over_seeds.compare("explained variance", {"first phase": predicted[0], "last phase": predicted[-1]})

# %%
curves(
    {"frozen transformer": ([report.phase for report in reports], predicted)},
    "The value head learns from a frozen transformer",
    y_label="explained variance",
)

# %% [markdown]
# For every seed, the explained variance rises from 0, even though the transformer itself does not change. So its residual
# stream must already contain information about the reward. But the explained variance cannot reach 1, because part of the
# reward depends on words that haven't been generated yet. (If your explained variance stays at 0, check `head_lr` and the hook
# point.)
#
# ## The values of a review
#
# Below are the best and the worst of 128 reviews. The color of each word shows the value *after* it: blue means above 0, and
# orange means below 0 (hover over a word to see the number). The values are centered around 0 because the trainer normalizes
# rewards to mean 0. After which words does the value change the most?

# %%
rollout = trainer.rollout_phase()
best, worst = int(rollout.raw_rewards.argmax()), int(rollout.raw_rewards.argmin())
after_each = rollout.samples.values[:, 1:]  # the value before the next token


def colored(row: int) -> object:
    """Color the generated words of a review by the value after each."""
    words = [f" {word.strip()} " for word in token_texts(rollout.samples.tokens[row])]
    return tokens_html(words[prefix_len:-1], after_each[row], "value")


show_table(["reward", "text"], [[rollout.raw_rewards[best].item(), rollout.texts[best]]])
colored(best)

# %%
show_table(["reward", "text"], [[rollout.raw_rewards[worst].item(), rollout.texts[worst]]])
colored(worst)

# %% [markdown]
# The value does not simply follow the opinion words: it is close to 0 after "superb" and "horrible", and far from 0 after "so",
# "quite" and "i". One explanation is that a frozen transformer represents the opinion in its last layer only where it helps
# predict the next word, and the last layer is the value head's only input.
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - **Train the head for longer, or faster.** Train for 20 phases, or set `head_lr=1e-2`. How high does the explained variance
#   get while the transformer is frozen? And does it help to train the transformer as well, with the preset's `base_lr`?
#
#   <details><summary>Results (three seeds, last phase)</summary>
#
#   With a frozen transformer, the explained variance reaches 0.40 to 0.41 after 20 phases. With `head_lr=1e-2`, it reaches 0.31
#   to 0.42 after only 8 phases. If you also train the transformer, with the preset's `base_lr`, it reaches 0.27 to 0.34 after 8
#   phases, so training the transformer doesn't help here. (Note that the rewards then change during the run, so the numbers are
#   not strictly comparable.)
#
#   </details>
#
# Next: {lesson:the_objective}, where values and rewards are combined into one objective. The appendix
# {lesson:where_values_are_read} measures at which layer, and after which word, the value can first be predicted.
