"""The logit reward: reward models of the hub, sequence classifiers with a single logit."""

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
    """How many labels a classifier has, by its configuration.

    Raises:
        LoadError: there is no such classifier.
    """
    return load_pretrained(AutoConfig, model, "classifier").num_labels


class LogitReward(ConversationReward):
    """The logit that a reward model of one label gives a response to its prompt, as it is.

    1. Render the conversation with the reward model's own chat template; or, where it has none,
       take what was said before and the response as a pair of texts. There is one BOS at most.
    2. Pad on the right. The model reads its logit where transformers reads it from a text alone: at
       the first token (BERT and its like), or the last one that is no padding (decoders).

    Args:
        model: a Hugging Face directory or a hub id.
        dtype: of the weights, however they are stored.

    Raises:
        LoadError: no such reward model, or one with more labels.
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
                f"the reward model {model!r} has {loaded.config.num_labels} labels; the logit "
                "reward needs one with a single logit."
            )
        self.tokenizer = load_pretrained_tokenizer(model)
        validate_tokenizer(loaded, self.tokenizer, model)
        self.name, self.batch_size = model, batch_size
        self.model = loaded.requires_grad_(False).eval().to(device)
        self.longest = min(self.tokenizer.model_max_length, readable_length(loaded))

    def summary(self) -> str:
        """What is rewarded, in words."""
        form = "in its chat template" if self.tokenizer.chat_template else "as pairs of texts"
        return f"rewarding the logit of {self.name}, which reads prompt and response {form}"

    @torch.no_grad()
    def logits(self, conversations: Sequence[Sequence[Message]]) -> Float[Tensor, " batch"]:
        """The logit of each conversation, of which the last message is the response.

        Raises:
            ConfigError: a conversation that is longer than the model reads. Of a pair, the
                beginning of what was said before is cut instead, with a warning.
            LoadError: one that the chat template refuses.
        """
        rows = [self.encode(turns) for turns in conversations]
        chunks = [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        found = [self._run(chunk) for chunk in chunks]
        return torch.cat([torch.empty(0, device=self.model.device), *found])

    def encode(self, turns: Sequence[Message]) -> dict[str, list[int]]:
        """Token ids of a conversation, and their segments where the model has two.

        Raises:
            ConfigError, LoadError: see `logits`.
        """
        if self.tokenizer.chat_template:
            text = render_chat(self.tokenizer, turns, "a conversation to reward", for_answer=False)
            found = {"input_ids": self.tokenizer.encode(text, add_special_tokens=False)}
        else:
            found = self._encode_pair("\n\n".join(t["content"] for t in turns[:-1]), turns[-1])
        if len(found["input_ids"]) > self.longest:
            raise ConfigError(
                f"a response with its prompt has {len(found['input_ids'])} tokens, and the reward "
                f"model {self.name!r} reads {self.longest}; shorten the prompts or gen_len."
            )
        return found

    def _encode_pair(self, asked: str, answer: Message) -> dict[str, list[int]]:
        """What was said before and the response as one row, with BOS at its beginning alone."""
        read = dict(return_special_tokens_mask=True, return_attention_mask=False)
        found = self.tokenizer(asked, answer["content"], **read)
        if len(found["input_ids"]) > self.longest:
            warnings.warn(
                f"prompt and response have {len(found['input_ids'])} tokens, and the reward model "
                f"{self.name!r} reads {self.longest}; the beginning of the prompt is cut off.",
                stacklevel=2,
            )
            excess = len(found["input_ids"]) - self.longest
            ids = self.tokenizer.encode(asked, add_special_tokens=False)[excess:]
            asked = self.tokenizer.decode(ids)
            found = self.tokenizer(asked, answer["content"], **read)
        added, bos = found.pop("special_tokens_mask"), self.tokenizer.bos_token_id
        again = [i > 0 and mark and found["input_ids"][i] == bos for i, mark in enumerate(added)]
        return {
            name: [x for x, drop in zip(row, again, strict=True) if not drop]
            for name, row in found.items()
        }

    def _run(self, rows: Sequence[dict[str, list[int]]]) -> Float[Tensor, " rows"]:
        """The logits of rows, padded on the right.

        A decoder without a padding token reads a text alone at its last token. In a batch it looks
        for the last one that is no padding: that is made a token with which no row ends.
        """
        config = self.model.config.get_text_config()
        own, size = config.pad_token_id, self.model.get_input_embeddings().num_embeddings
        fill = own
        if own is None or not 0 <= own < size:
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
            config.pad_token_id = own
