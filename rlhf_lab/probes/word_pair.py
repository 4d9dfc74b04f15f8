"""Word pair: probes of the logit difference of two words behind a position of the eval text."""

from typing import Any

from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes.probe import Probe


class WordPairProbe(Probe):
    """A probe that compares two words behind a position of each eval text.

    Args:
        word, other: single tokens of the tokenizer.
        pos: the position before the word, in each text; from its end when negative.
        n: sequences to look at.
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
        self.word, self.other, self.pos, self.n = word, other, pos, n

    def check_model(self, model: HookedModel) -> None:
        """Refuse words that are no single tokens of the model."""
        for word in (self.word, self.other):
            single_token(model.tokenizer, word)

    def settings(self) -> dict[str, Any]:
        """Also the two words."""
        return super().settings() | {"word": self.word, "other": self.other}
