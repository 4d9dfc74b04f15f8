# %% [markdown]
# # What a probe memorizes
#
# By the end of this lesson, you will be able to use a control task to measure how much of a probe's accuracy is just memorization.
#
# Suppose you train a linear probe to tell whether the last adjective was positive or negative. A probe with enough
# dimensions doesn't have to find sentiment to do this: it can simply memorize one label per word, even if the labels
# are meaningless. On Reel, you can compute the best possible accuracy for comparison, but for a real model, nobody
# knows it. A control task works in both cases.
#
# **You need** {lesson:watch_it_learn}.

# %%
# first cell

# %% [markdown]
# Allow about {minutes} minutes. The whole notebook runs in about 15 seconds on one CPU core and needs no internet
# access.

# %%
# %load_ext jaxtyping
# %jaxtyping.typechecker beartype.beartype
import rlhf_lab

rlhf_lab.check_shapes()  # of the package, too: before anything else is imported from it

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.course import Predictions, check, hint, progress
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models import load_model
from rlhf_lab.organism.lexicon import ADJECTIVES, ASPECTS, flat
from rlhf_lab.probes.direction import fit_direction, project
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views import curves

SETTINGS = dict(preset="reel", gen_len=26, top_k=None, advantages="gae", kl_coef=0.3)
predictions = Predictions()
model = load_model("reel-nano")

# %% [markdown]
# ## A control task
#
# Hewitt and Liang (2019, [1909.03368](https://arxiv.org/abs/1909.03368)) assign a random label to each word, and use
# the same label wherever the word appears. A probe can only predict such labels if it has memorized them. The
# *selectivity* is the probe's accuracy on the real task minus its accuracy on this control task.

# %%
from rlhf_lab.probes import control_labels  # exercise

# %% [markdown]
# The sentences all have the form "this movie anyway , the *plot* was quite *lovely* and". The probe reads the last
# token, so the model has to carry information about the adjective to this position.
#
# The probe is tested in two ways. With *words seen*, the test sentences pair new nouns with adjectives the probe was
# fitted to. With *words unseen*, the adjectives are new, so the control accuracy should be 0.5; anything higher
# indicates a leak. With words seen, how high is the probe's accuracy on random labels at the best layer?

# %%
memorized = "above 0.9"  # predict: "below 0.55", "0.55 to 0.9" or "above 0.9"

# %%
good, bad = (list(flat(ADJECTIVES[sign])) for sign in (1, -1))
nouns, words = list(ASPECTS)[:6], good + bad
encode = lambda text: model.tokenizer.encode(text, add_special_tokens=False)
rows = [
    [model.tokenizer.bos_token_id, *encode(f"this movie anyway , the {noun} was quite {word} and")]
    for noun in nouns
    for word in words
]
word_of = torch.arange(len(rows)) % len(words)
noun_of = torch.arange(len(rows)) // len(words)
is_good = word_of < len(good)
hook_names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
acts = capture_activations(model, torch.tensor(rows), hook_names, pos=-1)
states = torch.stack([acts[name] for name in hook_names]).cpu().double()
sixths = torch.randperm(len(words), generator=torch.Generator().manual_seed(4)) % 6


def accuracies(
    labels: Bool[Tensor, " n"], groups: Int[Tensor, " n"]
) -> Float[Tensor, "layer word"]:
    """Fit a probe without each group, and compute its accuracy on that group, by word."""
    correct = torch.zeros(len(states), len(labels), dtype=torch.float64)
    for group in groups.unique():
        held_out = groups == group
        probe = fit_direction(states[:, ~held_out], labels[~held_out])
        above = project(states[:, held_out], probe.direction) > probe.threshold[:, None]
        correct[:, held_out] = (above == labels[held_out]).double()
    return torch.stack([correct[:, word_of == word].mean(1) for word in range(len(words))], 1)


generator = torch.Generator().manual_seed(5)
controls = [control_labels(word_of, generator) for _ in range(20)]
lines = {}
for name, groups in (("words seen", noun_of), ("words unseen", sixths[word_of])):
    of_controls = torch.stack([accuracies(labels, groups) for labels in controls]).mean(0)
    for kind, found in (("", accuracies(is_good, groups)), ("control, ", of_controls)):
        means = bootstrap_means(found.T)
        lines[kind + name] = (range(len(states)), means.value.tolist())
        print(
            f"{kind}{name}:",
            *(
                f"{m:.2f} [{a:.2f}, {b:.2f}]"
                for m, a, b in zip(
                    means.value.tolist(), means.low.tolist(), means.high.tolist(), strict=True
                )
            ),
        )
print(f"by layer; intervals over {len(words)} words; controls: means of {len(controls)} labelings")
best = max(lines["control, words seen"][1])
limits = {"below 0.55": 0.55, "0.55 to 0.9": 0.9, "above 0.9": 1.1}
predictions.compare("random labels of words seen", memorized, best, limits)
curves(lines, "Accuracy of a probe at the last token", "block", "fraction of words")

# %% [markdown]
# With words seen, the probe predicts the random labels with an accuracy of 0.59, and sentiment perfectly. With words
# unseen, the control accuracy drops to about 0.5, while sentiment is still predicted perfectly. So none of the
# sentiment accuracy comes from memorization. Note that the more dimensions a model has, the more its probes can
# memorize.
#
# There is one trap. If you give *exactly* half of the words the label True, the control accuracy for words unseen falls
# below 0.5. The reason is that whenever the fitted words contain more Trues, the held-out words contain fewer, so a
# probe that predicts the majority is wrong more often than not. Independent coin flips don't have this problem. In
# other words, controls need checking, too.

# %%
predictions.show()
progress()
