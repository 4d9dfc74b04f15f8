"""Control task of a probe: one random label per word type, which only memory can fit."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def control_labels(
    tokens: Int[Tensor, "*shape"], generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "*shape"]:
    """Label every token by its word type alone, at random: the labels of a control task.

    1. Find the different tokens (the word types), and which of them is at each place.
    2. Toss a coin for each type, with the `generator` (of the CPU) and no other random state: it is
       True with probability `share`.
    3. Give each place the label of its type.

    Call this once, on the rows of the fit and of the test, so a word has one label in both. A probe
    can only predict these labels by memorizing words; its accuracy on the real labels minus this
    one is its selectivity. If exactly half of the types were True, labels would predict each other.

    Raises ValueError unless `share` is between 0 and 1.

    Source: Hewitt and Liang 2019, arXiv 1909.03368, section 2

    Args:
        share: the probability of True: that of the real labels.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}. Use a number between 0 and 1, such as 0.5.")
    types, inverse = tokens.unique(return_inverse=True)
    coins = torch.rand(len(types), generator=generator) < share
    return coins.to(tokens.device)[inverse]
