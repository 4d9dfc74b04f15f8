"""Chat templates: reading conversations, rendering them, and the tokens that end a response.

The template is Jinja from the tokenizer, which transformers renders in a sandbox.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lab.errors import LoadError

Message = dict[str, str]
CHAT_ROLES = ("system", "user", "assistant")
TOOL_PARTS = ("tool_calls", "function_call", "tool_call_id")
TRIED_ANSWER = "answer"


def make_turn(role: str, text: str) -> Message:
    """Return a text as the message of a role."""
    return {"role": role, "content": text}


def read_turns(found: Any, where: str, last: str) -> list[Message]:
    """Return the messages of a conversation, or of a text, which must end with the role `last`."""
    if isinstance(found, str) and found.strip():
        return [make_turn(last, found)]
    if not isinstance(found, list) or not found:
        raise LoadError(f"{where} has no messages. Use a text, or objects with role and content.")
    turns = [_turn(message, f"{where}, message {n},") for n, message in enumerate(found, 1)]
    if any(turn["role"] == "system" for turn in turns[1:]):
        raise LoadError(f"{where} has a system message after the first. Put it first.")
    if turns[-1]["role"] != last:
        raise LoadError(
            f"{where} ends with a message of {turns[-1]['role']!r}, not of {last!r}. Remove what "
            f"follows the last message of {last!r}."
        )
    return turns


def _turn(message: Any, where: str) -> Message:
    fields = message if isinstance(message, dict) else {}
    if any(map(fields.get, TOOL_PARTS)):
        raise LoadError(f"{where} calls a tool, but tools are not run here. Remove the row.")
    role, content = fields.get("role"), fields.get("content")
    if role not in CHAT_ROLES or not isinstance(content, str) or not content.strip():
        raise LoadError(
            f"{where} is {message!r:.80}. Use an object with a role ({', '.join(CHAT_ROLES)}) and "
            "a text as content, or remove the row."
        )
    return make_turn(role, content)


def with_system(turns: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """Return a conversation with a system message first; its own one is kept."""
    if system_prompt is None or turns[0]["role"] == "system":
        return list(turns)
    return [make_turn("system", system_prompt), *turns]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Message],
    where: str,
    for_answer: bool = True,
) -> str:
    """Render a conversation with special tokens, and with the generation prompt `for_answer`."""
    if not tokenizer.chat_template:
        raise LoadError(
            f"chat=True, but the tokenizer of {tokenizer.name_or_path or 'the model'!r} has no "
            "chat template. Use a model tuned for chats, or remove chat."
        )
    try:
        return tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=for_answer
        )
    except Exception as error:  # a template fails in any way there is
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        problem = f"does not fit the chat template ({reason:.200})"
        raise LoadError(f"{where} {problem}. Change its roles, or remove it.") from None


def template_stops(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the first special or added token after a response, such as <|im_end|>, if any."""
    turns = [make_turn("user", "question"), make_turn("assistant", TRIED_ANSWER)]
    rendered = render_chat(tokenizer, turns, "a question and an answer", for_answer=False)
    _, answer, rest = rendered.rpartition(TRIED_ANSWER)
    if not answer:
        return ()
    marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.unk_token_id}
    ids = tokenizer.encode(rest, add_special_tokens=False)
    return tuple(token for token in ids if token in marks)[:1]
