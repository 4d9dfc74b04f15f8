# %% [markdown]
# # 04 The policy and its hooks
#
# How does a transformer choose the next token, and how does one look and reach inside while it does?
#
# In the first half you take the choice apart: from logits to a token, from token to text, and back from
# a text to the probability that the model gave it. In the second half you open the model: you list the
# places where one can look, read the choice off every layer, and find the attention head that carries
# one fact, the difference between "was" and "wasn't", by putting activations of one text into another.
#
# **Needs** {lesson:start} (policy, state, token), Python and PyTorch.
#
# **Afterwards you can**
# - draw a token from logits with one random number, and score a text that somebody else has written,
# - list the hook points of a transformer with their shapes, and check that they add up,
# - say with a logit lens what a model would answer if it stopped at an earlier layer,
# - show with a patch which head carries a fact, and at which token, with an interval,
# - say what the attention pattern alone would have told you.
#
# **What to inspect** when something looks wrong:
#
# | you see | look at | because |
# |---|---|---|
# | sampled and scored log-probabilities differ | temperature, top-k, off by one | the text was drawn from another distribution than the one that scores it |
# | a patch changes nothing at all | what the hook returns | a hook that returns nothing leaves the activation alone |
# | the donor's activations have changed | `clone` | a hook that writes in place writes into what others keep |
# | logits differ from those of an hour ago | hooks that are still attached | `add_hook` stays, `hooks(...)` and `run_with_hooks` clean up |
# | a lens that reads nonsense | the layer | early layers need not write in the words of the unembedding |
# | a share above 1, or below 0 | the interval, then nothing | patches may overshoot; shares of several heads need not add up to 1 |

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 40 seconds on one core, without a
# network. Cells that take more than 3 seconds say so, as the imports do here:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import inspect
from collections import Counter
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from IPython.display import display
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.functional import Interval, bootstrap_interval
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.models.hooked_transformer import Attention
from rlhf_lab.organism import WORD_IDS, Grammar, build_graph, grammar_policy
from rlhf_lab.organism.lexicon import SENSE_OF_ADJECTIVE, SENSE_OF_VERB
from rlhf_lab.probes import Run
from rlhf_lab.sampling import SamplingSpec, sample, sampling_noise
from rlhf_lab.training.callbacks import Event
from rlhf_lab.views import curves, heatmap
from rlhf_lab.views.plots import heatmaps

SETTINGS = dict(
    preset="reel",
    total_phases=3,
    warmup_steps=1,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
)
predictions = Predictions()

# %% [markdown]
# `SETTINGS` decides what this runs on: Reel, a tiny language of movie reviews, and a transformer of two
# layers that speaks it. With another preset the cells about texts run on that model; those about "was"
# and "wasn't" need Reel's grammar and are left out. The text between the cells is about Reel.
#
# ## From logits to a token
#
# The policy reads the text so far and gives one number for each word of its vocabulary, a *logit* $z_v$. Logits
# become probabilities by the softmax, here with a *temperature* $T$:
#
# $$\pi(v \mid s) = \frac{e^{z_v / T}}{\sum_w e^{z_w / T}}$$
#
# The exponential makes every number positive, and the sum makes them add up to 1. Only differences of
# logits matter: add a constant $c$ to all, and $e^{c/T}$ cancels. In particular the log odds of two words, the
# logarithm of the quotient of their probabilities, are $(z_v - z_w) / T$, so that a lower temperature pulls the
# words apart. How the likeliest word $v$ fares follows from the derivative in $b = 1 / T$:
#
# $$\frac{\partial}{\partial b} \log \pi(v) = z_v - \frac{\sum_w z_w e^{b z_w}}{\sum_w e^{b z_w}} = z_v - \mathbb{E}_\pi[z]$$
#
# Before you run the cell: at temperature 0.5, is the likeliest word drawn more often than at 1?

# %%
at_half_temperature = "more often"  # predict: "more often", "less often" or "as often"

# %%
args = RLHFArgs(**SETTINGS)
speaks_reel = args.preset == "reel"
trainer = RLHFTrainer(args)
model, tokenizer = trainer.policy.base_model, trainer.tokenizer


def word(token: int | Tensor) -> str:
    """One token as text."""
    return tokenizer.decode([int(token)]).strip()


tokens = model.to_tokens("this movie honestly , the plot was")
with torch.no_grad():
    next_logits = model(tokens)[0, -1]
warm, hot, cold = ((next_logits / t).softmax(-1) for t in (1.0, 2.0, 0.5))
likeliest = warm.argsort(descending=True)[:8]
show_table(
    ["next word", "logit", "T = 1", "T = 0.5", "T = 2"],
    [
        [word(v), next_logits[v].item(), warm[v].item(), cold[v].item(), hot[v].item()]
        for v in likeliest
    ],
)
difference = (cold - warm)[likeliest[0]].item()
predictions.compare(
    "at temperature 0.5 the likeliest word is drawn",
    at_half_temperature,
    "more often" if difference > 0.001 else "less often" if difference < -0.001 else "as often",
)

# %% [markdown]
# The likeliest word has the largest logit, which is above any mean of logits, so the derivative is
# positive: it can only gain.
#
# ### One number per token
#
# Drawing needs randomness, and one random number is enough. Lay the probabilities behind each other on a
# line from 0 to 1. With $C_v = \sum_{w \le v} \pi(w)$ word $v$ has the piece from $C_{v-1}$ to $C_v$, of
# length $\pi(v)$. A number $u$ that is uniform on $[0, 1)$ falls into it with probability
#
# $$P(C_{v-1} \le u < C_v) = C_v - C_{v-1} = \pi(v)$$
#
# which is just what is asked for. So: draw the first word whose running sum is *greater* than $u$. This is
# sampling by the inverse of the distribution function. The sampler of this package draws all its random
# numbers beforehand, one for each text and step (`sampling_noise`), and that is all the randomness there is.

# %%
from rlhf_lab.sampling import draw_token  # exercise

