"""Word pair: base class of probes of the logit difference of two words."""

from typing import Any

from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes.probe import Probe


class WordPairProbe(Probe):
    """A probe that compares two words after a position of each eval text.

    Args:
        word, other: single tokens of the tokenizer.
        pos: the position before the word, in each text; from its end when negative.
        n: number of sequences.
    """

    text = "eval"

    def __init__(
        self,
        word: str = "loved",
        other: str = "hated",
        pos: int = -1,
        n: int = 64,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        self.word, self.other, self.pos = word, other, pos
        self.n = self.rows = n

    def check_model(self, model: HookedModel) -> None:
        """Raise ConfigError if a word is not a single token of the model."""
        for word in (self.word, self.other):
            single_token(model.tokenizer, word)

    def settings(self) -> dict[str, Any]:
        """Return also the two words."""
        return super().settings() | {"word": self.word, "other": self.other}
