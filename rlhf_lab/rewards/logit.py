"""The logit reward: hub reward models, which are sequence classifiers with a single logit."""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_lab.chat import Message, render_chat
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models.load import (
    load_pretrained,
    load_pretrained_model,
    load_pretrained_tokenizer,
    validate_tokenizer,
)
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.rewards.conversation import ConversationReward
from rlhf_lab.rewards.sentiment import readable_length


def count_labels(model: str) -> int:
    """Return the number of labels in a classifier's configuration.

    Raises:
        LoadError: If there is no such classifier.
    """
    return load_pretrained(AutoConfig, model, "classifier").num_labels


class LogitReward(ConversationReward):
    """The logit that a reward model with one label gives a response to its prompt, not scaled.

    1. Render the conversation with the reward model's chat template; without one, tokenize the
       previous messages and the response as a pair of texts, with at most one BOS.
    2. Pad on the right. The logit is read where transformers reads it from a single text: at the
       first token (BERT), or at the last real token (decoders).

    Args:
        model: a Hugging Face directory or a hub id.
        dtype: of the weights, regardless of the stored dtype.

    Raises:
        LoadError: If there is no such reward model, or it has several labels.
    """

    def __init__(
        self,
        model: str,
        device: str | torch.device = "cpu",
        batch_size: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(self.logits)
        loaded = load_pretrained_model(
            AutoModelForSequenceClassification, model, "reward model", dtype=dtype
        )
        if loaded.config.num_labels != 1:
            raise LoadError(
                f"the reward model {model!r} has {loaded.config.num_labels} labels. "
                "The logit reward requires a single logit."
            )
        self.tokenizer = load_pretrained_tokenizer(model)
        validate_tokenizer(loaded, self.tokenizer, model)
        self.name, self.batch_size = model, batch_size
        self.model = loaded.requires_grad_(False).eval().to(device)
        self.longest = min(self.tokenizer.model_max_length, readable_length(loaded))

    def summary(self) -> str:
        """Return a line about the reward model and the form of its input."""
        form = "in its chat template" if self.tokenizer.chat_template else "as pairs of texts"
        return f"rewarding the logit of {self.name}, which reads prompt and response {form}"

    @torch.no_grad()
    def logits(self, conversations: Sequence[Sequence[Message]]) -> Float[Tensor, " batch"]:
        """Return the logit of each conversation, whose last message is the response.

        Raises:
            ConfigError: If a conversation is longer than the model's context. Of a pair, the
                beginning of the prompt is truncated first, with a warning.
            LoadError: If the chat template raises an error.
        """
        rows = [self.encode(turns) for turns in conversations]
        chunks = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        empty = torch.empty(0, device=self.model.device)
        return torch.cat([empty, *map(self._run, chunks)])

    def encode(self, turns: Sequence[Message]) -> dict[str, list[int]]:
        """Return the token ids of a conversation, and segment ids if the model has them.

        Raises:
            ConfigError, LoadError: See `logits`.
        """
        if self.tokenizer.chat_template:
            text = render_chat(self.tokenizer, turns, "a conversation to reward", for_answer=False)
            row = {"input_ids": self.tokenizer.encode(text, add_special_tokens=False)}
        else:
            prompt = "\n\n".join(turn["content"] for turn in turns[:-1])
            row = self._encode_pair(prompt, turns[-1]["content"])
        if len(row["input_ids"]) > self.longest:
            raise ConfigError(
                f"a response with its prompt has {len(row['input_ids'])} tokens, and the reward "
                f"model {self.name!r} reads {self.longest}. To fit, shorten the prompts or gen_len."
            )
        return row

    def _encode_pair(self, prompt: str, response: str) -> dict[str, list[int]]:
        settings = dict(return_special_tokens_mask=True, return_attention_mask=False)
        row = self.tokenizer(prompt, response, **settings)
        excess = len(row["input_ids"]) - self.longest
        if excess > 0:
            warnings.warn(
                f"prompt and response have {len(row['input_ids'])} tokens, and the reward model "
                f"{self.name!r} reads {self.longest}: the beginning of the prompt is cut off. "
                "Shorten the prompts.",
                stacklevel=2,
            )
            ids = self.tokenizer.encode(prompt, add_special_tokens=False)[excess:]
            row = self.tokenizer(self.tokenizer.decode(ids), response, **settings)
        special, bos = row.pop("special_tokens_mask"), self.tokenizer.bos_token_id
        ids = row["input_ids"]
        keep = [i for i, mark in enumerate(special) if i == 0 or not mark or ids[i] != bos]
        return {name: [values[i] for i in keep] for name, values in row.items()}

    def _run(self, rows: Sequence[dict[str, list[int]]]) -> Float[Tensor, " rows"]:
        """Return the logits of rows, padded on the right.

        A decoder finds the last real token by its padding token. A model without one gets a token
        that is not the last one of any row.
        """
        config = self.model.config.get_text_config()
        pad, size = config.pad_token_id, self.model.get_input_embeddings().num_embeddings
        fill = pad
        if pad is None or not 0 <= pad < size:
            ends = {row["input_ids"][-1] for row in rows}
            fill = next(token for token in range(size) if token not in ends)
        device = self.model.device
        ids, real = pad_rows([row["input_ids"] for row in rows], device, fill)
        inputs = {"input_ids": ids, "attention_mask": real.long()}
        if "token_type_ids" in rows[0]:
            inputs["token_type_ids"], _ = pad_rows([row["token_type_ids"] for row in rows], device)
        try:
            config.pad_token_id = fill
            return self.model(**inputs).logits[:, 0].float()
        finally:
            config.pad_token_id = pad
