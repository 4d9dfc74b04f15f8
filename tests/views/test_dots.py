"""Dots of one run and of runs with other seeds."""

import re

import pytest

from rlhf_lab.views.dots import seed_dots


def test_each_value_is_a_mark_with_its_number() -> None:
    picture = seed_dots({"first": (0.25, [0.2, 0.5]), "second": (-1.0, [])}, "reward", 2)
    titles = re.findall(r"<title>(.*?)</title>", picture.svg)
    other = "first, 2 runs with other seeds"
    of_run = ["first, this run: 0.25", "second, this run: -1"]
    assert titles == [f"{other}: 0.2", f"{other}: 0.5", *of_run]
    assert picture.alt == "reward: first 0.25 (others 0.20 to 0.50); second -1.00"


def test_marks_are_placed_in_proportion_to_their_values() -> None:
    svg = seed_dots({"a": (0.0, []), "b": (1.0, []), "c": (4.0, [])}, "reward").svg
    a, b, c = (float(x) for x in re.findall(r'<title>.*?cx="([\d.]+)"', svg))
    assert c - a == pytest.approx(4 * (b - a), abs=0.3) and b - a > 50
