# %% [markdown]
# # 04 The policy and its hooks
#
# By the end of this lesson, you will be able to find the attention head that carries a fact, by patching activations between
# texts.
#
# **You will also be able to**
# - sample from a language model, and compute the log-probability of text that was sampled elsewhere;
# - decode an intermediate layer with the logit lens;
# - explain why an attention pattern does not show what a model uses.
#
# **You need** {lesson:start}. This lesson only works with Reel.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 30 seconds on one CPU core and needs no internet access. Cells
# that take longer than 3 seconds are labeled with their run time, like this one:
#
# (4 s on one core)

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # before anything else is imported from the package

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import Predictions, check, hint, progress, show_table
from rlhf_lab.functional import Interval, auc
from rlhf_lab.models import HookedTransformer, load_model
from rlhf_lab.organism import WORD_IDS
from rlhf_lab.organism.lexicon import SENSE_OF_ADJECTIVE, SENSE_OF_VERB
from rlhf_lab.probes import ReelTruth
from rlhf_lab.sampling import SamplingSpec, sample, sampling_noise
from rlhf_lab.views import curves, heatmap
from rlhf_lab.views.plots import heatmaps

SETTINGS = dict(preset="reel", batch_size=128, gen_len=26, top_k=None, kl_coef=0.3)
predictions = Predictions()

# %% [markdown]
# ## Sampling
#
# The policy reads the text so far and outputs one *logit* $z_v$ for each word in the vocabulary. The logits are divided by a
# *temperature* $T$, and a softmax turns the result into probabilities:
#
# $$\pi(v \mid s) = \frac{e^{z_v / T}}{\sum_w e^{z_w / T}}$$
#
# Only differences between logits matter: $\log \pi(v) - \log \pi(w) = (z_v - z_w) / T$. A lower temperature makes all
# differences larger, so the most likely word becomes even more likely.

# %%
trainer = RLHFTrainer(args := RLHFArgs(**SETTINGS))
model, tokenizer = trainer.policy.base_model, trainer.tokenizer


def word(token: int | Tensor) -> str:
    """Decode one token."""
    return tokenizer.decode([int(token)]).strip()


# %% [markdown]
# To draw a word, all you need is a uniform random number $u$. Go through the words in order, add up their probabilities, and
# stop at the first word where the sum is *greater* than $u$. This draws each word with exactly the right probability.

# %%
from rlhf_lab.sampling import draw_token  # given

# %% [markdown]
# To generate a whole text, repeat: run the model on everything so far, look at the logits at the last position, draw a token,
# and append it. `noise` contains the random numbers, with one row per step. (`check_context` raises an error if the text would
# exceed the model's context length, and `at_least_float32` converts half precision to float32.)

# %%
from rlhf_lab.sampling import sample_without_cache  # exercise

# %% [markdown]
# The package's `sample` is faster because it uses a *KV cache*: it keeps the keys and values of all earlier tokens, so at each
# step the model only has to process the new token. With the same random numbers, it should generate the same texts:

# %%
prompts = trainer.next_prompts()
spec = SamplingSpec(args.gen_len, temperature=args.temperature)
samples = sample(trainer.policy, prompts, spec, torch.Generator().manual_seed(1))
noise = sampling_noise(len(prompts), args.gen_len, torch.Generator().manual_seed(1))
prefix_len, device = samples.prefix_len, samples.tokens.device
by_hand = sample_without_cache(model, torch.tensor(prompts, device=device), noise, args.temperature)
print(" ".join(word(token) for token in by_hand[0]))
same = (by_hand == samples.tokens)[:, prefix_len:][samples.mask].double().mean().item()
print(f"fraction of tokens that are equal: {same:.3f}")

