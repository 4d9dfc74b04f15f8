"""Diagrams are pictures of their own, with the words for those who do not see them."""

from rlhf_lab.views import loop_diagram
from rlhf_lab.views.diagrams import ARROWS, BOXES


def test_the_loop_is_a_picture_that_is_the_same_each_time_and_says_what_it_shows() -> None:
    picture = loop_diagram()
    assert picture.svg == loop_diagram().svg and "<svg" in picture.svg
    for part in ("policy", "reward", "value head", "advantage", "objective", "reference", "KL"):
        assert part in picture.alt
    assert "src=" in picture.html() and picture.image().size[0] > 700


def test_arrows_join_boxes_and_boxes_do_not_lie_on_each_other() -> None:
    assert {end for start, end, _ in ARROWS} | {start for start, _, _ in ARROWS} <= set(BOXES)
    places = [place for place, _, _ in BOXES.values()]
    apart = [(a, b) for i, a in enumerate(places) for b in places[:i]]
    assert all(abs(a[0] - b[0]) > 1.5 or abs(a[1] - b[1]) > 1.5 for a, b in apart)
