"""Escaping of control characters; bad_input/test_hostile_texts.py has pages and commands."""

from rlhf_lab.console import visible


def is_hidden(c: str) -> bool:
    """Return True for a control character, or one that changes the writing direction."""
    directions = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return c in directions or (c not in "\n\t" and (ord(c) < 32 or 127 <= ord(c) < 160))


def test_visible_escapes_hidden_characters_only():
    assert visible("a\x1b[2J\x1b]0;t\x07\u202eb\x9b1m\r") == r"a\x1b[2J\x1b]0;t\x07\u202eb\x9b1m\r"
    for c in map(chr, range(0x3000)):
        assert (visible(c) == c) == (not is_hidden(c)) and not any(map(is_hidden, visible(c)))
    assert visible("é 漢字 \U0001f600 [b]\tc\n") == "é 漢字 \U0001f600 [b]\tc\n"