# %% [markdown]
# ## Log-probabilities
#
# PPO changes how likely the sampled tokens are, so it needs the *log-probability* $\log \pi(a_t \mid s_t)$ of each of them.
# Remember that the logits at one position predict the next token. The log-probability of a text is the sum over its tokens:
#
# $$\log \pi(x) = \sum_t \log \pi(a_t \mid s_t)$$
#
# To select the right entries, use `eindex`, which indexes by dimension name: `eindex(logprobs, tokens, "b s [b s+1]")` is
# `logprobs[b, s, tokens[b, s+1]]` for each row b and position s. `gather` also works. Compute in float32 (`at_least_float32`).

# %%
from rlhf_lab.functional import get_logprobs  # exercise

# %% [markdown]
# Many samplers exclude unlikely words. With `top_k=5`, for example, only the five most likely words can be drawn, and their
# probabilities are rescaled to add up to 1. Your function does not take this into account. To see how much this matters, divide
# the probability that your function computes for a review by the probability it was actually sampled with. For a single token,
# this ratio is a little below 1 on average. How large is the median ratio for a whole review?

# %%
quotient_of_a_review = "below 0.5"  # predict: "about 1", "0.5 to 0.9" or "below 0.5"

# %%
for top_k in (None, 5):
    cut = SamplingSpec(args.gen_len, temperature=args.temperature, top_k=top_k)
    texts = sample(trainer.policy, prompts, cut, torch.Generator().manual_seed(2))
    with torch.no_grad():
        logprobs = get_logprobs(model(texts.tokens), texts.tokens, prefix_len, args.temperature)
    gap = torch.where(texts.mask, logprobs - texts.logprobs, 0.0)
    median = gap.sum(1).exp().median().item()
    per_token = gap[texts.mask].exp().mean().item()
    print(f"top_k={top_k}: mean ratio of a token {per_token:.3f}, median of a review {median:.3f}")
size = "about 1" if median > 0.9 else "0.5 to 0.9" if median > 0.5 else "below 0.5"
predictions.compare("the ratio of a review, top 5", quotient_of_a_review, size)

# %% [markdown]
# The ratio for a single token is 0.87 on average. But a review's ratio is the product of its 26 token ratios, so the median
# over reviews is only 0.009. In PPO, this ratio must be 1 before the first gradient step, so sampling and training must use the
# same temperature and the same top-k.
#
# ## Hook points
#
# A `HookedTransformer` passes every activation through a named *hook point*, using the same names as TransformerLens.
# `run_with_cache` returns the output together with the activation at each hook point. `run_with_hooks` registers functions for
# a single forward pass. Each function is called with its activation, and if it returns a tensor, that tensor replaces the
# activation. Here is what happens inside a block:
#
# - The *residual stream* enters (`hook_resid_pre`), with one vector of `d_model` numbers per position.
# - *Attention* moves information between positions. A *head* compares the query at one position with the keys at all positions
#   up to it, and a softmax turns the scores into weights, the *pattern* $A$ (`hook_pattern`). The head then takes the weighted
#   sum of the values $V$, $z_q = \sum_k A_{qk} V_k$ (`hook_z`), and writes $z_q W_O$ to the residual stream.
# - The *MLP* processes each position separately. It consists of a linear map (`hook_pre`), a GELU nonlinearity (`hook_post`),
#   and a second linear map back to the residual stream.

# %%
_, cache = model.run_with_cache(samples.tokens[:8])
in_block = [name for name in cache if name.startswith("blocks.0.")]
show_table(["hook point of block 0", "shape"], [[n, str(list(cache[n].shape))] for n in in_block])
print(len(cache), "hook points in total")

# %% [markdown]
# The class is short enough to read in full (`rlhf_lab/models/hooked_transformer.py`). Note that components only ever add to the
# residual stream: nothing is overwritten.
#
# ## Logit lens
#
# After the last block, the stream is normalized and multiplied by the *unembedding*, a matrix with one column per word. You can
# do the same to the stream after an *earlier* layer, as if the model stopped there. This is the *logit lens*.
# `unembed_residuals` does both steps for a `[batch seq d_model]` tensor, so flatten the leading axes first, then restore them.

# %%
from rlhf_lab.diffing import logit_lens  # exercise

