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


def test_no_lesson_needs_a_later_one_or_one_that_is_not_there() -> None:
    rows = {number: needs for number, _, _, needs in ROW.findall(TEXT)}
    for number, needs in rows.items():
        needed = set(re.findall(r"\b\d\d\b", needs))
        assert needed < set(rows) and all(other < number for other in needed)
