"""The map of the lessons: all are on it, with their own minutes, and none needs a later one."""

import re
from pathlib import Path

from tools.course.builder import masters

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| \[(\d\d) [^\]]+\]\((\w+)\.ipynb\) \|[^|]+\| ([^|]+) \|[^|]+\| (\d+) \|$", re.M
)


def test_every_lesson_is_on_the_map_with_its_own_minutes() -> None:
    rows = {name: int(minutes) for _, name, _, minutes in ROW.findall(MAP)}
    said = {
        master.stem: int(re.search(r"About (\d+) minutes", master.read_text(encoding="utf-8"))[1])
        for master in masters(ROOT)
        if master.parent.name != "more"
    }
    assert rows == said


def test_no_lesson_needs_a_later_one_or_one_that_is_not_there() -> None:
    rows = {number: needs for number, _, needs, _ in ROW.findall(MAP)}
    assert len(rows) >= 9
    for number, needs in rows.items():
        wanted = set(re.findall(r"\b\d\d\b", needs))
        assert wanted < set(rows) and all(other < number for other in wanted)
        assert wanted or number == "00"


def test_routes_name_lessons_that_are_there() -> None:
    routes = MAP.split("## Three ways through")[1]
    there = {number for number, *_ in ROW.findall(MAP)}
    assert len(re.findall(r"^- \*\*", routes, re.M)) == 3
    assert set(re.findall(r"\b\d\d\b", routes)) <= there
