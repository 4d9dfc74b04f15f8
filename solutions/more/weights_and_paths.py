# %% [markdown]
# # Weights and paths
#
# By the end of this lesson, you will be able to describe a weight change in terms of its rank, test whether a few
# directions are enough to produce the new behavior, and break down a change in logit difference by cause.
#
# This appendix continues {lesson:what_rlhf_changed} with the same run.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 30 seconds on one CPU core and needs no internet
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
from rlhf_lab.course import Predictions, check, hint, new_run, progress, show_table
from rlhf_lab.diffing import graft_groups, path, truncate
from rlhf_lab.diffing.effects import layer_groups
from rlhf_lab.diffing.logit_shift import ends_of
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead
from rlhf_lab.models.hooked_model import is_centered
from rlhf_lab.organism import true_reward
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.probes.logit_shift import SITES, residual_components, single_token
from rlhf_lab.probes.weight_delta import as_matrix, spectrum
from rlhf_lab.sampling import sample
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import bars, curves

SETTINGS = dict(
    preset="reel",
    seed=1,
    total_phases=12,
    batch_size=128,
    num_minibatches=4,
    gen_len=26,
    top_k=None,
    advantages="gae",
    kl_coef=0.3,
    keep_checkpoints=None,
)
predictions = Predictions()

# %% [markdown]
# (10 s on one core)

# %%
args = RLHFArgs(**SETTINGS)
trainer = RLHFTrainer(args, out=new_run("run"))
trainer.train()
run = Run(trainer.run.path)
before, after = (run.policy(which).base_model for which in (0, "last"))
old, new = ({n: w.detach() for n, w in m.named_parameters()} for m in (before, after))


def compute_reward(model: HookedTransformer) -> float:
    """Compute the mean true reward of 256 samples."""
    generator = torch.Generator().manual_seed(1)
    policy, prompts = TransformerWithValueHead(model), [trainer.prompt] * 256
    texts = sample(policy, prompts, trainer.sampling_spec, generator).texts(trainer.tokenizer)
    return true_reward(texts).mean().item()


# %% [markdown]
# ## Few entries, or few directions?
#
# Mukherjee et al. 2025 ([2505.11711](https://arxiv.org/abs/2505.11711)) report that RL leaves most weights of large
# models *exactly* unchanged. However, those models are stored in bfloat16, which rounds small changes away. Compute the
# fraction of unchanged weights in float32 and in bfloat16.

# %%
from rlhf_lab.probes.weight_delta import unchanged_fraction  # exercise

# %%
exactly, rounded = unchanged_fraction(
    *(torch.cat([w.flatten() for w in weights.values()]) for weights in (old, new))
)
print(f"unchanged: {exactly:.2%} in float32, {rounded:.2%} in bfloat16")

# %% [markdown]
# In Reel's model, every single weight changed, because its learning rate is much higher than a large model's. Still,
# each matrix may have changed along only a few *directions*. You can measure this in two ways from the singular values
# of the change:

# %%
from rlhf_lab.probes.weight_delta import describe_spectrum  # exercise

# %%
rows = []
for name, weight in old.items():
    if weight.ndim > 1 and ".b_" not in name:
        delta = as_matrix(name, new[name] - weight)
        relative = (delta.norm() / weight.norm()).item()
        rows.append([name, relative, *describe_spectrum(spectrum(delta)[0])])
rows.sort(key=lambda row: -row[1])
show_table(["matrix", "relative change", "stable rank", "directions for 90 %"], rows)

# %% [markdown]
# The stable rank is below 5 for every matrix. (The ordinary rank is nearly full, because it counts every direction, no
# matter how weak.) But this only describes the change. To find out whether these few directions matter, we need an
# intervention: keep only the strongest directions of each change, and sample from the resulting model. With a single
# direction per matrix, what fraction of the gain in true reward is left?

# %%
from rlhf_lab.diffing.weights import truncate_delta  # exercise

# %%
rank_one = "over two thirds"  # predict: "less than a third", "about half" or "over two thirds"

# %% [markdown]
# (4 s on one core)

# %%
name = "blocks.0.mlp.W_in"
for rank in (0, 1, 4, 16):
    error = (new[name] - truncate_delta(old[name], new[name], rank)).square().sum().item()
    left_out = spectrum(new[name] - old[name])[0][rank:].square().sum().item()
    print(
        f"rank {rank}: squared error {error:.4f}, squares of the other singular values {left_out:.4f}"
    )
