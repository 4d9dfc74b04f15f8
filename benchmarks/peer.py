"""Shared parts of the TRL contestants: a tokenizer for random weights, and the reward."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from benchmarks.worker import Setup


def load_tokenizer(setup: Setup) -> PreTrainedTokenizerFast:
    """Load the tokenizer next to the weights, with an EOS that the model cannot generate.

    Random weights generate every token; an EOS among them would shorten the work.
    """
    return PreTrainedTokenizerFast(
        tokenizer_file=str(Path(setup["model"], "tokenizer.json")),
        bos_token=setup["bos"],
        unk_token=setup["bos"],
        eos_token="<end>",
        pad_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode_prompt(setup: Setup, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return BOS and the prefix as token ids."""
    return [tokenizer.bos_token_id, *tokenizer.encode(setup["prefix"], add_special_tokens=False)]


def count(setup: Setup, texts: Sequence[str]) -> list[float]:
    """Count the rewarded text in each text."""
    return [float(text.count(setup["rewarded"])) for text in texts]
