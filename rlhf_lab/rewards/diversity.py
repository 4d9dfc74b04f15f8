"""Diversity of a batch: the share of a response's n-grams that no other response has."""

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards.responses import ResponseReward


class Diversity(ResponseReward):
    """Of the distinct n-grams of a response, the share that no other response of its batch has.

    1. The n-grams of a response are its runs of n words; blanks part words. Each counts once.
    2. A response earns the share of them that are in no other response: 1 where it says nothing
       that another says, 0 where it has fewer than n words.

    It is called on whole batches only. Alone in a batch, a response of n words or more earns 1.

    Raises:
        ConfigError: n is no whole number, or below 1.

    Source: distinct-n (Li et al. 2016, arXiv 1510.03055) counts the distinct n-grams of all
    responses together; this is each response against the others, as in Self-BLEU (Zhu et al. 2018,
    arXiv 1802.01886).
    """

    __name__ = "diversity"

    def __init__(self, n: int) -> None:
        super().__init__(self._shares, whole_batch=True)
        if type(n) is not int or n < 1:
            raise ConfigError(f"diversity:{n} counts no n-grams; give a whole number from 1 on.")
        self.n = n

    def _shares(self, prompts: Sequence[str], responses: Sequence[str]) -> Float[Tensor, " batch"]:
        of_each = [self.ngrams(response) for response in responses]
        holders = Counter(ngram for ngrams in of_each for ngram in ngrams)
        own = [sum(holders[ngram] == 1 for ngram in ngrams) for ngrams in of_each]
        sizes = [max(1, len(ngrams)) for ngrams in of_each]
        return torch.tensor([k / size for k, size in zip(own, sizes, strict=True)])

    def ngrams(self, response: str) -> set[tuple[str, ...]]:
        """The distinct runs of n words in a response."""
        words = response.split()
        return {tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)}