# %% [markdown]
# Reel's grammar gives us the exact probability of each next word, so we can measure how far the distribution decoded from each
# layer is from the exact one. We measure this as a KL, in nats:

# %%
PLACES = {"embedding": "blocks.0.hook_resid_pre"}
for layer in range(model.cfg.n_layers):
    PLACES[f"attention {layer}"] = f"blocks.{layer}.hook_resid_mid"
    PLACES[f"MLP {layer}"] = f"blocks.{layer}.hook_resid_post"
truth = ReelTruth()
slots = truth.slot_names(truth.grammar.seq_len)
rows = truth.reviews(256, seed=0)[0].to(device)
with torch.no_grad():
    _, cache = model.run_with_cache(rows)
state, _ = truth.graph.walk(rows)
exact = [p[state[:, t]] for t, p in enumerate(truth.policy.probability[: rows.shape[1] - 1])]
exact = torch.from_numpy(np.stack(exact, axis=1)).to(device)
errors = []
for site in PLACES.values():
    lens = logit_lens(model, cache[site])[:, :-1].double()
    errors.append((torch.special.xlogy(exact, exact) - exact * lens).sum(-1).mean(0).cpu())
per_text = ", ".join(f"{name} {row.sum():.2f}" for name, row in zip(PLACES, errors, strict=True))
print("KL in nats per text:", per_text)
title = "log10 of KL(exact || lens) in nats, by layer and next word"
heatmap(torch.stack(errors).clamp(min=1e-4).log10(), list(PLACES), slots[1:], title)

# %% [markdown]
# Each column is the *slot* of the next word. A review has three clauses, each of which consists of THE, ASP (an aspect such as
# "plot"), COP ("was" or "wasn't"), ADV and ADJ. CONN is "and" or "but", and VERB is the verdict, such as "loved". MLP 0 reduces
# the KL the most, from 261 to 3.8 nats. But a large KL does not mean that the information is missing, because early layers do
# not have to use the unembedding's basis. A *tuned lens* (Belrose et al. 2023, [2303.08112](https://arxiv.org/abs/2303.08112))
# learns a map for each layer to correct for this.
#
# ## Attention patterns
#
# In "the plot **wasn't** so good", the copula reverses the adjective. The verdict, "i liked it" or "i hated it", comes many
# words later. Only attention moves information between positions, so some head has to carry the difference between "was" and
# "wasn't". Below are the attention patterns of all heads for one review with "wasn't" in its first clause. Each row is an
# attending word, and each column is a word it can attend to. L0H1 is head 1 in layer 0.

# %%
copula = [truth.grammar.slot("COP", k) for k in range(3)]
adjective = [truth.grammar.slot("ADJ", k) for k in range(3)]
at_i = truth.grammar.slot("I")  # the last word before the verdict
example = rows[rows[:, copula[0]] == WORD_IDS["wasn't"]][:1, : at_i + 1]
with torch.no_grad():
    _, kept = model.run_with_cache(example, names_filter=lambda name: name.endswith("hook_pattern"))
heads = [(l, h) for l in range(model.cfg.n_layers) for h in range(model.cfg.n_heads)]
grids = {f"L{l}H{h}": kept[f"blocks.{l}.attn.hook_pattern"][0, h].tolist() for l, h in heads}
words = [word(token) for token in example[0]]
heatmaps(grids, words, words, "Attention patterns: each row reads the columns", 2, (0.0, 1.0))

# %% [markdown]
# Find the column for the first "wasn't". Several words attend to it. Where does a head pick up the information that determines
# the verdict: at the adjective, at a later word before "i", or at "i" itself? And does the head that attends *most strongly* to
# the copula also carry this information?

# %%
picked_up = "at the adjective"  # predict: "at the adjective", "in between" or "at i"
largest_attention_carries_it = "yes"  # predict: "yes" or "no"

