"""The page on chats: its program runs, and its commands exist."""

import re
import shlex

from rlhf_lab.__main__ import parse
from tests.pages import page

CHAT = page("chat")


def test_the_program_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)```", CHAT, flags=re.DOTALL)
    found = {}
    exec(compile(program, "chat.md", "exec"), found)
    rollout = found["rollout"]
    said = [
        next(p for p in ("the film was", "this movie") if t.startswith(p)) for t in rollout.texts
    ]
    assert len(said) == 16 and len(set(said)) == 2
    for asked, text, reward in zip(said, rollout.texts, rollout.raw_rewards, strict=True):
        assert reward == -sum(word in asked.split() for word in text.removeprefix(asked).split())


def test_the_commands_of_the_page_can_be_parsed():
    commands = re.findall(r"^python -m rlhf_lab (.*)$", CHAT, flags=re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        parse(shlex.split(command))
