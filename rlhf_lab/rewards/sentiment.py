"""The sentiment reward: the probability that a classifier gives to the wanted class."""

import re
from collections.abc import Sequence
from types import MappingProxyType

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
from rlhf_lab.models.padding import beginnings

UNNAMED = MappingProxyType({"label_0": -1, "label_1": 1})
"""What transformers calls classes without names; the second is positive by convention."""
NEGATED = re.compile(r"(not|non|no|nicht|kein)\b")


class SentimentReward:
    """P(positive) or P(negative) of each text, from a two-class sequence classifier.

    The classifier runs in float32 without gradients, and its attention mask goes with the padded
    tokens, so that a text's reward does not depend on the other texts of its batch.

    Args:
        model: a bundled name (reel-sentiment), a Hugging Face directory or a hub id.
        direction: "pos" or "neg", the class that is rewarded.
        positive_label: the name of the positive class, for names that do not tell.

    Attributes:
        rewarded_class: the index of the class that is rewarded.

    Raises:
        LoadError: no such classifier, not one of two classes, or one that cannot pad texts.
        ConfigError: another direction, or classes of which the positive one is not known.
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
            raise ConfigError(f"direction={direction!r} is unknown; choose pos or neg.")
        classifier = load_pretrained_model(
            AutoModelForSequenceClassification, model, "classifier", dtype=torch.float32
        )
        if classifier.config.num_labels != 2:
            raise LoadError(
                f"the classifier {model!r} has {classifier.config.num_labels} classes; "
                "the sentiment reward needs one with two."
            )
        _check_names(classifier.config, model)
        positive = _positive_class(classifier.config.id2label, positive_label, model)
        self.rewarded_class = positive if direction == "pos" else 1 - positive
        self.name, self.batch_size = model, batch_size
        self.model = classifier.requires_grad_(False).eval().to(device)
        self.tokenizer = _padding_tokenizer(classifier, model)

    @property
    def rewarded_label(self) -> str:
        """The name of the class that is rewarded."""
        return str(self.model.config.id2label[self.rewarded_class])

    def summary(self) -> str:
        """Which class is rewarded, in words."""
        return f"rewarding the class {self.rewarded_label!r} of {self.name}"

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """The probability of the rewarded class, between 0 and 1, for each text."""
        longest = min(self.tokenizer.model_max_length, readable_length(self.model))
        texts = beginnings(texts, self.tokenizer, longest)
        parts = [
            sentiment_reward(
                texts[start : start + self.batch_size],
                self.tokenizer,
                self.model,
                self.rewarded_class,
                longest,
            )
            for start in range(0, len(texts), self.batch_size)
        ]
        return torch.cat(parts) if parts else torch.empty(0, device=self.model.device)


@torch.no_grad()
def sentiment_reward(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    classifier: PreTrainedModel,
    positive: int,
    max_length: int | None = None,
) -> Float[Tensor, " batch"]:
    """Give the probability of one class of a text classifier for each text of one batch.

    1. Turn the texts into tokens, padded to one length and cut at `max_length` (the tokenizer's
       own when None), on the classifier's device.
    2. Run the classifier on the tokens and their attention mask, without gradients.
    3. Take the softmax over its classes, and of each text the entry of the class `positive`.

    The mask keeps a text's reward from depending on the texts that it is padded with.

    r_i = softmax(z_i)[positive]
    """
    batch = tokenizer(
        list(texts), return_tensors="pt", padding=True, truncation=True, max_length=max_length
    ).to(classifier.device)
    return classifier(**batch).logits.softmax(-1)[:, positive]


def _padding_tokenizer(classifier: PreTrainedModel, name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a classifier, which can pad texts to one length.

    A decoder finds the last word of a text by the number of the padding token in its configuration,
    which is set if it lacks there.

    Raises:
        LoadError: there is no padding token, or no embedding for some token.
    """
    tokenizer = load_pretrained_tokenizer(name)
    validate_tokenizer(classifier, tokenizer, name)
    if tokenizer.pad_token_id is None:
        raise LoadError(
            f"the classifier {name!r} has no padding token, so texts of unequal length cannot be "
            "scored together; name its pad_token in tokenizer_config.json."
        )
    if classifier.config.pad_token_id is None:
        classifier.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer


def _check_names(config: PreTrainedConfig, model: str) -> None:
    """Refuse names of classes that contradict each other.

    Transformers drops names that are more or fewer than `num_labels`, without a word.

    Raises:
        LoadError: there are more or fewer, or label2id numbers them in another way.
    """
    place, on_disk = locate(model)
    written = PreTrainedConfig.get_config_dict(place, local_files_only=on_disk)[0].get("id2label")
    if written and len(written) != config.num_labels:
        raise LoadError(
            f"config.json of the classifier {model!r} names {len(written)} classes in id2label but "
            f"counts {config.num_labels} in num_labels; correct one of them."
        )
    for index, name in config.id2label.items():
        if (config.label2id or {}).get(name, index) != index:
            raise LoadError(
                f"config.json of the classifier {model!r} gives {name!r} the number {index} in "
                f"id2label and {config.label2id[name]} in label2id; correct one of them."
            )


def _positive_class(id2label: dict[int, str], given: str | None, model: str) -> int:
    """The index of the positive class: the one with the name that was given, or that tells.

    Case, blanks around a name and what follows its first word do not matter: "Positive sentiment"
    is positive.

    Raises:
        LoadError: the classes are not numbered 0 and 1.
        ConfigError: no class, or both, have that name, or the names do not tell.
    """
    if set(id2label) != {0, 1}:
        raise LoadError(
            f"the classifier {model!r} numbers its classes {sorted(id2label)}; correct id2label in "
            "its config.json to 0 and 1."
        )
    names = [str(id2label[index]).strip().casefold() for index in (0, 1)]
    shown = f"the classifier {model!r} has the classes {id2label[0]!r} and {id2label[1]!r}"
    if given is not None:
        wanted = given.strip().casefold()
        if names.count(wanted) != 1:
            raise ConfigError(
                f"{shown}, and positive_label={given!r} is not the name of one of them; give that "
                "of the positive one."
            )
        return names.index(wanted)
    signs = [_sign(name) for name in names]
    # "neutral" beside "negative" is not the positive class
    is_other = 1 not in signs and any(name.startswith("neutr") for name in names)
    if signs[0] == signs[1] or is_other or any(map(_is_unclear, names)):
        raise ConfigError(
            f"{shown}, which do not tell the positive one; name it with positive_label "
            "(--positive-label)."
        )
    return int(signs[1] > signs[0])


def _sign(name: str) -> int:
    """1 for the name of a positive class, -1 for that of a negative one, 0 if it does not tell."""
    if name in UNNAMED:
        return UNNAMED[name]
    word = re.match(r"[^\W\d_]*", name)[0]
    if word in ("pos", "neg"):
        return 1 if word == "pos" else -1
    return int(word.startswith("positiv")) - int(word.startswith("negativ"))


def _is_unclear(name: str) -> bool:
    """Whether a name speaks of a sign but neither begins with it nor with a negation of it.

    "Very negative" beside "negative" is not the positive class.
    """
    speaks = re.search("positiv|negativ", name) is not None
    return speaks and not _sign(name) and not NEGATED.match(name)


def readable_length(model: PreTrainedModel) -> int:
    """Tokens a classifier can read; RoBERTa's position table starts behind its padding index."""
    tables = [
        module
        for name, module in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    reserved = [table.padding_idx + 1 for table in tables if table.padding_idx is not None]
    return model.config.max_position_embeddings - max(reserved, default=0)