# %% [markdown]
# ## Activation patching
#
# A pattern shows you what a head attends to, but not whether the output depends on it. To find out, change what a single head
# contributes, and see how the output changes. Choose two texts that differ in one word. Run both, and then run the second one
# again, with one of its activations replaced by the same activation from the first. This is called *activation patching*:
#
# ```text
# donor     the plot was    so good ... i  ->  logit(loved) - logit(hated) = clean
#                             | activation of one head at one position
#                             v
# receiver  the plot wasn't so good ... i  ->  corrupted without the patch, patched with it
# ```

# %%
from rlhf_lab.diffing import patch_heads  # exercise

# %% [markdown]
# The *recovered fraction* is $f = (\mathrm{patched} - \mathrm{corrupted}) / (\mathrm{clean} - \mathrm{corrupted})$, where each
# term is a mean over texts. It is 0 if the patch changes nothing, and 1 if the patched model behaves as if the text contained
# "was". The function below also computes a 95% confidence interval with a *bootstrap*, which resamples the texts 2,000 times.

# %%
from rlhf_lab.functional import recovered_fraction  # given

# %% [markdown]
# The next cell uses your function in a hook, and can measure the recovered fraction for any heads at any positions. The metric
# is the mean logit of the three positive verbs minus the mean logit of the three negative verbs at "i", times the sign of the
# adjective. (In your own work, use `patch_activations` from `rlhf_lab.diffing`, which can patch any activation.)

# %%
Place = tuple[str, list[int], slice]  # hook point, heads (or neurons), positions


def patch(
    other: HookedTransformer, rows: Int[Tensor, "batch seq"], k: int, places: dict[str, Place]
) -> dict[str, Interval]:
    """Patch from reviews with "was" in clause k to the same with "wasn't", one place at a time."""
    was, wasnt = rows[:, : at_i + 1].clone(), rows[:, : at_i + 1].clone()
    was[:, copula[k]], wasnt[:, copula[k]] = WORD_IDS["was"], WORD_IDS["wasn't"]
    with torch.no_grad():
        clean, donor = other.run_with_cache(was)
        logits = [clean, other(wasnt)]
        for site, *where in places.values():
            shape = (*donor[site].shape[:3], -1)  # a neuron is treated as a head with d_head = 1
            hook = lambda z, hook, d=donor[site], shape=shape, where=where: patch_heads(
                z.view(shape), d.view(shape), *where
            ).view_as(z)
            logits.append(other.run_with_hooks(wasnt, fwd_hooks=[(site, hook)]))
    sign = torch.tensor([SENSE_OF_ADJECTIVE[word(t)][0] for t in rows[:, adjective[k]]])
    verbs = {WORD_IDS[verb]: side / 3 for verb, (side, _) in SENSE_OF_VERB.items()}
    ends = [sum(w * each[:, -1, v] for v, w in verbs.items()).cpu() * sign for each in logits]
    return {x: recovered_fraction(*ends[:2], end) for x, end in zip(places, ends[2:], strict=True)}


def head_places(k: int) -> dict[str, Place]:
    """List each head at each position at which it could carry the copula of clause k."""
    return {
        f"L{layer}H{head} at {slots[t]}": (f"blocks.{layer}.attn.hook_z", [head], slice(t, t + 1))
        for layer, head in heads
        for t in range(at_i if layer == heads[-1][0] else copula[k], at_i + 1)
    }


# %% [markdown]
# Now patch every head at every position from the copula to "i", on 64 pairs of texts. (In the last layer, only "i" matters,
# because nothing uses what that layer's heads write at other positions.) Here is the result for the copula in the first clause:

# %%
pairs = truth.reviews(320, seed=1)[0].to(device)
search, fresh = pairs[:64], pairs[64:]  # choose the place on some, measure on others
found = {name: f.value.item() for name, f in patch(model, search, 0, head_places(0)).items()}
columns, names = slots[copula[0] : at_i + 1], [*grids]
grid = [[found.get(f"{name} at {slot}") for slot in columns] for name in names]
title = "Recovered fraction by head and slot, first copula"
heatmap(grid, names, columns, title, "diverging", (-1, 1))

