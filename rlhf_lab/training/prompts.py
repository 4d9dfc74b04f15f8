"""Prompts from a data set or a list, dealt out in a seeded order, and how long answers get."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_lab.chat import Message, read_turns, render_chat, with_system
from rlhf_lab.config import RLHFArgs
from rlhf_lab.data_sources import MOVIE_REVIEWS, TEXT, Row, read_rows
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.padding import most_characters
from rlhf_lab.sampling import SamplingSpec, check_context, tokenize_prompts
from rlhf_lab.training.random_streams import phase_generator


def load_prompts(source: str | Path, column: str = "prompt", words: int | None = None) -> list[str]:
    """The prompts of a source (see `read_rows`): one per line, or those in a column.

    Args:
        column: of .jsonl and .csv files and of datasets; real reviews have one of their own.
        words: keep so many words from the start of each; all when None.

    Raises:
        LoadError: no such source, or one sentence on the first row that has no prompt.
    """
    source = str(source)
    column = TEXT if source.partition(":")[0] == MOVIE_REVIEWS else column
    rows = read_rows(source, "prompts", lines_as=column)
    held = next((row for row in rows if isinstance(_found(row, column), list)), None)
    if held is not None:
        raise LoadError(
            f"{held.where} has a list under {column!r}; if it is one of messages, set chat=True "
            "(--chat)."
        )
    return [_first_words(row.text(column), words) for row in rows]


def _found(row: Row, column: str) -> Any:
    return row.fields.get(column) if isinstance(row.fields, dict) else None


def _first_words(text: str, words: int | None) -> str:
    return text if words is None else " ".join(text.split()[:words])


def load_conversations(
    source: str | Path, column: str = "prompt", words: int | None = None
) -> list[list[Message]]:
    """The prompts of a source as conversations: messages, or texts as a user's turn each.

    For the arguments, see `load_prompts`.

    Raises:
        LoadError: no such source, or one sentence on the first row that is no conversation up to a
            user's turn, or of which `words` cannot be kept.
    """
    source = str(source)
    column = TEXT if source.partition(":")[0] == MOVIE_REVIEWS else column
    found = []
    for row in read_rows(source, "prompts", lines_as=column):
        given = _found(row, column)
        if not isinstance(given, list):
            given = _first_words(row.text(column), words)
        elif words is not None:
            raise LoadError(f"{row.where} has messages; prompt_words={words} is for plain texts.")
        found.append(read_turns(given, row.where, last="user"))
    return found


def choose_conversations(
    args: RLHFArgs, given: Sequence[str | list[Message]] | None
) -> list[list[Message]]:
    """The conversations to answer: those handed in, those of `args.prompts`, or the prefix alone.

    Raises:
        ConfigError: there is none.
        LoadError: see `load_conversations`.
    """
    if given is None and args.prompts is not None:
        found = load_conversations(args.prompts, args.prompts_column, args.prompt_words)
    elif isinstance(given, str):
        raise ConfigError("prompts must be a list of prompts; put a single one in a list.")
    else:
        given = [args.prefix] if given is None else given
        names = [f"prompt {number}" for number in range(1, len(given) + 1)]
        found = [read_turns(*pair, last="user") for pair in zip(given, names, strict=True)]
    if not found:
        raise ConfigError(f"prompts={args.prompts!r} holds no prompt; give at least one.")
    return [with_system(turns, args.system_prompt) for turns in found]


def choose_prompts(args: RLHFArgs, given: Sequence[str] | None) -> list[str]:
    """The texts to continue: those handed in, those of `args.prompts`, or the prefix alone.

    Raises:
        ConfigError: not one text, or something that is no text.
        LoadError: see `load_prompts`.
    """
    if given is None and args.prompts is None:
        return [args.prefix]
    texts = given
    if given is None:
        texts = load_prompts(args.prompts, args.prompts_column, args.prompt_words)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("prompts must be a list of texts; put a single one in a list.")
    if not texts:
        raise ConfigError(f"prompts={args.prompts!r} holds no prompt; give at least one.")
    return list(texts)


def deal(n_prompts: int, start: int, count: int, seed: int) -> list[int]:
    """Which prompts come at places `start` to `start + count` of a run's endless order.

    1. Each time round, all prompts come once, in an order of that round's own.
    2. A place tells its round, so that nothing has to be remembered.
    """
    first, skipped = divmod(start, n_prompts)
    rounds = range(first, (start + count - 1) // n_prompts + 1)
    generators = [phase_generator(seed, turn, "prompts") for turn in rounds]
    orders = [torch.randperm(n_prompts, generator=generator) for generator in generators]
    return torch.cat(orders)[skipped : skipped + count].tolist()


def _refuse_endless(texts: Sequence[str], model: HookedModel) -> None:
    """Refuse a text that cannot fit, before it is tokenized for minutes."""
    limit = most_characters(model.tokenizer, model.cfg.n_ctx)
    for number, text in enumerate(texts, 1):
        if len(text) > limit:
            raise ConfigError(
                f"prompt {number} of {len(texts)} has {len(text)} characters, which the model's "
                f"context of {model.cfg.n_ctx} tokens cannot hold; shorten it or set prompt_words."
            )


class Prompts:
    """A run's prompts as token ids, and which of them each batch continues.

    Args:
        args: the settings.
        given: texts, or conversations in a chat, that were handed in; those of `args.prompts`, or
            the prefix alone, when None.
        model: the policy's transformer, whose tokenizer reads them.

    Attributes:
        texts, tokens: the prompts, in a chat as its template writes them.
        turns: the messages of each; None without a chat.
        labels: the text behind each that a response is compared with; None without labels.
        answers: the right answer to each; None without `answers_column`.

    Raises:
        ConfigError: no tokenizer, an empty prompt, or one that leaves no room for an answer.
    """

    def __init__(
        self,
        args: RLHFArgs,
        given: Sequence[str | list[Message]] | None,
        model: HookedModel,
    ) -> None:
        self.args = args
        self.turns = choose_conversations(args, given) if args.chat else None
        if self.turns is None:
            self.texts = choose_prompts(args, given)
        else:
            self.texts = [
                render_chat(model.tokenizer, turns, f"prompt {number} of {len(self.turns)}")
                for number, turns in enumerate(self.turns, 1)
            ]
        self.labels, self.answers = (
            self._column(name, given) for name in ("labels_column", "answers_column")
        )
        _refuse_endless(self.texts, model)
        prepend_bos = args.prepend_bos and not args.chat  # a template writes its own
        self.tokens = tokenize_prompts(model.tokenizer, self.texts, prepend_bos)
        if not all(self.tokens):
            raise ConfigError(
                "prefix='' leaves an empty prompt; write a prefix or set prepend_bos."
            )
        check_context(model, max(map(len, self.tokens)), args.gen_len)

    def _column(self, field: str, given: Sequence[Any] | None) -> list[str] | None:
        """The texts of the column of the file of prompts that a field names; None without one."""
        column = getattr(self.args, field)
        if column is None:
            return None
        if given is not None:
            raise ConfigError(
                f"{field}={column!r} is a column of the file of prompts, but prompts were handed "
                "in; leave one of them out."
            )
        rows = read_rows(self.args.prompts, "prompts", lines_as=self.args.prompts_column)
        return [row.text(column) for row in rows]

    def of_batch(self, batch: int) -> list[list[int]]:
        """The prompt of each row of a run's batch, counted from 0.

        Answers to one prompt stand together. Where there is one prompt only, it is the same in
        every batch.
        """
        each = self.args.samples_per_prompt
        return [self.tokens[i] for i in self._dealt(batch) for _ in range(each)]

    def in_place_of(self, batch: int) -> Iterator[list[int]]:
        """Prompts without end to take the place of a batch's own, in an order of that batch's.

        First come those that the batch has not, then its own, then all again; which prompts other
        batches have stays as it is.
        """
        generator = phase_generator(self.args.seed, batch, "redraws")
        order = torch.randperm(len(self.tokens), generator=generator).tolist()
        own = set(self._dealt(batch))
        for i in itertools.cycle(sorted(order, key=own.__contains__)):
            yield self.tokens[i]

    def _dealt(self, batch: int) -> list[int]:
        """The number of each prompt of a batch."""
        n = self.args.batch_size // self.args.samples_per_prompt
        return deal(len(self.tokens), batch * n, n, self.args.seed)


def phase_spec(spec: SamplingSpec, args: RLHFArgs, phase: int) -> SamplingSpec:
    """The sampling spec with a phase's number of tokens, drawn anew with `gen_len_min`."""
    if args.gen_len_min is None:
        return spec
    generator = phase_generator(args.seed, phase, "lengths")
    drawn = torch.randint(args.gen_len_min, spec.gen_len + 1, (), generator=generator)
    return dataclasses.replace(spec, gen_len=int(drawn))
