"""Text to tokens and back, with the method names of TransformerLens."""

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.model_config import ModelConfig
from rlhf_lab.models.padding import pad_rows


def with_special_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy with the special tokens of TransformerLens: missing PAD and BOS are EOS."""
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.eos_token is None and "<|endoftext|>" in tokenizer.get_vocab():
        tokenizer.eos_token = "<|endoftext|>"
    for name in ("pad_token", "bos_token"):
        if getattr(tokenizer, name) is None and tokenizer.eos_token is not None:
            setattr(tokenizer, name, tokenizer.eos_token)
    return tokenizer


def single_token(tokenizer: PreTrainedTokenizerBase, text: str, where: str = "") -> int:
    """Return the id of a text that is one token, or raise ConfigError."""
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # some tokenizers raise on unknown words
        ids = []
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ConfigError(f"{where}{text!r} is not one token of this tokenizer. Use another word.")
    return ids[0]


class Tokenization:
    """Methods of `HookedTransformer` that need its tokenizer."""

    cfg: ModelConfig
    tokenizer: PreTrainedTokenizerBase | None

    def to_tokens(
        self, text: str | list[str], prepend_bos: bool = True, truncate: bool = True
    ) -> Int[Tensor, "batch pos"]:
        """Return the token ids of texts, at most `n_ctx` if `truncate`, padded on the right."""
        if self.tokenizer is None:
            raise ValueError("The model has no tokenizer. Set one with set_tokenizer.")
        from rlhf_lab.sampling import tokenize_prompts  # which imports the models

        has_bos = prepend_bos and self.tokenizer.bos_token_id is not None
        rows = tokenize_prompts(self.tokenizer, [text] if isinstance(text, str) else text, has_bos)
        tokens, _ = pad_rows(rows, torch.device(self.cfg.device), self.tokenizer.pad_token_id or 0)
        return tokens[:, : self.cfg.n_ctx if truncate else None]

    def to_string(self, tokens: Int[Tensor, "*batch pos"] | list[int]) -> str | list[str]:
        """Return the text of token ids, or one text per row of a batch."""
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            return [self.to_string(row) for row in tokens]
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def to_str_tokens(self, text: str | Int[Tensor, "..."], prepend_bos: bool = True) -> list[str]:
        tokens = self.to_tokens(text, prepend_bos) if isinstance(text, str) else text
        return [self.tokenizer.decode([token]) for token in tokens.flatten().tolist()]

    def to_single_token(self, text: str) -> int:
        return single_token(self.tokenizer, text)

    def tokens_to_residual_directions(
        self, tokens: str | int | Int[Tensor, "*pos"]
    ) -> Float[Tensor, "*pos d_model"]:
        """Return the column of W_U for each token, the direction that its logit reads."""
        token = self.to_single_token(tokens) if isinstance(tokens, str) else tokens
        return self.W_U[:, token].movedim(0, -1)

    def set_tokenizer(
        self, tokenizer: PreTrainedTokenizerBase, default_padding_side: str = "right"
    ) -> None:
        """Set the tokenizer. `default_padding_side` is accepted and ignored."""
        self.tokenizer = tokenizer