# %% [markdown]
# The largest of many noisy estimates is usually an overestimate, so we measure the best place again on 256 pairs that were not
# used in the search. For comparison, the next cell also lists the three places that attend most strongly to the first copula.


# %%
def best_place(other: HookedTransformer, k: int) -> tuple[str, Interval]:
    """Search on 64 pairs, and measure the best place on 256 others."""
    searched = patch(other, search, k, head_places(k))
    best = max(searched, key=lambda name: searched[name].value)
    return best, patch(other, fresh, k, {best: head_places(k)[best]})[best]


best, share = best_place(model, 0)
print(f"{best}: recovered fraction {share}")
at = slots.index(best.split(" at ")[1])
where = {adjective[0]: "at the adjective", at_i: "at i"}.get(at, "in between")
predictions.compare("the first copula is picked up", picked_up, where)
with torch.no_grad():
    _, cache = model.run_with_cache(search)
attention = {
    name: cache[site.replace("hook_z", "hook_pattern")][:, head, t, copula[0]].mean().item()
    for name, (site, (head,), t) in head_places(0).items()
    if t.start > copula[0]
}
top = sorted(attention, key=attention.get, reverse=True)[:3]
columns = ["most attention to the first copula", "attention", "recovered fraction"]
show_table(columns, [[name, attention[name], found[name]] for name in top], digits=2)
carries = "yes" if top[0] == best else "no"
predictions.compare("the largest attention carries it", largest_attention_carries_it, carries)

# %% [markdown]
# Head 0 in layer 0 picks up the first copula at ASP 2, the aspect in the *next* clause. At the adverb, two heads attend to the
# copula even more strongly, but patching them there recovers nothing. So an attention pattern shows what a head attends to, not
# what the output depends on. (Jain and Wallace 2019, [1902.10186](https://arxiv.org/abs/1902.10186), and Wiegreffe and Pinter
# 2019, [1908.04626](https://arxiv.org/abs/1908.04626), debate this point.)
#
# ## One neuron
#
# At ASP 2, block 0's MLP has access to both the adjective and the copula. The verdict depends on their combination, the
# *polarity* ("good" with "wasn't" is negative). Is there a single neuron whose activation separates the two polarities
# perfectly, before or after the GELU? To measure this, we use the *AUC*, the probability that a random text of positive
# polarity has a larger activation than one of negative polarity. An AUC of 0.5 is random guessing; 0 or 1 is perfect.

# %%
perfect_neuron = "nowhere"  # predict: "nowhere", "before the GELU" or "only after the GELU"

# %%
many, mlp = truth.reviews(512, seed=2)[0].to(device), "blocks.0.mlp.hook_"
good = torch.tensor([SENSE_OF_ADJECTIVE[word(t)][0] > 0 for t in many[:, adjective[0]]])
negated = (many[:, copula[0]] == WORD_IDS["wasn't"]).cpu()
with torch.no_grad():
    _, cache = model.run_with_cache(many)
pre, post = (cache[mlp + name][:, at].T.cpu() for name in ("pre", "post"))  # [neuron batch]
before, after = ((auc(x, good != negated) - 0.5).abs() for x in (pre, post))
for name, x in {"before": before, "after": after}.items():
    print(f"{name} the GELU: best AUC {0.5 + x.max():.2f}, {int((x > 0.45).sum())} beyond 0.95")
neuron = int(after.argmax())
gelu = lambda x: torch.nn.functional.gelu(torch.tensor(x)).tolist()
points = {"GELU": (across := torch.linspace(-4, 1, 51).tolist(), gelu(across))}
for name, rows in {"good": good, "bad": ~good}.items():
    inputs = [pre[neuron, rows & (negated == n)].mean().item() for n in (False, True)]
    points |= {f"{name}, was and wasn't": (inputs, gelu(inputs))}
title = f"Neuron {neuron} at ASP 2: mean input of four kinds of text"
beyond = "only after the GELU" if before.max() < 0.45 else "before the GELU"
predictions.compare("a perfect neuron exists", perfect_neuron, beyond)
curves(points, title, "input of the GELU", "output")

