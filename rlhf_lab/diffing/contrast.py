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

    def sides(self, model: HookedModel) -> tuple[str, str]:
        """Return the words with positive weights, and those with negative ones."""
        decode = lambda chosen: ", ".join(model.tokenizer.decode([i]) for i in self.ids[chosen])
        return decode(self.weights > 0), decode(self.weights < 0)


Words = Contrast | tuple[Word, Word] | Mapping[Word, float | int]


def make_contrast(model: HookedModel, words: Words) -> Contrast:
    """Return a contrast from two words (the first minus the second), or from weights by word.

    Args:
        words: single tokens, as text or as ids; {"good": 0.5, "great": 0.5, "bad": -1} compares
            groups of words.

    Raises:
        ConfigError: If the words are not different single tokens, or a weight is not finite.
    """
    if isinstance(words, Contrast):
        return words
    is_pair = not isinstance(words, str) and len(set(words)) == len(words) == 2
    entries = dict(zip(words, (1, -1), strict=True)) if is_pair else {}
    entries = words if isinstance(words, Mapping) else entries
    ids = [single_token(model.tokenizer, w) if isinstance(w, str) else w for w in entries]
    weights = torch.tensor([*entries.values()], dtype=torch.float64)
    d_vocab = model.unembed.W_U.shape[1]
    is_known = len(set(ids)) == len(ids) and set(ids) <= set(range(d_vocab))
    if not (is_known and weights.any() and weights.isfinite().all()):
        raise ConfigError(
            f"words={words!r:.60} are not different tokens below {d_vocab} with finite weights. "
            "Pass two words, or weights by word such as {'good': 1, 'bad': -1}."
        )
    return Contrast(torch.tensor(ids), weights)
