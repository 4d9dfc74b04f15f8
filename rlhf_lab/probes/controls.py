"""Control task of a probe: one random label per word type, which only memory can fit."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

__all__ = ["control_labels"]


def control_labels(
    tokens: Int[Tensor, "*shape"], generator: torch.Generator, share: float = 0.5
) -> Bool[Tensor, "*shape"]:
    """Label every token by its word type alone, at random: the labels of a control task.

    1. Find the different tokens (the word types), and which of them stands at each place.
    2. Make `share` of the types True, rounded, but at least one of them True and one False.
    3. Draw which ones with the `generator` (of the CPU), and no other random state.
    4. Give each place the label of its type.

    A word has the same label wherever it stands, in rows that a probe is fitted to and in rows that
    it is judged on: call this once, on all of them. What a probe reads of these labels is what it
    can memorise of the words; its accuracy on the real labels less this one is its selectivity. Of
    exactly so many True and False types both occur in every draw, where independent coins over a
    few types may all fall alike.

    Raises ValueError for fewer than two types, and for a share outside 0 to 1.

    Source: Hewitt and Liang 2019, arXiv 1909.03368, section 2

    Args:
        share: of the types that are True: that of the real labels.
    """
    types, inverse = tokens.unique(return_inverse=True)
    if len(types) < 2 or not 0 < share < 1:
        raise ValueError(
            f"tokens has {len(types)} word types and share is {share}; give at least two types and "
            "a share between 0 and 1."
        )
    n_true = min(max(round(share * len(types)), 1), len(types) - 1)
    coins = torch.randperm(len(types), generator=generator) < n_true
    return coins.to(tokens.device)[inverse]
