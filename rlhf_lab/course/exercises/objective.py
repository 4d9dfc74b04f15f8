"""Words and cases that the exercises of lesson 05 share."""

import torch

from rlhf_lab.course.cases import draw
from rlhf_lab.course.exercise import Case

LESSON = "05_the_objective"
COEF_MISSING = "the coefficient is missing"
PADDING_COUNTS = "the mask is not used: padding counts as if it were text"
DIVIDES_BY_ALL = "this divides by all entries, the masked ones included"
DENOMINATOR_UNUSED = "the denominator is not used"
LOG_OF_SOFTMAX = "the logarithm of a softmax is -inf or nan for large logits: use log_softmax"
HALF = "half-precision input stays in half precision: at_least_float32 turns it into float32"
NOT_BLANKED = (
    "nan or inf at padding gets into the gradient: put 0 there first, not only in what comes out"
)
NEVER_SAID = (
    "a word that cannot be said gives 0 * inf, which is nan: put 0 there before multiplying"
)
ONLY_AFTER = (
    "0 * inf is nan: putting 0 there after multiplying fixes the value, but not the gradient"
)
TOO_EARLY = "this averages each sequence first: tokens of short responses count for more"


def filtered(fn, *names: str) -> Case:
    """A case in which one word of the vocabulary cannot be said, as after top-k."""
    arguments = draw(fn, {"batch": 2, "gen": 3, "d_vocab": 5}, 8)
    cut = {name: arguments[name].index_fill(-1, torch.tensor([1]), -torch.inf) for name in names}
    return Case("one word has logit -inf", arguments | cut)
