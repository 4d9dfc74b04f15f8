"""Conversations to fine-tune on: only the last turn of the assistant is learned."""

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
    """Read conversations from a source (see `read_rows`), each of which ends with a response.

    Args:
        column: column of whole conversations; with a prompt_column, of responses, as texts or
            messages.
        prompt_column: column of the prompts: a user's turn as text, or messages; None without.
        chat: its system prompt is added to conversations without one.

    Raises:
        ConfigError: If a system prompt is set without chat, or the source has no row.
        LoadError: If the source does not exist, or a row is not a conversation.
    """
    if not chat.chat:
        raise ConfigError(
            f"system_prompt={chat.system_prompt!r:.60} requires a chat. Set chat=True (--chat)."
        )
    found = []
    for row in read_rows(name, "texts", lines_as=column):
        before = [] if prompt_column is None else _read_turns(row, prompt_column, "user")
        turns = before + _read_turns(row, column, "assistant")
        if turns[0]["role"] == "assistant":
            raise LoadError(
                f"{row.where} begins with a response. Set prompt_column to the column of its "
                "prompt, or remove that row."
            )
        found.append(with_system(turns, chat.system_prompt))
    if not found:
        raise ConfigError(f"texts={name!r} has no conversation. Use a source with at least 2.")
    return found


def _read_turns(row: Row, column: str, last: str) -> list[Message]:
    value: Any = row.fields.get(column) if isinstance(row.fields, dict) else None
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
            learned, found, _ = text.rpartition(end)
            text = learned + found if found else text
        prompts.append(prompt)
        texts.append(text)
    return Examples(prompts, texts, rendered=True)
