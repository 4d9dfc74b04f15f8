"""Contrasts of words: the weighted sums of logits whose shift is studied."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.tokenization import single_token

Word = str | int


class Contrast(NamedTuple):
    """Words and their weights; a pair of words has the weights 1 and -1.

    Args:
        ids: tokens of the words.
        weights: of each word, in float64.
    """

    ids: Int[Tensor, " word"]
    weights: Float[Tensor, " word"]

    def of(self, logits: Float[Tensor, "*n d_vocab"]) -> Float[Tensor, "*n"]:
        """Return the weighted sum over the words, in float64."""
        chosen = exact(logits[..., self.ids.to(logits.device)])
        return chosen @ self.weights.to(chosen.device)


Words = Contrast | tuple[Word, Word] | Mapping[Word, float | int]


def make_contrast(model: HookedModel, words: Words) -> Contrast:
    """Return a contrast from two words (the first minus the second), or from weights by word.

    Args:
        words: single tokens, as text or as ids; {"good": 0.5, "great": 0.5, "bad": -1} compares
            groups of words.

    Raises:
        ConfigError: If there are not two words or a mapping, or a word is not a single token.
    """
    if isinstance(words, Contrast):
        return words
    if isinstance(words, str) or (not isinstance(words, Mapping) and len(words) != 2):
        raise ConfigError(f"words must be two words, or weights by word, got {words!r:.60}.")
    weights = [*words.values()] if isinstance(words, Mapping) else [1, -1]
    ids = [single_token(model.tokenizer, w) if isinstance(w, str) else w for w in words]
    return Contrast(torch.tensor(ids), torch.tensor(weights, dtype=torch.float64))
