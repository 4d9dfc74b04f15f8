"""Conversations to fine-tune on: messages of which the assistant's last turn is learned."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import Message, read_turns, render_chat, template_stops, with_system
from rlhf_lab.config import ChatArgs
from rlhf_lab.data_sources import Row, read_rows
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.tuning.examples import Examples


def read_conversations(
    name: str, column: str, prompt_column: str | None, chat: ChatArgs
) -> list[list[Message]]:
    """The conversations of a source (see `read_rows`), each of which ends with an answer.

    Args:
        column: of whole conversations; or of answers, as texts or messages, where there is a
            prompt_column.
        prompt_column: of what is answered: a user's turn as text, or messages; None without.
        chat: the system prompt of conversations that have none.

    Raises:
        ConfigError: a system prompt without a chat, or no row at all.
        LoadError: no such source, or a row that is no conversation.
    """
    if not chat.chat:
        raise ConfigError(
            f"system_prompt={chat.system_prompt!r:.60} is a message of a chat; set chat=True "
            "(--chat)."
        )
    found = []
    for row in read_rows(name, "texts", lines_as=column):
        before = [] if prompt_column is None else _turns(row, prompt_column, "user")
        turns = before + _turns(row, column, "assistant")
        if turns[0]["role"] == "assistant":
            raise LoadError(
                f"{row.where} begins with an answer; name the column of what it answers as "
                "prompt_column, or leave that row out."
            )
        found.append(with_system(turns, chat.system_prompt))
    if not found:
        raise ConfigError(f"texts={name!r} holds no conversation; give at least 2.")
    return found


def _turns(row: Row, column: str, last: str) -> list[Message]:
    """The messages, or the text, in a column of a row."""
    found: Any = row.fields.get(column) if isinstance(row.fields, dict) else None
    given = found if isinstance(found, list) else row.text(column)
    return read_turns(given, row.where, last)


def render_examples(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]
) -> Examples:
    """Each conversation as the template writes it, of which its last answer is to be learned.

    1. The prompt ends with what the template puts before an answer, as where the model is to write.
    2. The text is the answer up to the token that ends it, at which a model stops; what the
       template puts behind that is nothing to learn.

    Raises:
        LoadError: a conversation that the template refuses, or an answer that it does not put
            behind its own generation prompt.
    """
    ends = [tokenizer.convert_ids_to_tokens(token) for token in template_stops(tokenizer)]
    prompts, texts = [], []
    for number, turns in enumerate(conversations, 1):
        where = f"conversation {number}"
        whole = render_chat(tokenizer, turns, where, for_answer=False)
        prompt = render_chat(tokenizer, turns[:-1], where)
        if not whole.startswith(prompt):
            raise LoadError(
                f"{where}: the chat template writes another prompt before an answer than for one; "
                "give a tokenizer whose chat_template does not."
            )
        text = whole.removeprefix(prompt)
        for end in ends:
            learned, found, _ = text.rpartition(end)
            text = learned + found if found else text
        prompts.append(prompt)
        texts.append(text)
    return Examples(prompts, texts, rendered=True)