start, end = compute_reward(before), compute_reward(after)
by_rank = {rank: compute_reward(truncate(before, after, rank)) for rank in (0, 1, 2, 4, 8)}
print(
    f"true reward: base {start:.2f}", *(f"rank {r} {x:.2f}" for r, x in by_rank.items()), sep="; "
)
fraction = (by_rank[1] - start) / (end - start)
found = "less than a third" if fraction < 1 / 3 else "about half" if fraction < 2 / 3 else None
predictions.compare("fraction of the gain at rank 1", rank_one, found or "over two thirds")

# %% [markdown]
# The squared errors match the singular values that were left out, as they should (Eckart and Young 1936). One direction
# per matrix is enough for more than half of the gain, and four directions are enough for almost all of it. So here the
# description and the intervention agree.
#
# We can also move along the straight line from the base weights to the tuned weights, and even beyond (this is called
# task arithmetic: Ilharco et al. 2022, [2212.04089](https://arxiv.org/abs/2212.04089)). What happens to the true reward
# along the way?
#
# (3 s on one core)

# %%
alphas = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
on_line = [compute_reward(model) for model in path(before, after, alphas)]
print(f"true reward: {on_line[5]:.2f} at 1, {on_line[7]:.2f} at 1.5, {on_line[8]:.2f} at 2")
curves(
    {"true reward": (alphas, on_line)},
    "base + alpha (tuned - base)",
    "alpha",
    "mean of 256 samples",
)

# %% [markdown]
# Going beyond the tuned model doesn't help. At an alpha of 1.5, the true reward drops to 0.82, and at 2, hardly any
# text is still a review (0.04).
#
# ## Causes of a rise
#
# In {lesson:what_rlhf_changed}, you split the increase in a logit difference into one row per component. Each row is the
# change in a product: the component's output $k$, times the unembedding direction $q$ (the norm's gain times $u$), times $s$,
# which is one over the norm's scale. Training changed all three factors:
#
# $$k_1 q_1 s_1 - k_0 q_0 s_0 = \underbrace{\text{own output}}_{\Delta k} +
# \underbrace{\text{scale}}_{\Delta s} + \underbrace{\text{unembedding}}_{\Delta q}$$
#
# To divide the row among the three factors, we average each factor's effect over all orders in which the three can
# change. (This is its Shapley value.) The component's own output, in turn, can change for two reasons: its weights have
# changed, or its input has ("inherited"). To see what is in `ModelEnd` and `ShiftCauses`, run `ModelEnd?` and
# `ShiftCauses?` in a cell.

# %%
from rlhf_lab.diffing.logit_shift import split_shift  # exercise

# %%
truth = ReelTruth.of_reward(args.reward_fn)
text = truth.reviews(256, seed=0)[0][:, : truth.grammar.slot("VERB")]
ids = tuple(single_token(trainer.tokenizer, word) for word in ("loved", "hated"))
names = residual_components(before, capture_activations(before, text, SITES, pos=-1))[0]


def split_causes(
    model0: HookedTransformer, model1: HookedTransformer
) -> dict[str, Float[Tensor, " part"]]:
    """Return the mean causes of the rise between two models, by component."""
    acts = tuple(capture_activations(model, text, SITES, pos=-1) for model in (model0, model1))
    found = split_shift(
        *ends_of((model0, model1), acts, text, -1, ids), is_centered(model0.ln_final)
    )
    return {
        "own weights": found.own_weights.mean(1),
        "inherited": found.inherited.mean(1),
        "scale": found.scale.mean(1),
        "unembedding": found.read_out.mean(1),
    }


causes = split_causes(before, after)
print("all components:", {name: round(x.sum().item(), 2) for name, x in causes.items()})
top = sum(causes.values()).abs().argsort(descending=True)[:6].tolist()
bars(
    [names[i] for i in top],
    {cause: x[top].tolist() for cause, x in causes.items()},
    'causes of the rise of logit("loved") - logit("hated")',
    "nats",
)

# %% [markdown]
# Part of the row for block 0's MLP comes from the unembedding. This MLP writes a large vector, so even a small change
# in the unembedding direction shows up in its row. Much of the heads' contribution is inherited, which means that it
# would be there even if the heads still had their old weights.
#
# Is this split correct? Let's test it on a change whose cause we know: we take the base model and replace only the
# unembedding and the final norm.

# %%
only_unembedding = graft_groups(before, after, layer_groups(before), ["read-out"])
known = split_causes(before, only_unembedding)
row = sum(known.values())
worst = int(row.abs().argmax())
output = (known["own weights"] + known["inherited"]).abs().max()
print(f"largest row: {names[worst]} {row[worst]:+.2f}; largest own output: {output:.2f}")

# %% [markdown]
# Judging by this row's total, you would blame a component that hasn't changed at all. The split correctly shows that
# the component's own output hasn't changed, and attributes the difference to the unembedding instead.

# %%
predictions.show()
progress()