# %%
noise = torch.tensor([0.2, 0.5, 0.9])
drawn = draw_token(next_logits.log_softmax(-1).expand(3, -1).cpu(), noise)
print(*(f"u = {u:.1f}: {word(v)}" for u, v in zip(noise.tolist(), drawn, strict=True)), sep="; ")
numbers = torch.rand(5000, generator=torch.Generator().manual_seed(0))
many = draw_token(next_logits.log_softmax(-1).expand(5000, -1).cpu(), numbers).to(warm.device)
show_table(
    ["word", "probability", "share of 5000 draws"],
    [[word(v), warm[v].item(), (many == v).float().mean().item()] for v in likeliest[:4]],
)
reached = warm.cpu().cumsum(-1)
steps = torch.stack([reached - warm.cpu(), reached], 1).flatten()  # it jumps at each word
edges = torch.arange(len(warm)).repeat_interleave(2).double()
near = (edges - likeliest[:6].cpu().double().mean()).abs() < 8
across = edges[near].tolist()
curves(
    {"running sum": (across, steps[near].tolist()), "u = 0.5": (across, [0.5] * len(across))},
    "The word is drawn at whose number the running sum passes u",
    x_label="number of the word in the vocabulary",
    y_label="probability up to this word",
)

# %% [markdown]
# Look at the steps: each is as high as its word is likely. The flat parts are words that have next to no probability
# here.
#
# ## Write and score
#
# To write, repeat: read everything so far, take the logits at the last position, draw, append. There is no
# more to it. Your function takes `noise` of shape `[gen batch]`: a row is a step.

# %%
from rlhf_lab.sampling import sample_without_cache  # exercise

# %% [markdown]
# The package's `sample` does the same with a *KV cache*: it keeps what the model has computed for the tokens that it
# has read (of each layer the keys and values, two vectors per token), and reads only the new token at each step.
# Given the same numbers, does it write the same texts? (Two ways of adding the same numbers round differently; where
# $u$ lies within a rounding of a step, the word may be another.)
#
# (3 s on one core)

# %%
same_tokens = "all of them"  # predict: "none", "some of them" or "all of them"

# %%
prompts = trainer.next_prompts()
spec = SamplingSpec(args.gen_len, temperature=args.temperature)
by_sampler = sample(trainer.policy, prompts, spec, torch.Generator().manual_seed(1))
noise = sampling_noise(len(prompts), args.gen_len, torch.Generator().manual_seed(1))
prefix_len, device = by_sampler.prefix_len, by_sampler.tokens.device
by_hand = sample_without_cache(model, torch.tensor(prompts, device=device), noise, args.temperature)
agree = (by_hand == by_sampler.tokens)[:, prefix_len:][by_sampler.mask].double().mean().item()
for row in by_hand[:3]:
    print(" ".join(word(token) for token in row))
share = "all of them" if agree > 0.999 else "some of them" if agree > 0.1 else "none"
predictions.compare("tokens that are the same", same_tokens, share)
seq = prefix_len + args.gen_len
print("tokens read, with a cache", seq - 1, "and without", sum(range(prefix_len, seq)), "per text")

# %% [markdown]
# Without a cache the model reads $1 + 2 + \dots$ tokens, a number that grows with the square of the length.
#
# ### The log-probability of what was said
#
# PPO (proximal policy optimisation, the training method of {lesson:ppo}) changes how likely the sampled tokens are. So it
# has to know, for each token that was generated, its *log-probability* $\log \pi(a_t \mid s_t)$: the log-softmax of
# the logits at the position *before* it, picked at the token's own number. The probability of the whole answer is the product over its tokens, its logarithm the sum:
#
# $$\log \pi(x) = \sum_t \log \pi(a_t \mid s_t)$$
#
# `eindex` picks entries by name. `eindex(logprobs, tokens, "b s [b s+1]")` reads: for each batch row b and
# position s, take `logprobs[b, s, tokens[b, s+1]]`. (`logprobs.gather(-1, index)` does the same, if you
# know it.) From here on jaxtyping checks the shapes that you promise.

# %%
from rlhf_lab.functional import get_logprobs  # exercise

# %% [markdown]
# Now a trap. Samplers often cut off unlikely words: `top_k=5` draws among the five likeliest alone. Score
# such texts with your function, which knows nothing of that, and divide the probability that it gives by
# the one they were drawn with. Per token the quotient is a bit below 1. What is it for a whole review?

# %%
quotient_of_a_review = "below 0.5"  # predict: "about 1", "0.5 to 0.9" or "below 0.5"

# %%
gaps = {}
for name, top_k in {"all words": None, "top 5": 5}.items():
    cut = SamplingSpec(args.gen_len, temperature=args.temperature, top_k=top_k)
    written = sample(trainer.policy, prompts, cut, torch.Generator().manual_seed(2))
    with torch.no_grad():
        scored = get_logprobs(model(written.tokens), written.tokens, prefix_len, args.temperature)
    gap = torch.where(written.mask, scored - written.logprobs, 0.0)
    gaps[name] = gap.sum(1).exp()
    per_token = gap[written.mask].exp().mean().item()
    median = gaps[name].median().item()
    print(f"{name}: mean per token {per_token:.3f}, median per review {median:.3f}")
middle = gaps["top 5"].median().item()
bracket = "about 1" if middle > 0.9 else "0.5 to 0.9" if middle > 0.5 else "below 0.5"
predictions.compare("the quotient of a review, top 5", quotient_of_a_review, bracket)

# %% [markdown]
# Small factors multiply. In {lesson:the_objective} this quotient gets a name, the *ratio*, and a rule: before the first gradient
# step it is 1, or else the policy that is trained is not the one that sampled. (The trainer scores with the same
# top-k that it samples with.)
#
# ## Places to look
#
# Now open the model. It begins with the *embedding*, one vector for each word of the vocabulary, and goes on in
# layers, here called blocks. The policy is a `HookedTransformer`, a class of this package in one file,
# `rlhf_lab/models/hooked_transformer.py`, with the names of TransformerLens. It passes its
# activations through named *hook points*, also called sites. `run_with_cache` runs the model and returns the output and
# TransformerLens's `ActivationCache` with the activation at each site (except `hook_result`, the largest, unless
# `names_filter` names it). A function that is registered at a site is a *hook*: it is called with the activation, and what it
# returns, if anything, replaces the activation (`run_with_hooks` registers hooks for one run). In one block:
#
# - the *residual stream* comes in (`hook_resid_pre`), one vector of `d_model` numbers per position;
# - *attention* moves information between positions. At each position an *attention head* makes three vectors of the
#   stream: a *query*, a *key* and a *value*. It compares the query with the keys up to its own position; softmax
#   makes weights of that, the *pattern* $A$. The head reads the values $V$ with these weights,
#   $z_q = \sum_k A_{qk} V_k$, and writes $z_q W_O$ into the residual stream;
# - the *MLP* (two linear maps with a nonlinearity, the GELU, between them) reads each position by itself, and writes into the
#   residual stream, too.
#
# Which shape does `hook_z` have, for 8 texts of 29 tokens, in a model of width 64 with 4 heads? (On
# another model the numbers are others.)

