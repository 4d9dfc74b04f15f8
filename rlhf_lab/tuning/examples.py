"""Examples for SFT: texts or conversations, their tokens with a mask, their log-probabilities."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import Message, read_turns, render_chat, template_stops, with_system
from rlhf_lab.config.checks import AT_LEAST_1, AT_LEAST_2, check_range
from rlhf_lab.data_sources import PROMPT, TEXT, Row, find_prompt_column, read_rows
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.functional import get_logprobs, sequence_sum
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.padding import pad_rows
from rlhf_lab.organism import Grammar
from rlhf_lab.rewards.pairs import REEL, Columns, without_prompts
from rlhf_lab.sampling import tokenize_prompts


@dataclass(frozen=True)
class Examples(Columns):
    """Good examples, each a prompt and the text that follows it.

    Args:
        prompts: context that is not learned; empty if a text has no prompt.
        texts: texts to learn, appended to their prompts without a space.
        rendered: True if a chat template rendered both, with all BOS and EOS they need.
    """

    prompts: list[str]
    texts: list[str]
    rendered: bool = False


def load_examples(
    name: str, n_texts: int, seed: int, column: str = TEXT, prompt_column: str | None = None
) -> Examples:
    """Load examples by the name of their source.

    Args:
        name: "reel" for reviews from the grammar, a file, or hub:NAME:SPLIT (see `read_rows`).
        n_texts, seed: number and seed of the texts; Reel's only.
        column: column of the texts; a plain text file has one per line.
        prompt_column: column of the prompts, removed from the texts that start with them; if None,
            the column prompt if the source has it.

    Raises:
        LoadError: If the source does not exist, or a row has no text.
        ConfigError: If `n_texts` is below 1, or both columns are the same.
    """
    check_range(AT_LEAST_1, n_texts=n_texts)
    if column == prompt_column:  # texts would be empty
        raise ConfigError(f"column and prompt_column are both {column!r}. Set two columns.")
    if name == REEL:
        texts = Grammar().sample(n_texts, np.random.default_rng(seed)).texts()
        rows = [Row({TEXT: text}, "reel") for text in texts]
    else:
        rows = read_rows(name, "texts", lines_as=column)
    if prompt_column is None and column != PROMPT:
        prompt_column = find_prompt_column(rows, None)
    prompts = ["" if prompt_column is None else row.text(prompt_column) for row in rows]
    return Examples(prompts, without_prompts(prompts, [row.text(column) for row in rows]))


def read_conversations(
    name: str, column: str, prompt_column: str | None, system_prompt: str | None = None
) -> list[list[Message]]:
    """Read conversations from a source (see `read_rows`), each of which ends with a response.

    Args:
        column: column of whole conversations; with a prompt_column, of responses, as texts or
            messages.
        prompt_column: column of the prompts: a user's turn as text, or messages; None without.
        system_prompt: added to conversations without one.

    Raises:
        LoadError: If the source does not exist, or a row is not a conversation.
    """
    if name == REEL:
        raise ConfigError(f"texts={name!r} has no conversations. Use a file, or remove chat.")
    conversations = []
    for row in read_rows(name, "texts", lines_as=column):
        before = [] if prompt_column is None else _read_turns(row, prompt_column, "user")
        turns = before + _read_turns(row, column, "assistant")
        if turns[0]["role"] == "assistant":
            raise LoadError(
                f"{row.where} begins with a response. Set prompt_column to that of its prompt."
            )
        conversations.append(with_system(turns, system_prompt))
    return conversations


def _read_turns(row: Row, column: str, last: str) -> list[Message]:
    value = row.fields[column] if row.has(column) else None
    return read_turns(value if isinstance(value, list) else row.text(column), row.where, last)


def render_examples(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]
) -> Examples:
    """Render each conversation with the chat template; its last response is to be learned.

    The prompt includes the template's generation prompt; the text ends with the token that stops a
    response.

    Raises:
        LoadError: If the template rejects a conversation, or renders a response after anything but
            its generation prompt.
    """
    ends = [tokenizer.convert_ids_to_tokens(token) for token in template_stops(tokenizer)]
    prompts, texts = [], []
    for number, turns in enumerate(conversations, 1):
        where = f"conversation {number}"
        whole = render_chat(tokenizer, turns, where, for_answer=False)
        prompt = render_chat(tokenizer, turns[:-1], where)
        if not whole.startswith(prompt):
            raise LoadError(
                f"{where}: the chat template renders a response after another prompt than its "
                "generation prompt. Use a tokenizer with a consistent chat_template."
            )
        text = whole.removeprefix(prompt)
        for end in ends:
            learned, stop, _ = text.rpartition(end)
            text = learned + stop if stop else text
        prompts.append(prompt)
        texts.append(text)
    return Examples(prompts, texts, rendered=True)


class TokenRow(NamedTuple):
    """Tokens of a prompt and a text; the first `prefix_len` of them are not learned."""

    ids: list[int]
    prefix_len: int


def encode_examples(
    model: HookedModel,
    prompts: Sequence[str],
    texts: Sequence[str],
    max_tokens: int | None = None,
    rendered: bool = False,
) -> list[TokenRow]:
    """Encode each prompt and text with BOS and EOS, unless the text has them or is `rendered`.

    Rows are cut to `max_tokens`, or to the model's context, with a warning; a row that was cut has
    no EOS, which would teach the model to stop in the middle. The first token is never learned.

    Raises:
        ConfigError: If a word is not in a closed vocabulary, `max_tokens` is below 2, or a prompt
            leaves no room for its text.
    """
    check_range(AT_LEAST_2, max_tokens=max_tokens)
    if texts and not any(text.strip() for text in texts):
        raise ConfigError("All texts are empty. Pass the texts to learn, without their prompts.")
    if not isinstance(model, HookedModel):
        kind = type(model).__name__
        raise ConfigError(f"model is a {kind}. Pass a language model, such as policy.base_model.")
    room = model.cfg.n_ctx if max_tokens is None else min(max_tokens, model.cfg.n_ctx)
    tokenizer = model.tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    starts = tokenize_prompts(tokenizer, prompts, False)
    ends = tokenize_prompts(tokenizer, texts, False)
    if rendered:  # tokens of the whole, unless they merge across the end of the prompt
        pairs = zip(prompts, texts, strict=True)
        wholes = tokenize_prompts(tokenizer, [prompt + text for prompt, text in pairs], False)
        ends = [
            whole[len(start) :] if whole[: len(start)] == start else ids
            for start, whole, ids in zip(starts, wholes, ends, strict=True)
        ]
    rows, n_cut = [], 0
    for start, ids in zip(starts, ends, strict=True):
        if not rendered:
            has_bos = bos is None or (start or ids)[:1] == [bos]
            start = start if has_bos else [bos, *start]
            ids = ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
        row = TokenRow((start + ids)[:room], max(1, len(start)))
        n_cut += len(start + ids) - (not rendered and eos is not None) > room
        if len(row.ids) <= row.prefix_len:
            raise ConfigError(
                f"nothing is left to learn of {tokenizer.decode(row.ids[:8])!r}...: the prompt has "
                f"{row.prefix_len} of {room} tokens. Raise max_tokens or remove that row."
            )
        rows.append(row)
    if n_cut:
        warnings.warn(
            f"{n_cut} of {len(rows)} texts were cut to {room} tokens. Use shorter texts, or raise "
            "max_tokens if the model's context allows it.",
            stacklevel=3,
        )
    return rows


def example_logprobs(
    model: HookedModel, rows: Sequence[TokenRow]
) -> tuple[Float[Tensor, "batch gen"], Bool[Tensor, "batch gen"]]:
    """Compute the log-probability of every token after the first, and the mask of learned ones."""
    tokens, real = pad_rows([row.ids for row in rows], model.W_U.device)
    prefix_lens = torch.tensor([row.prefix_len for row in rows], device=tokens.device)
    positions: Int[Tensor, " seq"] = torch.arange(tokens.shape[1], device=tokens.device)
    mask = real & (positions >= prefix_lens[:, None])
    logits = model(tokens, attention_mask=torch.ones_like(tokens))
    return get_logprobs(logits, tokens), mask[:, 1:]


def text_logprobs(model: HookedModel, rows: Sequence[TokenRow]) -> Float[Tensor, " batch"]:
    """Compute the log-probability of each whole text, in nats."""
    return sequence_sum(*example_logprobs(model, rows))
