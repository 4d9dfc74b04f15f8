"""The map of the lessons: all are on it, with their minutes, and none needs a later one."""

import re
from pathlib import Path

from tools.course.builder import MAP, map_text, masters

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / MAP).read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[(\d\d) [^]]+\]\(([\w/]+)\.ipynb\) \|([^|]+)\|(?:([^|]*)\|)? \d+ \|$", re.M)


def test_map_has_every_lesson_with_its_minutes() -> None:
    lessons = [master.stem for master in masters(ROOT) if master.parent.name != "more"]
    assert sorted(name for _, name, _, _ in ROW.findall(TEXT)) == lessons
    assert map_text(ROOT) == TEXT
