"""The sentiment reward: the probability that a classifier gives to the wanted class."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models.load import model_from_files, tokenizer_from_files

POSITIVE_LABELS = ("positive", "pos", "label_1")
NEGATIVE_LABELS = ("negative", "neg", "label_0")


class SentimentReward:
    """P(positive) or P(negative) of each text, from a two-class sequence classifier.

    The classifier runs in float32 without gradients, and its attention mask goes with the padded
    tokens, so that a text's reward does not depend on the other texts of its batch.

    Args:
        model: a bundled name (reel-sentiment), a Hugging Face directory or a hub id.
        direction: "pos" or "neg", the class that is rewarded.

    Raises:
        LoadError: no such classifier, or not one of two classes.
        ConfigError: another direction.
    """

    def __init__(
        self,
        model: str,
        direction: str = "pos",
        device: str | torch.device = "cpu",
        batch_size: int = 128,
    ) -> None:
        if direction not in ("pos", "neg"):
            raise ConfigError(f"direction={direction!r} is unknown; choose pos or neg.")
        classifier = model_from_files(
            AutoModelForSequenceClassification, model, "classifier", dtype=torch.float32
        )
        if classifier.config.num_labels != 2:
            raise LoadError(
                f"the classifier {model!r} has {classifier.config.num_labels} classes; "
                "the sentiment reward needs one with two."
            )
        self.model = classifier.requires_grad_(False).eval().to(device)
        self.tokenizer = tokenizer_from_files(model)
        self.batch_size = batch_size
        positive = _positive_class(self.model.config.id2label)
        self.rewarded_class = positive if direction == "pos" else 1 - positive

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """The probability of the rewarded class, between 0 and 1, for each text."""
        probs = []
        for start in range(0, len(texts), self.batch_size):
            batch = self.tokenizer(
                list(texts[start : start + self.batch_size]),
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=min(self.tokenizer.model_max_length, _readable_length(self.model)),
            ).to(self.model.device)
            probs.append(self.model(**batch).logits.softmax(-1)[:, self.rewarded_class])
        return torch.cat(probs) if probs else torch.empty(0, device=self.model.device)


def _positive_class(id2label: dict[int, str]) -> int:
    """The index of the positive class by its label, or 1, the convention, when no label tells."""
    for index, label in id2label.items():
        if label.lower() in POSITIVE_LABELS:
            return index
        if label.lower() in NEGATIVE_LABELS:
            return 1 - index
    return 1


def _readable_length(model: PreTrainedModel) -> int:
    """Tokens a classifier can read; RoBERTa's position table starts behind its padding index."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    reserved = [table.padding_idx + 1 for table in tables if table.padding_idx is not None]
    return model.config.max_position_embeddings - max(reserved, default=0)
