"""Rewards by sequence classifiers: the probability of one of two classes, or a single logit."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_lab.chat import Message, render_chat
from rlhf_lab.errors import ConfigError, LoadError, require_list
from rlhf_lab.models.load import (
    load_pretrained_model,
    load_pretrained_tokenizer,
    locate,
    validate_tokenizer,
)
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.rewards.conversation import ConversationReward


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
        LoadError: If there is no such classifier, or it does not have two classes.
        ConfigError: If the positive class cannot be determined.
    """

    def __init__(
        self,
        model: str,
        direction: str = "pos",
        device: str | torch.device = "cpu",
        batch_size: int = 128,
        positive_label: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.longest = load_classifier(model, "classifier", device)
        config = self.model.config
        _validate_classes(config, model)
        positive = _positive_class(config, positive_label, model)
        if direction not in ("pos", "neg"):
            raise ConfigError(f"Unknown direction {direction!r}. Choose one of: pos, neg.")
        self.rewarded_class = positive if direction == "pos" else 1 - positive
        self.name, self.batch_size = model, batch_size
        if config.pad_token_id is None:  # decoders find the last real token by it
            config.pad_token_id = self.tokenizer.pad_token_id

    @property
    def rewarded_label(self) -> str:
        """The name of the rewarded class."""
        return str(self.model.config.id2label[self.rewarded_class])

    def summary(self) -> str:
        """Return a line about the rewarded class."""
        return f"rewarding the class {self.rewarded_label!r} of {self.name}"

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """Return the probability of the rewarded class, between 0 and 1, for each text."""
        require_list(texts, "texts=")
        settings = self.tokenizer, self.model, self.rewarded_class, self.longest
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


def load_classifier(
    name: str, kind: str, device: str | torch.device
) -> tuple[Any, PreTrainedTokenizerBase, int]:
    """Load a sequence classifier without gradients, its tokenizer, and the tokens it can read.

    RoBERTa reserves positions up to its padding id.
    """
    model = load_pretrained_model(
        AutoModelForSequenceClassification, name, kind, dtype=torch.float32
    )
    tokenizer = load_pretrained_tokenizer(name)
    validate_tokenizer(model, tokenizer, name)
    tables = [
        module
        for path, module in model.named_modules()
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding)
    ]
    reserved = [table.padding_idx + 1 for table in tables if table.padding_idx is not None]
    longest = model.config.max_position_embeddings - max(reserved, default=0)
    model = model.requires_grad_(False).eval().to(device)
    return model, tokenizer, min(tokenizer.model_max_length, longest)


def _validate_classes(config: PreTrainedConfig, model: str) -> None:
    """Raise LoadError unless the classifier has two classes with consistent names."""
    names = config.id2label
    numbers = {name: index for index, name in names.items()}
    place, on_disk = locate(model)
    stored = PreTrainedConfig.get_config_dict(place, local_files_only=on_disk)[0].get("id2label")
    stored = stored or names  # transformers ignores names that do not fit num_labels
    if set(names) != {0, 1} or len(stored) != 2 or numbers != (config.label2id or numbers):
        raise LoadError(
            f"the classifier {model!r} has num_labels={len(names)}, id2label={stored} and "
            f"label2id={config.label2id}. The sentiment reward requires two classes, numbered 0 "
            "and 1 in the same way."
        )


def _positive_class(config: PreTrainedConfig, label: str | None, model: str) -> int:
    """Return the index of the positive class, by its given name or by both names."""
    names = [str(config.id2label[index]).strip().casefold() for index in (0, 1)]
    if label is not None and names.count(label.strip().casefold()) == 1:
        return names.index(label.strip().casefold())
    # transformers calls unnamed classes LABEL_0 and LABEL_1
    positive = [bool(re.match(r"pos(itiv|\b|_)|label_1$", name)) for name in names]
    negative = [bool(re.match(r"neg(ativ|\b|_)|label_0$", name)) for name in names]
    if label is None and sum(positive) == sum(negative) == 1 and positive != negative:
        return positive.index(True)
    raise ConfigError(
        f"the classifier {model!r} has the classes {config.id2label[0]!r} and "
        f"{config.id2label[1]!r}, and positive_label={label!r} is not the name of one of them. Set "
        "positive_label (--positive-label) to the name of the positive class."
    )


class LogitReward(ConversationReward):
    """The logit that a reward model with one label gives a response to its prompt, not scaled.

    1. Render the conversation with the reward model's chat template; without one, tokenize the
       previous messages and the response as a pair of texts.
    2. Pad on the right. The logit is read where transformers reads it from a single text: at the
       first token (BERT), or at the last real token (decoders).

    Args:
        model: a Hugging Face directory or a hub id.

    Raises:
        LoadError: If there is no such reward model, or it has several labels.
    """

    def __init__(
        self, model: str, device: str | torch.device = "cpu", batch_size: int = 32
    ) -> None:
        super().__init__(self.logits)
        self.model, self.tokenizer, self.longest = load_classifier(model, "reward model", device)
        self.name, self.batch_size = model, batch_size
        if self.model.config.num_labels != 1:
            raise LoadError(
                f"the reward model {model!r} has {self.model.config.num_labels} labels. "
                "The logit reward requires a single logit."
            )
        pad = self.model.config.get_text_config().pad_token_id
        self.pad = None if pad is None or pad < 0 else pad  # decoders find the last token by it

    def summary(self) -> str:
        """Return a line about the reward model and the form of its input."""
        form = "in its chat template" if self.tokenizer.chat_template else "as pairs of texts"
        return f"rewarding the logit of {self.name}, which reads prompt and response {form}"

    @torch.no_grad()
    def logits(self, conversations: Sequence[Sequence[Message]]) -> Float[Tensor, " batch"]:
        """Return the logit of each conversation, whose last message is the response."""
        rows = [self.encode(turns) for turns in conversations]
        device, size = self.model.device, 1 if self.pad is None else self.batch_size
        logits = [torch.empty(0, device=device)]
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            ids, real = pad_rows([row["input_ids"] for row in part], device, self.pad or 0)
            inputs = {"input_ids": ids, "attention_mask": real.long()}
            if "token_type_ids" in part[0]:
                segments = [row["token_type_ids"] for row in part]
                inputs["token_type_ids"], _ = pad_rows(segments, device)
            logits.append(self.model(**inputs).logits[:, 0].float())
        return torch.cat(logits)

    def encode(self, turns: Sequence[Message]) -> dict[str, list[int]]:
        """Return the token ids of a conversation, and segment ids if the model has them."""
        if self.tokenizer.chat_template:
            text = render_chat(self.tokenizer, turns, "a conversation to reward", for_answer=False)
            row = {"input_ids": self.tokenizer.encode(text, add_special_tokens=False)}
        else:
            prompt = "\n\n".join(turn["content"] for turn in turns[:-1])
            row = dict(self.tokenizer(prompt, turns[-1]["content"], return_attention_mask=False))
        if len(row["input_ids"]) > self.longest:
            raise ConfigError(
                f"a response with its prompt has {len(row['input_ids'])} tokens, and the reward "
                f"model {self.name!r} reads {self.longest}. To fit, shorten the prompts or gen_len."
            )
        return row
