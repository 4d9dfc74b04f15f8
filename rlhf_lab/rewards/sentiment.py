"""The sentiment reward: the probability of one class of a two-class sequence classifier."""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models.load import (
    load_pretrained_model,
    load_pretrained_tokenizer,
    locate,
    validate_tokenizer,
)


class SentimentReward:
    """P(positive) or P(negative) of each text, from a two-class sequence classifier.

    The classifier runs in float32 without gradients. Its attention mask excludes padding, so a
    text's reward does not depend on the other texts of its batch.

    Args:
        model: a bundled name (reel-sentiment), a Hugging Face directory or a hub id.
        direction: "pos" or "neg", the class that is rewarded.
        positive_label: the name of the positive class, if the names do not show it.

    Attributes:
        rewarded_class: the index of the rewarded class.

    Raises:
        LoadError: If there is no such classifier, it does not have two classes, or it has no
            padding token.
        ConfigError: If the direction is unknown, or the positive class cannot be determined.
    """

    def __init__(
        self,
        model: str,
        direction: str = "pos",
        device: str | torch.device = "cpu",
        batch_size: int = 128,
        positive_label: str | None = None,
    ) -> None:
        if direction not in ("pos", "neg"):
            raise ConfigError(f"Unknown direction={direction!r}. Choose one of: pos, neg.")
        classifier = load_pretrained_model(
            AutoModelForSequenceClassification, model, "classifier", dtype=torch.float32
        )
        _validate_classes(classifier.config, model)
        positive = _positive_class(classifier.config.id2label, positive_label, model)
        self.rewarded_class = positive if direction == "pos" else 1 - positive
        self.name, self.batch_size = model, batch_size
        self.model = classifier.requires_grad_(False).eval().to(device)
        self.tokenizer = load_pretrained_tokenizer(model)
        validate_tokenizer(classifier, self.tokenizer, model)
        if self.tokenizer.pad_token_id is None:
            raise LoadError(
                f"the classifier {model!r} has no padding token, which batches of texts need. "
                "Set pad_token in tokenizer_config.json."
            )
        if classifier.config.pad_token_id is None:  # decoders find the last real token by it
            classifier.config.pad_token_id = self.tokenizer.pad_token_id

    @property
    def rewarded_label(self) -> str:
        """The name of the rewarded class."""
        return str(self.model.config.id2label[self.rewarded_class])

    def summary(self) -> str:
        """Return a line about the rewarded class."""
        return f"rewarding the class {self.rewarded_label!r} of {self.name}"

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """Return the probability of the rewarded class, between 0 and 1, for each text."""
        longest = min(self.tokenizer.model_max_length, readable_length(self.model))
        settings = self.tokenizer, self.model, self.rewarded_class, longest
        parts = [texts[at : at + self.batch_size] for at in range(0, len(texts), self.batch_size)]
        empty = torch.empty(0, device=self.model.device)
        return torch.cat([empty, *(sentiment_reward(part, *settings) for part in parts)])


@torch.no_grad()
def sentiment_reward(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    classifier: PreTrainedModel,
    positive: int,
    max_length: int | None = None,
) -> Float[Tensor, " batch"]:
    """Return the probability of one class of a text classifier for each text of one batch.

    1. Tokenize the texts, padded to one length and truncated to `max_length` (the tokenizer's
       own when None), on the classifier's device.
    2. Run the classifier on the tokens and their attention mask, without gradients.
    3. Take the softmax over its classes, and the entry of the class `positive` for each text.

    The mask makes a text's reward independent of the texts that it is padded with.

    r_i = softmax(z_i)[positive]
    """
    batch = tokenizer(
        list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_length
    ).to(classifier.device)
    return classifier(**batch).logits.softmax(-1)[:, positive]


def _validate_classes(config: PreTrainedConfig, model: str) -> None:
    """Raise LoadError unless the classifier has two classes with consistent names."""
    if config.num_labels != 2:
        raise LoadError(
            f"the classifier {model!r} has {config.num_labels} classes. "
            "The sentiment reward requires two."
        )
    place, on_disk = locate(model)
    stored = PreTrainedConfig.get_config_dict(place, local_files_only=on_disk)[0].get("id2label")
    if stored and len(stored) != 2:  # transformers ignores these names without a warning
        raise LoadError(
            f"config.json of the classifier {model!r} names {len(stored)} classes in id2label but "
            "has num_labels=2. Correct one of them."
        )
    numbers = {name: index for index, name in config.id2label.items()}
    if set(numbers.values()) != {0, 1} or numbers != (config.label2id or numbers):
        raise LoadError(
            f"config.json of the classifier {model!r} has id2label={config.id2label} and "
            f"label2id={config.label2id}. Number both classes 0 and 1 in the same way."
        )


def _positive_class(id2label: dict[int, str], positive_label: str | None, model: str) -> int:
    """Return the index of the positive class, by its given name or by both names."""
    names = [str(id2label[index]).strip().casefold() for index in (0, 1)]
    classes = f"the classifier {model!r} has the classes {id2label[0]!r} and {id2label[1]!r}"
    if positive_label is not None:
        name = positive_label.strip().casefold()
        if names.count(name) != 1:
            raise ConfigError(
                f"{classes}, and positive_label={positive_label!r} is not the name of one of "
                "them. Use the name of the positive one."
            )
        return names.index(name)
    signs = [_sign(name) for name in names]
    if sorted(signs) != [-1, 1]:
        raise ConfigError(
            f"{classes}, which do not show the positive one. Set positive_label "
            "(--positive-label) to its name."
        )
    return signs.index(1)


def _sign(name: str) -> int:
    """Return 1 for the name of a positive class, -1 for a negative one, 0 if unclear."""
    if re.match(r"pos(itiv|\b|_)|label_1$|(not|non|no) negativ", name):
        return 1  # transformers calls unnamed classes LABEL_0 and LABEL_1
    return -int(bool(re.match(r"neg(ativ|\b|_)|label_0$|(not|non|no) positiv", name)))


def readable_length(model: PreTrainedModel) -> int:
    """Return the tokens a classifier can read; RoBERTa reserves positions up to its padding id."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    reserved = [table.padding_idx + 1 for table in tables if table.padding_idx is not None]
    return model.config.max_position_embeddings - max(reserved, default=0)
