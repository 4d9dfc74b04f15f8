"""Words whose logits probes compare: a pair, or weights by word."""

from typing import Any

from rlhf_lab.diffing.contrast import Contrast, Word, Words, make_contrast
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.probe import Probe


class WordPairProbe(Probe):
    """A probe that compares words, see `make_contrast`, after a position of each eval text."""

    options = ("word", "other", "pos", "n", *Probe.options)
    word: Word | Words = "loved"
    other: Word | None = None
    pos, n = -1, 64
    text = "eval"
    sides: tuple[str, str] = ("", "")  # of the contrast, once the model is known

    def check_model(self, model: HookedModel) -> None:
        """Raise ConfigError if the words are not a contrast of single tokens of the model."""
        self.sides = self.contrast(model).sides(model)

    def contrast(self, model: HookedModel) -> Contrast:
        """Return the words with their weights."""
        word, other = self.word, self.other
        if isinstance(word, str | int):
            return make_contrast(model, (word, "hated" if other is None else other))
        if other is not None:
            raise ConfigError(f"other={other!r} cannot be combined with weights. Remove it.")
        return make_contrast(model, word)

    def settings(self) -> dict[str, Any]:
        """Return also both sides of the contrast."""
        return super().settings() | dict(zip(("word", "other"), self.sides, strict=True))