# %% [markdown]
# Before the GELU, no neuron separates the polarities. The input to the GELU is nearly the sum of one number for the adjective
# and one for the copula, and no threshold on such a sum can separate "good, was" and "bad, wasn't" from the other two. After
# the GELU, 55 of 256 neurons have an AUC beyond 0.95 (in one direction or the other), and the best one reaches 1.00.
#
# How is this possible? The GELU is not monotonic: it has a dip. For neuron 2, "bad, was" is so far to the left that the output
# is back at 0, "bad, wasn't" is in the dip, and "good, wasn't" is to the right of it. But "good, was" is on the flat part next
# to "bad, was", so their outputs are nearly equal, and the "perfect" separation depends on a tiny difference. Does the model
# use this difference? To find out, we patch this neuron, the whole MLP, and heads in block 0 at several positions:

# %%
z, here, n_heads = "blocks.0.attn.hook_z", slice(at, at + 1), range(model.cfg.n_heads)
three = ("L0H0 at ASP 2", "L0H0 at ASP 3", "L0H0 at I")
places = {name: head_places(0)[name] for name in three}
places |= {
    "all heads after ASP 2": (z, [*n_heads], slice(at + 1, None)),
    "all heads at all positions": (z, [*n_heads], slice(None)),
    "MLP at ASP 2": (mlp + "post", [*range(model.cfg.d_mlp)], here),
    "the neuron at ASP 2": (mlp + "post", [neuron], here),
}
measured = patch(model, fresh, 0, places)
show_table(["patched", "recovered fraction"], [[name, str(f)] for name, f in measured.items()])

# %% [markdown]
# Patching the whole MLP at ASP 2 recovers a fraction of 1.09, but patching the perfect neuron recovers nothing. So even if you
# can decode a fact from a neuron, the model may not use that neuron. Note also that the fractions do not add up. Patching head
# 0 recovers 1.11 at ASP 2 and 0.13 at each of two later words. Patching all heads after ASP 2 recovers 0.19, and patching all
# heads at all positions recovers 1.00. The reason is that head 0 picks up the fact at three words, and its effect at the later
# two words depends on what it wrote at the first. So a fraction above 1 is not an error.
#
# ## Other seeds
#
# So far, you have looked at a single set of weights. The package includes two more models, trained the same way with different
# seeds. The next cell repeats the search on all three. Do all three models pick up the first clause's copula at the same word?
#
# (6 s on one core)

# %%
same_word = "yes"  # predict: "yes" or "no"

# %%
rows = []
for name in ("reel-nano", "reel-nano-b", "reel-nano-c"):
    other = load_model(name, device=str(device))
    found = [best_place(other, k) for k in range(3)]
    rows += [[name, k + 1, place, str(share)] for k, (place, share) in enumerate(found)]
show_table(["model", "clause", "best place", "recovered fraction"], rows)
words = {place.split(" at ")[1] for _, clause, place, _ in rows if clause == 1}
predictions.compare("the same word", same_word, "yes" if len(words) == 1 else "no")

# %% [markdown]
# In all three models, a head in the first layer picks up the copula. But the word where this happens differs from model to
# model, and even from clause to clause. So a claim like "head 0 does negation" is only true of a single model. (A fraction
# clearly below 1 may mean that the fact is picked up at several words.)
#
# ## Your results

# %%
predictions.show()
progress()

# %% [markdown]
# ## Try
#
# - At "i", does a head in layer 1 use what head 0 wrote at ASP 2? To find out, you can use `patch_path` from
#   `rlhf_lab.diffing`, which patches the output of one head into the input of another.
# - Zhang and Nanda 2023 ([2309.16042](https://arxiv.org/abs/2309.16042)) compare patching metrics, and Heimersheim and Nanda
#   2024 ([2404.15255](https://arxiv.org/abs/2404.15255)) explain how to interpret the results.
#
# Next: {lesson:rewards_and_credit}, where you find the tokens that deserve the credit. (Appendix: {lesson:write_the_rest}.)