# %%
shape_of_z = "[8, 29, 4, 16]"  # predict: "[8, 29, 64]", "[8, 29, 4, 16]" or "[8, 4, 29, 29]"

# %%
reviews = by_sampler.tokens[:8]
with torch.no_grad():
    logits, cache = model.run_with_cache(reviews)
meaning = {
    "hook_embed": "the word's own vector",
    "hook_pos_embed": "the position's own vector",
    "blocks.0.hook_resid_pre": "what comes into block 0",
    "blocks.0.attn.hook_pattern": "who reads whom, by head",
    "blocks.0.attn.hook_z": "what each head has read",
    "blocks.0.hook_attn_out": "what the heads write, added up",
    "blocks.0.hook_resid_mid": "the stream behind attention",
    "blocks.0.mlp.hook_post": "the neurons, behind the GELU",
    "blocks.0.hook_mlp_out": "what the MLP writes",
    "blocks.0.hook_resid_post": "the stream behind block 0",
    "ln_final.hook_normalized": "the last stream, normalised",
}
there = [name for name in meaning if name in cache]
show_table(
    ["site", "shape", "what it is"],
    [[name, str(list(cache[name].shape)), meaning[name]] for name in there],
)
print(len(cache), "sites in all")
predictions.compare(
    "the shape of hook_z", shape_of_z, str(list(cache["blocks.0.attn.hook_z"].shape))
)

# %% [markdown]
# ### Read the forward pass
#
# The next cell prints the code that has computed these activations: the hook points of attention with their shapes, then
# the forward pass. `Attention.attend` has a shortcut: if no hook is registered on scores or pattern, one operation of torch
# computes softmax and sum. Everything else runs line by line as you read it, in sampling and in training as well.

# %%
source = inspect.getsource(Attention)
print("\n".join(line for line in source.splitlines() if "HookPoint()" in line))
print(inspect.getsource(Attention.forward))
print(inspect.getsource(Attention.attend))

# %% [markdown]
# So you can also change the code itself. `breakpoint()` in `Attention.forward` stops each time that a block runs. Or replace the
# method `forward` of one block's attention. If the new one returns zeros, are the logits the same as
# with a hook that replaces `hook_attn_out` by zeros?

# %%
patched_or_hooked = "the same"  # predict: "the same" or "different"


# %%
def return_zeros(x: Tensor, *rest: object) -> Tensor:
    """Return zeros: attention that adds nothing to the residual stream."""
    return torch.zeros_like(x)


attention = model.blocks[0].attn
with torch.no_grad():
    hooked = model.run_with_hooks(
        reviews, fwd_hooks=[("blocks.0.hook_attn_out", lambda x, hook: return_zeros(x))]
    )
    attention.forward = return_zeros
    patched = model(reviews)
    del attention.forward
    print("largest change of a logit", f"{(patched - logits).abs().max().item():.1f}")
predictions.compare(
    "patched or hooked, the logits are",
    patched_or_hooked,
    "the same" if torch.allclose(patched, hooked, atol=1e-4) else "different",
)

# %% [markdown]
# Hooks are still the better tool: they are removed for you, they have names, and they do not depend on the code around them.
#
# ### Add it up
#
# Nothing ever overwrites the residual stream; everything is added to it. So what arrives at its end should be
# the sum of all that was written:
#
# $$h_\mathrm{last} = \mathrm{embed} + \mathrm{pos} + \sum_l \big(\mathrm{attn}_l + \mathrm{mlp}_l\big)$$
#
# An identity like this is worth checking before one trusts a cache.

# %%
last = model.cfg.n_layers - 1
parts = ["hook_embed", "hook_pos_embed"]
parts += [f"blocks.{l}.hook_{part}_out" for l in range(last + 1) for part in ("attn", "mlp")]
summed = torch.stack([cache[name] for name in parts if name in cache]).flip(0).sum(0)
end = cache[f"blocks.{last}.hook_resid_post"]
print("largest difference", f"{(summed - end).abs().max().item():.0e}", "of", len(parts), "parts,")
print("where the largest entry is", f"{end.abs().max().item():.1f}")

# %% [markdown]
# ## Logit lens
#
# Behind the last block the stream is normalised and multiplied with the *unembedding*, a matrix with one column for
# each word of the vocabulary; the products are the logits. Nobody can forbid you to do the same with the stream of an
# *earlier* layer: what would the model say if it stopped here? This is the *logit lens*.

# %%
from rlhf_lab.diffing import logit_lens  # exercise

# %% [markdown]
# Read all layers of 256 reviews with it. On Reel the right answer is known at every position: the grammar
# says exactly with which probability each word comes next, $p(v \mid s)$. How far is the lens from that, in
# nats?
#
# $$\mathrm{KL}(p \,\|\, \mathrm{lens}) = \sum_v p(v \mid s) \, \big(\log p(v \mid s) - \log \mathrm{lens}(v)\big)$$
#
# It is 0 only where the two are equal ({lesson:the_kl_penalty} is about it). Add it up over the positions of a review. The
# embedding alone, which has seen no other word, is hundreds of nats away, and the last layer, which the model
# was trained on, is nearly right. And behind the first of the two blocks?

# %%
behind_block_0 = "1 to 20"  # predict: "more than 100", "20 to 100", "1 to 20" or "below 1"

# %%
SITES = {"embedding": "blocks.0.hook_resid_pre"}
for layer in range(model.cfg.n_layers):
    SITES[f"attention {layer}"] = f"blocks.{layer}.hook_resid_mid"
    SITES[f"MLP {layer}"] = f"blocks.{layer}.hook_resid_post"
language = Grammar()


def reviews_of_reel(n: int, seed: int) -> Int[Tensor, "batch seq"]:
    """Reviews that the grammar itself has written."""
    rows = language.sample(n, np.random.default_rng(seed)).tokens
    return torch.from_numpy(rows).to(device)


grammar = grammar_policy(build_graph(language))
texts = by_sampler.tokens
if speaks_reel:
    texts = reviews_of_reel(256, seed=0)
    slots = [s.name if s.clause is None else f"{s.name} {s.clause + 1}" for s in language.slots]


