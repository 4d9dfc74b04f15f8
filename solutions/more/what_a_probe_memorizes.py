# %% [markdown]
# # What a probe memorizes
#
# By the end of this lesson you can measure how much of a probe's accuracy is memory, with a control task.
#
# A linear probe shall find out whether the last adjective was a good or a bad one. But a probe with enough dimensions can also
# memorize the label of each word, even if the label means nothing. On Reel you can compute the best possible accuracy; for a
# real model nobody knows it. A control task works for both.
#
# **You need** {lesson:watch_it_learn}.

# %%
# first cell

# %% [markdown]
# About {minutes} minutes of work. All cells together run in about 15 seconds on a single core, without a network.

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
# Hewitt and Liang (2019, [1909.03368](https://arxiv.org/abs/1909.03368)) give each word a random label, always the same one. A
# probe that reads this label has memorized it. The accuracy minus that of the control is the *selectivity*.

# %%
from rlhf_lab.probes import control_labels  # exercise

# %% [markdown]
# The sentences are minimal: "this movie anyway , the *plot* was quite *lovely* and", read at the last token, so the model must
# have carried the adjective there. *Words seen*: the probe is tested with other nouns, but with words that it was fitted to.
# *Words unseen*: it is tested with other words. Then the control must be at 0.5, or something leaks. With words seen, how
# accurate is the probe for labels that mean nothing, at its best layer?

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
# For words seen, the probe reads random labels with an accuracy of 0.59, and sentiment without an error. With
# words unseen, the control is close to 0.5, and sentiment is read without an error: nothing of that is memory. The more
# dimensions a model has, the more a probe can memorize.
#
# One trap: with *exactly* half of the words True, the control of words unseen falls below 0.5. If more of the fitted words are
# True, fewer of the held-out words are, and a probe that follows the majority it saw is wrong more often than not. Independent
# coins do not have this problem. A control needs a check, too.

# %%
predictions.show()
progress()