def next_word(rows: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch next d_vocab"]:
    """The exact probability of each next word; on other models than Reel's, the model's own."""
    if not speaks_reel:
        with torch.no_grad():
            return model(rows).softmax(-1)[:, :-1].double()
    index, _ = grammar.graph.walk(rows)
    tables = [grammar.probability[t][index[:, t]] for t in range(rows.shape[1] - 1)]
    return torch.from_numpy(np.stack(tables, axis=1)).to(rows.device)


@torch.no_grad()
def lens_errors(
    other: HookedTransformer, rows: Int[Tensor, "batch seq"]
) -> Float[Tensor, "site next"]:
    """KL(exact || lens) at each site and position, in nats, averaged over texts."""
    _, kept = other.run_with_cache(rows, names_filter=list(SITES.values()))
    exact, found = next_word(rows), []
    for site in SITES.values():
        lens = logit_lens(other, kept[site])[:, :-1].double()
        found.append((torch.special.xlogy(exact, exact) - exact * lens).sum(-1).mean(0))
    return torch.stack(found).cpu()


errors = lens_errors(model, texts)
show_table(
    ["lens at", "nats per text", "largest at one position"],
    [[name, row.sum().item(), row.max().item()] for name, row in zip(SITES, errors, strict=True)],
    digits=2,
)
nats = errors[2].sum().item()
bracket = "below 1" if nats < 1 else "1 to 20" if nats < 20 else "20 to 100"
predictions.compare(
    "left behind block 0", behind_block_0, "more than 100" if nats > 100 else bracket
)
columns = slots[1:] if speaks_reel else [str(t) for t in range(1, texts.shape[1])]
heatmap(
    errors.clamp(min=1e-4).log10(),
    list(SITES),
    columns,
    "log10 of KL(exact || lens) in nats, by layer and by the word to come",
)

# %% [markdown]
# Rows are layers from the embedding on, columns the word that comes next; yellow is far from the right answer, blue
# is near it. The columns bear the names of the *slots*, the places in the sentence: in each clause THE, ASP (what is
# judged, such as "plot"), COP ("was" or "wasn't"), ADV and ADJ, with the clause's number; CONN joins clauses ("and" or
# "but"). One part closes most of the distance: compare the row of MLP 0 with the row above it.
#
# Be careful with the upper rows. That the lens reads nonsense in the embedding does not mean that nothing is known
# there: the early layers need not write in the basis that the unembedding reads. A *tuned lens* (Belrose et al. 2023,
# [2303.08112](https://arxiv.org/abs/2303.08112)) first learns a map from each layer's basis to the last one's.
#
# How much of such a picture belongs to this model alone? The package has two more of the same training, which
# differ in the seed alone.

# %%
names = ("reel-nano", "reel-nano-b", "reel-nano-c")
models = {name: load_model(name, device=str(device)) for name in names} if speaks_reel else {}
rows = {name: lens_errors(other, texts[:64]).sum(1).tolist() for name, other in models.items()}
show_table(
    ["nats per text, n = 64", *SITES], [[name, *row] for name, row in rows.items()], digits=2
)

# %% [markdown]
# In all three, MLP 0 brings the largest part. What is left for block 1 differs: one of the models has nearly finished
# behind block 0, as the lens reads it.
#
# ## One head
#
# A review of Reel has three clauses, such as "the plot **wasn't** so good". The *copula* ("was" or "wasn't") turns
# the adjective round, and what the reviewer thinks decides, many words later, between "i liked it" and "i hated it".
# So somewhere "wasn't" has to meet its adjective, and what comes of it has to get to the "i". Only attention moves
# anything from one position to another.
#
# The common way to look for such a thing is to look at patterns. Here are those of all heads, for one review with
# "wasn't" in its first clause. A row is a word that reads, a column a word that is read, the colour the weight; L0H1 is
# head 1 of layer 0.

# %%
if speaks_reel:
    at_i = language.slot("I")
    copula = [language.slot("COP", k) for k in range(3)]
    adjective = [language.slot("ADJ", k) for k in range(3)]
    shown = texts[texts[:, copula[0]] == WORD_IDS["wasn't"]][:1, : at_i + 1]
else:
    shown = texts[:1]
with torch.no_grad():
    _, kept = model.run_with_cache(shown, names_filter=lambda name: name.endswith("hook_pattern"))
grids = {
    f"L{layer}H{head}": kept[f"blocks.{layer}.attn.hook_pattern"][0, head].tolist()
    for layer in range(model.cfg.n_layers)
    for head in range(model.cfg.n_heads)
}
said = [word(token) for token in shown[0]]
title = "attention patterns: each row reads the columns"
heatmaps(grids, said, said, title, across=2, limits=(0.0, 1.0))

# %% [markdown]
# Find the column of the first "wasn't". Some heads look at it, from some rows. Before anything is changed, write
# down what you expect. At which word is the copula of the first clause picked up, so that the verb comes out right:
# at its adjective, at a later word before "i", or at "i"? And the head and word with the *largest attention* to the
# copula: is it the one that carries the fact?

# %%
picked_up = "at the adjective"  # predict: "at the adjective", "in between" or "at i"
largest_attention_carries_it = "yes"  # predict: "yes" or "no"

# %% [markdown]
# ## Reach in
#
# A pattern says what a head reads, not whether anybody uses it. To know that, change what the head has read, and
# see whether the answer changes. Take a *minimal pair*: two texts that differ in one word, "was" in one and
# "wasn't" in the other. Run both. Then run the second again, and put into one head, at one position, what the
# same head had read there in the first. This is *activation patching*.

# %%
from rlhf_lab.diffing import patch_heads  # exercise

# %% [markdown]
# ### What is measured
#
# At "i" the next word is one of three positive or three negative verbs. How much the model leans to the side that
# the adjective of clause $k$ speaks for, $s_k = \pm 1$, are the log odds
#
# $$\ell = s_k \, \log \frac{\sum_{v\ \mathrm{positive}} \pi(v \mid \mathrm{text})}{\sum_{v\ \mathrm{negative}} \pi(v \mid \mathrm{text})}$$
#
# With "was" the adjective counts as it stands, with "wasn't" the other way, and so $\ell$ should fall from one to the
# other. The grammar says by exactly how much. Does the model have the rule?


# %%
class Pairs(NamedTuple):
    """Texts up to "i" that differ in the copula of one clause, and the sign of its adjective."""

    was: Int[Tensor, "batch seq"]
    wasnt: Int[Tensor, "batch seq"]
    sign: Float[Tensor, " batch"]


def make_pairs(rows: Int[Tensor, "batch seq"], k: int) -> Pairs:
    """Reviews with "was", and the same with "wasn't", in clause k (counted from 0)."""
    was, wasnt = rows[:, : at_i + 1].clone(), rows[:, : at_i + 1].clone()
    was[:, copula[k]], wasnt[:, copula[k]] = WORD_IDS["was"], WORD_IDS["wasn't"]
    signs = [SENSE_OF_ADJECTIVE[word(token)][0] for token in rows[:, adjective[k]]]
    return Pairs(was, wasnt, torch.tensor(signs, dtype=torch.float32, device=rows.device))


def lean_of(probs: Float[Tensor, "batch d_vocab"], sign: Float[Tensor, " batch"]) -> Tensor:
    """Log odds of a verb on the adjective's side."""
    verbs = [[WORD_IDS[v] for v, (s, _) in SENSE_OF_VERB.items() if s == side] for side in (1, -1)]
    positive, negative = (probs[:, of_side].sum(-1).log() for of_side in verbs)
    return (sign * (positive - negative)).float()


@torch.no_grad()
def lean(
    other: HookedTransformer, rows: Int[Tensor, "batch seq"], sign: Tensor, hooks: list = ()
) -> Float[Tensor, " batch"]:
    """What the model makes of it at the last word, with hooks."""
    logits = other.run_with_hooks(rows, fwd_hooks=list(hooks))
    return lean_of(logits[:, -1].double().softmax(-1), sign)


if speaks_reel:
    reviews = reviews_of_reel(320, seed=1)
    search, fresh = reviews[:64], reviews[64:]  # to search among, and to measure on afterwards
    rows = []
    for k in range(3):
        pairs = make_pairs(fresh, k)
        fall = lean(model, pairs.was, pairs.sign) - lean(model, pairs.wasnt, pairs.sign)
        full = [torch.cat([part, fresh[:, at_i + 1 :]], 1) for part in (pairs.was, pairs.wasnt)]
        exact = [lean_of(next_word(one)[:, at_i], pairs.sign) for one in full]
        found = bootstrap_interval(fall)
        rows.append([k + 1, str(found), (exact[0] - exact[1]).mean().item()])
    show_table(["clause", "lean with was, less with wasn't", "the grammar says"], rows, digits=2)

# %% [markdown]
# The model has the rule, more or less strongly than the grammar. (Each mean stands with a range in brackets, which the
# next section explains.)
#
# ### How much does a patch bring back?
#
# Three means tell: of the *clean* text ("was"), of the *corrupted* one ("wasn't"), and of the corrupted one with a
# *patch* from the clean one. The share of the effect that the patch recovers is
#
# $$f = \frac{\overline{\ell_\mathrm{patched}} - \overline{\ell_\mathrm{corrupted}}}{\overline{\ell_\mathrm{clean}} - \overline{\ell_\mathrm{corrupted}}}$$
#
# 0 if it does nothing, 1 if it is as if the text had said "was". A share needs an *interval*, by a *bootstrap* over
# texts (draw as many texts with replacement, the same ones in all three means, and compute the share again, 2,000
# times; the middle 95 % of the results are the interval). It has no meaning where clean and corrupted differ by no more
# than noise: where the interval of the mean difference between them holds 0.
#
# This exercise has no steps: the signature, and the sentence. `bootstrap_means(*columns, statistic=...)` gives the
# interval of what depends on the columns' means alone (it calls the statistic once, with the means of all
# resamples), `bootstrap_interval(*columns, statistic=...)` that of any statistic (it calls it with the drawn rows of
# each column, once per resample, which takes longer), and an `Interval` has `value`, `low`, `high` and `n`. Where
# the share is undefined give `Interval(None, None, None, n, level, why="...")`. The `resamples` and the `generator`
# you may leave alone.

# %%
from rlhf_lab.functional import recovered_fraction  # exercise

# %% [markdown]
# ### Search
#
# Patch every head at every position from the copula to "i", in all three clauses, on 64 pairs. (Heads of the last
# layer are patched at "i" alone: what they write elsewhere is never read again.)
#
# (5 s on one core)


# %%
def in_brackets(found: Interval) -> str:
    """A share and its interval, or why there is none."""
    if found.value is None:
        return f"undefined ({found.why})"
    return f"{found.value.item():.2f} [{found.low.item():.2f}, {found.high.item():.2f}]"


class Found(NamedTuple):
    """A head at a position, and what was measured there."""

    layer: int
    head: int
    position: int


@torch.no_grad()
def look_at(other: HookedTransformer, rows: Int[Tensor, "batch seq"], site: str) -> list[Tensor]:
    """What a forward has at a site of each layer."""
    names = [f"blocks.{layer}.attn.{site}" for layer in range(other.cfg.n_layers)]
    _, kept = other.run_with_cache(rows, names_filter=names)
    return [kept[name] for name in names]


def patched_lean(
    other: HookedTransformer, pairs: Pairs, donor: list[Tensor], heads: list[int], place: Found
) -> Float[Tensor, " batch"]:
    """The lean of the texts with "wasn't", with heads of a layer from those with "was"."""
    where = slice(place.position, place.position + 1)

    def put(z: Tensor, hook: object) -> Tensor:
        return patch_heads(z, donor[place.layer], heads, where)

    hook = (f"blocks.{place.layer}.attn.hook_z", put)
    return lean(other, pairs.wasnt, pairs.sign, [hook])


def share_map(
    other: HookedTransformer, rows: Tensor, k: int, stride: int
) -> Float[Tensor, "layer head seq"]:
    """The share of the effect of clause k's copula that each head recovers at every stride-th
    position.
    """
    pairs = make_pairs(rows, k)
    ends = lean(other, pairs.was, pairs.sign), lean(other, pairs.wasnt, pairs.sign)
    donor, n_layers = look_at(other, pairs.was, "hook_z"), other.cfg.n_layers
    found = torch.zeros(n_layers, other.cfg.n_heads, at_i + 1)
    for layer in range(n_layers):
        for position in range(at_i if layer == n_layers - 1 else copula[k], at_i + 1, stride):
            for head in range(other.cfg.n_heads):
                place = Found(layer, head, position)
                patched = patched_lean(other, pairs, donor, [head], place)
                found[place] = (patched - ends[1]).mean() / (ends[0] - ends[1]).mean()
    return found


def largest(table: Float[Tensor, "layer head seq"], n: int = 1) -> list:
    """Where the largest entries are."""
    flat = table.flatten().topk(n).indices
    return [Found(*(int(i) for i in torch.unravel_index(at, table.shape))) for at in flat]


def named(place: Found) -> str:
    """Head and slot in words."""
    return f"L{place.layer}H{place.head} at {slots[place.position]}"


if speaks_reel:
    shares = {k: share_map(model, search, k, stride=1) for k in range(3)}
    best = {k: largest(table)[0] for k, table in shares.items()}
    heads = [f"L{layer}H{head}" for layer in range(last + 1) for head in range(model.cfg.n_heads)]
    grid = torch.cat([shares[k].flatten(0, 1)[:, copula[k] :] for k in range(3)], 1)
    columns = [f"{slots[t]}, clause {k + 1}" for k in range(3) for t in range(copula[k], at_i + 1)]
    some = [i for i in range(len(columns)) if grid[:, i].abs().max() > 0.05]
    print(
        f"some head recovers more than 0.05 of the effect at {len(some)} of {len(columns)} places"
    )
    title = "Share of a copula's effect that one head recovers at one slot"
    display(heatmap(grid[:, some], heads, [columns[i] for i in some], title, "diverging", (-1, 1)))

# %% [markdown]
# Rows are heads, columns the slots where they are patched, with the clause of the
# copula; blue is a share of 1. Take the best place of each clause, and measure it on 256 pairs that were not
# searched: the largest of many numbers is larger than it would be again.

# %%
if speaks_reel:
    rows = []
    for k, place in best.items():
        pairs = make_pairs(fresh, k)
        clean, corrupted = (lean(model, part, pairs.sign) for part in (pairs.was, pairs.wasnt))
        donor = look_at(model, pairs.was, "hook_z")
        patched = patched_lean(model, pairs, donor, [place.head], place)
        share = recovered_fraction(clean, corrupted, patched)
        rows.append([k + 1, named(place), in_brackets(share)])
    show_table(["clause", "best on 64 pairs", "share on 256 others"], rows)
    print("pairs measured on:", len(fresh))
    first = best[0].position
    where = (
        "at the adjective" if first == adjective[0] else "at i" if first == at_i else "in between"
    )
    predictions.compare("the first copula is picked up", picked_up, where)

# %% [markdown]
# One head at one word brings back most of the difference, or all of it. Look where that is: is it a word where one
# would have looked?
#
# ### Attention is not use
#
# Now put attention beside it. For each head and each position after the copula: how much attention does it pay to the
# copula (the mean over both texts of a pair)? The places with the most attention, and the share that patching
# them recovers:

# %%
if speaks_reel:
    rows, n_read, n_both = [], 0, 0
    for k in range(3):
        pairs, behind = make_pairs(search, k), slice(copula[k] + 1, None)
        both = [look_at(model, part, "hook_pattern") for part in (pairs.was, pairs.wasnt)]
        of_each = torch.stack([torch.stack(patterns) for patterns in both])
        attention = torch.zeros_like(shares[k])
        attention[..., behind] = of_each.mean((0, 2))[..., behind, copula[k]].cpu()
        top = largest(attention, 3)
        for place in [*top, *([] if best[k] in top else [best[k]])]:
            remark = "largest share" if place == best[k] else ""
            row = [k + 1, named(place), attention[place].item(), shares[k][place].item(), remark]
            rows.append(row)
        reads, used = (table[0, :, behind] > 0.3 for table in (attention, shares[k]))
        n_read, n_both = n_read + int(reads.sum()), n_both + int((reads & used).sum())
        if k == 0:
            carries = "yes" if top[0] == best[0] else "no"
    show_table(["clause", "head and slot", "attention to the copula", "share", ""], rows, digits=2)
    print(n_read, "places of layer 0 pay more than 0.3 of their attention to a copula;")
    print(n_both, "of them recover more than 0.3 of its effect")
    predictions.compare("the largest attention carries it", largest_attention_carries_it, carries)

# %% [markdown]
# Attention tells what a head reads. Only the patch tells whether what it has read is used for *this* answer. The
# places that pay most attention to a copula need not change the verb at all, and those that carry the fact need not stand
# out among them. What the others read it for, this measurement does not say: it asks about one answer, the
# verb. (Jain and Wallace 2019, "Attention is not explanation", [1902.10186](https://arxiv.org/abs/1902.10186), and the
# answer by Wiegreffe and Pinter 2019, [1908.04626](https://arxiv.org/abs/1908.04626).)
#
# And mind what the patch does not tell. If a later layer needs what two heads carry together, either of them alone
# gets a share of 0; if each of the two suffices, either gets 1. Shares of several heads need not add up to 1.
#
# ### Ablate it (if you like)
#
# A patch asks: is this enough? An *ablation* asks: can it be missed? What should stand there instead? With 0 the
# following layers get something that they have never seen. With the mean over texts they get what is usual at this
# slot, and only what distinguishes the texts is gone. Nothing later needs this exercise, only the cell behind it.

# %%
from rlhf_lab.diffing import ablate_heads  # exercise

# %% [markdown]
# How much worse does the model foresee the verb, against the grammar's exact probabilities, without the head found
# above, from the copula on? Which ablation does more damage?

# %%
more_damage = "zero"  # predict: "zero", "mean" or "about the same"


# %%
def damage(other: HookedTransformer, rows: Tensor, exact: Tensor, hooks: list) -> Interval:
    """KL(exact || model) in nats at "i", over texts."""
    with torch.no_grad():
        found = other.run_with_hooks(rows[:, : at_i + 1], fwd_hooks=hooks)[:, -1].double()
    kl = torch.special.xlogy(exact, exact) - exact * found.log_softmax(-1)
    return bootstrap_interval(kl.sum(-1))


if speaks_reel:
    site, place = f"blocks.{best[0].layer}.attn.hook_z", best[0]
    exact, off = next_word(fresh)[:, at_i], {"nothing": []}
    for to in ("zero", "mean"):

        def blank(z: Tensor, hook: object, to: Literal["zero", "mean"] = to) -> Tensor:
            """The head found above, from its copula on."""
            return ablate_heads(z, [place.head], slice(copula[0], None), to)

        off[to] = [(site, blank)]
    lost = {name: damage(model, fresh, exact, hooks) for name, hooks in off.items()}
    show_table(["ablated to", "KL(exact || model) at i"], [[n, str(i)] for n, i in lost.items()])
    zero, mean = (lost[name].value.item() for name in ("zero", "mean"))
    more = "about the same" if abs(zero - mean) < 0.1 * max(zero, mean) else "zero"
    predictions.compare("more damage", more_damage, "mean" if mean - zero > 0.1 * mean else more)

# %% [markdown]
# ## Three neurons
#
# What does the MLP make of it, at the place where the head writes? A *neuron* of MLP 0 is one number per position
# (`mlp.hook_post`). Three labels might be found in it: the adjective's sign, whether it was negated, and the
# *polarity*, the sign times -1 if negated. How well a number $x$ orders two classes is its *AUC*, the chance that a
# text of the first class has more of it than one of the second,
#
# $$\mathrm{AUC} = P(x_+ > x_-) + \tfrac12 P(x_+ = x_-)$$
#
# 0.5 is no order, 1 and 0 perfect order. For each label take the neuron that orders best, and then look at its *means*
# in the four cells. What do you expect of a neuron with an AUC near 1 for polarity: two cells high and two low?

# %%
polarity_neuron = "two high"  # predict: "two high", "one high" or "one low"


# %%
def auc(x: Float[Tensor, " n"], labels: Bool[Tensor, " n"]) -> float:
    """The chance that a labelled number is larger than one that is not; ties count half."""
    one, other = x[labels][:, None], x[~labels][None]
    return ((one > other).double() + 0.5 * (one == other).double()).mean().item()


if speaks_reel:
    k, position = 0, best[0].position
    many_texts = reviews_of_reel(512, seed=2)
    signs = [SENSE_OF_ADJECTIVE[word(token)][0] for token in many_texts[:, adjective[k]]]
    sign = torch.tensor(signs) > 0
    negated = (many_texts[:, copula[k]] == WORD_IDS["wasn't"]).cpu()
    labels = {"sign": sign, "negated": negated, "polarity": sign != negated}
    post = "blocks.0.mlp.hook_post"
    with torch.no_grad():
        _, kept = model.run_with_cache(many_texts, names_filter=[post])
    neurons = kept[post].cpu()
    cells = {
        "good, was": sign & ~negated,
        "good, wasn't": sign & negated,
        "bad, was": ~sign & ~negated,
        "bad, wasn't": ~sign & negated,
    }
    rows, chosen = [], {}
    for label, of_label in labels.items():
        areas = torch.tensor([auc(x, of_label) for x in neurons[:, position].T])
        chosen[label] = int((areas - 0.5).abs().argmax())
        x = neurons[:, position, chosen[label]]
        means = [x[cell].mean().item() for cell in cells.values()]
        rows.append([label, chosen[label], auc(x, of_label), *means])
    show_table(["best for", "neuron", "AUC", *cells], rows, digits=2)
    counted = ", ".join(f"{int(cell.sum())} {name!r}" for name, cell in cells.items())
    print(f"texts, at {slots[position]}: {counted}")
    four = [neurons[cell, position, chosen["polarity"]].mean().item() for cell in cells.values()]
    middle = (max(four) + min(four)) / 2
    high = sum(mean > middle for mean in four)
    shape = {1: "one high", 2: "two high", 3: "one low"}[high]
    predictions.compare("means of the polarity neuron", polarity_neuron, shape)

# %% [markdown]
# Read the means before you believe an AUC. It asks for order alone: an AUC of 0 or 1 may rest on one cell that stands out and on
# two that differ by a hundredth. Suppose that what reaches a neuron is a sum of one part for the
# sign, $a s$, one for the negation, $b n$, and a constant. In opposite cells the two sums add up to the same:
# $(a + c) + (b + c) = (a + b + c) + c$. So both cells of one polarity cannot lie above a threshold that
# both cells of the other lie below. One cell can: this is an "and" of two labels, and not the polarity.
#
# The other common look at a neuron is the list of words that it fires at most. Here are the 200 positions of 512 reviews
# with the largest activations of each of the three.

# %%
if speaks_reel:
    rows = []
    for label, neuron in chosen.items():
        top = neurons[..., neuron].flatten().topk(200)
        where = [divmod(int(i), neurons.shape[1]) for i in top.indices]
        at_slots = Counter(slots[t].split(" ")[0] for _, t in where).most_common(2)
        at_words = Counter(word(many_texts[row, t]) for row, t in where).most_common(4)
        counted = [", ".join(f"{name} {n}" for name, n in of) for of in (at_slots, at_words)]
        rows.append([label, neuron, *counted, top.values[-1].item()])
    show_table(["best for", "neuron", "slots", "words", "smallest of the 200"], rows, digits=2)

# %% [markdown]
# What a neuron fires at most and what it was chosen for need not be the same. "Orderable" is not "used", either: to learn
# whether the model uses it, patch it.
#
# ## A recorder of your own
#
# In {lesson:watch_it_learn} you watch a model *while* it trains. Any function can be registered for an event of a run; a dict
# that it returns is stored with the run. These are the events, in
# their order within a run. `ctx` is what the function gets.
#
# | event | when | new on `ctx` |
# |---|---|---|
# | `run_start` | once, before the first phase | `policy`, `reference`, `args`, `kl_coef`, `run`, `phase`: there at every event |
# | `after_rollout` | the texts are written | `samples` |
# | `after_score` | they are scored, every token has its credit | `rollout` |
# | `before_minibatch` | before each step | `minibatch`, `step` |
# | `after_loss` | its objective is computed | `terms` |
# | `after_backward` | gradients are there | the gradients of the policy |
# | `after_step` | weights have changed | `grad_norm` |
# | `after_phase` | at the end of a phase | `report` |
# | `checkpoint` | each time that weights are stored, also between the others | `checkpoint` |
# | `run_end` | once | `reports` |
#
# Does the head found above keep its habit while PPO trains the model for praise? Ten lines record its attention to the
# copula, over 3 phases, and a counter listens to all ten events. Which fire most often?
#
# (4 s on one core)

# %%
most_often = "of a minibatch"  # predict: "of a phase", "of a minibatch" or "all the same"

# %%
watched = RLHFTrainer(RLHFArgs(**SETTINGS), out=new_run("recorder"))
probe = make_pairs(search, 0).wasnt if speaks_reel else texts[:8]
who, key = (best[0], copula[0]) if speaks_reel else (Found(0, 0, texts.shape[1] - 1), 0)
pattern = f"blocks.{who.layer}.attn.hook_pattern"
heard = Counter()


@watched.on("after_phase")
def attention_to_the_copula(ctx: object) -> dict:
    """Mean attention of one head from one position to another."""
    with torch.no_grad():
        _, seen = ctx.policy.base_model.run_with_cache(probe, names_filter=[pattern])
    read = seen[pattern][:, who.head, who.position, key]
    return {"attention": read.mean().item(), "reward": ctx.report.mean_reward}


for event in get_args(Event):
    watched.on(event)(lambda ctx: heard.update([ctx.event]))
watched.train()
stored = Run(watched.recorder.run.path).returned("attention_to_the_copula")
show_table(
    ["phase", "reward", "attention"], [[r["phase"], r["reward"], r["attention"]] for r in stored]
)
show_table(["event", "times that it fired"], heard.items())
most = heard["before_minibatch"] - heard["after_score"]
kinds = "all the same" if not most else "of a minibatch" if most > 0 else "of a phase"
predictions.compare("the events that fire most often", most_often, kinds)

# %% [markdown]
# A probe like this must leave the run as it found it. That is the rule for all of them here: with and without it the
# weights come out the same, bit for bit.
#
# ### Three traps
#
# 1. A hook that writes *in place* changes the tensor itself, and with it whatever else holds it.
# 2. `add_hook` stays. A forgotten hook changes every later run.
# 3. A hook of your own that keeps an activation keeps its history: patch it in elsewhere, and a gradient flows
#    into the donor's run, too. (`run_with_cache` detaches what it keeps; it does not copy it.)
#
# Take the first. At one site hang two hooks: one puts the donor in, the other then writes 0 into head 0, in place,
# which is a common way to write an ablation. What is the donor afterwards?

# %%
donor_afterwards = "changed"  # predict: "as before", "changed" or "an error is raised"

# %%
few, site = texts[:4], "blocks.0.attn.hook_z"


def silence_in_place(z: Tensor, hook: object) -> Tensor:
    """Wrong: the tensor belongs to somebody else."""
    z[:, :, 0] = 0.0
    return z


def silence_a_copy(z: Tensor, hook: object) -> Tensor:
    """Right."""
    return patch_heads(z, torch.zeros_like(z), [0], slice(None))


for name, silence in {"on a copy": silence_a_copy, "in place": silence_in_place}.items():
    with torch.no_grad():
        donor = model.run_with_cache(texts[4:8], names_filter=[site])[1][site]
        before = donor.clone()
        model.run_with_hooks(
            few, fwd_hooks=[(site, lambda z, hook, donor=donor: donor), (site, silence)]
        )
    state = "as before" if donor.equal(before) else "changed"
    print(f"silenced {name}: the donor is {state}")
predictions.compare("silenced in place, the donor is", donor_afterwards, state)

with torch.no_grad():
    intact = model(few)
    model.add_hook(site, silence_a_copy)
    forgotten = model(few)
    model.reset_hooks()
    print("with a forgotten hook the logits are the same:", forgotten.equal(intact))
    print("and after reset_hooks:", model(few).equal(intact))

held = []
model.run_with_hooks(texts[4:8], fwd_hooks=[(site, lambda z, hook: held.append(z))])
weight, gradients = model.blocks[0].attn.W_V, {}
for name, source in {"attached": held[0], "detached": held[0].detach()}.items():
    hook = (site, lambda z, hook, source=source: patch_heads(z, source, [0], slice(None)))
    objective = model.run_with_hooks(few, fwd_hooks=[hook]).log_softmax(-1)[..., 0].mean()
    gradients[name] = torch.autograd.grad(objective, weight, retain_graph=True)[0]
sizes = {name: gradient[0].norm().item() for name, gradient in gradients.items()}
print("gradient of the patched head's W_V:", {n: f"{size:.1e}" for n, size in sizes.items()})

# %% [markdown]
# No error, no warning: from then on every patch with that donor is a patch with zeros. And the head that was patched
# reads nothing from its own text any more, so the gradient of its $W_V$ is 0, unless it comes from the donor's.
# Write hooks that copy, take donors under `no_grad` or `detach` them, and prefer `with model.hooks(...)` to `add_hook`.
#
# ## Does it replicate?
#
# Everything above is one set of weights. Search the two sister models in the same way, and measure what is found on
# the fresh pairs. Will the copula of the first clause be carried by a head of the same layer? At the same
# word?
#
# (9 s on one core)

# %%
same_layer = "yes"  # predict: "yes" or "no"
same_word = "yes"  # predict: "yes" or "no"

# %%
if speaks_reel:
    rows, places = [], {}
    for name, other in models.items():
        maps = (
            shares
            if name == names[0]
            else {k: share_map(other, search[:32], k, stride=1) for k in range(3)}
        )
        places[name] = [largest(maps[k])[0] for k in range(3)]
        for k, place in enumerate(places[name]):
            pairs = make_pairs(fresh, k)
            clean, corrupted = (lean(other, part, pairs.sign) for part in (pairs.was, pairs.wasnt))
            donor = look_at(other, pairs.was, "hook_z")
            share = recovered_fraction(
                clean, corrupted, patched_lean(other, pairs, donor, [place.head], place)
            )
            patterns = look_at(other, pairs.wasnt, "hook_pattern")[place.layer]
            reads = patterns[:, place.head, place.position, copula[k]].mean().item()
            effect = (clean - corrupted).mean().item()
            last_layer = maps[k][-1].max().item()
            row = [name, k + 1, effect, named(place), in_brackets(share), reads, last_layer]
            rows.append(row)
    show_table(
        ["model", "clause", "effect", "best", "share, n = 256", "attention", "last layer"],
        rows,
        digits=2,
    )
    of_first = [places[name][0] for name in names]
    layers, words_of = ({getattr(p, part) for p in of_first} for part in ("layer", "position"))
    predictions.compare(
        "the same layer in all three", same_layer, "yes" if len(layers) == 1 else "no"
    )
    predictions.compare(
        "the same word in all three", same_word, "yes" if len(words_of) == 1 else "no"
    )

# %% [markdown]
# (For each model and clause the best place is shown; "effect" is how far the lean falls from "was" to "wasn't";
# "attention" is what the head pays to "wasn't"; "last layer" the largest share of one of its heads at "i", by the
# search.) Compare the three. What holds in all of them is a claim about this architecture and this language: a head of the
# first layer fetches the copula, mostly at one word, and where that is before "i", heads of the last layer bring it
# on, each a part of it. What differs is a fact about one set of weights: which head, and at which
# word, even from clause to clause. A share clearly below 1 may mean that the fact is fetched at several words, so that one
# patch brings back a part alone.
#
# So a sentence such as "head so-and-so does negation" is a sentence about one model. Ask for the other seeds.
#
# ## What surprised you

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - The other direction: patch "wasn't" into the texts with "was". Which shares change, and why might they?
# - Does a head of layer 1 read, at "i", what the head found above has written? `patch_path` in `rlhf_lab.diffing`
#   patches one head's output into another one's input alone.
# - Patch two heads at once (`heads=[0, 1]`). Is the share the sum of the two?
# - Take a head with much attention to the copula and no share. What is it for? (Look at what stands behind its word.)
# - Read Zhang and Nanda 2023 ([2309.16042](https://arxiv.org/abs/2309.16042)) on which metric to patch with, and
#   Heimersheim and Nanda 2024 ([2404.15255](https://arxiv.org/abs/2404.15255)) on how to read a patch.
#
# Next: {lesson:rewards_and_credit}, on the contribution of each token to the reward.
